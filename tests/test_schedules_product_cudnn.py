"""Convolutions that cuDNN runs: for which regions it is offered, and what its calls compute, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import kernel_harness
import launch_convolutions
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError, run_plan
from kernel_harness import Made, check, make, only, random_inputs, short_inputs

from onnxfuse.ir.exact import exactly
from onnxfuse.lowering.launch import EXTENDED, LaunchPlan
from onnxfuse.lowering.routines import ROUTINES
from onnxfuse.schedules import SCHEDULES, Choice, Kernel, Request, make_kernel, parse_choice, sharing, words
from onnxfuse.schedules.products.cudnn import RANKS

IMAGES = "i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)"
BACK = "Transpose<perm = [0,2,3,1]>"
REGIONS = {
    "plain": (f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) y = {BACK}(c) }}", "conv"),
    "bias and ReLU, steps of two": (f"g (T[N,9,8,5] x, T[7,3,3,5] w, T[7] b) => (T[N,5,4,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1], strides = [2,2]>(i, v, b) r = Relu(c) y = {BACK}(r) }}", "conv_bias"),
    "windows of two sizes, apart, SiLU": (f"g (T[N,9,12,5] x, T[7,3,2,5] w, T[7] b) => (T[N,11,11,7] y) {{ {IMAGES} c = Conv<pads = [1,2,3,0], dilations = [1,3]>(i, v, b) s = Sigmoid(c) m = Mul(s, c) y = {BACK}(m) }}", "conv_bias"),
    "a residual": (f"g (T[N,9,8,5] x, T[7,3,3,5] w, T[7] b, T[N,9,8,7] z) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v, b) t = {BACK}(c) s = Add(t, z) y = Relu(s) }}", "conv_bias_add"),
    "a residual alone": (f"g (T[N,9,8,5] x, T[7,3,1,5] w, T[N,7,8,7] z) => (T[N,7,8,7] y) {{ {IMAGES} c = Conv(i, v) t = {BACK}(c) y = Add(z, t) }}", "conv_add"),
    "single pixels": (f"g (T[N,9,8,5] x, T[7,1,1,5] w, T[7] b) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv(i, v, b) r = Relu(c) y = {BACK}(r) }}", "conv_bias"),
    "GELU by tanh": (f"g (T[N,9,8,5] x, T[7,3,3,5] w, T[7] b) => (T[N,7,6,7] y) {{ {IMAGES} c = Conv(i, v, b) r = Gelu<approximate = \"tanh\">(c) y = {BACK}(r) }}", "conv_bias"),
    "one axis": ("g (T[N,9,5] x, T[7,3,5] w) => (T[N,4,7] y) { i = Transpose<perm = [0,2,1]>(x) v = Transpose<perm = [0,2,1]>(w) c = Conv<strides = [2]>(i, v) y = Transpose<perm = [0,2,1]>(c) }", "conv"),
    "three axes": ("g (T[N,5,4,6,3] x, T[7,3,1,3,3] w) => (T[N,3,4,6,7] y) { i = Transpose<perm = [0,4,1,2,3]>(x) v = Transpose<perm = [0,4,1,2,3]>(w) c = Conv<pads = [1,0,1,1,0,1], strides = [2,1,1]>(i, v) y = Transpose<perm = [0,2,3,4,1]>(c) }", "conv"),
    "windows that end before the image": (f"g (T[N,9,8,5] x, T[7,2,2,5] w) => (T[N,3,3,7] y) {{ {IMAGES} c = Conv<strides = [3,3]>(i, v) y = {BACK}(c) }}", "conv"),
}
"""By what they are, a graph and the routine."""

OTHERS = {
    "channels first": "g (T[N,5,9,8] x, T[7,5,3,3] w) => (T[N,7,9,8] y) { c = Conv<pads = [1,1,1,1]>(x, w) y = Relu(c) }",
    "results with their channels first": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[N,7,9,8] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) y = Relu(c) }}",
    "results with their images inside": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[9,N,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) y = Transpose<perm = [2,0,3,1]>(c) }}",
    "weights across": f"g (T[N,9,8,5] x, T[3,3,5,7] w) => (T[N,9,8,7] y) {{ i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [3,2,0,1]>(w) c = Conv<pads = [1,1,1,1]>(i, v) y = {BACK}(c) }}",
    "in groups": f"g (T[N,9,8,6] x, T[4,3,3,3] w) => (T[N,9,8,4] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1], group = 2>(i, v) y = {BACK}(c) }}",
    "an image that is computed": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[N,9,8,7] y) {{ {IMAGES} t = Tanh(i) c = Conv<pads = [1,1,1,1]>(t, v) y = {BACK}(c) }}",
    "another activation": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) t = Tanh(c) y = {BACK}(t) }}",
    "GELU by the error function": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) t = Gelu(c) y = {BACK}(t) }}",
    "a part of an image": f"g (T[N,9,8,9] x, T[7,3,3,5] w) => (T[N,9,8,7] y) <int64[1] o = {{2}}, int64[1] e = {{7}}, int64[1] a = {{3}}> {{ s = Slice(x, o, e, a) i = Transpose<perm = [0,3,1,2]>(s) v = Transpose<perm = [0,3,1,2]>(w) c = Conv<pads = [1,1,1,1]>(i, v) y = {BACK}(c) }}",
    "a result of another type": f"g (T[N,9,8,5] x, T[7,3,3,5] w) => (double[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) d = Cast<to = 11>(c) y = {BACK}(d) }}",
    "a gate of something else": f"g (T[N,9,8,5] x, T[7,3,3,5] w, T[7] b) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv<pads = [1,1,1,1]>(i, v) d = Add(c, c) s = Sigmoid(d) m = Mul(s, c) y = {BACK}(m) }}",
    "transposed": f"g (T[N,9,8,5] x, T[5,3,3,7] w) => (T[N,11,10,7] y) {{ i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w) c = ConvTranspose(i, v) y = {BACK}(c) }}",
    "single pixels that cuBLASLt has": f"g (T[N,9,8,5] x, T[7,1,1,5] w, T[7] b) => (T[N,9,8,7] y) {{ {IMAGES} c = Conv(i, v, b) y = {BACK}(c) }}",
    "a product": "g (T[N,9,8,5] x, T[5,7] w) => (T[N,9,8,7] y) { p = MatMul(x, w) y = Relu(p) }",
}

PLANNED = {"N": 8}


def offered(kernel: Kernel) -> list[Choice]:
    """Choices that are cuDNN's."""
    return [choice for choice in kernel.choices if "cudnn" in dict(choice.settings)]


def told(text: str, kind: str, rank: int = 0, planned: Mapping[str, int] | None = None) -> Made:
    """A region whose first variant is cuDNN's."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    return kernel_harness.told(made, Choice.of("product", cudnn=rank), planned or {})


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("case", REGIONS)
def test_calls(case: str, kind: str) -> None:
    text, routine = REGIONS[case]
    made = told(text, kind)
    first, *_ = made.kernel.plan.variants
    (call,) = first.calls
    assert call.routine == routine and first.steps == first.calls and not first.guards
    assert call.dtype == ("tf32" if kind == "float" else kind)
    for seed, images in enumerate((1, 3, 0)):
        inputs = (short_inputs if kind == "float" else random_inputs)(made, {"N": images}, seed)
        check(only(made, [first]), inputs, length=64)


@pytest.mark.parametrize("case", OTHERS)
def test_what_the_library_does_not_do_is_not_offered(case: str) -> None:
    made = make(OTHERS[case].replace("T[", "float16["), planned=PLANNED)
    assert made.kernel.schedule == "product" and not offered(made.kernel)
    assert kernel_harness.told(made, Choice.of("product", cudnn=0), PLANNED).kernel == made.kernel


def test_float32_that_is_not_rounded_is_not_offered() -> None:
    """Its engines without tensor cores are slower than all others."""
    made = make(REGIONS["plain"][0].replace("T[", "float["), planned=PLANNED)
    lowered = replace(made.lowered, program=exactly(made.lowered.program))
    kernel = make_kernel(Request(lowered, "test", PLANNED))
    assert isinstance(kernel, Kernel) and offered(made.kernel) and not offered(kernel)


def test_nothing_runs_unmeasured() -> None:
    """The schedule's own choice calls no library; of what tuning may try the library's come last.  What is generated
    stands behind, all of it, and the text tells that it does."""
    text = REGIONS["bias and ReLU, steps of two"][0]
    own = make(text.replace("T[", "float16["), planned=PLANNED).kernel
    assert not any(variant.calls for variant in own.plan.variants) and not own.plan.scratch
    assert [choice["cudnn"] for choice in offered(own)] == list(range(RANKS))
    assert own.choices[-RANKS:] == tuple(offered(own)) and len(own.choices) > RANKS
    kernel = told(text, "float16", RANKS - 1, PLANNED).kernel
    assert kernel.choice == Choice.of("product", cudnn=RANKS - 1) and kernel.plan.variants[1:] == own.plan.variants
    assert "behind cuDNN" in kernel.source and kernel.plan.version == EXTENDED and not sharing(kernel)
    assert LaunchPlan.from_json(kernel.plan.to_json()).variants == kernel.plan.variants
    assert SCHEDULES["product"].leeway(kernel) == 0.0 < SCHEDULES["product"].leeway(told(text, "float").kernel)


def test_words() -> None:
    choice = Choice.of("product", cudnn=2)
    assert words(choice) == "by cuDNN, plan 2 of those that it proposes" and parse_choice(str(choice)) == choice
    assert parse_choice('{"schedule":"product","cudnn":2,"library":0}') is None


def test_what_is_no_number_stays_none() -> None:
    made = told(REGIONS["bias and ReLU, steps of two"][0], "float16")
    inputs = random_inputs(made, {"N": 2})
    inputs["x"][0, 4, 4, 2], inputs["x"][1, 0, 0, 0], inputs["w"][3, 1, 1, 1] = np.nan, np.inf, -np.inf
    check(only(made, made.kernel.plan.variants[:1]), inputs, length=64)


@pytest.mark.parametrize("name", launch_convolutions.CONVOLUTIONS)
def test_plans_of_the_stand_in_s_models(name: str) -> None:
    """The emulator has the word of what their calls compute, by a sum over each window."""
    convolved = launch_convolutions.CONVOLUTIONS[name]
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(convolved.dtype, np.float32)
    random = np.random.default_rng(3)
    shapes = convolved.shapes(2, tuple(range(5, 5 + len(convolved.axes))), 3, 3)
    *arrays, wanted = (random.integers(-2, 3, shape).astype(dtype) for shape in shapes.values())
    (got,) = run_plan(convolved.fused().plan, "", arrays, variant=0)
    named = dict(zip(shapes, arrays, strict=False))
    assert got.shape == wanted.shape
    for place in np.ndindex(*got.shape):
        np.testing.assert_allclose(float(got[place]), one_of(convolved, named, place), rtol=1e-2, atol=1e-2)


def one_of(convolved: launch_convolutions.Convolved, arrays: Mapping[str, np.ndarray], place: tuple[int, ...]) -> float:
    """One result, in float64."""
    x, w = (arrays[name].astype(np.float64) for name in "xw")
    total = 0.0
    for tap in np.ndindex(*(axis.taps for axis in convolved.axes)):
        at = [own * axis.step + each * axis.apart - axis.before
              for own, each, axis in zip(place[1:-1], tap, convolved.axes, strict=True)]
        if all(0 <= own < size for own, size in zip(at, x.shape[1:-1], strict=True)):
            total += float(x[(place[0], *at)] @ w[(place[-1], *tap)])
    total += float(arrays["v"][place[-1]]) if "v" in arrays else 0.0
    total += float(arrays["u"][place]) if "u" in arrays else 0.0
    return {"": total, "relu": max(total, 0.0), "silu": total / (1 + np.exp(-total)),
            "gelu_tanh": total * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (total + 0.044715 * total**3)))}[
                convolved.activation]


@pytest.mark.parametrize(("sizes", "fault"), [
    ({"channels": "0"}, "has sizes that are none"),
    ({"count_x": "s2 1 +"}, "of output o0, which has 240 bytes"),
    ({"algorithm": "16"}, "has sizes that are none"), ({"activation": "4"}, "has sizes that are none"),
    ({"before_y": "-1"}, "has sizes that are none"), ({"step_z": "0"}, "has sizes that are none"),
    ({"images": "s0 1 +"}, "of input i0, which has 240 bytes"),
    ({"results": "s4 1 +"}, "of input i1, which has 324 bytes"),
])
def test_calls_that_would_leave_their_operands(sizes: dict[str, str], fault: str) -> None:
    plan = launch_convolutions.CONVOLUTIONS["convolution"].fused().plan
    ((call,),) = (variant.steps for variant in plan.variants)
    names = ROUTINES[call.routine].sizes
    changed = replace(call, sizes=tuple(sizes.get(name, size) for name, size in zip(names, call.sizes, strict=True)))
    plan = replace(plan, variants=(replace(plan.variants[0], steps=(changed,)),))
    with pytest.raises(EmulatorError, match=fault):
        run_plan(plan, "", [np.ones((1, 5, 4, 3), np.float32), np.ones((3, 3, 3, 3), np.float32)])
