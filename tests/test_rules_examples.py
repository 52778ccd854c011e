"""The examples that the shipped rules carry: each one matches, or is refused with the code that it names."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import erf, sqrt
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfuse.operators import load_graph
from onnxfuse.resources import rules_folder
from onnxfuse.rules import (
    CLASSES,
    Example,
    Rule,
    RuleSet,
    canonicalise,
    check_examples,
    example_model,
    find_matches,
    load_rules,
)
from onnxfuse.rules.operators import operator_key
from onnxfuse.rules.yamlfile import read, rule_files


@cache
def shipped() -> RuleSet:
    return load_rules([rules_folder()])


CASES = [(rule.id, position) for rule in shipped().all for position in range(len(rule.examples))]


@pytest.mark.parametrize(("rule", "position"), CASES, ids=lambda part: str(part))
def test_example(rule: str, position: int) -> None:
    outcomes = check_examples(shipped(), only=[rule])
    assert outcomes[position].fault is None, outcomes[position].fault


def test_every_rule_has_two_examples_of_each_sort() -> None:
    assert shipped().warnings == ()
    for rule in shipped().all:
        sorts = Counter(example.refused is None for example in rule.examples)
        assert sorts[True] >= 2, rule.id
        assert sorts[False] >= 2, rule.id


def lists(part: Any) -> Iterator[tuple[str, ...]]:
    """The lists of a rule's file, its examples apart, that name two operators, classes or sets and more."""
    match part:
        case dict():
            for key, value in part.items():
                yield from () if key == "examples" else lists(value)
        case str():
            for text in re.findall(r'\[("[\w.]+"(?:, *"[\w.]+")+)]', part):
                yield from lists(re.findall(r'"([\w.]+)"', text))
        case list():
            if len(part) > 1 and all(isinstance(name, str) and (
                    name in CLASSES or operator_key(name) is not None) for name in part):
                yield tuple(sorted(part))
            else:
                yield from (found for each in part for found in lists(each))


def test_lists_of_operators_are_named_once() -> None:
    """What two rules list is a set that every pattern has (``onnxfuse.rules.classes``)."""
    rules = [rule for file in rule_files(rules_folder()) for rule in read(file)]
    found = Counter(each for rule in rules for each in set(lists(rule.data)))
    assert found.total() >= 5
    assert [each for each, count in found.items() if count > 1] == []


@pytest.mark.parametrize("name", ["softmax", "norm", "project", "matmul", "products"])
def test_sets_hold_what_the_reference_says(name: str) -> None:
    text = (rules_folder() / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
    assert {operator_key(operator) for operator in row.split(", ")} == CLASSES[name]


def test_every_rule_explains_itself() -> None:
    for rule in shipped().all:
        assert rule.summary.endswith("."), rule.id
        assert rule.why.endswith("."), rule.id
        assert len({example.name for example in rule.examples}) == len(rule.examples), rule.id


def test_examples_load_in_the_reference() -> None:
    for rule in shipped().all:
        for example in rule.examples:
            model = example_model(example)
            if not any(node.domain for node in model.graph.node):
                ReferenceEvaluator(model)


def test_compute_callback_sees_what_matched_and_its_verdict_counts() -> None:
    seen: list[tuple[str, str]] = []

    def compute(model: onnx.ModelProto, rule: Rule, example: Example) -> str | None:
        seen.append((rule.id, example.name))
        return "off by 2" if example.name == "no scale, float32" else None

    outcomes = check_examples(shipped(), only=["rms-norm"], compute=compute)
    assert seen == [("rms-norm", example.name) for example in shipped().by_id["rms-norm"].examples[:3]]
    assert [outcome.fault for outcome in outcomes] == [None, None, "off by 2", None, None]


# What each canonical node means, in float64; used to check that a pattern computes what it becomes.
def _meaning(op: str, attributes: dict[str, Any], inputs: list[Any]) -> Any:
    x = inputs[0]

    def sigmoid(v: Any) -> Any:
        return 1 / (1 + np.exp(-v))

    match op:
        case "LayerNormalization" | "RMSNormalization":
            centred = x - x.mean(-1, keepdims=True) if op[0] == "L" else x
            y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + attributes["epsilon"])
            y = y * inputs[1] if len(inputs) > 1 and inputs[1] is not None else y
            return y + inputs[2] if len(inputs) > 2 and inputs[2] is not None else y
        case "Gelu" if attributes["approximate"] == "tanh":
            return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case "Gelu":
            return 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2)))
        case "Silu":
            return x * sigmoid(x)
        case "QuickGelu":
            return x * sigmoid(x * attributes["alpha"])
        case "Softplus":
            return np.logaddexp(x, 0)
        case "Mish":
            return x * np.tanh(np.logaddexp(x, 0))
        case "HardSwish":
            return x * np.clip(x / 6 + 0.5, 0, 1)
        case "SafeSoftmax" | "LogSoftmax":
            shifted = x - x.max(-1, keepdims=True)
            logarithm = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            return np.exp(logarithm) if op[0] == "S" else logarithm
        case "Identity":
            return x
        case _:
            raise AssertionError(op)


@pytest.mark.parametrize(
    ("rule", "name"),
    [(r.id, e.name) for r in shipped().canonical for e in r.examples if e.refused is None],
    ids=lambda part: str(part),
)
def test_canonical_node_means_what_its_nodes_compute(rule: str, name: str) -> None:
    """Example against the canonical node's meaning.  Types: the example's own, against float64 on the same inputs;
    tolerance: 4 units of the example's coarsest type, of the output's scale.  Reference: onnx's evaluator."""
    (example,) = (e for e in shipped().by_id[rule].examples if e.name == name)
    model = example_model(example)
    if any(node.domain for node in model.graph.node):
        pytest.skip("the reference evaluator has no com.microsoft")
    view = canonicalise(load_graph(model), shipped().canonical).graph
    random = np.random.default_rng(7)
    sizes = {"b": 2, "s": 3, "n": 5}
    feeds = {}
    for value in load_graph(model).inputs:
        assert value.shape is not None and value.dtype is not None
        shape = [size.evaluate(sizes) for size in value.shape]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.dtype)
        feeds[value.name] = random.standard_normal(shape).astype(dtype)
    wanted = dict(zip((o.name for o in view.outputs), ReferenceEvaluator(model).run(None, feeds), strict=True))
    known: dict[str, Any] = {name: array.astype(np.float64) for name, array in feeds.items()}
    coarsest = max(
        float(np.finfo(np.float16).eps) if str(a.dtype) == "float16" else 2.0**-7 if str(a.dtype) == "bfloat16"
        else float(np.finfo(np.float32).eps) for a in (*feeds.values(), *wanted.values())
    )
    made = [node for node in view.nodes if node.rule is not None]
    assert made
    for node in made:
        inputs = [
            None if v is None else known[v.name] if v.name in known else np.asarray(v.constant, np.float64)
            for v in node.inputs
        ]
        assert node.outputs[0] is not None
        known[node.outputs[0].name] = _meaning(node.op, dict(node.attributes), inputs)
    for output, result in wanted.items():
        if output in known:
            scale = float(np.max(np.abs(known[output]))) or 1.0
            np.testing.assert_allclose(result.astype(np.float64), known[output], rtol=0, atol=4 * coarsest * scale)


def test_matching_is_fast() -> None:
    """All shipped rules on a graph of over 1,300 nodes; the bound is ten times what it takes."""
    nodes = []
    for layer in range(110):
        x, y = f"x{layer}", f"x{layer + 1}"
        nodes.append(f"""
            p{layer} = Pow({x}, two)
            m{layer} = ReduceMean <axes = [-1]> (p{layer})
            e{layer} = Add(m{layer}, eps)
            q{layer} = Sqrt(e{layer})
            n{layer} = Div({x}, q{layer})
            w{layer} = Mul(n{layer}, w)
            g{layer} = MatMul(w{layer}, k)
            s{layer} = Sigmoid(g{layer})
            a{layer} = Mul(g{layer}, s{layer})
            u{layer} = MatMul(w{layer}, k)
            h{layer} = Mul(a{layer}, u{layer})
            r{layer} = Add(h{layer}, {x})
            {y} = Identity(r{layer})""")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[b, 64] x0, float[64] w, float[64, 64] k) => (float[b, 64] '
        f"x110) <float two = {{2.0}}, float eps = {{1e-5}}> {{{''.join(nodes)}}}"
    )
    graph = load_graph(model)
    assert len(graph.nodes) > 1_300
    start = time.perf_counter()
    view = canonicalise(graph, shipped().canonical)
    matches, _ = find_matches(view.graph, shipped())
    elapsed = time.perf_counter() - start
    found = Counter(found.rule.id for found in matches)
    assert Counter(node.rule for node in view.made) == {"rms-norm": 110, "silu": 110, "identity": 1}
    assert found["gated-silu"] == 110
    assert found["residual-rms-norm"] == 109
    assert elapsed < 5
