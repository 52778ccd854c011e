"""The examples of rules, computed: each is fused by its rule and compared with what it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from onnxfuse.checking.compute import MEMORY, SECONDS, CannotRun, compare, example_inputs
from onnxfuse.checking.kernels import KernelChecks, Tried
from onnxfuse.checking.reading import read_all
from onnxfuse.checking.views import check_view
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import Graph, bind
from onnxfuse.graph.model import Node
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import DEFAULT_TARGET, written
from onnxfuse.planning.candidates import wanted_schedules
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.passes import searched
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import rewrite
from onnxfuse.rules import (
    CanonicalRule,
    Example,
    ExampleOutcome,
    FuseRule,
    GrowRule,
    NameRule,
    Rule,
    RuleSet,
    RuntimeRule,
    canonicalise,
    check_examples,
    groups_of,
    load_rules,
    match,
)
from onnxfuse.verifying.bounds import Bounds

NO_EXAMPLE = "nothing was tried: the rule has no example"
RUNTIME = "nothing was computed: ONNX Runtime itself fuses what the rule describes"
NAMED = "nothing was computed: the rule names what others fuse"
WRITTEN = "no kernel was run: onnxfuse writes it, and verifies it in every model that it fuses"


@dataclass
class Checked:
    """Rule files and how their examples went.

    Attributes:
        rules: those of the files that were asked for, in order.
        outcomes: of every example of theirs.
        computed: places of the examples whose fused model was computed and equals the original.
        kernels: by id of a rule with a kernel of its own, "right" (it was run, and was), "wrong" or "not run".
        unrun: what was not done, and why, each with the ids of the rules that it is said of.
        warnings: of the rule files.
    """

    rules: tuple[Rule, ...]
    outcomes: list[ExampleOutcome]
    computed: frozenset[tuple[str, str]]
    kernels: Mapping[str, str] = field(default_factory=dict)
    unrun: tuple[tuple[str, tuple[str, ...]], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> list[ExampleOutcome]:
        """Examples that did not go as they should."""
        return [outcome for outcome in self.outcomes if outcome.fault is not None]


def check_rules(paths: Iterable[Path]) -> Checked:
    """Read rule files beside the shipped ones, and run and compute the examples of those in ``paths``.

    Raises:
        RuleError: a file, or one of its rules, is wrong; all files are read before, and each is told of.
    """
    asked = read_all(paths)
    shipped = load_rules([rules_folder()])
    known = {Path(rule.place.file).resolve() for rule in shipped.all}
    own = list(dict.fromkeys(Path(rule.place.file) for rule in asked.all))
    rules = load_rules([rules_folder(), *(file for file in own if file.resolve() not in known)])
    wanted_schedules(rules)
    computer = Computer(rules)
    outcomes = check_examples(rules, [rule.id for rule in asked.all], computer)
    return Checked(asked.all, outcomes, frozenset(computer.computed), _kernels(asked.all, computer.kernels),
                   _unrun(asked.all, computer), asked.warnings)


def _kernels(rules: Sequence[Rule], checks: KernelChecks) -> dict[str, str]:
    """What became of the kernels that rules bring."""
    return {rule.id: "wrong" if rule.id in checks.failed else "right" if rule.id in checks.passed else "not run"
            for rule in rules if _has_kernel(rule)}


def _has_kernel(rule: Rule) -> bool:
    return isinstance(rule, FuseRule) and rule.kernel is not None


def _unrun(rules: Sequence[Rule], computer: Computer) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What was not done of each rule, by the reason, in the rules' order."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        reasons = [*computer.unrun.get(rule.id, ()), *computer.kernels.unrun.get(rule.id, ())]
        if not rule.examples:
            reasons.append(NO_EXAMPLE)
        elif isinstance(rule, RuntimeRule):
            reasons.append(RUNTIME)
        elif isinstance(rule, NameRule):
            reasons.append(NAMED)
        elif isinstance(rule, FuseRule | GrowRule) and not _has_kernel(rule):
            reasons.append(WRITTEN)
        for reason in reasons:
            found.setdefault(reason, []).append(rule.id)
    return tuple((reason, tuple(ids)) for reason, ids in found.items())


@dataclass
class Computer:
    """Computes examples; a callback of ``rules.check_examples``.

    ``computed`` gathers the rule and the name of every example that was fused and equals the original, ``unrun`` why
    others were not computed, by their rule.
    """

    rules: RuleSet
    computed: set[tuple[str, str]] = field(default_factory=set)
    unrun: dict[str, list[str]] = field(default_factory=dict)
    kernels: KernelChecks = field(default_factory=KernelChecks)

    def __call__(self, model: onnx.ModelProto, rule: Rule, example: Example) -> str | None:
        """A sentence where the example computes something else than before, or cannot be fused; else None."""
        try:
            graph = load_graph(model)
            Bounds(SECONDS, MEMORY).check_memory(Ledger(graph, bind(graph, example.dims)))
            fault, computed = self._compute(model, graph, rule, example, example_inputs(graph, example))
        except CannotRun as error:
            if error.missing:
                self._leave(rule, example, f"ONNX Runtime's CPU provider does not run it: {error.reason}")
                return None
            return f"ONNX Runtime cannot run the example; give it dims or inputs that suit it: {error.reason}"
        except OnnxfuseError as error:
            return f"The example cannot be computed: {error.message}"
        if computed and fault is None:
            self.computed.add((rule.id, example.name))
        return fault

    def _compute(self, model: onnx.ModelProto, graph: Graph, rule: Rule, example: Example,
                 inputs: Mapping[str, NDArray[Any]]) -> tuple[str | None, bool]:
        """What is wrong, and whether anything was computed."""
        if isinstance(rule, RuntimeRule | NameRule):
            return None, False
        if isinstance(rule, CanonicalRule):
            told = check_view(model, canonicalise(graph, self.rules.canonical), rule.id, inputs)
            if told == (None, False):
                self._leave(rule, example, "ONNX Runtime's CPU provider does not run what it becomes")
            return told
        fusions = self._fusions(graph, rule, example)
        if isinstance(fusions, Refusal):
            return f"It matches, and there is no kernel for it ({fusions.code}: {fusions.message}).", False
        if not fusions:
            return None, False
        fused = rewrite(model, graph, list(map(written, fusions))).model
        onnx.checker.check_model(fused)
        wrong = compare(model, fused, inputs)
        if wrong is None and _has_kernel(rule):
            tried = Tried(model, graph, bind(graph, example.dims), inputs)
            wrong = self.kernels.fault(rule.id, tried, fused)
        return wrong, True

    def _leave(self, rule: Rule, example: Example, why: str) -> None:
        self.unrun.setdefault(rule.id, []).append(f"the example {example.name!r} was not computed: {why}")

    def _fusions(self, graph: Graph, rule: Rule, example: Example) -> list[Region] | Refusal:
        """What the rule fuses in the example, whether or not that gains anything; for other kinds of rules, what the
        planner chooses."""
        view = canonicalise(graph, self.rules.canonical).graph
        costs = CostModel(Ledger(graph, bind(graph, example.dims)), find_profile(DEFAULT_TARGET),
                          groups_of(graph, self.rules.runtime))
        context = Context(view, self.rules, costs, Objective(least_gain=0.0))
        if not isinstance(rule, FuseRule):
            return list(searched(context).fusions)
        maker = context.makers[graph.place]
        found: list[Region] = []
        taken: set[Node] = set()
        for one in match(rule, view, forbidden=self.rules.conditions).matches:
            if taken.isdisjoint(one.nodes):
                fusion = maker.custom(one) if rule.kernel is not None else maker.fusion(one.nodes, rule.id)
                if isinstance(fusion, Refusal):
                    return fusion
                found.append(fusion)
                taken |= set(one.nodes)
        return found
