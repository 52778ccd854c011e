"""The attention schedule: spellings, masks, head sizes and lengths, in every variant, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, make, random_inputs, refused

from onnxfuse.ir.tensors import Contract, postorder
from onnxfuse.schedules import parse_choice
from onnxfuse.schedules.attentions.parts import AttentionParts, parts_of

PLAIN = ("g (T[B,H,S,64] q, T[B,H,K,64] k, T[B,H,K,64] v) => (T[B,H,S,64] y) <T f = {2}> "
         "{ t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) c = Div(s, f) p = Softmax(c) y = MatMul(p, v) }")

SPELLINGS = {
    "heads of a joint projection":
        "g (T[B,S,96] x, T[B,1,1,S] mask) => (T[B,S,32] y) <int64[4] a = {0,0,2,16}, int64[3] o = {0,0,32}> "
        "{ q, k, v = Split<axis = 2, num_outputs = 3>(x) qr = Reshape(q, a) kr = Reshape(k, a) vr = Reshape(v, a) "
        "qt = Transpose<perm = [0,2,1,3]>(qr) kt = Transpose<perm = [0,2,3,1]>(kr) vt = Transpose<perm = [0,2,1,3]>(vr) "
        "s = MatMul(qt, kt) c = Add(s, mask) p = Softmax(c) z = MatMul(p, vt) zt = Transpose<perm = [0,2,1,3]>(z) y = Reshape(zt, o) }",
    "groups of heads that share keys":
        "g (T[B,4,S,32] q, T[B,2,K,32] k, T[B,2,K,32] v) => (T[B,4,S,32] y) "
        "<int64[5] e = {1,2,2,1,1}, int64[3] o = {0,4,32}, int64[1] two = {2}, int64[4] h = {0,4,-1,32}> "
        "{ k1 = Unsqueeze(k, two) k2 = Expand(k1, e) k3 = Reshape(k2, h) v1 = Unsqueeze(v, two) v2 = Expand(v1, e) v3 = Reshape(v2, h) "
        "t = Transpose<perm = [0,1,3,2]>(k3) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v3) }",
    "one head of keys for all": "g (T[B,4,S,16] q, T[B,1,16,K] k, T[B,1,K,24] v) => (T[B,4,S,24] y) { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }",
    "scores that are scaled before": "g (T[N,S,40] q, T[N,K,40] k, T[N,K,40] v) => (T[N,S,40] y) <T f = {2}> "
                                     "{ a = Div(q, f) c = Div(k, f) t = Transpose<perm = [0,2,1]>(c) s = MatMul(a, t) p = Softmax(s) w = Mul(v, f) y = MatMul(p, w) }",
    "a softmax in float32": "g (T[N,S,16] q, T[N,16,K] k, T[N,K,16] v, float[S,K] bias) => (T[N,S,16] y) <float part = {0.0625}>"
                            "{ s = MatMul(q, k) f = Cast<to = 1>(s) e = Mul(f, part) b = Add(e, bias) p = Softmax(b) c = CastLike(p, v) y = MatMul(c, v) }",
    "segments of queries and keys": "g (T[N,S,16] q, T[N,16,K] k, T[N,K,16] v, int64[S,1] a, int64[1,K] b, T[S,1] w) => (T[N,S,16] y) <T far = {-9}> "
                                    "{ s = MatMul(q, k) d = Add(s, w) m = Equal(a, b) o = Where(m, w, far) c = Add(d, o) p = Softmax(c) y = MatMul(p, v) }",
    "a boolean mask": "g (T[N,S,16] q, T[N,16,K] k, T[N,K,16] v, bool[N,1,K] m) => (T[N,S,16] y) <T none = {-60000}> "
                      "{ s = MatMul(q, k) c = Where(m, s, none) p = Softmax(c) y = MatMul(p, v) }",
    "a soft cap and a bias of the heads": "g (T[B,2,S,16] q, T[B,2,16,K] k, T[B,2,K,16] v, T[1,2,S,K] r) => (T[B,2,S,16] y) <T cap = {30}> "
                                          "{ s = MatMul(q, k) d = Div(s, cap) t = Tanh(d) u = Mul(t, cap) c = Add(u, r) p = Softmax(c) y = MatMul(p, v) }",
    "what follows": "g (T[B,2,S,16] q, T[B,2,16,K] k, T[B,2,K,16] v, T[B,S,2,16] z) => (T[B,S,2,16] y) "
                    "{ s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) t = Transpose<perm = [0,2,1,3]>(o) g = Sigmoid(z) y = Mul(t, g) }",
    "matrices without a batch": "g (T[S,80] q, T[K,80] k, T[K,16] v) => (T[S,16] y) { t = Transpose(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }",
    "keys by queries": "g (T[N,S,16] q, T[N,K,16] k, T[N,K,16] v) => (T[N,S,16] y) "
                       "{ t = Transpose<perm = [0,2,1]>(q) s = MatMul(k, t) u = Transpose<perm = [0,2,1]>(s) p = Softmax(u) y = MatMul(p, v) }",
    "an Einstein sum": "g (T[B,S,2,16] q, T[B,K,2,16] k, T[B,K,2,16] v) => (T[B,S,2,16] y) "
                       "{ s = Einsum<equation = \"bqhd,bkhd->bhqk\">(q, k) p = Softmax(s) y = Einsum<equation = \"bhqk,bkhd->bqhd\">(p, v) }",
}

SHARED = {
    "groups of heads that share keys": "2*B, 2*S",
    "heads of a joint projection": "2*B, S",
    "one head of keys for all": "B, 4*S",
    "groups of groups": "B*G, 3*S",
    "a flat batch": "2*B, 4*S",
    "other groups": "4*B, S",
    "values of larger groups": "4*B, 2*S",
}
"""Batches, and rows of queries, of some."""

SPELLINGS |= {
    "groups of groups": "g (T[B,G,3,S,32] q, T[B,G,1,K,32] k, T[B,G,1,32,K] v) => (T[B,G,3,S,32] y) "
                        "{ t = Transpose<perm = [0,1,2,4,3]>(k) s = MatMul(q, t) p = Softmax(s) u = Transpose<perm = [0,1,2,4,3]>(v) y = MatMul(p, u) }",
    "a flat batch": "g (T[B,8,S,16] q, T[B,2,K,16] k, T[B,2,K,16] v) => (T[B,8,S,16] y) "
                    "<int64[5] e = {1,2,4,1,1}, int64[1] two = {2}> "
                    "{ k1 = Unsqueeze(k, two) k2 = Expand(k1, e) v1 = Unsqueeze(v, two) v2 = Expand(v1, e) "
                    "qs = Shape<start = 2>(q) ks = Shape<start = 2>(k) all = Constant<value_ints = [-1]>() qh = Concat<axis = 0>(all, qs) kh = Concat<axis = 0>(all, ks) "
                    "k3 = Reshape(k2, kh) v3 = Reshape(v2, kh) q1 = Reshape(q, qh) t = Transpose<perm = [0,2,1]>(k3) s = MatMul(q1, t) p = Softmax(s) "
                    "z = MatMul(p, v3) o = Shape(q) y = Reshape(z, o) }",
    "values of larger groups":
        "g (T[B,8,S,16] q, T[B,4,16,K] k, T[B,2,K,16] v) => (T[B,8,S,16] y) <int64[5] e = {1,1,2,1,1}, int64[5] f = {1,1,4,1,1}, "
        "int64[1] two = {2}, int64[4] h = {0,8,16,-1}, int64[4] w = {0,8,-1,16}> { k1 = Unsqueeze(k, two) k2 = Expand(k1, e) k3 = Reshape(k2, h) "
        "v1 = Unsqueeze(v, two) v2 = Expand(v1, f) v3 = Reshape(v2, w) s = MatMul(q, k3) p = Softmax(s) y = MatMul(p, v3) }",
    "other groups": "g (T[B,4,S,16] q, T[B,2,K,16] k, T[B,2,K,16] v) => (T[B,4,S,16] y) <int64[4] e = {1,2,1,1}> "
                    "{ k1 = Tile(k, e) v1 = Tile(v, e) t = Transpose<perm = [0,1,3,2]>(k1) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v1) }",
}

MASKED = {"no number": "y = MatMul(p, v)", "zeros": "i = IsNaN(p) g = Where(i, zero, p) y = MatMul(g, v)"}

SIZES = ({"B": 2, "H": 1, "N": 2, "G": 1, "S": 1, "K": 1}, {"B": 1, "H": 2, "N": 1, "G": 2, "S": 70, "K": 33}, {"B": 1, "H": 1, "N": 1, "G": 1, "S": 17, "K": 130})


def attention(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    made = make(text.replace("T[", f"{kind}[").replace("T ", f"{kind} "), planned=planned)
    assert made.kernel.schedule == "attention"
    return made


@pytest.mark.parametrize("case", SHARED)
def test_keys_in_common_are_read_once(case: str) -> None:
    lowered = attention(SPELLINGS[case]).lowered
    products = [each for each in postorder(lowered.program.outputs) if isinstance(each, Contract)]
    parts = parts_of(lowered, products[0], products[1])
    assert isinstance(parts, AttentionParts)
    batch, rows = (size.substitute(lowered.binding.names) for size in (parts.batch, parts.rows))
    assert f"{batch}, {rows}" == SHARED[case]


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case: str) -> None:
    made = attention(SPELLINGS[case])
    for seed, sizes in enumerate(SIZES):
        check(made, random_inputs(made, sizes, seed), length=130, limit=3)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(("depth", "columns"), [(1, 8), (16, 16), (40, 24), (64, 64), (128, 120), (256, 256)])
def test_head_sizes(depth: int, columns: int, kind: str) -> None:
    """Those that no vector and no tile divides, and the largest."""
    text = PLAIN.replace("S,64] y", f"S,{columns}] y").replace("K,64] v", f"K,{columns}] v").replace("64", str(depth))
    made = attention(text, kind)
    for seed, (rows, keys) in enumerate(((1, 49), (49, 17))):
        check(made, random_inputs(made, {"B": 1, "H": 1, "S": rows, "K": keys}, seed), length=64)


@pytest.mark.parametrize("order", ["backward", 3])
def test_threads_in_any_order(order: str | int) -> None:
    """Nobody reads a tile that is not there, or writes one that another still reads."""
    made = attention(PLAIN, planned={"B": 8, "H": 12, "S": 65, "K": 150})
    check(made, random_inputs(made, {"B": 1, "H": 2, "S": 65, "K": 150}), length=150, orders=[order], limit=2)


def together(made: Made, inputs: Mapping[str, np.ndarray], sm: int = 90) -> bool:
    """Whether the first variant for these inputs is one whose warps multiply together."""
    return "4 multiply together" in variants_that_hold(made.kernel.plan, arguments(made, inputs), [], sm)[0]


def test_four_warps_multiply_together_where_the_gpu_can() -> None:
    """And where a quarter of their rows are there."""
    made = attention(PLAIN, planned={"B": 8, "H": 12, "S": 512, "K": 512})
    many, few = (random_inputs(made, {"B": 1, "H": 1, "S": rows, "K": 8}) for rows in (33, 32))
    assert together(made, many) and not together(made, few)
    assert not any(together(made, many, sm) for sm in (75, 80, 89, 100, 120))
    assert "4 multiply" not in str(attention(PLAIN, planned={"S": 32}).kernel.plan.variants)


@pytest.mark.parametrize(("depth", "columns"), [(16, 256), (72, 72), (144, 16), (200, 136)])
def test_heads_of_several_panels(depth: int, columns: int) -> None:
    """Of shared memory, whole ones and parts of one, in both products; several tiles of keys."""
    text = PLAIN.replace("S,64] y", f"S,{columns}] y").replace("K,64] v", f"K,{columns}] v").replace("64", str(depth))
    made = attention(text, planned={"B": 1, "H": 1, "S": 100, "K": 140})
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 140})
    assert together(made, inputs)
    check(made, inputs, length=140, limit=1)


@pytest.mark.parametrize(("planned", "rows"), [
    ({"B": 64, "H": 12, "S": 512, "K": 512}, 128), ({"B": 8, "H": 12, "S": 512, "K": 512}, 128),
    ({"B": 1, "H": 1, "S": 500, "K": 8}, 64), ({"B": 1, "H": 1, "S": 20, "K": 8}, 32), ({"B": 1, "H": 1, "S": 8, "K": 8}, 16),
])
def test_tiles_follow_the_sizes(planned: Mapping[str, int], rows: int) -> None:
    made = attention(PLAIN, planned=planned)
    own = next(variant for variant in made.kernel.plan.variants if len(variant.steps) == 1 and "4 multiply" not in variant.name)
    (grid, _, _) = own.launches[0].grid
    assert f" {rows} ceil" in grid
    check(made, random_inputs(made, {"B": 1, "H": 1, "S": 130, "K": 70}), length=70, limit=1)


def splits(made: Made, inputs: Mapping[str, np.ndarray]) -> bool:
    """Whether these inputs take the variant that splits keys."""
    first = variants_that_hold(made.kernel.plan, arguments(made, inputs), [])[0]
    return "keys split" in first


@pytest.mark.parametrize(("rows", "keys", "kind"), [
    (1, 256, "float16"), (17, 300, "bfloat16"), (1, 1057, "bfloat16"), (70, 500, "float16")])
def test_few_queries_of_many_keys(rows: int, keys: int, kind: str) -> None:
    """Blocks share the keys of a row."""
    made = attention(PLAIN, kind, planned={"B": 1, "H": 2, "S": rows, "K": keys})
    inputs = random_inputs(made, {"B": 1, "H": 2, "S": rows, "K": keys})
    assert splits(made, inputs)
    check(made, inputs, length=keys, limit=1, orders=["forward", "backward"])


@pytest.mark.parametrize("case", MASKED)
def test_chunks_that_are_masked(case: str) -> None:
    """Rows without a number in some chunks, or in all."""
    made = attention("g (T[2,S,16] q, T[2,16,K] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) <T zero = {0}> "
                     f"{{ s = MatMul(q, k) c = Add(s, m) p = Softmax(c) {MASKED[case]} }}", planned={"S": 6, "K": 600})
    inputs = random_inputs(made, {"S": 6, "K": 600})
    inputs["m"][:] = 0
    inputs["m"][1], inputs["m"][2, :590], inputs["m"][3, 10:] = -np.inf, -np.inf, -np.inf
    inputs["q"][0, 4, 0], inputs["q"][0, 5, 0] = np.nan, np.inf
    assert splits(made, inputs)
    check(made, inputs, length=600)


def test_scores_need_no_wide_indices() -> None:
    """They are nowhere: of 2 x 8 x 16,384 x 16,384 none is counted through."""
    made = attention(PLAIN.replace("B,H,S,64", "2,8,16384,64").replace("B,H,K,64", "2,8,16384,64"))
    assert made.kernel.plan.variants[0].name.endswith("32-bit") and "width 8" in made.kernel.plan.variants[0].name


def test_many_queries_or_few_keys_are_not_split() -> None:
    made = attention(PLAIN)
    assert not splits(made, random_inputs(made, {"B": 1, "H": 1, "S": 2, "K": 255}))
    assert splits(made, random_inputs(made, {"B": 5, "H": 10, "S": 1, "K": 256}))
    assert not splits(made, random_inputs(made, {"B": 8, "H": 16, "S": 1, "K": 256}))
    large = attention(PLAIN, planned={"B": 8, "H": 16, "S": 128, "K": 512})
    assert all(len(variant.steps) == 1 for variant in large.kernel.plan.variants)


@pytest.mark.parametrize("sizes", [{"S": 0, "K": 5}, {"S": 5, "K": 0}, {"B": 0, "S": 5, "K": 5}, {"B": 0, "S": 5, "K": 500}])
def test_nothing(sizes: Mapping[str, int]) -> None:
    """Of no keys the sum is zero."""
    made = attention(PLAIN)
    check(made, random_inputs(made, {"B": 1, "H": 1} | dict(sizes)))


@pytest.mark.parametrize("case", MASKED)
def test_rows_that_are_masked_everywhere(case: str) -> None:
    """What the nodes give: no number, or zeros behind a guard, also where a tile is masked and others are not."""
    made = attention("g (T[2,S,16] q, T[2,16,K] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) <T zero = {0}> "
                     f"{{ s = MatMul(q, k) c = Add(s, m) p = Softmax(c) {MASKED[case]} }}")
    inputs = random_inputs(made, {"S": 40, "K": 150})
    inputs["m"][:] = 0
    inputs["m"][3], inputs["m"][4, :140], inputs["m"][5, 10:] = -np.inf, -np.inf, -np.inf
    check(made, inputs, length=150)
    (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    assert np.isnan(got[:, 3]).all() if case == "no number" else not got[:, 3].any()
    inputs["v"][0, 7, 2] = np.inf  # times zero
    (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    assert np.isnan(got[0, 3, 2])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_lowest_number_as_a_mask(kind: str) -> None:
    """A row that is masked so everywhere is uniform, as far as scores do not lift it; large scores are far apart."""
    made = attention("g (T[2,S,16] q, T[2,16,K] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) "
                     "{ s = MatMul(q, k) c = Add(s, m) p = Softmax(c) y = MatMul(p, v) }", kind)
    inputs = random_inputs(made, {"S": 33, "K": 70})
    inputs["m"][:] = 0
    lowest = ml_dtypes.finfo(inputs["m"].dtype).min
    inputs["m"][1], inputs["m"][2, 3:], inputs["m"][3] = lowest, lowest, -np.inf
    inputs["q"][:, 1] = 0
    inputs["q"][1, 4] *= 3000
    check(made, inputs, length=70)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 60000.0])
def test_numbers_at_the_edge(number: float) -> None:
    made = attention(PLAIN)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 33, "K": 70})
    inputs["q"][0, 0, 1, 3] = number
    check(made, inputs, length=70)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 5, "K": 70})
    inputs["v"][0, 0, 66, 2] = number
    check(made, inputs, length=70, slack=2)


def test_what_tuning_may_try() -> None:
    made = attention(PLAIN)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 140})
    assert made.kernel.choices
    for choice in made.kernel.choices:
        other = attention_of(made, choice)
        assert parse_choice(str(choice)) == choice and other.kernel.choice == choice
        check(other, inputs, length=140, limit=1, misalign=False)


def attention_of(made: Made, choice: object) -> Made:
    from onnxfuse.schedules import Choice, Kernel, Request, make_kernel

    assert isinstance(choice, Choice)
    kernel = make_kernel(Request(made.lowered, "test", {}, choice))
    assert isinstance(kernel, Kernel)
    return Made(made.model, made.graph, made.lowered, kernel)


ACROSS = "g (T[B,2,S,40] q, T[B,2,40,K] k, T[B,2,K,24] v, T[S,K] m) => (T[B,2,S,24] y) { s = MatMul(q, k) c = Add(s, m) p = Softmax(c) y = MatMul(p, v) }"


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_keys_that_lie_side_by_side(kind: str) -> None:
    """Are copied as they lie, where their number divides; by four warps together, by each, and where they are split."""
    for planned, count in (({"B": 1, "S": 70, "K": 136}, 3), ({"B": 1, "S": 3, "K": 600}, 2)):
        made = attention(ACROSS, kind, planned)
        functions = [each.body for each in made.kernel.code.functions if not each.name.endswith(("join", "masked"))]
        assert all("const T* const origin = i1 + " in body for body in functions) and len(functions) == 2
        inputs = random_inputs(made, planned)
        check(made, inputs, length=planned["K"], limit=count)
        check(made, random_inputs(made, {"B": 2, "S": 5, "K": 49}), length=49, limit=1)
    assert "origin = i1" not in attention(ACROSS, planned={"K": 49}).kernel.code.functions[0].body


REFUSED = [
    (PLAIN.replace("T[", "double[").replace("T ", "double "), "products of float64; its kernels have those of float16, bfloat16 or float32"),
    (PLAIN.replace("64", "136").replace("T[", "float[").replace("T ", "float "), "a head size of 136; its kernels of float32 have those up to 128"),
    (PLAIN.replace("64", "D"), "the head size, D and D, is known only when it runs"),
    (PLAIN.replace("64", "264"), "a head size of 264; its kernels of float16 have those up to 256"),
]

OTHERS = [
    (PLAIN.replace("Softmax(c)", "Relu(c)"), "between its products is no softmax"),
    (PLAIN.replace("p = Softmax(c)", "e = Softmax(c) i = IsNaN(e) p = Where(i, f, e)"), "the left operand of the second product is no softmax"),
    (PLAIN.replace("p = Softmax(c)", "e = Softmax(c) p = Tanh(e)"), "the left operand of the second product is no softmax"),
    (PLAIN.replace("<T f = {2}>", "<T f = {2}, int64[1] a = {0}, int64[1] e = {-1}, int64[1] last = {3}>").replace("p = Softmax(c) y", "w = Softmax(c) p = Slice(w, a, e, last) y").replace("K,64] v", "L,64] v"), "its softmax is not of the rows that the second product sums over"),
    (PLAIN.replace("p = Softmax(c)", "p = Softmax <axis = 2> (c)"), "a product's sums are used at other places than where they are taken"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED + OTHERS)
def test_what_is_no_attention(text: str, message: str) -> None:
    """Those that its kernels do not have, and what is none at all."""
    code = "attention-structure" if (text, message) in REFUSED else "no-attention"
    found = refused(text.replace("T[", "float16[").replace("T ", "float16 "))
    assert (found.code, found.message) == (code, message)
