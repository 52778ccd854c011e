"""What the time of blocks for products of 8-bit integers follows from.

Fitted to 220 kernels of the layers of quantised networks and transformers (H200, ``benchmarks/int8.py``): nine of ten
took 0.8 to 1.3 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.schedules.kernel import HOPPER_HAS, TILE_ENDS, Pace
from onnxfuse.schedules.products.shape import ProductShape, SpecialisedShape

RATE = 2.2
"""How many times the FLOP/s of 16-bit floats large tiles reach that a warp copies."""

LINE, LINE_OF_WINDOWS = 1.6e-9, 1.85e-9
"""Seconds of a multiprocessor in which threads copy a line of a stage, of matrices and of images' windows, while four
warps multiply the stage before."""

ZEROS = 1.35
"""How many times as long that takes where operands have zero points, whose totals are taken on the way."""

RESULT, RESULT_SPECIALISED = (0.107e-9, 1.8e-12), (0.03e-9, 7e-12)
"""Seconds of a result of a tile, and of each instruction of what is computed of it: by all warps of a block, several of
which a multiprocessor may have, and by those that multiply in one of which a warp copies."""


@dataclass(frozen=True)
class IntegerTiles:
    """Those of a block at the planned sizes.

    Attributes:
        count: how many there are; stages: each goes through so many.
        line: elements of a line of a stage; windows: whether these are of images' windows.
        follows: instructions of what is computed of a sum; zeros: whether operands have zero points.
        copied: whether threads copy whole vectors of operands.
    """

    count: int
    stages: int
    line: int
    windows: bool
    follows: int
    zeros: bool
    copied: bool

    def pace(self, shape: ProductShape) -> Pace | None:
        """Of blocks with a warp that copies, and of those whose warps multiply together; None of others, of which
        nothing was measured."""
        copies = isinstance(shape, SpecialisedShape)
        if not copies and not (shape.together and self.copied):
            return None
        tiles, results = -(-self.count // HOPPER_HAS), shape.rows * shape.columns
        one, each = RESULT_SPECIALISED if copies else RESULT
        ends = results * (one + each * self.follows) - TILE_ENDS
        if copies:
            return Pace(tiles, self.stages, 2 * results * self.line, RATE, ends=ends)
        line = (LINE_OF_WINDOWS if self.windows else LINE) * (ZEROS if self.zeros else 1.0)
        return Pace(tiles, self.stages, 0, waits=line * (shape.rows + shape.columns), ends=ends)
