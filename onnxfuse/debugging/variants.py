"""The fused model with some of its fused nodes put back, and what its outputs are beside the original's.

Put back are the nodes of the original model, not of the function in the file: a damaged function is a fault like any
other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxfuse.debugging.search import Outcome
from onnxfuse.errors import KernelError, ModelError, VerificationError
from onnxfuse.graph import Graph, LoadedModel
from onnxfuse.graph.constants import read
from onnxfuse.lowering.launch import DOMAIN
from onnxfuse.measuring.compare import compare
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.verifying.capture import run_model
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim, sharing

TOLERANCES = {TensorProto.BFLOAT16: 5e-2, TensorProto.FLOAT16: 1e-2, TensorProto.FLOAT: 1e-3, TensorProto.DOUBLE: 1e-9}
"""Error of a model's output, over its largest magnitude, that is no sign of a fault when kernels run; by the narrowest
float type in the model.  Whole models amplify roundings: these are wide, and nodes are verified on their own first."""


def default_tolerance(graph: Graph) -> float:
    """The tolerance for a model, by the narrowest float type of its values."""
    kinds = {value.dtype for value in graph.values.values()}
    return next((limit for kind, limit in TOLERANCES.items() if kind in kinds), 0.0)


@contextmanager
def paired(original: LoadedModel, fused: LoadedModel) -> Iterator[tuple[Slim, Slim]]:
    """Both models for sessions, each with its weights where they are, or in one shared file where both hold theirs."""
    held = (original.proto.graph.initializer, fused.proto.graph.initializer)
    if any(tensor.data_location == TensorProto.EXTERNAL for tensors in held for tensor in tensors):
        yield Slim(original.proto, original.folder), Slim(fused.proto, fused.folder)
        return
    with sharing(original, fused.proto) as pair:
        yield pair


@dataclass(frozen=True)
class Replaced:
    """What stands in the original model for a fused node: positions of nodes, names of initialisers."""

    nodes: tuple[int, ...]
    constants: tuple[str, ...]


class Variants:
    """Variants of a fused model."""

    def __init__(self, original: LoadedModel, fused: LoadedModel) -> None:
        """Find every fused node's nodes in the original.

        Raises:
            ModelError: the original lacks a value that a fused node reads or computes.
        """
        self._original = original
        self._place = None if fused.path is None else str(fused.path)
        self.nodes = {node.name: node for node in read_fused(fused.proto)}
        self._producer = {name: place for place, node in enumerate(original.proto.graph.node) for name in node.output}
        self._tensors = {tensor.name: tensor for tensor in original.proto.graph.initializer}
        self.replaced = {name: self._find(node) for name, node in self.nodes.items()}

    def labels(self, name: str) -> tuple[str, ...]:
        """What the original nodes of a fused one are called; constants left out."""
        nodes = [self._original.proto.graph.node[place] for place in self.replaced[name].nodes]
        return tuple(node.name or f"{node.op_type} -> {node.output[0]}" for node in nodes if node.op_type != "Constant")

    def model(self, fused: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
        """``fused`` (with its weights wherever they are) with all fused nodes but the ``kept`` put back."""
        result = onnx.ModelProto()
        result.CopyFrom(fused)
        back = [node.name for node in fused.graph.node if node.name in self.nodes and node.name not in kept]
        if not back:
            return result
        known = {name for node in fused.graph.node for name in node.output if name}
        known |= {tensor.name for tensor in fused.graph.initializer}
        del result.graph.node[:]
        for node in fused.graph.node:
            if node.name not in back or node.domain != DOMAIN:
                result.graph.node.append(node)
                continue
            known -= set(node.output)
            for place in self.replaced[node.name].nodes:
                original = self._original.proto.graph.node[place]
                if not known.issuperset(name for name in original.output if name):
                    result.graph.node.append(original)
                    known.update(name for name in original.output if name)
            for name in self.replaced[node.name].constants:
                if name not in known:
                    result.graph.initializer.append(self._constant(name))
                    known.add(name)
        return result

    def _constant(self, name: str) -> TensorProto:
        tensor: TensorProto = self._tensors[name]
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        inline: TensorProto = numpy_helper.from_array(read(tensor, self._original.folder), name)
        return inline

    def _find(self, node: FusedNode) -> Replaced:
        graph = self._original.proto.graph
        edge = {name for name in node.inputs if name}
        positions: set[int] = set()
        constants: dict[str, None] = {}
        inputs = {info.name for info in graph.input}
        waiting = [name for name in node.outputs if name]
        for name in (*edge, *waiting):
            if name not in self._producer and name not in self._tensors and name not in inputs:
                raise ModelError(
                    f"The fused node {node.name!r} speaks of {name!r}, and the original model has no such value.",
                    place=self._place, remedy="Give the model that the file was fused from.",
                )
        while waiting:
            name = waiting.pop()
            place = self._producer.get(name)
            if name in edge and name not in node.outputs:
                continue
            if place is None:
                if name in self._tensors:
                    constants[name] = None
            elif place not in positions:
                positions.add(place)
                waiting += [name for name in graph.node[place].input if name]
        return Replaced(tuple(sorted(positions)), tuple(constants))


class Outputs:
    """An oracle: the outputs of variants beside the original's, on the same inputs and providers."""

    def __init__(self, pair: tuple[Slim, Slim], variants: Variants, runs: Sequence[tuple[Run, Sequence[Any]]],
                 tolerance: float | None, providers: Sequence[Any] = CPU, *, kernels: bool = False) -> None:
        """Args: runs: inputs with the original's outputs; tolerance: error over the output's largest magnitude, bit
        for bit where None; kernels: whether fused nodes run as kernels, or through their functions."""
        self._pair, self._variants, self._runs = pair, variants, runs
        self._tolerance, self._providers, self._kernels = tolerance, providers, kernels

    def __call__(self, kept: frozenset[str]) -> Outcome:
        original, fused = self._pair
        slim = Slim(self._variants.model(fused.model, kept), fused.folder)
        names = [info.name for info in original.model.graph.output]
        try:
            session = slim.fused_session(self._providers) if self._kernels else slim.session(self._providers)
            for run, wanted in self._runs:
                got = run_model(session, slim.model, run)
                detail = self._difference(dict(zip(names, wanted, strict=True)), dict(zip(names, got, strict=True)))
                if detail:
                    return Outcome(True, f"{detail} on {run.about}")
        except (VerificationError, KernelError) as error:
            return Outcome(True, f"the model does not run: {error.message}")
        return Outcome(False)

    def _difference(self, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str:
        """The output that is farthest off, or ""."""
        tensors = {name: array for name, array in wanted.items() if isinstance(array, np.ndarray)}
        other = [name for name in wanted if name not in tensors and repr(wanted[name]) != repr(got[name])]
        if other:
            return f"output {other[0]!r} differs"
        limit = self._tolerance
        if limit is None:
            tensors = {name: array for name, array in tensors.items() if not _same_bits(array, got[name])}
        errors = compare(tensors, got)
        worst = max(errors, key=lambda entry: entry.error, default=None)
        if worst is None or (limit is not None and worst.error <= limit):
            return ""
        allowed = "bit for bit" if limit is None else f"{limit:.1e} allowed"
        return f"output {worst.name!r} is off by {worst.error:.1e} of its largest magnitude ({allowed})"


def _same_bits(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
