"""Values that are computed again where they are read: when they are, when they may not be, and the way back.

Kernels run in the emulator; reference: each region's body in float64, tolerances those of ``verifying.tolerances``.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from fake_timer import RUNTIME, FakeTimer
from recomputing import LARGE, again, feeds, fuse, model, packed, peak, regions, run

from onnxfuse.graph import from_proto
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.memory import peak_memory
from onnxfuse.planning.costs.traffic import Ledger, Observation
from onnxfuse.planning.evidence import Revising
from onnxfuse.planning.regions.recompute import recomputed
from onnxfuse.region import Region, Times
from onnxfuse.reporting import as_json, explain, report_of, report_of_fused
from onnxfuse.rewriting import InvariantError, read_fused, rewrite, unfuse
from onnxfuse.tuning import Timed, TuneOptions, tune
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")

SMALL = {"N": 2, "H": 7, "W": 5}

GATE = """g (float16[N, 16, H, W] x, float16[16, 16, 1, 1] w) => (float16[N, 16, H, W] y) <int64[2] axes = {2, 3}> {
    c = Conv(x, w) s = Sigmoid(c) a = Mul(c, s)
    m = ReduceMean(a, axes) e = Conv(m, w) g = Sigmoid(e) b = Mul(a, g) y = Conv(b, w)
}"""
"""A value that the pool and the gate read: computed once by each, from the convolution's result."""


def test_a_cheap_value_is_computed_by_each_reader() -> None:
    made, plain = fuse(GATE), fuse(GATE, disable=["recompute"])
    assert regions(made) == [["Sigmoid", "Mul", "ReduceMean"], ["Sigmoid", "Mul", "Sigmoid", "Mul"]]
    assert again(made) == [[], ["Sigmoid", "Mul"]]
    assert regions(plain) == [["Sigmoid", "Mul", "ReduceMean"], ["Sigmoid", "Mul"]]
    after, before = report_of(made), report_of(plain)
    # Before, it was written and read; now the second reader reads the convolution's result instead.
    assert before.after.bytes - after.after.bytes == 2 * 32 * 16 * 112 * 112
    assert after.before == before.before and after.after.seconds < before.after.seconds
    assert [entry.recomputes for entry in after.fusions] == [(), ("Sigmoid -> s", "Mul -> a")]
    assert sum(entry.bytes_before for entry in after.fusions) == sum(entry.bytes_before for entry in before.fusions)
    assert after.after.flops > before.after.flops == before.before.flops


def test_the_report_of_the_file_says_the_same() -> None:
    made = fuse(GATE)
    entries = report_of(made).fusions
    found = report_of_fused(from_proto(made.model), LARGE, made.profile)
    assert found.fusions == entries and found.after == report_of(made).after
    assert as_json(found)["fusions"][1]["recomputes"] == ("Sigmoid -> s", "Mul -> a")


@pytest.mark.parametrize("sizes", [SMALL, {"N": 1, "H": 1, "W": 1}, {"N": 3, "H": 33, "W": 31}])
def test_bodies_are_the_original_and_kernels_are_right(sizes: dict[str, int]) -> None:
    original, made = model(GATE), fuse(GATE)
    given = feeds(original, sizes)
    for wanted, got in zip(run(original, given), run(made.model, given), strict=True):
        assert wanted.tobytes() == got.tobytes()
    found = verify(made, EmulatedRunner(), given)
    assert [result.verdict for result in found.nodes] == ["passed", "passed"]


CHAIN = """g (float[N, 64, 4096] x, float[4096, 4096] w) => (float[N, 64, 4096] y, float[N, 64, 4096] z) {
    a = Abs(x) b = Exp(a) m = MatMul(b, w) c = Sub(m, a) d = Tanh(c) n = MatMul(d, w) e = Mul(n, a) y = Neg(e)
    z = MatMul(e, w)
}"""


def test_the_region_that_wrote_it_keeps_the_rest() -> None:
    made = fuse(CHAIN, dims={"N": 64})
    assert regions(made) == [["Abs", "Exp"], ["Abs", "Sub", "Tanh"], ["Abs", "Mul", "Neg"]]
    assert again(made) == [[], ["Abs"], ["Abs"]]
    assert [value.name for value in made.plan.fusions[0].outputs] == ["b"]


@pytest.mark.parametrize("text", [GATE, CHAIN])
def test_the_original_comes_back_in_every_order(text: str) -> None:
    """Byte for byte; on the way every model gives the original's results."""
    original = model(text)
    made = fuse(text, dims={"N": 64} if text == CHAIN else LARGE).model
    assert packed(unfuse(made)) == packed(original)
    given = feeds(original, SMALL) if text == GATE else None
    wanted = run(original, given) if given is not None else []
    names = [node.name for node in read_fused(made)]
    for order in itertools.permutations(names):
        left = made
        for name in order:
            left = unfuse(left, [name])
            onnx.checker.check_model(left)
            kinds = [node.op_type for node in left.graph.node]
            assert all(kinds.count(kind) <= [n.op_type for n in original.graph.node].count(kind)
                       for kind in kinds if not kind.startswith("Region"))
            if given is not None:
                assert [array.tobytes() for array in run(left, given)] == [array.tobytes() for array in wanted]
        assert packed(left) == packed(original)


def test_notes_of_what_is_computed_again_come_back() -> None:
    original = model(GATE)
    for place, node in enumerate(original.graph.node):
        node.name, node.doc_string = f"node {place}", f"note {place}"
    original.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, ["N", 16, "H", "W"]) for name in "sa")
    made = optimise(original, Options(dims=LARGE, verify=False, target="H200", database=False)).model
    assert not made.graph.value_info or {info.name for info in made.graph.value_info}.isdisjoint("sa")
    first, second = (node.name for node in read_fused(made))
    assert first != second and not first.startswith("node 1.")
    for order in ((first, second), (second, first)):
        assert packed(unfuse(unfuse(made, [order[0]]), [order[1]])) == packed(original)


def test_nodes_that_compute_the_same_stay_two() -> None:
    """Two nodes of equal content, each computed by two regions."""
    text = """g (float[N, 64, 4096] x, float[4096, 4096] w) => (float[N, 64, 4096] y) {
        a = Abs(x) k = Abs(x) b = Exp(a) p = Mul(b, k) m = MatMul(p, w) c = Sub(m, a) d = Mul(c, k) y = MatMul(d, w)
    }"""
    made = fuse(text, dims={"N": 64})
    assert again(made) == [[], ["Abs", "Abs"]]
    assert packed(unfuse(made.model)) == packed(model(text))
    names = [node.name for node in read_fused(made.model)]
    for order in (names, names[::-1]):
        assert packed(unfuse(unfuse(made.model, [order[0]]), [order[1]])) == packed(model(text))


def test_a_second_run_changes_nothing() -> None:
    made = fuse(GATE)
    other = optimise(made.model, Options(dims=LARGE, verify=False, target="H200", database=False))
    assert other.plan.fusions == () and packed(other.model) == packed(made.model)


def test_kernels_that_fail_go_together() -> None:
    """Without one of two that compute a value again nobody would write it: the other goes too."""
    made = fuse(GATE)
    assert made.together([]) == set() and made.together([0]) == made.together([1]) == {0, 1}
    assert packed(made.without([1]).model) == packed(model(GATE))
    with pytest.raises(InvariantError, match=r"'[sa]' vanishes"):
        rewrite(made.folded.proto, made.graph, made.regions[:1])
    with pytest.raises(InvariantError, match="share node"):
        rewrite(made.folded.proto, made.graph, [replace(region, again=()) for region in made.regions])


@pytest.mark.parametrize(("old", "new"), [
    ("(float16[N, 16, H, W] y)", "(float16[N, 16, H, W] y, float16[N, 16, H, W] a)"),
    ("y = Conv(b, w)", "y = Conv(b, w) z = Conv(a, w) "),
    ("s = Sigmoid(c) a = Mul(c, s)", "s = Softmax<axis = 1>(c) a = Mul(c, s)"),
    ("c = Conv(x, w) s = Sigmoid(c)", "c = Conv(x, w) s = RandomNormalLike(c)"),
], ids=["an output of the graph", "another reader", "a reduction", "random numbers"])
def test_what_must_be_written_is_written(old: str, new: str) -> None:
    text = GATE.replace(old, new)
    if "z = " in text:
        text = text.replace("W] y)", "W] y, float16[N, 16, H, W] z)")
    assert text != GATE and not any(again(fuse(text)))


@pytest.mark.parametrize(("captured", "expected"), [("a", []), ("b", [["Sigmoid", "Mul"]])])
def test_what_a_body_reads_is_written(captured: str, expected: list[list[str]]) -> None:
    text = GATE.replace("y = Conv(b, w)", """q = If (t) <
        then_branch = f () => (float16[N, 16, H, W] u) { u = Neg(CAPTURED) },
        else_branch = h () => (float16[N, 16, H, W] v) { v = Exp(b) }
    > y = Conv(q, w)""".replace("CAPTURED", captured)).replace("1] w) =>", "1] w, bool t) =>")
    assert [found for found in again(fuse(text)) if found] == expected


def test_bodies_are_graphs_too() -> None:
    """Inside a branch a value is computed again as in the main graph, and comes back."""
    inner = GATE[GATE.index("c = Conv"):GATE.rindex("}")]
    text = """g (float16[N, 16, H, W] x, bool t) => (float16[N, 16, H, W] r)
        <int64[2] axes = {2, 3}> {
        r = If (t) <
            then_branch = f () => (float16[N, 16, H, W] y) { INNER },
            else_branch = h () => (float16[N, 16, H, W] v) { v = Identity(x) }
        >
    }""".replace("INNER", inner)
    proto = model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float16), "w"))
    made = optimise(proto, Options(dims=LARGE, verify=False, target="H200", database=False))
    assert again(made) == [[], ["Sigmoid", "Mul"]]
    assert packed(unfuse(made.model)) == packed(proto)


SUM = """g (float[N, 64, 4096] x, float[N, 64, 4096] z, float[4096, 4096] w) => (float[N, 64, 4096] y) {
    a = Add(x, z) b = Exp(a) m = MatMul(b, w) c = Sub(m, a) d = Tanh(c) y = MatMul(d, w)
}"""
"""Two operands in place of one: reading the sum costs no more."""


def test_a_loop_runs_its_body_many_times() -> None:
    inner = GATE[GATE.index("c = Conv"):GATE.rindex("}")].replace("Conv(x, w)", "Conv(s0, w)")
    made = fuse("""g (float16[N, 16, H, W] x, float16[16, 16, 1, 1] w, int64 n, bool t) => (float16[N, 16, H, W] r)
        <int64[2] axes = {2, 3}> {
        r = Loop(n, t, x) <body = f (int64 i, bool u, float16[N, 16, H, W] s0) => (bool v, float16[N, 16, H, W] y) {
            v = Identity(u) INNER
        }>
    }""".replace("INNER", inner))
    assert again(made) == [[], ["Sigmoid", "Mul"]]


def test_no_gain_is_told() -> None:
    made = fuse(SUM, dims={"N": 64})
    assert regions(made) == [["Add", "Exp"], ["Sub", "Tanh"]]
    told = explain(made, "a").node
    assert told is not None
    (reason,) = (entry.reason for entry in told.considered if entry.verdict == "refused")
    assert reason.startswith("'a' stays written: computed again by 1 reader, all would take ")


def context(made: Optimised, costs: CostModel | None = None, measured: Revising | None = None) -> Context:
    return Context(made.canonical.graph, made.rules, costs or CostModel(made.ledger, made.profile), measured=measured)


def test_what_runs_less_often_than_its_reader_is_written() -> None:
    plain = fuse(GATE, disable=["recompute"])
    for runs, expected in ((1.0, ["Sigmoid", "Mul"]), (3.0, [])):
        observed = {node: Observation(None, runs) for node in plain.plan.fusions[1].nodes}
        ledger = Ledger(plain.graph, plain.ledger.sizes, plain.ledger.placement, observed)
        made = recomputed(plain.plan, context(plain, CostModel(ledger, plain.profile)))
        assert [node.op for node in made.fusions[1].again] == expected


def test_what_loses_at_a_size_nearby_is_written() -> None:
    """There its arithmetic takes long: on a GPU that has next to none."""
    plain = fuse(GATE, disable=["recompute"])
    weak = plain.profile.model_copy(update={"peaks": plain.profile.peaks.model_copy(update={"float32": 0.001})})
    for profile, expected in ((plain.profile, ["Sigmoid", "Mul"]), (weak, [])):
        nearby = {"elsewhere": CostModel(plain.ledger, profile)}
        plan = replace(plain.plan, spaces=tuple(
            replace(each, pool=replace(each.pool, nearby=nearby)) for each in plain.plan.spaces))
        made = recomputed(plan, context(plain))
        assert [node.op for node in made.fusions[1].again] == expected


def test_explain_names_the_regions() -> None:
    made = fuse(GATE)
    node = explain(made, "a").node
    assert node is not None
    names = [entry.node for entry in made.rewritten.placed]
    assert node.state == "fused" and node.fused_nodes == tuple(names)
    assert node.summary == f"computed in each of {', '.join(names)}: so its result need not be written and read"
    chosen = [entry for entry in node.considered if entry.verdict == "chosen"]
    assert len(chosen) == 2 and all("'a' is computed again where it is read" in entry.reason for entry in chosen)
    reader = explain(made, "b").node
    assert reader is not None and {entry.verdict: bool(entry.lost_to) for entry in reader.considered} == {
        "chosen": False, "lost": True}


SPREAD = """g (float16[N, 64, 4096] u, float16[1, 1, 4096] x, float16[4096, 4096] w) => (float16[N, 64, 4096] y) {
    p0 = Tanh(x) STEPS m = MatMul(u, w) c = Mul(m, p7) d = Tanh(c) n = MatMul(d, w) e = Mul(n, p7) f = Tanh(e)
    y = MatMul(f, w)
}""".replace("STEPS", " ".join(f"p{place} = Pow(p{place - 1}, x)" for place in range(1, 8)))
"""Few elements that a reader spreads over many: done for each, their arithmetic outweighs a kernel of their own."""


def test_a_value_that_is_spread_costs_its_arithmetic_every_time() -> None:
    made = fuse(SPREAD, dims={"N": 16})
    assert not any(again(made)) and regions(made)[1:] == [["Mul", "Tanh"], ["Mul", "Tanh"]]


def test_a_run_holds_no_more() -> None:
    made, plain = fuse(GATE), fuse(GATE, disable=["recompute"])
    assert peak(made) <= peak(plain)


HOLDING = """g (float[N, 2, 16] x, float[N, 1, 16] z, float[16, 4096] i, float[4096, 32768] wide,
           float[32768, 4096] narrow, float[4096, 16384] half, float[16384, 16] back,
           float[4096, 16] o) => (float[N, 2, 16] y) <float small = {0.5}> {
    c = MatMul(x, i) u = MatMul(z, i) a = Mul(c, u) b = Exp(a) l = MatMul(b, wide) m = MatMul(l, narrow)
    d = Sub(m, a) e = Tanh(d) END
}"""
"""What a value is computed from takes half as much again as the value, and what lies between the most of the run."""

ENDS = {
    "no room": "y = MatMul(e, o)",
    "another that holds no more": """
        t = MatMul(e, o) s = MatMul(t, i) f = Abs(s) h = Exp(f) k = MatMul(h, wide) n = MatMul(k, narrow) p = Sub(n, f)
        q = Tanh(p) y = MatMul(q, o)""",
    "another that a constant is read for": """
        t = MatMul(e, o) s = MatMul(t, i) f = Add(s, small) h = Exp(f) k = MatMul(h, wide) n = MatMul(k, narrow)
        p = Sub(n, f) q = Tanh(p) y = MatMul(q, o)""",
    "room as long as nothing is fused": """
        f = MatMul(e, half) h = Exp(f) k = Sigmoid(h) p = Add(h, k) y = MatMul(p, back)""",
}


@pytest.mark.parametrize(("end", "strategy", "expected"), [
    ("no room", "auto", []),
    ("another that holds no more", "auto", [["Abs"]]),
    ("another that a constant is read for", "auto", [["Add"]]),
    ("room as long as nothing is fused", "auto", [["Mul"]]),
    ("room as long as nothing is fused", "memory", []),
])
def test_what_holds_more_needs_room(end: str, strategy: str, expected: list[list[str]]) -> None:
    text = HOLDING.replace("END", ENDS[end])
    made, plain = (fuse(text, dims={"N": 4096}, strategy=strategy, disable=off) for off in ((), ["recompute"]))
    assert [found for found in again(made) if found] == expected
    assert peak(made) <= (peak(plain) if strategy == "memory" else max(peak(plain), peak_memory(plain.ledger).peak))


def test_values_that_hold_as_much_together_need_room_too() -> None:
    """What both are computed from takes no more than they do; but one of them would be gone at the peak of the run."""
    text = HOLDING.replace("END", ENDS["no room"])
    text = text.replace("b = Exp(a) l = MatMul(b, wide)", """
        r = Sub(c, u) f = Exp(a) b = Mul(f, r) p = MatMul(b, o) q = MatMul(p, i) s = Add(q, r) t = Tanh(s)
        l = MatMul(t, wide)""")
    made, plain = (fuse(text, dims={"N": 4096}, disable=off) for off in ((), ["recompute"]))
    assert regions(made) == [["Mul", "Exp", "Sub", "Mul"], ["Add", "Tanh"], ["Sub", "Tanh"]]
    assert peak(made) <= max(peak(plain), peak_memory(plain.ledger).peak)


def test_it_is_computed_from_what_is_written_anyway() -> None:
    text = """g (float[N, 64, 4096] x, float[4096, 4096] w) => (float[N, 64, 4096] y, float[N, 64, 4096] v) {
        v = Abs(x) a = Tanh(v) b = Exp(a) m = MatMul(b, w) c = Sub(m, a) d = Neg(c) y = MatMul(d, w)
    }"""
    assert again(fuse(text, dims={"N": 64})) == [[], ["Tanh"]]


def test_of_two_values_the_cheap_one_is_computed_again() -> None:
    text = """g (float[N, 64, 4096] x, float[4096, 4096] w) => (float[N, 64, 4096] y) {
        a = Abs(x) q = Softmax(a) b = Neg(q) m = MatMul(b, w) c = Sub(m, a) d = Mul(c, q) y = MatMul(d, w)
    }"""
    made = fuse(text, dims={"N": 64})
    assert again(made) == [[], ["Abs"]]
    assert [value.name for value in made.plan.fusions[0].outputs] == ["q", "b"]


class Asked:
    """Stands in for a database that knows of no region, and keeps what it was asked."""

    def __init__(self) -> None:
        self.fusions: list[Region] = []

    def revision(self, fusion: Region) -> Region:
        """The region as it is."""
        self.fusions.append(fusion)
        return fusion

    def runtime(self, _: Region) -> None:
        """Not measured either."""


@dataclass
class Recorded(Asked):
    """Somebody measured kernels that compute something again, and others."""

    written: float
    repeated: float

    def revision(self, fusion: Region) -> Region:
        """The region with its time."""
        reads = any(value.name == "a" for value in (*fusion.tensors, *fusion.outputs))
        return replace(fusion, measured=Times(self.written if reads else self.repeated, None, "H100", "2026-01-01"))


@pytest.mark.parametrize(("written", "repeated", "expected"), [
    (10.0, 20.0, [[], []]), (20.0, 10.0, [[], ["Sigmoid", "Mul"]]), (10.0, 9.9, [[], []]),
], ids=["slower", "faster", "noise"])
def test_what_was_measured_decides(written: float, repeated: float, expected: list[list[str]]) -> None:
    plain = fuse(GATE, disable=["recompute"])
    known = Recorded(written, repeated)
    plan = replace(plain.plan, fusions=tuple(map(known.revision, plain.plan.fusions)))
    made = recomputed(plan, context(plain, measured=known))
    assert [[node.op for node in fusion.again] for fusion in made.fusions] == expected


def test_half_a_measurement_decides_nothing() -> None:
    plain = fuse(GATE, disable=["recompute"])
    made = recomputed(plain.plan, context(plain, measured=Recorded(10.0, 20.0)))
    assert [[node.op for node in fusion.again] for fusion in made.fusions] == [[], ["Sigmoid", "Mul"]]


def test_without_a_measurement_the_prediction_decides() -> None:
    """It is close enough to be measured, and nobody has."""
    plain = fuse(SUM, dims={"N": 64}, disable=["recompute"])
    made = recomputed(plain.plan, context(plain, measured=Asked()))
    assert not any(fusion.again for fusion in made.fusions)


def test_what_is_predicted_far_slower_is_not_even_made() -> None:
    plain = fuse(SPREAD, dims={"N": 16}, disable=["recompute"])
    asked = Asked()
    recomputed(plain.plan, context(plain, measured=asked))
    assert not asked.fusions


class _PoolTimer(FakeTimer):
    """Tells what the kernel takes that writes the value beside the pool; every other one takes 10 µs."""

    pool = 10.0

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        found = super().time(model, fused=fused)
        return replace(found, microseconds=self.pool if fused and len(model.graph.output) == 2 else found.microseconds)


@pytest.mark.parametrize(("pool", "expected"), [(100.0, [[], ["Sigmoid", "Mul"]]), (1.0, [[], []])])
def test_tune_measures_both_ways(tmp_path: Path, pool: float, expected: list[list[str]]) -> None:
    """``optimize`` takes the faster one, whatever was predicted."""
    path = tmp_path / "measurements.sqlite"
    timer = _PoolTimer(lambda name: 1000.0 if name == RUNTIME else 10.0)
    timer.pool = pool
    with open_database(path) as kept:
        found = tune(model(GATE), timer, kept, TuneOptions(disable=["products"], dims=LARGE))
    assert sorted(region.operators for region in found.regions) == sorted([
        ("Sigmoid", "Mul", "ReduceMean"), ("Sigmoid", "Mul", "ReduceMean"), ("Sigmoid", "Mul", "Sigmoid", "Mul"),
        ("Sigmoid", "Mul"),
    ])
    assert {region.verdict for region in found.regions} == {"fused"}
    assert again(fuse(GATE, target="H100", database=path)) == expected
    assert again(fuse(GATE, target="H100")) == [[], ["Sigmoid", "Mul"]]


def test_a_record_tells_what_others_compute() -> None:
    made = fuse(GATE)
    nodes = read_fused(made.model)
    assert [node.again for node in nodes] == [(), ("s", "a")]
    left = unfuse(made.model, [nodes[0].name])
    (attribute,) = (entry for node in left.graph.node for entry in node.attribute if entry.name == "onnxfuse")
    stands = [entry.get("stands", False) for entry in json.loads(attribute.s)["nodes"]]
    assert stands == [True, True, False, False]
