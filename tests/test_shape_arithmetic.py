"""Arithmetic on sizes: what is folded, and that every size gives the same bits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from plain_session import ENDING, takes
from rewriting_models import run, same_bits
from sizes_models import B_S, SIZES_OF_X, attention, folded, model, operand, operators, packed, same_at

from onnxfuse.graph import from_proto
from onnxfuse.rewriting import fold, unfuse
from onnxfuse.rewriting.sizes import sizes_record

INT_MAX = np.iinfo(np.int64).max
NEWEST = min(onnx.defs.onnx_opset_version(), 23)


@pytest.mark.parametrize("opset", [opset for opset in range(13, NEWEST + 1) if takes(opset)])
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


def test_slice_without_axes() -> None:
    """Bounds are those of the first axes."""
    original = model(SIZES_OF_X + "y = Slice (x, front, b)", "float[b, s] x", "float[b, s] y")
    made = folded(original)
    assert operand(made, "y", 2) == [INT_MAX]
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
    ends = not {each.op_type for each in original.graph.node}.isdisjoint(ENDING)
    same_at(original, made, {"b": 2}, {"b": 1}, *([] if ends else [{"b": 0}]))


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
    record = sizes_record(made)
    assert record is not None and record.replaced == 1, "what is the first of its kind is read as before"
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


def test_values_of_unknown_rank_are_not_taken_for_equal() -> None:
    """The same sizes in one row and in several are two values.  Types: int64; tolerance: none."""
    original = model("""
  shape = Shape (x)
  rows = Unsqueeze (shape, axes)
  row = Squeeze (rows, axes)
  y = Mul (row, row)
""", "float[b, s] x, int64[1] axes", "int64[2] y")
    made = folded(original)
    feeds = {"x": np.ones((2, 3), np.float32), "axes": np.array([1])}
    assert same_bits(run(made, feeds), run(original, feeds))


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


@pytest.mark.parametrize("made_for", ["ReduceMax <keepdims = 0> (x)", "Gather <axis = 0> (shape, one)"])
def test_a_shape_of_no_axes_is_not_put_together(made_for: str) -> None:
    """There is no Concat of nothing."""
    original = model(f"""
  one = Constant <value = int64 {{1}}> ()
  shape = Shape (x)
  scalar = {made_for}
  none = Shape (scalar)
  y = Expand (x, none)
  back = Max (shape, shape)
""", "float[b, s] x", "float[b, s] y, int64[2] back, int64[0] none")
    made = folded(original)
    assert "Concat" not in operators(made)
    same_at(original, made, *B_S[:2])


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


def test_edits_made_since_are_kept() -> None:
    made = folded(attention())
    made.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 4, 3]), "mine"))
    (apart,) = (node for node in made.graph.node if "apart" in node.output)
    apart.input[1] = "mine"
    assert operand(unfuse(made), "apart") == [0, 0, 4, 3]


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
