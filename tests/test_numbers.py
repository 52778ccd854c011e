"""Floats that sizes are computed by are followed, and are what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from kernel_harness import parse
from onnx import TensorProto

from onnxfuse.graph.load import from_proto
from onnxfuse.graph.model import Graph
from onnxfuse.operators.inference import load_graph
from onnxfuse.rewriting.sizes import fold, unfold

SAME = """g (float[N,C,{size},{size}] x) => (float[A,B,P,Q] y) <
    int64 axis = {{2}}, float stride = {{{stride}}}, float kernel = {{{kernel}}}, float one = {{1}}, float none = {{0}},
    float half = {{2}}, int64[1] front = {{0}}, int64[1] a = {{2}}, int64[1] b = {{4}}, int64[1] zero = {{0}},
    int64[2] off = {{0, 0}}> {{
    sizes = Shape(x) size = Gather(sizes, axis) wide = Cast<to = 1>(size)
    parts = Div(wide, stride) whole = Ceil(parts) steps = Sub(whole, one) reach = Mul(steps, stride)
    end = Add(reach, kernel) over = Sub(end, wide) pad = Clip(over, none)
    share = Div(pad, half) low = Cast<to = 7>(share) lows = Cast<to = 1>(low) highs = Sub(pad, lows)
    l = Unsqueeze(lows, front) h = Unsqueeze(highs, front) both = Concat<axis = 0>(l, l, h, h)
    ints = Cast<to = 7>(both) ends = Slice(ints, a, b) begins = Slice(ints, zero, a)
    pads = Concat<axis = 0>(off, begins, off, ends) y = Pad(x, pads)
}}"""
"""Padding that keeps a convolution's sizes, as exporters spell it."""


def chain(size: int, stride: int, kernel: int) -> str:
    return SAME.format(size=size, stride=stride, kernel=kernel)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 7, 31, 112, 225])
def test_padding_that_keeps_sizes(size: int, stride: int, kernel: int) -> None:
    model = parse(chain(size, stride, kernel))
    shape = load_graph(model).outputs[0].shape
    assert shape is not None
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.zeros((2, 3, size, size), np.float32)})
    assert [each.known({"N": 2, "C": 3}) for each in shape] == list(result.shape)




KINDS = {"float": (TensorProto.FLOAT, np.float32), "double": (TensorProto.DOUBLE, np.float64),
         "float16": (TensorProto.FLOAT16, np.float16)}


def found(body: str, kind: str = "float") -> tuple[list[int] | None, list[int]]:
    """What is known of a chain's end from 7 and 2, and what ONNX Runtime computes."""
    number, given = KINDS[kind]
    model = parse(f"g ({kind}[7] u, {kind}[2] v) => (int64[1] y) <int64[1] front = {{0}}> {{"
                  f" s = Shape(u) t = Shape(v) a = Cast<to = {number}>(s) b = Cast<to = {number}>(t)"
                  f" {body} y = Cast<to = {TensorProto.INT64}>(r) }}")
    elements = load_graph(model).values["y"].elements
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"u": np.zeros(7, given), "v": np.zeros(2, given)})
    known = None if elements is None else [size.value for size in elements if size.value is not None]
    return known, result.tolist()


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("body", [
    "r = Div(a, b)", "q = Div(a, b) r = Round(q)", "q = Div(a, b) r = Ceil(q)", "q = Div(a, b) r = Floor(q)",
    "n = Neg(a) r = Div(n, b)", "n = Neg(a) q = Div(n, b) r = Floor(q)", "m = Sub(b, a) r = Abs(m)",
    "r = Max(a, b)", "r = Min(a, b)", "m = Mul(a, a) r = Sqrt(m)", "s2 = Squeeze(a) r = Unsqueeze(s2, front)",
    "s1 = Shape(a) i = Identity(a) r = Reshape(i, s1)"])
def test_each_operator(body: str, kind: str) -> None:
    known, computed = found(body, kind)
    assert known == computed


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("size", [0, 1, 4, 196, 576, 1024, 4096, 12321, 2**20])
def test_sides_of_squares(size: int, kind: str) -> None:
    """As the sides of an image are exported, of which the number of patches is known."""
    number, given = KINDS[kind]
    model = parse(f"g ({kind}[{size}] u) => (int64[1] y) <{kind} half = {{0.5}}> {{ s = Shape(u) "
                  f"a = Cast<to = {number}>(s) r = Pow(a, half) y = Cast<to = {TensorProto.INT64}>(r) }}")
    elements = load_graph(model).values["y"].elements
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"u": np.zeros(size, given)})
    assert elements is not None and [each.value for each in elements] == result.tolist()


@pytest.mark.parametrize(("body", "known"), [
    ("r = Pow(a, b)", True), ("c = Add(b, a) r = Pow(a, c)", False), ("h = Div(a, b) r = Pow(h, b)", False),
    ("h = Div(a, a) i = Div(h, b) r = Pow(a, i)", False)])
def test_powers_that_are_exact(body: str, known: bool) -> None:
    """Squares of integers; not high powers, squares of fractions or roots of what is no square."""
    answer, computed = found(body)
    assert answer == (computed if known else None)


def test_floats_of_two_bytes_are_not_followed() -> None:
    """Where the CPU has no kernel for them a chain may be rounded once, at its end."""
    known, _ = found("q = Div(a, b) r = Floor(q)", "float16")
    assert known is None


@pytest.mark.parametrize("body", [
    "z = Sub(a, a) r = Div(b, z)", "z = Sub(a, a) r = Div(z, z)", "r = Exp(a)", "h = Pow(a, a) q = Mul(h, h) "
    "m = Mul(q, q) w = Mul(m, m) r = Mul(w, w)"],
    ids=["infinity", "no number", "a function that libraries round", "more than floats hold"])
def test_what_is_not_followed(body: str) -> None:
    known, _ = found(body)
    assert known is None


def test_sizes_that_are_open_stay_open() -> None:
    graph = load_graph(parse(chain(32, 2, 3).replace("[N,C,32,32] x", "[N,C,H,H] x")))
    assert graph.values["pad"].numbers is None and graph.values["pads"].elements is None
    known: Graph = load_graph(parse(chain(32, 2, 3)))
    assert known.values["pad"].numbers == np.float32(1)


def test_arithmetic_through_floats_is_folded() -> None:
    """And comes back."""
    model = parse(chain(112, 2, 3))
    folded = fold(from_proto(model)).proto
    assert [node.op_type for node in folded.graph.node] == ["Pad"]
    unfold(folded)
    assert folded.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
