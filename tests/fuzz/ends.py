"""How a case ends, and what of that is no fault.

A subject is a module beside this one:

    make(seed, folder) -> files     writes the case's files into an empty folder; the same for the same seed, always
    attempt(files) -> text          runs the product on them, in a word how that went: "" or "fused"

and, where it needs that, ``prepare()``, called once before any worker starts (to build a program, say).  ``attempt``
runs in a worker process and lets errors pass: an ``OnnxfuseError`` or wrong usage is a refusal, which is fine; a
``FaultError`` says what is wrong by itself; any other exception is a traceback that a user would have met.  It must not
look at anything but the files, so that a kept input can be tried again.  What it does of its own, and the product would
not (running a damaged model, to compare), it does in ``beyond``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
from click.testing import CliRunner

from onnxfuse.errors import InternalError, OnnxfuseError

FINE = ("ok", "refused", "beyond")
"""``beyond``: the process died or hung in what is not the product's."""

FAULTS = ("crash", "traceback", "internal error", "hang", "memory", "wrong")
"""A signal or an exit, an exception that is not onnxfuse's, the same through the command line, past the limits of time
and of memory, and a result that is not what it should be."""


class FaultError(Exception):
    """A fault that the subject itself sees, of one of the kinds in ``FAULTS``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class End:
    """How a case ended.

    Attributes:
        kind: one of ``FINE`` or of ``FAULTS``.
        text: what was said; of an exception the traceback, its last line first.
        seconds, megabytes: what it took: time, and the most memory that the process has held.
    """

    kind: str
    text: str
    seconds: float = 0.0
    megabytes: int = 0

    @property
    def fine(self) -> bool:
        return self.kind in FINE

    @property
    def first_line(self) -> str:
        return (self.text.splitlines() or [""])[0]

    @property
    def signature(self) -> str:
        """What ends of one cause have in common: the kind, and of a traceback where it was raised."""
        frames = [line.strip() for line in self.text.splitlines() if line.startswith("  File ")]
        own = [line for line in frames if "onnxfuse/" in line] or frames
        return f"{self.kind}: {self.first_line[:60] if not own else own[-1].split('onnxfuse/')[-1]}"


telling: Callable[[str], None] | None = None
"""Told, in a worker, what that is not the product's begins; "" where it ends."""


@contextmanager
def beyond(what: str) -> Iterator[None]:
    """While it lasts, a crash, a hang or too much memory is no fault of the product."""
    tell = telling or (lambda text: None)
    tell(what)
    yield
    tell("")


def end_of(attempt: Callable[[], str]) -> End:
    """How an attempt ends, as far as the process lives to tell."""
    try:
        return End("ok", attempt())
    except FaultError as failure:
        return End(failure.kind, f"{failure}\n{_chain(failure)}" if failure.__cause__ else str(failure))
    except InternalError as error:
        return End("internal error", f"{error.message}\n{_chain(error.__cause__ or error)}")
    except OnnxfuseError as error:
        return End("refused", str(error))
    except click.UsageError as error:
        return End("refused", error.format_message())
    except MemoryError as error:
        return End("memory", f"MemoryError: {error}\n{_chain(error)}")
    except Exception as error:
        return End("traceback", f"{type(error).__name__}: {error}\n{_chain(error)}")


def _chain(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def invoke(command: click.Command, *arguments: object, **environment: str) -> str:
    """Run a command line in this process: what it prints.

    Raises:
        OnnxfuseError, click.UsageError: it refuses, with what it said.
        FaultError: it dies of something else.
    """
    result = CliRunner().invoke(command, [str(argument) for argument in arguments],
                                env={"COLUMNS": "100", "NO_COLOR": "1", "ONNXFUSE_DEBUG": "1", **environment})
    if result.exit_code == 0:
        return result.output
    if "internal error:" in result.output or result.exit_code not in (1, 2):
        _, _, said = result.output.partition("internal error:")
        raise FaultError("internal error", f"{said.strip() or result.output}\n{result.output}")
    if result.exit_code == 2:
        raise click.UsageError(result.output)
    raise OnnxfuseError(result.output[result.output.rfind("error:"):].strip())
