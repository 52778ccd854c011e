"""Products with norms behind them: which regions are offered, and when one is taken."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import pytest
from kernel_harness import parse

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise

RESIDUAL = "p = MatMul(a, b) q = Add(p, c) z = Add(q, r) "
HEAD = "g (float16[M,256] a, float16[256,128] b, float16[128] c, float16[M,128] r, float16[128] s, float16[128] t{more}) => ({results}) {constants}{{ {nodes} }}"

SPELLED = ("x = Constant<value = int64[1] {-1}>() m = ReduceMean(z, x) d = Sub(z, m) k = Mul(d, d) v = ReduceMean(k, x) "
           "w = Add(v, eps) o = Sqrt(w) n = Div(d, o) u = Mul(n, s) y = Add(u, t)")

OFFERED: dict[str, tuple[str, str, str, list[str]]] = {
    "a norm": (RESIDUAL + "y = LayerNormalization(z, s, t)", "float16[M,128] y", "", ["LayerNormalization"]),
    "a norm, and the sum that the next layer adds to": (
        RESIDUAL + "y = LayerNormalization(z, s, t) n = MatMul(y, w) f = Add(n, z)", "float16[M,128] f", ", float16[128,128] w",
        ["LayerNormalization"]),
    "a norm that is spelled out": (RESIDUAL + SPELLED, "float16[M,128] y", "", ["LayerNormalization"]),
    "a norm whose statistics are read by others": (
        RESIDUAL + SPELLED + " e = Neg(w)", "float16[M,128] y, float16[M,1] e", "", ["ReduceMean", "Sub", "Mul"]),
    "what follows a norm": (
        RESIDUAL + "n = LayerNormalization(z, s, t) y = Tanh(n)", "float16[M,128] y", "", ["LayerNormalization", "Tanh"]),
    "rows of heads": (
        RESIDUAL + "h = Constant<value = int64[3] {-1,4,32}>() f = Reshape(z, h) y = Softmax(f)", "float16[M,4,32] y", "", []),
}


def fuse(nodes: str, results: str, more: str) -> Optimised:
    constants = "<float16 eps = {1}> " if "eps" in nodes else ""
    model = parse(HEAD.format(nodes=nodes, results=results, more=more, constants=constants))
    return optimise(model, Options(target="H200", verify=False, database=False, eager=True, dims={"M": 512}))


def behind(made: Optimised) -> list[list[str]]:
    """Operators behind the sum of each region with a product whose results' rows are reduced."""
    regions = [region for region in made.plan.with_products if region.made is not None
               and region.kernel.schedule == "product_rows"]
    return [[node.op for node in region.view if node.op not in ("MatMul", "Add", "Constant")] for region in regions]


@pytest.mark.parametrize("name", OFFERED)
def test_what_comes_in(name: str) -> None:
    nodes, results, more, operators = OFFERED[name]
    found = behind(fuse(nodes, results, more))
    assert found[:1] == ([operators] if operators else [])


def test_what_comes_back_by_another_way_stays_outside() -> None:
    """The norm of a sum with what another product makes of the first: a path leads out and back."""
    made = fuse("p = MatMul(a, b) q = MatMul(p, w) z = Add(p, q) y = LayerNormalization(z, s, t)", "float16[M,128] y",
                ", float16[128,128] w")
    for region in made.plan.with_products:
        if region.made is not None and region.kernel.schedule == "product_rows":
            assert sum(node.op == "MatMul" for node in region.view) == 1 and region.view[0].inputs[0].name == "p"


def test_it_is_taken_where_it_is_predicted_to_be_quicker() -> None:
    """Of few tiles; of many two kernels are."""
    text = "g (float16[M,768] a, float16[768,768] b, float16[768] c, float16[M,768] r, float16[768] s, float16[768] t) => (float16[M,768] y) { " + (
        RESIDUAL + "y = LayerNormalization(z, s, t) }")
    for rows, taken in ((1024, True), (12_288, False)):
        made = optimise(parse(text), Options(target="H200", verify=False, database=False, dims={"M": rows}))
        assert any(region.kernel.schedule == "product_rows" for region in made.plan.fusions) is taken
