"""Fenced blocks of a page of documentation, and how they are run in order: what stands there works as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"(?:^<!-- (?P<mark>[\w ./-]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        section: the heading above it, without its marks.
        mark: the comment right above, as in ``<!-- gpu -->``; "" where there is none.
        line: of the fence, from 1.
    """

    section: str
    language: str
    text: str
    mark: str
    line: int


def blocks(page: Path, section: str | None = None) -> list[Block]:
    """All blocks of a page, or of one section."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        headings = re.findall(r"^#+ (.*)$", text[:match.start()], re.MULTILINE)
        found.append(Block(headings[-1], match["language"], match["text"], match["mark"] or "",
                           text[:match.start()].count("\n") + 1))
    return [each for each in found if section in (None, each.section)]


def run(page: Path, chosen: Iterable[Block], folder: Path, environment: dict[str, str]) -> str:
    """Run blocks of shell and Python as if pasted into one shell, which stops at the first that fails; what it
    printed."""
    lines = ["set -euo pipefail"]
    for block in chosen:
        if block.language in ("sh", "python"):
            lines.append(f"echo {shlex.quote(f'{page.name}:{block.line}:')} >&2")
            lines.append(block.text if block.language == "sh" else f"python - <<'PYTHON'\n{block.text}PYTHON")
    shell = subprocess.Popen(["bash", "-c", "\n".join(lines)], cwd=folder, env={**os.environ, **environment}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = shell.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a block left running in the background
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, f"{out}{err}"
    return out


def commands(folder: Path, python: str | Path, package: Path) -> dict[str, str]:
    """An environment in which ``python`` and ``onnxfuse`` are those of an interpreter, with a checkout's package; the
    other commands of the interpreter's environment are there too."""
    folder.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("onnxfuse", "-m onnxfuse")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": os.pathsep.join([str(folder), str(Path(python).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(package), "NO_COLOR": "1"}
