"""What ONNX Runtime fuses by itself, as the rules of the kind ``runtime`` say it."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.model import Graph, Value
from onnxfuse.provider.fusions import Fusing, Made, RuntimeFusion
from onnxfuse.refusal import Refusal
from onnxfuse.resources import rules_folder
from onnxfuse.rules.canonical import attributes_of, inputs_of
from onnxfuse.rules.kinds import RuntimeRule
from onnxfuse.rules.load import load_rules
from onnxfuse.rules.matcher import match
from onnxfuse.rules.matches import Match, NodeIndex
from onnxfuse.rules.pattern import operators_in

LEVELS = ("basic", "extended")
"""Of ONNX Runtime's optimisations, in their order."""

MOST_ROUNDS = 10
"""Rounds over the rules of a level, while they still find something: a limit of ONNX Runtime's own."""


def groups_of(graph: Graph, rules: Sequence[RuntimeRule] | None = None) -> tuple[RuntimeFusion, ...]:
    """``runtime_groups`` of a graph and of the bodies in it."""
    return tuple(group for each in graph.walk() for group in runtime_groups(each, rules))


def runtime_groups(graph: Graph, rules: Sequence[RuntimeRule] | None = None) -> tuple[RuntimeFusion, ...]:
    """Disjoint groups of two nodes and more that ONNX Runtime would run as one kernel each, in graph order; ``rules``
    say so, the shipped ones where None."""
    return _fused(graph, load_rules([rules_folder()]).runtime if rules is None else rules)[0].groups()


def told(rule: RuntimeRule, graph: Graph, rules: Sequence[RuntimeRule]) -> tuple[bool, tuple[Refusal, ...]]:
    """Whether a rule fuses something in a graph beside the other rules, and the near misses where it does not."""
    fusing, matched = _fused(graph, rules)
    return rule.id in matched, match(rule, fusing.graph).near_misses


def _fused(graph: Graph, rules: Sequence[RuntimeRule]) -> tuple[Fusing, set[str]]:
    """The graph with everything fused, and the rules that fused something."""
    fusing = Fusing(graph)
    matched: set[str] = set()
    for level in LEVELS:
        chosen = [rule for rule in rules if rule.level == level]
        for _ in range(MOST_ROUNDS):
            index = NodeIndex(fusing.graph)
            done: list[RuntimeRule] = []
            for rule in chosen:
                for found in match(rule, index.graph, index, tell=False).matches:
                    new = _made(rule, found, index.graph)
                    if new is not None and fusing.holds(found.nodes):
                        fusing.fuse(found.nodes, new)
                        done.append(rule)
            matched.update(rule.id for rule in done)
            # What was made is all that a further round could find more of.
            made = {(rule.becomes.domain, rule.becomes.op) for rule in done}
            chosen = [rule for rule in chosen if rule.pattern and not made.isdisjoint(operators_in(rule.pattern))]
            if not chosen:
                break
    return fusing, matched


def _made(rule: RuntimeRule, found: Match, graph: Graph) -> Made | None:
    """What a pattern becomes; None where that reads what would be gone then, or needs what is not known."""
    assert rule.pattern is not None
    kept = [found.bindings.get(name) for name in rule.pattern.optional_results]
    inputs, core = inputs_of(found), found.bindings.get(rule.core or "")
    if any(value is not None and value.producer in found.nodes for value in inputs):
        return None
    try:
        attributes = attributes_of(found, graph)
    except ValueError:
        return None
    results = tuple(value for value in found.results if value not in kept)
    return Made(rule.id, rule.becomes.op, rule.becomes.domain, attributes, inputs, results,
                core.producer if isinstance(core, Value) else None)
