"""The fused nodes of a model, without reading its weights."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.bounded import parse_json
from onnxfuse.runtime.compile import PTX, KernelSource, compiles_for
from onnxfuse.runtime.dump import VARIABLE as DUMP
from onnxfuse.varint import Buffer, delimited

DOMAIN = "onnxfuse"  # lowering.launch.DOMAIN, which a deployment need not import
_GRAPH, _FUNCTIONS, _NODES = 7, 25, 1  # field numbers: ModelProto.graph, ModelProto.functions, GraphProto.node
_FUNCTION_NODES = 7  # FunctionProto.node
_METADATA, _KEY, _VALUE = 14, 1, 2  # ModelProto.metadata_props, StringStringEntryProto.key and value
PLAN = b"onnxfuse.plan"  # rewriting.provenance.KEY



def fused_nodes(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> list[onnx.NodeProto]:
    """All nodes of onnxfuse's domain, those in nested graphs and functions too.

    Weights are stepped over, so that a model of gigabytes takes milliseconds.

    Raises:
        OSError: the file cannot be read.
        ValueError: the bytes are no model.
    """
    if isinstance(model, onnx.ModelProto):
        nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
        return [found for node in nodes for found in _fused(node)]
    with _opened(model) as data:
        return list(_read(data))


def planned_for(model: str | os.PathLike[str] | bytes) -> tuple[dict[str, str], list[str]]:
    """The options of the CUDA provider that a fused model was planned for, and those that its plan hangs on; nothing
    of a model that does not say so.

    Raises:
        OSError, ValueError: as ``fused_nodes``.
    """
    with _opened(model) as data:
        entries = (dict(_texts(data, start, end)) for number, _, start, end in delimited(data, 0, len(data))
                   if number == _METADATA)
        text = next((entry.get(_VALUE, b"") for entry in entries if entry.get(_KEY) == PLAN), None)
    record = None if text is None else parse_json(text)
    if not isinstance(record, dict):
        return {}, []
    options, hangs_on = record.get("provider_options"), record.get("hangs_on")
    return (options if isinstance(options, dict) else {}), (hangs_on if isinstance(hangs_on, list) else [])


@contextmanager
def _opened(model: str | os.PathLike[str] | bytes) -> Iterator[Buffer]:
    """A model's bytes, without a copy of its weights."""
    if isinstance(model, bytes):
        yield model
        return
    with Path(model).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _texts(data: Buffer, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of a message's length-delimited fields."""
    return ((number, data[first:last]) for number, _, first, last in delimited(data, start, end))


def names_needed(nodes: Iterable[onnx.NodeProto]) -> int:
    """How many names of the library's pool, counted from its first, hold the operators of these fused nodes."""
    numbers = [re.fullmatch(r"Region([0-9]{1,6})", node.op_type) for node in nodes]
    return 1 + max((int(found[1]) for found in numbers if found is not None), default=-1)


def kernel_sources(model: str | os.PathLike[str] | bytes | onnx.ModelProto, architecture: str) -> list[KernelSource]:
    """The distinct kernel texts of a model that must be compiled for an architecture ("sm_90a").

    Those with an embedded image need not, unless kernels are dumped; nor those with PTX, which is the driver's to
    compile, where the compiler here does not know the architecture.

    Raises:
        OSError, ValueError: as ``fused_nodes``.
    """
    return sources_of(fused_nodes(model), architecture)


def sources_of(nodes: Iterable[onnx.NodeProto], architecture: str) -> list[KernelSource]:
    """The same of fused nodes at hand."""
    distinct: dict[KernelSource, None] = {}
    for node in nodes:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "plan" not in attributes or "source" not in attributes:
            continue
        if _embedded(set(attributes), architecture) and not os.environ.get(DUMP):
            continue
        if _has_ptx(set(attributes), architecture) and not compiles_for(architecture):
            continue
        try:
            plan = parse_json(attributes["plan"].s)
            kernels = sorted({step["kernel"] for variant in plan["variants"] for step in variant["steps"]
                              if "call" not in step})
            "\n".join((*kernels, *plan["options"])).encode()
            kernel = KernelSource(attributes["source"].s.decode(), tuple(plan["options"]), tuple(kernels))
        except (ValueError, KeyError, TypeError):
            continue  # the native library names the node and what is wrong with its plan
        if kernels:
            distinct[kernel] = None
    return list(distinct)


def _embedded(attributes: set[str], architecture: str) -> bool:
    """Whether the native library finds an image among the attributes: native/images.cc has the same rule."""
    number = _number(architecture)
    names = [f"sm_{number}a", *(f"sm_{lower}" for lower in range(number, number // 10 * 10 - 1, -1))]
    return any(f"image_{name}" in attributes for name in names)


def _has_ptx(attributes: set[str], architecture: str) -> bool:
    """Whether there is PTX among the attributes that a driver compiles for an architecture."""
    return any(f"image_{PTX}{lower}" in attributes for lower in range(_number(architecture), 0, -1))


def _number(architecture: str) -> int:
    """90 of "sm_90a"."""
    return int(architecture.removeprefix("sm_").rstrip("af"))


def _fused(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    if node.domain == DOMAIN:
        yield node
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                yield from _fused(inner)


def _read(data: Buffer) -> Iterator[onnx.NodeProto]:
    for number, _, start, end in delimited(data, 0, len(data)):
        if number in (_GRAPH, _FUNCTIONS):
            wanted = _NODES if number == _GRAPH else _FUNCTION_NODES
            for inner, _, node_start, node_end in delimited(data, start, end):
                if inner == wanted:
                    yield from _fused(_node(data[node_start:node_end]))


def _node(raw: bytes) -> onnx.NodeProto:
    try:
        node: onnx.NodeProto = onnx.NodeProto.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"not an ONNX model: {error}") from error
    return node
