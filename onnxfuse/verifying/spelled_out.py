"""Operators with values of their own inside, as the standard operators that they stand for.

Such an operator computes in float32 or wider wherever it is evaluated, and on a GPU it keeps what is inside in 16 bits,
as its kernel does: what is infinite there is finite in a reference that runs the operator itself in float32.  So
references never do (``reference``): what they evaluate is spelled out, in whatever type that is, and where the
original's own result is wanted the values that lie in memory inside are rounded as those between nodes are.

Of the runtime's own operators are here:

    Attention             queries, keys and values by one product with a bias, then as the next
    MultiHeadAttention    queries by keys, scaled, biased, masked; a softmax; values weighed by it

What ONNX Runtime's CPU provider gives for them in float32 is what these say: masks add a number, and a query that sees
no key has what all keys give.  Forms that no kernel holds, those with keys of the past above all, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxfuse.graph.order import MICROSOFT, STANDARD_DOMAINS
from onnxfuse.ir.scalars import TYPES, limits
from onnxfuse.rewriting import value_types
from onnxfuse.verifying.spelling import Spelling, with_nodes

Key = tuple[str, str]
"""Domain and name of an operator."""

_INT64 = TensorProto.INT64

_ENDLESS = 1 << 62
"""Beyond every axis."""


@dataclass(frozen=True)
class Site:
    """A node that is spelled out, where it stands.

    Attributes:
        node: it; to: the nodes in its place.
        kind: the type that floats are computed in; stored: the narrower one in which values inside lie in memory, None
            where they are to be exact; scores: whether scores do, too.
        ranks: axes of the model's values, as far as they are known.
    """

    node: onnx.NodeProto
    to: Spelling
    kind: int
    stored: int | None
    scores: bool
    ranks: Mapping[str, int]

    def operand(self, place: int) -> str:
        """The name of an operand, "" where there is none."""
        return str(self.node.input[place]) if place < len(self.node.input) else ""

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute's value."""
        found = (helper.get_attribute_value(each) for each in self.node.attribute if each.name == name)
        return next(found, default)

    def number(self, value: float) -> str:
        """A scalar of the type that is computed in; the nearest that it has."""
        least, most = limits(self.kind)
        endless = value in (float("inf"), float("-inf"))
        return self.to.number(value if endless else min(max(value, least), most), self.kind)

    def kept(self, value: str) -> str:
        """A value as it lies in memory inside the operator."""
        if self.stored is None:
            return value
        narrow = self.to.step("Cast", value, to=self.stored)
        return self.to.step("Cast", narrow, to=self.kind)

    def size(self, of: str, axis: int, axes: int = 1) -> str:
        """So many sizes from an axis on, as a list."""
        to = self.to
        return to.step("Slice", to.step("Shape", of), to.integers(axis), to.integers(axis + axes))

    def part(self, of: str, begin: str, end: str, axis: int) -> str:
        """A part along an axis, between two lists of one integer."""
        return self.to.step("Slice", of, begin, end, self.to.integers(axis))

    def laid(self, value: str, *sizes: str, result: str = "") -> str:
        """A value with these sizes, lists of integers: of an empty tensor none could be left open."""
        return self.to.step("Reshape", value, self.to.step("Concat", *sizes, axis=0), result=result)


Way = Callable[[Site], bool]
"""Spells a node out; whether it has its form."""


def spelled_out(
    model: onnx.ModelProto, stored: Mapping[str, int] | None = None, scores: bool = True
) -> onnx.ModelProto:
    """The model with such operators spelled out, in the types that it has; the model itself where it has none.

    Names of what is inside follow from a node's first result, so that they are the same in whatever type a body is.

    Args:
        stored: by a node's first result, the type in which values inside lie in memory where that is not the one that
            they are computed in.
        scores: whether scores of an attention lie there, too, as the runtime's kernels for it have them that are not
            one; in the others, as in ours, they are float32.
    """
    if not any((node.domain, node.op_type) in WAYS for node in model.graph.node):
        return model
    opset = next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), 1)
    types, ranks = value_types(model), _ranks(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        way = WAYS.get((node.domain, node.op_type))
        kind = types.get(node.input[0], 0) if way is not None and node.input else 0
        if way is None or kind not in TYPES or not TYPES[kind].is_floating:
            nodes.append(node)
            continue
        name = str(node.output[0])
        site = Site(node, Spelling(f"{name}.inside", opset), kind, (stored or {}).get(name), scores, ranks)
        nodes.extend(site.to.nodes if way(site) else [node])
    return with_nodes(model, nodes)


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {info.name: len(info.type.tensor_type.shape.dim)
             for info in (*graph.input, *graph.output, *graph.value_info) if info.type.tensor_type.HasField("shape")}
    return found | {tensor.name: len(tensor.dims) for tensor in graph.initializer}


def _packed(site: Site) -> bool:
    """``com.microsoft.Attention``: rows, weights, bias, mask, keys of the past, bias of scores, their number."""
    rows, weights, bias, mask, past, scores, length = (site.operand(place) for place in range(7))
    if past or length or any(site.node.output[1:]) or site.attribute("do_rotary", 0) or not _is_known(site, mask):
        return False
    to = site.to
    made = site.kept(to.step("MatMul", rows, weights))
    if bias:
        made = site.kept(to.step("Add", made, bias))
    given = site.attribute("qkv_hidden_sizes", None)
    third = "" if given else to.step("Div", site.size(weights, 1), to.integers(3))
    begin, sides = to.integers(0), []
    for place in range(3):
        end = to.step("Add", begin, to.integers(given[place]) if given else third)
        sides.append(_headed(site, site.part(made, begin, end, 2)))
        begin = end
    _attended(site, sides, mask, scores)
    return True


def _multi_head(site: Site) -> bool:
    """``com.microsoft.MultiHeadAttention``: queries, keys, values, their bias, mask, bias of scores, the past."""
    *sides, bias, mask, scores = (site.operand(place) for place in range(6))
    ranks = [site.ranks.get(side) for side in sides]
    if any(site.node.input[6:]) or any(site.node.output[1:]) or not _is_known(site, mask):
        return False
    if ranks not in ([3, 3, 3], [3, 4, 4]):
        return False
    if bias:
        begin, added = site.to.integers(0), []
        for side in sides:
            end = site.to.step("Add", begin, site.size(side, 2))
            added.append(site.kept(site.to.step("Add", side, site.part(bias, begin, end, 0))))
            begin = end
        sides = added
    whole = [_headed(site, side) if rank == 3 else side for side, rank in zip(sides, ranks, strict=True)]
    _attended(site, whole, mask, scores)
    return True


WAYS: Mapping[Key, Way] = {
    (MICROSOFT, "Attention"): _packed,
    (MICROSOFT, "MultiHeadAttention"): _multi_head,
}
"""By operator: what spells it out."""


def _is_known(site: Site, mask: str) -> bool:
    """Whether a mask, where there is one, has axes of which it is known what they are."""
    return not mask or site.ranks.get(mask) in (1, 2, 3)


def _headed(site: Site, side: str) -> str:
    """Rows as (batch, heads, rows, a head's columns)."""
    to, count = site.to, site.to.integers(site.attribute("num_heads", 0))
    columns = to.step("Div", site.size(side, 2), count)
    return to.step("Transpose", site.laid(side, site.size(side, 0, 2), count, columns), perm=[0, 2, 1, 3])


def _attended(site: Site, sides: Sequence[str], mask: str, bias: str) -> None:
    """What heads of queries, keys and values make, each (batch, heads, rows, a head's columns)."""
    to, (queries, keys, values) = site.to, sides
    scores = to.step("MatMul", queries, to.step("Transpose", keys, perm=[0, 1, 3, 2]))
    if scale := site.attribute("scale", 0.0):
        scores = to.step("Mul", scores, site.number(scale))
    else:
        scores = to.step("Div", scores, to.step("Sqrt", to.step("Cast", site.size(queries, 3), to=site.kind)))
    if site.scores:
        scores = site.kept(scores)
    if bias:
        scores = to.step("Add", scores, bias)
    if mask:
        hidden = site.number(site.attribute("mask_filter_value", -10000.0))
        scores = to.step("Add", scores, to.step("Where", _seen(site, mask, keys), site.number(0.0), hidden))
    if site.attribute("unidirectional", 0):
        later = to.step("Less", site.laid(_places(site, queries), to.integers(-1, 1)), _places(site, keys))
        scores = to.step("Where", later, site.number(float("-inf")), scores)
    made = to.step("MatMul", site.kept(to.step("Softmax", scores, axis=3)), values)
    columns = to.step("Mul", site.size(values, 1), site.size(values, 3))
    rows = to.step("Transpose", made, perm=[0, 2, 1, 3])
    site.laid(rows, site.size(rows, 0, 2), columns, result=site.node.output[0])


def _places(site: Site, side: str) -> str:
    """The numbers of a side's rows."""
    to = site.to
    count = to.step("Gather", to.step("Shape", side), to.number(2, _INT64))
    return to.step("Range", to.number(0, _INT64), count, to.number(1, _INT64))


def _seen(site: Site, mask: str, keys: str) -> str:
    """Whether a key is seen: by a number for each key (batch, keys), or for each query too; or by where keys end in
    each batch, and behind all these perhaps where they begin."""
    to, one, rank = site.to, site.to.integers(1), site.ranks[mask]
    whole = to.step("Cast", mask, to=_INT64)
    if rank > 1:
        between = (one, one) if rank == 2 else (one, site.size(mask, 1))
        laid = site.laid(whole, site.size(mask, 0), *between, site.size(mask, rank - 1))
        return to.step("Less", to.number(0, _INT64), laid)
    batch, place = site.size(keys, 0), _places(site, keys)
    nowhere = to.step("Expand", to.number(0, _INT64), batch)
    ends = site.part(whole, to.integers(0), batch, 0)
    rest = site.part(to.step("Concat", whole, nowhere, axis=0), batch, to.integers(_ENDLESS), 0)
    begins = site.part(rest, to.integers(0), batch, 0)
    ends, begins = (site.laid(each, batch, to.integers(1, 1, 1)) for each in (ends, begins))
    return to.step("And", to.step("Less", place, ends), to.step("Not", to.step("Less", place, begins)))
