"""What is read with a product's results and brought by copies: where it is, and what is computed of it, against
float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kernel_harness import Made, check, compile_all, random_inputs
from test_schedules_product import LARGE, product, specialised

from onnxfuse.schedules.products.boxes import Box
from onnxfuse.schedules.source import Source

BROUGHT = {
    "a residual": "g (T[M,K] a, T[K,N] b, T[M,N] c) => (T[M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "with a bias and an activation": "g (T[M,K] a, T[N,K] b, T[N] c, T[M,N] r) => (T[M,N] y) { p = Gemm<transB = 1>(a, b) s = Add(p, c) t = Add(s, r) y = Relu(t) }",
    "two": "g (T[M,K] a, T[K,N] b, T[M,N] c, T[M,N] d) => (T[M,N] y) { p = MatMul(a, b) q = Mul(p, c) y = Add(q, d) }",
    "two of a Gemm": "g (T[M,K] a, T[N,K] b, T[M,N] c, T[M,N] d) => (T[M,N] y) { p = Gemm<transB = 1>(a, b) q = Mul(p, c) y = Add(q, d) }",
    "of a batch": "g (T[3,M,K] a, T[3,K,N] b, T[3,M,N] c) => (T[3,M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "with a scale of rows": "g (T[M,K] a, T[K,N] b, T[M,1] s, T[M,N] c) => (T[M,N] y) { p = MatMul(a, b) q = Mul(p, s) y = Add(q, c) }",
}
OTHERWISE = {
    "three": "g (T[M,K] a, T[K,N] b, T[M,N] c, T[M,N] d, T[M,N] e) => (T[M,N] y) { p = MatMul(a, b) q = Mul(p, c) r = Add(q, d) y = Mul(r, e) }",
    "wide": "g (T[M,K] a, T[K,N] b, float[M,N] c) => (T[M,N] y) { p = MatMul(a, b) q = Cast<to = 1>(p) r = Add(q, c) y = CastLike(r, p) }",
    "wide results": "g (T[M,K] a, T[K,N] b, T[M,N] c) => (float[M,N] y) { p = MatMul(a, b) q = Add(p, c) y = Cast<to = 1>(q) }",
    "two results": "g (T[M,K] a, T[K,N] b, T[M,N] c) => (T[M,N] y, T[M,N] z) { p = MatMul(a, b) y = Add(p, c) z = Relu(p) }",
    "transposed": "g (T[M,K] a, T[K,N] b, T[N,M] c) => (T[M,N] y) { p = MatMul(a, b) t = Transpose(c) y = Add(p, t) }",
    "looked up": "g (T[M,K] a, T[K,N] b, T[9,N] c, int64[M] i) => (T[M,N] y) { t = Gather(c, i) p = MatMul(a, b) y = Add(p, t) }",
    "a gate's": "g (T[M,K] a, T[K,N] b, T[K,N] c, T[M,N] d) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) t = Mul(u, w) y = Add(t, d) }",
}
CONVOLUTION = ("g (T[{images},{high},{wide},64] x, T[N,3,3,64] w, T[N] c, T[{images},{high},{wide},N] r) => "
               "(T[{images},{high},{wide},N] y) {{ t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w) "
               "p = Conv<pads = [1,1,1,1]>(t, v, c) q = Transpose<perm = [0,2,3,1]>(p) s = Add(q, r) y = Relu(s) }}")


def with_columns(text: str, columns: int) -> str:
    """Of so many, as weights have them."""
    return text.replace("N]", f"{columns}]").replace("[N,", f"[{columns},")


def ways(text: str, kind: str, planned: Mapping[str, int]) -> list[Made]:
    """Every block with a warp that copies, each of whose sums is one block's."""
    found = [way for way in specialised(product(text, kind, planned), planned) if "split" not in settings(way)]
    assert len(found) > 2
    return found


def settings(way: Made) -> dict[str, int]:
    return {} if way.kernel.choice is None else dict(way.kernel.choice.settings)


def brings(way: Made) -> bool:
    """Whether copies bring what is read with the results."""
    assert isinstance(way.kernel.code, Source)
    return "of::wait_for(brought" in way.kernel.code.functions[0].body


@pytest.fixture(autouse=True)
def every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 12)


@pytest.mark.parametrize("case", [*BROUGHT, *OTHERWISE])
def test_which(case: str) -> None:
    found = ways((BROUGHT | OTHERWISE)[case], "float16", LARGE)
    assert {brings(way) for way in found} == {case in BROUGHT}


@pytest.mark.parametrize("sizes", [
    {"M": 197, "K": 72, "N": 136}, {"M": 65, "K": 8, "N": 8}, {"M": 321, "K": 456, "N": 264}],
    ids=["parts", "one piece", "long"])
@pytest.mark.parametrize("case", BROUGHT)
def test_results(case: str, sizes: Mapping[str, int]) -> None:
    """Of whole tiles and parts of them, several a block, in any order of the threads."""
    found = ways(BROUGHT[case], "bfloat16" if case == "two" else "float16", LARGE)
    compile_all(found)
    for number, way in enumerate(found):
        check(way, random_inputs(way, sizes), length=sizes["K"], limit=1, misalign=False, multiprocessors=1,
              orders=[("backward", 3, "forward")[number % 3]])


@pytest.mark.parametrize("case", ["with a bias and an activation", "two of a Gemm"])
@pytest.mark.parametrize("columns", [24, 80, 144, 336])
def test_columns_of_the_last_piece(case: str, columns: int) -> None:
    """Where tiles are as wide as results or a part of them, but not as whole pieces."""
    planned = {"M": 25088, "K": 72}
    found = [way for way in ways(with_columns(BROUGHT[case], columns), "float16", planned)
             if settings(way).get("columns", 0) % 64]
    assert found and all(map(brings, found))
    compile_all(found)
    for way in found:
        check(way, random_inputs(way, planned | {"M": 300}), length=72, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize("start", [136, 8])
def test_a_part_of_a_tensor(start: int) -> None:
    """Which begins elsewhere than that."""
    text = (f"g (T[M,K] a, T[K,136] b, T[M,272] c) => (T[M,136] y) <int64[1] s = {{{start}}}, int64[1] e = {{{start + 136}}}, "
            "int64[1] x = {1}> { r = Slice(c, s, e, x) p = MatMul(a, b) y = Add(p, r) }")
    found = ways(text, "float16", {"M": 25088, "K": 72})
    assert all(map(brings, found))
    compile_all(found)
    for way in found:
        check(way, random_inputs(way, {"M": 197, "K": 72}), length=72, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize(("images", "high", "wide"), [(2, 16, 8), (1, 9, 64), (3, 32, 32), (9, 8, 8)])
def test_boxes(images: int, high: int, wide: int) -> None:
    """Of a convolution's windows, 64 of which are a box too."""
    text = with_columns(CONVOLUTION.format(images=images, high=high, wide=wide), 72)
    found = [way for way in ways(text, "float16", {}) if brings(way)]
    assert len(found) > 1
    compile_all(found)
    for way in found:
        check(way, random_inputs(way, {}), length=576, limit=1, misalign=False, multiprocessors=1)


def test_boxes_of_which_64_windows_are_none() -> None:
    text = with_columns(CONVOLUTION.format(images=2, high=14, wide=14), 64)
    found = [way for way in ways(text, "float16", {}) if "_shared" not in way.kernel.plan.variants[0].steps[0].kernel]
    assert found and not any(map(brings, found))


@pytest.mark.parametrize(("sides", "rows", "wanted"), [
    ((8, 16, 1), 64, (8, 8, 1)), ((64, 2, 1), 64, (64, 1, 1)), ((128, 1, 1), 64, (64, 1, 1)), ((8, 8, 2), 64, (8, 8, 1)),
    ((4, 4, 8), 64, (4, 4, 4)), ((14, 9, 1), 64, None), ((32, 3, 2), 64, None), ((16, 6, 2), 64, None)])
def test_parts_of_a_box(sides: tuple[int, ...], rows: int, wanted: tuple[int, ...] | None) -> None:
    found = Box(sides).part(rows)
    assert found == (None if wanted is None else Box(wanted))


@pytest.mark.parametrize(("rows", "turns"), [(2048, 1), (25088, 2)])
def test_both_groups_have_the_only_tile(rows: int, turns: int) -> None:
    """Where no multiprocessor has two tiles, by turns one group would have none."""
    kernel = product(with_columns(BROUGHT["with a bias and an activation"], 1024), planned={"M": rows, "K": 512}).kernel
    assert kernel.plan.variants[0].name == f"tiles of 128 x 128, 6 stages, 4 warps multiply together, one copies, tiles at a time {turns}"


@pytest.mark.parametrize(("case", "tile"), [("a residual", "128 x 64, 8"), ("bare", "64 x 128, 8")])
def test_one_group_alone_does_not_wait_for_rows(case: str, tile: str) -> None:
    """Where it has its multiprocessor's only tile."""
    text = (BROUGHT | {"bare": "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { y = MatMul(a, b) }"})[case]
    kernel = product(text, planned={"M": 1024, "K": 768, "N": 768}).kernel
    assert kernel.plan.variants[0].name.startswith(f"tiles of {tile} stages")
