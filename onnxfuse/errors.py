"""Every error that a user can meet, and nothing else.

    OnnxfuseError                 exit code 1
    ├── ModelError                the model cannot be read, understood or written back
    │   └── ExternalDataError     its weights are missing, truncated or outside its folder
    ├── RuleError                 a rule file is wrong: file, line, excerpt, suggestion
    ├── TargetError               an unknown GPU, hardware profile or architecture
    ├── OutputError               the result cannot be written; nothing was left behind
    ├── KernelError               a kernel cannot be compiled or had for the GPU present
    ├── MeasurementError          a database of measurements, or a profile of a run, cannot be used
    ├── RuntimeLibraryError       the native library is missing, too old, or refused by ONNX Runtime
    ├── VerificationError         a fused model that must not be delivered
    └── InternalError             a fault of onnxfuse itself

A message has three parts: what is wrong, where, and what mends it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A spot in a text file; ``line`` and ``column`` count from one."""

    file: str
    line: int | None = None
    column: int | None = None
    excerpt: str | None = None
    length: int = 1

    def __str__(self) -> str:
        spot = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        if self.excerpt is None or self.line is None:
            return f"--> {spot}"
        gutter = " " * len(str(self.line))
        marks = " " * ((self.column or 1) - 1) + "^" * max(self.length, 1)
        return f"--> {spot}\n{gutter} |\n{self.line} | {self.excerpt}\n{gutter} | {marks}"


class OnnxfuseError(Exception):
    """Base of all errors that onnxfuse raises on purpose.

    Args:
        message: what is wrong, one sentence.
        place: where: a ``Place``, a path, or the name of a node or tensor.
        remedy: what the user can do about it, one sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, place: Place | str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.message]
        if self.place is not None:
            lines.append(str(self.place) if isinstance(self.place, Place) else f"--> {self.place}")
        if self.remedy is not None:
            lines.append(f"help: {self.remedy}")
        return _printable("\n".join(lines))


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would obey or could not show: names in files may hold anything."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


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
    """A kernel cannot be compiled, or had, for the GPU present."""


class MeasurementError(OnnxfuseError):
    """A database of measurements, or ONNX Runtime's profile of a run, cannot be used."""


class RuntimeLibraryError(OnnxfuseError):
    """The native library is missing, too old, or refused by ONNX Runtime."""


class VerificationError(OnnxfuseError):
    """A fused model failed verification as a whole."""


class InternalError(OnnxfuseError):
    """A fault of onnxfuse itself; ``__cause__`` is what happened."""
