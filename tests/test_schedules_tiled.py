"""The tiled schedule: permutations of every rank and type, odd sizes, several inputs and outputs, layouts that meet.

All variants that hold, aligned and not, threads in several orders.  Where elements are only moved they must be equal;
float32 is compared with 1e-5 of the largest output, float16 and bfloat16 with two units in the last place of it.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from itertools import permutations

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, attempt, check, fails, failures, make, parse, random_inputs
from reference import evaluate
from zoo_models import compile_failures

from onnxfuse.lowering.launch import Situation
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.tiled import SHARED_BYTES

ORDERS = ("forward", "backward", 7)

BIAS = ("g (T[N,C,P] x, T[C] b) => (T[N,P,C] y) "
        "{ t = Transpose<perm=[0,2,1]>(x) a = Add(t, b) y = Gelu(a) }")
KEYS = "g (T[B,S,H,D] x, T c) => (T[B,H,D,S] y) { t = Transpose<perm=[0,2,3,1]>(x) y = Mul(t, c) }"


def tiled(text: str, **options: object) -> Made:
    return make(text, schedule="tiled", **options)  # type: ignore[arg-type]


def typed(text: str, kind: str) -> str:
    return re.sub(r"\bT\b(?=\[| )", kind, text)


def moving(axes: tuple[int, ...]) -> bool:
    return axes[-1] != len(axes) - 1


def transposing(kind: str, axes: tuple[int, ...], sizes: tuple[object, ...]) -> str:
    """A model that only transposes."""
    before, after = ",".join(map(str, sizes)), ",".join(str(sizes[axis]) for axis in axes)
    return f"g ({kind}[{before}] x) => ({kind}[{after}] y) {{ y = Transpose<perm={list(axes)}>(x) }}"


PERMUTATIONS = [axes for rank in (2, 3, 4) for axes in permutations(range(rank)) if moving(axes)]
PERMUTATIONS += [(0, 1, 4, 2, 3), (4, 3, 2, 1, 0), (0, 3, 1, 4, 2), (1, 4, 0, 3, 2)]
SYMBOLS = "ABCDE"


@pytest.mark.parametrize("axes", PERMUTATIONS, ids=lambda axes: "".join(map(str, axes)))
def test_permutations(axes: tuple[int, ...]) -> None:
    """Sizes known only when running: odd ones, even ones, ones, more than a tile along each axis."""
    made = tiled(transposing("float16", axes, tuple(SYMBOLS[:len(axes)])))
    for numbers in ((3, 5, 7, 2, 3), (8, 4, 12, 4, 8), (1, 1, 1, 1, 1), (65, 3, 70, 1, 2), (2, 1, 3, 129, 2)):
        sizes = dict(zip(SYMBOLS, numbers, strict=True))
        check(made, random_inputs(made, sizes), orders=("forward", 3))
    assert made.kernel.scattered == ()


KINDS = ("float16", "float", "bfloat16", "double", "int64", "int32", "int8", "uint16", "bool")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(1, 1), (31, 33), (64, 64), (4097, 3), (3, 4097), (130, 72)])
def test_known_sizes(kind: str, rows: int, columns: int) -> None:
    if 1 in (rows, columns):
        made = attempt(parse(transposing(kind, (1, 0), (rows, columns))), schedule="tiled")
        assert isinstance(made, Refusal) and made.code == "not-transposing"
        return
    made = tiled(transposing(kind, (1, 0), (rows, columns)))
    check(made, random_inputs(made, {}), orders=ORDERS)


@pytest.mark.parametrize("kind", ["float16", "float", "bfloat16", "double"])
@pytest.mark.parametrize("text", [BIAS, KEYS], ids=["bias", "keys"])
def test_regions_of_symbolic_sizes(text: str, kind: str) -> None:
    made = tiled(typed(text, kind), planned={"N": 2, "C": 96, "P": 49, "B": 2, "S": 128, "H": 4, "D": 64})
    for seed, numbers in enumerate([(2, 96, 49, 2), (1, 33, 31, 1), (3, 8, 4, 5), (1, 1, 1, 1), (2, 65, 64, 3)]):
        sizes = dict(zip("NCPH", numbers, strict=True)) | dict(zip("BSDH", numbers, strict=True))
        check(made, random_inputs(made, sizes, seed), orders=ORDERS)


@pytest.mark.parametrize("text", [BIAS, KEYS], ids=["bias", "keys"])
def test_every_variant_is_run(text: str) -> None:
    made = tiled(typed(text, "float16"), planned={"N": 2, "C": 96, "P": 64, "B": 2, "S": 128, "H": 4, "D": 64})
    inputs = random_inputs(made, {"N": 1, "C": 8, "P": 12, "B": 1, "S": 8, "H": 2, "D": 4})
    names = variants_that_hold(made.kernel.plan, arguments(made, inputs))
    assert names == [variant.name for variant in made.kernel.plan.variants] and len(names) == 5


@pytest.mark.parametrize("empty", ["N", "C", "P"])
def test_empty(empty: str) -> None:
    made = tiled(typed(BIAS, "float"))
    inputs = random_inputs(made, {"N": 2, "C": 3, "P": 5, empty: 0})
    check(made, inputs)
    situation = Situation([array.shape for array in arguments(made, inputs)])
    situation.bind(made.kernel.plan)
    assert situation.evaluate(made.kernel.plan.variants[-1].steps[0].grid[0]) == 0


REGIONS = [
    ("two inputs of another layout", "g (T[N,C,P] x, T[N,C,P] z, T[N,P,C] w) => (T[N,P,C] y) "
     "{ a = Mul(x, z) t = Transpose<perm=[0,2,1]>(a) y = Add(t, w) }"),
    ("inputs that run along either axis", "g (T[C,N,P] x, T[P,N,C] z, T[N,C,P] w) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[1,2,0]>(x) u = Transpose<perm=[1,0,2]>(z) v = Transpose<perm=[0,2,1]>(w) a = Add(t, u) y = Sub(a, v) }"),
    ("a value and its transpose", "g (T[N,C,P] x) => (T[N,C,P] a, T[N,P,C] y) "
     "{ a = Gelu(x) y = Transpose<perm=[0,2,1]>(a) }"),
    ("a value of two layouts and what follows", "g (T[N,C,P] x, T[N,P,C] w) => (T[N,P,C] y, T[N,C,P] a, T[N,P,C] z) "
     "{ a = Exp(x) t = Transpose<perm=[0,2,1]>(a) z = Sub(t, w) y = Neg(z) }"),
    ("two outputs of one layout", "g (T[N,C,P] x, T[P,1] b) => (T[N,P,C] y, T[N,P,C] z) "
     "{ t = Transpose<perm=[0,2,1]>(x) y = Add(t, b) z = Mul(t, b) }"),
    ("broadcast along either axis", "g (T[N,C,P] x, T[N,C,1] b, T[N,1,P] d, T[C] e) => (T[N,P,C] y) "
     "{ a = Add(x, b) c = Mul(a, d) t = Transpose<perm=[0,2,1]>(c) y = Add(t, e) }"),
    ("a transposed operand that is broadcast", "g (T[C,P] x, T[N,P,C] w) => (T[N,P,C] y) { t = Transpose(x) y = Add(w, t) }"),
    ("heads apart and turned", "g (T[N,P,12] x, T[12] b) => (T[N,3,4,P] y) <int64[4] s = {0,0,3,4}> "
     "{ a = Add(x, b) r = Reshape(a, s) y = Transpose<perm=[0,2,3,1]>(r) }"),
    ("pictures to tokens", "g (T[N,C,P,3] x, T[C] b) => (T[N,Q,C] y) <int64[3] s = {0,0,-1}> "
     "{ r = Reshape(x, s) t = Transpose<perm=[0,2,1]>(r) y = Add(t, b) }"),
    ("tokens to pictures", "g (T[N,P,C] x, T[C] b, T[N,C,P] w) => (T[N,C,P] y) "
     "{ a = Add(x, b) t = Transpose<perm=[0,2,1]>(a) y = Add(t, w) }"),
    ("pixels shuffled", "g (T[N,8,P,C] x, T[1] b) => (T[N,2,U,V] y) { a = Add(x, b) y = DepthToSpace<blocksize=2>(a) }"),
    ("a part of each row", "g (T[N,C,12] x) => (T[N,8,C] y) <int64[1] b = {3}, int64[1] e = {11}, int64[1] a = {2}> "
     "{ s = Slice(x, b, e, a) t = Transpose<perm=[0,2,1]>(s) y = Neg(t) }"),
    ("parts joined along the rows", "g (T[N,C,5] x, T[N,C,7] z) => (T[N,12,C] y) "
     "{ c = Concat<axis=2>(x, z) t = Transpose<perm=[0,2,1]>(c) y = Neg(t) }"),
    ("parts joined along the columns", "g (T[N,C,12] x, T[N,3,12] z) => (T[N,12,D] y) "
     "{ c = Concat<axis=1>(x, z) t = Transpose<perm=[0,2,1]>(c) y = Neg(t) }"),
    ("matrices that are looked up", "g (T[C,12,20] x, int64[N,1,1] k) => (T[N,20,12] y) <int64[3] s = {1,12,20}> "
     "{ e = Expand(k, s) r = GatherElements<axis=0>(x, e) y = Transpose<perm=[0,2,1]>(r) }"),
    ("short pieces", "g (T[N,C,5] x) => (T[5,C,N] y) { t = Transpose<perm=[2,1,0]>(x) y = Neg(t) }"),
    ("three layouts", "g (T[N,C,P] x, T[P,N,C] z) => (T[C,P,N] y) "
     "{ t = Transpose<perm=[1,2,0]>(x) u = Transpose<perm=[2,0,1]>(z) y = Add(t, u) }"),
]


APART = {"three layouts": 1, "short pieces": 1}
"""Regions of which so many inputs run along neither axis of a tile, or for a few elements only."""


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("text", [text for _, text in REGIONS], ids=[name for name, _ in REGIONS])
def test_regions(text: str, kind: str) -> None:
    made = tiled(typed(text, kind))
    for seed, numbers in enumerate([(1, 1, 1), (2, 33, 5), (3, 8, 64), (2, 70, 12)]):
        sizes = dict(zip("NCP", numbers, strict=True))
        inputs = random_inputs(made, sizes, seed)
        if "k" in inputs:
            most = sizes["P" if "P" in text else "C"]
            inputs["k"] = np.random.default_rng(seed).integers(-most, most, inputs["k"].shape)
        check(made, inputs, orders=("forward", "backward"))


@pytest.mark.parametrize("name", [name for name, _ in REGIONS if name not in APART])
def test_nothing_is_read_far_apart(name: str) -> None:
    assert tiled(typed(dict(REGIONS)[name], "float16")).kernel.scattered == ()


@pytest.mark.parametrize("name", APART)
def test_what_lies_apart_even_so_is_said_to_be_scattered(name: str) -> None:
    made = tiled(typed(dict(REGIONS)[name], "float16"))
    assert len(made.kernel.scattered) == APART[name]


def test_vectors_end_where_a_slice_does() -> None:
    """Six of eight neighbours: vectors of four would run past them, of two do not."""
    made = tiled("g (float16[N,48,8] x) => (float16[N,6,48] y) <int64[1] a = {0}, int64[1] b = {6}, int64[1] d = {2}> "
                 "{ s = Slice(x, a, b, d) t = Transpose <perm = [0, 2, 1]> (s) y = Neg(t) }")
    assert "vectors 2 x" in made.kernel.plan.variants[0].name
    check(made, random_inputs(made, {"N": 3}))


def test_what_is_read_element_by_element_may_lie_anywhere() -> None:
    """A bias that begins between two vectors."""
    made = tiled("g (float16[N,48,P] x, float16[49] b) => (float16[N,P,48] y) <int64[1] a = {1}, int64[1] e = {49}> "
                 "{ s = Slice(b, a, e) t = Transpose <perm = [0, 2, 1]> (x) y = Add(t, s) }")
    guards = [guard for variant in made.kernel.plan.variants for guard in variant.guards]
    assert any(guard.startswith("i0.addr") for guard in guards)
    assert not any(guard.startswith("i1.addr") for guard in guards)


def test_an_output_of_another_layout_is_not_computed_again() -> None:
    """x is read once, along its own layout; the transpose leaves through shared memory."""
    made = tiled(typed(dict(REGIONS)["a value and its transpose"], "float16"))
    assert made.kernel.source.count("(i0 + ") == 1 and "out1.take" in made.kernel.source


@pytest.mark.parametrize("text", [
    "g (float[N,C] x, float[C] b) => (float[N,C] y) { y = Add(x, b) }",
    "g (float[N,C,P] x) => (float[C,N,P] y) { t = Transpose<perm=[1,0,2]>(x) y = Neg(t) }",
    "g (float[N,C] x) => (float[N,C] y) { t = Transpose(x) a = Neg(t) y = Transpose(a) }",
    "g (float[N,1,P] x) => (float[N,P,1] y) { t = Transpose<perm=[0,2,1]>(x) y = Neg(t) }",
])
def test_refused_where_nothing_is_transposed(text: str) -> None:
    made = attempt(parse(text), schedule="tiled")
    assert isinstance(made, Refusal) and made.code == "not-transposing"


def test_many_transposed_inputs() -> None:
    """Tiles shrink until all of them fit; past that the region is refused."""
    def text(count: int) -> str:
        inputs = ", ".join(f"double[40,36] x{place}" for place in range(count))
        return f"g ({inputs}) => (double[36,40] y) {{ s = Sum({', '.join(f'x{p}' for p in range(count))}) y = Transpose(s) }}"

    made = tiled(text(9))
    check(made, random_inputs(made, {}), orders=ORDERS)
    refused = attempt(parse(text(24)), schedule="tiled")
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.message) == ("tile-memory", "24 transposed tensors do not fit shared memory together")
    assert SHARED_BYTES == 49152


def test_tiles_follow_the_planned_sizes() -> None:
    """A short axis makes the tile longer the other way; where both are short a block takes several."""
    def tile(rows: int, columns: int) -> str:
        made = tiled(transposing("float16", (0, 2, 1), ("N", "A", "B")), planned={"N": 4096, "A": columns, "B": rows})
        check(made, random_inputs(made, {"N": 5, "A": min(columns, 72), "B": min(rows, 72)}), orders=ORDERS)
        return made.kernel.plan.variants[0].name

    assert tile(4096, 4096) == "tile 64 x 64, vectors 4 x 4, 32-bit"
    assert tile(3, 1000) == "tile 4 x 1024, vectors 1 x 4, 32-bit"
    assert tile(1000, 3) == "tile 1024 x 4, vectors 4 x 1, 32-bit"
    assert tile(8, 16) == "tile 8 x 16, 32 a block, vectors 4 x 4, 32-bit"


def test_wide_indices() -> None:
    """More elements than 32 bits index: the variant with 64 bits is the one that holds."""
    plan = tiled(typed(BIAS, "float16")).kernel.plan
    situation = Situation([(3, 1 << 16, 1 << 15), (1 << 16,)])
    situation.bind(plan)
    holding = [variant.name for variant in plan.variants if all(situation.evaluate(guard) for guard in variant.guards)]
    assert holding == ["tile 64 x 64, vectors 1 x 1, 64-bit"]
    step = plan.variants[-1].steps[0]
    assert [situation.evaluate(size) for size in step.grid] == [3 << 19, 1, 1] and "i64:s1" in step.arguments


def test_no_barrier_is_missing() -> None:
    for text in (BIAS, dict(REGIONS)["a value and its transpose"]):
        made = tiled(typed(text, "float"))
        inputs = random_inputs(made, {"N": 1, "C": 40, "P": 70})
        faulty = made.kernel.source.replace("__syncthreads();", "")
        assert faulty != made.kernel.source and not failures(made, inputs, orders=ORDERS)
        assert fails(made, inputs, orders=ORDERS, source=faulty)


def test_nvrtc_compiles_it() -> None:
    """Each way into and out of shared memory, and each size of an element."""
    texts = [transposing("bool", (1, 0), (4097, 3)), transposing("int64", (0, 2, 1), ("N", "A", "B")),
             typed(BIAS, "bfloat16"), typed(dict(REGIONS)["a value of two layouts and what follows"], "float16"),
             typed(dict(REGIONS)["matrices that are looked up"], "float")]
    kernels = [tiled(text).kernel for text in texts]
    failures = compile_failures({kernel.source: (text, ()) for text, kernel in zip(texts, kernels, strict=True)})
    assert not failures, "\n".join(failures)


def test_texts_name_nothing_of_the_model() -> None:
    text = typed(BIAS, "float16")
    other = re.sub(r"\b(x|b|y|t|a|N|C|P)\b", lambda match: f"other_{match[0]}", text)
    one, two = tiled(text).kernel, tiled(other).kernel
    assert one.source == two.source and one.plan.variants == two.plan.variants
    assert tiled(text).kernel == one


def test_reference_agrees_with_numpy() -> None:
    """What everything here is compared with, on one case."""
    made = tiled(transposing("int64", (2, 0, 1), (2, 3, 4)))
    x = np.arange(24).reshape(2, 3, 4)
    assert (evaluate(made.model, {"x": x})["y"] == x.transpose(2, 0, 1)).all()
    check(made, {"x": x})
