"""Convolutions by cuDNN as steps of launch plans, on a real GPU.

    python tests/gpu/check_library_convolutions.py [--only NAME ...]

Every type with every activation and what is added, along one axis to three, each rank of a plan, numbers that are none,
and captured CUDA graphs are right.  Needs what check_runtime.py needs, and cuDNN.  Results are compared with NumPy's of
the same rounded operands in float64, by the error of the output's scale.  Prints a table and exits with 1 where a check
failed.  ``--rehearse FOLDER`` runs what can be run without a GPU over the stand-ins of tests/native that lie there,
``fake_cuda.so`` and ``fake_cudnn.so``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from building import ROOT, build

sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
build()

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from launch_convolutions import Along, Convolved  # noqa: E402
from runtime_sessions import DEVICE, REHEARSAL, begin, expect, failed, session  # noqa: E402

from onnxfuse.emulator.convolving import Axis, convolved  # noqa: E402
from onnxfuse.lowering.routines import CONVOLUTION_ACTIVATIONS, TF32  # noqa: E402
from onnxfuse.schedules.products.cudnn import RANKS  # noqa: E402
from onnxfuse.schedules.products.library import WORKSPACE  # noqa: E402

TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, TF32: 2e-3}
"""Of the output's largest element: two units in the last place of it, and the order of sums."""

ACTIVATED = 1e-3
"""What the library's exponentials may add."""

SAME = Along(3, 1, 1, 1, 1)
SHAPES: dict[str, tuple[tuple[Along, ...], tuple[int, ...], int, int, int]] = {
    "3 x 3": ((SAME, SAME), (14, 14), 3, 64, 64), "uneven channels": ((SAME, SAME), (9, 11), 2, 5, 7),
    "in steps of two": ((Along(3, 2, 1, 1, 1),) * 2, (15, 13), 2, 32, 40),
    "single pixels": ((Along(), Along()), (7, 7), 4, 128, 72),
    "apart": ((Along(3, 1, 2, 2, 2),) * 2, (17, 9), 1, 24, 16),
    "the first of a network": ((Along(7, 2, 1, 3, 3),) * 2, (31, 33), 2, 3, 64),
    "more before than behind": ((Along(2, 1, 1, 1, 0), Along(3, 1, 1, 0, 2)), (9, 11), 2, 16, 24),
    "one axis": ((Along(5, 2, 1, 2, 2),), (65,), 3, 32, 48), "three axes": ((SAME,) * 3, (5, 6, 7), 2, 16, 32),
}
"""Axes, sizes along them, images, channels and results."""

TRIED = ("uneven channels", "one axis") if REHEARSAL else tuple(SHAPES)
FEW = TRIED[:1] if REHEARSAL else ("3 x 3", "single pixels", "in steps of two")
"""Shapes of each type and activation, and of each plan; the stand-in takes its time."""

NO_PLAN = "has no plan"

REPLAYS = 6


def shaped(name: str, **more: Any) -> tuple[Convolved, dict[str, np.ndarray]]:
    """A convolution of a shape, and random inputs."""
    axes, sizes, images, channels, results = SHAPES[name]
    made, random = Convolved(axes=axes, workspace=WORKSPACE, **more), np.random.default_rng(0)
    shapes = made.shapes(images, sizes, channels, results)
    return made, {each: random.standard_normal(shape, np.float32) for each, shape in shapes.items() if each != "z"}


def wanted(made: Convolved, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The result in float64, of operands as the type holds them."""
    kind: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(made.dtype, np.float32)
    held = {name: array.astype(kind).astype(np.float64) for name, array in inputs.items()}
    flat = 3 - len(made.axes)
    x, w = (held[name].reshape(held[name].shape[:1] + (1,) * flat + held[name].shape[1:]) for name in "xw")
    axes = [Axis(1, 1, 1, 1, 1, 0)] * flat + [
        Axis(size, (size + axis.before + axis.after - axis.span) // axis.step + 1, axis.taps, axis.step, axis.apart,
             axis.before) for size, axis in zip(inputs["x"].shape[1:-1], made.axes, strict=True)]
    out = convolved(x, w, (axes[0], axes[1], axes[2])).astype(np.float64)
    out = out.reshape(out.shape[:1] + out.shape[1 + flat:])
    out = sum((held[name] for name in "vu" if name in held), out)
    if made.activation == "relu":
        return np.maximum(out, 0)
    if made.activation == "silu":
        return out / (1 + np.exp(-out))
    return out * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (out + 0.044715 * out**3))) if made.activation else out


def error_of(made: Convolved, inputs: dict[str, np.ndarray], run: Any) -> float | None:
    """The largest error by the output's scale; None where the library has no plan.

    Raises:
        AssertionError: it is too large.
    """
    try:
        (got,) = run.run(None, inputs)
    except Exception as error:  # ONNX Runtime has an exception type per status, all of them plain
        if NO_PLAN in str(error) or "NOT_SUPPORTED" in str(error):
            return None
        raise
    right = wanted(made, inputs)
    error = float(np.max(np.abs(got - right)) / max(float(np.max(np.abs(right))), 1e-3))
    least = TOLERANCES[made.dtype] + (ACTIVATED if made.activation in ("silu", "gelu_tanh") else 0.0)
    expect(error <= least, made, [array.shape for array in inputs.values()], "error", error)
    return error


def epilogues() -> str:
    """Every type with every activation and what is added, at every shape."""
    worst: dict[str, float] = defaultdict(float)
    without: Counter[str] = Counter()
    for name in TRIED:
        for dtype, activation, bias, added in itertools.product(
                TOLERANCES, CONVOLUTION_ACTIVATIONS, (False, True), (False, True)):
            if not REHEARSAL and bias + added == 0 and activation:
                continue  # a plan is made of each, which takes its time
            made, inputs = shaped(name, dtype=dtype, activation=activation, bias=bias, added=added)
            error = error_of(made, inputs, session(made.model()))
            without[f"{dtype} {name}"] += error is None
            worst[f"{dtype} {name}"] = max(worst[f"{dtype} {name}"], error or 0.0)
    for kind, error in worst.items():
        print(f"    {kind:36} error at most {error:.1e}; no plan for {without[kind]}", flush=True)
    return f"{len(worst)} kinds, error at most {max(worst.values()):.1e}; no plan in {without.total()} cases"


def ranks() -> str:
    """Each plan that tuning may take."""
    worst = 0.0
    for name, dtype, rank in itertools.product(FEW, TOLERANCES, range(RANKS)):
        made, inputs = shaped(name, dtype=dtype, activation="relu", bias=True, algorithm=rank)
        worst = max(worst, error_of(made, inputs, session(made.model())) or 0.0)
    return f"{RANKS} plans of {len(FEW)} shapes and {len(TOLERANCES)} types, error at most {worst:.1e}"


def numbers() -> str:
    """What is no number, or infinite, shows where it belongs, by every plan and activation."""
    count = 0
    for activation, rank in itertools.product(CONVOLUTION_ACTIVATIONS, range(RANKS)):
        made, inputs = shaped(FEW[0], dtype="float16", activation=activation, bias=True, algorithm=rank)
        inputs["x"][0, 3, 3, 2], inputs["x"][1, 5, 5, 4] = np.nan, np.inf
        (got,) = session(made.model()).run(None, inputs)
        with np.errstate(all="ignore"):
            right = wanted(made, inputs)
        expect(bool(np.array_equal(np.isnan(got), np.isnan(right))), made, "has numbers where there are none")
        expect(bool(np.array_equal(np.isposinf(got), np.isposinf(right))), made, "has no infinity where there is one")
        count += 1
    return f"{count} ways keep them"


def captured() -> str:
    """Convolutions in captured CUDA graphs."""
    if REHEARSAL:
        return "not in a rehearsal"
    count = 0
    for name, dtype in itertools.product(("3 x 3", "single pixels", "three axes"), ("float16", TF32)):
        made, inputs = shaped(name, dtype=dtype, activation="relu", bias=True)
        run = session(made.model(), enable_cuda_graph="1")
        held = {each: onnxruntime.OrtValue.ortvalue_from_numpy(array, DEVICE, 0) for each, array in inputs.items()}
        right = wanted(made, inputs)
        out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(right.shape, np.float32), DEVICE, 0)
        binding = run.io_binding()
        for each, value in held.items():
            binding.bind_ortvalue_input(each, value)
        binding.bind_ortvalue_output("z", out)
        for factor in range(1, REPLAYS):
            now = inputs | {"x": inputs["x"] / factor}
            held["x"].update_inplace(now["x"])
            run.run_with_iobinding(binding)
            right = wanted(made, now)
            error = float(np.max(np.abs(out.numpy() - right)) / np.max(np.abs(right)))
            expect(error <= TOLERANCES[dtype], "wrong at replay", factor, made, error)
            count += 1
    return f"{count} runs and replays right"


CHECKS: list[Callable[[], str]] = [epilogues, ranks, numbers, captured]


def main() -> int:
    """Run the checks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--only", nargs="*", default=names, choices=names, help="names of the checks to run")
    parser.add_argument("--rehearse", metavar="FOLDER", type=Path, help="where the stand-ins are, built")
    arguments = parser.parse_args()
    begin(arguments.rehearse)
    return 1 if sum(failed(check) for check in CHECKS if check.__name__ in arguments.only) else 0


if __name__ == "__main__":
    sys.exit(main())
