#!/usr/bin/env python3
"""Generated kernels on a GPU: every rule example, odd and huge sizes, misaligned inputs.

    python tests/gpu/check_kernels.py [--only NAME ...] [--rules ID ...]

Rule examples are verified node by node as ``onnxfuse optimize`` verifies them.  The rest is compared with CuPy in
float64, or in float32 where that would not fit.  Exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cupy as cp  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402

import onnxfuse.runtime as runtime  # noqa: E402
from onnxfuse.pipeline import Options, optimise  # noqa: E402
from onnxfuse.resources import rules_folder  # noqa: E402
from onnxfuse.rules import example_model, load_rules  # noqa: E402

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
RULES: list[str] = []
"""Ids of the rules whose examples are run; all where there are none."""

TYPES = {np.dtype(np.float16): onnx.TensorProto.FLOAT16, np.dtype(np.float32): onnx.TensorProto.FLOAT}


def session(text: str) -> ort.InferenceSession:
    """A model of one region, fused whatever it gains."""
    made = optimise(onnx.parser.parse_model(HEAD + text), Options(least_gain=0.0, verify=False, compile=True))
    if len(made.plan.fusions) != 1:
        raise AssertionError(f"{len(made.plan.fusions)} regions instead of one: {made.refusals}")
    return runtime.session(made.model.SerializeToString(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def run(model: ort.InferenceSession, outputs: list[cp.ndarray], **inputs: cp.ndarray) -> None:
    """Run on memory of ours: whatever its alignment; the outputs are poisoned first."""
    binding = model.io_binding()
    for name, array in inputs.items():
        binding.bind_input(name, "cuda", 0, array.dtype.type, array.shape, array.data.ptr)
    for meta, array in zip(model.get_outputs(), outputs, strict=True):
        array.view(cp.uint8).fill(0xFB)
        binding.bind_output(meta.name, "cuda", 0, array.dtype.type, array.shape, array.data.ptr)
    cp.cuda.Device().synchronize()
    model.run_with_iobinding(binding)
    binding.synchronize_outputs()


def expect_near(found: cp.ndarray, wanted: cp.ndarray, share: float) -> float:
    """The largest error as a share of the largest magnitude; fails above ``share``."""
    error = float(cp.max(cp.abs(found.astype(wanted.dtype) - wanted)) / cp.max(cp.abs(wanted)))
    if not error <= share:
        raise AssertionError(f"error {error:.2e} of the output's scale, {share:.0e} allowed")
    return error


def normal(*shape: int, dtype: Any = np.float16, offset: int = 0) -> cp.ndarray:
    """Random numbers whose memory starts ``offset`` elements past an aligned address."""
    count = int(np.prod(shape))
    whole = cp.random.standard_normal(count + offset, dtype=cp.float32).astype(dtype)
    return whole[offset:].reshape(shape)


def rule_examples() -> str:
    rules = load_rules([rules_folder()])
    checked, wrong = 0, []
    for rule in (*rules.fuse, *rules.grow, *rules.canonical):
        for example in rule.examples if not RULES or rule.id in RULES else ():
            if example.refused is not None:
                continue
            made = optimise(example_model(example), Options(least_gain=0.0, dims=dict(example.dims)))
            verification = made.verification
            if verification is None or (made.plan.fusions and not verification.kernels_run):
                text = verification.text() if verification is not None else ""
                wrong.append(f"{rule.id}, {example.name}: kernels not run: {text}")
            elif made.taken_back or not verification.passed:
                reasons = "; ".join(refusal.message for refusal in made.taken_back)
                wrong.append(f"{rule.id}, {example.name}: {reasons or verification.text()}")
            checked += len(made.plan.fusions)
    if wrong:
        raise AssertionError(f"{checked} fused nodes right, wrong are\n" + "\n".join(wrong))
    return f"{checked} fused nodes right"


SOFTMAX = "g (float16[B, S] x) => (float16[B, S] y) { a = Mul(x, x) y = Softmax<axis = -1>(a) }"
NORM = """g (float16[B, S] x, float16[B, S] r, float16[S] w, float16[S] b) => (float16[B, S] y, float16[B, S] s) {
    s = Add(x, r) y = LayerNormalization<axis = -1, epsilon = 1e-5>(s, w, b) }"""


def softmax(x: cp.ndarray) -> cp.ndarray:
    a = cp.asarray(x, dtype=cp.float64) ** 2
    powers = cp.exp(a - a.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def row_lengths() -> str:
    model, worst = session(SOFTMAX), 0.0
    for length in (1, 2, 31, 33, 127, 128, 197, 1000, 1024, 1025, 4097, 8192, 8200, 65536, 100001, 1000000):
        rows = 1 if length > 50000 else 37
        for offset in (0, 1):
            x = normal(rows, length, offset=offset)
            y = cp.empty((rows, length), np.float16)
            run(model, [y], x=x)
            worst = max(worst, expect_near(y, softmax(x), 2e-3))
    return f"rows of 1 to 1,000,000, aligned and not: {worst:.1e}"


def norm_lengths() -> str:
    model, worst = session(NORM), 0.0
    for length in (8, 96, 100, 768, 1536, 4096, 30000):
        for offset in (0, 3):
            x, r = (normal(65, length, offset=offset) for _ in range(2))
            w, b = normal(length), normal(length)
            y, s = (cp.empty((65, length), np.float16) for _ in range(2))
            run(model, [y, s], x=x, r=r, w=w, b=b)
            total = x.astype(cp.float64) + r
            centred = total - total.mean(axis=-1, keepdims=True)
            wanted = centred / cp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * w + b
            worst = max(worst, expect_near(y, wanted, 2e-3), expect_near(s, total, 1e-3))
    return f"{worst:.1e}"


def empty() -> str:
    pointwise = session("g (float16[B, S] x) => (float16[B, S] y) { a = Exp(x) y = Neg(a) }")
    sums = session("""g (float[B, S] x) => (float[B] y) <int64[1] a = {1}> {
        e = Exp(x) y = ReduceSum<keepdims = 0>(e, a) }""")
    cases = ((session(SOFTMAX), (0, 64), (0, 64)), (pointwise, (5, 0), (5, 0)), (sums, (5, 0), (5,)))
    for model, shape, wanted in cases:
        kind = np.float32 if model is sums else np.float16
        (y,) = model.run(None, {"x": np.empty(shape, kind)})
        if y.shape != wanted or y.any():
            raise AssertionError(f"{shape}: {y}")
    return "no elements, no rows, empty rows"


def past_2_to_31() -> str:
    columns, rows = 1024, 2**21 + 3
    model = session("g (float16[B, 1024] x, float16[1024] b) => (float16[B, 1024] y) { a = Add(x, b) y = Relu(a) }")
    x, b = cp.empty((rows, columns), np.float16), normal(columns)
    for start in range(0, rows, 2**19):
        part = x[start : start + 2**19]
        part[...] = normal(*part.shape)
    y = cp.empty_like(x)
    run(model, [y], x=x, b=b)
    worst = 0.0
    for start in range(0, rows, 2**18):
        part = slice(start, start + 2**18)
        worst = max(worst, expect_near(y[part], cp.maximum(x[part].astype(cp.float32) + b, 0), 1e-3))
    return f"{x.size} elements: {worst:.1e}"


CHECKS: tuple[Callable[[], str], ...] = (rule_examples, row_lengths, norm_lengths, empty, past_2_to_31)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--rules", nargs="*", default=[], metavar="ID", help="rule_examples of these rules alone")
    arguments = parser.parse_args()
    only = arguments.only
    RULES.extend(arguments.rules)
    failed = []
    for check in CHECKS:
        if only and check.__name__ not in only:
            continue
        try:
            print(f"{check.__name__:<16} ok      {check()}", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(check.__name__)
            print(f"{check.__name__:<16} FAILED  {type(error).__name__}: {str(error)[:2000]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
