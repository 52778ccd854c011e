"""Launch plans as JSON: what earlier releases wrote stays as it was, and what they do not know has its own version."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fused_models import add_host, add_two
from launch_models import CLUSTERED, PRODUCTS, TILED, clustered, tiled

from onnxfuse.compiling import ReadBack, source_of
from onnxfuse.embedding import compile_images
from onnxfuse.lowering.launch import LaunchPlan, Situation, Step, Variant, elsewhere
from onnxfuse.planning.costs.traffic import plan_cost
from onnxfuse.runtime import library
from onnxfuse.runtime.compile import compile_cubin
from onnxfuse.runtime.nodes import kernel_sources
from onnxfuse.schedules import USER, Kernel
from onnxfuse.schedules.source import Given

ADD = '{"kernel":"add_one","grid":["i0.n 128 ceil 1024 min","1","1"],"block":["128","1","1"],"shared":"0",'
WRITTEN = (
    '{"version":1,"region":"add-two","inputs":1,"symbols":["i0.0"],"checks":[],"outputs":[{"dtype":1,"shape":["s0"]}],'
    '"scratch":["s0 4 *"],"options":[],"variants":[{"name":"scratch","guards":[],"steps":['
    + ADD + '"args":["i0","t0","i64:s0"]},' + ADD + '"args":["t0","o0","i64:s0"]}]}]}')
"""A plan as the first release wrote it."""


def test_a_plan_of_version_1_is_written_as_it_always_was() -> None:
    plan = add_two().plan
    assert plan.to_json() == WRITTEN
    assert LaunchPlan.from_json(WRITTEN) == plan


@pytest.mark.parametrize("plan", [
    add_host().plan, clustered().plan, tiled().plan, PRODUCTS["product_turned"].fused().plan,
    PRODUCTS["product"].of_sum().plan,
])
def test_a_plan_is_read_as_it_was_written(plan: LaunchPlan) -> None:
    assert LaunchPlan.from_json(plan.to_json()) == plan
    assert LaunchPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_only_a_plan_that_asks_for_more_has_the_newer_version() -> None:
    def version(plan: LaunchPlan) -> Any:
        return json.loads(plan.to_json())["version"]

    plan = clustered().plan
    (step,) = plan.variants[0].steps
    assert version(plan) == 2
    for less, wanted in (({"cluster": None}, 2), ({"dependent": False}, 2), ({"cluster": None, "dependent": False}, 1)):
        steps = (replace(step, **less),)
        assert version(replace(plan, variants=(replace(plan.variants[0], steps=steps), *plan.variants[1:]))) == wanted


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 3}, "launch plan of version 3; this release reads 1 and 2"),
    ({"version": 1}, "a launch plan of version 1 that asks for what version 2 has"),
    ({"cluster": ["1"]}, "not enough values to unpack (expected 3, got 1)"),
    ({"cluster": [1, 1, 1]}, "not a launch plan: 1 is no text"),
    ({"dependent": 1}, "not a launch plan: 1 is neither true nor false"),
], ids=str)
def test_wrong_plans_of_the_newer_version(change: dict[str, Any], message: str) -> None:
    raw = json.loads(clustered().plan.to_json())
    raw["version"] = change.pop("version", 2)
    raw["variants"][0]["steps"][0] |= change
    with pytest.raises(ValueError) as error:
        LaunchPlan.from_json(json.dumps(raw))
    assert str(error.value) == message


def evaluated(plan: str, *shapes: int | list[int]) -> dict[str, Any]:
    """What the library says of a run with inputs of these shapes, or with vectors of these sizes.

    Raises:
        ValueError: the plan is wrong, or the run.
    """
    inputs = [[shape] if isinstance(shape, int) else shape for shape in shapes]
    run = {"inputs": inputs, "hosts": [], "input_addresses": [], "output_addresses": []}
    situation = json.dumps({"sm": 90, "sms": 132, "runs": [run]})
    (result,) = json.loads(
        library.read_checked(library.load().onnxfuse_evaluate_plan, plan.encode(), situation.encode()))
    if "error" in result:
        raise ValueError(result["error"])
    found: dict[str, Any] = result
    return found


def with_map(**members: Any) -> str:
    """A plan whose first tensor map has these members."""
    raw = json.loads(tiled().plan.to_json())
    raw["maps"][0] |= members
    return json.dumps(raw)


CHANNELS = {"sizes": ["16", "4", "s0"], "strides": ["32", "128"], "box": [16, 1, 1], "element_strides": [1, 1, 1],
            "type": "uint8"}


@pytest.mark.parametrize(("members", "message"), [
    ({"base": "m0"}, "has the base 'm0', which is no address"),
    ({"base": "i64:4"}, "has the base 'i64:4', which is no address"),
    ({"type": "float128"}, "has 'type' float128"),
    ({"sizes": []}, "has 0 sizes; 1 to 5"),
    ({"sizes": ["1"] * 6}, "has 6 sizes; 1 to 5"),
    ({"strides": ["128", "128"]}, "has 2 strides for 2 sizes"),
    ({"box": [32]}, "has 1 of 'box' for 2 sizes"),
    ({"box": [32, 0]}, "has 0 in 'box'; it is 1 to 256"),
    ({"box": [32, 257]}, "has 257 in 'box'; it is 1 to 256"),
    ({"element_strides": [1, 1, 1]}, "has 3 of 'element_strides' for 2 sizes"),
    ({"element_strides": [1, 9]}, "has 9 in 'element_strides'; it is 1 to 8"),
    ({"swizzle": 16}, "has 'swizzle' 16"),
    ({"interleave": 64}, "has 'interleave' 64"),
    ({"promotion": 1}, "has 'promotion' 1"),
    ({"fill": "one"}, "has 'fill' one"),
    ({"interleave": 16}, "with 'interleave' has fewer than 3 sizes"),
    (CHANNELS | {"interleave": 32}, "with 'interleave' 32 has no 'swizzle' 32"),
    ({"box": [6, 8]}, "has a box of 24 bytes along its first axis, no multiple of 16"),
    ({"swizzle": 64}, "has a box of 128 bytes along its first axis, more than its 'swizzle' 64"),
    ({"type": "int32", "fill": "nan"}, "of integers has 'fill' nan"),
], ids=str)
def test_wrong_tensor_maps_are_told_alike_in_both_languages(members: dict[str, Any], message: str) -> None:
    for read in (LaunchPlan.from_json, lambda text: evaluated(text, 64)):
        with pytest.raises(ValueError) as error:
            read(with_map(**members))
        if members.get("base") != "m0":  # the library names what it does not know
            assert str(error.value) == f"a tensor map of the launch plan {message}"


@pytest.mark.parametrize(("members", "size", "message"), [
    ({"sizes": ["32", "0"]}, 64, "has the size 0 along axis 1"),
    ({"sizes": ["-1", "1"]}, 64, "has the size -1 along axis 0"),
    ({"sizes": ["2147483649", "1"]}, 64, "has the size 2147483649 along axis 0"),
    ({"strides": ["s0 8 +"]}, 64, "has a stride of 72 bytes along axis 1, no multiple of 16 below 2^40"),
    ({"strides": ["-16"]}, 64, "has a stride of -16 bytes along axis 1, no multiple of 16 below 2^40"),
    ({"strides": ["1099511627776"]}, 64,
     "has a stride of 1099511627776 bytes along axis 1, no multiple of 16 below 2^40"),
    (CHANNELS | {"interleave": 32, "swizzle": 32, "strides": ["48", "64"]}, 64,
     "has a stride of 48 bytes along axis 1, no multiple of 32 below 2^40"),
], ids=str)
def test_sizes_that_no_tensor_map_has(members: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        evaluated(with_map(**members), size)
    assert str(error.value) == f"a tensor map of the launch plan {message}"


def test_a_tensor_map_has_the_sizes_of_the_run() -> None:
    plan = tiled().plan
    for size, variant in ((64, 0), (320, 0), (5, 1), (0, 0)):
        situation = Situation(((size,),))
        situation.bind(plan)
        (launch,) = evaluated(plan.to_json(), size)["steps"]
        if size == 0:
            assert launch is None
            continue
        maps = plan.maps[2 * variant:2 * variant + 2]
        assert launch["args"] == [
            {"base": one.base, "sizes": [situation.evaluate(text) for text in one.sizes],
             "strides": [situation.evaluate(text) for text in one.strides]} for one in maps
        ]


def test_more_tensor_maps_than_a_plan_may_have() -> None:
    raw = json.loads(tiled().plan.to_json())
    raw["maps"] *= 65
    with pytest.raises(ValueError, match=r"^the launch plan has 260 tensor maps; 256 at most$"):
        evaluated(json.dumps(raw), 64)


@pytest.mark.parametrize(("uses", "sizes", "places"), [
    (["0", "01", "12", "2"], (1000, 3000, 500), [3072, 0, 3072]),
    (["0", "02", "12", "1"], (5000, 1000, 800), [0, 0, 5120]),
    (["012", "", "2"], (256, 255, 257), [512, 768, 0]),
    (["0", "13", "1", "23"], (0, 100, 700, 0), [0, 0, 0, 0]),
    (["01", "2", "0"], (512, 512, 1), [0, 512, 512]),
], ids=str)
def test_scratch_buffers_that_no_step_needs_at_once_share_memory(
    uses: list[str], sizes: tuple[int, ...], places: list[int]
) -> None:
    """Each step's buffers; the largest has the first place."""
    steps = tuple(Step("k", ("1",) * 3, ("1",) * 3, tuple(f"t{place}" for place in each)) for each in uses)
    plan = LaunchPlan("r", 1, (), (), (), (Variant("v", steps),), scratch=tuple(map(str, sizes)))
    found = evaluated(plan.to_json(), 1)
    ends = [place + size for place, size in zip(places, sizes, strict=True)]
    assert (found["scratch"], found["places"], found["memory"]) == (list(sizes), places, max(ends))


def test_a_launch_elsewhere_reads_sizes_elsewhere_too() -> None:
    step = Step("of_rows", ("1", "1", "1"), ("32", "1", "1"), ("i2", "i2.n 4 *", "i0", "o0", "7"))
    assert elsewhere(step, {"i2": "t0", "i2.n": "i0.0 i0.1 *", "o0": "o1"}).arguments == (
        "t0", "i0.0 i0.1 * 4 *", "i0", "o1", "7")


def test_scratch_that_leaves_64_bits_is_an_error() -> None:
    step = Step("k", ("1",) * 3, ("1",) * 3, ("t0", "t1"))
    plan = LaunchPlan("r", 1, (), (), (), (Variant("v", (step,)),), scratch=(str(2**63 - 1), "1"))
    with pytest.raises(ValueError, match=r"^the scratch memory of a launch leaves 64 bits$"):
        evaluated(plan.to_json(), 1)


def test_scratch_that_a_tensor_map_shows_is_the_variant_s() -> None:
    plan = tiled().plan
    plan = replace(plan, scratch=("64", "4 s0 *", "64"), maps=(*plan.maps[:3], replace(plan.maps[3], base="t1")))
    assert [plan.scratch_of(variant) for variant in plan.variants] == [(), (1,)]
    assert [evaluated(plan.to_json(), size)["scratch"] for size in (64, 5)] == [[], [20]]


def with_call(**members: Any) -> str:
    """A plan whose call of a library has these members."""
    raw = json.loads(PRODUCTS["product_turned"].fused().plan.to_json())
    raw["variants"][0]["steps"][0] |= members
    return json.dumps(raw)


SIZES = json.loads(with_call())["variants"][0]["steps"][0]["sizes"]


@pytest.mark.parametrize(("members", "message"), [
    ({"call": "gemv"}, "the launch plan calls 'gemv', which is no routine that this library knows"),
    ({"type": "float64"}, "is of 'float64', which it does not take"),
    ({"args": ["i0", "i64:1", "o0"]}, "has an argument that is no address"),
    ({"args": ["i0", "i1"]}, "has 2 arguments, not 3"),
    ({"args": ["i0", "o0", "i1"]}, "writes an input"),
    ({"args": ["i0", "i1", "o0", "o0"]}, "has a workspace that is no scratch buffer"),
    ({"sizes": {name: SIZES[name] for name in SIZES if name != "k"}}, "has no size 'k'"),
    ({"sizes": SIZES | {"beta": "1"}}, "has sizes that it does not take"),
], ids=str)
def test_wrong_calls_are_told_alike_in_both_languages(members: dict[str, Any], message: str) -> None:
    where = "" if "call" in members else "a call of 'gemm' in the launch plan "
    for read in (LaunchPlan.from_json, lambda text: evaluated(text, [2, 3, 5], [7, 3])):
        with pytest.raises(ValueError) as error:
            read(with_call(**members))
        assert str(error.value) == where + message


def test_a_call_in_a_plan_of_version_1_is_refused() -> None:
    text = PRODUCTS["product"].fused().plan.to_json().replace('"version":2', '"version":1')
    for read in (LaunchPlan.from_json, evaluated):
        with pytest.raises(ValueError, match=r"^a launch plan of version 1 that asks for what version 2 has$"):
            read(text)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"m": "-1"}, "has the m -1; it is 0 to 2147483647"), ({"n": "2147483648"}, "has the n 2147483648; it is 0 to "
                                                           "2147483647"),
    ({"k": "0"}, "has the k 0; it is 1 to 2147483647"), ({"batch": "-2"}, "has the batch -2; it is 0 to 2147483647"),
    ({"stride_a": "-1"}, "has the stride_a -1; it is 0 to 281474976710656"),
    ({"stride_c": "34"}, "has the stride_c 34; it is 35 to 281474976710656"),
    ({"transpose_b": "2"}, "has the transpose_b 2; it is 0 to 1"),
    ({"activation": "3"}, "has the activation 3; it is 0 to 2"),
    ({"algorithm": "16"}, "has the algorithm 16; it is 0 to 15"),
], ids=str)
def test_sizes_that_no_product_has(sizes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        evaluated(with_call(sizes=SIZES | sizes), [2, 3, 5], [7, 3])
    assert str(error.value) == f"a gemm of the launch plan {message}"


def test_a_call_has_the_sizes_of_the_run() -> None:
    plan = PRODUCTS["product_turned"].fused().plan
    (call,) = plan.variants[0].steps
    situation = Situation(((2, 3, 5), (7, 3)))
    situation.bind(plan)
    assert evaluated(plan.to_json(), *map(list, situation.inputs))["steps"] == [{
        "call": "gemm", "type": "float32", "args": ["i0", "i1", "o0", "t0"],
        "sizes": [situation.evaluate(size) for size in call.sizes],
    }]
    assert evaluated(plan.to_json(), [2, 3, 0], [7, 3])["steps"] == [None]


def test_what_is_not_a_kernel_is_compiled_by_nobody() -> None:
    """Not when a model is opened, nor when images are embedded."""
    product = PRODUCTS["product"]
    assert kernel_sources(product.model(product.fused()), "sm_90a") == []
    assert [source.kernels for source in kernel_sources(product.model(product.of_sum()), "sm_90a")] == [("add_one",)]
    source = source_of("", product.fused().plan)
    assert source.kernels == ()
    assert compile_images([source], ["sm_90"]) == [{}]
    assert ReadBack("sm_90").figures([Kernel(USER, Given(""), product.fused().plan)]) == [None]


def test_a_call_counts_as_a_kernel_and_its_workspace_not_at_all() -> None:
    """Most algorithms take nothing of it; what another step leaves for the call is scratch."""
    product = PRODUCTS["product_turned"]
    assert plan_cost(product.fused().plan, [(2, 3, 5), (7, 3)], 90, 132) == (1, 0)
    assert plan_cost(product.of_sum().plan, [(2, 3, 5), (7, 3)], 90, 132) == (2, 2 * 4 * 30)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("source", [CLUSTERED, TILED], ids=["clustered", "tiled"])
def test_kernels_for_the_gpu_compile(source: str, architecture: str) -> None:
    assert compile_cubin(source, architecture)
