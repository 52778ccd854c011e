"""Horizontal fusion: which independent regions are joined, and whether their joint kernels are right.

Kernels run in the emulator on float32 and float16; reference: the region's body in float64, tolerances those of
``verifying.tolerances``, every variant that holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.planning.costs.memory import Memory, peak_memory
from onnxfuse.planning.regions.horizontal import CODE, MOST_PARTS, STAGE, joined
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.runtime.compile import compile_cubin
from onnxfuse.schedules import SCHEDULES
from onnxfuse.schedules.headers import definitions
from onnxfuse.verifying.nodes import NodeVerifier

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
SMALL = {"N": 32}


def fuse(text: str, **options: object) -> Optimised:
    given = {"dims": SMALL, "verify": False, "target": "H200", "database": False, **options}
    return optimise(onnx.parser.parse_model(HEAD + text), Options(**given))  # type: ignore[arg-type]


def regions(optimised: Optimised) -> list[tuple[str, list[str]]]:
    return [(f.kernel.schedule, [node.op for node in f.view]) for f in optimised.plan.fusions]


def verify(optimised: Optimised, feeds: Mapping[str, np.ndarray]) -> None:
    """Every fused node that reads graph inputs alone, in the emulator against its body."""
    (node,) = read_fused(optimised.model)
    fusion = optimised.plan.fusions[0]
    given = {f"x{place}": feeds[value.name] for place, value in enumerate(fusion.tensors)}
    names = dict(zip(given, node_inputs(optimised), strict=True))
    result = NodeVerifier(optimised.model, EmulatedRunner()).verify(
        node, {names[name]: array for name, array in given.items()}, "given")
    assert result.verdict == "passed", result.message


def node_inputs(optimised: Optimised) -> Sequence[str]:
    """Names of the fused function's tensor inputs."""
    (function,) = (each for each in optimised.model.functions if each.domain == "onnxfuse")
    return [name for name in function.input if not name.startswith("h")]


QKV = """g (float[N, 64] q, float[N, 64] k, float[N, 64] v, float[64] a, float[64] b, float[64] c)
  => (float[4, N, 16] x, float[4, N, 16] y, float[4, N, 16] z) <int64[3] s = {0, 4, 16}> {
    d = Add(q, a) e = Reshape(d, s) x = Transpose<perm = [1, 0, 2]>(e)
    f = Add(k, b) g = Reshape(f, s) y = Transpose<perm = [1, 0, 2]>(g)
    h = Add(v, c) i = Reshape(h, s) z = Transpose<perm = [1, 0, 2]>(i)
}"""


def test_equal_regions_share_a_launch() -> None:
    made = fuse(QKV)
    assert regions(made) == [("together", ["Add", "Reshape", "Transpose"] * 3)]
    (fusion,) = made.plan.fusions
    assert fusion.cost.kernels_after == 1 and fusion.rule == "grow-pointwise"
    (step,) = fusion.kernel.plan.variants[0].steps
    assert step.grid[1:] == ("3", "1")
    # Equal texts are one function.
    assert fusion.kernel.source.count("namespace part") == 1


def test_joined_texts_have_their_headers_once_and_compile() -> None:
    """The compiler that the GPU's kernels come from: NVIDIA's headers stand in no namespace."""
    (fusion,) = fuse(MIXED).plan.fusions
    for name in ("Vector", "Tile"):
        (text,) = {each.text for header in ("onnxfuse", "tile") for each in definitions(header) if name in each.names}
        assert fusion.kernel.source.count(text) == 1
        assert fusion.kernel.source.index(text) < fusion.kernel.source.index("namespace part0")
    assert compile_cubin(fusion.kernel.source, "sm_90").startswith(b"\x7fELF")


def test_joined_regions_compute_what_they_did() -> None:
    rng = np.random.default_rng(0)
    shapes = {**dict.fromkeys("qkv", (32, 64)), **dict.fromkeys("abc", (64,))}
    verify(fuse(QKV), {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


def test_they_stay_apart_where_that_is_asked_for_or_their_schedule_has_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = regions(fuse(QKV, disable=[STAGE]))
    for schedule, _ in apart:
        monkeypatch.setattr(SCHEDULES[schedule], "sharing", lambda kernel: ())
    assert len(apart) == len(regions(fuse(QKV))) == 3


def test_unfusing_gives_the_original_back() -> None:
    made = fuse(QKV)
    assert unfuse(made.model).SerializeToString(deterministic=True) == (
        made.loaded.proto.SerializeToString(deterministic=True))


MIXED = """g (float[N, 96] x, float16[N, 64] y, float[N, 40] z, float[96] w)
  => (float[N, 96] a, float16[64, N] b, float[N, 40] c, float[N, 1] d) <int64[1] last = {-1}> {
    r = Abs(x) s = Softmax(r) a = Mul(s, w)
    t = Exp(y) u = Neg(t) b = Transpose(u)
    e = ReduceSum(z, last) d = Sqrt(e) c = Div(z, d)
}"""


@pytest.mark.parametrize("count", [32, 33, 7])
def test_different_schedules_and_sizes_share_a_launch(count: int) -> None:
    """Rows of two lengths, and a tiled transpose in float16: each has its own blocks and its own shared memory."""
    made = fuse(MIXED)
    assert regions(made) == [
        ("together", ["Abs", "Softmax", "Mul", "Exp", "Neg", "Transpose", "ReduceSum", "Sqrt", "Div"])]
    rng = np.random.default_rng(1)
    verify(made, {
        "x": rng.standard_normal((count, 96)).astype(np.float32),
        "y": rng.standard_normal((count, 64)).astype(np.float16),
        "z": rng.random((count, 40)).astype(np.float32) + 0.5,
        "w": rng.standard_normal(96).astype(np.float32),
    })


NORMS = """g (float[N, 64] q, float[N, 64] k, float[N, 64] v, float[64] w)
  => (float[N, 64] x, float[N, 64] y, float[N, 64] z) {
    x = LayerNormalization(q, w) y = LayerNormalization(k, w) z = LayerNormalization(v, w)
}"""

ROTATIONS = """g (float[N, 4, 16] q, float[N, 2, 16] k, float[N, 1, 16] c, float[N, 1, 16] s)
  => (float[N, 4, 16] x, float[N, 2, 16] y)
  <int64[1] zero = {0}, int64[1] half = {8}, int64[1] whole = {16}, int64[1] axis = {2}> {
    a = Mul(q, c) d = Slice(q, half, whole, axis) e = Neg(d) f = Slice(q, zero, half, axis) g = Concat<axis = 2>(e, f)
    h = Mul(g, s) x = Add(a, h)
    i = Mul(k, c) j = Slice(k, half, whole, axis) l = Neg(j) m = Slice(k, zero, half, axis) n = Concat<axis = 2>(l, m)
    o = Mul(n, s) y = Add(i, o)
}"""


@pytest.mark.parametrize(("text", "shapes", "parts"), [
    (NORMS, {"q": (64,), "k": (64,), "v": (64,)}, "3"),
    (ROTATIONS, {"q": (4, 16), "k": (2, 16), "c": (1, 16), "s": (1, 16)}, "2"),
])
def test_norms_of_queries_keys_and_values_and_rotations(
    text: str, shapes: dict[str, tuple[int, ...]], parts: str
) -> None:
    """Queries may have more heads than keys: their part has more blocks."""
    made = fuse(text)
    (fusion,) = made.plan.fusions
    assert fusion.kernel.plan.variants[0].steps[0].grid[1] == parts
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal((32, *shape)).astype(np.float32) for name, shape in shapes.items()}
    verify(made, {**feeds, "w": rng.standard_normal(64).astype(np.float32)})


def test_what_is_not_worth_a_kernel_joins_others() -> None:
    text = "g (float[N, 64] x, float[N, 32] y) => (float[N, 64] a, float[N, 32] b) { a = Exp(x) b = Tanh(y) }"
    assert fuse(text, disable=[STAGE]).plan.fusions == ()
    made = fuse(text)
    assert regions(made) == [("together", ["Exp", "Tanh"])]
    assert [(each.verdict, each.lost_to) for each in made.plan.considered] == [
        ("chosen", ""), ("lost", "Exp -> a"), ("lost", "Exp -> a")]
    assert made.plan.considered[0].reason == (
        "2 independent regions as one kernel are predicted to take 1.7 µs; apart, 3.4 µs.")


def test_a_join_settles_that_its_parts_gained_nothing_and_no_more() -> None:
    text = "g (float[N, 64] x, float[N, 32] y) => (float[N, 64] a, float[N, 32] b) { a = Exp(x) b = Tanh(y) }"
    plain = fuse(text, disable=[STAGE])
    kept = (Refusal("no-gain", "another region", "Sqrt -> z"), Refusal("growth", "no rule has it", "Exp -> a"))
    plan = replace(plain.plan, refusals=(*kept, Refusal("no-gain", "it takes as long", "Exp -> a")))
    made = joined(plan, Context(plain.canonical.graph, plain.rules, CostModel(plain.ledger, plain.profile)))
    assert len(made.fusions) == 1 and made.refusals == kept


def test_how_often_a_body_runs_does_not_make_its_kernels_long() -> None:
    made = fuse("""g (float[N, 64] x, float[N, 32] z, float[64, 64] w) => (float[N, 64] r, float[100, N, 32] q)
      <int64 hundred = {100}, bool yes = {1}> {
        r, q = Loop(hundred, yes, x) <
            body = f (int64 i, bool u, float[N, 64] s) => (bool v, float[N, 64] y, float[N, 32] t) {
                v = Identity(u) e = Exp(s) y = MatMul(e, w) t = Tanh(z)
            }
        >
    }""")
    assert regions(made) == [("together", ["Exp", "Tanh"])]
    assert made.plan.fusions[0].cost.executions == 100


def test_siblings_read_their_input_once() -> None:
    made = fuse("""g (float[N, 4096] x) => (float[N, 4096] a, float[N, 4096] b) {
        r = Relu(x) c = Hardmax(r) d = Exp(c) a = Neg(d) e = Tanh(c) b = Abs(e)
    }""", dims={"N": 8192})
    assert ("pointwise", ["Exp", "Neg", "Tanh", "Abs"]) in regions(made)


def test_long_kernels_stay_apart() -> None:
    """What a launch costs is no matter there: sharing registers would be all that is left."""
    text = """g (float[N, 64] x, float[N, 32] y) => (float[N, 64] a, float[N, 32] b) {
        c = Exp(x) a = Neg(c) d = Tanh(y) b = Abs(d)
    }"""
    assert len(fuse(text).plan.fusions) == 1
    assert len(fuse(text, dims={"N": 4_000_000}).plan.fusions) == 2


def test_sizes_too_far_apart_stay_apart() -> None:
    """The grid has room for the largest part for each: most blocks would have nothing to do."""
    text = """g (float[N, 64] x, float[N] y) => (float[N, 64] a, float[N] b) {
        c = Exp(x) a = Neg(c) d = Tanh(y) b = Abs(d)
    }"""
    assert len(fuse(text, dims={"N": 64}).plan.fusions) == 1
    assert len(fuse(text, dims={"N": 65536}).plan.fusions) == 2


def told(text: str, **dims: int) -> list[str]:
    """Why regions of one kernel are in several launches."""
    return [refusal.message for refusal in fuse(text, dims=dims).plan.refusals if refusal.code == CODE]


def test_why_a_launch_ends_is_told() -> None:
    count = MOST_PARTS + 1
    reads = ", ".join(f"float[N, 64] x{place}" for place in range(count))
    gives = ", ".join(f"float[N, 64] y{place}" for place in range(count))
    nodes = " ".join(f"a{place} = Exp(x{place}) y{place} = Neg(a{place})" for place in range(count))
    (message,) = told(f"g ({reads}) => ({gives}) {{ {nodes} }}", N=64)
    assert message.endswith(f"which runs the same kernel: a launch holds {MOST_PARTS} regions.")
    long = """g (float[N, 64] x, float[N, 64] y) => (float[N, 64] a, float[N, 64] b) {
        c = Exp(x) a = Neg(c) d = Exp(y) b = Neg(d)
    }"""
    assert told(long, N=4) == []
    (message,) = told(long, N=4_000_000)
    assert message.endswith("too little is predicted to be saved.")


APART = """g (float[N, 4096] x, float[N, 4096] y, GIVEN) => (float[N, 4096] a, MADE, float[N, 4096] b) {
    c = Exp(x) a = Neg(c) BETWEEN d = Exp(y) b = Neg(d)
}"""
"""Nodes stand in the order of the outputs."""


@pytest.mark.parametrize(("size", "between", "reason"), [
    (128, 100, None), (128, 140, "held all that while."), (16, 140, None),
], ids=["near", "far", "far and small"])
def test_what_stands_far_apart_is_joined_where_it_is_small(size: int, between: int, reason: str | None) -> None:
    text = APART.replace("GIVEN", ", ".join(f"float[16, 16] p{place}" for place in range(between)))
    text = text.replace("MADE", ", ".join(f"float[16, 16] m{place}" for place in range(between)))
    text = text.replace("BETWEEN", " ".join(f"m{place} = MatMul(p{place}, p{place})" for place in range(between)))
    messages = told(text, N=size)
    assert [message[-len(reason or ""):] for message in messages] == ([] if reason is None else [reason])
    joins = [schedule for schedule, _ in regions(fuse(text, dims={"N": size})) if schedule == "together"]
    assert len(joins) == (reason is None)


@pytest.mark.parametrize(("between", "reason"), [
    (8, None), (9, "9 kernels in a row run between the first of its regions and this one."),
])
def test_what_runs_much_later_stays_apart(between: int, reason: str | None) -> None:
    chain = " ".join(f"m{place + 1} = MatMul(m{place}, w)" for place in range(between))
    text = f"""g (float[N, 16] x, float[N, 16] m0, float[16, 16] w) => (float[N, 16] a, float[N, 16] b) {{
        c = Exp(x) a = Neg(c) {chain} d = Exp(m{between}) b = Neg(d)
    }}"""
    messages = told(text, N=128)
    assert [message[-len(reason or ""):] for message in messages] == ([] if reason is None else [reason])
    assert len(fuse(text, dims={"N": 128}).plan.fusions) == (1 if reason is None else 2)


def test_what_does_not_run_equally_often_stays_apart() -> None:
    """As a profile may show of branches that ONNX Runtime leaves out."""
    text = """g (float[N, 64] x, float[N, 64] y) => (float[N, 64] a, float[N, 64] b) {
        c = Exp(x) a = Neg(c) d = Exp(y) b = Neg(d)
    }"""
    plain = fuse(text, disable=[STAGE])
    first, second = plain.plan.fusions
    for runs, count in ((1.0, 1), (0.5, 2)):
        other = replace(second, counted=replace(second.cost, executions=runs))
        plan = replace(plain.plan, fusions=(first, other))
        made = joined(plan, Context(plain.canonical.graph, plain.rules, CostModel(plain.ledger, plain.profile)))
        assert len(made.fusions) == count


def test_that_one_runs_after_the_other_is_not_told() -> None:
    assert told("""g (float[N, 64] x, float[64, 64] w) => (float[N, 64] y) {
        p = Exp(x) a = Neg(p) m = MatMul(a, w) q = Exp(m) y = Neg(q)
    }""", N=8) == []


@pytest.mark.parametrize("between", ["m = MatMul(a, w)", "m = Hardmax(a)"])
def test_a_path_between_keeps_regions_apart(between: str) -> None:
    made = fuse(f"""g (float[N, 64] x, float[64, 64] w) => (float[N, 64] y) {{
        p = Exp(x) a = Neg(p) {between} q = Tanh(m) y = Abs(q)
    }}""")
    assert sorted(ops for _, ops in regions(made)) == [["Exp", "Neg"], ["Tanh", "Abs"]]


CROSSED = """g (float[N, 64] x, float[N, 64] y, float[64, 64] w, float[64, 4096] wide, float[4096, 64] narrow)
  => (float[N, 64] z, float[N, 64] d, float[N, 64] h) {{
    t = MatMul(x, wide) u = Hardmax(t) z = MatMul(u, narrow)
    {nodes}
}}"""
"""Room enough in memory for what stands in it."""


def test_layers_are_joined_one_by_one() -> None:
    made = fuse(CROSSED.format(nodes="""
        a = Exp(x) b = Neg(a) m = MatMul(b, w) c = Tanh(m) d = Abs(c)
        e = Exp(y) f = Neg(e) n = MatMul(f, w) g = Tanh(n) h = Abs(g)
    """))
    assert [ops for _, ops in regions(made)] == [["Exp", "Neg"] * 2, ["Tanh", "Abs"] * 2]


def test_two_joins_do_not_close_a_cycle() -> None:
    """The first of one branch may join the last of the other, and the other way round; both would close a cycle."""
    made = fuse(CROSSED.format(nodes="""
        a = Exp(x) b = Neg(a) m = MatMul(b, w) c = Hardmax(m) d = Erf(c)
        e = Erf(y) f = Hardmax(e) n = MatMul(f, w) g = Exp(n) h = Neg(g)
    """))
    onnx.checker.check_model(made.model)
    joins = [ops for schedule, ops in regions(made) if schedule == "together"]
    assert len(joins) == 2


def test_a_branch_that_captures_a_result_comes_after_it() -> None:
    """An If that reads one region's result by name, and is read by the other: a path like any other."""
    made = fuse("""g (float[N, 64] x, float[N, 64] y, bool p) => (float[N, 64] b, float[N, 64] f) {
        a = Exp(x) b = Neg(a)
        i = If(p) <
            then_branch = t () => (float[N, 64] u) { u = Hardmax(b) },
            else_branch = o () => (float[N, 64] v) { v = Hardmax(y) }
        >
        e = Tanh(i) f = Abs(e)
    }""")
    assert [ops for _, ops in regions(made)] == [["Exp", "Neg"], ["Tanh", "Abs"]]


def test_the_peak_of_memory_does_not_rise() -> None:
    """Two chains one after the other: joined at their ends, both products' inputs would be held at once."""
    text = """g (float[N, 64] x, float[64, 4096] w, float[4096, 64] v) => (float[N, 64] y) {
        a = MatMul(x, w) b = Exp(a) c = Neg(b) d = MatMul(c, v)
        e = MatMul(x, w2) f = Tanh(e) g = Abs(f) h = MatMul(g, v)
        y = Add(d, h)
    }""".replace("float[64, 4096] w,", "float[64, 4096] w, float[64, 4096] w2,")
    dims = {"N": 256}
    apart, made = fuse(text, dims=dims, disable=[STAGE]), fuse(text, dims=dims)
    assert len(apart.plan.fusions) == len(made.plan.fusions)
    peaks = [peak_memory(each.ledger, each.plan.fusions).peak for each in (apart, made)]
    assert peaks[1] <= peaks[0]
    # With something larger held at another time, there is room.
    larger = text.replace("y = Add(d, h)", "s = Add(d, h) t = MatMul(s, big) y = MatMul(t, back)").replace(
        "float[4096, 64] v)", "float[4096, 64] v, float[64, 32768] big, float[32768, 64] back)")
    roomy = fuse(larger, dims=dims)
    assert ["Exp", "Neg", "Tanh", "Abs"] in [ops for _, ops in regions(roomy)]


@pytest.mark.parametrize(("between", "kept"), [(10, ["Exp", "Neg"] * 2), (60, ["Tanh", "Abs"] * 2)])
def test_joins_that_hold_the_least_for_the_shortest_stay(
    between: int, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small join over some distance and one next to each other, of sixteen times the bytes, with room for one."""
    every = range(between)
    text = f"""g (float[N, 64] x, float[N, 64] p, float[N, 1024] u, float[N, 1024] v, float[16, 16] w) =>
      (float[N, 64] a, float[N, 1024] e, float[N, 1024] f, {", ".join(f"float[16, 16] m{place}" for place in every)},
       float[N, 64] b) {{
        s = Exp(x) a = Neg(s) k = Tanh(u) e = Abs(k) l = Tanh(v) f = Abs(l)
        {" ".join(f"m{place} = MatMul(w, w)" for place in every)} t = Exp(p) b = Neg(t)
    }}"""
    monkeypatch.setattr("onnxfuse.planning.regions.horizontal.EMPTY", 0)  # else the large ones could join the small
    everything = fuse(text, dims={"N": 128})
    assert len(everything.plan.fusions) == 2
    monkeypatch.setattr("onnxfuse.planning.regions.horizontal.peak_memory", lambda ledger, fused=(): Memory(
        1 << 40 if len(fused) == 2 else 0, 0, None))
    assert [ops for schedule, ops in regions(fuse(text, dims={"N": 128})) if schedule == "together"] == [kept]


def test_a_profile_limits_what_is_joined() -> None:
    profile = find_profile("H200")
    few = replace_limits(profile, 2)
    text = """g (float[N, 64] x, float[N, 32] y) => (float[N, 64] a, float[N, 32] b) {
        c = Exp(x) a = Neg(c) d = Tanh(y) b = Abs(d)
    }"""
    assert len(fuse(text, target=few).plan.fusions) == 2
    assert len(fuse(text, target=profile).plan.fusions) == 1


def replace_limits(profile: Profile, operators: int) -> Profile:
    return profile.model_copy(update={"limits": profile.limits.model_copy(update={"operators": operators})})


def test_names_of_both_rules_are_told() -> None:
    made = fuse("""g (float[N, 64] x, float[N, 64] r, float[64] w, float[64] b, float[N, 64] z)
      => (float[N, 64] y, float[N, 64] s, float[N, 64] e) {
        s = Add(x, r) y = LayerNormalization(s, w, b) f = Exp(z) e = Neg(f)
    }""")
    assert [fusion.rule for fusion in made.plan.fusions] == ["residual-layer-norm+grow-pointwise"]


def test_predicted_time_is_what_both_move_in_one_launch() -> None:
    made, apart = fuse(QKV), fuse(QKV, disable=[STAGE])
    costs = CostModel(apart.ledger, apart.profile)
    floor = made.profile.floor_us * 1e-6
    alone = sum(fusion.cost.seconds_after for fusion in apart.plan.fusions)
    assert made.plan.fusions[0].cost.seconds_after == pytest.approx(alone - 2 * floor, rel=1e-3)
    assert costs.together(apart.plan.fusions) == made.plan.fusions[0].cost
    assert made.plan.fusions[0].cost.bytes_after == sum(f.cost.bytes_after for f in apart.plan.fusions)
