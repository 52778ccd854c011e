"""From an optimisation to an explanation: of a node, or of the traffic that remains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from onnx import TensorProto

from onnxfuse.errors import ModelError
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import shape_of
from onnxfuse.optimised import Optimised
from onnxfuse.planning.placement import Kind
from onnxfuse.planning.region import Region, RegionCost
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.reporting.explain import (
    Explanation,
    ModelExplanation,
    Neighbour,
    NodeExplanation,
    Remaining,
    State,
    Verdict,
    Weighed,
)
from onnxfuse.reporting.findings import Assumed
from onnxfuse.reporting.gather import costs_before, input_sizes, name_of, replaced_nodes
from onnxfuse.reporting.left import left_regions, own_matches
from onnxfuse.reporting.reasons import JOINS, Reasons, advice, product_words, told
from onnxfuse.rewriting import read_fused, sizes_record

_STATES: dict[Kind, State] = {
    Kind.FOLDED: "folded", Kind.VIEW: "view", Kind.HOST: "host", Kind.PRODUCT: "product", Kind.OTHER: "alone",
    Kind.CONTROL: "control",
}
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


@dataclass(frozen=True)
class _Placed:
    """A fused node of the plan."""

    name: str
    fusion: Region


class _Explainer:
    def __init__(self, optimised: Optimised) -> None:
        self.optimised = optimised
        self.graph, self.ledger = optimised.graph, optimised.ledger
        self.reasons = Reasons(optimised)
        self.costs = optimised.costs
        self.placed = [
            _Placed(entry.node, optimised.plan.fusions[entry.region]) for entry in optimised.rewritten.placed
        ]
        self.home: dict[Node, list[_Placed]] = {}
        for placed in self.placed:
            for node in placed.fusion.nodes:
                self.home.setdefault(node, []).append(placed)

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
        made = {placed.name: list(placed.fusion.nodes) for placed in self.placed}
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
        state: State = "fused" if homes else self._state(nodes[-1])
        refusals = self.reasons.at(nodes)
        if state == "alone":
            why = self.reasons.why(nodes[-1])
            refusals = [why, *(refusal for refusal in refusals if refusal.message != why.message)]
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
            tuple(next(placed.fusion.compiled for placed in self.placed if placed.name == name) for name in homes),
        )

    def whole(self) -> ModelExplanation:
        """The traffic that remains after fusion."""
        counted = [placed.fusion for placed in self.placed]
        whole = costs_before(self.costs, self.optimised.loaded, self.optimised.folded, self.optimised.rules.runtime)
        before, after = whole.ledger.total(), self.ledger.total(counted)
        return ModelExplanation(
            before.bytes_other, after.bytes_other, after.bytes_products, whole.total(), self.costs.total(counted),
            tuple(self._remaining()), left_regions(self.optimised), own_matches(self.optimised),
            advice(self.optimised), told(self.optimised),
        )

    def _state(self, node: Node) -> State:
        return "fused" if node in self.home else _STATES[self.ledger.placement.kinds[node]]

    def _summary(self, nodes: Sequence[Node], state: State, refusals: Sequence[Refusal]) -> str:
        if state == "fused":
            homes = self._homes(nodes)
            first = next(placed for placed in self.placed if placed.name in homes)
            others = sum(node.op != "Constant" for node in first.fusion.nodes)
            more = f" and {len(homes) - 1} more" if len(homes) > 1 else ""
            if len(homes) > 1 and all(len(self.home.get(node, ())) == len(homes) for node in nodes):
                return f"computed in each of {', '.join(homes)}: so its result need not be written and read"
            return f"runs in {first.name}{more}: {others} nodes as one kernel ({first.fusion.rule})"
        if state == "product":
            return product_words(nodes[-1])
        if state == "alone" and self.reasons.runtime(nodes[-1]):
            return f"left to ONNX Runtime: {refusals[0].message}"
        return f"a kernel of its own: {refusals[0].message}" if state == "alone" else _WORDS[state]

    def _homes(self, nodes: Sequence[Node]) -> list[str]:
        """Names of the fused nodes that hold one of these nodes."""
        return list(dict.fromkeys(placed.name for node in nodes for placed in self.home.get(node, ())))

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
        return Neighbour(value.name, self.ledger.bytes_of(value), node.label, node.qualified_op, self._state(node),
                         home[0].name if home else "")

    def _remaining(self) -> list[Remaining]:
        """Nodes and fused nodes by what they are, what they read and write, and why."""
        groups: dict[tuple[object, ...], list[Remaining]] = {}
        for found in (*self._remaining_fused(), *self._remaining_nodes()):
            code = None if found.reason is None else (found.reason.code, found.reason.rule)
            key = (found.state, found.operators, found.rule, found.shapes, code)
            groups.setdefault(key, []).append(found)
        joined = [
            Remaining(
                group[0].state, tuple(name for found in group for name in found.nodes), group[0].operators,
                group[0].rule, group[0].shapes, len(group), sum(found.bytes for found in group),
                sum(found.kernels for found in group), sum(found.seconds for found in group), group[0].reason,
            )
            for group in groups.values()
        ]
        return sorted(joined, key=lambda found: -found.bytes)

    def _remaining_fused(self) -> Iterable[Remaining]:
        for placed in self.placed:
            fusion = placed.fusion
            traffic = self.ledger.region(fusion)
            stopped = [refusal for refusal in self.reasons.at(fusion.nodes) if refusal.code in JOINS]
            operators = tuple(node.qualified_op for node in fusion.nodes if node.op != "Constant")
            yield Remaining("fused", (placed.name,), operators, fusion.rule,
                            self._shapes(fusion.tensors, fusion.outputs), 1,
                            round(traffic.bytes * fusion.cost.executions),
                            round(traffic.kernels * fusion.cost.executions),
                            fusion.cost.seconds_after, stopped[0] if stopped else None)

    def _remaining_nodes(self) -> Iterable[Remaining]:
        """Nodes of the canonical view: what many operators spell is one thing."""
        for view in (node for graph in self.optimised.canonical.graph.walk() for node in graph.nodes):
            nodes = [node for node in view.originals if node not in self.home]
            moved = sum(self.ledger.node(node).bytes for node in nodes)
            if not moved:
                continue
            main = max(nodes, key=lambda node: (self._state(node) == "product", self.ledger.node(node).bytes))
            seconds, kernels = self.costs.unfused(nodes)
            runs = self.ledger.executions(nodes)
            shown = [node for node in nodes if node.op != "Constant"]
            outputs = [value for value in view.outputs if value is not None]
            yield Remaining(self._state(main), tuple(node.label for node in shown),
                            tuple(node.qualified_op for node in shown), view.rule or "",
                            self._shapes(view.reads(), outputs), 1, round(moved * runs), round(kernels * runs),
                            seconds, self.reasons.why(main))

    def _shapes(self, inputs: Iterable[Value], outputs: Iterable[Value]) -> str:
        return " -> ".join(", ".join(map(self._shape, side)) for side in (inputs, outputs))

    def _shape(self, value: Value) -> str:
        sizes = shape_of(value, self.ledger.sizes)
        kind = "?" if value.dtype is None else TensorProto.DataType.Name(value.dtype).lower()
        return f"{kind}[{'?' if sizes is None else ', '.join(map(str, sizes))}]"


def _removed(optimised: Optimised, name: str) -> NodeExplanation | None:
    """The explanation of a node that went with the arithmetic on sizes; None where no such node is meant."""
    record = sizes_record(optimised.model)
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
