"""The blocks that kernels of a region's products may have, and which of them are expected to take least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from onnxfuse.graph.dims import Dim
from onnxfuse.schedules.attention_shape import ALL_SHARED, BLOCK_BYTES, PANEL
from onnxfuse.schedules.kernel import HOPPER_HAS, Pace
from onnxfuse.schedules.product_boxes import Boxed, BoxShape, box_of
from onnxfuse.schedules.product_integers import (
    INTEGER_TILES,
    IntegerBoxShape,
    IntegerShape,
    IntegerSpecialisedShape,
)
from onnxfuse.schedules.product_library import LibraryShape
from onnxfuse.schedules.product_maps import COPIED, FILLED, Mapped
from onnxfuse.schedules.product_parts import ProductParts, Side
from onnxfuse.schedules.product_shape import STAGE_BYTES, WARP_ROWS, ProductShape, SpecialisedShape
from onnxfuse.schedules.product_shared import shared_shapes_of
from onnxfuse.schedules.schedule import Request
from onnxfuse.schedules.split import MULTIPROCESSORS
from onnxfuse.schedules.streaming import MOST_SHARED

TILES = {(128, 128): 1.0, (128, 256): 1.0, (64, 128): 0.85, (128, 64): 0.85, (64, 64): 0.65, (128, 192): 1.0,
         (192, 192): 1.0}
"""Rows and columns of a block, and the share of the largest ones' rate that they reach (H200: each byte that comes from
the caches is multiplied so much less often)."""

TILES_OF_THREE = {(128, 192): 1.0, (64, 192): 0.85, (128, 96): 0.85, (64, 96): 0.65}
"""The same where three products share the columns."""

MOST_EXACT = 128 * 128
"""Results of a tile of float32 products that are not rounded: registers hold what is left of operands too."""

SPECIALISED = {(128, 128, 2): 1.0, (128, 256, 1): 1.0, (256, 128, 1): 1.0, (128, 64, 1): 0.8, (256, 64, 1): 0.82,
               (128, 192, 1): 1.0, (192, 192, 1): 1.0, (128, 128, 1): 0.95, (64, 64, 2): 0.6, (64, 96, 2): 0.75,
               (64, 128, 2): 0.9}
"""The same of blocks with a warp that copies, which go through so many tiles at a time.  Those of 64 rows, of floats of
16 bits alone, are for tiles that are too few for all multiprocessors otherwise (H200: of 27 small products 14 took 0.78
to 0.95 times as long; 1,568 x 1,152 to 192 4.6 us, in tiles of 128 x 64 5.6); those of 256 x 64 take the right operand
half as often (H200: 0.75 to 0.92 times as long as of 128 x 64 for two convolutions, 0.97 to 1.06 for four products)."""

IDLE, IDLE_READING = 0.93, 0.85
"""Share of that by turns where no multiprocessor has two tiles, so that one group has none, and the same where what
follows reads rows, which that group alone waits for then (H200: four products took 1.02 to 1.10 times as long as by
both groups; tiles of 64 x 128 0.87 times as long as of 128 x 64 with an activation, 1.02 and 1.09 with a residual)."""

ROUNDED = {(128, 128, 2): 0.9, (128, 256, 1): 1.0, (256, 128, 1): 1.0, (128, 64, 1): 0.5, (128, 192, 1): 0.75,
           (192, 192, 1): 0.8}
"""The same of float32, whose largest ones reach half the rate of 16-bit floats' (H100, 16 convolutions; the last is
taken to be between its neighbours)."""

SPECIALISED_OF_THREE = {(128, 192, 1): 1.0, (64, 192, 2): 0.85, (128, 96, 2): 0.85}
"""The same where three products share the columns."""

ROUNDED_OF_THREE = {(128, 192, 1): 0.75, (64, 192, 2): 0.6, (128, 96, 2): 0.6}
"""The same of float32 (the latter two by what they have in common with one of 128 x 64)."""

FITTED = {(256, 1): (128, 1.1), (128, 2): (160, 0.85), (128, 1): (256, 0.85), (64, 2): (128, 1.0)}
"""By rows of such blocks and tiles at a time, columns at most, where these are as many as results have, or an even part
of them; and the share that they reach of a rate from that of the narrow tile up to, of so many, the largest's (H200:
401,408 rows of 96 took 41 us in tiles of 256, 54 in tiles of 128 by turns, 51 in 256 x 128; 100,352 rows of 24 took 12,
13 and, in 128 x 64, 16, of 144 in tiles of 256 x 80 27, of 128 x 144 29; 6,272 of 112 in tiles of 64 rows 5.3, of 128
6.3)."""

STEP, EMPTY = 16, 0.05
"""Columns to whose multiples fitted ones are filled up; share of all tiles' columns that they must save."""

NARROW = 64
"""Columns under which a tile takes as long as of so many, for copies of rows take that."""

PAIRED_STEPS = 4
"""Stages of all that is summed over up to which two blocks a multiprocessor are offered: with a residual they took 0.92
times as long as the best of others where that is 64 or 128 elements, 0.98 where it is 256, 1.19 where 512; with SiLU
0.84 to 1.06 (H200)."""

CLUSTERS = {2: 64, 3: 36, 4: 28, 6: 18, 8: 14}
"""How many clusters run at one time, by the blocks in one, which share what is summed over (H100: clusters lie in parts
of the GPU, and leave multiprocessors over).  In two turns they take longer than blocks alone."""

LEAST_STEPS = 6
"""Stages that each of these blocks goes through at least."""

BEGUN = 20 * 128 * 128
"""What a block takes in any case, as elements of a tile times stages: some 6 us."""

LEAST_STAGES = 4
"""In shared memory, beside all sums of a tile: fewer do not hide what a copy waits for."""

WORTH_SHARING = 0.95
"""Share of the time without that they must be expected to take."""

MOST_TILES = 3
"""Of these those that are worth a measurement: which are expected to take least."""

SHORT, LONG = 2, 32
"""Stages of all that is summed over up to which two at a time are enough, and from which on many are better."""

MOST_WARPS = 16
"""Of a block."""

LEAST_PACED = 64
"""Rows from which on the time of blocks with a warp that copies follows from their tiles."""

SPREAD = 0.65
"""Share of the rate that large tiles reach of those whose threads copy operands by vectors: products whose tiles may be
copied both ways took 1.4 times as long so at most, nine of ten (H100, 703 products and convolutions of the zoo)."""

SHORTER = 0.22
"""The same where threads copy by vectors of less than 16 bytes, and results are stored by such: six products with what
follows them went through their tiles at 0.22 to 0.35 of that rate (H200)."""

RESULT_ALONE = 0.11e-9
"""Seconds of a result of such a block whose rows no vector divides, and that is stored by itself (H200)."""

RESULTS = {1: 5.5, 2: 3.5}
"""TFLOP/s at which what follows products of float32 is computed, by tiles at a time: of two one is multiplied meanwhile
(H100, seven products with activations; of 16 bits what follows takes 3 to 14% of a product)."""

STAYING = 1.06
"""How many times as fast tiles are multiplied at least whose right operand stays (H200: 1.02 to 1.4 for ten
convolutions, 1.02 to 1.25 for products whose last stage is zeros in part)."""

LINE_SHORT = 1.35e-9
"""Seconds of a line of 64 bytes or 32 (H200: eight convolutions of 16 and 32 channels took 1.3 to 1.6e-9, with what
follows them)."""

LINE_UNEVEN = 1.55
"""How many times as long that takes of pixels whose bytes are no power of two (H100, of 24 channels and of 48)."""

GATHERED = {2: (0.08e-9, 0.28e-9), 4: (0.2e-9, 0.6e-9)}
"""Seconds in which a multiprocessor's threads gather an element of windows, by its bytes: where sums are of ``NEAR``
elements and fewer, and of ``FAR`` and more.  With what follows, 44 kernels of convolutions in groups, channels first,
took 0.53 to 1.10 times as long as is predicted, half of them 0.93 and more (H100); by vectors, channels last, nothing
was measured, and as much is taken for granted."""

NEAR, FAR = 256, 1280
"""Of what is summed over."""

TILE_GATHERED = {2: 0.25e-6, 4: 0.9e-6}
"""Seconds that each tile of such a kernel takes beside, by an element's bytes."""

STAGE_GATHERED = {2: 0.95e-6, 4: 1.4e-6}
"""Seconds that a stage takes at least of a block that is alone on a multiprocessor, likewise."""

WEIGHT_GATHERED, RESULT_STORED = 0.85e-9, 0.25e-9
"""Seconds of an element of weights that is read by itself, and of a result that is written so."""

UNKNOWN = 4096
"""What is taken for a size that is not known."""


class Blocks:
    """Blocks for the products of one region at its planned sizes.

    Attributes:
        vectors: how operands are read by vectors; mapped, boxed: as tensor maps copy them, whole or in boxes of
            windows; None, or no operand, where they do not.
        together: whether four warps multiply together, the better first; least: the block that runs everywhere.
    """

    def __init__(self, parts: ProductParts, request: Request, vectors: Sequence[Side], mapped: Sequence[Mapped],
                 boxed: tuple[Boxed, Mapped] | None) -> None:
        self.parts, self.request, self.vectors, self.mapped, self.boxed = parts, request, vectors, mapped, boxed
        floats, thirds = not parts.integers, len(parts.rights) == 3
        self._tiles, self._copying = (
            (TILES_OF_THREE, ROUNDED_OF_THREE if parts.words else SPECIALISED_OF_THREE) if thirds else
            (TILES if floats else INTEGER_TILES, ROUNDED if parts.words else SPECIALISED))
        if not floats:
            self._copying = {tile: share for tile, share in self._copying.items() if tile[0] > WARP_ROWS}
        if floats and len(parts.rights) == 1:
            self._copying = {**self._copying, **self._fitted()}
        if parts.exact:
            self._tiles = {tile: share for tile, share in self._tiles.items() if prod(tile) <= MOST_EXACT}
        self._shape = ProductShape if floats else IntegerShape
        self._specialised_shape, self._box_shape = (
            (SpecialisedShape, BoxShape) if floats else (IntegerSpecialisedShape, IntegerBoxShape))
        self.least = self._shape(64, 96 if thirds else 64, 2, vectors=False)
        # The instruction takes integers from tiles that have a line for each row alone.
        plain = floats or not any(side.across or side.width == 1 for side in vectors)
        self.together = (True, False) if plain and not parts.words else (False,)

    def planned(self, size: Dim) -> int:
        """A size as it is planned to be; large where that is not known."""
        found = self.at(size)
        return UNKNOWN if found is None else found

    def at(self, size: Dim) -> int | None:
        """A size as it is planned to be; None where that is not known."""
        return self.parts.lowered.binding.at(size, self.request.sizes)

    def own(self, together: bool) -> ProductShape:
        """The tile that is expected to take least, with as many stages as there is something to hold in."""
        return next(shape for tile in self._ranked(together) for shape in self._staged(tile, together))

    def copied(self, offered: Sequence[ProductShape]) -> list[SpecialisedShape]:
        """Of these the block with a warp that copies that is expected to take least, where floats are copied in one: of
        40 products and convolutions such blocks took 0.79 times as long as those of four warps in the mean, 1.05 at
        most (H100).  Clusters are for measurements."""
        blocks = [] if self.parts.integers else [shape for shape in offered if isinstance(shape, SpecialisedShape)]
        return [shape for shape in blocks if shape.split == 1][:1]

    def offered(self, most: int) -> list[ProductShape]:
        """What may be quickest, of so many tiles; those with a warp that copies, which most large products are quickest
        by, and then those by four warps together, before what a budget of measurements may not reach."""
        shapes = [shape for together in self.together for tile in self._ranked(together)[:most]
                  for shape in self._staged(tile, together)]
        return sorted([*self._boxes(most), *self._specialised(most), *shapes], key=lambda shape: not shape.together)

    def all_offered(self) -> list[ProductShape]:
        """The same of all tiles."""
        return self.offered(len(self._tiles) + len(self._copying))

    def _specialised(self, most: int) -> list[SpecialisedShape]:
        """Of blocks with a warp that copies those that may be quickest, with as many stages as there is room for."""
        if not self.mapped:
            return []
        blocks = [
            (self._specialised_shape(rows, columns, 1, turns=turns), self._count(rows, columns), rate)
            for (rows, columns, turns), rate in self._copying.items() if self._are_panels(columns)]
        return [*self._quickest(most, blocks, self._steps), *self._pairs()]

    def _fitted(self) -> dict[tuple[int, int, int], float]:
        """Tiles that are as wide as the results, or an even part of them, where of all others more would be empty; and
        the share of the largest ones' rate that they are expected to reach."""
        columns = self.at(self.parts.columns)
        if columns is None or columns < STEP:
            return {}
        least = min((-(-columns // wide) * wide for rows, wide, _ in self._copying if rows > WARP_ROWS), default=0)
        found: dict[tuple[int, int, int], float] = {}
        for (rows, turns), (most, share) in FITTED.items():
            if rows == WARP_ROWS and self.parts.words:
                continue
            narrow = self._copying.get((64, NARROW, 2) if rows == WARP_ROWS else (128, NARROW, 1), 1.0)
            count = -(-columns // most)
            wide = -(-columns // (count * STEP)) * STEP
            if wide <= most and wide * count < (1 - EMPTY) * least:
                wider = max(0, wide - NARROW) / (most - NARROW)
                found[rows, wide, turns] = min(1.0, share * (narrow + (1 - narrow) * wider))
        return found

    def _boxes(self, most: int) -> list[SpecialisedShape]:
        """The same of a convolution whose windows are copied in boxes."""
        if self.boxed is None:
            return []
        windows, blocks = self.boxed[0].windows, list[tuple[SpecialisedShape, int, float]]()
        counts = tuple(map(self.planned, windows.counts))
        for (rows, columns, turns), rate in self._copying.items():
            if not self._are_panels(columns):
                continue
            box = box_of(windows, rows, counts)
            shape = self._box_shape(
                rows, columns, 1, turns=turns, box=box, taps=windows.taps, line=self.boxed[0].line)
            blocks.append((shape, self._boxes_of(shape), rate))
        return self._quickest(most, blocks, self._box_steps)

    @property
    def _box_steps(self) -> int:
        """Stages that a tile of boxes goes through."""
        assert self.boxed is not None
        return self.boxed[0].depth * self.parts.size // self.boxed[0].line

    def _boxes_of(self, shape: BoxShape) -> int:
        """How many tiles of boxes of this shape there are."""
        assert self.boxed is not None
        boxes = shape.box.count(tuple(map(self.planned, self.boxed[0].windows.counts)))
        return boxes * -(-self.planned(self.parts.columns) // shape.columns)

    def _quickest(
        self, most: int, blocks: Sequence[tuple[SpecialisedShape, int, float]], steps: int
    ) -> list[SpecialisedShape]:
        """Of blocks, with how many tiles there are of so many stages and the share of the largest ones' rate that they
        reach, those that may be quickest; before them those of clusters that share what is summed over, where tiles are
        few."""
        idle = IDLE_READING if self.parts.beside(self.parts.lanes("@n", 1)) else IDLE
        blocks = [(shape, tiles, rate * (idle if shape.turns > 1 and tiles <= HOPPER_HAS else 1.0))
                  for shape, tiles, rate in blocks]
        staying = {shape: self._staying(shape, steps)
                   for shape, tiles, _ in blocks if tiles > HOPPER_HAS * shape.beside}
        alone = sorted(((
            _busiest(tiles, (shape.rows, shape.columns), rate * (STAYING if staying.get(shape) else 1.0)), shape)
            for shape, tiles, rate in blocks), key=lambda each: each[0])[:most]
        longest = WORTH_SHARING * (steps * alone[0][0] + BEGUN)
        shared = [
            (-(-steps // split) * _busiest(1, (shape.rows, shape.columns), rate) + BEGUN,
             filled(replace(shape, turns=1, split=split)))
            for shape, tiles, rate in blocks for split, most_clusters in CLUSTERS.items()
            # Sums are laid out in whole pieces; blocks by both groups are those by turns.
            if shape.rows > 64 and not self.parts.integers and not shape.columns % NARROW
            and (shape.rows, shape.columns, shape.turns) != (128, 128, 1)
            and tiles <= most_clusters and split * LEAST_STEPS <= steps]
        better = sorted((each for each in shared if each[0] < longest and each[1].stages >= LEAST_STAGES),
                        key=lambda each: each[0])
        return [*(shape for _, shape in better[:most]),
                *(each for _, shape in alone for each in (
                    *staying.get(shape, ()), filled(shape), *self._sharing(shape, steps)))]

    def _staying(self, shape: SpecialisedShape, steps: int) -> list[SpecialisedShape]:
        """The same block with the whole right operand in shared memory, where each tile has all columns and there is
        room for that beside enough stages.  Of products without windows only those whose last stage is zeros in part
        gain by it: others wait for memory."""
        depth = self.parts.depth.value
        if not self._may_stay(shape) or (self.boxed is None and (depth or 0) * self.parts.size % STAGE_BYTES == 0):
            return []
        found = filled(replace(shape, stays=steps))
        if found.stages * shape.line < LEAST_STAGES * STAGE_BYTES:
            return []
        # Where copies are what takes long, one group's results are stored beside the other's: for measurements.
        turns = [replace(found, turns=2)] if (shape.rows, shape.turns) == (128, 1) and shape.columns <= NARROW else []
        return [found, *turns]

    def _may_stay(self, shape: SpecialisedShape) -> bool:
        """Whether all tiles have the same right operand, of certain size."""
        parts = self.parts
        columns, depth = parts.columns.value, parts.depth.value
        one = not parts.integers and len(parts.rights) == 1 and parts.batch.value == 1
        return one and depth is not None and columns is not None and columns <= shape.columns

    def _sharing(self, shape: SpecialisedShape, steps: int) -> Sequence[SpecialisedShape]:
        """The same blocks whose windows share pieces of the image, those of which the fewest are needed first."""
        if not isinstance(shape, BoxShape) or self.boxed is None or self.parts.integers or len(self.parts.rights) > 1:
            return []
        if self.boxed[1].across or self.parts.batch.value != 1:
            return []
        windows = self.boxed[0].windows
        counts = tuple(map(self.planned, windows.counts))
        ways = (shape, *([replace(shape, stays=steps)] if self._may_stay(shape) else []))
        found = [each for way in ways for each in shared_shapes_of(way, windows)]
        return sorted(found, key=lambda each: (each.box.count(counts), not each.stays, each.parts * each.lines))[:1]

    def _pairs(self) -> list[SpecialisedShape]:
        """The narrow block of which a multiprocessor may have two, where little is summed up: one computes what follows
        while the other waits for what it reads."""
        narrow = [columns for rows, columns, turns in self._copying
                  if (rows, turns) == (128, 1) and columns <= NARROW and self._are_panels(columns)]
        if self.parts.integers or self._steps > PAIRED_STEPS or not narrow:
            return []
        return [filled(self._specialised_shape(128, min(narrow), 1, turns=1, blocks=2))]

    def _are_panels(self, columns: int) -> bool:
        """Whether each product's share of so many columns is whole panels, where these are what is copied."""
        right = self.mapped[1] if self.boxed is None else self.boxed[1]
        return not (right.across and columns // len(self.parts.rights) % PANEL)

    def _ranked(self, together: bool) -> list[tuple[int, int]]:
        """Tiles, those first of which the busiest multiprocessor's take least together."""
        has = HOPPER_HAS if together else MULTIPROCESSORS
        fitting = [tile for tile in self._tiles if not (self.vectors[1].across and tile[1] % PANEL)]
        return sorted(fitting, key=lambda tile: _busiest(self._count(*tile), tile, self._tiles[tile], has))

    @property
    def _steps(self) -> int:
        """Stages that a tile goes through."""
        return -(-self.planned(self.parts.depth) // self._staged_depth)

    @property
    def _staged_depth(self) -> int:
        """Elements of a stage, of what is summed over."""
        return STAGE_BYTES // self.parts.size

    def _count(self, high: int, wide: int) -> int:
        """How many tiles of this size there are."""
        parts = self.parts
        batch, rows, columns = map(self.planned, (parts.batch, parts.rows, parts.columns))
        return batch * -(-rows // high) * -(-columns * len(parts.rights) // wide)

    def _staged(self, tile: tuple[int, int], together: bool) -> list[ProductShape]:
        """A tile with few and with many stages, those first that suit what is summed over; more hide longer waits, less
        leave room for a block beside."""
        steps = -(-self.planned(self.parts.depth) * self.parts.size // STAGE_BYTES)
        least = 3 if tile == (128, 128) else 4
        wanted = (2, least) if steps <= SHORT else (least, 6) if steps < LONG else (6, least)
        if sum(tile) > 256:
            wanted = (2, 3) if steps <= SHORT else (4, 3)
        shapes = [self._shape(*tile, stages, together) for stages in wanted]
        return [shape for shape in shapes if shape.shared <= MOST_SHARED and shape.warps <= MOST_WARPS]

    def pace(self, shape: ProductShape | LibraryShape, stored: int) -> Pace | None:
        """Of blocks with a warp that copies, each of which sums up all, and of those whose threads gather operands of a
        convolution in groups, where no size is left open; ``stored``: elements of a vector of results."""
        sizes = [self.at(size) for size in (
            self.parts.batch, self.parts.rows, self.parts.columns, self.parts.depth)]
        if None in sizes or self.parts.exact:  # of which nothing was measured
            return None
        if type(shape) is ProductShape:
            return self._copied(shape) or self._gathering(shape, stored)
        if not isinstance(shape, SpecialisedShape) or shape.split > 1:
            return None
        if self.planned(self.parts.rows) < LEAST_PACED:
            return None
        tiles, stages = (self._boxes_of(shape), self._box_steps) if isinstance(shape, BoxShape) else (
            self._count(shape.rows, shape.columns), self._steps)
        share = self._copying.get(
            (shape.rows, shape.columns, shape.turns), self._copying.get((shape.rows, shape.columns, 1), 1.0)
        ) if self.parts.rounds else 1.0
        flops = 2 * shape.rows * max(shape.columns, NARROW) * (shape.line // self.parts.size)
        results = RESULTS[shape.turns] if self.parts.rounds else None
        uneven = stored == 1 and self.parts.of_matrices and self.planned(self.parts.columns) % self.parts.width != 0
        ends = RESULT_ALONE * shape.rows * shape.columns if uneven else 0.0
        return Pace(-(-tiles // HOPPER_HAS), stages, flops, share, self._waits(shape), results, shape.turns > 1,
                    ends=ends)

    def _copied(self, shape: ProductShape) -> Pace | None:
        """The same of transposed convolutions, and of matrices of rows that no whole vector divides, whose operands
        threads copy by vectors."""
        parts = self.parts
        copied = shape.together and all(side.copied and side.width > 1 and not side.shifted for side in self.vectors)
        shorter = parts.of_matrices and any(side.width < parts.width for side in self.vectors)
        spread = "ConvTranspose" in parts.lowered.program.operators
        rows = self.planned(parts.columns if parts.swapped else parts.rows)
        if not copied or not (shorter or spread) or rows < LEAST_PACED:
            return None
        tiles = -(-self._count(shape.rows, shape.columns) // HOPPER_HAS)
        share = SHORTER if shorter else SPREAD
        return Pace(tiles, self._steps, 2 * shape.rows * shape.columns * self._staged_depth, share)

    def _gathering(self, shape: ProductShape, stored: int) -> Pace | None:
        """The same of a convolution in groups, each of whose tiles counts as one stage that is waited for."""
        parts, size = self.parts, self.parts.size
        rows, columns, depth = map(self.planned, (parts.rows, parts.columns, parts.depth))
        grouped = "Conv" in parts.lowered.program.operators and parts.batch != 1 and len(parts.rights) == 1
        if not grouped or (columns if parts.swapped else rows) < LEAST_PACED:
            return None
        windows, channels = (shape.columns, shape.rows) if parts.swapped else (shape.rows, shape.columns)
        near, far = GATHERED[size]
        element = near + (far - near) * min(1.0, max(0, depth - NEAR) / (FAR - NEAR))
        tiles = -(-self._count(shape.rows, shape.columns) // HOPPER_HAS)
        alone = STAGE_GATHERED[size] * self._steps / min(tiles, shape.beside)
        seconds = max(windows * depth * element, alone) + TILE_GATHERED[size]
        if self.vectors[0 if parts.swapped else 1].width == 1:
            seconds += channels * depth * WEIGHT_GATHERED
        if stored == 1:
            seconds += min(shape.rows, rows) * min(shape.columns, columns) * RESULT_STORED
        return Pace(tiles, 1, 0, waits=seconds, results=RESULTS[1] if parts.rounds else None)

    def _waits(self, shape: SpecialisedShape) -> float:
        """Seconds that a stage's copies take at least where they are zeros in part."""
        if not isinstance(shape, BoxShape) or self.boxed is None:
            return 0.0
        channels = self.boxed[0].windows.channels
        zeros, uneven = 1 - channels / self.boxed[0].staged, channels < self._staged_depth and channels & (channels - 1)
        line = (LINE_UNEVEN if uneven else 1.0) * (COPIED + zeros * FILLED) if zeros else LINE_SHORT
        lines = shape.rows + (0 if shape.stays else shape.columns)
        return lines * line if zeros or shape.line < STAGE_BYTES else 0.0


def _busiest(tiles: int, tile: tuple[int, int], rate: float, multiprocessors: int = HOPPER_HAS) -> float:
    """What the busiest multiprocessor's tiles take, of so many rows and columns."""
    rows, columns = tile
    return -(-tiles // multiprocessors) * rows * max(columns, NARROW) / rate


def filled(least: SpecialisedShape) -> SpecialisedShape:
    """A block of one stage with as many as there is room for."""
    one = replace(least, stages=2).shared - least.shared
    most = MOST_SHARED if least.blocks == 1 else ALL_SHARED // least.blocks - BLOCK_BYTES
    stages, even = 1 + (most - least.shared) // one, STAGE_BYTES // least.line
    # What lies behind the stages begins at a multiple of 1,024 bytes.
    return replace(least, stages=stages - stages % even)
