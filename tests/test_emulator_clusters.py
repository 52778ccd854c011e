"""Clusters in the emulator: blocks that run together, meet, and read each other's shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.emulator import EmulatorError
from onnxfuse.emulator.machine import Emulator, Order

TEXT = r"""
extern "C" __global__ void neighbours(const int* in, int* out, int blocks) {
  extern __shared__ __align__(16) int own[];
  const int rank = blockIdx.x % blocks;
  own[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  onnxfuse_emulator_meet_cluster(__builtin_LINE());
  const int* there = static_cast<const int*>(
      onnxfuse_emulator_of_block(own + threadIdx.x, (rank + 1) % blocks, __builtin_LINE()));
  const int found = *there;
  onnxfuse_emulator_meet_cluster(__builtin_LINE());
  own[threadIdx.x] = -1;
  out[blockIdx.x * blockDim.x + threadIdx.x] = found;
}
extern "C" __global__ void own_memory(int* out) {
  __shared__ int mine;
  if (threadIdx.x == 0) mine = blockIdx.x;
  __syncthreads();
  onnxfuse_emulator_meet_cluster(__builtin_LINE());
  out[blockIdx.x * blockDim.x + threadIdx.x] = mine;
}
extern "C" __global__ void some_end(int* out) {
  if (threadIdx.x % 2) return;
  onnxfuse_emulator_meet_cluster(__builtin_LINE());
  out[blockIdx.x * blockDim.x / 2 + threadIdx.x / 2] = 1;
}
extern "C" __global__ void one_waits(int* out) {
  if (blockIdx.x == 1 && threadIdx.x == 3) __syncthreads();
  else onnxfuse_emulator_meet_cluster(__builtin_LINE());
}
extern "C" __global__ void far(int* out, int rank) {
  extern __shared__ __align__(16) int own[];
  out[0] = *static_cast<const int*>(onnxfuse_emulator_of_block(own, rank, __builtin_LINE()));
}
extern "C" __global__ void elsewhere(int* out) { onnxfuse_emulator_of_block(out, 0, __builtin_LINE()); }
extern "C" __global__ void ahead(int* out) {
  extern __shared__ __align__(16) unsigned long long barrier[];
  if (threadIdx.x == 0) onnxfuse_emulator_arrivals(barrier, 1, __builtin_LINE());
  __syncthreads();
  if (threadIdx.x == 0) {
    const void* const other = onnxfuse_emulator_of_block(barrier, 1 - blockIdx.x % 2, __builtin_LINE());
    onnxfuse_emulator_arrive(const_cast<void*>(other), 0, __builtin_LINE());
  }
  onnxfuse_emulator_arrived(barrier, 0, __builtin_LINE());
}
extern "C" __global__ void past_the_end(int* out) {
  extern __shared__ __align__(16) int own[];
  if (blockIdx.x == 1 && threadIdx.x == 0) own[40] = 7;
}
"""


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(TEXT)


@pytest.mark.parametrize("order", ["forward", "backward", 1, 2])
@pytest.mark.parametrize(("blocks", "clusters", "threads"), [(2, 3, 33), (8, 1, 64), (3, 2, 1), (1, 4, 96)])
def test_blocks_read_each_other(
    emulator: Emulator, order: Order, blocks: int, clusters: int, threads: int
) -> None:
    given = np.arange(blocks * clusters * threads, dtype=np.int32)
    got = np.zeros_like(given)
    emulator.launch("neighbours", blocks * clusters, threads, [given, got, blocks], 4 * threads, order, cluster=blocks)
    assert np.array_equal(got.reshape(clusters, blocks, -1), np.roll(given.reshape(clusters, blocks, -1), -1, axis=1))


@pytest.mark.parametrize("order", ["forward", "backward", 7])
def test_memory_that_is_not_dynamic_is_each_block_s_own(emulator: Emulator, order: Order) -> None:
    got = np.zeros((6, 40), np.int32)
    emulator.launch("own_memory", 6, 40, [got], order=order, cluster=3)
    assert np.array_equal(got, np.repeat(np.arange(6)[:, None], 40, axis=1))


def test_threads_that_ended_are_not_waited_for(emulator: Emulator) -> None:
    got = np.zeros(64, np.int32)
    emulator.launch("some_end", 2, 64, [got], cluster=2)
    assert got.all()


@pytest.mark.parametrize(("kernel", "message"), [
    ("one_waits", "divergent barrier: thread 0 waits for its cluster"),
    ("elsewhere", "no address of the block's shared"),
    ("past_the_end", "write outside of dynamic shared memory")])
def test_what_is_wrong_is_told(emulator: Emulator, kernel: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        emulator.launch(kernel, 2, 32, [np.zeros(4, np.int32)], 128, cluster=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_block_that_the_cluster_has_not(emulator: Emulator, rank: int) -> None:
    with pytest.raises(EmulatorError, match=f"block {rank} of a cluster of 2"):
        emulator.launch("far", 2, 1, [np.zeros(4, np.int32), rank], 128, cluster=2)


@pytest.mark.parametrize(("grid", "cluster"), [(9, 9), (4, 0), (3, 2)])
def test_clusters_that_no_gpu_has(emulator: Emulator, grid: int, cluster: int) -> None:
    with pytest.raises(EmulatorError, match=f"cannot have clusters of {cluster} blocks"):
        emulator.launch("own_memory", grid, 32, [np.zeros(512, np.int32)], cluster=cluster)


def test_a_block_may_go_ahead_before_the_next_one_begins(emulator: Emulator) -> None:
    """So that who reaches into another block without waiting for it is found, in some order."""
    found = []
    for seed in range(6):
        try:
            emulator.launch("ahead", 2, 64, [np.zeros(1, np.int32)], 64, seed, cluster=2)
        except EmulatorError as error:
            found.append(str(error))
    assert 0 < len(found) < 6 and all("no arrivals are counted at this address" in error for error in found)
    emulator.launch("ahead", 2, 64, [np.zeros(1, np.int32)], 64, cluster=2)
