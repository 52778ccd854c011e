"""The block of an attention kernel: its warps, their rows, and a tile's keys; what fits a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxfuse.schedules.choice import Choice

HOPPER = "sm 90 =="
"""The guard of what four warps multiply together."""

WIDTH = 8
"""Elements of 16 bytes."""

WARPS = 4
"""Warps of a block, where there are queries for all of them; those that multiply together."""

GROUP_ROWS = 16 * WARPS
"""Queries of these."""

PANEL = 64
"""Columns of a panel of a tile that they read."""

TILE_BYTES = 1024
"""What such a tile begins at a multiple of."""

ALL_SHARED, BLOCK_BYTES = 228 * 1024, 1024
"""Bytes of shared memory of their multiprocessor, and those that each block has beside its own."""

FLOAT_BYTES = 4
"""Bytes of a number that a mask of keys has become."""

ARRIVALS = 8
"""Bytes of a barrier that counts arrivals."""

SHARES = {2: (40, 232), 3: (32, 160)}
"""Registers of a thread: of the four warps of which one copies, and of those that multiply, in so many groups."""

SHARES_OF_TWO = (32, 104)
"""The same of two groups where a multiprocessor has two such blocks."""

REGISTERS, OTHER_REGISTERS, LESS_REGISTERS = 65_536, 48, 16
"""Of a multiprocessor, and a thread's beside scores, powers and sums; those of them that only copying takes."""


@dataclass(frozen=True)
class AttentionShape:
    """Warps of a block, tiles of 16 rows a warp, keys of a tile, and elements of a vector; bits of an index; whether
    four warps multiply together; bytes of an element; whether tiles of a mask of the scores are copied too."""

    warps: int
    tiles: int
    keys: int
    width: int = WIDTH
    bits: int = 32
    together: bool = False
    size: int = 2
    masked: bool = False

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return 16 * self.warps * self.tiles

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = "_together" if self.together else ""
        return f"attention_{self.warps}x{self.tiles}x16x{self.keys}_w{self.width}_{self.bits}{kind}{self._masked}"

    @property
    def _masked(self) -> str:
        return "_masked" if self.masked else ""

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("attention", warps=self.warps, tiles=self.tiles, keys=self.keys, width=self.width,
                         group=WARPS if self.together else 1)

    def shared(self, depth: int, columns: int) -> int:
        """Bytes of shared memory for heads of these sizes; see ``text`` and ``together``."""
        if not self.together:
            longer = 2 * WIDTH // self.size
            keys = self.keys * depth + WIDTH * max(self.keys, depth)  # which may lie across
            return self.size * (self.rows * (depth + longer) + keys + self.keys * (columns + longer))
        depth, columns = (-(-size // PANEL) * PANEL for size in (depth, columns))
        tiles = (self.rows + 2 * self.keys) * depth + 2 * self.keys * columns + self._mask
        return TILE_BYTES + 2 * tiles + 2 * FLOAT_BYTES * self.keys

    @property
    def _mask(self) -> int:
        """Elements of a tile of a mask, in whole panels."""
        return self.rows * -(-self.keys // PANEL) * PANEL if self.masked else 0

    def beside(self, depth: int, columns: int) -> int:
        """Blocks that a multiprocessor is to hold at least, where warps multiply together."""
        if not self.together:
            return 1
        held = REGISTERS // (self.threads * self._registers(columns))
        return max(1, min(held, ALL_SHARED // (self.shared(depth, columns) + BLOCK_BYTES)))

    def _registers(self, columns: int) -> int:
        """About how many a thread has, where warps multiply together: scores, their powers, sums, and all else."""
        return self.keys // 2 + self.keys // 4 + columns // 2 + OTHER_REGISTERS

    def fits(self, depth: int, columns: int) -> bool:
        """Whether shared memory and registers hold it."""
        if not self.together:
            return (self.shared(depth, columns) <= 48 * 1024 * self.size
                    and self.tiles * (columns + self.keys) // 2 <= 160)
        return (self.shared(depth, columns) <= ALL_SHARED - BLOCK_BYTES
                and self._registers(columns) <= min(255, REGISTERS // self.threads))


@dataclass(frozen=True)
class SpecialisedAttentionShape(AttentionShape):
    """A block with so many warps that multiply, and one that copies keys and values, ``stages`` tiles ahead: beside it
    three that leave their registers to the others, but where these are one group, whose block is one of several."""

    together: bool = True
    stages: int = 2

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply, 64 queries each."""
        return self.warps // WARPS

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + (1 if self.groups == 1 else WARPS))

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"attention_{self.rows}x{self.keys}x{self.stages}_specialised{self._masked}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return replace(super().choice, settings=(*super().choice.settings, ("stages", self.stages)))

    def shared(self, depth: int, columns: int) -> int:
        """Bytes of shared memory for heads of these sizes; see ``specialised``."""
        depth, columns = (-(-size // PANEL) * PANEL for size in (depth, columns))
        tiles = self.rows * depth + self.stages * (self.keys * (depth + columns) + self._mask)
        return TILE_BYTES + 2 * tiles + ARRIVALS * (4 * self.stages + 2 * self.groups + 1) + 4 * self.warps

    def beside(self, depth: int, columns: int) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        return super().beside(depth, columns) if self.groups == 1 else 1

    def fits(self, depth: int, columns: int) -> bool:
        """Whether shared memory and registers hold it."""
        if self.groups == 1:
            return super().fits(depth, columns)
        return (self.shared(depth, columns) <= ALL_SHARED - BLOCK_BYTES
                and self._registers(columns) - LESS_REGISTERS <= SHARES[self.groups][1])
