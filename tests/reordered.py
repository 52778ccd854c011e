"""The same model written down another way: nodes in another order, initialisers too, everything renamed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph.order import captured_names, subgraphs


@dataclass(frozen=True)
class Rewritten:
    """A model written down another way; ``old`` leads from the names of values there to those in the original."""

    model: onnx.ModelProto
    old: dict[str, str]


def rewritten(original: onnx.ModelProto, seed: int, *, sort: bool = True, rename: bool = True) -> Rewritten:
    """A model with nodes and initialisers of every graph in an order of its own, and with names of its own.

    Args:
        sort: keep each node after those that it reads from.
    """
    chance = Random(seed)
    model = onnx.ModelProto()
    model.CopyFrom(original)
    for graph in _graphs(model.graph):
        nodes = [_copy(node) for node in graph.node]
        order = _topological(nodes, chance) if sort else chance.sample(range(len(nodes)), len(nodes))
        for items, moved in (
            (graph.node, [nodes[place] for place in order]),
            (graph.initializer, chance.sample([_copy(tensor) for tensor in graph.initializer], len(graph.initializer))),
            (graph.value_info, chance.sample([_copy(info) for info in graph.value_info], len(graph.value_info))),
        ):
            del items[:]
            items.extend(moved)
    return Rewritten(model, _renamed(model, chance) if rename else {})


def _copy(message: object) -> object:
    made = type(message)()
    made.CopyFrom(message)  # type: ignore[attr-defined]
    return made


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)
    yield graph


def _topological(nodes: Collection[onnx.NodeProto], chance: Random) -> list[int]:
    """Places in one of the topological orders: depth first, breadth first or anything between."""
    made = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    needs = [{made[name] for name in (*node.input, *captured_names(node)) if name in made} for node in nodes]
    early, ready, order = chance.random(), [place for place, need in enumerate(needs) if not need], []
    while ready:
        near = min(int(chance.expovariate(0.5)), len(ready) - 1)
        place = ready.pop(near if chance.random() < early else len(ready) - 1 - near)
        order.append(place)
        freed = [other for other, need in enumerate(needs) if place in need]
        for other in chance.sample(freed, len(freed)):
            needs[other].discard(place)
            if not needs[other]:
                ready.append(other)
    return order


def _renamed(model: onnx.ModelProto, chance: Random) -> dict[str, str]:
    """Rename every value and node in place; names of sizes stay, they are the user's."""
    new: dict[str, str] = {"": ""}
    words = ("batch", "seq_len", "n", "h", "a/b:0", "x", "height")

    def name(old: str) -> str:
        if old not in new:
            new[old] = f"{chance.choice(words)}{len(new)}_{chance.randrange(1 << 30)}"
        return new[old]

    for graph in _graphs(model.graph):
        for node in graph.node:
            node.name = f"{chance.randrange(1 << 30)}" if chance.random() < 0.9 else ""
            node.input[:] = [name(each) for each in node.input]
            node.output[:] = [name(each) for each in node.output]
        for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            entry.name = name(entry.name)
    return {text: old for old, text in new.items()}


class Network:
    """A model while it is made, node by node."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def constant(self, *values: int) -> str:
        """Name of a vector of integers."""
        return self.hold("i" + "_".join(map(str, values)), np.array(values, np.int64))

    def weight(self, name: str, *shape: int) -> str:
        """Name of a float32 weight."""
        return self.hold(name, np.random.default_rng(len(self.constants)).standard_normal(shape).astype(np.float32) / 8)

    def hold(self, name: str, array: np.ndarray) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> list[str]:
        """Names of a new node's results."""
        names = [f"v{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"n{len(self.nodes)}", **attributes))
        return names


def tagger(steps: int = 6, hidden: int = 16, width: int = 8) -> onnx.ModelProto:
    """Embedding, convolutions side by side, a bidirectional LSTM spelled out step by step, a softmax over classes."""
    net = Network()
    (x,) = net.add("Gather", net.weight("table", 50, width), "ids")
    (across,) = net.add("Transpose", x, perm=[0, 2, 1])
    branches = [across]
    for size in (3, 5):
        (y,) = net.add("Conv", across, net.weight(f"kernel{size}", width, width, size), net.weight(f"b{size}", width),
                       pads=[size // 2, size // 2])
        branches += net.add("Relu", y)
    (x,) = net.add("Concat", *branches, axis=1)
    (x,) = net.add("Transpose", x, perm=[2, 0, 1])
    directions = []
    for direction in (1, -1):
        (gates,) = net.add("MatMul", x, net.weight(f"w{direction}", 3 * width, 4 * hidden))
        (gates,) = net.add("Add", gates, net.weight(f"bias{direction}", 4 * hidden))
        results = [""] * steps
        h, c = "", ""
        for step in range(steps)[::direction]:
            (z,) = net.add("Slice", gates, net.constant(step), net.constant(step + 1), net.constant(0))
            (z,) = net.add("Squeeze", z, net.constant(0))
            if h:
                z = net.add("Add", z, *net.add("MatMul", h, net.weight(f"u{direction}", hidden, 4 * hidden)))[0]
            i, f, g, o = net.add("Split", z, net.constant(*[hidden] * 4), outputs=4, axis=-1)
            (new,) = net.add("Mul", *net.add("Sigmoid", i), *net.add("Tanh", g))
            c = net.add("Add", *net.add("Mul", *net.add("Sigmoid", f), c), new)[0] if c else new
            (h,) = net.add("Mul", *net.add("Sigmoid", o), *net.add("Tanh", c))
            (results[step],) = net.add("Unsqueeze", h, net.constant(0))
        directions += net.add("Concat", *results, axis=0)
    (y,) = net.add("Concat", *directions, axis=-1)
    (y,) = net.add("MatMul", *net.add("Transpose", y, perm=[1, 0, 2]), net.weight("classes", 2 * hidden, 4))
    (y,) = net.add("Softmax", y, axis=-1)
    graph = helper.make_graph(
        net.nodes, "tagger", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", steps])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)], list(net.constants.values()),
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
