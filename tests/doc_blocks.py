"""Fenced blocks of a page of documentation, and how they are run in order: what stands there works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"(?:^<!-- (?P<mark>[\w ]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
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


def run(page: Path, chosen: Iterable[Block], folder: Path, environment: dict[str, str]) -> list[str]:
    """Run blocks of shell and Python in a folder, one after the other; what each printed."""
    printed = []
    for block in chosen:
        words = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}.get(block.language)
        if words is None:
            continue
        done = subprocess.run([*words, block.text], cwd=folder, env={**os.environ, **environment}, text=True,
                              capture_output=True, check=False)
        assert done.returncode == 0, f"{page.name}:{block.line}:\n{block.text}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    return printed


def commands(folder: Path, python: str | Path, package: Path) -> dict[str, str]:
    """An environment in which ``python`` and ``onnxfuse`` are those of an interpreter, with a checkout's package; the
    other commands of the interpreter's environment are there too."""
    folder.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("onnxfuse", "-m onnxfuse")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": os.pathsep.join([str(folder), str(Path(python).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(package), "NO_COLOR": "1"}
