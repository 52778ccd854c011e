"""Write a model to disk: all of it or nothing, and never over what it was made from.

    data ─▶ part, named by its digest ┐
    model that names it ─▶ part       ┴▶ both renamed, the model last ─▶ what nobody names any more is swept

A model and its data are two files, and no file system renames two at once.  So data files get names that follow from
their contents: whoever is killed, or saves to the same place at the same time, leaves a model with the data that it was
saved with.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import onnx
from google.protobuf.message import EncodeError
from onnx import numpy_helper

from onnxfuse.errors import OutputError
from onnxfuse.files import Part, alone_in, followed, sweep_parts
from onnxfuse.graph import store
from onnxfuse.graph.constants import is_external, tensor_bytes
from onnxfuse.graph.load import LoadedModel
from onnxfuse.rewriting import wire
from onnxfuse.rewriting.external import (
    Contents,
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

DIGITS = 16
"""Of a data file's digest, in its name."""


@dataclass(frozen=True)
class Saved:
    """What was written: the model and, where it has one, its new data file; ``weights``: all files that it refers to.
    """

    path: Path
    data: Path | None
    weights: tuple[Path, ...] = ()


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
    """Write a model; on any failure nothing new is left, and an older model under this name is as it was.

    Args:
        model: what to write; it is not changed.
        source: the model that it was made from: its file and data are never overwritten, and references to external
            data start from its folder.
        external: what becomes of data outside the model's file.  "keep" refers to the same files where they are in
            or below the new file's folder and copies them else, because ONNX Runtime reads no others; "copy" copies
            the bytes that are referred to into ``<path>.DIGEST.data``; "inline" puts them into the model.
        progress: told how much of the data file is written.

    A model of more than 2 GB, which no protobuf file can hold, gets its weights of a kilobyte and more written to
    ``<path>.DIGEST.data``.  Data files of earlier models at this path go once no model in the folder names them.  A
    symbolic link is followed; permissions of what is replaced stay.

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
        saved = _save(_Job(model, followed(path), None if source is None else source.folder, external), kept, progress)
    except OSError as error:
        raise _output_error(error, path) from error
    stay = [] if source is None or external != "keep" else [
        file for file in kept if file != source.path and location_below(file, saved.path.parent) is not None]
    return replace(saved, weights=(*stay, *([] if saved.data is None else [saved.data])))


def annotate(path: str | Path, note: Callable[[onnx.ModelProto], None]) -> None:
    """Change notes of a model's file that nothing else reads; weights outside it are not touched.

    Raises:
        OutputError: the file cannot be written; it is as it was.
    """
    target = followed(Path(path))
    model = onnx.load(target, load_external_data=False)
    note(model)
    try:
        with Part(target) as part:
            part.file.write(model.SerializeToString())
            part.finish()
            part.put(target)
    except OSError as error:
        raise _output_error(error, target) from error


@dataclass(frozen=True)
class _Job:
    """What is saved, where, and what becomes of its external data, which is referred to from ``folder``."""

    model: onnx.ModelProto
    path: Path
    folder: Path | None
    external: External

    def prepared(self, name: str) -> _Prepared:
        """The model file and the plan of a data file of this name.

        Raises:
            OutputError: the model does not fit in a file.
        """
        try:
            for spill in (False, True):
                data = DataFile(name)
                move = _Move(self.folder, self.path.parent, self.external, data)
                size, write = _prepare(self.model, move, spill)
                if size <= wire.LIMIT:
                    return _Prepared(data, write)
            raise EncodeError(f"{size} bytes without its weights")
        except EncodeError as error:
            raise OutputError(
                f"The model does not fit in one file of 2 GB: {error}.",
                place=str(self.path),
                remedy="Keep large tensors as initialisers instead of Constant nodes.",
            ) from error


@dataclass(frozen=True)
class _Prepared:
    """A data file's plan, and what writes the model file."""

    data: DataFile
    write: Callable[[BinaryIO], None]


def _save(job: _Job, kept: Sequence[Path], progress: Progress | None) -> Saved:
    path, ready, data = job.path, job.prepared(_data_name(job.path, "0" * DIGITS)), None
    with ExitStack() as parts:
        if ready.data.parts:
            weights = parts.enter_context(Part(path))
            digest = ready.data.write(weights.file, progress)
            weights.finish()
            data = path.parent / _free_name(path, digest, kept)
            ready = job.prepared(data.name)
        model = parts.enter_context(Part(path))
        ready.write(model.file)
        model.finish()
        with alone_in(path.parent) as alone:
            fresh = data is not None and not data.exists()
            if data is not None:
                weights.put(data, like=path)
            try:
                model.put(path)
            except BaseException:
                if data is not None and fresh and alone:
                    data.unlink(missing_ok=True)
                raise
            if alone:
                sweep_parts(path.parent, path.name)
                _sweep_data(path, kept)
    return Saved(path, data)


def _data_name(path: Path, digest: str, number: int = 0) -> str:
    return f"{path.name}.{digest[:DIGITS]}{f'.{number}' if number else ''}.data"


def _free_name(path: Path, digest: str, kept: Sequence[Path]) -> str:
    """A name for data beside the model that belongs to none of the files that must stay."""
    number = 0
    while any(same_file(path.parent / _data_name(path, digest, number), other) for other in kept):
        number += 1
    return _data_name(path, digest, number)


def _sweep_data(path: Path, kept: Sequence[Path]) -> None:
    """Remove data files that were saved for this path and that no model in its folder names."""
    pattern = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{{DIGITS}}}(\.\d+)?\.data")
    found = [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    found = [entry for entry in found if not any(same_file(entry, other) for other in kept)]
    if found:
        models = {path, *path.parent.glob("*.onnx")}
        for entry in found:
            if not any(_names(model, entry.name) for model in models if model.is_file()):
                entry.unlink(missing_ok=True)


def _names(model: Path, name: str) -> bool:
    """Whether a file holds a name; parsed it would be in memory whole.  One that cannot be read may."""
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except ValueError:  # an empty file
        return False
    except OSError:
        return True


def _sources(model: onnx.ModelProto, source: LoadedModel | None) -> tuple[Path, ...]:
    """Files that must stay as they are: the source model and every data file that the model refers to."""
    if source is None:
        return ()
    files = [] if source.path is None else [source.path]
    files += [span(tensor, source.folder).path for tensor in external_tensors(model)]
    return tuple(dict.fromkeys(files))


def _check_target(path: Path, kept: Sequence[Path]) -> None:
    if os.path.isdir(path):
        raise OutputError(
            "The output is a folder.", place=str(path), remedy="Give the name of a file: -o FOLDER/model.fused.onnx.",
        )
    if not os.path.isdir(path.parent):
        raise OutputError(
            f"The folder '{path.parent}' does not exist.", place=str(path), remedy="Create it, or choose another.",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise OutputError(
            "The output is a device or a pipe.", place=str(path), remedy="Give the name of a file.",
        )
    if any(same_file(path, other) for other in kept):
        raise OutputError(
            "The output would overwrite the model that is being read, or its data.",
            place=str(path),
            remedy="Choose another name with -o.",
        )


def _prepare(model: onnx.ModelProto, move: _Move, spill: bool) -> tuple[int, Callable[[BinaryIO], None]]:
    """The size of the model file, and what writes it; fills the data file's plan."""
    shell = wire.skeleton(model)
    whole = shell is None
    if shell is None:
        shell = onnx.ModelProto()
        shell.CopyFrom(store.whole(model))
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
    if (own := store.stretch(tensor)) is not None:
        return _of_file(store.around(tensor, own), own, move, spill)
    tensor = store.resolved(tensor)
    if is_external(tensor):
        moved = onnx.TensorProto()
        moved.CopyFrom(tensor)
        inside = move.settle(moved)
        return wire.weight(moved) if inside is None else _of_file(moved, inside, move, spill)
    return wire.weight(_spilled(tensor, move.data) if spill and _spills(tensor) else tensor)


def _of_file(tensor: onnx.TensorProto, inside: Contents, move: _Move, spill: bool) -> wire.Weight:
    """An initialiser, given without its contents, whose bytes are copied from a file."""
    if spill and inside.length >= SPILL:
        refer(tensor, move.data.name, move.data.place(inside, inside.length), inside.length)
        return wire.weight(tensor)
    return wire.raw_weight(tensor, inside.length, inside.chunks)


def _spills(tensor: onnx.TensorProto) -> bool:
    return tensor_bytes(tensor) >= SPILL and not is_external(tensor)


def _spilled(tensor: onnx.TensorProto, data: DataFile) -> onnx.TensorProto:
    """A reference to the bytes of a tensor, which go to the data file."""
    moved = store.described(tensor)
    length = tensor_bytes(tensor)
    refer(moved, data.name, data.place(lambda: _raw(tensor), length), length)
    return moved


def _raw(tensor: onnx.TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


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
