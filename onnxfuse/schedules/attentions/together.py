"""Attention by products of four warps together, which go on while the warps find maxima.

While a tile of scores is being summed up and the one before it is multiplied by its values, the next keys and the
values of this one come; while the latter product goes on, the scores' maxima are found (Shah and others,
"FlashAttention-3", 2024), and behind it their powers are computed and packed in one go.  Keys and values have two
places each, so that one barrier a tile is enough.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Scalar
from onnxfuse.schedules.attentions.masks import mask_of_keys
from onnxfuse.schedules.attentions.parts import AttentionParts
from onnxfuse.schedules.attentions.softmax import each_row, powers
from onnxfuse.schedules.attentions.text import RESCALED, AttentionText
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.text import added, indented, unrolled

INSTRUCTION_BYTES = 32
"""Of each row that one instruction multiplies."""

_TILE = "unsigned long long"  # what the instruction reads one by
_HERE = ("of::copies_here<0>();", "of::tiles_written();", "__syncthreads();")
SCORES = "of::multiply_tiles<Tensor, T, {}, keys, depth, false, {}>(scores[0], query_tile, {}, {});"
SUMS = "of::multiply_fragments<Tensor, T, keys, columns>(sums[0], powers, {});"
MASK_OF_KEYS = "of::value(mask_of_keys[n].at[part + v])"
"""What a thread has of one for a score."""

PACKED = ("powers[n / 2][n % 2 * 2 + half] = of::pair_of<T>(pair[0], pair[1]);",)
"""They are the left operand of the second product."""

SCALED = (
    "if (scaled) {", *indented(each_row(["const float scale = scales[half];", *RESCALED])), "}",
)


class TogetherText(AttentionText):
    """The body of a kernel with tiles of ``keys`` keys and ``columns`` columns, which its instructions are written for;
    ``tiles`` is one."""

    of_maximum = "idx start"
    """The parameters of what finds the maxima of a tile."""

    def __init__(self, parts: AttentionParts, sizes: Mapping[str, str], keys: int, columns: int) -> None:
        super().__init__(parts, sizes)
        self.keys, self.columns = keys, columns
        self.ahead = mask_of_keys(self.parts)

    def tiles(self) -> list[str]:
        """Whole panels; two places for keys and for values."""
        return [
            *self._instructions(),
            *self.places(),
            "T* const query_tile = reinterpret_cast<T*>(of::tiles_from(of_dynamic));",
            "T* const key_tile = query_tile + rows * (key_place / keys);",
            "T* const value_tile = key_tile + 2 * key_place;",
        ]

    def held(self, scalar: Scalar) -> str | None:
        """A mask of keys that was read ahead too."""
        return MASK_OF_KEYS if self.ahead is not None and scalar == self.ahead else super().held(scalar)

    def read_ahead(self, start: str) -> list[str]:
        """The line that reads a tile's mask of keys, if there is one: that of the next once the scores of this one are
        there, as it takes longer to come than a product."""
        return [] if self.ahead is None else [f"read({start});"]

    def _reading(self) -> list[str]:
        """What does."""
        if self.ahead is None:
            return []
        assert self.parts.along_keys is not None
        writer = self._writer(self.parts.along_keys)
        read = f"mask_of_keys[n] = of::load<2>({writer.address(self.ahead)});"
        vector = writer.lines[Scope.VECTOR]
        return [
            *writer.upto(Scope.ROW),
            f"of::Vector<{TYPES[self.ahead.dtype].storage}, 2> mask_of_keys[keys / 8] = {{}};",
            "const auto read = [&](idx start) {",
            *indented(unrolled("int n = 0; n < keys / 8; ++n", [
                "const idx k = start + n * 8 + corner;",
                f"if (k < {self.extents['k']}) {{", *indented([*vector, read]), "}"])),
            "};",
        ]

    def fragments(self) -> list[str]:
        """Lines that load what scores of a tile are made of besides products."""
        return []

    def places(self) -> list[str]:
        """Lines that say how large tiles of keys and of values are."""
        return [f"constexpr int {name}_place = keys * (({columns} + of::panel - 1) / of::panel * of::panel);"
                for name, columns in (("key", "depth"), ("value", "columns"))]

    def at(self, rows: str, columns: str, line: str, column: str) -> str:
        """As products read it."""
        return f"of::place<{rows}>({line}, {column})"

    def _scored(self, tile: str) -> str:
        return SCORES.format("rows", str(self.across).lower(), tile, "own")

    def loop(self) -> list[str]:
        """The first scores, then tile by tile scores and the sums of the tile before, then the last sums."""
        return indented([
            *self._softmax(),
            *_HERE,
            "of::products_begin();",
            self._scored("key_tile"),
            "of::products_asked();",
            *self._following(self.begin, "value_tile", "key_tile + key_place"),
            *self.read_ahead(self.begin),
            "of::products_done<0>();",
            "of::hold(scores[0]);",
            f"maximum({self.begin});",
            *self.read_ahead(added(self.begin, "keys")),
            "power();",
            "int turn = 0;  // the place of the values of the tile before",
            f"for (idx start = {added(self.begin, 'keys')}; start < {self.end}; start += keys, turn = 1 - turn) {{",
            *indented(self._step()),
            "}",
            *_HERE,
            "of::products_begin();",
            SUMS.format("value_tile + turn * value_place"),
            "of::products_asked();",
            "of::products_done<0>();",
            "of::hold(sums[0]);",
        ])

    def _step(self) -> list[str]:
        """The scores of a tile and their powers, and the sums of the tile before."""
        return [
            "// The keys and the values of the tile before are here, and everybody is done with those before them.",
            *_HERE,
            "of::products_begin();",
            self._scored("key_tile + (1 - turn) * key_place"),
            "of::products_asked();",
            SUMS.format("value_tile + turn * value_place"),
            "of::products_asked();",
            *self._following("start", "value_tile + (1 - turn) * value_place", "key_tile + turn * key_place"),
            "of::products_done<1>();",
            "of::hold(scores[0]);",
            "maximum(start);",
            *self.read_ahead("start + keys"),
            "of::products_done<0>();",
            "of::hold(sums[0]);",
            "of::hold(powers);",
            *SCALED,
            "power();",
        ]

    def _softmax(self) -> list[str]:
        """What holds a tile's scores and powers, and what makes these of those: once the products of the powers before
        are done, which is while maxima are found."""
        return [
            "float scores[tiles][keys / 8][4], scales[2];",
            "unsigned powers[keys / 16][4];",
            *self._reading(),
            f"const auto maximum = [&]({self.of_maximum}) {{",
            *indented([*self.fragments(), *self.scored(["scales[half] = scale;"])]), "};",
            "const auto power = [&] {", *indented(powers(PACKED)), "};",
        ]

    def _following(self, start: str, values: str, keys: str) -> list[str]:
        """Ask for the values of a tile, and for the keys of the next if there is one."""
        following = added(start, "keys")
        behind = self.bring(1, keys, following)
        return [*self.bring(2, values, start), f"if ({following} < {self.end}) {{", *indented(behind), "}",
                "of::copies_asked();"]

    def _instructions(self) -> list[str]:
        """The products of one step of 16, as the GPU has them: of tiles, and of fragments by a tile that lies across.
        """
        kind = "bf16" if self.element == "__nv_bfloat16" else "f16"
        return [
            "struct Tensor {",
            *indented([
                *instruction(
                    "by_tile", self.keys, f"{kind}.{kind}", parameters=f"{_TILE} left, {_TILE} right, int more",
                    given='"l"(left), "l"(right), "r"(more)', more="%{2}",
                    operands=f"%{{0}}, %{{1}}, more, 1, 1, 0, {int(self.across)}"),
                *instruction(
                    "by_fragments", self.columns, f"{kind}.{kind}",
                    parameters=f"const unsigned (&left)[4], {_TILE} right",
                    given='"r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right)',
                    operands="{{%{0}, %{1}, %{2}, %{3}}}, %{4}, more, 1, 1, 1", more="1"),
            ]),
            "};",
        ]


def tile_instruction(columns: int, kinds: str, flags: str = "", size: int = 2) -> list[str]:
    """A type with the instruction ``by_tile``, whose operands are both in shared memory; ``flags``: what is written
    behind the number that says whether the sums are added to; the others: see ``instruction``."""
    lines = instruction("by_tile", columns, kinds, parameters=f"{_TILE} left, {_TILE} right, int more",
                        given='"l"(left), "l"(right), "r"(more)', operands="%{0}, %{1}, more" + flags, more="%{2}",
                        size=size)
    return ["struct Tensor {", *indented(lines), "};"]


def instruction(
    name: str, columns: int, kinds: str, *, parameters: str, given: str, operands: str, more: str, size: int = 2,
) -> list[str]:
    """A function around one instruction with 64 rows and so many columns; ``operands`` and ``more``, the number that
    says whether the sums are added to, have places for the numbers of what is given; ``kinds``: of both operands;
    ``size``: bytes of their elements, integers where that is one."""
    count = columns // 2
    numbers = [count + place for place in range(5)]
    sums = ", ".join(f"%{place}" for place in range(count))
    element, sum_kind, register = ("int", "s32", "r") if size == 1 else ("float", "f32", "f")
    registers = ", ".join(f'"+{register}"(sums[{place // 4}][{place % 4}])' for place in range(count))
    return [
        f"static __device__ __forceinline__ void {name}({element} (&sums)[{columns // 8}][4], {parameters}) {{",
        "#ifdef OF_WARPGROUP",
        f'  asm volatile("{{.reg .pred more; setp.ne.b32 more, {more.format(*numbers)}, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k{INSTRUCTION_BYTES // size}.{sum_kind}.{kinds} "',
        f'    "{{{sums}}}, {operands.format(*numbers)};}}"',
        f"    : {registers}",
        f"    : {given});",
        "#endif",
        "}",
    ]
