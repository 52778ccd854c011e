"""Results in which terms cancel.

Kernels are stood in for by NumPy in another order of summing; the reference is the body in float64.  What cancels may
be off by as much as rounding makes of it (``verifying.wavering``), and a fault of one percent is still found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import parse
from emulated import EmulatedRunner, FaultyRunner
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.rewriting.standalone import value_types
from onnxfuse.verifying.evaluate import Evaluator
from onnxfuse.verifying.nodes import NodeVerifier, _kernel_key
from onnxfuse.verifying.results import NodeResult
from onnxfuse.verifying.wavering import FAR, FIRST, MANY, SAMPLE, SAMPLES, WAY, WITHIN, Moves, off_by, wavering_model

Array = NDArray[Any]

VARIANCE = """
g ({kind}[n, 37] x) => ({kind}[n, 1] y) {{
  m = ReduceMean <axes = [1]> (x) c = Sub(x, m) s = Mul(c, c) y = ReduceMean <axes = [1]> (s)
}}
"""
NORMED = """
g ({kind}[1, 5, n] x, {kind}[5] s, {kind}[5] b) => ({kind}[1, 5, n] y) {{
  i = InstanceNormalization(x, s, b) y = Relu(i)
}}
"""
QUANTISED = """
g ({kind}[n, 37] x, {kind}[37] s) => (uint8[n, 37] y)
<{kind} one = {{1}}, uint8 zero = {{101}}> {{
  m = ReduceMean <axes = [1]> (x) c = Sub(x, m) t = Mul(c, s) y = QuantizeLinear(t, one, zero)
}}
"""
ABOVE = """
g ({kind}[n, 37] x) => (bool[n, 37] y)
<{kind} least = {{0.000001}}> {{
  m = ReduceMean <axes = [1]> (x) c = Sub(x, m) y = Greater(c, least)
}}
"""
DIFFERENCE = """
g ({kind}[n, 64] a, {kind}[n, 64] b, {kind}[n, 64] c) => ({kind}[n, 64] y) {{
  p = Mul(a, b) q = Mul(b, c) s = Add(p, q) y = Sub(s, p)
}}
"""


class _Stands(EmulatedRunner):
    """Gives what a function makes of a node's tensors."""

    def __init__(self, compute: Callable[[list[Array]], Array]) -> None:
        super().__init__()
        self.compute = compute

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        return [self.compute([feeds[name] for name in sorted(feeds)])]


def fused(text: str, kind: str) -> tuple[Optimised, FusedNode]:
    subject = optimise(parse(text.format(kind=kind)), Options(verify=False, least_gain=0.0))
    (node,) = read_fused(subject.model)
    return subject, node


@pytest.mark.parametrize("opset", [13, 22])
def test_elements_move_apart_and_evaluations_differ(opset: int) -> None:
    """Equal elements do not move alike, and no further than they may; in every operator set."""
    model = parse("g (double[n] x) => (double[n] y) { a = Exp(x) y = Mul(a, a) }", opset=opset)
    wavering = wavering_model(model, value_types(model), lambda name: TensorProto.DOUBLE, 1,
                              exact=lambda node: False, sums=lambda node: False)
    evaluator = Evaluator(wavering)
    runs, back = (np.array([
        evaluator.run({"x": np.zeros(4097), SAMPLE: np.array(float(sample)), WAY: np.array(way)})[0] - 1
        for sample in range(SAMPLES)]) for way in (1.0, -1.0))
    np.testing.assert_allclose(back, -runs, atol=1e-12)
    limit = 2 * off_by(TensorProto.DOUBLE, 1)
    assert 0.9 * limit < np.abs(runs).max() <= 1.01 * limit
    assert abs(runs.mean()) < 0.05 * limit
    assert (np.ptp(runs, axis=0) > 0).all()
    assert np.abs(np.corrcoef(runs) - np.eye(SAMPLES)).max() < 0.1


def verdict(text: str, kind: str, runner: EmulatedRunner, *arrays: Array) -> NodeResult:
    subject, node = fused(text, kind)
    feeds = {f"x{place}": array for place, array in enumerate(arrays)}
    verifier = NodeVerifier(subject.model, runner)
    # Of a node that is not the first of its kernel the captured inputs alone are looked at: no edges here.
    verifier._first[_kernel_key(node, feeds)] = NodeResult("another", node.op, node.rule, "passed")
    return verifier.verify(node, feeds, "given")


def backwards(tensors: list[Array]) -> Array:
    """The variance of rows, each summed one by one from its end."""
    (x,) = tensors
    length = x.dtype.type(x.shape[1])
    mean = np.cumsum(x[:, ::-1], axis=1, dtype=x.dtype)[:, -1:] / length
    found: Array = np.cumsum(((x - mean) ** 2)[:, ::-1], axis=1, dtype=x.dtype)[:, -1:] / length
    return found


@pytest.mark.parametrize("kind", ["double", "float"])
def test_a_variance_of_rows_of_one_number(kind: str) -> None:
    """Zero in the reference, or the square of a rounding; the square of another one in the kernel."""
    dtype = np.float64 if kind == "double" else np.float32
    x = np.repeat(np.linspace(0.1, 7.3, 29).astype(dtype)[:, None], 37, axis=1)
    assert (backwards([x]) > 0).any(), "no error to look at"
    result = verdict(VARIANCE, kind, _Stands(backwards), x)
    assert result.verdict == "passed", result.message


def test_no_more_than_rounding_makes_of_it() -> None:
    """A hundred times what float64 could have left of rows of one number is a fault."""
    x = np.repeat(np.linspace(0.1, 7.3, 29)[:, None], 37, axis=1)
    result = verdict(VARIANCE, "double", _Stands(lambda tensors: np.full((29, 1), 1e-26)), x)
    assert result.verdict == "failed"


def test_behind_a_kink() -> None:
    """Channels of one number, normalised, of which a Relu shows one sign alone: a kernel's mean is a little off, and
    all of a channel with it."""
    x = np.repeat(np.arange(1, 6, dtype=np.float32)[None, :, None], 400, axis=2)  # whose sums are exact
    given = x, np.ones(5, np.float32), np.zeros(5, np.float32)
    off = 3e-7 * x / np.sqrt(np.float32(1e-5))
    result = verdict(NORMED, "float", _Stands(lambda tensors: off), *given)
    assert result.verdict == "passed", result.message
    assert verdict(NORMED, "float", _Stands(lambda tensors: 100 * off), *given).verdict == "failed"


@pytest.mark.parametrize(("column", "number", "verdict_"), [(5, 0, "passed"), (5, 255, "passed"), (4, 102, "failed")])
def test_a_number_that_rounding_decides(column: int, number: int, verdict_: str) -> None:
    """Rows of one number, less their mean and times infinity: no number in the reference, which is the zero point, and
    either end of the range where a mean is off."""
    x = np.repeat(np.linspace(0.1, 7.3, 29).astype(np.float32)[:, None], 37, axis=1)
    scale = np.ones(37, np.float32)
    scale[5] = np.inf
    found = np.full((29, 37), 101, np.uint8)
    found[:, column] = number
    result = verdict(QUANTISED, "float", _Stands(lambda tensors: found), x, scale,
                     np.array(1, np.float32), np.array(101, np.uint8))
    assert result.verdict == verdict_, result.message


@pytest.mark.parametrize(("row", "verdict_"), [(3, "passed"), (0, "failed")])
def test_a_truth_that_rounding_decides(row: int, verdict_: str) -> None:
    """Whether numbers are above the mean of their row by next to nothing: of a row of one number either is as good."""
    x = np.full((29, 37), 4.0, np.float32)  # whose sums are exact
    x[0] += np.linspace(0, 1e-3, 37).astype(np.float32)
    found = x > x.mean(axis=1, keepdims=True, dtype=np.float64)
    found[row] ^= True
    result = verdict(ABOVE, "float", _Stands(lambda tensors: found), x)
    assert result.verdict == verdict_, result.message


@pytest.mark.parametrize(("number", "verdict_"), [(101, "passed"), (60, "passed"), (3, "failed")])
def test_a_byte_that_lies_between(number: int, verdict_: str) -> None:
    """What cancels, in units of what is left of it: any of the numbers around the reference's."""
    x = np.repeat(np.linspace(0.1, 7.3, 29).astype(np.float32)[:, None], 37, axis=1)
    given = x, np.full(37, 1e7, np.float32), np.array(1, np.float32), np.array(101, np.uint8)
    found = np.full((29, 37), 101, np.uint8)
    found[-1, 5] = number
    result = verdict(QUANTISED, "float", _Stands(lambda tensors: found), *given)
    assert result.verdict == verdict_, result.message


def test_the_last_digits_of_a_difference() -> None:
    """Numbers of 1e8 that leave one of 1: float64 has eight digits of it, and the table asks for twelve."""
    rng = np.random.default_rng(0)
    a, b = 1e8 * rng.standard_normal((2, 9, 64))
    c = 1 / b * rng.standard_normal((9, 64))

    def other_order(tensors: list[Array]) -> Array:
        found: Array = (b * c + a * b) - np.nextafter(a * b, np.inf)
        return found

    subject, _ = fused(DIFFERENCE, "double")
    arrays = {"a": a, "b": b, "c": c}
    order = [arrays[value.name] for value in subject.plan.fusions[0].tensors]
    result = verdict(DIFFERENCE, "double", _Stands(other_order), *order)
    assert result.verdict == "passed", result.message
    off = verdict(DIFFERENCE, "double", _Stands(lambda tensors: 1.01 * (b * c)), *order)
    assert off.verdict == "failed"


@pytest.mark.parametrize("kind", ["double", "float", "float16"])
@pytest.mark.parametrize("text", [VARIANCE, DIFFERENCE])
def test_a_fault_of_one_percent_is_found(text: str, kind: str) -> None:
    dtype = {"double": np.float64, "float": np.float32, "float16": np.float16}[kind]
    rng = np.random.default_rng(0)
    shape = (29, 37) if text == VARIANCE else (29, 64)
    arrays = [rng.standard_normal(shape).astype(dtype) for _ in range(1 if text == VARIANCE else 3)]
    assert verdict(text, kind, EmulatedRunner(), *arrays).verdict == "passed"
    assert verdict(text, kind, FaultyRunner(), *arrays).verdict == "failed"


def test_what_is_exact_has_no_error_to_share() -> None:
    """A difference of two inputs is rounded once: a unit in the last place more is as wrong as it ever was."""
    text = "g ({kind}[n, 64] a, {kind}[n, 64] b) => ({kind}[n, 64] y) {{ d = Sub(a, b) y = Neg(d) }}"
    rng = np.random.default_rng(0)
    a = rng.standard_normal((9, 64)).astype(np.float32)
    b = np.nextafter(a, np.float32(np.inf))
    # 0.1% of a difference that float32 holds exactly.
    result = verdict(text, "float", _Stands(lambda tensors: (1.001 * (b - a)).astype(np.float32)), a, b)
    assert result.verdict == "failed"


def test_shares_grow_with_what_is_summed() -> None:
    assert off_by(TensorProto.FLOAT, 1) < off_by(TensorProto.FLOAT, 10**6) < 1e-3
    assert off_by(TensorProto.FLOAT16, 1) < off_by(TensorProto.FLOAT16, 10**6) < 1e-2
    assert off_by(TensorProto.DOUBLE, 10**6) < 1e-12


@pytest.mark.parametrize(("wrong", "made"), [(MANY, 2 * FIRST), (MANY - 1, 2 * SAMPLES)])
def test_what_many_elements_are_far_beyond_is_not_looked_at_any_more(wrong: int, made: int) -> None:
    """Few may be unlucky; the last evaluation moves them furthest."""
    seen: list[int] = []
    asked: list[float] = []

    def samples() -> Iterator[list[Array]]:
        for number in range(2 * SAMPLES):
            seen.append(number)
            yield [np.full(100, float(number)), np.array([number])]

    def beyond(largest: Array) -> int:
        asked.append(float(largest.max()))
        return wrong

    moves = Moves([np.zeros(100), np.array([-1])], samples())
    assert not seen, "nothing was asked"
    found = moves.largest(0, beyond)
    assert len(seen) == made and asked == [FAR * WITHIN * (2 * FIRST - 1)]
    assert found.tolist() == [WITHIN * (made - 1)] * 100
    # The next kernel is compared with the same ones, and what needs all of them makes the rest.
    assert moves.largest(0, lambda largest: wrong).tolist() == found.tolist() and len(seen) == made
    assert [int(each[0]) for each in moves.given(1)] == [-1, *range(2 * SAMPLES)] and len(seen) == 2 * SAMPLES
    assert moves.largest(0, lambda largest: MANY).tolist() == [WITHIN * (2 * SAMPLES - 1)] * 100
