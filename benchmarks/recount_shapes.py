"""Types, sizes and small contents of the tensors of a model file, fused nodes put back: what recount.py counts with.

Nothing of onnxfuse: onnx's inference of one node after the other, with small integer tensors computed on the way.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

KNOWN_ELEMENTS = 1 << 16
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
OWNERS = {"If", "Loop", "Scan"}
TRIPS = 16
BRANCH = 0.5


@dataclass
class Flat:
    """A graph with the bodies of its fused nodes in their places.

    ``groups`` holds for each fused node its inner nodes, tensor inputs, outputs and launch plan.
    """

    nodes: list[NodeProto]
    groups: list[tuple[list[NodeProto], list[str], list[str], dict[str, Any] | None]]


def flatten(model: ModelProto, graph: GraphProto) -> Flat:
    """Put the body of every fused node where the node is; inner names get the node's output as a prefix."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    flat = Flat([], [])
    for node in graph.node:
        body = bodies.get((node.domain, node.op_type)) if node.domain == "onnxfuse" else None
        if body is None:
            flat.nodes.append(node)
            continue
        prefix = next(name for name in node.output if name) + "//"
        names = {"": "", **dict(zip(body.input, list(node.input) + [""] * len(body.input), strict=False)),
                 **dict(zip(body.output, node.output, strict=False))}
        inside = []
        for step in body.node:
            copy = NodeProto()
            copy.CopyFrom(step)
            copy.input[:] = [names.setdefault(name, prefix + name) for name in step.input]
            copy.output[:] = [names.setdefault(name, prefix + name) for name in step.output]
            inside.append(copy)
        flat.nodes += inside
        plan = next((json.loads(a.s) for a in node.attribute if a.name == "plan"), None)
        tensors = [name for name in dict.fromkeys(node.input[8:]) if name]
        flat.groups.append((inside, tensors, [name for name in node.output if name], plan))
    return flat


class Shapes:
    """Types, sizes and small contents of every tensor of a graph, its fused nodes put back.

    A body (``outer`` is what is around it) is seen as it first runs; ``given`` are the types of its inputs.  ``bodies``
    lists those in the graph, with how often each runs in one run of the graph.
    """

    def __init__(self, model: ModelProto, graph: GraphProto, sizes: dict[str, int], outer: Shapes | None = None,
                 given: list[TypeProto | None] | None = None) -> None:
        self.model, self.graph, self.flat = model, graph, flatten(model, graph)
        self.types: dict[str, TypeProto] = dict(outer.types) if outer else {}
        self.data: dict[str, np.ndarray] = dict(outer.data) if outer else {}
        self.inputs: set[str] = set()
        self.constants: set[str] = set(outer.constants) if outer else set()
        self.bodies: list[tuple[Shapes, float]] = []
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self.sizes = sizes
        for tensor in graph.initializer:
            self.constants.add(tensor.name)
            self.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if prod(tensor.dims) <= 1024 and tensor.data_location != TensorProto.EXTERNAL:
                self.data[tensor.name] = numpy_helper.to_array(tensor)
        for place, info in enumerate(graph.input):
            if info.name not in self.constants or given is not None:
                self.inputs.add(info.name)
                known = given[place] if given is not None and place < len(given) else None
                self.types[info.name] = known or self.concrete(info.type)
        self.stated = {info.name: self.concrete(info.type) for info in (*graph.value_info, *graph.output)}
        for node in self.flat.nodes:
            if node.op_type in OWNERS and not node.domain:
                self.enter(node)
            else:
                self.infer(node)

    def enter(self, node: NodeProto) -> None:
        """The bodies of an If, a Loop or a Scan as they first run, and the types of the node's outputs."""
        graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        if node.op_type == "If":
            self.enter_branches(node, graphs)
            return
        (graph,) = graphs
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        stop = len(node.input) - scanned
        carried = [self.types.get(name) for name in node.input[2 if node.op_type == "Loop" else 0:stop]]
        enter = self.enter_loop if node.op_type == "Loop" else self.enter_scan
        body, runs, times = enter(node, graph, carried)
        self.bodies.append((body, max(times, 0)))
        self.leave(node, body, runs, len(carried))

    def enter_branches(self, node: NodeProto, graphs: list[GraphProto]) -> None:
        """Those of an If, and the types of its outputs."""
        bodies = [Shapes(self.model, graph, self.sizes, self) for graph in graphs]
        self.bodies += [(body, BRANCH) for body in bodies]
        for place, name in enumerate(node.output):
            kinds = [body.types.get(body.graph.output[place].name) for body in bodies]
            shapes = {body.shape(body.graph.output[place].name) for body in bodies}
            self.settle(name, kinds[0] if len(shapes) == 1 else None)

    def enter_loop(
        self, node: NodeProto, graph: GraphProto, carried: list[TypeProto | None]
    ) -> tuple[Shapes, int | None, int]:
        """That of a Loop, how often it runs where that is known, and how often that is counted."""
        first = [helper.make_tensor_type_proto(kind, [1] * len(info.type.tensor_type.shape.dim))
                 for kind, info in zip((TensorProto.INT64, TensorProto.BOOL), graph.input, strict=False)]
        body = Shapes(self.model, graph, self.sizes, self, [*first, *carried])
        count = self.data.get(node.input[0])
        known = None if count is None else int(count.reshape(-1)[0])
        runs = known if known is None or self.runs_through(node, body) else None
        return body, runs, min(TRIPS, TRIPS if known is None else known) if runs is None else runs

    def enter_scan(
        self, node: NodeProto, graph: GraphProto, carried: list[TypeProto | None]
    ) -> tuple[Shapes, int | None, int]:
        """The same of a Scan."""
        first: list[TypeProto | None] = []
        runs: int | None = None
        scanned = node.input[len(carried):]
        axes = next((list(a.ints) for a in node.attribute if a.name == "scan_input_axes"), [0] * len(scanned))
        for name, axis in zip(scanned, axes, strict=True):
            shape = self.shape(name)
            kind = self.types[name].tensor_type.elem_type if name in self.types else 0
            if shape is None:
                first.append(None)
                continue
            runs = shape[axis] if runs is None else runs
            rest = [size for place, size in enumerate(shape) if place != axis % len(shape)]
            first.append(helper.make_tensor_type_proto(kind, rest))
        body = Shapes(self.model, graph, self.sizes, self, [*carried, *first])
        return body, runs, TRIPS if runs is None else runs

    def leave(self, node: NodeProto, body: Shapes, runs: int | None, carried: int) -> None:
        """The types of a Loop's or a Scan's outputs: so many ``carried`` values, and what runs are stacked to."""
        graph, offset = body.graph, 1 if node.op_type == "Loop" else 0
        axes = next((list(a.ints) for a in node.attribute if a.name == "scan_output_axes"), [0] * len(node.output))
        for place, name in enumerate(node.output):
            inner = graph.output[place + offset].name
            shape, kind = body.shape(inner), body.types.get(inner)
            if place < carried:
                before = graph.input[place + 2 * offset].name
                self.settle(name, kind if shape is not None and shape == body.shape(before) else None)
            elif shape is None or runs is None or kind is None:
                self.settle(name, None)
            else:
                at = axes[place - carried] % (len(shape) + 1)
                sizes = [*shape[:at], runs, *shape[at:]]
                self.settle(name, helper.make_tensor_type_proto(kind.tensor_type.elem_type, sizes))

    def settle(self, name: str, kind: TypeProto | None) -> None:
        if kind is not None:
            self.types[name] = kind
        elif name in self.stated:
            self.types[name] = self.stated[name]

    def runs_through(self, node: NodeProto, body: Shapes) -> bool:
        """Whether nothing can end a Loop before its trip count."""
        start = node.input[1] if len(node.input) > 1 else ""
        if start and not (start in self.constants and bool(np.all(self.data[start]))):
            return False
        name = body.graph.output[0].name
        makers = {output: step for step in body.flat.nodes for output in step.output}
        while name in makers and makers[name].op_type == "Identity":
            name = makers[name].input[0]
        return name == body.graph.input[1].name or (name in body.constants and bool(np.all(body.data[name])))

    def concrete(self, kind: TypeProto) -> TypeProto:
        """A type with its symbols replaced by their sizes; an unknown shape is dropped."""
        copy = TypeProto()
        copy.CopyFrom(kind)
        for size in copy.tensor_type.shape.dim:
            if size.dim_param in self.sizes:
                size.dim_value = self.sizes[size.dim_param]
        return copy

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Sizes of a tensor, None where one is unknown."""
        kind = self.types.get(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        entries = kind.tensor_type.shape.dim
        known = all(size.HasField("dim_value") for size in entries)
        return tuple(size.dim_value for size in entries) if known else None

    def infer(self, node: NodeProto) -> None:
        """The node's output types, and its outputs where they are small and all its inputs are known."""
        if node.op_type == "Constant":
            self.constants.update(node.output)
        subgraphs = any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute)
        reads = [name for name in node.input if name]
        if not subgraphs and node.domain == "" and node.op_type not in RANDOM:
            shape = self.shape(node.input[0]) if node.op_type == "Shape" else None
            if shape is not None:
                start, end = (next((a.i for a in node.attribute if a.name == key), None) for key in ("start", "end"))
                self.keep(node.output[0], np.array(shape[slice(start, end)], np.int64))
                return
            if all(name in self.data for name in reads) and self.evaluate(node):
                return
        version = self.opsets.get(node.domain)
        if version is not None and not subgraphs and onnx.defs.has(node.op_type, version, node.domain):
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            types = {name: self.types.get(name, TypeProto()) for name in reads}
            data = {name: numpy_helper.from_array(self.data[name], name) for name in reads if name in self.data}
            imports = [helper.make_opsetid(domain, number) for domain, number in self.opsets.items()]
            try:
                self.types.update(
                    onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=imports)
                )
            except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
                print(f"note: {node.op_type} {node.name}: {error}", file=sys.stderr)
        for name in node.output:
            if self.shape(name) is None and name in self.stated:
                self.types[name] = self.stated[name]

    def evaluate(self, node: NodeProto) -> bool:
        """Compute a node of known, small inputs; False where its result is large."""
        results = [helper.make_value_info(name, TypeProto()) for name in node.output]
        graph = helper.make_graph([node], "one", [], results)
        feeds = {name: self.data[name] for name in node.input if name}
        graph.input.extend(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feeds.items()
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opsets[""])])
        try:
            with np.errstate(all="ignore"):
                found = ReferenceEvaluator(model).run(None, feeds)
        except Exception as error:  # the reference evaluator raises whatever its NumPy code does
            print(f"note: {node.op_type} {node.name} not evaluated: {error}", file=sys.stderr)
            return False
        if any(np.asarray(result).size > KNOWN_ELEMENTS for result in found):
            return False
        for name, result in zip(node.output, found, strict=False):
            if name:
                self.keep(name, np.asarray(result))
        return True

    def keep(self, name: str, value: np.ndarray) -> None:
        self.data[name] = value
        self.types[name] = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    def size(self, name: str) -> int | None:
        """Bytes of a tensor."""
        shape = self.shape(name)
        if shape is None:
            return None
        kind = self.types[name].tensor_type.elem_type
        if kind == TensorProto.STRING or not kind:
            return None
        four = {TensorProto.INT4, TensorProto.UINT4, getattr(TensorProto, "FLOAT4E2M1", -1)}
        width = 0.5 if kind in four else helper.tensor_dtype_to_np_dtype(kind).itemsize
        return ceil(prod(shape) * width)
