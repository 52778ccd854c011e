"""Rules of a user's own for what a build of ONNX Runtime fuses, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from onnxfuse.errors import RuleError
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.resources import rules_folder
from onnxfuse.rules import check_examples, load_rules, runtime_groups

RULE = """\
id: own-gate
kind: runtime
level: extended
summary: A hyperbolic tangent and the product with it.
why: Our build has a kernel for it.
pattern: |
  t = Tanh(x)
  y = t * z
becomes: my.domain.TanhGate(x, z)
examples:
  - name: a product
    expect: matched
    model: "g (float[B] x, float[B] z) => (float[B] y) { t = Tanh(x) y = Mul(z, t) }"
  - name: the tangent read elsewhere
    expect: {refused: inner-value-used-outside}
    model: "g (float[B] x, float[B] z) => (float[B] y, float[B] u) { t = Tanh(x) y = Mul(z, t) u = Neg(t) }"
"""
GATE = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1000,1000] x, float[1000,1000] z) => (float[1000,1000] y) { t = Tanh(x) y = Mul(z, t) }"""


def written(folder: Path, text: str) -> Path:
    file = folder / "own.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_rule_counts_against_regions(tmp_path: Path) -> None:
    """What the runtime runs as one kernel is one kernel to beat, and takes less time."""
    file = written(tmp_path, RULE)
    options = Options(target="H200", verify=False, database=False, least_gain=0.0)
    plain, ruled, disabled = (
        optimise(onnx.parser.parse_model(GATE), replace(options, **changes)).plan.fusions[0].cost
        for changes in ({}, {"rules": [file]}, {"rules": [file], "disable": ["own-gate"]}))
    assert (plain.kernels_before, ruled.kernels_before) == (2, 1)
    assert ruled.seconds_before < 0.8 * plain.seconds_before
    assert disabled == plain


def test_later_rules_read_what_earlier_ones_make(tmp_path: Path) -> None:
    more = RULE.replace("own-gate", "own-gate-bias").replace("level: extended", "level: extended\ncore: y").replace(
        "t = Tanh(x)\n  y = t * z", "y = my.domain.TanhGate(x + b, z)")
    rules = load_rules([written(tmp_path, f"{more}---\n{RULE}")]).runtime
    graph = load_graph(onnx.parser.parse_model(GATE.replace("Tanh(x)", "Tanh(s)").replace("{ t", "{ s = Add(x, z) t")))
    (group,) = runtime_groups(graph, rules)
    assert (len(group.nodes), {node.op for node in group.core}) == (3, {"Tanh", "Mul"})


def test_no_rule_reads_what_it_takes_away(tmp_path: Path) -> None:
    rules = load_rules([written(tmp_path, RULE)]).runtime
    assert not runtime_groups(load_graph(onnx.parser.parse_model(GATE.replace("Mul(z, t)", "Mul(t, t)"))), rules)


def test_outputs_of_the_graph_stay_apart(tmp_path: Path) -> None:
    rules = load_rules([written(tmp_path, RULE)]).runtime
    shown = GATE.replace("float[1000,1000] y)", "float[1000,1000] y, float[1000,1000] t)")
    assert not runtime_groups(load_graph(onnx.parser.parse_model(shown)), rules)


def test_examples_are_tried_beside_the_shipped_rules(tmp_path: Path) -> None:
    rules = load_rules([rules_folder(), written(tmp_path, RULE)])
    outcomes = check_examples(rules, ["own-gate"])
    assert [outcome.fault for outcome in outcomes] == [None, None]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("level: extended\n", "", "The key level is missing."),
        ("level: extended", "level: full", "level: Input should be 'basic' or 'extended'."),
        ("becomes: my", "core: z\nbecomes: my", "No line of the pattern assigns z."),
        ("becomes: my", "results: ['y?']\nbecomes: my", "What the runtime makes has a result that is not optional."),
        ("my.domain.TanhGate(x, z)", "my.domain.TanhGate(x, q)", "Nothing in the pattern is called q."),
    ],
)
def test_faults_are_told(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        load_rules([written(tmp_path, RULE.replace(old, new))])
    assert caught.value.message == message
