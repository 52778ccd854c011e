"""Scenarios of launches with attributes, and of drivers and GPUs that have none."""

from __future__ import annotations

import ctypes

import numpy as np
from native.stand_in import counter, driver, expect, message, plus, session


def last_cluster() -> list[int]:
    """The sizes of the cluster of the last launch with attributes."""
    return list((ctypes.c_uint * 3).in_dll(driver(), "fake_last_cluster"))


def clusters() -> None:
    """A step's cluster and its dependence reach the driver; a run of other steps has neither."""
    x = np.random.default_rng(0).standard_normal(300, np.float32)
    plain = session("one")
    expect(np.array_equal(plain.run(None, {"x": x})[0], x + 1))
    expect(last_cluster() == [0, 0, 0], last_cluster())
    made = session("clustered")
    for size in (300, 1, 0):
        expect(np.array_equal(made.run(None, {"x": x[:size]})[0], plus(x[:size], 3)), size)
    expect(last_cluster() == [2, 1, 1] and counter("fake_last_dependent", ctypes.c_uint).value == 1, last_cluster())
    expect(list((ctypes.c_uint * 7).in_dll(driver(), "fake_last")) == [2, 1, 1, 128, 1, 1, 0])
    made = session("clustered_scratch")
    expect(np.array_equal(made.run(None, {"x": x})[0], plus(x, 4)))
    expect(counter("fake_allocated", ctypes.c_long).value == 0)
    counter("fake_launch_error").value = 2
    try:
        made.run(None, {"x": x})
    except Exception as error:
        expect(str(error).endswith(
            "could not launch the kernel 'add_one' with grid 4x1x1, block 128x1x1, clusters of 2x1x1 and 0 bytes of "
            "shared memory: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"), error)
    else:
        raise AssertionError("no error")


def clusters_before_hopper() -> None:
    """An older GPU runs the variant that is not guarded; a plan without one is refused when the session is created."""
    counter("fake_major").value, counter("fake_minor").value = 8, 6
    x = np.arange(300, dtype=np.float32)
    expect(np.array_equal(session("clustered").run(None, {"x": x})[0], plus(x, 3)))
    expect(last_cluster() == [0, 0, 0], last_cluster())
    text = message("clustered_only")
    expect(text.endswith(
        "onnxfuse: node 'node0' (Region0, add-clustered): the variant 'clusters' of the launch plan asks for clusters, "
        "which GPUs have from sm_90 on, and Fake GPU \"40\" is sm_86: use the model on a newer GPU, or fuse it again "
        "for this one"), text)


def old_driver() -> None:
    """A driver without the newer entries runs what does not need them."""
    x = np.arange(300, dtype=np.float32)
    expect(np.array_equal(session("one").run(None, {"x": x})[0], x + 1))
    text = message("clustered")
    expect(text.endswith(
        "onnxfuse: node 'node0' (Region0, add-clustered): the NVIDIA driver is too old: the variant 'clusters' of the "
        "launch plan asks for clusters, and it has no cuLaunchKernelEx; CUDA 12 needs driver 525 or newer"), text)


SCENARIOS = (clusters, clusters_before_hopper, old_driver)
