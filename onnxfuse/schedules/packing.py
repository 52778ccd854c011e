"""How what lanes compute of a vector of results becomes what is stored."""

from __future__ import annotations

from onnxfuse.ir.scalars import FLOAT16, TYPES
from onnxfuse.lowering.pull import Apply, Scalar
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.text import Writer

Packed = tuple[str, str, str]
"""The type of what lanes keep of a result, its value, and what makes a vector of that."""


def packed(writer: Writer, result: Scalar, name: str, width: int | None = None) -> Packed:
    """Of numbers that are quantised by one step lanes keep what these are before, for a vector of them is quantised in
    half the instructions; and of halves that are numbers times their sigmoids, of which two need one reciprocal.

    Args:
        width: elements of a vector; None where the text is for any number of them.
    """
    if width != 1 and (gated := _gated_by_itself(result)) is not None:
        return "float", writer.scalar(gated), f"of::pack_silu({name})"
    if width and width > 1 and isinstance(result, Apply) and result.function == "nearest_byte":
        quotient, zero, *_ = result.operands
        if isinstance(quotient, Apply) and quotient.function == "steps":
            source, step = quotient.operands
            if all(writer.scope(each) not in (Scope.EACH_ROW, Scope.LANE) for each in (step, zero)):
                given = f"{writer.scalar(step)}, {writer.scalar(zero)}"
                return "float", writer.scalar(source), f"of::quantised<{TYPES[result.dtype].storage}>({name}, {given})"
    return packed_as_it_is(writer, result, name)


def packed_as_it_is(writer: Writer, result: Scalar, name: str) -> Packed:
    """Lanes keep the number itself, as where something else is computed of it too."""
    kind = TYPES[result.dtype]
    return kind.compute, writer.scalar(result), f"of::pack<{kind.storage}>({name})"


def _gated_by_itself(result: Scalar) -> Scalar | None:
    """What is multiplied by its own sigmoid and rounded to half; None where that is not so."""
    if result.dtype != FLOAT16 or not isinstance(result, Apply) or result.function != "mul":
        return None
    one, other = result.operands
    return next((x for x, gate in ((one, other), (other, one)) if isinstance(gate, Apply)
                 and gate.function == "sigmoid" and gate.operands == (x,)), None)
