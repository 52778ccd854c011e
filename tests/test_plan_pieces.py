"""Values of different sizes in one region: what is taken to pieces, and time steps of one tensor.

Kernels run in the emulator against their bodies in float64, tolerances those of ``verifying.tolerances``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.regions.horizontal import STAGE
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.verifying.nodes import NodeVerifier

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'


def fuse(text: str, dims: Mapping[str, int], **options: object) -> Optimised:
    given = {"dims": dims, "verify": False, "target": "H200", "database": False, **options}
    return optimise(onnx.parser.parse_model(HEAD + text), Options(**given))  # type: ignore[arg-type]


def regions(optimised: Optimised) -> list[list[str]]:
    return [[node.op for node in f.view] for f in optimised.plan.fusions]


def refusals(optimised: Optimised, code: str) -> list[Refusal]:
    return [refusal for refusal in optimised.refusals if refusal.code == code]


def verify(optimised: Optimised, *sizes: Mapping[str, int]) -> None:
    """The one fused node, which reads graph inputs and constants alone, at sizes of its run."""
    (node,), (fusion,) = read_fused(optimised.model), optimised.plan.fusions
    (function,) = (each for each in optimised.model.functions if each.domain == "onnxfuse")
    names = [name for name in function.input if not name.startswith("h")]
    for seed, one in enumerate(sizes):
        rng, feeds = np.random.default_rng(seed), {}
        for name, value in zip(names, fusion.tensors, strict=True):
            assert value.shape is not None
            shape = [size.evaluate(one) for size in value.shape]
            feeds[name] = rng.standard_normal(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype or 1))
        for place, value in enumerate(fusion.hosts):
            feeds[f"h{place}"] = np.array([size.evaluate(one) for size in value.elements or ()])
        result = NodeVerifier(optimised.model, EmulatedRunner()).verify(node, feeds, "given")
        assert result.verdict == "passed", result.message


NECK = """g (T[N,96,10,10] x, T[32,32,1,1] w) => (T[N,64,10,10] y, T[N,32,10,10] z) <int64[2] sizes = {64, 32}> {
    s = Sigmoid(x) p = Mul(x, s) a, b = Split<axis = 1>(p, sizes)
    r = Relu(a) y = Add(r, a) z = Conv(b, w)
}"""


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_unequal_halves_are_written_by_one_kernel(kind: str) -> None:
    """One half goes on in the kernel, a convolution reads the other."""
    made = fuse(NECK.replace("T[", f"{kind}["), {"N": 8})
    assert regions(made) == [["Silu", "Split", "Relu", "Add"]]
    assert not refusals(made, "iteration-shape")
    (fusion,) = made.plan.fusions
    assert fusion.cost.kernels_after == 1 and len(fusion.outputs) == 2
    verify(made, {"N": 1}, {"N": 0}, {"N": 3})
    assert unfuse(made.model).SerializeToString(deterministic=True) == (
        made.loaded.proto.SerializeToString(deterministic=True))


@pytest.mark.parametrize(("text", "inside"), [
    # Slices in place of a Split: neither alone is all that reads the whole.
    ("""g (float[N,96] x, float[64,8] w, float[32,8] v) => (float[N,8] y, float[N,8] z)
     <int64[1] o = {0}, int64[1] m = {64}, int64[1] e = {96}, int64[1] d = {1}> {
        t = Tanh(x) p = Exp(t) a = Slice(p, o, m, d) b = Slice(p, m, e, d) y = MatMul(a, w) z = MatMul(b, v)
     }""", ["Tanh", "Exp", "Slice", "Slice"]),
    # The whole is an output too, and a piece goes on.
    ("""g (float[N,96] x) => (float[N,96] p, float[N,32] y) <int64[2] n = {64, 32}> {
        t = Tanh(x) p = Exp(t) a, b = Split<axis = 1>(p, n) y = Neg(b)
     }""", ["Tanh", "Exp", "Split", "Neg"]),
    # Axes that only symbols tell apart.
    ("""g (float[N,A,5] x, float[N,C,5] u) => (float[N,A,5] y, float[N,C,5] z) {
        c = Concat<axis = 1>(x, u) t = Tanh(c) n = Shape<start = 1, end = 2>(x) m = Shape<start = 1, end = 2>(u)
        k = Concat<axis = 0>(n, m) y, b = Split<axis = 1>(t, k) z = Neg(b)
     }""", ["Concat", "Tanh", "Split", "Neg"]),
])
def test_pieces_of_a_whole_are_one_region(text: str, inside: list[str]) -> None:
    made = fuse(text, {"N": 64} | ({"A": 7, "C": 9} if "[N,A" in text else {}))
    assert inside in regions(made)
    if len(made.plan.fusions) == 1:
        verify(made, {"N": 0, "A": 3, "C": 2}, {"N": 3, "A": 0, "C": 5}, {"N": 5, "A": 4, "C": 3})


def test_a_split_alone_stays_the_runtimes() -> None:
    assert regions(fuse("""g (float[N,96] x) => (float[N,64] y, float[N,32] z) <int64[2] n = {64, 32}> {
        y, z = Split<axis = 1>(x, n) }""", {"N": 64})) == []


def test_what_is_read_again_takes_time() -> None:
    """A piece beside the whole reads its part of the input once more; the count of bytes has each tensor once."""
    made = fuse("""g (float[N,96] x) => (float[N,96] p, float[N,32] y) <int64[2] n = {64, 32}> {
        t = Tanh(x) p = Exp(t) a, b = Split<axis = 1>(p, n) y = Neg(b) }""", {"N": 1 << 20})
    (fusion,) = made.plan.fusions
    costs = CostModel(made.ledger, made.profile)
    again = fusion.read_again.evaluate({"N": 1 << 20})
    assert again == (1 << 20) * 32 * 4 and fusion.cost.bytes_after == (1 << 20) * (96 + 96 + 32) * 4
    seconds = costs.kernel_seconds(fusion) - made.profile.floor_us * 1e-6
    assert seconds == pytest.approx((fusion.cost.bytes_after + again) / made.profile.bandwidth / 0.9, rel=1e-6)


def test_few_elements_are_not_computed_for_each_of_many() -> None:
    """Written out for a product and spread over a large tensor: a loop over the large one would compute it anew for
    each element."""
    made = fuse(
        """g (float[1,64] x, float[N,64] u, float[64,8] w) => (float[N,64] y, float[1,8] z) {
        a = Tanh(x) b = Exp(a) z = MatMul(b, w) c = Mul(u, b) y = Neg(c) }""",
        {"N": 4096}, disable=[STAGE, "recompute"])
    assert regions(made) == [["Tanh", "Exp"], ["Mul", "Neg"]]
    (refusal,) = refusals(made, "iteration-shape")
    assert refusal.message == (
        "Exp -> b computes 64 elements, for 'b' and for 'y', which has 64*N: together they would be computed for each "
        "of these")
    assert refusal.remedy == "compute 'b' apart from 'y'"


def test_pieces_of_normalised_rows_say_why_not() -> None:
    made = fuse("""g (float[N,96] x, float[96] w) => (float[N,64] y, float[N,32] z) <int64[2] n = {64, 32}> {
        l = LayerNormalization(x, w) y, z = Split<axis = 1>(l, n) }""", {"N": 64})
    (refusal,) = refusals(made, "iteration-shape")
    assert refusal.message == "'y' has 64*N elements, and the rows have N x 96"
    assert refusal.remedy


SLICE = "p{t} = Slice(s, b{t}, e{t}, zero) q{t} = Squeeze(p{t}, zero)"
GATHER = "q{t} = Gather(s, i{t})"
CELLS = {
    "sum": "y{t} = ReduceSum<keepdims = 1>(q{t}, last)", "max": "y{t} = ReduceMax<keepdims = 1>(q{t}, last)",
    "softmax": "y{t} = Softmax(q{t})", "norm": "y{t} = LayerNormalization(q{t}, w)",
    "cell": "u{t} = Mul(q{t}, w) y{t} = Tanh(u{t})",
}


def steps(count: int, cut: str, cell: str, before: str = "s = Identity(x)") -> str:
    """A tensor of so many time steps, each read by a cell of its own."""
    width = "1" if cell in ("sum", "max") else "64"
    every = range(count)
    outputs = ", ".join(f"float[N, {width}] y{t}" for t in every)
    constants = ["int64[1] zero = {0}", "int64[1] last = {-1}"]
    constants += [f"int64[1] b{t} = {{{t}}}, int64[1] e{t} = {{{t + 1}}}, int64 i{t} = {{{t}}}" for t in every]
    first = before
    if cut == "split":
        names = ", ".join(f"p{t}" for t in every)
        first += f" {names} = Split<axis = 0, num_outputs = {count}>(s)"
    cutting = {"slice": SLICE, "gather": GATHER, "split": "q{t} = Squeeze(p{t}, zero)"}[cut]
    body = " ".join(f"{cutting} {CELLS[cell]}".format(t=t) for t in every)
    return f"g (float[{count}, N, 64] x, float[64] w) => ({outputs}) <{', '.join(constants)}> {{ {first} {body} }}"


@pytest.mark.parametrize(("cut", "cell"), [
    *(("slice", cell) for cell in CELLS), ("gather", "sum"), ("gather", "cell"), ("split", "softmax"),
    ("split", "cell"),
])
def test_a_few_time_steps_are_one_kernel(cut: str, cell: str) -> None:
    """What makes the tensor is part of it."""
    made = fuse(steps(5, cut, cell, "s = Neg(x)"), {"N": 8})
    assert len(made.plan.fusions) == 1 and len(made.plan.fusions[0].outputs) == 5
    if (cut, cell) in (("slice", "max"), ("gather", "cell")):
        verify(made, {"N": 3})


@pytest.mark.parametrize(("count", "cut", "cell"), [(20, "slice", "max"), (187, "split", "softmax")])
def test_many_time_steps_share_launches(count: int, cut: str, cell: str) -> None:
    """Sixteen in each; 32 operators, the target's limit, are another bound."""
    made = fuse(steps(count, cut, cell, "s = Exp(x)"), {"N": 8})
    written = [len(fusion.outputs) for fusion in made.plan.fusions]
    assert max(written) == 16 and len(written) <= -(-count // 16) + 1 and sum(written) in (count, count + 1)
    assert all(fusion.cost.kernels_after == 1 for fusion in made.plan.fusions)


def test_a_split_into_more_than_a_rule_admits_says_so() -> None:
    (refusal,) = refusals(fuse(steps(20, "split", "cell", "s = Exp(x)"), {"N": 8}), "region-size")[:1]
    assert refusal.message == (
        "no grow rule admits a region of these 2 nodes: grow-pointwise takes 8 outputs, not 20")


def test_a_limit_is_told_of_rules_that_list_the_operators() -> None:
    """What only grows over pointwise operators has no part in it."""
    (refusal, *_) = refusals(fuse(steps(20, "split", "cell", "s = Softmax<axis = -1>(x)"), {"N": 8}), "region-size")
    assert refusal.message == (
        "no grow rule admits a region of these 2 nodes: grow-row-reduction takes 8 outputs, not 20")


def test_sixteen_parts_of_a_launch_are_right() -> None:
    inputs, outputs = (", ".join(f"float[N, 40] {name}{t}" for t in range(16)) for name in "xy")
    body = " ".join(f"s{t} = Exp(x{t}) y{t} = Neg(s{t})" for t in range(16))
    made = fuse(f"g ({inputs}) => ({outputs}) {{ {body} }}", {"N": 8})
    (fusion,) = made.plan.fusions
    assert fusion.kernel.schedule == "together" and fusion.kernel.plan.variants[0].steps[0].grid[1] == "16"
    assert fusion.kernel.source.count("namespace part") == 1
    verify(made, {"N": 3}, {"N": 0})
