"""Contractions and windows of the region IR: what they are, what they refuse, when they are the same, what they cost."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_reference import evaluate_lowered, evaluate_tensors
from kernel_harness import arguments, make, parse, random_inputs, region_of
from onnx import TensorProto
from reference import Array, difference, numpy_type
from test_index import Situation, holds
from test_lowering_products import check, contractions, region

from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import dim, symbol
from onnxfuse.graph.dims import product as count_of
from onnxfuse.graph.model import Node
from onnxfuse.graph.stated import parse as size
from onnxfuse.ir.context import LoweringContext
from onnxfuse.ir.contractions import Slide, contract, operations, traffic, window
from onnxfuse.ir.scalars import FLOAT, INT8
from onnxfuse.ir.tensors import Contract, Expand, Input, Permute, Tensor, Window, postorder
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.pull import Constant, Load, Puller, Scalar, Select
from onnxfuse.operators import OPERATORS, OperatorClass, flops_of, lowered, record
from onnxfuse.operators.arithmetic import none
from onnxfuse.operators.operands import operand
from onnxfuse.operators.record import MICROSOFT, VIEW
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Does, Request, make_kernel


def roles(product: Contract) -> tuple[list[str], list[str], list[str], list[str]]:
    """Sizes of the batch, the rows, the columns and the sums."""
    return tuple([str(product.loops[loop]) for loop in loops] for loops in (  # type: ignore[return-value]
        product.batch, product.rows, product.columns, range(product.rank, len(product.loops))))


ROLES = [
    ("float[4,5] x, float[5,6] w", "float[4,6] y", "MatMul(x, w)", (["4"], ["6"], ["5"]), []),
    ("float[2,3,4,5] x, float[5,6] w", "float[2,3,4,6] y", "MatMul(x, w)", (["2", "3", "4"], ["6"], ["5"]), []),
    ("float[2,3,4,5] x, float[1,3,5,6] w", "float[2,3,4,6] y", "MatMul(x, w)", (["2", "4"], ["6"], ["5"]), ["3"]),
    ("float[4,5] x, float[2,5,6] w", "float[2,4,6] y", "MatMul(x, w)", (["4"], ["2", "6"], ["5"]), []),
    ("float[2,3,7,4,5] q, float[2,3,1,5,6] k", "float[2,3,7,4,6] y", "MatMul(q, k)", (["7", "4"], ["6"], ["5"]), ["2", "3"]),
    ("float[2,4,8,8] x, float[6,4,3,3] w", "float[2,6,6,6] y", "Conv(x, w)", (["2", "6", "6"], ["6"], ["4", "3", "3"]), []),
    ("float[2,4,8,8] x, float[6,2,3,3] w", "float[2,6,6,6] y", "Conv<group = 2>(x, w)", (["2", "6", "6"], ["3"], ["2", "3", "3"]), ["2"]),
    ("float[2,4,8,8] x, float[4,1,3,3] w", "float[2,4,6,6] y", "Conv<group = 4>(x, w)", (["2", "6", "6"], ["1"], ["1", "3", "3"]), ["4"]),
]


@pytest.mark.parametrize(("given_", "result", "node", "matrix", "batch"), ROLES)
def test_which_loops_are_rows_and_columns(given_: str, result: str, node: str, matrix: tuple[list[str], ...], batch: list[str]) -> None:
    """A batch that one operand lacks is rows of the other: one large product in place of many; grouped queries too."""
    (product,) = contractions(region(f"g ({given_}) => ({result}) {{ y = {node} }}"))
    assert roles(product) == (batch, *matrix)


@pytest.mark.parametrize(("kind", "sums"), [("float16", FLOAT), ("bfloat16", FLOAT), ("float", FLOAT), ("double", TensorProto.DOUBLE)])
def test_narrow_floats_are_summed_in_float32(kind: str, sums: int) -> None:
    """A result of float16 may lie past its largest number, until somebody rounds it."""
    made = region(f"g ({kind}[1,2] x, {kind}[2,1] w) => ({kind}[1,1] a, {kind}[1,1] y) {{ a = MatMul(x, w) b = Add(a, a) y = Mul(b, a) }}")
    (product,) = contractions(made)
    assert product.dtype == sums and [operand.dtype for operand in product.operands] == [product.operands[0].dtype] * 2
    given_ = [np.full(shape, 200, numpy_type(product.operands[0].dtype)) for shape in ((1, 2), (2, 1))]
    a, y = evaluate_lowered(made.lowered, given_, {})
    assert a == 80000 and y == 2 * 80000.0**2


def test_operands_of_a_product_are_rounded() -> None:
    """What a region computes in float32 and declares float16 is a float16 where it is multiplied."""
    made = region("g (float16[1,1] x, float16[1,1] w) => (float[1,1] y) { a = Add(x, x) b = Sub(a, w) c = MatMul(b, w) y = Cast<to = 1>(c) }")
    one, small = np.full((1, 1), 1, np.float16), np.full((1, 1), 2.0**-12, np.float16)
    (result,) = evaluate_lowered(made.lowered, [one, small], {})
    assert result == 2 * 2.0**-12


def test_sums_are_in_the_order_of_the_left_operand() -> None:
    """Whatever the right one's is, and before any of its transposes."""
    made = contract((tensor(2, 3, 4), "iba"), (tensor(3, 4, 5), "baj"), "ij")
    assert (made.axes, made.summed) == (((0, 2, 3), (2, 3, 1)), (dim(3), dim(4)))
    turned = Permute(FLOAT, (dim(4), dim(3), dim(2)), tensor(2, 3, 4), (2, 1, 0))
    assert contract((turned, "abi"), (tensor(4, 3, 5), "abj"), "ij").axes == (((0, 2, 3), (3, 2, 1)))


Sizes = Mapping[str, int]


@st.composite
def sums(draw: st.DrawFn) -> tuple[str, str, str, Sizes]:
    """Labels of two operands and a result, and sizes, some of them nothing or one."""
    left, right = (draw(st.permutations("abcdef").map(lambda letters: "".join(letters[:4]))) for _ in range(2))
    left, right = left[:draw(st.integers(0, 4))], right[:draw(st.integers(0, 4))]
    kept = [letter for letter in dict.fromkeys(left + right) if draw(st.booleans())]
    return left, right, "".join(draw(st.permutations(kept))), {letter: draw(st.integers(0, 4)) for letter in "abcdef"}


@settings(max_examples=200)
@given(sums(), st.data())
def test_contractions_are_einstein_sums(drawn: tuple[str, str, str, Sizes], data: st.DataObject) -> None:
    """Whatever the labels, with transposed operands, and axes of size one that are broadcast."""
    left, right, result, sizes = drawn
    rng, tensors, plain, turned = np.random.default_rng(0), [], [], []
    for place, labels in enumerate((left, right)):
        narrow = [label in result and label in left and label in right and data.draw(st.booleans()) for label in labels]
        symbolic, turn = data.draw(st.booleans()), data.draw(st.permutations(range(len(labels))))
        shape = tuple(dim(1) if one else symbol(label) if symbolic else dim(sizes[label])
                      for one, label in zip(narrow, labels, strict=True))
        plain.append(rng.integers(-4, 5, [extent.evaluate(sizes) for extent in shape]).astype(np.float32))
        turned.append(plain[-1].transpose(turn))
        source = Input(FLOAT, tuple(shape[axis] for axis in turn), place)
        tensors.append((Permute(FLOAT, shape, source, tuple(turn.index(axis) for axis in range(len(labels)))), labels))
    made = contract(*tensors, result)
    (actual,) = evaluate_tensors([made], turned, sizes)
    expected = np.einsum(f"{left},{right}->{result}", *plain)
    assert actual.shape == expected.shape and (actual == expected).all()
    assert not any(isinstance(each, Permute) for each in postorder((made,)))


def key(text: str) -> object:
    """What a region is apart from its operators' names."""
    lowered = region(text).lowered
    return replace(lowered, program=replace(lowered.program, operators=())).structure


PRODUCT = "g (float[M,8] x, float[8,N] w) => (float[M,N] y) { y = MatMul(x, w) }"
TURNED = "g (float[8,M] x, float[8,N] w) => (float[M,N] y) { t = Transpose(x) y = MatMul(t, w) }"
SAME = [
    ("g (float[4,8] x, float[8,6] w) => (float[4,6] y) { y = MatMul(x, w) }", "g (float[4,8] q, float[8,6] k) => (float[4,6] r) { r = MatMul(q, k) }"),
    (PRODUCT, "g (float[M,8] x, float[8,N] w) => (float[M,N] y) { y = Einsum<equation = \"ik,kj->ij\">(x, w) }"),
    (PRODUCT, "g (float[M,8] x, float[8,N] w) => (float[M,N] y) { y = Gemm(x, w) }"),
    (TURNED, "g (float[8,M] x, float[8,N] w) => (float[M,N] y) { y = com.microsoft.FusedMatMul<transA = 1>(x, w) }"),
    (TURNED, "g (float[8,M] x, float[8,N] w) => (float[M,N] y) { y = Gemm<transA = 1>(x, w) }"),
    (TURNED, "g (float[8,M] x, float[8,N] w) => (float[M,N] y) { t = Transpose(x) u = Transpose(t) v = Transpose(u) y = MatMul(v, w) }"),
    ("g (float[B,S,H,8] q, float[B,H,T,8] k) => (float[B,H,S,T] y) { t = Transpose<perm = [0,2,1,3]>(q) y = com.microsoft.FusedMatMul<transB = 1>(t, k) }",
     "g (float[B,S,H,8] q, float[B,H,T,8] k) => (float[B,H,S,T] y) { y = Einsum<equation = \"bshd,bhtd->bhst\">(q, k) }"),
    ("g (float[M,2,3] x, float[3,2,N] w) => (float[M,N] y) { y = Einsum<equation = \"iab,baj->ij\">(x, w) }",
     "g (float[M,2,3] x, float[3,2,N] w) => (float[M,N] y) { t = Transpose<perm = [0,2,1]>(x) y = Einsum<equation = \"iba,baj->ij\">(t, w) }"),
    ("g (float[1,3,8,8] x, float[5,3,3,3] w) => (float[1,5,8,8] y) { y = Conv<pads = [1,1,1,1]>(x, w) }",
     "g (float[1,3,8,8] x, float[5,3,3,3] w) => (float[1,5,8,8] y) { y = Conv<auto_pad = \"SAME_LOWER\">(x, w) }"),
]
CONV = "g (float[1,4,8,8] x, float[4,{}] w) => (float[1,4,{}] y) {{ y = Conv<{}>(x, w) }}"
DIFFERENT = [
    PRODUCT, PRODUCT.replace("8", "16"), PRODUCT.replace("float", "float16"), PRODUCT.replace("(x, w)", "(w, x)").replace("[M,N] y", "[8,8] y").replace("N]", "M]"),
    "g (float[M,8] x, float[N,8] w) => (float[M,N] y) { y = Gemm<transB = 1>(x, w) }",
    "g (float[8,M] x, float[8,N] w) => (float[M,N] y) { y = Gemm<transA = 1>(x, w) }",
    "g (float[M,8] x, float[8,N] w) => (float[N,M] y) { y = Einsum<equation = \"ik,kj->ji\">(x, w) }",
    "g (float[M,8] x, float[8,N] w) => (float[M,N,8] y) { y = Einsum<equation = \"ik,kj->ijk\">(x, w) }",
    *(CONV.format(*case) for case in (
        ("4,3,3", "6,6", "pads = [0,0,0,0]"), ("4,3,3", "8,8", "pads = [1,1,1,1]"), ("4,3,3", "8,8", "pads = [2,1,0,1]"),
        ("4,3,3", "3,3", "strides = [2,2]"), ("4,3,3", "4,4", "dilations = [2,2]"), ("2,3,3", "6,6", "group = 2"), ("1,3,3", "6,6", "group = 4"))),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_work_is_equal(one: str, other: str) -> None:
    assert key(one) == key(other)


def test_different_work_is_different() -> None:
    assert len({key(text) for text in DIFFERENT}) == len(DIFFERENT)


def tensor(*shape: int | str, dtype: int = FLOAT, index: int = 0) -> Input:
    return Input(dtype, tuple(symbol(extent) if isinstance(extent, str) else dim(extent) for extent in shape), index)


def plain(axes: tuple[tuple[int, ...], tuple[int, ...]], *shape: int, dtype: int = FLOAT, summed: tuple[int, ...] = (5,),
          right: int = FLOAT) -> Contract:
    return Contract(dtype, tuple(map(dim, shape)), (tensor(4, 5), tensor(5, 6, dtype=right)), axes, tuple(map(dim, summed)))


RANKS = "the operands' ranks or axes do not fit a Contract of rank 2"
BROKEN = [
    (lambda: plain(((0, 2), (2,)), 4, 6), RANKS),
    (lambda: plain(((0, 2), (2, 2)), 4, 6), RANKS),
    (lambda: plain(((0, 2), (2, 3)), 4, 6), RANKS),
    (lambda: plain(((0, 2), (0, 1)), 4, 6), RANKS),
    (lambda: plain(((0, 1), (1, 0)), 4, 6, summed=(5,)), RANKS),
    (lambda: plain(((0, 2), (2, 1)), 4, 7), "the sizes 7 and 6 of an axis of a Contract differ"),
    (lambda: plain(((0, 2), (2, 1)), 4, 6, summed=(4,)), "the sizes 4 and 5 of an axis of a Contract differ"),
    (lambda: plain(((0, 2), (2, 1)), 4, 6, right=INT8), "a Contract of floats and integers"),
    (lambda: contract((tensor(4, 5), "mk"), (tensor(5, 6, dtype=INT8), "kn"), "mn"), "a product of float32 and int8"),
    (lambda: contract((tensor(4, 5), "mk"), (tensor(5, 6), "kn"), "mx"), "the labels ['m', 'k'] and ['k', 'n'] do not give ['m', 'x']"),
    (lambda: contract((tensor(4, 5), "mk"), (tensor(5, 6), "kn"), "mm"), "the labels ['m', 'k'] and ['k', 'n'] do not give ['m', 'm']"),
    (lambda: contract((tensor(4, 5), "m"), (tensor(5, 6), "kn"), "mn"), "the labels ['m'] do not fit a tensor of 2 axes"),
    (lambda: contract((tensor(4, 5), "kk"), (tensor(5, 6), "kn"), "n"), "the labels ['k', 'k'] do not fit a tensor of 2 axes"),
    (lambda: contract((tensor(4, 5), "bk"), (tensor(3, 5), "bk"), "b"), "the sizes ['3', '5'] do not broadcast to ['4', '5']"),
    (lambda: contract((tensor(4, 5), "mk"), (tensor(1, 6), "kn"), "mn"), "the sizes 5 and 1 of an axis of a Contract differ"),
    (lambda: Window(FLOAT, (dim(4), dim(3)), tensor(6), (1,), (dim(0),), (1,), (1,)), "the operands' ranks or axes do not fit a Window of rank 2"),
    (lambda: Window(FLOAT, (dim(4), dim(3), dim(1)), tensor(6), (0,), (dim(0),), (1,), (1,)), "the operands' ranks or axes do not fit a Window of rank 3"),
    (lambda: Window(FLOAT, (dim(4), dim(3)), tensor(6), (0,), (dim(0),), (0,), (1,)), "a Window whose strides or dilations are less than one"),
    (lambda: Window(FLOAT, (dim(2), dim(4), dim(3)), tensor(1, 6), (1,), (dim(0),), (1,), (1,)), "the sizes 2 and 1 of an axis of a Window differ"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN, ids=range(len(BROKEN)))
def test_what_does_not_fit_is_refused(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


REFUSED = [
    ("g (float[4,5] x, float[1,6] w) => (float[4,6] y) { y = MatMul(x, w) }", "broken-node", "MatMul breaks its operator's rules: the sizes 5 and 1 of an axis of a Contract differ"),
    ("g (float[3,4,5] x, float[2,5,6] w) => (float[3,4,6] y) { y = MatMul(x, w) }", "broken-node", "MatMul breaks its operator's rules: the sizes ['2', '5', '6'] do not broadcast to ['3', '5', '6']"),
    ("g (float x, float[5,6] w) => (float[6] y) { y = MatMul(x, w) }", "broken-node", "MatMul breaks its operator's rules: a matrix product of a scalar"),
    ("g (float[1,4,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) { y = Conv(x, w) }", "broken-node", "Conv breaks its operator's rules: 4 channels in 1 groups of 3"),
    ("g (float[1,4,8,8] x, float[5,2,3,3] w) => (float[1,5,6,6] y) { y = Conv<group = 2>(x, w) }", "broken-node", "Conv breaks its operator's rules: 5 channels in 2 groups"),
    ("g (float[4,4] x, float[4] w) => (float[4] y) { y = Einsum<equation = \"ii,i->i\">(x, w) }", "unsupported-mode", "an Einsum along a diagonal has no kernel"),
    ("g (float[4,5] x) => (float[5,4] y) { y = Einsum<equation = \"ij->ji\">(x) }", "unsupported-mode", "an Einsum of 1 operands has no kernel"),
    ("g (float[1,2,4,4] x, float[2,3,3,3] w) => (float[1,3,8,8] y) { y = ConvTranspose<strides = [2,2], auto_pad = \"SAME_UPPER\">(x, w) }", "unsupported-mode", "a ConvTranspose that chooses its padding has no kernel"),
    ("g (int32[4,5] x, int32[5,6] w) => (int32[4,6] y) { y = Gemm<alpha = 0.5>(x, w) }", "unsupported-mode", "Gemm of integers by 0.5 has no kernel"),
]


@pytest.mark.parametrize(("text", "code", "message"), REFUSED)
def test_nodes_without_a_meaning(text: str, code: str, message: str) -> None:
    found = region_of(parse(text, 21))
    assert isinstance(found, Refusal) and (found.code, found.message) == (code, message)


def test_sizes_that_must_agree() -> None:
    """Called differently in the model, they are for whoever schedules the contraction to check."""
    made = contract((tensor("M", "K"), "mk"), (tensor("L", "N", index=1), "kn"), "mn")
    assert made.relations == ((symbol("L"), symbol("K")),)
    assert not contract((tensor("M", "K"), "mk"), (tensor("K", "N"), "kn"), "mn").relations
    (batched,) = contractions(region("g (float[A,4,5] x, float[B,5,6] w) => (float[C,4,6] y) { y = MatMul(x, w) }"))
    assert not batched.relations and [isinstance(operand, Expand) for operand in batched.operands] == [True, True]


COUNTED = [PRODUCT, *(f"g ({given_}) => ({result}) {{ y = {node} }}" for given_, result, node, _, _ in ROLES),
           "g (float16[8,M] x, float16[N,8] w) => (float16[M,N] y) { y = Gemm<transA = 1, transB = 1>(x, w) }",
           "g (float[B,H,S,8] q, float[B,H,T,8] k) => (float[B,H,S,T] y) { y = Einsum<equation = \"bhsd,bhtd->bhst\">(q, k) }",
           "g (uint8[4,5] x, int8[5,6] w) => (int32[4,6] y) { y = MatMulInteger(x, w) }",
           "g (float[B,4,H,W] x, float[6,2,3,3] w) => (float[B,6,R,S] y) { y = Conv<group = 2, strides = [2,1], pads = [1,0,1,0]>(x, w) }"]


@pytest.mark.parametrize("text", COUNTED)
def test_operations_are_those_of_the_operators_record(text: str) -> None:
    made, sizes = region(text), {"M": 3, "N": 7, "B": 2, "H": 9, "S": 5, "T": 6, "W": 8, "R": 5}
    (product,) = contractions(made)
    sizes["S"] = 6 if "R,S" in text else 5
    names = {name: extent.evaluate(sizes) for name, extent in made.lowered.binding.names.items()}
    assert operations(product).evaluate(names) == flops_of(made.graph.nodes[-1], sizes) > 0


def test_a_transposed_convolution_counts_no_zeros_between() -> None:
    """Nine taps in four kernels of four: of 16 products 9 count, and no more are taken for the zeros between."""
    made = region("g (float[1,2,16,16] x, float[2,3,3,3] w) => (float[1,3,33,33] y) { y = ConvTranspose<strides = [2,2]>(x, w) }")
    (product,) = contractions(made)
    assert operations(product) == 2 * (17 * 2) ** 2 * 3 * 2 * 4


TRAFFIC = [
    (PRODUCT, "32*M + 32*N + 4*M*N"),
    (PRODUCT.replace("float", "float16"), "16*M + 16*N + 4*M*N"),
    ("g (float[M,8] x) => (float[M,M] y) { t = Transpose(x) y = MatMul(x, t) }", "32*M + 4*M*M"),
    ("g (float[M,24] x) => (float[M,M] y) { q, k, v = Split<axis = 1, num_outputs = 3>(x) t = Transpose(k) y = MatMul(q, t) }", "2*32*M + 4*M*M"),
    ("g (float[B,4,8,8] x, float[6,4,3,3] w) => (float[B,6,8,8] y) { y = Conv<pads = [1,1,1,1]>(x, w) }", "4*256*B + 4*216 + 4*384*B"),
    ("g (float[M,8,4] x, float[4,N] w) => (float[M,N] y) <int64[1] k = {2}, int64[1] s = {0}, int64[1] e = {4}, int64[1] a = {1}> "
     "{ r = ReduceSum<keepdims = 0>(x, k) t = Slice(r, s, e, a) y = MatMul(t, w) }", "4*32*M + 16*N + 4*M*N"),
    ("g (float[S,8] x, float[8,S] w) => (float[B,S,S] y) <int64[3] z = {3,1,1}> { e = Expand(x, z) y = MatMul(e, w) }", "32*S + 32*S + 12*S*S"),
]


@pytest.mark.parametrize(("text", "expected"), TRAFFIC)
def test_traffic_counts_every_input_once(text: str, expected: str) -> None:
    """What a window or a batch reads again comes from the caches; a slice is no more than it is."""
    made = region(text.replace("[B,S,S] y", "[3,S,S] y"))
    (product,) = contractions(made)
    assert traffic(product).substitute(made.lowered.binding.names) == size(expected)


def sliding(node: Node, context: LoweringContext) -> Tensor:
    """A test's operator: windows of 3 by 2 over an image's last two axes, padded, two and one apart."""
    source = operand(node, context, 0)
    *_, rows, columns = source.shape
    return window(source, {2: Slide((rows + 1) // 2, dim(3), dim(-1), 2), 3: Slide(columns, dim(2), dim(-1), 1, 2)})


def sliding_types(context: TypeContext) -> list[Type]:
    *outer, rows, columns = context.shape() or ()
    return [Type(context.dtype(), (*outer, (rows + 1) // 2, dim(3), columns, dim(2)))]


@pytest.fixture()
def sliding_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "OPERATORS", dict(OPERATORS))
    record.define("Sliding", domain=MICROSOFT, kind=VIEW, types=sliding_types, lowering=sliding, arithmetic=none,
                  host=(), runtime=record.PLAIN)


WINDOWS = [
    "g (T[B,2,H,W] x) => (T[B,2,P,3,W,2] y) { y = com.microsoft.Sliding(x) }",
    "g (T[B,2,H,W] x) => (T[B,2,P,3,W,2] y) { a = Exp(x) b = com.microsoft.Sliding(a) y = Add(b, b) }",
    "g (T[B,2,W,H] x) => (T[B,2,P,3,W,2] y) { a = Transpose<perm = [0,1,3,2]>(x) y = com.microsoft.Sliding(a) }",
    "g (T[B,2,H,W] x, T[B,2,H,W] z) => (T[B,4,P,3,W,2] y) { a = Concat<axis = 1>(x, z) y = com.microsoft.Sliding(a) }",
    "g (T[B,2,H,W] x) => (T[B,2,P,1,W,1] y) <int64[2] axes = {3,5}> { a = Exp(x) b = com.microsoft.Sliding(a) y = ReduceSum(b, axes) }",
    "g (T[B,2,H,W] x) => (T[B,2,P,1,W,1] y) <int64[2] axes = {3,5}> { b = com.microsoft.Sliding(x) y = ReduceMax(b, axes) }",
]


@pytest.mark.usefixtures("sliding_operator")
@pytest.mark.parametrize("text", WINDOWS)
@pytest.mark.parametrize("kind", ["float", "float16", "int32"])
def test_kernels_read_windows(text: str, kind: str) -> None:
    """As the schedules of today have any view: what lies outside is neither read nor anything but zero."""
    if kind == "int32" and "Exp" in text:
        return
    made = make(text.replace("T[", f"{kind}["))
    for seed, sizes in enumerate(({"B": 1, "H": 5, "W": 4}, {"B": 2, "H": 8, "W": 7}, {"B": 2, "H": 1, "W": 1})):
        inputs = random_inputs(made, sizes | {"P": 0}, seed)
        given_ = arguments(made, inputs)
        (expected,) = evaluate_lowered(made.lowered, given_, sizes)
        dtype = made.model.graph.output[0].type.tensor_type.elem_type
        for variant in variants_that_hold(made.kernel.plan, given_, []):
            (actual,) = run_plan(made.kernel.plan, made.kernel.source, given_, [], variant=variant)
            assert not difference(actual, expected, dtype, length=6), variant


SCORES = "g (float[M,8] x, float[8,N] w) => (float[M,N] y) { a = MatMul(x, w) y = Softmax(a) }"


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if not each.products])
def test_no_schedule_holds_a_contraction(schedule: str) -> None:
    """But those that say so: of a product with a reduction and of one without one is no kind of region that a schedule
    looks at, the other is refused.  Windows are in neither."""
    refused = {found.message for text in (PRODUCT, SCORES)
               if isinstance(found := make_kernel(Request(region(text).lowered), schedule), Refusal)
               and found.code == "no-schedule"}
    windows = set() if SCHEDULES[schedule].runs(Does.POOLS) else {"no schedule holds a contraction yet"}
    assert refused == {"no schedule has kernels for such a region", *windows}


CONTRACTIONS = sorted(key for key, entry in OPERATORS.items() if entry.lowering is not None and key not in lowered())


def test_what_has_a_meaning_and_no_kernel() -> None:
    """Everything else that is a product or a convolution has neither."""
    assert [name for _, name in CONTRACTIONS] == [
        "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger", "QLinearConv",
        "QLinearMatMul", "Attention", "FusedMatMul", "GroupQueryAttention", "MatMulIntegerToFloat", "MultiHeadAttention", "QGemm", "TransposeMatMul"]
    assert {OPERATORS[key].kind for key in CONTRACTIONS} == {OperatorClass.HEAVY}


def pulled(product: Contract) -> tuple[IndexSpace, list[Scalar]]:
    """Both operands' elements at a place of the batch, a row, a column and a place in the sum: what a tile is read by."""
    space, at = IndexSpace(), {}
    summed = range(product.rank, len(product.loops))
    for name, loops in (("@B", product.batch), ("@M", product.rows), ("@N", product.columns), ("@K", summed)):
        extents = tuple(product.loops[loop] for loop in loops)
        at |= zip(loops, space.delinear(space.base(name, count_of(extents)), extents), strict=True)
    puller = Puller(space)
    return space, [puller.element(side, tuple(at[loop] for loop in loops))
                   for side, loops in zip(product.operands, product.axes, strict=True)]


TILES = [
    (PRODUCT, "@K + 8*@M", "@K*@s1 + @N"),
    ("g (float[B,S,8] x, float[8,6] w) => (float[B,S,6] y) { y = MatMul(x, w) }", "@K + 8*@M", "6*@K + @N"),
    ("g (float[B,S,8] x, float[6,8] w) => (float[B,S,6] y) { t = Transpose(w) y = MatMul(x, t) }", "@K + 8*@M", "@K + 8*@N"),
    ("g (float[B,H,W,3] x, float[5,3,1,1] w) => (float[B,5,H,W] y) { t = Transpose<perm = [0,3,1,2]>(x) y = Conv(t, w) }", "@K + 3*@M", "@K + 3*@N"),
]


@pytest.mark.parametrize(("text", "left", "right"), TILES)
def test_operands_in_memory_order_are_read_in_order(text: str, left: str, right: str) -> None:
    """Loops that lie together in memory are one index: no division is left, and neighbours are neighbours."""
    (product,) = contractions(region(text))
    _, elements = pulled(product)
    assert [str(each.offset) for each in elements if isinstance(each, Load)] == [left, right]


@pytest.mark.parametrize("group", [1, 2])
def test_images_with_the_channels_last_are_summed_over_the_channels_last(group: int) -> None:
    """The innermost loop of the sum is the innermost axis of memory, whatever ONNX calls the axes."""
    (product,) = contractions(region(
        f"g (float[B,H,W,4] x, float[6,{4 // group},3,3] w) => (float[B,6,H,W] y) "
        f"{{ t = Transpose<perm = [0,3,1,2]>(x) y = Conv<pads = [1,1,1,1], group = {group}>(t, w) }}"))
    assert [extent.value for extent in product.summed] == [3, 3, 4 // group]
    assert isinstance(product.operands[0], Window)


OPERANDS = [
    *(f"g ({given_}) => ({result}) {{ y = {node} }}" for given_, result, node, _, _ in ROLES),
    "g (float[2,4,6] x, float[2,4,6] z) => (float[2,2,4,4] y) <int64[4] s = {2,4,2,3}> { q = Reshape(x, s) k = Reshape(z, s) "
    "a = Transpose<perm = [0,2,1,3]>(q) b = Transpose<perm = [0,2,3,1]>(k) y = MatMul(a, b) }",
    "g (float[1,4,5,6] x, float[6,2,3,2] w) => (float[1,6,3,5] y) { y = Conv<group = 2, strides = [2,1], pads = [1,0,1,0]>(x, w) }",
    "g (float[1,5,6,4] x, float[3,4,3,3] w) => (float[1,3,5,6] y) { t = Transpose<perm = [0,3,1,2]>(x) y = Conv<pads = [1,1,1,1]>(t, w) }",
    "g (float[1,2,3,3] x, float[2,3,3,3] w) => (float[1,3,7,7] y) { y = ConvTranspose<strides = [2,2]>(x, w) }",
]


@pytest.mark.parametrize("text", OPERANDS)
def test_tiles_of_operands_give_the_contraction(text: str) -> None:
    """Everything that a schedule needs can be pulled: sums over what is loaded, or zero, are the contraction's elements."""
    made = region(text)
    (product,) = contractions(made)
    space, elements = pulled(product)
    arrays = [np.arange(1, count_of(each.shape).value + 1).reshape([extent.value for extent in each.shape]).astype(np.float32) for each in made.lowered.program.inputs]
    (expected,) = evaluate_tensors([product], arrays, {})
    flat = [np.append(array.reshape(-1), 0) for array in arrays]
    extents = {name: extent.value for name, extent in space.extents.items() if name in ("@B", "@M", "@N", "@K")}
    order = [*product.batch, *product.rows, *product.columns]
    turned = expected.transpose(order).reshape([extents[name] for name in ("@B", "@M", "@N")])
    rng = np.random.default_rng(0)
    for batch, row, column in {tuple(int(rng.integers(0, extent)) for extent in turned.shape) for _ in range(12)}:
        total = 0.0
        for place in range(extents["@K"]):
            at = Situation(space, {"@B": batch, "@M": row, "@N": column, "@K": place})
            total += prod(value_of(each, at, flat) for each in elements)
        assert total == turned[batch, row, column]


def value_of(scalar: Scalar, at: Situation, arrays: Sequence[Array]) -> float:
    """What an expression of loads is: the last element of each array is the zero where no load is made."""
    match scalar:
        case Constant():
            return float(scalar.number)
        case Select():
            return value_of(scalar.operands[0 if holds(scalar.condition, at) else 1], at, arrays)
        case Load():
            inside = all(holds(condition, at) for condition in scalar.conditions)
            return float(arrays[scalar.input][scalar.offset.evaluate(at) if inside else -1])
    raise AssertionError(scalar)


COMPUTED = {
    "numbers": "x = DequantizeLinear(t, s, z)",
    "numbers of each channel": "x = DequantizeLinear<axis = 1>(t, q, o)",
    "of its own": "e = Neg(t) x = Mul(e, e)",
    "beside another tensor": "x = Add(t, r)",
    "along two axes": "x = Add(t, m)",
}


@pytest.mark.parametrize("case", COMPUTED)
@pytest.mark.parametrize("group", [1, 4])
def test_what_is_computed_of_a_transposed_image_is_that_transposed(case: str, group: int) -> None:
    """Where one tensor is read, and what is along one axis at most: windows slide over the image as it lies, in its
    order of axes."""
    kind = "uint8" if "Dequantize" in COMPUTED[case] else "float"
    made = check(
        f"g ({kind}[2,5,6,4] a, float s, uint8 z, float[4] q, uint8[4] o, float[2,4,5,6] r, float[1,4,5,1] m, float[4,{4 // group},3,2] w) "
        f"=> (float[2,4,5,6] y) {{ t = Transpose<perm = [0,3,1,2]>(a) {COMPUTED[case]} "
        f"y = Conv<pads = [1,0,1,1], group = {group}>(x, w) }}")
    (product,) = contractions(made)
    moved = any(isinstance(tensor, Permute) for tensor in postorder((product,)))
    assert moved == (case in ("of its own", "beside another tensor", "along two axes"))
