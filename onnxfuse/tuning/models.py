"""A region as models of its own: its nodes for ONNX Runtime, and one fused node; and inputs for both.

Weights of the region are initialisers for ONNX Runtime, as they are where the region comes from: it may fold them.  The
fused node's model has them as inputs, which are on the GPU once for all ways to run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph import LoadedModel, build_graph
from onnxfuse.graph.constants import read
from onnxfuse.graph.model import Value
from onnxfuse.graph.order import graphs_of
from onnxfuse.graph.sizes import shape_of
from onnxfuse.lowering import launch
from onnxfuse.measuring.intervals import Interval, interval_of
from onnxfuse.measuring.ranges import INDICES, find_ranges, index_bound
from onnxfuse.planning.regions.caches import bound_together
from onnxfuse.region import decides_sizes
from onnxfuse.rewriting.standalone import body_model
from onnxfuse.schedules import Kernel
from onnxfuse.tuning.subjects import Subject

Array = NDArray[Any]

DRAWN = 1 << 16
"""Numbers that are drawn at random; larger inputs repeat them, which no time depends on."""

MOST_WEIGHTS = 1 << 29
"""Bytes of weights that go into a model; larger ones are inputs."""


def runtime_model(subject: Subject) -> onnx.ModelProto:
    """The region's nodes as a model, with its sizes and its weights.

    Inputs are ``h0``, ``h1`` and so on for operands that decide sizes, ``x0`` and so on for tensors that are no
    weights.
    """
    fusion, optimised = subject.fusion, subject.source
    sizes = optimised.ledger.sizes
    model = body_model(fusion, optimised.folded.proto)
    graph = model.graph
    values = {f"h{place}": value for place, value in enumerate(fusion.hosts)}
    values |= {f"x{place}": value for place, value in enumerate(fusion.tensors)}
    values |= {f"y{place}": value for place, value in enumerate(fusion.outputs)}
    for info in (*graph.input, *graph.output):
        value = values[info.name]
        shape = (len(value.elements or ()),) if info.name.startswith("h") and value.shape is None else shape_of(
            value, sizes)
        info.CopyFrom(helper.make_tensor_value_info(info.name, info.type.tensor_type.elem_type, shape))
    read = {name for node in graph.node for name in node.input}
    weights = _weights({name: value for name, value in values.items() if name in read}, optimised.folded)
    graph.initializer.extend(weights.values())
    kept = [info for info in graph.input if info.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)
    return model


def kernel_model(body: onnx.ModelProto, subject: Subject, kernel: Kernel) -> onnx.ModelProto:
    """The same region as one fused node that runs a kernel; ``body`` is its ``runtime_model``, whose weights
    (``weights_of``) are inputs too."""
    hosts = [f"h{place}" if decides_sizes(value) else "" for place, value in enumerate(subject.fusion.hosts)]
    node = helper.make_node(
        "Region0", [*hosts, *[""] * (launch.HOST_INPUTS - len(hosts)),
                    *(f"x{place}" for place in range(len(subject.fusion.tensors)))],
        [info.name for info in body.graph.output], name="tuned", domain=launch.DOMAIN,
        plan=kernel.plan.to_json(), source=kernel.source,
    )
    weights = [helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
               for tensor in body.graph.initializer]
    read = [info for info in (*body.graph.input, *weights) if info.name in node.input]
    graph = helper.make_graph([node], body.graph.name or "region", read, body.graph.output)
    opsets = [entry for entry in body.opset_import if entry.domain != launch.DOMAIN]
    return helper.make_model(graph, ir_version=body.ir_version,
                             opset_imports=[*opsets, helper.make_opsetid(launch.DOMAIN, 1)])


def weights_of(body: onnx.ModelProto) -> dict[str, Array]:
    """The weights in a region's model by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in body.graph.initializer}


def feeds_of(body: onnx.ModelProto, subject: Subject, seed: int = 0) -> dict[str, Array]:
    """An array for each input: what the planned sizes imply for those that decide sizes, random numbers for others."""
    generator = np.random.default_rng(seed)
    values = build_graph(body).values
    feeds: dict[str, Array] = {}
    told: dict[Value, Interval] = {}
    hosts = {f"h{place}": host for place, host in enumerate(subject.fusion.hosts) if decides_sizes(host)}
    for info in sorted(body.graph.input, key=lambda info: info.name not in hosts):
        kind = info.type.tensor_type
        shape = tuple(size.dim_value for size in kind.shape.dim)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if info.name in hosts:
            elements = hosts[info.name].elements or ()
            array = np.array([size.evaluate(subject.sizes) for size in elements], dtype).reshape(shape)
            if (known := interval_of(array)) is not None:
                told[values[info.name]] = known
        else:
            array = _drawn(values[info.name], shape, dtype, (generator, told))
        feeds[info.name] = array
    return feeds


def bound_names(subject: Subject) -> dict[str, str]:
    """Outputs of its models that are to lie in the memory of an input, as the model's caller binds them."""
    return {f"y{output}": f"x{place}" for output, place in bound_together(subject.fusion, subject.sizes).items()}


def _drawn(value: Value, shape: tuple[int, ...], dtype: np.dtype[Any],
           by: tuple[np.random.Generator, Mapping[Value, Interval]]) -> Array:
    """Numbers for an input, drawn ``by`` a generator, beside what is known of other inputs."""
    generator, told = by
    if dtype.kind in "iu" and (only := find_ranges([value], {}, told).intervals[value]).low == only.high:
        return np.full(shape, only.low, dtype)  # as lengths of sequences are, which take time
    count = int(np.prod(shape, dtype=np.int64))
    few = min(count, DRAWN)
    if value.dtype == TensorProto.BOOL:
        drawn = generator.integers(0, 2, few).astype(dtype)
    elif dtype.kind in "iu":
        # Integers that index nothing are masks and the like: larger ones would make infinities of them.
        bound = 2 if (table := index_bound(value)) == INDICES else min(table, int(np.iinfo(dtype).max))
        drawn = generator.integers(0, max(1, bound), few).astype(dtype)
    else:
        drawn = generator.standard_normal(few, dtype=np.float32).astype(dtype)
    return np.resize(drawn, shape) if count else np.zeros(shape, dtype)


def _weights(values: Mapping[str, Value], loaded: LoadedModel) -> dict[str, TensorProto]:
    """Those of the values that are weights, as initialisers under the given names."""
    wanted = {value.name: name for name, value in values.items() if value.is_constant}
    found: dict[str, TensorProto] = {}
    room = MOST_WEIGHTS
    for tensor in (tensor for _, graph in graphs_of(loaded.proto) for tensor in graph.initializer):
        name = wanted.get(tensor.name)
        if name is None:
            continue
        array = read(tensor, loaded.folder)
        room -= array.nbytes
        if room >= 0:
            found[name] = helper.make_tensor(name, tensor.data_type, tensor.dims, array.tobytes(), raw=True)
    for name, value in values.items():
        if value.is_constant and name not in found and value.constant is not None:
            found[name] = numpy_helper.from_array(np.asarray(value.constant), name)
    return found
