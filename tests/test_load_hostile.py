"""What else a model file may hold: names that are no text, functions that call themselves, records that somebody
changed, and what ends the process in the inference of onnx."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from plain_session import is_refused
from rewriting_models import chain, fuse, fused_nodes
from test_load import message_of, model
from test_load_weights import external

from onnxfuse import api
from onnxfuse.errors import ExternalDataError, ModelError
from onnxfuse.graph import from_proto
from onnxfuse.graph.inference import FOLLOWED
from onnxfuse.operators import infer, load_graph
from onnxfuse.rewriting import read_fused
from onnxfuse.rewriting.metadata import packed

AGAIN = "help: Fuse the original model again."


def calling(text: str) -> onnx.ModelProto:
    """A model that calls Mine of these functions."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "here" : 1]>\n'
        f"g (float[n, 4] x) => (float[n, 4] y) {{ y = here.Mine (x) }}\n{text}")


HEAD = '<domain: "here", opset_import: ["" : 17, "here" : 1]>'


@pytest.mark.parametrize(("text", "message"), [
    (f"{HEAD} Mine (a) => (b) {{ b = here.Yours (a) }}\n{HEAD} Yours (a) => (b) {{ b = here.Mine (a) }}",
     "Functions of the model call one another in a circle: 'Mine', 'Yours'."),
    (f"{HEAD} Mine (a) => (b) {{ b = here.Mine (a) }}",
     "Functions of the model call one another in a circle: 'Mine'."),
    (f"{HEAD} Mine (a) => (b) {{ b = Add (a, c) }}", "Node 'Add -> b' reads 'c', which nothing computes."),
    (f"{HEAD} Mine (a) => (b) {{ c = Neg (a) }}", "The graph's output 'b' is computed by no node."),
    (f"{HEAD} Mine (a) => (b) {{ b = Neg (a) b = Exp (a) }}", "The name 'b' is defined twice."),
    (f"{HEAD} Mine (a) => (b) {{ b = Neg (a) }}\n{HEAD} Mine (a) => (b) {{ b = Exp (a) }}",
     "The function 'Mine' has two inputs or outputs of one name, or stands twice."),
])
def test_functions_that_are_wrong(text: str, message: str) -> None:
    proto = calling(text)
    assert message_of(proto).startswith(message)
    assert is_refused(proto, "invalid|fail|recursion|cycle|circular|exist")


@pytest.mark.parametrize("name", ["relu", "x", "Relu", "a note", "key", "four", "weight"])
def test_text_that_is_none(name: str) -> None:
    """Names, operators, notes, sizes: whatever a text may stand in."""
    proto = model(initializer=[numpy_helper.from_array(onnx.numpy_helper.np.ones(1), "weight")])
    proto.graph.node[0].doc_string = "a note"
    proto.metadata_props.add(key="key", value="")
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "four"
    data = proto.SerializeToString().replace(name.encode(), b"\xff" * len(name))
    odd = onnx.ModelProto.FromString(data)
    assert message_of(odd) == (
        f"A name or a note in the model is no UTF-8 text: {bytes([255] * len(name))!r}.\n"
        "help: Rename it: write the model again with a tool that writes names as UTF-8.")


def twice(node: onnx.NodeProto) -> None:
    node.attribute.extend([helper.make_attribute("alpha", 0.5), helper.make_attribute("alpha", 0.25)])


def referring(node: onnx.NodeProto) -> None:
    node.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")


@pytest.mark.parametrize(("change", "message"), [
    (twice, "The operator LeakyRelu has the attribute 'alpha' twice here."),
    (referring,
     "The operator LeakyRelu takes its attribute 'alpha' from 'slope' of a function here, and stands in none."),
])
def test_attributes_that_are_wrong(change: Callable[[onnx.NodeProto], None], message: str) -> None:
    node = helper.make_node("LeakyRelu", ["x"], ["y"], "it")
    change(node)
    assert message_of(model([node])) == f"{message}\n--> node 'it'\nhelp: Export the model again."


@pytest.mark.parametrize(("node", "message"), [
    (helper.make_node("BiasGelu", ["x"], ["y"], "it", domain="com.microsoft"),
     "The operator BiasGelu has 1 input here, and takes 2."),
    (helper.make_node("MatMulNBits", ["x", "x", "x"], ["y"], "it", domain="com.microsoft", N=4, block_size=16),
     "The operator MatMulNBits needs the attribute 'K', which is missing here."),
    (helper.make_node("MultiHeadAttention", ["x"], ["y"], "it", domain="com.microsoft", num_heads=1.5),
     "The operator MultiHeadAttention takes INT as its attribute 'num_heads', which is FLOAT here."),
])
def test_the_runtimes_own_operators_have_signatures_too(node: onnx.NodeProto, message: str) -> None:
    proto = model([node])
    proto.opset_import.add(domain="com.microsoft", version=1)
    assert message_of(proto) == f"{message}\n--> node 'it'\nhelp: Export the model again."


def test_a_constant_of_another_attribute() -> None:
    """ONNX Runtime takes it in a graph, and not in the function of a fused node."""
    constant = helper.make_node("Constant", [], ["y"], "it", value_float=1.0)
    constant.attribute[0].name = "worth"
    assert message_of(model([constant])) == (
        "The operator Constant has one attribute, its value, and others here.\n"
        "--> node 'it'\nhelp: Export the model again.")


@pytest.mark.parametrize(("imports", "message"), [
    ('"" : 2', "The operator LayerNormalization is none of version 2, which its function imports."),
    ('"here" : 1', "The operator LayerNormalization stands in a function here that imports no version of the standard "
                   "operators."),
])
def test_a_function_that_imports_other_operators(imports: str, message: str) -> None:
    """ONNX Runtime ends the process over the first."""
    proto = calling(f'<domain: "here", opset_import: [{imports}]> Mine (a) => (b) {{ b = LayerNormalization (a, a) }}')
    assert message_of(proto) == (
        f"{message}\n--> function 'Mine', node 'LayerNormalization -> b'\nhelp: Export the model again.")


@pytest.mark.parametrize("version", [-1, 1 << 31, -(1 << 63)])
def test_a_version_that_cannot_be(version: int) -> None:
    proto = model()
    proto.opset_import.add(domain="mine", version=version)
    assert message_of(proto) == (
        f"The model imports version {version} of the operators of 'mine', and there can be no such version.\n"
        "help: Mend model.opset_import, or export the model again.")


def test_a_tensor_of_less_than_nothing() -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-1, 4])
    assert message_of(model([helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weight])) == (
        "Tensor 'w' has the sizes [-1, 4], of which one is below zero.\n--> tensor 'w'\nhelp: Export the model again.")


def test_a_tensor_of_more_than_a_file_can_have() -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 62], raw_data=bytes(256))
    assert message_of(model([helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weight])) == (
        "Tensor 'w' holds 256 bytes, and its type and sizes need 18446744073709551616.\n"
        "--> tensor 'w'\nhelp: Export the model again.")


@pytest.mark.parametrize(("location", "message"), [
    ("a\0b", r"Tensor 'w' keeps its data in 'a\x00b', which no file can be called."),
    ("loop", "The external data file 'loop' is missing."),
    ("x" * 300, f"The external data file '{'x' * 300}' is missing."),
    ("x/" * 3000, f"The external data file '{'x/' * 3000}' is missing."),
])
def test_external_data_at_no_place(location: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert message_of(external(tmp_path, location), ExternalDataError).startswith(f"{message}\n--> tensor 'w'\nhelp: ")


@pytest.mark.parametrize("nodes", [
    [helper.make_node("EyeLike", ["f"], ["e"])],
    [helper.make_node("Split", ["x"], ["e", "h"], axis=1, num_outputs=1)],
    [helper.make_node("GatherND", ["x", "i"], ["e"], batch_dims=-3)],
    [helper.make_node("Expand", ["x", "low"], ["w"]), helper.make_node("Slice", ["w", "i", "i"], ["e"])],
])
def test_what_the_inference_of_onnx_does_not_live_to_answer(nodes: list[onnx.NodeProto]) -> None:
    """Types are hints: where they cannot be asked for they stay unknown, and onnxfuse goes on."""
    proto = model([
        helper.make_node("NoSuch", ["x"], ["f"]), *nodes, helper.make_node("Mine", ["x"], ["y"], domain="here"),
    ], opset=18, initializer=[helper.make_tensor("i", TensorProto.INT64, [1], [1]),
                              helper.make_tensor("low", TensorProto.INT64, [2], [-5, -5])])
    proto.opset_import.add(domain="here", version=1)
    proto.functions.append(onnx.parser.parse_function(f"{HEAD} Mine (a) => (b) {{ b = Neg (a) }}"))
    graph = infer(load_graph(proto))
    assert graph.values["y"].dtype == TensorProto.FLOAT


VECTORS = {
    "weight": "float[4611686018427387904] w) => (float y) { y = Add (w, w)",
    "made": """float[1000000, 1000, 1000, 1000] w) => (float y) {
        s = Shape (w) p = ReduceProd <keepdims = 1> (s) f = Reshape (w, p) a = Concat <axis = -1> (f, f)
        i = Cast <to = 1> (a) b = Mul (i, i) c = Unsqueeze (b, p) d = Gather (i, p) y = Sub (d, b)""",
    "function": "float[1000000, 1000, 1000, 1000] w) => (float y) { y = here.Mine (w)",
    "sums": "float[2] w) => (float y) { s = Shape (w) c0 = Concat <axis = 0> (s, s) " + "".join(
        f"c{place + 1} = Concat <axis = 0> (c{place}, c{place}) " for place in range(40)) + " y = Neg (c40)",
    "composed": "float[4611686018427387904] w) => (float y) { y = MeanVarianceNormalization <axes = [0]> (w)",
}


def test_vectors_whose_numbers_onnx_would_follow_without_end(tmp_path: Path) -> None:
    """That takes all of the machine's memory, or ends the process: a process of its own is in order."""
    for name, text in VECTORS.items():
        proto = onnx.parser.parse_model(f"""
            <ir_version: 8, opset_import: ["" : 18, "here" : 1]> g ({text} z = here.Mine (w) }} {HEAD}
            Mine (a) => (b) {{ s = Shape (a) e = Expand (a, s) m = Constant <value_ints = [-1]> () f = Reshape (e, m)
                               h = Concat <axis = 0> (f, f) c = Cast <to = 1> (h) q = Squeeze (c) b = Add (q, q) }}""")
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        onnx.save(proto, tmp_path / f"{name}.onnx")
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33));"
            "from onnxfuse.operators import load_graph; [load_graph(path) for path in sys.argv[1:]]")
    subprocess.run([sys.executable, "-c", code, *tmp_path.iterdir()], check=True, timeout=60)


def test_sizes_that_a_function_computes_are_known() -> None:
    """Although it reads weights and vectors of unknown length as well."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18, "here" : 1]>
        g (float[n, s, 768] x, float[m] w) => (float[a, b, c, d] y) {{ y = here.Mine (x, w) }} {HEAD}
        Mine (a, w) => (b) {{
            s = Shape (a) zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()
            n = Gather (s, zero) l = Gather (s, one) rest = Constant <value_ints = [12, 64]> ()
            t = Concat <axis = 0> (n, l, rest) h = Cast <to = 1> (a) k = Mul (h, w) r = Reshape (k, t)
            b = Transpose <perm = [0, 2, 1, 3]> (r) }}""")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert [str(size) for size in infer(load_graph(proto)).values["y"].shape or ()] == ["n", "12", "s", "64"]


@pytest.mark.skipif(not hasattr(onnx.defs.OpSchema, "has_data_propagation_function"), reason="an older onnx")
def test_all_operators_that_onnx_follows_numbers_through_are_known() -> None:
    found = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.has_data_propagation_function}
    assert found == FOLLOWED | {"Shape", "Size", "Slice"}


def recorded(change: Callable[[dict[str, object]], object]) -> onnx.ModelProto:
    """A fused model whose record was changed."""
    fused = fuse(chain(), ["a", "b", "c"]).model
    entry = next(entry for entry in fused_nodes(fused)[0].attribute if entry.name == "onnxfuse")
    record = json.loads(entry.s)
    change(record)
    entry.s = json.dumps(record).encode()
    return fused


@pytest.mark.parametrize(("change", "detail"), [
    (lambda record: record.pop("rule"), "FusedRecord has lost its field 'rule'"),
    (lambda record: record["nodes"][0].update(position="x"), "FusedRecord.nodes[0].position is 'x'"),
    (lambda record: record["nodes"][0].update(position=-1), "FusedRecord.nodes[0].position is -1"),
    (lambda record: record["nodes"][0].update(position=True), "FusedRecord.nodes[0].position is True"),
    (lambda record: record["nodes"].append(3), "FusedRecord.nodes[3] is 3"),
    (lambda record: record.update(nodes={}), "FusedRecord.nodes is {}"),
    (lambda record: record.update(values=[]), "FusedRecord.values is []"),
    (lambda record: record["types"]["x0"].pop(), "FusedRecord.types['x0'] is ['FLOAT']"),
    (lambda record: record.update(rule="\ud800"), r"FusedRecord.rule is '\ud800'"),
    (lambda record: record["nodes"].extend([{}, {}]), "it does not fit the function that the node calls"),
    (lambda record: record["constants"].clear(), "it does not fit the function that the node calls"),
    (lambda record: record["constants"]["c0"].update(tensor="!"), "Only base64 data is allowed"),
    (lambda record: record["constants"]["c0"].update(tensor="////"), "Error parsing message"),
])
def test_records_that_somebody_changed(change: Callable[[dict[str, object]], object], detail: str) -> None:
    with pytest.raises(ModelError) as caught:
        api.unfuse(recorded(change))
    text, wrong = str(caught.value), "The record that onnxfuse left in the model cannot be read: "
    assert text.startswith((f"{wrong}{detail}", f"{wrong}Error parsing message"))
    assert text.endswith(AGAIN)


def test_what_records_put_back_is_checked() -> None:
    """Names in a record may be those of other values."""
    def rename(record: dict[str, object]) -> None:
        record["values"] = {formal: {"name": "x"} for formal in record["values"]}  # type: ignore[attr-defined]

    fused = recorded(rename)
    names = [name for node in api.unfuse(fused).graph.node for name in node.output]
    assert len(set(names)) == len(names) and "x" not in names
    entry = next(entry for entry in fused.metadata_props if entry.key == "onnxfuse")
    constant = packed(helper.make_node("Neg", ["nothing"], ["q"], "it"))
    entry.value = json.dumps({**json.loads(entry.value), "idle": [{"name": "q", "position": 0, "node": constant}]})
    with pytest.raises(ModelError) as caught:
        api.unfuse(fused)
    assert str(caught.value) == (
        "What onnxfuse's records in the model put back is no model: "
        "Node 'it' reads 'nothing', which nothing computes.\n"
        f"--> node 'it'\n{AGAIN}")


@pytest.mark.parametrize("change", [
    lambda plan: plan.update(symbols="s"), lambda plan: plan.update(inputs=True), lambda plan: plan.update(checks=3),
    lambda plan: plan["outputs"][0].update(shape=[3]), lambda plan: plan["outputs"][0].update(dtype=-1),
    lambda plan: plan["variants"][0].update(steps=[{}]), lambda plan: plan.update(options=[None]),
])
def test_launch_plans_that_somebody_changed(change: Callable[[dict[str, object]], object]) -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    entry = next(entry for entry in fused_nodes(fused)[0].attribute if entry.name == "plan")
    plan = json.loads(entry.s)
    change(plan)
    entry.s = json.dumps(plan).encode()
    with pytest.raises(ModelError) as caught:
        read_fused(fused)
    assert str(caught.value).startswith("The launch plan of a fused node cannot be read: not a launch plan: ")
    assert str(caught.value).endswith(AGAIN)
    infer(load_graph(fused))


def test_a_domain_that_is_spelled_out_comes_back() -> None:
    """ONNX Runtime takes "ai.onnx" for "" in a graph, and not in a function."""
    proto = chain()
    for node in proto.graph.node[:3]:
        node.domain = "ai.onnx"
    for key in ("twice", "twice"):
        proto.graph.node[0].metadata_props.add(key=key)
    fused = fuse(proto, ["a", "b", "c"]).model
    onnxruntime.InferenceSession(fused.SerializeToString(), providers=["CPUExecutionProvider"])
    assert api.unfuse(fused).SerializeToString(deterministic=True) == proto.SerializeToString(deterministic=True)


def test_functions_of_an_old_model_stay_in_an_old_model() -> None:
    proto = chain()
    proto.ir_version = 7  # functions came with 8, and ONNX Runtime takes them
    proto.functions.append(onnx.parser.parse_function(f"{HEAD} Mine (a) => (b) {{ b = Neg (a) }}"))
    fused = fuse(proto, ["a", "b", "c"]).model
    assert fused.ir_version == 8
    assert api.unfuse(fused).SerializeToString(deterministic=True) == proto.SerializeToString(deterministic=True)
    assert from_proto(fused)


def owner(op: str, inputs: int, outputs: int, border: tuple[int, int], **attributes: object) -> onnx.NodeProto:
    """A Loop or a Scan with a body of so many inputs and outputs."""
    names = [f"i{number}" for number in range(border[0])]
    body = helper.make_graph(
        [helper.make_node("Identity", [names[0] if names else "x"], [f"o{number}"]) for number in range(border[1])],
        "body", [helper.make_tensor_value_info(name, 1, None) for name in names],
        [helper.make_tensor_value_info(f"o{number}", 1, None) for number in range(border[1])])
    return helper.make_node(op, ["x"] * inputs, ["y", *(f"z{number}" for number in range(outputs - 1))], "it",
                            body=body, **attributes)


@pytest.mark.parametrize(("node", "message"), [
    (owner("Loop", 3, 1, (1, 2)), "has 3 inputs and 1 outputs here, and its body 1 and 2."),
    (owner("Loop", 3, 1, (3, 0)), "has 3 inputs and 1 outputs here, and its body 3 and 0."),
    (owner("Scan", 2, 1, (3, 1), num_scan_inputs=1), "has 2 inputs and 1 outputs here, and its body 3 and 1."),
    (owner("Scan", 2, 1, (2, 1), num_scan_inputs=3),
     "has 2 inputs here, and 3 of them to take slice by slice."),
    (owner("Scan", 2, 1, (2, 1), num_scan_inputs=-1),
     "has 2 inputs here, and -1 of them to take slice by slice."),
    (owner("Scan", 2, 1, (2, 1), num_scan_inputs=1, scan_input_axes=[0, 0]),
     "takes 1 numbers as its attribute 'scan_input_axes', which has 2 here."),
])
def test_bodies_that_do_not_fit_their_node(node: onnx.NodeProto, message: str) -> None:
    proto = model([node])
    assert message_of(proto) == f"The operator {node.op_type} {message}\n--> node 'it'\nhelp: Export the model again."
    assert is_refused(proto, "invalid|fail|exception")
