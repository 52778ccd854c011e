"""What the standard's Attention, and the runtime's own and its MultiHeadAttention, mean as tensors: two contractions
with a softmax between them, the runtime's Attention behind one that gives queries, keys and values.

Scores are scaled once, in float32, where the runtime scales queries and keys by the root of the factor each.  What its
providers do in different ways, or no kernel holds, is refused: keys of the past, scores of hidden keys as a result, and
a causal mask over more keys than queries, which one provider aligns at the first key and another at the last (ONNX
Runtime, issue 29020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Shape
from onnxfuse.ir.context import LoweringContext, apply, declare, like, reshape, size_of, test, total
from onnxfuse.ir.contractions import contract
from onnxfuse.ir.scalars import BOOL, FLOAT, INT64
from onnxfuse.ir.tensors import Iota, Slice, Tensor
from onnxfuse.operators.norms import softmax
from onnxfuse.operators.operands import integer_attribute, number_attribute, operand, optional

OPERANDS = 4
"""Queries, keys, values and a mask: what follows is of the past."""

SCORES, MASKED = 3, 2
"""The result that scores are, or what is made of them; the way in which they are masked ones."""

MULTI_HEAD_OPERANDS = 6
"""The same of MultiHeadAttention, with a bias of all three, a mask of keys and a bias of scores."""

PACKED_PAST = (4, 6)
"""Operands of the runtime's Attention that are of the past."""


@dataclass(frozen=True)
class Heads:
    """Attributes:
        queries, keys, values: with an axis for the heads, and for those of them that share keys; labels: of their axes.
        packed: whether heads lie side by side in the last axis.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    labels: tuple[str, str, str]
    packed: bool


def attention(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """The first result, and scores or their softmax, where those are asked for."""
    if any(value is not None for value in node.inputs[OPERANDS:]):
        raise context.refuse("no-lowering", "an Attention with keys of the past, or their number, has no kernel",
                             "join past and new keys outside of it")
    if any(value is not None for value in node.outputs[1:3]):
        raise context.refuse("no-lowering", "an Attention that also writes its keys or values has no kernel")
    heads = _heads(node, context)
    given = node.attributes.get("scale")
    scaled = scores_of(heads, None if given is None else float(given))
    score = capped(scaled, node)
    masked = _masked(score, node, context)
    power = softmax(masked, (4,))
    if masked is not score:  # a query that sees no key gives zeros
        largest = total("max_number", masked, (4,))
        power = apply("where", test("eq", largest, like(float("-inf"), largest)), like(0, power), power)
    found: list[Tensor | None] = [weighed(power, heads), *(None for _ in node.outputs[1:])]
    if len(node.outputs) > SCORES and node.outputs[SCORES] is not None:
        kept = _kept(node, context, (scaled, score, masked, power))
        batch, own, groups, *sizes = kept.shape
        found[SCORES] = declare(reshape(kept, (batch, own * groups, *sizes)), heads.queries.dtype)
    return found


def _kept(node: Node, context: LoweringContext, stages: Sequence[Tensor]) -> Tensor:
    """What is asked for of scores: as products, capped, masked, or their softmax."""
    mode, mask = integer_attribute(node, "qk_matmul_output_mode", 0), optional(node, context, OPERANDS - 1)
    if not 0 <= mode < len(stages):
        raise ValueError(f"there is no way {mode} to write scores")
    hides = integer_attribute(node, "is_causal", 0) or (mask is not None and mask.dtype == BOOL)
    if mode == MASKED and hides:
        raise context.refuse("no-lowering", "an Attention that also writes scores of hidden keys has no kernel: which "
                             "number stands for these differs", "write the softmax, or scores before the mask")
    return stages[mode]


def scores_of(heads: Heads, scale: float | None) -> Tensor:
    """Queries by keys (batch, heads, heads that share keys, queries, keys), times a scale or by the root of a head's
    size."""
    q, k, _ = heads.labels
    summed = contract((heads.queries, q), (heads.keys, k), "bhgsk")
    by = apply("rsqrt", size_of(heads.queries.shape[-1], FLOAT)) if scale is None else like(scale, summed)
    return apply("mul", summed, by, dtype=summed.dtype, shape=summed.shape)


def capped(score: Tensor, node: Node) -> Tensor:
    """Scores between what the node caps them at and its negative, where it does."""
    cap = number_attribute(node, "softcap", 0.0)
    return score if cap == 0 else apply("mul", apply("tanh", apply("div", score, like(cap, score))), like(cap, score))


def weighed(power: Tensor, heads: Heads) -> Tensor:
    """Values, summed up by what a softmax gives each."""
    made = contract((declare(power, heads.values.dtype), "bhgsk"), (heads.values, heads.labels[2]),
                    "bshgn" if heads.packed else "bhgsn")
    shape = made.shape
    joined = (shape[0], shape[1], shape[2] * shape[3] * shape[4]) if heads.packed else (
        shape[0], shape[1] * shape[2], *shape[3:])
    return declare(reshape(made, joined), heads.queries.dtype)


def multi_head_attention(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """The first result of the runtime's own operator, where nobody asks for another.

    A query that sees no key by the mask of keys, which is a finite number, has what all keys give.
    """
    if any(value is not None for value in (*node.inputs[MULTI_HEAD_OPERANDS:], *node.outputs[1:])):
        raise context.refuse(
            "no-lowering", "a MultiHeadAttention with keys of the past, or more results, has no kernel",
            "join past and new keys outside of it")
    score_bias, mask = optional(node, context, 5), optional(node, context, 4)
    return _attended(node, context, _many_heads(node, context), score_bias, mask)


def packed_attention(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """The first result of the runtime's Attention: queries, keys and values by one product, which lie in memory in the
    operands' type between, then what MultiHeadAttention makes of them."""
    past = any(place < len(node.inputs) and node.inputs[place] is not None for place in PACKED_PAST)
    if past or any(value is not None for value in node.outputs[1:]):
        raise context.refuse("no-lowering", "an Attention with keys of the past, or more results, has no kernel",
                             "write it as a product and a MultiHeadAttention, past and new keys joined outside of it")
    if integer_attribute(node, "do_rotary", 0):
        raise context.refuse("no-lowering", "an Attention with rotary embeddings has no kernel",
                             "write it as a product, RotaryEmbedding and a MultiHeadAttention")
    rows, weights = (operand(node, context, place) for place in range(2))
    bias = optional(node, context, 2)
    if rows.rank != 3 or weights.rank != 2:
        raise ValueError("rows and weights of other than three and two axes")
    summed: Tensor = contract((rows, "bsi"), (weights, "ih"), "bsh")
    if bias is not None:
        summed = apply("add", summed, declare(bias, summed.dtype), shape=summed.shape)
    made = declare(summed, rows.dtype)
    sides, begin = [], dim(0)
    for width in _widths(node, weights, bias, context):
        sides.append(Slice(made.dtype, (*made.shape[:2], width), made, (dim(0), dim(0), begin), (1, 1, 1)))
        begin += width
    count = dim(integer_attribute(node, "num_heads", 0))
    heads = Heads(parted(sides[0], count, dim(1), context), parted(sides[1], count, None, context),
                  parted(sides[2], count, None, context), ("bshgd", "bkhd", "bkhn"), True)
    return _attended(node, context, heads, optional(node, context, 5), optional(node, context, 3))


def _widths(node: Node, weights: Tensor, bias: Tensor | None, context: LoweringContext) -> Sequence[Dim]:
    """Columns of queries, keys and values."""
    whole, given = weights.shape[1], node.attributes.get("qkv_hidden_sizes")
    if bias is not None and bias.shape != (whole,):
        raise context.refuse("no-lowering", f"an Attention of {whole} columns whose bias is not known to have as many "
                             "has no kernel", "give sizes that are the same one name")
    third = whole.divide(dim(3))
    sizes = [dim(int(size)) for size in given] if given else [] if third is None else [third] * 3
    if len(sizes) != 3 or sizes[0] != sizes[1] or sum(sizes, dim(0)) != whole:
        raise context.refuse(
            "no-lowering", f"an Attention whose {whole} columns are not known to be those of queries, keys and values "
            "has no kernel", "state the sizes of its weights")
    return sizes


def _attended(
    node: Node, context: LoweringContext, heads: Heads, bias: Tensor | None, mask: Tensor | None
) -> list[Tensor | None]:
    """What the runtime's operators make of heads, with a bias of scores and a mask of keys."""
    score = scores_of(heads, number_attribute(node, "scale", 0.0) or None)
    batch, _, _, length, count = score.shape
    if bias is not None:
        if not _spreads(bias.shape, (batch, score.shape[1], length, count)):
            raise _unknown_mask(node, context)
        more = reshape(bias, (*bias.shape[:2], dim(1), *bias.shape[2:]))
        score = apply("add", score, declare(more, score.dtype), shape=score.shape)
    if mask is not None:
        seen = _seen(mask, score.shape, node, context)
        hidden = like(number_attribute(node, "mask_filter_value", -10000.0), score)
        score = apply("add", score, apply("where", seen, like(0, score), hidden), shape=score.shape)
    if integer_attribute(node, "unidirectional", 0):
        score = _causal(score, node, context)
    return [weighed(softmax(score, (4,)), heads), *(None for _ in node.outputs[1:])]


def _seen(mask: Tensor, scores: Shape, node: Node, context: LoweringContext) -> Tensor:
    """Whether a key is seen: by a number for each key, and of a packed operator for each query too; or by where the
    keys of a batch end, and behind all these perhaps where they begin."""
    batch, _, _, length, count = scores
    one, packed = dim(1), node.op == "Attention"
    if mask.shape == (batch, count) or (packed and mask.shape == (batch, length, count)):
        rows = one if mask.rank == 2 else length
        return test("gt", reshape(mask, (batch, one, one, rows, count)), like(0, mask))
    if not packed or mask.shape not in ((batch,), (2 * batch,)):
        raise _unknown_mask(node, context)
    key = Iota(mask.dtype, scores, 4)

    def places(first: Dim) -> Tensor:
        part = Slice(mask.dtype, (batch,), mask, (first,), (1,))
        return reshape(part, (batch, one, one, one, one))

    seen = test("lt", key, places(dim(0)))
    return seen if mask.shape == (batch,) else apply("and", seen, test("ge", key, places(batch)), dtype=BOOL)


def _many_heads(node: Node, context: LoweringContext) -> Heads:
    """Heads of queries, keys and values side by side in the last axis, a bias of all three added; or of keys and values
    in an axis of their own."""
    count = dim(integer_attribute(node, "num_heads", 0))
    if any(value is None for value in node.inputs[1:3]) or len(node.inputs) < 3:
        raise context.refuse("no-lowering", "a MultiHeadAttention whose keys or values are packed has no kernel",
                             "split them outside of it")
    queries, keys, values = sides = [operand(node, context, place) for place in range(3)]
    bias = optional(node, context, 3)
    ranks, whole = [side.rank for side in sides], sum((side.shape[-1] for side in sides), dim(0))
    apart = ranks == [3, 4, 4] and bias is None and keys.shape[1] == values.shape[1] == count
    beside = ranks == [3, 3, 3] and (bias is None or bias.shape == (whole,))
    if not apart and not beside:
        raise context.refuse(
            "no-lowering", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, "
            "with biases for all of them or none, has no kernel")
    if bias is not None:
        begin, own = dim(0), []
        for side in sides:
            part = Slice(bias.dtype, side.shape[-1:], bias, (begin,), (1,))
            own.append(apply("add", side, part, shape=side.shape))
            begin += side.shape[-1]
        queries, keys, values = own
    if apart:
        return Heads(parted(queries, count, dim(1), context), keys, values, ("bshgd", "bhkd", "bhkn"), True)
    return Heads(parted(queries, count, dim(1), context), parted(keys, count, None, context),
                 parted(values, count, None, context), ("bshgd", "bkhd", "bkhn"), True)


def _spreads(sizes: Shape, wanted: Shape) -> bool:
    """Whether sizes are those that are wanted, or one."""
    return len(sizes) == len(wanted) and all(size in (1, whole) for size, whole in zip(sizes, wanted, strict=True))


def _unknown_mask(node: Node, context: LoweringContext) -> Exception:
    article = "an" if node.op == "Attention" else "a"
    return context.refuse(
        "no-lowering", f"{article} {node.op} whose mask is not known to have its scores' sizes, or one, has no kernel",
        "give sizes that are the same one name")


def _heads(node: Node, context: LoweringContext) -> Heads:
    queries, keys, values = (operand(node, context, place) for place in range(3))
    if not queries.rank == keys.rank == values.rank or queries.rank not in (3, 4):
        raise ValueError("queries, keys and values of other than three or four axes")
    if packed := queries.rank == 3:
        count, own = (dim(integer_attribute(node, f"{side}_num_heads", 0)) for side in ("q", "kv"))
    else:
        count, own = queries.shape[1], keys.shape[1]
    groups = count.divide(own)
    if groups is None:
        raise context.refuse("no-lowering", f"an Attention of {count} heads over {own} of keys has no kernel",
                             "state the numbers of heads")
    if packed:
        return Heads(parted(queries, own, groups, context), parted(keys, own, None, context),
                     parted(values, own, None, context), ("bshgd", "bkhd", "bkhn"), True)
    batch, _, length, depth = queries.shape
    return Heads(reshape(queries, (batch, own, groups, length, depth)), keys, values, ("bhgsd", "bhkd", "bhkn"), False)


def parted(tensor: Tensor, own: Dim, groups: Dim | None, context: LoweringContext) -> Tensor:
    """The last axis as heads, in groups where those share keys."""
    heads = (own,) if groups is None else (own, groups)
    size = tensor.shape[-1]
    for count in heads:
        divided = size.divide(count)
        if divided is None:
            raise context.refuse("no-lowering", f"{tensor.shape[-1]} columns are not known to divide into heads")
        size = divided
    return reshape(tensor, (*tensor.shape[:2], *heads, size))


def _masked(score: Tensor, node: Node, context: LoweringContext) -> Tensor:
    """Scores (batch, heads, heads that share keys, queries, keys) with what hides some of them."""
    batch, own, groups, length, count = score.shape
    hidden = like(float("-inf"), score)
    mask = optional(node, context, 3)
    if mask is not None:
        sizes = (dim(1),) * (4 - mask.rank) + mask.shape
        wanted = (batch, own * groups, length, count)
        if not _spreads(sizes, wanted):
            raise _unknown_mask(node, context)
        split = (own, groups) if sizes[1] != 1 or own * groups == 1 else (dim(1), dim(1))
        mask = reshape(mask, (sizes[0], *split, *sizes[2:]))
        if mask.dtype == BOOL:
            score = apply("where", mask, score, hidden, dtype=score.dtype, shape=score.shape)
        else:
            score = apply("add", score, declare(mask, score.dtype), shape=score.shape)
    return _causal(score, node, context) if integer_attribute(node, "is_causal", 0) else score


def _causal(score: Tensor, node: Node, context: LoweringContext) -> Tensor:
    """Scores of keys that do not come later."""
    *_, length, count = score.shape
    if length != count:
        raise context.refuse(
            "no-lowering", f"a causal {node.op} of {length} queries over {count} keys has no kernel: "
            "ONNX Runtime's providers differ in which of them it hides", "write the mask as an operand")
    place, key = (Iota(INT64, score.shape, axis) for axis in (3, 4))
    hidden = like(float("-inf"), score)
    return apply("where", test("le", key, place), score, hidden, dtype=score.dtype, shape=score.shape)
