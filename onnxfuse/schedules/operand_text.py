"""Lines that bring a vector of an operand to where its product is computed: ``vector``, or right to ``to``."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.dims import product
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Input
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.kernel import VECTOR_BYTES, load_of
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.text import Writer, indented, pointer, unrolled


def packed(writer: Writer, scalar: Scalar) -> list[str]:
    """Lines that compute ``vector``."""
    value = writer.scalar(scalar)
    inner = writer.lines[Scope.LANE]
    return [*writer.upto(Scope.VECTOR), "float x[width];",
            *unrolled("int v = 0; v < width; ++v", [*inner, f"x[v] = {value};"]), "vector = of::pack<T>(x);"]


def computed(writer: Writer, scalar: Scalar, inside: str) -> list[str]:
    """Lines that compute a vector and store it, zeros where it is not ``inside``."""
    return ["of::Vector<T, width> vector = {};", f"if ({inside}) {{", *indented(packed(writer, scalar)), "}",
            "of::store(to, vector);"]


def source(writer: Writer, scalar: Scalar, inside: str) -> tuple[str, str]:
    """Where an operand that is a tensor's has a vector, and when: ``inside``, as far as its own conditions hold."""
    assert isinstance(scalar, Load)
    conditions = [writer.condition(condition)[0] for condition in scalar.conditions]
    allowed = " && ".join([inside, *(f"({text})" for text in conditions if text != "true")])
    return pointer(f"i{scalar.input}", writer.index(scalar.offset)), allowed


def shifted(writer: Writer, scalar: Scalar, inside: str, count: str, inputs: Sequence[Input]) -> list[str]:
    """Lines that copy a vector that begins anywhere, of which ``count`` elements are there, and zeros elsewhere."""
    assert isinstance(scalar, Load)
    address, allowed = source(writer, scalar, inside)
    base = f"i{scalar.input}"
    end = pointer(base, writer.size(product(inputs[scalar.input].shape)))
    some = f"{allowed} ? (int){count} : 0"
    return [*writer.upto(Scope.VECTOR), f"of::copy_shifted(to, {address}, {base}, {end}, {some});"]


def copied(writer: Writer, scalar: Scalar, inside: str, known: str = "") -> list[str]:
    """Lines that copy such a vector while the threads go on, and zeros elsewhere, or what a padded image has there;
    ``known``: where it lies, if that is known and nothing else has to be."""
    found = load_of(scalar)
    assert found is not None
    load, outside = found
    address, allowed = source(writer, load, inside)
    if outside is None:
        size = writer.lanes.width * TYPES[load.dtype].size
        name = "copy_async" if size == VECTOR_BYTES else f"copy_async_of<{size}>"
        return [*([] if known else writer.upto(Scope.VECTOR)), f"of::{name}(to, {known or address}, {allowed});"]
    number = writer.scalar(outside)
    return [*writer.upto(Scope.VECTOR), f"of::copy_padded(to, {address}, {allowed}, {inside}, {number});"]
