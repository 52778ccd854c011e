"""The recurrent schedule: all steps of a recurrent layer in one launch, behind one product for what inputs add.

    inputs ─ product ─▶ what they add to the gates of all steps (scratch)
                                     │
    step by step: states x weights ──┴─ gates ─▶ states, in eight blocks that see each other's shared memory

The blocks of a cluster share the units of one direction, for some of the sequences: each multiplies the states before a
step, which all of them have, by the weights of its own units, which stay in its registers and shared memory, and gives
its new states to the others.  So a step takes a microsecond, where a library launches a product and the gates'
arithmetic for each.  After "Persistent RNNs" (Diamos et al., 2016), with clusters in place of a barrier of the whole
GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.dims import product as times
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Contract, Input, Program, Recurrence, Tensor
from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant, elsewhere, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.headers import in_order
from onnxfuse.schedules.kernel import Kernel, Pace
from onnxfuse.schedules.products.product import SHARED_EVERYWHERE, Product
from onnxfuse.schedules.reductions.streaming import BLOCK_SHARED
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source
from onnxfuse.schedules.text import indented

BLOCKS = 8
"""Of a cluster."""

HAS_CLUSTERS = "90 sm <="
"""The guard of what runs in clusters."""

CLUSTERS = 16
"""Of eight blocks that a GPU of 132 multiprocessors runs at one time."""

WARPS, LEAST_WARPS = 8, 4
"""Of a block, at most; and at least, for all of them hand on states."""

UNITS_16, UNITS_32 = 512, 256
"""The most units of a direction whose weights stay in the registers and shared memory of eight blocks, of 16 bits and
of 32."""

HELD = 22
"""Sixteens of states whose weights stay in a warp's registers, at most."""

UNIT_TILE = 8
"""Units of a warp on tensor cores, whose four gates are two tiles of 16 rows."""

MOST_ROWS = 8
"""Sequences of a cluster of float32, and of a tile on tensor cores."""

MOST_TILES = 4
"""Of these."""

STEP, STEP_UNIT, STEP_TILE = 0.7e-6, 3.4e-9, 0.95e-6
"""Seconds of a step on tensor cores, and more for each unit, and for each tile of sequences after the first (H200,
eight layers took 0.79 to 0.99 times what is predicted, ``benchmarks/recurrent.py``)."""

STEP_PLAIN, STEP_ROW, BYTE, BYTE_ROW = 0.75e-6, 0.15e-6, 12e-12, 3e-12
"""The same of float32, more for each sequence, and for each byte of weights in a block by itself and for each sequence
(H200, six layers took 0.64 to 0.98 times what is predicted)."""

PRODUCT_RATE = 150e12
"""Operations a second that what inputs add is computed at, at least."""


BETWEEN = {"o0": "t0"}
"""The product's result lies between the kernels."""


@dataclass(frozen=True)
class _Shape:
    """How a launch is cut: so many sequences a cluster of so many blocks, which have ``own`` units and so many warps
    each."""

    rows: int
    blocks: int
    own: int
    warps: int


class Recurrent(Schedule):
    """Recurrent layers by themselves."""

    name = "recurrent"
    settings = "{rows} sequences a cluster"
    efficiency = 0.5
    products = 1

    def runs(self, does: Does) -> bool:
        """Nothing that is told by what nodes do: a layer is a product until it is lowered."""
        return False

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Two kernels."""
        return Expected(2) if _layers(lowered) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of one layer by itself."""
        layers = _layers(request.lowered)
        if not layers:
            return None
        first, outputs = layers[0], request.lowered.program.outputs
        if any(output not in layers for output in outputs) or any(layer.given is not first.given for layer in layers):
            return _refused("a recurrent layer has a kernel by itself alone")
        operands = (first.weights, first.bias, first.state, first.cell)
        if any(each is not None and not isinstance(each, Input) for each in operands):
            return _refused("weights and first states of a recurrent layer are read from memory")
        most = UNITS_32 if first.dtype == FLOAT else UNITS_16
        if (first.units.value or most + 1) > most:
            return _refused(f"it has {first.units} units, and kernels hold the weights of {most} at most")
        return _RecurrentWork(request, first).kernel()


def _layers(lowered: Lowered) -> list[Recurrence]:
    return [tensor for tensor in lowered.program.tensors if isinstance(tensor, Recurrence)]


def _refused(message: str) -> Refusal:
    return Refusal("recurrence-structure", message)


class _RecurrentWork:
    """The kernels of one layer as they come."""

    def __init__(self, request: Request, layer: Recurrence) -> None:
        self.request, self.layer, self.lowered = request, layer, request.lowered
        self.units, self.narrow = layer.units.value or 0, layer.dtype != FLOAT
        self.length, self.batch = layer.given.shape[0], layer.given.shape[1]
        self.directions = len(layer.backwards)
        self.signature = Signature(self.lowered, (Parameter("const float* __restrict__", "t0", "t0"), *(
            Parameter("const {index}", name, f"i{{bits}}:{self.text(size)}")
            for name, size in (("length", self.length), ("batch", self.batch)))))

    def text(self, size: Dim) -> str:
        """A size as the plan has it."""
        return expression(size, self.lowered.binding.symbols)

    def kernel(self) -> Kernel | Refusal:
        """Both."""
        given = replace(self.layer.given, dtype=FLOAT)
        program = self.lowered.program
        before = Product().kernel(replace(self.request, lowered=replace(
            self.lowered, program=Program(program.inputs, (given,), program.operators)), choice=None, _found={}))
        if not isinstance(before, Kernel) or not isinstance(before.code, Source):
            return before if isinstance(before, Refusal) else _refused("what inputs add has no kernel")
        shapes = (self.shape(BLOCKS), self.shape(1))
        functions = [self.function(shape) for shape in shapes]
        entries = [function.entry(f"recurrent_{shape.rows}_{shape.blocks}", (), 32, 32 * shape.warps)
                   for function, shape in zip(functions, shapes, strict=True)]
        fast, general = (self.step(*each) for each in zip(entries, shapes, strict=True))
        held = (f"{fast.shared} {BLOCK_SHARED} <=",) if int(fast.shared) > SHARED_EVERYWHERE else ()
        variants = []
        for variant in before.plan.variants:
            guards = (HAS_CLUSTERS, *held, *(guard for guard in variant.guards if not guard.startswith("o0.")))
            variants.append(Variant(
                f"{variant.name}, {BLOCKS} blocks", (*(elsewhere(step, BETWEEN) for step in variant.launches), fast),
                tuple(dict.fromkeys(guards))))
        last = before.plan.variants[-1]
        steps = (*(elsewhere(step, BETWEEN) for step in last.launches), general)
        variants.append(Variant(f"{last.name}, alone", steps))
        used = {*before.code.headers, "mma", "cluster", "recurrent"}
        code = Source(
            in_order(used), f"{self.request.rule}: {self.layer.kind.upper()}",
            (*before.code.functions, *functions), (*before.code.entries, *entries))
        return Kernel("recurrent", code, self.plan(before.plan, given, variants), heavy=True, rounds=before.rounds,
                      pace=self.pace(shapes[0]) if before.rounds or self.narrow else None)

    def plan(self, before: LaunchPlan, given: Tensor, variants: list[Variant]) -> LaunchPlan:
        """That of the product with what follows it, and the memory between."""
        outputs = tuple(Output(output.dtype, tuple(map(self.text, output.shape)))
                        for output in self.lowered.program.outputs)
        size = self.text(times(given.shape) * TYPES[FLOAT].size)
        return replace(before, outputs=outputs, variants=tuple(variants), scratch=(size,))

    def shape(self, blocks: int) -> _Shape:
        """So that all clusters run at one time, if they can."""
        batch = self.lowered.binding.at(self.batch, self.request.sizes) or MOST_ROWS
        apart = -(-batch // max(1, CLUSTERS // self.directions))
        share = -(-self.units // blocks)
        own = -(-share // UNIT_TILE) * UNIT_TILE
        least, most = (MOST_ROWS, MOST_ROWS * MOST_TILES) if self.narrow else (1, MOST_ROWS)
        if blocks == 1:
            return _Shape(least, blocks, own, WARPS)
        rows = least
        while rows < min(apart, most):
            rows *= 2
        return _Shape(rows, blocks, own, max(LEAST_WARPS, own // UNIT_TILE) if self.narrow else WARPS)

    @property
    def sixteens(self) -> int:
        """Steps of a product of states on tensor cores."""
        return -(-self.units // 16)

    def kept(self, shape: _Shape) -> tuple[int, int]:
        """Of these the weights in registers, and in shared memory."""
        held = min(self.sixteens, HELD) if shape.blocks > 1 else 0
        return held, self.sixteens - held if shape.blocks > 1 else 0

    def shared(self, shape: _Shape) -> int:
        """Bytes of a block's shared memory, as the text lays it out."""
        size, made = TYPES[self.layer.dtype].size, 2 * shape.rows * shape.own
        if self.narrow:
            fragments = shape.warps * self.kept(shape)[1] * 2 * 32 * 16
            return fragments + (2 * shape.rows * (self.sixteens * 16 + 8) + made) * size
        fours = -(-self.units // 4)
        weights = fours * self.layer.gates * shape.own * 16 if shape.blocks > 1 else 0
        return weights + (shape.warps * 2 * made + 2 * shape.rows * fours * 4 + made) * size

    def function(self, shape: _Shape) -> Function:
        """What all blocks do."""
        layer, kind = self.layer, TYPES[self.layer.dtype].storage
        numbers = f"{str(layer.kind == 'gru').lower()}, {self.units}, {shape.own}"
        if self.narrow:
            held, kept = self.kept(shape)
            numbers += f", {shape.rows // MOST_ROWS}, {shape.blocks}, {shape.warps}, {held}, {kept}, {kind}"
        else:
            numbers += f", {shape.rows}, {shape.blocks}, {shape.warps}, {str(shape.blocks > 1).lower()}"
        weights = layer.gates * self.units * self.units
        places = {"weights": (layer.weights, f"{weights}"), "bias": (layer.bias, f"{2 * layer.gates * self.units}"),
                  "first": (layer.state, f"batch * {self.units}"), "first_cell": (layer.cell, f"batch * {self.units}")}
        results = {"steps": "0", "state": f"batch * {self.units}", "cell": f"batch * {self.units}"}
        names = {"steps": "steps", "state": "last", "cell": "last_cell"}
        written = {output.result: place for place, output in enumerate(_outputs(self.lowered))}
        lines = [
            f"const int rank = blockIdx.x % {shape.blocks}, cluster = blockIdx.x / {shape.blocks};",
            f"const long long direction = cluster % {self.directions};",
            f"of::Recurrent<{kind}> at;",
            "at.given = t0;",
            *(f"at.{name} = {_pointer(tensor)} + direction * {by};" if tensor is not None else f"at.{name} = nullptr;"
              for name, (tensor, by) in places.items()),
            *(f"at.{name} = o{written[result]} + direction * {results[result]};" if result in written else
              f"at.{name} = nullptr;" for result, name in names.items()),
            f"at.length = length, at.batch = batch, at.directions = {self.directions}, at.direction = (int)direction;",
            f"at.backwards = {self.backwards};",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            f"{'of::recur_tiles' if self.narrow else 'of::recur_lanes'}<{numbers}>(",
            f"    at, cluster / {self.directions} * {shape.rows}, rank, of_dynamic);",
        ]
        body = "\n".join(indented(lines)) + "\n"
        return Function(f"of_recurrent_{shape.rows}_{shape.blocks}", (), self.signature.parameters(()), body)

    @property
    def backwards(self) -> str:
        """Whether the direction at hand begins with the last step."""
        found = [f"direction == {place}" for place, each in enumerate(self.layer.backwards) if each]
        return " || ".join(found) or "false"

    def step(self, entry: Entry, shape: _Shape) -> Step:
        """A launch of it."""
        grid = f"{shape.blocks * self.directions} {self.text(self.batch)} {shape.rows} ceil *"
        step = entry.step(grid, shared=str(self.shared(shape)))
        return replace(step, cluster=(str(shape.blocks), "1", "1")) if shape.blocks > 1 else step

    def pace(self, shape: _Shape) -> Pace | None:
        """What the steps take one after the other, and the product before."""
        length, batch = (self.lowered.binding.at(size, self.request.sizes) for size in (self.length, self.batch))
        inputs = times(self.layer.given.summed).value if isinstance(self.layer.given, Contract) else None
        if not length or not batch or inputs is None:
            return None
        turns = -(-(-(-batch // shape.rows) * self.directions) // CLUSTERS)
        if self.narrow:
            one = STEP + STEP_UNIT * self.units + STEP_TILE * (shape.rows // MOST_ROWS - 1)
        else:
            weights = self.layer.gates * shape.own * self.units * TYPES[FLOAT].size
            one = STEP_PLAIN + STEP_ROW * shape.rows + weights * (BYTE + BYTE_ROW * shape.rows)
        flops = 2 * length * batch * inputs * self.directions * self.layer.gates * self.units
        return Pace(1, 1, 0, whole=length * turns * one + flops / PRODUCT_RATE)


def _outputs(lowered: Lowered) -> list[Recurrence]:
    return [output for output in lowered.program.outputs if isinstance(output, Recurrence)]


def _pointer(tensor: Tensor) -> str:
    assert isinstance(tensor, Input)
    return f"i{tensor.index}"
