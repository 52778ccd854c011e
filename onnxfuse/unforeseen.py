"""What is left of errors: those that nobody foresaw, told with the file and with what a report of them needs."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from onnxfuse.errors import InternalError, OnnxfuseError
from onnxfuse.version import __version__
from onnxfuse.visible import visible

DEBUG = "ONNXFUSE_DEBUG"
"""Environment variable that asks for tracebacks and all messages."""

_PARTS = ("onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "protobuf", "ml_dtypes")
_HERE = Path(__file__).resolve().parent
_LONGEST = 200
"""Letters of an exception's text that a message shows."""


@contextmanager
def told(*files: object) -> Iterator[None]:
    """Turn what nobody foresaw into an error that names the files and says how to report it.

    Raises:
        InternalError: in place of any exception that is not onnxfuse's own.
    """
    try:
        yield
    except OnnxfuseError:
        raise
    except Exception as error:
        raise unforeseen(error, [str(file) for file in files if isinstance(file, str | os.PathLike)]) from error


def unforeseen(error: Exception, files: Sequence[str], command: str = "") -> InternalError:
    """The error to show for an exception that nobody foresaw.

    Args:
        files: what was being worked on.
        command: the command line, where there is one.
    """
    text = (str(error).splitlines() or [""])[0][:_LONGEST]
    place = ", ".join(files)
    spot = _spot(error)
    if spot:
        place = f"{place}, in {spot}" if place else f"in {spot}"
    if isinstance(error, MemoryError):
        return InternalError(
            f"There is not enough memory{f': {text}' if text else '.'}", place=place or None,
            remedy="Close what else runs, or work on a machine with more.",
        )
    lines = [
        "This is a fault of onnxfuse. Please report it with the file, or the smallest one that shows it, and this:",
        f"      {versions()}",
        *([f"      {visible(command)}"] if command else []),
        f"      and what {DEBUG}=1 in the environment shows: the traceback.",
    ]
    return InternalError(f"{type(error).__name__}: {text}", place=place or None, remedy="\n".join(lines))


def versions() -> str:
    """What a report has to say of this installation."""
    found = [f"onnxfuse {__version__}"]
    for name in _PARTS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}", platform.platform(terse=True)])


def _spot(error: Exception) -> str:
    """The innermost line of this package that the exception went through: "planning/costs/cost.py:120"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_HERE):
            return f"{path.relative_to(_HERE)}:{frame.lineno}"
    return ""
