"""onnx's own inference, asked only what it lives to answer.

It is C++ in this process, and a few operators end the process (onnx 1.23): some where the type of an input is unknown,
some on attributes that break the rules of the standard, Slice on a size below zero, which the inference of other
operators gives for odd operands.  ``left_out`` tells which nodes to keep from it; their types stay unknown.

Where it is to follow the numbers in a value, so that it knows what a Reshape to computed sizes gives, it makes an
entry of 70 bytes of every element of every vector that an arithmetic operator reads, weights and signals too.  So it
first infers without, and then follows numbers through those nodes alone whose operands are known to have few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.graph.order import STANDARD_DOMAINS, subgraphs

LONGEST = 4096
"""Elements of a value whose numbers are followed."""

MOST_FOLLOWED = 1 << 22
"""Elements of all these values of a model."""

_RANK = 16
"""Elements that the result of a Shape counts for: ranks beyond are rare."""

_UNTYPED = frozenset({"EyeLike", "RegexFullMatch", "TreeEnsemble", "DictVectorizer", "LabelEncoder"})
"""Operators that end the process where the type of an input is unknown."""

_MADE_UP = "unk__"
"""What onnx calls sizes that it knows nothing of, with a number behind."""

FOLLOWED = frozenset({"Add", "Cast", "Concat", "Gather", "Mul", "Squeeze", "Sub", "Unsqueeze"})
"""Operators that numbers are followed through; Slice is one as well, and always left out."""

_EXPANDED = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
"""Operators that older versions of the standard infer by what they are composed of, such operators among it."""

_ALIKE = {"Add": "Div", "Mul": "Div", "Sub": "Div", "Cast": "RandomNormalLike"}
"""Operators whose types are inferred in the same way, without a number being followed."""


def left_out(node: onnx.NodeProto, typed: bool) -> bool:
    """Whether onnx's inference might not survive a node.

    Args:
        typed: whether every input is known to have a type, and no size is below zero.
    """
    if node.op_type in _UNTYPED or node.op_type == "Slice":
        return not typed
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Split":
        return bool(numbers.get("num_outputs", len(node.output)) != len(node.output))
    return bool(node.op_type == "GatherND" and numbers.get("batch_dims", 0) < 0)


def leave_out(nodes: Iterable[onnx.NodeProto]) -> None:
    """Rename, in place, operators that a whole model's inference might not survive: what no schema knows is skipped."""
    for node in nodes:
        for graph in subgraphs(node):
            leave_out(graph.node)
        if left_out(node, typed=False):
            node.op_type = f"{node.op_type}?"


def infer_model(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A model with the types that onnx infers, which is changed on the way; None where it infers none.

    The model is one whose large initialisers have turned into inputs.
    """
    leave_out(model.graph.node)
    for function in model.functions:
        leave_out(function.node)
    inferred = _inferred(model, follow=False)
    if inferred is None:
        return None
    numbers = _Numbers(inferred)
    numbers.exchange()
    if not numbers.followed:
        return inferred
    return _inferred(inferred, follow=True) or inferred


def _inferred(model: onnx.ModelProto, follow: bool) -> onnx.ModelProto | None:
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=follow)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, DecodeError, RuntimeError, ValueError):
        # Nothing is lost but hints: what onnx cannot infer stays unknown, and is left alone.  What it tells of the
        # innermost bodies may be nested too deep to be read.
        return None


class _Numbers:
    """How many numbers onnx would follow in the values of a model whose types it has inferred.

    ``followed`` tells, once operators were exchanged, whether it would follow any.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._left = MOST_FOLLOWED
        self.followed = False

    def exchange(self) -> None:
        """Exchange the operators, in place, through which onnx would follow numbers of values that may have many."""
        self._graph(self._model.graph, {}, frozenset())
        for function in self._model.functions:
            self._nodes(function.node, {}, frozenset())

    def _graph(self, graph: onnx.GraphProto, counts: Mapping[str, int], tables: frozenset[str]) -> None:
        """Args: what is known of values around: how many elements they have at most; names of those of several axes."""
        own = dict(counts)
        several = set(tables)
        for info in (*graph.input, *graph.value_info, *graph.output):
            own.pop(info.name, None)  # a value of the graph around may be called so
            several.discard(info.name)
            sizes = _sizes(info)
            if sizes is not None and len(sizes) > 1:
                several.add(info.name)
            elif sizes is not None and all(0 <= size <= LONGEST for size in sizes):
                own[info.name] = prod(sizes)
        for tensor in graph.initializer:
            if (count := _count(tensor.dims)) is not None:
                own[tensor.name] = count
        # Symbols that the first inference made up would hide what the second finds.
        for info in (*graph.value_info, *graph.output):
            for size in info.type.tensor_type.shape.dim:
                if size.dim_param.startswith(_MADE_UP):
                    size.ClearField("dim_param")
        self._nodes(graph.node, own, frozenset(several))

    def _nodes(self, nodes: Iterable[onnx.NodeProto], counts: dict[str, int], tables: frozenset[str]) -> None:
        for node in nodes:
            for graph in subgraphs(node):
                self._graph(graph, counts, tables)
            if node.domain not in STANDARD_DOMAINS:
                continue
            if node.op_type in ("Shape", "Size"):
                self.followed = True
                counts[node.output[0]] = _RANK if node.op_type == "Shape" else 1
            elif node.op_type == "Constant":
                if (held := _held(node)) is not None:
                    counts[node.output[0]] = held
            elif node.op_type in FOLLOWED:
                self._followed(node, counts, tables)
            elif node.op_type in _EXPANDED and not all(name in counts or name in tables for name in node.input):
                node.op_type = f"{node.op_type}?"

    def _followed(self, node: onnx.NodeProto, counts: dict[str, int], tables: frozenset[str]) -> None:
        if any(attribute.name == "axis" and attribute.i > 0 for attribute in node.attribute):
            return  # only vectors have numbers that are followed
        read = [counts.get(name) for name in node.input if name]
        known = [count for count in read if count is not None]
        count = sum(known) if node.op_type == "Concat" else prod(known)
        if len(known) == len(read) and count <= min(LONGEST, self._left):
            self.followed = True
            self._left -= count
            counts[node.output[0]] = max(count, counts.get(node.output[0], 0))
        elif len(known) == len(read) or not all(name in counts or name in tables for name in node.input if name):
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.name == "to":
                    attribute.name = "dtype"
            node.op_type = _ALIKE.get(node.op_type, f"{node.op_type}?")


def _sizes(info: onnx.ValueInfoProto) -> list[int] | None:
    """The sizes of a tensor, -1 for those that are not known; None for what is no tensor or has no rank."""
    if not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    return [size.dim_value if size.HasField("dim_value") else -1 for size in info.type.tensor_type.shape.dim]


def _count(dims: Iterable[int]) -> int | None:
    count = prod(dims)
    return count if 0 <= count <= LONGEST else None


def _held(node: onnx.NodeProto) -> int | None:
    """Elements of a Constant; None where they are many, or stand elsewhere."""
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
            return _count(attribute.t.dims)
        if attribute.name in ("value_int", "value_float", "value_string"):
            return 1
        if attribute.name in ("value_ints", "value_floats"):
            return _count([len(attribute.ints) + len(attribute.floats)])
    return None
