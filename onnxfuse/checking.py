"""The examples of rules, computed: each is fused by its rule and compared with what it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.graph import Graph, bind, load_graph
from onnxfuse.graph.model import Node
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.pipeline import DEFAULT_TARGET, region_of
from onnxfuse.planning.candidates import Fusion, Maker
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.hardware import find_profile
from onnxfuse.planning.plan import make_plan
from onnxfuse.planning.sizes import shape_of
from onnxfuse.planning.traffic import Ledger
from onnxfuse.refusal import Refusal
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import rewrite
from onnxfuse.rules import (
    Example,
    ExampleOutcome,
    FuseRule,
    Rule,
    RuleSet,
    canonicalise,
    check_examples,
    load_rules,
    match,
)

if TYPE_CHECKING:
    import onnxruntime

SEED = 0
INDICES = 8
"""Integers are drawn below this where an example gives no bounds."""


@dataclass
class Checked:
    """Rule files and how their examples went.

    Attributes:
        rules: those of the files that were asked for, in order.
        outcomes: of every example of theirs.
        computed: places of the examples whose fused model was computed and equals the original.
        warnings: of the rule files.
    """

    rules: tuple[Rule, ...]
    outcomes: list[ExampleOutcome]
    computed: frozenset[tuple[str, str]]
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> list[ExampleOutcome]:
        """Examples that did not go as they should."""
        return [outcome for outcome in self.outcomes if outcome.fault is not None]


def check_rules(paths: Iterable[Path]) -> Checked:
    """Read rule files beside the shipped ones, and run and compute the examples of those in ``paths``.

    Raises:
        RuleError: a file, or one of its rules, is wrong.
    """
    asked = load_rules(paths)
    shipped = load_rules([rules_folder()])
    known = {Path(rule.place.file).resolve() for rule in shipped.all}
    own = list(dict.fromkeys(Path(rule.place.file) for rule in asked.all))
    rules = load_rules([rules_folder(), *(file for file in own if file.resolve() not in known)])
    computer = Computer(rules)
    outcomes = check_examples(rules, [rule.id for rule in asked.all], computer)
    return Checked(asked.all, outcomes, frozenset(computer.computed), asked.warnings)


@dataclass
class Computer:
    """Computes examples; a callback of ``rules.check_examples``.

    ``computed`` gathers the rule and the name of every example that was fused and equals the original.
    """

    rules: RuleSet
    computed: set[tuple[str, str]] = field(default_factory=set)

    def __call__(self, model: onnx.ModelProto, rule: Rule, example: Example) -> str | None:
        """A sentence where the fused model differs from the original, or cannot be made; else None."""
        graph = load_graph(model)
        fusions = self._fusions(graph, rule, example)
        if isinstance(fusions, Refusal):
            return f"It matches, and there is no kernel for it ({fusions.code}: {fusions.message})."
        if not fusions:
            return None
        fused = rewrite(model, graph, [region_of(fusion) for fusion in fusions]).model
        onnx.checker.check_model(fused)
        fault = compare(model, fused, example_inputs(graph, example))
        if fault is None:
            self.computed.add((rule.id, example.name))
        return fault

    def _fusions(self, graph: Graph, rule: Rule, example: Example) -> list[Fusion] | Refusal:
        """What the rule fuses in the example, whether or not that gains anything; for other kinds of rules, what the
        planner chooses."""
        view = canonicalise(graph, self.rules.canonical).graph
        ledger = Ledger(graph, bind(graph, example.dims))
        profile = find_profile(DEFAULT_TARGET)
        if not isinstance(rule, FuseRule):
            return list(make_plan(graph, view, self.rules, ledger, profile, least_gain=0.0).fusions)
        maker = Maker(graph, view, CostModel(ledger, profile))
        found: list[Fusion] = []
        taken: set[Node] = set()
        for one in match(rule, view, forbidden=self.rules.conditions).matches:
            if taken.isdisjoint(one.nodes):
                fusion = maker.custom(one) if rule.kernel is not None else maker.fusion(one.nodes, rule.id)
                if isinstance(fusion, Refusal):
                    return fusion
                found.append(fusion)
                taken |= set(one.nodes)
        return found


def example_inputs(graph: Graph, example: Example) -> dict[str, NDArray[Any]]:
    """Random inputs of an example: uniform between the bounds that it gives; other integers are small indices, and
    all else is drawn by ``make_inputs``."""
    sizes = bind(graph, example.dims)
    generator = np.random.default_rng(SEED)
    given = {}
    for value in graph.inputs:
        shape = shape_of(value, sizes)
        if value.name in example.inputs and shape is not None and value.dtype is not None:
            low, high = example.inputs[value.name]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.dtype))
            whole = dtype.kind in "iu"
            made = generator.integers(int(low), int(high), shape, endpoint=True) if whole else generator.uniform(
                low, high, shape)
            given[value.name] = np.asarray(made).astype(dtype)
        elif value.dtype in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) and shape is not None:
            whole_type = helper.tensor_dtype_to_np_dtype(value.dtype)
            given[value.name] = generator.integers(0, INDICES, shape).astype(whole_type)
    return make_inputs(graph, example.dims, given, SEED)


def compare(original: onnx.ModelProto, fused: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> str | None:
    """Whether two models give the same bits on the CPU provider with the runtime's optimisations off.

    Returns a sentence where they differ; None where they agree, or where the provider cannot run the original.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        first = _session(original, options)
        names = [output.name for output in first.get_outputs()]
        wanted = first.run(names, inputs)
    except Exception as error:  # ONNX Runtime has an exception type per status
        if "NOT_IMPLEMENTED" in str(error):
            return None
        reason = str(error).splitlines()[0]
        return f"ONNX Runtime cannot run the example itself; give it dims or inputs that suit it: {reason}"
    found = _session(fused, options).run(names, inputs)
    for name, left, right in zip(names, wanted, found, strict=True):
        if left.shape != right.shape or left.tobytes() != right.tobytes():
            return f"The output {name} of the fused model differs from the original's on the CPU."
    return None


def _session(model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    import onnxruntime

    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
