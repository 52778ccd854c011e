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
    by = step_of(result) if width and width > 1 else None
    if by is not None and all(writer.scope(each) not in (Scope.EACH_ROW, Scope.LANE) for each in by):
        step, zero = map(writer.scalar, by)
        source = _quotient(result).operands[0]
        whole = _positive(source)
        kind = f"{TYPES[result.dtype].storage}{', true' if whole is not None else ''}"
        value = writer.scalar(source if whole is None else whole)
        return "float", value, f"of::quantised<{kind}>({name}, {step}, {zero})"
    return packed_as_it_is(writer, result, name)


def _positive(number: Scalar) -> Scalar | None:
    """The number that one is where that is positive, and else none; None of any other."""
    while isinstance(number, Apply) and number.function == "narrow":
        number = number.operands[0]
    return number.operands[0] if isinstance(number, Apply) and number.function == "relu" else None


def step_of(result: Scalar) -> tuple[Scalar, Scalar] | None:
    """The step and the zero point that numbers are quantised by; None of any other result."""
    if not isinstance(result, Apply) or result.function != "nearest_byte":
        return None
    quotient, zero, *_ = result.operands
    return (quotient.operands[1], zero) if isinstance(quotient, Apply) and quotient.function == "steps" else None


def _quotient(result: Scalar) -> Apply:
    """What is rounded of numbers that are quantised."""
    assert isinstance(result, Apply) and isinstance(result.operands[0], Apply)
    return result.operands[0]


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
