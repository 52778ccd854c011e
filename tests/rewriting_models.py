"""Small models, regions chosen by hand, and runs of both, for the tests of the rewriting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxfuse.graph import Graph, Node
from onnxfuse.lowering.launch import LaunchPlan, Output, Variant
from onnxfuse.operators import load_graph
from onnxfuse.region import Region, RegionCost
from onnxfuse.rewriting import Rewritten, rewrite
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.source import Given

PLAN = LaunchPlan("test", 1, (), (), (Output(onnx.TensorProto.FLOAT, ("i0.0",)),), (Variant("only", ()),))
SOURCE = 'extern "C" __global__ void k() {}'
COST = RegionCost(96, 32, 3, 1, 6e-6, 2e-6, 64)

CHAIN = """
<ir_version: 8, opset_import: ["" : 17], producer_name: "tests", doc_string: "a chain">
chain (float[batch, 4] x, float[batch, 4] z) => (float[batch, 4] y)
<float two = {2.0}, float[4] w = {1.0, 2.0, 3.0, 4.0}, float[batch, 4] a>
{
  a = Add (x, z)
  b = Mul (a, two)
  c = Relu (b)
  d = MatMul (c, eye)
  e = Mul (d, w)
  y = Tanh (e)
}
"""


def parse(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form; its nodes are named after their first outputs, "node_y"."""
    model = onnx.parser.parse_model(text)
    for name, array in initializers.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    return model


def chain() -> onnx.ModelProto:
    """Two pointwise pieces around a product."""
    return parse(CHAIN, eye=np.eye(4, dtype=np.float32))


def region(graph: Graph, *outputs: str, hosts: Sequence[str] = (), inline: bool = True, **fields: Any) -> Region:
    """The region of the nodes whose first outputs are named; constants of up to 16 elements are inlined."""
    chosen = {graph.values[name].producer for name in outputs}
    return region_of(graph, [node for node in graph.nodes if node in chosen], hosts, inline=inline, **fields)


def region_of(
    graph: Graph, nodes: Sequence[Node], hosts: Collection[str] = (), *, inline: bool = True, plan: LaunchPlan = PLAN,
    source: str = SOURCE, **fields: Any
) -> Region:
    """The region of the nodes, with the inputs and outputs that it must have."""
    produced = [value for node in nodes for value in node.outputs if value is not None]
    reads = dict.fromkeys(value for node in nodes for value in node.reads() if value not in produced)
    small = [v for v in reads if inline and v.constant is not None and v.constant.size <= 16 and v.name not in hosts]
    return Region(**{
        "rule": "test",
        "nodes": tuple(nodes),
        "hosts": tuple(value for value in reads if value.name in hosts),
        "tensors": tuple(value for value in reads if value not in small and value.name not in hosts),
        "inlined": tuple(small),
        "outputs": tuple(v for v in produced if v.is_output or any(user not in nodes for user in v.consumers)),
        "counted": COST,
        "made": Kernel("pointwise", Given(source), plan),
        **fields,
    })


def fuse(model: onnx.ModelProto, *groups: Sequence[str], **fields: Any) -> Rewritten:
    """The model with a region for each group of first outputs; the result passes onnx's checker."""
    graph = load_graph(model)
    before = model.SerializeToString(deterministic=True)
    result = rewrite(model, graph, [region(graph, *group, **fields) for group in groups])
    assert model.SerializeToString(deterministic=True) == before, "the input was changed"
    onnx.checker.check_model(result.model, full_check=True)
    return result


def run(model: onnx.ModelProto | str, feeds: Mapping[str, np.ndarray], basic: bool = False) -> list[np.ndarray]:
    """Outputs on the CPU, the runtime's own optimisations off, or the ``basic`` ones on."""
    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if basic else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    data = model if isinstance(model, str) else model.SerializeToString()
    return list(ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, dict(feeds)))


def same_bits(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Whether two runs gave the same types, sizes and bits."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )


def random_feeds(model: onnx.ModelProto, seed: int = 0, size: int = 3) -> dict[str, np.ndarray]:
    """Normal numbers, in the inputs' types, for every input; ``size`` for each open dimension."""
    generator = np.random.default_rng(seed)
    held = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        if info.name not in held:
            shape = [entry.dim_value or size for entry in kind.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            feeds[info.name] = generator.normal(size=shape).astype(dtype)
    return feeds


def fused_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Nodes of our domain in the main graph."""
    return [node for node in model.graph.node if node.domain == "onnxfuse"]
