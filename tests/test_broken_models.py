"""Models that are broken somewhere: one clear error, or a fused model that is as good as the original.

Small models are damaged at random, in a way a careless script or an attacker might: inputs rewired or emptied,
operators exchanged, attributes, sizes, types and constants changed.  Whatever comes of it, onnxfuse says what is wrong,
or what it makes of the model computes the original's results bit for bit and turns back into it.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from body_models import branches, growing, loop, nested, scan
from cli_models import CHAIN, encoder, parse
from onnx import AttributeProto, TensorProto, numpy_helper
from plain_session import session

from onnxfuse import api
from onnxfuse.errors import ModelError
from onnxfuse.graph import build_graph
from onnxfuse.graph.order import in_order
from onnxfuse.measuring import make_inputs
from onnxfuse.pipeline import Options, optimise

SEEDS = 24
"""Damaged copies of each model."""

SECONDS = 0.5
"""A run that takes longer has no end: every model here runs for some milliseconds."""

OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
SMALL = (-1, 0, 1, 2, 5, -7, 99)
INTEGERS = (*SMALL, 2**62, -(2**62))
"""No tensor of so many elements can be had: that ends at once, where 2**31 of them might be had after a while."""
FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e30)
STRINGS = (b"", b"foo", b"\xff\xfe", b"NOTSET", b"tanh")
SIZES = ("n", "a + b", "2*n", "", "x y", "-1", "n/2", "99999999999999999999", "{0}", '__import__("os")')
TYPES = (1, 2, 3, 6, 7, 8, 9, 10, 11, 14, 16)


def empty_input(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    if node.input:
        node.input[rng.randrange(len(node.input))] = ""


def rewire(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    names = [name for each in graph.node for name in each.output]
    names += [each.name for each in (*graph.initializer, *graph.input)]
    if node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def drop_input(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    del node.input[-1:]


def exchange(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    node.op_type = rng.choice(OPERATORS)


def twin(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    copy = graph.node.add()
    copy.CopyFrom(node)
    copy.output[:] = [f"{name}.twin" if name else "" for name in node.output]


def attribute(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    if not node.attribute:
        return
    place = rng.randrange(len(node.attribute))
    entry = node.attribute[place]
    if rng.random() < 0.2:
        del node.attribute[place]
    elif entry.type == AttributeProto.INT:
        entry.i = rng.choice(INTEGERS)
    elif entry.type == AttributeProto.FLOAT:
        entry.f = rng.choice(FLOATS)
    elif entry.type == AttributeProto.STRING:
        entry.s = rng.choice(STRINGS)
    elif entry.type == AttributeProto.INTS:
        numbers = [*entry.ints, rng.choice(INTEGERS)]
        rng.shuffle(numbers)
        entry.ints[:] = numbers[:rng.randrange(len(numbers) + 1)]


def constant(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    if not graph.initializer:
        return
    tensor = rng.choice(graph.initializer)
    numbers = contents(tensor) if tensor.data_type == TensorProto.INT64 and rng.random() < 0.7 else None
    if numbers is not None:
        if numbers.size:
            # A single number may be how often a Loop runs.
            numbers.reshape(-1)[rng.randrange(numbers.size)] = rng.choice(INTEGERS if numbers.ndim else SMALL)
        tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    else:
        tensor.dims.insert(rng.randrange(len(tensor.dims) + 1), 1)


def contents(tensor: TensorProto) -> np.ndarray | None:
    """A copy of what a tensor holds; None where an earlier damage left what cannot be read, or it is in a file."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return np.array(numpy_helper.to_array(tensor))
    except ValueError:
        return None


def declared(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    infos = [info for info in (*graph.input, *graph.output, *graph.value_info) if info.type.HasField("tensor_type")]
    if not infos:
        return
    tensor = rng.choice(infos).type.tensor_type
    if tensor.shape.dim and rng.random() < 0.7:
        size = rng.choice(tensor.shape.dim)
        if rng.random() < 0.5:
            size.dim_param = rng.choice(SIZES)
        else:
            size.dim_value = rng.choice((0, 1, 3, -1, 7, 2**62))
    else:
        tensor.elem_type = rng.choice(TYPES)


DAMAGES: Sequence[Callable[[onnx.GraphProto, onnx.NodeProto, random.Random], None]] = (
    empty_input, rewire, rewire, drop_input, exchange, twin, attribute, attribute, constant, declared, declared)


def damaged(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy with one to three damages, in the main graph or in a body."""
    rng = random.Random(seed)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for _ in range(rng.choice((1, 1, 2, 3))):
        graph, node = copy.graph, rng.choice(copy.graph.node)
        bodies = [entry.g for entry in node.attribute if entry.type == AttributeProto.GRAPH and entry.g.node]
        if bodies and rng.random() < 0.7:
            graph = rng.choice(bodies)
            node = rng.choice(graph.node)
        rng.choice(DAMAGES)(graph, node, rng)
    return copy


def loads(model: onnx.ModelProto) -> Any:
    """A session of the model; None where ONNX Runtime refuses it."""
    try:
        return session(model)
    except Exception:  # ONNX Runtime has an exception type per status
        return None


def run(model: Any, feeds: Mapping[str, Any], seconds: float) -> list[Any]:
    """A run's outputs; a Loop that damage made endless is ended from outside."""
    options = onnxruntime.RunOptions()
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.start()
    try:
        return list(model.run(None, feeds, options))
    finally:
        timer.cancel()


def fault(model: onnx.ModelProto) -> str | None:
    """What onnxfuse does wrong with a damaged model."""
    plain = loads(model)
    try:
        made = optimise(model, Options(target="H100", verify=False, least_gain=0.0, database=False))
    except ModelError as error:
        return f"refused: {error}" if plain is not None else None
    before = in_order(model)[0].SerializeToString(deterministic=True)
    if api.unfuse(made.model).SerializeToString(deterministic=True) != before:
        return "it does not come back"
    if plain is None or not made.regions:
        return None
    try:
        feeds = make_inputs(build_graph(model), {})
        wanted = run(plain, feeds, SECONDS)
    except Exception:  # it does not run: what the fused model would do is no matter
        return None
    after = loads(made.model)
    if after is None:
        return "ONNX Runtime refuses the fused model alone"
    for output, own, found in zip(plain.get_outputs(), wanted, run(after, feeds, 100 * SECONDS), strict=True):
        if isinstance(own, np.ndarray) and (own.dtype, own.shape, own.tobytes()) != (
                found.dtype, found.shape, found.tobytes()):
            return f"'{output.name}' changed"
    return None


VIEWS = """
g (float[n, 6, 8] x, int64[n] i) => (float[n, 3, 16] y, float[n, 8, 6] z, float[6, 8] m) {
  axes = Constant <value_ints = [0]> ()
  shape = Constant <value_ints = [0, 3, 16]> ()
  one = Constant <value = int64[1] {1}> ()
  starts = Constant <value_ints = [1]> ()
  ends = Constant <value_ints = [4]> ()
  a = Reshape(x, shape)
  b = Softmax <axis = -1> (a)
  y = Elu <alpha = 0.5> (b)
  t = Transpose <perm = [0, 2, 1]> (x)
  g = Gather <axis = 0> (t, i)
  z = Add(g, t)
  s = Slice(x, starts, ends, one)
  p = Concat <axis = 1> (s, s)
  m = ReduceMean <keepdims = 0> (p, axes)
}
"""

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "chain": lambda: parse(CHAIN),
    "encoder": lambda: encoder(layers=1, hidden=32, heads=2, dtype="float32"),
    "views": lambda: parse(VIEWS, opset=18),
    "branches": branches, "loop": loop, "scan": scan, "nested": nested, "growing": growing,
}


@pytest.mark.parametrize("name", MODELS)
def test_damaged_models(name: str) -> None:
    model = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numbers that were made large overflow
        faults = {seed: found for seed in range(SEEDS) if (found := fault(damaged(model, seed))) is not None}
    assert faults == {}


def test_damage_is_done() -> None:
    """Most damaged models are still models, and many are refused: neither side of the test is idle."""
    model = encoder(layers=1, hidden=32, heads=2, dtype="float32")
    copies = [damaged(model, seed) for seed in range(SEEDS)]
    assert sum(copy != model for copy in copies) > 0.75 * SEEDS
    assert 0.2 * SEEDS < sum(loads(copy) is not None for copy in copies) < 0.9 * SEEDS


def test_damage_is_done_to_what_is_damaged() -> None:
    """Whatever its constants hold by then, or do not."""
    model = parse(VIEWS, opset=18)
    for dims, numbers in (([3], [1, 2]), ([1 << 62, 8], []), ([-3], [1])):
        weight = TensorProto(name="w", data_type=TensorProto.INT64, dims=dims, int64_data=numbers)
        model.graph.initializer.append(weight)
        assert contents(weight) is None or list(contents(weight)) == numbers
    for seed in range(SEEDS):
        constant(model.graph, model.graph.node[0], random.Random(seed))
    assert any(len(tensor.dims) > 2 for tensor in model.graph.initializer)


def test_internal_errors_of_good_models_are_not_blamed_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxfuse import pipeline

    def fails(*_: object) -> None:
        raise IndexError("deep inside")

    monkeypatch.setattr(pipeline._Optimisation, "_chosen", fails)
    with pytest.raises(IndexError, match="deep inside"):
        optimise(parse(CHAIN), Options(verify=False))
    wrong = parse(CHAIN)
    wrong.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(ModelError, match="ONNX Runtime refuses the model itself, before anything is fused: "):
        optimise(wrong, Options(verify=False))
