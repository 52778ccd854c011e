"""The product schedule: matrix products and convolutions with what is computed around them, in one kernel.

    result = g(f(A) B, ...)      or of several products of A, as gate and value of a feed-forward

f and g are any maps. Operands are read where and as they lie: transposed, as heads, as the windows of a convolution,
with padding. Sums are float32, of float16, bfloat16 or float32 (rounded to TF32) on tensor cores where the GPU has
them; of 16-bit floats by four warps together on Hopper (a variant of its own, which comes first), elsewhere by each
warp. What tuning may choose on Hopper too are blocks with a warp that copies whole tiles of operands that need nothing
else (``specialised``), of 16-bit floats as well, and on every GPU cuBLASLt in the kernel's place, or cuDNN in
a convolution's, where these can do all of it (``library``, ``cudnn``). Products of dequantised 8-bit
numbers are those of the integers, whose sums int32 holds exactly (``integers``). How the tiles are arranged is
described in Boehm, "How to Optimize a CUDA Matmul Kernel" (2022), and NVIDIA's CUTLASS documentation (efficient GEMM
in CUDA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from onnxfuse.ir.integers import in_integers
from onnxfuse.lowering.launch import Step, Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.shape import HOPPER
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import Kernel, Pace, contractions, fits_narrow, make_plan, narrow_guards
from onnxfuse.schedules.products import cudnn
from onnxfuse.schedules.products.blocks import MOST_TILES, Blocks
from onnxfuse.schedules.products.boxes import BoxShape, BoxText, boxed_of
from onnxfuse.schedules.products.few import FewShape, few_of
from onnxfuse.schedules.products.few_text import FewText
from onnxfuse.schedules.products.integers import IntegerBoxText, IntegerSpecialisedText, IntegerText
from onnxfuse.schedules.products.library import WORDS, WORKSPACE, LibraryShape, library_of
from onnxfuse.schedules.products.maps import all_mapped, map_parameter, mapped
from onnxfuse.schedules.products.pace import RESULTS
from onnxfuse.schedules.products.parts import (
    MOST_BESIDE,
    ProductParts,
    Side,
    parts_of,
    result_lanes,
    side_guards,
    side_in_pieces,
    single,
)
from onnxfuse.schedules.products.patch import PatchShape, PatchText, pace_of, patch_of, shapes_of
from onnxfuse.schedules.products.pixels import PixelShape, PixelText, pixel_shapes_of
from onnxfuse.schedules.products.shape import STAGE_BYTES, ProductShape, SpecialisedShape
from onnxfuse.schedules.products.shared import SHARED_TEXTS, SharedShape, shared_map
from onnxfuse.schedules.products.specialised import SpecialisedText
from onnxfuse.schedules.products.tall import TallShape, TallText, tall_of, tall_pace, tall_shapes_of
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.products.tf32 import RoundedBoxText, RoundedSpecialisedText
from onnxfuse.schedules.products.windows import Windows, has_windows
from onnxfuse.schedules.reductions.streaming import BLOCK_SHARED
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source

SHARED_EVERYWHERE = 48 * 1024
"""Bytes of shared memory that a block may have on every GPU."""

TEXTS: Mapping[int, type[SpecialisedText]] = {
    1: IntegerSpecialisedText, 2: SpecialisedText, 4: RoundedSpecialisedText}
BOX_TEXTS: Mapping[int, type[BoxText]] = {1: IntegerBoxText, 2: BoxText, 4: RoundedBoxText}
"""What writes kernels whose warps have roles, by the bytes of an element."""

MULTIPLYING = {1: ("int8", "warpgroup", "int8_together"), 2: ("warpgroup",), 4: ("tf32", "warpgroup", "tf32_together")}
"""Headers of products, likewise."""

LEAST_HALF = 32
"""Columns of half of the least tile whose windows a warp copies."""

TF32_CORES = "80 sm <="
"""The guard of GPUs that multiply TF32."""

OTHERWISE_ROUNDED = 2.0**-9
"""Share of the largest result that operands cut off after TF32's digits are off by, and not rounded: 2^-11 of each, and
what sums leave of that where terms cancel."""


class Product(Schedule):
    """Products of one left operand."""

    name = "product"
    settings = "tiles of {rows} x {columns}, {stages} stages, {group} warps multiply together"
    optional = MappingProxyType({
        "alone": "{alone} warps go through rows by themselves",
        "sharers": "{sharers} warps share what is summed over",
        "turns": "one copies, tiles at a time {turns}", "blocks": "{blocks} blocks a multiprocessor",
        "split": "{split} blocks share what is summed over", "taps": "each of {taps} places of windows by one copy",
        "line": "{line} bytes of a row at a time", "stays": "the right operand stays",
        "shared": "windows share pieces of the image",
        "wide": "{wide} windows side by side over one piece of image"})
    efficiency = 0.6
    products = MOST_BESIDE

    def template(self, choice: Choice) -> str:
        """See ``Schedule``."""
        own = {"library": WORDS, "cudnn": cudnn.WORDS}
        return next((own[name] for name, _ in choice.settings if name in own), super().template(choice))

    def leeway(self, kernel: Kernel) -> float:
        """See ``Schedule``; a library rounds operands to TF32 in its own way, and so do copies by tensor maps, which go
        to the even one of two numbers that are as near."""
        others = any("turns" in dict(choice.settings) for choice in kernel.choices)
        rounded = kernel.rounds and (others or bool(kernel.plan.variants[0].calls))
        return OTHERWISE_ROUNDED if rounded else super().leeway(kernel)

    def sharing(self, kernel: Kernel) -> tuple[int, ...]:
        """See ``Schedule``; a library's launches are its own."""
        return () if any(variant.calls for variant in kernel.plan.variants) else super().sharing(kernel)

    def runs(self, does: Does) -> bool:
        """Products without a reduction."""
        return Does.CONTRACTS in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel."""
        return Expected() if contractions(lowered) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with products."""
        if not contractions(request.lowered):
            return None
        lowered = request.lowered
        request = Request(replace(lowered, program=in_integers(lowered.program)), request.rule, request.sizes,
                          request.choice, request.nearby)
        products = contractions(request.lowered)
        if len(products) > self.products:
            return Refusal("product-structure", f"{len(products)} products in one region")
        parts = parts_of(request.lowered, products)
        return parts if isinstance(parts, Refusal) else ProductWork(request, parts).kernel()


class ProductWork:
    """The functions, kernels and variants of one region as they come."""

    def __init__(self, request: Request, parts: ProductParts) -> None:
        self.request, self.parts, self.lowered = request, parts, request.lowered
        planned = self.lowered.binding.planned(request.sizes)
        self.signature = Signature(self.lowered)
        self.batch, self.rows, self.columns = (
            expression(size, self.lowered.binding.symbols) for size in (parts.batch, parts.rows, parts.columns))
        operands = ((parts.left, "@m"), *((right, "@n") for right in parts.rights))
        self.vectors = self._alike([side_in_pieces(parts, scalar, loop, planned) for scalar, loop in operands])
        self.singles = [single(parts, scalar, loop) for scalar, loop in operands]
        floats = not parts.integers
        # Tiles that tensor maps copy, and those of images in pieces, are multiplied as TF32.
        found = [None if parts.exact else mapped(parts, scalar, loop) for scalar, loop in operands]
        self.mapped = all_mapped(parts, found, planned)
        self.lanes, self.stored = result_lanes(parts, planned)
        products = contractions(self.lowered)
        self.boxed = None if self.mapped else boxed_of(products, parts, found[1])
        self.patch = patch_of(products, parts, planned) if floats and not parts.exact else None
        self.tall = None if parts.integers or parts.exact else tall_of(
            products, parts, (self.lanes, self.stored), planned)
        self.library = (library_of(parts) or cudnn.convolution_of(products, parts)) if floats else None
        self.blocks = Blocks(parts, request, self.vectors, self.lanes, self.mapped, self.boxed)
        self.few = few_of(parts, self.blocks.planned(parts.rows), planned) if floats else None
        self.guards = tuple(dict.fromkeys(
            (*(guard for side in self.vectors for guard in side_guards(parts, side)), *self.stored)))
        self.functions: dict[str, Function] = {}
        self.entries: list[Entry] = []
        self.variants: list[Variant] = []
        self.maps: list[TensorMap] = []

    def _alike(self, sides: list[Side]) -> list[Side]:
        """Right operands lie alike, for one instruction reads them all."""
        left, *rights = sides
        if len({side.across for side in rights}) > 1:
            rights = [single(self.parts, side.scalar, side.loop) for side in rights]
        return [left, *rights]

    def kernel(self) -> Kernel:
        """All of it."""
        lowered, request = self.lowered, self.request
        patched, pixels, few, tall = self._patched(), self._pixels(), self._few(), self._tall()
        plain = [] if self._meets() else [shape for shape in few if shape.plain]
        general = self.blocks.own(self.blocks.together[0])
        tried = self.blocks.offered(MOST_TILES)
        copied = self.blocks.copied(tried)
        own = [*patched, *(pixels if self._are_quicker(pixels, copied) else ()), *plain,
               *(shape for shape in tall if shape.quicker), *copied, general][0]
        offered: dict[Choice, ProductShape | LibraryShape] = {
            shape.choice: shape for shape in self._with_library([*patched, *few, *pixels, *tall, *tried])}
        choice, first = told(request.choice, self._known(offered) if request.choice else offered)
        if isinstance(first, LibraryShape) and self.library is not None:
            self.variants.append(self.library.variant(first, lowered.binding.symbols))
        alone = patched and not self.parts.words
        self._variants(first, own, [] if alone else [general, self.blocks.own(together=False)])
        plan = replace(
            make_plan(lowered, request.rule, self.parts.puller, self.variants), maps=tuple(self.maps),
            scratch=(str(WORKSPACE),) if isinstance(first, LibraryShape) else ())
        # Times from production are kept by the text: those of the library are none of the kernels behind it.
        behind = f" (behind {self.library.title})" if self.library and isinstance(first, LibraryShape) else ""
        comment = f"{request.rule}: {', '.join(lowered.program.operators)}{behind}"
        pieces = ["patch", *(["patch_tf32"] if self.parts.words else [])] if patched or pixels or tall else []
        headers = ("onnxfuse", "mma", *MULTIPLYING[self.parts.size],
                   *(["tensor_copies", "cluster"] if self.maps else []), *pieces, *(["tall"] if tall else []),
                   *(["few_rows"] if isinstance(first, FewShape) or plain else []))
        source = Source(headers, comment, tuple(self.functions.values()), tuple(self.entries))
        choices = tuple(each for each, shape in offered.items() if shape != own)
        # Warps that only add leave room for others in a launch, as those of the few rows' other products.
        return Kernel("product", source, plan, (), choice, choices, heavy=not plain, rounds=self.parts.rounds,
                      pace=self._pace(own if first is None else first))

    def _pace(self, shape: ProductShape | LibraryShape) -> Pace | None:
        """What the time of a kernel that begins with such a block follows from."""
        if isinstance(shape, TallShape) and self.tall is not None:
            return tall_pace(self.tall, shape, self.blocks.at)
        if not isinstance(shape, PatchShape) or self.patch is None:
            return self.blocks.paces.pace(shape, self.lanes.width)
        pace = pace_of(self.patch, shape, self.blocks.at)
        return pace if pace is None or not self.parts.rounds else replace(pace, results=RESULTS[1])

    def _variants(self, first: ProductShape | LibraryShape | None, own: ProductShape, general: Sequence[ProductShape]
                  ) -> None:
        """Those that were told, or the schedule chose, before what runs where they do not."""
        narrow = narrow_guards(self.lowered, rows=False)
        if fits_narrow(self.lowered, rows=False):
            # Behind a block that was told the general ones are enough; behind a library, which may be missing, all are.
            enough = isinstance(own, SpecialisedShape) and isinstance(first, ProductShape)
            shapes = (first, *(() if enough else (own,)), *general)
            for shape in dict.fromkeys(each for each in shapes if isinstance(each, ProductShape)):
                if isinstance(shape, SpecialisedShape):
                    self.add_specialised(shape, narrow)
                elif isinstance(shape, PatchShape):
                    self._add_patched(shape, narrow)
                elif isinstance(shape, FewShape):
                    self._add_few(shape, narrow)
                elif isinstance(shape, TallShape):
                    self._add_tall(shape, narrow)
                else:
                    self._add(shape, (*narrow, *self.guards, *fitting(shape)))
            self._add(self.blocks.least, narrow)
        self._add(replace(self.blocks.least, bits=64), ())

    def _with_library(self, generated: Sequence[ProductShape]) -> list[ProductShape | LibraryShape]:
        """What may be measured: a library's own choice first where it is mostly the quickest, what else it has last."""
        if self.library is None:
            return list(generated)
        shapes, first = self.library.shapes, int(self.library.leads)
        return [*shapes[:first], *generated, *shapes[first:]]

    def _known(self, offered: Mapping[Choice, ProductShape | LibraryShape]) -> (
            Mapping[Choice, ProductShape | LibraryShape]):
        """All that a choice may mean: what was measured runs also where today's ranks would not have it tried."""
        return {shape.choice: shape for shape in self.blocks.all_offered()} | dict(offered)

    def _patched(self) -> list[PatchShape]:
        """Tiles of a convolution of few channels, whose elements come one by one."""
        if self.patch is None or self.patch.pixel is not None:
            return []
        return shapes_of(self.patch, self.blocks.planned)

    def _pixels(self) -> list[PixelShape]:
        """The same where pixels are vectors of channels."""
        if self.patch is None or self.patch.pixel is None:
            return []
        return pixel_shapes_of(self.patch, self.blocks.planned)

    def _are_quicker(self, pixels: Sequence[PixelShape], copied: Sequence[ProductShape]) -> bool:
        """Whether pieces of the image are expected to take less than boxes: where a pixel's channels are no stage of
        those that tensor maps copy, and, of float32, results no half of the least tile (so they did on an H100, of 26
        convolutions all but those of one tile), and by what tiles take."""
        if not pixels or self.patch is None or self.patch.windows.channels * self.parts.size >= STAGE_BYTES:
            return False
        if self.parts.rounds and self.blocks.planned(self.patch.parts.columns) > LEAST_HALF:
            return False
        pieces, boxes = (None if shape is None else self._pace(shape) for shape in (
            pixels[0], copied[0] if copied else None))
        if pieces is None or boxes is None or pieces.whole is None:
            return True
        return pieces.whole <= self.blocks.paces.seconds(boxes)

    def _meets(self) -> bool:
        """Whether columns are windows that lie along what is summed over: tiles read of neighbours once what lanes of
        few rows would each read for itself, three to six times as long (a VAE's and a U-Net's last)."""
        windows = any(map(has_windows, contractions(self.lowered)))
        return windows and any(side.width > 1 and not side.across for side in self.vectors[1:])

    def _tall(self) -> list[TallShape]:
        """A block for many rows by few columns."""
        return [] if self.tall is None else tall_shapes_of(self.tall, self.blocks.planned, self.signature.sizes)

    def _few(self) -> list[FewShape]:
        """Blocks for few rows, where there are few."""
        sizes = map(self.blocks.planned, (self.parts.batch, self.parts.columns, self.parts.depth))
        return [] if self.few is None else self.few.shapes(*sizes)

    def _add(self, shape: ProductShape, guards: tuple[str, ...]) -> None:
        """A variant."""
        key = replace(shape, bits=32).name
        sides, lanes = (self.vectors, self.lanes) if shape.vectors else (self.singles, self.parts.lanes("@n", 1))
        if key not in self.functions:
            text = IntegerText if self.parts.integers else ProductText
            body = text(self.parts, sides, lanes, shape, self.signature.sizes).text()
            self.functions[key] = Function(f"of_{key}", (), self.signature.parameters(body.sizes), body.text)
        step = self._step(self.functions[key], shape, self._tiles(shape))
        words = f"{Product().words(shape.choice)}, {'vectors' if shape.vectors else 'one by one'}, {shape.bits}-bit"
        self.variants.append(Variant(words, (step,), guards))

    def add_specialised(
        self, shape: SpecialisedShape, guards: tuple[str, ...], more: tuple[Parameter, ...] = ()
    ) -> None:
        """A variant with tensor maps; ``more``: what its kernel takes beside what all do."""
        symbols, first = self.lowered.binding.symbols, len(self.maps)
        columns = shape.columns // len(self.parts.rights)
        operands, tiles = self.mapped, self._tiles(shape)
        text: SpecialisedText
        if isinstance(shape, BoxShape):
            assert self.boxed is not None
            operands, tiles = list(self.boxed), self._tiles_of_boxes(self.boxed[0].windows, shape)
            if isinstance(shape, SharedShape):
                left = shared_map(self.boxed[0], shape, symbols)
                shared = SHARED_TEXTS[self.parts.size, shape.stays > 0]
                text = shared(self.parts, self.boxed, self.lanes, shape, self.signature.sizes, first)
            else:
                left, box = self.boxed[0].boxed(shape.box, symbols), BOX_TEXTS[self.parts.size]
                text = box(self.parts, self.boxed, self.lanes, shape, self.signature.sizes, first)
        else:
            left = operands[0].map(shape.rows, symbols)
            text = TEXTS[self.parts.size](self.parts, operands, self.lanes, shape, self.signature.sizes, first)
        self.maps += [left, *(operand.map(columns, symbols) for operand in operands[1:]),
                      *(text.aside_map(aside, symbols) for aside in text.asides)]
        taken = map(map_parameter, range(first, len(self.maps)))
        body, shape = text.text(), replace(shape, asides=bool(text.asides))
        parameters = (*self.signature.parameters(body.sizes), *taken, *more)
        function = self.functions[shape.name] = Function(f"of_{shape.name}", (), parameters, body.text)
        needed = [guard for operand in (*operands, *text.asides) for guard in operand.guards(symbols)]
        beside = f"sms {shape.beside} *" if shape.beside > 1 else "sms"
        step = self._step(function, shape, f"{tiles} {beside} min")
        if shape.split > 1:
            # Every block of a cluster sums something.
            depth = shape.line // self.parts.size
            needed += [f"{shape.split} {expression(self.parts.depth, symbols)} {depth} ceil <="]
            step = replace(step, grid=(f"{tiles} {shape.split} *", "1", "1"), cluster=(str(shape.split), "1", "1"))
        self.variants.append(Variant(
            Product().words(shape.choice), (step,),
            tuple(dict.fromkeys((*guards, *needed, *self.stored, *fitting(shape))))))

    def _add_patched(self, shape: PatchShape, guards: tuple[str, ...]) -> None:
        """A variant whose blocks go through tiles of windows, as many blocks as the GPU has room for."""
        assert self.patch is not None
        text = PixelText if isinstance(shape, PixelShape) else PatchText
        function = self._function(shape, text(self.patch, shape, self.signature.sizes))
        windows, symbols = self.patch.windows, self.lowered.binding.symbols
        x, y, images = (expression(size, symbols) for size in windows.counts)
        columns = expression(self.patch.parts.columns, symbols)
        blocks = f"{y} {shape.rows // shape.wide} ceil {x} {shape.wide} ceil * {images} * sms {shape.beside} * min"
        step = self._step(function, shape, blocks, f"{columns} {shape.columns} ceil")
        self.variants.append(Variant(
            Product().words(shape.choice), (step,), (*self._rounding, *guards, *self.patch.guards, *fitting(shape))))

    def _add_tall(self, shape: TallShape, guards: tuple[str, ...]) -> None:
        """A variant whose warps go through rows, as many blocks as the GPU has room for."""
        assert self.tall is not None
        function = self._function(shape, TallText(self.tall, shape, self.signature.sizes))
        blocks = f"{self.rows} {shape.rows} ceil sms {shape.beside} * min"
        self.variants.append(Variant(Product().words(shape.choice), (self._step(function, shape, blocks),), (
            *self._rounding, *guards, *self.tall.guards, *fitting(shape))))

    def _add_few(self, shape: FewShape, guards: tuple[str, ...]) -> None:
        """A variant whose warps share what is summed over, where rows are few."""
        assert self.few is not None
        sides = self.few.sides(shape)
        function = self._function(shape, FewText(self.parts, sides, self.lanes, shape, self.signature.sizes))
        few = () if self.parts.rows.value is not None else (f"{self.rows} {shape.rows} <=",)
        needed = (guard for side in sides for guard in side_guards(self.parts, side))
        self.variants.append(Variant(
            Product().words(shape.choice), (self._step(function, shape, self._tiles(shape)),),
            tuple(dict.fromkeys((*guards, *few, *needed, *self.stored, *fitting(shape))))))

    def _function(self, shape: ProductShape, text: ProductText) -> Function:
        """A function of a text that no other variant has."""
        body = text.text()
        function = self.functions[shape.name] = Function(
            f"of_{shape.name}", (), self.signature.parameters(body.sizes), body.text)
        return function

    @property
    def _rounding(self) -> tuple[str, ...]:
        """The guard of what is multiplied as TF32."""
        return (TF32_CORES,) if self.parts.rounds else ()

    def _tiles(self, shape: ProductShape) -> str:
        """How many there are."""
        own_columns = shape.columns // len(self.parts.rights)
        return f"{self.rows} {shape.rows} ceil {self.columns} {own_columns} ceil * {self.batch} *"

    def _tiles_of_boxes(self, windows: Windows, shape: BoxShape) -> str:
        """The same of tiles that are boxes of windows."""
        symbols, sides = self.lowered.binding.symbols, shape.box.sides
        boxes = " ".join(f"{expression(size, symbols)} {side} ceil"
                         for size, side in zip(windows.counts, sides, strict=True))
        return f"{boxes} {'* ' * len(windows.axes)}{self.columns} {shape.columns} ceil *"

    def _step(self, function: Function, shape: ProductShape, blocks: str, count: str = "1") -> Step:
        """A launch of so many blocks of a new kernel, ``count`` times."""
        entry = function.entry(shape.name, (), shape.bits, 32 * shape.warps, shape.beside)
        self.entries.append(entry)
        return entry.step(blocks, count, str(shape.shared))


def fitting(shape: ProductShape) -> tuple[str, ...]:
    """The guards of what not every GPU holds, or has instructions for."""
    held = (f"{shape.shared} {BLOCK_SHARED} <=",) if shape.shared > SHARED_EVERYWHERE else ()
    return (HOPPER, *held) if shape.together else held
