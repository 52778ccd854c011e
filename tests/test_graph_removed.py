"""What ONNX Runtime takes out of a graph, and that it does: the runtime at hand is asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse.graph import Graph
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.provider.removed import is_same_memory, same_memory

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "benchmarks")]

TYPES = ("bool", "uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
         "float", "double")


def loaded(text: str) -> Graph:
    return load_graph(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}'))


def left(text: str, op: str, folder: Path) -> int:
    """Nodes of an operator that ONNX Runtime keeps with all its optimisations on."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "left.onnx"), 4
    raw = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString()
    onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    return sum(node.op_type == op for node in nodes(onnx.load(folder / "left.onnx").graph))


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Those of its bodies too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def chain(types: tuple[str, ...], *, output: bool = False, read: bool = False) -> str:
    """Casts one after the other; the last one gives an output or not, the first one is read by something else or not.
    Concat is there for every type."""
    number = [onnx.TensorProto.DataType.Value(name.upper()) for name in types]
    casts = [f"v{place} = Cast <to = {to}> (v{place - 1})" for place, to in enumerate(number[1:], 1)]
    last = len(types) - 1
    end = f"{types[-1]}[4] v{last}" if output else f"{types[-1]}[8] y"
    more = "" if output else f"y = Concat <axis = 0> (v{last}, v{last})"
    other, result = (", " + f"{types[1]}[8] z", "z = Concat <axis = 0> (v1, v1)") if read else ("", "")
    return f"g ({types[0]}[4] x) => ({end}{other}) {{ v0 = Concat <axis = 0> (x) {' '.join(casts)} {more} {result} }}"


@pytest.mark.parametrize("first", TYPES)
def test_casts_that_the_runtime_takes_out(first: str, tmp_path: Path) -> None:
    for second in TYPES:
        for types in ((first, second, first), (first, second, "double" if second == "float" else "float")):
            for output, read in ((False, False), (True, False), (False, True)):
                text = chain(types, output=output, read=read)
                casts = [node for node in loaded(text).nodes if node.op == "Cast"]
                kept = [node for node in casts if not is_same_memory(node)]
                # Through double it also merges what is not exact: a kernel more is counted than there is.
                more = types[0] in ("int64", "uint64") and types[1:] == ("double", "float") and not read
                assert len(kept) == left(text, "Cast", tmp_path) + more, (types, output, read)


NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
NUMBERS = ("float16", "float", "double", "int32", "int64")
END = np.iinfo(np.int64).max


def beside(op: str, kind: str, shape: str, number: int, *, first: bool = False, output: bool = False) -> str:
    """One node between two that stay, with a constant number for an operand."""
    operands = "d, a" if first else "a, d"
    end = f"{kind}[q,p] b" if output else f"{kind}[p,q] y"
    more = "" if output else "y = Transpose <perm = [1, 0]> (b)"
    return (f"g ({kind}[4,3] x) => ({end}) {{ c = Constant <value = {kind}{shape} {{{number}}}> () "
            f"a = Transpose <perm = [1, 0]> (x) d = Identity(c) b = {op}({operands}) {more} }}")


@pytest.mark.parametrize("op", NEUTRAL)
def test_numbers_that_change_nothing(op: str, tmp_path: Path) -> None:
    for first in (False, True):
        for kind in NUMBERS:
            for number in (NEUTRAL[op], 2):
                whole = 15360 if kind == "float16" and number == 1 else number  # the parser takes a pattern of bits
                for shape in ("", "[1]", "[1,1]", "[1,1,1]"):
                    for output in (False, True):
                        text = beside(op, kind, shape, whole, first=first, output=output)
                        if shape == "[1,1,1]":
                            text = text.replace("[p,q] y", "[o,p,q] y").replace("[q,p] b", "[o,q,p] b").replace(
                                "y = Transpose <perm = [1, 0]>", "y = Transpose <perm = [0, 2, 1]>")
                        (node,) = (node for node in loaded(text).nodes if node.op == op)
                        gone = left(text, op, tmp_path) == 0
                        assert is_same_memory(node) is gone, (first, kind, number, shape, output)
                        if is_same_memory(node):
                            assert same_memory(node) is node.inputs[1 if first else 0]


SAME = {
    "all of an axis": ("b = Slice(a, s, e, x1)", f"<int64[1] s = {{0}}, int64[1] e = {{{END}}}, int64[1] x1 = {{1}}>"),
    "all of two axes": ("b = Slice(a, s, e)", f"<int64[2] s = {{0, 0}}, int64[2] e = {{{END}, {END}}}>"),
    "all of an axis, one by one": (
        "b = Slice(a, s, e, x1, s1)",
        f"<int64[1] s = {{0}}, int64[1] e = {{{END}}}, int64[1] x1 = {{1}}, int64[1] s1 = {{1}}>"),
    "every second": (
        "b = Slice(a, s, e, x1, s1)",
        f"<int64[1] s = {{0}}, int64[1] e = {{{END}}}, int64[1] x1 = {{1}}, int64[1] s1 = {{2}}>"),
    "all but the first": ("b = Slice(a, s, e)", f"<int64[1] s = {{1}}, int64[1] e = {{{END}}}>"),
    "to the last one": ("b = Slice(a, s, e)", "<int64[1] s = {0}, int64[1] e = {4}>"),
    "to ones": ("b = Expand(a, s)", "<int64[3] s = {1, 1, 1}>"),
    "to its own sizes": ("b = Expand(a, s)", "<int64[3] s = {2, 4, 3}>"),
    "to some of its sizes": ("b = Expand(a, s)", "<int64[3] s = {1, 4, 1}>"),
    "to a number": ("b = Expand(a, s)", "<int64[1] s = {1}>"),
    "to its last size": ("b = Expand(a, s)", "<int64[1] s = {3}>"),
    "to more axes": ("b = Expand(a, s)", "<int64[4] s = {1, 1, 1, 1}>"),
    "a transpose that moves nothing": ("b = Transpose <perm = [0, 1, 2]> (a)", ""),
}


@pytest.mark.parametrize("sizes", ["2,3,4", "u,v,w"])
@pytest.mark.parametrize("name", SAME)
def test_moves_that_move_nothing(name: str, sizes: str, tmp_path: Path) -> None:
    body, constants = SAME[name]
    op = body.split()[2].split("(")[0]
    text = (f"g (float[{sizes}] x) => (float[p,q,r] y) {constants} "
            f"{{ a = Neg(x) {body} y = Abs(b) }}").replace("2,3,4", "2,4,3")
    (node,) = (node for node in loaded(text).nodes if node.op == op)
    assert is_same_memory(node) is (left(text, op, tmp_path) == 0)
    given = text.replace("y = Abs(b)", "").replace("[p,q,r] y", "[p,q,r] b")
    (node,) = (node for node in loaded(given).nodes if node.op == op)
    assert not is_same_memory(node)


GIVEN = {
    "Mul": "b = Mul(v, one)", "Add": "b = Add(zero, v)", "Div": "b = Div(v, one)", "Sub": "b = Sub(v, zero)",
    "Slice": "b = Slice(v, s, e)", "Expand": "b = Expand(v, ones)",
}
BETWEEN = {
    "nothing": "v = Identity(x)", "Dropout": "v = Dropout(x)", "Cast": "v = Cast <to = 1> (x)",
    "Reshape": "v = Reshape(x, same)", "Slice": "v = Slice(x, s, e)", "Mul": "v = Mul(x, one)",
    "casts": "w = Cast <to = 11> (x) v = Cast <to = 1> (w)", "two": "w = Identity(x) v = Dropout(w)",
}
NUMBERED = (f"float one = {{1}}, float zero = {{0}}, int64[1] s = {{0}}, int64[1] e = {{{END}}}, "
            "int64[3] ones = {1, 1, 1}, int64[3] same = {2, 4, 3}")


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("op", GIVEN)
def test_what_gives_an_input_back_stays(op: str, between: str, tmp_path: Path) -> None:
    """There is no node before it that could give what it gives."""
    text = (f"g (float[2,4,3] x) => (float[p,q,r] y) <{NUMBERED}> "
            f"{{ {BETWEEN[between]} {GIVEN[op]} y = Abs(b) }}")
    found = [node for node in loaded(text).nodes if node.op == op]
    assert sum(not is_same_memory(node) for node in found) == left(text, op, tmp_path)


@pytest.mark.parametrize("op", GIVEN)
@pytest.mark.parametrize("read", ["v = Identity(c)", "v = Identity(a)", "v = Exp(c)"])
def test_what_gives_a_value_of_a_body_back(op: str, read: str, tmp_path: Path) -> None:
    """The same of what a body is handed, and of what it reads from around it."""
    text = (f"g (float[2,4,3] x, int64 t, bool k) => (float[p,q,r] y) <{NUMBERED}> {{ a = Exp(x) y = Loop(t, k, a) "
            "<body = h (int64 i, bool j, float[2,4,3] c) => (bool l, float[2,4,3] w) "
            f"{{ l = Identity(j) {read} {GIVEN[op]} w = Abs(b) }}> }}")
    (node,) = (node for body in loaded(text).walk() for node in body.nodes if node.op == op)
    assert is_same_memory(node) is (read == "v = Exp(c)")
    assert is_same_memory(node) is (left(text, op, tmp_path) == 0)


def test_a_tensor_that_is_read_twice_through_them_counts_once() -> None:
    """By the ledger, of a node and of a region of the runtime's, and where the bytes are counted again."""
    text = ("g (float[2,4,3] x) => (float[2,4,3] y) <float one = {1}> "
            "{ a = Neg(x) b = Mul(one, a) c = Identity(a) d = Mul(b, c) y = Abs(d) }")
    assert Ledger(loaded(text), {}).total().bytes_other == 6 * 4 * 24
    import recount

    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    assert recount.count(model, {}).other == 6 * 4 * 24


def test_nothing_is_counted_for_them() -> None:
    """Neither here nor where the bytes are counted again."""
    text = ("g (float[2,4,3] x) => (float[2,4,3] y) "
            f"<float one = {{1}}, int64[1] s = {{0}}, int64[1] e = {{{END}}}, int64[3] ones = {{1, 1, 1}}> "
            "{ a = Neg(x) b = Mul(one, a) c = Slice(b, s, e) d = Expand(c, ones) y = Abs(d) }")
    traffic = Ledger(loaded(text), {}).total()
    assert (traffic.kernels, traffic.bytes_other) == (2, 4 * 24 * 4)
    import recount

    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    counts = recount.count(model, {})
    assert (counts.kernels, counts.other) == (2, 4 * 24 * 4)
