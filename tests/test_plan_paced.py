"""Products in the planner on a GPU of which it is known how fast kernels go through their tiles: predictions decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse
from onnx import numpy_helper
from unmeasured import UNMEASURED

from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.cost import TILE_BEGINS, TILE_ENDS
from onnxfuse.planning.hardware import find_profile
from onnxfuse.tuning import TuneOptions, tune

LINEAR = "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }"
HEADS = """
g (float16[B,S,768] x, float16[768,768] wq, float16[768,768] wk, float16[768,768] wv)
  => (float16[B,S,768] y) <int64[4] heads = {0,0,12,64}, int64[3] joined = {0,0,768}, float16 f = {8}> {
  q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
  qr = Reshape(q, heads) kr = Reshape(k, heads) vr = Reshape(v, heads)
  qt = Transpose<perm = [0,2,1,3]>(qr) kt = Transpose<perm = [0,2,3,1]>(kr) vt = Transpose<perm = [0,2,1,3]>(vr)
  s = MatMul(qt, kt) d = Div(s, f) p = Softmax(d) o = MatMul(p, vt)
  z = Transpose<perm = [0,2,1,3]>(o) y = Reshape(z, joined)
}"""
JOINED = """
g (float16[B,S,768] x, float16[768,2304] w, float16[2304] b) => (float16[B,S,768] y)
  <int64[5] heads = {0,0,3,12,64}, int64[3] joined = {0,0,768}, int64[1] axis = {0}, int64[1] one = {1},
   int64[1] two = {2}, int64[1] three = {3}, float16 f = {8}> {
  m = MatMul(x, w) a = Add(m, b) r = Reshape(a, heads) t = Transpose<perm = [2,0,3,1,4]>(r)
  q1 = Slice(t, axis, one, axis) k1 = Slice(t, one, two, axis) v1 = Slice(t, two, three, axis)
  q = Squeeze(q1, axis) k = Squeeze(k1, axis) v = Squeeze(v1, axis) kt = Transpose<perm = [0,1,3,2]>(k)
  s = MatMul(q, kt) d = Div(s, f) p = Softmax(d) o = MatMul(p, v)
  z = Transpose<perm = [0,2,1,3]>(o) y = Reshape(z, joined)
}"""
IMAGES = ("g (float16[N,64,56,56] x0, float16[64,64,3,3] w, float16[64] b) => (float16[N,64,56,56] x6) { " + " ".join(
    f"c{place} = Conv<pads = [1,1,1,1]>(x{place}, w, b) x{place + 1} = Relu(c{place})" for place in range(6)) + " }")

SIZES = {"M": 4096, "K": 1024, "N": 1024}


def images() -> onnx.ModelProto:
    """Convolutions with constant weights, which a session lays out."""
    model = parse(IMAGES)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (64, 64, 3, 3)), ("b", (64,))):
        weights = (0.1 * rng.standard_normal(shape)).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    del model.graph.input[1:]
    return model


def fuse(model: str | onnx.ModelProto, sizes: Mapping[str, int], **options: object) -> Optimised:
    wanted = {"dims": sizes, "target": "H100", "verify": False, "database": False, "compile": False, **options}
    return optimise(parse(model) if isinstance(model, str) else model, Options(**wanted))  # type: ignore[arg-type]


def sized(sizes: Mapping[str, int] = SIZES, kind: str = "float16") -> str:
    """The sizes stand in the model, so that tensor maps can be told apart from what no map has."""
    text = LINEAR.replace("T[", f"{kind}[")
    for name, size in sizes.items():
        for before, behind in (("[", ","), (",", "]"), ("[", "]")):
            text = text.replace(f"{before}{name}{behind}", f"{before}{size}{behind}")
    return text


OPEN = sized({"K": 1024, "N": 1024})
"""Of any number of rows."""


def linear(sizes: Mapping[str, int] = SIZES, kind: str = "float16", **options: object) -> Optimised:
    return fuse(sized(sizes, kind), {}, **options)


def held(made: Optimised, rule: str = "products") -> list[list[str]]:
    return [[node.op for node in region.view] for region in made.plan.fusions if region.rule == rule]


@pytest.mark.parametrize("target", ["H100", "H200"])
def test_a_product_with_what_follows(target: str) -> None:
    """Is one kernel, where the runtime runs two or three, as predicted: nothing was measured."""
    made = linear(target=target)
    assert held(made) == [["MatMul", "Add", "Relu"]]
    (region,) = made.plan.fusions
    assert region.measured is None and 1.2 < region.cost.estimated_speedup < 3


@pytest.mark.parametrize(("sizes", "kind", "options"), [
    (SIZES, "float16", {"target": UNMEASURED}), (SIZES, "float16", {"target": "A100"}), (SIZES, "float", {}),
    ({**SIZES, "M": 16}, "float16", {}), ({**SIZES, "K": 1022}, "float16", {}),
    (SIZES, "float16", {"disable": ["products"]}), ({**SIZES, "K": 65536}, "float16", {})],
    ids=["another GPU", "another architecture", "float32", "few rows", "no tensor map", "left out", "little to gain"])
def test_what_predictions_do_not_tell(sizes: Mapping[str, int], kind: str, options: Mapping[str, object]) -> None:
    assert not held(linear(sizes, kind, **options))


def test_a_bare_product_stays() -> None:
    model = "g (float16[4096,1024] a, float16[1024,1024] b) => (float16[4096,1024] y) { y = MatMul(a, b) }"
    assert not fuse(model, {}).plan.fusions


def test_sizes_that_are_open_are_those_that_are_planned_for() -> None:
    """Of many rows, and of few."""
    assert [bool(held(fuse(OPEN, {"M": rows}))) for rows in (4096, 8)] == [True, False]


def test_other_sizes_are_not_judged_by_the_planned_ones() -> None:
    """Under the strategy that looks at a quarter and at four times of them, too."""
    assert held(fuse(OPEN, {"M": 4096}, strategy="dynamic")) == [["MatMul", "Add", "Relu"]]


@pytest.mark.parametrize(("batch", "queries", "found"), [(8, 512, 1), (8, 8, 0)])
def test_attention_of_many_queries(batch: int, queries: int, found: int) -> None:
    """Is one kernel; of few it is said that nothing was measured."""
    made = fuse(HEADS, {"B": batch, "S": queries})
    told = {refusal.code for refusal in made.refusals if refusal.rule == "attention"}
    assert len(held(made, "attention")) == found and told == (set() if found else {"unmeasured"})


def test_a_joint_projection_is_left_as_it_lies() -> None:
    """For an attention that reads it so: with heads apart it would be one kernel, and what is around it another."""
    made = fuse(JOINED, {"B": 8, "S": 512})
    assert held(made) == [["MatMul", "Add"]] and len(held(made, "attention")) == len(made.plan.fusions) - 1 == 1


def test_convolutions_lie_channels_last() -> None:
    made = fuse(images(), {"N": 32})
    assert [each.count("Conv") for each in held(made)] == [1] * 5  # the first reads what others computed
    assert sum(node.op_type == "Conv" for node in made.model.graph.node) == 1


def test_a_prediction_is_of_tiles_and_bytes() -> None:
    """Of the busiest multiprocessor's tiles at the rate that was measured, or of what moves, whichever takes longer."""
    profile = find_profile("H100")
    rate = profile.measured.tile_tflops
    assert rate is not None
    (long,) = linear({"M": 8448, "K": 4096, "N": 2048}).plan.fusions
    pace = long.kernel.pace
    assert pace is not None and pace.share == 1.0
    stage = pace.flops * 132 / (1e12 * rate)
    seconds = TILE_BEGINS + pace.tiles * (pace.stages * stage + TILE_ENDS)
    assert long.cost.seconds_after == pytest.approx(seconds)
    flops = 2 * 8448 * 4096 * 2048
    assert flops / (1e12 * rate) < seconds < 1.25 * flops / (1e12 * rate)
    (short,) = linear({"M": 65536, "K": 64, "N": 512}).plan.fusions
    moved = 2 * (65536 * 64 + 64 * 512 + 512 + 65536 * 512)
    assert moved / profile.bandwidth < short.cost.seconds_after < 1.3 * moved / profile.bandwidth


def test_measurements_go_before_predictions(tmp_path: Path) -> None:
    """What was measured to be slower is left to the runtime, whatever is predicted."""
    path = tmp_path / "measured.sqlite"
    text = sized()
    timer = FakeTimer(lambda name: 20.0 if name == RUNTIME else 90.0)
    with open_database(path) as database:
        tune(parse(text), timer, database, TuneOptions())
    assert held(fuse(text, {})) and not held(fuse(text, {}, database=path))
