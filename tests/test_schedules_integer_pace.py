"""What is predicted of blocks for 8-bit integers, beside times that were measured on an H200."""

from __future__ import annotations

import pytest

from onnxfuse.schedules.kernel import TILE_BEGINS
from onnxfuse.schedules.products.integer_pace import IntegerTiles
from onnxfuse.schedules.products.integers import IntegerShape, IntegerSpecialisedShape
from onnxfuse.schedules.products.pace import MULTIPLIED
from onnxfuse.schedules.products.shape import ProductShape

BYTES, FLOATS = 43, 2
"""Instructions of what is computed of a sum that is rounded to int8 behind bias and ReLU, and of one that is scaled."""


def microseconds(
    shape: ProductShape, sizes: tuple[int, int, int], follows: int, *, windows: bool = False, zeros: bool = False
) -> float:
    """Of a product of so many rows and columns over a depth."""
    rows, columns, depth = sizes
    count = -(-rows // shape.rows) * -(-columns // shape.columns)
    pace = IntegerTiles(count, -(-depth // 128), 128, windows, follows, zeros, True).pace(shape)
    assert pace is not None
    return 1e6 * (TILE_BEGINS + pace.tiled(MULTIPLIED[1]))


@pytest.mark.parametrize(("tile", "sizes", "windows", "zeros", "measured"), [
    ((128, 64, 2), (100_352, 64, 64), False, False, 11.3), ((128, 256, 2), (100_352, 256, 64), False, False, 41.7),
    ((64, 64, 4), (100_352, 64, 576), True, False, 24.4), ((256, 128, 4), (25_088, 128, 1152), True, False, 15.2),
    ((128, 128, 2), (6272, 1024, 256), False, False, 12.9), ((128, 64, 4), (25_088, 128, 1152), True, True, 19.3),
    ((256, 128, 4), (25_088, 128, 1152), True, True, 16.3), ((128, 64, 6), (1568, 512, 4608), True, False, 15.9),
    ((128, 256, 4), (6304, 3072, 768), False, False, 55.0),
])
def test_warps_that_multiply_together(
    tile: tuple[int, int, int], sizes: tuple[int, int, int], windows: bool, zeros: bool, measured: float
) -> None:
    shape = IntegerShape(*tile, together=True)
    assert microseconds(shape, sizes, BYTES, windows=windows, zeros=zeros) == pytest.approx(measured, rel=0.25)


def test_zero_points_take_longer() -> None:
    """Their totals are taken on the way."""
    shape, sizes = IntegerShape(64, 128, 4, together=True), (25_088, 128, 1152)
    with_them, without = (microseconds(shape, sizes, BYTES, windows=True, zeros=zeros) for zeros in (True, False))
    assert with_them / without == pytest.approx(23.0 / 18.6, rel=0.1)


@pytest.mark.parametrize(("tile", "sizes", "follows", "measured"), [
    ((192, 192), (6304, 3072, 768), FLOATS, 26.5), ((192, 192), (6304, 768, 3072), FLOATS, 22.2),
    ((128, 192), (1024, 3072, 768), FLOATS, 6.4), ((128, 256), (100_352, 256, 64), BYTES, 72.6),
    ((256, 128), (25_088, 512, 128), BYTES, 33.5), ((128, 192), (6304, 768, 3072), BYTES, 40.5),
])
def test_a_warp_that_copies(
    tile: tuple[int, int], sizes: tuple[int, int, int], follows: int, measured: float
) -> None:
    shape = IntegerSpecialisedShape(*tile, 4)
    assert microseconds(shape, sizes, follows) == pytest.approx(measured, rel=0.25)


def test_nothing_is_known_of_others() -> None:
    """Blocks whose warps multiply each for themselves, and operands that come element by element."""
    tiles = IntegerTiles(100, 4, 128, False, FLOATS, False, True)
    assert tiles.pace(IntegerShape(128, 128, 2)) is None
    apart = IntegerTiles(100, 4, 128, False, FLOATS, False, False)
    assert apart.pace(IntegerShape(128, 128, 2, together=True)) is None
