"""Finding a rule's pattern in a graph.

From each node that could end the pattern the matcher walks against the edges, trying the orders, alternatives and
optional nodes that the pattern leaves open, and undoing what it bound where a choice fails.  The work at one node is
bounded.  A failure is a value: the deepest point that any choice reached, with what was expected and found there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.refusal import Refusal
from onnxfuse.rules import conditions
from onnxfuse.rules.classes import is_pointwise
from onnxfuse.rules.kinds import ForbidRule, PatternRule, Rule
from onnxfuse.rules.operators import DTYPE_NAMES, OperatorKey, attribute, input_position, root
from onnxfuse.rules.pattern import (
    AnyOf,
    Capture,
    CompiledPattern,
    Free,
    Given,
    Hole,
    Literal,
    Maybe,
    Named,
    Op,
    Output,
    Pattern,
    root_keys,
)

MAX_STEPS = 20_000
"""Comparisons of a pattern's part with a value that are made for one anchor."""

MAX_HOLE_NODES = 256
"""Nodes of the largest pointwise hole."""

ESCAPE_CODES = ("inner-value-used-outside", "inner-value-is-output")

# A constant equals a literal within this; bfloat16 keeps 8 bits and its rounding error is larger.
_TOLERANCE = 1e-3
_TOLERANCE_BFLOAT16 = 4e-3


@dataclass(frozen=True)
class Match:
    """A place where a rule's pattern stands.

    Attributes:
        nodes: of the graph that was searched, in graph order; their ``originals`` are the model's.
        bindings: by name: a Value, a captured attribute, or None for an absent input; what the match left out
            is not there.
        holes: nodes of each pointwise hole, by name.
        results: values that may be read outside, in the rule's order.
    """

    rule: Rule
    nodes: tuple[Node, ...]
    bindings: Mapping[str, Any]
    holes: Mapping[str, tuple[Node, ...]]
    results: tuple[Value, ...]

    @property
    def originals(self) -> tuple[Node, ...]:
        """The model's nodes that it covers, in graph order."""
        found = dict.fromkeys(original for node in self.nodes for original in node.originals)
        return tuple(sorted(found, key=lambda node: node.index))


@dataclass(frozen=True)
class MatchResult:
    matches: tuple[Match, ...]
    near_misses: tuple[Refusal, ...]


class NodeIndex:
    """Nodes of a graph by operator, last ones first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_key: dict[OperatorKey, list[Node]] = {}
        for node in reversed(graph.nodes):
            self.by_key.setdefault((node.domain, node.op), []).append(node)

    def nodes(self, keys: Collection[OperatorKey]) -> Sequence[Node]:
        lists = [self.by_key[key] for key in keys if key in self.by_key]
        if len(lists) == 1:
            return lists[0]
        return sorted((node for found in lists for node in found), key=lambda node: -node.index)


def match(
    rule: PatternRule,
    graph: Graph,
    index: NodeIndex | None = None,
    forbidden: Mapping[str, ForbidRule] | None = None,
    claimed: Collection[Node] = (),
) -> MatchResult:
    """Every match of a rule, and its near misses.

    Args:
        rule: one with a pattern.
        graph: where to look.
        index: the graph's nodes by operator, to share among rules.
        forbidden: rules that forbid by condition, by code; None means that every such condition forbids, without
            a rule's own words.  Where a rule for a code is missing, a value that escapes becomes a further result.
        claimed: nodes that no match may hold.

    No two matches of one rule share the node that they start from; matches of a rule that lie wholly within an
    earlier one are left out.
    """
    pattern = rule.pattern
    if pattern is None:
        return MatchResult((), ())
    index = index or NodeIndex(graph)
    keys = root_keys(pattern.roots[0]) or frozenset()
    matches: list[Match] = []
    misses: list[Refusal] = []
    covered: set[Node] = set()
    for node in index.nodes(keys):
        if node in covered or node in claimed:
            continue
        attempt = _Attempt(rule, pattern, index, forbidden, claimed)
        found = attempt.run(node)
        if found is not None:
            matches.append(found)
            covered.update(found.nodes)
        elif (refusal := attempt.near_miss()) is not None:
            misses.append(refusal)
    matches.reverse()
    misses.reverse()
    return MatchResult(tuple(matches), tuple(misses))


class _Exhausted(Exception):
    """The bound on the work at one anchor was reached."""


@dataclass
class _Miss:
    depth: int
    severity: int
    code: str
    node: Node | None
    message: Callable[[], str]
    remedy: str = ""


class _Attempt:
    """One pattern at one anchor.  Every generator below binds, yields, and takes back what it bound."""

    def __init__(
        self, rule: PatternRule, pattern: CompiledPattern, index: NodeIndex,
        forbidden: Mapping[str, ForbidRule] | None, claimed: Collection[Node],
    ) -> None:
        self.rule, self.pattern, self.index, self.graph = rule, pattern, index, index.graph
        self.forbidden, self.claimed = forbidden, claimed
        self.bindings: dict[str, Any] = {}
        self.holes: dict[str, tuple[Node, ...]] = {}
        self.nodes: dict[Node, int] = {}
        self.ops: dict[Op, Node] = {}
        self.depth = 0
        self.steps = 0
        self.best: _Miss | None = None
        self.anchor: Node | None = None

    def run(self, anchor: Node) -> Match | None:
        self.anchor = anchor
        first = self.pattern.roots[0]
        try:
            for value in anchor.outputs:
                if value is None:
                    continue
                for _ in self._roots(first, value, 1):
                    found = self._finish()
                    if found is not None:
                        return found
        except _Exhausted:
            self.best = _Miss(
                self.pattern.size, 3, "too-many-choices", anchor,
                lambda: f"The pattern leaves more than {MAX_STEPS} choices open here.",
                "Give the rule fewer alternatives, or split it in two.",
            )
        return None

    def near_miss(self) -> Refusal | None:
        """The deepest failure, where enough of the pattern had matched to be worth telling: two thirds of its nodes,
        or one third where the operators agreed and an attribute or value did not."""
        best = self.best
        if best is None or best.depth * 3 < self.pattern.size * (2 if best.severity < 2 else 1):
            return None
        node = best.node or self.anchor
        return Refusal(best.code, best.message(), node.label if node else "", self.rule.id, best.remedy)

    def _roots(self, pattern: Named, value: Value, following: int) -> Iterator[None]:
        for _ in self._match(pattern, value):
            if following == len(self.pattern.roots):
                yield
                continue
            target = self.pattern.roots[following]
            if target.name in self.bindings:
                yield from self._roots(target, self.bindings[target.name], following + 1)
                continue
            for candidate in self._candidates(target):
                yield from self._roots(target, candidate, following + 1)

    def _candidates(self, target: Named) -> Iterator[Value]:
        """Values that another result of the pattern may be: outputs of nodes that read what is bound already."""
        keys = root_keys(target) or frozenset()
        index = target.pattern.index if isinstance(target.pattern, Output) else 0
        readers: dict[Node, None] = {}
        for bound in list(self.bindings.values()):
            if isinstance(bound, Value):
                readers.update(dict.fromkeys(bound.consumers))
                if bound.producer is not None:
                    readers[bound.producer] = None
        for node in sorted(readers, key=lambda node: node.index):
            if (node.domain, node.op) in keys and index < len(node.outputs):
                value = node.outputs[index]
                if value is not None:
                    yield value

    def _match(self, pattern: Pattern, value: Value | None) -> Iterator[None]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _Exhausted
        if isinstance(pattern, Free):
            yield from self._bind(pattern.name, value, pattern.optional)
        elif isinstance(pattern, Named):
            if pattern.name in self.bindings:
                yield from self._bind(pattern.name, value, False)
            else:
                for _ in self._match(pattern.pattern, value):
                    yield from self._bind(pattern.name, value, False)
        elif isinstance(pattern, Literal):
            if self._equals(pattern.value, value):
                yield
        elif isinstance(pattern, Op):
            yield from self._node(pattern, value, 0)
        elif isinstance(pattern, Output):
            yield from self._node(pattern.op, value, pattern.index)
        elif isinstance(pattern, Maybe):
            if self._may_be(pattern.op, value):
                yield from self._match(pattern.op, value)
            yield from self._match(pattern.instead, value)
        elif isinstance(pattern, AnyOf):
            tried = False
            for alternative in pattern.alternatives:
                if self._may_be(alternative, value):
                    tried = True
                    yield from self._match(alternative, value)
            if not tried:
                self._miss_operator(value, root_keys(pattern))
        else:
            yield from self._hole(pattern, value)

    def _bind(self, name: str, value: Value | None, optional: bool) -> Iterator[None]:
        if name == "_":
            yield
        elif name in self.bindings:
            if _same(self.bindings[name], value):
                yield
            else:
                self._miss(2, "different-value", lambda: (
                    f"{name} stands for {_name(self.bindings.get(name))} and for {_name(value)}; the rule needs "
                    "one value."
                ))
        elif value is None and not optional:
            self._miss(2, "inputs", lambda: f"The input {name} is absent.")
        else:
            self.bindings[name] = value
            yield
            del self.bindings[name]

    def _equals(self, wanted: float, value: Value | None) -> bool:
        found = root(value) if value is not None else None
        if found is None or found.constant is None or found.constant.size != 1:
            self._miss(0, "constant-value", lambda: (
                f"{_name(value)} is not a constant of one element; the rule needs {wanted:g}."
            ))
            return False
        content = float(found.constant.reshape(-1)[0])
        bfloat16 = DTYPE_NAMES.get(found.dtype or 0) == "bfloat16"
        tolerance = _TOLERANCE_BFLOAT16 if bfloat16 else _TOLERANCE
        if content == wanted or abs(content - wanted) <= tolerance * abs(wanted) < np.inf:
            return True
        self._miss(2, "constant-value", lambda: f"{_name(value)} is {content:g}; the rule needs {wanted:g}.")
        return False

    def _may_be(self, pattern: Pattern, value: Value | None) -> bool:
        """Whether the value's producer has an operator that the pattern could start with."""
        keys = root_keys(pattern)
        if keys is None:
            return True
        if value is not None and ("", "Identity") in keys and _is_identity(value.producer):
            return True
        node, _, _ = _producer(value)
        return node is not None and (node.domain, node.op) in keys

    def _node(self, op: Op, value: Value | None, index: int) -> Iterator[None]:
        if ("", "Identity") in op.keys and value is not None and _is_identity(value.producer):
            node, position = value.producer, _position(value)
            skipped: tuple[Node, ...] = ()
        else:
            node, position, skipped = _producer(value)
        if node is None or (node.domain, node.op) not in op.keys or value is None or value.is_constant:
            self._miss_operator(value, op.keys)
            return
        if position != index:
            self._miss(2, "operator", lambda: f"{_name(value)} is output {position} of {node.label}, not {index}.")
            return
        if op in self.ops:
            if self.ops[op] is node:
                yield
            else:
                self._miss(2, "different-value", lambda: (
                    f"{node.label} and {self.ops[op].label} stand where the rule needs one {op.label}."
                ), node)
            return
        if node in self.claimed:
            self._miss(0, "claimed", lambda: f"{node.label} belongs to another match.", node)
            return
        joined = (node, *skipped)
        for member in joined:
            self.nodes[member] = self.nodes.get(member, 0) + 1
        self.ops[op] = node
        self.depth += 1
        yield from self._keywords(op, node, 0, ())
        self.depth -= 1
        del self.ops[op]
        for member in joined:
            self.nodes[member] -= 1
            if not self.nodes[member]:
                del self.nodes[member]

    def _keywords(self, op: Op, node: Node, number: int, taken: tuple[int, ...]) -> Iterator[None]:
        """Match keywords from ``number`` on, then the inputs; ``taken`` are inputs that keywords spoke for."""
        if number == len(op.keywords):
            yield from self._inputs(op, node, taken)
            return
        name, wanted = op.keywords[number]
        position = None if name in node.attributes else input_position(node, name, self.graph)
        if position is not None:
            operand = node.inputs[position] if position < len(node.inputs) else None
            taken = (*taken, position)
        found: Any = operand if position is not None else attribute(node, name, self.graph)
        if isinstance(wanted, Capture):
            if found is None and not wanted.optional:
                self._miss(2, "attribute", lambda: f"{node.label} has no {name}.", node)
                return
            if isinstance(found, Value):
                for _ in self._bind(wanted.name, found, True):
                    yield from self._keywords(op, node, number + 1, taken)
            elif wanted.name in self.bindings:
                if _close(_plain(self.bindings[wanted.name]), _plain(found)):
                    yield from self._keywords(op, node, number + 1, taken)
                else:
                    self._miss(2, "different-value", lambda: f"{wanted.name} differs at {node.label}.", node)
            else:
                self.bindings[wanted.name] = found
                yield from self._keywords(op, node, number + 1, taken)
                del self.bindings[wanted.name]
        elif isinstance(wanted, Given):
            if self._keyword_equals(node, name, wanted, found):
                yield from self._keywords(op, node, number + 1, taken)
        elif position is None:
            self._miss(2, "attribute", lambda: f"{name} of {node.label} is no input.", node)
        else:
            for _ in self._match(wanted, operand):
                yield from self._keywords(op, node, number + 1, taken)

    def _keyword_equals(self, node: Node, name: str, wanted: Given, found: Any) -> bool:
        content = found
        if isinstance(found, Value):
            inner = root(found)
            content = inner.constant
            if content is None:
                code = "reduction-axis" if name == "axes" else "constant-value"
                self._miss(2, code, lambda: (
                    f"{name} of {node.label} is not known before the model runs; the rule needs {wanted.text}."
                ), node)
                return False
        got, need = _plain(content), wanted.value
        if name in ("axis", "axes"):
            rank = _axes_rank(node)
            got, need = _axes(got, rank, node, self.graph), _axes(need, rank, node, self.graph)
        elif isinstance(got, list) and len(got) == 1 and not isinstance(need, tuple | str):
            got = got[0]
        elif isinstance(need, tuple):
            need = list(need)  # type: ignore[assignment]
        if _close(got, need):
            return True
        reduces = name in ("axis", "axes") and (node.op.startswith("Reduce") or "ormaliz" in node.op
                                               or "oftmax" in node.op)
        code = "reduction-axis" if reduces else "type" if name == "to" else "axis" if name.startswith("ax") \
            else "attribute"
        shown = DTYPE_NAMES.get(got, got) if name == "to" and isinstance(got, int) else _plain(content)
        rank_text = f" of rank {_axes_rank(node)}" if name.startswith("ax") and _axes_rank(node) is not None else ""
        self._miss(2, code, lambda: (
            f"{node.qualified_op} has {name} {'all' if shown is None else shown}{rank_text}; "
            f"the rule needs {wanted.text}."
        ), node)
        return False

    def _inputs(self, op: Op, node: Node, taken: tuple[int, ...]) -> Iterator[None]:
        given = [value for position, value in enumerate(node.inputs) if position not in taken]
        while given and given[-1] is None:
            given.pop()
        arguments = op.arguments
        if len(given) > len(arguments) and not op.rest:
            self._miss(2, "inputs", lambda: (
                f"{node.label} has {len(given)} inputs; the rule needs {len(arguments)}."
            ), node)
            return
        values: list[Value | None] = [*given, *[None] * (len(arguments) - len(given))]
        for order in op.orders:
            pairs = [(arguments[position], values[i]) for i, position in enumerate(order)]
            if len(op.orders) > 1:
                # constants first: they tell a wrong order at once
                pairs.sort(key=lambda pair: 0 if isinstance(pair[0], Literal) else 1)
            yield from self._all(pairs, 0)

    def _all(self, pairs: Sequence[tuple[Pattern, Value | None]], position: int) -> Iterator[None]:
        if position == len(pairs):
            yield
            return
        pattern, value = pairs[position]
        for _ in self._match(pattern, value):
            yield from self._all(pairs, position + 1)

    # -- pointwise holes ------------------------------------------------------------------------------------------

    def _hole(self, hole: Hole, value: Value | None) -> Iterator[None]:
        if value is None:
            self._miss(2, "inputs", lambda: "The input of a pointwise region is absent.")
            return
        members, frontier = self._region(value, frozenset())
        yield from self._hole_arguments(hole, value, members, frontier, 0, ())

    def _hole_arguments(
        self, hole: Hole, value: Value, members: Collection[Node], frontier: Sequence[Value], number: int,
        stops: tuple[Value, ...],
    ) -> Iterator[None]:
        if number == len(hole.arguments):
            final, _ = self._region(value, frozenset(stops))
            nodes = tuple(sorted(final, key=lambda node: node.index))
            for node in nodes:
                self.nodes[node] = self.nodes.get(node, 0) + 1
            self.holes[hole.name] = nodes
            yield
            del self.holes[hole.name]
            for node in nodes:
                self.nodes[node] -= 1
                if not self.nodes[node]:
                    del self.nodes[node]
            return
        argument = hole.arguments[number]
        candidates = [*frontier]
        if not isinstance(argument, Free):
            # the region may have swallowed what the argument names: then it ends there
            candidates += [output for node in members for output in node.outputs if output is not None]
        keys = root_keys(argument)
        tried = False
        for candidate in candidates:
            if candidate in stops or (keys is not None and not self._may_be(argument, candidate)):
                continue
            tried = True
            for _ in self._match(argument, candidate):
                yield from self._hole_arguments(hole, value, members, frontier, number + 1, (*stops, candidate))
        if not tried:
            self._miss_operator(frontier[0] if frontier else value, keys)

    def _region(self, value: Value, stops: Collection[Value]) -> tuple[set[Node], list[Value]]:
        """The largest pointwise region that computes ``value`` and that nothing outside reads, and what it reads:
        values of the same shape first, constants left out."""
        members: set[Node] = set()
        pending: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def visit(read: Value) -> None:
            producer = read.producer
            if producer is not None and not read.is_constant and read not in stops and producer not in queued:
                queued.add(producer)
                heapq.heappush(pending, (-producer.index, producer))

        visit(value)
        while pending and len(members) < MAX_HOLE_NODES:
            _, node = heapq.heappop(pending)
            outputs = [output for output in node.outputs if output is not None]
            if not is_pointwise(node) or node.has_subgraph or node in self.nodes or node in self.claimed:
                continue
            if any(
                output.is_output or output in stops
                or any(reader not in members and reader not in self.nodes for reader in output.consumers)
                for output in outputs
            ):
                continue
            members.add(node)
            for read in node.reads():
                visit(read)
        if not members:
            return members, [value]
        frontier = dict.fromkeys(
            read for node in sorted(members, key=lambda node: node.index) for read in node.reads()
            if read.producer not in members and not read.is_constant
        )
        return members, sorted(frontier, key=lambda read: (read.shape != value.shape, -(read.rank or 0)))

    # -- the end of a match ---------------------------------------------------------------------------------------

    def _finish(self) -> Match | None:
        for condition in self.rule.where:
            scope = conditions.Scope(self.graph, self.bindings, self.holes)
            failure = conditions.check(condition, scope)
            if failure is not None:
                failed = failure
                self._miss(3, failed.code, lambda: failed.message, self.anchor, failed.remedy, whole=True)
                return None
        results = {
            name: self.bindings[name]
            for name in self.pattern.results
            if isinstance(self.bindings.get(name), Value)
        }
        declared = set(results.values())
        extra: list[Value] = []
        escaped: set[Value] = set()
        for node in self.nodes:
            for value in node.outputs:
                if value is None:
                    continue
                reader = next((reader for reader in value.consumers if reader not in self.nodes), None)
                if reader is None and not value.is_output:
                    continue
                escaped.add(value)
                if value in declared:
                    continue
                code = ESCAPE_CODES[0] if reader is not None else ESCAPE_CODES[1]
                if self._forbids(code):
                    self._escape(code, value, node, reader)
                    return None
                extra.append(value)
        kept = [
            value for name, value in results.items()
            if name not in self.pattern.optional_results or value in escaped
        ]
        nodes = tuple(sorted(self.nodes, key=lambda node: node.index))
        return Match(self.rule, nodes, dict(self.bindings), dict(self.holes), (*kept, *extra))

    def _forbids(self, code: str) -> bool:
        return self.forbidden is None or code in self.forbidden

    def _escape(self, code: str, value: Value, node: Node, reader: Node | None) -> None:
        rule = self.forbidden.get(code) if self.forbidden else None
        reason = f" {rule.reason}" if rule is not None else ""
        if reader is not None:
            self._miss(
                3, code, lambda: f"{value.name}, an inner value, is read by {reader.label} as well.{reason}", node,
                "Name the value among the rule's results, or remove the other use.", whole=True,
            )
        else:
            self._miss(
                3, code, lambda: f"{value.name}, an inner value, is an output of the model.{reason}", node,
                "Remove it from the model's outputs, or name it among the rule's results.", whole=True,
            )

    def _miss_operator(self, value: Value | None, keys: Collection[OperatorKey] | None) -> None:
        def message() -> str:
            wanted = ", ".join(sorted(f"{d}.{op}" if d else op for d, op in keys)) if keys else "another operator"
            if value is None:
                return f"An input is absent where the rule needs {wanted}."
            node, _, _ = _producer(value)
            if node is None or value.is_constant:
                source = "a constant" if root(value).is_constant else "an input of the model"
                return f"{value.name} is {source} where the rule needs {wanted}."
            return f"{value.name} comes from {node.qualified_op} where the rule needs {wanted}."

        producer = None if value is None or value.is_constant else value.producer
        self._miss(1, "operator", message, producer)

    def _miss(
        self, severity: int, code: str, message: Callable[[], str], node: Node | None = None, remedy: str = "",
        whole: bool = False,
    ) -> None:
        depth = max(self.depth, self.pattern.size) + 1 if whole else self.depth
        best = self.best
        if best is not None and (best.depth, best.severity) >= (depth, severity):
            return
        if node is None:
            node = next(reversed(self.nodes), None)
        text: str | None = None
        if code != "operator":
            text = message()  # the bindings that it speaks of are undone later
        self.best = _Miss(depth, severity, code, node, message if text is None else lambda: str(text), remedy)


def _producer(value: Value | None) -> tuple[Node | None, int, tuple[Node, ...]]:
    """The node that computes a value, looked at through Identity nodes, which output of it, and those nodes."""
    skipped: list[Node] = []
    while value is not None and not value.is_constant:
        node = value.producer
        if node is None:
            return None, 0, ()
        if node.op != "Identity" or node.domain or not node.inputs:
            return node, _position(value), tuple(skipped)
        skipped.append(node)
        value = node.inputs[0]
    return None, 0, ()


def _is_identity(node: Node | None) -> bool:
    return node is not None and node.op == "Identity" and not node.domain


def _position(value: Value) -> int:
    producer = value.producer
    if producer is None:
        return 0
    return next(index for index, output in enumerate(producer.outputs) if output is value)


def _same(bound: Any, value: Value | None) -> bool:
    if bound is None or value is None or not isinstance(bound, Value):
        return bound is value
    a, b = root(bound), root(value)
    if a is b:
        return True
    # exporters repeat small constants: equal contents are one value
    return (
        a.constant is not None and b.constant is not None and a.dtype == b.dtype
        and a.constant.shape == b.constant.shape and bool(np.array_equal(a.constant, b.constant))
    )


def _close(a: Any, b: Any) -> bool:
    """Whether two contents agree; floating-point numbers within the tolerance of constants."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= _TOLERANCE * abs(b)
    return bool(a == b)


def _plain(value: Any) -> Any:
    """An attribute's or constant's content as Python numbers and lists; a single element as a number."""
    if isinstance(value, Value):
        constant = root(value).constant
        return value.name if constant is None else constant.reshape(-1)[0].item() if constant.size == 1 else \
            constant.tolist()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _axes_rank(node: Node) -> int | None:
    reference = node.outputs[0] if node.op == "Unsqueeze" else node.inputs[0] if node.inputs else None
    return reference.rank if reference is not None else None


def _axes(axes: Any, rank: int | None, node: Node, graph: Graph) -> Any:
    """Axes counted from the front and sorted where the rank is known; absent ones are all."""
    if axes is None or (isinstance(axes, list) and not axes and node.op.startswith("Reduce")):
        if attribute(node, "noop_with_empty_axes", graph):
            return []
        return None if rank is None else list(range(rank))
    numbers = [int(axis) for axis in (axes if isinstance(axes, list | tuple) else [axes])]
    return sorted(axis + rank if axis < 0 and rank is not None else axis for axis in numbers)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Value) else str(value)
