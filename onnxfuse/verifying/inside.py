"""A model that gives out values of its bodies: no session can be asked for them by name.

    If    ─▶ a further result of both branches, empty in the other one
    Loop  ─▶ one more carried value, empty before the first run: what comes out is of the last run
    Scan  ─▶ one more stacked result: the last slice is of the last run

A body in a body hands its value to the graph around it, and that one on, until the main graph has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.graph.model import Place
from onnxfuse.rewriting.index import graph_at


@dataclass(frozen=True)
class Inner:
    """A value of a body: where that is, and the value's name, element type and, where known, number of axes."""

    place: Place
    name: str
    kind: int
    rank: int | None = None


@dataclass(frozen=True)
class Exposed:
    """What the main graph calls it, and how often it was stacked on the way."""

    name: str
    stacked: int

    def last(self, array: NDArray[Any]) -> NDArray[Any] | None:
        """What it was when its body ran last, an array even if it has no axes; None where that did not run, or it is
        empty."""
        for _ in range(self.stacked):
            if not len(array):
                return None
            array = array[-1, ...]
        return array if array.size else None


def expose(model: onnx.ModelProto, values: Sequence[Inner]) -> tuple[onnx.ModelProto, list[Exposed]]:
    """A copy of the model whose main graph computes these values of bodies, under new names.

    The names are no outputs yet.  Nodes keep their places.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    found = []
    for number, value in enumerate(values):
        name, stacked, rank = value.name, 0, value.rank
        for depth in range(len(value.place), 0, -1):
            place = value.place[:depth]
            fresh = f"onnxfuse.{number}.{depth}"
            owner = graph_at(result, place[:-1]).node[place[-1][0]]
            if owner.op_type == "If":
                _from_branch(result, place, owner, name, fresh, value.kind)
            elif owner.op_type == "Loop":
                _from_loop(result, place, owner, name, fresh, value.kind)
            else:
                _from_scan(result, place, owner, name, _info(f"{fresh}.each", value.kind, rank))
                owner.output.append(fresh)
                stacked, rank = stacked + 1, None if rank is None else rank + 1
            name = fresh
        found.append(Exposed(name, stacked))
    return result, found


def _from_branch(
    model: onnx.ModelProto, place: Place, owner: onnx.NodeProto, name: str, fresh: str, kind: int
) -> None:
    for attribute in owner.attribute:
        graph, given = attribute.g, f"{fresh}.{attribute.name}"
        if attribute.name == place[-1][1]:
            graph.node.append(helper.make_node("Identity", [name], [given]))
        else:
            graph.node.append(helper.make_node("Constant", [], [given], value=helper.make_tensor("", kind, [0], [])))
        graph.output.append(_info(given, kind))
    owner.output.append(fresh)


def _from_loop(model: onnx.ModelProto, place: Place, owner: onnx.NodeProto, name: str, fresh: str, kind: int) -> None:
    around, body = graph_at(model, place[:-1]), graph_at(model, place)
    while len(owner.input) < 2:
        owner.input.append("")
    carried = len(owner.input) - 2
    around.initializer.append(helper.make_tensor(f"{fresh}.before", kind, [0], []))
    owner.input.append(f"{fresh}.before")
    body.input.append(_info(f"{fresh}.inside", kind))
    body.node.append(helper.make_node("Identity", [name], [f"{fresh}.after"]))
    body.output.insert(1 + carried, _info(f"{fresh}.after", kind))
    owner.output.insert(carried, fresh)


def _from_scan(
    model: onnx.ModelProto, place: Place, owner: onnx.NodeProto, name: str, each: onnx.ValueInfoProto
) -> None:
    """The result says its number of axes: ONNX Runtime wants it, and behind a Loop it cannot tell it by itself."""
    body = graph_at(model, place)
    body.node.append(helper.make_node("Identity", [name], [each.name]))
    body.output.append(each)
    for attribute in owner.attribute:
        if attribute.name in ("scan_output_axes", "scan_output_directions"):
            attribute.ints.append(0)


def _info(name: str, kind: int, rank: int | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank)
