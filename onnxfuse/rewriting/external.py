"""Weights outside the model file: where they are, and where they go when the model moves."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import onnx

from onnxfuse.errors import ExternalDataError
from onnxfuse.graph.constants import external_path, external_span, is_external, node_tensors, tensors
from onnxfuse.graph.store import CHUNK, Stretch

PAGE = 4096
"""Data of at least a page starts at a multiple of this, so that a runtime can map it."""

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and those to copy in all."""


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """The bytes.

        Raises:
            ExternalDataError: they cannot be read.
        """
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most ``CHUNK`` at a time."""
        left = self.length
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while left:
                    part = file.read(min(left, CHUNK))
                    if not part:
                        raise ExternalDataError(
                            f"The external data file '{self.path.name}' is too short: {left} bytes are missing.",
                            place=str(self.path),
                            remedy="Copy the file again, in full.",
                        )
                    left -= len(part)
                    yield part
        except OSError as error:
            raise ExternalDataError(
                f"The external data file '{self.path.name}' cannot be read: {error.strerror}.",
                place=str(self.path),
                remedy="Put the file back beside the model, readable.",
            ) from error


Contents = Span | Stretch
"""Bytes of a file beside the model, or of its own."""


@dataclass
class DataFile:
    """A data file in the making: what goes where."""

    name: str
    size: int = 0
    parts: list[tuple[int, Contents | Callable[[], bytes]]] = field(default_factory=list)
    known: dict[Contents, int] = field(default_factory=dict)

    def place(self, content: Contents | Callable[[], bytes], length: int) -> int:
        """The offset at which the content will stand; a span asked for twice stands once."""
        if isinstance(content, Contents) and content in self.known:
            return self.known[content]
        if length >= PAGE:
            self.size = -(-self.size // PAGE) * PAGE
        offset = self.size
        self.parts.append((offset, content))
        self.size += length
        if isinstance(content, Contents):
            self.known[content] = offset
        return offset

    def write(self, file: BinaryIO, progress: Progress | None) -> str:
        """Write all of it; a digest of what stands where."""
        digest = hashlib.sha256()
        for offset, content in self.parts:
            file.seek(offset)
            digest.update(offset.to_bytes(8, "little"))
            for part in content.chunks() if isinstance(content, Contents) else [content()]:
                file.write(part)
                digest.update(part)
                if progress is not None:
                    progress(file.tell(), self.size)
        return digest.hexdigest()


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every tensor of the model whose contents lie in a file: initialisers, attributes, functions' too."""
    found = [tensor for tensor in tensors(model.graph) if is_external(tensor)]
    for function in model.functions:
        found.extend(tensor for tensor in node_tensors(function.node) if is_external(tensor))
    for training in model.training_info:
        for graph in (training.initialization, training.algorithm):
            found.extend(tensor for tensor in tensors(graph) if is_external(tensor))
    return found


def span(tensor: onnx.TensorProto, folder: Path | None) -> Span:
    """Where a tensor's contents lie.

    Raises:
        ExternalDataError: the reference is malformed or leaves the folder, or that is unknown.
    """
    location, offset, length = external_span(tensor)
    return Span(external_path(tensor, location, folder), offset, length)


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor refer to bytes of a file beside the model; drops a checksum, which is the whole file's."""
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def relocate(tensor: onnx.TensorProto, location: str) -> None:
    """Change the path of a tensor's external data and nothing else."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location


def location_below(path: Path, folder: Path) -> str | None:
    """The path as a model in ``folder`` may refer to it, or None where it lies outside."""
    real, base = path.resolve(), folder.resolve()
    return real.relative_to(base).as_posix() if real.is_relative_to(base) else None


def same_file(first: Path, second: Path) -> bool:
    """Whether two paths are one file; not where one is not there."""
    try:
        return os.path.samefile(first, second)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
