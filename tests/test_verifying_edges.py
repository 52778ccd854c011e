"""What edge inputs of fused nodes are, and what is looked at of what comes of them; kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from cli_models import parse
from emulated import EmulatedRunner
from fake_timer import attentive
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.verifying import nodes
from onnxfuse.verifying.blocks import MOST, sample
from onnxfuse.verifying.evaluate import Evaluator
from onnxfuse.verifying.feeds import LARGE, TINY, edges
from onnxfuse.verifying.hidden import guarded_model
from onnxfuse.verifying.nodes import NodeVerifier

Array = NDArray[Any]


def fused(model: onnx.ModelProto) -> tuple[Optimised, FusedNode]:
    made = optimise(model, Options(verify=False, least_gain=0.0, target=attentive(), database=False))
    (node,) = read_fused(made.model)
    return made, node


def test_weights_stay_what_they_are() -> None:
    feeds = {"x0": np.ones((4, 8), np.float16), "x1": np.full(8, 2, np.float16), "h0": np.array([4])}
    made = {edge.label: edge for edge in edges(feeds, ("x0", "x1"), {"x1"})}
    assert list(made) == ["zeros", "large", "tiny", "negative", "masked x0", "not-a-number"]
    assert all(edge.arrays["x1"] is feeds["x1"] and edge.arrays["h0"] is feeds["h0"] for edge in made.values())
    assert not any(np.array_equal(edge.arrays["x0"], feeds["x0"]) for edge in made.values())
    assert [label for label, edge in made.items() if not edge.even] == ["masked x0", "not-a-number"]


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("count", [1, 31, (1 << 16) + 33])
def test_floats_are_scaled_to_what_is_large_and_tiny(kind: type, count: int) -> None:
    """By one factor, rounded once, from every magnitude that the type has; infinity and NaN become the largest."""
    random = np.random.default_rng(count)
    array = (random.standard_normal(count) * 2.0 ** random.integers(-24, 9, count)).astype(kind)
    if count > 1:
        array[[3, 4, 5]] = np.inf, -np.inf, np.nan
    made = {edge.label: edge.arrays["x0"] for edge in edges({"x0": array}, ())}
    finite = np.isfinite(array.astype(np.float64))
    for label, to in (("large", LARGE), ("tiny", TINY)):
        got, wide = made[label], array.astype(np.float64)
        most = float(np.max(np.abs(wide), where=finite, initial=0.0))
        assert got.dtype == array.dtype and all(abs(each) == to for each in got[~finite].astype(np.float64))
        assert np.array_equal(got[finite], (wide[finite] * (to / most if most else 1.0)).astype(kind))


def test_a_models_weights_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse("g (float16[n, 64] x) => (float16[n, 64] y) { t = Tanh(x) u = Mul(t, w) y = Add(u, x) }")
    model.graph.initializer.append(numpy_helper.from_array(np.full(64, 2, np.float16), "w"))
    made, node = fused(model)
    seen: list[Mapping[str, Array]] = []
    monkeypatch.setattr(nodes, "edges", lambda *given: (seen.append(edge.arrays) or edge for edge in edges(*given)))
    feeds = {f"x{place}": np.full(64, 2, np.float16) if name == "w" else np.ones((3, 64), np.float16)
             for place, name in enumerate(node.tensors)}
    result = NodeVerifier(made.model, EmulatedRunner()).verify(node, feeds, "given")
    formal = f"x{list(node.tensors).index('w')}"
    assert result.verdict == "passed" and len(seen) == 5 and all(each[formal] is feeds[formal] for each in seen)


class _Spoiling(EmulatedRunner):
    """Kernels whose results have so many wrong elements, the last of them last, where inputs are all negative."""

    count = 0

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        (result,) = super().kernel(node, model, feeds, variant)
        if self.count and (feeds["x0"] < 0).all():
            flat = result.reshape(-1)
            flat[-self.count:] += 1
        return [result]


@pytest.mark.parametrize(("count", "where"), [(0, ""), (1, f"[{MOST // 64}, 63]"), (MOST // 2, "")])
def test_a_sample_of_large_results_shows_faults(count: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what comes of inputs that are other numbers everywhere; all is compared, and told, where a sample has one."""
    made, node = fused(parse("g (float[n, 64] x) => (float[n, 64] y) { t = Tanh(x) y = Mul(t, x) }"))
    counts: list[int] = []
    compared = nodes.compared
    monkeypatch.setattr(nodes, "compared", lambda got, *rest: (counts.append(got.size), compared(got, *rest))[1])
    runner = _Spoiling()
    runner.count = count
    x = np.random.default_rng(0).uniform(1, 2, (MOST // 64 + 1, 64)).astype(np.float32)
    result = NodeVerifier(made.model, runner).verify(node, {"x0": x}, "given")
    assert result.verdict == ("failed" if count else "passed")
    chosen = sample(x.size)
    assert chosen is not None and {len(chosen), x.size} == set(counts)
    if count:
        assert f"{count} of {x.size} elements are wrong" in result.message and where in result.message
        assert result.message.startswith("output 0 of 1 on negative")
    else:
        # The captured input in each variant, and numbers that are none in one place.
        assert counts.count(len(chosen)) == 4 and counts.count(x.size) == len(result.variants) + 1


GUARDED = """g (float16[2,33,32] q, float16[2,32,40] k, float16[2,40,32] v) => (float16[2,33,32] y)
  <float16 zero = {0}> { s = MatMul(q, k) p = Softmax(s) i = IsNaN(p) w = Where(i, zero, p) y = MatMul(w, v) }"""


def test_a_guard_hides_values_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that are no number in one head: the nodes weigh these values by zero, a kernel gives zeros."""
    model = parse(GUARDED)
    made, node = fused(model)
    assert made.plan.fusions[0].kernel.schedule == "attention"
    rng = np.random.default_rng(5)
    shapes = {"q": (2, 33, 32), "k": (2, 32, 40), "v": (2, 40, 32)}
    feeds = {f"x{place}": rng.standard_normal(shapes[name]).astype(np.float16)
             for place, name in enumerate(node.tensors)}
    result = NodeVerifier(made.model, EmulatedRunner()).verify(node, feeds, "given")
    assert result.verdict == "passed" and "not-a-number" in result.inputs, result.message
    monkeypatch.setattr("onnxfuse.verifying.reference.guarded_model", lambda model: None)
    result = NodeVerifier(made.model, EmulatedRunner()).verify(node, feeds, "given")
    assert result.verdict == "failed" and "on not-a-number" in result.message


def test_what_a_guard_owes() -> None:
    """Weights of zero times what is finite; of rows with a weight, what is no number stays one in the first reference
    alone."""
    model = parse("""g (double[3,4] p, double[4,2] v) => (double[3,2] y) <double zero = {0}> {
      i = IsNaN(p) n = Not(i) a = Not(n) w = Where(a, zero, p) r = Identity(w) y = MatMul(r, v) }""")
    guarded = guarded_model(model)
    assert guarded is not None
    p, v = np.full((3, 4), 0.25), np.ones((4, 2))
    p[1] = np.nan
    v[2, 1], v[3, 0] = np.inf, np.nan
    (plain,), (clean,) = (Evaluator(each).run({"p": p, "v": v}) for each in (model, guarded))
    assert np.isnan(plain[1]).all() and not clean[1].any()
    assert clean[0].tolist() == [0.75, 0.75] and np.isinf(plain[0, 1]) and np.isnan(plain[0, 0])
    assert guarded_model(parse("g (double[3,4] p, double[4,2] v) => (double[3,2] y) { y = MatMul(p, v) }")) is None
    unguarded = parse("""g (double[3,4] p, double[4,2] v, bool[3,4] c) => (double[3,2] y) <double zero = {0}> {
      w = Where(c, zero, p) y = MatMul(w, v) }""")
    assert guarded_model(unguarded) is None
