"""Why a node is in no fused node, or a fused node is no larger: the planner's refusals by node, most telling first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from onnxfuse.graph.model import Graph, Node
from onnxfuse.lowering.alike import Lowerings
from onnxfuse.optimised import Optimised
from onnxfuse.planning.admission import Facts, node_facts
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.placement import Kind, Placement
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.resources import rules_folder
from onnxfuse.rules import CanonicalRule, FuseRule, Rule, prohibitions

JOINS = frozenset({
    "two-rules", "growth", "region-size", "reduction-structure", "iteration-shape", "not-convex", "scattered-access",
    "pool-structure",
})
"""Codes of refusals to join two groups along an edge; they name the node that computes the value on it."""


RUNTIME = "runtime-fusion"
"""Code of the reason that ONNX Runtime runs the nodes in one kernel by itself."""

GROWTH = JOINS - {"region-size"} | {
    "already-fused", "computes-again", "cycle-with-region", "host-inputs", "lone-transpose", "no-gain", "operators",
    "transposing", "unused",
}
"""Codes that speak of how regions came about: nothing in the model or the options is wrong."""


class Reasons:
    """The refusals of an optimisation, by original node."""

    def __init__(self, optimised: Optimised) -> None:
        self._optimised, self._lowerings = optimised, Lowerings()
        self._views = list(optimised.canonical.graph.walk())
        self.view = {original: node for view in self._views for node in view.nodes for original in node.originals}
        """The node of the canonical view that stands for an original one."""
        self.inside: dict[Node, list[Region]] = {}
        """The fusions that an original node is in: several where its result is computed again."""
        for fusion in optimised.plan.fusions:
            for node in fusion.nodes:
                self.inside.setdefault(node, []).append(fusion)
        self._refused: dict[str, list[Refusal]] = {}
        for refusal in optimised.refusals:
            self._refused.setdefault(refusal.node, []).append(refusal)
        self._weighed: dict[Node, list[Considered]] = {}
        for considered in optimised.plan.considered:
            for node in considered.nodes:
                self._weighed.setdefault(node, []).append(considered)

    def considered(self, nodes: Iterable[Node]) -> list[Considered]:
        """Regions weighed that hold one of these original nodes."""
        views = dict.fromkeys(self.view[node] for node in nodes if node in self.view)
        return list({id(entry): entry for view in views for entry in self._weighed.get(view, ())}.values())

    def at(self, nodes: Collection[Node], around: bool = True) -> list[Refusal]:
        """Refusals at original nodes, what mends them first; with ``around`` also those to join with what they read."""
        labels = {label for node in nodes for label in (node.label, self._label(node))}
        found = [refusal for label in sorted(labels) for refusal in self._refused.get(label, ())]
        if around:
            producers = {value.producer for node in nodes for value in node.reads()} - {None, *nodes}
            beside = {label for node in producers if node is not None for label in (node.label, self._label(node))}
            found += [refusal for label in sorted(beside - labels) for refusal in self._refused.get(label, ())
                      if refusal.code in JOINS]
        return sorted(dict.fromkeys(found), key=lambda refusal: not refusal.remedy)

    def why(self, node: Node) -> Refusal:
        """Why an original node that launches a kernel is in no fused node."""
        if self._optimised.ledger.placement.kinds[node] is Kind.PRODUCT:
            # Another form of some operators would have a kernel, as an attention without keys of the past.
            form = self._facts(self.view.get(node, node))
            if isinstance(form, Refusal) and form.code == "no-lowering" and form.remedy:
                return form
            return Refusal("product", product_words(node), node.label)
        if self._optimised.ledger.placement.kinds[node] is Kind.CONTROL:
            words = f"{node.op} copies the results that it stacks; what its body holds is fused in there"
            return Refusal("control", words, node.label)
        view = self.view.get(node, node)
        if view.dead:
            return Refusal("unused", "nothing reads what it computes", view.label)
        if view in self._forbidden:
            return self._forbidden[view]
        facts = self._facts(view)
        if isinstance(facts, Refusal):
            return facts
        decided = self._decided(node, view)
        if decided is not None:
            return decided
        refusals = self.at([node], around=False)
        if refusals:
            return refusals[0]
        return self._without_company(node, view)

    def _facts(self, view: Node) -> Facts | Refusal:
        return node_facts(view, self._home[view], self._placement, self._lowerings)

    def _decided(self, node: Node, view: Node) -> Refusal | None:
        """What settles it whatever else was tried: too little is gained, or the runtime has one kernel for it."""
        weighed = self._weighed.get(view, ())
        counted = [(entry, entry.cost) for entry in weighed if entry.cost is not None]
        gains = sorted(((entry, cost) for entry, cost in counted if entry.verdict == "no-gain"),
                       key=lambda one: -one[1].estimated_speedup)
        # One kernel that stays one kernel is no reason: why it found no company is.
        for entry, cost in gains:
            if cost.kernels_before > 1:
                return Refusal("no-gain", entry.reason, node.label, entry.rule)
            if several(entry.nodes):
                return Refusal(RUNTIME, runtime_words(entry.nodes, cost, self._optimised.costs), node.label, entry.rule)
        others = [other for other in self.runtime(node) if other.op != "Constant"]
        if others:
            return Refusal(RUNTIME, f"ONNX Runtime itself runs it in one kernel with {_operators(others)}", view.label)
        for verdict in ("lost", "refused"):
            for entry in weighed:
                if entry.verdict == verdict and (entry.cost is None or entry.cost.kernels_before > 1):
                    return Refusal(verdict, entry.reason, node.label, entry.rule)
        return None

    def _without_company(self, node: Node, view: Node) -> Refusal:
        """Nothing was refused: no rule lists the operator, it is one kernel already, or nothing is beside it."""
        if not any((view.domain, view.op) in rule.operators for rule in self._optimised.rules.grow):
            return Refusal("not-listed", f"no grow rule lists {view.qualified_op}", view.label,
                           remedy=f"list {view.qualified_op} in a grow rule of your own")
        around = self.at([node])
        if around:
            return around[0]
        before, after = self._beyond(view, back=True), self._beyond(view, back=False)
        names = " and ".join(", ".join(side) for side in (before, after) if side)
        words = f"it stands alone between {names}" if before and after else f"it stands alone beside {names}"
        return Refusal("stands-alone", f"{words if names else 'it stands alone'}: one kernel that stays one kernel "
                       "gains nothing", view.label)

    def runtime(self, node: Node) -> list[Node]:
        """Nodes that ONNX Runtime itself runs in one kernel with an original node, in graph order."""
        return sorted(self._groups.get(node, frozenset()) - {node}, key=lambda other: other.index)

    def _beyond(self, view: Node, back: bool) -> list[str]:
        """Operators of the nearest nodes that launch kernels, before or after a node of the view."""
        found: dict[Node, None] = {}
        waiting, seen = [view], {view}
        while waiting:
            node = waiting.pop()
            for value in node.reads() if back else node.outputs:
                if value is None:
                    continue
                for other in [value.producer] if back else value.consumers:
                    if other is None or other in seen:
                        continue
                    seen.add(other)
                    if self._placement.kinds[other] is Kind.VIEW:
                        waiting.append(other)
                    elif self._placement.kinds[other].launches:
                        found[other] = None
        return list(dict.fromkeys(node.qualified_op for node in sorted(found, key=lambda node: node.index)))

    def _label(self, node: Node) -> str:
        return self.view[node].label if node in self.view else node.label

    @cached_property
    def _placement(self) -> Placement:
        return Ledger(self._views[0], self._optimised.ledger.sizes).placement

    @cached_property
    def _home(self) -> dict[Node, Graph]:
        """The graph of the canonical view that a node of it is in."""
        return {node: view for view in self._views for node in view.nodes}

    @cached_property
    def _groups(self) -> dict[Node, frozenset[Node]]:
        return {node: group.nodes for group in self._optimised.costs.groups for node in group.nodes}

    @cached_property
    def _forbidden(self) -> dict[Node, Refusal]:
        """Nodes that a forbid rule keeps out of every region."""
        found = [each for view in self._views for each in prohibitions(view, self._optimised.rules).found]
        return {
            node: Refusal(entry.rule.id, entry.rule.reason, node.label, entry.rule.id,
                          f"Disable the rule {entry.rule.id} to join them all the same.")
            for entry in found for node in entry.leave
        }


def several(nodes: Iterable[Node]) -> bool:
    """Whether nodes of the canonical view stand for more than one node of the model."""
    return len(_originals(nodes)) > 1


def runtime_words(nodes: Iterable[Node], cost: RegionCost, costs: CostModel) -> str:
    """Why a region that costs the runtime one kernel is none of ours: what it runs with what."""
    groups = {node: group.nodes for group in costs.groups for node in group.nodes}
    members = _originals(nodes)
    units = dict.fromkeys(groups.get(node, frozenset([node])) for node in members)
    inside = [[node for node in members if node in unit] for unit in units]
    outside = [sorted((node for node in unit if node not in members and node.op != "Constant"),
                      key=lambda node: node.index) for unit in units]
    words = [
        f"{_operators(held)} in one kernel" + (f" with {_operators(others)}" if others else "")
        for held, others in zip(inside, outside, strict=True) if others or len(held) > 1
    ]
    return (f"ONNX Runtime itself runs {', and '.join(words) or 'them so'}; as one fused node the {len(members)} nodes "
            f"are predicted to run {cost.estimated_speedup:.2f}x as fast")


def _operators(nodes: Iterable[Node]) -> str:
    return ", ".join(dict.fromkeys(node.qualified_op for node in nodes))


def _originals(nodes: Iterable[Node]) -> list[Node]:
    """The model's nodes behind nodes of the canonical view, constants left out."""
    found = dict.fromkeys(original for node in nodes for original in node.originals)
    return [node for node in found if node.op != "Constant"]


def product_words(node: Node) -> str:
    """What a product is called."""
    if "Conv" in node.op:
        kind = "a convolution"
    elif any(word in node.op for word in ("MatMul", "Gemm", "Einsum")):
        kind = "a matrix product"
    else:
        kind = "built around matrix products"
    return f"{node.qualified_op} is {kind}, which stays ONNX Runtime's"


def told(optimised: Optimised) -> tuple[Refusal, ...]:
    """The refusals worth telling: without those to make one of two named regions that are both fused anyway."""
    view = optimised.canonical.graph
    fused = {node for fusion in optimised.plan.fusions for node in fusion.view}
    labels = {node.label for node in fused}
    joined = {
        node.label for each in view.walk() for node in each.nodes if node in fused
        for value in node.outputs if value is not None
        if any(consumer in fused for consumer in value.consumers)
    }
    return tuple(refusal for refusal in optimised.refusals
                 if refusal.code != "two-rules" or refusal.node not in labels & joined)


def advice(optimised: Optimised) -> tuple[Refusal, ...]:
    """The refusals that a user can mend: by another export, an option, or a rule of their own.

    A shipped pattern that nearly stood needs no mending where the nodes are fused all the same, are seen as another
    operator, or would gain too little; and where an operator is another one, it is most often another computation.
    """
    explained = [node for fusion in optimised.plan.fusions for node in (*fusion.view, *fusion.nodes)]
    explained += [original for node in optimised.canonical.made for original in (node, *node.originals)]
    explained += [original for entry in optimised.plan.considered if entry.verdict == "no-gain"
                for node in entry.nodes for original in (node, *node.originals)]
    labels = {node.label for node in explained}
    rules = optimised.rules.by_id
    found: dict[Refusal, None] = {}
    for refusal in told(optimised):
        remedy, rule = refusal.remedy, rules.get(refusal.rule)
        pattern = isinstance(rule, CanonicalRule | FuseRule)
        shipped = rule is not None and pattern and not is_own(rule)
        if refusal.code in GROWTH or (shipped and (refusal.node in labels or refusal.code == "operator")):
            continue
        if pattern and not remedy:
            remedy = f"spell it as the rule does: onnxfuse rules show {refusal.rule}"
        if remedy:
            found[replace(refusal, remedy=remedy)] = None
    return tuple(found)


def is_own(rule: Rule) -> bool:
    """Whether a rule is none that comes with onnxfuse."""
    return not _is_shipped(rule.place.file)


@cache
def _is_shipped(file: str) -> bool:
    """Whether a file lies in the folder of the shipped rules: asked of every refusal, and paths are slow to resolve."""
    return rules_folder().resolve() in Path(file).resolve().parents
