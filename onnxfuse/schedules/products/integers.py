"""Products of 8-bit integers: their blocks, and the text of their kernels.

Tiles come as those of floats do, and lie as they lie in memory: an operand whose neighbours are not those that are
summed over is transposed when a warp takes it out of shared memory.  Sums are those of the numbers as they are; what
zero points take off them follows from the totals of either operand's rows, which are summed up on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Scalar
from onnxfuse.schedules.attentions.shape import ALL_SHARED, BLOCK_BYTES, REGISTERS
from onnxfuse.schedules.attentions.together import tile_instruction
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.products.boxes import BoxShape, BoxText
from onnxfuse.schedules.products.direct import LANES_OF_A_ROW, DirectText
from onnxfuse.schedules.products.epilogue import PAIR, Held, is_brief
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import FLOATS, ProductShape, SpecialisedShape
from onnxfuse.schedules.products.specialised import SpecialisedText
from onnxfuse.schedules.text import Writer

INTEGER_TILES = {(128, 128): 1.0, (128, 256): 1.1, (256, 128): 1.1, (64, 128): 0.85, (128, 64): 0.85, (64, 64): 0.65}
"""Rows and columns of a block, and the rate that they are taken to reach beside one of 128 x 128."""

WARP_TILES = ((128 * 128, (64, 64)), (64 * 128, (64, 32)), (0, (32, 32)))
"""Rows and columns of one warp's part of a tile, by the elements that the tile has at least.  The larger it is the more
products are made of a byte that comes from shared memory; four warps, one for each part of a multiprocessor, there are
in any case."""


@dataclass(frozen=True)
class IntegerShape(ProductShape):
    """A block for integers; ``width``: neighbours that a lane has of a row where it stores results of the sums that it
    has, 0 where these are laid out as rows first."""

    width: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return super().name.replace("product", "product_int8", 1)

    @property
    def warp_tile(self) -> tuple[int, int]:
        """Rows and columns of the part of one warp."""
        return next(part for least, part in WARP_TILES if self.rows * self.columns >= least)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        if self.together:
            return super().warps
        rows, columns = self.warp_tile
        return self.rows // rows * (self.columns // columns)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, where sums that are laid out come to lie later, and room for totals."""
        totals = 4 * (self.rows + self.columns)
        return self.staged + totals if self.is_direct else super().shared + totals

    @property
    def is_direct(self) -> bool:
        """Whether lanes store results where they have the sums: four lanes have so many neighbours each."""
        own = self.columns if self.together else self.warp_tile[1]
        return self.width > 0 and own % (LANES_OF_A_ROW * self.width) == 0

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        if self.together:
            return super().beside
        held = REGISTERS // (32 * self.warps * (prod(self.warp_tile) // 32 + 100))
        return max(1, min(held, ALL_SHARED // (self.shared + BLOCK_BYTES)))


@dataclass(frozen=True)
class IntegerSpecialisedShape(SpecialisedShape):
    """A block for integers of which one warp copies."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return super().name.replace("product", "product_int8", 1)


@dataclass(frozen=True)
class IntegerBoxShape(BoxShape):
    """The same of images whose windows are copied in boxes."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return super().name.replace("product", "product_int8", 1)


class IntegerText(DirectText):
    """Writes the body of a kernel of integers."""

    sum_type = "int"

    @property
    def direct(self) -> int:  # type: ignore[override]
        """See ``DirectText``."""
        return self.shape.width if isinstance(self.shape, IntegerShape) and self.shape.is_direct else 0

    def _writer(self, lanes: Lanes) -> Writer:
        writer = Writer(lanes, self.sizes, lambda scalar: self._sum_of(scalar, writer))
        return writer

    def _less_zeros(self, number: int, writer: Writer) -> str:
        """A sum less what zero points take off it."""
        zeros = self.parts.zeros[number]
        if zeros == (None, None):
            return f"sums{number}.at[v]"
        own, other = ("0" if zero is None else writer.scalar(zero) for zero in zeros)
        offset = f"{number} * own_columns + " if number else ""
        row = "0" if zeros[1] is None else "row_totals[line]"
        column = "0" if zeros[0] is None else f"column_totals[{offset}column + v]"
        return f"of::less_zeros(sums{number}.at[v], {own}, {other}, {row}, {column}, {self.extents['k']})"

    @property
    def _totals(self) -> tuple[bool, bool]:
        """Whether totals of rows are asked for, and of columns."""
        zeros = self.parts.zeros
        return any(other is not None for _, other in zeros), any(own is not None for own, _ in zeros)

    def _warp(self) -> list[str]:
        if self.shape.together:
            names = (name for name, asked in zip(("rows", "columns"), self._totals, strict=True) if asked)
            return [*super()._warp(), *(f"int {name}_own[({name} + threads - 1) / threads] = {{}};" for name in names)]
        assert isinstance(self.shape, IntegerShape)
        rows, columns = self.shape.warp_tile
        return [f"constexpr int rows16 = {rows // 16}, columns8 = {columns // 8};",
                f"const int own_row = warp / (columns / {columns}) * {rows}, "
                f"own_column = warp % (columns / {columns}) * {columns};"]

    def _sums(self) -> str:
        return "of::ByteSums<rows16, columns8> sums = {};"

    def _swizzle(self, side: Side) -> str:
        return f"place_bytes<{_flag(side.across)}, "

    def _alone(self) -> list[str]:
        right = self.rights[0]
        flags = ", ".join(map(_flag, (self.left.across, right.across, *self._totals)))
        return [f"of::multiply_own_bytes<T, {TYPES[right.scalar.dtype].storage}, rows, columns, depth, {flags}>("
                "sums, left_tiles + turn * rows * depth, right_tiles + turn * columns * depth, own_row, own_column);"]

    def _instruction(self, element: str) -> list[str]:
        return _instruction(self.parts, self.shape.columns)

    def _together(self) -> list[str]:
        right = TYPES[self.parts.rights[0].dtype].storage
        left_tile, right_tile = "left_tiles + turn * rows * depth", "right_tiles + turn * columns * depth"
        rows, columns = self._totals
        return [
            "of::products_begin();",
            f"of::multiply_tiles_bytes<Tensor, T, {right}, rows, columns>("
            f"sums, {left_tile}, {right_tile}, own_row, start > 0);",
            "of::products_asked();",
            *([f"of::add_lines<T, rows, threads>(rows_own, {left_tile});"] if rows else []),
            *([f"of::add_lines<{right}, columns, threads>(columns_own, {right_tile});"] if columns else []),
        ]

    def _held(self) -> None:
        """Lanes have more neighbours than two, or sums are laid out as rows."""

    def _finished(self) -> list[str]:
        return ["of::products_done<0>();", "of::hold_bytes(sums);", f"if ({self.extents['k']} == 0) sums = {{}};"]

    def _laid_out(self) -> list[str]:
        left, right = (_flag(side.across) for side in (self.left, self.rights[0]))
        return [
            "// Everybody is done with the operands.",
            "__syncthreads();",
            f"constexpr int long_row = columns + {FLOATS};",
            "int* const laid = reinterpret_cast<int*>(shared);",
            f"of::lay_bytes_out<{left}, {right}>(laid, long_row, sums, own_row, own_column);",
            *self._totals_laid("laid + rows * long_row"),
            "__syncthreads();",
        ]

    def _totals_laid(self, place: str) -> list[str]:
        """Lines that lay totals of rows and columns out from a place on, where they are asked for."""
        left, right = (_flag(side.across) for side in (self.left, self.rights[0]))
        rows, columns = self._totals
        width = self.direct or PAIR
        if self.shape.together:
            lay_rows = f"of::lay_lines<rows, threads, {PAIR}>(row_totals, rows_own);"
            lay_columns = f"of::lay_lines<columns, threads, {width}>(column_totals, columns_own);"
        else:
            lay_rows = f"if (own_column == 0) of::lay_row_totals<{left}>(row_totals, sums, own_row);"
            lay_columns = (
                f"if (own_row == 0) of::lay_column_totals<{right}, {width}>(column_totals, sums, own_column);")
        return [*([f"int* const row_totals = {place};", lay_rows] if rows else []),
                *([f"int* const column_totals = {place} + rows;", lay_columns] if columns else [])]

    # ---- Results of sums where they are. ----

    def _before_direct(self) -> list[str]:
        """Totals lie behind the stages."""
        if not any(self._totals):
            return []
        behind = "reinterpret_cast<int*>(shared + stages * depth * (rows + columns))"
        return [*self._totals_laid(behind), "__syncthreads();"]

    def _sum_of(self, scalar: Scalar, writer: Writer) -> str | None:
        return self._less_zeros(scalar.number, writer) if isinstance(scalar, Contracted) else None


class IntegerSpecialisedText(SpecialisedText):
    """Writes the body of a kernel of integers without zero points, of which one warp copies."""

    sum_type, hold, first_sums = "int", "hold_bytes", ".of[0]"

    def _sum(self, scalar: Scalar) -> str | None:
        laid = super()._sum(scalar)
        return None if laid is None else f"__float_as_int({laid})"

    def _as_float(self, number: str) -> str:
        return f"__int_as_float({number})"

    def _sums(self) -> str:
        return "of::ByteSums<1, columns / 8> sums[rows64];"

    def _shares_columns(self, held: Held) -> bool:
        return True

    def _instruction(self, element: str) -> list[str]:
        return _instruction(self.parts, self.shape.columns)

    def _multiplies(self) -> str:
        return f"multiply_tiles_bytes<Tensor, T, {TYPES[self.parts.rights[0].dtype].storage}, rows, columns>"


class IntegerBoxText(BoxText, IntegerSpecialisedText):
    """The same over windows that are copied in boxes."""


def direct_width(parts: ProductParts, lanes: Lanes, right: Side) -> int:
    """Neighbours that a lane may have of a row of sums, for results that are stored by ``lanes``; 0 where they are laid
    out first: tiles of right operands that lie across have lines for what is summed over."""
    direct = lanes.element == "@n" and lanes.width >= PAIR and not right.across and is_brief(parts.results)
    return lanes.width if direct else 0


def _instruction(parts: ProductParts, columns: int) -> list[str]:
    """The instruction of four warps."""
    kinds = ".".join("u8" if TYPES[scalar.dtype].storage.startswith("unsigned") else "s8"
                     for scalar in (parts.left, parts.rights[0]))
    return tile_instruction(columns, kinds, size=1)


def _flag(flag: bool) -> str:
    return "true" if flag else "false"
