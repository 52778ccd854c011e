"""Where in a model the nodes of a region stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LocatedRegion:
    """A region in terms of the graph of the model that it is of.

    Attributes:
        label: what errors call it.
        nodes: positions of its nodes, in order.
        hosts, tensors, outputs: names of values, as in ``Region``.
        inlined: the constants that its body holds; with contents where they are kept outside the model's file.
        folded: names of those of its tensors that its kernel alone reads.
    """

    label: str
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    tensors: tuple[str, ...]
    inlined: Mapping[str, np.ndarray | None]
    outputs: tuple[str, ...]
    folded: frozenset[str] = frozenset()
