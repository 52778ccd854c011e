"""Two models in memory with their weights in one file, so that sessions map them instead of copying them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import onnx
import onnxruntime

from onnxfuse.errors import VerificationError
from onnxfuse.graph.constants import is_external, tensor_bytes
from onnxfuse.graph.fields import without_initializers
from onnxfuse.graph.load import LoadedModel
from onnxfuse.graph.order import graphs_of
from onnxfuse.graph.store import are_same, is_stored, resolved, stretch, whole
from onnxfuse.rewriting.external import refer
from onnxfuse.verifying.bounds import NONE, Bounds, BoundSession, OutOfMemoryError, is_lack_of_memory
from onnxfuse.verifying.evaluate import CPU, exact_options, with_plain_borders
from onnxfuse.verifying.given_biases import with_biases

_SHARED_BYTES = 1024
"""Weights of more bytes than this leave the model."""
_PAGE = 4096
FOLDER = "session.model_external_initializers_file_folder_path"
"""Setting of a session: where the files are that hold weights."""

_WEIGHTS = "weights.bin"


class Earlier(Protocol):
    """Sessions that were made earlier."""

    def session(self, slim: Slim) -> BoundSession | None:
        """The plain one of this model on the CPU; None where there is none."""


@dataclass(frozen=True)
class Slim:
    """A model whose weights lie in files of ``folder``, and what its runs may take.

    Attributes:
        earlier: what may have its plain session on the CPU already.
    """

    model: onnx.ModelProto
    folder: Path | None
    bounds: Bounds = NONE
    earlier: Earlier | None = None

    def of(self, model: onnx.ModelProto) -> Slim:
        """Another model with weights in the same files."""
        return replace(self, model=model)

    def options(self, optimised: bool = False) -> onnxruntime.SessionOptions:
        """Session options that find the weights, and keep the graph as it is or leave the runtime to rewrite it."""
        options = exact_options()
        if optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        if self.folder is not None:
            options.add_session_config_entry(FOLDER, str(self.folder))
        return options

    def session(self, providers: Sequence[Any] = CPU, extra: Collection[tuple[str, int]] = (),
                optimised: bool = False) -> Any:
        """A plain ONNX Runtime session: fused nodes are inlined.

        Args:
            extra: (name, element type) of inner values to give out after the model's outputs.
            optimised: whether the runtime may rewrite the graph as it does in a deployment.

        Raises:
            VerificationError: ONNX Runtime refuses the model, or the time is up, or there is no room for its weights.
        """
        plain = list(providers) == CPU and not extra and not optimised
        earlier = self.earlier.session(self) if plain and self.earlier is not None else None
        if earlier is not None:
            return earlier
        model = self.model
        if extra:
            model = onnx.ModelProto()
            model.CopyFrom(self.model)
            for name, kind in extra:
                info = model.graph.output.add(name=name)
                info.type.tensor_type.elem_type = kind
        if list(providers) == CPU:
            model = with_biases(model)
        self.bounds.left()
        try:
            return BoundSession(onnxruntime.InferenceSession(
                with_plain_borders(model).SerializeToString(), self.options(optimised), providers=list(providers),
                enable_fallback=0), self.bounds)
        except Exception as error:  # ONNX Runtime has an exception type per status
            if is_lack_of_memory(error):
                raise OutOfMemoryError("The model's weights take more memory than it may hold here.") from error
            raise VerificationError(
                f"ONNX Runtime refuses the model: {error}",
                remedy="Try the model without onnxfuse first: onnxruntime.InferenceSession(path).",
            ) from error

    def fused_session(self, providers: Sequence[Any]) -> Any:
        """A session in which fused nodes run as kernels where CUDA is among the providers.

        Raises:
            VerificationError: ONNX Runtime refuses the model.
            KernelError: a kernel cannot be had.
        """
        from onnxfuse.runtime import session

        raw = with_plain_borders(self.model).SerializeToString()
        return BoundSession(session(raw, providers, self.options()), self.bounds)


class Weights:
    """A file with the weights of several models, in a temporary folder that is there until the context ends; threads
    write to it one after the other."""

    def __init__(self) -> None:
        self._stack, self._turn = ExitStack(), Lock()
        self._folder: Path | None = None
        self._known: dict[str, tuple[onnx.TensorProto, int, int]] = {}

    def __enter__(self) -> Weights:
        with suppress(OSError):
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxfuse-")))
            (self._folder / _WEIGHTS).touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file."""
        self._stack.close()

    def slim(self, model: onnx.ModelProto, folder: Path | None, bounds: Bounds = NONE) -> Slim:
        """A model with its weights in the file, those that another one has too written once.

        Weights that it keeps in files of its own, in ``folder``, stay there.  Where the temporary folder has no room,
        each session copies them.
        """
        if any(map(is_external, model.graph.initializer)):
            return Slim(whole(model), folder, bounds)
        with self._turn:
            if self._folder is not None:
                try:
                    with (self._folder / _WEIGHTS).open("r+b") as file:
                        file.seek(0, os.SEEK_END)
                        slim = _slim(model, file, self._known)
                    return Slim(slim, self._folder, bounds)
                except OSError:
                    self._folder = None  # what of them is in the file is not known
        return Slim(whole(model), None, bounds)


@contextmanager
def sharing(loaded: LoadedModel, fused: onnx.ModelProto, bounds: Bounds = NONE, folder: Path | None = None
            ) -> Iterator[tuple[Slim, Slim]]:
    """The original and the fused model with the weights of both in one place, while the context lasts.

    Args:
        folder: where the fused model's files are; the original's where None.
    """
    with Weights() as weights:
        yield weights.slim(loaded.proto, loaded.folder, bounds), weights.slim(fused, folder or loaded.folder, bounds)


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of a model's weights, strings left out."""
    return sum(tensor_bytes(tensor) for _, graph in graphs_of(model) for tensor in graph.initializer)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its larger weights as graph inputs: what ``onnx.checker`` can check of any size."""
    result = without_initializers(model)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.raw_data) > _SHARED_BYTES:
            if all(info.name != tensor.name for info in result.graph.input):
                result.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            result.graph.initializer.append(tensor)
    return result


def _slim(model: onnx.ModelProto, file: Any, known: dict[str, tuple[onnx.TensorProto, int, int]]) -> onnx.ModelProto:
    """The model; ``known``: tensors in the file by name, each with the bytes' place and length there."""
    result = without_initializers(model)
    for tensor in model.graph.initializer:
        if not is_stored(tensor) and len(tensor.raw_data) <= _SHARED_BYTES:
            result.graph.initializer.append(tensor)
            continue
        earlier, offset, length = known.get(tensor.name, (None, 0, 0))
        if earlier is None or not are_same(earlier, tensor):
            offset = -(-file.tell() // _PAGE) * _PAGE
            file.seek(offset)
            inside = stretch(tensor)
            length = sum(map(file.write, (resolved(tensor).raw_data,) if inside is None else inside.chunks()))
            known.setdefault(tensor.name, (tensor, offset, length))
        reference = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        refer(reference, _WEIGHTS, offset, length)
        result.graph.initializer.append(reference)
    return result
