"""Which fused nodes cost time: each against the nodes that it replaced, alone, by turns on the GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from onnxfuse import rewriting
from onnxfuse.debugging.pair import Inputs, Progress
from onnxfuse.debugging.results import NodeTime, TimeResult
from onnxfuse.debugging.variants import Variants
from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.graph.order import graphs_of
from onnxfuse.lowering.launch import HOST_INPUTS
from onnxfuse.measuring import BenchResult, bench
from onnxfuse.measuring.machine import find_machine
from onnxfuse.rewriting import FusedNode, body_model
from onnxfuse.verifying.capture import Captured, Source, capture
from onnxfuse.verifying.evaluate import plain_feeds, with_plain_borders
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.runner import node_model
from onnxfuse.verifying.runs import Recipe, users_run
from onnxfuse.verifying.sharing import sharing

Array = NDArray[Any]

Ratio = tuple[float, float, float]
"""A ratio of times, and the ends of its 95% interval."""

RUNS = 100
"""Timed runs of a single node, and of what it replaced."""


class Timer(Protocol):
    """What measures GPU time."""

    device: str
    """Name of the GPU."""
    providers: Sequence[Any]
    """ONNX Runtime's providers for the run of the original that inputs of single nodes are taken from."""

    def node(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[float, float, Ratio]:
        """Milliseconds of the nodes that a fused node of ``model`` replaced, of the fused node, and their ratio; on
        inputs by formal name.

        Raises:
            OnnxfuseError: they cannot be run or measured.
        """
        ...

    def whole(self, pair: Pair, fused: onnx.ModelProto, feeds: Mapping[str, Array]) -> Ratio:
        """GPU time of the original over that of a variant of the fused model.

        Raises:
            OnnxfuseError: they cannot be run or measured.
        """
        ...


class BenchTimer:
    """``measuring.bench`` on the GPU."""

    def __init__(self) -> None:
        """Find the GPU.

        Raises:
            KernelError: there is none that ONNX Runtime can use.
        """
        machine = find_machine()
        if machine.gpu is None:
            raise KernelError(
                "Times are measured on a GPU, and there is none here that ONNX Runtime can use.",
                remedy="Run this where the GPU is; --by answer compares the functions without one.",
            )
        self.device = machine.name
        self.providers: Sequence[Any] = machine.providers({})

    def node(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[float, float, Ratio]:
        """See ``Timer``.  What is constant in the model is constant here, so that the runtime fuses what it would."""
        first, second, rest = node_pair(node, model, feeds)
        with tempfile.TemporaryDirectory(prefix="onnxfuse-") as folder:
            paths = [Path(folder) / name for name in ("original.onnx", "fused.onnx")]
            for path, made in zip(paths, (first, second), strict=True):
                onnx.save(made, path)
            found = bench(paths[0], paths[1], inputs=rest, runs=RUNS, memory=False)
        ratio = _ratio(found)
        before, after = found.original.gpu, None if found.fused is None else found.fused.gpu
        assert before is not None and after is not None
        return before.median, after.median, ratio

    def whole(self, pair: Pair, fused: onnx.ModelProto, feeds: Mapping[str, Array]) -> Ratio:
        """See ``Timer``; the original must have been read from a file."""
        assert pair.loaded.path is not None
        with tempfile.TemporaryDirectory(prefix="onnxfuse-") as folder:
            path = rewriting.save(fused, Path(folder) / "fused.onnx", source=pair.fused).path
            return _ratio(bench(pair.loaded.path, path, inputs=feeds, memory=False))


def bisect_times(pair: Pair, timer: Timer | None = None, *, inputs: Inputs | None = None,
                 progress: Progress | None = None) -> TimeResult:
    """Measure every fused node against the nodes it replaced; nodes of one kernel and equal sizes once.

    Args:
        timer: ``BenchTimer()`` where None.
        inputs: the user's own, by name; made ones of the planned sizes where None.

    Raises:
        KernelError: there is no GPU.
        ModelError: the files do not belong together, or ``inputs`` do not fit the model.
        OnnxfuseError: the whole model cannot be measured.
    """
    timer = timer or BenchTimer()
    step = progress or (lambda *_: None)
    variants = Variants(pair.loaded, pair.fused)
    nodes = tuple(variants.nodes.values())
    run = users_run(pair.graph, inputs) if inputs else Recipe(pair.ledger.sizes).make(pair.graph)
    groups: dict[tuple[Any, ...], list[str]] = {}
    times: dict[tuple[Any, ...], NodeTime] = {}
    planned = rewriting.planned_form(pair.loaded, pair.fused.proto)
    with sharing(planned, pair.fused.proto, folder=pair.folder) as (original, _):
        captured = capture(nodes, Source(planned, pair.graph, run), original, pair.ledger.sizes, timer.providers)
        for done, taken in enumerate(captured):
            step(f"timing {taken.node.name}", done, len(nodes))
            key = _key(taken)
            groups.setdefault(key, []).append(taken.node.name)
            if key not in times:
                times[key] = _timed(taken, pair, variants, timer)
    found = [replace(times[key], alike=tuple(names[1:])) for key, names in groups.items()]
    found.sort(key=lambda time: -time.lost)
    slow = {name for key, names in groups.items() if times[key].slower for name in names}
    before = after = None
    if slow:
        step("timing the whole model", 0, 2)
        before = timer.whole(pair, pair.fused.proto, run.feeds)
        step("timing the whole model", 1, 2)
        mended = variants.model(pair.fused.proto, variants.nodes.keys() - slow)
        after = timer.whole(pair, mended, run.feeds)
    return TimeResult(timer.device, (str(run.about),), len(nodes), tuple(found), before, after)


def node_pair(
    node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array]
) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Array]]:
    """A model of a fused node's own nodes, one of the fused node, and the inputs of both.

    Operands in host memory, and what is constant in ``model``, are constants of both.
    """
    body = body_model(node, model)
    kinds = {info.name: info.type.tensor_type.elem_type for info in body.graph.input}
    graphs = [graph for _, graph in graphs_of(model)]
    constants = {tensor.name for graph in graphs for tensor in graph.initializer}
    constants |= {name for graph in graphs for entry in graph.node if entry.op_type == "Constant"
                  for name in entry.output}
    reads = {f"h{place}": "" for place in range(HOST_INPUTS)} | {
        f"x{place}": name for place, name in enumerate(node.tensors)}
    held = {formal for formal in kinds if not reads[formal] or reads[formal] in constants}
    if held >= kinds.keys():
        held = {formal for formal in held if not reads[formal]}  # of constants alone the runtime would fold it all
    first, second = with_plain_borders(body), node_model(node, model, node.plan, feeds)
    rest: dict[str, Array] = {}
    for formal, kind in kinds.items():
        for name, array in plain_feeds(feeds, {formal: kind}).items():
            if formal in held:
                _fix(first, name, array)
                _fix(second, name, array)
            else:
                rest[name] = array
    return first, second, rest


def _fix(model: onnx.ModelProto, name: str, array: Array) -> None:
    """Make a constant of an input."""
    for place in reversed(range(len(model.graph.input))):
        if model.graph.input[place].name == name:
            del model.graph.input[place]
            tensor = helper.make_tensor("", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape,
                                        np.asarray(array, order="C").tobytes(), raw=True)
            tensor.name = name
            model.graph.initializer.append(tensor)


def _key(taken: Captured) -> tuple[Any, ...]:
    shapes = tuple((name, array.shape, str(array.dtype)) for name, array in sorted(taken.feeds.items()))
    return taken.node.op, shapes


def _timed(taken: Captured, pair: Pair, variants: Variants, timer: Timer) -> NodeTime:
    node = taken.node
    labels = variants.labels(node.name)
    try:
        before, after, (value, low, high) = timer.node(node, pair.fused.proto, taken.feeds)
    except OnnxfuseError as error:
        return NodeTime(node.name, node.op, node.rule, labels, reason=error.message)
    return NodeTime(node.name, node.op, node.rule, labels, (), before, after, value, low, high)


def _ratio(found: BenchResult) -> Ratio:
    if found.gpu_ratio is None:
        raise KernelError("; ".join(found.notes) or "GPU time was not measured")
    return found.gpu_ratio.value, found.gpu_ratio.low, found.gpu_ratio.high
