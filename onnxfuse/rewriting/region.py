"""What the rewriting needs to know of a fused region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.lowering.launch import LaunchPlan


@dataclass(frozen=True)
class FusedRegion:
    """A region of one graph of the original, the main one or a body, and the kernel that takes its place.

    Attributes:
        rule, schedule: ids, for the report.
        nodes: the original nodes it replaces, in graph order; a convex set.  Constant nodes among them are treated
            as inlined: they leave the model only when nothing else reads them.
        hosts: values that the node reads in host memory (shape operands), at most ``launch.HOST_INPUTS``.
        tensors: values that the kernel reads, in the order of the plan's ``i0``, ``i1`` and so on; at least one.
        inlined: small constants that the body needs and the kernel does not read: they become Constant nodes of
            the body.
        outputs: values used outside, in the order of the plan's ``o0``, ``o1`` and so on.
        plan: how the kernel is launched; source: its text.
        images: compiled kernels by architecture ("sm_90"), where embedding was asked for.
        figures: what the report keeps with the node (bytes, predicted speed-up and so on), JSON-able.
        again: those of its nodes that another region holds too; one region that holds them does not list them here.
        beside: those that others may hold too, and that stand beside the fused node where something else needs them.
    """

    rule: str
    schedule: str
    nodes: tuple[Node, ...]
    hosts: tuple[Value, ...]
    tensors: tuple[Value, ...]
    inlined: tuple[Value, ...]
    outputs: tuple[Value, ...]
    plan: LaunchPlan
    source: str
    images: Mapping[str, bytes] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    again: tuple[Node, ...] = ()
    beside: tuple[Node, ...] = ()

    @property
    def place(self) -> Place:
        """Where the graph is in the model that the nodes are of."""
        return self.nodes[0].place if self.nodes else ()


@dataclass(frozen=True, eq=False)
class LocatedRegion:
    """A region in terms of the graph of the model that it is of.

    Attributes:
        label: what errors call it.
        nodes: positions of its nodes, in order.
        hosts, tensors, outputs: names of values, as in ``FusedRegion``.
        inlined: the constants that its body holds; with contents where they are kept outside the model's file.
    """

    label: str
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    tensors: tuple[str, ...]
    inlined: Mapping[str, np.ndarray | None]
    outputs: tuple[str, ...]
