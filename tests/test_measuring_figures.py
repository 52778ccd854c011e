"""Medians, ratios, comparison, and the memory meter."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.errors import KernelError
from onnxfuse.measuring.compare import compare
from onnxfuse.measuring.driver import Device
from onnxfuse.measuring.memory import MemoryMeter
from onnxfuse.measuring.statistics import Ratio, ratio, spread


def test_a_spread():
    found = spread(np.array([[4.0, 1.0], [2.0, 3.0], [5.0, 100.0]]))
    assert (found.median, found.least, found.most, found.runs) == (3.5, 1.0, 100.0, 6)
    assert (found.lower_quartile, found.upper_quartile) == (2.25, 4.75)


def test_a_ratio_without_noise_is_exact():
    times = np.linspace(2.0, 2.0, 40).reshape(10, 4)
    assert ratio(times, times / 2) == Ratio(2.0, 2.0, 2.0)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """float64 lognormal times with a true ratio of 1.5; 95% intervals of ten blocks hold it in at least 85% of 100
    trials (the percentile bootstrap of ten blocks is a little narrow)."""
    generator, held = np.random.default_rng(0), 0
    for trial in range(100):
        a, b = (np.exp(generator.normal(0, 0.1, (10, 5))) for _ in range(2))
        found = ratio(1.5 * a, b, seed=trial)
        assert found.low <= found.value <= found.high
        held += found.low <= 1.5 <= found.high
    assert held >= 85


def test_what_both_models_of_a_block_suffer_does_not_widen_the_interval():
    slow = np.repeat(np.arange(1.0, 11.0), 4).reshape(10, 4)
    found = ratio(3 * slow, slow)
    assert found.high / found.low == pytest.approx(1.0)


def test_a_ratio_of_series_that_do_not_match():
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
        ratio(np.ones((2, 3)), np.ones((3, 2)))


def test_a_ratio_as_text():
    assert str(Ratio(1.5, 1.449, 1.6)) == "1.50 (1.45 to 1.60)"


def error(wanted: list[float], found: list[float], dtype: object = np.float32) -> float:
    return compare({"y": np.array(wanted, dtype)}, {"y": np.array(found, dtype)})[0].error


def test_errors_are_relative_to_the_outputs_own_magnitude():
    assert error([1, -8], [1, -8]) == 0
    assert error([1, -8], [2, -8]) == 0.125
    assert error([1, -8], [2, -8], ml_dtypes.bfloat16) == 0.125
    assert error([0, 0], [0, 0]) == 0
    assert error([0, 0], [0, 1]) == float("inf")
    assert error([3, 5], [3, 4], np.int64) == 0.2
    assert error([], []) == 0


def test_infinities_and_nans_have_to_be_the_same():
    nan, inf = float("nan"), float("inf")
    assert error([nan, inf, 2], [nan, inf, 1]) == 0.5
    assert error([nan, 1], [1, 1]) == inf
    assert error([inf, 1], [-inf, 1]) == inf
    assert error([inf, 1], [nan, 1]) == inf


def test_outputs_of_other_shapes_or_missing_ones():
    assert compare({"y": np.ones(2)}, {"y": np.ones(3)})[0].error == float("inf")
    assert compare({"y": np.ones(2)}, {})[0].error == float("inf")


class FakeDriver:
    """libcuda of a GPU with a 60 MB L2, whose copies of a gigabyte take a millisecond."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.called: list[str] = []

    def __getattr__(self, name: str) -> object:
        def function(*arguments: object) -> int:
            self.called.append(name)
            first = arguments[0] if arguments else None
            if name == "cuDeviceGetName":
                first.value = b"Fake GPU"
            elif name == "cuDeviceGetAttribute":
                first._obj.value = 60_000_000
            elif name == "cuDriverGetVersion":
                first._obj.value = 12080
            elif name == "cuEventElapsedTime":
                first._obj.value = 1.0
            elif name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
            return 2 if name == self.failing else 0

        return function


def test_a_device():
    library = FakeDriver()
    device = Device(0, library, library)
    assert (device.name, device.l2_bytes, device.cuda) == ("Fake GPU", 60_000_000, "12.8")
    assert device.copy_rate(10**9, 2) == pytest.approx(2e12, rel=1e-6)


def test_the_buffers_of_a_copy_are_given_back():
    library = FakeDriver("cuMemcpyDtoDAsync_v2")
    with pytest.raises(KernelError) as error:
        Device(0, library, library).copy_rate(10**9, 2)
    assert str(error.value) == "cuMemcpyDtoDAsync_v2 failed: out of memory (2)"
    assert library.called.count("cuMemFree_v2") == 2


class Heap:
    """Device memory that is none, of 1000 bytes."""

    def __init__(self) -> None:
        self.next, self.room, self.freed = 0x1000, 1000, []

    def allocate(self, size: int) -> int:
        if size > self.room:
            raise KernelError("out of memory")
        self.room -= size
        self.next += 0x1000
        return self.next

    def free(self, address: int) -> None:
        self.freed.append(address)


def test_the_meter_counts_what_is_held_at_once():
    heap = Heap()
    meter = MemoryMeter(heap)
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(meter.options["gpu_external_alloc"]))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(meter.options["gpu_external_free"]))
    ctypes.CFUNCTYPE(None)(int(meter.options["gpu_external_empty_cache"]))()
    first, second = allocate(100), allocate(300)
    free(first)
    allocate(50)
    assert (meter.held, meter.peak) == (350, 400)
    assert allocate(5000) is None
    free(None)
    free(0x5)
    free(second)
    assert (meter.held, meter.peak) == (50, 400)
    assert heap.freed == [first, second]
