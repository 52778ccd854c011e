"""The emulator's tiles that arrive by tensor maps: zeros outside, poison until they are waited for, lost arrivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, Order, run_plan
from onnx import TensorProto
from reference import Array

from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.schedules.headers import linked, used_in

KERNEL = """
extern "C" __global__ void copy(const __grid_constant__ of::TensorMap map, const int x, const int y, __half* out) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __half* const tile = reinterpret_cast<__half*>(tiles);
  of::Arrivals* const here = reinterpret_cast<of::Arrivals*>(tiles + 16 * 128);
  if (threadIdx.x == 0) of::count_arrivals(here, 1), of::arrivals_counted();
  __syncthreads();
  if (threadIdx.x == 32) {
    const int at[] = {x, y, 1};
    of::arrive_before(here, 16 * 128);
    of::copy_tile(tile, map, here, at);
  }
  of::wait_for(here, 0);
  for (int i = threadIdx.x; i < 16 * 64; i += 64) out[i] = tile[of::place<16>(i / 64, i % 64)];
}
"""
COPY = linked(("onnxfuse", "mma", "warpgroup", "tensor_copies"), used_in(KERNEL)) + KERNEL
MAP = TensorMap("i0", "float16", ("i0.2", "i0.1", "i0.0"), ("i0.2 2 *", "i0.1 i0.2 * 2 *"), (64, 16, 1), swizzle=128)
MATRICES: Array = np.arange(2 * 20 * 72).reshape(2, 20, 72).astype(np.float16)


def copied(
    source: str, first: tuple[int, int], order: Order = "forward", matrices: Array = MATRICES,
    tensor_map: TensorMap = MAP
) -> Array:
    """The tile of the second of two matrices that begins at a column and a row."""
    step = Step("copy", ("1", "1", "1"), ("64", "1", "1"), ("m0", f"i32:{first[0]}", f"i32:{first[1]}", "o0"), "2056")
    plan = LaunchPlan("copy", 1, (), (), (Output(TensorProto.FLOAT16, ("16", "64")),), (Variant("all", (step,)),),
                      maps=(tensor_map,))
    (found,) = run_plan(plan, source, [matrices], order=order)
    return found


@pytest.mark.parametrize("order", ["forward", "backward", 1])
@pytest.mark.parametrize("first", [(0, 0), (40, 8), (-8, -3), (72, 0)], ids=str)
def test_tiles_have_zeros_outside(first: tuple[int, int], order: Order) -> None:
    """Also where rows of the other matrix are beside them in memory."""
    x, y = first
    padded = np.pad(MATRICES[1], ((16, 16), (64, 64)))
    np.testing.assert_array_equal(copied(COPY, first, order), padded[16 + y:32 + y, 64 + x:128 + x])


@pytest.mark.parametrize("high", [31, 32])
def test_copies_that_leave_elements_out(high: int) -> None:
    """Every second row, of a box with as many as are copied, also where the last one that is left out is in it."""
    every_second = replace(MAP, box=(64, high, 1), element_strides=(1, 2, 1))
    padded = np.pad(MATRICES[1], ((16, 16), (64, 64)))
    np.testing.assert_array_equal(copied(COPY, (8, -3), tensor_map=every_second), padded[13:45:2, 72:136])


def test_neighbours_are_copied_together() -> None:
    with pytest.raises(EmulatorError, match="a tensor map asks for what is not emulated"):
        copied(COPY, (0, 0), tensor_map=replace(MAP, element_strides=(2, 1, 1)))


def test_what_nobody_waits_for_is_poison() -> None:
    head, wait, tail = COPY.partition("  of::wait_for(here, 0);\n")
    late = f"{head}  __syncthreads();\n{tail.removesuffix('}' + chr(10))}  __syncthreads();\n{wait}}}\n"
    assert np.isnan(copied(late, (0, 0))).all()


@pytest.mark.parametrize(("old", "new", "message"), [
    ("arrive_before(here, 16 * 128)", "arrive_before(here, 16 * 130)", "but 0 of 1 arrivals and 32 bytes do not come"),
    ("of::arrive_before(here, 16 * 128);", "", "but 1 of 1 arrivals and -2048 bytes do not come"),
    ("of::wait_for(here, 0);", "", "a tile is still coming when the block ends"),
    ("of::copy_tile(tile, map, here, at);", "of::copy_tile(tile + 8, map, here, at);", "a tile at no multiple of 1024"),
    ("const int at[] = {x, y, 1};", "const int at[] = {x, y};", "2 coordinates for a tensor map of rank 3"),
    ("of::arrive_before(here, 16 * 128);", "of::arrive_before(here, 16 * 128); of::arrive(here);",
     "more than 1 arrivals in a phase"),
    ("of::wait_for(here, 0);", "here[0] = 0; of::wait_for(here, 0);", "arrivals that something was written over"),
    ("of::count_arrivals(here, 1), ", "", "no arrivals are counted at this address"),
])
def test_faults_of_arrivals(old: str, new: str, message: str) -> None:
    assert old in COPY
    with pytest.raises(EmulatorError) as error:
        copied(COPY.replace(old, new), (0, 0))
    assert message in str(error.value)


def test_rows_that_no_map_has() -> None:
    """As the driver would refuse them."""
    with pytest.raises(EmulatorError, match=r"no tensor map has address .* strides \[140, 2800\]"):
        copied(COPY, (0, 0), matrices=MATRICES[:, :, :70])
