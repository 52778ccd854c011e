"""Compare inferred sizes and types with those of a run.

    python tests/graph_truth.py MODEL.onnx [SYMBOL=SIZE]...

runs the model in ONNX Runtime on the CPU, its optimisations off, with every value as an output, and prints each
value whose element type, sizes or followed contents differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from onnxfuse.graph import Graph
from onnxfuse.operators import load_graph


def run_everything(
    proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray],
) -> dict[str, tuple[int, tuple[int, ...], np.ndarray | None]]:
    """Element type, sizes and, of small integers, contents of every value of the main graph that is a tensor."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    present = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: _ortvalue(array) for name, array in feeds.items()}
    found = session.run_with_ort_values(None, values)
    result: dict[str, tuple[int, tuple[int, ...], np.ndarray | None]] = {}
    for info, value in zip(session.get_outputs(), found, strict=True):
        if value.is_tensor():
            small = value.element_type() in (6, 7, 9) and np.prod(value.shape()) <= 64
            result[info.name] = (value.element_type(), tuple(value.shape()), value.numpy() if small else None)
    return result


def _ortvalue(array: np.ndarray) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def random_feeds(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of the sizes that the symbols are given: integers are ones, floats normal."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in graph.inputs:
        assert value.shape is not None and value.dtype is not None
        shape = tuple(size.evaluate(sizes) for size in value.shape)
        kind = helper.tensor_dtype_to_np_dtype(value.dtype)
        feeds[value.name] = (np.ones(shape) if kind.kind in "iub" else rng.standard_normal(shape)).astype(kind)
    return feeds


def differences(graph: Graph, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each value that is inferred otherwise than a run has it.

    Symbols of inputs are bound to the feeds; a symbol that first appears on another value is bound there.
    """
    bound: dict[str, int] = {}
    for value in graph.inputs:
        for size, true in zip(value.shape or (), feeds[value.name].shape, strict=True):
            if len(size.symbols) == 1 and str(size) in size.symbols:
                bound.setdefault(str(size), true)
    lines = []
    truth = run_everything(proto, feeds)
    for node in graph.nodes:
        for value in (output for output in node.outputs if output is not None):
            if value.name not in truth:
                continue
            dtype, shape, contents = truth[value.name]
            if value.dtype not in (None, dtype):
                lines.append(f"{value!r}: element type {dtype}")
            if value.shape is None:
                continue
            for size, true in zip(value.shape, shape, strict=False):
                if str(size) in size.symbols:
                    bound.setdefault(str(size), true)
            evaluated = tuple(size.evaluate(bound) for size in value.shape)
            if evaluated != shape:
                lines.append(f"{value!r}: {evaluated} inferred, {shape} true ({node!r})")
            if value.elements is not None and contents is not None:
                numbers = [element.evaluate(bound) for element in value.elements]
                if numbers != [int(number) for number in contents.reshape(-1)]:
                    lines.append(f"{value!r}: contents {numbers} inferred, {contents.tolist()} true ({node!r})")
    return lines


def main(arguments: list[str]) -> int:
    """Print the differences of one model; the exit code says whether there were any."""
    path, *given = arguments
    graph = load_graph(path)
    sizes = {name: int(size) for name, size in (pair.split("=") for pair in given)}
    proto = onnx.load(path)
    lines = differences(graph, proto, random_feeds(graph, sizes))
    print("\n".join(lines))
    unknown = sum(value.shape is None or value.dtype is None for value in graph.values.values())
    print(f"{path}: {len(graph.values)} values, {len(lines)} differ, {unknown} unknown, "
          f"{len(graph.assumptions)} sizes taken from the file")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
