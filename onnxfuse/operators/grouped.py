"""The runtime's GroupQueryAttention: attention over keys of the past and new ones, of which each sequence of a batch
has its own number, and that cache with the new ones in it.

    seqlens_k ─ past of a sequence, n ──┬───────────────┐
    keys ── rotated ─────────────┐      │               │
    past keys ─────────── from n on, keys ── queries' scores of keys up to n + their place ── softmax ── by values ─▶
    past values ───────── from n on, values ─────────────────────────────────────────────────────────────┘

Rows of the caches that no sequence has yet stay what they are, or are zero where there were none.  No query sees them,
and what the runtime has there differs: its CPU provider zeros, its CUDA provider whatever was in the memory.  Of a
prompt that is shorter than others the queries behind its end see what stands there, as those of CUDA do.
"""

from __future__ import annotations

import re

from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import Dim, dim, maximum
from onnxfuse.graph.model import Node, Shape
from onnxfuse.graph.sizes import Sizes, contents_of
from onnxfuse.ir.context import LoweringContext, apply, declare, expand, like, reshape, size_of, test, wide
from onnxfuse.ir.scalars import INT64
from onnxfuse.ir.tensors import Concat, Fill, Iota, Map, Permute, Take, Tensor, Update
from onnxfuse.operators.arithmetic import SOFTMAX, sizes_of
from onnxfuse.operators.attending import Heads, capped, parted, scores_of, weighed
from onnxfuse.operators.norms import softmax
from onnxfuse.operators.operands import integer_attribute, number_attribute, operand, present
from onnxfuse.operators.pieces import cut
from onnxfuse.operators.record import HEAVY, MICROSOFT, PLAIN, define

PAST, ENDS, TOTAL, COSINES, SINES = (3, 4), 5, 6, 7, 8
"""Operands: keys and values of the past, where sequences end, the longest one's length, and tables to rotate by."""

REFUSED = {9: "positions of its own", 10: "a bias of scores", 11: "sinks", 12: "a quantised cache",
           13: "a quantised cache", 14: "norms of its queries and keys", 15: "norms of its queries and keys"}
"""Operands that no kernel has, by place."""


def group_query_attention_types(context: TypeContext) -> list[Type]:
    query, dtype = context.shape(0), context.dtype()
    if query is None:
        return [Type(dtype)] * 3
    heads, pairs = int(context.attribute("num_heads")), int(context.attribute("kv_num_heads"))
    # Without keys of its own the first input packs queries, keys and values.
    head = query[2] // heads if context.has(1) else query[2] // (heads + 2 * pairs)
    result = [Type(dtype, (query[0], query[1], head * heads))]
    for place in (1, 2):
        side = context.shape(place)
        if side is not None and len(side) == 3:
            for one, other in zip(side, (query[0], query[1], head * pairs), strict=True):
                context.demand(one, other)
    total, whole = context.elements(TOTAL), context.attribute("sliding_window_cache", 0) == 0
    if total is not None and len(total) == 1 and whole:
        context.demand(query[1], total[0], "room")
        table = context.shape(COSINES)
        if table and context.attribute("do_rotary", 0):
            context.demand(total[0], table[0], "room")
    for output, place in zip((1, 2), PAST, strict=True):
        past = context.shape(place)
        length = None
        if past is not None and len(past) == 4:
            for one, other in zip((past[0], past[1], past[3]), (query[0], dim(pairs), head), strict=True):
                context.demand(one, other)
        if total is not None and len(total) == 1 and past is not None and len(past) == 4 and whole:
            context.demand(total[0], past[2] + query[1], "room")
            length = maximum(past[2], total[0])
        # As CUDA has it, of what the cache's own type is.
        kind = context.dtype(place) if past is not None else dtype
        result.append(Type(kind, (query[0], dim(pairs), length or context.unknown(2, 4, output), head)))
    return result


def group_query_attention(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """What is attended, and the caches."""
    _refuse(node, context)
    queries, keys, values = _sides(node, context)
    caches = [operand(node, context, place) for place in PAST]
    (total,) = context.sizes(present(node, context, TOTAL))
    batch, length = queries.shape[:2]
    starts = _starts(operand(node, context, ENDS), batch, length, total)
    if integer_attribute(node, "do_rotary", 0):
        places = apply("add", reshape(starts, (batch, dim(1))), Iota(INT64, (batch, length), 1))
        queries, keys = (_rotated(each, places, node, context) for each in (queries, keys))
    whole = [_updated(cache, rows, starts, total, context)
             for cache, rows in zip(caches, (keys, values), strict=True)]
    seen = [cut(each, 2, dim(0), total) for each in whole]
    heads = Heads(queries, seen[0], seen[1], ("bshgd", "bhkd", "bhkn"), True)
    score = capped(scores_of(heads, number_attribute(node, "scale", 0.0) or None), node)
    score = _masked(score, starts, integer_attribute(node, "local_window_size", -1))
    return [weighed(softmax(score, (4,)), heads), *whole]


def _refuse(node: Node, context: LoweringContext) -> None:
    """Raise a refusal of what no kernel has."""
    named = [words for place, words in REFUSED.items() if place < len(node.inputs) and node.inputs[place] is not None]
    if any(node.attributes.get(f"{side}_quant_type", b"NONE") not in (b"NONE", "NONE") for side in "kv"):
        named.append(REFUSED[12])
    if integer_attribute(node, "smooth_softmax", -1) == 1:
        named.append("a smooth softmax")
    if integer_attribute(node, "causal", 1) != 1:
        named.append("no causal mask")
    if integer_attribute(node, "sliding_window_cache", 0):
        named.append("a cache of a window")
    if len(node.outputs) > 3 and node.outputs[3] is not None:
        named.append("scores as a result")
    if not all(place < len(node.inputs) and node.inputs[place] is not None for place in PAST):
        named.append("no caches of the past")
    if integer_attribute(node, "local_window_size", -1) > 0 and not _counts_itself():
        named.append("a window, in which ONNX Runtime sees one key more before 1.24,")
    if named:
        raise context.refuse("no-lowering", f"a GroupQueryAttention with {named[0]} has no kernel",
                             "leave it to ONNX Runtime's")
    if (value := present(node, context, TOTAL)).elements is None and value.constant is None:
        raise context.refuse(
            "unknown-sizes", f"a GroupQueryAttention whose total length '{value.name}' is not computed from sizes has "
            "no kernel", "compute it from the shape of an attention mask, as exporters do")


def _counts_itself() -> bool:
    """Whether the ONNX Runtime here counts a query's own key among those of a window, as all do by 1.24 (ONNX Runtime,
    pull request 25927)."""
    import onnxruntime

    release = re.match(r"(\d+)\.(\d+)", str(onnxruntime.__version__))
    return release is not None and (int(release[1]), int(release[2])) >= (1, 24)


def _sides(node: Node, context: LoweringContext) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (batch, rows, heads of keys, heads that share them, columns), and keys and values without the fourth
    axis; of one tensor that packs them, or three."""
    count, own = (integer_attribute(node, name, 0) for name in ("num_heads", "kv_num_heads"))
    if count < 1 or own < 1 or count % own:
        raise ValueError(f"{count} heads over {own} of keys")
    first = operand(node, context, 0)
    if first.rank != 3:
        raise ValueError("queries of other than three axes")
    sides = [first]
    if len(node.inputs) > 2 and node.inputs[1] is not None and node.inputs[2] is not None:
        sides += [operand(node, context, place) for place in (1, 2)]
    else:
        column = first.shape[2].divide(dim(count + 2 * own))
        if column is None:
            raise context.refuse("no-lowering", f"{first.shape[2]} columns are not known to divide into heads")
        widths = [column * heads for heads in (count, own, own)]
        sides = [cut(first, 2, sum(widths[:place], dim(0)), width) for place, width in enumerate(widths)]
    queries, keys, values = sides
    if keys.shape != values.shape or keys.shape[:2] != queries.shape[:2]:
        raise _unknown_sizes(context)
    return (parted(queries, dim(own), dim(count // own), context), parted(keys, dim(own), None, context),
            parted(values, dim(own), None, context))


def _unknown_sizes(context: LoweringContext) -> Exception:
    return context.refuse(
        "no-lowering", "a GroupQueryAttention whose keys, values and caches are not known to be as many rows and "
        "columns as its queries ask for has no kernel", "give sizes that are the same one name")


def _starts(ends: Tensor, batch: Dim, length: Dim, total: Dim) -> Tensor:
    """How many rows of the past each sequence has, behind which its new ones stand; never so many that these would
    reach past the longest, whatever is read."""
    if ends.shape != (batch,):
        ends = reshape(ends, (batch,))
    wide_ends = Map(INT64, (batch,), "cast", (ends,))
    new = apply("sub", wide_ends, size_of(length - 1, INT64), shape=(batch,))
    most = apply("min", new, size_of(total - length, INT64), shape=(batch,))
    return apply("max", most, like(0, most), shape=(batch,))


def _updated(cache: Tensor, rows: Tensor, starts: Tensor, total: Dim, context: LoweringContext) -> Tensor:
    """A cache (batch, heads, rows, columns) with new rows (batch, rows, heads, columns) behind those that a sequence
    has."""
    batch, length, own, columns = rows.shape
    if cache.dtype != rows.dtype:
        raise context.refuse("no-lowering", "a GroupQueryAttention with a quantised cache has no kernel",
                             "leave it to ONNX Runtime's")
    if cache.rank != 4 or (*cache.shape[:2], cache.shape[3]) != (batch, own, columns):
        raise _unknown_sizes(context)
    size = maximum(cache.shape[2], total)
    shape = (batch, own, size, columns)
    if size != cache.shape[2]:
        more = Fill(cache.dtype, (batch, own, size - cache.shape[2], columns), 0.0)
        cache = Concat(cache.dtype, shape, (cache, more), 2)
    laid, one = Permute(rows.dtype, (batch, own, length, columns), rows, (0, 2, 1, 3)), dim(1)
    return Update(cache.dtype, shape, cache, laid, reshape(starts, (batch, one, one, one)), 2, total)


def _rotated(side: Tensor, places: Tensor, node: Node, context: LoweringContext) -> Tensor:
    """Rows (batch, rows, ..., columns) turned by the angles of their places (batch, rows), of which tables have cosines
    and sines, one for each pair of columns: neighbours, or those a half apart."""
    tables = [operand(node, context, place) for place in (COSINES, SINES)]
    half, columns = tables[0].shape[1], side.shape[-1]
    if half.value is None or columns.value is None or tables[0].shape != tables[1].shape or (
            2 * half.value > columns.value):
        raise context.refuse("no-lowering", "a GroupQueryAttention whose tables to rotate by are not known to be of as "
                             "many pairs as a head has, or fewer, has no kernel", "state their sizes")
    pairs = integer_attribute(node, "rotary_interleaved", 0)
    last = side.rank - 1
    turned = cut(side, last, dim(0), half * 2)
    apart = (*side.shape[:-1], half, dim(2)) if pairs else (*side.shape[:-1], dim(2), half)
    split, axis = wide(reshape(turned, apart)), last + (1 if pairs else 0)
    one, other = (cut(split, axis, dim(place), dim(1)) for place in range(2))
    beside = Concat(split.dtype, apart, (apply("neg", other), one), axis)
    cosines, sines = (_looked_up(table, places, apart, bool(pairs)) for table in tables)
    made = apply("add", apply("mul", split, cosines, shape=apart), apply("mul", beside, sines, shape=apart),
                 shape=apart)
    whole = reshape(declare(made, side.dtype), turned.shape)
    if 2 * half.value == columns.value:
        return whole
    rest = cut(side, last, half * 2, columns - half * 2)
    return Concat(side.dtype, side.shape, (whole, rest), last)


def _looked_up(table: Tensor, places: Tensor, shape: Shape, pairs: bool) -> Tensor:
    """Rows of a table at places (batch, rows), spread over heads and the members of a pair."""
    batch, length = places.shape
    half, count, one = table.shape[1], batch * length, dim(1)
    indices = expand(reshape(places, (count, one)), (count, half))
    taken = wide(Take(table.dtype, (count, half), table, indices, 0))
    between = (one,) * (len(shape) - 4)
    return reshape(taken, (batch, length, *between, half, one) if pairs else (batch, length, *between, one, half))


def _masked(score: Tensor, starts: Tensor, window: int) -> Tensor:
    """Scores (batch, heads, heads that share keys, queries, keys) of keys up to the query's own, in a window of so many
    where there is one."""
    batch, one = score.shape[0], dim(1)
    row, key = (Iota(INT64, score.shape, axis) for axis in (3, 4))
    hidden, first = like(float("-inf"), score), reshape(starts, (batch, one, one, one, one))
    own = apply("add", first, row, shape=score.shape)
    seen = test("le", key, own)
    if window > 0:
        seen = apply("and", seen, test("gt", key, apply("sub", own, like(window, own))), dtype=seen.dtype)
    return apply("where", seen, score, hidden, dtype=score.dtype, shape=score.shape)


def _arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Two products of query rows by key rows by head size, and a softmax of the scores; of all keys that the longest
    sequence has."""
    query = sizes_of(node.inputs[0], sizes)
    value = node.inputs[TOTAL] if len(node.inputs) > TOTAL else None
    total = None if value is None else contents_of(value, sizes) if value.constant is None else (
        tuple(int(number) for number in value.constant.reshape(-1)))
    heads, own = (int(node.attributes.get(name, 0)) for name in ("num_heads", "kv_num_heads"))
    if query is None or len(query) != 3 or not total or heads < 1 or own < 1:
        return None
    batch, length, width = query
    if len(node.inputs) < 2 or node.inputs[1] is None:
        width = width // (heads + 2 * own) * heads
    return batch * length * total[0] * (4 * width + heads * SOFTMAX)


define("GroupQueryAttention", domain=MICROSOFT, kind=HEAVY, types=group_query_attention_types,
       lowering=group_query_attention, arithmetic=_arithmetic, host=(TOTAL,), runtime=PLAIN)
