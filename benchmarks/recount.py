"""Recount the report's bytes from the two model files and concrete sizes, by docs/bytes.md, with nothing of onnxfuse.

    python benchmarks/recount.py model.onnx model.fused.onnx --dim batch=8 --dim sequence=128 --report report.json

Shapes come from onnx's inference of one node after the other, with small integer tensors computed on the way.  Exit
code 1 where a figure differs from the report's by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto
from recount_shapes import OWNERS, RANDOM, Shapes

TOLERANCE = 0.02
HOST_ELEMENTS = 100
RESIZED = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}
VIEWS = RESIZED | {"Identity"}
NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""Operators that give their other operand back beside this number; Add and Mul beside it on either side."""
COUNTED = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64}
END = np.iinfo(np.int64).max
PARTIAL = {"Gather", "GatherElements", "GatherND", "Slice", "Split"}
READ_ON_HOST = {
    "Reshape": {1}, "Expand": {1}, "ConstantOfShape": {0}, "Slice": {1, 2, 3, 4}, "Range": {0, 1, 2}, "Clip": {1, 2},
    "Pad": {1, 2, 3}, "Squeeze": {1}, "Unsqueeze": {1}, "Split": {1}, "Tile": {1}, "TopK": {1}, "OneHot": {1},
    "CumSum": {1}, "Trilu": {1}, "Resize": {1, 2, 3}, "Upsample": {1}, "Dropout": {1, 2}, "AffineGrid": {1},
    "NonMaxSuppression": {2, 3, 4}, "SequenceAt": {1},
    **{f"Reduce{kind}": {1} for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                                         "SumSquare")},
}
NARROW = {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ,
          TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ}
EXPONENTS: dict[int, int] = {
    TensorProto.FLOAT16: 5, TensorProto.BFLOAT16: 8, TensorProto.FLOAT: 8, TensorProto.DOUBLE: 11}
"""Bits of a float's exponent; of the rest one is the sign's, and the first digit is not written."""
INTEGERS = {
    TensorProto.BOOL, TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT32,
    TensorProto.INT32, TensorProto.UINT64, TensorProto.INT64,
}
PRODUCTS = {
    "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm", "Einsum", "Conv", "ConvInteger", "QLinearConv", "ConvTranspose",
    "DeformConv", "LSTM", "GRU", "RNN", "Attention",
}
MICROSOFT_PRODUCTS = {
    "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "FusedGemm", "GemmFastGelu", "GemmFloat8", "FusedConv",
    "NhwcConv", "NhwcFusedConv", "MatMulNBits", "MatMulBnb4", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm",
    "QLinearConv", "Attention", "QAttention", "MultiHeadAttention", "GroupQueryAttention", "SparseAttention",
    "PackedAttention", "PackedMultiHeadAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention",
    "LongformerAttention", "MoE", "QMoE",
}


@dataclass
class Counts:
    """Bytes in products and in all else, kernels, and tensors whose size is unknown."""

    products: float = 0
    other: float = 0
    kernels: float = 0
    unknown: set[str] = field(default_factory=set)


def captured(node: NodeProto) -> set[str]:
    """Names that the node's subgraphs read from outside."""
    found: set[str] = set()
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            local = {t.name for t in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                found |= {name for name in (*inner.input, *captured(inner)) if name and name not in local}
                local |= set(inner.output)
            found |= {info.name for info in graph.output if info.name not in local}
    return found


def removed_nodes(shapes: Shapes, constant: set[str]) -> dict[int, str]:
    """Nodes that ONNX Runtime takes out, by ``id``, and the operands that it puts in their place."""
    outputs, casts = {info.name for info in shapes.graph.output}, removed_casts(shapes)
    computed = constant | computed_names(shapes)
    found = {id(node): name for node in shapes.flat.nodes if not node.domain and node.output[0] not in outputs
             and (name := unchanged(node, shapes, constant)) in computed}
    return found | {id(node): node.input[0] for node in shapes.flat.nodes if id(node) in casts}


def computed_names(shapes: Shapes) -> set[str]:
    """What nodes compute, but for those that give an input of the graph back and are taken out themselves."""
    found: set[str] = set()
    outputs = {info.name for info in shapes.graph.output}
    for node in shapes.flat.nodes:
        first = node.input[0] if node.input else ""
        kind = shapes.types.get(first)
        passes = not node.domain and (
            node.op_type in ("Identity", "Dropout")
            or (node.op_type == "Cast" and node.output[0] not in outputs and kind is not None
                and kind.tensor_type.elem_type == next(a.i for a in node.attribute if a.name == "to")))
        found |= set(node.output) if not passes or first in found else set()
    return found


def removed_casts(shapes: Shapes) -> set[int]:
    """Casts among them."""
    outputs = {info.name for info in shapes.graph.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in shapes.flat.nodes:
        for name in {*node.input, *captured(node)}:
            readers.setdefault(name, []).append(node)
    types = {}
    for node in shapes.flat.nodes:
        if node.op_type == "Cast" and not node.domain and node.input[0] in shapes.types:
            to = next(a.i for a in node.attribute if a.name == "to")
            types[id(node)] = (shapes.types[node.input[0]].tensor_type.elem_type, to)
    made = {node.output[0]: types[id(node)] for node in shapes.flat.nodes if id(node) in types}

    def back(node: NodeProto) -> bool:
        before = made.get(node.input[0])
        return (id(node) in types and node.output[0] not in outputs and before is not None and exact(*before)
                and types[id(node)] == before[::-1])

    found = set()
    for node in shapes.flat.nodes:
        if id(node) not in types or node.output[0] in outputs:
            continue
        (source, target), after = types[id(node)], readers.get(node.output[0], [])
        one = len(after) == 1 and id(after[0]) in types and len(set(types[id(after[0])])) == 2
        if source == target or back(node) or (exact(source, target) and after and (one or all(map(back, after)))):
            found.add(id(node))
    return found


def unchanged(node: NodeProto, shapes: Shapes, constant: set[str]) -> str | None:
    """The operand that ONNX Runtime puts in a node's place; None where it leaves the node, and of Casts."""
    known = {name: shapes.data[name] for name in node.input if name in constant and name in shapes.data}
    if node.op_type in NEUTRAL:
        for operand, number in ((0, 1), (1, 0)):
            name, beside = node.input[operand], node.input[number]
            value, shape = known.get(beside), shapes.shape(name)
            kind = shapes.types[beside].tensor_type.elem_type if beside in shapes.types else None
            if (operand == 0 or node.op_type in ("Add", "Mul")) and value is not None and shape is not None and (
                    kind in COUNTED and value.size == 1 and value.item() == NEUTRAL[node.op_type]
                    and value.ndim <= len(shape)):
                return str(name)
        return None
    if node.op_type == "Slice":
        names = [name for name in node.input[1:] if name]
        numbers = [known.get(name) for name in node.input[1:]]
        whole = len(numbers) >= 2 and all(name in known for name in names) and not np.any(numbers[0]) and bool(
            np.all(numbers[1] == END)) and (len(numbers) < 4 or numbers[3] is None or bool(np.all(numbers[3] == 1)))
    elif node.op_type == "Expand":
        sizes, shape = known.get(node.input[1]), shapes.shape(node.input[0])
        whole = sizes is not None and shape is not None and len(sizes) <= len(shape) and all(
            size in (1, own) for size, own in zip(sizes.tolist(), shape[len(shape) - len(sizes):], strict=True))
    else:
        return None
    return str(node.input[0]) if whole else None


def exact(source: int, target: int) -> bool:
    """Whether a type holds every value of another."""
    if source in EXPONENTS or target in EXPONENTS:
        wide = source in EXPONENTS and target in EXPONENTS and EXPONENTS[source] <= EXPONENTS[target]
        return target in EXPONENTS and (wide or source in INTEGERS) and digits(source) <= digits(target)
    if source not in INTEGERS or target not in INTEGERS:
        return False
    (low, high), (least, most) = bounds(source), bounds(target)
    return least <= low and high <= most


def digits(kind: int) -> int:
    """Binary digits that a type has at most for its numbers."""
    if kind in EXPONENTS:
        return 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize - EXPONENTS[kind]
    return bounds(kind)[1].bit_length()


def bounds(kind: int) -> tuple[int, int]:
    """The least and the largest number of an integer type."""
    if kind == TensorProto.BOOL:
        return 0, 1
    info = np.iinfo(onnx.helper.tensor_dtype_to_np_dtype(kind))
    return int(info.min), int(info.max)


def same_memory(node: NodeProto, removed: dict[int, str], shapes: Shapes, used: set[str]) -> str | None:
    """The operand whose memory the first output is; None where a kernel runs."""
    if id(node) in removed:
        return removed[id(node)]
    if node.domain:
        return None
    if node.op_type == "Dropout":
        mode = node.input[2] if len(node.input) > 2 else ""
        trains = bool(mode) and (mode not in shapes.data or bool(np.any(shapes.data[mode])))
        return None if trains or any(name in used for name in node.output[1:]) else node.input[0]
    return node.input[0] if node.op_type in VIEWS else None


def count(model: ModelProto, sizes: dict[str, int]) -> Counts:
    """Bytes through device memory of one run of a model, fused or not, by docs/bytes.md."""
    counts = Counts()
    count_graph(Shapes(model, model.graph, sizes), set(), 1.0, counts)
    return counts


def count_graph(shapes: Shapes, outside: set[str], runs: float, counts: Counts) -> None:
    """Add what a graph and its bodies move; ``outside`` are constants of the graphs around it."""
    flat, moves = shapes.flat, Moves(shapes, outside, counts.unknown)
    for body, times in shapes.bodies:
        count_graph(body, moves.constant, runs * times, counts)
    inside = {id(node) for nodes, *_ in flat.groups for node in nodes}
    for node in flat.nodes:
        if id(node) not in moves.launches or id(node) in inside:
            continue
        if not node.domain and node.op_type in OWNERS:
            stacked = node.output[max(len(node.input) - 2, 0):] if node.op_type == "Loop" else []
            for name in filter(None, stacked):
                add(counts, 2 * moves.size(name), False, 1, runs)
            continue
        add(counts, moves.of_node(node), is_product(node), 1, runs)
    for nodes, inputs, outputs, plan in flat.groups:
        kernels, scratch = plan_cost(plan, [shapes.shape(name) for name in inputs])
        product = any(is_product(node) for node in nodes if id(node) in moves.launches)
        add(counts, moves.of_group(nodes, inputs, outputs) + scratch, product, kernels, runs)


class Moves:
    """What the nodes of a graph move, each alone or as a group.

    Attributes:
        constant: names of what is known before a run; launches: nodes that run kernels, by ``id``.
    """

    def __init__(self, shapes: Shapes, outside: set[str], unknown: set[str]) -> None:
        """``outside``: constants of the graphs around it; ``unknown`` gets the tensors whose size is not known."""
        self.shapes, self.unknown = shapes, unknown
        self.used = {info.name for info in shapes.graph.output}
        for node in shapes.flat.nodes:
            self.used |= set(node.input) | captured(node)
        self.constant = shapes.constants | outside
        self.removed = removed_nodes(shapes, self.constant)
        self.launches = self._launches()
        self.given = {node.output[0]: operand for node in shapes.flat.nodes if node.op_type not in RESIZED
                      and (operand := self._memory(node)) is not None}

    def _launches(self) -> dict[int, NodeProto]:
        """Nodes that run kernels; others, as far as they are constant, come to the constants."""
        found: dict[int, NodeProto] = {}
        host: set[str] = set()
        for node in self.shapes.flat.nodes:
            reads = {name for name in node.input if name} | captured(node)
            random = node.domain == "" and node.op_type in RANDOM
            subgraphs = any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute)
            if not random and not subgraphs and reads <= self.constant:
                self.constant |= set(node.output)
            elif runs_on_host(node, self.shapes, host, self.constant, subgraphs):
                host |= set(node.output)
            elif (operand := self._memory(node)) is not None:
                host |= set(node.output) if operand in host else set()
            else:
                found[id(node)] = node
        return found

    def _memory(self, node: NodeProto) -> str | None:
        return same_memory(node, self.removed, self.shapes, self.used)

    def size(self, name: str) -> int:
        """Bytes of a tensor; 0, and noted, where they are not known."""
        size = self.shapes.size(name)
        if size is None:
            self.unknown.add(name)
        return size or 0

    def _source(self, name: str) -> str:
        """The tensor whose memory one is, as it lies there."""
        while name in self.given:
            name = self.given[name]
        return name

    def _read(self, node: NodeProto, name: str) -> int:
        """Bytes of a tensor that a node reads."""
        operands = [self._source(operand) for operand in node.input]
        if node.domain == "" and node.op_type in PARTIAL and operands.count(name) == 1 and operands[0] == name:
            return min(self.size(name), sum(self.size(output) for output in node.output if output))
        return self.size(name)

    def of_node(self, node: NodeProto) -> int:
        """Of a node by itself."""
        names = dict.fromkeys(map(self._source, [name for name in node.input if name] + sorted(captured(node))))
        return sum(self._read(node, name) for name in names) + sum(self.size(name) for name in node.output if name)

    def of_group(self, nodes: list[NodeProto], inputs: list[str], outputs: list[str]) -> int:
        """Of a fused node, but for its scratch memory."""
        def demand(name: str) -> int:
            total = 0
            for node in nodes:
                if name not in node.input:
                    continue
                if self._memory(node) == name:
                    total += self.size(name) if node.output[0] in outputs else demand(node.output[0])
                elif id(node) in self.launches:
                    total += self._read(node, name)
            return min(total, self.size(name))

        return sum(map(demand, inputs)) + sum(map(self.size, outputs))


def add(counts: Counts, total: int, product: bool, kernels: int, runs: float) -> None:
    counts.kernels += runs * kernels
    if product:
        counts.products += runs * total
    else:
        counts.other += runs * total


def is_product(node: NodeProto) -> bool:
    return node.op_type in (PRODUCTS if node.domain == "" else
                            MICROSOFT_PRODUCTS if node.domain == "com.microsoft" else ())


def runs_on_host(node: NodeProto, shapes: Shapes, host: set[str], constant: set[str], subgraphs: bool) -> bool:
    if node.domain or subgraphs:
        return False
    if node.op_type in ("Shape", "Size"):
        return True
    some = False
    for place, name in enumerate(node.input):
        if not name:
            continue
        kind = shapes.types.get(name)
        if kind is not None and kind.tensor_type.elem_type in NARROW:
            return False
        shape = shapes.shape(name)
        if name in shapes.inputs or (name in constant and shape is not None and prod(shape) <= HOST_ELEMENTS):
            continue
        if name not in host or place in READ_ON_HOST.get(node.op_type, set()):
            return False
        some = True
    return some


GPU = {"sm": 90, "sms": 132}
"""What launch plans ask of the GPU that is planned for: its generation, its multiprocessors."""


def plan_cost(plan: dict[str, Any] | None, shapes: list[tuple[int, ...] | None]) -> tuple[int, int]:
    """Kernels that a fused node starts, and bytes through its scratch memory."""
    if plan is None or any(shape is None for shape in shapes):
        return 1, 0
    symbols: list[int] = []

    def value(text: str) -> int | None:
        stack: list[int] = []
        for token in text.split():
            if token[0] == "h":
                return None
            if token == "sel":
                b, a, c = stack.pop(), stack.pop(), stack.pop()
                stack.append(a if c else b)
            elif token == "not":
                stack.append(int(not stack.pop()))
            elif token in OPERATORS:
                b, a = stack.pop(), stack.pop()
                stack.append(int(OPERATORS[token](a, b)))
            elif token in ("sm", "sms"):
                stack.append(GPU[token])
            elif token[0] == "s" and token[1:].isdigit():
                stack.append(symbols[int(token[1:])])
            elif token[0] in "io":
                number, part = token[1:].split(".")
                shape = shapes[int(number)] if token[0] == "i" else ()
                stack.append(0 if part == "addr" else prod(shape or ()) if part == "n" else (shape or ())[int(part)])
            else:
                stack.append(int(token))
        return stack.pop()

    for text in plan["symbols"]:
        symbols.append(value(text) or 0)
    variants = plan["variants"]
    chosen = next((v for v in variants if all(value(guard) for guard in v["guards"])), variants[-1])
    used = {argument for step in chosen["steps"] for argument in step["args"]}
    used |= {one["base"] for place, one in enumerate(plan.get("maps", ())) if f"m{place}" in used}
    scratch = sum(2 * (value(text) or 0) for place, text in enumerate(plan["scratch"]) if f"t{place}" in used)
    return len(chosen["steps"]), scratch


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "//": lambda a, b: a // b if b else 0, "%": lambda a, b: a % b if b else 0,
    "ceil": lambda a, b: -(-a // b) if b else 0, "min": min, "max": max,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    "and": lambda a, b: bool(a) and bool(b), "or": lambda a, b: bool(a) or bool(b),
    "bcast": lambda a, b: b if a == 1 else a,
}


def load(path: Path) -> ModelProto:
    return onnx.load(path, load_external_data=False)


def main(arguments: list[str] | None = None) -> int:
    """Count both files; compare with the report if one is given."""
    parser = argparse.ArgumentParser(description="Recount the report's bytes from the model files.")
    parser.add_argument("original", type=Path)
    parser.add_argument("fused", type=Path)
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=N")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--sm", type=int, default=GPU["sm"], help="generation of the GPU that is planned for")
    parser.add_argument("--multiprocessors", type=int, default=GPU["sms"], help="how many it has")
    options = parser.parse_args(arguments)
    GPU.update(sm=options.sm, sms=options.multiprocessors)
    sizes = {name: int(size) for name, _, size in (entry.rpartition("=") for entry in options.dim)}
    before, after = (count(load(path), sizes) for path in (options.original, options.fused))
    mine = {
        "bytes_products": round(before.products), "bytes_before": round(before.other),
        "bytes_after": round(after.other), "kernels_before": round(before.kernels),
        "kernels_after": round(after.kernels),
    }
    theirs = json.loads(options.report.read_text(encoding="utf-8")) if options.report else {}
    worst = 0.0
    for name, value in mine.items():
        line = f"{name:16} {value:>16,}"
        if name in theirs:
            share = abs(theirs[name] - value) / max(value, 1)
            worst = max(worst, share if name.startswith("bytes") else 0.0)
            line += f"  report {theirs[name]:>16,}  off by {share:.2%}"
        print(line)
    for name in sorted(before.unknown | after.unknown):
        print(f"unknown size: {name}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
