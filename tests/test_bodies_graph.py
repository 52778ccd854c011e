"""Bodies of If, Loop and Scan in the graph that is planned on: names, sizes, and how often they run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from body_models import BOOL, INT64, MODELS, WIDTH, branches, chain, constant, growing, loop, model, nested
from body_models import node as make_node
from body_models import value as info
from onnx import helper

from onnxfuse.graph import Graph, Node
from onnxfuse.graph.binding import bind
from onnxfuse.graph.order import graphs_of
from onnxfuse.measuring.ranges import index_bound
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.traffic import Ledger, Observation
from onnxfuse.provider.host import host, on_host

SIZES = {"n": 4096}


def part(graph: Graph, label: str) -> Graph:
    return next(each for each in graph.walk() if each.body is not None and each.body.label == label)


def named(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def test_a_body_knows_what_is_around_it() -> None:
    graph = load_graph(nested())
    assert [each.body.label if each.body else "" for each in graph.walk()] == [
        "", "If_y/else_branch", "If_y/then_branch", "If_y/then_branch/Loop_yes/body"]
    inner = part(graph, "If_y/then_branch/Loop_yes/body")
    assert inner.place == ((1, "then_branch"), (1, "body"))
    computed = inner.values["computed"]
    assert computed.producer is None and computed.outer is not None and computed.outer.outer is not None
    assert computed.outer.outer is graph.values["computed"]
    assert computed.shape == graph.values["x"].shape and not computed.is_input
    assert inner.values["half"].is_constant and float(np.asarray(inner.values["half"].constant)) == 0.5
    assert inner.values["state"].is_input and inner.values["next"].is_output
    assert str(inner.values["next"].shape) == str(graph.values["x"].shape)
    assert named(inner, "Add_next_3").label == "If_y/then_branch/Loop_yes/body: Add_next_3"
    assert graph.values["y"].shape == graph.values["x"].shape


def test_sizes_that_change_from_run_to_run_are_symbols_of_their_own() -> None:
    graph = load_graph(growing())
    body = part(graph, "Loop_last/body")
    shape = body.values["state"].shape
    assert shape is not None and [str(size) for size in shape] == ["state.0", str(WIDTH)]
    sizes = bind(graph, {"n": 7})
    assert sizes["state.0"] == 7, "as before the first run"
    assert graph.values["last"].shape is not None
    assert [str(size) for size in graph.values["last"].shape][1:] == [str(WIDTH)]
    steady = part(load_graph(loop(3, ["m", WIDTH])), "Loop_last/body").values["state"].shape
    assert steady is not None and [str(size) for size in steady] == ["n", str(WIDTH)], "kept by every run"


def test_a_stacked_result_has_the_trip_count_in_its_sizes() -> None:
    graph = load_graph(loop(3))
    assert [str(size) for size in graph.values["all"].shape or ()] == ["3", "n", str(WIDTH)]
    dynamic = load_graph(loop(None))
    assert [str(size) for size in dynamic.values["all"].shape or ()] == ["t", "n", str(WIDTH)], "as the file states"


@pytest.mark.parametrize(("result", "stated", "found"), [
    ("y = own.Mystery(v)", "n, 4", "v.0, 4"),  # the numbers that the file states, where nothing else tells
    ("y = own.Mystery(v)", "4", None),
    ("y = Unsqueeze(v, axes)", "n, 4", None),  # no rank holds in every run
])
def test_a_carried_value_of_which_the_rank_is_open(result: str, stated: str, found: str | None) -> None:
    graph = load_graph(onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[n, 4] x, int64 m) => (float last) <int64[1] axes = {{0}}> {{
            last = Loop (m, , x) <body = b (int64 i, bool c, float[{stated}] v) => (bool c, float y) {{ {result} }}>
        }}"""))
    shape = graph.bodies[0].values["v"].shape
    assert (None if shape is None else ", ".join(map(str, shape))) == found


def test_a_result_that_the_body_does_not_give_is_unknown() -> None:
    graph = load_graph(onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, int64 m) => (float[n, 4] last) {
            last, all, more = Loop (m, , x) <body = b (int64 i, bool c, float[n, 4] v) => (bool c, float y, float z) {
                y = Neg(v)  z = Exp(v) }>
        }"""))
    shapes = [value.shape and [*map(str, value.shape)] for value in graph.nodes[0].outputs if value is not None]
    assert shapes == [["n", "4"], ["all.0", "n", "4"], None]


def test_a_body_is_found_by_its_label() -> None:
    graph = load_graph(nested())
    for each in graph.walk():
        assert graph.part(each.body) is each
    with pytest.raises(KeyError):
        load_graph(branches()).part(graph.bodies[1].bodies[0].body)


@pytest.mark.parametrize(("made", "label", "runs"), [
    (branches(), "If_y/then_branch", 0.5), (loop(3), "Loop_last/body", 3.0), (loop(None), "Loop_last/body", 16.0),
    (nested(), "If_y/then_branch/Loop_yes/body", 2.0), (MODELS["scan"](), "Scan_last/body", 9.0),
])
def test_how_often_a_body_counts(made: onnx.ModelProto, label: str, runs: float) -> None:
    graph = load_graph(made)
    names = {name for each in graph.inputs for size in each.shape or () for name in size.symbols}
    ledger = Ledger(graph, bind(graph, {"n": 5, **({"t": 9} if "t" in names else {})}))
    assert ledger.executions(part(graph, label).nodes[:1]) == runs
    assert ledger.executions(graph.nodes[:1]) == 1


def conditional(start: bool | None, going: str, trips: int = 100) -> Graph:
    """A Loop that starts on a condition and gives on another."""
    steps = {"passed on": make_node("Identity", "going", "on"), "computed": make_node("Not", "going", "on"),
             "constant": make_node("Constant", "", "on", value=helper.make_tensor("", BOOL, [], [True]))}
    body = helper.make_graph(
        [steps[going], *chain("state", "next", "x")], "body",
        [info("i", [], INT64), info("going", [], BOOL), info("state", None)],
        [info("on", [], BOOL), info("next", None)])
    constants = [constant("m", trips, np.int64), *([] if start is None else [constant("begin", start, np.bool_)])]
    names = "m _ x" if start is None else "m begin x"
    return load_graph(model(
        [make_node("Loop", names, "last", body=body)], [info("x", ["n", WIDTH])], [info("last", ["n", WIDTH])],
        [constant("scale", np.ones(WIDTH)), constant("half", 0.5), *constants]))


@pytest.mark.parametrize(("graph", "runs"), [
    (conditional(None, "passed on"), 100), (conditional(True, "passed on"), 100), (conditional(True, "constant"), 100),
    (conditional(None, "computed"), 16), (conditional(False, "passed on"), 16),
    (conditional(None, "computed", trips=4), 4),
])
def test_a_condition_may_end_a_loop_early(graph: Graph, runs: int) -> None:
    ledger = Ledger(graph, bind(graph, {}))
    assert ledger.executions(part(graph, "Loop_last/body").nodes) == runs


def test_what_is_on_the_host_outside_is_not_inside() -> None:
    """ONNX Runtime looks at each graph by itself: a size from outside is no host value in a body."""
    body = helper.make_graph(
        [make_node("Identity", "going", "on"), make_node("Add", "rows one", "more"),
         make_node("Shape", "state", "own"), make_node("Add", "own one", "further"),
         make_node("Mul", "folded folded", "twice"), *chain("state", "next", "x"),
         make_node("Add", "seen more", "counted")],
        "body", [info("i", [], INT64), info("going", [], BOOL), info("state", None), info("seen", None, INT64)],
        [info("on", [], BOOL), info("next", None), info("counted", None, INT64), info("further", None, INT64),
         info("twice", None, INT64)])
    graph = load_graph(model(
        [make_node("Shape", "x", "rows"), make_node("Add", "one one", "folded"),
         make_node("Loop", "m _ x rows", "last sizes a b", body=body)], [info("x", ["n", WIDTH])],
        [info("last", ["n", WIDTH]), info("sizes", [2], INT64), info("a", [3, 2], INT64), info("b", [3, 1], INT64)],
        [constant("scale", np.ones(WIDTH)), constant("half", 0.5), constant("m", 3, np.int64),
         constant("one", [1], np.int64)]))
    inner = part(graph, "Loop_last/body")
    assert on_host(graph.values["rows"], graph) and not on_host(named(inner, "Add_more"), inner)
    assert on_host(named(inner, "Add_further"), inner)
    assert named(inner, "Mul_twice") in host(inner).folded, "folded with what is folded outside"


def test_integers_that_index_a_table_in_a_body_stay_in_it() -> None:
    """Read by name, and handed in by a Loop and by a Scan."""
    body = helper.make_graph(
        [make_node("Identity", "going", "on"), make_node("Gather", "tables seven", "a"),
         make_node("Gather", "more state", "b"), make_node("Add", "state zero", "next")],
        "body", [info("i", [], INT64), info("going", [], BOOL), info("state", None, INT64)],
        [info("on", [], BOOL), info("next", None, INT64), info("a", None), info("b", None)])
    step = helper.make_graph([make_node("Gather", "tables one", "c")], "step", [info("one", None, INT64)],
                             [info("c", None)])
    graph = load_graph(model(
        [make_node("Loop", "m _ five", "last a_all b_all", body=body),
         make_node("Scan", "scanned", "c_all", body=step, num_scan_inputs=1)],
        [info("seven", ["n"], INT64), info("five", ["n"], INT64), info("scanned", ["t"], INT64)],
        [info("last", ["n"], INT64), info("a_all", [2, "n"]), info("b_all", [2, "n"]), info("c_all", ["t"])],
        [constant("tables", np.ones(7)), constant("more", np.ones(5)), constant("zero", 0, np.int64),
         constant("m", 2, np.int64)]))
    assert [index_bound(value) for value in graph.inputs] == [7, 5, 7]


def test_a_profile_weighs_bodies() -> None:
    graph = load_graph(loop(3))
    body = part(graph, "Loop_last/body")
    plain = Ledger(graph, bind(graph, SIZES))
    seen = Ledger(graph, plain.sizes, plain.placement, {named(body, "Add_next_3"): Observation(None, 30.0)})
    assert seen.executions(body.nodes) == 30
    inside = sum(plain.node(each).bytes for each in body.nodes)
    assert seen.total().bytes_other - plain.total().bytes_other == 27 * inside


def test_labels_stay_distinct_where_names_are_not() -> None:
    then = [helper.make_graph([make_node("Relu", "x", name)], "g", [], [info(name, None)]) for name in "abcd"]
    made = model(
        [make_node("If", "flag", "p", name="if", then_branch=then[0], else_branch=then[1]),
         make_node("If", "flag", "q", name="if", then_branch=then[2], else_branch=then[3])],
        [info("x", ["n", WIDTH]), info("flag", [], BOOL)], [info("p", ["n", WIDTH]), info("q", ["n", WIDTH])])
    labels = [body.label for body, _ in graphs_of(made) if body is not None]
    assert labels == ["If -> p/else_branch", "If -> p/then_branch", "If -> q/else_branch", "If -> q/then_branch"]
    assert labels == [each.body.label for each in load_graph(made).walk() if each.body is not None]


@pytest.mark.parametrize("name", MODELS)
def test_sizes_in_bodies_do_not_hang_on_onnx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are so many bodies that onnx is not asked, their types and sizes are known all the same."""
    def known() -> list[tuple[object, ...]]:
        graph = load_graph(MODELS[name]())
        return [(part.place, each, value.dtype, value.shape) for part in graph.walk()
                for each, value in part.values.items()]

    asked = known()
    monkeypatch.setattr("onnxfuse.graph.build.MOST_SEEN", 0)
    monkeypatch.setattr("onnx.shape_inference.infer_shapes", None)
    assert known() == asked
