"""What still takes time after fusion: nodes and fused nodes that are alike together, and why they are not fewer."""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import shape_of, type_name
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.placement import Kind
from onnxfuse.region import Region
from onnxfuse.reporting.costs import main_node
from onnxfuse.reporting.explain import Remaining, State
from onnxfuse.reporting.reasons import JOINS, Reasons
from onnxfuse.rewriting import RemainingRecord

LARGEST = 16
"""Groups that a report keeps."""

_STATES: dict[Kind, State] = {
    Kind.FOLDED: "folded", Kind.VIEW: "view", Kind.HOST: "host", Kind.PRODUCT: "product", Kind.OTHER: "alone",
    Kind.CONTROL: "control",
}


class Places:
    """Where the original nodes of an optimised model are now.

    Attributes:
        placed: the fused nodes by name, with the regions that they are; home: names of those that hold a node.
    """

    def __init__(self, optimised: Optimised) -> None:
        self._kinds = optimised.ledger.placement.kinds
        self.placed: dict[str, Region] = {
            entry.node: optimised.plan.fusions[entry.region] for entry in optimised.rewritten.placed}
        self.home: dict[Node, list[str]] = {}
        for name, fusion in self.placed.items():
            for node in fusion.nodes:
                self.home.setdefault(node, []).append(name)

    def state(self, node: Node) -> State:
        """How an original node runs."""
        return "fused" if node in self.home else _STATES[self._kinds[node]]


class Remains:
    """What remains of an optimised model."""

    def __init__(self, optimised: Optimised, places: Places, reasons: Reasons) -> None:
        self._optimised, self._places, self._reasons = optimised, places, reasons
        self._ledger, self._costs = optimised.ledger, optimised.costs
        rest = [node for graph in self._ledger.graph.walk() for node in graph.nodes if node not in places.home]
        self._units: dict[Node, list[frozenset[Node]]] = {}
        for unit in self._costs.units(rest):
            self._units.setdefault(main_node(unit, self._costs), []).append(unit)

    def groups(self) -> list[Remaining]:
        """Nodes and fused nodes by what they are, what they read and write, and why; most bytes first."""
        groups: dict[tuple[object, ...], list[Remaining]] = {}
        for found in (*self._fused(), *self._nodes()):
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

    def _fused(self) -> Iterable[Remaining]:
        for name, fusion in self._places.placed.items():
            traffic, runs = self._ledger.region(fusion), fusion.cost.executions
            stopped = [refusal for refusal in self._reasons.at(fusion.nodes) if refusal.code in JOINS]
            operators = tuple(node.qualified_op for node in fusion.nodes if node.op != "Constant")
            yield Remaining("fused", (name,), operators, fusion.rule,
                            self._shapes(fusion.tensors, fusion.outputs), 1,
                            round(traffic.bytes * runs), round(traffic.kernels * runs),
                            self._costs.run_seconds(fusion), stopped[0] if stopped else None)

    def _nodes(self) -> Iterable[Remaining]:
        """Nodes of the canonical view: what many operators spell is one thing."""
        state = self._places.state
        for view in (node for graph in self._optimised.canonical.graph.walk() for node in graph.nodes):
            nodes = [node for node in view.originals if node not in self._places.home]
            moved = sum(self._ledger.node(node).bytes for node in nodes)
            if not moved:
                continue
            main = max(nodes, key=lambda node: (state(node) == "product", self._ledger.node(node).bytes))
            # What ONNX Runtime runs as one kernel counts once, where its main node is.
            units = [unit for node in nodes for unit in self._units.get(node, ())]
            seconds, kernels = self._costs.unfused(node for unit in units for node in unit)
            runs = self._ledger.executions(nodes)
            shown = [node for node in nodes if node.op != "Constant"]
            outputs = [value for value in view.outputs if value is not None]
            yield Remaining(state(main), tuple(node.label for node in shown),
                            tuple(node.qualified_op for node in shown), view.rule or "",
                            self._shapes(view.reads(), outputs), 1, round(moved * runs), round(kernels * runs),
                            seconds, self._reasons.why(main))

    def _shapes(self, inputs: Iterable[Value], outputs: Iterable[Value]) -> str:
        return " -> ".join(", ".join(map(self._shape, side)) for side in (inputs, outputs))

    def _shape(self, value: Value) -> str:
        sizes = shape_of(value, self._ledger.sizes)
        return f"{type_name(value.dtype)}[{'?' if sizes is None else ', '.join(map(str, sizes))}]"


def largest(optimised: Optimised) -> tuple[RemainingRecord, ...]:
    """The groups that take most of the predicted time, as a report and a fused file keep them."""
    found = Remains(optimised, Places(optimised), Reasons(optimised)).groups()
    return tuple(map(_record, sorted(found, key=lambda group: -group.seconds)[:LARGEST]))


def _record(group: Remaining) -> RemainingRecord:
    reason = group.reason
    return RemainingRecord(
        group.state, group.nodes[0], group.times, group.operators, group.rule, group.shapes, group.bytes,
        group.kernels, round(group.seconds, 9), *(("", "", "") if reason is None else (
            reason.code, reason.message, reason.remedy)),
    )
