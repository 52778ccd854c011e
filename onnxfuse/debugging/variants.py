"""The fused model with some of its fused nodes put back, and what its outputs are beside the original's.

Put back are the nodes of the original model, not of the function in the file: a damaged function is a fault like any
other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxfuse.debugging.search import Outcome
from onnxfuse.errors import KernelError, ModelError, VerificationError
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.constants import read
from onnxfuse.graph.model import Body
from onnxfuse.graph.order import bodies_in, graphs_of
from onnxfuse.lowering.launch import DOMAIN
from onnxfuse.measuring.compare import compare
from onnxfuse.rewriting import FusedNode, planned_form, read_fused
from onnxfuse.verifying.capture import run_model
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim


@dataclass(frozen=True)
class Replaced:
    """What stands in the original model for a fused node: positions of nodes, names of initialisers; names that the
    nodes read from the graphs around."""

    nodes: tuple[int, ...]
    constants: tuple[str, ...]
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Scope:
    """A graph of the original: positions of its nodes by what they compute, its initialisers, what is around it."""

    label: str
    graph: onnx.GraphProto
    producer: Mapping[str, int]
    tensors: Mapping[str, TensorProto]
    inputs: frozenset[str]
    around: _Scope | None

    @staticmethod
    def of(label: str, graph: onnx.GraphProto, around: _Scope | None) -> _Scope:
        return _Scope(
            label, graph, {name: place for place, node in enumerate(graph.node) for name in node.output},
            {tensor.name: tensor for tensor in graph.initializer}, frozenset(info.name for info in graph.input), around,
        )

    def holder(self, name: str) -> _Scope | None:
        """This graph or the one around it that the value is of; None where a node of the graph cannot read it."""
        scope: _Scope | None = self
        while scope is not None and not (name in scope.producer or name in scope.tensors or name in scope.inputs):
            scope = scope.around
        return scope


def _label(body: Body | None) -> str:
    return "" if body is None else body.label


class Variants:
    """Variants of a fused model."""

    def __init__(self, original: LoadedModel, fused: LoadedModel) -> None:
        """Find every fused node's nodes in the original.

        Raises:
            ModelError: the original lacks a value that a fused node reads or computes.
        """
        self._original = original = planned_form(original, fused.proto, whole=True)  # what the fused nodes speak of
        self._place = None if fused.path is None else str(fused.path)
        self.nodes = {node.name: node for node in read_fused(fused.proto)}
        self._scopes: dict[str, _Scope] = {}
        for body, graph in graphs_of(original.proto):
            self._scopes[_label(body)] = _Scope.of(_label(body), graph, self._around(body))
        self.replaced = {name: self._find(node) for name, node in self.nodes.items()}

    def labels(self, name: str) -> tuple[str, ...]:
        """What the original nodes of a fused one are called; constants left out."""
        graph = self._scope(self.nodes[name]).graph
        nodes = [graph.node[place] for place in self.replaced[name].nodes]
        return tuple(node.name or f"{node.op_type} -> {node.output[0]}" for node in nodes if node.op_type != "Constant")

    def model(self, fused: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
        """``fused`` (with its weights wherever they are) with all fused nodes but the ``kept`` put back."""
        result = onnx.ModelProto()
        result.CopyFrom(fused)
        names = frozenset(self.nodes.keys() - set(kept))
        self._put_back(result.graph, None, names)
        parts = {_label(body): graph for body, graph in graphs_of(result)}
        for name in sorted(names):
            for constant in self.replaced[name].around:
                self._give(constant, self._scope(self.nodes[name]), parts)
        return result

    def _give(self, name: str, scope: _Scope, parts: Mapping[str, onnx.GraphProto]) -> None:
        """See that a graph around has a constant that left it because only fused nodes in bodies held it."""
        holder = scope.holder(name)
        if holder is None:
            return
        graph = parts[holder.label]
        present = {tensor.name for tensor in graph.initializer}
        present |= {output for node in graph.node for output in node.output}
        if name in present or name in holder.inputs:
            return
        if name in holder.tensors:
            graph.initializer.append(self._constant(holder.tensors[name]))
        else:
            graph.node.insert(0, holder.graph.node[holder.producer[name]])

    def _put_back(self, graph: onnx.GraphProto, body: Body | None, names: Collection[str]) -> None:
        """Put the named fused nodes back in a graph, and in the bodies in it."""
        for _, inside, inner in bodies_in(body, graph):
            self._put_back(inner, inside, names)
        back = [node.name for node in graph.node if node.name in names]
        if not back:
            return
        scope = self._scopes[_label(body)]
        known = {name for node in graph.node for name in node.output if name}
        known |= {tensor.name for tensor in graph.initializer}
        before = onnx.GraphProto(node=graph.node)
        del graph.node[:]
        for node in before.node:
            if node.name not in back or node.domain != DOMAIN:
                graph.node.append(node)
                continue
            known -= set(node.output)
            for place in self.replaced[node.name].nodes:
                original = scope.graph.node[place]
                if not known.issuperset(name for name in original.output if name):
                    graph.node.append(original)
                    known.update(name for name in original.output if name)
            for name in self.replaced[node.name].constants:
                if name not in known:
                    graph.initializer.append(self._constant(scope.tensors[name]))
                    known.add(name)

    def _constant(self, tensor: TensorProto) -> TensorProto:
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        inline: TensorProto = numpy_helper.from_array(read(tensor, self._original.folder), tensor.name)
        return inline

    def _around(self, body: Body | None) -> _Scope | None:
        """What is around a body; bodies come after what they are in."""
        if body is None:
            return None
        return self._scopes[_label(next((outer for outer, _ in graphs_of(self._original.proto)
                                         if outer is not None and outer.place == body.place[:-1]), None))]

    def _scope(self, node: FusedNode) -> _Scope:
        """The original graph that a fused node's nodes are in.

        Raises:
            ModelError: the original has no such body.
        """
        label = _label(node.body)
        if label not in self._scopes:
            raise ModelError(
                f"The fused node {node.name!r} is in {label!r}, and the original model has no such body.",
                place=self._place, remedy="Give the model that the file was fused from.",
            )
        return self._scopes[label]

    def _find(self, node: FusedNode) -> Replaced:
        scope = self._scope(node)
        edge = {name for name in node.inputs if name}
        positions: set[int] = set()
        constants: dict[str, None] = {}
        around: dict[str, None] = {}
        waiting = [name for name in node.outputs if name]
        for name in (*edge, *waiting):
            if scope.holder(name) is None:
                raise ModelError(
                    f"The fused node {node.name!r} speaks of {name!r}, and the original model has no such value.",
                    place=self._place, remedy="Give the model that the file was fused from.",
                )
        while waiting:
            name = waiting.pop()
            place = scope.producer.get(name)
            if name in edge and name not in node.outputs:
                continue
            if place is None:
                if name in scope.tensors:
                    constants[name] = None
                elif name not in scope.inputs:
                    around[name] = None
            elif place not in positions:
                positions.add(place)
                waiting += [name for name in scope.graph.node[place].input if name]
        return Replaced(tuple(sorted(positions)), tuple(constants), tuple(around))


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
