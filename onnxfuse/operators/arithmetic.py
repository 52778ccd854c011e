"""Floating-point operations of a node, by the usual conventions.

- A matrix product of m x k by k x n counts 2 m n k, a convolution twice its output's elements times the elements that
  each of them sums; a bias adds one an output element.
- A pointwise operator counts an output element: 1 for additions, products, comparisons, minima and selections, 4 for
  divisions and roots, 8 for exponentials and their kin, 16 for general powers: what they take of a GPU's arithmetic,
  roughly.
- A reduction counts its cost an input element; softmax and norms count what their formulas hold an element.
- A Resize or GridSample counts twice the elements that each of the output's is made of, where that is not the nearest
  alone; a scatter that sums, multiplies or compares counts each update.
- Casts, copies, transposes, gathers and other views count nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import Sizes, elements_of, shape_of

SIMPLE, ROOT, ELEMENTARY, POWER = 1, 4, 8, 16
SOFTMAX = 3 + ELEMENTARY + ROOT
"""Maximum, difference, exponential, sum, division."""

Arithmetic = Callable[[Node, Sizes], "int | None"]
"""Operations of one run of a node; None where they are not counted, or a size that they take is unknown."""


def none(node: Node, sizes: Sizes) -> int | None:
    """Of what only moves elements."""
    return 0


def uncounted(node: Node, sizes: Sizes) -> int | None:
    """Of what computes in a way that nobody has written down."""
    return None


def per_output(operations: int) -> Arithmetic:
    """So many an element of the first output."""
    def counted(node: Node, sizes: Sizes) -> int | None:
        count = elements(node.outputs[0], sizes)
        return None if count is None else count * operations

    return counted


def per_input(operations: int) -> Arithmetic:
    """So many an element of the first input."""
    def counted(node: Node, sizes: Sizes) -> int | None:
        count = elements(node.inputs[0], sizes)
        return None if count is None else count * operations

    return counted


def per_operand(node: Node, sizes: Sizes) -> int | None:
    """One for every operand of an output element."""
    count = elements(node.outputs[0], sizes)
    return None if count is None else count * len(node.inputs)


def elements(value: Value | None, sizes: Sizes) -> int | None:
    """Elements of a value, 0 of one that is not there; None where unknown."""
    return 0 if value is None else elements_of(value, sizes)


def sizes_of(value: Value | None, sizes: Sizes) -> tuple[int, ...] | None:
    """Sizes of a value; None where it is not there or they are unknown."""
    return None if value is None else shape_of(value, sizes)
