"""What ONNX Runtime keeps, and why: the regions that could be fused and are not, and what became of a user's rules.

The decisive reason comes first: that the runtime runs a region in one kernel itself, or that too little is gained.
Why such a region did not grow matters to nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from onnxfuse.graph.model import Node
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.reporting.findings import LeftRegions, MatchEntry
from onnxfuse.reporting.reasons import RUNTIME, is_own, runtime_words, several
from onnxfuse.rules import Match

DECISIVE = frozenset({
    "compute-pressure", "efficiency", "measured-slower", "memory-pressure", "never-ran", "slower-elsewhere", "spills",
})
"""Codes of refusals of regions that have a kernel: it is not wanted."""


def left_regions(optimised: Optimised) -> tuple[LeftRegions, ...]:
    """Regions that were weighed and left to the runtime, no two with a node in common, those that are alike together;
    the largest predicted gain first."""
    fused = {node for fusion in optimised.plan.fusions for node in fusion.view}
    codes = {refusal.message: refusal.code for refusal in optimised.plan.refusals}
    weighed = [(entry, entry.cost, code) for entry in optimised.plan.considered
               if entry.cost is not None and fused.isdisjoint(entry.nodes)
               and (code := _code(entry, entry.cost, codes)) is not None]
    taken: set[Node] = set()
    groups: dict[tuple[object, ...], list[tuple[Considered, RegionCost]]] = {}
    for entry, cost, code in sorted(weighed, key=lambda one: (-one[1].estimated_speedup, one[0].nodes[0].index)):
        if taken.isdisjoint(entry.nodes) and several(entry.nodes):
            taken.update(entry.nodes)
            key = code, tuple(node.qualified_op for node in entry.nodes)
            groups.setdefault(key, []).append((entry, cost))
    found = [_alike(str(key[0]), group, optimised.costs) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda each: -each.speedup))


def _code(entry: Considered, cost: RegionCost, codes: Mapping[str, str]) -> str | None:
    """Code of what settled that a region is left; None where it has no kernel, or lost to others."""
    if entry.verdict == "no-gain":
        return RUNTIME if cost.kernels_before <= 1 else entry.verdict
    code = codes.get(entry.reason)
    return code if entry.verdict == "refused" and code in DECISIVE else None


def _alike(code: str, group: Sequence[tuple[Considered, RegionCost]], costs: CostModel) -> LeftRegions:
    entry, cost = group[0]
    reason = runtime_words(entry.nodes, cost, costs) if code == RUNTIME else entry.reason
    return LeftRegions(code, reason, entry.rule, tuple(node.op for node in entry.nodes),
                       tuple(each.nodes[0].label for each, _ in group), round(cost.estimated_speedup, 4))


def recognised(optimised: Optimised) -> dict[str, int]:
    """How often each canonical rule took several nodes as one operator, most often first."""
    found = Counter(node.rule for node in optimised.canonical.made if node.rule is not None)
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def own_matches(optimised: Optimised) -> tuple[MatchEntry, ...]:
    """What became of every place where a fuse rule of the user's matched."""
    return tuple(_became(match, optimised) for space in optimised.plan.spaces for match in space.matches
                 if is_own(match.rule))


def _became(match: Match, optimised: Optimised) -> MatchEntry:
    rule, label = match.rule.id, match.nodes[0].label
    members = set(match.nodes)
    holders = [fusion for fusion in optimised.plan.fusions if not members.isdisjoint(fusion.view)]
    whole = next((fusion for fusion in holders if members <= set(fusion.view)), None)
    if whole is not None and rule in whole.rule.split("+"):
        return MatchEntry(rule, label, "fused", "", "")
    if whole is not None:
        return MatchEntry(rule, label, "fused", _region(whole), "its nodes are part of a larger region")
    refusals = list(_refused(match, optimised))
    if holders:
        reason = next((refusal.message for refusal in refusals), "")
        return MatchEntry(rule, label, "lost", ", ".join(map(_region, holders)), reason)
    weighed = [entry for entry in optimised.plan.considered if members <= set(entry.nodes) and entry.reason]
    reason = next((entry.reason for entry in sorted(weighed, key=lambda entry: len(entry.nodes))),
                  refusals[0].message if refusals else "")
    return MatchEntry(rule, label, "left", "ONNX Runtime", reason)


def _refused(match: Match, optimised: Optimised) -> Iterator[Refusal]:
    labels = {node.label for node in match.nodes} | {node.label for node in match.originals}
    return (refusal for refusal in optimised.refusals if refusal.rule == match.rule.id and refusal.node in labels)


def _region(fusion: Region) -> str:
    return f"the region of {fusion.label} ({fusion.rule})"
