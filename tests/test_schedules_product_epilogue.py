"""What becomes of a product's sums: computed where they are or as rows, in every way of every block, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import test_schedules_tf32
from emulator import Emulator
from kernel_harness import Made, check, compile_all, random_inputs
from test_schedules_product import APART, LARGE, PLAIN, product, told

from onnxfuse.schedules.headers import linked, used_in
from onnxfuse.schedules.source import Source

WHERE_SUMS_ARE = {
    "bare": PLAIN,
    "a bias": "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) q = Add(p, c) y = Relu(q) }",
    "a scale of rows": "g (T[M,K] a, T[K,N] b, T[M,1] c) => (T[M,N] y) { p = MatMul(a, b) y = Mul(p, c) }",
    "two types": "g (T[M,K] a, T[K,N] b, T[N] c) => (bool[M,N] z, T[M,N] y) { y = MatMul(a, b) z = Greater(y, c) }",
    "a gate": "g (T[M,K] a, T[K,N] b, T[K,N] c) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) y = Mul(s, w) }",
    "three": APART["three"],
}
AS_ROWS = {
    "a residual": "g (T[M,K] a, T[K,N] b, T[M,N] c) => (T[M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "a gate and a residual": "g (T[M,K] a, T[K,N] b, T[K,N] c, T[M,N] d) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) t = Mul(u, w) y = Add(t, d) }",
    "a sine": "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { p = MatMul(a, b) y = Sin(p) }",
    "float64": "g (T[M,K] a, T[K,N] b, double[N] c) => (T[M,N] y) { p = MatMul(a, b) q = Cast<to = 11>(p) r = Add(q, c) y = CastLike(r, p) }",
    "what is looked up": "g (T[M,K] a, T[K,N] b, T[9,N] c, int64[M] i) => (T[M,N] y) { t = Gather(c, i) p = MatMul(a, b) y = Add(p, t) }",
    "wide results": "g (T[M,K] a, T[K,N] b) => (float[M,N] y) { p = MatMul(a, b) y = Cast<to = 1>(p) }",
}


def ways(case: str, kind: str) -> list[Made]:
    """Every block of tiles of a product, but for those of few rows."""
    made = product((WHERE_SUMS_ARE | AS_ROWS)[case], kind, LARGE)
    found = [told(made, choice, LARGE) for choice in made.kernel.choices
             if not {"library", "split"} & dict(choice.settings).keys() and choice["rows"] >= 64]
    assert len(found) > 3
    return found


def body(made: Made) -> str:
    """Of the block that was asked for."""
    assert isinstance(made.kernel.code, Source)
    return made.kernel.code.functions[0].body


@pytest.mark.parametrize("case", WHERE_SUMS_ARE)
def test_no_sum_is_laid_out(case: str) -> None:
    """But where four warps are not one block of rows, so that products side by side are not a thread's."""
    for way in ways(case, "float16"):
        apart = case in ("a gate", "three") and dict(way.kernel.choice.settings).get("group") == 1  # type: ignore[union-attr]
        assert ("packed_at" in body(way)) == (not apart) and ("laid_at" in body(way)) <= apart


@pytest.mark.parametrize("case", AS_ROWS)
def test_what_is_read_in_whole_lines(case: str) -> None:
    assert not any("packed_at" in body(way) for way in ways(case, "float16"))


@pytest.mark.parametrize("sizes", [{"M": 197, "K": 72, "N": 136}, {"M": 65, "K": 8, "N": 8}], ids=["parts", "one piece"])
@pytest.mark.parametrize("case", [*WHERE_SUMS_ARE, "a residual", "a gate and a residual"])
def test_results(case: str, sizes: Mapping[str, int]) -> None:
    """Of whole tiles and parts of them, in any order of the threads."""
    found = ways(case, "bfloat16" if "two" in case else "float16")
    compile_all(found)
    for number, way in enumerate(found):
        check(way, random_inputs(way, sizes), length=sizes["K"], limit=1, misalign=False, multiprocessors=1,
              orders=[("backward", 3)[number % 2]])


@pytest.mark.parametrize("sizes", [{"M": 70, "K": 33, "N": 36}, {"M": 70, "K": 36, "N": 35}])
def test_results_of_four_bytes(sizes: Mapping[str, int]) -> None:
    made = test_schedules_tf32.product(WHERE_SUMS_ARE["a bias"])
    assert "packed_at" in body(made)
    check(made, test_schedules_tf32.exact_inputs(made, sizes), length=sizes["K"])


BANKS = """
template <int wide, int size> __device__ void of_each(int* words) {
  const int lane = threadIdx.x, width = 16 / size < wide ? 16 / size : wide, row = lane * width / wide;
  for (int each = 0; each < 8; ++each) {
    words[each * 32 + lane] = of::packed_at<wide, size>(lane / 4, each * 8 % wide + lane % 4 * 2) * size / 4;
    words[(8 + each) * 32 + lane] = of::packed_at<wide, size>(row % 16, lane * width % wide) * size / 4;
  }
}
extern "C" __global__ void banks(int* y) { of_each<WIDE, SIZE>(y); }
"""


@pytest.mark.parametrize(("wide", "size"), [(64, 2), (32, 2), (16, 2), (8, 2), (32, 4), (16, 4), (64, 1), (32, 1)])
def test_pairs_and_vectors_lie_in_different_banks(wide: int, size: int) -> None:
    """Words of pairs that a warp stores at once, and of vectors that eight lanes load at once."""
    words, text = np.zeros((16, 32), np.int32), BANKS.replace("WIDE", str(wide)).replace("SIZE", str(size))
    Emulator(linked(("onnxfuse", "mma"), used_in(text)) + text).launch("banks", 1, 32, [words])
    for pairs in words[:8].reshape(-1, 32 if size < 4 else 16):
        met = set(pairs.tolist())
        assert len({word % 32 for word in met}) == len(met)
    for vectors in words[8:].reshape(-1, 8):
        assert sorted(vectors // 4 % 8) == sorted(set(vectors // 4 % 8))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
def test_numbers_that_are_multiplied_by_their_sigmoids(kind: str) -> None:
    """Two of float16 by one reciprocal: none spoils the other one's, whatever it is."""
    text = "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) t = Sigmoid(s) y = Mul(s, t) }"
    values = [0.0, -0.0, 1.5, -3.25, 11.0, -9.5, -17.0, -41.0, -43.0, -90.0, -200.0, 88.0, 6e4, -6e4, np.inf, -np.inf, np.nan]
    pairs = np.array([(one, other) for one in values for other in values]).reshape(-1)
    columns = -(-len(pairs) // 8) * 8
    sizes = {"M": 65, "K": 8, "N": columns}
    found = [way for way in [product(text, kind, LARGE)] for way in (
        way, *(told(way, choice, LARGE) for choice in way.kernel.choices[:2] if "library" not in dict(choice.settings)))]
    assert (kind == "float16") == all("pack_silu" in way.kernel.source for way in found)
    for way in found:
        inputs = random_inputs(way, sizes)
        named = dict(zip([value.name for value in way.model.graph.input], inputs.values(), strict=True))
        named["a"][:] = 0
        named["c"][:len(pairs)] = pairs.astype(named["c"].dtype)
        check(way, inputs, length=8, limit=1, misalign=False)
