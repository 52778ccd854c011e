"""A model repository for Triton Inference Server: configuration, model and native library in one folder.

    REPOSITORY/NAME/config.pbtxt
                    libonnxfuse.so
                    VERSION/model.onnx, and its data file where it has weights outside

Triton's ONNX Runtime backend opens the library under the very path that stands in the configuration, and compares the
sizes of outputs with those that ONNX Runtime infers: https://github.com/triton-inference-server/onnxruntime_backend.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import onnx
import onnxruntime
from google.protobuf.text_encoding import CEscape

from onnxfuse.errors import KernelError, ModelError, OutputError
from onnxfuse.files import Part
from onnxfuse.graph import LoadedModel, Value
from onnxfuse.graph.sizes import type_name
from onnxfuse.operators import load_graph
from onnxfuse.rewriting import FusedNode, read_fused, save
from onnxfuse.runtime import library_path
from onnxfuse.verifying.sharing import without_weights

_FLOAT = {"float16": "FP16", "bfloat16": "BF16", "float": "FP32", "double": "FP64"}
TYPES = {**{name.lower(): f"TYPE_{name}" for name in (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "STRING")},
    **{name: f"TYPE_{other}" for name, other in _FLOAT.items()}}
"""Triton's element types by ONNX's; others it has not."""

CONFIGURATION, MODEL, LIBRARY = "config.pbtxt", "model.onnx", "libonnxfuse.so"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: of the model in the repository.
        architectures: GPUs whose kernels the model holds; none where it has no fused nodes.
        fused: how many fused nodes there are.
    """

    folder: Path
    architectures: tuple[str, ...]
    fused: int


@dataclass(frozen=True)
class RepositoryPlace:
    """Where a model goes.

    Attributes:
        repository: folder of all models.
        name, version: of this one.
        server: where the server sees the repository; its absolute path where None.
    """

    repository: Path
    name: str
    version: int = 1
    server: str | None = None

    @property
    def folder(self) -> Path:
        """Of the model."""
        return self.repository / self.name

    @property
    def library(self) -> str:
        """The library as the server opens it."""
        seen = PurePosixPath(os.path.abspath(self.repository) if self.server is None else self.server)
        return str(seen / self.name / LIBRARY)


def export(loaded: LoadedModel, place: RepositoryPlace, max_batch: int = 0) -> Exported:
    """Write a model to a repository; an older one of this name and version is replaced, the configuration last.

    Args:
        max_batch: largest batch that the server may put together from requests; 0 where requests come as they are.

    Raises:
        ModelError: Triton cannot serve such inputs or outputs, or there is no batch to put together.
        KernelError: fused nodes have no compiled kernels, which a server could not compile.
        OutputError: something cannot be written.
        RuntimeLibraryError: the native library was not built.
    """
    nodes = read_fused(loaded.proto)
    architectures = _architectures(nodes)
    tensors = _tensors(loaded)
    if max_batch:
        _check_batched(tensors)
    text = configuration(place.name, tensors, max_batch, [place.library] if nodes else [])
    version = place.folder / str(place.version)
    try:
        version.mkdir(parents=True, exist_ok=True)
        if nodes:
            _put(place.folder / LIBRARY, library_path())
    except OSError as error:
        raise _output_error(error, place.folder) from error
    save(_stated(loaded.proto, tensors), version / MODEL, source=loaded, external="copy")
    try:
        _put(place.folder / CONFIGURATION, text.encode())
    except OSError as error:
        raise _output_error(error, place.folder) from error
    return Exported(place.folder, architectures, len(nodes))


@dataclass(frozen=True)
class Tensor:
    """An input or output: sizes are -1 where they are decided by the request."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    is_input: bool

    @property
    def what(self) -> str:
        """How messages call it."""
        return f"The {'input' if self.is_input else 'output'} '{self.name}'"


def _tensors(loaded: LoadedModel) -> list[Tensor]:
    graph = load_graph(loaded)
    given = {tensor.name for tensor in loaded.proto.graph.initializer}
    given |= {tensor.values.name for tensor in loaded.proto.graph.sparse_initializer}
    place = None if loaded.path is None else str(loaded.path)
    kinds = {info.name: info.type.WhichOneof("value") for info in
             (*loaded.proto.graph.input, *loaded.proto.graph.output)}
    inputs = [_tensor(value, kinds, True, place) for value in graph.inputs if value.name not in given]
    outputs = [_tensor(value, kinds, False, place) for value in graph.outputs]
    # With what we know stated: of an output whose rank it does not know, ONNX Runtime says what it says of a scalar.
    inferred = _inferred(_stated(loaded.proto, outputs))
    return [*inputs, *(replace(tensor, sizes=inferred.get(tensor.name, tensor.sizes)) for tensor in outputs)]


def _inferred(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Sizes of outputs as ONNX Runtime infers them, which knows more of some models than we do; empty where it has no
    kernels for the model on the CPU.  Large weights are left out: no size hangs on them."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            without_weights(proto).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # ONNX Runtime has an exception type per status
        return {}
    return {each.name: tuple(size if isinstance(size, int) else -1 for size in each.shape)
            for each in session.get_outputs()}


def _tensor(value: Value, kinds: dict[str, str], is_input: bool, place: str | None) -> Tensor:
    """
    Raises:
        ModelError: Triton has no such values.
    """
    dtype = type_name(value.dtype)
    shape = value.shape if value.declared is None or not is_input else value.declared
    found = Tensor(value.name, TYPES.get(dtype, ""),
                   tuple(-1 if size.value is None else size.value for size in shape or ()), is_input)
    wrong = None
    if kinds.get(value.name, "tensor_type") != "tensor_type":
        wrong = f"is no tensor but a {kinds[value.name].removesuffix('_type')}"
    elif not found.dtype:
        wrong = f"has the element type {dtype}"
    elif shape is None:
        wrong = "has no known number of axes"
    elif 0 in found.sizes:
        wrong = "has no elements"
    if wrong is not None:
        raise ModelError(
            f"{found.what} {wrong}, which Triton Inference Server does not serve.", place=place,
            remedy="Export the model with other inputs and outputs.",
        )
    return found


def _check_batched(tensors: Iterable[Tensor]) -> None:
    """
    Raises:
        ModelError: the first axis of some input or output is no batch.
    """
    for tensor in tensors:
        if tensor.sizes[:1] != (-1,):
            raise ModelError(
                f"{tensor.what} has no symbolic first axis, so that the server cannot put requests together.",
                remedy="Leave --max-batch out, or export the model with a dynamic batch as the first axis of all.",
            )


def _architectures(nodes: Sequence[FusedNode]) -> tuple[str, ...]:
    """Those that every kernel was compiled for.

    Raises:
        KernelError: there is none.
    """
    kernels = [node for node in nodes if node.source]
    if not kernels:
        return ()
    common = [name for name in kernels[0].architectures if all(name in node.architectures for node in kernels)]
    if not common:
        raise KernelError(
            "There is no architecture that every fused node holds a compiled kernel for, and Triton Inference Server "
            "cannot compile any.", remedy="Embed them for the server's GPUs: onnxfuse optimize --embed sm_80,sm_90.",
        )
    return tuple(common)


def configuration(name: str, tensors: Collection[Tensor], max_batch: int, libraries: Iterable[str]) -> str:
    """The text of config.pbtxt, a ``ModelConfig`` of Triton's schema as protobuf writes text."""
    lines = [f"name: {_quoted(name)}", 'backend: "onnxruntime"', f"max_batch_size: {max_batch}"]
    for tensor in tensors:
        lines += ["input {" if tensor.is_input else "output {", f"  name: {_quoted(tensor.name)}",
                  f"  data_type: {tensor.dtype}", *_sizes(tensor.sizes[1:] if max_batch else tensor.sizes, max_batch),
                  "}"]
    lines += ["instance_group {", "  kind: KIND_GPU", "}"]
    if max_batch > 1:
        lines += ["dynamic_batching {", "}"]
    for library in libraries:
        lines += ["model_operations {", f"  op_library_filename: {_quoted(library)}", "}"]
    return "\n".join(lines) + "\n"


def _sizes(sizes: Sequence[int], max_batch: int) -> list[str]:
    """Triton has no tensors of rank 0: they are one element, which with batches is taken for none by a reshape."""
    if sizes:
        return [f"  dims: {size}" for size in sizes]
    return ["  dims: 1", *(["  reshape {", "  }"] if max_batch else [])]


def _quoted(text: str) -> str:
    return f'"{CEscape(text, True)}"'


def _stated(proto: onnx.ModelProto, tensors: Iterable[Tensor]) -> onnx.ModelProto:
    """The model with the sizes of its outputs as they were inferred: what ONNX Runtime infers on CUDA, where fused
    nodes are operators of the library, may be less than through their functions, and the configuration is compared
    with it."""
    sizes = {tensor.name: tensor.sizes for tensor in tensors if not tensor.is_input}
    if all(_declared(info) == sizes[info.name] for info in proto.graph.output):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for info in copy.graph.output:
        if _declared(info) is None:
            info.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(
                dim=[onnx.TensorShapeProto.Dimension() for _ in sizes[info.name]]))
        for dimension, size in zip(info.type.tensor_type.shape.dim, sizes[info.name], strict=True):
            if size != -1:
                dimension.dim_value = size
    return copy


def _declared(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    if not info.type.tensor_type.HasField("shape"):
        return None
    return tuple(each.dim_value if each.HasField("dim_value") else -1 for each in info.type.tensor_type.shape.dim)


def _put(target: Path, content: bytes | Path) -> None:
    """A file with this content, or that of another file, whole or not at all."""
    with Part(target) as part:
        if isinstance(content, Path):
            with content.open("rb") as file:
                shutil.copyfileobj(file, part.file)
        else:
            part.file.write(content)
        os.fchmod(part.file.fileno(), 0o755 if isinstance(content, Path) else 0o644)
        part.finish()
        part.put(target)


def _output_error(error: OSError, folder: Path) -> OutputError:
    return OutputError(
        f"The repository cannot be written: {error.strerror or error}.", place=str(folder),
        remedy="Choose a folder that you may write to and that has room.",
    )


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names that are folders and parts of URLs as they stand."""

__all__ = ["NAME", "Exported", "RepositoryPlace", "configuration", "export"]
