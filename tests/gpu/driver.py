"""Launches through the CUDA driver itself, for kernels that take what CuPy does not pass: tensor maps by value."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from onnxfuse.lowering.launch import Situation
from onnxfuse.lowering.tensor_map import FILLS, INTERLEAVES, PROMOTIONS, SWIZZLES, TYPES, TensorMap

MAP_BYTES, MAP_ALIGNMENT = 128, 64


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _called(name: str, *arguments: Any) -> None:
    """Call an entry of the driver.

    Raises:
        RuntimeError: it says no.
    """
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {code}, {(text.value or b'?').decode()}")


def encoded(one: TensorMap, addresses: Mapping[str, int], situation: Situation) -> ctypes.Array[ctypes.c_char]:
    """A tensor map as the driver makes it, for tensors at these addresses.

    Raises:
        RuntimeError: the driver refuses it.
    """
    held = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(held) % MAP_ALIGNMENT

    def numbers(kind: type[Any], values: Sequence[int]) -> Any:
        return (kind * max(len(values), 1))(*values)

    _called(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(ctypes.addressof(held) + start), list(TYPES).index(one.dtype),
        ctypes.c_uint32(len(one.sizes)), ctypes.c_void_p(addresses[one.base]),
        numbers(ctypes.c_uint64, [situation.evaluate(size) for size in one.sizes]),
        numbers(ctypes.c_uint64, [situation.evaluate(stride) for stride in one.strides]),
        numbers(ctypes.c_uint32, one.box), numbers(ctypes.c_uint32, one.element_strides),
        INTERLEAVES.index(one.interleave), SWIZZLES.index(one.swizzle), PROMOTIONS.index(one.promotion),
        FILLS.index(one.fill))
    return ctypes.create_string_buffer(held.raw[start:start + MAP_BYTES], MAP_BYTES)


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: what it is, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint))


_CLUSTER = 4
"""``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION``."""


def launched(
    function: int, grid: Sequence[int], block: Sequence[int], shared: int, arguments: Sequence[Any],
    cluster: Sequence[int] = (),
) -> None:
    """Launch a kernel, by its handle, and wait for it.

    ``arguments`` are ctypes values, copied as they are; ``cluster``: blocks of one along each axis, if there are some.

    Raises:
        RuntimeError: the launch, or the kernel, fails.
    """
    pointers = (ctypes.c_void_p * max(len(arguments), 1))(*map(ctypes.addressof, arguments))
    whole = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block)), shared]
    attribute = _Attribute(_CLUSTER, b"", (ctypes.c_uint * 16)(*cluster))
    how = _Launch((ctypes.c_uint * 7)(*whole), None, ctypes.pointer(attribute), 1 if cluster else 0)
    _called("cuLaunchKernelEx", ctypes.byref(how), ctypes.c_void_p(function), pointers, None)
    _called("cuCtxSynchronize")
