"""One pattern at one anchor: the walk against the edges, with everything that it tries taken back where it fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnxfuse.graph.model import Node, Value, root
from onnxfuse.rules import conditions
from onnxfuse.rules.functions import Scope
from onnxfuse.rules.kinds import ForbidRule, FuseRule, PatternRule
from onnxfuse.rules.matches import Match, NodeIndex
from onnxfuse.rules.misses import NOT_CONSTANT, OTHER_OPERATOR, OTHER_VALUE, WHOLE, Misses, operator_message
from onnxfuse.rules.operands import (
    close,
    common_source,
    equals_literal,
    is_identity,
    keyword_mismatch,
    name_of,
    plain,
    position_of,
    producer_of,
    same,
)
from onnxfuse.rules.operators import OperatorKey, attribute, input_position
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
from onnxfuse.rules.regions import pointwise_region

MAX_STEPS = 20_000
"""Comparisons of a pattern's part with a value that are made for one anchor."""

ESCAPE_CODES = ("inner-value-used-outside", "inner-value-is-output")


class _ExhaustedError(Exception):
    """The bound on the work at one anchor was reached."""


class Attempt:
    """One pattern at one anchor.  Every generator below binds, yields, and takes back what it bound."""

    def __init__(
        self, rule: PatternRule, pattern: CompiledPattern, index: NodeIndex,
        forbidden: Mapping[str, ForbidRule] | None, claimed: Collection[Node], tell: bool,
    ) -> None:
        self.rule, self.pattern, self.index, self.graph = rule, pattern, index, index.graph
        self.forbidden, self.claimed, self.tell = forbidden, claimed, tell
        self.bindings: dict[str, Any] = {}
        self.holes: dict[str, tuple[Node, ...]] = {}
        self.nodes: dict[Node, int] = {}
        self.ops: dict[Op, Node] = {}
        self.depth = 0
        self.steps = 0
        self.misses = Misses(pattern.size)

    def run(self, anchor: Node) -> Match | None:
        """The match that ends in ``anchor``; where there is none, ``misses`` tells why."""
        first = self.pattern.roots[0]
        try:
            for value in anchor.outputs:
                if value is None:
                    continue
                for _ in self._roots(first, value, 1):
                    found = self._finish()
                    if found is not None:
                        return found
        except (_ExhaustedError, RecursionError):  # or a pattern of too many parts, each in a call of its own
            self.misses.record(
                self.depth, WHOLE, "too-many-choices",
                lambda: f"The pattern leaves more than {MAX_STEPS} choices open here.", anchor,
                "Give the rule fewer alternatives, or split it in two.",
            )
        return None

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
            raise _ExhaustedError
        if isinstance(pattern, Free):
            yield from self._bind(pattern.name, value, pattern.optional)
        elif isinstance(pattern, Named):
            if pattern.name in self.bindings:
                yield from self._bind(pattern.name, value, False)
            else:
                for _ in self._match(pattern.pattern, value):
                    yield from self._bind(pattern.name, value, False)
        elif isinstance(pattern, Literal):
            yield from self._literal(pattern.value, value)
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
            bound = self.bindings[name]
            if same(bound, value):
                # Where one read goes through Identity nodes and another does not, they belong to the match: the name,
                # and others for the same, stand for what all of its reads come from.
                source, between = common_source(bound, value)
                names = [each for each, known in self.bindings.items() if known is bound]
                self.bindings.update(dict.fromkeys(names, source))
                self._join(between)
                yield
                self._leave(between)
                self.bindings.update(dict.fromkeys(names, bound))
            else:
                self._miss(OTHER_VALUE, "different-value", lambda: (
                    f"{name} stands for {name_of(self.bindings.get(name))} and for {name_of(value)}; the rule needs "
                    "one value."
                ))
        elif value is None and not optional:
            self._miss(OTHER_VALUE, "inputs", lambda: f"The input {name} is absent.")
        else:
            self.bindings[name] = value
            yield
            del self.bindings[name]

    def _literal(self, wanted: float, value: Value | None) -> Iterator[None]:
        found = root(value) if value is not None else None
        if found is None or found.constant is None or found.constant.size != 1:
            self._miss(NOT_CONSTANT, "constant-value", lambda: (
                f"{name_of(value)} is not a constant of one element; the rule needs {wanted:g}."
            ), self._reader(value))
        elif equals_literal(wanted, found):
            yield
        else:
            self._miss(OTHER_VALUE, "constant-value", lambda: (
                f"{name_of(value)} is {plain(found):g}; the rule needs {wanted:g}."
            ), self._reader(value))

    def _reader(self, value: Value | None) -> Node | None:
        """The node of the match that reads a value, the last of several."""
        return next((node for node in reversed(self.nodes) if value is not None and value in node.inputs), None)

    def _may_be(self, pattern: Pattern, value: Value | None) -> bool:
        """Whether the value's producer has an operator that the pattern could start with."""
        keys = root_keys(pattern)
        if keys is None:
            return True
        if value is not None and ("", "Identity") in keys and is_identity(value.producer):
            return True
        node, _, _ = producer_of(value)
        return node is not None and (node.domain, node.op) in keys

    def _node(self, op: Op, value: Value | None, index: int) -> Iterator[None]:
        if ("", "Identity") in op.keys and value is not None and is_identity(value.producer):
            node, position = value.producer, position_of(value)
            skipped: tuple[Node, ...] = ()
        else:
            node, position, skipped = producer_of(value)
        if node is None or (node.domain, node.op) not in op.keys or value is None or value.is_constant:
            self._miss_operator(value, op.keys)
            return
        if position != index:
            self._miss(OTHER_VALUE, "operator", lambda: (
                f"{name_of(value)} is output {position} of {node.label}, not {index}."
            ))
            return
        if op in self.ops:
            if self.ops[op] is node:
                self._join(skipped)
                yield
                self._leave(skipped)
            else:
                self._miss(OTHER_VALUE, "different-value", lambda: (
                    f"{node.label} and {self.ops[op].label} stand where the rule needs one {op.label}."
                ), node)
            return
        if node in self.claimed:
            self._miss(NOT_CONSTANT, "claimed", lambda: f"{node.label} belongs to another match.", node)
            return
        joined = (node, *skipped)
        self._join(joined)
        self.ops[op] = node
        self.depth += 1
        yield from self._keywords(op, node, 0, ())
        self.depth -= 1
        del self.ops[op]
        self._leave(joined)

    def _join(self, nodes: Iterable[Node]) -> None:
        """Take nodes into the match, each as often as it is asked for."""
        for node in nodes:
            self.nodes[node] = self.nodes.get(node, 0) + 1

    def _leave(self, nodes: Iterable[Node]) -> None:
        """Take back what ``_join`` did."""
        for node in nodes:
            self.nodes[node] -= 1
            if not self.nodes[node]:
                del self.nodes[node]

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
                self._miss(OTHER_VALUE, "attribute", lambda: f"{node.label} has no {name}.", node)
                return
            if isinstance(found, Value):
                for _ in self._bind(wanted.name, found, True):
                    yield from self._keywords(op, node, number + 1, taken)
            elif wanted.name in self.bindings:
                if close(plain(self.bindings[wanted.name]), plain(found)):
                    yield from self._keywords(op, node, number + 1, taken)
                else:
                    self._miss(OTHER_VALUE, "different-value", lambda: f"{wanted.name} differs at {node.label}.", node)
            else:
                self.bindings[wanted.name] = found
                yield from self._keywords(op, node, number + 1, taken)
                del self.bindings[wanted.name]
        elif isinstance(wanted, Given):
            mismatch = keyword_mismatch(node, name, wanted, found, self.graph)
            if mismatch is None:
                yield from self._keywords(op, node, number + 1, taken)
            else:
                self._miss(OTHER_VALUE, *mismatch, node)
        elif position is None:
            self._miss(OTHER_VALUE, "attribute", lambda: f"{name} of {node.label} is no input.", node)
        else:
            for _ in self._match(wanted, operand):
                yield from self._keywords(op, node, number + 1, taken)

    def _inputs(self, op: Op, node: Node, taken: tuple[int, ...]) -> Iterator[None]:
        given = [value for position, value in enumerate(node.inputs) if position not in taken]
        while given and given[-1] is None:
            given.pop()
        arguments = op.arguments
        if len(given) > len(arguments) and not op.rest:
            self._miss(OTHER_VALUE, "inputs", lambda: (
                f"{node.label} has {len(given)} inputs; the rule needs {len(arguments)}."
            ), node)
            return
        values: list[Value | None] = [*given, *[None] * (len(arguments) - len(given))]
        for order in op.orders:
            pairs = [(argument, values[position]) for argument, position in zip(arguments, order, strict=True)]
            if len(op.orders) > 1:
                pairs.sort(key=_turn)
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
            self._miss(OTHER_VALUE, "inputs", lambda: "The input of a pointwise region is absent.")
            return
        members, frontier = pointwise_region(value, (), self.nodes, self.claimed)
        yield from self._hole_arguments(hole, value, members, frontier, 0, ())

    def _hole_arguments(
        self, hole: Hole, value: Value, members: Collection[Node], frontier: Sequence[Value], number: int,
        stops: tuple[Value, ...],
    ) -> Iterator[None]:
        if number == len(hole.arguments):
            final, _ = pointwise_region(value, stops, self.nodes, self.claimed)
            nodes = tuple(sorted(final, key=lambda node: node.index))
            self._join(nodes)
            self.holes[hole.name] = nodes
            yield
            del self.holes[hole.name]
            self._leave(nodes)
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

    # -- the end of a match ---------------------------------------------------------------------------------------

    def _finish(self) -> Match | None:
        scope = Scope(self.graph, self.bindings, self.holes)
        for condition in self.rule.where:
            if not self.tell and not conditions.holds(condition, scope):
                return None
            failure = conditions.check(condition, scope) if self.tell else None
            if failure is not None:
                text = failure.message
                self._miss(WHOLE, failure.code, text.__str__, next(iter(self.nodes)), failure.remedy)
                return None
        results = {
            name: self.bindings[name]
            for name in self.pattern.results
            if isinstance(self.bindings.get(name), Value)
        }
        leaving = self._leaving(set(results.values()))
        if leaving is None:
            return None
        kept = [
            value for name, value in results.items()
            if name not in self.pattern.optional_results or value in leaving
        ]
        extra = [value for value, declared in leaving.items() if not declared]
        nodes = tuple(sorted(self.nodes, key=lambda node: node.index))
        return Match(self.rule, nodes, dict(self.bindings), dict(self.holes), (*kept, *extra))

    def _leaving(self, results: Collection[Value]) -> dict[Value, bool] | None:
        """Values of the match that are needed outside, and whether each is among the ``results``; None where one may
        not leave a match of this rule."""
        found: dict[Value, bool] = {}
        for node in self.nodes:
            for value in node.outputs:
                if value is None:
                    continue
                readers = [reader for reader in value.consumers if reader not in self.nodes]
                reader = next(iter(readers), None)
                if reader is None and not value.is_output:
                    continue
                found[value] = value in results
                if found[value]:
                    continue
                code = ESCAPE_CODES[0] if reader is not None else ESCAPE_CODES[1]
                # What only dead nodes read is written for them: nobody would have a rule wait for that.
                idle = bool(readers) and not value.is_output and all(reader.dead for reader in readers)
                if self._forbids(code) and not (idle and isinstance(self.rule, FuseRule)):
                    self._escape(code, value, node, reader)
                    return None
        return found

    def _forbids(self, code: str) -> bool:
        return self.forbidden is None or code in self.forbidden

    def _escape(self, code: str, value: Value, node: Node, reader: Node | None) -> None:
        rule = self.forbidden.get(code) if self.forbidden else None
        reason = f" {rule.reason}" if rule is not None else ""
        if reader is not None:
            self._miss(
                WHOLE, code, lambda: f"{value.name}, an inner value, is read by {reader.label} as well.{reason}", node,
                "Name the value among the rule's results, or remove the other use.",
            )
        else:
            self._miss(
                WHOLE, code, lambda: f"{value.name}, an inner value, is an output of the model.{reason}", node,
                "Remove it from the model's outputs, or name it among the rule's results.",
            )

    def _miss_operator(self, value: Value | None, keys: Collection[OperatorKey] | None) -> None:
        node = None if value is None or value.is_constant else value.producer
        self._miss(OTHER_OPERATOR, "operator", lambda: operator_message(value, keys), node)

    def _miss(
        self, severity: int, code: str, message: Callable[[], str], node: Node | None = None, remedy: str = ""
    ) -> None:
        if not self.tell:
            return
        node = node or next(reversed(self.nodes), None)
        self.misses.record(self.depth, severity, code, message, node, remedy)


def _turn(pair: tuple[Pattern, Value | None]) -> int:
    """When to compare an operand: a number first with what is no constant, which tells a wrong order at once, and last
    with a constant, so that a wrong one is told where all the rest agrees."""
    pattern, value = pair
    if not isinstance(pattern, Literal):
        return 1
    found = root(value) if value is not None else None
    return 0 if found is None or found.constant is None or found.constant.size != 1 else 2
