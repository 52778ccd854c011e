"""Nodes that give their operand back change nothing: not what is fused, not what it is predicted to take, not a bit.

Every canonical activation and both norms, with such nodes of every kind on one read of their operand, on another, on
all of them, and one for all that something outside reads as well.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import numpy as np
import onnx
import onnx.parser
import pytest
from insertions import INSERTIONS, insert, reads_of
from plain_session import session

from onnxfuse.graph import build_graph, from_proto
from onnxfuse.operators import infer
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import unfuse
from onnxfuse.rules import RuleSet, canonicalise, load_rules

PATTERNS = {
    "silu": "s = Sigmoid(a) y = Mul(a, s)",
    "silu-exp": "n = Neg(a) e = Exp(n) f = Add(e, one) y = Div(a, f)",
    "softplus": "c = Greater(a, twenty) p = Softplus(a) y = Where(c, a, p)",
    "mish": "p = Softplus(a) t = Tanh(p) y = Mul(a, t)",
    "hard-swish": "b = Add(a, three) c = Clip(b, zero, six) m = Mul(a, c) y = Div(m, six)",
    "gelu-erf": "d = Div(a, root) e = Erf(d) f = Add(e, one) m = Mul(a, f) y = Mul(m, half)",
    "gelu-tanh": "p = Pow(a, three) q = Mul(p, k) r = Add(a, q) i = Mul(r, w) t = Tanh(i) f = Add(t, one) "
                 "m = Mul(a, f) y = Mul(m, half)",
    "gelu-sigmoid": "v = Mul(a, alpha) s = Sigmoid(v) y = Mul(a, s)",
    "layer-norm": "m = ReduceMean <axes = [-1]> (a) d = Sub(a, m) q = Mul(d, d) v = ReduceMean <axes = [-1]> (q) "
                  "h = Add(v, eps) z = Sqrt(h) u = Div(d, z) n = Mul(u, scale) y = Add(n, bias)",
    "rms-norm": "q = Mul(a, a) v = ReduceMean <axes = [-1]> (q) h = Add(v, eps) z = Sqrt(h) u = Div(a, z) "
                "y = Mul(u, scale)",
}
OPERANDS = {"layer-norm": ("a", "d"), "rms-norm": ("a",)}
CONSTANTS = {"one": 1, "twenty": 20, "three": 3, "zero": 0, "six": 6, "root": 2**0.5, "half": 0.5, "k": 0.044715,
             "w": 0.7978845608, "alpha": 1.702, "eps": 1e-5}


@pytest.fixture(autouse=True)
def _shipped_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped rules are read once, not for each of hundreds of models."""
    monkeypatch.setattr("onnxfuse.pipeline.load_rules", lambda places, disable: rules())


@cache
def rules() -> RuleSet:
    return load_rules([rules_folder()])


@cache
def target() -> Profile:
    return find_profile("H100")


@cache
def pattern_fused(name: str) -> Optimised:
    return fused(pattern(name))


def pattern(name: str) -> onnx.ModelProto:
    """The pattern behind one node, and read by another, so that it has company on both sides."""
    numbers = ", ".join(f"float {key} = {{{value}}}" for key, value in CONSTANTS.items() if key in words(name))
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x, float[64] scale, float[64] bias) => '
        f"(float[N, 64] o) <{numbers}> {{ a = Tanh(x) {PATTERNS[name]} o = Neg(y) }}"
    )


def words(name: str) -> list[str]:
    return PATTERNS[name].replace(",", " ").replace("(", " ").replace(")", " ").split()


def fused(model: onnx.ModelProto) -> Optimised:
    return optimise(model, Options(dims={"N": 8192}, target=target(), verify=False, least_gain=0.0, database=False))


def seconds(made: Optimised) -> float:
    """Predicted seconds of one run of the fused model."""
    return CostModel(made.ledger, made.profile).total(made.plan.fusions)


def same_answers(model: onnx.ModelProto, made: Optimised) -> None:
    """Bit for bit, with the runtime's optimisations off and nothing of onnxfuse; float32."""
    onnx.checker.check_model(made.model)
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal([5 if d.dim_param else d.dim_value for d in
                                              value.type.tensor_type.shape.dim]).astype(np.float32)
             for value in model.graph.input}
    before, after = session(model), session(made.model)
    assert before is not None and after is not None
    for wanted, found in zip(before.run(None, feeds), after.run(None, feeds), strict=True):
        assert wanted.tobytes() == found.tobytes()
    assert unfuse(made.model).SerializeToString(deterministic=True) == (
        made.loaded.proto.SerializeToString(deterministic=True))


def types(model: onnx.ModelProto) -> dict[str, int]:
    values = infer(build_graph(from_proto(model))).values
    return {name: value.dtype for name, value in values.items() if value.dtype is not None}


@pytest.mark.parametrize("kind", [*INSERTIONS, "power"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_found_past_what_gives_its_operand_back(name: str, kind: str) -> None:
    plain = pattern_fused(name)
    assert len(plain.plan.fusions) == 1
    made_of = {node.rule for node in plain.canonical.made}
    for operand in OPERANDS.get(name, ("a",)):
        reads = reads_of(pattern(name), operand)
        apart = [[edge] for edge in reads]
        ways = [*([group] for group in apart), apart, [reads]]
        for place, groups in enumerate(ways):
            model = pattern(name)
            insert(model, [(group, kind) for group in groups], types(model))
            view = canonicalise(infer(build_graph(from_proto(model))), rules().canonical)
            assert made_of <= {node.rule for node in view.made}, groups
            if place != sum(map(ord, kind)) % len(ways):
                continue  # the rest is the same from here on; each way has its kinds
            made = fused(model)
            (fusion,) = made.plan.fusions
            # A power is arithmetic all the same.
            assert seconds(made) == pytest.approx(seconds(plain), rel=0.05 if kind == "power" else 1e-9)
            assert [node.op_type for node in made.model.graph.node] == ["Region0"]
            assert fusion.hosts == () and len(fusion.tensors) == len(plain.plan.fusions[0].tensors)
            same_answers(model, made)


@pytest.mark.parametrize(("name", "kind"), [
    (name, kind) for place, name in enumerate(PATTERNS)
    for kind in (list(INSERTIONS)[place % len(INSERTIONS)], list(INSERTIONS)[(place + 4) % len(INSERTIONS)])
])
def test_others_may_read_what_is_given_back(name: str, kind: str) -> None:
    """One inserted node before a read of the pattern and a product, before two, and as an output of the model."""
    for reader in ("product", "output"):
        for count in (0, 1):
            models = []
            for inserted in (False, True):
                model = pattern(name)
                if reader == "product":
                    model.graph.node.append(onnx.helper.make_node("MatMul", ["a", "square"], ["product"], "product"))
                    square = np.ones((64, 64), np.float32)
                    model.graph.initializer.append(onnx.numpy_helper.from_array(square, "square"))
                    model.graph.output.append(onnx.helper.make_tensor_value_info("product", 1, ["N", 64]))
                elif not inserted:
                    model.graph.output.append(onnx.helper.make_tensor_value_info("a", 1, ["N", 64]))
                if inserted:
                    reads = reads_of(model, "a")
                    edges = [reads[-1], reads[min(count, len(reads) - 2)]] if reader == "product" else [reads[count]]
                    insert(model, [(sorted(set(edges)), kind)], types(model))
                    if reader == "output":
                        model.graph.output.append(onnx.helper.make_tensor_value_info("inserted0", 1, ["N", 64]))
                models.append(model)
            plain, made = (fused(model) for model in models)
            assert made.plan.fusions
            if reader == "product" or kind in ("identity", "dropout"):  # the runtime keeps what gives an output
                assert seconds(made) == pytest.approx(seconds(plain), rel=1e-9)
            same_answers(models[1], made)


def test_the_runtime_s_recogniser_cycle() -> None:
    """Swish as paddle2onnx writes it: x * sigmoid(1.0 * x), many times over."""
    layers = chain.from_iterable(
        (f"e{i} = Exp(x{i})", f"m{i} = Mul(e{i}, one)", f"s{i} = Sigmoid(m{i})", f"x{i + 1} = Mul(e{i}, s{i})")
        for i in range(3)
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x0) => (float[N, 64] x3) <float one = {1.0}> '
        f"{{ {' '.join(layers)} }}"
    )
    made = fused(model)
    assert len(made.plan.fusions) == 1 and len(made.model.graph.node) == 1
    assert [node.op for node in made.canonical.made] == ["Silu"] * 3
    same_answers(model, made)


# ---- Dead nodes. ----


DEAD = {
    "one": "d = Max(s, s)",
    "several": "d = Max(s, t)",
    "chain": "d = Max(s, s) e = Exp(d) f = Concat <axis = 0> (e, t)",
    "identity": "d = Identity(s)",
    "subgraph": "c = Shape(x) d = If (flag) <then_branch = one () => (float[M, 64] b) { b = Neg(s) }, "
                "else_branch = two () => (float[M, 64] b) { b = Exp(t) }>",
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_nodes_stop_nothing_and_stay(name: str) -> None:
    """What nobody reads reads inner values of a region; with the values computed again by their readers and not."""
    text = ('<ir_version: 10, opset_import: ["" : 17]> g (float[N, 64] x, bool flag) => (float[M, 64] y, float[M, 64] '
            f"z) {{ s = Neg(x) t = Exp(s) {DEAD[name]} y = Concat <axis = 0> (s, s) z = Concat <axis = 0> (x, t) }}")
    model = onnx.parser.parse_model(text)
    made = fused(model)
    assert made.plan.fusions
    dead = [node.output[0] for node in model.graph.node if node.output[0] in "cdef"]
    left = [node.output[0] for node in made.model.graph.node if node.domain == ""]
    assert [name for name in left if name in dead] == dead
    onnx.checker.check_model(made.model)
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32), "flag": np.asarray(True)}
    before, after = session(model), session(made.model)
    assert before is not None and after is not None
    for wanted, found in zip(before.run(None, feeds), after.run(None, feeds), strict=True):
        assert wanted.tobytes() == found.tobytes()
    assert unfuse(made.model).SerializeToString(deterministic=True) == (
        made.loaded.proto.SerializeToString(deterministic=True))


def test_dead_nodes_in_a_body_stop_nothing_and_stay() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[N, 64] x, bool flag) => (float[M, 64] y) '
        "{ y = If (flag) <then_branch = one () => (float[M, 64] b) { s = Neg(x) d = Max(s, s) b = Exp(s) }, "
        "else_branch = two () => (float[M, 64] b) { r = Exp(x) q = Identity(r) v = Sigmoid(q) b = Mul(r, v) }> }"
    )
    made = fused(model)
    one, two = (attribute.g for attribute in made.model.graph.node[0].attribute)
    assert [[node.op_type for node in body.node] for body in (one, two)] == [["Region0", "Max"], ["Region1"]] or (
        [[node.op_type for node in body.node] for body in (one, two)] == [["Region1", "Max"], ["Region0"]])
    assert unfuse(made.model).SerializeToString(deterministic=True) == (
        made.loaded.proto.SerializeToString(deterministic=True))
