"""Sessions over the stand-in for the CUDA driver, fake_cuda.c: its models, its counters and its messages.

Any Python with NumPy and an ONNX Runtime can import this; only ``write`` needs the package.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

LIBRARY = Path(__file__).resolve().parents[2] / "onnxfuse" / "runtime" / "libonnxfuse.so"
IMAGE = b"FAKE\nadd_one\nadd_more\n\0"


def write(folder: Path) -> None:
    """Write the models that the scenarios read."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    import fused_models as make

    embedded = {"sm_90": IMAGE}
    with_image = {"images": embedded}
    models = {
        "one": make.chain(make.add_one(embedded), 1),
        "chain": make.chain(make.add_one(embedded), 20),
        "aligned": make.chain(make.add_aligned(embedded), 1),
        "compiled": make.chain(make.add_one(), 3),
        "lower": make.chain(make.add_one({"sm_86": IMAGE, "sm_80": b"FAKE\n\0", "sm_89": b"FAKE\n\0"}), 1),
        "torn": make.chain(make.add_one({"sm_90": b"\x7fELF"}), 1),
        "scratch": make.chain(make.Fused(**{**vars(make.add_two()), **with_image}), 3),
        "bodies": make.bodies(make.add_one(embedded)),
        "bodies_torn": make.bodies(make.add_one({"sm_90": b"\x7fELF"})),
        "quantized": make.quantized(make.add_one(embedded)),
        "quantized_bodies": make.quantized_bodies(make.add_one(embedded)),
        "quantized_scan": make.quantized_scan(make.add_one(embedded)),
        "undeclared": make.undeclared(),
        "host": make.chain(make.Fused(**{**vars(make.add_host()), **with_image}), 2, ["shape"]),
    }
    models["host32"] = make.chain(make.Fused(**{**vars(make.add_host()), **with_image}), 2, ["shape"])
    models["host32"].graph.input[1].type.tensor_type.elem_type = make.TensorProto.INT32
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def driver() -> ctypes.CDLL:
    """The stand-in, to set and read its counters."""
    return ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"])


def counter(name: str, kind: Any = ctypes.c_int) -> Any:
    """A variable of the stand-in."""
    return kind.in_dll(driver(), name)


def model(name: str) -> bytes:
    """A model that ``write`` wrote."""
    return (Path(os.environ["SCENARIO_MODELS"]) / f"{name}.onnx").read_bytes()


def options() -> onnxruntime.SessionOptions:
    """Options with the library registered, by nothing but ONNX Runtime's own call."""
    out = onnxruntime.SessionOptions()
    out.log_severity_level = 4
    out.register_custom_ops_library(str(LIBRARY))
    return out


def session(name: str, settings: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    """A session of a model on the CPU provider, where the stand-in's kernels run."""
    return onnxruntime.InferenceSession(
        model(name), settings or options(), providers=["CPUExecutionProvider"], enable_fallback=0
    )


def message(name: str) -> str:
    """Why a session cannot be created."""
    try:
        session(name)
    except Exception as error:
        return str(error)
    raise AssertionError(f"a session of '{name}' was created")


def expect(condition: bool, *seen: object) -> None:
    """An assertion that stays in optimised Python and shows what was seen."""
    if not condition:
        raise AssertionError(seen)


def fails(run: Any, text: str) -> None:
    """``run`` must raise an error whose message ends with ``text``."""
    try:
        run()
    except Exception as error:
        expect(str(error).endswith(text), str(error))
    else:
        raise AssertionError("no error")


def plus(x: np.ndarray, times: int) -> np.ndarray:
    """x + 1 + 1 ..., rounded each time."""
    for _ in range(times):
        x = x + np.float32(1)
    return x
