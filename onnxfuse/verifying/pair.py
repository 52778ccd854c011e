"""A model and its fused form as two files, the second of which anybody may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import TypeProto

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph, LoadedModel, bind
from onnxfuse.graph.sizes import type_name
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.rewriting import FusedNode, planned_form, read_fused
from onnxfuse.verifying.first_run import FirstRun
from onnxfuse.verifying.foreseen import Foreseeing
from onnxfuse.verifying.reference import formal_names


@dataclass(frozen=True)
class Pair:
    """A model and its fused form, as ``verify.verify`` wants them.

    Attributes:
        loaded: the original; fused: the other file; graph: of the original; ledger: at the sizes to run at.
    """

    loaded: LoadedModel
    fused: LoadedModel
    graph: Graph
    ledger: Ledger

    @staticmethod
    def of(original: LoadedModel, fused: LoadedModel, dims: Mapping[str, int]) -> Pair:
        """Build the graph of the original, as far as Ifs go in the form that was planned.

        Raises:
            ModelError: it cannot be understood, or ``dims`` names no dimension of it.
        """
        graph = load_graph(planned_form(original, fused.proto))
        return Pair(original, fused, graph, Ledger(graph, bind(graph, dims)))

    @property
    def lean(self) -> onnx.ModelProto:
        """The fused model."""
        return self.fused.proto

    @property
    def folder(self) -> Path | None:
        """Where the fused model's weights are that are kept in files."""
        return self.fused.folder

    @property
    def first_run(self) -> FirstRun | None:
        """None: there is nothing beside which it would be made."""
        return None

    @property
    def foreseen(self) -> Foreseeing | None:
        """None, as ``first_run``."""
        return None

    def check(self) -> None:
        """See that the fused model is one of the original.

        Raises:
            ModelError: its fused nodes speak of values that the original lacks, or its inputs or outputs are others.
        """
        self._check_borders()
        for node in read_fused(self.fused.proto):
            known = self._known(node)
            for name in (*formal_names(node).values(), *filter(None, node.outputs)):
                if name not in known:
                    raise stranger(f"The fused node {node.name!r} speaks of {name!r}, and the original model has no "
                                   "such value.", self.fused)

    def _known(self, node: FusedNode) -> Mapping[str, object]:
        try:
            return self.graph.part(node.body).values
        except KeyError:
            label = "" if node.body is None else node.body.label
            raise stranger(f"The fused node {node.name!r} is in {label!r}, and the original model has no such body.",
                           self.fused) from None

    def _check_borders(self) -> None:
        for kind in ("inputs", "outputs"):
            wanted, got = (_border(loaded, kind) for loaded in (self.loaded, self.fused))
            if list(wanted) != list(got) or not all(wanted[name].agrees(got[name]) for name in wanted):
                raise stranger(f"The models have other {kind}: the original {_listed(wanted)}, the fused model "
                               f"{_listed(got)}.", self.fused)


def stranger(message: str, fused: LoadedModel) -> ModelError:
    """The error for a file that was not made of the original."""
    return ModelError(message, place=None if fused.path is None else str(fused.path),
                      remedy="Give the model that the file was fused from.")


class _Type(NamedTuple):
    """Of an input or an output: its element type or kind in words, and how many axes it has where that is said."""

    kind: str
    rank: int | None

    def agrees(self, other: _Type) -> bool:
        return self.kind == other.kind and (None in (self.rank, other.rank) or self.rank == other.rank)


def _border(loaded: LoadedModel, kind: str) -> dict[str, _Type]:
    """The inputs or outputs in their order."""
    graph = loaded.proto.graph
    held = {tensor.name for tensor in graph.initializer} if kind == "inputs" else set()
    infos = graph.input if kind == "inputs" else graph.output
    return {info.name: _type(info.type) for info in infos if info.name not in held}


def _type(kind: TypeProto) -> _Type:
    if kind.WhichOneof("value") != "tensor_type":
        return _Type(str(kind.WhichOneof("value") or "any type").removesuffix("_type"), None)
    tensor = kind.tensor_type
    rank = len(tensor.shape.dim) if tensor.HasField("shape") else None
    return _Type(type_name(tensor.elem_type), rank)


def _listed(border: Mapping[str, _Type]) -> str:
    return ", ".join(f"{name!r} ({each.kind}{'' if each.rank is None else f' of {each.rank} axes'})"
                     for name, each in border.items()) or "none"
