"""Why a fusion of a lock is no more: the rule, and the node or the edge that stopped matching.

What the planner and the matcher refused is known by node (``reporting.reasons``); here the nodes are found by what the
lock calls them, and where it names an operator that is not there, by the rules that make such operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.graph.model import Node
from onnxfuse.locking.gather import Found
from onnxfuse.locking.likely import NEAR, likely
from onnxfuse.locking.lock import Lock, Made, RuntimeSpot
from onnxfuse.locking.names import Locked, Names, labels, originals
from onnxfuse.locking.structure import edges, inner_reads
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.placement import Kind
from onnxfuse.refusal import Refusal
from onnxfuse.reporting.reasons import JOINS, Reasons
from onnxfuse.resources import rules_folder
from onnxfuse.rules import CanonicalRule, FuseRule, canonicalise, load_rules
from onnxfuse.rules.load import STAGES
from onnxfuse.rules.runtime import told
from onnxfuse.wording import option

SHOWN = 3
"""Reasons that are given of one lost fusion."""


@dataclass(frozen=True)
class Stopped:
    """Where a fusion stopped.

    Attributes:
        node: label of the node, or "" where none of the place is in the model; edge: labels of the two nodes that no
            kernel holds together any more, or None.
        words: what became of the place, the rest of a sentence; because: the most telling reasons first.
    """

    node: str
    edge: tuple[str, str] | None
    words: str
    because: tuple[Refusal, ...]


def unseen(locked: Locked, before: Made, now: Made) -> Stopped:
    """What is said where the rules still find a fusion of ONNX Runtime's and a session does not make it any more."""
    words = (f"a session of ONNX Runtime {now.onnxruntime} keeps its nodes apart, and one of {before.onnxruntime} ran "
             "them as one")
    return Stopped(locked.label, None, words, ())


class Because:
    """Reasons of one optimisation."""

    def __init__(self, optimised: Optimised, lock: Lock, ours: Sequence[Found], theirs: Sequence[Found],
                 new: Sequence[Found]) -> None:
        """``ours``: our own fused nodes, of which ``new`` are not in the lock; ``theirs``: what ONNX Runtime fuses in
        the model before."""
        self._optimised, self._lock, self._fused, self._theirs = optimised, lock, ours, theirs
        self._names = Names.of_view(optimised)
        held = {node for found in ours if found not in new for node in found.holds}
        self._free = [node for graph in optimised.canonical.graph.walk() for node in graph.nodes
                      if held.isdisjoint(node.originals)]
        self._rules = optimised.rules
        self._reasons = Reasons(optimised)
        self._plain = Names(optimised.graph)

    def ours(self, locked: Locked) -> Stopped:
        """Why a fusion of ours is lost."""
        nodes = self._found(locked)
        rules = [*locked.rule.split("+"), *locked.spot.spelled]
        reasons = [*self._gone(rules), *self._missing(locked, nodes)]
        reasons = reasons or [*self._rewired(locked, nodes), *self._at(locked.rule.split("+"), nodes)]
        return self._stopped(locked, nodes, reasons or [*self._since()])

    def runtimes(self, locked: Locked) -> Stopped:
        """Why ONNX Runtime does not fuse by itself what it did."""
        nodes = self._plain.of(locked)
        rules = locked.rule.split("+")
        reasons = [*self._taken(nodes), *self._gone(rules), *self._refused(locked, rules, nodes)]
        return self._stopped(locked, nodes, reasons or [*self._spelt(locked, nodes)])

    def _found(self, locked: Locked) -> tuple[Node | None, ...]:
        """The nodes of a place; where most of the lock's names are unknown, where it most likely is among those that
        nothing of the lock stands for, each once."""
        nodes = self._names.of(locked)
        if 2 * nodes.count(None) > len(nodes):
            found = likely(locked.words, self._free, self._is_no_product)
            nodes = max(nodes, found, key=lambda each: sum(node is not None for node in each))
        self._free = [node for node in self._free if node not in nodes]
        return nodes

    def _is_no_product(self, node: Node) -> bool:
        kinds = self._optimised.ledger.placement.kinds
        return all(kinds[each] is not Kind.PRODUCT for each in node.originals)

    def _stopped(self, locked: Locked, nodes: Sequence[Node | None], reasons: Iterable[Refusal]) -> Stopped:
        because = tuple(dict.fromkeys(reasons))[:SHOWN]
        known = labels(nodes)
        if not known:
            return Stopped("", None, "its nodes are not in the model any more, renamed or gone", because)
        changed = _changed(locked, nodes)
        edge = self._edge(locked, nodes, changed[:1])
        if changed:
            op, node = locked.operators[changed[0]], nodes[changed[0]]
            words = f"there is no {op} {locked.spot.nodes[changed[0]]!r} any more" if node is None else (
                f"{node.label!r} is {node.qualified_op} in place of {op}")
            return Stopped(known[0] if node is None else node.label, edge, words, because)
        homes = {id(found): found for node in nodes for found in self._held_by(node)}
        if not homes:
            return Stopped(because[0].node if because and because[0].node in known else known[0], edge,
                           "its nodes are left to ONNX Runtime", because)
        names = ", ".join(f"the region of {found.spot.nodes[0]} ({found.rule})" for found in homes.values())
        return Stopped(edge[0] if edge else known[0], edge, f"its nodes are no longer in one kernel: {names}", because)

    def _edge(self, locked: Locked, nodes: Sequence[Node | None], changed: Sequence[int]) -> tuple[str, str] | None:
        """The first edge whose ends run in no kernel together; where a node ``changed``, one of its edges."""
        for above, below in edges(locked.words):
            if not max(above, below) < len(nodes) or (changed and changed[0] not in (above, below)):
                continue
            ends = nodes[above], nodes[below]
            homes = [{id(found) for found in self._held_by(end)} for end in ends]
            if changed or homes[0].isdisjoint(homes[1]):
                first, second = (locked.spot.nodes[place] if node is None else node.label
                                 for place, node in zip((above, below), ends, strict=True))
                return first, second
        return None

    def _held_by(self, node: Node | None) -> Iterator[Found]:
        """Our fused nodes that hold all of a node."""
        held = set() if node is None else set(node.originals)
        return (found for found in self._fused if held and held <= found.holds)

    def _gone(self, rules: Iterable[str]) -> Iterator[Refusal]:
        """Rules that are not in force."""
        for rule in dict.fromkeys(rules):
            if rule in self._rules.disabled:
                what = "stage" if rule in STAGES else "rule"
                yield Refusal("disabled", f"the {what} {rule} is left out", "", rule,
                              f"Plan without {option('disable', rule)}.")
            elif rule not in self._rules.by_id and rule not in STAGES:
                yield Refusal("no-rule", f"there is no rule {rule} here", "", rule,
                              f"If it is a rule of your own, give its file: {option('rules', 'PATH')}.")

    def _since(self) -> Iterator[Refusal]:
        """What is left out that was not for the lock, such as a stage without rules of its own."""
        yield from self._gone(sorted(self._rules.disabled - set(self._lock.plan.disabled)))
        if self._optimised.keeps_biases and not self._lock.plan.keeps_biases:
            yield Refusal("bias", "convolutions keep their biases, as the CUDA provider's options ask for")

    def _missing(self, locked: Locked, nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """Why spellings of operators that are not there any more are not taken as such."""
        for place in _changed(locked, nodes):
            makers = [rule.id for rule in self._spelling if rule.becomes.op == locked.operators[place]
                      and not rule.becomes.domain]
            yield from self._gone(rule for rule in makers if rule in self._rules.disabled)
            here = {node.label for node in self._between(locked, nodes, place)}
            misses = [refusal for refusal in self._misses if refusal.rule in makers and refusal.node in here]
            yield from misses or self._spelt(locked, nodes)

    def _spelt(self, locked: Locked, nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """What computes now what an operator of the lock did, where nothing came near to being taken for it."""
        for place in _changed(locked, nodes):
            found = [node for node in self._between(locked, nodes, place) if node.op != "Constant"]
            if found:
                words = ", ".join(dict.fromkeys(node.qualified_op for node in found))
                message = f"in place of {locked.operators[place]} there is {words}, which no rule takes for it"
                yield Refusal("spelling", message, found[-1].label,
                              remedy="Export it as before, or in a spelling that `onnxfuse rules list` has.")

    def _rewired(self, locked: Locked, nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """Edges of a place that the model has no more, though both ends are there."""
        for above, below in edges(locked.words):
            read, reader = nodes[above], nodes[below]
            if read is None or reader is None or read in inner_reads(reader, [read]):
                continue
            now = labels([value.producer for value in reader.reads() if not value.is_constant])
            yield Refusal("rewired", f"it reads {', '.join(now) or 'inputs alone'}, and not {read.label}", reader.label)

    def _at(self, rules: Sequence[str], nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """Near misses of the rules themselves at the place, then why each of its nodes runs as it does, near misses of
        other patterns last."""
        known = [node for node in nodes if node is not None]
        here = {label for node in known for label in (node.label, *(each.label for each in node.originals))}
        yield from (refusal for refusal in self._optimised.refusals
                    if refusal.node in here and refusal.rule in rules)
        kinds = self._optimised.ledger.placement.kinds
        reasons = [self._reasons.why(node) for node in originals(known)
                   if not any(self._held_by(node)) and kinds[node].launches and kinds[node] is not Kind.PRODUCT]
        yield from sorted(reasons, key=lambda why: why.rule not in rules and isinstance(
            self._rules.by_id.get(why.rule), FuseRule | CanonicalRule))
        yield from (refusal for refusal in self._reasons.at(originals(known)) if refusal.code in JOINS
                    and refusal.node in here)

    def _taken(self, nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """Fused nodes that take a part of what the runtime would run in one kernel, and what that costs."""
        members = set(originals(nodes))
        group = next((found for found in self._theirs if members <= found.holds), None)
        if group is None or not isinstance(group.spot, RuntimeSpot):
            return
        for found in self._fused:
            held = [node for node in group.nodes if node in found.holds]
            if held:
                names = ", ".join(node.label for node in held)
                yield Refusal(
                    "taken", f"the fused node of {found.spot.nodes[0]} ({found.rule}) takes {names}; what ONNX Runtime "
                             f"keeps takes {group.spot.costs_us:.3g} µs predicted", held[0].label, found.rule,
                    f"Leave it out: {option('disable', found.rule)}.")

    def _refused(self, locked: Locked, rules: Sequence[str], nodes: Sequence[Node | None]) -> Iterator[Refusal]:
        """Near misses of runtime rules at nodes of the graph."""
        here = set(labels(nodes)) | {node.label for place in _changed(locked, nodes)
                                     for node in self._between(locked, nodes, place)}
        for rule in self._rules.runtime:
            if rule.id in rules:
                for graph in self._optimised.graph.walk():
                    misses = told(rule, graph, self._rules.runtime)[1]
                    yield from (refusal for refusal in misses if refusal.node in here)

    def _between(self, locked: Locked, nodes: Sequence[Node | None], place: int) -> list[Node]:
        """Nodes of the model that stand in place of one that is not there any more, in graph order: what those that
        read it are computed from, ``NEAR`` at most, up to the others of its place and to products."""
        readers = originals(nodes[below] for above, below in edges(locked.words) if above == place)
        others = set(originals(node for at, node in enumerate(nodes) if at != place))
        seen = readers or originals([nodes[place]])
        for node in seen:
            above = dict.fromkeys(value.producer for value in node.reads())
            seen += [other for other in above if other is not None and other not in seen and other not in others
                     and self._is_no_product(other) and len(seen) < NEAR]
        return sorted((node for node in seen if node not in others), key=lambda node: node.index)

    @cached_property
    def _spelling(self) -> tuple[CanonicalRule, ...]:
        """Rules that take several nodes as one operator, those that are left out too."""
        return (*load_rules([rules_folder()]).canonical, *self._rules.canonical)

    @cached_property
    def _misses(self) -> tuple[Refusal, ...]:
        """Near misses of the canonical rules, those of quiet ones too."""
        return canonicalise(self._optimised.graph, self._rules.canonical, tell_all=True).refusals


def _changed(locked: Locked, nodes: Sequence[Node | None]) -> list[int]:
    """Places of a structure whose node is not there any more, or of another operator."""
    return [place for place, (op, node) in enumerate(zip(locked.operators, nodes, strict=True))
            if node is None or node.qualified_op != op]
