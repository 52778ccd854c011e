"""Random chains of constants around random products, folded, against their nodes in float64.

Factors, sums, batch normalisations, orders of channels and views before and behind matrix products, Gemms and
convolutions of one group and several, and a second product behind some; what stands for them when a kernel is made is
computed by the IR's own reference.

    python -m pytest tests/test_random_folds.py --seed 1 --graphs 5000
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from ir_reference import evaluate_lowered
from kernel_harness import parse
from onnx import numpy_helper
from reference import evaluate

from onnxfuse.graph import Graph
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.lower import Lowered, lower
from onnxfuse.operators import load_graph
from onnxfuse.planning.weights.collapsing import Fold, Folds

QUICK = 150
"""Chains that are tried where no more are asked for."""

NEAR = 2e-5
"""How far results may be off, as a share of the largest of them and of what they are sums of: weights are rounded to
float32 once more, and a product of two sums what nearly cancels."""


class Drawn:
    """One random chain: its nodes, and its constants by name."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.kind = self.choose("MatMul", "Gemm", "Conv")
        self.lines: list[str] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.channels, self.value = self.rng.randint(1, 9), "x"
        self.shape: list[int | str] = {"MatMul": ["M", 2, self.channels], "Gemm": ["M", self.channels],
                                       "Conv": [2, self.channels, 5, 4]}[self.kind]
        self.axis: int = 1 if self.kind == "Conv" else len(self.shape) - 1
        self.given = f"g (float[{', '.join(map(str, self.shape))}] x) => "
        self.scattered(3)
        self.multiplied()
        if self.choose(False, False, True):
            self.scattered(1)
            self.multiplied()
        self.scattered(4, views=True)
        self.add("Identity", self.value)

    def choose(self, *what: Any) -> Any:
        return self.rng.choice(what)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def add(self, op: str, *inputs: str) -> None:
        self.value = f"v{len(self.lines)}"
        self.lines.append(f"{self.value} = {op}({', '.join(inputs)})")

    def vector(self, least: float = 0.0) -> str:
        """A number for each channel, or one for all."""
        size = self.choose(self.channels, self.channels, 1)
        array = self.numbers.standard_normal(size).astype(np.float32)
        array = np.where(np.abs(array) < least, np.float32(1.5), array)
        behind = len(self.shape) - 1 - self.axis
        shape = [size] + [1] * behind if size > 1 or self.choose(True, False) else []
        return self.constant(array.reshape(shape))

    def scattered(self, most: int, views: bool = False) -> None:
        """What may stand beside a product."""
        for _ in range(self.rng.randint(0, most)):
            op = self.choose("Mul", "Div", "Add", "Sub", "less", "Neg", "norm", "order", *(["view"] * 2 * views))
            if op in ("Mul", "Div"):
                self.add(op, self.value, self.vector(0.3))
            elif op in ("Add", "Sub"):
                self.add(op, self.value, self.vector())
            elif op == "less":
                self.add("Sub", self.vector(), self.value)
            elif op == "Neg":
                self.add("Neg", self.value)
            elif op == "norm" and self.axis == 1:
                parts = self.numbers.standard_normal((4, self.channels)).astype(np.float32)
                parts[0], parts[3] = 0.5 + np.abs(parts[0]), 0.5 + np.abs(parts[3])
                self.add("BatchNormalization", self.value, *map(self.constant, parts))
            elif op == "order":
                order = self.numbers.permutation(self.channels) - self.choose(0, self.channels)
                self.add(f"Gather<axis = {self.axis}>", self.value, self.constant(order.astype(np.int64)))
            elif op == "view":
                axes = self.rng.sample(range(len(self.shape)), len(self.shape))
                self.add(f"Transpose<perm = {axes}>", self.value)
                self.shape, self.axis = [self.shape[axis] for axis in axes], axes.index(self.axis)

    def multiplied(self) -> None:
        """A product."""
        features, channels = self.rng.randint(1, 9), self.channels
        bias = [self.constant(self.numbers.standard_normal(features).astype(np.float32))] * self.choose(0, 1)
        if self.kind == "Conv":
            groups = self.choose(1, 1, *(each for each in (2, 3) if channels % each == 0))
            features, window, pad = groups * self.rng.randint(1, 4), self.choose(1, 1, 2, 3), self.choose(0, 0, 1)
            bias = [self.constant(self.numbers.standard_normal(features).astype(np.float32))] * len(bias)
            height, width = (int(size) + 2 * pad - window + 1 for size in self.shape[2:])
            if height < 1 or width < 1:
                window, height, width = 1, int(self.shape[2]) + 2 * pad, int(self.shape[3]) + 2 * pad
            weights = self.numbers.standard_normal((features, channels // groups, window, window))
            op = f"Conv<group = {groups}, pads = [{pad}, {pad}, {pad}, {pad}]>"
            self.shape = [2, features, height, width]
        elif self.kind == "Gemm":
            turned = self.choose(0, 1)
            weights = self.numbers.standard_normal((features, channels) if turned else (channels, features))
            op = f"Gemm<transB = {turned}, alpha = {self.choose(1.0, 0.3)}, beta = {self.choose(1.0, 0.0, -2.0)}>"
            self.shape = [*self.shape[:-1], features]
        else:
            weights, op, bias = self.numbers.standard_normal((channels, features)), "MatMul", []
            self.shape = [*self.shape[:-1], features]
        self.add(op, self.value, self.constant(weights.astype(np.float32)), *bias)
        self.channels = features

    def model(self) -> onnx.ModelProto:
        shape = ", ".join(map(str, self.shape))
        made = parse(f"{self.given} (float[{shape}] {self.value}) {{ {' '.join(self.lines)} }}")
        made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in self.constants.items())
        return made


def test_folds(seeds: Callable[[int], range]) -> None:
    """Many chains have something to fold, some of them two products."""
    folded, collapsed = 0, 0
    for seed in (drawn := seeds(QUICK)):
        one = Drawn(seed)
        model = one.model()
        graph = load_graph(model)
        fold, _ = Folds(graph, rounding=True).of(graph.nodes)
        if fold is not None:
            folded, collapsed = folded + 1, collapsed + fold.collapses
            check(model, graph, fold, f"seed {seed}: {' '.join(one.lines)}")
    assert folded > len(drawn) // 2 and collapsed > len(drawn) // 50


def check(model: onnx.ModelProto, graph: Graph, fold: Fold, text: str) -> None:
    """What stands for the nodes computes what they do, of less."""
    nodes = [each for node in graph.nodes for each in fold.instead.get(node, (node,))]
    lowered, plain = (lower(each, graph.outputs, graph) for each in (nodes, graph.nodes))
    assert isinstance(lowered, Lowered) and isinstance(plain, Lowered), text
    assert set(fold.made) <= set(lowered.tensors), text
    assert sum(isinstance(tensor, Contract) for tensor in lowered.program.tensors) < 2 or not fold.collapses, text
    (x,) = graph.inputs
    sizes = {"M": 3}
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    arrays[x.name] = np.random.default_rng(0).standard_normal(
        [size.evaluate(sizes) for size in x.shape or ()]).astype(np.float32)
    arrays |= {value.name: value.contents() for value in fold.made if value.contents is not None}
    (got,) = evaluate_lowered(lowered, [arrays[value.name] for value in lowered.tensors], sizes)
    values = evaluate(model, {x.name: arrays[x.name]})
    want = values[graph.outputs[0].name]
    largest = max(np.abs(values[name]).max(initial=1.0) for node in graph.nodes for name in [node.outputs[0].name])
    assert got.shape == want.shape and np.abs(got - want).max(initial=0.0) <= NEAR * largest, text
