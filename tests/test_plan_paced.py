"""Products in the planner on a GPU of which it is known how fast kernels go through their tiles: predictions decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse, with_constants
from unmeasured import UNMEASURED, measured

from onnxfuse import forms
from onnxfuse.measurements import environment_of, text_of
from onnxfuse.measuring.database import DEFAULT, Measurement, open_database
from onnxfuse.measuring.database import RUNTIME as NODES
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import BESIDE_COPY, TILES_COPY
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.identity import Identities
from onnxfuse.rewriting import layout_record
from onnxfuse.schedules.attentions.attention import ROUNDED_ALONE, ROUNDED_SHARE, TOGETHER_SHARE
from onnxfuse.schedules.kernel import STAGE_WAITS, TILE_BEGINS, TILE_ENDS
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
VOLUMES = IMAGES.replace("56,56", "8,28,28").replace("3,3]", "3,3,3]").replace("1,1,1,1", "1,1,1,1,1,1")

SIZES = {"M": 4096, "K": 1024, "N": 1024}


def images(text: str = IMAGES) -> onnx.ModelProto:
    """Convolutions with constant weights, which a session lays out."""
    model = parse(text)
    rng = np.random.default_rng(0)
    shapes = {given.name: [size.dim_value for size in given.type.tensor_type.shape.dim]
              for given in model.graph.input[1:]}
    return with_constants(model, {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float16) for name, shape in shapes.items()})


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
    ({**SIZES, "M": 16}, "float16", {}), ({**SIZES, "K": 1023}, "float16", {}),
    (SIZES, "float16", {"disable": ["products"]}), ({**SIZES, "K": 65536}, "float16", {})],
    ids=["another GPU", "another architecture", "float32", "few rows", "no tensor map", "left out", "little to gain"])
def test_what_predictions_do_not_tell(sizes: Mapping[str, int], kind: str, options: Mapping[str, object]) -> None:
    assert not held(linear(sizes, kind, **options))


@pytest.mark.parametrize(("sizes", "is_held"), [
    ({"K": 1020}, True), ({"K": 1022}, True), ({"K": 1023}, False), ({"N": 1023}, False)])
def test_uneven_rows(sizes: Mapping[str, int], is_held: bool) -> None:
    """The runtime's library is slow where rows are no whole vectors; ours are where they begin anywhere."""
    assert bool(held(linear({**SIZES, **sizes}))) is is_held


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


CACHED = """
g (float16[B,32,Q,128] q, float16[B,8,K,128] k, float16[B,8,K,128] v) => (float16[B,32,Q,128] y)
  <int64[1] two = {2}, int64[5] each = {1,1,4,1,1}, int64[4] heads = {0,32,-1,128}, float16 f = {8}> {
  ku = Unsqueeze(k, two) ke = Expand(ku, each) kh = Reshape(ke, heads) vu = Unsqueeze(v, two) ve = Expand(vu, each)
  vh = Reshape(ve, heads) kt = Transpose<perm = [0,1,3,2]>(kh) s = MatMul(q, kt) d = Div(s, f) p = Softmax(d)
  y = MatMul(p, vh)
}"""
TURNED = CACHED.replace("float16[B,8,K,128] k", "float16[B,32,128,K] kt").replace(
    "ku = Unsqueeze(k, two) ke = Expand(ku, each) kh = Reshape(ke, heads) ", "").replace(
    "kt = Transpose<perm = [0,1,3,2]>(kh) ", "")


@pytest.mark.parametrize(("text", "sizes", "options", "found"), [
    (CACHED, (1, 1, 2048), {}, True), (CACHED, (1, 4, 2048), {"target": "H200"}, True), (CACHED, (2, 1, 256), {}, True),
    (CACHED, (2, 1, 255), {}, False), (CACHED, (1, 5, 2048), {}, False), (CACHED, (66, 1, 2048), {}, False),
    (CACHED, (2, 1, 200), {"strategy": "dynamic"}, False), (CACHED, (66, 1, 2048), {"strategy": "dynamic"}, False),
    (TURNED, (1, 1, 2048), {}, False), (CACHED.replace("float16", "float"), (1, 1, 2048), {}, False),
    (CACHED, (1, 1, 2048), {"target": UNMEASURED}, False)],
    ids=["one", "four", "few keys", "fewer", "two tiles", "blocks enough", "fewer planned", "blocks enough as planned",
         "keys across", "float32", "another GPU"])
def test_few_queries_of_many_keys(
    text: str, sizes: tuple[int, int, int], options: Mapping[str, object], found: bool
) -> None:
    """Blocks share the keys, which are copied as they lie: bytes say how long that takes."""
    made = fuse(text, dict(zip("BQK", sizes, strict=True)), **options)
    assert bool(held(made, "attention")) == found


@pytest.mark.parametrize("keys", [256, 257])
def test_bare_attention_by_what_its_products_take_the_runtime(keys: int) -> None:
    """25 us with the softmax, and 53 where rows are no whole vectors; by their bytes they would be no slower than as
    one kernel, for which 18 are predicted."""
    text = (f"g (float16[B,6,{keys},64] q, float16[B,6,64,{keys}] k, float16[B,6,{keys},64] v) => "
            f"(float16[B,6,{keys},64] o) {{ s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) }}")
    (region,) = optimise(parse(text), Options(dims={"B": 16}, target="H100", verify=False)).plan.fusions
    assert region.kernel.schedule == "attention"


@pytest.mark.parametrize(("batch", "heads", "length", "measured"), [
    (8, 12, 128, 13.9), (32, 12, 384, 169.5), (32, 12, 197, 84.8), (8, 12, 256, 34.0)])
def test_attention_of_float32(batch: int, heads: int, length: int, measured: float) -> None:
    """Takes no longer than is predicted, as an H100 was seen to run it; one block a multiprocessor goes slower."""
    text = (f"g (float[B,{heads},{length},64] q, float[B,{heads},64,{length}] k, float[B,{heads},{length},64] v) => "
            f"(float[B,{heads},{length},64] o) {{ s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) }}")
    (region,) = fuse(text, {"B": batch}).plan.fusions
    assert region.kernel.schedule == "attention" and region.kernel.rounds
    assert 0.95 * measured < 1e6 * region.cost.seconds_after < 1.6 * measured
    assert not held(fuse(text, {"B": batch}, provider_options={"use_tf32": "0"}), "attention")
    whole = [each.kernel.pace for size in (1, batch) for each in fuse(text, {"B": size}, eager=True).plan.with_products
             if each.kernel.schedule == "attention" and len(each.view) == 3]
    assert all(pace.share == (ROUNDED_SHARE if pace.tiles > 1 else ROUNDED_ALONE) for pace in whole if pace)


def test_a_prediction_of_shared_keys_is_of_bytes_and_of_two_kernels() -> None:
    """As was measured on an H100 (36.2 MB in 17.4 us, 134 MB in 64.7), or of tiles that wait where they are few."""
    (region,) = (each for each in fuse(CACHED, {"B": 4, "Q": 1, "K": 2048}).plan.fusions if each.rule == "attention")
    moved = 2 * (2 * 4 * 8 * 2048 * 128 + 2 * 4 * 32 * 128)
    profile = find_profile("H100")
    floor = 2e-6
    assert region.cost.seconds_after == pytest.approx(
        TILE_BEGINS + floor + (moved + region.scratch) / (TILES_COPY * profile.bandwidth), rel=0.05)
    pace = region.kernel.pace
    assert pace is not None and region.steps == 2
    assert (pace.tiles, pace.stages) == (4, 2)  # 32 heads of keys, each with 16 chunks of two tiles of 64
    (small,) = (each for each in fuse(CACHED, {"B": 1, "Q": 1, "K": 256}).plan.fusions if each.rule == "attention")
    stage = 2 * 16 * 64 * (128 + 128) * 132 / (1e12 * 820 * TOGETHER_SHARE)
    assert stage > STAGE_WAITS and small.cost.seconds_after == pytest.approx(TILE_BEGINS + floor + TILE_ENDS + stage)


def test_a_joint_projection_is_left_as_it_lies() -> None:
    """For an attention that reads it so: with heads apart it would be one kernel, and what is around it another."""
    made = fuse(JOINED, {"B": 8, "S": 512})
    assert held(made) == [["MatMul", "Add"]] and len(held(made, "attention")) == len(made.plan.fusions) - 1 == 1


@pytest.mark.parametrize(("text", "batch", "taps"), [(IMAGES, 32, 9), (VOLUMES, 16, 27)], ids=["images", "volumes"])
def test_convolutions_lie_channels_last(text: str, batch: int, taps: int) -> None:
    """Along two axes and along three, whose windows are copied in boxes."""
    made = fuse(images(text), {"N": batch})
    assert [each.count("Conv") for each in held(made)] == [1] * 5  # the first reads what others computed
    assert sum(node.op_type == "Conv" for node in made.model.graph.node) == 1
    boxes = [region.kernel.plan.variants[0].name for region in made.plan.fusions if region.rule == "products"]
    assert all(f"each of {taps} places of windows" in name for name in boxes)


@pytest.mark.parametrize("text", [IMAGES, VOLUMES], ids=["images", "volumes"])
def test_norms_over_pixels_read_and_write_channels_last(text: str) -> None:
    """A transpose on one side alone would have rows lie along some tensors and across others."""
    text = text.replace("float16[64] b)", "float16[64] b, float16[64] s)")
    for place in range(6):
        text = text.replace(f"x{place + 1} = Relu(c{place})", f"n{place} = InstanceNormalization(c{place}, s, b) "
                            f"x{place + 1} = LeakyRelu(n{place})")
    regions = [[node.op for node in region.view] for region in fuse(images(text), {"N": 16}).plan.fusions]
    assert regions.count(["Transpose", "InstanceNormalization", "LeakyRelu", "Transpose"]) == 5  # but for the output's


@pytest.mark.parametrize(("results", "schedule"), [(1, "stencil_last"), (2, "stencil")])
def test_several_results_a_channel_are_no_product_of_few_columns(results: int, schedule: str) -> None:
    """Where images lie channels-last predictions are of one: as a product these took many times as long (H100)."""
    between = "c2 = Conv<pads = [1,1,1,1]>(x2, w, b)"
    assert between in IMAGES
    text = IMAGES.replace(between, "c2 = Conv<group = 64, pads = [1,1,1,1]>(x2, d)").replace(
        "c3 = Conv<pads = [1,1,1,1]>(x3, w, b)", "c3 = Conv<pads = [1,1,1,1]>(x3, e, b)").replace(
        "float16[64] b)", f"float16[64] b, float16[{64 * results},1,3,3] d, float16[64,{64 * results},3,3] e)")
    made = fuse(images(text), {"N": 32})
    assert [each.count("Conv") for each in held(made)] == [1] * 4
    assert [region.kernel.schedule for region in made.plan.fusions if region.rule == "depthwise"] == [schedule]


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


def test_what_is_waited_for_counts() -> None:
    """A stage takes as long as its copies where that is longer; float32 half as fast as the data sheet has it."""
    made = linear({"M": 8448, "K": 4096, "N": 2048})
    (region,) = made.plan.fusions
    pace, profile = region.kernel.pace, find_profile("H100")
    assert pace is not None

    def seconds(rounds: bool = False, **changes: Any) -> float:
        kernel = replace(region.kernel, rounds=rounds, pace=replace(pace, **changes))
        return made.costs.kernel_seconds(replace(region, made=kernel))

    ended = TILE_BEGINS + pace.tiles * TILE_ENDS
    assert seconds(waits=1e-5) == pytest.approx(ended + pace.tiles * pace.stages * 1e-5)
    assert seconds(waits=1e-9) == pytest.approx(seconds())
    slower = profile.peaks.float16_matrix / profile.peaks.tf32_matrix
    assert seconds(rounds=True) - ended == pytest.approx(slower * (seconds() - ended))
    # A bias and a Relu follow, which read a row beside the operands.
    behind, beside = 2 * 8448 * 2048 / 1e12, 2 * 2048 / (BESIDE_COPY * profile.bandwidth)
    assert seconds(results=1.0, meanwhile=False) == pytest.approx(seconds() + behind + beside)
    assert seconds(results=1.0, meanwhile=True) == pytest.approx(seconds() + beside)
    assert seconds(results=0.01, meanwhile=True) == pytest.approx(TILE_BEGINS + 100 * behind + beside)


def test_measurements_go_before_predictions(tmp_path: Path) -> None:
    """What was measured to be slower is left to the runtime, whatever is predicted."""
    path = tmp_path / "measured.sqlite"
    text = sized()
    timer = FakeTimer(lambda name: 20.0 if name == RUNTIME else 90.0)
    with open_database(path) as database:
        tune(parse(text), timer, database, TuneOptions())
    assert held(fuse(text, {})) and not held(fuse(text, {}, database=path))


def kept(path: Path, made: Optimised, nodes: Sequence[str], candidates: Mapping[str, float]) -> None:
    """Keep what some candidates of the region with these operators take, as if time had been over after that."""
    region = next(each for each in made.plan.with_products if [node.op for node in each.view] == nodes)
    what = Identities(made.graph, made.ledger.sizes).of(region)
    assert what is not None
    with open_database(path) as database:
        for name, microseconds in candidates.items():
            subject = what.nodes if name == NODES else what.kernel
            database.record(environment_of("NVIDIA H100 80GB HBM3"), Measurement(
                subject, text_of(what), name, microseconds, 0.1, 24, "ok"))


@pytest.mark.parametrize(("runtime", "taken"), [(30.0, True), (14.0, True), (11.0, False)])
def test_what_time_did_not_suffice_for_is_predicted(runtime: float, taken: bool, tmp_path: Path) -> None:
    """Of the product alone it is known what the runtime takes; of its region's kernel, which is predicted 14.5 us, a
    fifth more is expected then.  Where it takes 11, and the rest 8, a third would be gained else."""
    path = tmp_path / "measured.sqlite"
    kept(path, linear(eager=True), ["MatMul"], {NODES: runtime})
    made = linear(database=path)
    assert [made.costs.is_learned(node) for node in made.graph.nodes] == [True, False, False]
    assert held(made) == ([["MatMul", "Add", "Relu"]] if taken else [])


def test_what_was_measured_counts_before_all_of_it_was(tmp_path: Path) -> None:
    """Not yet what the runtime takes for the product alone."""
    path = tmp_path / "measured.sqlite"
    kept(path, linear(eager=True), ["MatMul", "Add", "Relu"], {NODES: 30.0, DEFAULT: 12.0})
    made = linear(database=path)
    assert held(made) == [["MatMul", "Add", "Relu"]] and made.plan.fusions[0].measured is not None
    alone = tmp_path / "alone.sqlite"  # as production's own times are
    kept(alone, linear(eager=True), ["MatMul", "Add", "Relu"], {DEFAULT: 12.0})
    assert held(linear(database=alone)) == [["MatMul", "Add", "Relu"]]
    slow = tmp_path / "slow.sqlite"
    kept(slow, linear(eager=True), ["MatMul", "Add", "Relu"], {NODES: 12.0, DEFAULT: 30.0})
    assert not held(linear(database=slow))


def test_on_other_gpus_all_of_it_has_to_be(tmp_path: Path) -> None:
    path = tmp_path / "measured.sqlite"
    unknown = measured("H100", tile_tflops=None)
    kept(path, linear(eager=True, target=unknown), ["MatMul", "Add", "Relu"], {NODES: 30.0, DEFAULT: 12.0})
    assert not held(linear(database=path, target=unknown))
    kept(path, linear(eager=True, target=unknown), ["MatMul"], {NODES: 20.0})
    assert held(linear(database=path, target=unknown)) == [["MatMul", "Add", "Relu"]]


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_large_graphs_are_planned_once(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last where the runtime would lay images out for much of its time; else as they lie."""
    monkeypatch.setattr(forms, "MOST_FORESEEN", 3)
    monkeypatch.setattr(forms, "LAYS_OUT", share)
    made: list[object] = []
    draft = forms.Drafting.draft
    monkeypatch.setattr(forms.Drafting, "draft", lambda *given: made.append(given) or draft(*given))
    found = fuse(images(), {"N": 16})
    assert (layout_record(found.model) is not None) is (share < 1) and len(made) == 1


def test_what_the_cpu_takes_says_nothing_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the GPU takes images are much that are laid out, however long others wait for the CPU."""
    monkeypatch.setattr(forms, "MOST_FORESEEN", 3)
    beside = IMAGES.replace("N,", "16,").replace("b) =>", "b, float16[16,224,224,2] p) =>").replace(
        "x6) {", "x6, float16[16,64,224,224] y) { y = GridSample(x0, p)")
    assert layout_record(fuse(images(beside), {}).model) is not None


UP = """g (float16[N,256,32,32] x, float16[256,128,{size},{size}] w, float16[128] b, float16[64,128,3,3] v)
 => (float16[N,64,64,64] y) {{ c = ConvTranspose<strides = [2,2], pads = {pads}>(x, w, b) r = Relu(c)
 d = Conv<pads = [1,1,1,1]>(r, v) y = Relu(d) }}"""


@pytest.mark.parametrize(("size", "pads"), [(2, [0, 0, 0, 0]), (4, [1, 1, 1, 1])])
def test_transposed_convolutions(size: int, pads: list[int]) -> None:
    """Predicted as a product of the same tiles, by tensor maps or by threads, channels-last with what follows."""
    found = fuse(images(UP.format(size=size, pads=pads)), {"N": 8})
    region = next(each for each in found.plan.fusions if any(node.op == "ConvTranspose" for node in each.nodes))
    assert {node.op for node in region.nodes} >= {"ConvTranspose", "Relu"} and region.kernel.schedule == "product"
    assert region.kernel.pace is not None and ("one copies" in region.kernel.plan.variants[0].name) is (size == 2)
    assert layout_record(found.model) is not None
