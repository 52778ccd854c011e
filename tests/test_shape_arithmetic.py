"""Arithmetic on sizes: what is folded, that every size gives the same bits, and that the original comes back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from rewriting_models import run, same_bits
from rich.console import Console

from onnxfuse.debugging.variants import Variants
from onnxfuse.errors import ModelError, RuleError
from onnxfuse.graph import from_proto
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json, explain, report_of, report_of_fused
from onnxfuse.reporting.text import show
from onnxfuse.rewriting import fold, read_fused, sizes_record, unfuse
from onnxfuse.rules import load_rules

INT_MAX = np.iinfo(np.int64).max
NEWEST = min(onnx.defs.onnx_opset_version(), 23)


def model(body: str, inputs: str, outputs: str, *, opset: int = 17, held: str = "", ir: int = 8) -> onnx.ModelProto:
    """A model in ONNX's text form; nodes are named after their first outputs."""
    text = f'<ir_version: {ir}, opset_import: ["" : {opset}]>\nsizes ({inputs}) => ({outputs})\n{held}{{\n{body}\n}}'
    made = onnx.parser.parse_model(text)
    for node in made.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.checker.check_model(made, full_check=True)
    return made


def packed(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))


def folded(original: onnx.ModelProto) -> onnx.ModelProto:
    """The folded model: it passes the checker, unfolds to the original's bytes, and is not folded again."""
    before = packed(original)
    result = fold(from_proto(original)).proto
    assert packed(original) == before, "the input was changed"
    onnx.checker.check_model(result, full_check=True)
    assert packed(unfuse(result)) == before
    assert packed(fold(from_proto(result)).proto) == packed(result)
    return result


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node if node.op_type != "Constant")


def operand(proto: onnx.ModelProto, output: str, place: int = 1) -> list[int] | None:
    """The initialiser that a node reads at a place, or None where it reads none."""
    (name,) = (node.input[place] for node in proto.graph.node if output in node.output)
    found = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    return numpy_helper.to_array(found[0]).reshape(-1).tolist() if found else None


def same_at(original: onnx.ModelProto, result: onnx.ModelProto, *sizes: Mapping[str, int]) -> None:
    """Bit for bit the same in ONNX Runtime at each of the sizes (float32 and integers, no tolerance).

    Left out are empty tensors that the original itself refuses: a size of zero in the target of a Reshape copies.
    """
    generator = np.random.default_rng(0)
    for chosen in sizes:
        feeds = {}
        for info in original.graph.input:
            kind = info.type.tensor_type
            shape = [chosen[entry.dim_param] if entry.dim_param else entry.dim_value for entry in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            feeds[info.name] = generator.integers(0, 5, shape).astype(dtype)
        try:
            wanted = run(original, feeds)
        except Fail:
            assert 0 in chosen.values()
            continue
        assert same_bits(run(result, feeds), wanted), chosen


B_S = ({"b": 2, "s": 5}, {"b": 1, "s": 1}, {"b": 3, "s": 0}, {"b": 0, "s": 4}, {"b": 0, "s": 0})
"""Batches and sequences, empty ones among them."""

SIZES_OF_X = """
  shape = Shape (x)
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  b0 = Gather <axis = 0> (shape, zero)
  s0 = Gather <axis = 0> (shape, one)
  front = Constant <value = int64[1] {0}> ()
  b = Unsqueeze (b0, front)
  s = Unsqueeze (s0, front)
"""


def attention(opset: int = 17) -> onnx.ModelProto:
    """What an exporter writes around attention: heads taken apart and put together."""
    return model(
        SIZES_OF_X + """
  heads = Constant <value = int64[1] {3}> ()
  width = Constant <value = int64[1] {4}> ()
  whole = Constant <value = int64[1] {12}> ()
  split = Concat <axis = 0> (b, s, heads, width)
  apart = Reshape (x, split)
  turned = Transpose <perm = [0, 2, 1, 3]> (apart)
  squared = Mul (turned, turned)
  back = Transpose <perm = [0, 2, 1, 3]> (squared)
  join = Concat <axis = 0> (b, s, whole)
  y = Reshape (back, join)
""", "float[b, s, 12] x", "float[b, s, 12] y", opset=opset)


@pytest.mark.parametrize("opset", range(13, NEWEST + 1))
def test_heads_are_split_by_constants(opset: int) -> None:
    original = attention(opset)
    result = folded(original)
    assert operators(result) == {"Reshape": 2, "Transpose": 2, "Mul": 1}
    assert (operand(result, "apart"), operand(result, "y")) == ([0, 0, 3, 4], [0, 0, 12])
    assert not any(node.op_type == "Constant" for node in result.graph.node)
    same_at(original, result, *B_S)


@pytest.mark.parametrize("opset", [11, 12])
def test_old_opsets(opset: int) -> None:
    original = model("""
  shape = Shape (x)
  zero = Constant <value = int64 {0}> ()
  b0 = Gather <axis = 0> (shape, zero)
  b = Unsqueeze <axes = [0]> (b0)
  rest = Constant <value = int64[1] {-1}> ()
  flat = Concat <axis = 0> (b, rest)
  y = Reshape (x, flat)
""", "float[b, 3, 4] x", "float[b, 12] y", opset=opset)
    result = folded(original)
    assert operators(result) == {"Reshape": 1}
    assert operand(result, "y") == [0, -1]
    same_at(original, result, {"b": 3}, {"b": 1})


def reshape(source: str, target: str, *, extra: str = "", allowzero: bool = False, result: str = "") -> onnx.ModelProto:
    """A Reshape of x, of ``source``'s sizes, to a Concat of ``target``; b and s are the first sizes of z."""
    flag = " <allowzero = 1>" if allowzero else ""
    return model(
        SIZES_OF_X.replace("(x)", "(z)", 1) + extra + f"""
  target = Concat <axis = 0> ({target})
  y = Reshape{flag} (x, target)
""", f"float[b, s] z, float[{source}] x", f"float[{result}] y",
        held="<int64[1] three = {3}, int64[1] four = {4}, int64[1] rest = {-1}, int64[1] none = {0}>")


@pytest.mark.parametrize(("source", "target", "result", "found"), [
    ("b, s, 12", "b, s, three, four", "b, s, 3, 4", [0, 0, 3, 4]),
    ("b, s, 12", "b, s, rest, four", "b, s, 3, 4", [0, 0, -1, 4]),
    ("b, 12", "b, three, four", "b, 3, 4", [0, 3, 4]),
    ("3, b, 4", "b, three, four", "b, 3, 4", [-1, 3, 4]),
    ("3, b, 4", "three, rest, four", "3, b, 4", None),  # no chain at all
    ("3, b, 4", "rest, b, four", "3, b, 4", [-1, 0, 4]),
    ("3, 4, b", "rest, b, four", "3, b, 4", None),  # where b is zero, zero copies the 4
    ("b, 3, s, 4", "b, s, three, four", "b, s, 3, 4", None),  # -1 beside b, which may be zero
    ("b, s, 12", "s, b, three, four", "s, b, 3, 4", None),
])
def test_reshape(source: str, target: str, result: str, found: list[int] | None) -> None:
    original = reshape(source, target, result=result)
    made = folded(original)
    assert operand(made, "y") == found
    same_at(original, made, *B_S)


def test_reshape_where_other_sizes_are_above_zero() -> None:
    """-1 may stand beside a size that is a sum with a number."""
    original = model("""
  longer = Concat <axis = 0> (x, z)
  sizes = Shape (longer)
  n = Gather <axis = 0> (sizes, at)
  b = Gather <axis = 0> (sizes, two)
  target = Concat <axis = 0> (n, b, three)
  y = Reshape (longer, target)
""", "float[s, 3, b] x, float[1, 3, b] z", "float[m, b, 3] y",
        held="<int64[1] at = {0}, int64[1] two = {2}, int64[1] three = {3}>")
    made = folded(original)
    assert operand(made, "y") == [0, -1, 3]
    same_at(original, made, *B_S)


@pytest.mark.parametrize(("proof", "output", "found"), [
    ("", "", None),
    ("p = Reshape (z, open)", "float[b, s, 1] p", [0, -1, 4]),  # refuses a batch of zero
    ("p = Reshape <allowzero = 1> (z, open)", "float[b, s, 1] p", None),  # takes it
    ("p = Reshape (z, open)", "", None),  # leads to no output, and may never run
    ("p = Reshape (flat, deep)", "float[1, 1, b] p", [0, -1, 4]),  # no axis to copy from
])
def test_reshape_where_another_one_refuses_zero(proof: str, output: str, found: list[int] | None) -> None:
    """-1 may stand beside a size that is above zero in every run that the model survives."""
    original = model(SIZES_OF_X.replace("(x)", "(z)", 1) + f"""
  open = Concat <axis = 0> (b, s, rest)
  deep = Concat <axis = 0> (one1, one1, b)
  flat = Slice (z, none, one1, one1)
  three = Constant <value = int64[1] {{3}}> ()
  wide = Mul (s, three)
  target = Concat <axis = 0> (b, wide, four)
  y = Reshape (x, target)
  {proof}
""", "float[b, s] z, float[b, 3, s, 4] x", f"float[b, t, 4] y{', ' * bool(output)}{output}",
        held="<int64[1] rest = {-1}, int64[1] four = {4}, int64[1] one1 = {1}, int64[1] none = {0}>")
    made = folded(original)
    assert operand(made, "y") == found
    same_at(original, made, *B_S)


@pytest.mark.parametrize(("source", "target", "result", "found", "flag"), [
    ("b, s, 12", "b, s, three, four", "b, s, 3, 4", [0, 0, 3, 4], False),  # the flag is left out
    ("3, b, 4", "b, three, four", "b, 3, 4", [-1, 3, 4], True),
    ("b, 12", "rest, three, four", "b, 3, 4", None, True),
    ("3, 4, b", "rest, b, four", "3, b, 4", [3, -1, 4], True),  # -1 changes places
    ("b, s, 12", "b, s, rest, four", "b, s, 3, 4", [0, 0, 3, 4], False),  # -1 beside zeros is a number
    ("b, s, 3, 4", "b, rest, four", "b, t, 4", None, True),  # and another one here
    ("b, 0", "b, none", "b, 0", None, True),  # a zero that means zero
])
def test_reshape_with_literal_zeros(source: str, target: str, result: str, found: list[int] | None,
                                    flag: bool) -> None:
    original = reshape(source, target, result=result, allowzero=True)
    made = folded(original)
    assert operand(made, "y") == found
    (node,) = (node for node in made.graph.node if node.op_type == "Reshape")
    assert [attribute.name for attribute in node.attribute] == ["allowzero"] * flag
    same_at(original, made, *B_S)


@pytest.mark.parametrize(("source", "target", "result", "found"), [
    ("b, 1, 4", "b, three, four", "b, 3, 4", [1, 3, 4]),
    ("s, 4", "b, s, four", "b, s, 4", None),
    ("b, s", "three, b, s", "3, b, s", [3, 1, 1]),
    ("1, s", "b, s", "b, s", None),
])
def test_expand(source: str, target: str, result: str, found: list[int] | None) -> None:
    original = model(
        SIZES_OF_X.replace("(x)", "(z)", 1) + f"""
  target = Concat <axis = 0> ({target})
  y = Expand (x, target)
""", f"float[b, s] z, float[{source}] x", f"float[{result}] y",
        held="<int64[1] three = {3}, int64[1] four = {4}>")
    made = folded(original)
    assert operand(made, "y") == found
    same_at(original, made, *B_S)


@pytest.mark.parametrize(("starts", "ends", "found"), [
    ("front", "s", [INT_MAX]),
    ("front", "longer", [INT_MAX]),
    ("front", "shorter", None),  # below zero where s is 0
    ("front", "b", None),
    ("s", "longer", [INT_MAX]),
])
def test_slice(starts: str, ends: str, found: list[int] | None) -> None:
    bound = {"longer": "longer = Add (s, step)", "shorter": "shorter = Sub (s, step)"}.get(ends, "")
    original = model(
        SIZES_OF_X + f"""
  step = Constant <value = int64[1] {{1}}> ()
  {bound}
  y = Slice (x, {starts}, {ends}, step)
""", "float[b, s] x", "float[b, m] y")
    made = folded(original)
    assert operand(made, "y", 2) == found
    if starts == "s":
        assert operand(made, "y", 1) == [INT_MAX]
    same_at(original, made, *B_S)


def test_slice_that_leaves_out_the_last() -> None:
    """A bound from the end is negative where the axis is provably long enough, and for every kind of integer."""
    original = model("""
  longer = Concat <axis = 1> (head, x)
  shape = Shape (longer)
  at = Constant <value = int64[1] {1}> ()
  n = Gather <axis = 0> (shape, at)
  n32 = Cast <to = 6> (n)
  two = Constant <value = int32[1] {2}> ()
  last = Sub (n32, two)
  front = Constant <value = int32[1] {0}> ()
  axis = Constant <value = int32[1] {1}> ()
  y = Slice (longer, front, last, axis)
  z = Slice (longer, front, n32, axis)
""", "float[2, s] x", "float[2, m] y, float[2, k] z", held="<float[2, 2] head = {1, 2, 3, 4}>")
    made = folded(original)
    assert (operand(made, "y", 2), operand(made, "z", 2)) == ([-2], [np.iinfo(np.int32).max])
    assert operators(made) == {"Concat": 1, "Slice": 2}
    same_at(original, made, {"s": 0}, {"s": 1}, {"s": 7})


@pytest.mark.parametrize(("node", "outputs", "inputs"), [
    ("y = ConstantOfShape (many)", "float[12] y", "float[b, 12] x"),
    ("tail = Concat <axis = 0> (front1, many)\n  y = Tile (x, tail)", "float[b, m] y", "float[b, 12] x"),
    ("n = Squeeze (many)\n  y = Range (origin, n, step)", "int64[12] y", "float[b, 12] x"),
    ("half = Div (many, two)\n  both = Concat <axis = 0> (half, half)\n  y, z = Split <axis = 1> (x, both)",
     "float[b, 6] y, float[b, 6] z", "float[b, 12] x"),
    ("y, z = TopK <axis = 1> (x, many)", "float[b, 12] y, int64[b, 12] z", "float[b, 12] x"),
    ("nothing = Sub (many, many)\n  pads = Concat <axis = 0> (nothing, many, nothing, many)\n  y = Pad (x, pads)",
     "float[b, 36] y", "float[b, 12] x"),
    ("count = Mul (many, many)\n  y = Add (count, two)", "int64[1] y", "float[b, 12] x"),
])
def test_operands_that_are_numbers(node: str, outputs: str, inputs: str) -> None:
    """Whoever reads them: sizes of an axis that is fixed are numbers."""
    original = model(f"""
  shape = Shape (x)
  at = Constant <value = int64[1] {{1}}> ()
  front1 = Constant <value = int64[1] {{1}}> ()
  two = Constant <value = int64[1] {{2}}> ()
  many = Gather <axis = 0> (shape, at)
  origin = Constant <value = int64 {{0}}> ()
  step = Constant <value = int64 {{1}}> ()
  {node}
""", inputs, outputs)
    made = folded(original)
    assert not {"Shape", "Gather", "Squeeze", "Mul", "Div", "Sub", "Concat"} & operators(made).keys()
    same_at(original, made, {"b": 2}, {"b": 1}, {"b": 0})


def test_resize_sizes() -> None:
    original = model("""
  shape = Shape (x)
  sides = Slice (shape, two, four)
  doubled = Mul (sides, two)
  front = Slice (shape, none, two)
  sizes = Concat <axis = 0> (front, doubled)
  y = Resize <mode = "nearest"> (x, , , sizes)
""", "float[2, 3, 4, 5] x", "float[2, 3, 8, 10] y",
        held="<int64[1] none = {0}, int64[1] two = {2}, int64[1] four = {4}>")
    assert operators(folded(original)) == {"Resize": 1}


def test_a_value_keeps_its_name_as_a_constant() -> None:
    """Where a whole value is known, it is an initialiser of its own name: others may refer to it."""
    original = model("""
  shape = Shape <start = 1> (x)
  y = ConstantOfShape (shape)
""", "float[b, 3, 4] x", "float[3, 4] y")
    made = folded(original)
    assert [(tensor.name, tensor.data_type) for tensor in made.graph.initializer] == [("shape", TensorProto.INT64)]
    assert operators(made) == {"ConstantOfShape": 1}


def chains(second: str = "Shape (x)") -> onnx.ModelProto:
    """The same target twice, by two chains."""
    return model(f"""
  shape_1 = Shape (x)
  b_1 = Gather <axis = 0> (shape_1, at)
  s_1 = Gather <axis = 0> (shape_1, one)
  target_1 = Concat <axis = 0> (s_1, b_1)
  y = Reshape (x, target_1)
  e = Exp (x)
  shape_2 = {second}
  b_2 = Gather <axis = 0> (shape_2, at)
  s_2 = Gather <axis = 0> (shape_2, one)
  target_2 = Concat <axis = 0> (s_2, b_2)
  z = Reshape (e, target_2)
""", "float[b, s] x", "float[s, b] y, float[s, b] z", held="<int64[1] at = {0}, int64[1] one = {1}>")


@pytest.mark.parametrize("second", ["Shape (x)", "Shape (e)"])
def test_equal_chains_are_computed_once(second: str) -> None:
    original = chains(second)
    made = folded(original)
    assert operators(made) == {"Shape": 1, "Gather": 2, "Concat": 1, "Reshape": 2, "Exp": 1}
    assert {node.input[1] for node in made.graph.node if node.op_type == "Reshape"} == {"target_1"}
    same_at(original, made, *B_S)


def test_a_shared_value_is_the_one_that_is_ready_first() -> None:
    """A chain that begins at a graph input does not come to wait for one that begins at a computed tensor."""
    original = model("""
  e = Exp (x)
  f = Exp (e)
  late = Shape (f)
  b_1 = Gather <axis = 0> (late, at)
  s_1 = Gather <axis = 0> (late, one)
  target_1 = Concat <axis = 0> (s_1, b_1)
  y = Reshape (f, target_1)
  early = Shape (x)
  b_2 = Gather <axis = 0> (early, at)
  s_2 = Gather <axis = 0> (early, one)
  target_2 = Concat <axis = 0> (s_2, b_2)
  z = Reshape (x, target_2)
""", "float[b, s] x", "float[s, b] y, float[s, b] z", held="<int64[1] at = {0}, int64[1] one = {1}>")
    made = folded(original)
    reads = {node.output[0]: node.input[1] for node in made.graph.node if node.op_type == "Reshape"}
    assert reads["z"] == "target_2"
    same_at(original, made, *B_S)


def test_a_tensor_that_is_made_for_its_shape_goes() -> None:
    original = model("""
  b = Shape <end = 1> (x)
  s = Shape <start = 1, end = 2> (x)
  both = Max (down, across)
  shape = Shape (both)
  y = Expand (down, shape)
  z = Expand (across, shape)
""", "float[b, s] x, float[b, 1, 1, 1] down, float[1, 1, 1, s] across",
        "float[b, 1, 1, s] y, float[b, 1, 1, s] z, int64[1] b, int64[1] s")
    made = folded(original)
    assert operators(made) == {"Shape": 2, "Concat": 1, "Expand": 2}
    (node,) = (node for node in made.graph.node if node.op_type == "Concat")
    assert (list(node.input), node.name, list(node.output)) == (["b", "sizes_1_1", "s"], "node_shape", ["shape"])
    same_at(original, made, *B_S)


@pytest.mark.parametrize(("more", "outputs"), [
    ("w = Neg (both)", ", float[b, 1, 1, s] w"),
    ("", ", float[b, 1, 1, s] both"),
])
def test_a_tensor_that_others_read_stays(more: str, outputs: str) -> None:
    original = model(f"""
  b = Shape <end = 1> (x)
  s = Shape <start = 1, end = 2> (x)
  both = Max (down, across)
  shape = Shape (both)
  y = Expand (down, shape)
  {more}
""", "float[b, s] x, float[b, 1, 1, 1] down, float[1, 1, 1, s] across",
        f"float[b, 1, 1, s] y, int64[1] b, int64[1] s{outputs}")
    assert packed(folded(original)) == packed(original)


def test_different_symbols_are_different() -> None:
    """Batches that two inputs call differently are not taken for one, whatever is planned for."""
    original = model("""
  shape_1 = Shape (x)
  shape_2 = Shape (z)
  one = ConstantOfShape (shape_1)
  y = Reshape (x, shape_2)
  w = Expand (one, shape_2)
""", "float[a, 4] x, float[b, 4] z", "float[b, 4] y, float[c, 4] w")
    assert packed(folded(original)) == packed(original)


def test_a_statement_of_the_file_proves_nothing() -> None:
    """What ``value_info`` says of a size that depends on contents is no proof."""
    original = model("""
  places = NonZero (x)
  shape = Shape (places)
  y = Reshape (places, shape)
""", "float[b] x", "int64[1, n] y")
    original.graph.value_info.append(helper.make_tensor_value_info("places", TensorProto.INT64, [1, 4]))
    made = folded(original)
    same_at(original, made, {"b": 6}, {"b": 0})
    assert operand(made, "y") != [1, 4]


def test_outputs_stay() -> None:
    original = model("""
  shape = Shape (x)
  at = Constant <value = int64[1] {1}> ()
  n = Gather <axis = 0> (shape, at)
  twice = Add (n, n)
  y = ConstantOfShape (n)
""", "float[b, 3] x", "float[3] y, int64[1] n, int64[1] twice")
    made = folded(original)
    assert [info.name for info in made.graph.output] == ["y", "n", "twice"]
    same_at(original, made, {"b": 2})


def test_what_a_body_reads_stays() -> None:
    original = model("""
  shape = Shape (x)
  at = Constant <value = int64[1] {1}> ()
  n = Gather <axis = 0> (shape, at)
  y = If (c) <then_branch = t () => (float[m] u) { u = ConstantOfShape (n) },
              else_branch = e () => (float[m] v) { two = Add (n, n)
 v = ConstantOfShape (two) }>
  z = ConstantOfShape (n)
""", "float[b, 3] x, bool c", "float[m] y, float[3] z")
    made = folded(original)
    assert {"Shape", "Gather"} <= operators(made).keys()
    for choice in (True, False):
        feeds = {"x": np.ones((2, 3), np.float32), "c": np.array(choice)}
        assert same_bits(run(made, feeds), run(original, feeds))


def test_what_a_function_of_the_model_reads_stays() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
sizes (float[b, 3] x) => (float[3] y)
{
  shape = Shape (x)
  at = Constant <value = int64[1] {1}> ()
  n = Gather <axis = 0> (shape, at)
  y = own.fill (n)
}
<domain: "own", opset_import: ["" : 17]>
fill (n) => (y) { y = ConstantOfShape (n) }
"""
    original = onnx.parser.parse_model(text)
    assert packed(folded(original)) == packed(original)


def test_names_of_the_user_survive() -> None:
    """A name that a constant would get may be taken, even in a body."""
    original = attention()
    original.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "sizes_0_0_12"))
    original.graph.node.append(helper.make_node("Add", ["y", "sizes_0_0_12"], ["sizes_0_0_3_4"], "mine"))
    original.graph.output.append(helper.make_tensor_value_info("sizes_0_0_3_4", TensorProto.FLOAT, ["b", "s", 12]))
    original.graph.doc_string = "note"
    original.metadata_props.add(key="author", value="somebody")
    made = folded(original)
    assert (operand(made, "apart"), operand(made, "y")) == ([0, 0, 3, 4], [0, 0, 12])
    assert {entry.key for entry in made.metadata_props} == {"author", "onnxfuse.sizes"}
    same_at(original, made, {"b": 2, "s": 3})


def test_statements_about_values_come_back() -> None:
    original = attention()
    stated: dict[str, list[int | str]] = {"b": [1], "apart": ["b", "s", 3, 4], "split": [4], "join": [3]}
    for name, shape in stated.items():
        kind = TensorProto.FLOAT if name == "apart" else TensorProto.INT64
        original.graph.value_info.append(helper.make_tensor_value_info(name, kind, shape))
    made = folded(original)
    assert [info.name for info in made.graph.value_info] == ["apart"]


def test_initialisers_that_nothing_reads_go_and_come_back() -> None:
    original = chains()
    original.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.int64), "unread before"))
    made = folded(reshape("b, s, 12", "b, s, three, four", result="b, s, 3, 4"))
    assert [tensor.name for tensor in made.graph.initializer] == ["rest", "none", "sizes_0_0_3_4"]
    assert "unread before" in {tensor.name for tensor in folded(original).graph.initializer}


def test_an_initialiser_that_the_caller_may_replace_is_no_constant() -> None:
    original = model("""
  shape = Shape (x)
  n = Gather <axis = 0> (shape, at)
  y = ConstantOfShape (n)
""", "float[2, 3] x, int64[1] at", "float[m] y", held="<int64[1] at = {1}>")
    made = folded(original)
    assert "Gather" in operators(made) and any(tensor.name == "at" for tensor in made.graph.initializer)


def test_nothing_is_folded_below_ir_version_4() -> None:
    original = attention()
    original.ir_version = 3
    assert packed(fold(from_proto(original)).proto) == packed(original)


# ---- the whole way -------------------------------------------------------------------------------------------------


def deep() -> onnx.ModelProto:
    """Pointwise work around reshapes, so that something is fused too."""
    return model(
        SIZES_OF_X + """
  heads = Constant <value = int64[1] {3}> ()
  width = Constant <value = int64[1] {4}> ()
  whole = Constant <value = int64[1] {12}> ()
  split = Concat <axis = 0> (b, s, heads, width)
  e = Exp (x)
  f = Mul (e, x)
  apart = Reshape (f, split)
  g = Tanh (apart)
  h = Add (g, apart)
  product = MatMul (h, w)
  i = Exp (product)
  j = Mul (i, i)
  join = Concat <axis = 0> (b, s, whole)
  y = Reshape (j, join)
""", "float[b, s, 12] x, float[4, 4] w", "float[b, s, 12] y")


OPTIONS = Options(dims={"b": 8, "s": 4096}, target="H200", verify=False, database=False)


def test_optimised_and_back() -> None:
    original = deep()
    optimised = optimise(original, OPTIONS)
    assert read_fused(optimised.model) and not any(region.hosts for region in optimised.regions)
    onnx.checker.check_model(optimised.model, full_check=True)
    same_at(original, optimised.model, *B_S)
    assert packed(unfuse(optimised.model)) == packed(original)
    assert packed(optimise(optimised.model, OPTIONS).model) == packed(optimised.model)


def test_put_back_one_by_one() -> None:
    """Arithmetic on sizes comes back with the last fused node; or not at all, where that is asked for."""
    original = deep()
    part = optimise(original, OPTIONS).model
    assert sizes_record(unfuse(part, folded=True)) is not None
    names = [node.name for node in read_fused(part)]
    assert len(names) > 1
    for name in names:
        assert sizes_record(part) is not None
        part = unfuse(part, [name])
    assert packed(part) == packed(original)


def test_bisecting_puts_back_what_was_planned() -> None:
    original = deep()
    fused = optimise(original, OPTIONS).model
    variants = Variants(from_proto(original), from_proto(fused))
    for name in variants.nodes:
        assert not {"node_shape", "node_split", "node_join"} & set(variants.labels(name))
        part = variants.model(fused, variants.nodes.keys() - {name})
        assert len(read_fused(part)) == len(variants.nodes) - 1
        same_at(original, part, *B_S)


def test_an_edited_model_keeps_its_edits() -> None:
    made = folded(attention())
    made.graph.node.insert(1, helper.make_node("Neg", ["x"], ["negative"]))
    made.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT, ["b", "s", 12]))
    back = unfuse(made)
    onnx.checker.check_model(back, full_check=True)
    assert operators(back) == {**operators(attention()), "Neg": 1}
    assert sizes_record(back) is None


def test_disabled() -> None:
    original = deep()
    optimised = optimise(original, Options(**{**vars(OPTIONS), "disable": ["shape-arithmetic"]}))
    assert sizes_record(optimised.model) is None and "Shape" in operators(optimised.model)


def test_a_misspelt_stage_is_named() -> None:
    with pytest.raises(RuleError) as caught:
        load_rules([], ["shape-arithmetics"])
    assert caught.value.message == "No rule is called shape-arithmetics."
    assert caught.value.remedy == "Did you mean shape-arithmetic?"


def test_the_report_counts_what_went() -> None:
    optimised = optimise(deep(), OPTIONS)
    for report in (report_of(optimised), report_of_fused(from_proto(optimised.model), OPTIONS.dims, optimised.profile)):
        data = as_json(report)
        assert (data["size_operands_folded"], data["size_nodes_removed"]) == (2, 13)
        assert data["nodes_before"] == len(deep().graph.node)
        console = Console(record=True, width=120, file=StringIO())
        show(report, console)
        assert "size operands folded: 2, 13 nodes removed\n" in console.export_text()


@pytest.mark.parametrize("name", ["node_split", "split"])
def test_a_removed_node_is_explained(name: str) -> None:
    found = explain(optimise(deep(), OPTIONS), name).node
    assert found is not None
    assert (found.subject, found.state, found.operators) == ("node_split", "removed", ("Concat",))
    assert found.summary == (
        "removed: it was arithmetic on sizes, and what read it has a constant now, or an equal value")


@pytest.mark.parametrize(("text", "message"), [
    ("{", "The record that onnxfuse left in the model cannot be read: JSONDecodeError("),
    (json.dumps({"version": 1, "counts": [1, 1, 1], "more": []}),
     "The record that onnxfuse left in the model cannot be read: TypeError("),
    (json.dumps({"version": 7, "counts": [1, 1, 1]}),
     "Sizes were folded by another release of onnxfuse (the record has version 7, this one reads 1)."),
])
def test_a_damaged_record(text: str, message: str) -> None:
    made = folded(attention())
    next(entry for entry in made.metadata_props if entry.key == "onnxfuse.sizes").value = text
    with pytest.raises(ModelError) as caught:
        unfuse(made)
    assert caught.value.message.startswith(message)
    assert caught.value.place == "metadata property 'onnxfuse.sizes'"
    assert caught.value.remedy == "Fuse the original model again."


def test_where_a_program_comes_from_plays_no_part() -> None:
    """Planned sizes prove nothing: the folded model is the same for all of them."""
    results: Sequence[bytes] = [
        packed(optimise(attention(), Options(dims=dims, target="H200", verify=False, database=False)).folded.proto)
        for dims in ({"b": 1, "s": 1}, {"b": 8, "s": 128})
    ]
    assert len(set(results)) == 1


# ---- Random arithmetic ---------------------------------------------------------------------------------------------


OPERATORS = ("Gather", "Slice", "Concat", "Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Copy")


@st.composite
def arithmetic(draw: st.DrawFn) -> onnx.ModelProto:
    """Integers computed from the sizes of two inputs in any way, each read as floats and some as size operands."""
    nodes = [helper.make_node("Shape", ["x"], ["v0"]), helper.make_node("Shape", ["z"], ["v1"])]
    known = {"v0": 3, "v1": 2}
    consts: dict[str, np.ndarray] = {}

    def constant(*numbers: int) -> str:
        name = f"c{len(consts)}"
        consts[name] = np.array(numbers, np.int64)
        return name

    for _ in range(draw(st.integers(2, 14))):
        name, first = f"v{len(known)}", draw(st.sampled_from(sorted(known)))
        count = known[first]
        kind = draw(st.sampled_from(OPERATORS))
        if kind == "Gather":
            places = draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=3))
            nodes.append(helper.make_node("Gather", [first, constant(*places)], [name]))
            known[name] = len(places)
        elif kind == "Slice":
            start = draw(st.integers(0, count - 1))
            nodes.append(helper.make_node("Slice", [first, constant(start), constant(count)], [name]))
            known[name] = count - start
        elif kind == "Concat":
            other = draw(st.sampled_from(sorted(known)))
            if count + known[other] > 6:
                continue
            nodes.append(helper.make_node("Concat", [first, other], [name], axis=0))
            known[name] = count + known[other]
        elif kind == "Copy":  # the same again, by other nodes
            nodes.append(helper.make_node("Reshape", [first, constant(-1)], [name]))
            known[name] = count
        else:
            same = [other for other, length in known.items() if length in (1, count)]
            second = draw(st.sampled_from(same)) if kind not in ("Div", "Mod") and draw(st.booleans()) else constant(
                draw(st.integers(1, 3)))
            nodes.append(helper.make_node(kind, [first, second], [name]))
            known[name] = count
    outputs: list[onnx.ValueInfoProto] = []
    for number, (name, count) in enumerate(known.items()):
        nodes.append(helper.make_node("Cast", [name], [f"f{number}"], to=TensorProto.FLOAT))
        outputs.append(helper.make_tensor_value_info(f"f{number}", TensorProto.FLOAT, [count]))
        match draw(st.sampled_from(["none", "none", "Expand", "Slice", "Reshape", "Range"])):
            case "Expand":
                nodes.append(helper.make_node("Abs", [name], [f"a{number}"]))
                nodes.append(helper.make_node("Min", [f"a{number}", constant(3)], [f"m{number}"]))
                nodes.append(helper.make_node("Expand", ["one", f"m{number}"], [f"o{number}"]))
            case "Slice":
                nodes.append(helper.make_node("Gather", [name, constant(0)], [f"a{number}"]))
                nodes.append(helper.make_node("Slice", ["x", constant(0), f"a{number}", constant(1)], [f"o{number}"]))
            case "Reshape":
                nodes.append(helper.make_node("Concat", ["v0", constant(1)], [f"a{number}"], axis=0))
                nodes.append(helper.make_node("Reshape", ["x", f"a{number}"], [f"o{number}"], allowzero=number % 2))
            case "Range":
                nodes.append(helper.make_node("Gather", [name, "where"], [f"a{number}"]))
                nodes.append(helper.make_node("Range", ["where", f"a{number}", "step"], [f"o{number}"]))
            case _:
                continue
        dtype, rank = {"Expand": (TensorProto.FLOAT, count), "Slice": (TensorProto.FLOAT, 3),
                      "Reshape": (TensorProto.FLOAT, 4), "Range": (TensorProto.INT64, 1)}[nodes[-1].op_type]
        outputs.append(helper.make_tensor_value_info(
            f"o{number}", dtype, [f"o{number}.{axis}" for axis in range(rank)]))
    numbers = {"one": np.ones(1, np.float32), "where": np.array(0), "step": np.array(1)}
    read = {name for node in nodes for name in node.input}
    consts |= {name: array for name, array in numbers.items() if name in read}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", 6]),
              helper.make_tensor_value_info("z", TensorProto.FLOAT, ["s", "b"])]
    held = [numpy_helper.from_array(array, name) for name, array in consts.items()]
    return helper.make_model(helper.make_graph(nodes, "arithmetic", inputs, outputs, held),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@given(arithmetic())
@settings(max_examples=60, deadline=None)
def test_any_arithmetic_gives_the_same_numbers(original: onnx.ModelProto) -> None:
    same_at(original, folded(original), {"b": 2, "s": 5}, {"b": 1, "s": 1}, {"b": 7, "s": 3}, {"b": 0, "s": 4})
