"""Strategies, hints and limits: what they admit, what they prefer, and what they say where they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from emulator import run_plan, variants_that_hold

from onnxfuse.cli.parameters import STRATEGIES as OFFERED
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.admission import efficiency, too_large
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.costs.traffic import chosen_variant
from onnxfuse.planning.objective import STRATEGIES, Hints, Objective, read_hints
from onnxfuse.refusal import Refusal
from onnxfuse.region import RegionCost

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
CHAIN = "g (float[N, 4096] x) => (float[N, 4096] y) { a = Exp(x) b = Neg(a) y = Tanh(b) }"


def fuse(text: str, **options: Any) -> Optimised:
    settings = {"target": "H200", "verify": False, **options}
    return optimise(onnx.parser.parse_model(HEAD + text), Options(**settings))


def regions(optimised: Optimised) -> list[list[str]]:
    return [[node.op for node in fusion.view] for fusion in optimised.plan.fusions]


def refusal(optimised: Optimised, code: str) -> Refusal:
    (found,) = [each for each in optimised.refusals if each.code == code]
    return found


def test_the_command_offers_every_strategy() -> None:
    assert OFFERED == STRATEGIES


def test_under_memory_pressure_only_what_saves_memory_is_fused() -> None:
    # Both norms gain: the first as one kernel for three, the second one for two whose inner value is an output.
    text = """g (float[N, 1024] x, float[N, 1024] z) => (float[N, 1024] y, float[N, 1024] a, float[N, 1024] b) {
        e = Exp(x) y = Neg(e) a = Exp(z) b = Neg(a)
    }"""
    dims = {"N": 8192}
    assert regions(fuse(text, dims=dims)) == [["Exp", "Neg"], ["Exp", "Neg"]]
    pressed = fuse(text, dims=dims, hints=Hints(memory_pressure=0.9))
    assert [fusion.outputs[0].name for fusion in pressed.plan.fusions] == ["y"]
    found = refusal(pressed, "memory-pressure")
    assert found.message == (
        "fusing 2 nodes saves no memory, and the memory pressure is 0.9 (past 0.8 only what saves memory is fused)"
    )
    assert found.remedy == "lower the hint memory-pressure, or raise pressure-threshold"
    relaxed = Hints(memory_pressure=0.9, pressure_threshold=0.95)
    assert len(fuse(text, dims=dims, hints=relaxed).plan.fusions) == 2


def test_under_compute_pressure_only_what_gains_enough_is_fused() -> None:
    text = "g (float[N, 4096] x, float[N, 4096] z) => (float[N, 4096] y) { a = Exp(x) y = Add(a, z) }"
    dims = {"N": 8192}
    (fusion,) = fuse(text, dims=dims).plan.fusions
    gain = fusion.cost.estimated_speedup
    assert 1.2 < gain < 2.5
    pressed = fuse(text, dims=dims, hints=Hints(compute_pressure=0.9, pressed_gain=2.5))
    assert pressed.plan.fusions == ()
    found = refusal(pressed, "compute-pressure")
    assert found.message == (
        f"2 nodes would run {gain:.2f}x as fast, under the 2.5x asked for at a compute pressure of 0.9 (past 0.8)"
    )
    assert found.remedy == "lower the hint compute-pressure, or pressed-gain"
    at_the_threshold = Hints(compute_pressure=0.8, pressed_gain=2.5)
    assert len(fuse(text, dims=dims, hints=at_the_threshold).plan.fusions) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory-pressure": 1.5}, "the hint memory-pressure must be between 0 and 1, not 1.5"),
        ({"compute_pressure": -1.0}, "the hint compute-pressure must be between 0 and 1, not -1"),
        ({"pressed-gain": float("inf")}, "the hint pressed-gain must be finite and not negative, not inf"),
        ({"memory-presure": 0.9}, 'there is no hint "memory-presure"; did you mean "memory-pressure"?'),
        ({"zzz": 1.0}, 'there is no hint "zzz"; known: memory-pressure, compute-pressure, pressure-threshold, '
                       'pressed-gain'),
    ],
)
def test_messages_for_wrong_hints(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_hints(given)
    assert str(caught.value) == message


def test_a_strategy_that_is_none() -> None:
    with pytest.raises(ValueError, match='there is no strategy "fast"; known: auto, all-in-one, memory, dynamic'):
        Objective("fast")


def cost(seconds: float, kernels: int = 3, memory: int = 0) -> RegionCost:
    """A region that saves so many of ten seconds."""
    return RegionCost(100, 50, kernels, 1, 10.0, 10.0 - seconds, memory)


def test_what_strategies_value() -> None:
    quick, large, saving = cost(5.0, 2), cost(4.0, 9), cost(1.0, 2, memory=1000)
    best = {name: max((quick, large, saving), key=Objective(name).worth) for name in STRATEGIES}
    assert best == {"auto": quick, "all-in-one": large, "memory": saving, "dynamic": quick}
    # Time decides between equals.
    for name in STRATEGIES:
        assert Objective(name).worth(cost(0.4)) > Objective(name).worth(cost(0.2))


PRESSED, AT_THE_THRESHOLD = Hints(compute_pressure=0.9, pressed_gain=1.25), Hints(memory_pressure=0.8)


@pytest.mark.parametrize(
    ("objective", "seconds", "code"),
    [
        (Objective(least_gain=1.25), 2.0, "no-gain"),
        (Objective(least_gain=1.25), 2.1, None),
        (Objective("all-in-one"), 0.0, "no-gain"),
        (Objective(hints=PRESSED), 2.0, "compute-pressure"),
        (Objective(hints=PRESSED), 2.1, None),
        (Objective(hints=AT_THE_THRESHOLD), 2.0, None),
    ],
)
def test_what_just_reaches_a_threshold(objective: Objective, seconds: float, code: str | None) -> None:
    """A gain must be passed, and so must the threshold of a pressure: 8 seconds for 10 are 1.25x as fast."""
    found = objective.refuses(cost(seconds), 3, "a", "r")
    assert (None if found is None else found.code) == code


def test_bounds_of_pressures() -> None:
    assert not Objective(hints=AT_THE_THRESHOLD).saves_memory
    assert Objective(hints=Hints(memory_pressure=1.0)).saves_memory


def test_all_in_one_takes_what_leaves_fewer_kernels_and_costs_no_time() -> None:
    assert Objective("all-in-one").refuses(cost(0.5), 3, "a", "r") is None
    assert Objective("all-in-one").refuses(cost(0.5, kernels=1), 3, "a", "r") is not None
    slower = Objective("all-in-one").refuses(cost(-0.5), 3, "a", "r")
    assert slower is not None and slower.message.startswith("3 nodes would run 0.95x as fast, under 1x: ")


def test_memory_strategy_takes_what_saves_memory_and_costs_no_time() -> None:
    small = cost(0.5, memory=1000)
    assert Objective("auto").refuses(small, 3, "a", "r") == Refusal(
        "no-gain", "3 nodes would run 1.05x as fast, under 1.2x: 10000000.0 µs as the runtime runs them (3 kernels), "
                   "9500000.0 µs fused", "a", "r")
    assert Objective("memory").refuses(small, 3, "a", "r") is None
    assert Objective("memory").refuses(cost(-0.5, memory=1000), 3, "a", "r") is not None
    assert Objective("memory").refuses(cost(0.5), 3, "a", "r") is not None


def test_dynamic_refuses_what_loses_at_sizes_nearby() -> None:
    found = Objective("dynamic").refuses_elsewhere({"N=4": cost(5.0), "N=64": cost(-10.0)}, "a", "r")
    assert found == Refusal(
        "slower-elsewhere",
        "at N=64 it would run 0.50x as fast: 10000000.0 µs as the runtime runs it, 20000000.0 µs fused", "a", "r",
        "plan with the strategy auto, which looks at the planned sizes alone",
    )
    assert Objective("dynamic").refuses_elsewhere({"N=4": cost(5.0), "N=64": cost(0.0)}, "a", "r") is None


NORM = """g (float16[B, S, C] x, float16[B, S, C] z) => (float16[B, S, C] y) <int64[1] last = {-1}> {
    s = Add(x, z) m = ReduceMean(s, last) d = Sub(s, m) y = Relu(d)
}"""


def test_dynamic_makes_variants_by_length() -> None:
    dims = {"B": 8, "S": 128, "C": 768}
    (plain,) = fuse(NORM, dims=dims).plan.fusions
    (dynamic,) = fuse(NORM, dims=dims, strategy="dynamic").plan.fusions
    plan = dynamic.kernel.plan
    assert len(plan.variants) > len(plain.kernel.plan.variants)
    # What each size runs: rows of 192, 768 and 3072 elements each have a variant of their own.
    ran = {size: chosen(dynamic, [(8, 128, size)] * 2) for size in (192, 768, 3072)}
    assert len(set(ran.values())) == 3
    assert ran[768] == chosen(plain, [(8, 128, 768)] * 2)


def test_dynamic_makes_variants_by_the_number_of_rows() -> None:
    text = NORM.replace("C]", "1024]")
    (plain,) = fuse(text, dims={"B": 1, "S": 256}).plan.fusions
    (dynamic,) = fuse(text, dims={"B": 1, "S": 256}, strategy="dynamic").plan.fusions
    few, many = chosen(dynamic, [(1, 16, 1024)] * 2), chosen(dynamic, [(4, 4096, 1024)] * 2)
    assert few != many
    assert len({chosen(plain, [(1, rows, 1024)] * 2) for rows in (16, 4096)}) == 1
    names = [step.kernel for variant in dynamic.kernel.plan.variants for step in variant.steps]
    assert all(dynamic.kernel.source.count(f"{name}(") == 1 for name in set(names))


def chosen(fusion: Any, shapes: list[tuple[int, ...]]) -> str:
    """The variant that runs for inputs of these shapes."""
    return chosen_variant(fusion.kernel.plan, shapes, 90, 132)[0].name


def chain(count: int) -> str:
    body = " ".join(f"v{place} = Tanh({'x' if place == 0 else f'v{place - 1}'})" for place in range(count - 1))
    return f"g (float[N, 4096] x) => (float[N, 4096] y) {{ {body} y = Neg(v{count - 2}) }}"


@pytest.mark.parametrize(("target", "most"), [("Ascend 910", 10), ("A100", 20), ("H100", 32)])
def test_a_region_past_the_profiles_operators_is_cut_into_its_best_parts(target: str, most: int) -> None:
    made = fuse(chain(40), dims={"N": 8192}, target=target)
    sizes = [len(ops) for ops in regions(made)]
    assert sum(sizes) == 40 and max(sizes) == most
    assert len(sizes) == -(-40 // most)
    found = next(each for each in made.refusals if each.code == "operators")
    assert found.message == f"40 operators, and the profile of {find_profile(target).name} takes {most} in one region"
    assert found.remedy == "its best parts are fused; raise limits.operators in a profile of your own to join them"


def test_views_are_no_operators() -> None:
    body = "a = Exp(x) r = Reshape(a, s) b = Neg(r) t = Reshape(b, s) y = Tanh(t)"
    text = f"g (float[N, 4096] x) => (float[N, 64, 64] y) <int64[3] s = {{-1, 64, 64}}> {{ {body} }}"
    profile = find_profile("H200")
    small = profile.model_copy(update={"limits": profile.limits.model_copy(update={"operators": 3})})
    made = fuse(text, dims={"N": 8192}, target=small)
    assert regions(made) == [["Exp", "Reshape", "Neg", "Reshape", "Tanh"]]


def test_a_region_that_is_not_efficient_enough_is_refused() -> None:
    profile = find_profile("H200")
    strict = profile.model_copy(update={"limits": profile.limits.model_copy(update={"efficiency": 0.95})})
    made = fuse(CHAIN, dims={"N": 65536}, target=strict)
    assert made.plan.fusions == ()
    found = next(each for each in made.refusals if each.code == "efficiency")
    assert found.message == (
        "its kernel is predicted to reach 0.90 of the roofline, and the profile of H200 asks for 0.95"
    )
    plain = fuse(CHAIN, dims={"N": 65536})
    (fusion,) = plain.plan.fusions
    assert efficiency(fusion, CostModel(plain.ledger, profile)) == pytest.approx(0.9)


def test_a_kernel_that_needs_more_on_chip_than_there_is() -> None:
    made = fuse(CHAIN, dims={"N": 8192})
    (fusion,) = made.plan.fusions
    plan = fusion.kernel.plan
    greedy = replace(plan, variants=tuple(
        replace(variant, steps=tuple(replace(step, shared="200000") for step in variant.steps))
        for variant in plan.variants
    ))
    asking = replace(fusion, made=replace(fusion.kernel, plan=greedy))
    small, large = (CostModel(made.ledger, find_profile(name)) for name in ("Ascend 910", "H100"))
    assert too_large(fusion, small) is None and too_large(asking, large) is None
    found = too_large(asking, small)
    assert found is not None
    assert found == Refusal(
        "on-chip", "a block of its kernel asks for 195 KiB on chip, and the profile of Ascend 910 has 192",
        fusion.label, fusion.rule)


IMAGE = """g (float16[N, 64, 56, 56] x, float16[64, 64, 3, 3] w, float16[N, 64, 56, 56] z)
  => (float16[N, 64, 56, 56] y, float16[N, 64, 56, 56] v) {
    c = Conv<pads = [1, 1, 1, 1]>(x, w) e = Exp(c) r = Tanh(e) s = Sigmoid(r)
    y = Conv<pads = [1, 1, 1, 1]>(s, w)
    a = Exp(z) b = Neg(a) v = Tanh(b)
}"""


def test_channels_last_leaves_what_lies_between_convolutions_alone() -> None:
    dims = {"N": 32}
    assert regions(fuse(IMAGE, dims=dims)) == [["Exp", "Tanh", "Sigmoid"], ["Exp", "Neg", "Tanh"]]
    made = fuse(IMAGE, dims=dims, provider_options={"prefer_nhwc": "1"})
    assert regions(made) == [["Exp", "Neg", "Tanh"]]
    found = [each for each in made.refusals if each.code == "channels-last"]
    own = "Conv runs channels-last with prefer_nhwc=1, and beside a fused node the runtime would lay out its image anew"
    assert len(found) == 5 and [each.message for each in found[3:]] == [own] * 2
    label = made.graph.values["c"].producer.label  # type: ignore[union-attr]
    assert found[0].message.startswith(f"Exp lies beside {label} (Conv): with prefer_nhwc=1 the runtime moves its ")
    assert found[0].remedy == "plan without provider_options={\"prefer_nhwc\": \"1\"}"
    assert regions(fuse(IMAGE, dims=dims, provider_options={"prefer_nhwc": "0"})) == regions(fuse(IMAGE, dims=dims))


@pytest.mark.parametrize("shape", [(1, 16, 1024), (1, 300, 1024), (4, 600, 1024)])
def test_variants_for_nearby_sizes_compute_the_same(shape: tuple[int, ...]) -> None:
    """float16 against float64, two units in the last place: each variant that holds, in the emulator."""
    made = fuse(NORM.replace("C]", "1024]"), dims={"B": 1, "S": 256}, strategy="dynamic")
    (fusion,) = made.plan.fusions
    random = np.random.default_rng(1)
    inputs = [random.standard_normal(shape).astype(np.float16) for _ in range(2)]
    total = inputs[0].astype(np.float64) + inputs[1]
    expected = np.maximum(total - total.mean(-1, keepdims=True), 0)
    holding = variants_that_hold(fusion.kernel.plan, inputs)
    assert len(holding) > 1
    for variant in holding:
        (found,) = run_plan(fusion.kernel.plan, fusion.kernel.source, inputs, variant=variant)
        np.testing.assert_allclose(found.astype(np.float64), expected, atol=2 * 2.0**-10 * expected.max(), rtol=0)
