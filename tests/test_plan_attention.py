"""Attention in the planner: what it takes in, and when."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer, PricedTimer, attentive
from kernel_harness import parse
from unmeasured import UNMEASURED

import onnxfuse
from onnxfuse import schedules
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.known import asked_for
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules import Kernel, Request, Schedule
from onnxfuse.tuning import Tuned, TuneOptions, products, tune
from onnxfuse.tuning.subjects import subjects_of
from onnxfuse.verifying import verify

tune_module = importlib.import_module("onnxfuse.tuning.tune")

pytestmark = pytest.mark.usefixtures("few_ways")

HEADS = """
g (float16[B,S,768] x, float16[B,1,1,S] mask,
   float16[768,768] wq, float16[768,768] wk, float16[768,768] wv, float16[768] b)
  => (float16[B,S,768] y) <int64[4] heads = {0,0,12,64}, int64[3] joined = {0,0,768}, float16 f = {8}> {
  q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
  qb = Add(q, b) kb = Add(k, b) vb = Add(v, b)
  qr = Reshape(qb, heads) kr = Reshape(kb, heads) vr = Reshape(vb, heads)
  qt = Transpose<perm = [0,2,1,3]>(qr) kt = Transpose<perm = [0,2,3,1]>(kr) vt = Transpose<perm = [0,2,1,3]>(vr)
  s = MatMul(qt, kt) d = Div(s, f) m = Add(d, mask) p = Softmax(m) o = MatMul(p, vt)
  z = Transpose<perm = [0,2,1,3]>(o) y = Reshape(z, joined)
}"""

INSIDE = Counter({"MatMul": 2, "Div": 1, "Add": 4, "Softmax": 1, "Transpose": 4, "Reshape": 4})

DIMS = {"B": 8, "S": 512}


def fuse(text: str = HEADS, **options: object) -> Optimised:
    wanted = {"dims": DIMS, "target": UNMEASURED, "verify": False, "database": False, **options}
    return optimise(parse(text), Options(**wanted))  # type: ignore[arg-type]


def attentions(made: Optimised) -> list[Counter[str]]:
    return [Counter(node.op for node in fusion.view) for fusion in made.plan.fusions if fusion.rule == "attention"]


def reasons(made: Optimised) -> list[tuple[str, str]]:
    return [(refusal.code, refusal.message) for refusal in made.refusals if refusal.rule == "attention"]


def test_heads_masks_and_biases_are_taken_in() -> None:
    """All that is between the projections; a fused model that is taken apart again is what it was."""
    made = fuse(target=attentive())
    assert attentions(made) == [INSIDE]
    (fusion,) = made.plan.fusions
    assert fusion.kernel.schedule == "attention" and fusion.cost.kernels_after == 1
    onnx.checker.check_model(made.model, full_check=True)


def test_without_a_measurement_it_is_left() -> None:
    """What is pointwise, and the softmax, are fused as ever."""
    made, without = fuse(), fuse(disable=["attention"])
    assert not attentions(made) and [code for code, _ in reasons(made)] == ["unmeasured"] and not reasons(without)
    assert [fusion.view for fusion in made.plan.fusions] and made.model == without.model


@pytest.mark.parametrize(("tflops", "count"), [(300.0, 1), (1.0, 0)])
def test_a_measured_rate_decides(tflops: float, count: int) -> None:
    made = fuse(target=attentive(tflops))
    assert len(attentions(made)) == count
    assert ("no-gain" in dict(reasons(made))) is not bool(count)


LEFT = {
    "float64": (HEADS.replace("float16", "double"), "products of float64"),
    "float32 that nobody measured": (HEADS.replace("float16", "float"), "how fast it is on H200 was not measured"),
    "a head size of 384": (HEADS.replace("12,64", "2,384"), "a head size of 384"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_has_no_kernel_says_why(case: str) -> None:
    text, reason = LEFT[case]
    made = fuse(text, target=attentive())
    assert not attentions(made) and any(reason in message for _, message in reasons(made))


def test_what_somebody_reads_of_scores_is_written_by_its_kernel() -> None:
    """Shares that the model gives out, or averages; predicted too."""
    more = {"p": ("12,S,S", ""), "w": ("1,S,S", "w = ReduceMean<axes = [1]>(p)")}
    for name, (shape, node) in more.items():
        text = HEADS.replace("[B,S,768] y)", f"[B,S,768] y, float16[B,{shape}] {name})").replace(
            "p = Softmax(m)", f"p = Softmax(m) {node}")
        for target in (attentive(), "H200"):
            made = fuse(text, target=target)
            (inside,) = attentions(made)
            assert (inside["MatMul"], inside["Softmax"]) == (2, 1)
            (fusion,) = (fusion for fusion in made.plan.fusions if fusion.rule == "attention")
            assert {value.name for value in fusion.outputs} == {"p", "y"}


@pytest.mark.parametrize("between", [
    "n = LayerNormalization(q, c, c) r = Relu(n)",
    "m = ReduceMax<axes = [-1], keepdims = 1>(q) r = Sub(q, m)",
], ids=["a norm", "rows less their maxima"])
def test_products_that_are_no_attention_are_not_spoken_of(between: str) -> None:
    """What is between two products is no softmax."""
    made = fuse(f"""    g (float16[B,S,768] x, float16[768,768] w, float16[768] c) => (float16[B,S,768] y) {{
      q = MatMul(x, w) {between} y = MatMul(r, w)
    }}""", target=attentive())
    assert not attentions(made) and not reasons(made)


SHARED = """g (float16[B,S,1536] x, float16[B,4,S,64] past, float16[S,S] bias)
  => (float16[B,16,S,64] y, float16[B,4,S,64] present)
  <int64[3] parts = {1024,256,256}, int64[4] h = {0,0,16,64}, int64[4] g = {0,0,4,64}, int64[1] two = {2},
   int64[5] e = {1,1,4,1,1}, int64[4] w = {0,16,-1,64}, float16 f = {8}> {
  a, b, c = Split <axis = 2> (x, parts)
  q1 = Reshape(a, h) q2 = Transpose<perm = [0,2,1,3]>(q1) q = Mul(q2, f)
  k1 = Reshape(b, g) present = Transpose<perm = [0,2,1,3]>(k1) k2 = Add(present, past) k3 = Unsqueeze(k2, two)
  k4 = Expand(k3, e) k5 = Reshape(k4, w) k = Transpose<perm = [0,1,3,2]>(k5)
  v1 = Reshape(c, g) v2 = Transpose<perm = [0,2,1,3]>(v1) v3 = Unsqueeze(v2, two) v4 = Expand(v3, e) v = Reshape(v4, w)
  s = MatMul(q, k) n = Add(s, bias) p = Softmax(n) y = MatMul(p, v)
}"""


def test_what_others_read_stays_outside() -> None:
    """Keys that are a result of the model are written by somebody else; groups of heads are not spread, and a transpose
    that the runtime takes into its product goes with that."""
    made = fuse(SHARED, target=attentive())
    most = max(made.plan.with_products, key=lambda region: len(region.view))
    assert Counter(node.op for node in most.view) == Counter({
        "MatMul": 2, "Add": 2, "Softmax": 1, "Reshape": 4, "Transpose": 3, "Mul": 1, "Unsqueeze": 2, "Expand": 2})
    assert len(attentions(made)) == 1
    onnx.checker.check_model(made.model, full_check=True)


GROUPED = """g (float16[B,8,S,16] q, float16[B,S,32] kx, float16[B,S,32] vx, float16[B,1,S,16] turned)
  => (float16[B,8,S,16] y)
  <int64[4] g = {0,0,2,16}, int64[1] two = {2}, int64[5] e = {1,1,4,1,1}, int64[4] w = {0,8,-1,16}, float16 f = {2}> {
  k1 = Reshape(kx, g) k2 = Transpose<perm = [0,2,1,3]>(k1) few = Mul(k2, turned)
  k3 = Unsqueeze(few, two) k4 = Expand(k3, e) k5 = Reshape(k4, w) k6 = Transpose<perm = [0,1,3,2]>(k5) k = Mul(k6, f)
  v1 = Reshape(vx, g) v2 = Transpose<perm = [0,2,1,3]>(v1) v3 = Unsqueeze(v2, two) v4 = Expand(v3, e) v = Reshape(v4, w)
  s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v)
}"""


def test_heads_of_a_group_are_not_spread_before_they_are_scaled() -> None:
    """What is computed of keys for each head of a group is part of the attention, which reads those that there are;
    what is computed before, once for all heads, may be too, and may stay outside."""
    made = fuse(GROUPED, target=attentive())
    reads = [{value.name for value in region.tensors} for region in made.plan.with_products]
    assert all(each in reads for each in ({"q", "k", "vx"}, {"q", "few", "vx"}, {"q", "kx", "turned", "vx"}))
    kept = GROUPED.replace("[B,8,S,16] y)", "[B,8,S,16] y, float16[B,2,S,16] few)")
    made = fuse(kept, target=attentive(), least_gain=0.0, dims={"B": 1, "S": 37}, disable=["grow-pointwise"])
    assert {value.name for value in made.plan.fusions[-1].tensors} == {"q", "few", "vx"} and len(attentions(made)) == 1
    for runner, verdict in ((EmulatedRunner(), "passed"), (FaultyRunner(), "failed")):
        assert [node.verdict for node in verify(made, runner).nodes if node.rule == "attention"] == [verdict]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification(runner: type[EmulatedRunner], kept: bool) -> None:
    """The kernel is right, and a hundredth more is not, of the result or of shares that are kept."""
    text = HEADS.replace("[B,S,768] y)", "[B,S,768] y, float16[B,2,S,S] p)") if kept else HEADS
    made = fuse(text.replace("768", "32").replace("12,64", "2,16"), target=attentive(), least_gain=0.0,
                dims={"B": 1, "S": 37}, disable=["grow-pointwise", "scaled-masked-softmax"])
    assert len(attentions(made)) == 1
    (result,) = [node for node in verify(made, runner()).nodes if node.rule == "attention"]
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result
    if runner is EmulatedRunner:  # rows of what products multiply are no scores
        place = [value.name for value in next(each for each in made.plan.fusions if each.rule == "attention").tensors]
        assert [label for label in result.inputs if "masked" in label] == [f"masked x{place.index('mask')}"]


def times(attention: float) -> FakeTimer:
    """Of attention, of a product alone, which is slower than the runtime's, and of all else."""
    named = {RUNTIME: 50.0, "attention": attention, "product": 60.0}
    return FakeTimer(lambda name: named.get(name.split("_")[0], 10.0))


def tuned(timer: FakeTimer, database: Path) -> Tuned:
    with open_database(database) as kept:
        return tune(parse(HEADS), timer, kept, TuneOptions(dims={"B": 8, "S": 128}))


@pytest.mark.parametrize(("microseconds", "count"), [(20.0, 1), (60.0, 0)])
def test_measured_attention(tmp_path: Path, microseconds: float, count: int) -> None:
    """It is fused where it was measured faster; where it was not, what was measured beside it is."""
    database = tmp_path / "measurements.sqlite"
    found = tuned(times(microseconds), database)
    schedules = [region.schedule for region in found.regions]
    assert "attention" in schedules and "rows" in schedules
    made = fuse(database=database, dims={"B": 8, "S": 128}, target="H100")
    assert len(attentions(made)) == count
    assert count or "measured-slower" in dict(reasons(made))
    assert any(fusion.kernel.schedule == "rows" for fusion in made.plan.fusions) is not bool(count)


def test_it_competes_with_a_kernel_of_the_softmax_by_its_own_time_alone(tmp_path: Path) -> None:
    """What the latter saves is predicted: the runtime's time, measured low, counts for neither."""
    timer = FakeTimer(lambda name: {RUNTIME: 5.0, "attention": 4.0}.get(name.split("_")[0], 1.0))
    database = tmp_path / "measurements.sqlite"
    tuned(timer, database)
    assert attentions(fuse(database=database, dims={"B": 8, "S": 128}, target="H100"))


def test_it_competes_with_its_own_products_by_the_same_measure(tmp_path: Path) -> None:
    """What the runtime takes for a product counts as measured in both, though predictions see far less."""
    timer = PricedTimer({("MatMul",): 50.0}, {"attention": 24.0, "product": 12.0, "pointwise": 2.0, "rows": 2.0})
    database = tmp_path / "measurements.sqlite"
    tuned(timer, database)
    made = fuse(database=database, dims={"B": 8, "S": 128}, target="H100")
    (attention,) = [fusion for fusion in made.plan.fusions if fusion.rule == "attention"]
    before, _ = made.costs.unfused(attention.nodes)
    assert before > 2 * 50e-6


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A database with nothing in it."""
    with open_database(tmp_path / "measurements.sqlite") as kept:
        return Path(kept.name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    """An H100 at hand, on which attention is faster than the runtime's nodes."""
    timer = times(20.0)
    present = find_profile("H100")
    monkeypatch.setattr(products, "find_timer", lambda: timer)
    for module in (products, tune_module):
        monkeypatch.setattr(module, "present_profile", lambda: present)
    return timer


def test_optimize_measures_attention_where_the_gpu_is(gpu: FakeTimer, known: Path) -> None:
    """And what stands in its place, once; nothing else is measured."""
    given = {"dims": {"B": 8, "S": 128}, "target": "H100", "verify": False, "database": known}
    made = onnxfuse.optimize(parse(HEADS), **given)
    assert len(attentions(made.optimised)) == 1
    schedules = {name.split("_")[0] for name in gpu.timed}
    assert {"attention", RUNTIME} < schedules
    count = len(gpu.timed)
    assert len(attentions(onnxfuse.optimize(parse(HEADS), **given).optimised)) == 1
    assert len(gpu.timed) == count


def test_no_kernel_is_made_again_for_the_plan_behind_measurements(
    gpu: FakeTimer, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def asked(schedule: Schedule, request: Request) -> Kernel | Refusal | None:
        found = schedules.asked(schedule, request)
        if isinstance(found, Kernel):
            made.append((schedule.name, request.rule, asked_for(request)))
        return found

    monkeypatch.setattr("onnxfuse.planning.known.asked", asked)
    onnxfuse.optimize(parse(HEADS), dims={"B": 8, "S": 128}, target="H100", verify=False, database=known)
    assert gpu.timed and len(made) == len(set(made)) > 1


@pytest.mark.parametrize(("value", "target", "count"), [("1", "H100", 1), ("0", "H100", 0), ("1", "T4", 0)])
def test_float32_is_one_kernel_where_the_runtime_rounds_it_too(
    tmp_path: Path, value: str, target: str, count: int
) -> None:
    """On a GPU that can, in a session that may, and where it was measured."""
    database = tmp_path / "measurements.sqlite"
    model = parse(HEADS.replace("float16", "float"))
    with open_database(database) as kept:
        tune(model, times(20.0), kept, TuneOptions(dims={"B": 8, "S": 128}))
    made = onnxfuse.optimize(model, dims={"B": 8, "S": 128}, target=target, verify=False, database=database,
                             measure_seconds=0, provider_options={"use_tf32": value})
    assert len(attentions(made.optimised)) == count
    assert all(region.kernel.rounds for region in made.optimised.plan.fusions if region.rule == "attention")


@pytest.mark.parametrize(("changed", "count"), [
    ({"measure_seconds": 0}, 1), ({"target": "T4"}, 0), ({"database": False}, 1),
    ({"disable": ["attention", "products"]}, 0)])
def test_where_optimize_measures_nothing(gpu: FakeTimer, known: Path, changed: dict[str, object], count: int) -> None:
    """What is predicted decides, where that is known well enough."""
    given = {"dims": {"B": 8, "S": 128}, "target": "H100", "verify": False, "database": known}
    made = onnxfuse.optimize(parse(HEADS), **{**given, **changed})  # type: ignore[arg-type]
    assert len(attentions(made.optimised)) == count and not gpu.timed


@pytest.mark.parametrize(("kind", "value", "tuned"), [
    ("float", "1", True), ("float", "0", True), ("double", "1", False), ("float16", "0", True)])
def test_a_model_that_no_kernel_multiplies_is_not_planned_twice(
    gpu: FakeTimer, monkeypatch: pytest.MonkeyPatch, kind: str, value: str, tuned: bool, known: Path
) -> None:
    """Float32 is, rounded or not, as the session has it."""
    asked: list[object] = []
    monkeypatch.setattr(products, "tune", lambda *arguments: asked.append(arguments))
    text = "g (T[N,8] x, T[8,8] w) => (T[N,8] y) { a = MatMul(x, w) b = MatMul(a, w) y = Relu(b) }"
    onnxfuse.optimize(parse(text.replace("T[", f"{kind}[")), dims={"N": 4}, target="H100", verify=False,
                      database=known, provider_options={"use_tf32": value})
    assert bool(asked) == tuned and not gpu.timed


SCALED = HEADS.replace("d = Div(s, f) m = Add(d, mask)", "m = Add(s, mask)").replace(
    "kt = Transpose<perm = [0,2,3,1]>(kr)", "kn = Transpose<perm = [0,2,3,1]>(kr) kt = Div(kn, f)")
"""Keys that are scaled where they are transposed, as exporters of attention as an operator write it."""


def test_keys_that_are_only_scaled_are_read_as_they_lie() -> None:
    """Beside what takes in everything pointwise, biases too, and views alone there is a region with views and products
    with one number: its kernel copies keys, and what precedes has its biases in kernels of its own."""
    offered = {tuple(sorted(Counter(node.op for node in each.nodes if node.op != "Constant").items()))
               for each in subjects(SCALED)}
    whole = Counter({"MatMul": 2, "Div": 1, "Add": 4, "Softmax": 1, "Transpose": 4, "Reshape": 4})
    views, scaled = whole - Counter({"Add": 3, "Div": 1, "Transpose": 1, "Reshape": 1}), whole - Counter({"Add": 3})
    assert {tuple(sorted(each.items())) for each in (whole, scaled, views)} <= offered
    other = {tuple(sorted(Counter(node.op for node in each.nodes if node.op != "Constant").items()))
             for each in subjects(SCALED.replace("kt = Div(kn, f)", "kt = Div(kn, b2)").replace(
                 "float16[768] b)", "float16[768] b, float16[S] b2)"))}
    assert tuple(sorted(scaled.items())) not in other


def subjects(text: str) -> list[Region]:
    """Attentions that tuning would measure."""
    made = fuse(text, eager=True)
    return [each.fusion for each in subjects_of(made)[0] if each.fusion.kernel.schedule == "attention"]
