"""The graph view: links, constants, captures, what onnx-graphsurgeon leaves out."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph import build_graph, from_proto
from onnxfuse.graph.build import Tensor
from onnxfuse.graph.constants import SMALL_ELEMENTS
from onnxfuse.graph.dims import dim, symbol
from onnxfuse.operators import load_graph


def parsed(text: str, ir_version: int = 8) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : 17, "com.microsoft" : 1]>\n{text}')


def test_links() -> None:
    graph = build_graph(parsed("""
        g (float[n, 4] x) => (float[n, 4] y, float[n, 4] a) {
            a = Relu(x)
            b = Add(a, a)
            y = Clip(b, , a)
        }"""))
    relu, add, clip = graph.nodes
    assert [node.index for node in graph.nodes] == [0, 1, 2]
    assert [node.op for node in graph.nodes] == ["Relu", "Add", "Clip"]
    a = graph.values["a"]
    assert a.producer is relu and a.consumers == [add, clip] and a.is_output and not a.is_input
    assert add.inputs == (a, a) and list(add.reads()) == [a]
    assert clip.inputs[1] is None
    assert graph.inputs == (graph.values["x"],) and graph.values["x"].is_input
    assert [value.name for value in graph.outputs] == ["y", "a"]
    assert graph.opsets == {"": 17, "com.microsoft": 1} and graph.opset == 17
    assert add.originals == (add,)


def test_nodes_without_names_are_called_after_their_results() -> None:
    proto = parsed("""g (float[n, 4] x, float[4] b) => (float[n, 4] y) {
        a = com.microsoft.BiasGelu(x, b)  c = Relu(a)  y = Neg(c) }""")
    proto.graph.node[2].name = "last"
    assert [node.label for node in build_graph(proto).nodes] == ["com.microsoft.BiasGelu -> a", "Relu -> c", "last"]


def test_the_standard_domain_has_one_name() -> None:
    node = helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    graph = build_graph(_model([node], domain="ai.onnx"))
    assert graph.nodes[0].domain == "" and graph.opset == 17


def _model(nodes: list[onnx.NodeProto], domain: str = "", ir_version: int = 8, inputs: object = None,
           **more: object) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])] if inputs is None else inputs
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, outputs, **more)  # type: ignore[arg-type]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, 17)], ir_version=ir_version)


def test_constants() -> None:
    large = np.zeros(SMALL_ELEMENTS + 1, np.float32)
    nodes = [
        helper.make_node("Constant", [], ["ints"], value_ints=[3, -1]),
        helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.array([1.5], np.float16))),
        helper.make_node("Constant", [], ["large"], value=numpy_helper.from_array(large)),
        helper.make_node("Constant", [], ["scalar"], value_float=0.5),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.arange(SMALL_ELEMENTS, dtype=np.int64), "small"),
        numpy_helper.from_array(large, "big"),
        TensorProto(name="brain", data_type=TensorProto.BFLOAT16, dims=[2],
                    raw_data=np.array([1, 2], ml_dtypes.bfloat16).tobytes()),
    ]
    graph = load_graph(_model(nodes, initializer=weights))
    values = graph.values
    assert len(graph.nodes) == 5
    for name in ("ints", "half", "large", "scalar", "small", "big", "brain"):
        assert values[name].is_constant, name
    assert values["ints"].constant is not None and values["ints"].constant.tolist() == [3, -1]
    assert values["ints"].elements == (dim(3), dim(-1))
    assert values["ints"].dtype == TensorProto.INT64 and values["ints"].producer in graph.nodes
    assert values["half"].dtype == TensorProto.FLOAT16 and values["half"].shape == (dim(1),)
    assert values["large"].constant is None and values["large"].shape == (dim(SMALL_ELEMENTS + 1),)
    assert values["large"].producer is not None
    assert isinstance(values["large"].producer.attributes["value"], Tensor)
    assert values["scalar"].shape == () and values["scalar"].dtype == TensorProto.FLOAT
    assert values["small"].constant is not None and values["small"].constant[-1] == SMALL_ELEMENTS - 1
    assert values["big"].constant is None and values["big"].dtype == TensorProto.FLOAT
    brain = values["brain"]
    assert brain.dtype == TensorProto.BFLOAT16 and brain.constant is not None
    assert brain.constant.astype(np.float32).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        brain.constant[0] = 0


@pytest.mark.parametrize(("ir_version", "is_constant"), [(3, True), (4, False), (8, False)])
def test_an_initialiser_among_the_inputs_may_be_replaced_from_version_4_on(ir_version: int, is_constant: bool) -> None:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "w")]
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = build_graph(_model([node], ir_version=ir_version, inputs=inputs, initializer=[weight]))
    value = graph.values["w"]
    assert value.is_constant is is_constant
    assert (value.constant is not None) is is_constant
    assert value.is_input is not is_constant
    assert [given.name for given in graph.inputs] == ["x"]
    assert value.dtype == TensorProto.FLOAT and value.shape == (dim(4),)


def test_sizes_of_inputs() -> None:
    proto = parsed("g (float[batch, 3, ?, s0] x, float z) => (float y) { y = Add(x, z) }")
    proto.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "s0 + 1"
    proto.graph.input[1].type.tensor_type.ClearField("shape")
    graph = build_graph(proto)
    assert graph.values["x"].shape == (symbol("batch"), dim(3), symbol("x.2"), symbol("s0") + 1)
    for past in (1 << 63, 1 << 70):  # a size has 63 bits
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = str(past)
        assert build_graph(proto).values["x"].shape == (symbol("x.0"), *graph.values["x"].shape[1:])
    assert graph.values["z"].shape is None


def test_captures_are_those_of_all_depths_and_hidden_names_are_not() -> None:
    graph = build_graph(parsed("""
        g (float[4] x, float[4] u, float[4] v, bool c) => (float[4] y) {
            w = Relu(x)
            y = If (c) <
                then_branch = t () => (float[4] r) {
                    r = If (c) <
                        then_branch = tt () => (float[4] p) { p = Add(u, w) },
                        else_branch = te () => (float[4] q) { v = Neg(u)  q = Abs(v) }
                    >
                },
                else_branch = e () => (float[4] s) { s = Exp(w) }
            >
        }"""))
    relu, branch = graph.nodes
    assert branch.has_subgraph and not relu.has_subgraph
    assert [value.name for value in branch.captures] == ["w", "c", "u"]  # else_branch comes before then_branch
    assert graph.values["w"].consumers == [branch]
    assert graph.values["v"].consumers == []
    assert "then_branch" not in branch.attributes
    assert [value.name for value in branch.reads()] == ["c", "w", "u"]


def test_a_name_that_is_hidden_later_is_captured() -> None:
    inner = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["z"]), helper.make_node("Exp", ["z"], ["w"])], "b", [],
        [helper.make_tensor_value_info("w", 1, None)],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["w"]), helper.make_node("Cast", ["x"], ["c"], to=9),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    assert [value.name for value in build_graph(_model(nodes)).nodes[2].captures] == ["w"]


def test_attributes() -> None:
    node = helper.make_node(
        "Thing", ["x"], ["y"], domain="mine", number=3, ratio=0.5, text="abc", image=b"\xff\xfe\0", numbers=[1, 2],
        texts=["a", "b"], images=[b"\xff"], table=numpy_helper.from_array(np.array([1, 2], np.int32)),
    )
    proto = _model([node])
    proto.opset_import.add(domain="mine", version=1)
    attributes = build_graph(proto).nodes[0].attributes
    assert attributes["number"] == 3 and attributes["ratio"] == 0.5 and attributes["text"] == "abc"
    assert attributes["image"] == b"\xff\xfe\0" and attributes["images"] == [b"\xff"]
    assert attributes["numbers"] == [1, 2] and attributes["texts"] == ["a", "b"]
    assert attributes["table"].tolist() == [1, 2]


def test_functions_of_the_model() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
        g (float[n, 4] x) => (float[n, 4] y) { y = mine.twice(x) }
        <domain: "mine", opset_import: ["" : 17]> twice (a) => (b) { b = Add(a, a) }""")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    graph = load_graph(proto)
    assert graph.functions == {("mine", "twice")}
    assert graph.values["y"].shape == (symbol("n"), dim(4)) and graph.values["y"].dtype == TensorProto.FLOAT


def test_the_model_is_left_as_it_was() -> None:
    proto = parsed("g (float[n, 4] x) => (float[n, 4] y) { c = Constant<value_ints=[4]>() y = Reshape(x, c) }")
    before = proto.SerializeToString(deterministic=True)
    load_graph(proto)
    assert proto.SerializeToString(deterministic=True) == before


def test_ten_thousand_nodes_take_seconds() -> None:
    count = 10_000
    nodes = [helper.make_node("Add", ["x" if i == 0 else f"v{i - 1}", "x"], [f"v{i}"]) for i in range(count - 1)]
    nodes.append(helper.make_node("Relu", [f"v{count - 2}"], ["y"]))
    loaded = from_proto(_model(nodes))
    start = time.process_time()
    assert len(build_graph(loaded).nodes) == count
    assert time.process_time() - start < 5
