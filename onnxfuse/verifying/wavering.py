"""How far a result may be off because of what cancels in it: a body evaluated with its operands a little off.

A sum that is computed in some type is the exact sum of operands each of which is off by a few units in the last place:
by about the square root of their number where they are many, some of it in common, for a partial sum is rounded with
all that is in it.  (That is the backward error of summation; the same holds of one product or quotient.)  So nothing
can be asked of a result beyond how much it moves when operands do by as much.  Where terms cancel that is more than
any share of the result, which may be zero; a square of such a difference moves by the square of it, which no bound that
is linear in the error tells.  Hence operands move at random here, all at once, and each element of the outputs is
looked at in some such evaluations, and in as many with all moves the other way: behind a Relu half of them would show
nothing.

What is exact does not move where one operator rounds its result alone: ``a - b`` of two inputs has no error to share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import sqrt
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.graph.order import STANDARD_DOMAINS
from onnxfuse.verifying.feeds import is_float
from onnxfuse.verifying.spelling import Spelling

Array = NDArray[Any]

SAMPLES = 8
"""Evaluations each way: of a million elements that cancel alike, in all of which random shares come out small for
none."""

SAMPLE, WAY = "wavering.sample", "wavering.way"
"""Inputs that tell evaluations apart: a number, and one or minus one."""

FIRST, FAR, MANY = 3, 4.0, 64
"""After so many evaluations each way no more are made where so many elements are off by so many times what passes until
then: the other five would all have to move that much further."""

WITHIN = 2.0
"""Times the largest move seen that passes."""

_ROUNDINGS = 4
"""Units in the last place that a computed operand may be off by, in a type whose numbers are computed in itself."""

_UNITS: dict[int, float] = {
    TensorProto.DOUBLE: 2.0**-53, TensorProto.FLOAT: 2.0**-24, TensorProto.FLOAT16: 2.0**-11,
    TensorProto.BFLOAT16: 2.0**-8,
}
"""Half a unit in the last place of one, by type."""


def off_by(dtype: int, length: int) -> float:
    """Share that an operand of this type moves by at most, of a sum of ``length`` terms; those of narrow types are
    added in float32."""
    unit = _UNITS[dtype]
    if unit > _UNITS[TensorProto.FLOAT]:
        return unit + sqrt(length) * _UNITS[TensorProto.FLOAT]
    return (_ROUNDINGS + sqrt(length)) * unit


def wavering_model(
    lifted: onnx.ModelProto, wide: Mapping[str, int], declared: Callable[[str], int], length: int,
    exact: Callable[[onnx.NodeProto], bool], sums: Callable[[onnx.NodeProto], bool],
) -> onnx.ModelProto:
    """A body in float64 that moves the operands of what rounds by random shares, others for each number in ``SAMPLE``
    and as far one way as the other by ``WAY``.

    Args:
        lifted: the body; wide: types of its values.
        declared: the type that a value has in the original.
        length: of the longest sum.
        exact: whether a node only moves, selects or negates numbers; sums: whether it adds up many.
    """
    opset = next(entry.version for entry in lifted.opset_import if entry.domain in STANDARD_DOMAINS)
    result = onnx.ModelProto()
    result.CopyFrom(lifted)
    result.graph.ClearField("node")
    result.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.DOUBLE, []) for name in (SAMPLE, WAY))
    computed: set[str] = set()
    for place, original in enumerate(lifted.graph.node):
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if exact(original):
            if not computed.isdisjoint(original.input):
                computed.update(original.output)
            result.graph.node.append(node)
            continue
        computed.update(original.output)
        many = sums(original)
        for operand, name in enumerate(original.input):
            if wide.get(name) != TensorProto.DOUBLE or not (many or name in computed):
                continue
            stem = f"wavering{place}.{operand}"
            share = off_by(declared(name), length if many else 1)
            result.graph.node.extend(_moving(name, stem, share, many, 2 * len(result.graph.node), opset))
            node.input[operand] = stem
        result.graph.node.append(node)
    return result


def _moving(name: str, target: str, share: float, together: bool, seed: int, opset: int) -> list[onnx.NodeProto]:
    """target = name * (1 + a share at random of each element, and ``together`` one more that all have)."""
    to = Spelling(f"{target}.share", opset)
    reshape: dict[str, Any] = {"allowzero": 1} if opset >= 14 else {}
    every = to.step("Range", to.number(0, TensorProto.INT64), to.step("Size", name), to.number(1, TensorProto.INT64))
    places = to.step("Reshape", to.step("Cast", every, to=TensorProto.DOUBLE), to.step("Shape", name), **reshape)
    factor = _factor(to, share, seed, places)
    if together:
        factor = to.step("Mul", factor, _factor(to, share, seed + 1))
    to.step("Mul", name, factor, result=target)
    return to.nodes


def _factor(to: Spelling, share: float, seed: int, places: str | None = None) -> str:
    """1 + a number in [-share, share] for each of ``places``, or one for all, another in each sample, times the way.

    The digits of a sine that is large are as good as random.  The runtime's random operators do not do: it has none
    for some operator sets that it has all the rest for.
    """
    step, number = to.step, to.number
    phase = step("Add", step("Mul", SAMPLE, number(78.233)), number(37.719 * seed))
    if places is not None:
        phase = step("Add", phase, step("Mul", places, number(12.9898)))
    large = step("Mul", step("Sin", phase), number(43758.5453))
    digits = step("Sub", large, step("Floor", large))
    moved = step("Mul", step("Sub", digits, number(0.5)), number(2 * share))
    return step("Add", step("Mul", moved, WAY), number(1.0))


class Moves:
    """How far each element of the outputs may be off, from evaluations of a wavering body.  They are made as far as
    they are asked for, once for all outputs and for all kernels that are compared with them."""

    def __init__(self, exact: Sequence[Array], samples: Iterator[Sequence[Array]]) -> None:
        """``exact``: the outputs of the body itself; ``samples``: of the wavering one, ``SAMPLES`` times each way."""
        self._exact, self._samples = exact, samples
        self._made = 0
        self._largest: dict[int, Array] = {
            place: np.zeros(one.shape) for place, one in enumerate(exact) if is_float(one)}
        self._given: dict[int, list[Array]] = {
            place: [one] for place, one in enumerate(exact) if place not in self._largest}

    def given(self, place: int) -> list[Array]:
        """What an output of integers or booleans is: first the body's own."""
        self._make(2 * SAMPLES)
        return self._given[place]

    def largest(self, place: int, beyond: Callable[[Array], int]) -> Array:
        """How far the elements of an output of floats may be off; not from all evaluations where the first leave no
        doubt.

        Args:
            beyond: how many elements are wrong where so far is allowed.
        """
        self._make(2 * FIRST)
        if self._made == 2 * FIRST and beyond(FAR * WITHIN * self._largest[place]) < MANY:
            self._make(2 * SAMPLES)
        return WITHIN * self._largest[place]

    def _make(self, count: int) -> None:
        """Evaluations up to so many."""
        with np.errstate(invalid="ignore", over="ignore"):
            for sample in islice(self._samples, max(0, count - self._made)):
                self._made += 1
                for place, one in enumerate(sample):
                    if place in self._given:
                        self._given[place].append(one)
                        continue
                    move = np.abs(one.astype(np.float64) - self._exact[place])
                    np.maximum(self._largest[place], np.where(np.isfinite(move), move, 0.0), out=self._largest[place])


def replace_moved(got: Array, exact: Array, largest: Array) -> Array:
    """A kernel's result with the reference's numbers where it is as near to them as ``Moves`` says; what is further off
    is left to be compared by the others' limits."""
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(got.astype(np.float64) - exact) <= largest
        result: Array = np.where(near, exact.astype(got.dtype), got)
    return result
