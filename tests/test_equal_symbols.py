"""Symbols of the inputs' sizes that operators need to be equal are one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from emulator import EmulatorError, run_plan
from kernel_harness import arguments, make, random_inputs

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.graph.binding import bound
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise

DECODER = """g (float16[B,2,1,16] q, float16[B,2,P,16] pk, float16[B,2,R,16] pv,
      float16[B,2,1,16] nk, float16[B,2,1,16] nv)
    => (float16[B,2,1,16] y, float16[B,2,T,16] k, float16[B,2,U,16] v) {
  k = Concat <axis = 2> (pk, nk)
  v = Concat <axis = 2> (pv, nv)
  t = Transpose <perm = [0,1,3,2]> (k)
  s = MatMul(q, t)
  p = Softmax(s)
  y = MatMul(p, v)
}"""


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')


@pytest.mark.parametrize(("body", "same"), [
    ("y = MatMul(a, b)", {"M": "K"}),
    ("y = Gemm(a, b)", {"M": "K"}),
    ("c = Concat <axis = 1> (a, a) d = Concat <axis = 0> (b, b) y = MatMul(c, d)", {"M": "K"}),
    ("y = Add(a, b)", {}),  # either may be one
    ("y = Einsum <equation = \"ij,jk->ik\"> (a, b)", {}),
    ("y = Concat <axis = 0> (a, a) z = MatMul(a, b)", {}),  # nobody reads it
], ids=["product", "gemm", "both twice", "broadcast", "letters", "unread"])
def test_what_operators_need(body: str, same: dict[str, str]) -> None:
    graph = load_graph(parse(f"g (float[N,K] a, float[M,J] b) => (float[P,Q] y) {{ {body} }}"))
    assert graph.same == same
    assert [str(size) for size in graph.values["b"].shape or ()] == [same.get("M", "M"), "J"]


def test_names_lead_to_the_first_of_all() -> None:
    graph = load_graph(parse("g (float[A,B] x, float[C,D] y, float[E,F] z) => (float[A,F] r) "
                             "{ u = MatMul(y, z) r = MatMul(x, u) }"))
    assert graph.same == {"C": "B", "E": "D"}
    assert bound(graph, {"C": 5, "E": 7}).sizes["B"] == 5 and "E" not in bound(graph, {}).sizes


def test_two_sizes_for_one() -> None:
    graph = load_graph(parse("g (float[N,K] a, float[M,J] b) => (float[N,J] y) { y = MatMul(a, b) }"))
    assert bound(graph, {"K": 4, "M": 4}).sizes["K"] == 4
    with pytest.raises(ModelError) as caught:
        bound(graph, {"K": 4, "N": 1, "M": 5})
    assert caught.value.message == "The model needs 'K' and 'M' to be equal, not 4 and 5."
    assert caught.value.remedy == "Give both the same size, or one of them."


def test_a_decoders_attention_is_one_region() -> None:
    """Whose past keys and values are as long as one another, though they are called otherwise."""
    made = optimise(parse(DECODER), Options(dims={"P": 300}, target="A100", verify=False, database=False))
    assert [refusal.code for refusal in made.refusals if refusal.rule == "attention"] == ["unmeasured"]
    assert dict(made.ledger.sizes)["P"] == 300 and "R" not in made.ledger.sizes
    assert onnxfuse.optimize(parse(DECODER), dims={"P": 300, "R": 300}, target="H200", verify=False, database=False)


def test_a_kernel_refuses_sizes_that_differ() -> None:
    made = make("g (float16[S,16] q, float16[16,K] k, float16[L,16] v) => (float16[S,16] y) "
                "{ s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }")
    assert made.kernel.schedule == "attention"
    inputs = random_inputs(made, {"S": 3, "K": 40, "L": 40})
    assert run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))[0].shape == (3, 16)
    with pytest.raises(EmulatorError, match=r"axis 0 of input .* is not K as the model states"):
        run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs | {"v": np.zeros((39, 16), np.float16)}))
