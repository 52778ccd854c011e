"""The text by which a product's kernel tells mean and squares of each column of its results, of a group's rows.

Results are stored in pieces of 16 rows of a warp.  Where these go through shared memory each lane goes down two columns
of a piece, where lanes have vectors of some rows they share the columns, and each keeps what it finds of two.  When a
tile is done lanes lay that out in shared memory, and the group's warps put it together.  All rows of a tile are
results: others would count.
"""

from __future__ import annotations

from onnxfuse.schedules.attentions.shape import WARPS
from onnxfuse.schedules.products.shape import PIECE, SpecialisedShape
from onnxfuse.schedules.text import indented, unrolled

MEANS, SQUARES = "means", "squares"
"""Parameters: float32, of the rows' groups and columns."""

Room = tuple[str, int]
"""A warp's own floats in shared memory, and how many there are from one warp's to the next one's."""

OWN: Room = ("own_laid", 16 * PIECE)
"""Where sums are laid out otherwise."""


class ColumnMoments:
    """Writes it for a kernel whose warps have roles: ``laid``, ``group``, ``warp`` and ``lane`` are its names."""

    def __init__(self, shape: SpecialisedShape, barriers: str) -> None:
        """``barriers``: behind which shared memory has room."""
        self.shape, self.apart, self.barriers = shape, shape.turns > 1, barriers

    def constants(self) -> list[str]:
        """Lines that say where things are."""
        return [f"of::Arrivals* const known_here = {self.barriers};",
                "of::Arrivals* const known_read = known_here + groups;"]

    def counted(self) -> list[str]:
        """Lines by which one thread sets up the barriers."""
        return [
            f"  for (int each = 0; each < 2 * groups; ++each) of::count_arrivals(known_here + each, {32 * WARPS});"]

    def begun(self) -> list[str]:
        """Lines before the first tile."""
        return ["int known_phase = 0;"]

    def before(self, wide: int) -> list[str]:
        """Lines before a tile's results: the group has read what was known of the tile before."""
        return [f"of::Moments known[columns / {wide}][2] = {{}};",
                "of::wait_for(known_read + group, known_phase ^ 1);"]

    def packed(self, laid: str) -> list[str]:
        """Lines that go down a piece as results are laid out, from there on."""
        return ["{", *indented([
            "of::Moments found[2];",
            f"of::find_moments<piece_wide>(found, {laid}, lane);",
            "of::add_moments(known[piece], found, i);"]), "}"]

    def shared(self) -> list[str]:
        """Lines that bring together what lanes have of a piece's results; all of them take part."""
        return [
            "of::Moments found[2];",
            "of::share_moments<lanes>(found, results0, lane);",
            *unrolled("int piece = 0; piece < pieces; ++piece", [
                "if (piece == now % pieces) of::add_moments(known[piece], found, now / pieces);"]),
        ]

    def after(self, columns: str, row: str, wide: int, width: int, room: Room = OWN) -> list[str]:
        """Lines behind a tile's results, of so many ``columns`` in all, that tell what the group knows; ``row``: which
        of the tiles' rows these are; ``wide``: columns of a piece, ``width``: of a vector, where results are these;
        ``room``: where warps lay out what they know."""
        own, apart = room
        place = row if self.apart else f"({row}) * groups + group"
        column = f"of::shared_column<{wide // width}, {width}>(lane)" if width else "lane * 2"
        return [
            "__syncwarp();",
            *unrolled(f"int piece = 0; piece < columns / {wide}; ++piece", unrolled("int v = 0; v < 2; ++v", [
                "of::Vector<float, 2> pair;",
                "pair.at[0] = known[piece][v].mean, pair.at[1] = known[piece][v].squares;",
                f"if (lane * 2 < {wide}) of::store({own} + (piece * {wide} + {column} + v) * 2, pair);"])),
            "of::arrive(known_here + group);",
            "of::wait_for(known_here + group, known_phase);",
            f"for (int column = threadIdx.x % {32 * WARPS}; column < columns; column += {32 * WARPS}) {{",
            *indented([
                f"if (first_n + column >= {columns}) break;",
                f"const of::Moments all = of::of_four({own} - warp % {WARPS} * {apart}, {apart}, column, "
                f"{self.shape.windows // WARPS}.0f);",
                f"const idx place = ({place}) * {columns} + first_n + column;",
                f"{MEANS}[place] = all.mean, {SQUARES}[place] = all.squares;",
            ]),
            "}",
            "of::arrive(known_read + group);",
            "known_phase ^= 1;",
        ]
