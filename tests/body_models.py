"""Models with If, Loop and Scan: what there is to fuse lies in their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
WIDTH = 64


def value(name: str, shape: Sequence[int | str] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    """A value of the model's border or a body's."""
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: str, output: str, name: str = "", **attributes: object) -> onnx.NodeProto:
    """A node of one output, its inputs apart by spaces ("_" for none), called after its output."""
    operands = ["" if text == "_" else text for text in inputs.split()]
    return helper.make_node(op, operands, output.split(), name or f"{op}_{output.split()[0]}", **attributes)


def constant(name: str, content: object, kind: type = np.float32) -> onnx.TensorProto:
    """An initialiser."""
    return numpy_helper.from_array(np.array(content, kind), name)


def model(nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto],
          outputs: Sequence[onnx.ValueInfoProto], constants: Sequence[onnx.TensorProto] = ()) -> onnx.ModelProto:
    """A model of opset 17 that onnx's checker takes."""
    graph = helper.make_graph(list(nodes), "model", list(inputs), list(outputs), list(constants))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def chain(source: str, result: str, other: str) -> list[onnx.NodeProto]:
    """Four pointwise nodes: result = tanh(sigmoid(source * scale) + other) * half."""
    return [
        node("Mul", f"{source} scale", f"{result}_1"), node("Sigmoid", f"{result}_1", f"{result}_2"),
        node("Add", f"{result}_2 {other}", f"{result}_3"), node("Tanh", f"{result}_3", f"{result}_4"),
        node("Mul", f"{result}_4 half", result),
    ]


CONSTANTS = (constant("scale", np.linspace(0.5, 2, WIDTH)), constant("half", 0.5))


def branches(inner: Sequence[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """An If of which each branch holds a chain over captured values: an input, a computed value, initialisers."""
    then = helper.make_graph(
        list(inner) if inner else chain("computed", "yes", "x"), "then", [], [value("yes", None)])
    other = helper.make_graph(
        [*chain("x", "shared", "computed"), node("Relu", "shared", "no")], "else", [], [value("no", None)])
    return model(
        [node("Add", "x x", "computed"), node("If", "flag", "y", then_branch=then, else_branch=other)],
        [value("x", ["n", WIDTH]), value("flag", [], BOOL)], [value("y", ["n", WIDTH])],
        [*CONSTANTS, constant("trips", 4, np.int64)])


def loop(trips: int | None = 3, stated: Sequence[int | str] | None = None) -> onnx.ModelProto:
    """A Loop with carried state and a result of each run; the trip count is an input where it is None."""
    body = helper.make_graph(
        [node("Identity", "going", "going_on"), *chain("state", "next", "x"), node("Sqrt", "next_2", "root"),
         node("Add", "root next", "seen")],
        "body", [value("i", [], INT64), value("going", [], BOOL), value("state", stated)],
        [value("going_on", [], BOOL), value("next", stated), value("seen", None)])
    inputs = [value("x", ["n", WIDTH])] + ([] if trips is not None else [value("m", [], INT64)])
    counts = [] if trips is None else [constant("m", trips, np.int64)]
    return model([node("Loop", "m _ x", "last all", body=body)], inputs,
                 [value("last", ["n", WIDTH]), value("all", ["t", "n", WIDTH])], [*CONSTANTS, *counts])


def scan() -> onnx.ModelProto:
    """A Scan over a sequence, with carried state and a result of each step."""
    body = helper.make_graph(
        [*chain("state", "next", "step"), node("Sqrt", "next_2", "root"), node("Add", "root next", "out")],
        "body", [value("state", None), value("step", None)], [value("next", None), value("out", None)])
    return model([node("Scan", "start xs", "last all", body=body, num_scan_inputs=1)],
                 [value("start", ["n", WIDTH]), value("xs", ["t", "n", WIDTH])],
                 [value("last", ["n", WIDTH]), value("all", ["t", "n", WIDTH])], CONSTANTS)


def nested() -> onnx.ModelProto:
    """A Loop in a branch of an If: its body captures values of both graphs around it."""
    body = helper.make_graph(
        [node("Identity", "going", "going_on"), *chain("state", "next", "computed")],
        "body", [value("i", [], INT64), value("going", [], BOOL), value("state", None)],
        [value("going_on", [], BOOL), value("next", None)])
    then = [node("Add", "x computed", "begin"), node("Loop", "trips _ begin", "yes", body=body)]
    return branches(then)


def growing() -> onnx.ModelProto:
    """A Loop whose carried state has more rows after each run."""
    body = helper.make_graph(
        [node("Identity", "going", "going_on"), *chain("state", "changed", "bias"),
         node("Concat", "changed x", "next", axis=0)],
        "body", [value("i", [], INT64), value("going", [], BOOL), value("state", ["n", WIDTH])],
        [value("going_on", [], BOOL), value("next", None)])
    return model(
        [node("Add", "scale half", "bias"), node("Loop", "m _ x", "last", body=body)],
        [value("x", ["n", WIDTH])], [value("last", ["rows", WIDTH])],
        [constant("scale", np.linspace(0.5, 2, WIDTH)), constant("half", 0.5), constant("m", 3, np.int64)])


MODELS = {
    "if": branches, "loop": loop, "loop-dynamic": lambda: loop(None), "loop-stated": lambda: loop(3, ["n", WIDTH]),
    "scan": scan, "nested": nested, "growing": growing,
}


def feeds(made: onnx.ModelProto, rows: int = 5, seed: int = 0) -> list[dict[str, NDArray[np.generic]]]:
    """Inputs that between them go every way."""
    generator = np.random.default_rng(seed)
    names = {info.name for info in made.graph.input}
    found: list[dict[str, NDArray[np.generic]]] = []
    for turn in range(2):
        every = {
            "x": generator.standard_normal((rows, WIDTH)).astype(np.float32),
            "start": generator.standard_normal((rows, WIDTH)).astype(np.float32),
            "xs": generator.standard_normal((2 + turn, rows, WIDTH)).astype(np.float32),
            "flag": np.array(bool(turn)), "m": np.array(3 * turn, np.int64),
        }
        found.append({name: array for name, array in every.items() if name in names})
    return found
