"""Automatic fusion: groups of nodes, grown by joining neighbours.

Every node that can be fused starts as a group of its own, and every match of a fuse rule as one group.  The edges of
the graph are visited from the largest tensor to the smallest; where an edge joins two groups that fit, they become
one.  Groups fit where

- their row structures agree (there is one at most), and what has rows and moves the innermost axis can be transposed,
- with rows, every value that is used outside has as many elements as the rows, or one a row,
- the contracted graph stays free of cycles, and no rule forbids it.

Joining the largest tensors first keeps the most bytes on chip; what does not fit afterwards says why.  Results of
different sizes share a launch and little else, so groups that they make are joined last, of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import bytes_of
from onnxfuse.lowering.arrangement import Arrangement
from onnxfuse.lowering.lower import Lowered
from onnxfuse.operators.classes import pools
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.known import KnownKernels, asked_for
from onnxfuse.planning.legality import Contraction
from onnxfuse.refusal import Refusal
from onnxfuse.rules import FuseRule, GrowRule, RuleSet
from onnxfuse.schedules import Does, Request, running

_Edge = tuple[int, int, Node, Node, Value]
"""Minus the bytes of a value, the place of its reader, its producer, that reader, and it."""


@dataclass
class Group:
    """Nodes that are to be one kernel.

    Attributes:
        rows: their row structure, if any; transposes: whether one of them moves the innermost axis.
        rule: the fuse rule that named them; names: the values of its pattern.
    """

    nodes: set[Node]
    rows: Arrangement | None
    rule: FuseRule | None = None
    names: Mapping[Value, str] = field(default_factory=dict)
    transposes: bool = False


@dataclass
class Growth:
    """Groups of one graph while they grow."""

    graph: Graph
    facts: Mapping[Node, Facts]
    rules: RuleSet
    sizes: Mapping[str, int]
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.contraction = Contraction(self.graph)
        self.group: dict[Node, Group] = {}
        self._transposed: dict[frozenset[Node], Refusal | None] = {}

    def seed(
        self, nodes: Iterable[Node], rule: FuseRule | None = None, names: Mapping[Value, str] | None = None
    ) -> Group | Refusal:
        """Start a group."""
        members = set(nodes)
        rows: Arrangement | None = None
        for node in sorted(members, key=lambda node: node.index):
            facts = self.facts[node]
            if facts.rows is not None:
                if rows is not None and rows != facts.rows:
                    return Refusal(
                        "reduction-structure", "reductions over different rows meet in one region", node.label
                    )
                rows = facts.rows
        if len(members) > 1:
            refusal = self.contraction.contract(members)
            if refusal is not None:
                return refusal
        transposes = any(self.facts[node].transposes for node in members)
        group = Group(members, rows, rule, names or {}, transposes)
        self.group.update(dict.fromkeys(members, group))
        return group

    def drop(self, group: Group) -> None:
        """Give a group's nodes free again."""
        if len(group.nodes) > 1:
            self.contraction.release(group.nodes)
        for node in group.nodes:
            del self.group[node]

    def grow(self) -> None:
        """Join groups along the graph's edges, largest tensors first, but for those within pairs of transposes."""
        self._along(lambda reader: not self.facts[reader].returns)

    def enclose(self) -> None:
        """Join what has rows with the halves of pairs of transposes on all its sides at once: with one side alone its
        rows would lie along some tensors and across others."""
        for group in {id(group): group for group in self.group.values() if group.rows is not None}.values():
            before = [node for value in entering(group.nodes) if (node := value.producer) is not None
                      and node in self.group and self.facts[node].returns]
            written = escaping(group.nodes)
            behind = [node for value in written for node in value.consumers
                      if node in self.group and self.facts[node].leaves]
            around = {*before, *behind}
            if before and behind and all(len(self.group[node].nodes) == 1 for node in around):
                self.join(group, Group(around, None), next(iter(written)))

    def bridge(self) -> bool:
        """Join what pairs of transposes lie between; whether there is any."""
        return self._along(lambda reader: self.facts[reader].returns)

    def _along(self, leads_on: Callable[[Node], bool]) -> bool:
        """Join along the edges to readers that lead on; whether there is such an edge."""
        edges = [
            (-(bytes_of(value, self.sizes) or 0), consumer.index, node, consumer, value)
            for node in self.group
            for value in node.outputs
            if value is not None
            for consumer in value.consumers
            if consumer in self.group and leads_on(consumer)
        ]
        # Transposes last: what joins one moves its bytes less well.
        edges.sort(key=lambda edge: (self._transposes(edge[2], edge[3]), edge[0], edge[2].index, edge[1]))
        refused = self._joined(edges, alike=True)
        if any(refusal.code == "iteration-shape" for _, refusal in refused):
            refused = self._joined([edge for edge, _ in refused], alike=False)
        self.refusals += [refusal for _, refusal in refused]
        return bool(edges)

    def _joined(self, edges: Sequence[_Edge], alike: bool) -> list[tuple[_Edge, Refusal]]:
        """Join along edges until none is left that fits; those that do not, and why.

        Args:
            alike: whether all values that a group without rows is used for must have the same size.
        """
        waiting = list(edges)
        while True:
            later, joined = [], False
            for edge in waiting:
                _, _, node, consumer, value = edge
                first, second = self.group[node], self.group[consumer]
                if first is second:
                    continue
                refusal = self.join(first, second, value, alike)
                if refusal is None:
                    joined = True
                else:
                    later.append((edge, refusal))
            if not joined:
                return later
            waiting = [edge for edge, _ in later]

    def join(self, first: Group, second: Group, value: Value, alike: bool = True) -> Refusal | None:
        """Make two groups one, or say why not; ``alike`` as ``_joined`` takes it."""
        refusal = self._fits(first, second, value, alike)
        if refusal is not None:
            return refusal
        refusal = self.contraction.join(first.nodes, second.nodes)
        if refusal is not None:
            return refusal
        first.nodes |= second.nodes
        first.rows = first.rows or second.rows
        first.transposes = first.transposes or second.transposes
        if first.rule is None:
            first.rule, first.names = second.rule, second.names
        self.group.update(dict.fromkeys(second.nodes, first))
        return None

    def _fits(self, first: Group, second: Group, value: Value, alike: bool) -> Refusal | None:
        label = value.producer.label if value.producer is not None else value.name
        if first.rule is not None and second.rule is not None:
            return Refusal(
                "two-rules",
                f"both sides of '{value.name}' are named regions ({first.rule.id}, {second.rule.id})",
                label,
            )
        members = first.nodes | second.nodes
        refusal = self._admitted(first, second, value, label)
        if refusal is not None:
            return refusal
        if first.rows is not None and second.rows is not None and first.rows != second.rows:
            return Refusal(
                "reduction-structure",
                f"{_rows(first.rows, second.rows)} meet at '{value.name}'",
                label,
            )
        rows = first.rows or second.rows
        transposes = first.transposes or second.transposes
        outputs = escaping(members)
        alike = alike or rows is not None or transposes
        refusal = _domain(outputs, rows, label) if alike else spread(members, outputs)
        refusal = refusal or self._pooling(members, label)
        if refusal is not None or rows is None or not (transposes or any(
                self.facts[node].leaves or self.facts[node].returns for node in members)):
            return refusal
        why = self._transposing(frozenset(members))
        return why and Refusal(
            "transposing",
            f"a transpose of the innermost axis and rows of {rows.length} elements meet at '{value.name}': "
            f"{why.message}",
            label,
            remedy="keep the innermost axis in place",
        )

    def _pooling(self, members: set[Node], label: str) -> Refusal | None:
        """Why nodes with windows among them are better apart."""
        if not any(map(pools, members)):
            return None
        lowered = self._lowered(members)
        found = lowered if isinstance(lowered, Refusal) else running(Does.POOLS).refuses(Request(lowered))
        return found and replace(found, node=found.node or label)

    def _transposing(self, members: frozenset[Node]) -> Refusal | None:
        """Why nodes with rows, some of which move the innermost axis, have no kernel that reads well."""
        if members not in self._transposed:
            lowered = self._lowered(members)
            self._transposed[members] = lowered if isinstance(lowered, Refusal) else self._refused(
                Request(lowered, sizes=self.sizes))
        return self._transposed[members]

    def _lowered(self, members: Collection[Node]) -> Lowered | Refusal:
        nodes = sorted(members, key=lambda node: node.index)
        return self.kernels.lowerings.lower(nodes, escaping(set(members)), self.graph)

    def _refused(self, request: Request) -> Refusal | None:
        """Why a region that moves the innermost axis has no kernel that reads well; equal regions are asked once."""
        key, known = asked_for(request), self.kernels.transposing
        if key not in known:
            known[key] = running(Does.REDUCES | Does.TRANSPOSES).refuses(self.kernels.shared(request))
        return known[key]

    def _transposes(self, *nodes: Node) -> bool:
        return any(self.facts[node].transposes for node in nodes)

    def _admitted(self, first: Group, second: Group, value: Value, label: str) -> Refusal | None:
        """Whether a rule lets the groups join: the fuse rule that named one of them, or else a grow rule."""
        named = first if first.rule is not None else second
        if named.rule is not None:
            other = second if named is first else first
            side = "after" if named is first else "before"
            edges = named.rule.growth.edges
            allowed = edges.get(named.names.get(value, side), edges.get(side, frozenset()))
            strangers = [node for node in other.nodes if (node.domain, node.op) not in allowed]
            if not strangers:
                return None
            stranger = min(strangers, key=lambda node: node.index)
            return Refusal(
                "growth",
                f"{named.rule.id} does not grow over {stranger.qualified_op} {side} its pattern",
                label,
                named.rule.id,
            )
        members = first.nodes | second.nodes
        if admitting(self.rules, members) is not None:
            return None
        return Refusal(
            "region-size",
            f"no grow rule admits a region of these {len(members)} nodes{_past(self.rules, members)}",
            label,
            remedy="raise the limits of a grow rule, or list the operators in one",
        )


def admitting(rules: RuleSet, members: set[Node]) -> GrowRule | None:
    """The first grow rule that lets these nodes be one region."""
    return next((rule for rule in rules.grow if _within(rule, members)), None)


def _past(rules: RuleSet, members: set[Node]) -> str:
    """Which limits a region passes of grow rules that list all of its operators, each by the first that has it; ""
    where there is none."""
    found: dict[str, str] = {}
    for rule in rules.grow:
        if any((node.domain, node.op) not in rule.operators for node in members):
            continue
        for what, count, most in (
            ("nodes", len(members), rule.max_nodes), ("inputs", len(entering(members)), rule.max_inputs),
            ("outputs", len(escaping(members)), rule.max_outputs),
        ):
            if most is not None and count > most:
                found.setdefault(f"takes {most} {what}, not {count}", rule.id)
                break
    return ": " + "; ".join(f"{rule} {limit}" for limit, rule in found.items()) if found else ""


def _within(rule: GrowRule, members: set[Node]) -> bool:
    """Whether a grow rule lists all operators of a region, and its limits hold."""
    if rule.max_nodes is not None and len(members) > rule.max_nodes:
        return False
    if any((node.domain, node.op) not in rule.operators for node in members):
        return False
    if rule.max_inputs is not None and len(entering(members)) > rule.max_inputs:
        return False
    return rule.max_outputs is None or len(escaping(members)) <= rule.max_outputs


def _rows(first: Arrangement, second: Arrangement) -> str:
    """What tells two row structures apart."""
    if first.length != second.length:
        return f"rows of {first.length} elements and rows of {second.length}"
    return f"reductions over {first} and over {second}, reduced sizes in parentheses,"


def _domain(outputs: Sequence[Value], rows: Arrangement | None, label: str) -> Refusal | None:
    """Whether one loop nest can write all outputs."""
    counts = {_elements(value): value for value in outputs}
    if rows is not None:
        for count, value in counts.items():
            if count != rows.count * rows.length and count != rows.count:
                return Refusal(
                    "iteration-shape",
                    f"'{value.name}' has {count} elements, and the rows have {rows.count} x {rows.length}",
                    label,
                    remedy="give what a reduction's region is read for as many elements as its rows have, or one a row",
                )
    elif len(counts) > 1:
        names = ", ".join(f"'{value.name}' ({count} elements)" for count, value in counts.items())
        return Refusal(
            "iteration-shape", f"values of different sizes are used outside: {names}", label,
            remedy="keep a transpose of the innermost axis apart from what takes its result to pieces",
        )
    return None


def spread(members: Collection[Node], outputs: Sequence[Value]) -> Refusal | None:
    """Why outputs of different sizes are better apart: each has a loop of its own, and in the longest one the few
    elements that another is computed from would be computed for every element."""
    if len({_elements(value) for value in outputs}) == 1:
        return None
    needed: dict[Node, dict[Value, None]] = {}
    for node in sorted(members, key=lambda node: -node.index):
        feeds: dict[Value, None] = {}
        for value in node.outputs:
            if value is not None:
                feeds |= dict.fromkeys([value] if value in outputs else ())
                for reader in value.consumers:
                    feeds |= needed.get(reader, {})
        needed[node] = feeds
        sizes = {_elements(value): value for value in feeds}
        if len(sizes) > 1:
            own = [_elements(value) for value in node.outputs if value is not None]
            more = next((value for size, value in sizes.items() if size is None or not any(
                each is not None and (each - size).non_negative() for each in own)), None)
            if more is not None:
                others = ", ".join(f"'{value.name}'" for value in sizes.values() if value is not more)
                return Refusal(
                    "iteration-shape",
                    f"{node.label} computes {own[0]} elements, for {others} and for '{more.name}', which has "
                    f"{_elements(more)}: together they would be computed for each of these",
                    node.label,
                    remedy=f"compute {others} apart from '{more.name}'",
                )
    return None


def _elements(value: Value) -> Dim | None:
    return None if value.shape is None else product(value.shape)


def escaping(members: set[Node]) -> list[Value]:
    """Values of a set of nodes that are used outside, in graph order."""
    return [
        value
        for node in sorted(members, key=lambda node: node.index)
        for value in node.outputs
        if value is not None and (value.is_output or any(consumer not in members for consumer in value.consumers))
    ]


def entering(members: set[Node]) -> list[Value]:
    """Values that a set of nodes reads from outside, constants of one element left out, in order of first use."""
    found: dict[Value, None] = {}
    for node in sorted(members, key=lambda node: node.index):
        for value in node.reads():
            if value.producer not in members and not (value.constant is not None and value.constant.size == 1):
                found[value] = None
    return list(found)


def trimmed(members: set[Node], facts: Mapping[Node, Facts]) -> set[Node]:
    """The set without views at its border: outside they move nothing, inside they bring operands of their own.

    Those that are better inside come back once the region is chosen (``borders``).  Of a pair of transposes the first
    stays with what is before it, and the second with what is behind; of three that take one another back the first two,
    which move nothing, before it.
    """
    kept = set(members)

    def fed(node: Node) -> bool:
        return any(value.producer in kept for value in node.reads())

    def read(node: Node) -> bool:
        return any(reader in kept for value in node.outputs if value is not None for reader in value.consumers)

    def stays_last(node: Node) -> bool:
        """Whether it is for what is before it, or of a pair that lies here and moves nothing."""
        return not facts[node].view and (not facts[node].returns or (facts[node].leaves and fed(node)))

    while True:
        border = {node for node in kept if (
            ((facts[node].view or facts[node].leaves) and not fed(node)) or not (read(node) or stays_last(node)))}
        if not border:
            return kept
        kept -= border
