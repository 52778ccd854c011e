"""The blocks that kernels of a region's products may have, and which of them are expected to take least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from operator import itemgetter

from onnxfuse.schedules.attentions.shape import PANEL
from onnxfuse.schedules.kernel import HOPPER_HAS
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.products.boxes import Boxed, BoxShape, box_of
from onnxfuse.schedules.products.integers import (
    INTEGER_TILES,
    IntegerBoxShape,
    IntegerShape,
    IntegerSpecialisedShape,
    direct_width,
)
from onnxfuse.schedules.products.maps import Mapped
from onnxfuse.schedules.products.pace import NARROW, Paces, Tiles
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import STAGE_BYTES, WARP_ROWS, ProductShape, SpecialisedShape
from onnxfuse.schedules.products.shared import SharedShape, shared_shapes_of
from onnxfuse.schedules.reductions.split import MULTIPROCESSORS
from onnxfuse.schedules.reductions.streaming import MOST_SHARED
from onnxfuse.schedules.schedule import Request

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

PAIRED = ((128, 1), (64, 2), (128, 2))
"""Rows and tiles at a time of blocks of which a multiprocessor may have two (H200: of 102,400 rows of 96 to 64, SiLU,
128 x 64 took 12.6 microseconds, with operands that stay 11.9, of 64 rows by turns 11.2; the best alone 13.0)."""

PAIRED_STEPS = 4
"""Stages of all that is summed over up to which two blocks a multiprocessor are offered: with a residual they took 0.92
times as long as the best of others where that is 64 or 128 elements, 0.98 where it is 256, 1.19 where 512; with SiLU
0.84 to 1.06 (H200)."""

PAIRED_FIRST, SHORTEST, PAIRED_TILES = (128, 2), 2, 4
"""Of these those that are first, such stages up to which, and tiles a multiprocessor from which on they are (H200,
beside the best of others: of 102,400 rows of 96 to 64, SiLU, 11.2 microseconds for 12.5, of 64 to 32 7.1 for
7.8, of 100,352 rows of 96 to 24 without what follows 8.3 for 8.4; of 144 to 24 11.2 for 10.7, and of 25,088 of 144 to
40 5.7 for 5.2)."""

CLUSTERS = {2: 64, 3: 36, 4: 28, 6: 18, 8: 14}
"""How many clusters run at one time, by the blocks in one, which share what is summed over (H100: clusters lie in parts
of the GPU, and leave multiprocessors over).  In two turns they take longer than blocks alone."""

LEAST_STEPS = 6
"""Stages that each of these blocks goes through at least."""

BEGUN = 20 * 128 * 128
"""What a block takes in any case, as elements of a tile times stages: some 6 us."""

LEAST_STAGES = 4
"""In shared memory, beside all sums of a tile: fewer do not hide what a copy waits for."""

WORTH_PIECES = 0.97
"""Share of the time of boxes that windows over shared pieces must be expected to take to be the first."""

WORTH_SHARING = 0.95
"""Share of the time without that they must be expected to take."""

MOST_TILES = 3
"""Of these those that are worth a measurement: which are expected to take least."""

SHORT, LONG = 2, 32
"""Stages of all that is summed over up to which two at a time are enough, and from which on many are better."""

MOST_WARPS = 16
"""Of a block."""

STAYING = 1.06
"""How many times as fast tiles are multiplied at least whose right operand stays (H200: 1.02 to 1.4 for ten
convolutions, 1.02 to 1.25 for products whose last stage is zeros in part)."""


class Blocks(Tiles):
    """Blocks for the products of one region at its planned sizes.

    Attributes:
        vectors: how operands are read by vectors, and ``lanes`` results stored; mapped, boxed: see ``Tiles``.
        together: whether four warps multiply together, the better first; least: the block that runs everywhere.
    """

    def __init__(self, parts: ProductParts, request: Request, vectors: Sequence[Side], lanes: Lanes,
                 mapped: Sequence[Mapped], boxed: tuple[Boxed, Mapped] | None) -> None:
        super().__init__(parts, request, mapped, boxed)
        self.vectors = vectors
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
        self.paces = Paces(self, vectors, self._copying)
        self._specialised_shape, self._box_shape = (
            (SpecialisedShape, BoxShape) if floats else (IntegerSpecialisedShape, IntegerBoxShape))
        self._direct = 0 if floats else direct_width(parts, lanes, vectors[1])
        self.least = self._shape((64, 96 if thirds else 64), 2, vectors=False)
        # The instruction takes integers from tiles that have a line for each row alone.
        plain = floats or not any(side.across or side.width == 1 for side in vectors)
        self.together = (True, False) if plain and not parts.words else (False,)

    def own(self, together: bool) -> ProductShape:
        """The tile that is expected to take least, with as many stages as there is something to hold in."""
        return next(shape for tile in self._ranked(together) for shape in self._staged(tile, together))

    def copied(self, offered: Sequence[ProductShape]) -> Sequence[ProductShape]:
        """Of these the block with a warp that copies that is expected to take least, where floats are copied in one: of
        40 products and convolutions such blocks took 0.79 times as long as those of four warps in the mean, 1.05 at
        most (H100).  Clusters are for measurements.  Of integers any block, by the time that follows from its tiles."""
        if self.parts.integers:
            paced = [(shape, pace) for shape in offered if (pace := self.paces.pace(shape, 0)) is not None]
            return [min(paced, key=lambda each: self.paces.seconds(each[1]))[0]] if paced else []
        return [shape for shape in offered if isinstance(shape, SpecialisedShape) and shape.split == 1][:1]

    def offered(self, most: int) -> list[ProductShape]:
        """What may be quickest, of so many tiles; those with a warp that copies, which most large products are quickest
        by, and then those by four warps together, before what a budget of measurements may not reach."""
        shapes = [shape for together in self.together for tile in self._ranked(together)[:most]
                  for shape in self._staged(tile, together)]
        boxes, shared = self._boxes(most), self._shared(most)
        found = [*shared, *boxes] if self._are_quicker(shared, boxes) else [*boxes, *shared]
        return sorted([*found, *self._specialised(most), *shapes], key=lambda shape: not shape.together)

    def _are_quicker(self, shared: Sequence[SharedShape], boxes: Sequence[SpecialisedShape]) -> bool:
        """Whether windows that share pieces of the image are expected to take less than those that do not."""
        first = next((shape for shape in boxes if shape.split == 1), None)
        alone = None if first is None else self.paces.pace(first, 0)
        if not shared or first is None or alone is None:
            return False
        pieces = self.paces.seconds(self.paces.shared(shared[0]))
        behind = alone.tiles * self.paces.behind(first, alone.tiles)
        return pieces < WORTH_PIECES * (self.paces.seconds(alone) + behind)

    def all_offered(self) -> list[ProductShape]:
        """The same of all tiles."""
        return self.offered(len(self._tiles) + len(self._copying))

    def _specialised(self, most: int) -> list[SpecialisedShape]:
        """Of blocks with a warp that copies those that may be quickest, with as many stages as there is room for."""
        if not self.mapped:
            return []
        blocks = [
            (self._specialised_shape(rows, columns, 1, turns=turns), self.count(rows, columns), rate)
            for (rows, columns, turns), rate in self._copying.items() if self._are_panels(columns)]
        found = [*self._quickest(most, blocks, self.steps), *self._pairs()]
        return sorted(found, key=lambda shape: not self._is_first(shape))

    def _is_first(self, shape: SpecialisedShape) -> bool:
        """Whether it is two blocks by turns where tiles are many and short."""
        by_turns = shape.blocks > 1 and (shape.rows, shape.turns) == PAIRED_FIRST and not self.parts.rounds
        return by_turns and self.steps <= SHORTEST and self.count(
            shape.rows, shape.columns) >= PAIRED_TILES * HOPPER_HAS

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
            blocks.append((shape, self.boxes_of(shape), rate))
        return self._quickest(most, blocks, self.box_steps)

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
             replace(shape, turns=1, split=split).filled())
            for shape, tiles, rate in blocks for split, most_clusters in CLUSTERS.items()
            # Sums are laid out in whole pieces; blocks by both groups are those by turns.
            if shape.rows > 64 and not self.parts.integers and not shape.columns % NARROW
            and (shape.rows, shape.columns, shape.turns) != (128, 128, 1)
            and tiles <= most_clusters and split * LEAST_STEPS <= steps]
        better = sorted((each for each in shared if each[0] < longest and each[1].stages >= LEAST_STAGES),
                        key=lambda each: each[0])
        return [*(shape for _, shape in better[:most]),
                *(each for _, shape in alone for each in (*staying.get(shape, ()), shape.filled()))]

    def _staying(self, shape: SpecialisedShape, steps: int) -> list[SpecialisedShape]:
        """The same block with the whole right operand in shared memory, where each tile has all columns and there is
        room for that beside enough stages."""
        if not self._may_stay(shape) or not self._gain_by_staying():
            return []
        found = replace(shape, stays=steps).filled()
        if found.stages * shape.line < LEAST_STAGES * STAGE_BYTES:
            return []
        # Where copies are what takes long, one group's results are stored beside the other's: for measurements.
        turns = [replace(found, turns=2)] if (shape.rows, shape.turns) == (128, 1) and shape.columns <= NARROW else []
        return [found, *turns]

    def _gain_by_staying(self) -> bool:
        """Of products without windows only those do whose last stage is zeros in part: others wait for memory."""
        depth = self.parts.depth.value
        return self.boxed is not None or (depth is not None and depth * self.parts.size % STAGE_BYTES != 0)

    def _may_stay(self, shape: SpecialisedShape) -> bool:
        """Whether all tiles have the same right operand, of certain size."""
        columns, depth = self.parts.columns.value, self.parts.depth.value
        return self._has_one and depth is not None and columns is not None and columns <= shape.columns

    @property
    def _has_one(self) -> bool:
        """Whether there is one right operand, of floats, for all rows."""
        parts = self.parts
        return not parts.integers and len(parts.rights) == 1 and parts.batch.value == 1

    def _shared(self, most: int) -> list[SharedShape]:
        """Of blocks whose windows share pieces of the image those that are expected to take least, of each tile the
        best."""
        if self.boxed is None or not self._has_one or self.boxed[1].across:
            return []
        windows, line = self.boxed[0].windows, self.boxed[0].line
        best = list[tuple[float, SharedShape]]()
        for rows, columns, turns in self._copying:
            shape = BoxShape(rows, columns, 1, turns=turns, taps=windows.taps, line=line)
            ways = (shape, *([replace(shape, stays=self.box_steps)] if self._may_stay(shape) else []))
            found = [(self.paces.seconds(self.paces.shared(each)), each)
                     for way in ways for each in shared_shapes_of(way, windows)]
            best += sorted(found, key=itemgetter(0))[:1]
        best.sort(key=lambda each: (each[0], each[1].rows * each[1].columns))
        return [shape for _, shape in best[:most]]

    def _pairs(self) -> list[SpecialisedShape]:
        """Narrow blocks of which a multiprocessor may have two, where little is summed up: one computes what follows
        while the other waits for what it reads.  Where each tile has all columns also of two tiles at a time."""
        found = list[SpecialisedShape]()
        for rows, turns in PAIRED if not self.parts.integers and self.steps <= PAIRED_STEPS else ():
            fitting = [columns for high, columns, _ in self._copying
                       if high == rows and columns <= NARROW and self._are_panels(columns)]
            shape = self._specialised_shape(rows, min(fitting, default=0), 1, turns=turns, blocks=2)
            may_stay = self._may_stay(shape)
            if not fitting or (turns > 1 and not may_stay):
                continue
            stays = replace(shape, stays=self.steps if self._gain_by_staying() and may_stay else 0)
            found += [way.filled() for way in dict.fromkeys((shape, stays) if turns == 1 else (stays,))]
        return found

    def _are_panels(self, columns: int) -> bool:
        """Whether each product's share of so many columns is whole panels, where these are what is copied."""
        right = self.mapped[1] if self.boxed is None else self.boxed[1]
        return not (right.across and columns // len(self.parts.rights) % PANEL)

    def _ranked(self, together: bool) -> list[tuple[int, int]]:
        """Tiles, those first of which the busiest multiprocessor's take least together."""
        has = HOPPER_HAS if together else MULTIPROCESSORS
        fitting = [tile for tile in self._tiles if not (self.vectors[1].across and tile[1] % PANEL)]
        return sorted(fitting, key=lambda tile: _busiest(self.count(*tile), tile, self._tiles[tile], has))

    def _staged(self, tile: tuple[int, int], together: bool) -> list[ProductShape]:
        """A tile with few and with many stages, those first that suit what is summed over; more hide longer waits, less
        leave room for a block beside."""
        steps = -(-self.planned(self.parts.depth) * self.parts.size // STAGE_BYTES)
        least = 3 if tile == (128, 128) else 4
        wanted = (2, least) if steps <= SHORT else (least, 6) if steps < LONG else (6, least)
        if sum(tile) > 256:
            wanted = (2, 3) if steps <= SHORT else (4, 3)
        shapes = [self._shape(tile, stages, together) for stages in wanted]
        return [shape for shape in shapes if shape.shared <= MOST_SHARED and shape.warps <= MOST_WARPS]

    def _shape(self, tile: tuple[int, int], stages: int, together: bool = False, vectors: bool = True) -> ProductShape:
        """A block all of whose warps copy and multiply."""
        if not self.parts.integers:
            return ProductShape(*tile, stages, together, vectors)
        direct = vectors and (together or len(self.parts.rights) == 1)
        return IntegerShape(*tile, stages, together, vectors, width=self._direct if direct else 0)


def _busiest(tiles: int, tile: tuple[int, int], rate: float, multiprocessors: int = HOPPER_HAS) -> float:
    """What the busiest multiprocessor's tiles take, of so many rows and columns."""
    rows, columns = tile
    return -(-tiles // multiprocessors) * rows * max(columns, NARROW) / rate
