"""Images that are scaled by what products make of their means: which regions, in three launches, and refusals."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from kernel_harness import Made, attempt, check, make, only, parse, random_inputs
from reference import Array

from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel

FIRST = "(T[N,{c},H,W] x, T[{r},{c},1,1] w, T[{r}] b, T[{c},{r},1,1] v, T[{c}] e)"
MEAN = "m = GlobalAveragePool(x) "
GATE = "p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = Sigmoid(q) "

FORMS: Mapping[str, str] = {
    "torchvision": f"g {FIRST} => (T[N,{{c}},H,W] y) {{ {MEAN}{GATE}y = Mul(g, x) }}",
    "timm": (f"g {FIRST} => (T[N,{{c}},H,W] y) <int64[2] o = {{2,3}}> {{ m = ReduceMean<keepdims = 1>(x, o) p = Conv(m, w, b) s = Sigmoid(p) "
             "a = Mul(p, s) q = Conv(a, v, e) g = HardSigmoid(q) y = Mul(x, g) }"),
    "SENet": ("g (T[N,{c},H,W] x, T[{r},{c}] w, T[{r}] b, T[{c},{r}] v, T[{c}] e) => (T[N,{c},H,W] y) <int64[4] f = {0,-1,1,1}> "
              "{ i = GlobalAveragePool(x) m = Flatten(i) p = Gemm<transB = 1>(m, w, b) a = Relu(p) q = Gemm<transB = 1>(a, v, e) "
              "h = Sigmoid(q) g = Reshape(h, f) y = Mul(x, g) }"),
    "channels last": ("g (T[N,H,W,{c}] t, T[{r},{c},1,1] w, T[{r}] b, T[{c},{r},1,1] v, T[{c}] e) => (T[N,H,W,{c}] y) "
                      f"{{ x = Transpose<perm = [0,3,1,2]>(t) {MEAN}{GATE}z = Mul(x, g) y = Transpose<perm = [0,2,3,1]>(z) }}"),
    "a residual behind it": (f"g {FIRST.replace(')', ', T[N,{c},H,W] z)')} => (T[N,{{c}},H,W] y) {{ {MEAN}{GATE}s = Mul(x, g) d = Add(s, z) y = Relu(d) }}"),
    "one product": ("g (T[N,{c},H,W] x, T[{c},{c},1,1] w, T[{c}] b) => (T[N,{c},H,W] y) "
                    f"{{ {MEAN}p = Conv(m, w, b) g = HardSigmoid(p) y = Mul(x, g) }}"),
    "three products": ("g (T[N,{c},H,W] x, T[{r},{c},1,1] w, T[{r},{r},1,1] u, T[{c},{r},1,1] v) => (T[N,{c},H,W] y) "
                       f"{{ {MEAN}p = Conv(m, w) a = Relu(p) o = Conv(a, u) i = Relu(o) q = Conv(i, v) g = Sigmoid(q) y = Mul(x, g) }}"),
}


def filled(text: str, kind: str, channels: int, few: int) -> str:
    """A form with its type and its numbers of channels."""
    for name, number in (("{c}", str(channels)), ("{r}", str(few)), ("{{", "{"), ("}}", "}"), ("T[", f"{kind}[")):
        text = text.replace(name, number)
    return text


def text_of(form: str, kind: str = "float16", channels: int = 96, few: int = 4) -> str:
    return filled(FORMS[form], kind, channels, few)


def made_of(form: str, kind: str = "float16", channels: int = 96, few: int = 4) -> Made:
    return make(text_of(form, kind, channels, few), 20)


SIZES = {"N": 3, "H": 7, "W": 5}


def inputs_of(made: Made, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Random inputs, weights so small that sums of many are no larger than what is summed."""
    return {name: (array / array.dtype.type(16)).astype(array.dtype) if name in "wuv" else array
            for name, array in random_inputs(made, sizes).items()}


def cluster(made: Made) -> Made:
    """The variant whose blocks share an image, alone."""
    first = made.kernel.plan.variants[0]
    assert [step.cluster is not None for step in first.launches] == [False, True, False]
    return only(made, [replace(first, guards=())])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, kind: str) -> None:
    """Every way to run them, also where blocks of a cluster share an image: rows of some channels are larger then."""
    made = made_of(form, kind)
    assert made.kernel.schedule == "gated" and len(made.kernel.plan.variants[0].launches) == 3
    assert not made.kernel.rounds
    check(made, inputs_of(made, SIZES), length=96, misalign=False)


@pytest.mark.parametrize(("channels", "few"), [(1, 1), (33, 3), (97, 5), (40, 10), (260, 9)])
@pytest.mark.parametrize("kind", ["float16", "float"])
def test_odd_numbers_of_channels(kind: str, channels: int, few: int) -> None:
    """Weights that no vector divides are read by shorter ones, or one by one."""
    for form in ("torchvision", "channels last"):
        made = made_of(form, kind, channels, few)
        check(made, inputs_of(made, {"N": 2, "H": 3, "W": 9}), length=channels, misalign=False)


@pytest.mark.parametrize(("kind", "channels", "few", "blocks"), [
    ("float16", 240, 20, 2), ("float16", 480, 20, 4), ("float16", 672, 28, 8), ("float16", 416, 416, 8),
    ("bfloat16", 300, 75, 8), ("float", 240, 20, 4), ("float", 480, 20, 8)])
def test_blocks_share_an_image(kind: str, channels: int, few: int, blocks: int) -> None:
    """In any order: all have begun before one writes into another's memory, and a row is whole before it is read."""
    made = made_of("channels last", kind, channels, few)
    assert [step.cluster for step in made.kernel.plan.variants[0].launches][1] == (str(blocks), "1", "1")
    # Blocks that have not begun have no memory to write to: the emulator's have.
    assert made.kernel.source.partition("namespace of_gate")[2].partition("namespace")[0].count("of::meet_cluster()") == 2
    check(cluster(made), inputs_of(made, {"N": 2, "H": 2, "W": 3}), length=channels, misalign=False, limit=1,
          orders=["backward", 3, 4], multiprocessors=9)


@pytest.mark.parametrize("images", [1, 5])
def test_any_number_of_images(images: int) -> None:
    made = made_of("torchvision", channels=320, few=32)
    check(cluster(made), inputs_of(made, {"N": images, "H": 4, "W": 4}), misalign=False, limit=1)


def test_one_image_whose_size_is_known() -> None:
    """Both operands of a product are one row then, of a kind."""
    text = text_of("torchvision", channels=24, few=24).replace("[N,", "[1,").replace(",H,W]", ",6,6]")
    made = make(text, 20)
    assert made.kernel.schedule == "gated"
    check(made, inputs_of(made, {}), misalign=False)


def test_a_row_between_products_is_rounded_as_it_is_declared() -> None:
    """To 16 bits, as the nodes themselves do."""
    source = made_of("torchvision").kernel.source
    assert "of::round_to<__half>(relu0)" in source
    assert "round_to" not in made_of("torchvision", "float").kernel.source.partition("namespace of_gate")[2]


def test_vectors_are_read_where_rows_of_weights_divide_by_them() -> None:
    """Of 20 sums four of 16 bits at a time, of 480 eight."""
    gates = made_of("torchvision", channels=480, few=20).kernel.source.partition("namespace of_gate")[2]
    assert "width = 8;" in gates and "width = 4;" in gates
    odd = made_of("torchvision", channels=97, few=5).kernel.source.partition("namespace of_gate")[2]
    assert "width = 8;" not in odd.partition("namespace of_scale")[0]


def test_weights_are_asked_for_together() -> None:
    """Those that threads hold before their row is, others some columns at a time."""
    few = made_of("torchvision", channels=128, few=32).kernel.source.partition("namespace of_gate")[2]
    assert few.index("held1[turn][at] = of::load<width>") < few.index("row0[i] =") and "begin += " not in few.partition("single")[0]
    made = make(text_of("torchvision", channels=4096, few=16), 20, planned={"N": 512, "H": 7, "W": 7})
    many = made.kernel.source.partition("namespace of_gate")[2].partition("single")[0]
    assert all(step.cluster is None for step in made.kernel.plan.variants[0].launches)  # images enough for all blocks
    assert "> held1[6][2];" in many and "begin < turns; begin += 6)" in many
    check(made, inputs_of(made, {"N": 2, "H": 2, "W": 1}), length=4096, misalign=False)


REFUSED: Mapping[str, tuple[str, str]] = {
    "weights that lie across": (
        "g (T[N,{c},H,W] x, T[{c},{r}] w, T[{r},{c}] v) => (T[N,{c},H,W] y) <int64[4] f = {0,-1,1,1}> { i = GlobalAveragePool(x) "
        "m = Flatten(i) p = MatMul(m, w) a = Relu(p) q = MatMul(a, v) h = Sigmoid(q) g = Reshape(h, f) y = Mul(x, g) }",
        "weights do not lie along what is summed over"),
    "weights that are computed": (
        f"g {FIRST} => (T[N,{{c}},H,W] y) {{ {MEAN}k = Tanh(w) p = Conv(m, k, b) a = Relu(p) q = Conv(a, v, e) g = Sigmoid(q) y = Mul(g, x) }}",
        "operands are computed"),
    "weights with zeros around": (
        "g (T[N,8,H,W] x, T[4,6,1,1] w, T[8,4,1,1] v) => (T[N,8,H,W] y) <int64[8] o = {0,1,0,0,0,1,0,0}> { k = Pad(w, o) "
        f"{MEAN}p = Conv(m, k) a = Relu(p) q = Conv(a, v) g = Sigmoid(q) y = Mul(g, x) }}",
        "operands are computed"),
    "channels in another order between products": (
        "g (T[N,8,H,W] x, T[8,8,1,1] w, T[8,8,1,1] v) => (T[N,8,H,W] y) <int64[3] o = {0,2,4}, int64[4] f = {0,8,1,1}> "
        f"{{ {MEAN}p = Conv(m, w) a = Reshape(p, o) t = Transpose<perm = [0,2,1]>(a) k = Reshape(t, f) q = Conv(k, v) g = Sigmoid(q) "
        "y = Mul(g, x) }", "results are laid out anew"),
    "rows that no block holds": (
        "g (T[N,20000,H,W] x, T[{r},20000,1,1] w, T[20000,{r},1,1] v) => (T[N,20000,H,W] y) "
        f"{{ {MEAN}p = Conv(m, w) q = Conv(p, v) g = Sigmoid(q) y = Mul(g, x) }}",
        "take 160032 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    text, why = REFUSED[name]
    found = attempt(parse(filled(text, "float16", 96, 4), 20))
    assert not isinstance(found, Made) and found.code == "product-structure" and why in found.message, found


MULTIPLIED = ("g (T[N,H,W,{c}] t, T[{r},{c},1,1] w, T[{r}] b, T[{c},{r},1,1] v, T[{c}] e, T[24,{c},1,1] k, T[24] o, T[N,H,W,24] d) => (T[N,H,W,24] y) "
              f"{{ x = Transpose<perm = [0,3,1,2]>(t) {MEAN}{GATE}z = Mul(x, g) s = Conv(z, k, o) l = Transpose<perm = [0,2,3,1]>(s) y = Add(l, d) }}")
LARGE = {"N": 32, "H": 28, "W": 28}


@pytest.mark.parametrize(("channels", "kind"), [(96, "float16"), (144, "bfloat16"), (16, "float16")])
def test_what_is_scaled_may_be_multiplied(channels: int, kind: str) -> None:
    """By warps that scale what they read: no kernel scales the image alone."""
    made = make(filled(MULTIPLIED, kind, channels, 4), 20, planned=LARGE)
    last = made.kernel.plan.variants[0].launches[-1].kernel
    assert made.kernel.schedule == "gated" and last.startswith("of_product_product_tall_")
    assert "of_scale" not in made.kernel.source and not made.kernel.plan.maps
    check(made, inputs_of(made, SIZES), length=channels, misalign=False)


@pytest.mark.parametrize(("channels", "kind", "planned"), [
    (96, "float", LARGE), (168, "float16", LARGE), (96, "float16", SIZES), (20, "float16", LARGE)])
def test_what_is_scaled_is_multiplied_by_warps_alone(channels: int, kind: str, planned: Mapping[str, int]) -> None:
    """Not what they do not hold, nor of few rows, nor by rounded numbers."""
    assert isinstance(attempt(parse(filled(MULTIPLIED, kind, channels, 4), 20), planned=planned), Refusal)


@pytest.mark.parametrize("nodes", [
    f"{MEAN}{GATE}s = Mul(x, g) y = Add(s, m)",
    f"{MEAN}{GATE}s = Mul(x, g) h = GlobalAveragePool(s) y = Sub(s, h)",
    "c = Conv(x, u) m = GlobalAveragePool(c) " + GATE + "y = Mul(x, g)",
])
def test_what_is_another_region(nodes: str) -> None:
    """What reads the mean behind its gate too, what reduces the scaled image, and a mean of a product's."""
    text = f"g {FIRST.replace(')', ', T[{c},{c},1,1] u)')} => (T[N,{{c}},H,W] y) {{ {nodes} }}"
    found = attempt(parse(filled(text, "float16", 8, 4), 20))
    assert not (isinstance(found, Made) and found.kernel.schedule == "gated")


def test_kernels_are_those_of_the_parts() -> None:
    """A mean, and what scales an image, have the text that they have alone."""
    whole = made_of("channels last", channels=64, few=16)
    alone = make("g (float16[N,H,W,64] t) => (float16[N,64,1,1] m) { x = Transpose<perm = [0,3,1,2]>(t) m = GlobalAveragePool(x) }")
    assert isinstance(whole.kernel, Kernel)
    names = [step.kernel for step in alone.kernel.plan.variants[0].launches]
    assert [step.kernel for step in whole.kernel.plan.variants[0].launches][:len(names)] == [f"of_mean_{each}" for each in names]
