"""Arithmetic on sizes through the whole pipeline: fused models, putting back, reports; and any arithmetic at random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from sizes_models import B_S, SIZES_OF_HEADS, attention, folded, model, operators, packed, same_at

from onnxfuse.debugging.variants import Variants
from onnxfuse.errors import ModelError, RuleError
from onnxfuse.graph import from_proto
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json, explain, report_of, report_of_fused
from onnxfuse.reporting.report_text import show
from onnxfuse.rewriting import read_fused, sizes_record, unfuse
from onnxfuse.rules import load_rules


def deep() -> onnx.ModelProto:
    """Pointwise work around reshapes, so that something is fused too."""
    return model(
        SIZES_OF_HEADS + """
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
     "The record that onnxfuse left in the model cannot be read: ValueError("),
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


class _Arithmetic:
    """Integers computed from the sizes of two inputs, by nodes that come one after the other.

    Attributes:
        known: how many numbers each tensor of them has; consts: constants by name; outputs: what shows them.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.known: dict[str, int] = {}
        self.consts: dict[str, np.ndarray] = {}
        self.outputs: list[onnx.ValueInfoProto] = []
        self.add("Shape", ["x"], 3)
        self.add("Shape", ["z"], 2)

    def node(self, operator: str, inputs: Sequence[str], result: str, **attributes: int) -> None:
        self.nodes.append(helper.make_node(operator, inputs, [result], **attributes))

    def add(self, operator: str, inputs: Sequence[str], count: int, **attributes: int) -> None:
        """One more tensor, of so many numbers."""
        name = f"v{len(self.known)}"
        self.node(operator, inputs, name, **attributes)
        self.known[name] = count

    def constant(self, *numbers: int) -> str:
        name = f"c{len(self.consts)}"
        self.consts[name] = np.array(numbers, np.int64)
        return name

    def compute(self) -> None:
        """A node that computes from what is there."""
        draw, known = self.draw, self.known
        first = draw(st.sampled_from(sorted(known)))
        count = known[first]
        kind = draw(st.sampled_from(OPERATORS))
        if kind == "Gather":
            places = draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=3))
            self.add("Gather", [first, self.constant(*places)], len(places))
        elif kind == "Slice":
            start = draw(st.integers(0, count - 1))
            self.add("Slice", [first, self.constant(start), self.constant(count)], count - start)
        elif kind == "Concat":
            other = draw(st.sampled_from(sorted(known)))
            if count + known[other] <= 6:
                self.add("Concat", [first, other], count + known[other], axis=0)
        elif kind == "Copy":  # the same again, by other nodes
            self.add("Reshape", [first, self.constant(-1)], count)
        else:
            same = [other for other, length in known.items() if length in (1, count)]
            second = draw(st.sampled_from(same)) if kind not in ("Div", "Mod") and draw(st.booleans()) else (
                self.constant(draw(st.integers(1, 3))))
            self.add(kind, [first, second], count)

    def show(self, number: int, name: str, count: int) -> None:
        """A tensor as floats, and perhaps as a size operand."""
        self.node("Cast", [name], f"f{number}", to=TensorProto.FLOAT)
        self.outputs.append(helper.make_tensor_value_info(f"f{number}", TensorProto.FLOAT, [count]))
        inner, result = f"a{number}", f"o{number}"
        match self.draw(st.sampled_from(["none", "none", "Expand", "Slice", "Reshape", "Range"])):
            case "Expand":
                dtype, rank = TensorProto.FLOAT, count
                self.node("Abs", [name], inner)
                self.node("Min", [inner, self.constant(3)], f"m{number}")
                self.node("Expand", ["one", f"m{number}"], result)
            case "Slice":
                dtype, rank = TensorProto.FLOAT, 3
                self.node("Gather", [name, self.constant(0)], inner)
                self.node("Slice", ["x", self.constant(0), inner, self.constant(1)], result)
            case "Reshape":
                dtype, rank = TensorProto.FLOAT, 4
                self.node("Concat", ["v0", self.constant(1)], inner, axis=0)
                self.node("Reshape", ["x", inner], result, allowzero=number % 2)
            case "Range":
                dtype, rank = TensorProto.INT64, 1
                self.node("Gather", [name, "where"], inner)
                self.node("Range", ["where", inner, "step"], result)
            case _:
                return
        self.outputs.append(helper.make_tensor_value_info(result, dtype, [f"{result}.{axis}" for axis in range(rank)]))

    def model(self) -> onnx.ModelProto:
        numbers = {"one": np.ones(1, np.float32), "where": np.array(0), "step": np.array(1)}
        read = {name for node in self.nodes for name in node.input}
        consts = self.consts | {name: array for name, array in numbers.items() if name in read}
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", 6]),
                  helper.make_tensor_value_info("z", TensorProto.FLOAT, ["s", "b"])]
        held = [numpy_helper.from_array(array, name) for name, array in consts.items()]
        return helper.make_model(helper.make_graph(self.nodes, "arithmetic", inputs, self.outputs, held),
                                 opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@st.composite
def arithmetic(draw: st.DrawFn) -> onnx.ModelProto:
    """Integers computed from the sizes of two inputs in any way, each read as floats and some as size operands."""
    made = _Arithmetic(draw)
    for _ in range(draw(st.integers(2, 14))):
        made.compute()
    for number, (name, count) in enumerate(made.known.items()):
        made.show(number, name, count)
    return made.model()


@given(arithmetic())
@settings(max_examples=60, deadline=None)
def test_any_arithmetic_gives_the_same_numbers(original: onnx.ModelProto) -> None:
    same_at(original, folded(original), {"b": 2, "s": 5}, {"b": 1, "s": 1}, {"b": 7, "s": 3}, {"b": 0, "s": 4})
