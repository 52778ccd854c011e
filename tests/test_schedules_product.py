"""The product schedule: operands and results however they lie, what surrounds them, in every variant, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import kernel_harness
import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, compile_all, make, random_inputs, refused, short_inputs

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Choice, parse_choice
from onnxfuse.schedules.source import Source

PLAIN = "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { y = MatMul(a, b) }"

FORMS = {
    "both transposed": ("g (T[K,M] a, T[N,K] b) => (T[M,N] y) { y = Gemm<transA = 1, transB = 1>(a, b) }", {"M": 72, "K": 72, "N": 80}),
    "the right one transposed": ("g (T[B,M,64] a, T[B,N,64] b) => (T[B,M,N] y) { t = Transpose<perm = [0,2,1]>(b) y = MatMul(a, t) }", {"B": 2, "M": 72, "N": 80}),
    "a batch that one lacks": ("g (T[B,M,40] a, T[40,24] b) => (T[B,M,24] y) { y = MatMul(a, b) }", {"B": 3, "M": 33}),
    "heads": ("g (T[2,S,64] a, T[64,96] b, T[96] c) => (T[2,6,S,16] y) <int64[4] h = {2,-1,6,16}> "
              "{ p = MatMul(a, b) q = Add(p, c) r = Reshape(q, h) y = Transpose<perm = [0,2,1,3]>(r) }", {"S": 70}),
    "results that lie transposed": ("g (T[2,S,64] a, T[64,40] b) => (T[2,40,S] y) { p = MatMul(a, b) y = Transpose<perm = [0,2,1]>(p) }", {"S": 72}),
    "two results": ("g (T[M,64] a, T[64,N] b, T[M,N] c) => (T[M,N] s, T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }", {"M": 70, "N": 40}),
    "a gate": ("g (T[M,72] a, T[72,N] b, T[72,N] c) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }", {"M": 70, "N": 136}),
    "a gate with other weights": ("g (T[M,72] a, T[72,N] b, T[N,72] c) => (T[M,N] y) { u = MatMul(a, b) d = Transpose(c) w = MatMul(a, d) s = Sigmoid(u) y = Mul(s, w) }", {"M": 70, "N": 72}),
    "an operand that is computed": ("g (T[M,64] a, T[64] s, T[64,40] b) => (T[M,40] y) { p = Mul(a, s) g = Relu(p) y = MatMul(g, b) }", {"M": 70}),
    "one column": ("g (T[M,64] a, T[64] b) => (T[M] y) { y = MatMul(a, b) }", {"M": 70}),
    "an Einstein sum": ("g (T[B,S,4,16] q, T[4,16,40] w) => (T[B,S,40] y) { y = Einsum<equation = \"bshd,hdn->bsn\">(q, w) }", {"B": 2, "S": 35}),
}

CONVOLUTIONS = {
    "channels first": ("g (T[2,64,H,W] x, T[24,64,3,3] w, T[24] b) => (T[2,24,P,Q] y) { c = Conv<pads = [1,1,1,1]>(x, w, b) y = Relu(c) }", {"H": 9, "W": 10, "P": 9, "Q": 10}),
    "channels last": ("g (T[2,9,10,16] t, T[24,3,3,16] v, T[24] b) => (T[2,5,5,24] y) { x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v) "
                      "c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }", {}),
    "groups": ("g (T[2,16,9,10] x, T[24,8,3,2] w) => (T[2,24,5,5] y) { y = Conv<pads = [1,1,1,0], strides = [2,2], group = 2>(x, w) }", {}),
    "one place": ("g (T[2,16,8,8] x, T[24,16,1,1] w, T[2,24,8,8] r) => (T[2,24,8,8] y) { c = Conv(x, w) y = Add(c, r) }", {}),
    "one axis, dilated": ("g (T[2,16,L] x, T[24,16,5] w) => (T[2,24,L] y) { y = Conv<pads = [8,0], dilations = [2]>(x, w) }", {"L": 33}),
    "three axes": ("g (T[1,8,5,6,7] x, T[16,8,2,3,2] w) => (T[1,16,4,4,6] y) { y = Conv(x, w) }", {}),
}

TRANSPOSED = {
    "as many as a stride": ("g (T[N,16,5,6] x, T[16,8,2,2] w, T[8] b) => (T[N,8,10,12] y) { c = ConvTranspose<strides = [2,2]>(x, w, b) y = Relu(c) }", {"N": 2}),
    "channels last, as many as a stride": (
        "g (T[2,5,6,16] t, T[16,2,2,8] v, T[8] b) => (T[2,10,12,8] y) { x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v) "
        "c = ConvTranspose<strides = [2,2]>(x, w, b) y = Transpose<perm = [0,2,3,1]>(c) }", {}),
    "borders left out": ("g (T[2,16,5,6] x, T[16,8,4,4] w, T[8] b) => (T[2,8,10,12] y) { c = ConvTranspose<strides = [2,2], pads = [1,1,1,1]>(x, w, b) y = Relu(c) }", {}),
    "channels last, borders left out": (
        "g (T[2,5,6,16] t, T[16,3,3,8] v, T[8] b, T[2,10,12,8] r) => (T[2,10,12,8] y) { x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v) "
        "c = ConvTranspose<strides = [2,2], pads = [1,1,1,1], output_padding = [1,1]>(x, w, b) l = Transpose<perm = [0,2,3,1]>(c) y = Add(l, r) }", {}),
    "channels last, in groups": (
        "g (T[2,9,16] t, T[16,4,8] v) => (T[2,18,16] y) { x = Transpose<perm = [0,2,1]>(t) w = Transpose<perm = [0,2,1]>(v) "
        "c = ConvTranspose<strides = [2], pads = [1,1], group = 2>(x, w) y = Transpose<perm = [0,2,1]>(c) }", {}),
    "one axis, a stride that no vector divides": ("g (T[2,16,L] x, T[16,8,7] w, T[8] b) => (T[2,8,M] y) { c = ConvTranspose<strides = [3], pads = [2,2]>(x, w, b) y = Tanh(c) }", {"L": 33, "M": 99}),
    "one channel": ("g (T[2,16,L] x, T[16,1,16] w) => (T[2,1,M] y) { y = ConvTranspose<strides = [8], pads = [4,4]>(x, w) }", {"L": 17, "M": 136}),
    "three axes": ("g (T[1,8,3,4,5] x, T[8,16,2,3,4] w) => (T[1,16,6,8,10] y) { y = ConvTranspose<strides = [2,2,2], pads = [0,0,1,0,1,1]>(x, w) }", {}),
    "spread weights": ("g (T[2,8,5,6] x, T[8,16,3,3] w) => (T[2,16,13,8] y) { y = ConvTranspose<strides = [2,1], dilations = [2,1]>(x, w) }", {}),
}

SIZES = ({"M": 1, "K": 1, "N": 1}, {"M": 31, "K": 33, "N": 17}, {"M": 130, "K": 136, "N": 200}, {"M": 33, "K": 197, "N": 49})


def product(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    assert made.kernel.schedule == "product"
    return made


def told(made: Made, choice: Choice, planned: Mapping[str, int]) -> Made:
    """The kernel of a choice, the text of its first variant alone."""
    way = kernel_harness.told(made, choice, planned)
    assert way.kernel.choice == choice
    return first(way)


def first(made: Made) -> Made:
    """A kernel with the text of its first variant alone."""
    kernel = made.kernel
    assert isinstance(kernel.code, Source)
    code = replace(kernel.code, functions=kernel.code.functions[:1], entries=kernel.code.entries[:1])
    return replace(made, kernel=replace(kernel, code=code))


def specialised(made: Made, planned: Mapping[str, int]) -> list[Made]:
    """The kernels whose tiles a warp copies: the schedule's own, if it is one, and those of its choices."""
    own = [first(made)] if "one copies" in made.kernel.plan.variants[0].name else []
    return own + [told(made, choice, planned) for choice in made.kernel.choices if "turns" in dict(choice.settings)]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sizes(kind: str) -> None:
    """Whole tiles and parts of them, with vectors and without."""
    made = product(PLAIN, kind)
    for seed, sizes in enumerate(SIZES):
        check(made, random_inputs(made, sizes, seed), length=sizes["K"])


@pytest.mark.parametrize("case", FORMS | CONVOLUTIONS)
def test_forms(case: str) -> None:
    text, sizes = (FORMS | CONVOLUTIONS)[case]
    made = product(text, planned=sizes)
    check(made, random_inputs(made, sizes), length=200)


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolutions(case: str, kind: str) -> None:
    """What lies behind a border is stored nowhere, and nothing is read beside it."""
    text, sizes = TRANSPOSED[case]
    made = product(text, kind, planned=sizes)
    check(made, (short_inputs if kind == "float" else random_inputs)(made, sizes), length=200)


@pytest.mark.parametrize(("case", "condition"), [
    ("as many as a stride", False), ("channels last, as many as a stride", False), ("channels last, borders left out", True)])
def test_conditions_stand_where_something_is_left_out(case: str, condition: bool) -> None:
    text, sizes = TRANSPOSED[case]
    assert bool(any(product(text, planned=sizes).kernel.code.functions[0].body.count(f"{sign} of::store(o0") for sign in ("< 10)", "< 12)"))) is condition


@pytest.mark.parametrize(("case", "pieces"), [
    ("both transposed", 2), ("heads", 2), ("a gate", 3), ("a gate with other weights", 1), ("channels last", 2), ("one place", 2),
    ("channels first", 1), ("an operand that is computed", 1), ("groups", 1)])
def test_operands_are_copied_as_they_lie(case: str, pieces: int) -> None:
    """By vectors, without a register between, wherever neighbours lie side by side."""
    text, sizes = (FORMS | CONVOLUTIONS)[case]
    made = product(text, planned=sizes)
    body = next(each.body for each in made.kernel.code.functions if "together" in each.name)
    assert body.count("of::copy_async") == pieces


@pytest.mark.parametrize("case", ["both transposed", "heads", "results that lie transposed", "one place", "channels last"])
def test_results_that_are_neighbours_are_stored_together(case: str) -> None:
    """Whichever operand's rows they are of."""
    text, sizes = (FORMS | CONVOLUTIONS)[case]
    assert "of::store(o0 + " in product(text, planned=sizes).kernel.code.functions[0].body


def test_one_column_is_one_row_of_the_other_operand() -> None:
    """Whose results are neighbours so: the operand of many rows is then read once, as weights are by few rows."""
    text, sizes = FORMS["one column"]
    assert "few" in product(text, planned=sizes).kernel.plan.variants[0].steps[0].kernel


@pytest.mark.parametrize("sizes", [{"M": 0, "K": 5, "N": 5}, {"M": 5, "K": 0, "N": 5}, {"M": 8, "K": 0, "N": 8}, {"M": 5, "K": 5, "N": 0}])
def test_nothing(sizes: Mapping[str, int]) -> None:
    """Of nothing the sum is zero."""
    made = product(PLAIN)
    check(made, random_inputs(made, sizes))


@pytest.mark.parametrize("order", ["backward", 3])
def test_threads_in_any_order(order: str | int) -> None:
    """Nobody multiplies a stage that is not there, or fills one that another still reads."""
    made = product(PLAIN, planned={"M": 4096, "K": 4096, "N": 4096})
    check(made, random_inputs(made, {"M": 72, "K": 456, "N": 136}), length=456, orders=[order], limit=2)


@pytest.mark.parametrize("number", [np.nan, np.inf, 60000.0])
def test_numbers_at_the_edge(number: float) -> None:
    """Of other rows nothing shows: what is past the ends is zero, whatever lies there."""
    made = product(PLAIN)
    inputs = random_inputs(made, {"M": 9, "K": 72, "N": 40})
    inputs["a"][3, 7] = number
    check(made, inputs, length=72)
    (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    assert np.isfinite(np.delete(got, 3, 0)).all()


def test_padding_is_zero() -> None:
    """An infinite weight makes no number of it, as in the nodes."""
    text, sizes = CONVOLUTIONS["channels last"]
    made = product(text, planned=sizes)
    inputs = random_inputs(made, sizes)
    inputs["v"][3, 0, 0, 5] = np.inf
    check(made, inputs, length=144)


@pytest.mark.parametrize(("case", "sizes"), [
    ("plain", {"M": 4096, "K": 4096, "N": 4096}), ("plain", {"M": 100, "K": 72, "N": 264}), ("a gate", {"M": 4096, "N": 4096})])
def test_what_tuning_may_try(case: str, sizes: Mapping[str, int]) -> None:
    """The tiles that may be quickest, by four warps together and by each, with few stages and with many; and blocks with
    a warp that copies, which tests of their own run."""
    text, given = FORMS.get(case, (PLAIN, {"M": 72, "K": 136, "N": 264}))
    made = product(text, planned=sizes)
    choices = [choice for choice in made.kernel.choices if "library" not in dict(choice.settings)]
    assert 9 <= len(choices) < 16 and all(parse_choice(str(choice)) == choice for choice in choices)
    groups = [choice["group"] for choice in choices]
    assert groups == sorted(groups, reverse=True)  # a budget reaches what is quickest on Hopper
    others = [told(made, choice, sizes) for choice in choices if "turns" not in dict(choice.settings)]
    pairs = [choice for choice in choices if "blocks" in dict(choice.settings)]
    assert len(others) == len(choices) - 2 - len(pairs) and len(pairs) == (sizes.get("K") == 72)
    compile_all(others)
    for other in others:
        check(other, random_inputs(made, given), length=136, limit=1, misalign=False)


@pytest.mark.parametrize("tile", [(128, 192), (192, 192)])
@pytest.mark.parametrize("case", ["plain", "the right one transposed", "a gate", "results that lie transposed"])
def test_tiles_whose_sides_are_no_powers_of_two(case: str, tile: tuple[int, int]) -> None:
    text, given = FORMS.get(case, (PLAIN, {"M": 200, "K": 136, "N": 264}))
    made = product(text, planned=LARGE)
    way = told(made, Choice.of("product", rows=tile[0], columns=tile[1], stages=3, group=4), LARGE)
    check(way, random_inputs(way, given), length=200, limit=1, misalign=False)


LARGE = {"M": 4096, "K": 4096, "N": 4096}


@pytest.mark.parametrize(("block", "kind"), [
    ((128, 128, 2), "bfloat16"), ((128, 256, 1), "float16"), ((256, 128, 1), "bfloat16"), ((128, 64, 1), "float16"),
    ((128, 192, 1), "bfloat16"), ((192, 192, 1), "float16"), ((128, 128, 1), "float16"), ((64, 128, 2), "bfloat16"),
    ((64, 64, 2), "float16")])
def test_tiles_that_a_warp_copies(monkeypatch: pytest.MonkeyPatch, block: tuple[int, int, int], kind: str) -> None:
    """Parts of tiles, several of them a block and many stages of each, in any order of the threads."""
    monkeypatch.setattr("onnxfuse.schedules.products.blocks.SPECIALISED", {block: 1.0})
    (made,) = specialised(product(PLAIN, kind, LARGE), LARGE)
    for sizes, multiprocessors, order in (
            ({"M": 1, "K": 8, "N": 8}, 132, "forward"), ({"M": 197, "K": 200, "N": 136}, 1, "backward"),
            ({"M": 49, "K": 648, "N": 264}, 1, 3)):
        inputs = random_inputs(made, sizes)
        assert "one copies" in variants_that_hold(made.kernel.plan, arguments(made, inputs))[0]
        check(made, inputs, length=sizes["K"], limit=1, misalign=False, orders=[order],
              multiprocessors=multiprocessors)


@pytest.mark.parametrize("case", [
    "both transposed", "the right one transposed", "heads", "results that lie transposed", "two results", "a gate"])
def test_forms_of_tiles_that_a_warp_copies(case: str) -> None:
    """However operands lie, with a batch too, and whatever is computed of the sums."""
    text, sizes = FORMS[case]
    made = specialised(product(text, planned=sizes), sizes)[0]
    check(made, random_inputs(made, sizes), length=200, limit=1, misalign=False, multiprocessors=1)


APART = {
    "three": "g (T[M,K] a, T[K,N] b, T[K,N] c, T[K,N] d, T[N] e) => (T[M,N] q, T[M,N] k, T[M,N] v) "
             "{ p = MatMul(a, b) q = Add(p, e) r = MatMul(a, c) k = Relu(r) v = MatMul(a, d) }",
    "four": "g (T[M,K] a, T[N,K] b, T[N,K] c, T[N,K] d, T[N,K] e) => (T[M,N] q, T[M,N] k, T[M,N] v, T[M,N] w) "
            "{ q = Gemm<transB = 1>(a, b) k = Gemm<transB = 1>(a, c) v = Gemm<transB = 1>(a, d) r = Gemm<transB = 1>(a, e) w = Neg(r) }",
}


@pytest.mark.parametrize("case", APART)
def test_results_that_go_ways_of_their_own(case: str) -> None:
    """Queries, keys and values: whole tiles and parts of them, with vectors and without; the same as a warp copies them."""
    made = product(APART[case], planned={"M": 1024, "K": 768, "N": 768})
    assert made.kernel.plan.variants[0].name.startswith("tiles of 128 x 192")
    for seed, sizes in enumerate(SIZES):
        check(made, random_inputs(made, sizes, seed), length=sizes["K"])
    sizes = {"M": 197, "K": 200, "N": 136}
    for way in specialised(product(APART[case], planned=LARGE), LARGE):
        check(way, random_inputs(way, sizes), length=200, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize(("block", "across"), [((128, 192, 1), True), ((64, 192, 2), True), ((128, 96, 2), False)])
def test_a_third_of_tiles_that_a_warp_copies(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int, int], across: bool
) -> None:
    monkeypatch.setattr("onnxfuse.schedules.products.blocks.SPECIALISED_OF_THREE", {block: 1.0})
    text = APART["three"]
    if not across:
        text = text.replace("T[K,N]", "T[N,K]").replace("{ p = MatMul(a, b)", (
            "{ bt = Transpose<perm = [1,0]>(b) ct = Transpose<perm = [1,0]>(c) dt = Transpose<perm = [1,0]>(d) p = MatMul(a, bt)"
        )).replace("MatMul(a, c)", "MatMul(a, ct)").replace("MatMul(a, d)", "MatMul(a, dt)")
    (made,) = specialised(product(text, "bfloat16", LARGE), LARGE)
    for sizes, multiprocessors, order in (({"M": 1, "K": 8, "N": 8}, 132, "forward"), ({"M": 197, "K": 200, "N": 136}, 1, 3)):
        inputs = random_inputs(made, sizes)
        assert "one copies" in variants_that_hold(made.kernel.plan, arguments(made, inputs))[0]
        check(made, inputs, length=sizes["K"], limit=1, misalign=False, orders=[order], multiprocessors=multiprocessors)


CUT = {
    "rows that are longer than they are": ("g (T[M,64] a, T[72,40] b) => (T[M,40] y) <int64[4] p = {0,0,0,8}> { q = Pad(a, p) y = MatMul(q, b) }", {"M": 70}),
    "a part of rows": ("g (T[M,72] a, T[64,40] b) => (T[M,40] y) <int64[1] f = {8}, int64[1] t = {72}, int64[1] x = {1}> "
                       "{ q = Slice(a, f, t, x) y = MatMul(q, b) }", {"M": 70}),
    "every eighth element": ("g (T[M,512] a, T[64,40] b) => (T[M,40] y) <int64[1] f = {0}, int64[1] t = {512}, int64[1] x = {1}, int64[1] s = {8}> "
                            "{ q = Slice(a, f, t, x, s) y = MatMul(q, b) }", {"M": 70}),
}


@pytest.mark.parametrize("case", ["a gate with other weights", "an operand that is computed", "one column",
                                  "channels first", "groups", *CUT])
def test_what_no_warp_copies(case: str) -> None:
    """Operands that are no straight tensors in memory, or that lie differently."""
    text, sizes = (FORMS | CONVOLUTIONS | CUT)[case]
    assert not specialised(product(text, planned=sizes), sizes)


@pytest.mark.parametrize(("sizes", "sm", "misaligned"), [
    ({"M": 72, "K": 196, "N": 136}, 90, {}), ({"M": 72, "K": 200, "N": 132}, 90, {}), ({"M": 0, "K": 8, "N": 8}, 90, {}),
    ({"M": 8, "K": 0, "N": 8}, 90, {}), ({"M": 72, "K": 200, "N": 136}, 90, {1: 1}), ({"M": 72, "K": 200, "N": 136}, 89, {}),
    ({"M": 72, "K": 200, "N": 136}, 100, {})])
def test_where_no_warp_copies(sizes: Mapping[str, int], sm: int, misaligned: Mapping[int, int]) -> None:
    """Where no tensor map has such sizes or addresses, or the GPU no such instructions."""
    made = specialised(product(PLAIN, planned=LARGE), LARGE)[0]
    inputs = arguments(made, random_inputs(made, sizes))
    assert not any("one copies" in name for name in variants_that_hold(made.kernel.plan, inputs, [], sm, misaligned))


@pytest.mark.parametrize(("sizes", "copied", "tile"), [
    ({"M": 8192, "K": 1024, "N": 4096}, "128 x 128, 6", "128 x 128, 3"), ({"M": 12288, "K": 3072, "N": 768}, "128 x 192, 4", "128 x 192, 4"),
    ({"M": 6304, "K": 768, "N": 3072}, "192 x 192, 3", "192 x 192, 4"), ({"M": 1024, "K": 768, "N": 768}, "64 x 128, 8", "64 x 128, 4"),
    ({"M": 100352, "K": 576, "N": 64}, "256 x 64, 4", "128 x 64, 4"), ({"M": 100352, "K": 64, "N": 256}, "128 x 128, 6", "128 x 128, 2"),
    ({"M": 17, "K": 4096, "N": 4096}, "64 x 64, 12", "64 x 64, 6"), ({"M": 1, "K": 4096, "N": 4096}, None, "1 x 32, 8")])
def test_tiles_follow_the_sizes(sizes: Mapping[str, int], copied: str | None, tile: str) -> None:
    """Those of the busiest multiprocessor, and what there is to be summed up; first where a warp can copy them whole."""
    names = [variant.name for variant in product(PLAIN, planned=sizes).kernel.plan.variants]
    found = [name for name in names if "one copies" in name]
    assert [name.partition(" stages")[0] for name in found] == ([f"tiles of {copied}"] if copied else [])
    assert names[:len(found)] == found and names[len(found)].startswith(f"tiles of {tile} stages")


def test_what_runs_where_no_warp_copies_the_schedules_own_tiles() -> None:
    """Behind a block that was told the general ones; behind a library, which may be missing, its own comes first."""
    made = product(PLAIN, planned=LARGE)
    own = made.kernel.plan.variants[0].name
    assert "one copies" in own
    for choice in made.kernel.choices:
        names = [variant.name for variant in kernel_harness.told(made, choice, LARGE).kernel.plan.variants]
        assert (names[1] == own) == ("library" in dict(choice.settings)) and names.count(own) <= 1


def test_four_warps_multiply_together_where_the_gpu_can() -> None:
    made = product(PLAIN)
    inputs = arguments(made, random_inputs(made, {"M": 72, "K": 72, "N": 72}))
    first = {sm: variants_that_hold(made.kernel.plan, inputs, [], sm)[0] for sm in (75, 80, 89, 90, 100, 120)}
    assert [sm for sm, name in first.items() if "4 warps multiply together" in name] == [90]


@pytest.mark.parametrize(("text", "message"), [
    (PLAIN.replace("T[", "double["), "a product of float64; its kernels have those of float16, bfloat16, float32 or 8-bit integers"),
    ("g (T[M,K] a, T[K,N] b, T[K,N] c, T[K,N] d, T[K,N] e, T[K,N] f) => (T[M,N] y) { p = MatMul(a, b) q = MatMul(a, c) r = MatMul(a, d) "
     "s = MatMul(a, e) t = MatMul(a, f) y = Sum(p, q, r, s, t) }", "5 products in one region"),
    ("g (T[M,K] a, T[L,K] c, T[K,N] b) => (T[M,N] y, T[L,N] z) { y = MatMul(a, b) z = MatMul(c, b) }", "its products have no operand in common that all of their rows are of"),
    ("g (T[M,K] a, T[M,K] c, T[K,N] b, T[K,N] d) => (T[M,N] y, T[M,N] z) { y = MatMul(a, b) z = MatMul(c, d) }", "its products have no operand in common that all of their rows are of"),
    (PLAIN.replace("(T[M,N] y)", "(T[L,N] y)").replace("y = MatMul(a, b)", "p = MatMul(a, b) y = Slice(p, none, all, none, two)").replace(
        "{ p", "<int64[1] none = {0}, int64[1] all = {9999}, int64[1] two = {2}> { p"), "what follows the product changes the number of its elements"),
    (PLAIN.replace("(T[M,N] y)", "(T[M] y)").replace("y = MatMul(a, b)", "p = MatMul(a, b) y = ReduceMax<keepdims = 0>(p, one)").replace("{ p", "<int64[1] one = {1}> { p"), "its rows have N elements, and the blocks of a cluster hold 1536 at most"),
])
def test_what_it_has_no_kernel_for(text: str, message: str) -> None:
    assert refused(text.replace("T[", "float16[")).message == message


def test_what_goes_one_by_one_fits_registers() -> None:
    """All of a tile's elements at once, with a place each in a window with padding, did not, and took the compiler
    seconds."""
    text = CONVOLUTIONS["channels last"][0].replace("T[2,9,10,16]", "T[N,64,64,128]").replace("[24,3,3,16]", "[128,3,3,128]")
    kernel = product(text.replace("T[24]", "T[128]").replace("T[2,5,5,24]", "T[N,32,32,128]")).kernel
    code = kernel.code.keeping({name for name in kernel.plan.kernels if name.endswith("_s32")})
    figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), "sm_90")
    assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0]
