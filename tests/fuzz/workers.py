"""Processes that cases run in, under limits: 20 seconds and 4 GB each.

Seconds are of the processor, which others may keep busy; a case that only waits hangs after as many by the clock.

A worker is a process of its own, so that a crash is an end like another.  It is asked for a case by a line of JSON on
one pipe and answers with a line on another; what native code prints goes into a file, of which the end is kept.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ends
from ends import End, end_of

HERE = Path(__file__).resolve().parent
SECONDS = 20.0
MEGABYTES = 4096
CASES_EACH = 10_000
"""After so many cases a worker is replaced: what leaks is not taken for what a case needs."""

_STARTING = 120.0
_LOOK = 0.1
"""How often the memory of a case under way is looked at, in seconds."""

_WAITS = 10
"""Looks in a row that find no process of a case running, after which it waits."""

_SAID = 4000
"""Letters of what a dying worker printed that are kept."""


def subjects() -> list[str]:
    """The modules beside this one that make cases."""
    return sorted(path.stem for path in HERE.glob("*.py") if "\ndef make(" in path.read_text())


def folder_for_cases() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: products that sync what they write would wait for disks."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fuzz.", dir=memory if os.access(memory, os.W_OK) else None)


class Worker:
    """One process for cases of a subject; a dead one is replaced with the next case."""

    def __init__(self, subject: str, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._cases = 0
        self._before = self._now = 0.0

    @property
    def spent(self) -> float:
        """Seconds of the processor that its processes, those that are gone and this one, took up to the last case."""
        return self._before + self._now

    @property
    def case(self) -> Path:
        """Where the files of the last case are."""
        return self.folder / "case"

    def run(self, seed: int) -> End:
        """The end of a case."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        return self._ask({"seed": seed, "folder": str(self.case)})

    def attempt(self, files: Sequence[Path]) -> End:
        """The end of files that are there already."""
        return self._ask({"files": [str(path) for path in files]})

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            for end in (self._asks, self._answers):
                os.close(end)
            self._before, self._now = self.spent, 0.0
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, what: Mapping[str, Any]) -> End:
        if self._process is None or self._cases >= CASES_EACH:
            self.close()
            self._start()
        self._cases += 1
        assert self._process is not None
        began = _processor(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asks, json.dumps(what).encode() + b"\n")
        end = self._answer(SECONDS)
        self._now = _processor(self._process.pid)
        seconds = self._now - began
        if isinstance(end, str):
            said = self._said()
            self.close()
            return End(end, said, seconds)
        return End(end["kind"] if end["megabytes"] < MEGABYTES else "memory", end["text"], seconds, end["megabytes"])

    def _answer(self, seconds: float) -> Any:
        """What the worker says; or the kind of its end, where it says nothing."""
        assert self._process is not None
        process = self._process.pid
        last, most, said, beyond, waits = time.monotonic() + seconds, _processor(process) + seconds, b"", "", 0
        while _processor(process) < most and (time.monotonic() < last or waits < _WAITS):
            if select.select([self._answers], [], [], _LOOK)[0]:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return "beyond" if beyond else "crash"
                said += part
                *lines, said = said.split(b"\n")
                for line in map(json.loads, lines):
                    if "beyond" not in line:
                        return line
                    beyond = line["beyond"]
                continue
            if _resident(process) > MEGABYTES:
                return "beyond" if beyond else "memory"
            waits = 0 if _runs(process) else waits + 1
        return "beyond" if beyond else "hang"

    def _start(self) -> None:
        asked, self._asks = os.pipe()
        self._answers, answered = os.pipe()
        environment = {
            **os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
            "ONNXFUSE_CACHE": str(self.folder / "cache"), "TMPDIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [
                str(HERE), str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])),
        }
        command = [sys.executable, str(HERE / "workers.py"), self.subject, str(asked), str(answered)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             pass_fds=(asked, answered), env=environment)
        os.close(asked)
        os.close(answered)
        self._cases = 0
        if not isinstance(self._answer(_STARTING), dict):
            text = self._said()
            self.close()
            raise RuntimeError(f"no worker for '{self.subject}':\n{text}")

    @property
    def _log(self) -> Path:
        return self.folder / "said"

    def _said(self) -> str:
        """What a worker that ended printed, after how it ended."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        how = "" if code is None else f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return f"{how}\n{self._log.read_bytes()[-_SAID:].decode(errors='replace')}".strip()


def _resident(process: int) -> int:
    """Megabytes that a process and those that it started hold."""
    kilobytes = 0
    for pid in (process, *_children(process)):
        with contextlib.suppress(OSError, ValueError):
            kilobytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * (resource.getpagesize() // 1024)
    return kilobytes // 1024


def _processor(process: int) -> float:
    """Seconds of the processor that a process has taken, with those that it started."""
    ticks = 0
    for pid in (process, *_children(process)):
        ticks += sum(map(int, _status(Path(f"/proc/{pid}"))[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _runs(process: int) -> bool:
    """Whether a thread of a process, or of one that it started, runs, waits for its turn on a processor, or for a disk.
    """
    return any(_status(thread)[0] in "RD" for pid in (process, *_children(process))
               for thread in Path(f"/proc/{pid}/task").glob("*"))


def _status(place: Path) -> list[str]:
    """The fields of a process's or a thread's ``stat`` from the third on; of one that is gone, of one that did nothing.
    """
    with contextlib.suppress(OSError):
        return (place / "stat").read_text().rpartition(")")[2].split()
    return ["Z", *"0" * 20]


def _children(process: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _peak() -> int:
    """The most megabytes that this process has held since it was asked to begin to count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


def _serve(subject: str, asked: int, answered: int) -> None:
    """The worker's side."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    module = importlib.import_module(subject)
    answers = os.fdopen(answered, "w", encoding="utf-8")
    ends.telling = lambda what: print(json.dumps({"beyond": what}), file=answers, flush=True)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in os.fdopen(asked, encoding="utf-8"):
        what = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # count anew
        faulthandler.dump_traceback_later(SECONDS - 1)
        end = end_of(lambda what=what: _case(module, what))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"kind": end.kind, "text": end.text, "megabytes": _peak()}), file=answers, flush=True)


def _case(module: Any, what: Mapping[str, Any]) -> str:
    files = [Path(path) for path in what["files"]] if "files" in what else module.make(
        what["seed"], Path(what["folder"]))
    return str(module.attempt(files))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
