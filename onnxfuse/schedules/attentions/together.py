"""Attention by products of four warps together, which go on while the warps find maxima.

While a tile of scores is being summed up and the one before it is multiplied by its values, the next keys and the
values of this one come; while the latter product goes on, the scores' maxima are found (Shah and others,
"FlashAttention-3", 2024), and behind it their powers are computed and packed in one go.  Keys and values have two
places each, so that one barrier a tile is enough.  A warp copies the part of a mask that its own scores are made of as
soon as it is done with the part before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.ir.scalars import FLOAT, FLOAT16, TYPES
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.attentions.masks import MaskTiles, mask_of_keys
from onnxfuse.schedules.attentions.parts import AttentionParts
from onnxfuse.schedules.attentions.shape import WIDTH, AttentionShape
from onnxfuse.schedules.attentions.softmax import added_to, each_row, powers
from onnxfuse.schedules.attentions.text import RESCALED, AttentionText
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.operand_text import copied
from onnxfuse.schedules.text import added, indented, literal, unrolled

INSTRUCTION_BYTES = 32
"""Of each row that one instruction multiplies."""

_TILE = "unsigned long long"  # what the instruction reads one by
_SOME_OF_MASK = (
    "// Biases have some everywhere, padding and what hides keys mostly none: zeros of either sign.",
    "constexpr unsigned both = 0x7fff7fffu;",
    "bool is_masked = __any_sync(0xffffffffu, (masks[0][0] | masks[0][1] | masks[1][0] | masks[1][1]) & both);",
    "if (!is_masked) {",
    *indented([
        "unsigned all = 0;",
        *unrolled("int n = 2; n < keys / 8; ++n", ["all |= masks[n][0] | masks[n][1];"]),
        "is_masked = __any_sync(0xffffffffu, all & both);"]),
    "}",
)
_HERE = ("of::copies_here<0>();", "of::tiles_written();")
SCORES = "of::multiply_tiles<Tensor, T, {}, keys, depth, false, {}>(scores[0], query_tile, {}, {});"
SUMS = "of::multiply_fragments<Tensor, T, keys, columns>(sums[0], powers, {});"
_MASK_PAIR = "reinterpret_cast<const of::Vector<T, 2>&>(masks[n][half])"
_KEY_MASK_PAIR = "reinterpret_cast<const of::Vector<float, 2>*>(key_mask + n * 8 + corner)[0]"
"""What a thread has of a mask for two scores, and what all have of one that is the same for all queries."""

PACKED = ("powers[n / 2][n % 2 * 2 + half] = of::pair_of<T>(pair[0], pair[1]);",)
"""They are the left operand of the second product."""

SCALED = (
    "if (scaled) {", *indented(each_row(["const float scale = scales[half];", *RESCALED])), "}",
)


class TogetherText(AttentionText):
    """The body of a kernel with tiles of a shape's keys and ``columns`` columns, which its instructions are written
    for; ``tiles`` is one.

    ``mask``: what is copied, where the shape says so.  ``staged``: a mask of keys, which threads read as they ask for
    these, once for all queries; ``ahead``: one that each thread reads for itself instead, where
    there are registers for it.  ``added``: what of a mask is all that is done to scores: a multiple of it, where these
    are not multiplied before, so that nothing is done to tiles that have none of it.
    """

    rows_of_mask, own_of_mask = "rows", "own"
    """Those of its tile, and the first of a warp's."""

    stages_masks = True
    """Whether masks of keys are staged."""

    def __init__(
        self, parts: AttentionParts, sizes: Mapping[str, str], shape: AttentionShape, columns: int,
        mask: MaskTiles | None = None
    ) -> None:
        super().__init__(parts, sizes)
        self.keys, self.columns = shape.keys, columns
        of_keys = mask_of_keys(self.parts)
        self.mask = mask
        self.added: Load | None = None
        self.staged = of_keys if self.stages_masks else None
        self.ahead = None if self.stages_masks else of_keys
        # A multiple of another type's lowest number may be none: of masks of keys that is looked at once.
        copied_mask = None if mask is None or self.parts.operand != FLOAT16 else mask.load
        for load in filter(None, (self.staged, copied_mask)):
            if self.added is None and (found := added_to(self.parts, load)) is not None:
                self.added, (self.parts, self.factor) = load, found

    @property
    def is_told(self) -> bool:
        """Whether barriers tell which tiles have some of a mask of keys."""
        return self.added is not None and self.added == self.staged

    def tiles(self) -> list[str]:
        """Whole panels; two places for keys, for their masks, and for values."""
        behind = "value_tile + 2 * value_place" if self.mask is None else "mask_tile + mask_place"
        return [
            *self._instructions(),
            *self.places(),
            "T* const query_tile = reinterpret_cast<T*>(of::tiles_from(of_dynamic));",
            "T* const key_tile = query_tile + rows * (key_place / keys);",
            "T* const value_tile = key_tile + 2 * key_place;",
            *(["T* const mask_tile = value_tile + 2 * value_place;"] if self.mask is not None else []),
            *([f"float* const key_mask = reinterpret_cast<float*>({behind});"] if self.staged is not None else []),
        ]

    def held(self, scalar: Scalar) -> str | None:
        """What came of masks too."""
        if self.mask is not None and scalar == self.mask.load:
            return f"of::value({_MASK_PAIR}.at[part + v])"
        if self.staged is not None and scalar == self.staged:
            return f"{_KEY_MASK_PAIR}.at[part + v]"
        return super().held(scalar)

    def _masks_of_keys(self, start: str, place: str) -> list[str]:
        """Lines that read a mask of keys for all queries, and say whether a thread's part of it is not zero."""
        if self.staged is None:
            return []
        writer = self._writer(Lanes(self.parts.puller.space, self.parts.puller, "@k", "", 1))
        read = f"of::value(*({writer.address(self.staged)}))"
        if self.is_told and self.factor != 1.0:
            read = f"of::added_before<{TYPES[self.staged.dtype].storage}>({read}, {literal(self.factor, FLOAT)})"
        return [
            *(["some = false;"] if self.is_told else []),
            *unrolled("int pass = 0; pass < (keys + threads - 1) / threads; ++pass", [
                "const int at = pass * threads + threadIdx.x;",
                f"const idx k = {added(start, 'at')};",
                *writer.upto(Scope.VECTOR),
                "if (keys % threads == 0 || at < keys) {",
                *indented([
                    f"const float masked = k < {self.extents['k']} ? {read} : 0.0f;",
                    f"({place})[at] = masked;",
                    *(["some |= masked != 0.0f;"] if self.is_told else [])]),
                "}"]),
        ]

    def scored(self, last: Sequence[str]) -> list[str]:
        """With a mask that is added first, where a tile has some of it."""
        if self.added is None:
            return super().scored(last)
        inverse = "" if self.factor == 1.0 else f" * {literal(1 / self.factor, FLOAT)}"
        pair, part = (_KEY_MASK_PAIR, "pair.at[v]") if self.is_told else (
            _MASK_PAIR, f"of::value(pair.at[v]){inverse}")
        adding = unrolled("int n = 0; n < keys / 8; ++n", unrolled("int half = 0; half < 2; ++half", [
            f"const auto pair = {pair};",
            *unrolled("int v = 0; v < 2; ++v", [f"scores[0][n][half * 2 + v] += {part};"])]))
        return [*([] if self.is_told else _SOME_OF_MASK), "if (is_masked) {", *indented(adding), "}",
                *super().scored(last)]

    def _mask_asked(self, start: str) -> list[str]:
        """Lines that ask for a warp's part of a tile of the mask."""
        if self.mask is None:
            return []
        writer = self._writer(Lanes(self.parts.puller.space, self.parts.puller, "@k", "", WIDTH))
        inside = f"column < keys && m < {self.extents['m']} && k < {self.extents['k']}"
        return [
            "__syncwarp();",
            "// Eight rows at once, so that where vectors lie among them is the same for all.",
            *unrolled("int half = 0; half < 2; ++half", [
                "const int line = own + half * 8 + lane % 8;",
                "const idx m = first + line;",
                *unrolled(f"int n = 0; n < keys; n += {4 * WIDTH}", [
                    f"const int column = n + lane / 8 * {WIDTH};",
                    f"const idx k = {added(start, 'column')};",
                    "T* const to = mask_tile + of::place<rows>(line, column);",
                    *copied(writer, self.mask.load, inside)]),
            ]),
            "of::copies_asked();",
        ]

    @property
    def of_maximum(self) -> str:
        """The parameters of what finds the maxima of a tile."""
        return "idx start" if self.staged is None else "idx start, const float* key_mask"

    def fragments(self) -> list[str]:
        """A thread's part of a tile of the mask: four times eight by eight elements an instruction."""
        if self.mask is None:
            return []
        return [
            "unsigned masks[keys / 8][2];",
            *unrolled("int n = 0; n < keys / 8; n += 2", [
                "unsigned four[4];",
                f"of::load_matrices<false>(four, mask_tile + of::place<{self.rows_of_mask}>("
                f"{self.own_of_mask} + lane % 16, n * 8 + lane / 16 * 8));",
                "masks[n][0] = four[0], masks[n][1] = four[1], masks[n + 1][0] = four[2], masks[n + 1][1] = four[3];",
            ]),
        ]

    def places(self) -> list[str]:
        """Lines that say how large tiles of keys, of values and of the mask are."""
        tiles = [("key", "keys", "depth"), ("value", "keys", "columns")]
        tiles += [("mask", self.rows_of_mask, "keys")] if self.mask is not None else []
        return [f"constexpr int {name}_place = {rows} * (({columns} + of::panel - 1) / of::panel * of::panel);"
                for name, rows, columns in tiles]

    def at(self, rows: str, columns: str, line: str, column: str) -> str:
        """As products read it."""
        return f"of::place<{rows}>({line}, {column})"

    def rows_on(self, columns: str, to: str) -> str:
        """Vectors change places by the row's number of eight."""
        return f"step % 8 == 0 ? into + pass * (step * of::panel) : {to}"

    def _scored(self, tile: str) -> str:
        return SCORES.format("rows", str(self.across).lower(), tile, "own")

    def loop(self) -> list[str]:
        """The first scores, then tile by tile scores and the sums of the tile before, then the last sums."""
        return indented([
            *self._softmax(),
            *self._mask_asked(self.begin),
            *self._masks_of_keys(self.begin, "key_mask"),
            *self._here(),
            "of::products_begin();",
            self._scored("key_tile"),
            "of::products_asked();",
            *self._following(self.begin, "value_tile", "key_tile + key_place", "key_mask + keys"),
            "of::products_done<0>();",
            "of::hold(scores[0]);",
            *self._met(self.begin, "key_mask"),
            "power();",
            "int turn = 0;  // the place of the values of the tile before",
            f"for (idx start = {added(self.begin, 'keys')}; start < {self.end}; start += keys, turn = 1 - turn) {{",
            *indented(self._step()),
            "}",
            *self._here(),
            "of::products_begin();",
            SUMS.format("value_tile + turn * value_place"),
            "of::products_asked();",
            "of::products_done<0>();",
            "of::hold(sums[0]);",
        ])

    def _met(self, start: str, key_mask: str) -> list[str]:
        """Lines that make scores and maxima of a tile's products, and ask for the next tile's part of a mask."""
        following, asked = added(start, "keys"), self._mask_asked(added(start, "keys"))
        behind = [f"if ({following} < {self.end}) {{", *indented(asked), "}"] if asked else []
        return [f"maximum({start});" if self.staged is None else f"maximum({start}, {key_mask});", *behind]

    def _here(self) -> list[str]:
        """Lines behind which all copies are here, and everybody is done with what was there before."""
        return [*_HERE, "is_masked = __syncthreads_or(some);" if self.is_told else "__syncthreads();"]

    def _step(self) -> list[str]:
        """The scores of a tile and their powers, and the sums of the tile before."""
        return [
            "// The keys and the values of the tile before are here, and everybody is done with those before them.",
            *self._here(),
            "of::products_begin();",
            self._scored("key_tile + (1 - turn) * key_place"),
            "of::products_asked();",
            SUMS.format("value_tile + turn * value_place"),
            "of::products_asked();",
            *self._following("start", "value_tile + (1 - turn) * value_place", "key_tile + turn * key_place",
                             "key_mask + turn * keys"),
            "of::products_done<1>();",
            "of::hold(scores[0]);",
            *self._met("start", "key_mask + (1 - turn) * keys"),
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
            *(["bool some = false, is_masked;  // whether a mask of keys is not zero"] if self.is_told else []),
            "float scores[tiles][keys / 8][4], scales[2];",
            "unsigned powers[keys / 16][4];",
            f"const auto maximum = [&]({self.of_maximum}) {{",
            *indented([*self.fragments(), *self.scored(["scales[half] = scale;"])]), "};",
            "const auto power = [&] {", *indented(powers(PACKED)), "};",
        ]

    def _following(self, start: str, values: str, keys: str, masks: str) -> list[str]:
        """Ask for the values of a tile, and for the keys of the next if there is one, with masks of theirs."""
        following = added(start, "keys")
        behind = [*self.bring(1, keys, following), *self._masks_of_keys(following, masks)]
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
