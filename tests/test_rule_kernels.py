"""The kernels of every rule's examples, of the shipped rules and of those in examples/rules.

All that can be fused in an example is, whether or not it gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from emulator import prepare
from plain_session import takes
from reference import Array, evaluate, numpy_type
from zoo_models import TARGET, Emulation, captured, compile_failures, distinct

from onnxfuse.checking import example_inputs
from onnxfuse.errors import VerificationError
from onnxfuse.graph import Graph
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.rules import Example, FuseRule, GrowRule, RuleSet, example_model, load_rules
from onnxfuse.verifying.reference import formal_names

USERS = Path(__file__).resolve().parent.parent / "examples" / "rules"
SIZES = (3, 5, 4, 7)
"""Of an example's symbols that have no size of their own, by turns."""


@cache
def rules() -> RuleSet:
    return load_rules([rules_folder(), USERS])


RULES = [rule.id for rule in rules().all if rule.kind != "runtime"]


@cache
def fused_examples(rule: str) -> tuple[tuple[Example, dict[str, int], Optimised], ...]:
    """The examples of a rule, those that are refused too, their sizes, and what is fused in them."""
    found = []
    for example in rules().by_id[rule].examples:
        model = example_model(example)
        dims = dims_of(example, load_graph(model))
        options = Options(rules=[USERS], dims=dims, target=TARGET, verify=False, least_gain=0.0)
        found.append((example, dims, optimise(model, options)))
    return tuple(found)


def dims_of(example: Example, graph: Graph) -> dict[str, int]:
    """Small sizes of an example's symbols."""
    names = sorted({name for value in graph.inputs for size in value.shape or () for name in size.symbols})
    return {**{name: SIZES[place % len(SIZES)] for place, name in enumerate(names)}, **example.dims}


def fed(example: Example, dims: Mapping[str, int], model: Optimised, nodes: list[FusedNode]
        ) -> Iterator[tuple[FusedNode, dict[str, Array]]]:
    """What nodes read in a run on the example's inputs; by the tests' own evaluator where the CPU provider lacks a
    type or an operator."""
    inputs = example_inputs(model.graph, Example(example.name, None, example.place, dims=dims, inputs=example.inputs))
    try:
        yield from captured(model, nodes, inputs, dims)
        return
    except VerificationError as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
    values = evaluate(model.loaded.proto, inputs)
    for node in nodes:
        yield node, {formal: np.asarray(values[name]).astype(numpy_type(model.graph.values[name].dtype))
                     for formal, name in formal_names(node).items()}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_matches_is_fused(rule: str) -> None:
    found = rules().by_id[rule]
    if isinstance(found, (FuseRule, GrowRule)):
        matched = [(example, model) for example, _, model in fused_examples(rule) if example.refused is None]
        assert matched
        for example, model in matched:
            assert read_fused(model.model), example.name


@pytest.mark.parametrize("rule", RULES)
def test_kernels_compile(rule: str, request: pytest.FixtureRequest) -> None:
    kernels = distinct([model for _, _, model in fused_examples(rule)])
    failures = compile_failures({
        text: (f"{model.loaded.proto.graph.name} {node.name} ({node.rule})", node.plan.options)
        for text, (model, node) in kernels.items()}, every=request.config.getoption("--slow"))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("rule", RULES)
def test_kernels_pass_the_emulator(rule: str) -> None:
    """Every fused node of an example: every variant that holds, aligned memory, on what it reads in a run of the
    example and on edge inputs.  Reference: the region's body in float64; tolerances and types:
    ``verifying.tolerances``.  A fault of one percent in it must be found."""
    prepare(list(distinct([model for _, _, model in fused_examples(rule)])))
    failures = []
    for example, dims, model in fused_examples(rule):
        if not takes(model.loaded.proto.opset_import[0].version):
            continue  # an old release of ONNX Runtime, that cannot run the model either
        nodes, emulation = list(read_fused(model.model)), Emulation.of(model)
        for node, arrays in fed(example, dims, model, nodes) if nodes else ():
            failures += [f"{example.name}: {failure}" for failure in emulation.failures(node, arrays)]
    assert not failures, "\n".join(failures)


def test_there_are_kernels_to_test() -> None:
    """The examples make more than a hundred distinct kernels."""
    models = [model for rule in RULES for _, _, model in fused_examples(rule)]
    assert len(distinct(models)) > 100
