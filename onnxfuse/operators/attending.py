"""What the standard's Attention means as tensors: two contractions with a softmax between them.

Scores are scaled once, in float32, where the runtime scales queries and keys by the root of the factor each.  What its
providers do in different ways, or no kernel holds, is refused: keys of the past, scores as a result, and a causal mask
over more keys than queries, which one provider aligns at the first key and another at the last (ONNX Runtime, issue
29020).
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, apply, declare, like, reshape, size_of, test, total
from onnxfuse.ir.contractions import contract
from onnxfuse.ir.scalars import BOOL, FLOAT, INT64
from onnxfuse.ir.tensors import Iota, Tensor
from onnxfuse.operators.norms import softmax
from onnxfuse.operators.operands import integer_attribute, number_attribute, operand, optional

OPERANDS = 4
"""Queries, keys, values and a mask: what follows is of the past."""


@dataclass(frozen=True)
class _Heads:
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
    """The first result, where nobody asks for another."""
    if any(value is not None for value in node.inputs[OPERANDS:]):
        raise context.refuse("no-lowering", "an Attention with keys of the past, or their number, has no kernel",
                             "join past and new keys outside of it")
    if any(value is not None for value in node.outputs[1:]):
        raise context.refuse("no-lowering", "an Attention that also writes its keys, values or scores has no kernel")
    heads = _heads(node, context)
    q, k, v = heads.labels
    summed: Tensor = contract((heads.queries, q), (heads.keys, k), "bhgsk")
    depth = heads.queries.shape[-1]
    given = node.attributes.get("scale")
    scale = like(float(given), summed) if given is not None else apply("rsqrt", size_of(depth, FLOAT))
    score: Tensor = apply("mul", summed, scale, dtype=summed.dtype, shape=summed.shape)
    cap = number_attribute(node, "softcap", 0.0)
    if cap != 0:
        score = apply("mul", apply("tanh", apply("div", score, like(cap, score))), like(cap, score))
    masked = _masked(score, node, context)
    power = softmax(masked, (4,))
    if masked is not score:  # a query that sees no key gives zeros
        largest = total("max_number", masked, (4,))
        power = apply("where", test("eq", largest, like(float("-inf"), largest)), like(0, power), power)
    made = contract((declare(power, heads.values.dtype), "bhgsk"), (heads.values, v),
                    "bshgn" if heads.packed else "bhgsn")
    shape = made.shape
    joined = (shape[0], shape[1], shape[2] * shape[3] * shape[4]) if heads.packed else (
        shape[0], shape[1] * shape[2], *shape[3:])
    return [declare(reshape(made, joined), heads.queries.dtype), *(None for _ in node.outputs[1:])]


def _heads(node: Node, context: LoweringContext) -> _Heads:
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
        return _Heads(_parted(queries, own, groups, context), _parted(keys, own, None, context),
                      _parted(values, own, None, context), ("bshgd", "bkhd", "bkhn"), True)
    batch, _, length, depth = queries.shape
    return _Heads(reshape(queries, (batch, own, groups, length, depth)), keys, values, ("bhgsd", "bhkd", "bhkn"), False)


def _parted(tensor: Tensor, own: Dim, groups: Dim | None, context: LoweringContext) -> Tensor:
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
        if len(sizes) > 4 or any(size not in (1, whole) for size, whole in zip(sizes, wanted, strict=True)):
            raise context.refuse(
                "no-lowering", "an Attention whose mask is not known to have its scores' sizes, or one, has no kernel",
                "give sizes that are the same one name")
        split = (own, groups) if sizes[1] != 1 or own * groups == 1 else (dim(1), dim(1))
        mask = reshape(mask, (sizes[0], *split, *sizes[2:]))
        if mask.dtype == BOOL:
            score = apply("where", mask, score, hidden, dtype=score.dtype, shape=score.shape)
        else:
            score = apply("add", score, declare(mask, score.dtype), shape=score.shape)
    if integer_attribute(node, "is_causal", 0):
        if length != count:
            raise context.refuse(
                "no-lowering", f"a causal Attention of {length} queries over {count} keys has no kernel: "
                "ONNX Runtime's providers differ in which of them it hides", "write the mask as an operand")
        place, key = (Iota(INT64, score.shape, axis) for axis in (3, 4))
        score = apply("where", test("le", key, place), score, hidden, dtype=score.dtype, shape=score.shape)
    return score
