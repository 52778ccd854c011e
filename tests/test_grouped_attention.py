"""The runtime's GroupQueryAttention, which keeps keys and values of the past: as tensors beside ONNX Runtime, as kernels
in the emulator, caches in the past's memory or apart from it, in the planner, and verified."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulated import EmulatedRunner, FaultyRunner
from emulator import run_plan
from fake_timer import RUNTIME, FakeTimer
from ir_reference import evaluate_lowered
from kernel_harness import Made, Region, arguments, check, make, parse, random_inputs, refused, region_of, told
from reference import Array, evaluate
from test_attention_operator import planned

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.rewriting import unfuse
from onnxfuse.schedules import parse_choice
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify
from onnxfuse.verifying.evaluate import CPU, exact_options

HEADS = "num_heads = 4, kv_num_heads = 2"
SIDES, PACKED = "T[B,S,64] q, T[B,S,32] k, T[B,S,32] v", "T[B,S,128] q"
TABLES = ", T[M,8] cos, T[M,8] sin"
ROTARY = ", do_rotary = 1"

FORMS = {
    "plain": (SIDES, "q, k, v", ""),
    "packed": (PACKED, "q, , ", ""),
    "rotated": (SIDES + TABLES, "q, k, v", ROTARY),
    "rotated by neighbours": (SIDES + TABLES, "q, k, v", ROTARY + ", rotary_interleaved = 1"),
    "rotated, packed": (PACKED + TABLES, "q, , ", ROTARY),
    "a window": (SIDES, "q, k, v", ", local_window_size = 7"),
    "a cap and a scale": (SIDES, "q, k, v", ", softcap = 3.0, scale = 0.4"),
    "rotated, packed, in a window": (PACKED + TABLES, "q, , ", ROTARY + ", local_window_size = 40"),
}

CASES: dict[str, tuple[dict[str, int], list[int]]] = {
    "a first prompt": ({"B": 2, "S": 5, "P": 0, "L": 5}, [4, 4]),
    "prompts of other lengths": ({"B": 2, "S": 33, "P": 40, "L": 33}, [32, 17]),
    "one token": ({"B": 1, "S": 1, "P": 31, "L": 32}, [31]),
    "one token of each": ({"B": 3, "S": 1, "P": 300, "L": 280}, [279, 40, 0]),
    "several tokens": ({"B": 1, "S": 31, "P": 197, "L": 197}, [196]),
    "several tokens behind a cache": ({"B": 1, "S": 3, "P": 9, "L": 12}, [11]),
}
"""Sizes, and the places of the last tokens of each sequence."""


def text(form: str, kind: str = "float") -> str:
    inputs, operands, attributes = FORMS[form]
    more = ", cos, sin" if TABLES in inputs else ""
    inputs = f"{inputs}, T[B,2,P,16] a, T[B,2,P,16] c, int32[B] n, int64[B,L] mask"
    return (f"g ({inputs}) => (T[B,S,64] y, T[B,2,N,16] d, T[B,2,N,16] e) {{ s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s) "
            f"y, d, e = com.microsoft.GroupQueryAttention<{HEADS}{attributes}>({operands}, a, c, n, t{more}) }}").replace("T[", f"{kind}[")


def given(made: Region, case: str, behind: float = np.nan) -> dict[str, Array]:
    """Inputs of a case; ``behind``: what lies in the past behind a sequence."""
    sizes, ends = CASES[case]
    inputs = random_inputs(made, {**sizes, "M": sizes["L"] + 3})
    inputs["n"][:] = ends
    for sequence, end in enumerate(ends):
        for cache in "ac":
            inputs[cache][sequence, :, max(end + 1 - sizes["S"], 0):] = behind
    return inputs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, case: str) -> None:
    """What the lowering means is what ONNX Runtime gives, where its sequences have something."""
    model, sizes = parse(text(form)), CASES[case][0]
    made = region_of(model)
    assert isinstance(made, Region), made
    del model.opset_import[2:]
    session = onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), providers=CPU)
    inputs = given(made, case, 7.0)
    got = evaluate_lowered(made.lowered, arguments(made, inputs), {**_bound(made, sizes)})
    wanted = session.run(None, inputs)
    for sequence, end in enumerate(CASES[case][1]):
        rows = min(end + 1, sizes["S"])
        np.testing.assert_allclose(got[0][sequence, :rows], wanted[0][sequence, :rows], atol=2e-6)
        for place in (1, 2):
            np.testing.assert_allclose(got[place][sequence, :, :end + 1], wanted[place][sequence, :, :end + 1], atol=2e-6)


def _bound(made: Region, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes by the region's own symbols."""
    whole = {**sizes, "M": sizes["L"] + 3}
    return {name: size.evaluate(whole) for name, size in made.lowered.binding.names.items()} | whole


@pytest.mark.parametrize(("form", "kind"), [
    *((form, "float16") for form in FORMS), *((form, kind) for form in ("rotated", "packed") for kind in ("bfloat16", "float"))])
def test_kernels(form: str, kind: str) -> None:
    made = make(text(form, kind))
    assert made.kernel.schedule == "cached" and made.kernel.hides
    slack = 400 if kind == "float" else 4  # which is multiplied as TF32
    for case in CASES:
        check(made, given(made, case), length=70, misalign=False, limit=4, slack=slack)


def test_a_warp_copies_where_no_sequence_ends_before_others() -> None:
    """By tensor maps of the caches, of as many rows as the longest sequence has."""
    sizes = {"B": 1, "S": 2048, "P": 0, "L": 2048, "M": 2048}
    made = make(text("rotated", "float16"), planned=sizes)
    plan = made.kernel.plan
    assert [each.base for each in plan.maps] == ["o1", "o2"] and "s4" in plan.maps[0].sizes
    copied = [each for each in plan.variants if "m0" in each.launches[-1].arguments]
    assert len(copied) == 2 and all("s0 1 == s4 s1 == or" in each.guards for each in copied)
    for case in ("prompts of other lengths", "several tokens"):
        check(made, given(made, case), length=70, misalign=False, slack=4)


def test_a_kernel_is_told_what_the_attention_is_to_be() -> None:
    sizes = {"B": 1, "S": 31, "P": 197, "L": 197, "M": 200}
    made = make(text("rotated", "float16"), planned=sizes)
    assert made.kernel.choices and all(parse_choice(str(choice)) == choice for choice in made.kernel.choices)
    other = told(made, made.kernel.choices[-1], sizes)
    assert other.kernel.choice == made.kernel.choices[-1] and other.kernel.source != made.kernel.source
    check(other, given(other, "several tokens"), length=70, misalign=False, limit=2, slack=4)


# ---- Caches in the memory of those of the past. ----


def shared_run(made: Made, inputs: dict[str, Array]) -> list[Array]:
    places = [value.name for value in made.lowered.tensors]
    return run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs), [np.array([inputs["mask"].shape[1]])],
                    shared={1: places.index("a"), 2: places.index("c")})


@pytest.mark.parametrize("form", ["rotated", "packed"])
@pytest.mark.parametrize("case", ["prompts of other lengths", "one token of each", "several tokens"])
def test_new_rows_alone_are_written_to_the_past(form: str, case: str) -> None:
    made = make(text(form, "float16"))
    inputs = given(made, case)
    expected, got = evaluate(made.model, inputs), shared_run(made, inputs)
    for name, array in zip("yde", got, strict=True):
        np.testing.assert_allclose(array, expected[name], atol=4e-3, rtol=4e-3)
    sizes, ends = CASES[case]
    for sequence, end in enumerate(ends):
        for array, past in zip(got[1:], (inputs["a"], inputs["c"]), strict=True):
            kept = np.ones(array.shape[2], bool)
            kept[max(end + 1 - sizes["S"], 0):][:sizes["S"]] = False
            np.testing.assert_array_equal(array[sequence][:, kept], past[sequence][:, kept])


def test_nothing_is_copied_where_all_is_there() -> None:
    """Nor where all rows are new; elsewhere the past is copied first."""
    made = make(text("plain", "float16"))
    variants = made.kernel.plan.variants
    kept = [each for each in variants if "in its place" in each.name]
    assert len(kept) * 2 == len(variants) and made.kernel.plan.version == 2
    test = "s1 s2 s3 max == i3.at o1.at == i4.at o2.at == and s2 s2 s3 max == and or"
    for each in variants:
        launched = [step.kernel.split("_pointwise")[0] for step in each.launches][:-1]
        assert (each in kept) == (test in each.guards) == ("of_past" not in launched)
        assert "of_new" in launched


@pytest.mark.parametrize("ends", [[-7, 2**31 - 1], [10**6, -(2**31)], [4, 90]])
def test_no_length_makes_it_write_elsewhere(ends: list[int]) -> None:
    """The emulator ends a kernel that reads, or writes, outside of its tensors."""
    made = make(text("rotated", "float16"))
    inputs = given(made, "prompts of other lengths")
    inputs["n"][:] = ends
    shared_run(made, inputs)
    run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs), [np.array([33])])


def test_caches_that_nobody_reads_lie_between() -> None:
    made = make(text("rotated", "float16").replace(", float16[B,2,N,16] d, float16[B,2,N,16] e", ""))
    assert len(made.kernel.plan.outputs) == 1 and made.kernel.plan.scratch[:2] == ("s0 s2 s4 max * 64 *",) * 2
    for case in ("one token of each", "several tokens"):
        check(made, given(made, case), length=70, misalign=False, limit=2, slack=4)


# ---- What has no kernel. ----

OWN = "q, k, v, a, c, n, t"
REFUSED = [
    ("", OWN + ", , , i", "positions of its own"),
    ("", OWN + ", , , , r", "a bias of scores"),
    ("", OWN + ", , , , , z", "sinks"),
    ("", OWN + ", , , , , , , , w, w", "norms of its queries and keys"),
    (', k_quant_type = "PER_TENSOR"', OWN, "a quantised cache"),
    (", smooth_softmax = 1", OWN, "a smooth softmax"),
    (", causal = 0", OWN, "no causal mask"),
    (", local_window_size = 8, sliding_window_cache = 1", OWN, "a cache of a window"),
    ("", "q, k, v, , , n, t", "no caches of the past"),
]


@pytest.mark.parametrize(("attributes", "operands", "what"), REFUSED)
def test_what_has_no_kernel(attributes: str, operands: str, what: str) -> None:
    inputs = SIDES + ", T[B,2,P,16] a, T[B,2,P,16] c, int32[B] n, int64[B,L] mask, int64[B,S] i, T[B,4,S,L] r, T[4] z, T[16] w"
    found = refused((f"g ({inputs}) => (T[B,S,64] y, T[B,2,N,16] d, T[B,2,N,16] e) {{ s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s) "
                     f"y, d, e = com.microsoft.GroupQueryAttention<{HEADS}{attributes}>({operands}) }}").replace("T[", "float16["))
    assert found.message == f"a GroupQueryAttention with {what} has no kernel" and found.remedy


def test_a_window_that_the_runtime_counts_otherwise_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.24 a query may have seen as many keys before its own."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.22.1")
    found = refused(text("a window", "float16"))
    assert found.message == "a GroupQueryAttention with a window, in which ONNX Runtime sees one key more before 1.24, has no kernel"
    make(text("rotated", "float16"))


@pytest.mark.parametrize(("old", "new"), [
    ("T[B,S,32] k, T[B,S,32] v", "T[B,4,32] k, T[B,5,32] v"), ("T[B,S,32] k", "T[B,S,48] k"), ("T[B,S,32] v", "T[B,S,64] v"), ("T[B,2,P,16] a", "T[B,2,P,32] a"), ("T[B,2,P,16] c", "T[B,4,P,16] c")])
def test_sizes_that_do_not_fit_have_no_kernel(old: str, new: str) -> None:
    """Nothing is written by sizes that may be others."""
    found = refused(text("plain", "T").replace(old, new).replace("T[", "float16["))
    assert "are not known to be as many rows and columns as its queries ask for has no kernel" in found.message


def test_sizes_by_other_names_are_the_same() -> None:
    """What the operator asks to be equal is one size, which the plan makes sure of."""
    made = make(text("plain", "float16").replace("float16[B,S,32] k", "float16[B,U,32] k").replace("float16[B,2,P,16] c", "float16[A,2,Q,16] c"))
    checks = {check.message for check in made.kernel.plan.checks}
    assert {"axis 1 of input 1 is not S as the model states", "axis 0 of input 4 is not B as the model states"} <= checks, checks


def test_a_length_that_nobody_computes_has_no_kernel() -> None:
    found = refused(text("plain", "float16").replace("int64[B,L] mask", "int32 t").replace("s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s) ", ""))
    assert found.message == "a GroupQueryAttention whose total length 't' is not computed from sizes has no kernel"


# ---- In the planner, and verified. ----

LAYER = ("g (float16[B,S,32] x, float16[32,128] w, float16[B,2,P,16] a, float16[B,2,P,16] c, int64[B,L] mask, float16[256,8] cos, float16[256,8] sin, float16[64,32] o) "
         "=> (float16[B,S,32] y, float16[B,2,N,16] d, float16[B,2,N,16] e) <int64 one = {1}, int64[1] axis = {1}> { p = MatMul(x, w) "
         "s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s) count = ReduceSum<keepdims = 0>(mask, axis) last = Sub(count, one) n = Cast<to = 6>(last) "
         f"z, d, e = com.microsoft.GroupQueryAttention<{HEADS}, do_rotary = 1>(p, , , a, c, n, t, cos, sin) y = MatMul(z, o) }}")
DIMS = {"B": 1, "S": 16, "P": 16, "L": 32}


def measured(layer: onnx.ModelProto, folder: Path) -> Optimised:
    """As it is planned where its kernels were measured to be faster."""
    timer = FakeTimer(lambda name: 50.0 if name == RUNTIME else 5.0)
    with open_database(folder / "measurements.sqlite") as kept:
        tune(layer, timer, kept, TuneOptions(dims=DIMS))
        return planned(layer, database=Path(kept.name), target="H100", dims=DIMS)


def test_the_runtimes_own_kernel_is_replaced_where_that_was_measured_alone(tmp_path: Path) -> None:
    """A fault of a hundredth is found; the node stands in the body, and comes back."""
    layer = parse(LAYER)
    del layer.opset_import[2:]
    made = planned(layer, dims=DIMS)
    assert "cached" not in {fusion.kernel.schedule for fusion in made.plan.fusions}
    (refusal,) = {refusal.message for refusal in made.refusals if refusal.code == "unmeasured"}
    assert refusal.startswith("what is put into caches and the attention over them could be kernels of a node; how fast they are")
    made = measured(layer, tmp_path)
    (fusion,) = [fusion for fusion in made.plan.fusions if fusion.kernel.schedule == "cached"]
    assert [node.op for node in fusion.view] == ["GroupQueryAttention"] and [value.name for value in fusion.hosts] == ["t"]
    for runner, verdict in ((EmulatedRunner(), "passed"), (FaultyRunner(), "failed")):
        verification = verify(made, runner)
        assert {result.verdict for result in verification.nodes} == {verdict}, verification.nodes
        assert verification.whole.identical
    fused = made.rewritten.model
    back = unfuse(fused)
    assert back.graph == layer.graph and list(back.opset_import) == list(layer.opset_import)


@pytest.mark.parametrize(("room", "bound"), [(64, True), (32, True), (16, False)])
def test_it_is_measured_as_callers_bind_it(room: int, bound: bool, tmp_path: Path) -> None:
    """Caches that are as large before as behind are one memory; each sequence is as long as it can be."""
    layer, benches = parse(text("rotated", "float16")), []
    del layer.opset_import[2:]

    class Timer(FakeTimer):
        def bench(self, feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None,
                  bound: Mapping[str, str] | None = None) -> AbstractContextManager[FakeTimer]:
            benches.append((feeds, bound))
            return super().bench(feeds, weights, bound)

    timer = Timer(lambda name: 50.0 if name == RUNTIME else 5.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(layer, timer, kept, TuneOptions(dims={"B": 1, "S": 16, "P": room, "L": 32, "M": 64}))
    feeds, names = benches[0]
    assert bool(names) == bound and all(feeds[own].shape == (1, 2, room, 16) for own in names.values())
    assert [array.tolist() for name, array in feeds.items() if name.startswith("x") and array.dtype == np.int32] == [[31]]
    first = {name.split("_pointwise")[0] for name in timer.timed if name != RUNTIME}
    assert first == {"of_new" if bound else "of_past"}


def test_sizes_have_room_for_what_is_new() -> None:
    """What a run cannot have is no plan's."""
    layer = parse(LAYER)
    with pytest.raises(ModelError, match=r"has room for 32 \(P \+ S\) rows, and 40 \(L\) are asked for"):
        planned(layer, dims={**DIMS, "L": 40})
    assumed = planned(layer).ledger.sizes
    assert assumed["S"] <= assumed["L"] <= min(assumed["P"] + assumed["S"], 256)  # which tables have


def test_what_the_runtime_takes_is_foreseen_as_its_kernels_are() -> None:
    """One that rotates and puts into caches, and an attention, where it would be one launch."""
    made = planned(parse(LAYER), target="H100", dims=DIMS)
    node = next(node for node in made.ledger.graph.nodes if node.op == "GroupQueryAttention")
    foreseen = made.costs.group_seconds(frozenset([node]))
    alone = CostModel(made.ledger, made.profile).group_seconds(frozenset([node]))
    assert foreseen - alone > 0.9e-6 * made.profile.floor_us and not made.costs.is_learned(node)


def test_what_would_give_a_node_a_kernel_is_told() -> None:
    layer = parse(LAYER.replace("do_rotary = 1", "do_rotary = 1, smooth_softmax = 1"))
    found = onnxfuse.explain(layer, "z", dims=DIMS, target="H100", database=False).to_text()
    assert "a GroupQueryAttention with a smooth softmax has no kernel" in found
