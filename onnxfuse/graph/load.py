"""Read a model file and make sure that it is one.

Weights outside the file are not read; that they are there, long enough and inside the model's folder is checked from
their sizes.  Nodes that are in no topological order are sorted, and names that a body shares with a later value around
are told apart.  What passes here has: graphs in topological order in which every name is defined once, an operator set
that onnx knows, standard operators with the inputs and attributes that they need, and tensors whose bytes are present.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnxfuse.errors import ExternalDataError, ModelError
from onnxfuse.graph.apart import told_apart
from onnxfuse.graph.constants import (
    element_bits,
    external_path,
    external_span,
    is_external,
    node_tensors,
    tensor_bytes,
    tensors,
)
from onnxfuse.graph.lean import read_lean
from onnxfuse.graph.order import STANDARD_DOMAINS, check_functions, check_order, depth, in_order
from onnxfuse.graph.signatures import check_signatures
from onnxfuse.graph.store import WeightStore, apart
from onnxfuse.graph.texts import check_texts
from onnxfuse.graph.wire import DecodeError, diagnose

OLDEST_OPSET = 11

SHOWN = 4
"""Graphs that a message names."""

LARGEST = (1 << 31) - 1
"""Bytes that a protobuf message can have."""

DEEPEST = 31
"""Bodies in one another: protobuf reads messages that are nested 100 deep, a body in a node takes three, and the sizes
of its values some more."""

FLATTER = "Export the model with fewer nested conditions and loops."

CHECKED_BYTES = 1 << 16
"""The length of an inline tensor's contents is checked where no more bytes than this are needed, or more than a file
can have."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed the checks.

    Attributes:
        path: the file it was read from, or None.
        proto: the model, with references to external data and without the data; not to be changed.
        folder: where its external data is looked for, or None.
        notes: what a user should know of how it was read.
        store: what has the larger weights that ``proto`` has references to (``graph.store``), or None.
    """

    path: Path | None
    proto: onnx.ModelProto
    folder: Path | None
    notes: tuple[str, ...] = ()
    store: WeightStore | None = field(default=None, repr=False, compare=False)

    def lean(self) -> LoadedModel:
        """The same with its larger weights in a store of its own, where they can be: copies that are made of it are
        without them."""
        store = WeightStore(self.store)
        proto = apart(self.proto, store)
        return self if proto is self.proto else replace(self, proto=proto, store=store)


def load_model(path: str | Path, lean: bool = False) -> LoadedModel:
    """Read and check a model file.

    Args:
        lean: leave the contents of large initialisers in the file, which must stay as it is then: references stand for
            them in ``proto``, as after ``LoadedModel.lean``.

    Raises:
        ModelError: there is no such file, it holds no ONNX model, or the model is invalid.
        ExternalDataError: data outside the file is missing, too short or outside the model's folder.
    """
    path = Path(path)
    found = read_lean(path, LARGEST) if lean else None
    if found is not None and found[0].HasField("graph"):
        return _checked(LoadedModel(path, found[0], path.parent, store=found[1]), str(path))
    data = _contents(path)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
        parsed = proto.HasField("graph")
    except DecodeError as error:
        parsed = False
        if "MaxDepth" in str(error):
            raise ModelError(f"The model has bodies in bodies, more than {DEEPEST} deep.", place=str(path),
                             remedy=FLATTER) from None
    if not parsed:
        message, remedy = diagnose(data)
        raise ModelError(message, place=str(path), remedy=remedy)
    del data
    return _checked(LoadedModel(path, proto, path.parent), str(path))


def _contents(path: Path) -> bytes:
    """What is in a model's file, or comes out of a pipe: no more than a protobuf message can have.

    Raises:
        ModelError: there is no such file, it cannot be read, or it is too large.
    """
    place = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except IsADirectoryError:
        raise ModelError("A folder is no ONNX model.", place=place, remedy="Give the .onnx file inside it.") from None
    except FileNotFoundError:
        raise ModelError(
            "There is no such file.", place=place, remedy="Check the path and the working directory.",
        ) from None
    except OSError as error:
        raise ModelError(f"The file cannot be read: {error.strerror}.", place=place,
                         remedy="Check the path, and that you may read what is there.") from error
    except ValueError as error:  # a NUL in the name
        raise ModelError(f"There can be no such file: {error}.", place=place, remedy="Check the path.") from error
    if len(data) > LARGEST:
        raise ModelError(
            "The file has more than 2 GB, which no ONNX file can have.", place=place,
            remedy="Save the model with its weights beside it: onnx.save(model, path, save_as_external_data=True).",
        )
    return data


def from_proto(proto: onnx.ModelProto, folder: str | Path | None = None) -> LoadedModel:
    """Check a model that is in memory; it is not changed, and copied only to sort its nodes or tell names apart.

    Args:
        folder: where its external data is, for a model that has some.

    Raises:
        ModelError: the model is invalid.
        ExternalDataError: as ``load_model``, or there is external data and no ``folder``.
    """
    if not isinstance(proto, onnx.ModelProto):
        raise ModelError(
            f"An onnx.ModelProto is needed, and this is {type(proto).__name__}.",
            remedy="Give the path of an ONNX file or what onnx.load returns.",
        )
    if not proto.HasField("graph"):
        raise ModelError("The model has no graph.", remedy="Export the model again.")
    return _checked(LoadedModel(None, proto, None if folder is None else Path(folder)), None)


def _checked(model: LoadedModel, place: str | None) -> LoadedModel:
    _check_versions(model.proto, place)
    nested = depth(model.proto)
    if nested > DEEPEST:
        raise ModelError(
            f"The model has bodies in bodies, {nested} deep, and ONNX files hold {DEEPEST}.", place=place,
            remedy=FLATTER,
        )
    check_texts(model.proto, place)
    proto, unsorted = in_order(model.proto)
    if unsorted:
        text = f"Nodes of {_listed(unsorted)} stood before others whose results they read; they are sorted."
        model = replace(model, proto=proto, notes=(*model.notes, text))
    _check_names(model.proto, place)
    proto, owners = told_apart(model.proto)
    if owners:
        text = (f"Values in bodies of {_listed(owners)} were called as others that are computed later in the graph "
                "around; they have names of their own now.")
        model = replace(model, proto=proto, notes=(*model.notes, text))
    check_signatures(model.proto)
    _check_tensors(model)
    return model


def check(model: LoadedModel) -> None:
    """Check a model that was made of one that is loaded, and is in order.

    Raises:
        ModelError: it is invalid.
    """
    place = None if model.path is None else str(model.path)
    _check_versions(model.proto, place)
    check_texts(model.proto, place)
    _check_names(model.proto, place)
    check_signatures(model.proto)
    _check_tensors(model)


def _check_names(proto: onnx.ModelProto, place: str | None) -> None:
    check_order(proto.graph, place)
    check_functions(proto, place)


def _listed(texts: Sequence[str]) -> str:
    shown = [*texts[:SHOWN], f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN + 1 else texts
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _check_versions(proto: onnx.ModelProto, place: str | None) -> None:
    if proto.ir_version < 1:
        raise ModelError(
            "The model states no IR version.", place=place, remedy="Set model.ir_version, or export the model again.",
        )
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"The model's IR version is {proto.ir_version}, and onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}.", place=place, remedy="Install a newer onnx: pip install -U onnx.",
        )
    for entry in (*proto.opset_import, *(each for function in proto.functions for each in function.opset_import)):
        if not 0 <= entry.version < 1 << 31:
            raise ModelError(
                f"The model imports version {entry.version} of the operators of '{entry.domain}', and there can be no "
                "such version.", place=place, remedy="Mend model.opset_import, or export the model again.",
            )
    _check_opset(proto, place)


def _check_opset(proto: onnx.ModelProto, place: str | None) -> None:
    versions = {entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS}
    newest = onnx.defs.onnx_opset_version()
    if not versions:
        if proto.opset_import and all(node.domain not in STANDARD_DOMAINS for node in proto.graph.node):
            return
        raise ModelError(
            "The model imports no version of the standard operators.", place=place,
            remedy="Export the model again, or add one: model.opset_import.add(domain='', version=17).",
        )
    if len(versions) > 1:
        raise ModelError(
            f"The model imports the standard operators in several versions: {', '.join(map(str, sorted(versions)))}.",
            place=place, remedy="Keep one of them in model.opset_import.",
        )
    (version,) = versions
    if version > newest:
        raise ModelError(
            f"The model's opset is {version}, and onnx {onnx.__version__} knows up to {newest}.", place=place,
            remedy="Install a newer onnx, or export the model with an older opset.",
        )
    if version < OLDEST_OPSET:
        raise ModelError(
            f"The model's opset is {version}; onnxfuse works on {OLDEST_OPSET} and newer.", place=place,
            remedy="Convert the model: onnx.version_converter.convert_version(onnx.load(path), 17).",
        )


def _check_tensors(model: LoadedModel) -> None:
    sizes: dict[str, int] = {}
    for function in model.proto.functions:
        for tensor in node_tensors(function.node):
            _check_tensor(tensor, model, sizes)
    for tensor in tensors(model.proto.graph):
        _check_tensor(tensor, model, sizes)


def _check_tensor(tensor: onnx.TensorProto, model: LoadedModel, sizes: dict[str, int]) -> None:
    place = f"tensor '{tensor.name}'"
    known = onnx.TensorProto.DataType.values()
    if tensor.data_type not in known or tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise ModelError(
            f"Tensor '{tensor.name}' has an element type, {tensor.data_type}, that onnx {onnx.__version__} does not "
            "know.", place=place, remedy="Install a newer onnx, or export the model again.",
        )
    if any(size < 0 for size in tensor.dims):
        raise ModelError(
            f"Tensor '{tensor.name}' has the sizes {list(tensor.dims)}, of which one is below zero.", place=place,
            remedy="Export the model again.",
        )
    if is_external(tensor):
        _check_external(tensor, model, sizes)
    elif tensor.HasField("raw_data") and not CHECKED_BYTES < (needed := tensor_bytes(tensor)) <= LARGEST:
        # Larger contents are left to ONNX Runtime to check: to look at them is to copy them.  The largest have no file.
        found = len(tensor.raw_data)
        if needed != found and element_bits(tensor.data_type):
            raise ModelError(
                f"Tensor '{tensor.name}' holds {found} bytes, and its type and sizes need {needed}.", place=place,
                remedy="Export the model again.",
            )


def _check_external(tensor: onnx.TensorProto, model: LoadedModel, sizes: dict[str, int]) -> None:
    location, offset, length = external_span(tensor)
    place = f"tensor '{tensor.name}'"
    if location not in sizes:
        path = external_path(tensor, location, model.folder)
        if not os.path.isfile(path):  # and False for names that no file can have
            raise ExternalDataError(
                f"The external data file '{location}' is missing.", place=place,
                remedy=f"Put the file back beside the model, at {path}.",
            )
        sizes[location] = path.stat().st_size
    if length < tensor_bytes(tensor):
        raise ExternalDataError(
            f"Tensor '{tensor.name}' needs {tensor_bytes(tensor)} bytes and refers to {length} in '{location}'.",
            place=place, remedy="Export the model again.",
        )
    if offset + length > sizes[location]:
        raise ExternalDataError(
            f"The external data file '{location}' is too short: tensor '{tensor.name}' ends at byte "
            f"{offset + length}, and the file at {sizes[location]}.", place=place,
            remedy="Copy the file again, in full; it was cut short or belongs to another model.",
        )
