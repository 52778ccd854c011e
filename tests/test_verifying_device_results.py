"""What a kernel left on its device is judged as what it gave to the host; plain memory stands for a GPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import parse
from emulated import EmulatedRunner, FaultyRunner
from numpy.typing import NDArray

from onnxfuse import delivery
from onnxfuse.measuring.machine import HostMemory
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.verifying import CudaRunner
from onnxfuse.verifying.device_arrays import DeviceArray, on_host
from onnxfuse.verifying.nodes import NodeVerifier

Array = NDArray[Any]

TEXTS = {
    "rows": """g (float16[n, 64] x) => (float16[n, 64] y) {
      t = Tanh(x) m = ReduceMean <axes = [-1], keepdims = 1> (t) y = Sub(t, m) }""",
    "two results": "g (float[n, 64] x) => (float[n, 64] y, float[n, 64] z) { z = Neg(x) t = Exp(z) y = Mul(t, z) }",
    "bfloat16": "g (float[n, 64] x) => (bfloat16[n, 64] y) { t = Tanh(x) s = Mul(t, x) y = Cast <to = 16> (s) }",
    "float64": "g (double[n, 64] x) => (double[n, 64] y) { t = Neg(x) y = Mul(t, x) }",
    "integers": "g (float[n, 64] x) => (int32[n, 64] y) { t = Abs(x) s = Mul(t, t) y = Cast <to = 6> (s) }",
    "booleans": "g (float[n, 64] x) => (bool[n, 64] y) { t = Neg(x) s = Tanh(t) y = Greater(s, x) }",
    "a number": "g (float[n, 64] x) => (float y) { t = Mul(x, x) y = ReduceSum <keepdims = 0> (t) }",
}


def left(arrays: Sequence[Array]) -> list[DeviceArray]:
    return [DeviceArray(array, HostMemory(), array.ctypes.data, array.shape, array.dtype) for array in arrays]


class Leaving(EmulatedRunner):
    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],  # type: ignore[override]
               variant: int | None) -> list[DeviceArray]:
        return left(super().kernel(node, model, feeds, variant))


class LeavingFaulty(FaultyRunner):
    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],  # type: ignore[override]
               variant: int | None) -> list[DeviceArray]:
        return left(super().kernel(node, model, feeds, variant))


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("name", TEXTS)
def test_verdicts_are_the_same(name: str, rows: int) -> None:
    """Every figure and every word of them, on given inputs, edges of them, and where something is wrong."""
    made = optimise(parse(TEXTS[name]), Options(verify=False, least_gain=0.0, target="H100", database=False))
    (node,) = read_fused(made.model)
    kind = np.float16 if "float16[" in TEXTS[name] else np.float64 if "double" in TEXTS[name] else np.float32
    feeds = {"x0": np.random.default_rng(0).uniform(-3, 3, (rows, 64)).astype(kind)}
    for here, there, verdict in ((EmulatedRunner(), Leaving(), "passed"), (FaultyRunner(), LeavingFaulty(), "failed")):
        wanted, found = (NodeVerifier(made.model, runner).verify(node, feeds, "given") for runner in (here, there))
        assert found == wanted
        # A hundredth is hardly more than what bfloat16 rounds by.
        assert found.verdict == verdict or not rows or name == "bfloat16"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_a_result_stays_where_it_is(dtype: type[np.generic]) -> None:
    runner = CudaRunner.__new__(CudaRunner)
    runner.__dict__["_memory"] = HostMemory()
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    found = runner._result(onnxruntime.OrtValue.ortvalue_from_numpy(array), kind)
    assert isinstance(found, DeviceArray) and (found.shape, found.dtype, found.ndim) == (array.shape, array.dtype, 3)
    host = on_host(found)
    assert host.dtype == array.dtype and np.array_equal(host, array)
    assert np.array_equal(on_host(replace(found, shape=(24,)))[3:7], found.reshape(-1)[3:7])
    assert np.array_equal(found.reshape(-1).gathered([(1, 3), (20, 22)]), array.reshape(-1)[[1, 2, 20, 21]])
    empty = runner._result(onnxruntime.OrtValue.ortvalue_from_numpy(array[:0].copy()), kind)
    assert isinstance(empty, np.ndarray) and empty.shape == (0, 3, 4)


def test_a_result_that_crosses_the_border_as_another_type() -> None:
    """bfloat16 does as float32: the runtime's arrays have no such type."""
    runner = CudaRunner.__new__(CudaRunner)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((2, 2), np.float32))
    found = runner._result(value, onnx.TensorProto.BFLOAT16)
    assert isinstance(found, np.ndarray) and found.dtype == ml_dtypes.bfloat16


def test_a_runner_for_a_model_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Begins(EmulatedRunner):
        def begin(self) -> None:
            begun.append(1)

    monkeypatch.setattr(delivery, "find_runner", lambda **_: Begins())
    assert delivery.runner_for({}) is not None and begun == [1]
    monkeypatch.setattr(delivery, "find_runner", lambda **_: None)
    assert delivery.runner_for({}) is None
