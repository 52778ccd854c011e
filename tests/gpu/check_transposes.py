#!/usr/bin/env python3
"""Tiled kernels on a GPU: right, and at which share of the rate of a copy.

    python tests/gpu/check_transposes.py [--only TEXT ...] [--least 0.8] [--set tiled.TILE_BYTES=16384 ...]

Transposes and regions that transpose, from 4 to 256 MB a tensor, odd sizes and misaligned memory among them.  Where
elements are only moved they must be equal to CuPy's; the rest is compared with float32 or float64, to 2e-3 of the
largest magnitude in float16 and 1e-5 in float32.  Every way a plan could run is checked, the first is timed: under a
CUDA graph, over as many sets of tensors as the second-level cache cannot hold; the copy is timed in the same way.
Exits with 1 where a result is wrong, or a large aligned case (from 16 MB on) reaches less than ``--least``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cupy as cp
import launching
from launching import Compute, Launcher


@dataclass(frozen=True)
class Case:
    """A model of one region.

    Attributes:
        text: its graph; sizes: of its symbols; compute: what it computes, from CuPy arrays.
        exact: whether elements are only moved; offset: elements that inputs lie past an aligned address.
    """

    name: str
    text: str
    sizes: dict[str, int]
    compute: Compute
    exact: bool = False
    offset: int = 0


def gelu(x: cp.ndarray) -> cp.ndarray:
    from cupyx.scipy.special import erf

    return x * (0.5 * (1.0 + erf(x * 0.7071067811865476)))


def moved(*axes: int) -> Compute:
    return lambda x: (x.transpose(axes),)


def wide(x: cp.ndarray) -> cp.ndarray:
    return x.astype(cp.float32 if x.dtype == cp.float16 else cp.float64)


def cases() -> list[Case]:
    found = []
    for kind, size in (("float16", 2), ("float", 4)):
        for megabytes in (4, 16, 64, 256):
            rows = 1 << ((megabytes << 20) // size).bit_length() // 2
            sizes = {"R": rows, "C": (megabytes << 20) // size // rows}
            turned = f"g ({kind}[R,C] x) => ({kind}[C,R] y) {{ y = Transpose(x) }}"
            found.append(Case(f"{kind} rows and columns", turned, sizes, moved(1, 0), exact=True))
            pixels = (megabytes << 20) // size // (96 * 56 * 56) or 1
            found.append(Case(
                f"{kind} NCHW to NHWC, bias, gelu",
                f"g ({kind}[N,96,56,56] x, {kind}[96] b) => ({kind}[N,56,56,96] y) "
                "{ t = Transpose<perm=[0,2,3,1]>(x) a = Add(t, b) y = Gelu(a) }",
                {"N": pixels}, lambda x, b: (gelu(wide(x).transpose(0, 2, 3, 1) + wide(b)),)))
            found.append(Case(
                f"{kind} NHWC to NCHW, scale, residual",
                f"g ({kind}[N,56,56,96] x, {kind}[96] b, {kind}[N,96,56,56] r) => ({kind}[N,96,56,56] y) "
                "{ a = Mul(x, b) t = Transpose<perm=[0,3,1,2]>(a) y = Add(t, r) }",
                {"N": pixels}, lambda x, b, r: ((wide(x) * wide(b)).transpose(0, 3, 1, 2) + wide(r),)))
            found.append(Case(
                f"{kind} heads: BSHD to BHDS, scale",
                f"g ({kind}[B,S,16,64] x, {kind} c) => ({kind}[B,16,64,S] y) "
                "{ t = Transpose<perm=[0,2,3,1]>(x) y = Mul(t, c) }",
                {"B": 4, "S": (megabytes << 20) // size // 4096},
                lambda x, c: (wide(x).transpose(0, 2, 3, 1) * wide(c),)))
        found.append(Case(
            f"{kind} a value and its transpose",
            f"g ({kind}[B,768,1024] x) => ({kind}[B,768,1024] a, {kind}[B,1024,768] y) "
            "{ a = Abs(x) y = Transpose<perm=[0,2,1]>(a) }",
            {"B": 32}, lambda x: (cp.abs(x), cp.abs(x).transpose(0, 2, 1)), exact=True))
        found.append(Case(
            f"{kind} odd sizes", f"g ({kind}[B,R,C] x, {kind}[R] b) => ({kind}[B,C,R] y) "
            "{ t = Transpose<perm=[0,2,1]>(x) y = Add(t, b) }",
            {"B": 32, "R": 197, "C": 4097}, lambda x, b: (wide(x).transpose(0, 2, 1) + wide(b),)))
        for sizes in ({"R": 4097, "C": 3}, {"R": 3, "C": 4097}, {"R": 31, "C": 33}, {"R": 8, "C": 16}):
            batch = (32 << 20) // size // prod(sizes.values())
            found.append(Case(f"{kind} many of {sizes['R']} x {sizes['C']}",
                              f"g ({kind}[B,R,C] x) => ({kind}[B,C,R] y) {{ y = Transpose<perm=[0,2,1]>(x) }}",
                              {"B": batch, **sizes}, moved(0, 2, 1), exact=True))
        found.append(Case(f"{kind} misaligned", f"g ({kind}[R,C] x) => ({kind}[C,R] y) {{ y = Transpose(x) }}",
                          {"R": 4096, "C": 4096}, moved(1, 0), exact=True, offset=1))
        found.append(Case(
            f"{kind} pixels shuffled", f"g ({kind}[N,256,64,64] x) => ({kind}[N,64,128,128] y) "
            "{ a = Relu(x) y = DepthToSpace<blocksize=2, mode=\"CRD\">(a) }",
            {"N": 16}, lambda x: (cp.maximum(x, 0).reshape(-1, 64, 2, 2, 64, 64).transpose(0, 1, 4, 2, 5, 3)
                                  .reshape(-1, 64, 128, 128),), exact=True))
    found.append(Case(
        "pictures: uint8 NHWC to float16 NCHW",
        "g (uint8[N,224,224,3] x, float16 c) => (float16[N,3,224,224] y) "
        "{ f = Cast<to=10>(x) t = Transpose<perm=[0,3,1,2]>(f) y = Mul(t, c) }",
        {"N": 256}, lambda x, c: (wide(x).transpose(0, 3, 1, 2) * wide(c),)))
    for kind in ("int64", "bool"):
        found.append(Case(f"{kind} rows and columns", f"g ({kind}[R,C] x) => ({kind}[C,R] y) {{ y = Transpose(x) }}",
                          {"R": 4096, "C": 4096}, moved(1, 0), exact=True))
    return found


def check(case: Case) -> tuple[str, float | None]:
    """Every variant right; how quick the first is, as text and as a share of a copy's rate."""
    subject = launching.made(case.text, case.sizes, "tiled")
    launcher = Launcher.of(subject.kernel)

    def tensors() -> tuple[list[cp.ndarray], list[cp.ndarray]]:
        inputs = [launching.filled(dtype, shape, case.offset) for dtype, shape in subject.inputs]
        return inputs, launcher.outputs(inputs, subject.outputs)

    inputs, outputs = tensors()
    expected = case.compute(*(inputs[place] for place in subject.places))
    variants = launcher.variants(inputs, outputs)
    for variant in variants:
        for array in outputs:
            array.reshape(-1).view(cp.uint8).fill(0xFB)
        launcher.launch(variant, inputs, outputs)
        cp.cuda.Device().synchronize()
        for number, (array, wanted) in enumerate(zip(outputs, expected, strict=True)):
            launching.expect(f"output {number}, {variant.name}", array, wanted, case.exact)
    del expected
    size = sum(array.nbytes for array in (*inputs, *outputs))
    sets = [(inputs, outputs), *(tensors() for _ in range(launching.sets_of(size) - 1))]
    taken = launching.seconds(lambda turn: launcher.launch(variants[0], *sets[turn]), len(sets))
    share = launching.copy_seconds(size) / taken
    sizes = " ".join(f"{name}={number}" for name, number in case.sizes.items())
    text = f"{size / 1e6:7.0f} MB {taken * 1e6:8.1f} us {size / taken / 1e9:6.0f} GB/s {share:5.2f} of a copy"
    largest = max(array.nbytes for array in (*inputs, *outputs))
    counts = not case.offset and largest >= launching.LEAST_MB << 20
    return f"{text}   {variants[0].name}; {sizes}", share if counts else None


if __name__ == "__main__":
    sys.exit(launching.run(__doc__, cases(), check))
