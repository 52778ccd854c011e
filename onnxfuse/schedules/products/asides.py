"""What is read with a product's results as rows, such as a residual, and comes by tensor maps before it is needed.

Each group that multiplies has a ring of two slots of 64 rows and columns, where its sums would be laid out otherwise,
and a warp of its own that fills them while tiles are multiplied, as NVIDIA's CUTLASS has a warp load what epilogues
read.  What follows is computed where sums are; results take the place of what was read, and are stored from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Puller, Scalar
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.schedules.attentions.shape import PANEL, WARPS
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.products.epilogue import PAIR, Held
from onnxfuse.schedules.products.maps import PIECE_BYTES, Mapped, laid
from onnxfuse.schedules.products.shape import ASIDE_SLOTS, SpecialisedShape
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.text import Writer, indented, unrolled

BYTES = 2
"""Of an element: a slot's line is 128 bytes."""


@dataclass(frozen=True)
class Aside(Mapped):
    """A tensor that lies as the results do, read by ``load``; its axes those of columns, of rows, and of the batch."""

    load: Load


def aside_of(puller: Puller, load: Load) -> Aside | None:
    """What is read with the results of a matrix product, as the tensor that it is; None where it lies otherwise, or has
    no 16 bits."""
    found = laid(puller, load, ("@n", "@m")) if TYPES[load.dtype].size == BYTES else None
    return None if found is None else Aside(
        found.input, found.dtype, found.axes, found.strides, found.sizes, found.across, load)


def slot_at(kind: str, group: str, slot: str) -> str:
    """A slot of a group's ring."""
    return f"reinterpret_cast<{kind}*>(laid) + ({group} * {ASIDE_SLOTS} + {slot}) * {PANEL * PANEL}"


def passed() -> str:
    """A line that goes on to the next slot."""
    return f"if (++slot == {ASIDE_SLOTS}) slot = 0, odd ^= 1;"


def counted() -> list[str]:
    """Lines by which one thread sets up the barriers of all rings: that a slot is there, and that it was stored."""
    return [f"for (int slot = 0; slot < groups * {ASIDE_SLOTS}; ++slot) {{",
            "  of::count_arrivals(brought + slot, 1);", f"  of::count_arrivals(stored + slot, {WARPS});", "}"]


def brought(maps: Sequence[int], at: Sequence[Sequence[str]]) -> list[str]:
    """Lines by which one thread asks for 64 rows and columns of each tensor, by the map of its number, from coordinates
    on, for the group ``for_group``."""
    return [line for number, coordinates in zip(maps, at, strict=True) for line in (
        f"of::wait_for(stored + for_group * {ASIDE_SLOTS} + slot, odd);",
        f"of::arrive_before(brought + for_group * {ASIDE_SLOTS} + slot, {PANEL * PANEL * BYTES});",
        "{", *indented([
            f"const int at[] = {{{', '.join(coordinates)}}};",
            f"of::copy_tile({slot_at('T', 'for_group', 'slot')}, m{number}, "
            f"brought + for_group * {ASIDE_SLOTS} + slot, at);"]), "}",
        passed())]


def allowed(first: str) -> list[str]:
    """Lines by which a group, whose first tile has a number, allows both slots to be filled: when its first operands
    are there, which others then do not come before."""
    return [f"if ({first} < tiles) {{", *indented([
        "of::wait_for(here + turn, phase);",
        f"if (lane < {ASIDE_SLOTS}) of::arrive(stored + group * {ASIDE_SLOTS} + lane);"]), "}"]


def here(asides: Sequence[Aside]) -> list[str]:
    """Lines that wait until slots are filled, and name what is there."""
    lines = list[str]()
    for number, aside in enumerate(asides):
        kind = TYPES[aside.dtype].storage
        lines += [f"const int slot{number} = slot;", f"of::wait_for(brought + group * {ASIDE_SLOTS} + slot, odd);",
                  f"{kind}* const aside{number} = {slot_at(kind, 'group', 'slot')};", passed()]
    return lines


def done(asides: Sequence[Aside]) -> list[str]:
    """Lines by which a warp leaves them to the next copies."""
    return ["of::tiles_written();", "__syncwarp();", "if (lane == 0) {", *indented(
        f"of::arrive(stored + group * {ASIDE_SLOTS} + slot{number});" for number in range(len(asides))), "}"]


class AsidesText(ProductText):
    """Writes what brings it, and the results that are computed of it.

    ``first``: the plan's tensor map of the first of ``operands``, behind which those of asides are; ``apart``: whether
    groups have a tile each; ``sharing``: what of the text is how many blocks share one, "" where each has its own.
    """

    shape: SpecialisedShape
    operands: Sequence[Mapped]
    first: int
    apart: bool
    sharing: str

    @cached_property
    def asides(self) -> list[Aside]:
        """What is read with the results that copies bring: all of it, or nothing."""
        moving, held = self._moving(), self._held()
        found = [aside for load in moving if (aside := self._aside(load)) is not None]
        usable = (
            0 < len(found) == len(moving) <= ASIDE_SLOTS and held is not None
            and len(self.rights) == 1 and [kind.size for kind in self.kinds] == [BYTES]
            and self.lanes.width * BYTES == PIECE_BYTES and self._piece_wide(held) is not None)
        return found if usable else []

    def _aside(self, load: Load) -> Aside | None:
        """What is read with the results, where tensor maps may bring it."""
        return aside_of(self.parts.puller, load) if self.parts.size == BYTES else None

    def aside_map(self, aside: Aside, symbols: Mapping[str, str]) -> TensorMap:
        """What copies 64 rows and columns of it."""
        return aside.map(PANEL, symbols)

    def _asides_brought(self) -> list[str]:
        """The warps that bring what is read with the results of a group each, beside the one that copies operands."""
        if not self.asides:
            return []
        writer, first = self._writer(self.lanes), self.first + len(self.operands)
        rows = self._strip_at()
        at = [[f"(int)({one})" for one in (
            f"first_n + piece * {PANEL}", *rows, *aside.others_at(writer, 1 + len(rows)))] for aside in self.asides]
        maps = range(first, first + len(self.asides))
        strip = "i" if self.apart else "(for_group * rows64 + i)"
        return [
            f"const int for_group = warp - groups * {WARPS} - 1;",
            "if (lane != 0 || for_group >= groups) return;",
            "if (for_group >= 0) {",
            *indented([
                *(f"of::fetch_map(m{number});" for number in maps),
                "int slot = 0, odd = 0;",
                self._own_loop("for_group"),
                *indented([
                    *self._place("number"),
                    *writer.upto(Scope.VECTOR),
                    "for (int i = 0; i < rows64; ++i) {",
                    *indented([
                        f"const int place = {strip} * 64;",
                        f"for (int piece = 0; piece < (own_columns + {PANEL - 1}) / {PANEL}; ++piece) {{",
                        *indented(brought(maps, at)),
                        "}",
                    ]),
                    "}",
                ]),
                "}",
                "return;",
            ]),
            "}",
        ]

    def _tile_loop(self, first: str, step: str) -> str:
        """A loop over tiles, from those of the first blocks on."""
        over = f" / {self.sharing}" if self.sharing else ""
        return f"for (idx number = {first}{over}; number < tiles; number += {step}{over}) {{"

    def _own_first(self, group: str) -> str:
        """The first of a group's tiles."""
        return f"(idx)blockIdx.x + {group} * (idx)gridDim.x" if self.apart else "(idx)blockIdx.x"

    def _own_loop(self, group: str) -> str:
        """A loop over them."""
        return self._tile_loop(self._own_first(group), f"{'groups * ' if self.apart else ''}(idx)gridDim.x")

    def _strip_at(self) -> list[str]:
        """Where 64 rows begin, so many lines into the tile as ``place`` says, along each axis of rows."""
        return ["first_m + place"]

    def _in_place(self, held: Held) -> int | None:
        return PANEL if self.asides else super()._in_place(held)

    def _computed_first(self, held: Held, wide: int) -> list[str]:
        """A slot of what is read with the results after the other, whose place the results take."""
        if not self.asides:
            return super()._computed_first(held, wide)
        return [
            f"constexpr int piece_wide = {PANEL}, pieces = (own_columns + {PANEL - 1}) / {PANEL};",
            *unrolled("int i = 0; i < rows64; ++i", unrolled("int piece = 0; piece < pieces; ++piece", [
                *here(self.asides),
                f"{self.kinds[0].storage}* const at0 = reinterpret_cast<{self.kinds[0].storage}*>(aside0);",
                "const idx first_column = first_n + piece * piece_wide;",
                self._first_row(f"i * {held.apart}"),
                *self._read(),
                *self._computed(held),
                "__syncwarp();",
                "{", *indented(self._sent()), "}",
                *self._followed(),
                *done(self.asides),
            ])),
        ]

    def _read(self) -> list[str]:
        """Lines that read a lane's pairs, all before results take the first's place."""
        kinds = [TYPES[aside.dtype].storage for aside in self.asides]
        column = f"j * 8 + lane % 4 * {PAIR}"
        return [
            *(f"of::Vector<{kind}, {PAIR}> read{number}[2][piece_wide / 8];" for number, kind in enumerate(kinds)),
            *unrolled("int half = 0; half < 2; ++half", unrolled("int j = 0; j < piece_wide / 8; ++j", [
                f"const int line = warp % {WARPS} * 16 + half * 8 + lane / 4, column = {column};",
                *(f"read{number}[half][j] = of::load<{PAIR}>(aside{number} + of::place<{PANEL}>(line, column));"
                  for number in range(len(kinds))),
            ])),
        ]

    def _past_tile(self, column: str) -> str | None:
        """See ``EpilogueText``."""
        return f"piece * piece_wide + {column} >= own_columns" if (
            self.asides and self.shape.columns % PANEL) else None

    def _lies_at(self, number: int, line: str) -> str:
        """See ``EpilogueText``."""
        if not self.asides:
            return super()._lies_at(number, line)
        return f"at{number} + of::place<{PANEL}>(warp % {WARPS} * 16 + {line}, column)"

    def _pair_writer(self) -> Writer:
        """Reads what copies bring from where it is."""
        numbers = {aside.load: number for number, aside in enumerate(self.asides)}

        def taken(scalar: Scalar) -> str | None:
            if not isinstance(scalar, Load) or scalar not in numbers:
                return self._sum(scalar)
            return writer.of_vector(scalar, f"read{numbers[scalar]}[half][j]")

        writer = Writer(self.parts.lanes("@n", PAIR), self.sizes, taken)
        return writer

