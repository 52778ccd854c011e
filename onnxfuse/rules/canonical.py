"""The canonical view: a graph in which one operator's many spellings are one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxfuse.graph.bodies import is_idle
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.provider.removed import gives_back
from onnxfuse.refusal import Refusal
from onnxfuse.rules import conditions
from onnxfuse.rules.functions import Scope
from onnxfuse.rules.kinds import Becomes, CanonicalRule, RuntimeRule, attribute_value
from onnxfuse.rules.matcher import match
from onnxfuse.rules.matches import Match, NodeIndex

MOST_PASSED = 64
"""Nodes in a row that give their operand back and are read through at once: a region copies those before it."""

MAX_PASSES = 8
"""Rounds of matching at most; each starts from what the one before made."""


@dataclass(frozen=True)
class CanonicalGraph:
    """The view.

    Attributes:
        graph: nodes and values of its own; a value has the name that it has in the model, and a node's ``originals``
            are nodes of the graph that the view was made from.  Its ``bodies`` are the views of that graph's bodies.
        made: canonical nodes of the view, those in its bodies too.
        refusals: near misses of the canonical rules, but those that a later round mended.
    """

    graph: Graph
    made: tuple[Node, ...]
    refusals: tuple[Refusal, ...]


def canonicalise(graph: Graph, rules: Sequence[CanonicalRule], *, tell_all: bool = False) -> CanonicalGraph:
    """The canonical view of a graph; the graph itself stays as it is.

    Args:
        graph: the model's graph.
        rules: canonical rules.
        tell_all: whether the near misses of quiet rules are kept as well.

    Rules are tried largest pattern first, to a fixed point.  A group of which an inner value is read outside, or is an
    output of the model, stays as it is; so does one that would make a cycle, and a body that never runs.

    Nodes that give their operand back and run no kernel are read through (``Node.passed``), whoever else reads them.
    """
    view = _rebuild(graph, ())
    order = sorted(rules, key=lambda rule: -(rule.pattern.size if rule.pattern else 0))
    told: dict[tuple[str, str], Refusal] = {}
    for _ in range(MAX_PASSES):
        index = NodeIndex(view)
        idle = _idle(order, view, index)
        if idle:
            view = _rebuild(view, idle)
            continue
        chosen, misses = _chosen(order, view, index, tell_all)
        for miss in misses:
            told[miss.rule, miss.node] = miss
        if not chosen:
            break
        # What gives its operand back goes first: behind it a pattern may be longer than it looked.  An epsilon of 0 is
        # not of that kind where a larger pattern has claimed it.
        view = _rebuild(view, [found for found in chosen if _is_identity(found)] or chosen)
    made = tuple(node for node in view.nodes if node.rule is not None)
    mended = {(node.rule, original.label) for node in made for original in node.originals}
    refusals = tuple(miss for place, miss in told.items() if place not in mended)
    bodies = [canonicalise(body, () if is_idle(body) else rules, tell_all=tell_all) for body in graph.bodies]
    return CanonicalGraph(
        replace(view, bodies=tuple(body.graph for body in bodies)),
        made + tuple(node for body in bodies for node in body.made),
        refusals + tuple(miss for body in bodies for miss in body.refusals),
    )


def _chosen(
    rules: Sequence[CanonicalRule], view: Graph, index: NodeIndex, tell_all: bool
) -> tuple[list[Match], list[Refusal]]:
    """Matches of which no two share a node, those of earlier rules first, and near misses."""
    claimed: set[Node] = set()
    chosen: list[Match] = []
    misses: list[Refusal] = []
    for rule in rules:
        result = match(rule, view, index, claimed=claimed)
        if tell_all or not rule.quiet:
            misses += [miss for miss in result.near_misses if miss.code != "claimed"]
        for found in result.matches:
            if not claimed.isdisjoint(found.nodes) or _is_canonical(found):
                continue
            refusal = _obstacle(found, view)
            if refusal is not None:
                misses.append(refusal)
                continue
            chosen.append(found)
            claimed.update(found.nodes)
    return chosen, misses


def _idle(rules: Sequence[CanonicalRule], view: Graph, index: NodeIndex) -> list[Match]:
    """Matches that give back the one thing that they read, as no number or operand of theirs could mean anything else;
    no two share a node."""
    claimed: set[Node] = set()
    result = []
    for rule in rules:
        if not _gives_back(rule):
            continue
        for found in match(rule, view, index).matches:
            lone = all(sum(1 for _ in node.reads()) == 1 for node in found.nodes)
            if lone and claimed.isdisjoint(found.nodes) and not _is_canonical(found) and not _obstacle(found, view):
                claimed.update(found.nodes)
                result.append(found)
    return result


def _gives_back(rule: CanonicalRule) -> bool:
    return (rule.becomes.domain, rule.becomes.op) == ("", "Identity")


def _is_identity(found: Match) -> bool:
    """Whether the match gives its operand back."""
    rule = found.rule
    assert isinstance(rule, CanonicalRule)
    return _gives_back(rule)


def _is_canonical(found: Match) -> bool:
    """Whether the match is one node that is already what it would become."""
    becomes = _becomes(found)
    return len(found.nodes) == 1 and (found.nodes[0].domain, found.nodes[0].op) == (
        becomes.domain, becomes.op,
    ) and found.nodes[0].rule is not None


def _obstacle(found: Match, graph: Graph) -> Refusal | None:
    """Why the match cannot become one node, or None."""
    label = found.nodes[-1].label
    if _makes_cycle(found):
        return Refusal("cycle", "What reads one of its results feeds it as well.", label, found.rule.id)
    strange = _unread(found)
    if strange is not None:
        return Refusal("different-value", f"It reads {strange.name}, which its canonical node does not.", label,
                       found.rule.id)
    try:
        attributes_of(found, graph)
    except ValueError as error:
        message = str(error) or "A name that its attributes need is not bound"
        return Refusal("not-constant", f"{message[0].upper()}{message[1:]}.", label, found.rule.id)
    return None


def _unread(found: Match) -> Value | None:
    """What the match's nodes read from outside, no constant, and the canonical node would not."""
    known = {found.bindings.get(name) for name in _becomes(found).inputs if name is not None}
    made = {value for node in found.nodes for value in node.outputs}
    reads = (value for node in found.nodes for value in node.reads())
    return next((v for v in reads if v not in known and v not in made and not v.is_constant), None)


def _makes_cycle(found: Match) -> bool:
    """Whether something outside both reads one of the match's nodes and feeds another."""
    members = set(found.nodes)
    first = found.nodes[0].index
    seen: set[Node] = set()
    pending = [
        value.producer for node in members for value in node.reads()
        if value.producer is not None and value.producer not in members
    ]
    while pending:
        node = pending.pop()
        if node in seen or node.index < first:
            continue
        seen.add(node)
        for value in node.reads():
            if value.producer in members:
                return True
            if value.producer is not None:
                pending.append(value.producer)
    return False


def _rebuild(graph: Graph, matches: Sequence[Match]) -> Graph:
    """A copy of the graph with each match replaced by its canonical node, in which nodes read what those that give
    their operand back were given: these are left out where nothing needs their result."""
    values = {
        name: replace(value, producer=None, consumers=[]) for name, value in graph.values.items()
    }
    nodes = _linked(_entries(graph, matches), values)
    kept = {
        name: value for name, value in values.items()
        if value.producer is not None or graph.values[name].producer is None
    }
    return Graph(
        nodes, kept, tuple(values[value.name] for value in graph.inputs),
        tuple(values[value.name] for value in graph.outputs), graph.opsets, graph.functions,
        body=graph.body, owner=graph.owner, first=graph.first,
    )


def _entries(graph: Graph, matches: Sequence[Match]) -> list[_Entry]:
    """The nodes of a graph, and a canonical one for each match, which stands where the last of its nodes stood:
    everything that it reads is computed before.  What reads one of its results earlier than that comes after it by
    sorting again."""
    replaced: dict[Node, Match] = {node: found for found in matches for node in found.nodes}
    last: dict[int, int] = {id(found): found.nodes[-1].index for found in matches}
    entries: list[_Entry] = []
    for node in graph.nodes:
        found = replaced.get(node)
        if found is None:
            entries.append((node, node.inputs, node.outputs))
        elif node.index == last[id(found)]:
            made = _canonical_node(found, graph)
            entries.append((made, made.inputs, made.outputs))
    return entries


def _linked(entries: Sequence[_Entry], values: Mapping[str, Value]) -> tuple[Node, ...]:
    """Copies of the nodes in an order that can be run, linked with values of the same names."""
    alive = _alive(entries)
    passing = _passing(_sorted(entries))
    read = {value for node, inputs, _ in passing for value in (*inputs, *node.captures)}
    nodes: list[Node] = []
    for node, inputs, outputs in passing:
        dead = alive.isdisjoint(outputs)
        if gives_back(node) and not dead and read.isdisjoint(outputs) and not any(v and v.is_output for v in outputs):
            continue
        copy = replace(
            node, index=len(nodes), dead=dead,
            inputs=tuple(None if value is None else values[value.name] for value in inputs),
            outputs=tuple(None if value is None else values[value.name] for value in outputs),
            captures=tuple(values[value.name] for value in node.captures),
        )
        nodes.append(copy)
        for value in copy.outputs:
            if value is not None:
                value.producer = copy
        for value in copy.reads():
            value.consumers.append(copy)
    return tuple(nodes)


def _alive(entries: Sequence[_Entry]) -> set[Value]:
    """What the nodes write on which an output of the graph depends."""
    by_output = {value: entry for entry in entries for value in entry[2] if value is not None}
    waiting = [value for value in by_output if value.is_output]
    found: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value in by_output and value not in found:
            node, inputs, outputs = by_output[value]
            found.update(each for each in outputs if each is not None)
            waiting += [each for each in (*inputs, *node.captures) if each is not None]
    return found


def _passing(entries: Sequence[_Entry]) -> list[_Entry]:
    """The entries, each reading what those between that give their operand back were given."""
    given: dict[Value, tuple[Value, tuple[Node, ...]]] = {}
    result: list[_Entry] = []
    for node, inputs, outputs in entries:
        between = dict.fromkeys(node.passed)
        read: list[Value | None] = []
        for value in inputs:
            if value is not None and value in given:
                value, through = given[value]
                between.update(dict.fromkeys(through))
            read.append(value)
        passed = tuple(between)
        if passed != node.passed:
            node = replace(node, inputs=tuple(read), passed=passed)
        result.append((node, tuple(read), outputs))
        passes = len(node.copied) <= MOST_PASSED and gives_back(node)
        if passes and read[0] is not None and outputs[0] is not None:
            given[outputs[0]] = read[0], node.copied
    return result


_Entry = tuple[Node, tuple[Value | None, ...], tuple[Value | None, ...]]


def _sorted(entries: Sequence[_Entry]) -> list[_Entry]:
    """The entries in topological order, as near as can be to the order given."""
    by_output = {value: entry for entry in entries for value in entry[2] if value is not None}
    done: set[int] = set()
    result: list[_Entry] = []
    for start in entries:
        stack: list[tuple[_Entry, bool]] = [(start, False)]
        while stack:
            entry, ready = stack.pop()
            if id(entry) in done:
                continue
            if ready:
                done.add(id(entry))
                result.append(entry)
                continue
            stack.append((entry, True))
            for value in (*entry[1], *entry[0].captures):
                before = by_output.get(value) if value is not None else None
                if before is not None and id(before) not in done and before is not entry:
                    stack.append((before, False))
    return result


def attributes_of(found: Match, graph: Graph) -> Mapping[str, Any]:
    """Attributes of the node that a match becomes.

    Raises:
        ValueError: they need what is not known.
    """
    scope = Scope(graph, found.bindings, found.holes)
    return {
        name: attribute_value(conditions.evaluate(tree, scope)) for name, tree in _becomes(found).attributes
    }


def inputs_of(found: Match) -> tuple[Value | None, ...]:
    """What the node that a match becomes reads; None for an operand that is absent, though not at the end."""
    inputs = [None if name is None else found.bindings.get(name) for name in _becomes(found).inputs]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return tuple(inputs)


def _becomes(found: Match) -> Becomes:
    rule = found.rule
    assert isinstance(rule, CanonicalRule | RuntimeRule)
    return rule.becomes


def _canonical_node(found: Match, graph: Graph) -> Node:
    becomes, final = _becomes(found), found.nodes[-1]
    return Node(
        final.index, final.name, becomes.op, becomes.domain, attributes_of(found, graph), inputs_of(found),
        found.results, originals=found.originals, passed=found.passed, rule=found.rule.id, body=final.body,
    )
