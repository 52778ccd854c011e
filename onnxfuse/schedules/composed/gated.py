"""Images scaled by what their means make, as squeeze-and-excite does.

    image ─┬─ mean of each channel ─ products by small weights, activations ─ gate ─┐
           └─────────────────────────────────────────────────────────────── scale ─┴▶

Few numbers go through the products, one for each image and channel, and a launch for each of them, or two where the
activation is one, takes longer than they do.  Here one launch has all of them (``gated_text``): the blocks of a cluster
have an image's columns of each product between them, and tell each other what they found.  Before it the kernel of a
mean runs, or that of a depthwise convolution which tells the sums with what it writes (``gated_ahead``), behind it a
pointwise one, those that regions of these alone have: three launches of one node.  Where a tall and skinny product of
the scaled image follows (``products.tall``), its warps scale what they read, and the scaled image is never in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from itertools import product as product_of

from onnxfuse.graph.dims import product
from onnxfuse.ir.descent import above, computed_of
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Contract, Input, Program, Reduce, Tensor, postorder
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.composed.gated_ahead import Mean, convolution_ahead, mean_of, paced
from onnxfuse.schedules.composed.gated_text import PARTS, THREADS, GateShape, GateText, Stage, shared, stage_of
from onnxfuse.schedules.composed.in_parts import REDUCTIONS, InParts, Launches, inputs_of, joined, renamed_variant
from onnxfuse.schedules.composed.recurrent import HAS_CLUSTERS
from onnxfuse.schedules.kernel import Kernel, Launched, Pace, contractions, fits_narrow, make_plan, narrow_guards
from onnxfuse.schedules.pointwise import Pointwise
from onnxfuse.schedules.products.in_two import Divided, ProductDivided
from onnxfuse.schedules.products.parts import refused, side_guards
from onnxfuse.schedules.products.product import SHARED_EVERYWHERE, Product
from onnxfuse.schedules.products.tall import ALONE, TALL
from onnxfuse.schedules.schedule import Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source
from onnxfuse.schedules.stencils.last import StencilLast, Summing, summing
from onnxfuse.schedules.tiled import Tiled

NAME = "gated"

MOST_PRODUCTS = 3
"""Of a chain between a mean and its gate."""

SCALES = (Pointwise(), Tiled())
"""What scales the image."""

BLOCKS, BLOCK_BYTES = (1, 2, 4, 8), 16 << 10
"""Blocks of a cluster, the fewest of which each reads no more of the weights than so many bytes (H200, EfficientNet's
gates together: 70.9 microseconds, with 8 KiB 71.8, with 32 KiB 74.1)."""

RESIDENT, MOST_BLOCKS = 2, 256
"""Blocks that a multiprocessor holds at least, so that clusters do not wait for one another; and those of a launch at
most, where images are not more."""

PHASE, CACHED = 1.0e-6, 3e12
"""Seconds that a product of the chain waits for memory and for the other blocks, and bytes a second of the weights that
all blocks read, which the second-level cache serves: chains of two take an H200 2 to 3 µs by one block an image, and
4 to 9 by clusters of 4 and 8."""


class Gated(ProductDivided):
    """Images that are scaled by what products make of their means."""

    name = NAME
    settings = StencilLast.settings

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Three kernels, of which the first and the last read the image."""
        found = _found(Request(lowered, sizes=sizes))
        if found is None:
            return None
        # What a convolution writes is read by the last of them.
        again = found.read_again(found.cuts[:1], found.scaled.outputs)
        return Expected(3, again if found.ahead is None else 2 * again)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with a mean, products of it and what these scale."""
        found = _found(request)
        return None if found is None else _GatedWork(found).kernel()


@dataclass(frozen=True)
class _Chain(InParts):
    """A region cut where few numbers are: ``cuts`` are what the first of its ``products`` reads, what each of the
    others does, and the gate; behind a convolution where there is one ``ahead``; ``multiplies``: whether what is scaled
    is multiplied."""

    products: tuple[Contract, ...]
    cuts: tuple[Tensor, ...]
    multiplies: bool
    ahead: Divided | None = None

    def stand_in(self, place: int) -> Input:
        """What is between, as what follows reads it."""
        cut = self.cuts[place]
        return Input(cut.dtype, cut.shape, len(self.program.inputs))

    def behind(self, place: int, roots: tuple[Tensor, ...]) -> Program:
        """What is computed from one of the cuts."""
        stand_in = self.stand_in(place)
        return Program((*self.program.inputs, stand_in), substituted(roots, {self.cuts[place]: stand_in}),
                       self.program.operators)

    @property
    def scaled(self) -> Program:
        """What is computed from the gate."""
        return self.behind(len(self.products), self.program.outputs)


def _found(request: Request) -> _Chain | None:
    """A chain of products from reductions to what is no sum any more; None where there is no such."""
    if not any(map(_reduces, request.lowered.program.tensors)):
        return None
    ahead = convolution_ahead(request)
    if ahead is not None:
        rest = _found(ahead.part(ahead.behind()))
        return None if rest is None or rest.ahead is not None else replace(rest, ahead=ahead)
    program, products = request.lowered.program, tuple(contractions(request.lowered))
    scaled = _multiplied(products)
    products = products if scaled is None else products[:-1]
    if not 0 < len(products) <= MOST_PRODUCTS or any(map(_reduces, above(program, products[0]))):
        return None
    cuts: list[Tensor | None] = [_cut((products[0],), _reduces)]
    cuts += [_cut((each,), partial(operator.is_, last)) for last, each in pairwise(products)]
    cuts.append(_cut(program.outputs if scaled is None else (scaled,), _contracts))
    known = tuple(each for each in cuts if each is not None)
    if len(known) < len(cuts):
        return None
    found = _Chain(request, products, known, scaled is not None)
    parts = [(place, (cut,)) for place, cut in enumerate(known[1:])] + [(len(products), program.outputs)]
    behind = (each for place, roots in parts for each in found.behind(place, roots).tensors)
    if any(map(_reduces, behind)) or sum(map(_contracts, found.scaled.tensors)) > int(found.multiplies):
        return None
    return found


def _multiplied(products: Sequence[Contract]) -> Tensor | None:
    """What the last of some products multiplies where that is an image which the others scale; None where it is one of
    these, whose operand has no more elements than what they make."""
    if len(products) < 2:
        return None
    *_, before, last = products
    for operand in last.operands:
        cut = _cut((operand,), partial(operator.is_, before))
        if cut is not None:
            return None if product(cut.shape) == product(operand.shape) else operand
    return None


def _is_tall(made: Kernel) -> bool:
    """Whether warps go through rows by themselves."""
    return made.plan.variants[0].launches[0].kernel.startswith(TALL)


def _reduces(tensor: Tensor) -> bool:
    return isinstance(tensor, Reduce)


def _contracts(tensor: Tensor) -> bool:
    return isinstance(tensor, Contract)


def _cut(roots: tuple[Tensor, ...], of: Callable[[Tensor], bool]) -> Tensor | None:
    """The tensor by which alone the roots have anything of some others: of those with the fewest elements, and the
    fewest bytes, the last."""

    every = postorder(roots)
    having = computed_of(every, of)
    found = [each for each in every if each in having and each not in roots
             and not any(map(of, postorder(roots, without=each)))]
    counts = [product(each.shape) for each in found]
    least = next((count for count in counts if all(other.divide(count) is not None for other in counts)), None)
    few = [each for each, count in zip(found, counts, strict=True) if count == least]
    size = min((TYPES[each.dtype].size for each in few), default=0)
    return next((each for each in reversed(few) if TYPES[each.dtype].size == size), None)


class _GatedWork:
    """The kernels of one region as they come."""

    def __init__(self, chain: _Chain) -> None:
        self.chain, self.request, self.lowered = chain, chain.request, chain.request.lowered
        self.last = len(chain.products)

    def kernel(self) -> Kernel | Refusal:
        """All of them."""
        scale = self._multiplying() if self.chain.multiplies else self._best(SCALES, self.chain.scaled)
        if isinstance(scale, Refusal):
            return scale
        ahead = self.chain.ahead
        return self._behind_mean(scale) if ahead is None else self._behind_convolution(ahead, scale)

    def _behind_mean(self, scale: Kernel) -> Kernel | Refusal:
        chain, program = self.chain, self.lowered.program
        mean = self._best(REDUCTIONS, Program(program.inputs, chain.cuts[:1], program.operators))
        if isinstance(mean, Refusal):
            return mean
        gate = self.gate()
        if isinstance(gate, Refusal):
            return gate
        return self._together(mean, gate, scale)

    def _behind_convolution(self, ahead: Divided, scale: Kernel) -> Kernel | Refusal:
        """The same where a convolution tells sums."""
        mean = mean_of(self.chain.cuts[0], ahead.stand_in, self.lowered.program)
        if mean is None:
            return refused("its means are not of what the convolution writes as it is")
        told = self._of_convolution(ahead.request.choice)
        convolution = summing(replace(ahead.part(ahead.ahead), choice=told))
        if not isinstance(convolution, Summing):
            return convolution or refused("its convolution has no kernel of its own")
        gate = self.gate(mean)
        if isinstance(gate, Refusal):
            return gate
        return self._summed(convolution, gate, scale, ahead)

    def _multiplying(self) -> Kernel | Refusal:
        """What multiplies the scaled image, by warps that scale what they read."""
        made = self.chain.made((Product(),), self.chain.scaled)
        if isinstance(made, Refusal):
            return made
        if made.rounds:
            return refused("what it scales is multiplied by numbers that are rounded")
        if _is_tall(made):
            return made
        told = next((choice for choice in made.choices if ALONE in dict(choice.settings)), None)
        return refused("what it scales is multiplied by more than warps hold, or has few rows") if told is None else (
            self.chain.made((Product(),), self.chain.scaled, told))

    @property
    def _last(self) -> str:
        """The namespace of what is launched last."""
        return "of_product" if self.chain.multiplies else "of_scale"

    def _best(self, schedules: Sequence[Schedule], program: Program) -> Kernel | Refusal:
        """A kernel of a part that reads nothing far apart, if there is one, else the first."""
        found: Kernel | Refusal | None = None
        for schedule in schedules:
            made = self.chain.made((schedule,), program)
            if isinstance(made, Kernel) and not made.scattered:
                return made
            found = made if found is None or isinstance(found, Refusal) else found
        assert found is not None
        return found

    def _together(self, mean: Kernel, gate: Kernel, scale: Kernel) -> Kernel:
        """Their launches one behind the other, in a text of all three."""
        chain = self.chain
        parts = Launches(self.request, [chain.bytes_of(chain.cuts[0]), chain.bytes_of(chain.cuts[-1])])
        for place, (kernel, space) in enumerate(((mean, "of_mean"), (gate, "of_gate"), (scale, self._last))):
            parts.add(kernel, space, self._names(place))
        # Sizes and addresses that one part has no vectors for leave the others theirs; the last of each runs anything.
        together = [joined(*each) for each in product_of(*(each[:-1] or each for each in parts.ways))]
        together.append(joined(*(each[-1] for each in parts.ways)))
        return parts.kernel(NAME, together, pace=self._pace(mean))

    def _summed(self, convolution: Summing, gate: Kernel, scale: Kernel, ahead: Divided) -> Kernel:
        """The same behind a convolution: what it writes lies in scratch memory, and its sums do."""
        chain = self.chain
        parts = Launches(ahead.request, [ahead.bytes_of(ahead.between), chain.bytes_of(chain.cuts[-1])])
        image, gates, sums = "t0", "t1", f"t{len(parts.scratch)}"
        read = ahead.reads(ahead.stand_in, image)
        parts.add(convolution.kernel, "of_convolution", {"o0": image, "o0.addr": "0"})
        parts.add(gate, "of_gate", {**read, **chain.reads(chain.stand_in(0), sums), "o0": gates, "o0.addr": "0"})
        parts.add(scale, self._last, {**read, **chain.reads(chain.stand_in(self.last), gates)})
        told = dict(zip(parts.ways[0], convolution.parts, strict=True))

        def launched(first: Variant, second: Variant, third: Variant) -> Variant:
            by = {f"i{bits}:{PARTS}": f"i{bits}:{told[first]}" for bits in (32, 64)}
            return joined(first, renamed_variant(second, by), third)

        ways = (parts.ways[0][:1], *(each[:-1] or each for each in parts.ways[1:]))
        together = [launched(*each) for each in product_of(*ways)]
        together.append(launched(*(each[-1] for each in parts.ways)))
        choice, *choices = (None if each is None else Choice(NAME, each.settings) for each in (
            convolution.kernel.choice, *convolution.kernel.choices))
        made = parts.kernel(NAME, together, pace=self._pace_behind(ahead), choice=choice, choices=tuple(choices))
        assert isinstance(made.code, Source)
        return replace(made, code=made.code.keeping(made.plan.kernels))

    @staticmethod
    def _of_convolution(choice: Choice | None) -> Choice | None:
        """A region's choice, as the convolution's schedule has it."""
        return None if choice is None else Choice(StencilLast.name, choice.settings)

    def _names(self, place: int) -> dict[str, str]:
        """New names of what a launch reads, or writes, of the mean and of the gate, which lie in scratch memory."""
        read = {} if not place else self.chain.reads(
            self.chain.stand_in(0 if place == 1 else self.last), f"t{place - 1}")
        return read if place == 2 else {**read, "o0": f"t{place}", "o0.addr": "0"}

    # ---- The products. ----

    @cached_property
    def stages(self) -> list[Stage] | Refusal:
        """Each product with what follows it up to the next."""
        found = []
        for place in range(self.last):
            request = self.chain.part(self.chain.behind(place, (self.chain.cuts[place + 1],)))
            stage = stage_of(request, len(self.lowered.program.inputs), place + 1 == self.last)
            if isinstance(stage, Refusal):
                return stage
            found.append(stage)
        if any(stage.parts.rows != found[0].parts.rows for stage in found):
            return refused("its products have different rows")
        return found

    def gate(self, mean: Mean | None = None) -> Kernel | Refusal:
        """The kernel of all products, which computes the row of means of sums where it is told how."""
        stages = self.stages
        if isinstance(stages, Refusal):
            return stages
        size = shared(stages, GateShape(1))
        if size > SHARED_EVERYWHERE:
            return refused(f"an image's numbers before its products take {size} bytes, and every block has "
                           f"{SHARED_EVERYWHERE}")
        lowered = self.chain.part(self.chain.behind(0, self.chain.cuts[-1:])).lowered
        if mean is not None:
            *inputs, row = lowered.program.inputs
            sums = Input(FLOAT, row.shape, row.index)
            lowered = replace(lowered, program=replace(lowered.program, inputs=(*inputs, sums)))
        narrow = narrow_guards(lowered, rows=False)
        vectors = tuple(dict.fromkeys(
            guard for stage in stages if stage.side is not None for guard in side_guards(stage.parts, stage.side)))
        shapes = [(GateShape(self._blocks), (*narrow, *vectors, HAS_CLUSTERS))] if self._blocks > 1 else []
        shapes.append((GateShape(1), (*narrow, *vectors)))
        make = partial(self._launch, lowered, stages, mean)
        made = [make(*each) for each in shapes if fits_narrow(lowered, rows=False)]
        made.append(make(GateShape(1, wide=False, bits=64), ()))
        functions, entries, variants = zip(*made, strict=True)
        plans = [make_plan(lowered, self.request.rule, stage.parts.puller, variants) for stage in stages]
        checks = tuple(dict.fromkeys(check for plan in plans for check in plan.checks))
        headers = ("onnxfuse", "mma", "warpgroup", "tensor_copies", "cluster")
        return Kernel(NAME, Source(headers, "", functions, entries), replace(plans[0], checks=checks))

    def _launch(
        self, lowered: Lowered, stages: list[Stage], mean: Mean | None, shape: GateShape, guards: tuple[str, ...]
    ) -> tuple[Function, Entry, Variant]:
        """A launch of so many blocks for each image."""
        more = () if mean is None else (Parameter("const {index}", PARTS, f"i{{bits}}:{PARTS}"),)
        signature, rows = Signature(lowered, more), expression(stages[0].parts.rows, lowered.binding.symbols)
        body = GateText(stages, shape, signature.sizes, len(self.lowered.program.inputs), mean).text()
        function = Function(f"of_{shape.name}", (), signature.parameters(body.sizes), body.text)
        entry = function.entry(shape.name, (), shape.bits, THREADS, RESIDENT)
        step = entry.step(f"{rows} {shape.blocks} *", shared=str(shared(stages, shape)))
        if shape.blocks > 1:
            step = replace(step, cluster=(str(shape.blocks), "1", "1"))
        words = f"{shape.blocks} block{'s' * (shape.blocks > 1)} an image"
        return function, entry, Variant(f"{words}, {shape.bits}-bit", (step,), guards)

    @property
    def _weights(self) -> int:
        """Bytes that an image's blocks read of the weights."""
        stages = self.stages
        assert not isinstance(stages, Refusal)
        return sum(stage.depth * stage.columns * stage.parts.size for stage in stages)

    @property
    def _blocks(self) -> int:
        """Of a cluster."""
        stages = self.stages
        assert not isinstance(stages, Refusal)
        images = self.lowered.binding.at(stages[0].parts.rows, self.request.sizes) or 1
        counts = [count for count in BLOCKS if images * count <= MOST_BLOCKS] or [1]
        return next((count for count in counts if self._weights <= count * BLOCK_BYTES), counts[-1])

    # ---- What it takes. ----

    def _pace(self, mean: Kernel) -> Pace | None:
        """What its time follows from, where no size is left open."""
        moved = self._moved(self.chain.cuts[:1])
        if moved is None:
            return None
        schedule = next(each for each in REDUCTIONS if each.name == mean.schedule)
        more = len(mean.plan.variants[0].launches) - 1
        return self._pace_of((Launched(moved, schedule.efficiency), *(more * (Launched(0, 1.0),))), schedule.waits_us)

    def _pace_behind(self, ahead: Divided) -> Pace | None:
        """The same of what has a convolution ahead."""
        convolution = paced(ahead, self.request.sizes)
        return None if convolution is None else self._pace_of((convolution,), StencilLast.waits_us)

    def _pace_of(self, first: tuple[Launched, ...], waits_us: float) -> Pace | None:
        """The same of the launches that compute the mean, what these wait for, and what is behind them."""
        stages, moved = self.stages, self._moved(self.chain.scaled.outputs)
        assert not isinstance(stages, Refusal)
        images = self.lowered.binding.at(stages[0].parts.rows, self.request.sizes)
        if images is None or moved is None:
            return None
        waits = 1e-6 * waits_us + len(stages) * PHASE + images * self._weights / CACHED
        last = (Product if self.chain.multiplies else Pointwise).efficiency
        launches = (*first, Launched(self._weights, 1.0), Launched(moved, last))
        return Pace(1, 1, 0, ends=waits, launches=launches)

    def _moved(self, results: tuple[Tensor, ...]) -> int | None:
        """Bytes of some results and of what they are computed from."""
        counts = [(self.lowered.binding.at(product(each.shape), self.request.sizes), TYPES[each.dtype].size)
                  for each in dict.fromkeys((*inputs_of(results), *results))]
        return None if any(count is None for count, _ in counts) else sum((count or 0) * size for count, size in counts)
