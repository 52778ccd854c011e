"""Consoles, progress, and files that are written whole or not at all.

Nothing that a command prints steers the terminal but onnxfuse's own colours and its line of progress: whatever is
written to stdout and stderr (``guarded``), and whatever a console prints, has its controls written out first.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from onnxfuse.errors import OutputError
from onnxfuse.unforeseen import DEBUG
from onnxfuse.visible import visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, int, int], None]
"""Told a stage's name, how much of it is done, and how much there is; 0 of 0 where that is not known."""

PLAIN_WIDTH = 4000
"""Width of output that no terminal shows: one line a message."""


PLAINLY = "onnxfuse.plainly"
"""Name of the way to write what a terminal's encoding lacks: onnxfuse's own signs in ASCII, all else as codes."""

_ASCII = {"µ": "u", "×": "x", "→": "->", "…": "...", "–": "-", "—": "-"}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start:error.end]
    return "".join(_ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs), error.end


codecs.register_error(PLAINLY, _plainly)


class Guard:
    """A stream that writes controls out as codes; ``stream`` is the one below, for who steers the terminal himself."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str | bytes) -> int:
        """Write a text of any number of lines; what the shell is to complete comes as bytes."""
        self.stream.write(visible_lines(text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # what takes bytes is past the guard; click looks for it where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """What is written to stdout and stderr steers no terminal: errors, warnings, tracebacks, messages of the options'
    parser, whatever names of files and of what they hold are in them."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):  # a character that the terminal's encoding lacks is no reason to end
            stream.reconfigure(errors=PLAINLY)
    own = cast(TextIO, Guard(before[0])), cast(TextIO, Guard(before[1]))
    sys.stdout, sys.stderr = own
    try:
        yield
    finally:  # after a broken pipe click has put streams of its own there, which stay
        sys.stdout = before[0] if sys.stdout is own[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is own[1] else sys.stderr


def _below(stream: TextIO) -> TextIO:
    """The stream that a console writes to: it writes the controls of others out itself."""
    return stream.stream if isinstance(stream, Guard) else stream


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints plain text where its stream is no terminal.  NO_COLOR is rich's own business."""
    from onnxfuse.cli.terminal import GuardedConsole

    stream = _below(sys.stderr if stderr else sys.stdout)
    width = None if stream.isatty() else PLAIN_WIDTH
    return GuardedConsole(file=stream, stderr=stderr, quiet=quiet, width=width, highlight=False, emoji=False,
                          soft_wrap=width is not None)


def print_json(content: object) -> None:
    """Print data as JSON."""
    click.echo(json_text(content))


def json_text(content: object) -> str:
    """Data as JSON of ASCII characters.  Halves of surrogate pairs, which bytes of a file's name that are no UTF-8
    become, are no text for other programs, and infinite figures no JSON: the first are replaced, the second null."""
    return json.dumps(_portable(content), indent=1)


def _portable(content: Any) -> Any:
    if isinstance(content, str):
        return content.encode("utf-8", "backslashreplace").decode() if not content.isascii() else content
    if isinstance(content, float):
        return content if abs(content) < float("inf") else None
    if isinstance(content, dict):
        return {_portable(key): _portable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_portable(item) for item in content]
    return content


@contextlib.contextmanager
def progress(quiet: bool = False) -> Iterator[Tell]:
    """A live line on stderr while something long runs; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, of: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
               TimeElapsedColumn())
    # What others write meanwhile the line of progress takes and prints above itself, past the guard of the streams.
    with Progress(*columns, console=console(stderr=True), transient=True) as live, guarded():
        task = live.add_task("", total=None)

        def tell(stage: str, done: int, of: int) -> None:
            live.update(task, description=visible(stage), completed=done, total=of or None)

        yield tell


def hush_runtime() -> None:
    """Keep what ONNX Runtime writes past Python, with names of the model in it, from the terminal: what ends a session
    or a run is an exception as well."""
    import onnxruntime

    if not os.environ.get(DEBUG):
        onnxruntime.set_default_logger_severity(4)


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
