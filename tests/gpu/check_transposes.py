#!/usr/bin/env python3
"""Tiled kernels on a GPU: right, and at which share of the rate of a copy.

    python tests/gpu/check_transposes.py [--only TEXT ...] [--least 0.8] [--set TILE_BYTES=16384 ...]

Transposes and regions that transpose, from 4 to 256 MB a tensor, odd sizes and misaligned memory among them.  Where
elements are only moved they must be equal to CuPy's; the rest is compared with float32 or float64, to 2e-3 of the
largest magnitude in float16 and 1e-5 in float32.  Every way a plan could run is checked, the first is timed: under a
CUDA graph, over as many sets of tensors as the second-level cache cannot hold; the copy is timed in the same way.
Exits with 1 where a result is wrong, or a large aligned case (from 16 MB on) reaches less than ``--least``.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cupy as cp  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402

import onnxfuse.schedules.tiled as tiled  # noqa: E402
from onnxfuse.graph import load_graph  # noqa: E402
from onnxfuse.lowering.launch import LaunchPlan, Situation, Step, Variant  # noqa: E402
from onnxfuse.lowering.lower import lower  # noqa: E402
from onnxfuse.refusal import Refusal  # noqa: E402
from onnxfuse.runtime.compile import compile_cubin  # noqa: E402
from onnxfuse.schedules import Kernel, make_kernel  # noqa: E402

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
LEAST_MB = 16
"""Bytes of the largest tensor from which on ``--least`` is asked for."""
TYPES = {"float16": np.float16, "float": np.float32, "uint8": np.uint8, "int64": np.int64, "bool": np.bool_}

Compute = Callable[..., Sequence[cp.ndarray]]


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


# ---- Kernels on memory of ours. ----


def made(case: Case) -> tuple[Kernel, list[tuple[np.dtype[Any], tuple[int, ...]]], list[np.dtype[Any]]]:
    """The kernel, types and shapes of its inputs, types of its outputs."""
    model = onnx.parser.parse_model(HEAD + case.text)
    graph = load_graph(model)
    lowered = lower(graph.nodes, graph.outputs, graph)
    kernel = lowered if isinstance(lowered, Refusal) else make_kernel(lowered, "check", "tiled", case.sizes)
    if isinstance(lowered, Refusal) or isinstance(kernel, Refusal):
        raise AssertionError(f"no kernel: {kernel}")
    numpy = onnx.helper.tensor_dtype_to_np_dtype
    inputs = [(np.dtype(numpy(value.dtype)), tuple(size.evaluate(case.sizes) for size in value.shape))
              for value in lowered.tensors]
    return kernel, inputs, [np.dtype(numpy(output.dtype)) for output in kernel.plan.outputs]


def filled(dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> cp.ndarray:
    """Random elements whose memory starts ``offset`` elements past an aligned address."""
    count = prod(shape)
    if dtype.kind == "f":
        whole = cp.random.standard_normal(count + offset, dtype=cp.float32).astype(dtype)
    else:
        whole = cp.random.randint(0, 2 if dtype.kind == "b" else 100, count + offset).astype(dtype)
    return whole[offset:].reshape(shape)


@dataclass(frozen=True)
class Launcher:
    """A compiled kernel's plan, on sets of arrays."""

    plan: LaunchPlan
    module: Any

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        capability = cp.cuda.Device().compute_capability
        module = cp.cuda.function.Module()
        module.load(compile_cubin(kernel.source, f"sm_{capability}", kernel.plan.options))
        return cls(kernel.plan, module)

    def situation(self, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray] = ()) -> Situation:
        found = Situation(
            [array.shape for array in inputs], (), [array.data.ptr for array in inputs],
            [array.data.ptr for array in outputs], sm=int(cp.cuda.Device().compute_capability))
        found.bind(self.plan)
        return found

    def outputs(self, inputs: Sequence[cp.ndarray], dtypes: Sequence[np.dtype[Any]]) -> list[cp.ndarray]:
        situation = self.situation(inputs)
        made = [cp.empty(tuple(situation.evaluate(size) for size in output.shape), dtype)
                for output, dtype in zip(self.plan.outputs, dtypes, strict=True)]
        for array in made:
            array.reshape(-1).view(cp.uint8).fill(0xFB)
        return made

    def variants(self, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray]) -> list[Variant]:
        situation = self.situation(inputs, outputs)
        return [one for one in self.plan.variants if all(situation.evaluate(guard) for guard in one.guards)]

    def launch(self, variant: Variant, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray]) -> None:
        situation = self.situation(inputs, outputs)
        for step in variant.steps:
            self._launch(step, situation, inputs, outputs)

    def _launch(self, step: Step, situation: Situation, inputs: Sequence[cp.ndarray],
                outputs: Sequence[cp.ndarray]) -> None:
        arguments: list[Any] = []
        for text in step.arguments:
            kind, colon, size = text.partition(":")
            if colon:
                arguments.append((np.int32 if kind == "i32" else np.int64)(situation.evaluate(size)))
            else:
                arguments.append((inputs if text[0] == "i" else outputs)[int(text[1:])])
        grid, block = (tuple(situation.evaluate(size) for size in sizes) for sizes in (step.grid, step.block))
        self.module.get_function(step.kernel)(grid, block, tuple(arguments), situation.evaluate(step.shared))


COPY = cp.RawKernel("""extern "C" __global__ void copy(const uint4* from, uint4* to, long long count) {
  const long long at = blockIdx.x * 256ll + threadIdx.x;
  if (at < count) to[at] = from[at];
}""", "copy")


def seconds(run: Callable[[int], None], sets: int) -> float:
    """Time of one launch: graphs of a hundred, the sets by turns; the median of nine."""
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    count = max(100 // sets, 1) * sets
    with stream:
        run(0)
        stream.synchronize()
        stream.begin_capture()
        for turn in range(count):
            run(turn % sets)
        graph = stream.end_capture()
        found = []
        for _ in range(10):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            found.append(cp.cuda.get_elapsed_time(start, stop) / 1e3 / count)
    return float(np.median(found[1:]))


def copy_seconds(size: int, known: dict[int, float] = {}) -> float:  # noqa: B006 (a memory)
    """Time of a copy that moves ``size`` bytes, half of them read."""
    half = size // 2 // 16 * 16
    if half not in known:
        sets = sets_of(size)
        pairs = [(cp.zeros(half, cp.uint8), cp.empty(half, cp.uint8)) for _ in range(sets)]
        known[half] = seconds(
            lambda turn: COPY((-(-half // 16 // 256),), (256,), (*pairs[turn], np.int64(half // 16))), sets)
    return known[half]


def sets_of(size: int) -> int:
    """So many sets of tensors that none is left in the second-level cache when its turn comes again."""
    cache = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["l2CacheSize"]
    return max(2, -(-4 * int(cache) // max(size, 1)))


def check(case: Case) -> tuple[str, float | None]:
    """Every variant right; how quick the first is, as text and as a share of a copy's rate."""
    kernel, kinds, dtypes = made(case)
    launcher = Launcher.of(kernel)
    inputs = [filled(dtype, shape, case.offset) for dtype, shape in kinds]
    outputs = launcher.outputs(inputs, dtypes)
    expected = case.compute(*inputs)
    variants = launcher.variants(inputs, outputs)
    for variant in variants:
        for array in outputs:
            array.reshape(-1).view(cp.uint8).fill(0xFB)
        launcher.launch(variant, inputs, outputs)
        cp.cuda.Device().synchronize()
        for number, (array, wanted) in enumerate(zip(outputs, expected, strict=True)):
            expect(f"output {number}, {variant.name}", array, wanted, case.exact)
    del expected
    size = sum(array.nbytes for array in (*inputs, *outputs))
    sets = [(inputs, outputs)]
    for _ in range(sets_of(size) - 1):
        sets.append(([filled(dtype, shape, case.offset) for dtype, shape in kinds], launcher.outputs(inputs, dtypes)))
    taken = seconds(lambda turn: launcher.launch(variants[0], *sets[turn]), len(sets))
    share = copy_seconds(size) / taken
    sizes = " ".join(f"{name}={number}" for name, number in case.sizes.items())
    text = f"{size / 1e6:7.0f} MB {taken * 1e6:8.1f} us {size / taken / 1e9:6.0f} GB/s {share:5.2f} of a copy"
    largest = max(array.nbytes for array in (*inputs, *outputs))
    counts = not case.offset and largest >= LEAST_MB << 20
    return f"{text}   {variants[0].name}; {sizes}", share if counts else None


def expect(what: str, found: cp.ndarray, wanted: cp.ndarray, exact: bool) -> None:
    if exact:
        if not bool((found == wanted).all()):
            raise AssertionError(f"{what}: {int((found != wanted).sum())} of {found.size} elements differ")
        return
    error = float(cp.max(cp.abs(found.astype(wanted.dtype) - wanted)) / cp.max(cp.abs(wanted)))
    if not error <= (2e-3 if found.dtype == cp.float16 else 1e-5):
        raise AssertionError(f"{what}: error {error:.2e} of the output's scale")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these texts")
    parser.add_argument("--least", type=float, default=0.0, help="share of a copy's rate that large cases must reach")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="other constants of the schedule")
    given = parser.parse_args()
    for text in given.set:
        name, _, number = text.partition("=")
        if not hasattr(tiled, name):
            parser.error(f"the tiled schedule has no constant {name}")
        setattr(tiled, name, int(number))
    failed = 0
    for case in cases():
        if given.only and not any(text in case.name for text in given.only):
            continue
        try:
            text, share = check(case)
            slow = share is not None and share < given.least
            failed += slow
            print(f"{case.name:<40} {'SLOW  ' if slow else 'ok    '} {text}", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            print(f"{case.name:<40} FAILED {type(error).__name__}: {str(error)[:2000]}", flush=True)
        cp.get_default_memory_pool().free_all_blocks()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
