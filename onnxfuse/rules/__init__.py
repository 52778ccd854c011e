"""Rules: reading and checking rule files, the pattern language, the matcher, the canonical view.

    load_rules(paths)          rule files to a ``RuleSet``
    canonicalise(graph, rules) the internal view: many spellings, one node
    find_matches(graph, rules) where the fuse rules match, and the near misses
    prohibitions(graph, rules) what the forbid rules say of the graph
    named(view, rules)         where the name rules match
    runtime_groups(graph, rules) what the runtime rules say that ONNX Runtime fuses by itself
    check_examples(rules)      run the examples that rules carry
"""

from __future__ import annotations

from onnxfuse.graph.model import Graph
from onnxfuse.refusal import Refusal
from onnxfuse.rules.canonical import CanonicalGraph, canonicalise
from onnxfuse.rules.classes import CLASSES
from onnxfuse.rules.examples import ExampleOutcome, check_examples, example_model
from onnxfuse.rules.forbid import Prohibition, Prohibitions, prohibitions
from onnxfuse.rules.growth import Component, components
from onnxfuse.rules.kernels import postfix
from onnxfuse.rules.kinds import (
    CanonicalRule,
    Example,
    ForbidRule,
    FuseRule,
    GrowRule,
    Growth,
    Kernel,
    NameRule,
    PatternRule,
    Rule,
    RuleSet,
    RuntimeRule,
)
from onnxfuse.rules.load import load_rules
from onnxfuse.rules.matcher import match
from onnxfuse.rules.matches import Match, MatchResult, NodeIndex
from onnxfuse.rules.naming import named
from onnxfuse.rules.runtime import groups_of, runtime_groups

__all__ = [
    "CLASSES", "CanonicalGraph", "CanonicalRule", "Component", "Example", "ExampleOutcome", "ForbidRule", "FuseRule",
    "GrowRule", "Growth", "Kernel", "Match", "MatchResult", "NameRule", "NodeIndex", "PatternRule", "Prohibition",
    "Prohibitions", "Rule", "RuleSet", "RuntimeRule", "canonicalise", "check_examples", "components", "example_model",
    "find_matches", "groups_of", "load_rules", "match", "named", "postfix", "prohibitions", "runtime_groups",
]


def find_matches(graph: Graph, rules: RuleSet) -> tuple[tuple[Match, ...], tuple[Refusal, ...]]:
    """Every match of every fuse rule in a graph (the canonical view, as a rule), and the near misses.

    Matches of different rules may overlap: choosing among them is the planner's business.
    """
    index = NodeIndex(graph)
    matches: list[Match] = []
    refusals: list[Refusal] = []
    for rule in rules.fuse:
        result = match(rule, graph, index, forbidden=rules.conditions)
        matches += result.matches
        if not rule.quiet:
            refusals += result.near_misses
    return tuple(matches), tuple(refusals)
