"""What the time of blocks for products of 8-bit integers follows from.

Fitted to 236 kernels of the layers of quantised networks and transformers, which find operands, scales and biases in
memory (H200, ``benchmarks/int8.py``): eight of ten took 0.8 to 1.25 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.schedules.kernel import HOPPER_HAS, STAGE_WAITS, TILE_ENDS, Pace
from onnxfuse.schedules.products.direct import LANES_OF_A_ROW, VECTORS_AT_ONCE, are_held
from onnxfuse.schedules.products.integers import IntegerShape
from onnxfuse.schedules.products.shape import ProductShape, SpecialisedShape

FLOPS = 6.2e12
"""FLOP/s of a multiprocessor in large tiles of 16-bit floats, of which rates are multiples."""

RATE = 2.0
"""How many times that blocks reach of which one warp copies."""

BOX_LINE, BOX_LINE_BY_TURNS = (1.3e-9, 0.8e-9), (1.1e-9, 5e-9)
"""Seconds of a multiprocessor in which such a warp copies a line of a stage of images' windows, and so much more as it
is zeros behind their channels: for one tile at a time, and for two."""

LINE, LINE_OF_WINDOWS = 1.8e-9, 1.87e-9
"""Seconds of a multiprocessor in which threads copy a line of a stage, of matrices and of images' windows, while four
warps multiply the stage before."""

ZEROS = 1.43
"""How many times as long that takes where operands have zero points, whose totals are taken on the way."""

RESULT, RESULT_LAID = (0.039e-9, 1.4e-12), (0.107e-9, 1.8e-12)
"""Seconds of a result of a tile, and of each instruction of what is computed of it, by all warps of a block, several of
which a multiprocessor may have: where lanes store results where they have the sums, and where these are laid out first
(the latter of 220 kernels as they were, of which all did)."""

ALONE = 1.25
"""How many times as long the former take of a block that a multiprocessor has alone: nothing runs while it waits."""

RESULT_SPECIALISED, RESULT_BY_TURNS, RESULT_BESIDE = (0.013e-9, 1.7e-12), (0.0, 5.6e-12), (0.9e-9, 7e-12)
"""The same by the warps that multiply of a block of which one copies: of one tile at a time; of two, of which one is
multiplied meanwhile; and where sums are laid out, for something is read with the results, piece after piece (two
convolutions with residuals took 0.7 and 1.4 nanoseconds)."""

RESULT_ALONE = 0.65e-9
"""Seconds of a result that is stored by itself, as those are that lie channels first, with what is read beside it (a
convolution of 7 x 7 pixels, by both kinds of blocks)."""

READ = 1.2e-6
"""Seconds that memory takes to answer while many ask: each block of a multiprocessor waits for it."""


@dataclass(frozen=True)
class IntegerTiles:
    """Those of a block at the planned sizes.

    Attributes:
        count: how many there are; stages: each goes through so many.
        line: elements of a line of a stage; windows: whether these are of images' windows.
        follows: instructions of what is computed of a sum; zeros: whether operands have zero points.
        copied: whether threads copy whole vectors of operands; beside: bytes that are read with each result, of rows.
        blank: share of a line of images that is zeros behind their channels; alone: whether results are stored one by
            one.
    """

    count: int
    stages: int
    line: int
    windows: bool
    follows: int
    zeros: bool
    copied: bool
    beside: int = 0
    blank: float = 0.0
    alone: bool = False

    def pace(self, shape: ProductShape) -> Pace | None:
        """Of blocks with a warp that copies, and of those whose warps multiply together; None of others, of which
        nothing was measured."""
        tiles = -(-self.count // HOPPER_HAS)
        if isinstance(shape, SpecialisedShape):
            return self._specialised(shape, tiles)
        if not (isinstance(shape, IntegerShape) and shape.together and self.copied):
            return None
        ends = self._results(shape, RESULT) * (ALONE if shape.beside == 1 else 1.0) + self._read(shape) if (
            shape.is_direct) else self._results(shape, RESULT_LAID)
        line = (LINE_OF_WINDOWS if self.windows else LINE) * (ZEROS if self.zeros else 1.0)
        return Pace(tiles, self.stages, 0, waits=line * (shape.rows + shape.columns), ends=ends - TILE_ENDS)

    def _specialised(self, shape: SpecialisedShape, tiles: int) -> Pace:
        """The former."""
        flops, apart = 2 * shape.rows * shape.columns * self.line, shape.turns > 1
        line, zeros = BOX_LINE_BY_TURNS if apart else BOX_LINE
        waits = (line + zeros * self.blank) * (shape.rows + shape.columns) if self.windows else 0.0
        stored = RESULT_BESIDE if self.beside else RESULT_BY_TURNS if apart else RESULT_SPECIALISED
        ends = self._results(shape, stored)
        if not apart:
            return Pace(tiles, self.stages, flops, RATE, waits=waits, ends=ends)
        # One tile is stored while another is multiplied, but for the last of an odd number.
        multiplied = self.stages * max(flops / (FLOPS * RATE), STAGE_WAITS, waits)
        two, one = max(2 * multiplied, multiplied + ends), multiplied + ends
        return Pace(tiles, self.stages, flops, RATE, whole=tiles // 2 * two + tiles % 2 * one)

    def _read(self, shape: IntegerShape) -> float:
        """Seconds that a tile waits for what is read with its results: once, or for some vectors after the other."""
        if not self.beside:
            return 0.0
        vectors = shape.columns // (LANES_OF_A_ROW * shape.width)
        times = 1 if are_held(shape.columns, self.beside) else -(-vectors // VECTORS_AT_ONCE)
        return READ * times / shape.beside

    def _results(self, shape: ProductShape, one: tuple[float, float]) -> float:
        """Seconds of all results of a tile."""
        alone, each = one
        return shape.rows * shape.columns * (alone + each * self.follows + (RESULT_ALONE if self.alone else 0.0))
