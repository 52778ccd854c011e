"""Fused nodes and their functions in the model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from rewriting_models import CHAIN, PLAN, SOURCE, chain, fuse, fused_nodes, parse, random_feeds, region, run, same_bits

from onnxfuse.lowering import launch
from onnxfuse.operators import load_graph
from onnxfuse.rewriting import InvariantError, rewrite, unfuse

TWO_LAYERS = """
<ir_version: 8, opset_import: ["" : 17]>
layers (float[n] x) => (float[n] y)
<float[1] two = {2.0}, float[1] deux = {2.0}, float[1] three = {3.0}>
{
  a = Mul (x, two)
  b = Relu (a)
  c = Exp (b)
  d = Mul (c, deux)
  e = Relu (d)
  f = Exp (e)
  g = Mul (f, three)
  h = Relu (g)
  y = Exp (h)
}
"""


def test_a_region_becomes_one_node_and_its_function() -> None:
    model = chain()
    model.graph.node[1].name = ""
    result = fuse(model, ["a", "b", "c"], images={"sm_90": b"\1\2"})
    assert [node.op_type for node in result.model.graph.node] == ["Region0", "MatMul", "Mul", "Tanh"]
    node = result.model.graph.node[0]
    assert node.name == "node_a.test"
    assert list(node.input) == [""] * launch.HOST_INPUTS + ["x", "z"]
    assert list(node.output) == ["c"]
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    assert attributes["plan"] == PLAN.to_json().encode()
    assert attributes["source"] == SOURCE.encode()
    assert attributes["image_sm_90"].data_type == TensorProto.UINT8
    assert numpy_helper.to_array(attributes["image_sm_90"]).tobytes() == b"\1\2"
    record = json.loads(attributes["onnxfuse"])
    assert record["rule"] == "test" and record["schedule"] == "pointwise" and record["figures"] == {
        "bytes_before": 96, "bytes_after": 32, "kernels_before": 3, "kernels_after": 1, "estimated_speedup": 3.0,
        "memory_saved": 64}
    assert [entry.get("name") for entry in record["nodes"]] == ["node_a", "", "node_c"]
    assert record["types"]["x0"] == ["FLOAT", ["batch", "4"]]

    (function,) = result.model.functions
    assert (function.domain, function.name, function.overload) == ("onnxfuse", "Region0", "")
    assert list(function.input) == [f"h{i}" for i in range(launch.HOST_INPUTS)] + ["x0", "x1"]
    assert list(function.output) == ["y0"]
    assert [(node.op_type, list(node.input), list(node.output)) for node in function.node] == [
        ("Constant", [], ["c0"]),
        ("Add", ["x0", "x1"], ["t0"]),
        ("Mul", ["t0", "c0"], ["t1"]),
        ("Relu", ["t1"], ["y0"]),
    ]
    assert [(entry.domain, entry.version) for entry in function.opset_import] == [("", 17)]
    assert [(entry.domain, entry.version) for entry in result.model.opset_import] == [("", 17), ("onnxfuse", 1)]


def test_placed_names_regions_nodes_and_operators() -> None:
    result = fuse(chain(), ["a", "b", "c"], ["e", "y"])
    assert [(entry.region, entry.node, entry.op) for entry in result.placed] == [
        (0, "node_a.test", "Region0"), (1, "node_e.test", "Region1"),
    ]
    assert result.refusals == ()


def test_results_are_the_same_bits() -> None:
    model = chain()
    fused = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_other_tools_understand_the_function() -> None:
    """onnx's reference evaluator and inliner; float32, 1e-6 of NumPy's tanh and sums."""
    model = chain()
    fused = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    feeds = random_feeds(model)
    (expected,) = run(model, feeds)
    np.testing.assert_allclose(ReferenceEvaluator(fused).run(None, feeds)[0], expected, rtol=1e-6, atol=1e-6)
    inlined = inline_local_functions(fused)
    assert not fused_nodes(inlined)
    assert same_bits(run(inlined, feeds), [expected])


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_half_types(element: str) -> None:
    model = parse(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        halves (float[n, 4] x) => (float[n, 4] y)
        {{
          r = Cast <to = {TensorProto.DataType.Value(element.upper())}> (x)
          a = Cast <to = 1> (r)
          b = Mul (a, scale)
          c = Cast <to = {TensorProto.DataType.Value(element.upper())}> (b)
          y = Cast <to = 1> (c)
        }}
        """,
        scale=np.array([1.5], np.float32),
    )
    fused = fuse(model, ["a", "b", "c"]).model
    assert fused.graph.value_info[0].type.tensor_type.elem_type == TensorProto.DataType.Value(element.upper())
    feeds = {"x": np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)}
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_regions_of_one_structure_share_a_function() -> None:
    fused = fuse(parse(TWO_LAYERS), ["a", "b"], ["d", "e"], ["g", "h"]).model
    assert [node.op_type for node in fused_nodes(fused)] == ["Region0", "Region0", "Region1"]
    assert [function.name for function in fused.functions] == ["Region0", "Region1"]
    assert [tensor.name for tensor in fused.graph.initializer] == []
    feeds = random_feeds(parse(TWO_LAYERS))
    assert same_bits(run(parse(TWO_LAYERS), feeds), run(fused, feeds))


def test_sharing_sees_through_the_order_of_nodes() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n] x) => (float[n] y) {
      a = Exp (x)
      b = Tanh (x)
      c = Mul (a, b)
      d = Floor (c)
      f = Tanh (d)
      e = Exp (d)
      y = Mul (e, f)
    }
    """
    fused = fuse(parse(text), ["a", "b", "c"], ["e", "f", "y"]).model
    assert [node.op_type for node in fused_nodes(fused)] == ["Region0", "Region0"]


def test_another_kernel_is_another_name() -> None:
    model = parse(TWO_LAYERS)
    graph = load_graph(model)
    other = region(graph, "d", "e", source=SOURCE + "//")
    regions = [region(graph, "a", "b"), other, region(graph, "g", "h", plan=PLAN)]
    assert [entry.op for entry in rewrite(model, graph, regions).placed] == ["Region0", "Region1", "Region2"]


def test_host_inputs_come_first() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[a, b] y) {
          s = Shape (x)
          t = Exp (x)
          y = Reshape (t, s)
        }
        """
    )
    fused = fuse(model, ["t", "y"], hosts=["s"]).model
    (node,) = fused_nodes(fused)
    assert list(node.input) == ["s"] + [""] * (launch.HOST_INPUTS - 1) + ["x"]
    assert [list(node.input) for node in fused.functions[0].node] == [["x0"], ["t0", "h0"]]
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_several_outputs_and_their_types() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y, bool[n, 4] q) {
          a = Exp (x)
          c = Cast <to = 10> (a)
          p = Greater (x, a)
          r = MatMul (a, eye)
          s = Cast <to = 1> (c)
          y = Add (r, s)
          q = Not (p)
        }
        """,
        eye=np.eye(4, dtype=np.float32),
    )
    fused = fuse(model, ["a", "c", "p"]).model
    (node,) = fused_nodes(fused)
    assert list(node.output) == ["a", "c", "p"]
    types = {info.name: info.type.tensor_type for info in fused.graph.value_info}
    assert {name: kind.elem_type for name, kind in types.items()} == {
        "a": TensorProto.FLOAT, "c": TensorProto.FLOAT16, "p": TensorProto.BOOL,
    }
    assert [(size.dim_param, size.dim_value) for size in types["c"].shape.dim] == [("n", 0), ("", 4)]
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_a_size_without_a_name_in_the_model_stays_open() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, float[n, 4] z) => (float[m, 4] y) {
          a = Exp (x)
          b = Concat <axis = 0> (a, z)
          c = Exp (b)
          y = Floor (c)
        }
        """
    )
    (info,) = fuse(model, ["c"]).model.graph.value_info
    assert [size.WhichOneof("value") for size in info.type.tensor_type.shape.dim] == [None, "dim_value"]


def test_value_info_follows_the_values() -> None:
    model = chain()
    fused = fuse(model, ["a", "b", "c"]).model
    assert [info.name for info in model.graph.value_info] == ["a"]
    assert [info.name for info in fused.graph.value_info] == ["c"]
    kept = fuse(model, ["b", "c"]).model
    assert [info.name for info in kept.graph.value_info] == ["a", "c"]


def test_constants_leave_only_where_nothing_reads_them() -> None:
    model = chain()
    model.graph.node.append(helper.make_node("Mul", ["y", "two"], ["y2"]))
    model.graph.output.append(helper.make_tensor_value_info("y2", TensorProto.FLOAT, ["batch", 4]))
    fused = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    assert [tensor.name for tensor in fused.graph.initializer] == ["two", "eye"]
    annotated = chain()
    annotation = annotated.graph.quantization_annotation.add(tensor_name="c")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="two")
    assert [t.name for t in fuse(annotated, ["a", "b", "c"]).model.graph.initializer] == ["two", "w", "eye"]


def test_constant_nodes_are_inlined_too() -> None:
    text = CHAIN.replace("float two = {2.0}, ", "").replace(
        "a = Add (x, z)", "two = Constant <value = float {2.0}> ()\n  a = Add (x, z)"
    )
    model = parse(text, eye=np.eye(4, dtype=np.float32))
    fused = fuse(model, ["a", "b", "c"]).model
    assert [node.op_type for node in fused.graph.node] == ["Region0", "MatMul", "Mul", "Tanh"]
    body = fused.functions[0].node
    assert [node.op_type for node in body] == ["Constant", "Add", "Mul", "Relu"]
    assert numpy_helper.to_array(body[0].attribute[0].t) == np.float32(2)
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_constant_nodes_of_a_region_may_have_other_readers() -> None:
    text = CHAIN.replace("float two = {2.0}, ", "").replace(
        "a = Add (x, z)", "two = Constant <value = float {2.0}> ()\n  a = Add (x, z)"
    )
    model = parse(text.replace("(d, w)", "(d, two)"), eye=np.eye(4, dtype=np.float32))
    graph = load_graph(model)
    first = region(graph, "two", "a", "b", "c", outputs=(graph.values["c"],))
    fused = rewrite(model, graph, [first]).model
    assert [node.op_type for node in fused.graph.node] == ["Constant", "Region0", "MatMul", "Mul", "Tanh"]
    both = rewrite(model, graph, [first, region(graph, "e", "y")]).model
    assert [node.op_type for node in both.graph.node] == ["Region0", "MatMul", "Region1"]
    feeds = random_feeds(model)
    for either in (fused, both):
        assert same_bits(run(model, feeds), run(either, feeds))
        assert unfuse(either) == model


def test_the_order_stays_topological() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (float[n] y, float[n] w) {
          a = Exp (x)
          p = MatMul (a, x)
          q = Tanh (x)
          b = Mul (a, q)
          y = Add (b, p)
          w = Neg (b)
        }
        """
    )
    fused = fuse(model, ["a", "b"]).model
    assert [node.op_type for node in fused.graph.node] == ["Tanh", "Region0", "MatMul", "Add", "Neg"]
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


def branching() -> onnx.ModelProto:
    """A value that both branches of an If, and a Loop inside one of them, capture."""
    inner = onnx.parser.parse_graph(
        "body (int64 i, bool go, float[n] s) => (bool go2, float[n] s2) { go2 = Identity (go) s2 = Add (s, b) }"
    )
    then = onnx.parser.parse_graph("then () => (float[n] r) { r = Neg (b) }")
    other = onnx.parser.parse_graph("other () => (float[n] t) { three = Constant <value = int64 {3}> () }")
    other.node.append(helper.make_node("Loop", ["three", "", "x"], ["t"], body=inner))
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x, bool flag) => (float[n] y) {
          a = Exp (x)
          b = Tanh (a)
          c = Floor (b)
          y = Add (c, c)
        }
        """
    )
    model.graph.node[3].input[1] = "k"
    model.graph.node.insert(3, helper.make_node("If", ["flag"], ["k"], then_branch=then, else_branch=other, name="if"))
    return model


@pytest.mark.parametrize("flag", [True, False])
def test_captured_values_stay(flag: bool) -> None:
    model = branching()
    fused = fuse(model, ["a", "b", "c"]).model
    assert list(fused_nodes(fused)[0].output) == ["b", "c"]
    feeds = {"x": np.linspace(-2, 2, 5, dtype=np.float32), "flag": np.array(flag)}
    assert same_bits(run(model, feeds), run(fused, feeds))


def test_a_captured_value_must_not_vanish() -> None:
    model = branching()
    graph = load_graph(model)
    with pytest.raises(InvariantError, match=r"^region 0 \(test\): 'b' vanishes and nodes \['if'\] read it$"):
        rewrite(model, graph, [region(graph, "a", "b", "c", outputs=(graph.values["c"],))])


def test_what_the_user_put_in_survives() -> None:
    model = chain()
    function = '<opset_import: ["" : 17], domain: "mine"> f (u) => (v) { v = Exp (u) }'
    model.functions.append(onnx.parser.parse_function(function))
    model.opset_import.add(domain="mine", version=3)
    model.opset_import.add(domain="unknown.domain", version=2)
    model.graph.node.append(helper.make_node("f", ["y"], ["v"], domain="mine", doc_string="theirs"))
    model.graph.output.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, ["batch", 4]))
    model.metadata_props.add(key="author", value="somebody")
    model.graph.metadata_props.add(key="of", value="the graph")
    model.graph.node[3].metadata_props.add(key="of", value="the product")
    model.graph.doc_string = "the graph"
    model.graph.quantization_annotation.add(tensor_name="d")
    model.training_info.add().algorithm.name = "training"
    model.domain, model.model_version = "org.example", 7
    fused = fuse(model, ["a", "b", "c"]).model
    for name in ("producer_name", "doc_string", "domain", "model_version", "training_info"):
        assert getattr(fused, name) == getattr(model, name), name
    for name in ("name", "doc_string", "input", "output", "metadata_props", "quantization_annotation"):
        assert getattr(fused.graph, name) == getattr(model.graph, name), name
    assert [entry.key for entry in fused.metadata_props] == ["author", "onnxfuse", "onnxfuse.optimised"]
    assert list(fused.graph.node[1:]) == list(model.graph.node[3:])
    assert fused.functions[0] == model.functions[0]
    assert [entry.domain for entry in fused.opset_import] == ["", "mine", "unknown.domain", "onnxfuse"]


def test_initialisers_among_the_inputs_of_an_old_model() -> None:
    model = chain()
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("eye", TensorProto.FLOAT, [4, 4]))
    model.graph.input.append(helper.make_tensor_value_info("two", TensorProto.FLOAT, []))
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    fused = fuse(model, ["a", "b", "c"]).model
    assert fused.ir_version == 8
    assert [info.name for info in fused.graph.input] == ["x", "z"]
    feeds = random_feeds(model)
    assert same_bits(run(model, feeds), run(fused, feeds))


@pytest.mark.parametrize(("before", "after"), [(4, 8), (7, 8), (8, 8), (10, 10)])
def test_ir_version_rises_as_far_as_functions_need(before: int, after: int) -> None:
    model = chain()
    model.ir_version = before
    assert fuse(model, ["a", "b"]).model.ir_version == after


def test_nothing_to_fuse_changes_nothing() -> None:
    model = chain()
    model.ir_version = 4
    assert fuse(model).model == model
    fused = fuse(model, ["a", "b"]).model
    assert fuse(fused).model == fused


def test_names_continue_after_those_in_the_model() -> None:
    model = chain()
    once = fuse(model, ["a", "b", "c"]).model
    twice = fuse(once, ["e", "y"]).model
    assert [node.op_type for node in fused_nodes(twice)] == ["Region0", "Region1"]
    at_once = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    assert [function.name for function in twice.functions] == [function.name for function in at_once.functions]
    layers = parse(TWO_LAYERS)
    shared = fuse(fuse(layers, ["a", "b"]).model, ["d", "e"]).model
    assert [node.op_type for node in fused_nodes(shared)] == ["Region0", "Region0"]
    assert len(shared.functions) == 1


def test_running_out_of_names_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REGION_NAMES", 1)
    result = fuse(parse(TWO_LAYERS), ["a", "b"], ["g", "h"], ["d", "e"])
    assert [entry.region for entry in result.placed] == [0, 2]
    (refusal,) = result.refusals
    assert (refusal.code, refusal.node, refusal.rule) == ("region-names", "node_g", "test")
    assert refusal.message == "All 1 names for fused operators are taken by other kernels of this model."
    assert refusal.remedy == "Disable a rule that makes many different kernels with little gain."
    assert [node.op_type for node in result.model.graph.node][4:6] == ["Mul", "Relu"]


def test_two_runs_give_the_same_bytes() -> None:
    first, second = (fuse(chain(), ["a", "b", "c"], ["e", "y"]).model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_names_of_nodes_that_go_are_free() -> None:
    model = chain()
    model.graph.node[1].name = "node_a.test"
    assert fused_nodes(fuse(model, ["a", "b"]).model)[0].name == "node_a.test"
    assert fused_nodes(fuse(model, ["a"]).model)[0].name == "node_a.test_2"


def test_outputs_that_are_absent_have_no_name_in_a_body() -> None:
    model = parse("""
        <ir_version: 8, opset_import: ["" : 17]>
        norm (float[n, 4] x, float[4] w) => (float[n, 4] y, float[n, 1] d) {
          a, , b = LayerNormalization (x, w)
          y = Neg (a)
          d = Exp (b)
        }""")
    result = fuse(model, ["a", "y", "d"]).model
    assert [list(node.output) for node in result.functions[0].node] == [["t0", "", "t1"], ["y0"], ["y1"]]
    (record,) = (json.loads(entry.s) for entry in fused_nodes(result)[0].attribute if entry.name == "onnxfuse")
    assert {value["name"] for value in record["values"].values()} == {"a", "b"}
    assert unfuse(result) == model


def test_node_names_are_unique() -> None:
    model = parse(TWO_LAYERS)
    for node in model.graph.node:
        node.name = "same"
    names = [node.name for node in fused_nodes(fuse(model, ["a", "b"], ["d", "e"]).model)]
    assert names == ["same.test", "same.test_2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": ("x",)}, "region 0 (test): reads ['z'] that it does not list, lists [] that it does not read"),
        (
            {"tensors": ("x", "z", "d")},
            "region 0 (test): reads [] that it does not list, lists ['d'] that it does not read",
        ),
        ({"outputs": ("a",)}, "region 0 (test): 'b' vanishes and nodes ['node_c'] read it"),
        ({"outputs": ("b", "y")}, "region 0 (test): does not compute its outputs ['y']"),
        ({"outputs": ()}, "region 0 (test): the region has no output"),
        ({"tensors": ()}, "region 0 (test): the region has no tensor input"),
        ({"tensors": ("x", "x")}, "region 0 (test): a value stands twice among its tensor values: ['x', 'x']"),
        ({"tensors": ("x", "z", "two")}, "region 0 (test): inlines and reads ['two']"),
    ],
)
def test_broken_regions(changes: dict[str, tuple[str, ...]], message: str) -> None:
    model = chain()
    graph = load_graph(model)
    fields = {name: tuple(graph.values[entry] for entry in names) for name, names in changes.items()}
    with pytest.raises(InvariantError) as caught:
        rewrite(model, graph, [region(graph, "a", "b", **fields)])
    assert str(caught.value) == message


def test_regions_of_another_model() -> None:
    """Names agree, operators do not."""
    model = chain()
    graph = load_graph(chain())
    model.graph.node[1].op_type = "Sub"
    with pytest.raises(InvariantError, match=r"^region 0 \(test\): node 'node_b' is not in the model$"):
        rewrite(model, graph, [region(graph, "a", "b")])


def test_regions_must_be_disjoint() -> None:
    model = chain()
    graph = load_graph(model)
    with pytest.raises(InvariantError, match=r"^region 1 \(test\) and region 0 \(test\) share node 'node_b'$"):
        rewrite(model, graph, [region(graph, "a", "b"), region(graph, "b", "c")])


def test_regions_must_be_convex() -> None:
    model = chain()
    graph = load_graph(model)
    message = r"^no order of the nodes is possible: a cycle runs through region 0 \(test\), node 'node_d'$"
    with pytest.raises(InvariantError, match=message):
        rewrite(model, graph, [region(graph, "c", "e")])


def test_an_output_of_the_graph_must_not_vanish() -> None:
    model = chain()
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["batch", 4]))
    graph = load_graph(model)
    with pytest.raises(InvariantError, match=r"^region 0 \(test\): 'b' is an output of the graph and vanishes$"):
        rewrite(model, graph, [region(graph, "a", "b", "c", outputs=(graph.values["c"],))])
