"""Scenarios of launches with attributes and tensor maps, and of drivers and GPUs that have none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import onnxruntime
from native.stand_in import counter, driver, expect, fails, message, plus, session


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
    expect("the variant 'tiles' of the launch plan asks for tensor maps, which GPUs have from sm_90 on"
           in message("tiled_only"))


def shared_scratch() -> None:
    """Buffers that no step needs at once share memory, in either variant, and all come in one allocation."""
    made = session("four")
    allocated = counter("fake_last_allocated", ctypes.c_long)
    x = np.random.default_rng(0).standard_normal(300, np.float32)
    for size, wanted in ((190, 768 + 760), (300, 1280 + 1200), (1, 256 + 4), (190, 768 + 760)):
        expect(np.array_equal(made.run(None, {"x": x[:size]})[0], plus(x[:size], 8)), size)
        expect(allocated.value == wanted, size, allocated.value)
    allocated.value = 0
    expect(made.run(None, {"x": x[:0]})[0].shape == (0,))
    expect(allocated.value == 0 and counter("fake_allocated", ctypes.c_long).value == 0)


def bound(made: onnxruntime.InferenceSession, x: np.ndarray) -> Callable[[], np.ndarray]:
    """Runs of a session with the same memory each time."""
    y = onnxruntime.OrtValue.ortvalue_from_shape_and_type(x.shape, np.float32)
    binding = made.io_binding()
    # A view of the array's own memory, wherever it begins.
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_ortvalue_output("y", y)

    def run() -> np.ndarray:
        made.run_with_iobinding(binding)
        out: np.ndarray = y.numpy()
        return out

    return run


def tensor_maps() -> None:
    """A tensor map is built where its tensor's address or a size is new, and never again."""
    built = counter("fake_maps")
    made = session("tiled")
    memory = aligned(4096)
    memory[:] = np.random.default_rng(0).standard_normal(len(memory))
    runs = [(x, bound(made, x)) for x in (memory[:320], memory[:300], memory[512:832], memory[:640])]
    for turn in range(3):
        for place, (x, run) in enumerate(runs):
            expect(np.array_equal(run(), x + 1), turn, place)
            expect(built.value == 2 * (place + 1 if turn == 0 else len(runs)), turn, place, built.value)
    for _ in range(2):
        for start in range(0, 3600, 4):
            x = memory[start:start + 320]
            expect(np.array_equal(made.run(None, {"x": x})[0], x + 1), start)
    expect(built.value < 3000, built.value)
    before = built.value
    for size in (64, 96, 128, 160, 192, 64):  # more sizes in turn than are kept
        expect(np.array_equal(made.run(None, {"x": memory[:size]})[0], memory[:size] + 1), size)
    expect(built.value > before)
    before = built.value
    expect(made.run(None, {"x": memory[:0]})[0].shape == (0,))
    expect(built.value == before, "a launch of nothing needs no map")


def wrong_tensor_maps() -> None:
    """What a map cannot be built of is told at the run, and what a kernel does not take when a session is created."""
    made = session("tiled")
    memory = aligned(400)
    where = "onnxfuse: node 'node0' (Region0, add-tiled): "
    fails(bound(made, memory[1:321]), where +
          "a tensor map of the launch plan is of a tensor whose address is no multiple of 16")
    counter("fake_map_error").value = 2
    fails(bound(made, memory[:320]), where +
          "could not build a tensor map of the launch plan: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    counter("fake_map_error").value = 0
    expect(np.array_equal(bound(made, memory[:320])(), memory[:320] + 1), "a session works on after a failed run")
    text = message("tiled_few")
    expect(text.endswith(f"{where}parameter 0 of the kernel 'add_one' has 8 bytes; a launch plan gives the 128 of a "
                         "tensor map"), text)
    text = message("tiled_bytes")
    expect(text.endswith(f"{where}parameter 0 of the kernel 'add_tiles' has 128 bytes; a launch plan gives 8 at most"),
           text)


def aligned(count: int) -> np.ndarray:
    """Zeros whose memory begins at a multiple of 64."""
    memory = np.zeros(count + 16, np.float32)
    first = -memory.ctypes.data % 64 // 4
    return memory[first:first + count]


def old_driver() -> None:
    """A driver without the newer entries runs what does not need them."""
    x = np.arange(300, dtype=np.float32)
    expect(np.array_equal(session("one").run(None, {"x": x})[0], x + 1))
    text = message("clustered")
    expect(text.endswith(
        "onnxfuse: node 'node0' (Region0, add-clustered): the NVIDIA driver is too old: the variant 'clusters' of the "
        "launch plan asks for clusters, and it has no cuLaunchKernelEx; CUDA 12 needs driver 525 or newer"), text)
    expect("the variant 'tiles' of the launch plan asks for tensor maps, and it has no cuTensorMapEncodeTiled;"
           in message("tiled"))


SCENARIOS = (clusters, clusters_before_hopper, shared_scratch, tensor_maps, wrong_tensor_maps, old_driver)
