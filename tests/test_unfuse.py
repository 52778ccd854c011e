"""The way back from a fused model, and what is read from one."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from rewriting_models import (
    CHAIN,
    PLAN,
    SOURCE,
    chain,
    fuse,
    fused_nodes,
    parse,
    random_feeds,
    region_of,
    run,
    same_bits,
)

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph
from onnxfuse.operators import load_graph
from onnxfuse.region import Region
from onnxfuse.rewriting import InvariantError, read_fused, rewrite, unfuse


def packed(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def odd() -> onnx.ModelProto:
    """A chain with every kind of note on its nodes, values and constants."""
    more = "one = Constant <value = float {1.0}> ()\n  o = Add (x, one)\n  a = Add (o, z)"
    model = parse(CHAIN.replace("a = Add (x, z)", more), eye=np.eye(4, dtype=np.float32))
    graph = model.graph
    for place, node in enumerate(graph.node):
        node.doc_string = f"note {place}"
        node.metadata_props.add(key="place", value=str(place))
    graph.node[0].attribute[0].t.name = "the name of one"
    graph.node[4].ClearField("name")
    graph.node[4].ClearField("doc_string")
    graph.node[3].name = ""
    graph.node[3].doc_string = ""
    device = graph.node[2].device_configurations.add(configuration_id="two devices")
    device.pipeline_stage = 3
    graph.value_info[0].doc_string = "a sum"
    graph.value_info[0].metadata_props.add(key="kind", value="sum")
    for name in ("b", "two", "y_unused"):
        shape = [] if name == "two" else ["batch", 4]
        graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    two = next(tensor for tensor in graph.initializer if tensor.name == "two")
    two.doc_string = "a factor"
    two.metadata_props.add(key="kind", value="factor")
    model.metadata_props.add(key="author", value="somebody")
    return model


@pytest.mark.parametrize("make", [chain, odd])
def test_the_original_comes_back_byte_for_byte(make: object) -> None:
    model = make()  # type: ignore[operator]
    names = {node.output[0] for node in model.graph.node}
    first = [name for name in ("o", "a", "b", "c") if name in names]
    graph = load_graph(model)
    regions = [region_of(graph, [graph.values[name].producer for name in group]) for group in (first, ["e", "y"])]
    fused = rewrite(model, graph, regions).model
    assert len(fused_nodes(fused)) == 2
    assert packed(unfuse(fused)) == packed(model)


def test_a_plain_model_comes_back_unchanged() -> None:
    assert unfuse(chain()) == chain()


def test_an_old_ir_version_comes_back_with_its_inputs() -> None:
    model = chain()
    model.ir_version = 3
    for name, shape in (("eye", [4, 4]), ("two", []), ("w", [4])):
        model.graph.input.insert(1, helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    assert packed(unfuse(fuse(model, ["a", "b", "c"], ["e", "y"]).model)) == packed(model)


def test_an_edited_old_model_keeps_its_edits() -> None:
    """An IR version that was raised since, and an input where a constant was."""
    model = chain()
    model.ir_version = 3
    declared = helper.make_tensor_value_info("eye", TensorProto.FLOAT, [4, 4])
    model.graph.input.append(declared)
    fused = fuse(model, ["a", "b", "c"]).model
    raised = onnx.ModelProto()
    raised.CopyFrom(fused)
    raised.ir_version = 9
    assert unfuse(raised).ir_version == 9
    (place,) = (place for place, tensor in enumerate(fused.graph.initializer) if tensor.name == "eye")
    del fused.graph.initializer[place]
    fused.graph.input.append(declared)
    assert [info.name for info in unfuse(fused).graph.input] == ["x", "z", "eye"]


@pytest.mark.parametrize("version", [3, 7, 8, 9, 10])
@pytest.mark.parametrize("before", [3, 7, 10])
@pytest.mark.parametrize("added", [False, True])
def test_an_ir_version_changed_between_two_goes(version: int, before: int, added: bool) -> None:
    """What the first go gives back then, the second gives back as well."""
    model = chain()
    model.ir_version = before
    model.graph.input.append(helper.make_tensor_value_info("eye", TensorProto.FLOAT, [4, 4]))
    once = fuse(model, ["e", "y"]).model
    once.ir_version = version
    if added:
        once.functions.add(name="mine", domain="mine")
    twice = fuse(once, ["a", "b"]).model
    assert len(fused_nodes(twice)) == 2
    assert packed(unfuse(twice)) == packed(unfuse(once))


def test_fused_in_two_goes() -> None:
    model = odd()
    twice = fuse(fuse(model, ["e", "y"]).model, ["o", "a", "b", "c"]).model
    assert len(fused_nodes(twice)) == 2
    assert packed(unfuse(twice)) == packed(model)


@pytest.mark.parametrize("make", [chain, odd])
@pytest.mark.parametrize("first", [0, 1])
def test_one_fused_node_is_put_back_and_then_the_other(make: object, first: int) -> None:
    model = make()  # type: ignore[operator]
    computed = {node.output[0] for node in model.graph.node}
    fused = fuse(model, [name for name in ("o", "a", "b", "c") if name in computed], ["e", "y"]).model
    names = [node.name for node in fused_nodes(fused)]
    part = unfuse(fused, [names[first]])
    onnx.checker.check_model(part, full_check=True)
    assert [node.name for node in fused_nodes(part)] == [names[1 - first]]
    assert {function.name for function in part.functions} == {fused_nodes(part)[0].op_type}
    feeds = random_feeds(model)
    assert same_bits(run(part, feeds), run(model, feeds))  # float32, no tolerance
    assert packed(unfuse(part, [names[1 - first]])) == packed(unfuse(part)) == packed(model)


def test_nothing_chosen_changes_nothing() -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    assert packed(unfuse(fused, [])) == packed(fused)


def test_an_unknown_fused_node() -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    for name, remedy in (("node_a.tst", "Did you mean 'node_a.test'?"),
                         ("???", "`onnxfuse report FILE --json` lists the fused nodes.")):
        with pytest.raises(ModelError) as caught:
            unfuse(fused, [name])
        assert str(caught.value) == f"No fused node is called {name!r}.\nhelp: {remedy}"


def two_and_one() -> onnx.ModelProto:
    """A chain whose two pieces share a constant."""
    text = CHAIN.replace("float[4] w = {1.0, 2.0, 3.0, 4.0}, ", "").replace("(d, w)", "(d, two)")
    return parse(text, eye=np.eye(4, dtype=np.float32))


@pytest.mark.parametrize("first", [0, 1])
def test_a_constant_of_a_body_that_stays_comes_back_too(first: int) -> None:
    model = two_and_one()
    model.graph.value_info.append(helper.make_tensor_value_info("two", TensorProto.FLOAT, []))
    fused = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    part = unfuse(fused, [fused_nodes(fused)[first].name])
    assert [tensor.name for tensor in part.graph.initializer] == ["two", "eye"]
    onnx.checker.check_model(part, full_check=True)
    assert packed(unfuse(part)) == packed(model)


def test_a_constant_that_two_bodies_hold_comes_back_once() -> None:
    model = two_and_one()
    in_one = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    in_two = fuse(fuse(model, ["a", "b", "c"]).model, ["e", "y"]).model
    for fused in (in_one, in_two):
        assert [tensor.name for tensor in fused.graph.initializer] == ["eye"]
        assert packed(unfuse(fused)) == packed(model)


def test_other_functions_and_imports_stay() -> None:
    model = chain()
    model.opset_import.add(domain="onnxfuse", version=1)  # theirs, and so is the function
    model.functions.append(
        onnx.parser.parse_function('<opset_import: ["" : 17], domain: "onnxfuse"> Mine (u) => (v) { v = Exp (u) }')
    )
    model.graph.node.append(helper.make_node("Mine", ["y"], ["v"], domain="onnxfuse"))
    model.graph.output.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, ["batch", 4]))
    fused = fuse(model, ["a", "b", "c"]).model
    assert [function.name for function in fused.functions] == ["Mine", "Region0"]
    assert packed(unfuse(fused)) == packed(model)


def test_a_stripped_record_leaves_the_computation() -> None:
    model = odd()
    fused = fuse(model, ["o", "a", "b", "c"], ["e", "y"]).model
    feeds = random_feeds(model)
    expected = run(model, feeds)
    for node in fused_nodes(fused):
        kept = [entry for entry in node.attribute if entry.name != "onnxfuse"]
        del node.attribute[:]
        node.attribute.extend(kept)
    del fused.metadata_props[:]
    back = unfuse(fused)
    onnx.checker.check_model(back, full_check=True)
    assert not fused_nodes(back) and not back.functions
    assert [entry.domain for entry in back.opset_import] == [""]
    assert same_bits(run(back, feeds), expected)


def test_edits_made_since_are_kept() -> None:
    model = chain()
    fused = fuse(model, ["a", "b", "c"], ["e", "y"]).model
    fused.graph.output[0].name = "result"
    fused_nodes(fused)[1].output[0] = "result"
    fused.graph.node.insert(1, helper.make_node("Neg", ["c"], ["b"], name="node_b"))  # names of the original, taken
    fused.graph.node[2].input[0] = "b"
    feeds = random_feeds(model)
    back = unfuse(fused)
    onnx.checker.check_model(back, full_check=True)
    assert [info.name for info in back.graph.output] == ["result"]
    assert [(node.name, list(node.output)) for node in back.graph.node] == [
        ("node_a", ["a"]), ("node_b_2", ["b_2"]), ("node_c", ["c"]), ("node_b", ["b"]),
        ("node_d", ["d"]), ("node_e", ["e"]), ("node_y", ["result"]),
    ]
    assert same_bits(run(back, feeds), run(fused, feeds))


def test_names_that_several_nodes_have_come_back() -> None:
    """ONNX wants names of nodes to be unique, and ONNX Runtime takes them as they come."""
    model = chain()
    for node in model.graph.node:
        node.name = "layer"
    assert packed(unfuse(fuse(model, ["a", "b", "c"], ["e", "y"]).model)) == packed(model)
    assert packed(unfuse(fuse(model, ["b", "c"]).model)) == packed(model)


def test_another_constant_under_the_old_name_is_kept_apart() -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    fused.graph.initializer.append(numpy_helper.from_array(np.float32(5), "two"))
    fused.graph.node.append(helper.make_node("Mul", ["y", "two"], ["z5"]))
    fused.graph.output.append(helper.make_tensor_value_info("z5", TensorProto.FLOAT, ["batch", 4]))
    back = unfuse(fused)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in back.graph.initializer}
    assert held["two"] == 5 and held["two_2"] == 2
    feeds = random_feeds(fused)
    assert same_bits(run(back, feeds), run(fused, feeds))


def _rewritten_record(change: dict[str, object]) -> onnx.ModelProto:
    fused = fuse(chain(), ["a", "b", "c"]).model
    for entry in fused_nodes(fused)[0].attribute:
        if entry.name == "onnxfuse":
            entry.s = json.dumps({**json.loads(entry.s), **change}).encode()
    return fused


def test_a_record_of_another_release() -> None:
    with pytest.raises(ModelError) as caught:
        unfuse(_rewritten_record({"version": 2}))
    assert str(caught.value) == (
        "The model was fused by another release of onnxfuse (its records have version 2, this one reads 1).\n"
        "--> node 'node_a.test'\n"
        "help: Use the release that fused the model, or fuse the original again."
    )


def test_a_damaged_record() -> None:
    with pytest.raises(ModelError) as caught:
        read_fused(_rewritten_record({"nodes": [{"nom": "a"}]}))
    assert str(caught.value).startswith(
        "The record that onnxfuse left in the model cannot be read: FusedRecord.nodes[0] has no field 'nom'.")
    assert caught.value.place == "node 'node_a.test'"
    assert caught.value.remedy == "Fuse the original model again."


def test_what_a_file_holds() -> None:
    model = chain()
    fused = fuse(model, ["a", "b", "c"], ["e", "y"], images={"sm_90": b"1", "sm_80": b"2"}).model
    first, second = read_fused(fused)
    assert (first.name, first.op, first.rule, first.schedule) == ("node_a.test", "Region0", "test", "pointwise")
    assert first.figures["memory_saved"] == 64 and first.figures["estimated_speedup"] == 3.0
    assert [record.name for record in first.replaces] == ["node_a", "node_b", "node_c"]
    assert [record.position for record in second.replaces] == [4, 5]
    assert (first.hosts, first.tensors, first.outputs) == ((), ("x", "z"), ("c",))
    assert first.types == dict.fromkeys(["x0", "x1", "y0"], ("FLOAT", ("batch", "4")))
    assert first.plan == PLAN
    assert first.source == SOURCE
    assert first.architectures == ("sm_80", "sm_90")
    assert read_fused(model) == ()


def test_a_damaged_plan() -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    next(entry for entry in fused_nodes(fused)[0].attribute if entry.name == "plan").s = b'{"version":1}'
    with pytest.raises(ModelError) as caught:
        read_fused(fused)
    assert str(caught.value) == (
        "The launch plan of a fused node cannot be read: not a launch plan: 'region'.\n"
        "--> node 'node_a.test'\n"
        "help: Fuse the original model again."
    )


def random_model(rng: random.Random) -> onnx.ModelProto:
    """Pointwise nodes on random earlier values, with constants of both kinds, in a random topological order."""
    names = ["x", "z"]
    nodes: list[onnx.NodeProto] = []
    initializers = []
    for number in range(rng.randint(2, 24)):
        operation = rng.choice(["Add", "Mul", "Sub", "Tanh", "Neg", "Scale", "Shift", "Exp"])
        output = f"v{number}"
        if operation == "Scale":
            if not initializers or rng.random() < 0.5:
                initializers.append(numpy_helper.from_array(np.float32(rng.randint(1, 3)), f"k{number}"))
            inputs, operation = [rng.choice(names), rng.choice(initializers).name], "Mul"
        elif operation == "Shift":
            contents = numpy_helper.from_array(np.float32(rng.randint(1, 3)))
            nodes.append(helper.make_node("Constant", [], [f"s{number}"], value=contents, name=f"S{number}"))
            inputs, operation = [rng.choice(names), f"s{number}"], "Add"
        else:
            inputs = rng.choices(names, k=2 if operation in ("Add", "Mul", "Sub") else 1)
        nodes.append(helper.make_node(operation, inputs, [output], name=rng.choice(["", f"N{number}", f"M{number}"])))
        names.append(output)
    used = {name for node in nodes for name in node.input}
    outputs = [name for name in names[2:] if name not in used or rng.random() < 0.1]
    infos = [name for name in names[2:] if name not in outputs and rng.random() < 0.5]
    declared = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in names}
    graph = helper.make_graph(
        nodes, "g", [declared["x"], declared["z"]], [declared[name] for name in outputs], initializers,
        value_info=[declared[name] for name in infos],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=rng.choice([4, 8, 10]))


def random_regions(graph: Graph, rng: random.Random) -> list[Region]:
    """Disjoint connected sets of nodes; not always convex."""
    free = {node.index for node in graph.nodes if node.op != "Constant" and not node.domain}
    regions = []
    for _ in range(rng.randint(1, 4)):
        if not free:
            break
        group = {rng.choice(sorted(free))}
        for _ in range(rng.randint(0, 5)):
            around = {
                other.index
                for place in group
                for value in (*graph.nodes[place].reads(), *graph.nodes[place].outputs)
                if value is not None
                for other in (*value.consumers, *([value.producer] if value.producer else []))
            }
            if around & free - group:
                group.add(rng.choice(sorted(around & free - group)))
        found = region_of(graph, [graph.nodes[place] for place in sorted(group)])
        if found.tensors and found.outputs:
            free -= group
            regions.append(found)
    return regions


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_random_graphs(seed: int) -> None:
    """Fused once and twice: valid, the same bits (float32, no tolerance) and, unfused, the original's bytes."""
    rng = random.Random(seed)
    model = random_model(rng)
    feeds = random_feeds(model)
    expected = run(model, feeds)
    fused = model
    for _ in range(2):
        graph = load_graph(fused)
        regions = random_regions(graph, rng)
        try:
            fused = rewrite(fused, graph, regions).model
        except InvariantError as error:
            assert "a cycle runs through" in str(error)
    onnx.checker.check_model(fused, full_check=True)
    assert same_bits(run(fused, feeds), expected)
    assert packed(unfuse(fused)) == packed(model)
    names = [node.name for node in fused_nodes(fused)]
    first = rng.sample(names, rng.randint(0, len(names)))
    part = unfuse(fused, first)
    onnx.checker.check_model(part, full_check=True)
    assert sorted(node.name for node in fused_nodes(part)) == sorted(set(names) - set(first))
    assert same_bits(run(part, feeds), expected)
    assert packed(unfuse(part)) == packed(model)


def test_records_hold_plain_data() -> None:
    (node,) = read_fused(fuse(odd(), ["o", "a", "b", "c"]).model)
    json.dumps([asdict(record) for record in node.replaces])
    assert node.replaces[0].doc_string == "note 1" and node.replaces[0].metadata_props == {"place": "1"}
