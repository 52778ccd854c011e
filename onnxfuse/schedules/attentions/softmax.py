"""Powers of an attention's scores under a running maximum, and what all scores are multiplied by, in the exponent.

A row's powers are under the maximum of its first tiles until a score is far above that: the sums of what came before
are scaled as seldom (Shah and others, "FlashAttention-4", 2025).  Then powers may be as large as 2 ^ 8, which 16-bit
floats have room for, and the row's sum of powers is as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations

from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.lowering.pull import Apply, Constant, Contracted, Load, Scalar
from onnxfuse.schedules.attentions.parts import AttentionParts, multiple_of
from onnxfuse.schedules.reductions.online import bare
from onnxfuse.schedules.text import indented, literal, unrolled

POWERS = "of::ExpSummed"
"""What computes powers: scores are float32, and a mask may be the lowest number of bfloat16, so that a product with a
maximum may overflow; no more than a unit of a power is rounded to 16 bits."""

LEAST_FACTOR, LARGEST_FACTOR = 2.0**-120, 2.0**16
"""From which on it is a normal number, as minus infinity times zero is none, and what a score may be above a maximum is
finite; below which sums of 16-bit numbers times it are."""


def unscaled(parts: AttentionParts) -> tuple[AttentionParts, float]:
    """An attention whose scores are the sums themselves, and what they are to be multiplied by, where that is all that
    is done to scores which are not masked."""
    if (unmasked := _unmasked(parts)) is None:
        return parts, 1.0
    score, factor = multiple_of(unmasked)
    capped = _capped(score, parts.words)
    score, factor = (score, factor * parts.factor) if capped is None else (capped, factor)
    known = isinstance(score, Contracted) or capped is not None
    if not known or not LEAST_FACTOR <= factor < LARGEST_FACTOR:
        return parts, 1.0
    return replace(_of_score(parts, score), factor=1.0 if capped is None else parts.factor), factor


def added_to(parts: AttentionParts, addend: Load) -> tuple[AttentionParts, float] | None:
    """An attention whose scores are the sums themselves once a quotient of an addend was added to them, and what they
    are to be multiplied by, which that is divided by; None where scores are otherwise."""
    score = None if (unmasked := _unmasked(parts)) is None else bare(unmasked)
    if not isinstance(score, Apply) or score.function != "add":
        return None
    for one, other in permutations(map(bare, score.operands)):
        sums, factor = multiple_of(one)
        factor *= parts.factor
        if isinstance(sums, Contracted) and _narrow(other) == addend and LEAST_FACTOR <= factor < LARGEST_FACTOR:
            return replace(_of_score(parts, sums), factor=1.0), factor
    return None


def _narrow(scalar: Scalar) -> Scalar:
    """What a float is that was made wider, which rounds nothing."""
    while isinstance(scalar, Apply) and scalar.function == "cast":
        (one,) = scalar.operands
        if not (TYPES[one.dtype].is_floating and TYPES[one.dtype].size < TYPES[scalar.dtype].size):
            break
        scalar = bare(one)
    return scalar


def _unmasked(parts: AttentionParts) -> Scalar | None:
    """What a score is that no comparison of places masks; None where masked ones may count too."""
    if parts.visible is None:
        return parts.softmax.score
    return parts.visible.score if parts.visible.least is None else None


def _of_score(parts: AttentionParts, score: Scalar) -> AttentionParts:
    """The same with another such score."""
    if parts.visible is None:
        return replace(parts, softmax=replace(parts.softmax, score=score))
    return replace(parts, visible=replace(parts.visible, score=score))


def _capped(score: Scalar, words: bool) -> Scalar | None:
    """A hyperbolic tangent of a multiple of the sums, as a soft cap has it, with one factor in place of several where
    that is less exact than a type of 16 bits; None where a score is something else."""
    if not isinstance(score, Apply) or score.function != "tanh":
        return None
    inner, factor = score.operands[0], 1.0
    while not isinstance(inner, Contracted):
        found, times = multiple_of(inner)
        if found is inner:
            return None
        inner, factor = found, factor * times
    if words or not LEAST_FACTOR <= abs(factor) < LARGEST_FACTOR:
        return score
    kind = score.operands[0].dtype
    return replace(score, operands=(Apply(kind, False, "mul", (inner, Constant(kind, False, factor))),))


def by_instruction(parts: AttentionParts) -> AttentionParts:
    """An attention of 16 bits whose scores take hyperbolic tangents by one instruction.

    Its error, 2^-11 of the result, is less than what nodes of float16 round a soft cap's quotient, tangent and product
    off by together.
    """
    if parts.words:
        return parts
    masked = parts.visible and replace(parts.visible, score=_by_instruction(parts.visible.score, {}))
    own = replace(parts.softmax, score=_by_instruction(parts.softmax.score, {}))
    return replace(parts, softmax=own, visible=masked)


def _by_instruction(scalar: Scalar, known: dict[Scalar, Scalar]) -> Scalar:
    if scalar in known or not isinstance(scalar, Apply):
        return known.get(scalar, scalar)
    operands = tuple(_by_instruction(operand, known) for operand in scalar.operands)
    is_tangent = scalar.function == "tanh" and TYPES[scalar.dtype].is_narrow
    if is_tangent or operands != scalar.operands:
        function = "tanh_approximate" if is_tangent else scalar.function
        known[scalar] = replace(scalar, function=function, operands=operands)
    return known.setdefault(scalar, scalar)


def begun(factor: float) -> list[str]:
    """Lines before those of ``maxima`` and ``powers``, whose scores are times ``factor``."""
    return [
        f"constexpr float by = {literal(factor, FLOAT)} * Powers::log2_e, above = Powers::most / by;",
        "bool scaled = false;  // whether what was summed up before is to be scaled",
        "bool near = true;  // whether a warp's maxima are near zero, so that one instruction comes before a power",
    ]


def maxima(last: Sequence[str]) -> list[str]:
    """Lines that find maxima which no score of a tile is far above; ``last`` scales what was summed up of a row before
    by ``scale``, or keeps that for the line that does where the warp's ``scaled`` says so."""
    return [
        "// Maxima that no score is far above; what was summed up under others is scaled.",
        "float largests[tiles][2];",
        "scaled = false;",
        *each_row([
            "float largest = scores[i][0][half * 2];",
            *unrolled("int n = 0; n < keys / 8; ++n", [
                "largest = Largest::of(largest, Largest::of(scores[i][n][half * 2], scores[i][n][half * 2 + 1]));"]),
            "largests[i][half] = largest;",
            "scaled |= !(largest < most[i][half] + above);",
        ]),
        "scaled = __any_sync(0xffffffffu, scaled);",
        "if (scaled) {",
        *indented([
            "near = true;",
            *each_row([
                "const float largest = of::reduce_lanes<Largest, 4>(Largest::of(most[i][half], largests[i][half]));",
                "largests[i][half] = largest, near &= Powers::near(largest * by);",
            ]),
            "near = __all_sync(0xffffffffu, near);",
            *each_row([
                "const float before = most[i][half], largest = largests[i][half];",
                "const float scale = near ? Powers::term(before, by, largest * by)",
                "                         : Powers::far_term(before, by, Powers::offset(largest));",
                "most[i][half] = largest, total[i][half] *= scale;",
                *last,
            ]),
        ]),
        "}",
    ]


def powers(packed: Sequence[str] = ()) -> list[str]:
    """Lines that make powers of scores under these, and add them to ``total``; ``packed`` keeps a ``pair`` of them."""
    return [
        "if (near) {", *indented(_powers("most[i][half] * by", "term", packed)),
        "} else {", *indented(_powers("Powers::offset(most[i][half])", "far_term", packed)), "}",
    ]


def _powers(offset: str, term: str, packed: Sequence[str]) -> list[str]:
    return each_row([
        f"const float offset = {offset};",
        "float sum = 0.0f;",
        *unrolled("int n = 0; n < keys / 8; ++n", [
            "float* const pair = &scores[i][n][half * 2];",
            *unrolled("int j = 0; j < 2; ++j", [
                f"pair[j] = Powers::{term}(pair[j], by, offset);",
                "sum += pair[j];",
            ]),
            *packed,
        ]),
        "total[i][half] += sum;",
    ])


def each_row(body: Iterable[str]) -> list[str]:
    """A loop over the rows that a thread has elements of."""
    return unrolled("int i = 0; i < tiles; ++i", unrolled("int half = 0; half < 2; ++half", body))
