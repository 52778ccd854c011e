"""Model files that are wrong each get one clear error; models that are right load with their data left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import body_models
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from reordered import rewritten

from onnxfuse import api
from onnxfuse.errors import ModelError
from onnxfuse.graph import from_proto, load_model
from onnxfuse.graph.load import LoadedModel, check
from onnxfuse.graph.order import in_order

NEWEST = onnx.defs.onnx_opset_version()


def model(nodes: list[onnx.NodeProto] | None = None, opset: int = 17, **more: object) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["y"], "relu")] if nodes is None else nodes
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, **more)  # type: ignore[arg-type]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def message_of(path: Path | onnx.ModelProto, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(ModelError) as caught:
        from_proto(path) if isinstance(path, onnx.ModelProto) else load_model(path)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    loaded = load_model(path)
    assert loaded.path == path and loaded.folder == tmp_path
    assert loaded.proto == model()


def test_a_model_in_memory_is_not_copied() -> None:
    proto = model()
    loaded = from_proto(proto)
    assert loaded.proto is proto and loaded.path is None and loaded.folder is None


EXPORT = "help: Give a file that onnx.save or an exporter wrote."


def _contents() -> dict[str, tuple[Callable[[], bytes], str, str]]:
    noise = random.Random(7)
    return {
        "random": (lambda: noise.randbytes(4000), "The file is no ONNX model.", EXPORT),
        "empty": (lambda: b"", "The file is empty.", EXPORT),
        "text": (
            lambda: onnx.printer.to_text(model()).encode(),
            "The file holds a model as text, not in ONNX's binary form.",
            "help: Convert it: onnx.save(onnx.parser.parse_model(open(path).read()), 'model.onnx').",
        ),
        "binary that names a field": (
            lambda: b"\x7fELF\0 ir_version" + bytes(60), "The file is no ONNX model.", EXPORT,
        ),
        "graph": (
            lambda: model().graph.SerializeToString(),
            "The file holds a graph (GraphProto) without the model around it.",
            "help: Wrap it: onnx.save(onnx.helper.make_model(graph), 'model.onnx').",
        ),
        "lfs": (
            lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
            "The file is a Git LFS pointer, not the model itself.", "help: Fetch it: git lfs pull.",
        ),
        "zip": (
            lambda: b"PK\x03\x04" + bytes(60), "The file is an archive (zip or PyTorch), not an ONNX model.",
            "help: Unpack it, or export the model with torch.onnx.export.",
        ),
        "ort": (
            lambda: b"\x1c\0\0\0ORTM" + bytes(60), "The file is in ONNX Runtime's ORT format.",
            "help: Give the .onnx file that it was made from.",
        ),
    }


@pytest.mark.parametrize("name", list(_contents()))
def test_a_file_that_is_no_model(tmp_path: Path, name: str) -> None:
    make, message, remedy = _contents()[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(make())
    assert message_of(path) == f"{message}\n--> {path}\n{remedy}"


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_never_get_past_the_door(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(random.Random(seed).randbytes(seed * 40))
    assert message_of(path).endswith(EXPORT)


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.onnx"
    assert message_of(path) == (
        f"There is no such file.\n--> {path}\nhelp: Check the path and the working directory."
    )


def test_a_folder(tmp_path: Path) -> None:
    assert message_of(tmp_path) == (
        f"A folder is no ONNX model.\n--> {tmp_path}\nhelp: Give the .onnx file inside it."
    )


def test_a_truncated_file_at_every_length(tmp_path: Path) -> None:
    """Whatever is missing at the end, the model is refused and the error is one line of sense."""
    whole = model(initializer=[numpy_helper.from_array(np.zeros(16, np.float32), "w")]).SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        beginnings = ("The file is cut short: ", "The model imports no version", "The file is no ONNX model.")
        assert message_of(path).startswith(beginnings)


@pytest.mark.parametrize("weights", [0, 16, 5000])
def test_a_truncated_file(tmp_path: Path, weights: int) -> None:
    """Lengths are of one, two and three bytes."""
    whole = model(initializer=[numpy_helper.from_array(np.zeros(weights, np.float32), "w")]).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(whole[:-20])
    end = len(whole) - len(helper.make_opsetid("", 17).SerializeToString()) - 2
    assert message_of(path) == (
        f"The file is cut short: its graph ends at byte {end}, and the file at {len(whole) - 20}.\n--> {path}\n"
        "help: Copy or download the file again, in full."
    )


def test_a_cycle(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "first"),
        helper.make_node("Add", ["a", "d"], ["b"], "second"),
        helper.make_node("Exp", ["b"], ["c"], "third"),
        helper.make_node("Neg", ["c"], ["d"], "fourth"),
        helper.make_node("Abs", ["d"], ["y"], "fifth"),
    ]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes).SerializeToString())
    assert message_of(path) == (
        "The graph has a cycle: 'second' -> 'third' -> 'fourth' -> 'second'.\n"
        f"--> {path}, node 'second'\nhelp: Export the model again."
    )


def test_a_cycle_of_one_node() -> None:
    assert message_of(model([helper.make_node("Add", ["x", "y"], ["y"])])) == (
        "The graph has a cycle: 'Add -> y' -> 'Add -> y'.\n--> node 'Add -> y'\nhelp: Export the model again."
    )


@pytest.mark.parametrize("body", [False, True])
def test_a_cycle_behind_nodes_that_only_stand_unsorted(body: bool) -> None:
    """No order is found for any node then; the message names those of the cycle."""
    nodes = [
        helper.make_node("Neg", ["k"], ["y"], "unsorted"), helper.make_node("Abs", ["x"], ["k"], "late"),
        helper.make_node("Add", ["x", "q"], ["p"], "there"), helper.make_node("Exp", ["p"], ["q"], "back"),
    ]
    if body:
        branch = helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("y", 1, [8])])
        nodes = [helper.make_node("Cast", ["x"], ["c"], to=9),
                 helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    assert message_of(model(nodes)) == (
        "The graph has a cycle: 'there' -> 'back' -> 'there'.\n--> node 'there'\nhelp: Export the model again."
    )


def test_a_model_that_was_not_sorted() -> None:
    """As onnxfuse's records may put it back."""
    nodes = [helper.make_node("Neg", ["a"], ["y"], "reader"), helper.make_node("Abs", ["x"], ["a"], "later")]
    with pytest.raises(ModelError, match="Node 'reader' reads 'a', which a later node computes"):
        check(LoadedModel(None, model(nodes), None))


def test_a_long_cycle_needs_no_deep_stack() -> None:
    count = 5000
    nodes = [helper.make_node("Add", ["x", f"v{count - 1}"], ["v0"], "n0")]
    nodes += [helper.make_node("Neg", [f"v{i - 1}"], [f"v{i}"], f"n{i}") for i in range(1, count)]
    assert message_of(model([*nodes, helper.make_node("Neg", ["v0"], ["y"])])).startswith(
        "The graph has a cycle: 'n0' -> 'n1' -> 'n2' -> 'n3' -> 'n4' -> 'n5' -> 'n6' -> 4992 more -> 'n4999' -> 'n0'."
    )


def test_nodes_out_of_order_are_sorted() -> None:
    """Each moves only behind what it reads; the model that was given stays as it is."""
    nodes = [
        helper.make_node("Neg", ["a"], ["b"], "late"), helper.make_node("Exp", ["x"], ["c"], "beside"),
        helper.make_node("Relu", ["x"], ["a"], "early"), helper.make_node("Add", ["b", "c"], ["y"], "last"),
    ]
    given = model(nodes)
    before = given.SerializeToString(deterministic=True)
    loaded = from_proto(given)
    assert [node.name for node in loaded.proto.graph.node] == ["beside", "early", "late", "last"]
    assert loaded.notes == (
        "Nodes of the main graph stood before others whose results they read; they are sorted.",
    )
    assert given.SerializeToString(deterministic=True) == before
    assert from_proto(loaded.proto).notes == () and from_proto(loaded.proto).proto is loaded.proto


def test_nodes_of_bodies_and_functions_are_sorted() -> None:
    """What a body captures may be computed after its owner; a name that it shares with the graph around is that one."""
    given = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
        g (float[4] x, bool c) => (float[4] y) {
            z = If (c) <
                then_branch = t () => (float[4] r) {
                    r = If (c) <
                        then_branch = tt () => (float[4] p) { p = Add(i, w) i = Neg(k) k = Abs(w) },
                        else_branch = te () => (float[4] q) { q = Abs(w) }
                    >
                },
                else_branch = e () => (float[4] s) { s = Neg(u) u = Exp(w) }
            >
            w = my.f(x)
            y = Relu(z)
        }
        <domain: "my", opset_import: ["" : 17]> f (a) => (b) { b = Tanh(d) d = Neg(a) }""")
    loaded = from_proto(given)
    assert len(loaded.notes) == 1 and loaded.notes[0].startswith(
        "Nodes of a body of 'If -> r', a body of 'If -> z', the main graph and function 'f' stood before others")
    onnx.checker.check_model(loaded.proto, full_check=True)
    assert [node.output[0] for node in loaded.proto.graph.node] == ["w", "z", "y"]
    assert onnxruntime.InferenceSession(loaded.proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_name_that_hides_one_of_the_graph_around_stays_where_it_is() -> None:
    """Sorted as it stands: the first node of the body reads the outer value, and its second defines its own."""
    inner = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["z"]), helper.make_node("Exp", ["z"], ["w"])], "b", [],
        [helper.make_tensor_value_info("w", 1, None)],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["w"]), helper.make_node("Cast", ["x"], ["c"], to=9),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    loaded = from_proto(model(nodes))
    assert loaded.notes == ()


def test_a_name_of_a_body_that_is_computed_later_around_is_told_apart() -> None:
    """Or fusing, which moves nodes, would hide it; nested bodies read the value that they did, and the answer stays."""
    given = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 17]>
        g (float[4] x, bool c) => (float[4] y, float[4] z) {
            first = Exp(x)
            r = If (c) <then_branch = t () => (float[4] w) {
                    w = Neg(x)
                    q = If (c) <then_branch = tt () => (float[4] s) { s = Abs(w) },
                                else_branch = te () => (float[4] s) { s = Tanh(w) }>
                }, else_branch = e () => (float[4] w) { w = Relu(first) }>
            w = Sin(r)
            y = Add(w, first)
            z = Add(w, r)
        }""")
    before = given.SerializeToString()
    loaded = from_proto(given)
    assert given.SerializeToString() == before
    assert len(loaded.notes) == 1 and "bodies of 'If -> r' were called as others" in loaded.notes[0]
    then, other = (attribute.g for attribute in loaded.proto.graph.node[1].attribute)
    if then.name == "e":
        then, other = other, then
    own = then.node[0].output[0]
    assert own == then.output[0].name != "w"
    assert [attribute.g.node[0].input[0] for attribute in then.node[1].attribute] == [own, own]
    assert other.node[0].output[0] == other.output[0].name != "w"
    again = from_proto(loaded.proto)
    assert again.notes == () and again.proto is loaded.proto
    made = api.optimize(given, target="H100", verify=False, database=False, least_gain=0.0)
    for condition in (True, False):
        inputs = {"x": np.linspace(-1, 1, 4, dtype=np.float32), "c": np.array(condition)}
        one, two = (onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, inputs) for each in (given, made.model))
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_other_results_of_a_body_keep_their_names() -> None:
    loaded = from_proto(onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 17]>
        g (float[4] x, bool c) => (float[4] w) {
            p, q = If (c) <then_branch = t () => (float[4] v, float[4] w) { v = Neg(x)  w = Abs(x) },
                           else_branch = e () => (float[4] v, float[4] u) { v = Exp(x)  u = Tanh(x) }>
            w = Add(p, q)
        }"""))
    results = {each.g.name: [value.name for value in each.g.output] for each in loaded.proto.graph.node[0].attribute}
    assert results == {"t": ["v", "w_2"], "e": ["v", "u"]}


@pytest.mark.parametrize("seed", range(4))
def test_files_in_any_order_are_optimised_as_when_sorted(seed: int, tmp_path: Path) -> None:
    """The saved model is valid and answers as the original does; its report tells that nodes were sorted."""
    original = body_models.nested()
    path = tmp_path / "model.onnx"
    shuffled = rewritten(original, seed, sort=False, rename=False).model
    onnx.save(shuffled, path)
    made = api.optimize(path, target="H100", verify=False, database=False)
    assert any("they are sorted" in note for note in made.optimised.notes)
    onnx.checker.check_model(made.model)
    sorted_again = api.unfuse(made.model)
    assert in_order(sorted_again) == (sorted_again, ())
    for inputs in body_models.feeds(original):
        one, other = (onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, inputs) for each in (original, made.model))
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_name_that_nothing_computes() -> None:
    assert message_of(model([helper.make_node("Neg", ["ghost"], ["y"], "neg")])) == (
        "Node 'neg' reads 'ghost', which nothing computes.\n--> node 'neg'\nhelp: Export the model again."
    )


def test_a_name_inside_a_subgraph_that_nothing_computes() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["ghost"], ["z"], "inner")], "b", [], [helper.make_tensor_value_info("z", 1, None)],
    )
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=9),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=branch, else_branch=branch),
    ]
    assert message_of(model(nodes)) == (
        "Node 'inner' reads 'ghost', which nothing computes.\n--> node 'inner'\nhelp: Export the model again."
    )


def test_a_name_defined_twice() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"], "one"), helper.make_node("Relu", ["x"], ["y"], "two")]
    assert message_of(model(nodes)) == (
        "The name 'y' is defined twice.\n--> node 'two'\nhelp: Export the model again."
    )


def attributed(kind: int) -> onnx.NodeProto:
    """A Softmax whose axis is of another type."""
    node = helper.make_node("Softmax", ["x"], ["y"], "it")
    node.attribute.add(name="axis", type=kind, f=1.0, s=b"1")
    return node


@pytest.mark.parametrize(("node", "message"), [
    (helper.make_node("MatMul", ["x"], ["y"], "it"), "The operator MatMul has 1 input here, and takes 2."),
    (helper.make_node("Relu", ["x", "x"], ["y"], "it"), "The operator Relu has 2 inputs here, and takes 1."),
    (helper.make_node("Clip", [], ["y"], "it"), "The operator Clip has 0 inputs here, and takes 1 to 3."),
    (helper.make_node("Concat", [], ["y"], "it", axis=0),
     "The operator Concat has 0 inputs here, and takes 1 or more."),
    (helper.make_node("Neg", ["x"], ["y", "z"], "it"), "The operator Neg has 2 outputs here, and takes 1."),
    (helper.make_node("Add", ["", "x"], ["y"], "it"), "The operator Add needs its input 0, which is left empty here."),
    (helper.make_node("Concat", ["x", "x"], ["y"], "it"),
     "The operator Concat needs the attribute 'axis', which is missing here."),
    (helper.make_node("Transpose", ["x"], ["y"], "it", perm=[0, 2]),
     "The operator Transpose takes every axis once as its attribute 'perm', which is [0, 2] here."),
    (helper.make_node("Transpose", ["x"], ["y"], "it", perm=[1, 1]),
     "The operator Transpose takes every axis once as its attribute 'perm', which is [1, 1] here."),
    (attributed(onnx.AttributeProto.FLOAT),
     "The operator Softmax takes INT as its attribute 'axis', which is FLOAT here."),
    (attributed(onnx.AttributeProto.STRING),
     "The operator Softmax takes INT as its attribute 'axis', which is STRING here."),
])
def test_an_operator_that_is_used_wrongly(node: onnx.NodeProto, message: str) -> None:
    """onnxfuse refuses what ONNX Runtime refuses too, in the main graph and in bodies."""
    proto = model([node])
    assert message_of(proto) == f"{message}\n--> node 'it'\nhelp: Export the model again."
    with pytest.raises(Exception, match=r"(?i)invalid|fail"):
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    branch = helper.make_graph([node], "b", [], [helper.make_tensor_value_info("y", 1, None)])
    condition = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    choice = helper.make_node("If", ["c"], ["result"], then_branch=branch, else_branch=branch)
    inside = model([condition, choice])
    inside.graph.output[0].name = "result"
    assert message_of(inside).startswith(message)


def test_operators_that_onnx_does_not_know_are_left_alone() -> None:
    nodes = [helper.make_node("Mine", [], ["y"], domain="my.domain"), helper.make_node("NoSuch", ["x"], ["z"])]
    proto = model(nodes)
    proto.opset_import.add(domain="my.domain", version=1)
    from_proto(proto)


def test_an_output_that_nothing_computes() -> None:
    assert message_of(model([helper.make_node("Neg", ["x"], ["z"])])) == (
        "The graph's output 'y' is computed by no node.\nhelp: Export the model again."
    )


def test_an_opset_that_is_too_new() -> None:
    assert message_of(model(opset=NEWEST + 1)) == (
        f"The model's opset is {NEWEST + 1}, and onnx {onnx.__version__} knows up to {NEWEST}.\n"
        "help: Install a newer onnx, or export the model with an older opset."
    )


def test_an_opset_that_is_too_old() -> None:
    assert message_of(model(opset=10)) == (
        "The model's opset is 10; onnxfuse works on 11 and newer.\n"
        "help: Convert the model: onnx.version_converter.convert_version(onnx.load(path), 17)."
    )


@pytest.mark.parametrize("opset", [11, NEWEST])
def test_the_oldest_and_the_newest_opset_load(opset: int) -> None:
    assert from_proto(model(opset=opset)).proto.opset_import[0].version == opset


def test_no_opset() -> None:
    proto = model()
    del proto.opset_import[:]
    assert message_of(proto) == (
        "The model imports no version of the standard operators.\n"
        "help: Export the model again, or add one: model.opset_import.add(domain='', version=17)."
    )


def test_two_opsets() -> None:
    proto = model()
    proto.opset_import.add(domain="ai.onnx", version=15)
    assert message_of(proto) == (
        "The model imports the standard operators in several versions: 15, 17.\n"
        "help: Keep one of them in model.opset_import."
    )


def test_no_ir_version() -> None:
    proto = model()
    proto.ClearField("ir_version")
    assert message_of(proto) == (
        "The model states no IR version.\nhelp: Set model.ir_version, or export the model again."
    )


def test_an_ir_version_that_is_too_new() -> None:
    proto = model()
    proto.ir_version = onnx.IR_VERSION + 1
    assert message_of(proto) == (
        f"The model's IR version is {onnx.IR_VERSION + 1}, and onnx {onnx.__version__} knows up to "
        f"{onnx.IR_VERSION}.\nhelp: Install a newer onnx: pip install -U onnx."
    )


def test_a_tensor_with_too_few_bytes() -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1000], raw_data=bytes(100))
    assert message_of(model(initializer=[weight])) == (
        "Tensor 'w' holds 100 bytes, and its type and sizes need 4000.\n--> tensor 'w'\n"
        "help: Export the model again."
    )


def test_an_unknown_element_type() -> None:
    weight = TensorProto(name="w", data_type=99, dims=[1], raw_data=bytes(4))
    assert message_of(model(initializer=[weight])) == (
        f"Tensor 'w' has an element type, 99, that onnx {onnx.__version__} does not know.\n--> tensor 'w'\n"
        "help: Install a newer onnx, or export the model again."
    )


def test_something_else_than_a_model() -> None:
    with pytest.raises(ModelError) as caught:
        from_proto(model().graph)
    assert str(caught.value) == (
        "An onnx.ModelProto is needed, and this is GraphProto.\n"
        "help: Give the path of an ONNX file or what onnx.load returns."
    )
