"""How time and memory grow over models that are made to keep an optimiser busy.

    python benchmarks/limits.py --kind chain --nodes 10000 --nodes 100000

Makes small models of each kind at each size, optimises each in a process of its own (no verification, no compilation),
reports, explains and puts back what was fused, and prints seconds of a processor and peak memory.  No GPU is needed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from common import RESULTS, environment, table, write_results
from onnx import TensorProto, helper, numpy_helper
from processes import ApartError, apart

TARGET = "H200"
HUGE = 1 << 40
"""A size that no memory holds."""

Nodes = list[onnx.NodeProto]


@dataclass(frozen=True)
class Handled:
    """One model: what came of it, in seconds of a processor for each stage and all; mebibytes at the peak of it all."""

    kind: str
    count: int
    seconds: float
    stages: dict[str, float]
    peak_mb: float
    outcome: str


def model(nodes: Nodes, inputs: Iterable[str] = ("x",), outputs: Iterable[str] = ("y",), *,
          arrays: dict[str, Any] | None = None, shape: tuple[int | str, ...] = ("rows", 64)) -> onnx.ModelProto:
    """A model of float32 inputs of one shape; outputs state none."""
    graph = helper.make_graph(
        nodes, "limits", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (arrays or {}).items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def row(count: int, step: Callable[[int, str, str], Nodes]) -> Nodes:
    """So many steps from x to y, each from one name to the next."""
    names = ["x", *(f"v{place}" for place in range(count - 1)), "y"]
    return [node for place in range(count) for node in step(place, names[place], names[place + 1])]


def chain(count: int) -> onnx.ModelProto:
    """Pointwise nodes, one after the other."""
    return model(row(count, lambda place, a, b: [helper.make_node(("Neg", "Exp")[place % 2], [a], [b])]))


def identities(count: int) -> onnx.ModelProto:
    """Identities between an Exp and a Neg."""
    return model([*row(count, lambda place, a, b: [helper.make_node("Identity", [a], [b])]),
                  helper.make_node("Exp", ["y"], ["z"]), helper.make_node("Neg", ["z"], ["w"])], outputs=["w"])


def neutral(count: int) -> onnx.ModelProto:
    """Nodes that change nothing: x + 0 and casts to the type at hand."""
    def step(place: int, a: str, b: str) -> Nodes:
        if place % 2:
            return [helper.make_node("Cast", [a], [b], to=TensorProto.FLOAT)]
        return [helper.make_node("Add", [a, "zero"], [b])]

    return model([helper.make_node("Exp", ["x"], ["e"]), *row(count, lambda place, a, b: step(
        place, "e" if place == 0 else a, b))], arrays={"zero": np.zeros((), np.float32)})


def casts(count: int) -> onnx.ModelProto:
    """Casts to float64 and back."""
    return model(row(count, lambda place, a, b: [helper.make_node(
        "Cast", [a], [b], to=TensorProto.FLOAT if place % 2 else TensorProto.DOUBLE)]))


def sizes(count: int) -> onnx.ModelProto:
    """Arithmetic on sizes: a shape is joined, cut and added to again and again, and given to an Expand at last."""
    def step(place: int, a: str, b: str) -> Nodes:
        start = "s" if place == 0 else a
        return [[helper.make_node("Concat", [start, "one"], [b], axis=0)],
                [helper.make_node("Slice", [start, "zero", "two"], [b])],
                [helper.make_node("Add", [start, "none"], [b])],
                [helper.make_node("Mul", [start, "one"], [b])]][place % 4]

    count -= count % 4
    arrays = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "none": np.array([0, 0])}
    return model([helper.make_node("Shape", ["x"], ["s"]), *row(count, step),
                  helper.make_node("Expand", ["x", "y"], ["w"])], outputs=["w"], arrays=arrays)


def constants(count: int) -> onnx.ModelProto:
    """A Constant for every node that reads one."""
    def step(place: int, a: str, b: str) -> Nodes:
        value = numpy_helper.from_array(np.array(place % 7 + 1, np.float32))
        return [helper.make_node("Constant", [], [f"c{place}"], value=value),
                helper.make_node(("Add", "Mul")[place % 2], [a, f"c{place}"], [b])]

    return model(row(count // 2, step))


def folded(count: int) -> onnx.ModelProto:
    """Nodes that constants alone feed, one after the other."""
    return model([*row(count, lambda place, a, b: [helper.make_node("Neg", ["c" if place == 0 else a], [b])]),
                  helper.make_node("Add", ["x", "y"], ["w"])], outputs=["w"], arrays={"c": np.float32(2)})


def initialisers(count: int) -> onnx.ModelProto:
    """An initialiser for every node, their names alike."""
    arrays = {f"weight_{place}": np.float32(place % 7 + 1) for place in range(count)}
    return model(row(count, lambda place, a, b: [helper.make_node(
        ("Add", "Mul")[place % 2], [a, f"weight_{place}"], [b])]), arrays=arrays)


def diamonds(count: int) -> onnx.ModelProto:
    """a, b = a + b, a - b: as many paths as two to the number of nodes."""
    nodes: Nodes = []
    a, b = "x", "z"
    for place in range(count // 2):
        nodes += [helper.make_node("Add", [a, b], [f"a{place}"]), helper.make_node("Sub", [a, b], [f"b{place}"])]
        a, b = f"a{place}", f"b{place}"
    return model([*nodes, helper.make_node("Mul", [a, b], ["y"])], ["x", "z"])


def doubled(count: int) -> onnx.ModelProto:
    """a = a + a."""
    return model(row(count, lambda place, a, b: [helper.make_node("Add", [a, a], [b])]))


def readers(count: int) -> onnx.ModelProto:
    """One tensor that all nodes read, each with an output of its own."""
    names = [f"y{place}" for place in range(count)]
    return model([helper.make_node("Exp", ["x"], ["e"]), *(helper.make_node("Neg", ["e"], [name]) for name in names)],
                 outputs=names)


def joined(count: int) -> onnx.ModelProto:
    """One tensor that all nodes read, one node that reads them all."""
    names = [f"v{place}" for place in range(count)]
    return model([*(helper.make_node("Exp", ["x"], [name]) for name in names),
                  helper.make_node("Concat", names, ["y"], axis=0)])


def split(count: int) -> onnx.ModelProto:
    """One Split, and a node behind each of its results."""
    names = [f"v{place}" for place in range(count)]
    return model([helper.make_node("Split", ["x"], names, axis=1, num_outputs=count),
                  *(helper.make_node("Exp", [name], [f"y{place}"]) for place, name in enumerate(names))],
                 outputs=[f"y{place}" for place in range(count)], shape=("rows", count))


def splits(count: int) -> onnx.ModelProto:
    """Splits of one tensor, each with a product of its halves."""
    nodes: Nodes = []
    for place in range(count):
        nodes += [helper.make_node("Split", ["x"], [f"a{place}", f"b{place}"], axis=1, num_outputs=2),
                  helper.make_node("Mul", [f"a{place}", f"b{place}"], [f"y{place}"])]
    return model(nodes, outputs=[f"y{place}" for place in range(count)])


def outputs(count: int) -> onnx.ModelProto:
    """A chain all of whose values are outputs."""
    names = ["x", *(f"v{place}" for place in range(count - 1)), "y"]
    return model(row(count, lambda place, a, b: [helper.make_node(("Neg", "Exp")[place % 2], [a], [b])]),
                 outputs=names[1:])


def inputs(count: int) -> onnx.ModelProto:
    """A sum of inputs, one after the other."""
    return model(row(count, lambda place, a, b: [helper.make_node("Add", [a, f"i{place}"], [b])]),
                 ["x", *(f"i{place}" for place in range(count))])


def wide(count: int) -> onnx.ModelProto:
    """One node that reads so many inputs of the model."""
    names = [f"i{place}" for place in range(count)]
    return model([helper.make_node("Sum", names, ["s"]), helper.make_node("Exp", ["s"], ["y"])], names)


def repeated(count: int) -> onnx.ModelProto:
    """One node that reads one tensor so many times."""
    return model([helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Max", ["e"] * count, ["y"])])


def attributes(count: int) -> onnx.ModelProto:
    """One node of a domain of its own with so many attributes, and one attribute of so many numbers."""
    many: dict[str, Any] = {f"a{place}": place for place in range(count)}
    made = model([helper.make_node("Own", ["x"], ["o"], domain="own", numbers=list(range(count)), **many),
                  helper.make_node("Exp", ["o"], ["e"]), helper.make_node("Neg", ["e"], ["y"])])
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def functions(count: int) -> onnx.ModelProto:
    """A function of the model's own for every node."""
    made = model(row(count, lambda place, a, b: [helper.make_node(f"F{place}", [a], [b], domain="own")]))
    opsets = [helper.make_opsetid("", 20)]
    made.functions.extend(helper.make_function(
        "own", f"F{place}", ["p"], ["q"],
        [helper.make_node("Exp", ["p"], ["o"]), helper.make_node("Neg", ["o"], ["q"])], opsets)
        for place in range(count))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def norms(count: int) -> onnx.ModelProto:
    """Reductions, one after the other, each with a pointwise node behind it."""
    def step(place: int, a: str, b: str) -> Nodes:
        return [helper.make_node("Softmax", [a], [f"s{place}"], axis=-1),
                helper.make_node("Mul", [f"s{place}", a], [b])]

    return model(row(count // 2, step))


def views(count: int) -> onnx.ModelProto:
    """Transposes, and an Exp after every other of them."""
    def step(place: int, a: str, b: str) -> Nodes:
        return [helper.make_node("Transpose", [a], [f"t{place}"], perm=[1, 0]),
                helper.make_node("Exp", [f"t{place}"], [b])]

    return model(row(count // 2, step))


def ranks(count: int) -> onnx.ModelProto:
    """Axes added one after the other."""
    return model(row(count, lambda place, a, b: [helper.make_node("Unsqueeze", [a, "one"], [b])]),
                 arrays={"one": np.array([1])})


def ifs(count: int) -> onnx.ModelProto:
    """An If in an If."""
    return nested(count, lambda place: "If")


def loops(count: int) -> onnx.ModelProto:
    """A Loop in a Scan in an If."""
    return nested(count, lambda place: ("Loop", "Scan", "If")[place % 3])


def growing(count: int) -> onnx.ModelProto:
    """A Loop in a Loop, each of which gives on more than it gets."""
    def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [] if kind != TensorProto.FLOAT else None)

    nodes = [helper.make_node("Concat", [f"s{count - 1}"] * 2, [f"t{count - 1}"], axis=0)]
    for place in reversed(range(count)):
        more = helper.make_node("Identity", [f"c{place}"], [f"d{place}"])
        body = helper.make_graph([*nodes, more], "body", [
            info(f"i{place}", TensorProto.INT64), info(f"c{place}", TensorProto.BOOL), info(f"s{place}")],
            [info(f"d{place}", TensorProto.BOOL), info(f"t{place}")])
        around = f"s{place - 1}" if place else "x"
        nodes = [helper.make_node("Loop", ["n", "", around], [f"u{place}"], name=f"n{place}", body=body),
                 helper.make_node("Concat", [f"u{place}"] * 2, [f"t{place - 1}" if place else "y"], axis=0)]
    made = model(nodes, arrays={"n": np.int64(3)})
    return made


def carried(count: int) -> onnx.ModelProto:
    """A Loop whose body hands each of its values on to the next, and more of the last."""
    def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [] if kind != TensorProto.FLOAT else None)

    nodes = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Concat", ["s0", "s0"], ["t0"], axis=0)]
    nodes += [helper.make_node("Exp", [f"s{place - 1}"], [f"t{place}"]) for place in range(1, count)]
    body = helper.make_graph(
        nodes, "body", [info("i", TensorProto.INT64), info("c", TensorProto.BOOL),
                        *(info(f"s{place}") for place in range(count))],
        [info("d", TensorProto.BOOL), *(info(f"t{place}") for place in range(count))])
    results = [f"y{place}" for place in range(count)]
    return model([helper.make_node("Loop", ["n", "", *["x"] * count], results, name="loop", body=body)],
                 outputs=results, arrays={"n": np.int64(3)})


def calls(count: int) -> onnx.ModelProto:
    """Functions that call one another, one in the other."""
    made = model([helper.make_node("F0", ["x"], ["e"], domain="own"), helper.make_node("Neg", ["e"], ["y"])])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    made.functions.extend(helper.make_function(
        "own", f"F{place}", ["p"], ["q"],
        [helper.make_node(f"F{place + 1}" if place + 1 < count else "Exp", ["p"], ["q"],
                          domain="own" if place + 1 < count else "")], opsets) for place in range(count))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def laughs(count: int) -> onnx.ModelProto:
    """Functions each of which calls the next one twice."""
    made = calls(count)
    for place, function in enumerate(made.functions):
        if place + 1 < count:
            first = function.node[0]
            second = onnx.NodeProto()
            second.CopyFrom(first)
            first.output[:] = second.input[:] = ["o"]
            function.node.append(second)
    return made


def beside(count: int) -> onnx.ModelProto:
    """Ifs one after the other in one graph, each reading the result of the one before."""
    def step(place: int, a: str, b: str) -> Nodes:
        return [owner("If", f"n{place}", [helper.make_node("Exp", [a], [f"p{place}"]),
                                          helper.make_node("Neg", [f"p{place}"], [f"q{place}"])], f"q{place}", a, b)]

    made = model(row(count, step))
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    return made


def nested(count: int, kind: Callable[[int], str]) -> onnx.ModelProto:
    """Bodies so deep, each with a pair of pointwise nodes around the next."""
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Neg", ["e"], [f"r{count}"])]
    for place in reversed(range(count)):
        inner = owner(kind(place), f"n{place}", nodes, f"r{place + 1}", "x", f"b{place}")
        nodes = [inner, helper.make_node("Exp", [f"b{place}"], [f"e{place}"]),
                 helper.make_node("Neg", [f"e{place}"], [f"r{place}"])]
    made = model(nodes, outputs=["r0"])
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    return made


def owner(op: str, name: str, nodes: Nodes, result: str, given: str, output: str) -> onnx.NodeProto:
    """A node with these nodes in its body, and their result its own."""
    def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [] if kind != TensorProto.FLOAT else None)

    if op == "If":
        other = helper.make_graph([helper.make_node("Abs", [given], [f"{name}.o"])], "else", [], [info(f"{name}.o")])
        body = helper.make_graph(nodes, "then", [], [info(result)])
        return helper.make_node("If", ["c"], [output], name=name, then_branch=body, else_branch=other)
    if op == "Loop":
        more = helper.make_node("Identity", [f"{name}.c"], [f"{name}.d"])
        body = helper.make_graph([*nodes, more], "body", [
            info(f"{name}.i", TensorProto.INT64), info(f"{name}.c", TensorProto.BOOL), info(f"{name}.s")],
            [info(f"{name}.d", TensorProto.BOOL), info(result)])
        return helper.make_node("Loop", ["", "c", given], [output], name=name, body=body)
    last = helper.make_node("Identity", [f"{name}.t"], [f"{name}.u"])
    body = helper.make_graph([*nodes, last], "body", [info(f"{name}.s"), info(f"{name}.t")],
                             [info(result), info(f"{name}.u")])
    return helper.make_node("Scan", [given, given], [output, f"{name}.all"], name=name, body=body, num_scan_inputs=1)


def huge(count: int) -> onnx.ModelProto:
    """Sizes that no memory holds, and constants of them: ``count`` in each chain of each kind."""
    arrays = {"big": np.array([HUGE]), "long": np.array([HUGE, 2]), "zero": np.int64(0), "end": np.int64(HUGE),
              "step": np.int64(1), "rank": np.array([1 << 20]), "depth": np.array([HUGE]),
              "values": np.array([0, 1], np.float32), "hot": np.arange(4), "many": np.ones(1 << 16, np.int64)}
    nodes = [
        helper.make_node("ConstantOfShape", ["big"], ["a"]),
        helper.make_node("ConstantOfShape", ["rank"], ["deep"], value=numpy_helper.from_array(np.array([1]))),
        helper.make_node("ConstantOfShape", ["deep"], ["b"]),
        helper.make_node("Expand", ["x", "deep"], ["c"]),
        helper.make_node("Expand", ["step", "big"], ["d"]),
        helper.make_node("Tile", ["hot", "big"], ["f"]),
        helper.make_node("Range", ["zero", "end", "step"], ["g"]),
        helper.make_node("OneHot", ["hot", "depth", "values"], ["h"]),
        helper.make_node("Expand", ["x", "many"], ["i"]),
        helper.make_node("Reshape", ["x", "many"], ["j"]),
        helper.make_node("Unsqueeze", ["x", "many"], ["k"]),
    ]
    ends = ["a", "b", "c", "d", "f", "g", "h", "i", "j", "k"]
    results = []
    for end in ends:
        name = end
        for place in range(count):
            nodes.append(helper.make_node(("Neg", "Abs")[place % 2], [name], [f"{end}{place}"]))
            name = f"{end}{place}"
        nodes.append(helper.make_node("Shape", [name], [f"{end}.s"]))
        nodes.append(helper.make_node("ReduceProd", [f"{end}.s"], [f"{end}.p"], keepdims=1))
        nodes.append(helper.make_node("ConstantOfShape", [f"{end}.p"], [f"{end}.y"]))
        results.append(f"{end}.y")
    return model(nodes, outputs=results, arrays=arrays)


KINDS: dict[str, tuple[Callable[[int], onnx.ModelProto], tuple[int, int]]] = {
    "chain": (chain, (10000, 100000)),
    "identities": (identities, (10000, 100000)),
    "neutral": (neutral, (10000, 100000)),
    "casts": (casts, (10000, 100000)),
    "sizes": (sizes, (10000, 100000)),
    "constants": (constants, (10000, 100000)),
    "folded": (folded, (10000, 100000)),
    "initialisers": (initialisers, (8000, 16000)),
    "norms": (norms, (10000, 20000)),
    "views": (views, (10000, 20000)),
    "diamonds": (diamonds, (10000, 20000)),
    "doubled": (doubled, (10000, 20000)),
    "readers": (readers, (8000, 16000)),
    "joined": (joined, (8000, 16000)),
    "split": (split, (8000, 16000)),
    "splits": (splits, (8000, 16000)),
    "outputs": (outputs, (8000, 16000)),
    "inputs": (inputs, (8000, 16000)),
    "wide": (wide, (8000, 16000)),
    "repeated": (repeated, (8000, 16000)),
    "attributes": (attributes, (8000, 16000)),
    "functions": (functions, (8000, 16000)),
    "ranks": (ranks, (100, 1000)),
    "ifs": (ifs, (15, 30)),
    "loops": (loops, (15, 30)),
    "growing": (growing, (15, 30)),
    "carried": (carried, (1000, 2000)),
    "calls": (calls, (1000, 2000)),
    "laughs": (laughs, (20, 60)),
    "beside": (beside, (1000, 2000)),
    "huge": (huge, (2, 100)),
}
"""What is made, and the sizes that are tried by default."""


def handle(kind: str, count: int) -> Handled:
    """Make a model, and do with it in this process all that can be done without running it."""
    from onnxfuse import api
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.pipeline import Options, optimise
    from onnxfuse.reporting import as_json, explain, report_of

    made = KINDS[kind][0](count)
    stages: dict[str, float] = {}
    start = last = time.process_time()

    def tell(name: str) -> None:
        nonlocal last
        now = time.process_time()
        stages[name], last = now - last, now

    try:
        found = optimise(made, Options(dims={"rows": 128}, target=TARGET, verify=False, database=False))
        tell("optimize")
        as_json(report_of(found))
        tell("report")
        explain(found, None)
        tell("explain")
        same = api.unfuse(found.model) == made
        tell("unfuse")
        outcome = f"{len(found.plan.fusions)} fused" + ("" if same else ", NOT PUT BACK")
    except OnnxfuseError as error:
        outcome = error.message
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Handled(kind, count, time.process_time() - start, stages, peak, outcome)


@click.command()
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=list(KINDS), help="May repeat.")
@click.option("--nodes", "counts", type=int, multiple=True, help="May repeat; by default two for each kind.")
@click.option("--seconds", type=float, default=600, show_default=True, help="Most that one model may take.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; by default benchmarks/results.")
def main(kinds: tuple[str, ...], counts: tuple[int, ...], seconds: float, out: Path) -> None:
    """Seconds and peak memory over models that are made to keep an optimiser busy."""
    rows: list[Handled] = []
    failed = 0
    for kind in kinds:
        for count in counts or KINDS[kind][1]:
            try:
                rows.append(apart(handle, kind, count, seconds=seconds))
            except ApartError as error:
                failed += 1
                click.echo(f"{kind}, {count}: {error}", err=True)
            else:
                click.echo(f"{kind}, {count}: {rows[-1].seconds:.1f} s", err=True)
    stages = ("optimize", "report", "explain", "unfuse")
    head = ("model", "n", "seconds", "peak MB", *stages, "outcome")
    lines = [
        (one.kind, f"{one.count:,}", f"{one.seconds:.1f}", f"{one.peak_mb:.0f}",
         *(f"{one.stages[name]:.1f}" if name in one.stages else "" for name in stages), one.outcome)
        for one in rows
    ]
    text = table(head, lines)
    click.echo(text)
    path = write_results(out, "limits", apart(environment), {"handled": [asdict(one) for one in rows]}, text)
    click.echo(f"written: {path} and .json", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
