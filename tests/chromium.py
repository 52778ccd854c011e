"""Pages in a headless Chromium, steered by its DevTools protocol over a pipe: nothing is installed but the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser, None where there is none."""


class Page:
    """One page.

    Attributes:
        faults: what scripts threw, what the console was told, and what the browser blocked.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self._number, self._session = 0, ""
        self.faults: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A method of the protocol; what it returns.

        Raises:
            AssertionError: the browser refuses, or is gone.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while not data.endswith(b"\0"):
            read = self._reads.read(1)
            assert read, "the browser is gone"
            data += read
        answer: dict[str, Any] = json.loads(data[:-1])
        told = answer.get("params", {})
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.faults.append(str(told["args"]))
            case "Log.entryAdded":
                self.faults.append(str(told["entry"]["text"]))
            case "Page.javascriptDialogOpening":
                self.faults.append(f"a dialog: {told['message']}")
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
        return answer

    def open(self, path: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Show a file in a window so wide."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """The value of an expression, evaluated in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, target: Path) -> None:
        """Write the whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        target.write_bytes(base64.b64decode(data))

    def print(self, target: Path) -> None:
        """Write the page as PDF, as it would be printed on A4."""
        target.write_bytes(base64.b64decode(self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"]))

    def tree(self) -> list[Mapping[str, Any]]:
        """What a screen reader is given: nodes with ``role`` and ``name``."""
        self.call("Accessibility.enable")
        return [
            {"role": node.get("role", {}).get("value"), "name": node.get("name", {}).get("value", "")}
            for node in self.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")
        ]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile in a folder of its own; it is gone in the end."""
    assert BINARY is not None
    theirs, ours = os.pipe(), os.pipe()  # what it reads from 3, what it writes to 4
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}', "bash", BINARY, "--headless=new", "--no-sandbox",
         "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
         f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
        pass_fds=(theirs[0], ours[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        yield Page(ours[0], theirs[1])
    finally:
        process.kill()
        process.wait()
