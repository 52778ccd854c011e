"""Sessions with fused nodes on a real GPU, for check_runtime.py; in a rehearsal over the stand-in of tests/native."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_models as make
import numpy as np
import onnx
import onnxruntime
from building import LIBRARY, ROOT
from native.stand_in import IMAGE

import onnxfuse.runtime as runtime

REHEARSAL = os.environ.get("ONNXFUSE_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
IMAGES = {"sm_90": IMAGE} if REHEARSAL else {}


def begin(stand_ins: Path | None) -> None:
    """Take a kernel cache of one's own, and tell what runs; begin anew over the stand-ins for the driver and cuBLASLt
    in a folder, where that is given and has not been done.

    Must come before anything of a GPU is used: libraries are looked for once in a process.
    """
    if stand_ins is not None and not REHEARSAL:
        os.environ.update(
            ONNXFUSE_REHEARSAL="1", ONNXFUSE_LIBCUDA=str(stand_ins / "fake_cuda.so"),
            ONNXFUSE_LIBCUBLASLT=str(stand_ins / "fake_cublaslt.so"),
            ONNXFUSE_LIBCUDNN=str(stand_ins / "fake_cudnn.so"))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["ONNXFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="onnxfuse-check-")
    print(f"ONNX Runtime {onnxruntime.__version__}, {onnxruntime.get_available_providers()}", flush=True)


def expect(condition: bool, *seen: object) -> None:
    """An assertion that stays in optimised Python and shows what was seen."""
    if not condition:
        raise AssertionError(" ".join(map(str, seen)))


def failed(check: Callable[[], str], name: str = "") -> bool:
    """Run a check and print its line; whether it failed."""
    start = time.monotonic()
    try:
        verdict, text = "ok", check()
    except Exception as error:
        verdict, text = "FAILED", f"{type(error).__name__}: {str(error)[:2000]}"
        traceback.print_exc()
    print(f"{name or check.__name__:22} {verdict:7} {time.monotonic() - start:6.1f} s  {text}", flush=True)
    return verdict != "ok"


def with_images(fused: make.Fused) -> make.Fused:
    """The same with the stand-in's image, in a rehearsal."""
    return make.Fused(**{**vars(fused), "images": IMAGES})


def plus(x: np.ndarray, times: int) -> np.ndarray:
    """x + 1 + 1 ..., rounded each time."""
    for _ in range(times):
        x = x + np.float32(1)
    return x


def provider(**settings: str) -> list[Any]:
    """The providers of a session that runs fused nodes as kernels."""
    return ["CPUExecutionProvider"] if REHEARSAL else [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]


def session(model: onnx.ModelProto, parallel: bool = False, registered: bool = True,
            **settings: str) -> onnxruntime.InferenceSession:
    """A session with the library registered, as a user would; it must run on the GPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    raw = model.SerializeToString()
    if registered:
        runtime.register(options, raw)
    out = onnxruntime.InferenceSession(raw, options, providers=provider(**settings), enable_fallback=0)
    expect(REHEARSAL or out.get_providers()[0] == "CUDAExecutionProvider", out.get_providers())
    return out


class Bound:
    """A session whose input x and output y stay on the device."""

    def __init__(self, made: onnxruntime.InferenceSession, x: np.ndarray) -> None:
        self.session, self.size = made, x.shape
        self.x = onnxruntime.OrtValue.ortvalue_from_numpy(x.copy(), DEVICE, 0)  # on the CPU it keeps the array itself
        self.y = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(x), DEVICE, 0)
        self.binding = made.io_binding()
        self.binding.bind_ortvalue_input("x", self.x)
        self.binding.bind_ortvalue_output("y", self.y)

    def run(self) -> None:
        """One run; ONNX Runtime waits for it to end."""
        self.session.run_with_iobinding(self.binding)

    def result(self, x: np.ndarray) -> np.ndarray:
        """The output for another input of the same size, written into the same memory."""
        self.x.update_inplace(x)
        self.run()
        out: np.ndarray = self.y.numpy()
        return out

    def microseconds(self, runs: int) -> float:
        """Median time of a run."""
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


CHILD = """
import sys, time
if sys.argv[1] == "embedded":
    sys.modules["cupy"] = None
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
start = time.perf_counter()
if sys.argv[1] == "embedded":
    options.register_custom_ops_library(sys.argv[3])
elif sys.argv[1] == "registered":
    sys.path.insert(0, sys.argv[3])
    import onnxfuse.runtime
    onnxfuse.runtime.register(options, sys.argv[2])
session = onnxruntime.InferenceSession(sys.argv[2], options, providers=sys.argv[4].split(","), enable_fallback=0)
took = time.perf_counter() - start
y = session.run(None, {"x": numpy.arange(5, dtype=numpy.float32)})[0]
print("RESULT", took, y.tolist() == [float(sys.argv[5]) + i for i in range(5)], session.get_providers()[0])
"""


def child(kind: str, path: Path, adds: int, cache: Path) -> float:
    """Create and run a session in a process of its own; the seconds that creating took."""
    providers = "CPUExecutionProvider" if REHEARSAL else "CUDAExecutionProvider,CPUExecutionProvider"
    where = LIBRARY if kind == "embedded" else ROOT
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(path), str(where), providers, str(adds)],
        capture_output=True, text=True, env=os.environ | {"ONNXFUSE_CACHE_DIR": str(cache)}, timeout=300,
    )
    results = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    expect(done.returncode == 0 and len(results) == 1, done.stdout, done.stderr)
    _, took, right, first = results[0]
    expect(right == "True" and first == providers.split(",")[0], results)
    return float(took)
