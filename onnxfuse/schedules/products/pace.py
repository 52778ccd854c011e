"""What the time of a product's blocks follows from: how many tiles they have, and what a stage of one waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.schedules.kernel import HOPPER_HAS, Pace
from onnxfuse.schedules.products.boxes import Boxed, BoxShape
from onnxfuse.schedules.products.integer_pace import IntegerTiles
from onnxfuse.schedules.products.library import LibraryShape
from onnxfuse.schedules.products.maps import COPIED, FILLED, Mapped
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import STAGE_BYTES, ProductShape, SpecialisedShape
from onnxfuse.schedules.products.shared import LINE, LINE_ZEROS, SHARED_NARROW, SharedShape, shared_pace
from onnxfuse.schedules.schedule import Request

NARROW = 64
"""Columns under which a tile takes as long as of so many, for copies of rows take that."""

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

LINE_SHORT = 1.35e-9
"""Seconds of a line of 64 bytes or 32 (H200: eight convolutions of 16 and 32 channels took 1.3 to 1.6e-9, with what
follows them)."""

LINE_UNEVEN = 1.55
"""How many times as long that takes of pixels whose bytes are no power of two (H100, of 24 channels and of 48)."""

MULTIPLIED = {1: 6.2e12, 2: 6.2e12, 4: 3.1e12}
"""FLOP/s of a multiprocessor in large tiles, by the bytes of an element (H200, of 16-bit floats; that of integers is a
multiple of it)."""

GATHERED = {2: (0.08e-9, 0.28e-9), 4: (0.2e-9, 0.6e-9)}
"""Seconds in which a multiprocessor's threads gather an element of windows, by its bytes: where sums are of ``NEAR``
elements and fewer, and of ``FAR`` and more.  With what follows, 44 kernels of convolutions in groups, channels first,
took 0.53 to 1.10 times as long as is predicted, half of them 0.93 and more (H100); by vectors, channels last, nothing
was measured, and as much is taken for granted."""

COLUMN = 0.3e-9
"""Seconds of an instruction of what is computed of the sums of a column, of a strip of 64 rows (H200, of SiLU in six
convolutions 0.2 to 0.4e-9)."""

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


class Tiles:
    """The tiles of one region's products at its planned sizes; ``mapped``, ``boxed``: as tensor maps copy them, whole
    or in boxes of windows; no operand, or None, where they do not."""

    def __init__(self, parts: ProductParts, request: Request, mapped: Sequence[Mapped],
                 boxed: tuple[Boxed, Mapped] | None) -> None:
        self.parts, self.request, self.mapped, self.boxed = parts, request, mapped, boxed

    def planned(self, size: Dim) -> int:
        """A size as it is planned to be; large where that is not known."""
        found = self.at(size)
        return UNKNOWN if found is None else found

    def at(self, size: Dim) -> int | None:
        """A size as it is planned to be; None where that is not known."""
        return self.parts.lowered.binding.at(size, self.request.sizes)

    @property
    def steps(self) -> int:
        """Stages that a tile goes through."""
        return -(-self.planned(self.parts.depth) // self.staged_depth)

    @property
    def staged_depth(self) -> int:
        """Elements of a stage, of what is summed over."""
        return STAGE_BYTES // self.parts.size

    def count(self, high: int, wide: int) -> int:
        """How many tiles of this size there are."""
        parts = self.parts
        batch, rows, columns = map(self.planned, (parts.batch, parts.rows, parts.columns))
        return batch * -(-rows // high) * -(-columns * len(parts.rights) // wide)

    @property
    def box_steps(self) -> int:
        """Stages that a tile of boxes goes through."""
        assert self.boxed is not None
        return self.boxed[0].pieces * self.boxed[0].windows.taps

    def boxes_of(self, shape: BoxShape) -> int:
        """How many tiles of boxes of this shape there are."""
        assert self.boxed is not None
        boxes = shape.box.count(tuple(map(self.planned, self.boxed[0].windows.counts)))
        return boxes * -(-self.planned(self.parts.columns) // shape.columns)


class Paces:
    """What the time of blocks for one region's products follows from; ``shares``: those of the rate of large tiles that
    others reach which a warp copies, by rows, columns and tiles at a time."""

    def __init__(
        self, tiles: Tiles, vectors: Sequence[Side], shares: Mapping[tuple[int, int, int], float]
    ) -> None:
        self.parts, self.tiles, self.vectors, self.shares = tiles.parts, tiles, vectors, shares

    def pace(self, shape: ProductShape | LibraryShape, stored: int) -> Pace | None:
        """Of blocks with a warp that copies, each of which sums up all, and of those whose threads gather operands of a
        convolution in groups, where no size is left open; ``stored``: elements of a vector of results."""
        sizes = [self.tiles.at(size) for size in (
            self.parts.batch, self.parts.rows, self.parts.columns, self.parts.depth)]
        if None in sizes or self.parts.exact:  # of which nothing was measured
            return None
        if isinstance(shape, SpecialisedShape) and shape.split > 1:
            return None
        if self.parts.integers:
            return self._of_integers(shape, stored) if isinstance(shape, ProductShape) else None
        if type(shape) is ProductShape:
            return self._copied(shape) or self._gathering(shape, stored)
        if not isinstance(shape, SpecialisedShape):
            return None
        if self.tiles.planned(self.parts.rows) < LEAST_PACED:
            return None
        if isinstance(shape, SharedShape):
            return self.shared(shape)
        tiles, stages = self._gone_through(shape)
        flops = 2 * shape.rows * max(shape.columns, NARROW) * (shape.line // self.parts.size)
        results = RESULTS[shape.turns] if self.parts.rounds else None
        columns = self.tiles.planned(self.parts.columns)
        uneven = stored == 1 and self.parts.of_matrices and columns % self.parts.width != 0
        ends = RESULT_ALONE * shape.rows * shape.columns if uneven else 0.0
        return Pace(-(-tiles // HOPPER_HAS), stages, flops, self._share(shape), self._waits(shape), results,
                    shape.turns > 1, ends=ends)

    def _gone_through(self, shape: ProductShape) -> tuple[int, int]:
        """How many tiles there are, and stages that each goes through."""
        if isinstance(shape, BoxShape):
            return self.tiles.boxes_of(shape), self.tiles.box_steps
        return self.tiles.count(shape.rows, shape.columns), self.tiles.steps

    def _of_integers(self, shape: ProductShape, stored: int) -> Pace | None:
        """The same of integers."""
        parts, tiles = self.parts, self.tiles
        if tiles.planned(parts.columns if parts.swapped else parts.rows) < LEAST_PACED:
            return None
        copied = all(side.copied and side.width == parts.width for side in self.vectors)
        beside, boxed = sum(TYPES[load.dtype].size for load in parts.beside(parts.lanes("@n", 1))), tiles.boxed
        blank = 0.0 if boxed is None else 1 - boxed[0].windows.channels / boxed[0].staged
        return IntegerTiles(*self._gone_through(shape), tiles.staged_depth, not tiles.mapped, parts.follows,
                            parts.has_zeros, copied, beside, blank, stored == 1).pace(shape)

    def _share(self, shape: SpecialisedShape) -> float:
        """Of the rate that large tiles reach, where operands are rounded."""
        alike = (shape.rows, shape.columns, shape.turns), (shape.rows, shape.columns, 1)
        return next((self.shares[tile] for tile in alike if tile in self.shares), 1.0) if self.parts.rounds else 1.0

    def shared(self, shape: SharedShape) -> Pace:
        """The same of blocks whose windows share pieces of the image."""
        assert self.tiles.boxed is not None
        boxed, size, rounds = self.tiles.boxed[0], self.parts.size, self.parts.rounds
        columns = shape.columns if rounds else max(shape.columns, NARROW)
        tiles = -(-self.tiles.boxes_of(shape) // HOPPER_HAS)
        return shared_pace(shape, boxed.windows, self._line(LINE[size], LINE_ZEROS), Pace(
            tiles, boxed.pieces, 2 * shape.rows * columns * (shape.line // size),
            SHARED_NARROW if rounds and columns <= NARROW else 1.0, ends=self.behind(shape, tiles)))

    def behind(self, shape: SpecialisedShape, tiles: int) -> float:
        """Seconds that what is computed of sums takes each of so many tiles; by turns the other group hides that of all
        but the last."""
        return COLUMN * shape.strips * shape.columns * self.parts.follows / (tiles if shape.turns > 1 else 1)

    def seconds(self, pace: Pace) -> float:
        """What a multiprocessor's tiles take where large ones reach the rate of an H200's."""
        return pace.tiled(MULTIPLIED[self.parts.size])

    def _copied(self, shape: ProductShape) -> Pace | None:
        """The same of transposed convolutions, and of matrices of rows that no whole vector divides, whose operands
        threads copy by vectors."""
        parts = self.parts
        copied = shape.together and all(side.copied and side.width > 1 and not side.shifted for side in self.vectors)
        shorter = parts.of_matrices and any(side.width < parts.width for side in self.vectors)
        spread = "ConvTranspose" in parts.lowered.program.operators
        rows = self.tiles.planned(parts.columns if parts.swapped else parts.rows)
        if not copied or not (shorter or spread) or rows < LEAST_PACED:
            return None
        tiles = -(-self.tiles.count(shape.rows, shape.columns) // HOPPER_HAS)
        share = SHORTER if shorter else SPREAD
        return Pace(tiles, self.tiles.steps, 2 * shape.rows * shape.columns * self.tiles.staged_depth, share)

    def _gathering(self, shape: ProductShape, stored: int) -> Pace | None:
        """The same of a convolution in groups, each of whose tiles counts as one stage that is waited for."""
        parts, size = self.parts, self.parts.size
        rows, columns, depth = map(self.tiles.planned, (parts.rows, parts.columns, parts.depth))
        grouped = "Conv" in parts.lowered.program.operators and parts.batch != 1 and len(parts.rights) == 1
        if not grouped or (columns if parts.swapped else rows) < LEAST_PACED:
            return None
        windows, channels = (shape.columns, shape.rows) if parts.swapped else (shape.rows, shape.columns)
        near, far = GATHERED[size]
        element = near + (far - near) * min(1.0, max(0, depth - NEAR) / (FAR - NEAR))
        tiles = -(-self.tiles.count(shape.rows, shape.columns) // HOPPER_HAS)
        alone = STAGE_GATHERED[size] * self.tiles.steps / min(tiles, shape.beside)
        seconds = max(windows * depth * element, alone) + TILE_GATHERED[size]
        if self.vectors[0 if parts.swapped else 1].width == 1:
            seconds += channels * depth * WEIGHT_GATHERED
        if stored == 1:
            seconds += min(shape.rows, rows) * min(shape.columns, columns) * RESULT_STORED
        return Pace(tiles, 1, 0, waits=seconds, results=RESULTS[1] if parts.rounds else None)

    def _waits(self, shape: SpecialisedShape) -> float:
        """Seconds that a stage's copies take at least where they are zeros in part, or their lines are short."""
        if not isinstance(shape, BoxShape) or self.tiles.boxed is None:
            return 0.0
        line, zeros = self._line(COPIED, FILLED), self.tiles.boxed[0].windows.channels != self.tiles.boxed[0].staged
        lines = shape.rows + (0 if shape.stays else shape.columns)
        return lines * (line if zeros else LINE_SHORT) if zeros or shape.line < STAGE_BYTES else 0.0

    def _line(self, whole: float, filled: float) -> float:
        """Seconds of a line of channels, by those of ``whole`` ones and of what is ``filled`` up with zeros."""
        assert self.tiles.boxed is not None
        boxed = self.tiles.boxed[0]
        channels, zeros = boxed.windows.channels, 1 - boxed.windows.channels / boxed.staged
        uneven = zeros and channels < self.tiles.staged_depth and channels & (channels - 1)
        return (LINE_UNEVEN if uneven else 1.0) * (whole + zeros * filled)
