"""Products of which the blocks of a cluster sum a share each: results, any order of blocks, and where there are none."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, arguments, check, make, only, random_inputs, told, variants_that_hold

from onnxfuse.schedules.products.shape import SpecialisedShape

FEW = {"M": 128, "K": 4096, "N": 128}

FORMS: Mapping[str, str] = {
    "bias and activation": "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }",
    "the right one transposed, a residual": "g (T[M,K] a, T[N,K] b, T[M,N] r) => (T[M,N] y) { p = Gemm<transB = 1>(a, b) y = Add(p, r) }",
    "a gate": "g (T[M,K] a, T[K,N] b, T[K,N] c) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }",
    "batches, results that lie transposed": "g (T[3,M,K] a, T[3,K,N] b) => (T[3,N,M] y) { p = MatMul(a, b) y = Transpose<perm = [0,2,1]>(p) }",
}

CONVOLUTION = ("g (T[2,9,11,64] t, T[72,3,3,64] v, T[72] b) => (T[2,9,11,72] y) { x = Transpose<perm = [0,3,1,2]>(t) "
               "w = Transpose<perm = [0,3,1,2]>(v) c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }")

pytestmark = pytest.mark.usefixtures("short_shares")


@pytest.fixture
def short_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage for each block is enough, and every tile is worth it."""
    monkeypatch.setattr("onnxfuse.schedules.products.blocks.LEAST_STEPS", 1)


def ways(text: str, planned: Mapping[str, int], kind: str = "float16") -> list[Made]:
    """The kernel in each way that shares what is summed over."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    found = [told(made, choice, planned) for choice in made.kernel.choices if "split" in dict(choice.settings)]
    assert found
    return found


def alone(made: Made) -> Made:
    """The variant that does alone, whatever its sizes."""
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Parts of tiles and of vectors, and shares that differ by a stage."""
    kinds = ("float16", "bfloat16") if form == "bias and activation" else ("float16",)
    for kind in kinds:
        for made in ways(FORMS[form], FEW, kind):
            split = dict(made.kernel.choice.settings)["split"]  # type: ignore[union-attr]
            for sizes in ({"M": 128, "K": 64 * split, "N": 128}, {"M": 56, "K": 64 * split + 200, "N": 136}):
                check(alone(made), random_inputs(made, sizes), length=sizes["K"], misalign=False)


def test_blocks_in_any_order() -> None:
    """Nobody reads sums before they are laid out, or ends before they were read."""
    for made in ways(FORMS["bias and activation"], FEW):
        sizes = {"M": 140, "K": 1000, "N": 200}  # of each tile a whole one and a part, both ways
        for order in ("backward", 3, 4):
            check(alone(made), random_inputs(made, sizes), length=1000, misalign=False, orders=[order])


def test_convolutions() -> None:
    for made in ways(CONVOLUTION, {}):
        check(alone(made), random_inputs(made, {}), length=600, misalign=False)


def test_what_is_infinite_shows_in_its_row_alone() -> None:
    for made in ways(FORMS["bias and activation"], FEW):
        inputs = random_inputs(made, {"M": 40, "K": 600, "N": 72})
        inputs["a"][7, 599], inputs["a"][33, 0] = np.inf, np.nan
        check(alone(made), inputs, length=600, misalign=False)


def test_every_block_has_something_to_sum() -> None:
    made = ways(FORMS["bias and activation"], FEW)[0]
    split = dict(made.kernel.choice.settings)["split"]  # type: ignore[union-attr]
    for depth, holds in ((64 * (split - 1), False), (64 * (split - 1) + 8, True)):
        inputs = arguments(made, random_inputs(made, {"M": 16, "K": depth, "N": 16}))
        names = variants_that_hold(made.kernel.plan, inputs)
        assert any("share what is summed over" in name for name in names) == holds


@pytest.mark.parametrize("sizes", [{"M": 8192, "K": 4096, "N": 4096}, {"M": 128, "K": 64, "N": 128}])
def test_where_there_are_tiles_enough_or_little_to_sum_nobody_shares(sizes: Mapping[str, int]) -> None:
    made = make(FORMS["bias and activation"].replace("T[", "float16["), planned=sizes)
    assert not any("split" in dict(choice.settings) for choice in made.kernel.choices)


def test_thirds_of_a_tile_are_not_shared() -> None:
    text = ("g (T[M,K] a, T[N,K] b, T[N,K] c, T[N,K] d) => (T[M,N] q, T[M,N] k, T[M,N] v) "
            "{ q = Gemm<transB = 1>(a, b) k = Gemm<transB = 1>(a, c) v = Gemm<transB = 1>(a, d) }")
    made = make(text.replace("T[", "float16["), planned=FEW)
    assert not any("split" in dict(choice.settings) for choice in made.kernel.choices)


def test_a_launch_is_of_whole_clusters() -> None:
    for made in ways(FORMS["bias and activation"], FEW):
        (step,) = made.kernel.plan.variants[0].steps
        split = str(dict(made.kernel.choice.settings)["split"])  # type: ignore[union-attr]
        assert step.cluster == (split, "1", "1") and step.grid[0].endswith(f"{split} *")


def test_all_sums_of_a_tile_are_in_shared_memory() -> None:
    """What other blocks read, beside the stages."""
    alone, split = SpecialisedShape(128, 128, 4), SpecialisedShape(128, 128, 4, split=2)
    assert split.shared - alone.shared == 4 * (128 * 128 - 8 * 16 * 64)
