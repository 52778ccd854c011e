"""Why a chain of convolutions is computed layer by layer where the cache does not hold what is between two of them.

In parts, image by image or in strips of rows, what is between would stay in the second-level cache.  It was measured
(``benchmarks/locality.py``): what bounds such chains is arithmetic, under which reading and writing hide, and each part
leaves most of the GPU idle at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from onnxfuse.graph.model import Node, Value
from onnxfuse.operators.classes import is_convolution
from onnxfuse.optimised import Optimised
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.reporting.text import size

CODE = "locality"

CHAINS, LEAST, MOST = 7, 0.31, 0.98
"""Chains of which no cache holds what is between that were measured, and how many times as fast as layer by layer they
were in the best parts (benchmarks/results of 2026-11-27, H100)."""


class Locality:
    """Which values of an optimised model no cache holds between two convolutions.

    Attributes:
        inside: the fusions that an original node is in.
    """

    def __init__(self, optimised: Optimised, inside: Mapping[Node, Collection[Region]]) -> None:
        self._ledger, self._profile, self._inside = optimised.ledger, optimised.profile, inside
        self._graphs = list(optimised.graph.walk())

    def note(self) -> str | None:
        """A sentence on all of them; None where there are none."""
        found = [value for graph in self._graphs for node in graph.nodes for value in self._larger([node])]
        return self._words(found) if found else None

    def refusal(self, nodes: Collection[Node]) -> Refusal | None:
        """The same on what the kernels of original nodes write; None where that is no such value."""
        kernels = sorted({each for node in nodes for each in self._kernel(node)}, key=lambda node: node.index)
        found = self._larger(kernels)
        return Refusal(CODE, self._words(found), next(iter(nodes)).label) if found else None

    def _larger(self, nodes: Collection[Node]) -> list[Value]:
        """Values that nodes write which are such: a kernel with a convolution reads them, and one with a convolution
        writes them, or what they are made from."""
        return [value for node in nodes for value in node.outputs
                if value is not None and (self._ledger.bytes_of(value) or 0) > self._profile.l2_bytes
                and self._is_between(node, value)]

    def _is_between(self, node: Node, value: Value) -> bool:
        own = self._kernel(node)
        if all(map(_moves, own)):
            return False
        before = {each.producer for other in own for each in other.reads()} - own - {None}
        kernels = [own, *(self._kernel(each) for each in before if each is not None)]
        return any(map(_convolves, kernels)) and any(
            _convolves(self._kernel(reader)) for reader in self._readers(value) if reader not in own)

    def _readers(self, value: Value) -> Iterator[Node]:
        """What reads a value, or what a kernel of a transpose alone makes of it."""
        for reader in value.consumers:
            yield reader
            if all(map(_moves, self._kernel(reader))):
                yield from (each for result in reader.outputs if result is not None for each in result.consumers)

    def _kernel(self, node: Node) -> set[Node]:
        """Nodes that run as one kernel with a node."""
        return {node, *(each for fusion in self._inside.get(node, ()) for each in fusion.nodes)}

    def _words(self, values: Collection[Value]) -> str:
        largest = max(values, key=lambda value: self._ledger.bytes_of(value) or 0)
        others = f" and {len(values) - 1} more between convolutions are" if len(values) > 1 else (
            ", between convolutions, is")
        return (
            f"'{largest.name}' ({size(self._ledger.bytes_of(largest) or 0)}){others} larger than the second-level "
            f"cache of {self._profile.name} ({size(self._profile.l2_bytes)}), and computed whole all the same: by "
            f"images, or by strips of rows that would stay in the cache, none of {CHAINS} such chains that were "
            f"measured gained ({LEAST:g} to {MOST:g} times as fast in the best parts, H100)")


def _moves(node: Node) -> bool:
    return node.op == "Transpose"


def _convolves(nodes: Collection[Node]) -> bool:
    return any(map(is_convolution, nodes))
