"""Copies by the CUDA driver; a library of the host stands in for it, whose memory is the host's."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from onnxfuse.errors import KernelError
from onnxfuse.measuring.driver import Device

DRIVER = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int held = 0, refused = 0;
int cuCtxSetCurrent(void* context) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t size) { ++held; *address = (uint64_t)malloc(size); return 0; }
int cuMemFree_v2(uint64_t address) { --held; free((void*)address); return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream) {
  if (refused) return 700;
  memcpy((void*)to, (void*)from, size);
  return 0;
}
int waited = 0;
int cuStreamSynchronize(void* stream) { ++waited; return stream != NULL; }
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t size, void* stream) {
  memset((void*)to, byte, size);
  return stream != NULL;
}
int cuMemcpyHtoD_v2(uint64_t to, void* from, size_t size) { memcpy((void*)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) { memcpy(to, (void*)from, size); return 0; }
int cuGetErrorString(int code, const char** text) { *text = "an illegal memory access"; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-", "-o", str(path)], input=DRIVER, text=True, check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def device(library: ctypes.CDLL) -> Device:
    found = object.__new__(Device)
    found._library, found._holding = library, ctypes.PyDLL(library._name)
    found._context = ctypes.c_void_p()
    return found


def test_pieces_are_gathered_in_their_order(device: Device, library: ctypes.CDLL) -> None:
    numbers = ctypes.create_string_buffer(bytes(range(200)))
    start = ctypes.addressof(numbers)
    assert device.gather([start + place for place in (40, 0, 190)], 10) == bytes(
        [*range(40, 50), *range(10), *range(190, 200)])
    assert ctypes.c_int.in_dll(library, "held").value == 0


def test_a_copy_that_fails(device: Device, library: ctypes.CDLL) -> None:
    """Is told, and gives its memory back."""
    refused = ctypes.c_int.in_dll(library, "refused")
    refused.value = 1
    with pytest.raises(KernelError, match=r"cuMemcpyDtoDAsync_v2 failed: an illegal memory access \(700\)"):
        device.gather([0, 64], 8)
    refused.value = 0
    assert ctypes.c_int.in_dll(library, "held").value == 0


def test_what_is_written_is_there_on_return(device: Device, library: ctypes.CDLL) -> None:
    waited = ctypes.c_int.in_dll(library, "waited")
    there, here = ctypes.create_string_buffer(64), ctypes.create_string_buffer(bytes(range(64)), 64)
    device.upload(ctypes.addressof(there), ctypes.addressof(here), 32)
    assert there.raw == bytes([*range(32), *[0] * 32]) and waited.value == 1
    device.fill(ctypes.addressof(there) + 8, 0xFF, 16)
    assert there.raw == bytes([*range(8), *[0xFF] * 16, *range(24, 32), *[0] * 32]) and waited.value == 2
    device.fill(ctypes.addressof(there), 0, 0)
    device.upload(ctypes.addressof(there), ctypes.addressof(here), 0)
    assert waited.value == 2


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_bytes_come_back(size: int, device: Device) -> None:
    """Few with Python's lock, many without."""
    there = ctypes.create_string_buffer(bytes(range(256)) * (size // 256), size)
    assert bytes(device.download(ctypes.addressof(there), size)) == there.raw
