"""The block of a product's kernel: its tile of the result, the stages of its operands, and the warps that share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from onnxfuse.schedules.attentions.shape import (
    ALL_SHARED,
    ARRIVALS,
    BLOCK_BYTES,
    REGISTERS,
    TILE_BYTES,
    WARPS,
)
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.reductions.streaming import MOST_SHARED

STAGE_BYTES = 128
"""Of what is summed over, bytes of one stage: a panel."""

WARP_ROWS, WARP_COLUMNS = 64, 32
"""Of the tile of one that multiplies by itself."""

GROUPS, MOST_GROUPS = 2, 3
"""Of four warps that multiply while one warp copies; three, of 64 rows each, where a tile has three times as many."""

PIECE = 64
"""Sums of a row that a warp lays out in shared memory at a time, of 16 rows."""

ASIDE_SLOTS = 2
"""Of each group, pieces of 64 rows and columns of what is read with results, where it would lay out sums."""

FLOATS = 8
"""Numbers by which a row of sums in shared memory is longer than it is, so that rows lie in different banks."""


@dataclass(frozen=True)
class ProductShape:
    """Rows and columns of a block's tile, stages of operands in shared memory; bits of an index; whether four warps
    multiply together; whether operands and results are moved by vectors."""

    rows: int
    columns: int
    stages: int
    together: bool = False
    vectors: bool = True
    bits: int = 32

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = "_together" if self.together else ""
        return f"product_{self.rows}x{self.columns}x{self.stages}_{'v' if self.vectors else 's'}{self.bits}{kind}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("product", rows=self.rows, columns=self.columns, stages=self.stages,
                         group=WARPS if self.together else 1)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        if self.together:
            return self.rows // 16
        return self.rows // WARP_ROWS * (self.columns // WARP_COLUMNS)

    @property
    def overlaps(self) -> bool:
        """Whether a stage is still being multiplied while the next one begins to be."""
        return self.together and self.stages > 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, where the sums come to lie later."""
        return max(self.staged, 4 * self.rows * (self.columns + FLOATS) + self._aligned)

    @property
    def staged(self) -> int:
        """Bytes of the stages."""
        return self.stages * STAGE_BYTES * (self.rows + self.columns) + self._aligned

    @property
    def _aligned(self) -> int:
        """Bytes before them, where they begin at multiples of so many."""
        return TILE_BYTES if self.together else 0

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least: as many as its shared memory and its registers do."""
        threads = 32 * self.warps
        registers = self.columns // 2 + 56 if self.together else WARP_ROWS * WARP_COLUMNS // 32 + 100
        held = REGISTERS // (threads * registers)
        return max(1, min(held, ALL_SHARED // (self.shared + BLOCK_BYTES)))


@dataclass(frozen=True)
class SpecialisedShape(ProductShape):
    """A block of which one warp copies by tensor maps and groups of four multiply: so many tiles at a time (``turns``),
    one that they share or one each; ``split``: blocks of a cluster that share what is summed over; ``moments``: whether
    it tells mean and squares of each column (``column_moments``); ``blocks``: of a multiprocessor; ``asides``: whether
    what is read with results is brought (``asides``); ``line``: bytes of what a stage has of each row;
    ``stays``: stages of the right operand, where these stay for all tiles, of which each has all columns."""

    together: bool = True
    turns: int = 1
    split: int = 1
    moments: bool = False
    blocks: int = 1
    asides: bool = False
    line: int = STAGE_BYTES
    stays: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel."""
        split = f"_split{self.split}" if self.split > 1 else ""
        line = f"_lines{self.line}" if self.line < STAGE_BYTES else ""
        stays = "_stays" if self.stays else ""
        moments, beside = "_moments" if self.moments else "", f"_beside{self.blocks}" if self.blocks > 1 else ""
        tile = f"{self.rows}x{self.columns}x{self.stages}"
        return f"product_{tile}_specialised{self.turns}{split}{moments}{beside}{line}{stays}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("product", **self.settings)

    @property
    def settings(self) -> dict[str, int]:
        """What it sets."""
        split = {"split": self.split} if self.split > 1 else {}
        beside = {"blocks": self.blocks} if self.blocks > 1 else {}
        line = {"line": self.line} if self.line < STAGE_BYTES else {}
        stays = {"stays": 1} if self.stays else {}
        return {"rows": self.rows, "columns": self.columns, "stages": self.stages, "group": WARPS,
                "turns": self.turns, **split, **beside, **line, **stays}

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return (self.groups + 1) * WARPS

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return MOST_GROUPS if self.rows == 64 * MOST_GROUPS else GROUPS

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, the multiplying warps' sums, all of them where other blocks read them,
        and the barriers."""
        staged = self.stages * self.line * self.rows + self.right
        laid = 4 * (self.rows * self.columns if self.split > 1 else self.groups * WARPS * 16 * PIECE)
        known = (2 * self.groups if self.moments else 0) + (2 * ASIDE_SLOTS * self.groups if self.asides else 0)
        return TILE_BYTES + staged + laid + (2 * self.stages + self.groups + known) * ARRIVALS

    @property
    def right(self) -> int:
        """Bytes of the right operand's stages; what lies behind them begins at a multiple of ``TILE_BYTES``."""
        if not self.stays:
            return self.stages * self.line * self.columns
        return -(-self.stays * self.line * self.columns // TILE_BYTES) * TILE_BYTES

    def filled(self) -> Self:
        """The same with as many stages as there is room for."""
        least = replace(self, stages=1)
        one = replace(self, stages=2).shared - least.shared
        most = MOST_SHARED if self.blocks == 1 else ALL_SHARED // self.blocks - BLOCK_BYTES
        stages, even = 1 + (most - least.shared) // one, STAGE_BYTES // self.line
        # What lies behind the stages begins at a multiple of 1,024 bytes.
        return replace(self, stages=stages - stages % even)

    @property
    def strips(self) -> int:
        """Of 64 rows, how many a group has of a tile."""
        return self.windows // 64

    @property
    def windows(self) -> int:
        """Rows of which a group tells what it knows of a column."""
        return self.rows if self.turns > 1 else self.rows // self.groups

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        return self.blocks
