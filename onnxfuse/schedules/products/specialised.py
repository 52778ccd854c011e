"""The text of a product whose warps have roles: one copies tiles by tensor maps, the others multiply.

As many blocks as the GPU has multiprocessors go through the tiles.  One warp asks for stages of them, for the next tile
while this one is still being multiplied.  Groups of four warps multiply, the rows of a tile between them, or two by
turns a tile each, so that one stores results while the other multiplies ("Efficient GEMM in CUDA" of NVIDIA's CUTLASS
documentation calls these cooperative and ping-pong).  A stage has two barriers: that it is there, and that it was
multiplied.  These tell only even from odd, so that whoever waits must know of the time before: by turns, a group begins
when the other has met all stages of its tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load
from onnxfuse.schedules.attentions.shape import PANEL, SHARES, SHARES_OF_TWO, WARPS, WIDTH
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.products.asides import BYTES, AsidesText, allowed, counted
from onnxfuse.schedules.products.column_moments import ColumnMoments
from onnxfuse.schedules.products.epilogue import Held
from onnxfuse.schedules.products.maps import Mapped
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import (
    ASIDE_SLOTS,
    PIECE,
    STAGE_BYTES,
    SpecialisedShape,
)
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Writer, indented, pointer, unrolled

LINE = 128
"""Bytes that come to a cache at once."""

AVAILABLE = "#if defined(OF_WARPGROUP) || defined(ONNXFUSE_EMULATOR)"
"""Where there are such copies and products."""


class SpecialisedText(AsidesText):
    """Writes the body of a kernel; the plan's tensor maps from ``first`` on are those of ``operands``.

    ``copied``: rows of the left operand's tile that come by copies; ``hold``: what holds sums; ``sharing``: what of the
    text is how many blocks share a tile, "" where each has its own.
    """

    copied, hold = "rows", "hold"

    def __init__(
        self, parts: ProductParts, operands: Sequence[Mapped], results: Lanes, shape: SpecialisedShape,
        sizes: Mapping[str, str], first: int
    ) -> None:
        scalars = (parts.left, *parts.rights)
        sides = [Side(scalar, "@n" if place else "@m", operand.across, results, WIDTH, copied=True)
                 for place, (scalar, operand) in enumerate(zip(scalars, operands, strict=True))]
        super().__init__(parts, sides, results, shape, sizes)
        self.operands, self.first, self.apart, self.groups = operands, first, shape.turns > 1, shape.groups
        self.shape: SpecialisedShape = shape
        self.split, self.sharing = shape.split, "split" if shape.split > 1 else ""
        self._barriers = "allowed + groups" if self.apart else "multiplied + stages"
        self.start, self.end = ("begin", "end") if self.split > 1 else ("0", self.extents["k"])

    @cached_property
    def moments(self) -> ColumnMoments | None:
        """What tells mean and squares of columns, where that is asked for."""
        behind = f"stored + groups * {ASIDE_SLOTS}" if self.asides else self._barriers
        return ColumnMoments(self.shape, behind) if self.shape.moments else None

    def text(self) -> Body:
        """All of it."""
        lines = [*self._constants(), self._tiles(), *self._begun(), *self._copying(), *self._multiplying()]
        return Body("\n".join([AVAILABLE, *indented(lines), "#endif", ""]), frozenset(self.sizes.used))

    def _constants(self) -> list[str]:
        shape = self.shape
        element = TYPES[self.parts.left.dtype].storage
        laid = "rows * columns" if self.split > 1 else f"groups * {WARPS * 16 * PIECE}"
        return [
            f"using T = {element};",
            *self._instruction(element),
            f"constexpr int rows = {shape.rows}, columns = {shape.columns}, stages = {shape.stages};",
            f"constexpr int depth = {shape.line // self.parts.size}, beside = {len(self.rights)}, "
            "own_columns = columns / beside;",
            f"constexpr int groups = {self.groups}, rows64 = rows / {64 if self.apart else 64 * self.groups};",
            "extern __shared__ __align__(1024) unsigned char of_tiles[];",
            "T* const left_tiles = reinterpret_cast<T*>(of::tiles_from(of_tiles));",
            self._right_tiles(),
            f"float* const laid = reinterpret_cast<float*>(right_tiles + {self._right()});",
            f"of::Arrivals* const here = reinterpret_cast<of::Arrivals*>(laid + {laid});",
            "of::Arrivals* const multiplied = here + stages;",
            *(["of::Arrivals* const allowed = multiplied + stages;"] if self.apart else []),
            *([f"of::Arrivals* const brought = {self._barriers};",
               f"of::Arrivals* const stored = brought + groups * {ASIDE_SLOTS};"] if self.asides else []),
            "// Which the compiler sees is the same for all of a warp.",
            "const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;",
            f"const int group = warp / {WARPS};",
            *(self.moments.constants() if self.moments else ()),
        ]

    def _right(self) -> str:
        """Elements of the right operand's stages."""
        return str(self.shape.right // self.parts.size) if self.shape.stays else "stages * columns * depth"

    def _right_stage(self) -> str:
        """Where a stage of the right operand lies."""
        return f"right_tiles + {'start * columns' if self.shape.stays else 'turn * columns * depth'}"

    def _step(self) -> list[str]:
        """Lines that say what a stage is of."""
        return []

    def _stage_bytes(self) -> str:
        """Bytes that come with a stage."""
        right = "(first ? columns : 0)" if self.shape.stays else "columns"
        return f"({self.copied} + {right}) * depth * (int)sizeof(T)"

    def _begun(self) -> list[str]:
        """Barriers, and what all warps know."""
        k = self.extents["k"]
        return [
            f"const idx tiles = {self._count()};",
            f"const idx steps = ({k} + depth - 1) / depth;",
            "if (threadIdx.x == 0) {",
            "  for (int stage = 0; stage < stages; ++stage) {",
            "    of::count_arrivals(here + stage, 1);",
            f"    of::count_arrivals(multiplied + stage, {self._users});",
            "  }",
            *([f"  for (int each = 0; each < groups; ++each) of::count_arrivals(allowed + each, {WARPS});"]
              if self.apart else []),
            *self._more_counted(),
            "  of::arrivals_counted();",
            "}",
            *self._shared(),
            "__syncthreads();",
        ]

    def _more_counted(self) -> list[str]:
        """Lines by which one thread sets up further barriers."""
        return [*(indented(counted()) if self.asides else ()), *(self.moments.counted() if self.moments else ())]

    @property
    def _users(self) -> int:
        """Warps that multiply what a stage brings."""
        return WARPS * (1 if self.apart else self.groups)

    def _freed(self, last: bool) -> list[str]:
        """Lines by which a warp says that it has multiplied the stage before: the ``last`` of a tile, or another."""
        where = "" if last else f"start > {self.start} && "
        return [f"if ({where}lane == 0) of::arrive(multiplied + before);"]

    def _count(self) -> str:
        """How many tiles there are, over all batches."""
        return f"below * beyond{self._batches}"

    @property
    def _batches(self) -> str:
        """A factor: of how many batches."""
        batch = self.extents["b"]
        return "" if batch == "1" else f" * {batch}"

    def _shared(self) -> list[str]:
        """What this block of a cluster sums over."""
        return [] if self.split == 1 else [
            f"constexpr int split = {self.split};",
            "const int rank = (int)blockIdx.x % split;",
            "const idx begin = steps * rank / split * depth;",
            f"const idx end = of::imin(steps * (rank + 1) / split * depth, (idx){self.extents['k']});",
        ]

    def _others_begun(self) -> list[str]:
        """Lines that wait until a cluster's other blocks may be reached."""
        return []

    def _registers(self, what: str, share: int) -> list[str]:
        """What copies hands registers to what multiplies."""
        shares = SHARES[self.groups] if self.shape.beside == 1 else SHARES_OF_TWO
        return [f"of::{what}_registers<{shares[share]}>();"]

    # ---- The warp that copies. ----

    def _copying(self) -> list[str]:
        writer = self._writer(self.lanes)
        copies = []
        for place, operand in enumerate(self.operands):
            copied = self._copied(place, operand, writer)
            copies += ["if (first) {", *indented(copied), "}"] if place and self.shape.stays else copied
        maps = [f"of::fetch_map(m{self.first + place});" for place in range(len(self.operands))]
        alone = self._asides_brought() or [f"if (threadIdx.x != groups * {32 * WARPS}) return;"]
        return [
            "if (group == groups) {",
            *indented([
                *self._registers("give", 0),
                *alone,
                *maps,
                "int turn = 0, phase = 0;",
                *self._others_begun(),
                self._tile_loop("(idx)blockIdx.x", "(idx)gridDim.x"),
                *indented([
                    *self._place("number"),
                    *writer.upto(Scope.VECTOR),
                    *(("const bool first = number == (idx)blockIdx.x;",) if self.shape.stays else ()),
                    f"for (idx start = {self.start}; start < {self.end}; start += depth) {{",
                    *indented([
                        *self._step(),
                        "// Everybody is done with what was there before.",
                        "of::wait_for(multiplied + turn, phase ^ 1);",
                        f"of::arrive_before(here + turn, {self._stage_bytes()});",
                        *copies,
                        "if (++turn == stages) turn = 0, phase ^= 1;",
                    ]),
                    "}",
                ]),
                "}",
                "return;",
            ]),
            "}",
        ]

    def _copied(self, place: int, operand: Mapped, writer: Writer) -> list[str]:
        """Panels of an operand's tile: one of all that is summed over, or, across, one of every 64 rows."""
        behind = f" + {place - 1} * own_columns * depth" if place > 1 else ""
        tile = f"{self._right_stage()}{behind}" if place else "left_tiles + turn * rows * depth"
        coordinates = ", ".join(f"(int)({one})" for one in self._at("n" if place else "m", operand, writer))
        asked = (f"const int at[] = {{{coordinates}}};", "of::copy_tile({}, "
                 f"m{self.first + place}, here + turn, at);")
        if not operand.across:
            return ["{", *indented([asked[0], asked[1].format(tile)]), "}"]
        wide = "own_columns" if place else "rows"
        return unrolled(f"int panel = 0; panel < {wide}; panel += {PANEL}", [
            asked[0], asked[1].format(f"{tile} + panel * depth")])

    def _at(self, loop: str, operand: Mapped, writer: Writer) -> list[str]:
        """Where a panel begins along each axis of an operand with rows of this loop."""
        at = [f"first_{loop} + panel", "start"] if operand.across else ["start", f"first_{loop}"]
        return [*at, *operand.others_at(writer)]

    # ---- The groups that multiply. ----

    def _multiplying(self) -> list[str]:
        begun = ["// The other group has met all stages of its tile.",
                 "of::wait_for(allowed + group, allowing);", "allowing ^= 1;"] if self.apart else []
        met = ["__syncwarp();", "if (lane == 0) of::arrive(allowed + (group ^ 1));"] if self.apart else []
        passed = ["// The other group's tile.", "pass_by(steps);"] if self.apart else []
        pieces = "rows64 * (columns / 64) * " if self.split > 1 else ""
        return [
            *self._registers("take", 1),
            f"const int own_row = {'' if self.apart else 'group * rows64 * 64 + '}warp % {WARPS} * 16;",
            f"float* const own_laid = laid + warp * {pieces}{16 * PIECE};",
            "int turn = 0, phase = 0;",
            *(["int slot = 0, odd = 0;"] if self.asides else []),
            *(["int allowing = group ^ 1;", "const auto pass_by = [&](idx steps) {",
               "  const idx on = turn + steps;",
               "  turn = (int)(on % stages), phase ^= (int)(on / stages & 1);",
               "};", "if (group > 0) pass_by(steps);"] if self.apart else []),
            *self._others_begun(),
            *(allowed(self._own_first("group")) if self.asides else ()),
            *(self.moments.begun() if self.moments else ()),
            self._own_loop("group"),
            *indented([
                *self._place("number"),
                *self._prefetched(),
                self._sums(),
                "int before = 0;",
                *begun,
                *self._summed(),
                *met,
                "of::products_done<0>();",
                *unrolled("int i = 0; i < rows64; ++i", [f"of::{self.hold}(sums[i]);"]),
                *self._freed(last=True),
                *passed,
                *self._stored(),
            ]),
            "}",
        ]

    def _prefetched(self) -> list[str]:
        """What is read with the results of a warp's rows comes to the second-level cache while they are multiplied."""
        lines = list[str]()
        for load in self._beside() if not self.asides else ():
            writer = self._writer(self.lanes)
            address = pointer(f"i{load.input}", writer.index(load.offset))
            lines += [
                f"for (int column = lane / 16 * {LINE // TYPES[load.dtype].size}; column < own_columns; "
                f"column += {2 * LINE // TYPES[load.dtype].size}) {{",
                *indented([
                    f"const idx n = of::imin(first_n + column, (idx){self.extents['n']} - 1);",
                    *writer.upto(Scope.VECTOR), f"of::prefetch({address});"]),
                "}",
            ]
        if not lines:
            return []
        return unrolled("int i = 0; i < rows64; ++i", [*self._near(), *lines])

    def _near(self) -> list[str]:
        """Lines that name the row that a lane brings near."""
        m = f"of::imin(first_m + own_row + i * 64 + lane % 16, (idx){self.extents['m']} - 1)"
        return [f"const idx m = {m};"]

    def _beside(self) -> list[Load]:
        """Those of what is read with the results that are rows too."""
        return [] if self.parts.puller.gathered else [
            load for load in self._moving() if self.lanes.stride(load.offset) == 1 and not load.conditions]

    def _summed(self) -> list[str]:
        """The stages of a tile, one being multiplied while the next is asked for."""
        return [
            f"for (idx start = {self.start}; start < {self.end}; start += depth) {{",
            *indented([
                *self._step(),
                "of::wait_for(here + turn, phase);",
                *self._left_stage(),
                "of::products_begin();",
                *unrolled("int i = 0; i < rows64; ++i", self._products()),
                "of::products_asked();",
                "// This stage is being multiplied; that before it may be filled.",
                "of::products_done<1>();",
                *self._freed(last=False),
                "before = turn;",
                "if (++turn == stages) turn = 0, phase ^= 1;",
                *self._passed(),
            ]),
            "}",
        ]

    def _left_stage(self) -> list[str]:
        """Lines that say where what a stage has of the left operand lies, where it does not lie by itself."""
        return []

    def _products(self) -> list[str]:
        """Lines that multiply what a stage has of 64 rows."""
        return [f"of::{self._multiplies()}(",
                f"    sums[i], left_tiles + turn * rows * depth, {self._right_stage()}, "
                f"own_row + i * 64, start > {self.start});"]

    def _passed(self) -> list[str]:
        """Lines that go on to the next stage's left operand, where that does not follow its turn."""
        return []

    def _sums(self) -> str:
        return "float sums[rows64][columns / 8][4];"

    def _multiplies(self) -> str:
        """What multiplies a stage."""
        if self.shape.line < STAGE_BYTES:
            return "multiply_short<Tensor, T, columns, depth>"
        return f"multiply_tiles<Tensor, T, rows, columns, depth, {_flag(self.left)}, {_flag(self.rights[0])}>"

    # ---- What becomes of sums. ----

    def _held(self) -> Held | None:
        """Where sums are; what blocks share they add up as rows."""
        return Held("rows64", 64, self.shape.columns // len(self.rights)) if self.split == 1 else None

    def _own_laid(self) -> list[str]:
        return []

    def _stored(self) -> list[str]:
        lines, held = super()._stored(), self._held()
        if self.moments is None or held is None:
            return lines
        packed = self._in_place(held)
        wide, width = packed or PIECE, 0 if packed else self.lanes.width
        after = [] if self.asides else self.moments.after(self.extents["n"], self._down, wide, width)
        return [*self.moments.before(wide), *lines, *after]

    def _followed(self) -> list[str]:
        if self.moments is None or not self.asides:
            return self.moments.packed("at0") if self.moments else []
        # What warps know lies where the last results did, before that place is left to the next copy.
        laid = f"at0 + warp % {WARPS} * {16 * PANEL}"
        told = self.moments.after(
            self.extents["n"], self._down, PANEL, 0, (f"(reinterpret_cast<float*>({laid}))", 16 * PANEL * BYTES // 4))
        return [*self.moments.packed(laid), "if (i == rows64 - 1 && piece == pieces - 1) {", *indented(told), "}"]

    @property
    def _down(self) -> str:
        """Which of the tiles below one another it is."""
        return "first_m / rows"

    def _laid_first(self) -> list[str]:
        """A piece of the sums after the other: as rows in the warp's shared memory, from there results."""
        wide = PIECE // 4 if len(self.rights) == 3 else PIECE // len(self.rights)  # a power of two
        while self.shape.columns // len(self.rights) % wide:
            wide //= 2
        head = f"constexpr int wide = {wide}, pieces = own_columns / wide;"
        laid = unrolled("int piece = 0; piece < rows64 * pieces; ++piece", [
            "if (piece == now) {", *indented(self._laid_piece("own_laid")), "}"])
        loop = "for (int now = 0; now < rows64 * pieces; ++now) {"
        if self.split == 1:
            lines = ["__syncwarp();", *laid, "__syncwarp();"]
            taken = "of::load_laid<width>(own_laid, line, column{})"
            return [head, "#pragma unroll 1", loop, *indented(self._piece_stored(lines, "16 / step", taken)), "}"]
        every = unrolled("int piece = 0; piece < rows64 * pieces; ++piece",
                         self._laid_piece(f"own_laid + piece * {16 * PIECE}"))
        taken = f"of::load_shares<split, width>(own_laid + now * {16 * PIECE}, line, column{{}})"
        return [
            head, *every,
            "// All blocks of the cluster have laid out what they summed; each stores its share of all rows.",
            "of::meet_cluster();",
            "#pragma unroll 1", loop,
            *indented(self._piece_stored([], "(16 / step + split - 1) / split", taken)), "}",
            "// Nobody ends while others read what it laid out.",
            "of::meet_cluster();",
        ]

    def _laid_piece(self, to: str) -> list[str]:
        """Lines that lay a piece of the sums out."""
        laid = "of::laid_at(half * 8 + lane / 4, p * wide + j * 8 + lane % 4 * 2)"
        place = "[(p * own_columns + piece % pieces * wide) / 8 + j]"
        one, other = (self._as_float(f"from[half * 2{more}]") for more in ("", " + 1"))
        return unrolled("int p = 0; p < beside; ++p", unrolled(
            "int j = 0; j < wide / 8; ++j", unrolled("int half = 0; half < 2; ++half", [
                f"const {self.sum_type} (&from)[4] = sums[piece / pieces]{self.first_sums}{place};",
                "of::Vector<float, 2> pair;",
                f"pair.at[0] = {one}, pair.at[1] = {other};",
                f"of::store({to} + {laid}, pair);"])))

    def _piece_stored(self, laid: Sequence[str], passes: str, taken: str) -> list[str]:
        """Lines that store the results of a piece, when it is ``laid`` out."""
        n = self.extents["n"]
        rows, ends, shared = self._row("m"), [f"if (n >= {n}) break;"], list[str]()
        at = "const idx n = first_column + column;"
        if self.moments:  # all lanes take part in what they share
            at, ends, shared = f"const idx n = of::imin(first_column + column, (idx){n} - width);", [], (
                self.moments.shared())
            rows = [*self._row("any_m"), f"const idx m = first_column + column < {n} ? any_m : {self.extents['m']};"]
        return [
            "const idx first_column = first_n + now % pieces * wide;",
            self._first_row("now / pieces * 64"),
            f"if (first_row >= {self._past_row}) break;",
            f"if (first_column >= {n}) continue;",
            *laid,
            f"constexpr int width = {self.lanes.width}, lanes = of::lanes_of(wide / width, 32), step = 32 / lanes;",
            f"constexpr int passes = {passes};",
            "for (int column = lane % lanes * width; column < wide; column += lanes * width) {",
            *indented([
                at, *ends, *self._results(self._row("row"), taken, rows, "wide"), *shared,
            ]),
            "}",
        ]

    def _line(self) -> list[str]:
        """Lines that name a lane's line of a piece; those of blocks that share them take turns."""
        if self.split == 1:
            return ["const int line = lane / lanes + pass * step;"]
        return ["const int share = lane / lanes + (pass * split + rank) * step, line = of::imin(share, 15);"]

    @property
    def _past_row(self) -> str:
        """Past which there are no rows, as a piece's first is counted."""
        return self.extents["m"]

    def _row(self, name: str) -> list[str]:
        """Lines that name a lane's row of a piece."""
        return [*self._line(), *self._row_of(name)]

    def _row_of(self, name: str) -> list[str]:
        return super()._row_of(name) if self.split == 1 else [
            f"const idx {name} = share < 16 ? first_row + line : (idx){self.extents['m']};"]


def _flag(side: Side) -> str:
    return "true" if side.across else "false"
