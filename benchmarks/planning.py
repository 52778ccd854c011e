"""How long planning takes, and how much memory, as graphs grow.

    python benchmarks/planning.py --nodes 1000 --nodes 30000 --kind pointwise

Makes graphs of each size and kind, plans and rewrites each in a process of its own (no verification, no compilation),
and prints seconds, seconds a thousand nodes, and peak memory.  No GPU is needed.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from common import RESULTS, environment, table, write_results
from onnx import TensorProto, helper, numpy_helper
from processes import ApartError, apart

SIZES = (1000, 3000, 10000)
HIDDEN, HEADS = 256, 4
TARGET = "H200"


@dataclass(frozen=True)
class Planned:
    """One graph, planned: seconds of the whole way, of a processor, and of the stages; mebibytes at the peak."""

    kind: str
    nodes: int
    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    peak_mb: float
    fusions: int
    fused_nodes: int


class _Graph:
    """A model while it is made; weights are shared, so that it stays small."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, array: Any) -> str:
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attributes))
        return name

    def model(self, inputs: dict[str, list[int | str]], outputs: list[str]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "synthetic",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in outputs],
            list(self.constants.values()),
        )
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def transformer(count: int) -> onnx.ModelProto:
    """Encoder layers, spelled out as exporters do, until there are so many nodes."""
    made = _Graph()
    half = np.float16
    weight = made.constant("w", np.zeros((HIDDEN, HIDDEN), half))
    wide = made.constant("wide", np.zeros((HIDDEN, 4 * HIDDEN), half))
    narrow = made.constant("narrow", np.zeros((4 * HIDDEN, HIDDEN), half))
    bias, wide_bias = made.constant("b", np.zeros(HIDDEN, half)), made.constant("wb", np.zeros(4 * HIDDEN, half))
    scale = made.constant("scale", half(0.125))
    split = made.constant("split", np.array([0, 0, HEADS, HIDDEN // HEADS], np.int64))
    merge = made.constant("merge", np.array([0, 0, HIDDEN], np.int64))

    def heads(x: str, order: list[int]) -> str:
        projected = made.add("Add", made.add("MatMul", x, weight), bias)
        return made.add("Transpose", made.add("Reshape", projected, split), perm=order)

    def norm(x: str) -> str:
        last = made.constant("last", np.array([-1], np.int64))
        centred = made.add("Sub", x, made.add("ReduceMean", x, last))
        square = made.add("Mul", centred, centred)
        variance = made.add("ReduceMean", square, last)
        root = made.add("Sqrt", made.add("Add", variance, made.constant("eps", half(1e-5))))
        return made.add("Add", made.add("Mul", made.add("Div", centred, root), bias), bias)

    def gelu(x: str) -> str:
        inner = made.add("Erf", made.add("Div", x, made.constant("root2", half(1.4142))))
        factor = made.add("Add", inner, made.constant("one", half(1.0)))
        return made.add("Mul", made.add("Mul", x, factor), made.constant("half", half(0.5)))

    x = "x"
    while len(made.nodes) < count:
        query, key, value = heads(x, [0, 2, 1, 3]), heads(x, [0, 2, 3, 1]), heads(x, [0, 2, 1, 3])
        scores = made.add("Add", made.add("Mul", made.add("MatMul", query, key), scale), "mask")
        mixed = made.add("MatMul", made.add("Softmax", scores, axis=-1), value)
        merged = made.add("Reshape", made.add("Transpose", mixed, perm=[0, 2, 1, 3]), merge)
        x = norm(made.add("Add", x, made.add("Add", made.add("MatMul", merged, weight), bias)))
        inner = gelu(made.add("Add", made.add("MatMul", x, wide), wide_bias))
        x = norm(made.add("Add", x, made.add("Add", made.add("MatMul", inner, narrow), bias)))
    return made.model({"x": ["batch", "sequence", HIDDEN], "mask": ["batch", 1, 1, "sequence"]}, [x])


def pointwise(count: int) -> onnx.ModelProto:
    """A random graph of unary and binary nodes, most of which read recent values, with a reduction now and then."""
    chance = random.Random(count)
    made = _Graph()
    last = made.constant("last", np.array([-1], np.int64))
    values = ["x", "z"]
    weight = made.constant("w", np.zeros((HIDDEN, HIDDEN), np.float16))
    unread: set[str] = set()
    while len(made.nodes) < count:
        first = values[-1 - min(int(chance.expovariate(0.25)), len(values) - 1)]
        second = values[-1 - min(int(chance.expovariate(0.05)), len(values) - 1)]
        draw = chance.random()
        if draw < 0.02:
            mean = made.add("ReduceMean", first, last)
            value, read = made.add("Sub", first, mean), {first}
        elif draw < 0.03:
            value, read = made.add("MatMul", first, weight), {first}
        elif draw < 0.5:
            value, read = made.add(chance.choice(["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Exp"]), first), {first}
        else:
            value, read = made.add(chance.choice(["Add", "Mul", "Sub", "Max"]), first, second), {first, second}
        unread -= read
        unread.add(value)
        values.append(value)
    return made.model({name: ["batch", "sequence", HIDDEN] for name in ("x", "z")}, sorted(unread))


KINDS = {"transformer": transformer, "pointwise": pointwise}


def plan(kind: str, count: int) -> Planned:
    """Make a graph, plan it and rewrite it, in this process."""
    from onnxfuse.pipeline import Options, optimise

    model = KINDS[kind](count)
    stages: dict[str, float] = {}
    start, cpu = time.perf_counter(), time.process_time()
    last = start
    stage = ""

    def tell(name: str, done: int, of: int) -> None:
        nonlocal stage, last
        now = time.perf_counter()
        if stage:
            stages[stage] = stages.get(stage, 0.0) + now - last
        stage, last = name, now

    made = optimise(model, Options(dims={"batch": 8, "sequence": 128}, target=TARGET, verify=False), tell)
    tell("", 0, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fused = sum(len(fusion.nodes) for fusion in made.plan.fusions)
    return Planned(
        kind, len(model.graph.node), time.perf_counter() - start, time.process_time() - cpu,
        stages, peak, len(made.plan.fusions), fused
    )


@click.command()
@click.option("--nodes", "sizes", type=int, multiple=True, default=SIZES, show_default=True, help="May repeat.")
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=list(KINDS), help="May repeat.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; by default benchmarks/results.")
def main(sizes: tuple[int, ...], kinds: tuple[str, ...], out: Path) -> None:
    """Seconds and peak memory of planning, as graphs grow."""
    rows: list[Planned] = []
    for kind in kinds:
        for count in sizes:
            click.echo(f"{kind}, {count} nodes ...", err=True)
            try:
                rows.append(apart(plan, kind, count))
            except ApartError as error:
                click.echo(f"{kind}, {count} nodes: {error}", err=True)
                sys.exit(1)
    head = (
        "graph", "nodes", "seconds", "of CPU", "per 1,000", "planning", "rewriting", "peak MB", "fused nodes", "into",
    )
    lines = [
        (row.kind, f"{row.nodes:,}", f"{row.seconds:.2f}", f"{row.cpu_seconds:.2f}",
         f"{1000 * row.cpu_seconds / row.nodes:.2f}",
         f"{row.stages.get('planning', 0):.2f}", f"{row.stages.get('rewriting', 0):.2f}", f"{row.peak_mb:.0f}",
         f"{row.fused_nodes:,}", f"{row.fusions:,}")
        for row in rows
    ]
    text = table(head, lines)
    click.echo(text)
    path = write_results(out, "planning", apart(environment), {"planned": [asdict(row) for row in rows]}, text)
    click.echo(f"written: {path} and .json", err=True)


if __name__ == "__main__":
    main()
