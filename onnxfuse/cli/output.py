"""Consoles, progress, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import OutputError
from onnxfuse.files import Part, alone_in, followed, sweep_parts
from onnxfuse.unforeseen import DEBUG

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, int, int], None]
"""Told a stage's name, how much of it is done, and how much there is; 0 of 0 where that is not known."""

PLAIN_WIDTH = 4000
"""Width of output that no terminal shows: one line a message."""


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints plain text where its stream is no terminal.  NO_COLOR is rich's own business."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, quiet=quiet, width=width, highlight=False, soft_wrap=width is not None)


@contextlib.contextmanager
def progress(quiet: bool = False) -> Iterator[Tell]:
    """A live line on stderr while something long runs; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, of: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as live:
        task = live.add_task("", total=None)

        def tell(stage: str, done: int, of: int) -> None:
            live.update(task, description=stage, completed=done, total=of or None)

        yield tell


def hush_runtime() -> None:
    """Keep ONNX Runtime's warnings about sessions that are made on the way from the terminal; its errors stay."""
    import onnxruntime

    if not os.environ.get(DEBUG):
        onnxruntime.set_default_logger_severity(3)


def write_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        target = followed(path)
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe
            target.write_text(text, encoding="utf-8")
            return
        with Part(target) as part:
            part.file.write(text.encode())
            part.finish()
            with alone_in(target.parent) as alone:
                part.put(target)
                if alone:
                    sweep_parts(target.parent, target.name)
    except OSError as error:
        raise OutputError(
            f"The file cannot be written: {error.strerror or error}. Nothing was left behind.", place=str(path),
            remedy="Choose a folder that you may write to and that has room.",
        ) from error


def check_folder(path: Path | None) -> None:
    """Say before anything long runs that a file could not be written.

    Raises:
        OutputError: its folder is not there or not writable, or it is a folder itself.
    """
    if path is None:
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            path.lstat()
    except OSError as error:
        raise OutputError(
            f"The file cannot be written: {error.strerror}.", place=str(path), remedy="Choose another name or folder.",
        ) from error
    if os.path.isdir(path):
        raise OutputError("The output is a folder.", place=str(path), remedy="Give the name of a file.")
    if not os.path.isdir(path.parent):
        raise OutputError(
            f"The folder '{path.parent}' does not exist.", place=str(path), remedy="Create it, or choose another.",
        )
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"The folder '{path.parent}' is not writable.", place=str(path),
            remedy="Choose a folder that you may write to.",
        )
