"""What the inputs of fused nodes are in a run of the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.constants import read
from onnxfuse.graph.load import LoadedModel
from onnxfuse.planning.sizes import Sizes, bytes_of
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.evaluate import array_type, plain_feeds
from onnxfuse.verifying.reference import formal_names
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim

Array = NDArray[Any]

GROUP_BYTES = 1 << 30
"""Captured values that are in memory at a time, as far as their sizes are known before the run."""


@dataclass(frozen=True)
class Captured:
    """A fused node and what it reads in a run, by formal name."""

    node: FusedNode
    feeds: Mapping[str, Array]


def capture(nodes: Sequence[FusedNode], loaded: LoadedModel, graph: Graph, slim: Slim, run: Run, sizes: Sizes,
            providers: Sequence[Any]) -> Iterator[Captured]:
    """The inputs of each node, from one run of the original for every group of nodes that fits in memory.

    Raises:
        VerificationError: ONNX Runtime cannot run the original.
    """
    constants = {tensor.name: tensor for tensor in loaded.proto.graph.initializer}
    for group in _groups(nodes, graph, sizes):
        wanted = {name: None for node in group for name in formal_names(node).values()
                  if name not in constants and name not in run.feeds}
        values = dict(zip(wanted, _run(slim, run, graph, list(wanted), providers), strict=True)) if wanted else {}
        for node in group:
            feeds = {}
            for formal, name in formal_names(node).items():
                if name in run.feeds:
                    feeds[formal] = run.feeds[name]
                elif name in constants:
                    feeds[formal] = read(constants[name], loaded.folder)
                else:
                    feeds[formal] = values[name]
            yield Captured(node, feeds)


def run_model(session: Any, model: onnx.ModelProto, run: Run) -> list[Array]:
    """The results of a session of a model that has plain borders.

    Raises:
        VerificationError: the run fails.
    """
    kinds = {info.name: info.type.tensor_type.elem_type for info in model.graph.input if info.name in run.feeds}
    try:
        results: list[Any] = session.run(None, plain_feeds(run.feeds, kinds))
    except Exception as error:  # ONNX Runtime has an exception type per status
        raise VerificationError(
            f"A run of the model fails on {run.about}: {error}",
            remedy="Give inputs that the model takes: --inputs FILE.npz, or sizes: --dim NAME=N.",
        ) from error
    return results


def _run(slim: Slim, run: Run, graph: Graph, names: Sequence[str], providers: Sequence[Any]) -> list[Array]:
    kinds = [graph.values[name].dtype for name in names]
    unknown = [name for name, kind in zip(names, kinds, strict=True) if kind is None]
    if unknown:
        raise VerificationError(f"The type of '{unknown[0]}' is not known.")
    present = {info.name for info in slim.model.graph.output}
    extra = [(name, kind) for name, kind in zip(names, kinds, strict=True) if kind is not None and name not in present]
    session = slim.session(providers, extra)
    outputs = [info.name for info in slim.model.graph.output] + [name for name, _ in extra]
    found = dict(zip(outputs, run_model(session, slim.model, run), strict=True))
    return [np.asarray(found[name]).astype(array_type(kind), copy=False)
            for name, kind in zip(names, kinds, strict=True) if kind is not None]


def _groups(nodes: Sequence[FusedNode], graph: Graph, sizes: Sizes) -> Iterator[list[FusedNode]]:
    group: list[FusedNode] = []
    held: set[str] = set()
    total = 0
    for node in nodes:
        fresh = set(formal_names(node).values()) - held
        size = sum(bytes_of(graph.values[name], sizes) or 0 for name in fresh)
        if group and total + size > GROUP_BYTES:
            yield group
            group, held, total = [], set(), 0
            fresh = set(formal_names(node).values())
        group.append(node)
        held |= fresh
        total += size
    if group:
        yield group
