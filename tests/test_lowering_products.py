"""What products and convolutions mean as tensors, compared with ONNX Runtime's CPU provider.

On small whole numbers, which float32 adds up exactly: results are equal, but for quantised ones, of which a tie may fall
either way.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_reference import evaluate_lowered
from kernel_harness import Region, arguments, parse, region_of, shapes_of
from onnx import TensorProto
from plain_session import RELEASE
from reference import Array, element_types, numpy_type

from onnxfuse.graph.dims import dim
from onnxfuse.ir.scalars import INT8, INT32
from onnxfuse.ir.tensors import Contract, Window, postorder
from onnxfuse.verifying.evaluate import CPU, exact_options


def region(text: str, opset: int = 21) -> Region:
    """The whole model as tensors, which must be possible."""
    made = region_of(parse(text, opset))
    assert isinstance(made, Region), made
    return made


def whole_numbers(made: Region, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Inputs of a model: small whole numbers of both signs; scales are powers of two."""
    rng, types = np.random.default_rng(seed), element_types(made.model)
    found = {}
    for name, shape in shapes_of(made, sizes).items():
        kind = numpy_type(types[name])
        if name.endswith("scale"):
            found[name] = np.asarray(2.0 ** rng.integers(-3, 1, shape), kind)
        else:
            found[name] = np.asarray(rng.integers(0 if kind.kind == "u" else -4, 5, shape), kind)
    return found


def by_runtime(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs that ONNX Runtime gives."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    del plain.opset_import[2:]  # it knows no canonical operators
    session = onnxruntime.InferenceSession(plain.SerializeToString(), exact_options(), providers=CPU)
    return session.run(None, dict(inputs))


def check(text: str, *sizes: Mapping[str, int], steps: int = 0) -> Region:
    """Assert that a model means what ONNX Runtime makes of it, up to so many steps of a quantised result."""
    made = region(text)
    assert contractions(made), "no contraction"
    for seed, one in enumerate(sizes or ({},)):
        inputs = whole_numbers(made, one, seed)
        actual = evaluate_lowered(made.lowered, arguments(made, inputs), one)
        for array, expected in zip(actual, by_runtime(made.model, inputs), strict=True):
            assert array.shape == expected.shape
            assert np.abs(array.astype(np.float64) - expected).max(initial=0) <= steps, one
    return made


def contractions(made: Region) -> list[Contract]:
    return [tensor for tensor in postorder(made.lowered.program.outputs) if isinstance(tensor, Contract)]


SHAPES = [
    ("4,5", "5,6", "4,6"), ("5", "5", ""), ("5", "5,6", "6"), ("4,5", "5", "4"), ("5", "2,5,6", "2,6"),
    ("2,3,4,5", "5", "2,3,4"), ("2,4,5", "5,6", "2,4,6"), ("4,5", "2,5,6", "2,4,6"), ("3,1,4,5", "2,5,6", "3,2,4,6"),
    ("1,4,5", "3,5,6", "3,4,6"), ("1,1,4,5", "1,1,5,6", "1,1,4,6"), ("1,5", "5,1", "1,1"), ("4,1", "1,6", "4,6"),
    ("0,5", "5,6", "0,6"), ("4,5", "5,0", "4,0"), ("2,0,4,5", "1,1,5,6", "2,0,4,6"),
    ("B,S,8", "8,12", "B,S,12"), ("B,S,N", "N", "B,S"), ("B,H,S,8", "B,H,8,T", "B,H,S,T"), ("B,1,S,8", "H,8,T", "B,H,S,T"),
]
SIZES = ({"B": 1, "S": 1, "N": 1, "H": 1, "T": 1}, {"B": 2, "S": 5, "N": 3, "H": 3, "T": 4})


def typed(kind: str, shape: str) -> str:
    return f"{kind}[{shape}]" if shape else kind


@pytest.mark.parametrize(("left", "right", "result"), SHAPES)
@pytest.mark.parametrize("kind", ["float", "double", "int32", "int64"])
def test_matmul(kind: str, left: str, right: str, result: str) -> None:
    check(f"g ({typed(kind, left)} x, {typed(kind, right)} w) => ({typed(kind, result)} y) {{ y = MatMul(x, w) }}", *SIZES)


def test_matmul_over_nothing() -> None:
    """A sum of no products is zero."""
    made = region("g (float[N,K] x, float[K,4] w) => (float[N,4] y) { y = MatMul(x, w) }")
    inputs = {"x": np.ones((3, 0), np.float32), "w": np.ones((0, 4), np.float32)}
    (result,) = evaluate_lowered(made.lowered, arguments(made, inputs), {"N": 3, "K": 0})
    assert result.shape == (3, 4) and not result.any()


@pytest.mark.parametrize(("a", "b"), [("S,8", "8,6"), ("8,S", "8,6"), ("S,8", "6,8"), ("8,S", "6,8")])
@pytest.mark.parametrize("bias", ["", "S,6", "S,1", "6", "1,6", "1", "scalar"])
def test_gemm(a: str, b: str, bias: str) -> None:
    given = ", float c" if bias == "scalar" else f", float[{bias}] c" if bias else ""
    turned = f"transA = {int(a[0] == '8')}, transB = {int(b[0] == '6')}"
    check(f"g (float[{a}] x, float[{b}] w{given}) => (float[S,6] y) "
          f"{{ y = Gemm<{turned}, alpha = 0.5, beta = 2.0>(x, w{', c' if bias else ''}) }}", {"S": 1}, {"S": 5})


def test_a_bias_that_counts_nothing_is_not_read() -> None:
    made = check("g (float[4,5] x, float[5,6] w, float[6] c) => (float[4,6] y) { y = Gemm<beta = 0.0>(x, w, c) }")
    assert [value.name for value in made.lowered.tensors] == ["x", "w", "c"]
    assert isinstance(made.lowered.program.outputs[0], Contract)


@pytest.mark.parametrize("turned", ["", "transA = 1", "transB = 1", "transA = 1, transB = 1", "transBatchA = 1", "transBatchB = 1",
                                    "transA = 1, transBatchA = 1", "transB = 1, transBatchA = 1, transBatchB = 1"])
def test_fused_matmul(turned: str) -> None:
    """As ONNX Runtime's own optimiser writes it: equal sizes, so that every operand can be turned in every way."""
    check(f"g (float[3,3,3,3] x, float[3,3,3,3] w) => (float[3,3,3,3] y) {{ y = com.microsoft.FusedMatMul<alpha = 0.5{', ' * bool(turned)}{turned}>(x, w) }}")


EINSUMS = [
    ("bij,bjk->bik", "2,3,4", "2,4,5"), ("bhid,bhjd->bhij", "2,3,4,5", "2,3,6,5"), ("bij,bjk", "2,3,4", "2,4,5"),
    ("ij,jk->ki", "3,4", "4,5"), ("i,j->ij", "3", "4"), ("i,i->", "3", "3"), ("i,i->i", "3", "3"), ("i,i", "3", "3"),
    ("...ij,...jk->...ik", "2,3,4", "5,2,4,3"), ("...ij,jk->...ik", "2,2,3,4", "4,5"), ("...,...", "2,3", "3"),
    ("bik,k->bi", "2,3,4", "4"), ("aib,ib->ab", "2,3,4", "3,4"), ("ij,k->ik", "3,4", "5"), ("ijl,jk->ik", "3,4,2", "4,5"),
    ("bhqd,bkd->bhqk", "2,3,4,5", "2,6,5"), ("bnth,btsh->bnts", "2,3,4,5", "2,4,6,5"), ("ab,cd->dbca", "2,3", "4,5"),
    ("ij,jk->ik", "3,1", "4,5"), ("ij,ij->ij", "3,1", "3,4"), ("ij,jk->ik", "0,4", "4,5"), ("Ab,bC", "3,4", "4,5"),
]


@pytest.mark.parametrize(("equation", "left", "right"), EINSUMS)
def test_einsum(equation: str, left: str, right: str) -> None:
    shapes = [tuple(map(int, text.split(","))) for text in (left, right)]
    if "..." not in equation and "->" not in equation:
        rank = sum(equation.count(letter) == 1 for letter in set(equation) - {","})
    else:
        rank = np.einsum(equation, *(np.zeros(shape) for shape in shapes)).ndim
    result = typed("double", ",".join(f"R{axis}" for axis in range(rank)))
    text = f"g (double[{left}] x, double[{right}] w) => ({result} y) {{ y = Einsum<equation = \"{equation}\">(x, w) }}"
    made = region(text)
    inputs = whole_numbers(made, {})
    expected = np.einsum(equation, *inputs.values())
    (actual,) = evaluate_lowered(made.lowered, arguments(made, inputs), {})
    assert actual.shape == expected.shape and (actual == expected).all()


@pytest.mark.parametrize("zeros", ["", ", p", ", p, q", ", , q"])
def test_matmul_integer(zeros: str) -> None:
    given = "".join(f", {kind} {name}" for name, kind in (("p", "uint8"), ("q", "int8")) if name in zeros)
    check(f"g (uint8[2,4,5] x, int8[5,6] w{given}) => (int32[2,4,6] y) {{ y = MatMulInteger(x, w{zeros}) }}")


@pytest.mark.parametrize(("p", "q"), [("1", "1"), ("4", "6"), ("2,4,1", "2,1,6")])
def test_zero_points_of_rows_and_columns(p: str, q: str) -> None:
    """Which ONNX Runtime's CPU provider lacks."""
    made = region(f"g (uint8[2,4,5] x, int8[2,5,6] w, uint8[{p}] p, int8[{q}] q) => (int32[2,4,6] y) {{ y = MatMulInteger(x, w, p, q) }}")
    inputs = whole_numbers(made, {})
    x, w, rows, columns = (array.astype(np.int32) for array in inputs.values())
    (actual,) = evaluate_lowered(made.lowered, arguments(made, inputs), {})
    assert (actual == np.matmul(x - (rows[:, None] if p == "4" else rows), w - columns)).all()


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("column", ["", "6"])
def test_qlinear_matmul(kind: str, column: str) -> None:
    scale, zero = typed("float", column), typed("int8", column)
    check(f"g ({kind}[2,4,5] x, float xscale, {kind} p, int8[5,6] w, {scale} wscale, {zero} q, float yscale, {kind} o) => ({kind}[2,4,6] y) "
          "{ y = QLinearMatMul(x, xscale, p, w, wscale, q, yscale, o) }", {}, {}, {}, steps=1)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("column", ["", "6"])
@pytest.mark.parametrize("more", ["", ", p", ", p, q", ", p, q, c", ", , q, c", ", , , c"])
def test_integers_to_floats(kind: str, column: str, more: str) -> None:
    scale, zero = typed("float", column), typed("int8", column)
    names = {"p": f"{kind} p", "q": f"{zero} q", "c": "float[6] c"}
    given = "".join(f", {text}" for name, text in names.items() if f" {name}" in more)
    check(f"g ({kind}[2,4,5] x, int8[5,6] w, float s, {scale} t{given}) => (float[2,4,6] y) "
          f"{{ y = com.microsoft.MatMulIntegerToFloat(x, w, s, t{more}) }}")


@pytest.mark.parametrize("form", ["", "<transA = 1>", "<transB = 1>", "<transA = 1, transB = 1, alpha = 0.5>"])
@pytest.mark.parametrize("column", ["", "6"])
@pytest.mark.parametrize("more", ["", ", c", ", c, v, o", ", , v, o"])
def test_qgemm(form: str, column: str, more: str) -> None:
    """To floats, and to integers again."""
    scale, zero = typed("float", column), typed("int8", column)
    names = {"c": "int32[6] c", "v": "float v", "o": "uint8 o"}
    given = "".join(f", {text}" for name, text in names.items() if f" {name}" in more)
    left, right = "5,4" if "transA" in form else "4,5", "6,5" if "transB" in form else "5,6"
    result, steps = ("uint8", 1) if "v" in more else ("float", 0)
    check(f"g (uint8[{left}] x, float s, uint8 p, int8[{right}] w, {scale} t, {zero} q{given}) => ({result}[4,6] y) "
          f"{{ y = com.microsoft.QGemm {form} (x, s, p, w, t, q{more}) }}", {}, {}, steps=steps)


def test_a_product_of_integers_without_zero_points_is_of_bytes() -> None:
    """As tensor cores take them; where a zero point is known to be zero too."""
    for zero in ("", "<uint8 z = {0}>"):
        made = region(f"g (uint8[4,5] x, int8[5,6] w) => (int32[4,6] y) {zero} {{ y = MatMulInteger(x, w{', z' * bool(zero)}) }}")
        (product,) = contractions(made)
        assert [operand.dtype for operand in product.operands] == [TensorProto.UINT8, INT8] and product.dtype == INT32


CONVS = [
    # x, w, attributes
    ("2,3,7", "4,3,3", ""), ("2,3,H", "4,3,3", "pads = [1,1]"), ("1,2,8,8", "4,2,3,3", "pads = [1,1,1,1]"),
    ("1,2,8,9", "4,2,3,2", "pads = [0,1,2,0], strides = [2,1]"), ("B,2,H,W", "4,2,3,3", "pads = [1,1,1,1], strides = [2,2]"),
    ("1,2,9,9", "4,2,3,3", "dilations = [2,3]"), ("1,2,H,W", "4,2,2,2", "dilations = [2,1], pads = [1,0,1,0]"),
    ("1,4,6,6", "6,2,3,3", "group = 2"), ("1,4,H,W", "4,1,3,3", "group = 4, pads = [1,1,1,1]"), ("1,4,6,6", "8,1,3,3", "group = 4"),
    ("B,3,H,W", "5,3,1,1", ""), ("B,3,H,W", "5,3,1,1", "strides = [2,3]"), ("1,3,6,6", "5,3,1,1", "pads = [1,1,1,1]"),
    ("1,3,6,6", "5,3,1,1", "pads = [0,0,1,1], strides = [2,2]"), ("1,3,6,7", "5,3,1,3", "pads = [0,1,0,1]"), ("1,4,6,6", "4,2,1,1", "group = 2"),
    ("1,2,4,5,6", "3,2,2,2,3", "pads = [1,0,1,0,1,1], strides = [1,2,1]"), ("1,4,D,H,W", "4,1,3,3,3", "group = 4, strides = [2,2,2], pads = [1,1,1,1,1,1]"),
    ("1,2,7,8", "3,2,3,3", "auto_pad = \"SAME_UPPER\", strides = [2,2]"), ("1,2,7,8", "3,2,2,2", "auto_pad = \"SAME_LOWER\", strides = [1,1]"),
    ("1,2,H,W", "3,2,3,3", "auto_pad = \"SAME_LOWER\", strides = [2,3]"), ("1,2,H,W", "3,2,4,2", "auto_pad = \"SAME_UPPER\", strides = [3,1]"),
    ("1,2,H,W", "3,2,4,2", "auto_pad = \"VALID\", strides = [3,1]"), ("1,2,8,8", "3,2,3,3", "kernel_shape = [3,3], strides = [5,5]"),
    ("1,2,5,8", "3,2,1,2", "auto_pad = \"SAME_UPPER\", strides = [3,4]"), ("1,2,5,8", "3,2,1,2", "auto_pad = \"SAME_LOWER\", strides = [3,4]"),
    ("1,2,3,3", "3,2,3,3", ""), ("1,2,1,1", "3,2,3,3", "pads = [1,1,1,1]"), ("1,1,H,W", "1,1,3,3", "pads = [5,4,3,2]"),
]
IMAGES = ({"B": 1, "D": 3, "H": 9, "W": 8}, {"B": 2, "D": 4, "H": 6, "W": 11}, {"B": 1, "D": 5, "H": 7, "W": 5})


def result_of(x: str, w: str, letter: str = "R") -> str:
    """Sizes of a convolution's result, those of space unknown."""
    return ",".join([x.split(",")[0], w.split(",")[0], *(f"{letter}{axis}" for axis in range(x.count(",") - 1))])


@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
@pytest.mark.parametrize("bias", [False, True])
def test_conv(x: str, w: str, attributes: str, bias: bool) -> None:
    given = f", float[{w.split(',')[0]}] b" * bias
    check(f"g (float[{x}] x, float[{w}] w{given}) => (float[{result_of(x, w)}] y) {{ y = Conv{attributes and f'<{attributes}>'}(x, w{', b' * bias}) }}",
          *IMAGES[:1 if x.replace(",", "").isdigit() else 3])


@pytest.mark.parametrize("zeros", ["", ", p", ", p, q"])
def test_conv_integer(zeros: str) -> None:
    """What is padded counts as the zero point."""
    given = "".join(f", {kind} {name}" for name, kind in (("p", "uint8"), ("q", "uint8")) if name in zeros)
    check(f"g (uint8[1,2,6,6] x, uint8[4,2,3,3] w{given}) => (int32[1,4,6,6] y) {{ y = ConvInteger<pads = [1,1,1,1]>(x, w{zeros}) }}")


def test_zero_points_of_channels() -> None:
    """Which ONNX Runtime's CPU provider lacks: the same as a convolution of what they leave."""
    shapes = "[1,4,6,6] y) {{ y = {}<pads = [1,1,1,1]>(x, w{}) }}"
    made = region("g (uint8[1,2,6,6] x, uint8[4,2,3,3] w, uint8 p, uint8[4] q) => (int32" + shapes.format("ConvInteger", ", p, q"))
    inputs = whole_numbers(made, {})
    (actual,) = evaluate_lowered(made.lowered, arguments(made, inputs), {})
    x, w, p, q = (array.astype(np.float32) for array in inputs.values())
    plain = parse("g (float[1,2,6,6] x, float[4,2,3,3] w) => (float" + shapes.format("Conv", ""))
    assert (actual == by_runtime(plain, {"x": x - p, "w": w - q[:, None, None, None]})[0]).all()


@pytest.mark.parametrize("channel", ["", pytest.param("4", marks=pytest.mark.skipif(
    RELEASE < (1, 27), reason="ONNX Runtime before 1.27 takes no zero points of channels"))])
@pytest.mark.parametrize("bias", [False, True])
def test_qlinear_conv(channel: str, bias: bool) -> None:
    scale, zero = typed("float", channel), typed("int8", channel)
    check(f"g (uint8[1,2,6,6] x, float xscale, uint8 p, int8[4,2,3,3] w, {scale} wscale, {zero} q, float yscale, uint8 o{', int32[4] b' * bias}) "
          f"=> (uint8[1,4,6,6] y) {{ y = QLinearConv<pads = [1,1,1,1]>(x, xscale, p, w, wscale, q, yscale, o{', b' * bias}) }}", {}, {}, {}, steps=1)


TRANSPOSED = [
    ("2,3,7", "3,4,3", ""), ("1,2,5,6", "2,3,3,3", "strides = [2,2]"), ("1,2,H,W", "2,3,3,3", "strides = [2,2], pads = [1,1,1,1]"),
    ("1,2,H,W", "2,3,4,4", "strides = [2,2], pads = [1,1,1,1]"), ("1,2,H,W", "2,3,2,2", "strides = [2,2]"),
    ("1,2,5,5", "2,3,3,3", "strides = [2,2], pads = [1,1,1,1], output_padding = [1,1]"), ("1,2,5,5", "2,3,1,1", "strides = [2,2], output_padding = [1,0]"),
    ("1,2,H,W", "2,3,3,2", "strides = [3,2], pads = [0,1,2,0]"), ("1,2,5,5", "2,3,3,3", "dilations = [2,1], strides = [2,1]"),
    ("1,2,5,5", "2,3,3,3", "dilations = [2,3], strides = [3,2], pads = [1,2,0,1]"), ("1,4,5,5", "4,2,3,3", "group = 2, strides = [2,2]"),
    ("1,4,5,5", "4,1,3,3", "group = 4"), ("1,2,3,4,3", "2,3,2,3,2", "strides = [2,1,2]"), ("B,3,H,W", "3,5,1,1", ""), ("1,2,5,5", "2,3,2,2", "auto_pad = \"VALID\", strides = [3,3]"),
]


@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED)
@pytest.mark.parametrize("bias", [False, True])
def test_conv_transpose(x: str, w: str, attributes: str, bias: bool) -> None:
    channels = int(w.split(",")[1]) * (int(attributes.split("group = ")[1][0]) if "group" in attributes else 1)
    result = ",".join([x.split(",")[0], str(channels), *(f"R{axis}" for axis in range(x.count(",") - 1))])
    made = check(f"g (float[{x}] x, float[{w}] w{f', float[{channels}] b' * bias}) => (float[{result}] y) {{ y = ConvTranspose{attributes and f'<{attributes}>'}(x, w{', b' * bias}) }}",
                 *IMAGES[:1 if x.replace(",", "").isdigit() else 3])
    assert len(contractions(made)) == 1


@pytest.mark.parametrize(("x", "w", "attributes"), [
    ("B,3,H,W", "5,3,1,1", ""), ("B,3,H,W", "5,3,1,1", "strides = [2,2]"), ("B,4,H,W", "6,2,1,1", "group = 2"), ("B,3,8,W", "5,3,1,1", "auto_pad = \"SAME_UPPER\"")])
def test_a_convolution_by_one_pixel_is_a_matrix_product(x: str, w: str, attributes: str) -> None:
    made = region(f"g (float[{x}] x, float[{w}] w) => (float[{result_of(x, w)}] y) {{ y = Conv{attributes and f'<{attributes}>'}(x, w) }}")
    (product,) = contractions(made)
    assert not any(isinstance(tensor, Window) for tensor in postorder(made.lowered.program.outputs))
    assert len(product.summed) == 1


def test_a_window_slides_along_the_axes_that_it_must() -> None:
    made = region("g (float[B,3,H,W] x, float[5,3,1,3] w) => (float[B,5,H,W] y) { y = Conv<pads = [0,1,0,1]>(x, w) }")
    (found,) = [tensor for tensor in postorder(made.lowered.program.outputs) if isinstance(tensor, Window)]
    assert (found.axes, found.starts, found.strides, found.dilations) == ((3,), (dim(-1),), (1,), (1,))
    assert found.rank == 5 and found.shape[3:] == (found.operand.shape[3], dim(3))


@st.composite
def operands_of_matmul(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes that NumPy multiplies: vectors, batches that broadcast, sizes of nothing and of one."""
    batch = draw(st.lists(st.integers(0, 3), max_size=3))
    rows, inner, columns = (draw(st.integers(0, 3)) for _ in range(3))

    def side(*matrix: int) -> tuple[int, ...]:
        if draw(st.integers(0, 4)) == 0:
            return (inner,)
        own = batch[draw(st.integers(0, len(batch))):]
        return (*(1 if draw(st.booleans()) else extent for extent in own), *matrix)

    return side(rows, inner), side(inner, columns)


@settings(max_examples=100)
@given(operands_of_matmul(), st.booleans())
def test_matmul_of_any_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]], symbolic: bool) -> None:
    """Also where no size is known: whether an axis is broadcast is decided when it runs."""
    arrays = [np.random.default_rng(place).integers(-4, 5, shape).astype(np.float32) for place, shape in enumerate(shapes)]
    expected = np.matmul(*arrays)
    names = [[f"{side}{axis}" if symbolic else str(extent) for axis, extent in enumerate(shape)] for side, shape in zip("XW", shapes, strict=True)]
    result = [f"Y{axis}" for axis in range(expected.ndim)]
    x, w, y = (typed("float", ",".join(axes)) for axes in (*names, result))
    made = region(f"g ({x} x, {w} w) => ({y} y) {{ y = MatMul(x, w) }}")
    sizes = {name: extent for axes, shape in zip(names, shapes, strict=True) for name, extent in zip(axes, shape, strict=True)}
    (actual,) = evaluate_lowered(made.lowered, arrays, sizes | dict(zip(result, expected.shape, strict=True)))
    assert actual.shape == expected.shape and (actual == expected).all()


@st.composite
def convolutions_of_images(draw: st.DrawFn) -> tuple[str, str, str]:
    """Sizes of an image and of weights that fit it, and attributes."""
    count, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel, strides, dilations, first, last = (
        [draw(st.integers(*limits)) for _ in range(count)] for limits in ((1, 3), (1, 3), (1, 2), (0, 2), (0, 2)))
    room = [max((k - 1) * d + 1 - a - b, 1) for k, d, a, b in zip(kernel, dilations, first, last, strict=True)]
    image = [extent + draw(st.integers(0, 4)) for extent in room]
    inputs, features = draw(st.integers(1, 2)), draw(st.integers(1, 2)) * groups
    text = ", ".join(f"{name} = {numbers}" for name, numbers in (
        ("group", groups), ("strides", strides), ("dilations", dilations), ("pads", first + last)))
    return ",".join(map(str, (draw(st.integers(1, 2)), inputs * groups, *image))), ",".join(map(str, (features, inputs, *kernel))), text


@settings(max_examples=60)
@given(convolutions_of_images())
def test_convolutions_of_any_shape(drawn: tuple[str, str, str]) -> None:
    x, w, attributes = drawn
    check(f"g (float[{x}] x, float[{w}] w) => (float[{result_of(x, w)}] y) {{ y = Conv<{attributes}>(x, w) }}")
