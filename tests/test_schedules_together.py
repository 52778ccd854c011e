"""Kernels that share a launch: what each part finds of the whole's, and which share none.

They run in the emulator, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator import run_plan

from onnxfuse.lowering.launch import Check, LaunchPlan, Output, Variant
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, named
from onnxfuse.schedules.source import Call, Entry, Function, Given, Parameter, Source
from onnxfuse.schedules.together import Part, together


def part(plan: LaunchPlan, source: Source, **places: tuple[int, ...]) -> Part:
    """A part whose first variant is planned."""
    given = {"inputs": (0,), "hosts": (), "outputs": (0,), **places}
    return Part(Kernel("rows", source, plan), 0, **given)  # type: ignore[arg-type]


COPY = """  __shared__ float held[threads];
  const idx place = (idx)blockIdx.x * threads + threadIdx.x;
  if (place < s0) held[threadIdx.x] = i0[place];
  __syncthreads();
  if (place < s0) o0[place] = held[threadIdx.x];
"""


def copying(threads: int = 64, **changes: object) -> tuple[LaunchPlan, Source]:
    parameters = (
        Parameter("const float* __restrict__", "i0", "i0"), Parameter("float* __restrict__", "o0", "o0"),
        Parameter("const {index}", "s0", "i{bits}:s0"),
    )
    function = Function("copy_all", ("threads",), parameters, COPY)
    entry = function.entry("copy", (threads,), 32, threads)
    plan = LaunchPlan(
        "copy", 1, ("i0.0",), (Check("0 s0 <=", "is not 0 as the model states", (0, 0)),),
        (Output(1, ("s0",)),), (Variant("all", (entry.step(f"s0 {threads} ceil"),)),),
    )
    return replace(plan, **changes), Source(("onnxfuse",), "copy", (function,), (entry,))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(100, 100), (1000, 10), (0, 70), (1, 129)])
def test_blocks_and_threads_past_a_part_end_at_once(sizes: tuple[int, int]) -> None:
    """Barriers hold with the threads of the part alone; parts may be empty.  float32, bit for bit."""
    both = together([part(*copying(64)), part(*copying(128), inputs=(1,), outputs=(1,))], "both", 2)
    assert isinstance(both, Kernel)
    given = [np.arange(size, dtype=np.float32) for size in sizes]
    for order in ("forward", "backward"):
        for wanted, array in zip(given, run_plan(both.plan, both.source, given, order=order), strict=True):
            assert array.tobytes() == wanted.tobytes()


def test_what_differs_in_values_alone_is_called_once() -> None:
    """Each call is a copy of the function that the compiler works through, 16 where layers are alike."""
    sizes = (100, 0, 129, 70)
    parts = [part(*copying(128 if number == 1 else 64), inputs=(number,), outputs=(number,))
             for number in range(len(sizes))]
    whole = together(parts, "all", len(sizes))
    assert isinstance(whole, Kernel)
    assert whole.source.count("part0::copy(") == whole.source.count("part1::copy(") == 1
    given = [np.arange(size, dtype=np.float32) for size in sizes]
    for order in ("forward", "backward"):
        for wanted, array in zip(given, run_plan(whole.plan, whole.source, given, order=order), strict=True):
            assert array.tobytes() == wanted.tobytes()


def test_what_is_taken_by_reference_is_taken_from_its_parameter() -> None:
    """A tensor map is read where the launch put it, never a copy of it."""
    parameters = (
        *(Parameter("const __grid_constant__ of::TensorMap", f"m{place}", within="const of::TensorMap&")
          for place in range(2)), *(Parameter("float*", f"o{place}") for place in range(3)))
    calls = tuple(Call("f", (), (f"m{read}", f"o{place}")) for place, read in enumerate((0, 1, 0)))
    text = Entry("k", 32, parameters, calls).text
    assert "f(m0, a1)" in text and "f(m1, o1)" in text and "m0;" not in text


def test_messages_speak_of_the_inputs_of_the_whole() -> None:
    refusing = Check("s0 0 ==", "is not 0 as the model states", (0, 0))
    both = together(
        [part(*copying()), part(*copying(checks=(refusing,)), inputs=(1,), outputs=(1,))], "both", 2)
    assert isinstance(both, Kernel)
    refused = next(check for check in both.plan.checks if check.condition == "s1 0 ==")
    assert refused.message == "axis 0 of input 1 is not 0 as the model states"


COPYING_CALL = LibraryCall("gemm", "float32", ("i0", "i0", "o0"), ("s0", "1", "1", "1", *["0"] * 7))


def test_calls_of_libraries_keep_their_names() -> None:
    plan, source = copying()
    (variant,) = plan.variants
    mixed = replace(plan, variants=(replace(variant, steps=(*variant.steps, COPYING_CALL)),))
    found = named(Kernel("rows", source, mixed))
    assert found.plan.variants[0].steps[1] == COPYING_CALL
    assert found.plan.kernels == named(Kernel("rows", source, plan)).plan.kernels != plan.kernels


@pytest.mark.parametrize("change", ["steps", "grid", "cluster", "dependent", "call", "given", "shared"])
def test_kernels_that_cannot_share_a_launch(change: str) -> None:
    plan, source = copying()
    variant = plan.variants[0]
    if change == "steps":
        plan = replace(plan, variants=(replace(variant, steps=variant.steps * 2),))
    elif change == "grid":
        plan = replace(plan, variants=(replace(variant, steps=(replace(variant.steps[0], grid=("1", "s0", "1")),)),))
    elif change == "call":
        plan = replace(plan, variants=(replace(variant, steps=(COPYING_CALL,)),))
    elif change in ("cluster", "dependent"):
        step = replace(variant.steps[0], **{change: ("1", "1", "1") if change == "cluster" else True})
        plan = replace(plan, variants=(replace(variant, steps=(step,)),))
    parts = [part(plan, source), part(*copying(128), inputs=(1,), outputs=(1,))]
    if change == "given":
        # It may look at what the whole has of its own: the grid's size, the block's.
        parts[0] = replace(parts[0], kernel=replace(parts[0].kernel, code=Given(source.text)))
    if change == "shared":
        # Of two tiles of one block the second may not fit.
        parts = [replace(one, kernel=replace(one.kernel, heavy=True)) for one in parts]
    found = together(parts, "both", 2)
    assert found == Refusal("no-common-launch", "the regions' kernels cannot share a launch")
