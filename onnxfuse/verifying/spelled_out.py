"""Operators with values of their own inside, as the standard operators that they stand for.

Such an operator computes in float32 or wider wherever it is evaluated, and on a GPU it keeps what is inside in 16 bits,
as its kernel does: what is infinite there is finite in a reference that runs the operator itself in float32.  So
references never do (``reference``): what they evaluate is spelled out, in whatever type that is, and where the
original's own result is wanted the values that lie in memory inside are rounded as those between nodes are.

Of the runtime's own operators are here:

    Attention             queries, keys and values by one product with a bias, then as the next
    MultiHeadAttention    queries by keys, scaled, biased, masked; a softmax; values weighed by it
    GroupQueryAttention   new keys and values behind those of the past, and queries by these; rotated, in a window

What ONNX Runtime's CPU provider gives for them in float32 is what these say: masks add a number, and a query that sees
no key has what all keys give.  Of rows of a cache that no sequence has its providers differ: here they are what the
past has there, or zero.  Forms that no kernel holds, as the first two with keys of the past, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


def _grouped(site: Site) -> bool:
    """``com.microsoft.GroupQueryAttention``: queries, keys, values, both of the past, where sequences end, the longest
    one's length, cosines and sines."""
    to, (first, keys, values, *past, ends, total, cosines, sines) = site.to, map(site.operand, range(9))
    plain = all(site.attribute(name, default) == default for name, default in (
        ("causal", 1), ("sliding_window_cache", 0), ("k_quant_type", b"NONE"), ("v_quant_type", b"NONE")))
    if any(site.node.input[9:]) or any(site.node.output[3:]) or not all(past) or not plain or (
            site.attribute("smooth_softmax", -1) == 1):
        return False
    count, own = (int(site.attribute(name, 0)) for name in ("num_heads", "kv_num_heads"))
    sides = [first, keys, values] if keys else _unpacked(site, first, (count, own, own))
    queries, keys, values = (_by_heads(site, side, heads) for side, heads in zip(sides, (count, own, own), strict=True))
    length, total = site.size(queries, 2), to.step("Reshape", to.step("Cast", total, to=_INT64), to.integers(1))
    new = to.step("Add", to.step("Cast", ends, to=_INT64), to.step("Sub", to.integers(1), length))
    starts = _between(to, new, to.integers(0), to.step("Sub", total, length))
    starts = to.step("Reshape", starts, to.integers(-1, 1))  # (batch, 1), as in what follows
    if site.attribute("do_rotary", 0):
        places = to.step("Add", starts, _counted(to, length))
        queries, keys = (site.kept(_rotated(site, each, places, (cosines, sines))) for each in (queries, keys))
    results = [*site.node.output[1:3], "", ""][:2]
    caches = [_written(site, old, rows, starts, (total, result))
              for old, rows, result in zip(past, (keys, values), results, strict=True)]
    sides = [queries]
    for cache in caches:
        seen = site.part(cache, to.integers(0), total, 2)
        shared = to.step("Reshape", seen, to.step("Concat", site.size(seen, 0, 2), to.integers(1), site.size(
            seen, 2, 2), axis=0))
        wide = to.step("Expand", shared, to.integers(1, 1, count // own, 1, 1))
        sides.append(site.laid(wide, site.size(seen, 0), to.integers(count), site.size(seen, 2, 2)))
    _attended(site, sides, "", "", starts)
    return True


def _unpacked(site: Site, packed: str, heads: Sequence[int]) -> list[str]:
    """Queries, keys and values side by side, of so many heads each."""
    to, begin, sides = site.to, site.to.integers(0), []
    column = to.step("Div", site.size(packed, 2), to.integers(sum(heads)))
    for count in heads:
        end = to.step("Add", begin, to.step("Mul", column, to.integers(count)))
        sides.append(site.part(packed, begin, end, 2))
        begin = end
    return sides


def _between(to: Spelling, of: str, least: str, most: str) -> str:
    """Integers, none above the most, and then none below the least."""
    below = to.step("Where", to.step("Less", most, of), most, of)
    return to.step("Where", to.step("Less", below, least), least, below)


def _counted(to: Spelling, count: str) -> str:
    """From zero up to a list of one integer."""
    end = to.step("Squeeze", count) if to.opset < 13 else to.step("Squeeze", count, to.integers(0))
    return to.step("Range", to.number(0, _INT64), end, to.number(1, _INT64))


def _rotated(site: Site, side: str, places: str, tables: Sequence[str]) -> str:
    """Rows (batch, heads, rows, columns) turned by the angles of their places (batch, rows)."""
    to, one = site.to, site.to.integers(1)
    half, pairs = site.size(tables[0], 1), bool(site.attribute("rotary_interleaved", 0))
    ends = (to.integers(0), to.step("Mul", half, to.integers(2)), to.integers(_ENDLESS))
    turned, rest = (site.part(side, begin, end, 3) for begin, end in pairwise(ends))
    two = to.integers(2)
    split = site.laid(turned, site.size(turned, 0, 3), *((half, two) if pairs else (two, half)))
    axis, shape = 4 if pairs else 3, (half, one) if pairs else (one, half)
    x, y = (site.part(split, to.integers(place), to.integers(place + 1), axis) for place in range(2))
    cosine, sine = (site.laid(to.step("Gather", table, places), site.size(places, 0), one, site.size(places, 1), *shape)
                    for table in tables)
    parts = (to.step("Sub", to.step("Mul", x, cosine), to.step("Mul", y, sine)),
             to.step("Add", to.step("Mul", y, cosine), to.step("Mul", x, sine)))
    made = to.step("Reshape", to.step("Concat", *parts, axis=axis), to.step("Shape", turned))
    return to.step("Concat", made, rest, axis=3)


def _written(site: Site, past: str, rows: str, starts: str, about: tuple[str, str]) -> str:
    """A cache with new rows (batch, heads, rows, columns) from where they start (batch, 1); ``about``: the longest
    sequence's length, and the name of the cache, if it has one."""
    to, (total, result) = site.to, about
    length, old, one = site.size(rows, 2), site.size(past, 2), to.integers(1)
    more = _between(to, to.step("Sub", total, old), to.integers(0), total)
    shape = to.step("Concat", site.size(past, 0, 2), more, site.size(past, 3), axis=0)
    base = to.step("Concat", past, to.step("Expand", site.number(0.0), shape), axis=2)
    places = to.step("Sub", _counted(to, to.step("Add", old, more)), starts)
    inside = to.step("And", to.step("Not", to.step("Less", places, to.integers(0))), to.step("Less", places, length))
    own = _between(to, places, to.integers(0), to.step("Sub", length, one))
    own, inside = (site.laid(each, site.size(each, 0), one, site.size(each, 1), one) for each in (own, inside))
    spread = to.step("GatherElements", rows, to.step("Expand", own, to.step("Shape", base)), axis=2)
    return to.step("Where", inside, spread, base, result=result)


WAYS: Mapping[Key, Way] = {
    (MICROSOFT, "Attention"): _packed,
    (MICROSOFT, "MultiHeadAttention"): _multi_head,
    (MICROSOFT, "GroupQueryAttention"): _grouped,
}
"""By operator: what spells it out."""


def _is_known(site: Site, mask: str) -> bool:
    """Whether a mask, where there is one, has axes of which it is known what they are."""
    return not mask or site.ranks.get(mask) in (1, 2, 3)


def _headed(site: Site, side: str) -> str:
    """Rows as (batch, heads, rows, a head's columns)."""
    return _by_heads(site, side, site.attribute("num_heads", 0))


def _by_heads(site: Site, side: str, heads: int) -> str:
    """The same of so many heads."""
    to, count = site.to, site.to.integers(heads)
    columns = to.step("Div", site.size(side, 2), count)
    return to.step("Transpose", site.laid(side, site.size(side, 0, 2), count, columns), perm=[0, 2, 1, 3])


def _attended(site: Site, sides: Sequence[str], mask: str, bias: str, starts: str = "") -> None:
    """What heads of queries, keys and values make, each (batch, heads, rows, a head's columns); ``starts``: the place
    of each sequence's first query among the keys (batch, 1), which queries see up to their own."""
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
    if cap := site.attribute("softcap", 0.0):
        scores = to.step("Mul", to.step("Tanh", to.step("Div", scores, site.number(cap))), site.number(cap))
    if starts:
        scores = to.step("Where", _seen_from(site, starts, queries, keys), scores, site.number(float("-inf")))
    if site.attribute("unidirectional", 0):
        later = to.step("Less", site.laid(_places(site, queries), to.integers(-1, 1)), _places(site, keys))
        scores = to.step("Where", later, site.number(float("-inf")), scores)
    made = to.step("MatMul", site.kept(to.step("Softmax", scores, axis=3)), values)
    columns = to.step("Mul", site.size(values, 1), site.size(values, 3))
    rows = to.step("Transpose", made, perm=[0, 2, 1, 3])
    site.laid(rows, site.size(rows, 0, 2), columns, result=site.node.output[0])


def _seen_from(site: Site, starts: str, queries: str, keys: str) -> str:
    """Whether queries (batch, 1, rows, 1) see keys up to their own place, in a window of so many where there is one."""
    to, one = site.to, site.to.integers(1)
    own = to.step("Add", starts, _places(site, queries))
    own, key = site.laid(own, site.size(own, 0), one, site.size(own, 1), one), _places(site, keys)
    seen = to.step("Not", to.step("Less", own, key))
    if (window := site.attribute("local_window_size", -1)) < 1:
        return seen
    return to.step("And", seen, to.step("Less", to.step("Sub", own, to.integers(window)), key))


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
