"""Recurrent layers spelled out in float64, as Scans over their steps: the CPU provider has them in float32 alone, and
there bounds what is no number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

GATES = {"LSTM": 4, "GRU": 3}


class Steps:
    """Nodes of a graph, each on values of those before it."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nodes: list[onnx.NodeProto] = []

    def step(self, op: str, *inputs: str, results: int, **attributes: Any) -> list[str]:
        """One more node; the names of what it computes."""
        names = [f"{self.stem}.{len(self.nodes)}.{place}" for place in range(results)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def one(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """The same of a node with one result, which may have a name."""
        self.nodes.append(helper.make_node(op, inputs, [result or f"{self.stem}.{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def number(self, value: float) -> str:
        """A scalar."""
        return self.one("Constant", value=helper.make_tensor("value", TensorProto.DOUBLE, [], [value]))

    def integers(self, *values: int, rank: int = 1) -> str:
        """A list of integers, or one by itself."""
        shape = [len(values)] if rank else []
        return self.one("Constant", value=helper.make_tensor("value", TensorProto.INT64, shape, values))

    def split(self, of: str, count: int, size: int, axis: int) -> list[str]:
        """Parts of one size along an axis."""
        ends = [self.integers(place * size) for place in range(count + 1)]
        return [self.one("Slice", of, *ends[place:place + 2], self.integers(axis)) for place in range(count)]

    def gate(self, of: str) -> str:
        """1 / (1 + exp(-x)), which the provider's own gives no more than float32's digits of."""
        one = self.number(1.0)
        return self.one("Div", one, self.one("Add", one, self.one("Exp", self.one("Neg", of))))

    def squashed(self, of: str) -> str:
        """2 / (1 + exp(-2 x)) - 1."""
        two = self.number(2.0)
        return self.one("Sub", self.one("Mul", two, self.gate(self.one("Mul", two, of))), self.number(1.0))


def spelled_layer(node: onnx.NodeProto, stem: str) -> list[onnx.NodeProto]:
    """The nodes in the place of an LSTM or a GRU of float64 with the usual activations and nothing of their own, such
    as kernels hold; what each direction gives, one behind the other."""
    to, (x, w, r, *more) = Steps(stem), node.input
    b, _, state, cell = (*more, "", "", "", "")[:4]
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    hidden, gates, direction = int(given["hidden_size"]), GATES[node.op_type], given.get("direction", b"forward")
    backwards = {b"forward": [0], b"reverse": [1], b"bidirectional": [0, 1]}[direction]
    found = []
    for number, back in enumerate(backwards):
        def of_direction(name: str, place: int = number) -> str:
            return to.one("Gather", name, to.integers(place, rank=0), axis=0)

        rows = gates * hidden
        weights, states = (to.one("Transpose", of_direction(name), perm=[1, 0]) for name in (w, r))
        put = to.one("MatMul", x, weights)
        biases = to.split(of_direction(b), 2, rows, 0) if b else []
        put = to.one("Add", put, biases[0]) if biases else put
        batch = to.one("Slice", to.one("Shape", x), to.integers(1), to.integers(2))
        zeros = to.one("Expand", to.number(0.0), to.one("Concat", batch, to.integers(hidden), axis=0))
        begins = (state, cell) if node.op_type == "LSTM" else (state,)
        first = [of_direction(each) if each else zeros for each in begins]
        reset = bool(given.get("linear_before_reset", 0))
        body = _body(f"{stem}.{number}.body", node.op_type, states, biases[1:], hidden, reset)
        found.append(to.step("Scan", *first, put, results=len(first) + 1, body=body, num_scan_inputs=1,
                             scan_input_directions=[back], scan_output_directions=[back]))
    *last, every = zip(*found, strict=True)
    for place, (parts, axis) in enumerate(((every, 1), *((part, 0) for part in last))):
        if len(node.output) > place and node.output[place]:
            lifted = [to.one("Unsqueeze", part, to.integers(axis)) for part in parts]
            to.one("Concat", *lifted, axis=axis, result=node.output[place])
    return to.nodes


def _body(stem: str, op: str, weights: str, bias: Sequence[str], hidden: int, reset: bool) -> onnx.GraphProto:
    """One step: the state, an LSTM's cell, and what inputs add, to the next and the state once more."""
    to = Steps(stem)
    taken = [f"{stem}.{name}" for name in (("state", "cell") if op == "LSTM" else ("state",))]
    put = f"{stem}.put"

    def added(state: str, by: str, also: Sequence[str]) -> str:
        product = to.one("MatMul", state, by)
        return to.one("Add", product, also[0]) if also else product

    if op == "LSTM":
        parts = to.split(to.one("Add", put, added(taken[0], weights, bias)), 4, hidden, 1)
        into, out, kept = (to.gate(part) for part in parts[:3])
        cell = to.one("Add", to.one("Mul", kept, taken[1]), to.one("Mul", into, to.squashed(parts[3])))
        made = [to.one("Mul", out, to.squashed(cell)), cell]
    else:
        by, also, puts = to.split(weights, 3, hidden, 1), [to.split(each, 3, hidden, 0) for each in bias], to.split(
            put, 3, hidden, 1)
        update, back = (to.gate(to.one("Add", puts[place], added(taken[0], by[place], [each[place] for each in also])))
                        for place in range(2))
        last = [each[2] for each in also]
        behind = to.one("Mul", back, added(taken[0], by[2], last)) if reset else added(
            to.one("Mul", back, taken[0]), by[2], last)
        new = to.squashed(to.one("Add", puts[2], behind))
        made = [to.one("Add", new, to.one("Mul", update, to.one("Sub", taken[0], new)))]
    results = [*made, to.one("Identity", made[0])]

    def values(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in names]

    return helper.make_graph(to.nodes, stem, values([*taken, put]), values(results))
