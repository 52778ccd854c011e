"""Which regions the planner makes: named, grown, and refused."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.pipeline import Optimised, Options, optimise

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'


def fuse(text: str, **options: object) -> Optimised:
    return optimise(onnx.parser.parse_model(HEAD + text), Options(verify=False, target="H200", **options))  # type: ignore[arg-type]


def regions(optimised: Optimised) -> list[tuple[str, list[str]]]:
    return [(fusion.rule, [node.op for node in fusion.view]) for fusion in optimised.plan.fusions]


def codes(optimised: Optimised) -> set[str]:
    return {refusal.code for refusal in optimised.refusals}


def test_rows_of_different_lengths_do_not_meet() -> None:
    # Both reductions have symbolic rows, and each on its own would call them alike.
    made = fuse("""g (float[A, B] x, float[C, D] z) => (float[A, B] y, float[C, D] w) <int64[1] last = {-1}> {
        m = ReduceMean(x, last) y = Sub(x, m)
        n = ReduceMean(z, last) w = Sub(z, n)
    }""", dims={"A": 4096, "B": 1024, "C": 2048, "D": 512})
    assert [ops for _, ops in regions(made)] == [["ReduceMean", "Sub"], ["ReduceMean", "Sub"]]


def test_a_few_long_rows_are_left_to_the_runtime() -> None:
    made = fuse("""g (float16[B, S] x) => (float16[B, S] y) {
        a = Abs(x) m = ReduceMax<keepdims = 1>(a) y = Div(x, m)
    }""", dims={"B": 8, "S": 1000000})
    assert "few-rows" in codes(made)
    assert all("ReduceMax" not in ops for _, ops in regions(made))


def test_a_transpose_of_the_innermost_axis_stays_outside() -> None:
    made = fuse("""g (float[N, 64, 4096] x, float[64, 1] b) => (float[N, 4096, 64] y) {
        a = Add(x, b) r = Tanh(a) y = Transpose<perm = [0, 2, 1]>(r)
    }""", dims={"N": 32})
    assert regions(made) == [("grow-pointwise", ["Add", "Tanh"])]
    assert "transposing" in codes(made)


def test_a_value_that_is_an_output_is_written_too() -> None:
    made = fuse("""g (float[N, 4096] x) => (float[N, 4096] y, float[N, 4096] a) {
        a = Abs(x) b = Exp(a) y = Neg(b)
    }""", dims={"N": 4096})
    (fusion,) = made.plan.fusions
    assert [value.name for value in fusion.outputs] == ["a", "y"]


def test_fusing_does_not_make_a_cycle() -> None:
    # All but MatMul would be one region, but it lies between them.
    made = fuse("""g (float[N, 64] x, float[64, 64] w) => (float[N, 64] y) {
        a = Abs(x) b = Exp(a) m = MatMul(b, w) c = Sub(m, a) y = Tanh(c)
    }""", dims={"N": 100000})
    assert [ops for _, ops in regions(made)] == [["Abs", "Exp"], ["Sub", "Tanh"]]


def test_small_work_is_not_worth_a_kernel_of_its_own() -> None:
    made = fuse("g (float[8] x) => (float[8] y) { y = Exp(x) }")
    assert made.plan.fusions == ()


@pytest.mark.parametrize("gain, count", [(1.2, 1), (100.0, 0)])
def test_a_region_must_gain_enough(gain: float, count: int) -> None:
    text = "g (float[N, 4096] x) => (float[N, 4096] y) { a = Exp(x) y = Neg(a) }"
    made = fuse(text, dims={"N": 4096}, least_gain=gain)
    assert len(made.plan.fusions) == count


def test_disabling_a_rule_changes_the_name_not_the_region() -> None:
    text = """g (float16[B, S, 768] x, float16[B, S, 768] r, float16[768] w, float16[768] b)
      => (float16[B, S, 768] y, float16[B, S, 768] s) {
        s = Add(x, r) n = LayerNormalization(s, w, b) y = Relu(n)
    }"""
    dims = {"B": 32, "S": 384}
    (named,) = fuse(text, dims=dims).plan.fusions
    (grown,) = fuse(text, dims=dims, disable=[named.rule, "norm-activation"]).plan.fusions
    assert named.rule == "residual-layer-norm"
    assert grown.rule == "grow-row-reduction"
    assert [node.name for node in named.nodes] == [node.name for node in grown.nodes]


def test_equal_regions_share_their_text_whatever_the_model_calls_its_sizes() -> None:
    one = fuse("g (float[N, M] x) => (float[N, M] y) { a = Exp(x) y = Neg(a) }", dims={"N": 4096, "M": 4096})
    two = fuse("g (float[rows, columns] x) => (float[rows, columns] y) { a = Exp(x) y = Neg(a) }",
               dims={"rows": 4096, "columns": 4096})
    assert one.plan.fusions[0].kernel.source == two.plan.fusions[0].kernel.source
