"""What is left to ONNX Runtime is named with the decisive reason, and a user's own rules are told what they lost to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, parse, run, write
from onnx import numpy_helper

from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import explain
from onnxfuse.reporting.reasons import advice, told

LAYERS = 3

SILU = "m{i} = MatMul({x}, w)\n a{i} = Mul(m{i}, two)\n s{i} = Sigmoid(a{i})\n y{i} = Mul(a{i}, s{i})"
"""The factor goes into the runtime's FusedMatMul, the rest into its QuickGelu: nothing is left to gain."""

NORM = """m{i} = MatMul({x}, w)
 c{i} = Add(m{i}, b)
 r{i} = Add(c{i}, {x})
 u{i} = ReduceMean <axes = [-1]> (r{i})
 d{i} = Sub(r{i}, u{i})
 p{i} = Pow(d{i}, two)
 v{i} = ReduceMean <axes = [-1]> (p{i})
 e{i} = Add(v{i}, eps)
 q{i} = Sqrt(e{i})
 n{i} = Div(d{i}, q{i})
 g{i} = Mul(n{i}, w1)
 y{i} = Add(g{i}, b)"""
"""Residual LayerNorms as DistilBERT's export spells them: the runtime's SkipLayerNormalization."""

CASES = {
    "silu": (SILU, "[batch, 64]", ["Mul", "Silu"],
             "ONNX Runtime itself runs Mul in one kernel with MatMul, and Sigmoid, Mul in one kernel; as one fused "
             "node the 3 nodes are predicted to run "),
    "norm": (NORM, "[batch, sequence, 64]", ["Add", "Add", "LayerNormalization"],
             "ONNX Runtime itself runs Add, ReduceMean, Sub, Pow, Sqrt, Div, Mul in one kernel; as one fused node the "
             "11 nodes are predicted to run "),
}


def layers(name: str) -> onnx.ModelProto:
    text, shape, *_ = CASES[name]
    lines = [text.format(i=i, x=f"y{i - 1}" if i else "x") for i in range(LAYERS)]
    model = parse(f"g (float{shape} x) => (float{shape} y{LAYERS - 1}) {{ {chr(10).join(lines)} }}")
    for name_, shape_ in (("w", (64, 64)), ("b", (64,)), ("w1", (64,))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape_, np.float32), name_))
    for name_, number in (("two", 2.0), ("eps", 1e-12)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), name_))
    return model


@pytest.mark.parametrize("name", CASES)
def test_what_the_runtime_fuses_itself_is_named(tmp_path: Path, name: str) -> None:
    _, _, operators, reason = CASES[name]
    path = tmp_path / "model.onnx"
    onnx.save(layers(name), path)
    result = run("optimize", path, "--dry-run", "--no-verify", "--report", tmp_path / "r.json", "--target", "H100")
    assert result.exit_code == 0, result.output
    (left,) = json.loads((tmp_path / "r.json").read_text())["left"]
    assert (left["code"], left["times"], left["operators"]) == ("runtime-fusion", LAYERS, operators)
    assert left["reason"].startswith(reason)
    lines = [line.strip() for line in result.output.splitlines()]
    assert f"{LAYERS} regions left to ONNX Runtime: best {left['speedup']:.2f}x predicted; " in result.output
    assert f"`onnxfuse explain {path}` says more" in " ".join(lines)
    assert left["reason"] in result.output.replace("\n        ", " ")
    assert "named regions" not in result.output


@pytest.mark.parametrize("name", CASES)
def test_a_node_is_explained_by_what_settles_it(name: str) -> None:
    optimised = optimise(layers(name), Options(verify=False, target="H100", database=False))
    for node in optimised.graph.nodes:
        found = explain(optimised, node.label).node
        assert found is not None
        if found.state == "alone":
            assert found.refusals[0].code == "runtime-fusion", node.label
            assert found.summary.startswith("left to ONNX Runtime: ONNX Runtime itself runs ")


def test_too_little_gain_is_named_with_its_figures(tmp_path: Path) -> None:
    output = run("optimize", write(tmp_path, CHAIN), "--dry-run", "--no-verify", "--least-gain", "50").output
    assert "1 region left to ONNX Runtime: best " in output
    assert "     1 x Mul, Tanh, Add, Sigmoid, Mul  no-gain\n        5 nodes would run " in output


def test_explaining_is_one_thing(tmp_path: Path) -> None:
    """What ``explain`` prints stands in what ``optimize --explain`` and ``report --explain`` print, word for word."""
    path = tmp_path / "model.onnx"
    onnx.save(layers("norm"), path)
    alone = run("explain", path, "-v").output.partition("\n\n")[2]
    assert alone.startswith("Through device memory") and f"{LAYERS} regions left to ONNX Runtime" in alone
    assert alone in run("optimize", path, "--dry-run", "--no-verify", "--explain", "-v").output
    assert alone in run("report", path, "--explain", "-v").output


@pytest.mark.parametrize("options", [
    ["--no-database"], ["--database", "none.sqlite"], ["--profile", "none.json"], ["--database", "x", "--no-database"],
], ids=" ".join)
def test_explaining_looks_at_the_same_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, CHAIN)
    one = run("explain", path, *options)
    other = run("optimize", path, "--dry-run", "--no-verify", "--explain", *options)
    assert one.exit_code == other.exit_code
    if one.exit_code:
        assert one.stderr.replace("explain", "optimize").splitlines()[-1] == other.stderr.splitlines()[-1]
    else:
        assert one.output.partition("\n\n")[2] in other.output


def test_canonical_rules_that_fired_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(layers("norm"), path)
    found = json.loads(run("report", path, "--json").output)
    assert found["canonical"] == {"layer-norm": LAYERS}
    assert f"recognised: {LAYERS} layer-norm\n" in run("report", path).output


def test_advice_is_what_a_user_can_act_on() -> None:
    """The rest is there with -v: growth between regions is nobody's to mend."""
    optimised = optimise(layers("norm"), Options(verify=False, target="H100", database=False))
    assert {refusal.code for refusal in told(optimised)} & {"two-rules", "growth"}
    assert not {refusal.code for refusal in advice(optimised)} & {"two-rules", "growth"}


def test_what_is_recognised_or_fused_needs_no_advice(tmp_path: Path) -> None:
    """A shipped pattern that nearly stood in nodes that another one took; a user's own is told of all the same."""
    model = parse("g (float[n, 64] x) => (float[n, 64] y) { s = Sigmoid(x)\n a = Mul(x, s)\n y = Tanh(a) }")
    optimised = optimise(model, Options(verify=False, database=False))
    assert [node.rule for node in optimised.canonical.made] == ["silu"] and not advice(optimised)
    (tmp_path / "mine.yaml").write_text(RULE.format(id="mine", pattern="Tanh(Silu(Exp(x)))"))
    (told_of,) = advice(optimise(model, Options(rules=[tmp_path], verify=False, database=False)))
    assert (told_of.rule, told_of.message) == ("mine", "x is an input of the model where the rule needs Exp.")
    assert told_of.remedy == "spell it as the rule does: onnxfuse rules show mine"


RULE = """
id: {id}
kind: fuse
summary: A rule of mine.
why: For a test.
pattern: y = {pattern}
examples: []
"""


@pytest.mark.parametrize(("pattern", "fates"), [
    ("Mul(Sigmoid(Add(Tanh(Mul(x, w)), x)), h)", [("fused", "")]),
    ("Tanh(x * w)", [("fused", "the region of a (grow-pointwise)")]),
    ("Neg(x)", []),
])
def test_own_rules_are_told_what_became_of_them(tmp_path: Path, pattern: str, fates: list[tuple[str, str]]) -> None:
    (tmp_path / "mine.yaml").write_text(RULE.format(id="mine", pattern=pattern))
    model = parse(CHAIN)
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.save(model, tmp_path / "m.onnx")
    found = json.loads(run("report", tmp_path / "m.onnx", "--json", "--rules", tmp_path).output)
    assert [(match["rule"], match["became"], match["to"]) for match in found["matches"]] == [
        ("mine", *fate) for fate in fates]


def test_a_rule_that_lost_says_to_what(tmp_path: Path) -> None:
    """Of two rules with kernels of their own the one that matches more takes a node that both name."""
    source = 'extern "C" __global__ void k(const float* x, float* y, long long n) {}\n'
    (tmp_path / "k.cu").write_text(source)
    kernel = """
kernel: {file: k.cu, entry: k, inputs: [x], outputs: [y], arguments: [{i64: size(x)}], grid: "1", block: 32}
"""
    for name, pattern in {"small": "Tanh(Neg(x))", "large": "Exp(Sigmoid(Tanh(x)))"}.items():
        (tmp_path / f"{name}.yaml").write_text(RULE.format(id=name, pattern=pattern) + kernel)
    path = write(tmp_path, """g (float[n, 64] x) => (float[n, 64] y) {
      a = Neg(x) t = Tanh(a) s = Sigmoid(t) y = Exp(s)
    }""")
    (lost,) = [match for match in json.loads(run("report", path, "--rules", tmp_path, "--json").output)["matches"]
               if match["rule"] == "small"]
    assert (lost["became"], lost["to"]) == ("lost", "the region of Tanh -> t (large)")
    assert lost["reason"] == "Tanh -> t belongs to a match of large"
    output = run("report", path, "--rules", tmp_path).output
    assert "your rule small matched 1 time: 1 lost\n" in output
    assert "Neg -> a: lost to the region of Tanh -> t (large): Tanh -> t belongs to a match of large" in output
