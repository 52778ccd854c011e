"""Regions of products whose results are put side by side, also with others': each writes its part, and what has a
kernel anyway is not copied.

Of what is no product a window's part has a kernel of its own, and what is only computed element by element, or passed
on as it is because others read it too, is copied.  Such a region gains what the products' parts, and the windows', need
not be written and read once more, less the launches of copies: it is weighed against a kernel that puts all side by
side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Node, Value
from onnxfuse.operators.classes import pools, slides
from onnxfuse.planning.context import Context
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.regions.beside import Beside, Offer
from onnxfuse.planning.regions.contractions import stays
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.planning.regions.products import STAGE
from onnxfuse.planning.weighing import CandidatePool, Members, ordered

MOST_BEHIND = 16
"""Nodes from a product to where its result is put beside others."""

MOST_BEFORE = 8
"""Nodes that compute what is put beside that, and is no product."""


def offer_sliced(pool: CandidatePool, context: Context) -> None:
    """Weigh products with what puts their results side by side."""
    if not (context.measures or pool.maker.costs.knows_tiles):
        return
    for node in _joining(pool):
        regions = list(_Joined(node, pool).regions())
        if regions:
            Offer(pool, context, STAGE, trusted=False).each(regions)


def side_by_side(pool: CandidatePool) -> list[Members]:
    """Products with what puts their results side by side, and with more and less of what stands beside them."""
    return [members for node in _joining(pool) for members in _Joined(node, pool).regions()]


def _joining(pool: CandidatePool) -> Sequence[Node]:
    return ordered(node for node in pool.facts if node.op == "Concat")


@dataclass(frozen=True)
class _Joined:
    """What the Concat ``node`` puts side by side."""

    node: Node
    pool: CandidatePool

    def regions(self) -> Iterator[Members]:
        """With all that is only computed for it, and with nothing but products, each with what lays out the result;
        none where it joins no product."""
        branches, others = set[Node](), list[Value]()
        for value in dict.fromkeys(value for value in self.node.inputs if value is not None):
            branch = self._branch(value)
            if branch and not branches & branch:
                branches |= branch
            else:
                others.append(value)
        if not branches:
            return
        core = {self.node, *self._leaving, *branches}
        for computes in (True, False):
            members = frozenset(core.union(*(self._copied(value, computes) for value in others)))
            if is_convex(members) is None and len(escaping(set(members))) == 1:
                yield members

    @cached_property
    def _leaving(self) -> set[Node]:
        """What alone reads the result and lays it out another way for others."""
        result = self.node.outputs[0]
        readers = set() if result is None or result.is_output else set(result.consumers)
        return {each for each in readers if len(readers) == 1 and self._is(each, "leaves")}

    def _is(self, node: Node | None, what: str) -> bool:
        """Whether facts say so of a node."""
        return node is not None and node in self.pool.facts and bool(getattr(self.pool.facts[node], what))

    def _branch(self, value: Value) -> Members:
        """A product with what is computed of its results alone up to a value, which lies as others have it or is taken
        back from that; nothing where the value is of something else, or somebody else reads it too."""
        taken, last = {self.node}, value
        if self.node.inputs.count(value) > 1 or not stays(value, taken):
            return frozenset()
        if self._is(value.producer, "returns"):
            assert value.producer is not None
            taken.add(value.producer)
            last = next(iter(value.producer.reads()))
        for found in self._products(last) if stays(last, taken) else ():
            beside = Beside([found], self.pool.maker.view, self.pool.facts, transposes=True)
            for members in beside.up_to(last):
                return members.union(taken - {self.node})
        return frozenset()

    def _products(self, value: Value) -> Iterator[Node]:
        """Products that a value is computed of, the nearest first: a residual is of one further off."""
        waiting, seen = deque([value]), set[Node]()
        while waiting and len(seen) <= MOST_BEHIND:
            node = waiting.popleft().producer
            if node is None or node in seen or node not in self.pool.facts:
                continue
            seen.add(node)
            if not self.pool.facts[node].contracts:
                waiting += node.reads()
            elif not self.pool.facts[node].maxima and not slides(node):
                yield node

    def _copied(self, value: Value, computes: bool) -> set[Node]:
        """What makes a value that is copied for the node alone, element by element or of windows; where it ``computes``
        nothing, what takes the value back that lies another way."""
        members: set[Node] = set()
        waiting = [(value, computes)]
        while waiting and len(members) <= MOST_BEFORE:
            each, inside = waiting.pop()
            made = self._makers(each, {self.node, *members}, inside)
            members.update(made)
            last = made[-1] if made else None
            if last is not None and not self.pool.facts[last].returns:
                # What is computed before windows would be computed for each.
                waiting += [(operand, not pools(last)) for operand in last.reads()]
        return members

    def _makers(self, value: Value, readers: set[Node], computes: bool) -> list[Node]:
        """What makes a value for some readers alone, last what computes it: behind that two transposes may stand that
        take each other back.  The second of them by itself where nothing may come in before."""
        node = value.producer
        if node is None or not stays(value, readers):
            return []
        if not self._is(node, "returns"):
            return [node] if computes and self._computes(node, readers) else []
        (between,) = node.reads()
        leaves = between.producer
        if not computes or leaves is None or not self._is(leaves, "leaves") or not stays(between, {node}):
            return [node]
        (source,) = leaves.reads()
        last = source.producer
        return [node, leaves, last] if last is not None and self._computes(last, {leaves}) else [node]

    def _computes(self, node: Node, readers: set[Node]) -> bool:
        """Whether a node computes element by element, or of windows, for some readers alone."""
        known = self.pool.facts.get(node)
        if known is None or known.rows is not None or known.contracts or known.maxima or known.transposes or (
                known.leaves or known.returns):
            return False
        return all(each is None or stays(each, readers) for each in node.outputs) and not self._follows(node)

    def _follows(self, node: Node) -> bool:
        """Whether another product's kernel computes a node with its results: of these alone, element by element."""
        waiting, seen = [*node.reads()], set[Node]()
        while waiting and len(seen) <= MOST_BEHIND:
            value = waiting.pop()
            before = value.producer
            if before is None or before in seen or before not in self.pool.facts or len(set(value.consumers)) > 1:
                continue
            seen.add(before)
            if self.pool.facts[before].contracts:
                return _elements(node) is not None and _elements(node) == _elements(before)
            waiting += [] if self.pool.facts[before].returns else before.reads()
        return False


def _elements(node: Node) -> Dim | None:
    """How many there are of a node's first result."""
    result = node.outputs[0]
    return None if result is None or result.shape is None else product(result.shape)
