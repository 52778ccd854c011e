"""Write a model to disk: all of it or nothing, and never over what it was made from."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import onnx
from google.protobuf.message import EncodeError
from onnx import numpy_helper

from onnxfuse.errors import OutputError
from onnxfuse.graph.constants import is_external, tensor_bytes
from onnxfuse.graph.load import LoadedModel
from onnxfuse.rewriting import wire
from onnxfuse.rewriting.external import (
    DataFile,
    Progress,
    Span,
    external_tensors,
    location_below,
    refer,
    relocate,
    same_file,
    span,
)

External = Literal["keep", "copy", "inline"]

SPILL = 1024
"""Bytes from which on a weight leaves a model that is too large for one file."""

Target = tuple[Path, Callable[[BinaryIO], None]]
"""A file to write, and what writes it."""


@dataclass(frozen=True)
class Saved:
    """What was written: the model and, where it has one, its new data file."""

    path: Path
    data: Path | None


@dataclass(frozen=True)
class _Move:
    """What becomes of external data: where it is now, where the model goes, and the new data file."""

    source: Path | None
    folder: Path
    external: External
    data: DataFile

    def settle(self, tensor: onnx.TensorProto) -> Span | None:
        """Make an external tensor's reference right for the new place; the bytes to put into the tensor itself
        where they are wanted there."""
        here = span(tensor, self.source)
        if self.external == "inline":
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            return here
        if self.external == "keep":
            if self.source is not None and self.source.resolve() == self.folder.resolve():
                return None
            location = location_below(here.path, self.folder)
            if location is not None:
                relocate(tensor, location)
                return None
        refer(tensor, self.data.name, self.data.place(here, here.length), here.length)
        return None


def save(
    model: onnx.ModelProto,
    path: str | Path,
    *,
    source: LoadedModel | None = None,
    external: External = "keep",
    progress: Progress | None = None,
) -> Saved:
    """Write a model; on any failure nothing new is left, and older files under these names are as they were.

    Args:
        model: what to write; it is not changed.
        source: the model that it was made from: its file and data are never overwritten, and references to external
            data start from its folder.
        external: what becomes of data outside the model's file.  "keep" refers to the same files where they are in
            or below the new file's folder and copies them else, because ONNX Runtime reads no others; "copy" copies
            the bytes that are referred to into ``<path>.data``; "inline" puts them into the model.
        progress: told how much of the data file is written.

    A model of more than 2 GB, which no protobuf file can hold, gets its weights of a kilobyte and more written to
    ``<path>.data``.

    Raises:
        OutputError: the file cannot be written.
        ExternalDataError: data that has to be copied is missing or too short.
        ValueError: ``external`` is none of the three words.
    """
    if external not in get_args(External):
        raise ValueError(f"external is {external!r}; it can be {', '.join(map(repr, get_args(External)))}")
    path = Path(path)
    kept = _sources(model, source)
    _check_target(path, kept)
    try:
        for spill in (False, True):
            data = DataFile(_data_name(path, kept))
            move = _Move(None if source is None else source.folder, path.parent, external, data)
            size, write = _prepare(model, move, spill)
            if size <= wire.LIMIT:
                break
        else:
            raise EncodeError(f"{size} bytes without its weights")
    except EncodeError as error:
        raise OutputError(
            f"The model does not fit in one file of 2 GB: {error}.",
            place=str(path),
            remedy="Keep large tensors as initialisers instead of Constant nodes.",
        ) from error
    targets: list[Target] = [(path, write)]
    if data.parts:
        targets.insert(0, (path.parent / data.name, lambda file: data.write(file, progress)))
    _commit(targets, path)
    return Saved(path, path.parent / data.name if data.parts else None)


def _sources(model: onnx.ModelProto, source: LoadedModel | None) -> tuple[Path, ...]:
    """Files that must stay as they are: the source model and every data file that the model refers to."""
    if source is None:
        return ()
    files = [] if source.path is None else [source.path]
    files += [span(tensor, source.folder).path for tensor in external_tensors(model)]
    return tuple(dict.fromkeys(files))


def _check_target(path: Path, kept: Sequence[Path]) -> None:
    if path.is_dir():
        raise OutputError(
            "The output is a folder.", place=str(path), remedy="Give the name of a file: -o FOLDER/model.fused.onnx.",
        )
    if not path.parent.is_dir():
        raise OutputError(
            f"The folder '{path.parent}' does not exist.", place=str(path), remedy="Create it, or choose another.",
        )
    if any(same_file(path, other) for other in kept):
        raise OutputError(
            "The output would overwrite the model that is being read, or its data.",
            place=str(path),
            remedy="Choose another name with -o.",
        )


def _data_name(path: Path, kept: Sequence[Path]) -> str:
    """A name beside the model that belongs to none of the files that must stay."""
    number = 0
    while True:
        name = f"{path.name}.{number}.data" if number else f"{path.name}.data"
        if not any(same_file(path.parent / name, other) for other in kept):
            return name
        number += 1


def _prepare(model: onnx.ModelProto, move: _Move, spill: bool) -> tuple[int, Callable[[BinaryIO], None]]:
    """The size of the model file, and what writes it; fills the data file's plan."""
    shell = wire.skeleton(model)
    whole = shell is None
    if shell is None:
        shell = onnx.ModelProto()
        shell.CopyFrom(model)
    for tensor in external_tensors(shell):
        content = move.settle(tensor)
        if content is not None:
            tensor.raw_data = content.read()
    if not whole:
        layout = wire.Layout(shell, [_weight(tensor, move, spill) for tensor in model.graph.initializer])
        return layout.size, layout.write
    if spill:
        for tensor in shell.graph.initializer:
            if _spills(tensor):
                tensor.CopyFrom(_spilled(tensor, move.data))
    content = shell.SerializeToString()

    def write(file: BinaryIO) -> None:
        file.write(content)

    return len(content), write


def _weight(tensor: onnx.TensorProto, move: _Move, spill: bool) -> wire.Weight:
    """An initialiser as it goes into the model file."""
    if is_external(tensor):
        moved = onnx.TensorProto()
        moved.CopyFrom(tensor)
        inside = move.settle(moved)
        if inside is None:
            return moved.ByteSize(), moved.SerializeToString
        if spill and inside.length >= SPILL:
            refer(moved, move.data.name, move.data.place(inside, inside.length), inside.length)
            return moved.ByteSize(), moved.SerializeToString
        return wire.raw_weight(moved, inside.length, inside.read)
    if spill and _spills(tensor):
        moved = _spilled(tensor, move.data)
        return moved.ByteSize(), moved.SerializeToString
    return tensor.ByteSize(), tensor.SerializeToString


def _spills(tensor: onnx.TensorProto) -> bool:
    return tensor_bytes(tensor) >= SPILL and not is_external(tensor)


def _spilled(tensor: onnx.TensorProto, data: DataFile) -> onnx.TensorProto:
    """A reference to the bytes of a tensor, which go to the data file."""
    moved = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.HasField("doc_string"):
        moved.doc_string = tensor.doc_string
    moved.metadata_props.extend(tensor.metadata_props)
    length = tensor_bytes(tensor)
    refer(moved, data.name, data.place(lambda: _raw(tensor), length), length)
    return moved


def _raw(tensor: onnx.TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def _commit(targets: Sequence[Target], path: Path) -> None:
    """Write files under other names, then move all of them in place; undo everything on failure."""
    pending: list[tuple[Path, Path]] = []
    undo: list[Callable[[], None]] = []
    done = False
    try:
        for target, write in targets:
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            with open(temporary, "xb") as file:
                pending.append((temporary, target))
                write(file)
        for temporary, target in pending[:-1]:
            undo.append(_put(temporary, target))
        os.replace(*pending[-1])
        done = True
    except OSError as error:
        raise _output_error(error, path) from error
    finally:
        if not done:
            for step in reversed(undo):
                step()
        for temporary, _ in pending:
            temporary.unlink(missing_ok=True)
            _backup(temporary).unlink(missing_ok=True)


def _put(temporary: Path, target: Path) -> Callable[[], None]:
    """Move a file in place of an older one; returns what undoes it."""
    if not target.exists():
        os.replace(temporary, target)
        return lambda: target.unlink(missing_ok=True)
    backup = _backup(temporary)
    os.replace(target, backup)
    try:
        os.replace(temporary, target)
    except OSError:
        os.replace(backup, target)
        raise
    return lambda: os.replace(backup, target)


def _backup(temporary: Path) -> Path:
    return temporary.with_suffix(".old")


def _output_error(error: OSError, path: Path) -> OutputError:
    remedy = {
        errno.ENOSPC: "Free space there, or choose another folder with -o.",
        errno.EDQUOT: "Free space there, or choose another folder with -o.",
        errno.EFBIG: "Raise the limit (ulimit -f), or choose another folder with -o.",
        errno.ENAMETOOLONG: "Choose a shorter name with -o.",
    }.get(error.errno or 0, "Choose a folder that you may write to with -o.")
    return OutputError(
        f"The model cannot be written: {error.strerror or error}. Nothing was left behind.",
        place=str(path),
        remedy=remedy,
    )
