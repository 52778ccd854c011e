"""From an optimisation to an explanation: of a node, or of the traffic that remains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import get_args

from onnxfuse.errors import ModelError
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.model import Node, Value
from onnxfuse.optimised import Optimised
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.region import RegionCost
from onnxfuse.reporting.explain import (
    ModelExplanation,
    Neighbour,
    NodeExplanation,
    State,
    Verdict,
    Weighed,
)
from onnxfuse.reporting.explanation import Explanation
from onnxfuse.reporting.findings import Assumed
from onnxfuse.reporting.gather import costs_before, input_sizes, name_of, replaced_nodes
from onnxfuse.reporting.left import left_regions, own_matches
from onnxfuse.reporting.locality import Locality
from onnxfuse.reporting.reasons import Reasons, advice, product_words, told
from onnxfuse.reporting.remaining import Places, Remains
from onnxfuse.rewriting import read_fused, sizes_record

_WORDS: dict[State, str] = {
    "folded": "ONNX Runtime computes it once, when the session is created",
    "view": "it costs nothing: its output is its input's memory under another shape",
    "host": "arithmetic on sizes, which ONNX Runtime leaves to the CPU",
    "control": "it runs its bodies and has no kernel of its own",
    "removed": "removed: it was arithmetic on sizes, and what read it has a constant now, or an equal value",
}
_DECIDED = "removed: sizes decide it, and the branch that it takes stands in its place"


def explain(optimised: Optimised, node: str | None = None, file: LoadedModel | None = None) -> Explanation:
    """Explain a node, or the whole model.

    Args:
        optimised: the plan, not verified.
        node: name of a node, of a value (the node that computes it is meant), or of a fused node.
        file: the fused file whose original was planned, if it was one: its fused nodes' names are known too.

    Raises:
        ModelError: nothing in the model has that name, or no node computes the value.
    """
    explainer = _Explainer(optimised)
    notes = [*optimised.loaded.notes]
    if file is not None:
        notes.append("The file is fused already: what follows is about the original in it, planned anew.")
    if optimised.profile.planning_only:
        notes.append(f"{optimised.profile.name} is for planning only: no kernels are made for it.")
    if node is None and (large := explainer.locality.note()) is not None:
        notes.append(large)
    gone = None if node is None else _removed(optimised, node)
    subject = None if node is None or gone is not None else explainer.subject(node, file)
    return Explanation(
        name_of(file or optimised.loaded),
        optimised.profile.name,
        input_sizes(optimised.graph, optimised.ledger.sizes),
        tuple(notes),
        gone if subject is None else explainer.node(*subject),
        explainer.whole() if node is None else None,
        Assumed(optimised.assumed_target, optimised.assumed),
    )


class _Explainer:
    def __init__(self, optimised: Optimised) -> None:
        self.optimised = optimised
        self.graph, self.ledger = optimised.graph, optimised.ledger
        self.reasons = Reasons(optimised)
        self.locality = Locality(optimised, self.reasons.inside)
        self.costs = optimised.costs
        self.places = Places(optimised)
        self.placed, self.home = self.places.placed, self.places.home

    def subject(self, name: str, file: LoadedModel | None) -> tuple[str, list[Node]]:
        """What a name stands for: how to call it, and the original nodes."""
        graphs = list(self.graph.walk())
        every = [node for graph in graphs for node in graph.nodes]
        nodes = {node.name: node for node in reversed(every) if node.name}
        labels = {node.label: node for node in every}
        if name in nodes and name not in labels:
            return nodes[name].label, [nodes[name]]
        if name in labels:
            return name, [labels[name]]
        made = {name: list(fusion.nodes) for name, fusion in self.placed.items()}
        for entry in () if file is None else read_fused(file.proto):
            made.setdefault(entry.name, list(replaced_nodes(entry, self.graph.part(entry.body))))
        if name in made:
            return name, made[name]
        values = {name: value for graph in reversed(graphs) for name, value in graph.values.items()
                  if value.outer is None}
        value = values.get(name)
        if value is not None and value.producer is not None:
            return value.producer.label, [value.producer]
        if value is not None:
            kind = "an input" if value.is_input else "a constant"
            readers = f", such as {value.consumers[0].label!r}" if value.consumers else ""
            raise ModelError(f"{name!r} is {kind} of the model: no node computes it.",
                             remedy=f"Name a node that reads it{readers}.", usage=True)
        near = get_close_matches(name, [*nodes, *made, *values], 3)
        raise ModelError(
            f"No node, value or fused node of the model is called {name!r}.",
            remedy=f"Did you mean {' or '.join(map(repr, near))}?" if near
            else "`onnxfuse explain MODEL` lists the nodes that move the most bytes.", usage=True,
        )

    def node(self, subject: str, nodes: Sequence[Node]) -> NodeExplanation:
        """One node, or the nodes of a fused one."""
        shown = [node for node in nodes if node.op != "Constant"] or list(nodes)
        homes = self._homes(nodes)
        state: State = "fused" if homes else self.places.state(nodes[-1])
        refusals = self.reasons.at(nodes)
        if state in ("alone", "product") and (why := self.reasons.why(nodes[-1])).code != "product":
            refusals = [why, *(refusal for refusal in refusals if refusal.message != why.message)]
        refusals = [*refusals, *filter(None, [self.locality.refusal(nodes)])]
        return NodeExplanation(
            subject,
            tuple(node.label for node in shown),
            tuple(node.qualified_op for node in shown),
            state,
            tuple(homes),
            self._runtime(nodes),
            self._summary(nodes, state, refusals),
            sum(self.ledger.node(node).bytes for node in nodes),
            self.costs.unfused(nodes)[0],
            tuple(self._weighed(nodes)),
            tuple(refusals),
            tuple(self._reads(nodes)),
            tuple(self._readers(nodes)),
            tuple(self.placed[name].compiled for name in homes),
        )

    def whole(self) -> ModelExplanation:
        """The traffic that remains after fusion."""
        counted = list(self.placed.values())
        whole = costs_before(self.costs, self.optimised.loaded, self.optimised.folded, self.optimised.rules.runtime)
        before, after = whole.ledger.total(), self.ledger.total(counted)
        return ModelExplanation(
            before.bytes_other, after.bytes_other, after.bytes_products, whole.total(), self.costs.total(counted),
            tuple(Remains(self.optimised, self.places, self.reasons).groups()), left_regions(self.optimised),
            own_matches(self.optimised), advice(self.optimised), told(self.optimised),
        )

    def _summary(self, nodes: Sequence[Node], state: State, refusals: Sequence[Refusal]) -> str:
        if state == "fused":
            homes = self._homes(nodes)
            first = next(name for name in self.placed if name in homes)
            fusion = self.placed[first]
            others = sum(node.op != "Constant" for node in fusion.nodes)
            more = f" and {len(homes) - 1} more" if len(homes) > 1 else ""
            if len(homes) > 1 and all(len(self.home.get(node, ())) == len(homes) for node in nodes):
                return f"computed in each of {', '.join(homes)}: so its result need not be written and read"
            return f"runs in {first}{more}: {others} nodes as one kernel ({fusion.rule})"
        if state == "product":
            return product_words(nodes[-1])
        if state == "alone" and self.reasons.runtime(nodes[-1]):
            return f"left to ONNX Runtime: {refusals[0].message}"
        return f"a kernel of its own: {refusals[0].message}" if state == "alone" else _WORDS[state]

    def _homes(self, nodes: Sequence[Node]) -> list[str]:
        """Names of the fused nodes that hold one of these nodes."""
        return list(dict.fromkeys(name for node in nodes for name in self.home.get(node, ())))

    def _runtime(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Nodes that the runtime itself would fuse with these."""
        found = dict.fromkeys(other for node in nodes for other in self.reasons.runtime(node))
        return tuple(other.label for other in found if other not in nodes and other.op != "Constant")

    def _weighed(self, nodes: Sequence[Node]) -> list[Weighed]:
        """Regions around nodes: the chosen, then the others by what they would have saved."""
        found = self.reasons.considered(nodes)
        reasons = {frozenset(entry.nodes): entry.reason for entry in found if entry.verdict == "chosen"}
        chosen = list({id(fusion): fusion for node in nodes for fusion in self.reasons.inside.get(node, ())}.values())
        weighed = [
            _weighed("chosen", reasons.get(frozenset(fusion.view), ""), fusion.rule, fusion.nodes, fusion.cost)
            for fusion in chosen
        ]
        return weighed + sorted((_considered(entry) for entry in found if entry.verdict != "chosen"), key=_order)

    def _reads(self, nodes: Sequence[Node]) -> Iterable[Neighbour]:
        values = dict.fromkeys(value for node in nodes for value in node.reads())
        for value in values:
            if value.producer is not None and value.producer not in nodes and not value.is_constant:
                yield self._neighbour(value, value.producer)

    def _readers(self, nodes: Sequence[Node]) -> Iterable[Neighbour]:
        for node in nodes:
            for value in node.outputs:
                for consumer in value.consumers if value is not None else ():
                    if value is not None and consumer not in nodes:
                        yield self._neighbour(value, consumer)

    def _neighbour(self, value: Value, node: Node) -> Neighbour:
        home = self.home.get(node)
        return Neighbour(value.name, self.ledger.bytes_of(value), node.label, node.qualified_op,
                         self.places.state(node), home[0] if home else "")


def _removed(optimised: Optimised, name: str) -> NodeExplanation | None:
    """The explanation of a node that went with the arithmetic on sizes; None where no such node is meant."""
    record = sizes_record(optimised.lean)
    for node in () if record is None else record.removed:
        if name == node.name or name in node.output:
            label = node.name or f"{node.op_type} -> {node.output[0]}"
            words = _DECIDED if node.op_type == "If" else _WORDS["removed"]
            return NodeExplanation(label, (label,), (node.op_type,), "removed", (), (), words, 0, 0.0, (), (), (), ())
    return None


def _considered(entry: Considered) -> Weighed:
    originals = sorted((node for member in entry.nodes for node in member.originals), key=lambda node: node.index)
    verdict: Verdict = next(name for name in get_args(Verdict) if name == entry.verdict)
    return _weighed(verdict, entry.reason, entry.rule, originals, entry.cost, entry.lost_to)


def _weighed(verdict: Verdict, reason: str, rule: str, nodes: Sequence[Node], cost: RegionCost | None,
             lost_to: str = "") -> Weighed:
    shown = [node for node in nodes if node.op != "Constant"]
    labels, operators = tuple(node.label for node in shown), tuple(node.qualified_op for node in shown)
    if cost is None:
        return Weighed(verdict, reason, rule, labels, operators, lost_to)
    return Weighed(
        verdict, reason, rule, labels, operators, lost_to, cost.bytes_before, cost.bytes_after, cost.kernels_before,
        cost.kernels_after, cost.seconds_before, cost.seconds_after,
    )


def _order(entry: Weighed) -> tuple[int, float]:
    return get_args(Verdict).index(entry.verdict), -(entry.seconds_saved or 0.0)
