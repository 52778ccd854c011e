"""Random graphs of whatever the standard has, drawn from its operators' schemas and not from what can be lowered.

Every node is drawn from its schema and tried in ONNX Runtime on what is there, so a graph holds whatever that takes:
any operator with any of its attributes and types, values that several nodes read or nobody, reads through nodes that
change nothing, bodies, functions, sequences.  A whole model counts where ONNX Runtime's CPU provider, its optimisations
off, loads and runs it (``accepted``).

    python tests/schema_graphs.py [FIRST [COUNT]]

prints how many are accepted, and which operators are in them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import onnx
import schema_layers
from onnx import TensorProto, helper, numpy_helper
from schema_bodies import MOTIFS
from schema_builder import Builder, opsets
from schema_operators import ELSEWHERE, LEFT_OUT, draw, operators
from schema_values import FLOAT, Array, Known, Runtime, reads_of

OLDEST, NEWEST = 11, min(26, onnx.defs.onnx_opset_version())
"""Opsets; ONNX Runtime 1.31 knows none after 26."""

KINDS = (FLOAT,) * 6 + (TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.BFLOAT16)
SYMBOLS = ("N", "L")
MOST_NODES = 24

NEVER_EMPTY = {"GRU", "InstanceNormalization", "LSTM", "RNN", "Scan", "Unique", "MatMulInteger", "Pad", "QLinearMatMul"}
"""Operators with which ONNX Runtime's CPU provider (1.31.1) ends the process where a tensor has no elements, leaves a
result unwritten (a product of no steps) or forgets what the standard asks for (a border taken away)."""

COMMON = ("Add", "Mul", "Sub", "Div", "Exp", "Sigmoid", "Tanh", "Relu", "Cast", "Reshape", "Transpose", "Slice",
          "Concat", "Split", "Softmax", "ReduceMean", "ReduceMax", "LayerNormalization", "Where", "Gather", "Max",
          "Neg")
"""What fusing is about: drawn more often, in some graphs much more, so that there are regions between the rest."""


@dataclass(frozen=True)
class SchemaGraph:
    """A model, and what it is run on.

    Attributes:
        situations: sizes of the symbols: the planned ones, others, and the least.
        feeds: inputs in each.
    """

    seed: int
    model: onnx.ModelProto
    situations: tuple[Mapping[str, int], ...]
    feeds: tuple[Mapping[str, Array], ...]


def seeded(seed: int, most: int = MOST_NODES) -> SchemaGraph:
    """The graph of a seed, accepted or not."""
    rng = Random(seed)
    planned = {name: rng.randint(2, 9) for name in SYMBOLS}
    other = {name: rng.choice([n for n in (1, 3, 5, 7, 11, 13) if n != planned[name]]) for name in SYMBOLS}
    if rng.random() < 0.3:  # no symbols at all, or always the same
        planned, other = ({}, {}) if rng.random() < 0.5 else (planned, planned)
    least = {name: rng.choice((0, 1)) for name in planned}
    opset, kind = rng.randint(OLDEST, NEWEST), rng.choice(KINDS)
    b = Builder(rng, max(opset, 16) if kind == TensorProto.BFLOAT16 else opset, kind, (planned, other),
                identities=rng.choice((0.0, 0.0, 0.1, 0.4)), common=rng.choice((0.2, 0.6, 0.9)), seed=seed, grow=grow)
    wanted = rng.randint(1, most)
    b.attempt(lambda b: b.emit("Identity", [b.fill(kind, b.random_axes(rng.randint(1, 4)))]) if b.flip() else None)
    for _ in range(6 * most):
        if len(b.nodes) >= wanted:
            break
        grow(b)
    return finished(b, (planned, other, least))


def grow(b: Builder) -> object:
    """One more node, or a few that belong together."""
    if b.depth < 2 and not b.closed and b.flip(0.08):
        motif = b.rng.choice(sorted(MOTIFS)) if not b.depth else b.rng.choice(("If", "Loop", "sequence"))
        return b.attempt(MOTIFS[motif])
    names = operators(b.opset)
    name = b.rng.choice(COMMON) if b.flip(b.common) else b.rng.choice(names)
    if name not in names:
        return None
    return any(b.attempt(lambda b: draw(b, name)) for _ in range(4))


def finished(b: Builder, situations: tuple[Mapping[str, int], ...]) -> SchemaGraph:
    """The model: some of what nobody reads is an output, some is dead; inner values and inputs may be outputs too."""
    rng = b.rng
    read = {name for node in b.nodes for name in node.input}
    made = [value for value in b.known if any(value.name in node.output for node in b.nodes)]
    outputs = [value for value in made if value.name not in read and rng.random() < 0.8]
    outputs += [value for value in made if value.name in read and rng.random() < 0.1]
    given = {each.name for each in b.inputs}
    others = [value for value in b.known if value.name in given or (value.constant and value not in made)]
    if others and rng.random() < 0.08:
        outputs.append(rng.choice(others))
    outputs = outputs or made[-1:]
    rng.shuffle(outputs)
    constants = list(b.constants)
    if rng.random() < 0.1:
        constants.append(numpy_helper.from_array(schema_layers.np.ones(3, "f"), "unused"))
    told = "names" if rng.random() < 0.8 else rng.choice(("own", "own", "rank", "nothing"))
    inputs = [each.info(told) for each in b.inputs]
    if constants and rng.random() < 0.1:  # initializers that are inputs too: defaults
        inputs += [helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                   for tensor in rng.sample(constants, rng.randint(1, len(constants)))]
    nodes = [*b.nodes]
    if rng.random() < 0.15:
        rng.shuffle(nodes)
    shapeless = rng.random() < 0.1
    results = [declared(b, value, shapeless and b.flip()) for value in dict.fromkeys(outputs)]
    model = helper.make_model(
        helper.make_graph(nodes, "schema", inputs, results, constants),
        opset_imports=opsets(b.opset), functions=b.functions, ir_version=10)
    decorate(b, model)
    shadow(rng, model)
    if operators_of(model) & NEVER_EMPTY:
        situations = (*situations[:2], dict.fromkeys(situations[2], 1))
    feeds = tuple({each.name: each.array(sizes, b.seed) for each in b.inputs} for sizes in situations)
    return SchemaGraph(b.seed, model, situations, feeds)


def declared(b: Builder, value: Known, shapeless: bool) -> onnx.ValueInfoProto:
    """Of a type and of a shape that the standard wants and ONNX Runtime does not; of sizes where there is one set."""
    shape = [a if a == c and b.situations[0] == {} else None for a, c in value.pairs]
    return helper.make_tensor_value_info(value.name, value.dtype, None if shapeless else shape)


def decorate(b: Builder, model: onnx.ModelProto) -> None:
    """Names, notes and types that change nothing."""
    rng, graph = b.rng, model.graph
    naming = rng.choice((0.0, 0.5, 1.0))
    for place, node in enumerate(graph.node):
        for inside, each in enumerate((node, *bodies_nodes(node))):
            if rng.random() < naming:  # nodes of bodies are called as those around are
                each.name = f"node_{inside or place}"
        if rng.random() < 0.05:
            node.doc_string = "a note"
            node.metadata_props.add(key="place", value=str(place))
    if rng.random() < 0.1:
        model.metadata_props.add(key="author", value="somebody")
        model.doc_string = graph.doc_string = "a model"
    written = {value.name for value in (*graph.input, *graph.output)}
    if rng.random() < 0.4:
        graph.value_info.extend(
            helper.make_tensor_value_info(value.name, value.dtype, [None] * value.rank) for value in b.known
            if value.name not in written and not value.constant and rng.random() < 0.5)


def shadow(rng: Random, model: onnx.ModelProto) -> None:
    """At times, give a value of a body the name of one that is computed later and that the body does not read."""
    owners = [(node, attribute.g) for node in model.graph.node for attribute in node.attribute
              if attribute.HasField("g") and attribute.g.node]
    if not owners or rng.random() < 0.6:
        return
    owner, body = rng.choice(owners)
    mentioned = set(reads_of(owner)) | {name for node in bodies_nodes(owner) for name in node.output}
    nodes = list(model.graph.node)
    free = [name for node in nodes[nodes.index(owner) + 1:] for name in node.output if name and name not in mentioned]
    inner = [name for node in body.node for name in node.output if name]
    if not free or not inner:
        return
    before = model.SerializeToString()
    rename(body, rng.choice(inner), rng.choice(free))
    try:
        Runtime(model)
        onnx.checker.check_model(model)
    except Exception:  # not of these two
        model.ParseFromString(before)


def rename(body: onnx.GraphProto, old: str, new: str) -> None:
    for node in every_node(body):
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in body.output:
        value.name = new if value.name == old else value.name


def runs(graph: SchemaGraph, model: onnx.ModelProto | None = None) -> list[dict[str, Array | None] | None] | None:
    """The outputs in each situation, None where one does not run; None where the model does not load."""
    try:
        runtime = Runtime(model or graph.model)
    except Exception:  # whatever ONNX Runtime has against it
        return None
    found: list[dict[str, Array | None] | None] = []
    for feeds in graph.feeds:
        try:
            found.append(runtime.run(feeds))
        except Exception:  # sizes that the model does not take
            found.append(None)
    return found


def accepted(graph: SchemaGraph) -> bool:
    """Whether ONNX Runtime's CPU provider runs it at the planned sizes."""
    found = runs(graph)
    return bool(found and found[0] is not None)


def every_node(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Nodes, those of bodies included."""
    for node in graph.node:
        yield node
        yield from bodies_nodes(node)


def bodies_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from every_node(attribute.g)


def operators_of(model: onnx.ModelProto) -> set[str]:
    """Standard operators that a model has anywhere."""
    return {node.op_type for graph in (model.graph, *model.functions) for node in every_node(graph) if not node.domain}


def all_operators() -> set[str]:
    """Every deterministic operator of tensors in any of the opsets."""
    return {name for opset in range(OLDEST, NEWEST + 1) for name in operators(opset)} | ELSEWHERE - LEFT_OUT


def main(arguments: list[str]) -> int:
    first, count = (int(text) for text in (*arguments, *("0", "1000")[len(arguments):]))
    good, seen, nodes = 0, Counter[str](), 0
    for seed in range(first, first + count):
        graph = seeded(seed)
        if accepted(graph):
            good += 1
            nodes += len(graph.model.graph.node)
            seen.update(operators_of(graph.model))
    missing = all_operators() - set(seen)
    print(f"{good} of {count} accepted, {nodes / max(good, 1):.1f} nodes each; {len(seen)} operators of "
          f"{len(all_operators())}; never: {', '.join(sorted(missing))}")
    print(", ".join(f"{name} {number}" for name, number in seen.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

