"""Scenarios of convolutions by cuDNN, over the stand-in fake_cudnn.c."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from native.stand_in import counter, expect, fails, message, session

Axis = tuple[int, int, int, int, int]
CONVOLUTIONS: dict[str, tuple[tuple[Axis, ...], str, str, int]] = {
    "convolution": (((3, 1, 1, 1, 1),) * 2, "", "", 0),
    "convolution_float16": (((3, 2, 1, 1, 1), (2, 1, 3, 2, 0)), "v", "relu", 0),
    "convolution_bfloat16": (((1, 1, 1, 0, 0),) * 2, "u", "", 1),
    "convolution_line": (((5, 2, 1, 0, 3),), "vu", "silu", 0),
    "convolution_volume": (((3, 1, 1, 1, 1), (1, 2, 1, 0, 0), (2, 1, 1, 0, 0)), "v", "gelu", 0),
}
"""Taps, step, places apart, and zeros before and after along each axis, what is added (v is a bias), what follows and
the plan's rank, by model: launch_convolutions.CONVOLUTIONS, which needs the package."""


def library_counter(name: str, kind: Any = ctypes.c_int) -> Any:
    """A variable of the stand-in for cuDNN."""
    return kind.in_dll(ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDNN"]), name)


def operands(
    name: str, images: int, size: int, channels: int, results: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Small integers, whose sums are exact in every type, and what is made of their convolution."""
    axes, added, activation, _ = CONVOLUTIONS[name]
    random = np.random.default_rng(size + channels)
    sizes = tuple(size + place for place in range(len(axes)))
    x = random.integers(-2, 3, (images, *sizes, channels)).astype(np.float32)
    w = random.integers(-2, 3, (results, *(taps for taps, *_ in axes), channels)).astype(np.float32)
    padded = np.pad(x, [(0, 0), *((before, after) for *_, before, after in axes), (0, 0)])
    windows = [(own + before + after - (taps - 1) * apart - 1) // step + 1
               for own, (taps, step, apart, before, after) in zip(sizes, axes, strict=True)]
    wanted = np.zeros((images, *windows, results), np.float32)
    for place in product(*(range(taps) for taps, *_ in axes)):
        seen = tuple(slice(tap * apart, tap * apart + (count - 1) * step + 1, step)
                     for tap, count, (_, step, apart, _, _) in zip(place, windows, axes, strict=True))
        wanted += padded[(slice(None), *seen)] @ w[(slice(None), *place)].T
    fed = {"x": x, "w": w}
    for name_of, shape in (("v", (results,)), ("u", wanted.shape)):
        if name_of in added:
            fed[name_of] = random.integers(-3, 4, shape).astype(np.float32)
            wanted = wanted + fed[name_of]
    return fed, activated(wanted.astype(np.float64), activation)


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """In float64."""
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return x * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x


def convolutions() -> None:
    """Of each type and along one axis to three, what follows them, with a workspace and without."""
    runs = library_counter("fake_dnn_runs", ctypes.c_long)
    for name, (_, _, activation, rank) in CONVOLUTIONS.items():
        made = session(name)
        for sizes in ((1, 6, 5, 3), (3, 9, 8, 4), (1, 4, 1, 1), (1, 6, 5, 3)):
            fed, wanted = operands(name, *sizes)
            least = {"": 0.0, "relu": 0.0, "silu": 1e-3, "gelu": 1e-5}[activation]
            found = made.run(None, fed)[0]
            expect(np.allclose(found, wanted, rtol=least, atol=least), name, sizes, np.abs(found - wanted).max())
            expect(library_counter("fake_dnn_rank").value == rank, name, "runs another plan")
        before = runs.value
        for sizes in ((0, 6, 5, 3), (2, 6, 5, 0)):
            fed, wanted = operands(name, *sizes)
            expect(made.run(None, fed)[0].shape == wanted.shape, name, sizes)
        expect(runs.value == before, "a convolution of nothing ran")
    expect(library_counter("fake_dnn_nan").value == 1, "what is no number would become zero")
    fails(partial(session("convolution").run, None, operands("convolution", 2, 6, 0, 3)[0]),
          "a conv of the launch plan has the channels 0; it is 1 to 2147483647")


def plans() -> None:
    """Plans that sum in other ways, that cannot be made or want more workspace are passed over, and their ranks with
    them; a run of the same sizes asks for nothing and leaves nothing."""
    refused, noted, note = (library_counter(f"fake_dnn_{name}") for name in ("refused", "noted", "note"))
    needed, asked, objects = library_counter("fake_dnn_needed", ctypes.c_long), library_counter("fake_dnn_asked"), (
        library_counter("fake_dnn_objects"))
    fed, wanted = operands("convolution_float16", 1, 6, 5, 3)
    # Engines of tensor cores, or that strictly keep what is no number, serve as well.
    for bits, notes, kind, rank in ((0, 0, 4, 0), (1, 0, 4, 1), (0, 3, 4, 2), (2, 1, 5, 2), (0, 7, 0, 0), (0, 7, 9, 0)):
        refused.value, noted.value, note.value = bits, notes, kind
        made = session("convolution_float16")
        expect(np.array_equal(made.run(None, fed)[0], wanted))
        found = library_counter("fake_dnn_rank").value
        expect(found == rank, bits, notes, kind, found)
        before, kept = asked.value, objects.value
        for _ in range(5):
            made.run(None, fed)
        expect(asked.value <= before + 2 and objects.value == kept, "a repeated convolution makes something")
        del made
    refused.value, noted.value = 0, 0
    needed.value = 1 << 12
    expect(np.array_equal(session("convolution_float16").run(None, fed)[0], wanted))
    expect(counter("fake_last_allocated", ctypes.c_long).value == 1 << 12, "the workspace is not what the plan wants")
    needed.value = (1 << 12) + 1
    fails(partial(session("convolution_float16").run, None, fed),
          "cuDNN has no plan for the convolution 1x5x6x7 by 3x3x2")
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


def convolutions_behind() -> None:
    """Where the library has no plan, or is not there, the variant behind the call runs; a run that fails says so."""
    fed = {"x": np.ones((2, 4, 4, 3), np.float32), "w": np.zeros((3, 3, 3, 3), np.float32)}
    made = session("convolution_or_sum")
    expect(np.array_equal(made.run(None, fed)[0], np.zeros((2, 4, 4, 3))))
    library_counter("fake_dnn_error").value = 3000
    fails(partial(made.run, None, fed),
          "cuDNN could not run the convolution 2x3x4x4 by 3x3x3: CUDNN_STATUS_NOT_SUPPORTED")
    library_counter("fake_dnn_error").value = 0
    library_counter("fake_dnn_found").value = 0
    one = {**fed, "x": fed["x"][:1]}
    expect(np.array_equal(session("convolution_or_sum").run(None, one)[0], one["x"] + 1), "there is no plan")


def no_cudnn() -> None:
    """The message names what is missing and the remedy."""
    os.environ["ONNXFUSE_LIBCUDNN"] = "/nowhere/libcudnn.so"
    fed = {"x": np.ones((2, 4, 4, 3), np.float32), "w": np.zeros((3, 3, 3, 3), np.float32)}
    found = session("convolution_or_sum").run(None, fed)[0]
    expect(np.array_equal(found, fed["x"] + 1), "the variant behind does not run")
    remedy = ("; a convolution of this model needs it: install CUDA's libraries (pip install onnxfuse[cuda]), or put "
              "the folder that has them into LD_LIBRARY_PATH")
    text = message("convolution")
    expect(text.endswith("onnxfuse: node 'node0' (Region0, convolution): no cuDNN: /nowhere/libcudnn.so: cannot open "
                         f"shared object file: No such file or directory{remedy}"), text)
    other = os.environ["ONNXFUSE_LIBCUDNN"] = os.environ["ONNXFUSE_LIBCUDA"]
    text = message("convolution")
    expect(text.endswith(f"(Region0, convolution): cuDNN is too old: {other} has no cudnnCreate{remedy}"), text)


SCENARIOS = (convolutions, plans, convolutions_behind, no_cudnn)
