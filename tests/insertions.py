"""Nodes that give their operand back, put into a model on the way to some of its readers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from plain_session import RELEASE

Insertion = Callable[[str, str, int, str], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]
"""Told what is read, what is written, the element type and a name of its own: the nodes, and their constants."""

Edge = tuple[int, int]
"""A read: position of the node, and which of its inputs."""


def number(name: str, dtype: int, value: float) -> onnx.TensorProto:
    """A constant of no axes."""
    return numpy_helper.from_array(np.asarray(value, helper.tensor_dtype_to_np_dtype(dtype)), name)


def _with_number(op: str, value: float, first: bool = False) -> Insertion:
    def make(read: str, written: str, dtype: int, name: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        inputs = [f"{name}_number", read] if first else [read, f"{name}_number"]
        return [helper.make_node(op, inputs, [written], name)], [number(f"{name}_number", dtype, value)]

    return make


def _plain(op: str) -> Insertion:
    return lambda read, written, dtype, name: ([helper.make_node(op, [read], [written], name)], [])


def _cast(read: str, written: str, dtype: int, name: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    return [helper.make_node("Cast", [read], [written], name, to=dtype)], []


def _cast_pair(read: str, written: str, dtype: int, name: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    wide = f"{name}_wide"
    return [
        helper.make_node("Cast", [read], [wide], f"{name}_to", to=TensorProto.DOUBLE),
        helper.make_node("Cast", [wide], [written], f"{name}_back", to=dtype),
    ], []


INSERTIONS: dict[str, Insertion] = {
    "identity": _plain("Identity"),
    "times-one": _with_number("Mul", 1),
    "one-times": _with_number("Mul", 1, first=True),
    "over-one": _with_number("Div", 1),
    "plus-zero": _with_number("Add", 0),
    "minus-zero": _with_number("Sub", 0),
    "same-type": _cast,
    "cast-pair": _cast_pair,
    "dropout": _plain("Dropout"),
}
"""What ONNX Runtime takes out when a session is created."""

STAY_BESIDE_INPUTS = {"times-one", "one-times", "over-one", "plus-zero", "minus-zero"}
"""What it leaves where the operand is an input of the graph."""

STAY_FOR_FUSIONS = {"cast-pair"}
"""What it takes out last: where it would fuse the nodes around, it does not."""

POWER = _with_number("Pow", 1)
"""What it does not."""


def insert(model: onnx.ModelProto, edges: Sequence[tuple[Sequence[Edge], str]], types: dict[str, int]) -> None:
    """Put nodes on edges of a model's main graph, in place.

    Args:
        edges: each a group of reads of one value that go through one inserted node, and its kind.
        types: element types by name.
    """
    graph = model.graph
    made: dict[int, list[onnx.NodeProto]] = {}
    values = {node.input[place] for group, _ in edges for position, place in group
              for node in [graph.node[position]]}
    assert values <= types.keys(), values - types.keys()
    for count, (group, kind) in enumerate(edges):
        (read,) = {graph.node[position].input[place] for position, place in group}
        written, name = f"inserted{count}", f"insertion{count}"
        make = POWER if kind == "power" else INSERTIONS[kind]
        nodes, constants = make(read, written, types[read], name)
        made.setdefault(min(position for position, _ in group), []).extend(nodes)
        graph.initializer.extend(constants)
    renamed = {edge: f"inserted{count}" for count, (group, _) in enumerate(edges) for edge in group}
    for (position, place), name in renamed.items():
        graph.node[position].input[place] = name
    order = [node for position, node in enumerate(graph.node) for node in (*made.get(position, ()), node)]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
    del graph.node[:]
    graph.node.extend(copies)


def reads_of(model: onnx.ModelProto, name: str) -> list[Edge]:
    """Where a value is read."""
    return [(position, place) for position, node in enumerate(model.graph.node)
            for place, read in enumerate(node.input) if read == name]


def drawn(model: onnx.ModelProto, types: dict[str, int], rng: Random, count: int,
          grouped: Collection[str] = ()) -> list[tuple[list[Edge], str]]:
    """Random edges of a model, each value's readers in part, all together, or each by itself; what goes in there is
    taken out before ONNX Runtime fuses anything.

    Args:
        types: element types by name.
        grouped: names of what nodes compute that ONNX Runtime fuses with others.
    """
    known = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
    names = sorted({read for node in model.graph.node for read in node.input if types.get(read) in known})
    inputs = {value.name for value in model.graph.input}
    found: list[tuple[list[Edge], str]] = []
    for name in rng.sample(names, min(count, len(names))):
        edges = reads_of(model, name)
        some = rng.sample(edges, rng.randint(1, len(edges)))
        groups = [some] if rng.random() < 0.5 else [[edge] for edge in some]
        for group in groups:
            ends = {name, *(made for position, _ in group for made in model.graph.node[position].output)}
            kinds = set(_kinds(types[name])).difference(
                STAY_BESIDE_INPUTS if name in inputs else (), () if ends.isdisjoint(grouped) else STAY_FOR_FUSIONS)
            found.append((sorted(group), rng.choice(sorted(kinds))))
    return found


def _kinds(dtype: int) -> list[str]:
    """Insertions that a type may have."""
    floats = dtype in (TensorProto.FLOAT, TensorProto.FLOAT16)
    absent = {"same-type"} if RELEASE < (1, 31) and dtype == TensorProto.FLOAT16 else set()  # the runtime mistypes it
    return [kind for kind in INSERTIONS if kind not in absent and (floats or kind not in ("dropout", "cast-pair"))]
