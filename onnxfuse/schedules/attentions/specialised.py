"""Attention whose warps have roles: one copies keys and values by tensor maps, groups of four multiply.

Each group has 64 queries of the block's and goes over all its keys: while a tile's scores are being multiplied, so is
the tile before by its values, and while these are, maxima of the scores are found, as ``together`` has it.
Groups multiply by turns, so that one's products go on while another computes powers (Shah and others,
"FlashAttention-3", 2024).  A tile of keys and one of values have two barriers each: that it is there, and that all
groups are done with it; these tell only even from odd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.lowering.pull import Scalar
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.schedules.attentions.masks import MaskTiles
from onnxfuse.schedules.attentions.parts import AttentionParts
from onnxfuse.schedules.attentions.shape import GROUP_ROWS, PANEL, SHARES, WARPS, SpecialisedAttentionShape
from onnxfuse.schedules.attentions.softmax import each_row
from onnxfuse.schedules.attentions.together import SCALED, SCORES, SUMS, TogetherText
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.products.maps import Mapped
from onnxfuse.schedules.products.specialised import AVAILABLE
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import added, indented, literal, unrolled

_ADVANCED = "if (++turn == stages) turn = 0, phase ^= 1;"
_DONE = "if (lane == 0) of::arrive({});"


MASK_OF_KEYS = "of::value(reinterpret_cast<const of::Vector<{}, 2>&>(mask_of_keys[n]).at[part + v])"
"""What a thread has of one of a type for a score."""


@dataclass(frozen=True)
class Copied:
    """What tensor maps copy: keys and values, and a mask, if one can be."""

    keys: Mapped
    values: Mapped
    mask: MaskTiles | None

    @property
    def operands(self) -> tuple[Mapped, ...]:
        """All, keys first and values second."""
        return (self.keys, self.values, *(() if self.mask is None else (self.mask.operand,)))

    def guards(self, symbols: Mapping[str, str]) -> tuple[str, ...]:
        """Under which they do."""
        own = (guard for operand in (self.keys, self.values) for guard in operand.guards(symbols))
        return (*own, *(() if self.mask is None else self.mask.guards(symbols)))

    def of(self, shape: SpecialisedAttentionShape) -> Copied:
        """What a block of this shape copies."""
        return self if shape.masked else replace(self, mask=None)

    def maps(self, shape: SpecialisedAttentionShape, symbols: Mapping[str, str]) -> list[TensorMap]:
        """Of tiles of a block of this shape."""
        rows = (shape.keys, shape.keys, GROUP_ROWS)
        return [operand.map(count, symbols) for operand, count in zip(self.operands, rows, strict=False)]


class SpecialisedAttentionText(TogetherText):
    """The body of a kernel; the plan's tensor maps from ``first`` on are those of the ``copied``: keys, values, and, if
    one is, a mask."""

    counts = "rows = 16 * tiles * warps, pair = wide > 1 ? 2 : 1"
    rows_of_mask, own_of_mask, stages_masks = str(GROUP_ROWS), f"warp % {WARPS} * 16", False

    def __init__(
        self, parts: AttentionParts, copied: Copied, shape: SpecialisedAttentionShape, columns: int,
        sizes: Mapping[str, str], first: int
    ) -> None:
        super().__init__(parts, sizes, shape, columns, copied.mask)
        self.copied, self.shape, self.first = copied, shape, first
        self.operands = copied.operands
        self.alone = shape.groups == 1
        self.repeats = self.visible is not None and self.visible.least is not None

    def text(self) -> Body:
        """All of it."""
        lines = [*self._begun(), *self._copying(), *self._multiplying()]
        return Body("\n".join([AVAILABLE, *indented(lines), "#endif", ""]), frozenset(self.sizes.used))

    def tiles(self) -> list[str]:
        """Whole panels: queries, stages of keys, of values and of the mask, each group's, and the barriers."""
        behind = "mask_tiles + stages * groups * mask_place" if self.mask else "value_tiles + stages * value_place"
        return [
            *self._instructions(),
            f"constexpr int stages = {self.shape.stages}, groups = warps / {WARPS};",
            *self.places(),
            "T* const query_tiles = reinterpret_cast<T*>(of::tiles_from(of_dynamic));",
            "T* const key_tiles = query_tiles + rows * (key_place / keys);",
            "T* const value_tiles = key_tiles + stages * key_place;",
            *(["T* const mask_tiles = value_tiles + stages * value_place;"] if self.mask else []),
            f"of::Arrivals* const keys_here = reinterpret_cast<of::Arrivals*>({behind});",
            "of::Arrivals* const keys_met = keys_here + stages;",
            "of::Arrivals* const values_here = keys_met + stages;",
            "of::Arrivals* const values_met = values_here + stages;",
            "of::Arrivals* const queries_here = values_met + stages;",
            "of::Arrivals* const allowed = queries_here + groups;",
            *(["of::Arrivals* const decided = allowed + groups;",
               "int* const lows = reinterpret_cast<int*>(decided + 1);  // of each warp"] if self.repeats else []),
        ]

    def _begun(self) -> list[str]:
        """What all warps know, and the barriers."""
        return [
            *self.constants(),
            "extern __shared__ __align__(1024) unsigned char of_dynamic[];",
            *self.tiles(),
            "// Which the compiler sees is the same for all of a warp.",
            "const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), own = warp * 16;",
            "const int lane = threadIdx.x % 32, group = lane / 4, corner = lane % 4 * 2;",
            *self.placed(),
            "if (threadIdx.x == 0) {",
            "  for (int stage = 0; stage < stages; ++stage) {",
            "    of::count_arrivals(keys_here + stage, 1), of::count_arrivals(values_here + stage, 1);",
            "    of::count_arrivals(keys_met + stage, warps), of::count_arrivals(values_met + stage, warps);",
            "  }",
            "  for (int each = 0; each < groups; ++each)",
            f"    of::count_arrivals(queries_here + each, {WARPS}), of::count_arrivals(allowed + each, {WARPS});",
            *(["  of::count_arrivals(decided, warps);"] if self.repeats else []),
            "  of::arrivals_counted();",
            "}",
            "__syncthreads();",
        ]

    def _registers(self, what: str, share: int) -> list[str]:
        """Where groups need more than their even share."""
        return [] if self.alone else [f"of::{what}_registers<{SHARES[self.shape.groups][share]}>();"]

    # ---- The warp that copies. ----

    def _copying(self) -> list[str]:
        maps = [f"of::fetch_map(m{self.first + place});" for place in range(len(self.operands))]
        return [
            "if (warp >= warps) {",
            *indented([
                *self._registers("give", 0),
                "if (threadIdx.x != 32 * warps) return;",
                *maps,
                "int turn = 0, phase = 0;",
                *self._rounds([
                    "// There is a tile where a block sees no key, too.",
                    f"for (idx start = {self.begin}; start == {self.begin} || start < {self.end}; start += keys) {{",
                    *indented([*self._copied(0, "key", self._masked()), *self._copied(1, "value"), _ADVANCED]),
                    "}",
                ]),
                "return;",
            ]),
            "}",
        ]

    def _copied(self, place: int, name: str, beside: Sequence[str] = ()) -> list[str]:
        """Panels of a tile, and what is copied ``beside`` them, once everybody is done with what was there before."""
        operand = self.operands[place]
        writer = self._writer(self.parts.accesses[1 + place].lanes)
        coordinates = ", ".join(f"(int)({one})" for one in ("panel", "start", *operand.others_at(writer)))
        size = f"({name}_place + groups * mask_place)" if beside else f"{name}_place"
        return ["{", *indented([
            f"of::wait_for({name}s_met + turn, phase ^ 1);",
            f"of::arrive_before({name}s_here + turn, {size} * (int)sizeof(T));",
            *writer.upto(Scope.VECTOR),
            *unrolled(f"int panel = 0; panel < {name}_place / keys; panel += {PANEL}", [
                f"const int at[] = {{{coordinates}}};",
                f"of::copy_tile({name}_tiles + turn * {name}_place + panel * keys, m{self.first + place}, "
                f"{name}s_here + turn, at);"]),
            *beside,
        ]), "}"]

    def _masked(self) -> list[str]:
        """Panels of each group's tile of the mask, which come with the keys."""
        if self.mask is None:
            return []
        writer = self._writer(Lanes(self.parts.puller.space, self.parts.puller, "@k", "", 1))
        places = self.mask.operand.others_at(writer, after=1)
        coordinates = ", ".join(f"(int)({one})" for one in ("start + panel", *places))
        return unrolled("int each = 0; each < groups; ++each", [
            f"const idx m = first + each * {GROUP_ROWS};",
            *writer.upto(Scope.VECTOR),
            *unrolled(f"int panel = 0; panel < mask_place / {GROUP_ROWS}; panel += {PANEL}", [
                f"const int at[] = {{{coordinates}}};",
                f"of::copy_tile(mask_tiles + (turn * groups + each) * mask_place + panel * {GROUP_ROWS}, "
                f"m{self.first + 2}, keys_here + turn, at);"]),
        ])

    def _rounds(self, once: Sequence[str], low: Sequence[str] = (), anew: Sequence[str] = ()) -> list[str]:
        """Lines that go over a block's keys, and, where a mask is a finite number and some row has seen nothing far
        above it, over all keys again: ``low`` says of a warp's rows whether that is so, ``anew`` begins once more."""
        if not self.repeats:
            return list(once)
        return [
            "for (bool everything = false;; everything = true) {" if not low else "while (true) {",
            *indented([
                *once,
                "if (everything) break;",
                *low,
                "of::wait_for(decided, 0);",
                "bool again = false;",
                "for (int each = 0; each < warps; ++each) again |= lows[each] != 0;",
                "if (!again) break;",
                "// A row may be masked everywhere: then its masked scores count.",
                f"begin = 0, end = {self.extents['k']}{', everything = true' if low else ''};",
                *anew,
            ]),
            "}",
        ]

    # ---- The groups that multiply. ----

    def _multiplying(self) -> list[str]:
        return [
            *self._registers("take", 1),
            f"const int party = warp / {WARPS};",
            "T* const query_tile = query_tiles + party * (64 * (key_place / keys));",
            *self._queries(),
            *self.sums(),
            *(["bool everything = false;"] if self.repeats else []),
            *self._reading(),
            *self._softmax(),
            *self.loop(),
            *self.closing(),
        ]

    def _queries(self) -> list[str]:
        """A group's own."""
        return [
            "{",
            *indented([
                f"constexpr int rows = 64, threads = {32 * WARPS};",
                "const idx first_own = first + party * rows;",
                *self.bring(0, "query_tile", "first_own"),
            ]),
            "}",
            "of::copies_asked();",
            "of::copies_here<0>();",
            "of::tiles_written();",
            "__syncwarp();",
            _DONE.format("queries_here + party"),
            "of::wait_for(queries_here + party, 0);",
        ]

    def held(self, scalar: Scalar) -> str | None:
        """A mask of keys that was read ahead too."""
        if self.ahead is None or scalar != self.ahead:
            return super().held(scalar)
        return MASK_OF_KEYS.format(TYPES[self.ahead.dtype].storage)

    @property
    def of_maximum(self) -> str:
        """With the tile of the mask, where there is one."""
        return "idx start" if self.mask is None else "idx start, const T* mask_tile"

    def _read_ahead(self, start: str) -> list[str]:
        """The line that reads a tile's mask of keys, if there is one: that of the next once the scores of this one are
        there, as it takes longer to come than a product."""
        return [] if self.ahead is None else [f"read({start});"]

    def _reading(self) -> list[str]:
        """What does, two elements of 16 bits as one word."""
        if self.ahead is None:
            return []
        assert self.parts.along_keys is not None
        writer, kind = self._writer(self.parts.along_keys), TYPES[self.ahead.dtype]
        read = f"mask_of_keys[n] = *reinterpret_cast<const Mask*>({writer.address(self.ahead)});"
        begun, vector, end = "const idx k = start + n * 8 + corner;", writer.lines[Scope.VECTOR], self.extents["k"]
        return [
            *writer.upto(Scope.ROW),
            f"using Mask = {'unsigned' if kind.is_narrow else f'of::Vector<{kind.storage}, 2>'};",
            "Mask mask_of_keys[keys / 8] = {};",
            "const auto read = [&](idx start) {",
            *indented([
                f"if (start + keys <= {end}) {{",
                *indented(unrolled("int n = 0; n < keys / 8; ++n", [begun, *vector, read])),
                "} else {",
                *indented(unrolled("int n = 0; n < keys / 8; ++n", [
                    begun, f"if (k < {end}) {{", *indented([*vector, read]), "}"])),
                "}",
            ]),
            "};",
        ]

    def _met(self, start: str, key_mask: str = "") -> list[str]:
        """Lines that are done with a tile of keys, and make scores and maxima of its products: with the mask's part of
        it, which has come with them, first."""
        met, following = _DONE.format("keys_met + turn"), self._read_ahead(added(start, "keys"))
        if self.mask is None:
            return [met, f"maximum({start});", *following]
        return [f"maximum({start}, mask_tiles + (turn * groups + party) * mask_place);", met, *following]

    def _scored(self, tile: str) -> str:
        return SCORES.format("64", "false", tile, f"warp % {WARPS} * 16")

    def loop(self) -> list[str]:
        """The first scores, then tile by tile scores and the sums of the tile before, then the last sums."""
        once = [
            "of::wait_for(keys_here + turn, phase);",
            "of::products_begin();",
            self._scored("key_tiles + turn * key_place"),
            "of::products_asked();",
            *self._read_ahead(self.begin),
            "of::products_done<0>();",
            "of::hold(scores[0]);",
            *self._met(self.begin),
            "power();",
            "int before = turn, phase_before = phase;  // the stage of the values of the tile before",
            _ADVANCED,
            f"for (idx start = {added(self.begin, 'keys')}; start < {self.end}; start += keys) {{",
            *indented([*self._step(), "before = turn, phase_before = phase;", _ADVANCED]),
            "}",
            "of::wait_for(values_here + before, phase_before);",
            "of::products_begin();",
            SUMS.format("value_tiles + before * value_place"),
            "of::products_asked();",
            "of::products_done<0>();",
            "of::hold(sums[0]);",
        ]
        if self.repeats:
            once += ["of::hold(powers);", _DONE.format("values_met + before")]
        return [
            "int turn = 0, phase = 0;  // the stage of the tile at hand",
            *([] if self.alone else ["int allowing = party == 0;"]),
            *self._rounds(once, self._low(), self._anew()),
        ]

    def _low(self) -> list[str]:
        """Lines that say whether some row of a warp has seen nothing far above masked scores."""
        if self.visible is None or self.visible.least is None:
            return []
        return [
            "bool low = false;",
            *each_row([f"low |= most[i][half] <= {literal(self.visible.least, FLOAT)};"]),
            "low = __any_sync(0xffffffffu, low);",
            "if (lane == 0) lows[warp] = low, of::arrive(decided);",
        ]

    def _anew(self) -> list[str]:
        """Lines that begin sums and maxima once more."""
        return each_row([
            "most[i][half] = -OF_INFINITY, total[i][half] = 0.0f;",
            *unrolled("int c = 0; c < columns / 8; ++c", [
                "sums[i][c][half * 2] = sums[i][c][half * 2 + 1] = 0.0f;"]),
        ])

    def _step(self) -> list[str]:
        """The scores of a tile and their powers, and the sums of the tile before."""
        return [
            "of::wait_for(keys_here + turn, phase);",
            "of::wait_for(values_here + before, phase_before);",
            *([] if self.alone else [
                "// The other groups have asked for their products.",
                "of::wait_for(allowed + party, allowing);",
                "allowing ^= 1;"]),
            "of::products_begin();",
            self._scored("key_tiles + turn * key_place"),
            "of::products_asked();",
            SUMS.format("value_tiles + before * value_place"),
            "of::products_asked();",
            *([] if self.alone else ["__syncwarp();", _DONE.format("allowed + (party + 1) % groups")]),
            "of::products_done<1>();",
            "of::hold(scores[0]);",
            *self._met("start"),
            "of::products_done<0>();",
            "of::hold(sums[0]);",
            "of::hold(powers);",
            _DONE.format("values_met + before"),
            *SCALED,
            "power();",
        ]
