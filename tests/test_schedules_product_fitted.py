"""Tiles that are as wide as results are, and two blocks a multiprocessor: which widths are taken, and what they compute,
against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import test_schedules_tf32
from kernel_harness import arguments, check, compile_all, random_inputs
from test_schedules_product import product, specialised

from onnxfuse.schedules.products.blocks import SPECIALISED

BEHIND = {
    "SiLU": ("", "s = Add(p, c) t = Sigmoid(s) y = Mul(s, t)"),
    "a residual": (", T[M,N] r", "s = Add(p, c) t = Add(s, r) y = Relu(t)"),
    "a residual of another type": (", float[M,N] r", "q = Cast<to = 1>(p) s = Add(q, r) t = CastLike(s, p) y = Add(t, c)"),
}

CONVOLUTION = ("g (T[2,9,10,K] x, T[N,3,3,K] w, T[N] c) => (T[2,9,10,N] y) { t = Transpose<perm = [0,3,1,2]>(x) "
               "v = Transpose<perm = [0,3,1,2]>(w) p = Conv<pads = [1,1,1,1]>(t, v, c) q = Relu(p) "
               "y = Transpose<perm = [0,2,3,1]>(q) }")


def text(behind: str) -> str:
    more, computed = BEHIND[behind]
    return f"g (T[M,K] a, T[N,K] b, T[N] c{more}) => (T[M,N] y) {{ p = Gemm<transB = 1>(a, b) {computed} }}"


@pytest.mark.parametrize(("columns", "wanted"), [
    (16, {(128, 16, 2), (256, 16, 1), (128, 16, 1), (64, 16, 2)}),
    (24, {(128, 32, 2), (256, 32, 1), (128, 32, 1), (64, 32, 2)}),
    (80, {(128, 80, 2), (256, 80, 1), (128, 80, 1), (64, 80, 2)}),
    (144, {(128, 144, 2), (256, 80, 1), (128, 144, 1), (64, 80, 2)}),
    (336, {(128, 112, 2), (256, 112, 1), (128, 176, 1), (64, 112, 2)}),
    (480, {(128, 160, 2), (128, 240, 1)}),
    (1000, set()),  # seven times 144 would be a sixty-fourth less
    (64, set()), (128, set()), (192, set()), (256, set()), (4096, set())])
def test_columns_are_those_of_the_results_where_others_would_be_empty(
        columns: int, wanted: set[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 9)
    kernel = product(text("SiLU"), planned={"M": 25088, "K": 72, "N": columns}).kernel
    named = re.match(r"tiles of (\d+) x (\d+), .* at a time (\d)", kernel.plan.variants[0].name)
    assert named is not None
    rows, width, turns = map(int, named.groups())
    found = {(rows, width, turns)} | {(each["rows"], each["columns"], each["turns"]) for each in kernel.choices
                                      if "turns" in dict(each.settings) and "blocks" not in dict(each.settings)}
    fitted = found - SPECIALISED.keys()
    assert fitted <= wanted and bool(fitted) == bool(wanted)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [16, 24, 40, 96, 144, 240])
@pytest.mark.parametrize("behind", BEHIND)
def test_results(behind: str, columns: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles and parts of them, several of them a block."""
    monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 9)
    planned = {"M": 25088, "K": 72, "N": columns}
    found = [way for way in specialised(product(text(behind), kind, planned), planned)
             if way.kernel.choice is None or way.kernel.choice["columns"] not in (128, 192, 256)]
    assert len(found) > 2
    compile_all(found)
    for number, way in enumerate(found):
        sizes = {"M": (197, 300)[number % 2], "K": 72, "N": columns}
        inputs = random_inputs(way, sizes)
        assert "one copies" in way.kernel.plan.variants[0].name
        check(way, inputs, length=72, limit=1, misalign=False, multiprocessors=1, orders=[("backward", 3)[number % 2]])


@pytest.mark.parametrize("columns", [24, 96])
def test_convolutions(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose windows are copied in boxes."""
    monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 9)
    sizes: Mapping[str, int] = {}
    found = specialised(product(CONVOLUTION.replace("K]", "64]").replace("N]", f"{columns}]").replace("[N,", f"[{columns},")), sizes)
    fitted = [way for way in found if way.kernel.choice is not None and way.kernel.choice["columns"] in (32, 96)]
    assert len(fitted) > 1
    compile_all(fitted)
    for way in fitted:
        check(way, random_inputs(way, sizes), length=576, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize("columns", [24, 96])
def test_float32(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to TF32 as tiles are copied."""
    monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 9)
    sizes: Mapping[str, int] = {"M": 197, "K": 72, "N": columns}
    made = test_schedules_tf32.product(text("SiLU"), planned={**sizes, "M": 25088})
    fitted = [way for way in specialised(made, {**sizes, "M": 25088})
              if way.kernel.choice is not None and way.kernel.choice["columns"] in (32, 96)]
    assert len(fitted) > 1
    for way in fitted:
        check(way, test_schedules_tf32.exact_inputs(way, sizes), length=72, limit=1, misalign=False, multiprocessors=1)


def test_two_blocks_a_multiprocessor() -> None:
    """Where registers and shared memory are for two; with as many blocks launched."""
    planned = {"M": 25088, "K": 128, "N": 512}
    made = product(text("a residual"), planned=planned)
    (way,) = (each for each in specialised(made, planned) if each.kernel.choice and "blocks" in dict(each.kernel.choice.settings))
    assert way.kernel.plan.variants[0].name == "tiles of 128 x 64, 3 stages, 4 warps multiply together, one copies, tiles at a time 1, 2 blocks a multiprocessor"
    step = way.kernel.plan.variants[0].launches[0]
    assert step.grid[0].endswith("sms 2 * min") and 2 * (int(step.shared) + 1024) <= 228 * 1024
    for sizes in ({"M": 70, "K": 128, "N": 512}, {"M": 513, "K": 40, "N": 72}):
        inputs = random_inputs(way, sizes)
        assert arguments(way, inputs)
        check(way, inputs, length=sizes["K"], limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize(("depth", "stay"), [(64, False), (96, True)])
def test_two_blocks_by_turns(depth: int, stay: bool) -> None:
    """Where a tile has all columns; of a last stage that is zeros in part the right operand stays."""
    planned = {"M": 25088, "K": depth, "N": 64}
    made = product(text("a residual").replace("K]", f"{depth}]").replace("[K", f"[{depth}").replace("N", "64"), planned=planned)
    ways = [each for each in specialised(made, planned)
            if each.kernel.choice and "blocks" in dict(each.kernel.choice.settings) and each.kernel.choice["turns"] == 2]
    assert {each.kernel.choice["rows"] for each in ways if each.kernel.choice} == {64, 128}
    assert all(("_stays" in each.kernel.entry) == stay for each in ways)
    for way in ways:
        for rows in (70, 513):
            check(way, random_inputs(way, {"M": rows}), length=depth, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize(("rows", "depth", "columns", "first"), [
    (102400, 96, 64, True), (100352, 64, 64, True), (67585, 128, 40, True), (67456, 96, 64, False), (102400, 136, 64, False), (102400, 96, 72, False)])
def test_two_blocks_by_turns_are_the_first_of_many_short_tiles(rows: int, depth: int, columns: int, first: bool) -> None:
    """Four tiles of 128 rows for each multiprocessor, of two stages, and all columns in 64."""
    planned = {"M": rows, "K": depth, "N": columns}
    entry = product(text("SiLU").replace("K]", f"{depth}]").replace("[K", f"[{depth}").replace("N", str(columns)), planned=planned).kernel.entry
    assert ("specialised2_beside2" in entry) == first


@pytest.mark.parametrize("across", [False, True])
def test_two_blocks_of_a_gate(across: bool) -> None:
    """Where each product's half of the columns is copied as it lies; not where whole panels are."""
    weights = "T[K,N]" if across else "T[N,K]"
    one, other = ("MatMul(a, b)", "MatMul(a, c)") if across else ("Gemm<transB = 1>(a, b)", "Gemm<transB = 1>(a, c)")
    sizes = {"M": 200, "K": 136, "N": 264}
    made = product(f"g (T[M,K] a, {weights} b, {weights} c) => (T[M,N] y) {{ u = {one} w = {other} s = Sigmoid(u) y = Mul(s, w) }}",
                   planned={**sizes, "M": 4096})
    found = [way for way in specialised(made, {**sizes, "M": 4096}) if "blocks" in dict(way.kernel.choice.settings if way.kernel.choice else ())]
    assert len(found) == (not across)
    for way in found:
        check(way, random_inputs(way, sizes), length=136, limit=1, misalign=False, multiprocessors=1)
