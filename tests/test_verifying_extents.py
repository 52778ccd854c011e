"""Extents of outputs by the GPU's kernel, in the emulator, against NumPy's: in float64, no tolerance but for sums."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.emulator import Emulator
from onnxfuse.runtime.compile import architectures, compile_cubin
from onnxfuse.verifying import device_extents
from onnxfuse.verifying.blocks import BLOCK, parts
from onnxfuse.verifying.comparison import compared
from onnxfuse.verifying.device_extents import FIELDS, THREADS, DeviceExtents, entry, read, scalars, text
from onnxfuse.verifying.evaluate import array_type
from onnxfuse.verifying.extents import Extent, extents
from onnxfuse.verifying.tolerances import TABLE, WIDTHS

HALF, FLOAT, DOUBLE = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE
NARROW = [(dtype, arithmetic) for dtype in WIDTHS for arithmetic in WIDTHS[:WIDTHS.index(dtype) + 1]]

Array = NDArray[Any]


class Emulated(DeviceExtents):
    """The kernel in the emulator; counts the elements that it saw."""

    seen = 0

    def _fields(self, got: Array, reference: Array, own: Array | None, types: tuple[int, int]) -> Array | None:
        self.seen += got.size
        blocks = -(-got.size // BLOCK)
        result = np.full((blocks, len(FIELDS)), np.nan)
        bits = [each if each is None else each.view(f"u{each.itemsize}") for each in (got, own)]
        mine, theirs = bits
        Emulator(text()).launch(entry(types[0]), blocks, THREADS, [
            mine, reference.astype(np.float64), mine if theirs is None else theirs, int(own is not None), got.size,
            BLOCK, *scalars(types), result])
        return result


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    monkeypatch.setattr(device_extents, "LEAST_ELEMENTS", 1)
    return Emulated(0, "sm_90")


def numbers(dtype: int, arithmetic: int, count: int, large: float = 1.0) -> tuple[Array, Array, Array]:
    """A reference, a kernel's result that is near it, and the original's own, which is as near."""
    generator = np.random.default_rng(count)
    exact = generator.standard_normal(count) * large * np.exp2(generator.integers(-30, 1, count))
    exact[::7] = 0.0
    kind, narrow = array_type(dtype), array_type(arithmetic)
    got, own = ((exact * (1 + 3e-3 * generator.standard_normal(count))).astype(narrow).astype(kind) for _ in range(2))
    return got, exact, own


def same(one: Extent, other: Extent) -> bool:
    """Sums in another order differ in the last digits."""
    (*first, squares, count), (*second, others, counted) = astuple(one), astuple(other)
    return first == second and count == counted and np.allclose(squares, others, rtol=1e-12, atol=0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("dtype", "arithmetic"), NARROW)
def test_the_kernel_gives_the_hosts_extents(dtype: int, arithmetic: int, known: bool, emulated: Emulated) -> None:
    """Blocks that end early, numbers that float16 has not as normal ones, zeros, and some that are none."""
    for count in (1, 33, BLOCK, 2 * BLOCK + 31):
        got, exact, own = numbers(dtype, arithmetic, count)
        if count > BLOCK:
            got[5], got[BLOCK - 1], exact[7], own[9] = np.nan, np.inf, -np.inf, np.nan
        theirs = own if known else None
        found = emulated(got, exact, theirs, (dtype, arithmetic))
        wanted = extents(got, exact, theirs, (dtype, arithmetic))
        assert len(found) == len(wanted) == len(parts(count))
        assert all(map(same, found, wanted)), (count, found, wanted)
    assert emulated.seen == 1 + 33 + BLOCK + 2 * BLOCK + 31


@pytest.mark.parametrize("large", [1e-160, 1e160])
def test_squares_that_float64_has_not(large: float, emulated: Emulated) -> None:
    """The host goes through these blocks itself."""
    got, exact, own = numbers(DOUBLE, DOUBLE, BLOCK + 1, large)
    (found, *_), (wanted, *_) = (each(got, exact, own, (DOUBLE, DOUBLE)) for each in (emulated, extents))
    assert same(found, wanted)
    row = np.array([0, large, large, 0, 1, 1, large * large, 1, 0])
    one = np.ones(9) * (np.arange(9) > 0)
    assert read(np.array([row, one]), [8, 8], TABLE[DOUBLE])[1] == [0]


def test_a_judgement_is_the_same(emulated: Emulated) -> None:
    """Errors and places of the worst element, and of one that is wrong in a block of its own."""
    got, exact, own = numbers(HALF, HALF, 5 * BLOCK)
    got = exact.astype(np.float16)
    assert compared(got, [exact], None, (HALF, HALF), measure=emulated).passed
    got[3 * BLOCK + 17] += 1
    for theirs in (None, own):
        found, wanted = (compared(got, [exact], theirs, (HALF, HALF), measure=each) for each in (emulated, extents))
        assert not found.passed and found.where == wanted.where == (3 * BLOCK + 17,)
        assert found.wrong == wanted.wrong and np.isclose(found.ratio, wanted.ratio)


def test_what_the_host_does_alone(emulated: Emulated) -> None:
    """Exact results, whose errors no type allows, and a GPU that does not answer."""
    got, exact, own = numbers(HALF, HALF, 64)
    assert [*emulated(got, exact, own, (HALF, None))] == [*extents(got, exact, own, (HALF, None))]
    assert not emulated.seen
    emulated._fields = lambda *_: None  # type: ignore[method-assign]
    assert [*emulated(got, exact, own, (HALF, HALF))] == [*extents(got, exact, own, (HALF, HALF))]


def test_bfloat16_is_taken_as_bits(emulated: Emulated) -> None:
    got, exact, _ = numbers(TensorProto.BFLOAT16, TensorProto.BFLOAT16, 100)
    assert got.dtype == ml_dtypes.bfloat16
    assert all(map(same, emulated(got, exact, None, (TensorProto.BFLOAT16,) * 2),
                   extents(got, exact, None, (TensorProto.BFLOAT16,) * 2)))


@pytest.mark.parametrize("number", architectures())
def test_the_kernel_compiles(number: int) -> None:
    assert compile_cubin(text(), f"sm_{number}")
