"""The text of a product whose results' rows are reduced before they are stored, as by a norm behind a residual.

The blocks of a cluster have the columns of some rows between them, a tile each, or one block has all.  When a tile is
multiplied, its sums go through shared memory as rows, a piece after the other, and a few lanes share each row: what
follows the product is computed there and stays in registers from phase to phase (``phases``).  What the lanes of a row
find of a reduction they give to the same rows' lanes in all other blocks; who has met the others goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Load, Reduced, Scalar
from onnxfuse.schedules.attentions.shape import ALL_SHARED, ARRIVALS, BLOCK_BYTES, REGISTERS, TILE_BYTES, WARPS
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.packing import packed
from onnxfuse.schedules.products.maps import Mapped
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.products.shape import PIECE, STAGE_BYTES, SpecialisedShape
from onnxfuse.schedules.products.specialised import SpecialisedText
from onnxfuse.schedules.products.tf32 import RoundedSpecialisedText
from onnxfuse.schedules.reductions.moments import Moments
from onnxfuse.schedules.reductions.online import bare
from onnxfuse.schedules.reductions.phases import WORDS, Output, Phases, neutral, vectors_of
from onnxfuse.schedules.text import Writer, indented, pointer, unrolled

NUMBER = 4
"""Bytes of what a block finds of a row."""

MOST_HELD = {1: 255, 2: 232, 3: 160}
"""Registers of a thread, by groups that multiply."""

OTHERS, OTHER_REGISTERS = 96, 76
"""Of these those for all but sums and what is read early; and but for sums and what is kept of them."""


@dataclass(frozen=True)
class ProductRowsShape(SpecialisedShape):
    """A block with a warp that copies and groups of four that multiply, 64 rows each; so many ``blocks`` of a cluster
    have all columns of a row, and find so many ``reductions`` of it."""

    blocks: int = 1
    reductions: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"product_rows_{self.rows}x{self.columns}x{self.stages}_by{self.blocks}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of(
            "product_rows", rows=self.rows, columns=self.columns, stages=self.stages, blocks=self.blocks)

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return self.rows // 64

    @property
    def warps(self) -> int:
        """Warps of a block: beside the one that copies three that leave their registers to the others, but where these
        are one group."""
        return self.groups * WARPS + (1 if self.groups == 1 else WARPS)

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least: one group's block leaves room for another."""
        if self.groups > 1:
            return 1
        held = REGISTERS // (32 * self.warps * (self.columns + OTHER_REGISTERS))
        return max(1, min(held, ALL_SHARED // (self.shared + BLOCK_BYTES)))

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, a piece of each multiplying warp's sums, the barriers, and what blocks
        find of rows."""
        staged = self.stages * STAGE_BYTES * (self.rows + self.columns)
        found = 0 if self.blocks == 1 else self.reductions * (
            NUMBER * self.blocks * self.rows + ARRIVALS * self.groups * WARPS)
        return TILE_BYTES + staged + 4 * self.groups * WARPS * 16 * PIECE + 2 * self.stages * ARRIVALS + found


class ProductRowsText(SpecialisedText):
    """Writes the body of a kernel; ``phases``: of the results' rows."""

    def __init__(
        self, parts: ProductParts, operands: Sequence[Mapped], phases: Phases, shape: ProductRowsShape,
        sizes: Mapping[str, str], first: int
    ) -> None:
        super().__init__(parts, operands, phases.lanes, shape, sizes, first)
        self.phases, self.blocks, self.length = phases, shape.blocks, parts.columns.value or 0
        self.sharing = "blocks" if shape.blocks > 1 else ""
        self.phase, self.counted = 0, False
        self.names: dict[Scalar, str] = {}
        self.arrays: dict[Scalar, str] = {}
        self.writer = self._writer(self.lanes)
        self.vectors: dict[Load, str] = {}

    def _aside(self, load: Load) -> None:
        """Phases read rows as they are."""

    def _registers(self, what: str, share: int) -> list[str]:
        return [] if self.groups == 1 else super()._registers(what, share)

    def _constants(self) -> list[str]:
        width = self.lanes.width
        return [
            *super()._constants(),
            f"constexpr int wide = {PIECE}, pieces = own_columns / wide;",
            f"constexpr int width = {width}, lanes = wide / width < 32 ? wide / width : 32, step = 32 / lanes;",
            "constexpr int passes = 16 / step;",
        ]

    # ---- Which tile. ----

    def _count(self) -> str:
        return f"below{self._batches}"

    @property
    def _told(self) -> int:
        """Barriers that what blocks find of a warp's rows comes to, one for each time that they tell each other."""
        return sum(map(bool, self.phases.reductions)) * self.groups * WARPS if self.blocks > 1 else 0

    def _begun(self) -> list[str]:
        lines = super()._begun()
        return lines if self.blocks == 1 else [
            "of::Arrivals* const told = multiplied + stages;",
            f"unsigned char* const found = reinterpret_cast<unsigned char*>(told + {self._told});", *lines]

    def _more_counted(self) -> list[str]:
        return [f"  for (int each = 0; each < {self._told}; ++each) of::count_arrivals(told + each, 1);"] if (
            self.blocks > 1) else []

    def _shared(self) -> list[str]:
        """Which of a row's blocks this is."""
        if self.blocks == 1:
            return ["constexpr int rank = 0;"]
        return [
            f"constexpr int blocks = {self.blocks};",
            "const int rank = (int)blockIdx.x % blocks;",
            "of::begin_cluster<blocks>();",
        ]

    @property
    def _users(self) -> int:
        return super()._users * self.blocks

    def _freed(self, last: bool) -> list[str]:
        """All blocks of a row are told, for any of them may bring what comes there next; where nothing does, none is:
        it may have ended."""
        if self.blocks == 1:
            return super()._freed(last)
        return [] if last else [
            f"if (start > 0 && start + (stages - 1) * depth < {self.end} && lane < blocks) "
            "of::arrive_in_block(multiplied + before, lane);"]

    def _others_begun(self) -> list[str]:
        return ["of::wait_in_cluster<blocks>();"] if self.blocks > 1 else []

    def _copied(self, place: int, operand: Mapped, writer: Writer) -> list[str]:
        """The blocks of a row have their left operand in common: each brings a part of its stages, to all of them."""
        lines = super()._copied(place, operand, writer)
        if place or self.blocks == 1:
            return lines
        asked = [line.replace("of::copy_tile(", "of::copy_tile_to_all<blocks>(") for line in lines]
        return ["if (start / depth % blocks == rank) {", *indented(asked), "}"]

    def _place(self, number: str) -> list[str]:
        return [f"const idx b = {number} / below;",
                f"const idx first_m = {number} % below * rows, first_n = (idx)rank * own_columns;"]

    # ---- What becomes of sums. ----

    def _prefetched(self) -> list[str]:
        """What the first phase reads comes to registers while its tile is multiplied, where there is room for it."""
        moving = self._beside()
        held = sum(TYPES[load.dtype].size for load in moving) * self.shape.columns // 8 + self.shape.columns // 2
        roomy = held + OTHERS <= MOST_HELD[self.groups]
        return [*([] if roomy else super()._prefetched()), *self._asked(0, moving if roomy else [])]

    def _asked(self, phase: int, moving: Sequence[Load] = ()) -> list[str]:
        """Lines that ask for vectors that a phase reads: those of a row which all rows have, and of each row of the
        lane's such as are ``moving``."""
        down, writer = self.parts.lanes("@m", 1), self._writer(self.lanes)
        found = [load for load in vectors_of(self.phases.roots(phase), self.lanes)
                 if load not in self.vectors and (load in moving or not down.moves_place(load.offset))]
        lines, rows, columns = list[str](), list[str](), list[str]()
        for load in found:
            name = f"early{len(self.vectors)}"
            each = "[piece][pass]" if load in moving else "[piece]"
            (rows if load in moving else columns).append(f"{name}{each} = of::load<width>({writer.address(load)});")
            lines.append(f"of::Vector<{TYPES[load.dtype].storage}, width> "
                         f"{name}{each.replace('piece', 'pieces').replace('pass', 'passes')};")
            self.vectors[load] = f"{name}{each}"
        if columns:
            lines += self._each_piece([*writer.lines[Scope.KERNEL], *columns])
        return [*lines, *self._each([*writer.upto(Scope.VECTOR), *rows])] if rows else lines

    def _each(self, body: list[str], before: Sequence[str] = ()) -> list[str]:
        """Loops over a lane's vectors, of each piece those of all its rows; ``before`` each piece."""
        return self._each_piece(unrolled("int pass = 0; pass < passes; ++pass", [
            "const int line = lane / lanes + pass * step;",
            "const idx row = first_m + own_row + line;",
            f"const idx m = of::imin(row, (idx){self.extents['m']} - 1);", *body]), before)

    def _each_piece(self, body: Sequence[str], before: Sequence[str] = ()) -> list[str]:
        """A loop over pieces of a lane's columns that there are."""
        whole = self.length % (self.blocks * self.shape.columns) == 0
        return unrolled("int piece = 0; piece < pieces; ++piece", [
            *before, "const int column = lane % lanes * width;", "const idx n = first_n + piece * wide + column;",
            *(body if whole else [f"if (n < {self.length}) {{", *indented(body), "}"])])

    def _sum(self, scalar: Scalar) -> str | None:
        """Also what is known of a row, was read early, or was kept by an earlier phase."""
        if isinstance(scalar, Load) and scalar in self.vectors:
            return self.writer.of_vector(scalar, self.vectors[scalar])
        if scalar in self.names:
            return f"{self.names[scalar]}[pass]"
        if scalar in self.arrays and self.phases.kept[scalar] < self.phase:
            return f"{self.arrays[scalar]}[piece][pass][v]"
        return super()._sum(scalar)

    def _stored(self) -> list[str]:
        found = NUMBER * self.blocks * self.shape.rows
        lines = ["const int own_line = own_row + lane / lanes;"]
        known = 0
        for phase in range(self.phases.count):
            self.phase = phase
            lines += self._computed_phase(known * found)
            known += len(self.phases.reductions[phase])
        return lines

    def _computed_phase(self, begins: int) -> list[str]:
        """Lines of a phase: what it computes of all pieces, and its reductions; what blocks find begins so far on."""
        writer = self.writer = self._writer(self.lanes)
        names = {each: f"{WORDS[each.kind]}{len(self.names) + place}"
                 for place, each in enumerate(self.phases.reductions[self.phase])}
        before, inner, vectors, after = list[str](), list[str](), list[str](), list[str]()
        for reduction, name in names.items():
            functor = REDUCTIONS[reduction.kind][0]
            before += [f"{TYPES[reduction.dtype].compute} {name}[passes];", f"of::fill({name}, {neutral(reduction)});"]
            if reduction not in self.phases.moments:
                inner.append(f"{name}[pass] = {functor}::of({name}[pass], {writer.scalar(reduction.element)});")
        self._keep(writer, before, inner)
        targets = [self._result(each, writer) for each in self.phases.outputs
                   if self.phases.depth(each.scalar) == self.phase]
        for declared, computed, stored in targets:
            vectors.append(declared)
            inner.append(computed)
            after.append(stored)
        body = [
            *(["const auto sums0 = of::load_laid<width>(own_laid, line, column);"] if self.phase == 0 else ()),
            *writer.upto(Scope.VECTOR),
            *vectors,
            *unrolled("int v = 0; v < width; ++v", [*writer.lines[Scope.LANE], *inner]),
            *([f"if (row < {self.extents['m']}) {{", *indented(after), "}"] if after else ()),
        ]
        laid = ["__syncwarp();", *self._laid_piece("own_laid"), "__syncwarp();"] if self.phase == 0 else []
        pieces = self._each(body, laid)
        reduced = self._reduced(names, begins)
        for reduction, name in names.items():
            self.names[reduction] = name
        return [*before, *pieces, *reduced]

    def _keep(self, writer: Writer, before: list[str], inner: list[str]) -> None:
        """Keep what later phases need of this one."""
        made: dict[str, str] = {}
        for scalar, first in self.phases.kept.items():
            if first != self.phase or scalar in self.vectors:
                continue
            value = writer.scalar(scalar)
            if value not in made:
                # What another expression only declares anew may be kept already.
                held = value.split("[")[0]
                made[value] = held if held in self.arrays.values() else f"kept{len(self.arrays)}"
                if made[value] != held:
                    before.append(f"{TYPES[scalar.dtype].compute} {made[value]}[pieces][passes][width];")
                    inner.append(f"{made[value]}[piece][pass][v] = {value};")
            self.arrays[scalar] = made[value]

    def _result(self, output: Output, writer: Writer) -> tuple[str, str, str]:
        """Lines that declare, compute and store a vector of a result."""
        name = f"y{output.index}"
        kind, value, vector = packed(writer, output.scalar, name, self.lanes.width)
        place = pointer(f"o{output.index}", writer.index(output.place))
        return f"{kind} {name}[width];", f"{name}[v] = {value};", f"of::store({place}, {vector});"

    def _reduced(self, names: dict[Reduced, str], begins: int) -> list[str]:
        """Lines that find what reductions amount to, over the lanes of a row and over the blocks; meanwhile what the
        next phase reads is on its way."""
        lines = self._asked(self.phase + 1) if names else []
        moments = self.phases.moments
        for reduction in sorted(names, key=moments.__contains__):
            name = names[reduction]
            if reduction in moments:
                lines += self._squared(name, moments[reduction], names[moments[reduction].total])
            lines += unrolled("int pass = 0; pass < passes; ++pass", [
                f"{name}[pass] = of::reduce_lanes<{REDUCTIONS[reduction.kind][0]}, lanes>({name}[pass]);"])
        return [*lines, *(self._met(names, begins) if self.blocks > 1 and names else [])]

    def _squared(self, name: str, moments: Moments, total: str) -> list[str]:
        """Lines that sum up squares of differences from the mean of what the block has of a row, all of it kept."""
        self.phase += 1
        writer = self.writer = self._writer(self.lanes)
        kept = (each for each in self.arrays if bare(each) is bare(moments.element))
        value = writer.scalar(next(kept, moments.element))
        self.phase -= 1
        share = f" * ({self.length}.0f / own_count)" if moments.shares else " / own_count"
        count = [] if self.counted else [
            f"const float own_count = (float)of::imin((idx)own_columns, {self.length} - first_n);"]
        self.counted = True
        return [
            *count,
            *self._each([
                f"const float about = {total}[pass]{share};",
                *writer.upto(Scope.VECTOR),
                *unrolled("int v = 0; v < width; ++v", [
                    *writer.lines[Scope.LANE], f"const float difference = {value} - about;",
                    f"{name}[pass] += difference * difference;"]),
            ]),
        ]

    def _met(self, names: dict[Reduced, str], begins: int) -> list[str]:
        """Lines that have the blocks of a row tell each other what they found of it."""
        each, moments = NUMBER * self.blocks * self.shape.rows, self.phases.moments
        places = {reduction: f"reinterpret_cast<{TYPES[reduction.dtype].compute}*>(found + {begins + place * each})"
                  for place, reduction in enumerate(names)}
        told = f"told + {sum(map(bool, self.phases.reductions[:self.phase])) * self.groups * WARPS} + warp"
        given = [f"of::give_rows<blocks, rows, lanes>({name}, {places[reduction]}, own_line, lane, rank, {told});"
                 for reduction, name in names.items()]
        taken = [f"of::take_rows<{REDUCTIONS[reduction.kind][0]}, blocks, rows, lanes>("
                 f"{name}, {places[reduction]}, own_line);"
                 for reduction, name in names.items() if reduction not in moments]
        for reduction, found in moments.items():
            if reduction in names:
                taken.append(
                    f"of::take_squares<blocks, rows, lanes, own_columns, {self.length}, {str(found.shares).lower()}>("
                    f"{names[reduction]}, {places[reduction]}, {names[found.total]}, {places[found.total]}, own_line);")
        bytes_told = NUMBER * self.blocks * 16 * len(names)
        return [f"if (lane == 0) of::arrive_before({told}, {bytes_told});", *given, f"of::wait_for({told}, 0);", *taken]


class RoundedProductRowsText(ProductRowsText, RoundedSpecialisedText):
    """The same of float32 operands."""
