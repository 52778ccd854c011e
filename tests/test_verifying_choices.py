"""All variants of a plan in one session: the one asked for runs; where none is, the plan's own guards choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cli_models import parse
from onnx import TensorProto
from test_native_plan import native
from test_verifying_several import OnCpu

from onnxfuse.emulator import run_plan
from onnxfuse.lowering.launch import HOST_INPUTS, LaunchPlan, Output, Situation, Step, Variant
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.verifying.choices import chosen, with_choice
from onnxfuse.verifying.runner import node_model

CALL = LibraryCall("gemm", "float32", ("i0", "i0", "o0"), ("s0", "1", "1", "1", *["0"] * 7))
NEW, EVEN = "90 sm <=", "i0.0 4 % 0 =="


def step(kernel: str) -> Step:
    return Step(kernel, ("s0", "1", "1"), ("32", "1", "1"), ("i0", "o0"))


PLAN = LaunchPlan("test", 1, ("i0.0",), (), (Output(1, ("s0",)),), (
    Variant("fast", (step("fast"),), (NEW, EVEN, "i0.addr 16 % 0 ==")), Variant("called", (CALL,), ("i0.0 3 <",)),
    Variant("even", (step("even"),), (EVEN,)), Variant("any", (step("any"),))))


def situation(size: int, choice: int, sm: int = 90) -> Situation:
    return Situation([(size,)], [*[()] * (HOST_INPUTS - 1), (choice,)], sm=sm)


def runs(size: int, choice: int) -> Variant:
    plan, where = with_choice(PLAN), situation(size, choice)
    where.bind(plan)
    return plan.variants[where.place(plan)]


@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_the_variant_that_is_asked_for_runs(size: int) -> None:
    """Whether or not its guards hold; without a number the first of which they do."""
    for place, variant in enumerate(PLAN.variants):
        assert runs(size, place).steps == variant.steps
    where = situation(size, -1)
    where.bind(PLAN)
    assert runs(size, -1) == PLAN.variants[where.place(PLAN)]


def test_behind_a_call_are_those_that_were() -> None:
    """They run where the library has no way, by their own guards, and none of another number does."""
    plan = with_choice(PLAN)
    for size, wanted in ((8, "even"), (5, "any")):
        where = situation(size, 1)
        where.bind(plan)
        holding = [variant for variant in plan.variants if all(map(where.evaluate, variant.guards))]
        assert [variant.name for variant in holding[:2]] == ["called", wanted]
    assert [variant.name for variant in plan.variants[:6]] == ["fast", "called", "even", "any", "even", "any"]


def test_a_gpu_is_asked_for_no_more_than_it_has() -> None:
    """A guard on the GPU alone stays with the variant: the library refuses a plan that could want more."""
    assert with_choice(PLAN).variants[0].guards == ("h7.0 0 ==", NEW)


@pytest.mark.parametrize("choice", range(-1, 4))
def test_the_library_chooses_the_same(choice: int) -> None:
    # It knows no GPU's library here: what it calls is the same for it as what it launches.
    plan = replace(PLAN, variants=tuple(replace(one, steps=(step(one.name),)) for one in PLAN.variants))
    for size in (2, 5, 8):
        where = situation(size, choice)
        made = with_choice(plan)
        where.bind(made)
        found = native(made, situation(size, choice))
        assert found["steps"][0]["kernel"] == made.variants[where.place(made)].name


@pytest.fixture(scope="module")
def subject() -> Optimised:
    made = optimise(parse("""g (float16[n, 64] x, float16[64] w) => (float16[n, 64] y) {
      t = Tanh(x) m = ReduceMean <axes = [-1], keepdims = 1> (t) c = Sub(t, m) y = Mul(c, w) }"""), Options(
          verify=False, least_gain=0.0, target="H100", database=False))
    (node,) = read_fused(made.model)
    assert len(node.plan.variants) > 1
    return made


def feeds(node: FusedNode, rows: int) -> dict[str, Any]:
    generator = np.random.default_rng(rows)
    sizes = {"x": (rows, 64), "w": (64,)}
    return {f"x{place}": generator.standard_normal(sizes[name]).astype(np.float16)
            for place, name in enumerate(node.tensors)}


@pytest.mark.parametrize("rows", [1, 31, 33])
def test_kernels_give_the_same(rows: int, subject: Optimised) -> None:
    """Bit for bit, in the emulator."""
    (node,) = read_fused(subject.model)
    given = feeds(node, rows)
    arrays = list(given.values())
    for variant in (None, *range(len(node.plan.variants))):
        plan, more = chosen(node, given, variant)
        hosts: Sequence[Any] = [more.get(f"h{place}") for place in range(HOST_INPUTS)]
        (got,), (wanted,) = (run_plan(plan, node.source, arrays, hosts),
                             run_plan(node.plan, node.source, arrays, (), variant))
        assert np.array_equal(got, wanted)


class Counting(OnCpu):
    def __init__(self) -> None:
        super().__init__()
        self.texts = set[bytes]()

    def _session(self, raw: bytes) -> Any:
        self.texts.add(raw)
        return super()._session(raw)


def test_one_session_runs_all(subject: Optimised) -> None:
    """Where the node has a host input to spare; with none each variant has its own, as before."""
    (node,) = read_fused(subject.model)
    given, runner = feeds(node, 5), Counting()
    ways = [None, *range(len(node.plan.variants))]
    results = [runner.kernel(node, subject.model, given, way)[0] for way in ways]
    assert len(runner.texts) == 1 and all(np.array_equal(results[0], each) for each in results)
    full = replace(node, inputs=("n",) * HOST_INPUTS + node.inputs[HOST_INPUTS:])
    plans = {chosen(full, given, way)[0] for way in ways}
    assert len(plans) == len(ways) and all(chosen(full, given, way)[1] is given for way in ways)
    alone = replace(node, plan=replace(node.plan, variants=node.plan.variants[-1:]))
    assert [chosen(alone, given, way) for way in (None, 0)] == [(alone.plan, given)] * 2


def test_inputs_cross_the_bus_once(subject: Optimised) -> None:
    """For all variants; of an edge those that changed, and none in another type."""
    (node,) = read_fused(subject.model)
    given, runner = feeds(node, 5), Counting()
    weights = f"x{list(node.tensors).index('w')}"
    seen = []
    for variant, arrays in ((0, given), (1, given), (None, {**feeds(node, 6), weights: given[weights]})):
        runner.kernel(node, subject.model, arrays, variant)
        seen.append({name: held.value for name, held in runner._inputs.held.items() if name in given})
    assert all(seen[0][name] is seen[1][name] for name in given)
    assert [name for name in given if seen[1][name] is seen[2][name]] == [weights]
    half = runner._inputs.held[weights]
    assert runner._inputs.placed(weights, half.given, TensorProto.FLOAT).value is not half.value
    runner.forget()
    assert not runner._inputs.held


def test_a_text_is_made_once_for_all_edges(subject: Optimised, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for another model, or inputs of other types or ranks."""
    made: list[str] = []
    monkeypatch.setattr("onnxfuse.verifying.runner.node_model", lambda node, *more: (
        made.append(node.name), node_model(node, *more))[1])
    (node,) = read_fused(subject.model)
    runner, given = Counting(), feeds(node, 5)
    for way in (0, 1, None):
        runner.kernel(node, subject.model, given, way)
    assert len(made) == 1
    runner.kernel(node, subject.model, feeds(node, 7), None)
    assert len(made) == 1
    other = type(subject.model).FromString(subject.model.SerializeToString())
    runner.kernel(node, other, given, None)
    assert len(made) == 2
    runner._text(node, other, node.plan, given)
    runner._text(node, other, node.plan, {**given, "x0": given["x0"].astype(np.float32)})
    assert len(made) == 4
