"""The pooling schedule: windows of every kind, channels first and last, what is computed around them, and what is not
worth it."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from ir_reference import evaluate_lowered
from kernel_harness import Made, arguments, check, make, random_inputs, refused
from reference import evaluate

CASES = {
    "line": ("MaxPool <kernel_shape = [3], strides = [2]>", "3,5,33"),
    "holes": ("MaxPool <kernel_shape = [3, 2], dilations = [2, 3], pads = [1, 0, 2, 1]>", "2,3,7,9"),
    "uneven": ("MaxPool <kernel_shape = [3, 5], strides = [1, 3], pads = [2, 0, 0, 4]>", "1,4,6,11"),
    "ceiling": ("MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [0, 1, 1, 0], ceil_mode = 1>", "2,8,10,13"),
    "gaps": ("MaxPool <kernel_shape = [1, 2], strides = [3, 4]>", "2,2,10,9"),
    "same": ("MaxPool <kernel_shape = [3, 4], strides = [2, 3], auto_pad = 'SAME_UPPER'>", "1,3,7,8"),
    "volume": ("MaxPool <kernel_shape = [2, 3, 2], strides = [2, 1, 1], pads = [0, 1, 1, 1, 1, 0]>", "1,2,5,4,3"),
    "mean": ("AveragePool <kernel_shape = [3, 3], strides = [2, 1], pads = [1, 2, 0, 1]>", "2,3,8,7"),
    "with zeros": ("AveragePool <kernel_shape = [2, 3], pads = [1, 1, 1, 2], count_include_pad = 1>", "1,3,5,6"),
    "mean of some": ("AveragePool <kernel_shape = [4], strides = [3], pads = [2, 0], ceil_mode = 1>", "2,1,9"),
    "same below": ("AveragePool <kernel_shape = [2, 2], auto_pad = 'SAME_LOWER', count_include_pad = 1>", "2,1,5,4"),
    "valid": ("AveragePool <kernel_shape = [2, 2], strides = [2, 2], auto_pad = 'VALID'>", "1,8,6,5"),
}
"""A pooling and the sizes of its image."""

UNKNOWN = "MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>"


def text(pool: str, shape: str, kind: str, around: str = "y = {} (x)") -> str:
    rank = shape.count(",") + 1
    sizes = ",".join(f"N{axis}" for axis in range(rank))
    return f"g ({kind}[{shape}] x) => ({kind}[{sizes}] y) {{ {around.format(pool.replace(chr(39), chr(34)))} }}"


def last(shape: str) -> str:
    """The same sizes with the channels behind."""
    sizes = shape.split(",")
    return ",".join([sizes[0], *sizes[2:], sizes[1]])


def turned(rank: int) -> str:
    """Read and written with channels last."""
    first, back = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    return f"f = Transpose <perm = {first}> (x) p = {{}} (f) y = Transpose <perm = {back}> (p)"


def first_of(made: Made) -> str:
    return made.kernel.plan.variants[0].steps[0].kernel


def agrees(made: Made, inputs: dict[str, np.ndarray]) -> None:
    """A kernel, and what the IR says, with the reference."""
    check(made, inputs, length=32)
    (found,) = evaluate_lowered(made.lowered, arguments(made, inputs), {})
    np.testing.assert_allclose(found, evaluate(made.model, inputs)["y"].astype(found.dtype), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_windows_channels_first_and_last(name: str) -> None:
    pool, shape = CASES[name]
    for kind, around, sizes in (("float16", "y = {} (x)", shape), ("float", turned(shape.count(",") + 1), last(shape))):
        made = make(text(pool, sizes, kind, around))
        assert made.kernel.schedule == "pooling" and bool(made.kernel.scattered) == (name == "gaps" and around[0] == "y")
        agrees(made, random_inputs(made, {}, 1))


@pytest.mark.parametrize("kind", ["bfloat16", "double", "int8", "uint8"])
def test_other_types(kind: str) -> None:
    made = make(text(CASES["uneven"][0], "1,11,6,8", kind, turned(4)))
    agrees(made, random_inputs(made, {}, 2))


def test_what_is_no_number_goes_on_and_padding_is_below_all() -> None:
    pool = "MaxPool <kernel_shape = [2, 2], pads = [1, 1, 1, 1]>"
    for shape, around in (("1,2,5,5", "y = {} (x)"), ("1,5,5,2", turned(4))):
        made = make(text(pool, shape, "float16", around))
        x = np.full([int(size) for size in shape.split(",")], -np.inf, np.float16)
        x[0, 1, 2, 0], x[0, 0, 0, 1], x[0, -1, -1, -1] = np.nan, np.inf, -65504
        agrees(made, {"x": x})
        x = np.full_like(x, -np.inf)
        agrees(made, {"x": x})


def test_sizes_of_a_run() -> None:
    made = make("g (float16[n,h,w,c] x) => (float16[n,i,j,c] y) { f = Transpose <perm = [0,3,1,2]> (x) p = "
                f"{UNKNOWN} (f) y = Transpose <perm = [0,2,3,1]> (p) }}")
    assert first_of(made) == "pooling_w8_32"
    for sizes in ({"n": 2, "h": 9, "w": 6, "c": 16}, {"n": 1, "h": 1, "w": 2, "c": 3}, {"n": 0, "h": 4, "w": 4, "c": 8}):
        check(made, random_inputs(made, sizes))
    mean = make("g (float[n,2,h,w] x) => (float[n,2,i,j] y) { y = AveragePool <kernel_shape = [3,3], strides = [2,2], "
                "pads = [1,1,1,1]> (x) }")
    for height, width in ((1, 1), (31, 4), (6, 33)):
        check(mean, random_inputs(mean, {"n": 2, "h": height, "w": width}))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "pads"), [
    (2, 2, 1, (0, 0)), (3, 3, 1, (0, 0)), (3, 1, 1, (0, 0)), (3, 2, 1, (0, 0)), (5, 3, 1, (0, 0)), (5, 3, 1, (1, 0)), (3, 3, 2, (0, 0)),
    (4, 6, 1, (0, 1))])
def test_windows_larger_than_an_image(op: str, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> None:
    """By less than a stride the runtime takes what there is, in one window."""
    apart = f"kernel_shape = [{kernel}], strides = [{stride}], dilations = [{dilation}], pads = [{pads[0]},{pads[1]}]"
    made = make(f"g (float[n,2,h] x) => (float[n,2,i] y) {{ y = {op} <{apart}> (x) }}", opset=19)
    session, seen = onnxruntime.InferenceSession(made.model.SerializeToString(), providers=["CPUExecutionProvider"]), set()
    for height in range(1, 10):
        inputs = random_inputs(made, {"n": 3, "h": height})
        try:
            (wanted,) = session.run(["y"], inputs)
        except Exception:  # ONNX Runtime has an exception type per status: sizes of which nothing is pooled
            continue
        np.testing.assert_allclose(evaluate(made.model, inputs)["y"], wanted, rtol=1e-6)
        check(made, inputs)
        fixed = make(f"g (float[3,2,{height}] x) => (float[3,2,{wanted.shape[2]}] y) {{ y = {op} <{apart}> (x) }}", opset=19)
        check(fixed, inputs)
        seen.add(wanted.shape[2])
    assert {1, 2} <= seen


def test_zeros_that_there_are_none_of() -> None:
    """Without padding none count, whatever a node says."""
    made = make("g (float[n,2,h] x) => (float[n,2,i] y) { y = AveragePool <kernel_shape = [3], strides = [3], count_include_pad = 1> (x) }")
    for height in (1, 2, 3, 7):
        check(made, random_inputs(made, {"n": 2, "h": height}))


def test_what_is_computed_around_it() -> None:
    made = make("g (float16[2,9,9,8] x, float16[8] a, float16[2,4,4,8] z) => (float16[2,4,4,8] y, float16[2,4,4,8] q) "
                "{ m = Mul(x, a) r = Relu(m) f = Transpose <perm = [0,3,1,2]> (r) "
                "p = MaxPool <kernel_shape = [3,3], strides = [2,2]> (f) y = Transpose <perm = [0,2,3,1]> (p) q = Add(y, z) }")
    assert first_of(made) == "pooling_w8_32"
    check(made, random_inputs(made, {}))


def test_vectors_where_all_of_them_lie_side_by_side() -> None:
    """With channels last and whole vectors of them, and no more at once than registers hold."""
    wide = "MaxPool <kernel_shape = [{0}, {0}], pads = [{1}, {1}, {1}, {1}]>"
    for shape, around, window, width in (
            ("1,20,20,16", turned(4), 3, 8), ("1,20,20,16", turned(4), 5, 4), ("1,20,20,12", turned(4), 3, 4), ("1,20,20,9", turned(4), 5, 1),
            ("1,20,20,16", turned(4), 9, 1), ("1,16,20,24", "y = {} (x)", 5, 1)):
        made = make(text(wide.format(window, window // 2), shape, "float16", around))
        assert first_of(made).startswith(f"pooling_w{width}_")


@pytest.mark.parametrize("model, said", [
    ("a = MaxPool <kernel_shape = [2,2]> (x) y = MaxPool <kernel_shape = [2,2]> (a)", "what other windows give"),
    ("a = Sigmoid(x) y = MaxPool <kernel_shape = [5,5]> (a)", "computed 25 times"),
    ("a = Softmax(x) y = MaxPool <kernel_shape = [2,2]> (a)", "rows"),
    ("y = MaxPool <kernel_shape = [2,2], pads = [2,0,0,0]> (x)", "padding of 2 and 0"),
    ("y = MaxPool <kernel_shape = [3,3], strides = [4,4], auto_pad = \"SAME_UPPER\"> (x)", "windows with gaps"),
    ("y = MaxPool <kernel_shape = [2,2], dilations = [16,1], pads = [1,0,1,0]> (x)", "beside the image"),
    ("y = MaxPool <kernel_shape = [10,10]> (x)", "windows of 100"),
    ("y = AveragePool <kernel_shape = [4,4], strides = [3,3], pads = [1,1,1,1], ceil_mode = 1, count_include_pad = 1> (x)",
     "past its padding"),
])
def test_refusals(model: str, said: str) -> None:
    assert said in refused(f"g (float[1,2,15,15] x) => (float[a,b,c,d] y) {{ {model} }}").message


def test_a_window_that_is_everything_is_a_reduction() -> None:
    for pool, exact in (("AveragePool <kernel_shape = [7, 7]>", 1e-6), ("MaxPool <kernel_shape = [7, 7]>", 0)):
        made = make(text(pool, "3,5,7,7", "float"))
        assert made.kernel.schedule == "rows"
        inputs = random_inputs(made, {})
        check(made, inputs, length=49)
        assert evaluate(made.model, inputs)["y"].shape == (3, 5, 1, 1) and exact < 1
