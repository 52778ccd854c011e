"""The attention schedule: two products with a softmax between them, whose scores never reach memory.

    scores = f(queries keys')      P = softmax(scores)      result = g(P values)

f and g are any maps, with masks and biases read or computed where a score is; what is transposed, reshaped, broadcast
over heads or scaled before a product is read so.  A block has the queries of one or two tiles of 16 rows a warp, goes
over the keys tile by tile, keeps the running maximum and sum of its rows' powers, and the sums with the values, which
are scaled down where the maximum grows (Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, 2018).  Products are of
float16, bfloat16 or float32 (rounded to TF32, ``tf32``), on tensor cores where the GPU has them; maxima, sums
and scores are float32.  Where four warps can multiply together (Hopper, 16-bit floats), a variant of its own comes
first.  Keys that a mask of places hides from all queries of a block are left out (``visible``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.tensors import postorder
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Load
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.accesses import accesses
from onnxfuse.schedules.attentions.kept import KeptText
from onnxfuse.schedules.attentions.masks import MaskTiles, mask_of
from onnxfuse.schedules.attentions.parts import OTHER, AttentionParts, parts_of
from onnxfuse.schedules.attentions.shape import (
    HOPPER,
    WARPS,
    WIDTH,
    AttentionShape,
    SpecialisedAttentionShape,
)
from onnxfuse.schedules.attentions.specialised import Copied, SpecialisedAttentionText
from onnxfuse.schedules.attentions.split import JOIN_WARPS, MOST_CHUNKS, JoinText, SplitText
from onnxfuse.schedules.attentions.text import AttentionText
from onnxfuse.schedules.attentions.together import TogetherText
from onnxfuse.schedules.choice import told
from onnxfuse.schedules.kernel import (
    HOPPER_HAS,
    Kernel,
    Pace,
    contractions,
    fits_narrow,
    make_plan,
    narrow_guards,
    walk,
)
from onnxfuse.schedules.products.maps import laid, map_parameter
from onnxfuse.schedules.reductions.split import MULTIPROCESSORS
from onnxfuse.schedules.reductions.streaming import BLOCK_SHARED
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source

TOGETHER_SHARE, SPECIALISED_SHARE = 0.25, 0.4
"""Of the rate of large tiles of products that blocks reach whose warps multiply together (H100), and those of which one
warp copies (H200)."""

ROUNDED_SHARE, ROUNDED_ALONE = 0.14, 0.09
"""The same of float32, whose warps multiply by themselves, and where a multiprocessor has one block alone."""

KEPT_SHARE = 0.2
"""The same of blocks that write scores or shares too, whose warps multiply by themselves, the first product twice."""

LEAST_ROWS = 33
"""Rows from which on they do: of fewer than half of theirs most of what they compute is of none."""

LONG_HEAD = 128
"""Columns of 16 bits up to which a multiprocessor holds two blocks of four warps that do, or blocks with 64 keys."""

SHARED_EVERYWHERE = 64 * 1024
"""Bytes of shared memory that a block may have on every GPU with tensor cores."""

MANY_BLOCKS = 2
"""Blocks a multiprocessor from which on larger ones are better: each reads all keys and values."""

SPECIALISED = ((3, 128), (3, 96), (3, 64), (2, 176), (2, 128), (2, 96), (2, 80), (2, 64), (1, 128), (1, 96), (1, 64))
"""Groups that multiply, and keys of a tile, of blocks with a warp that copies."""

OF_HEAD = {64: (1, 64), 128: (2, 128), 256: (2, 64)}
"""Of these the one that suits heads of up to so many columns, where keys are hidden or masks are read."""

OF_BARE_HEAD = {64: (3, 128), 96: (3, 96), 128: (3, 64), 256: (2, 64)}
"""The same where neither is (H200)."""

SMALLER, OF_THREE = (2, 128), 0.81
"""What stands in for three groups where these would leave multiprocessors idle in their last turn; and what a group's
share of a turn takes of three, of that of two (five attentions of 1,024 to 4,096 keys, H200)."""

LEAST_TILE, MOST_TILE = 48, 176
"""Keys of a tile that divides few keys evenly."""

LONG, LONG_BARE = 2048, 1024
"""Queries and keys from which on they are taken unmeasured, and where no keys are hidden and no masks read: those of
1,024 keys were read quicker by blocks of which a multiprocessor holds more (H200)."""

TEMPLATE = ("warps", "tiles", "keys", "depth", "columns", "wide")

SPLIT_BLOCKS = 4
"""Blocks a multiprocessor that chunks of keys are to be enough for; so many of one warp are to be split no further."""

LEAST_KEYS = 256
"""Keys from which on they are split."""

TILE_ROWS = 16
"""Queries of a tile."""


class Attention(Schedule):
    """Two products with a softmax between them.

    On an H200 140 to 350 TFLOP/s from a few hundred queries on, 390 to 720 from two thousand on, of the 750 that a
    large product has, less of fewer; 0.85 times as long as PyTorch's fastest in the mean (benchmarks/results).
    """

    name = "attention"
    settings = "{warps} warps with {tiles} x 16 queries, {group} multiply together, tiles of {keys} keys, width {width}"
    optional = MappingProxyType({"stages": "one copies, {stages} tiles ahead"})
    efficiency = 0.2
    products = 2
    other = OTHER
    hides = True
    # Each way rounds its powers to 16 bits under maxima of its own.
    tolerance = 2.0**-8

    def runs(self, does: Does) -> bool:
        """Products with the softmax between them, and what surrounds them."""
        return Does.CONTRACTS in does and Does.REDUCES in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel; that there are two where keys are split, and their scratch memory, is counted once it is made."""
        return Expected() if len(contractions(lowered)) == 2 else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with two products."""
        products = contractions(request.lowered)
        if len(products) != 2 or products[0] not in postorder(products[1].operands):
            return None
        try:
            parts = parts_of(request.lowered, *products)
            return parts if isinstance(parts, Refusal) else _kernel(request, parts)
        except Unlowerable as stopped:
            return replace(stopped.refusal, code=OTHER)  # something is used at other places than an attention has it


# ---- Its kernel. ----


def _kernel(request: Request, parts: AttentionParts) -> Kernel | Refusal:
    lowered = request.lowered
    parts, guards = accesses(parts, request.sizes)
    work = _AttentionWork(lowered, parts, request.sizes)
    own = _own(request, parts)
    width = parts.width if parts.vectors else 1
    together = None
    if parts.vectors and not parts.words and not parts.kept:
        together = work.long(request.sizes) or _together(request, parts, work)
    tried = [replace(own, warps=warps, tiles=tiles, keys=keys, width=width)
             for warps in {own.warps, WARPS} for tiles in (1, 2) for keys in (32, 64, 128)]
    if together is not None:
        tried += [work.masked(AttentionShape(warps, 1, keys, WIDTH, together=True), request.sizes)
                  for warps, keys in ((4, 64), (4, 128), (8, 64), (12, 64))]
        tried += work.specialised(request.sizes)
    offered = {shape.choice: shape for shape in sorted(tried, key=_promising)
               if shape.fits(work.depth, work.columns) and shape != (together or own)}
    choice, first = told(request.choice, offered)
    least = replace(own, warps=WARPS, tiles=1, keys=32 if own.keys > 32 else 16, width=1)
    every = dict.fromkeys((first, together, work.unmasked(together), own))
    vectorised = [shape for shape in every if shape is not None]
    divided = parts.vectors and not parts.kept and _is_split(request, parts, own)
    whole = own if (parts.words or parts.kept) and parts.vectors else together
    measured = not choice and not parts.exact
    pace = None if not measured else _split_pace(request, work, own) if divided else _pace(request, work, whole)
    for shape, needed in _shapes(lowered, vectorised if parts.vectors else [], guards, least):
        if divided and shape != first:
            work.split(own, needed)
            divided = False
        work.whole(shape, needed)
    plan = make_plan(lowered, request.rule, parts.puller, work.variants)
    comment = f"{request.rule}: {', '.join(lowered.program.operators)}"
    headers = ("onnxfuse", "mma", *(["tf32"] if parts.words else ["warpgroup"] if work.together else []),
               *(["tensor_copies"] if work.maps else []))
    source = Source(headers, comment, tuple(work.functions), tuple(work.entries))
    plan = replace(plan, scratch=tuple(work.scratch), maps=tuple(work.maps))
    hides = parts.visible is not None
    return Kernel("attention", source, plan, (), choice, tuple(offered), heavy=True, hides=hides,
                  rounds=parts.rounds, pace=pace)


def _promising(shape: AttentionShape) -> tuple[bool, bool, str]:
    """In which order ways are tried."""
    return not isinstance(shape, SpecialisedAttentionShape), not shape.together, shape.name


def _words(shape: AttentionShape, hides: bool) -> str:
    """Name of the variant; ``hides``: whether keys that a block does not see are left out."""
    return (f"{Attention().words(shape.choice)}, {shape.bits}-bit{', mask copied' if shape.masked else ''}"
            f"{', hidden keys left out' if hides else ''}")


class _AttentionWork:
    """The functions, kernels and variants of one region as they come."""

    def __init__(self, lowered: Lowered, parts: AttentionParts, sizes: Mapping[str, int]) -> None:
        assert parts.depth.value is not None and parts.columns.value is not None
        self.depth, self.columns = (-(-size // 16) * 16 for size in (parts.depth.value, parts.columns.value))
        self.parts, self.signature, symbols = parts, Signature(lowered), lowered.binding.symbols
        self.symbols, self.planned = symbols, lowered.binding.planned(sizes)
        self.batch, self.rows, self.length = (
            expression(size, symbols) for size in (parts.batch, parts.rows, parts.length))
        body = (KeptText if parts.kept else AttentionText)(parts, self.signature.sizes).text()
        self.functions = [Function("attention", TEMPLATE, self.signature.parameters(body.sizes), body.text)]
        self.together: dict[str, Function] = {}
        self.maps: list[TensorMap] = []
        self.entries: list[Entry] = []
        self.variants: list[Variant] = []
        self.scratch: list[str] = []

    def specialised(self, sizes: Mapping[str, int]) -> list[SpecialisedAttentionShape]:
        """Blocks of which one warp copies, where keys and values lie so that tensor maps can; with tiles that divide
        few keys, too."""
        if self.mapped is None:
            return []
        length = self.parts.lowered.binding.at(self.parts.length, sizes)
        even = () if length is None else (-(-length // (16 * tiles)) * 16 for tiles in (1, 2, 3))
        tiles = [*SPECIALISED, *((groups, keys) for keys in even for groups in (1, 2)
                                 if LEAST_TILE <= keys <= MOST_TILE)]
        return [self._block(groups, keys) for groups, keys in dict.fromkeys(tiles)]

    def _block(self, groups: int, keys: int) -> SpecialisedAttentionShape:
        return SpecialisedAttentionShape(WARPS * groups, 1, keys, masked=self.mask is not None)

    def masked(self, shape: AttentionShape, sizes: Mapping[str, int]) -> AttentionShape:
        """One whose blocks copy tiles of a mask too, where there is one that vectors can and there is room for it."""
        length = self.parts.lowered.binding.at(self.parts.length, sizes)
        if self.mask is None or (length is not None and length % WIDTH):
            return shape
        wide = replace(shape, masked=True)
        return wide if wide.fits(self.depth, self.columns) else shape

    def long(self, sizes: Mapping[str, int]) -> SpecialisedAttentionShape | None:
        """Such blocks where many queries meet many keys, which were quicker so in every case that was measured."""
        rows, batch, keys = _planned(self.parts, sizes)
        bare = self.parts.visible is None and not any(
            isinstance(each, Load) for each in walk([self.parts.softmax.score]))
        if rows is None or keys is None or min(rows, keys) < (LONG_BARE if bare else LONG):
            return None
        head = max(self.depth, self.columns)
        shape = self._block(*next(block for most, block in (OF_BARE_HEAD if bare else OF_HEAD).items() if head <= most))
        if shape.groups > SMALLER[0]:
            smaller = self._block(*SMALLER)
            turns, more = (_turns(-(-rows // each.rows) * (batch or 1)) * each.groups for each in (shape, smaller))
            shape = smaller if more < turns * OF_THREE else shape
        return shape if shape in self.specialised(sizes) else None

    @cached_property
    def mapped(self) -> Copied | None:
        """Keys and values as tensors in memory, and a mask; None where the former are not, or have no 16 bits."""
        if self.parts.words:
            return None
        keys, values = (laid(self.parts.puller, scalar, (inner, "@k"))
                        for scalar, inner in ((self.parts.keys, "@d"), (self.parts.values, "@n")))
        if keys is None or values is None:
            return None
        return Copied(keys, values, self.mask)

    @cached_property
    def mask(self) -> MaskTiles | None:
        """One that blocks can copy tiles of; None where there is none, or it has no 16 bits."""
        return None if self.parts.words else mask_of(self.parts, self.planned)

    def unmasked(self, shape: AttentionShape | None) -> AttentionShape | None:
        """What runs at sizes at which the mask is not copied that this shape's blocks do, where there may be such."""
        if shape is None or not shape.masked:
            return None
        keys = set() if self.mapped is None else {*replace(self.mapped, mask=None).guards(self.symbols)}
        hangs = any(".addr " not in guard for guard in {*self._copied(shape)} - keys)
        return replace(shape, masked=False) if hangs else None

    def _copied(self, shape: AttentionShape) -> tuple[str, ...]:
        """Guards of what its blocks copy by maps, or of a mask by vectors."""
        if isinstance(shape, SpecialisedAttentionShape):
            assert self.mapped is not None
            return self.mapped.of(shape).guards(self.symbols)
        if self.mask is None or not shape.masked:
            return ()
        even = self.parts.length.multiple_of() % WIDTH == 0
        return (*self.mask.guards(self.symbols), *(() if even else (f"{self.length} {WIDTH} % 0 ==",)))

    def whole(self, shape: AttentionShape, needed: tuple[str, ...]) -> None:
        """A variant whose blocks go over all keys."""
        needed += self._copied(shape)
        function = self._multiplied_together(shape) if shape.together else self.functions[0]
        blocks = shape.beside(self.depth, self.columns)
        entry = function.entry(shape.name, self._settings(shape), shape.bits, shape.threads, blocks)
        self.entries.append(entry)
        step = entry.step(self._blocks(shape), shared=str(shape.shared(self.depth, self.columns)))
        words = _words(shape, self.parts.visible is not None)
        guards = tuple(dict.fromkeys((*needed, *self._fitting(shape))))
        self.variants.append(Variant(words, (step,), guards))

    def _multiplied_together(self, shape: AttentionShape) -> Function:
        """The function of kernels whose warps multiply together, which is written for a tile's keys."""
        parts, sizes, taken = self.parts, self.signature.sizes, list[Parameter]()
        name = f"attention_together_{shape.keys}{'_masked' if shape.masked else ''}"
        text = TogetherText(parts, sizes, shape, self.columns, self.mask if shape.masked else None)
        if isinstance(shape, SpecialisedAttentionShape):
            assert self.mapped is not None
            name, first, copied = f"of_{shape.name}", len(self.maps), self.mapped.of(shape)
            text = SpecialisedAttentionText(parts, copied, shape, self.columns, sizes, first)
            self.maps += copied.maps(shape, self.symbols)
            taken = [map_parameter(place) for place in range(first, len(self.maps))]
        if name not in self.together:
            body = text.text()
            parameters = (*self.signature.parameters(body.sizes), *taken)
            self.together[name] = Function(name, TEMPLATE, parameters, body.text)
            self.functions.append(self.together[name])
        return self.together[name]

    def split(self, shape: AttentionShape, needed: tuple[str, ...]) -> None:
        """One whose blocks have a chunk of the keys each: whole tiles, as many blocks as the GPU holds."""
        blocks = self._blocks(shape)
        units = f"{self.length} {shape.keys} ceil 1 max"
        wanted = f"sms {SPLIT_BLOCKS} * {blocks} ceil {MOST_CHUNKS} min"
        chunk = f"{units} {wanted} ceil {shape.keys} *"
        chunks = f"{self.length} 1 max {chunk} ceil"
        self.scratch.append(f"{self.batch} {self.rows} * {chunks} * {4 * (self.columns + 2)} *")
        memory, size, count = (
            Parameter("unsigned char* __restrict__", "t0", "t0"),
            Parameter("const {index}", "chunk", f"i{{bits}}:{chunk}"),
            Parameter("const {index}", "chunks", f"i{{bits}}:{chunks}"),
        )
        for name, writer, template, more in (
            ("attention_split", SplitText, TEMPLATE, (memory, size, count)),
            ("attention_join", JoinText, ("columns", "wide"), (memory, count)),
        ):
            body = writer(self.parts, self.signature.sizes).text()
            signature = replace(self.signature, more=more)
            self.functions.append(Function(name, template, signature.parameters(body.sizes), body.text))
        first, second = self.functions[-2:]
        entry = first.entry(f"{shape.name}_split", self._settings(shape), shape.bits, 32 * shape.warps)
        join = second.entry(f"attention_join_w{shape.width}_{shape.bits}", (self.columns, shape.width), shape.bits,
                            32 * JOIN_WARPS)
        self.entries += [entry, join]
        steps = [entry.step(f"{blocks} {chunks} *", shared=str(shape.shared(self.depth, self.columns))),
                 join.step(f"{self.batch} {self.rows} *")]
        hides = SplitText(self.parts, self.signature.sizes).narrows
        few = f"{blocks} 2 * sms {_held(shape)} * <="
        guards = (*needed, few, f"{LEAST_KEYS} {self.length} <=", *self._fitting(shape))
        self.variants.append(Variant(f"{_words(shape, hides)}, keys split", tuple(steps), guards))

    def _settings(self, shape: AttentionShape) -> tuple[int, ...]:
        return shape.warps, shape.tiles, shape.keys, self.depth, self.columns, shape.width

    def _blocks(self, shape: AttentionShape) -> str:
        return f"{self.rows} {shape.rows} ceil {self.batch} *"

    def _fitting(self, shape: AttentionShape) -> tuple[str, ...]:
        """The guards of what not every GPU holds, or has instructions for."""
        shared = shape.shared(self.depth, self.columns)
        held = (f"{shared} {BLOCK_SHARED} <=",) if shared > SHARED_EVERYWHERE else ()
        return (HOPPER, f"{LEAST_ROWS} {self.rows} <=", *held) if shape.together else held


def _shapes(
    lowered: Lowered, vectorised: Sequence[AttentionShape], guards: tuple[str, ...], least: AttentionShape
) -> list[tuple[AttentionShape, tuple[str, ...]]]:
    """What to launch, and under which guards; the last runs anything."""
    found: list[tuple[AttentionShape, tuple[str, ...]]] = []
    if fits_narrow(lowered, rows=False):
        narrow = narrow_guards(lowered, rows=False)
        found = [*((shape, (*narrow, *guards)) for shape in vectorised), (least, narrow)]
    return [*found, (replace(least, bits=64), ())]


def _own(request: Request, parts: AttentionParts) -> AttentionShape:
    """Two tiles a warp where heads are short enough for their sums to stay in registers, and there are enough rows; no
    more warps than there are rows for."""
    assert parts.depth.value is not None and parts.columns.value is not None
    rows, batch, _ = _planned(parts, request.sizes)
    warps = WARPS
    while warps > 1 and rows is not None and 16 * warps >= 2 * rows:
        warps //= 2
    least = AttentionShape(warps, 1, 32, parts.width, size=parts.size)
    if max(parts.depth.value, parts.columns.value) * parts.size > 2 * LONG_HEAD:
        return least
    many = rows is not None and batch is not None and -(-rows // 128) * batch >= MANY_BLOCKS * MULTIPROCESSORS
    return replace(least, tiles=2 if many and warps == WARPS else 1, keys=64)


def _together(request: Request, parts: AttentionParts, work: _AttentionWork) -> AttentionShape | None:
    """Where four warps multiply together: blocks of their own, several of which a multiprocessor holds, but for heads
    that are so long that it does not; nothing for few rows."""
    rows, _, _ = _planned(parts, request.sizes)
    if rows is not None and rows < LEAST_ROWS:
        return None
    long = max(work.depth, work.columns) > LONG_HEAD
    shapes = (AttentionShape(warps, 1, 64, together=True) for warps in ((2 * WARPS, WARPS) if long else (WARPS,)))
    found = next((shape for shape in shapes if shape.fits(work.depth, work.columns)), None)
    return found and work.masked(found, request.sizes)


def _pace(request: Request, work: _AttentionWork, shape: AttentionShape | None) -> Pace | None:
    """Of blocks whose warps multiply together, of float32, or that write scores too, where no size is left open."""
    rows, batch, keys = _planned(work.parts, request.sizes)
    if shape is None or rows is None or batch is None or keys is None or rows < LEAST_ROWS:
        return None
    if work.parts.words and work.parts.has_costly_scores:
        return None  # a soft cap, whose text branches, took twelve times what it is counted as (H200)
    return _paced(work, shape, -(-rows // shape.rows) * batch, -(-keys // shape.keys))


def _split_pace(request: Request, work: _AttentionWork, shape: AttentionShape) -> Pace | None:
    """Of blocks that have a chunk of the keys each, where no size is left open and that is how these run, of 16-bit
    floats and no more queries than a tile has; and where keys and values are copied as they lie along a head: laid out
    otherwise a tile took five times as long (H100)."""
    parts, (rows, batch, keys) = work.parts, _planned(work.parts, request.sizes)
    _, *read = parts.accesses
    if parts.words or not all(each.copied and not each.across for each in read):
        return None
    if rows is None or batch is None or keys is None or not batch or not 0 < rows <= TILE_ROWS:
        return None
    if not _are_few(parts, shape, request.sizes, HOPPER_HAS):
        return None
    tiles = -(-keys // shape.keys)
    chunk = -(-tiles // min(-(-HOPPER_HAS * SPLIT_BLOCKS // batch), MOST_CHUNKS))
    return _paced(work, shape, batch * -(-tiles // chunk), chunk)


def _paced(work: _AttentionWork, shape: AttentionShape, blocks: int, stages: int) -> Pace:
    """Of so many blocks, each of which goes through so many tiles of keys."""
    columns = work.depth * (2 if work.parts.kept else 1) + work.columns
    flops, turns = 2 * shape.rows * shape.keys * columns, _turns(blocks)
    share = SPECIALISED_SHARE if isinstance(shape, SpecialisedAttentionShape) else TOGETHER_SHARE
    if work.parts.kept:
        share = KEPT_SHARE
    if work.parts.words:
        share = ROUNDED_SHARE if turns > 1 else ROUNDED_ALONE
    return Pace(turns, stages, flops, share)


def _turns(blocks: int) -> int:
    """Of blocks of which a multiprocessor has one at a time."""
    return -(-blocks // HOPPER_HAS)


def _planned(parts: AttentionParts, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """Rows, batches and keys at these sizes, as far as they are known."""
    return tuple(parts.lowered.binding.at(size, sizes) for size in (parts.rows, parts.batch, parts.length))


def _held(shape: AttentionShape) -> int:
    """Blocks that keep a multiprocessor as busy as one with all warps does."""
    return max(1, SPLIT_BLOCKS // shape.warps)


def _is_split(request: Request, parts: AttentionParts, shape: AttentionShape) -> bool:
    """Whether there may be few blocks and many keys at the planned sizes, or at those nearby."""
    return any(_are_few(parts, shape, sizes, MULTIPROCESSORS) for sizes in (request.sizes, *request.nearby))


def _are_few(parts: AttentionParts, shape: AttentionShape, sizes: Mapping[str, int], multiprocessors: int) -> bool:
    """Whether there may be few blocks for so many multiprocessors, and many keys: of these sizes it is not known that
    there are not."""
    rows, batch, keys = _planned(parts, sizes)
    few = rows is None or batch is None or 2 * -(-rows // shape.rows) * batch <= multiprocessors * _held(shape)
    return few and (keys is None or keys >= LEAST_KEYS)
