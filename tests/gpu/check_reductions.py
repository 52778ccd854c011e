#!/usr/bin/env python3
"""Kernels with reductions on a GPU: right, and at which share of the rate of a copy.

    python tests/gpu/check_reductions.py [--only TEXT ...] [--least 0.7] [--set split.BLOCKS=4 ...]

Whole tensors from 1 to 256 MB, few long rows, rows that shared memory keeps, running totals, reductions over channels
and over the batch, norms of images, norms and softmax between tensors that lie along the rows and across, as around a
transpose.  Compared with CuPy in float64: float32 to 1e-5 and float16 to 2e-3 of the largest magnitude, largest and
smallest elements exactly.  Every way a plan could run is checked, and twice, for the same bits; the first is timed:
under a CUDA graph, over as many sets of tensors as the second-level cache cannot hold.  A copy that moves as many bytes
is timed in the same way.  Exits with 1 where a result is wrong, or a large case (from 16 MB on) reaches less than
``--least``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cupy as cp
import launching
from launching import Compute, Launcher

TYPES = {"float16": 2, "float": 4}


@dataclass(frozen=True)
class Case:
    """A model of one region: its graph, sizes of its symbols, what it computes from float64 arrays, and whether that
    is one of the elements."""

    name: str
    text: str
    sizes: dict[str, int]
    compute: Compute
    exact: bool = False


def softmax(x: cp.ndarray, axis: int) -> cp.ndarray:
    powers = cp.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def group_norm(x: cp.ndarray, scale: cp.ndarray, bias: cp.ndarray) -> tuple[cp.ndarray]:
    groups = x.reshape(len(x), 32, -1)
    normal = (groups - groups.mean(axis=2, keepdims=True)) / cp.sqrt(groups.var(axis=2, keepdims=True) + 1e-5)
    y = normal.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]
    return (y / (1 + cp.exp(-y)),)


def norm(x: cp.ndarray, scale: cp.ndarray, bias: cp.ndarray, axis: int) -> cp.ndarray:
    normal = (x - x.mean(axis=axis, keepdims=True)) / cp.sqrt(x.var(axis=axis, keepdims=True) + 1e-5)
    return normal * scale + bias


def cases() -> list[Case]:
    """What is checked, by type."""
    found = []
    for kind, size in TYPES.items():
        def case(name: str, text: str, sizes: dict[str, int], compute: Compute, exact: bool = False,
                 kind: str = kind) -> None:
            found.append(Case(f"{kind} {name}", text.replace("T[", f"{kind}[").replace("(T ", f"({kind} "), sizes,
                              compute, exact))

        for megabytes in (1, 3, 4, 16, 64, 256):
            length = {"L": (megabytes << 20) // size}
            case(f"largest of {megabytes} MB", "g (T[L] x) => (T y) { a = Abs(x) y = ReduceMax<keepdims=0>(a) }",
                 length, lambda x: (cp.abs(x).max(),), exact=True)
            case(f"mean and variance of {megabytes} MB",
                 "g (T[L] x) => (T[1] m, T[1] v) { m = ReduceMean(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q) }",
                 length, lambda x: (x.mean(keepdims=True), x.var(keepdims=True)))
        case("overflow guard of an encoder",
             "g (T[B,S,768] x, T[B,S,768] r) => (T[B,S,768] y, bool t) { y = Add(x, r) c = Cast<to=1>(y) i = IsInf(c) "
             "k = Cast<to=7>(i) m = ReduceMax<keepdims=0>(k) t = Cast<to=9>(m) }", {"B": 8, "S": 256},
             lambda x, r: (x + r, cp.isinf(x + r).any()))
        for rows in (1, 4, 16, 64):
            sizes = {"R": rows, "L": 1_000_000}
            case(f"softmax of {rows} rows", "g (T[R,L] x) => (T[R,L] y) { y = Softmax(x) }", sizes,
                 lambda x: (softmax(x, 1),))
            case(f"norm of {rows} rows",
                 "g (T[R,L] x, T[L] w, T[L] b) => (T[R,L] y) { y = LayerNormalization(x, w, b) }", sizes,
                 lambda x, w, b: (norm(x, w, b, 1),))
            case(f"means of {rows} rows",
                 "g (T[R,L] x) => (T[R,1] y) <int64[1] a = {1}> { e = Abs(x) y = ReduceMean(e, a) }", sizes,
                 lambda x: (cp.abs(x).mean(axis=1, keepdims=True),))
        for length in (50_257, 100_352):
            case(f"softmax of 1024 rows of {length}", f"g (T[R,{length}] x) => (T[R,{length}] y) {{ y = Softmax(x) }}",
                 {"R": 1024}, lambda x: (softmax(x, 1),))
        totals(case)
        image = {"N": 32, "H": 56, "W": 56}
        case("softmax over 64 channels", "g (T[N,64,H,W] x) => (T[N,64,H,W] y) { y = Softmax<axis=1>(x) }", image,
             lambda x: (softmax(x, 1),))
        case("softmax over 1000 channels", "g (T[N,1000,H,W] x) => (T[N,1000,H,W] y) { y = Softmax<axis=1>(x) }",
             {"N": 8, "H": 28, "W": 28}, lambda x: (softmax(x, 1),))
        for channels in (64, 512):
            case(f"mean over {channels} channels",
                 f"g (T[N,{channels},H,W] x) => (T[N,1,H,W] y) <int64[1] a = {{1}}> {{ y = ReduceMean(x, a) }}", image,
                 lambda x: (x.mean(axis=1, keepdims=True),))
        case("mean over pixels", "g (T[N,64,H,W] x) => (T[N,64,1,1] y) <int64[2] a = {2,3}> { y = ReduceMean(x, a) }",
             image, lambda x: (x.mean(axis=(2, 3), keepdims=True),))
        case("statistics of 64 channels",
             "g (T[N,64,H,W] x) => (T[1,64,1,1] m, T[1,64,1,1] v) <int64[3] a = {0,2,3}> "
             "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) }", image,
             lambda x: (x.mean(axis=(0, 2, 3), keepdims=True), x.var(axis=(0, 2, 3), keepdims=True)))
        case("norm over 96 channels",
             "g (T[N,96,H,W] x, T[96,1,1] w, T[96,1,1] b, T e) => (T[N,96,H,W] y) <int64[1] a = {1}> "
             "{ u = ReduceMean(x, a) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, a) t = Add(v, e) r = Sqrt(t) "
             "n = Div(d, r) s = Mul(w, n) y = Add(s, b) }".replace("T e", f"{kind} e"), image,
             lambda x, w, b, e: ((x - x.mean(axis=1, keepdims=True))
                                 / cp.sqrt(x.var(axis=1, keepdims=True) + e) * w + b,))
        for rows, width in ((4096, 768), (100_000, 64), (64, 100_352)):
            case(f"sum over a batch of {rows} by {width}",
                 f"g (T[N,{width}] x, T[{width}] w) => (T[{width}] y) <int64[1] a = {{0}}> "
                 "{ p = Mul(x, w) y = ReduceSum<keepdims=0>(p, a) }", {"N": rows},
                 lambda x, w: ((x * w).sum(axis=0),))
        case("softmax of 64 columns of 100,000", "g (T[L,C] x) => (T[L,C] y) { y = Softmax<axis=0>(x) }",
             {"L": 100_000, "C": 64}, lambda x: (softmax(x, 0),))
        case("group norm and SiLU of [2, 320, 64, 64]",
             "g (T[N,320,H,W] x, T[320] w, T[320] b) => (T[N,320,H,W] y) "
             "{ n = GroupNormalization<num_groups=32>(x, w, b) s = Sigmoid(n) y = Mul(n, s) }",
             {"N": 2, "H": 64, "W": 64}, group_norm)
        for channels, pixels in ((96, 56), (192, 28), (384, 14), (768, 7), (97, 31)):
            turns(case, channels, {"N": 32, "H": pixels, "W": pixels})
    return found


def totals(case: Callable[..., None]) -> None:
    """Running totals, of rows that lie in one piece and side by side, few long ones among them; ``case`` takes what a
    case is made of."""
    for rows, length in ((4096, 1000), (64, 50_257), (1, 1_000_000)):
        case(f"totals of {rows} rows of {length}",
             f"g (T[R,{length}] x) => (T[R,{length}] y) <int64 a = {{1}}> {{ s = Abs(x) m = Softmax(s) "
             "c = CumSum<reverse=1>(m, a) y = Tanh(c) }", {"R": rows},
             lambda x: (cp.tanh(cp.cumsum(softmax(cp.abs(x), 1)[:, ::-1], 1)[:, ::-1]),))
    for batch, length in ((8, 128), (64, 1000), (2, 8000)):
        case(f"totals over time of [{batch}, {length}, 512]",
             f"g (T[N,{length},512] x) => (T[N,{length},512] y) <int64 a = {{1}}> {{ s = Tanh(x) c = CumSum(s, a) "
             "y = Sigmoid(c) }", {"N": batch}, lambda x: (1 / (1 + cp.exp(-cp.cumsum(cp.tanh(x), 1))),))


def turns(case: Callable[..., None], channels: int, image: dict[str, int]) -> None:
    """Cases between channels first and channels last, as in ConvNeXt; ``case`` takes what a case is made of."""
    size = f"of [32, {channels}, {image['H']}, {image['W']}]"
    first, last, known = (text.format(C=channels, **image) for text in ("N,{C},{H},{W}", "N,{H},{W},{C}", "{C}"))
    read = f"T[{first}] x, T[{known}] w, T[{known}] b"

    def moved(x: cp.ndarray) -> cp.ndarray:
        return x.transpose(0, 2, 3, 1)

    def back(x: cp.ndarray) -> cp.ndarray:
        return x.transpose(0, 3, 1, 2)

    case(f"norm to channels last {size}",
         f"g ({read}) => (T[{last}] y) {{ t = Transpose<perm=[0,2,3,1]>(x) y = LayerNormalization(t, w, b) }}", image,
         lambda x, w, b: (norm(moved(x), w, b, -1),))
    case(f"norm to channels first {size}",
         f"g (T[{last}] x, T[{known}] w, T[{known}] b) => (T[{first}] y) "
         "{ t = LayerNormalization(x, w, b) y = Transpose<perm=[0,3,1,2]>(t) }", image,
         lambda x, w, b: (back(norm(x, w, b, -1)),))
    case(f"norm there and back {size}",
         f"g ({read}) => (T[{first}] y) {{ t = Transpose<perm=[0,2,3,1]>(x) n = LayerNormalization(t, w, b) "
         "y = Transpose<perm=[0,3,1,2]>(n) }", image, lambda x, w, b: (back(norm(moved(x), w, b, -1)),))
    case(f"residual, norm, to channels last {size}",
         f"g ({read}, T[{last}] r) => (T[{first}] a, T[{last}] y) {{ t = Transpose<perm=[0,3,1,2]>(r) a = Add(x, t) "
         "u = Transpose<perm=[0,2,3,1]>(a) y = LayerNormalization(u, w, b) }", image,
         lambda x, w, b, r: (x + back(r), norm(moved(x) + r, w, b, -1)))
    case(f"softmax to channels last {size}",
         f"g (T[{first}] x) => (T[{last}] y) {{ s = Softmax<axis=1>(x) y = Transpose<perm=[0,2,3,1]>(s) }}", image,
         lambda x: (moved(softmax(x, 1)),))


def check(case: Case) -> tuple[str, float | None]:
    """Every variant right; how quick the first is, as text and as a share of a copy's rate."""
    subject = launching.made(case.text, case.sizes, "scans" if "CumSum" in case.text else "rows")
    launcher = Launcher.of(subject.kernel)

    def tensors() -> tuple[list[cp.ndarray], list[cp.ndarray], list[cp.ndarray]]:
        inputs = [cp.abs(launching.filled(dtype, shape, 0)) if not shape else launching.filled(dtype, shape, 0)
                  for dtype, shape in subject.inputs]
        return inputs, launcher.outputs(inputs, subject.outputs), launcher.scratch(inputs)

    inputs, outputs, scratch = tensors()
    expected = case.compute(*(inputs[place].astype(cp.float64) for place in subject.places))
    variants = launcher.variants(inputs, outputs)
    for variant in variants:
        before: list[bytes] = []
        for _ in range(2):
            for array in (*outputs, *scratch):
                array.reshape(-1).view(cp.uint8).fill(0xFB)
            launcher.launch(variant, inputs, outputs, scratch)
            cp.cuda.Device().synchronize()
            now = [cp.asnumpy(array).tobytes() for array in outputs]
            if before and now != before:
                raise AssertionError(f"{variant.name}: two runs give different bits")
            before = now
        for number, (array, wanted) in enumerate(zip(outputs, expected, strict=True)):
            exact = case.exact or wanted.dtype == cp.bool_
            what, flat = f"output {number}, {variant.name}", cp.asarray(wanted).reshape(-1)
            launching.expect(what, array.reshape(-1), flat, exact)
    del expected
    size = sum(array.nbytes for array in (*inputs, *outputs))
    sets = [(inputs, outputs, scratch), *(tensors() for _ in range(launching.sets_of(size) - 1))]
    taken = launching.seconds(lambda turn: launcher.launch(variants[0], *sets[turn]), len(sets))
    share = launching.copy_seconds(size) / taken
    text = f"{size / 1e6:7.1f} MB {taken * 1e6:8.1f} us {size / taken / 1e9:6.0f} GB/s {share:5.2f} of a copy"
    largest = max(array.nbytes for array in (*inputs, *outputs))
    steps = f"{len(variants[0].steps)} kernel{'s' * (len(variants[0].steps) > 1)}"
    return f"{text}   {variants[0].name}, {steps}", share if largest >= launching.LEAST_MB << 20 else None


if __name__ == "__main__":
    sys.exit(launching.run(__doc__, cases(), check))
