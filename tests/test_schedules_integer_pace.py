"""What is predicted of blocks for 8-bit integers, beside times that were measured on an H200."""

from __future__ import annotations

import pytest

from onnxfuse.schedules.kernel import TILE_BEGINS
from onnxfuse.schedules.products.integer_pace import IntegerTiles
from onnxfuse.schedules.products.integers import IntegerShape, IntegerSpecialisedShape
from onnxfuse.schedules.products.pace import MULTIPLIED
from onnxfuse.schedules.products.shape import ProductShape

BYTES, FLOATS, GELU = 43, 2, 54
"""Instructions of what is computed of a sum that is rounded to int8 behind bias and ReLU, of one that is scaled, and of
one that is rounded behind bias and GELU."""


def microseconds(
    shape: ProductShape, sizes: tuple[int, int, int], follows: int, *, windows: bool = False, zeros: bool = False,
    blank: float = 0.0,
) -> float:
    """Of a product of so many rows and columns over a depth."""
    rows, columns, depth = sizes
    count = -(-rows // shape.rows) * -(-columns // shape.columns)
    stages = -(-depth // 128) if not blank else round(depth / (1 - blank) / 128)
    pace = IntegerTiles(count, stages, 128, windows, follows, zeros, True, blank=blank).pace(shape)
    assert pace is not None
    return 1e6 * (TILE_BEGINS + pace.tiled(MULTIPLIED[1]))


@pytest.mark.parametrize(("tile", "sizes", "windows", "zeros", "measured"), [
    ((128, 64, 2), (100_352, 64, 64), False, False, 8.9), ((128, 256, 2), (100_352, 256, 64), False, False, 30.8),
    ((64, 64, 4), (100_352, 64, 576), True, False, 22.5), ((256, 128, 4), (25_088, 128, 1152), True, False, 11.4),
    ((128, 128, 2), (6272, 1024, 256), False, False, 9.9), ((128, 64, 4), (25_088, 128, 1152), True, True, 17.4),
    ((256, 128, 4), (25_088, 128, 1152), True, True, 13.9), ((128, 64, 6), (1568, 512, 4608), True, False, 15.5),
    ((128, 256, 4), (6304, 3072, 768), False, False, 45.6),
])
def test_warps_that_multiply_together(
    tile: tuple[int, int, int], sizes: tuple[int, int, int], windows: bool, zeros: bool, measured: float
) -> None:
    shape = IntegerShape(*tile, together=True, width=8)
    assert microseconds(shape, sizes, BYTES, windows=windows, zeros=zeros) == pytest.approx(measured, rel=0.25)


def test_sums_that_are_laid_out_take_longer() -> None:
    """As all did before lanes stored results of those that they have, when 100,352 rows of 64 to 256 took 41.7
    microseconds."""
    laid = microseconds(IntegerShape(128, 256, 2, together=True), (100_352, 256, 64), BYTES)
    assert laid == pytest.approx(41.7, rel=0.1)


def test_zero_points_take_longer() -> None:
    """Their totals are taken on the way."""
    shape, sizes = IntegerShape(64, 128, 4, together=True, width=8), (25_088, 128, 1152)
    with_them, without = (microseconds(shape, sizes, BYTES, windows=True, zeros=zeros) for zeros in (True, False))
    assert with_them / without == pytest.approx(20.5 / 15.3, rel=0.1)


@pytest.mark.parametrize(("tile", "turns", "sizes", "follows", "measured"), [
    ((192, 192), 1, (6304, 3072, 768), FLOATS, 26.5), ((192, 192), 1, (6304, 768, 3072), FLOATS, 26.7),
    ((128, 192), 1, (1024, 3072, 768), FLOATS, 6.0), ((128, 256), 1, (100_352, 256, 64), BYTES, 28.3),
    ((256, 128), 1, (25_088, 512, 128), BYTES, 13.0), ((128, 192), 1, (6304, 768, 3072), BYTES, 30.1),
    ((128, 128), 2, (6304, 3072, 768), BYTES, 33.1), ((128, 128), 2, (6304, 3072, 768), GELU, 43.6),
    ((128, 128), 2, (1568, 512, 2048), BYTES, 10.6),
])
def test_a_warp_that_copies(
    tile: tuple[int, int], turns: int, sizes: tuple[int, int, int], follows: int, measured: float
) -> None:
    shape = IntegerSpecialisedShape(*tile, 4, turns=turns)
    assert microseconds(shape, sizes, follows) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("tile", "turns", "sizes", "blank", "measured"), [
    ((256, 64), 1, (100_352, 64, 576), 0.5, 23.2), ((128, 128), 2, (100_352, 64, 576), 0.5, 51.5),
    ((128, 64), 1, (25_088, 128, 1152), 0.0, 13.0), ((128, 128), 1, (6272, 256, 2304), 0.0, 9.4),
])
def test_windows_that_are_copied_in_boxes(
    tile: tuple[int, int], turns: int, sizes: tuple[int, int, int], blank: float, measured: float
) -> None:
    """Where channels are half of a line the rest of it is zeros."""
    shape = IntegerSpecialisedShape(*tile, 4, turns=turns)
    assert microseconds(shape, sizes, BYTES, windows=True, blank=blank) == pytest.approx(measured, rel=0.25)


def test_rows_that_are_read_with_the_results_take_longer() -> None:
    """Sums are laid out then."""
    shape = IntegerSpecialisedShape(128, 256, 4)
    alone, beside = (IntegerTiles(1000, 2, 128, False, BYTES, False, True, each).pace(shape) for each in (0, 2))
    assert alone is not None and beside is not None and alone.ends < beside.ends / 2


def test_tiles_wait_for_what_is_read_with_results() -> None:
    """Once where registers hold it all, and less where a multiprocessor has other blocks meanwhile."""
    def ends(columns: int, beside: int) -> float:
        pace = IntegerTiles(1000, 2, 128, False, 0, False, True, beside).pace(
            IntegerShape(128, columns, 2, together=True, width=8))
        assert pace is not None
        return pace.ends

    narrow, wide = (1e6 * (ends(columns, 2) - ends(columns, 0)) for columns in (128, 256))
    assert narrow == pytest.approx(0.6) and wide == pytest.approx(4 * 1.2)


def test_nothing_is_known_of_others() -> None:
    """Blocks whose warps multiply each for themselves, and operands that come element by element."""
    tiles = IntegerTiles(100, 4, 128, False, FLOATS, False, True)
    assert tiles.pace(IntegerShape(128, 128, 2)) is None
    apart = IntegerTiles(100, 4, 128, False, FLOATS, False, False)
    assert apart.pace(IntegerShape(128, 128, 2, together=True)) is None
