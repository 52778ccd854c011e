"""Models without their weights, as the folders of networks keep them; needs onnx alone."""

from __future__ import annotations

import gc
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import onnx
from onnx import TensorProto, numpy_helper

KEPT = 64
"""Elements up to which a tensor keeps its bytes: sizes and axes are among them."""
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


class Named(Protocol):
    """A network to export."""

    @property
    def name(self) -> str:
        """Of the file."""
        ...


Network = TypeVar("Network", bound=Named)


def keep_all(folder: Path, networks: Iterable[Network], names: Sequence[str],
             exported: Callable[[Network], onnx.ModelProto], row: Callable[[Network], Mapping[str, Any]]) -> None:
    """Export networks whose names begin so, all where none is given, into a folder.

    Args:
        exported: makes a network's model; row: what zoo.json says of it.
    """
    for network in networks:
        if names and not network.name.startswith(tuple(names)):
            continue
        try:
            model = exported(network)
        except Exception as error:  # what one network cannot, others may
            print(f"{network.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue
        _keep(folder, network.name, model, row(network))
        gc.collect()


def _keep(folder: Path, name: str, model: onnx.ModelProto, row: Mapping[str, Any]) -> None:
    """Write a model's skeleton, and its row into the folder's zoo.json."""
    size = _strip(model.graph)
    (folder / f"{name}.onnx.xz").write_bytes(
        lzma.compress(model.SerializeToString(deterministic=True), preset=9 | lzma.PRESET_EXTREME))
    path = folder / "zoo.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    rows[name] = {**row, "nodes": len(model.graph.node), "bytes": size, "in_mean": False}
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    print(f"{name}: {len(model.graph.node)} nodes", flush=True)


def _strip(graph: onnx.GraphProto) -> int:
    """Leave a mean and a spread of each weight; gives the bytes that they had."""
    total = 0
    for node in graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for tensor in _tensors(graph):
        total += len(tensor.raw_data)
        if tensor.data_type not in FLOATS:
            continue
        values = numpy_helper.to_array(tensor).astype("float64")
        if values.size <= KEPT:
            continue
        tensor.doc_string = json.dumps({"hydrate": [round(float(values.mean()), 6), round(float(values.std()), 6)]})
        for field in ("raw_data", "float_data", "int32_data"):
            tensor.ClearField(field)
    return total


def _tensors(graph: onnx.GraphProto) -> Iterator[Any]:
    """All weights; those that nodes hold become the graph's."""
    for node in list(graph.node):
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            tensor = node.attribute[0].t
            if tensor.data_type in FLOATS and numpy_helper.to_array(tensor).size > KEPT:
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = node.output[0]
                graph.node.remove(node)
    yield from graph.initializer
