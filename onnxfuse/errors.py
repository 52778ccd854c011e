"""Every error that a user can meet, and nothing else.

    OnnxfuseError                 exit code 1; 2 where an option or a name given with the command is wrong
    ├── ModelError                the model cannot be read, understood or written back
    │   └── ExternalDataError     its weights are missing, truncated or outside its folder
    ├── RuleError                 a rule file is wrong: file, line, excerpt, suggestion
    ├── TargetError               an unknown GPU, hardware profile or architecture
    ├── OutputError               the result cannot be written; nothing was left behind
    ├── KernelError               a kernel cannot be compiled or had for the GPU present
    ├── LockError                 a lock of a model's fusions is broken, of a newer release, or of another model
    ├── MeasurementError          a database of measurements, or a profile of a run, cannot be used
    ├── RuntimeLibraryError       the native library is missing, too old, or refused by ONNX Runtime
    ├── VerificationError         a fused model that must not be delivered
    └── InternalError             a fault of onnxfuse itself

A message has three parts: what is wrong, where, and what mends it.  Its text shows names as ``visible`` does: one line
each, and no character that steers a terminal.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.visible import visible, visible_lines

LONGEST = 20_000
"""Characters of a message that are shown: names may have millions."""


@dataclass(frozen=True)
class Place:
    """A spot in a text file; ``line`` and ``column`` count from one."""

    file: str
    line: int | None = None
    column: int | None = None
    excerpt: str | None = None
    length: int = 1

    def __str__(self) -> str:
        spot = visible(":".join(str(part) for part in (self.file, self.line, self.column) if part is not None))
        if self.excerpt is None or self.line is None:
            return f"--> {spot}"
        gutter = " " * len(str(self.line))
        # The marks stand under what is shown, which may be longer than what the file has.
        start = (self.column or 1) - 1
        before = " " * (len(visible(self.excerpt[:start])) + max(start - len(self.excerpt), 0))
        marks = "^" * max(len(visible(self.excerpt[start:start + self.length])), 1)
        return f"--> {spot}\n{gutter} |\n{self.line} | {visible(self.excerpt)}\n{gutter} | {before}{marks}"


def _cut(text: str) -> str:
    """A text without its middle where it is long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


class OnnxfuseError(Exception):
    """Base of all errors that onnxfuse raises on purpose.

    Args:
        message: what is wrong, one sentence.
        place: where: a ``Place``, a path, or the name of a node or tensor.
        remedy: what the user can do about it, one sentence.
        usage: whether what was asked for is wrong, such as a name that is not there: exit code 2.
    """

    exit_code = 1
    _shown = staticmethod(visible)

    def __init__(
        self, message: str, *, place: Place | str | None = None, remedy: str | None = None, usage: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_code = 2 if usage else self.exit_code
        self.message = message
        self.place = place
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self._shown(_cut(self.message))]
        if self.place is not None:
            lines.append(str(self.place) if isinstance(self.place, Place) else f"--> {visible(_cut(self.place))}")
        if self.remedy is not None:
            lines.append(f"help: {self._shown(_cut(self.remedy))}")
        return "\n".join(lines)


class ModelError(OnnxfuseError):
    """The model cannot be read, understood or written back."""


class ExternalDataError(ModelError):
    """A weight kept outside the model file is missing, truncated or outside the model's folder."""


class RuleError(OnnxfuseError):
    """A rule file is wrong."""


class TargetError(OnnxfuseError):
    """An unknown GPU, hardware profile or architecture."""


class OutputError(OnnxfuseError):
    """The result cannot be written; nothing was left behind."""


class KernelError(OnnxfuseError):
    """A kernel cannot be compiled, or had, for the GPU present; the message may hold a log of several lines."""

    _shown = staticmethod(visible_lines)


class LockError(OnnxfuseError):
    """A lock of a model's fusions is broken, of a newer release, or of another model."""


class MeasurementError(OnnxfuseError):
    """A database of measurements, or ONNX Runtime's profile of a run, cannot be used."""


class RuntimeLibraryError(OnnxfuseError):
    """The native library is missing, too old, or refused by ONNX Runtime."""


class VerificationError(OnnxfuseError):
    """A fused model failed verification as a whole."""


class InternalError(OnnxfuseError):
    """A fault of onnxfuse itself; ``__cause__`` is what happened.  The remedy has several lines."""

    _shown = staticmethod(visible_lines)
