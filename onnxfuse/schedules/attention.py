"""The attention schedule: two products with a softmax between them, whose scores never reach memory.

    scores = f(queries keys')      P = softmax(scores)      result = g(P values)

f and g are any maps, with masks and biases read or computed where a score is; what is transposed, reshaped, broadcast
over heads or scaled before a product is read so.  A block has the queries of one or two tiles of 16 rows a warp, goes
over the keys tile by tile, keeps the running maximum and sum of its rows' powers, and the sums with the values, which
are scaled down where the maximum grows (Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, 2018).  Products are of
float16 or bfloat16, on tensor cores where the GPU has them; maxima, sums and scores are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract, Reduce, postorder
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Apply, Constant, Load, Puller, Reduced, Rows, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attention_text import Access, Parts, Softmax, attention_text
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import (
    Kernel,
    divides,
    fits_narrow,
    is_vector,
    make_plan,
    moving_loads,
    narrow_guards,
    vector_guards,
    walk,
)
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import reached
from onnxfuse.schedules.online import bare, online_sums
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Signature, Source
from onnxfuse.schedules.streaming import BLOCK_SHARED

OTHER = "no-attention"
"""Code of the refusal of two products that are no attention at all."""

MOST_DEPTH = 256
"""The largest head size; a tile of keys and one of values, and the queries, must fit shared memory together."""

WIDTH = 8
"""Elements of 16 bytes."""

WARPS = 4

SHARED_EVERYWHERE = 64 * 1024
"""Bytes of shared memory that a block may have on every GPU with tensor cores."""

MANY_BLOCKS = 2
"""Blocks a multiprocessor from which on larger ones are better: each reads all keys and values."""


@dataclass(frozen=True)
class Shape:
    """Tiles of 16 rows a warp, keys of a tile, and elements of a vector; bits of an index."""

    tiles: int
    keys: int
    width: int = WIDTH
    bits: int = 32

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return 16 * WARPS * self.tiles

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"attention_{self.rows}x{self.keys}_w{self.width}_{self.bits}"

    @property
    def words(self) -> str:
        """Name of the variant."""
        return f"{Attention().words(self.choice)}, {self.bits}-bit"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("attention", tiles=self.tiles, keys=self.keys, width=self.width)

    def shared(self, depth: int, columns: int) -> int:
        """Bytes of shared memory for heads of these sizes; see ``attention_text``."""
        return 2 * ((self.rows + self.keys) * (depth + WIDTH) + self.keys * (columns + WIDTH))


class Attention(Schedule):
    """Two products with a softmax between them.  The share of a large product's rate is a guess: none was measured."""

    name = "attention"
    settings = "{tiles} x 16 queries a warp, tiles of {keys} keys, width {width}"
    efficiency = 0.4

    def runs(self, does: Does) -> bool:
        """Products, with what surrounds them."""
        return Does.CONTRACTS in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel."""
        return Expected() if len(_contractions(lowered)) == 2 else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with two products."""
        products = _contractions(request.lowered)
        if len(products) != 2:
            return None
        try:
            parts = _parts(request.lowered, *products)
            return parts if isinstance(parts, Refusal) else _kernel(request, parts)
        except Unlowerable as stopped:
            return replace(stopped.refusal, code=OTHER)  # something is used at other places than an attention has it


def _contractions(lowered: Lowered) -> list[Contract]:
    return [tensor for tensor in postorder(lowered.program.outputs) if isinstance(tensor, Contract)]


def _refused(message: str, remedy: str = "") -> Refusal:
    return Refusal("attention-structure", message, remedy=remedy)


def _other(message: str) -> Refusal:
    return Refusal(OTHER, message)


# ---- What is computed: queries, keys, scores, values and the result, as expressions over five loops. ----


def _parts(lowered: Lowered, scores: Contract, values: Contract) -> Parts | Refusal:
    """The region as an attention.

    Raises:
        Unlowerable: something is used at other places than an attention has it.
    """
    space = IndexSpace()
    found = _placed(lowered, scores, values, space)
    if isinstance(found, Refusal):
        return found
    types = {operand.dtype for each in (scores, values) for operand in each.operands}
    if len(types) > 1 or not TYPES[next(iter(types))].is_narrow:
        named = " and ".join(sorted(TYPES[dtype].name for dtype in types))
        return _refused(f"products of {named}; its kernels have those of float16 or bfloat16")
    depth, columns = found.depth.value, found.columns.value
    if depth is None or columns is None:
        return _refused(f"the head size, {found.depth} and {found.columns}, is known only when it runs",
                        "state the size of a head, or give it with --dim")
    if not 0 < depth <= MOST_DEPTH or not 0 < columns <= MOST_DEPTH:
        return _refused(f"a head size of {max(depth, columns)}; its kernels have those up to {MOST_DEPTH}")
    return found


def _placed(lowered: Lowered, scores: Contract, values: Contract, space: IndexSpace) -> Parts | Refusal:
    """The region's expressions over the loops: batch, row (of queries), key, column (of values) and depth."""
    groups = {"@b": values.batch, "@m": values.rows, "@n": values.columns,
              "@k": tuple(range(values.rank, len(values.loops)))}
    extents = {name: product([values.loops[loop] for loop in loops]) for name, loops in groups.items()}
    bases = {name: space.base(name, extent) if extent != 1 else dim(0) for name, extent in extents.items()}
    at: dict[int, Dim] = {}
    for name, loops in groups.items():
        at |= zip(loops, space.delinear(bases[name], tuple(values.loops[loop] for loop in loops)), strict=True)
    place = tuple(at[axis] for axis in range(values.rank))
    reductions = [tensor for tensor in postorder(values.operands) if isinstance(tensor, Reduce)]
    if not reductions:
        return _other("between its products is no softmax")
    rows = Rows(None, bases["@k"], arrangement(reductions[0].operand.shape, reductions[0].axes))
    puller = Puller(space, rows, sums={values: place})
    operands = [puller.element(operand, tuple(at[loop] for loop in axes))
                for operand, axes in zip(values.operands, values.axes, strict=True)]
    softmax = _softmax(operands[0])
    if softmax is None:
        return _other("the left operand of the second product is no softmax")
    assert puller.sums is not None and puller.rows is not None
    own, along = puller.rows, Lanes(space, puller, "@k", "", 1)
    if own.row is None or along.moves_place(own.row) or own.arrangement.length != extents["@k"]:
        return _other("its softmax is not of the rows that the second product sums over")
    if scores not in puller.sums:
        return _other("its scores are not those of the first product")
    sides = _sides(scores, puller)
    if isinstance(sides, Refusal):
        return sides
    if len(lowered.program.outputs) != 1:
        return _refused("its scores, or what is made of them, are used outside too")
    (output,) = lowered.program.outputs
    out = reached(lowered.program, space, {values: place}).get(id(output))
    if out is None:
        return _refused("what follows the second product changes the number of its elements")
    result = puller.element(output, out)
    depth = product(scores.summed)
    return Parts(
        lowered, puller, extents["@b"], extents["@m"], extents["@k"], extents["@n"], depth, *sides, operands[1],
        softmax, result, space.linear(out, output.shape),
    )


def _sides(scores: Contract, puller: Puller) -> tuple[Scalar, Scalar] | Refusal:
    """Elements of the queries and of the keys."""
    assert puller.sums is not None
    space, depth = puller.space, product(scores.summed)
    base = space.base("@d", depth) if depth != 1 else dim(0)
    at = dict(enumerate(puller.sums[scores]))
    inner = range(scores.rank, len(scores.loops))
    at |= zip(inner, space.delinear(base, scores.summed), strict=True)
    one, other = (puller.element(operand, tuple(at[loop] for loop in axes))
                  for operand, axes in zip(scores.operands, scores.axes, strict=True))
    along_rows, along_keys = (Lanes(space, puller, name, "", 1) for name in ("@m", "@k"))
    for queries, keys in ((one, other), (other, one)):
        if not along_keys.moves(queries) and not along_rows.moves(keys):
            return queries, keys
    return _other("the operands of the first product are not queries and keys")


def _softmax(scalar: Scalar) -> Softmax | None:
    """What a softmax's element is made of; None where it is none."""
    power, guarded = bare(scalar, casts=True), False
    if isinstance(power, Apply) and power.function == "where":
        test, instead, power = power.operands[0], power.operands[1], bare(power.operands[2], casts=True)
        guarded = (isinstance(test, Apply) and test.function == "isnan" and bare(test.operands[0], casts=True) is power
                   and isinstance(instead, Constant) and instead.number == 0)
        if not guarded:
            return None
    if not isinstance(power, Apply) or power.function not in ("mul", "div"):
        return None
    sums = [each for each in walk([power]) if isinstance(each, Reduced)]
    online = online_sums(sums)
    if len(sums) != 2 or len(online) != 1:
        return None
    (summed, found), = online.items()
    numerator, divisor = (bare(operand) for operand in power.operands)
    if power.function == "mul":
        if not isinstance(divisor, Apply) or divisor.function != "reciprocal":
            return None
        divisor = bare(divisor.operands[0])
    if divisor is not summed or numerator is not bare(summed.element):
        return None
    return Softmax(bare(found.largest.element), found.largest, found.functor, guarded)


# ---- Its kernel. ----


def _kernel(request: Request, parts: Parts) -> Kernel | Refusal:
    lowered = request.lowered
    assert parts.depth.value is not None and parts.columns.value is not None
    depth, columns = (-(-size // 16) * 16 for size in (parts.depth.value, parts.columns.value))
    parts, guards = _accesses(parts, request.sizes)
    body = attention_text(parts, Signature(lowered).sizes)
    signature = Signature(lowered)
    function = Function("attention", ("tiles", "keys", "depth", "columns", "wide"), signature.parameters(body.sizes),
                        body.text)
    own = _own(request, parts)
    width = WIDTH if parts.vectors else 1
    tried = (Shape(tiles, keys, width) for tiles in (1, 2) for keys in (32, 64, 128))
    offered = {shape.choice: shape for shape in tried
               if _fits(shape, depth, columns) and (shape.tiles, shape.keys) != (own.tiles, own.keys)}
    choice, first = told(request.choice, offered)
    symbols = lowered.binding.symbols
    batch, rows = expression(parts.batch, symbols), expression(parts.rows, symbols)
    entries: list[Entry] = []
    variants: list[Variant] = []
    for shape, needed in _shapes(lowered, first, own, guards, parts.vectors):
        settings = (shape.tiles, shape.keys, depth, columns, shape.width)
        entry = function.entry(shape.name, settings, shape.bits, 32 * WARPS)
        entries.append(entry)
        shared = shape.shared(depth, columns)
        step = entry.step(f"{rows} {shape.rows} ceil {batch} *", shared=str(shared))
        large = (f"{shared} {BLOCK_SHARED} <=",) if shared > SHARED_EVERYWHERE else ()
        variants.append(Variant(shape.words, (step,), (*needed, *large)))
    plan = make_plan(lowered, request.rule, parts.puller, variants)
    comment = f"{request.rule}: {', '.join(lowered.program.operators)}"
    source = Source(("onnxfuse", "mma"), comment, (function,), tuple(entries))
    return Kernel("attention", source, plan, (), choice, tuple(offered), heavy=True)


def _shapes(
    lowered: Lowered, first: Shape | None, own: Shape, guards: tuple[str, ...], vectors: bool
) -> list[tuple[Shape, tuple[str, ...]]]:
    """What to launch, and under which guards; the last runs anything."""
    found: list[tuple[Shape, tuple[str, ...]]] = []
    least = Shape(1, 32 if own.keys > 32 else 16, 1)
    if fits_narrow(lowered):
        narrow = narrow_guards(lowered)
        if vectors:
            found += [(shape, (*narrow, *guards)) for shape in (first, own) if shape is not None]
        found.append((least, narrow))
    return [*found, (replace(least, bits=64), ())]


def _own(request: Request, parts: Parts) -> Shape:
    """Two tiles a warp where heads are short enough for their sums to stay in registers, and there are enough rows."""
    assert parts.depth.value is not None and parts.columns.value is not None
    largest = max(parts.depth.value, parts.columns.value)
    if largest > 128:
        return Shape(1, 32)
    sizes, names = request.sizes, request.lowered.binding.names
    rows, batch = (size.substitute(names) for size in (parts.rows, parts.batch))
    if not (rows * batch).symbols <= sizes.keys():
        return Shape(1, 64)
    blocks = -(-rows.evaluate(sizes) // 128) * batch.evaluate(sizes)
    return Shape(2 if blocks >= MANY_BLOCKS * 132 else 1, 64)


def _fits(shape: Shape, depth: int, columns: int) -> bool:
    """Whether shared memory and registers hold it."""
    sums = shape.tiles * (columns + shape.keys) // 2
    return shape.shared(depth, columns) <= 96 * 1024 and sums <= 160


def _accesses(parts: Parts, sizes: Mapping[str, int]) -> tuple[Parts, tuple[str, ...]]:
    """With how each tensor is brought in and the result stored, and the guards under which that is by vectors."""
    space, puller, lowered = parts.puller.space, parts.puller, parts.lowered
    guards: list[str] = []
    made = []
    planned = {name: size.evaluate(sizes) for name, size in lowered.binding.names.items()
               if size.symbols <= sizes.keys()}
    vectors = True
    sides = ((parts.queries, "@d", parts.depth), (parts.keys, "@d", parts.depth), (parts.values, "@n", parts.columns))
    for scalar, base, extent in sides:
        lanes = Lanes(space, puller, base, "", WIDTH)
        moving = moving_loads([scalar, *puller.gathered.values()], lanes)
        lanes.rely_on_loads(moving)
        whole = extent.multiple_of() % WIDTH == 0
        alike = all(is_vector(load, lanes) for load in moving)
        vectors = vectors and whole and divides(lanes, planned)
        copied = isinstance(scalar, Load) and alike and lanes.stride(scalar.offset) == 1
        made.append(Access(scalar, lanes, copied))
        guards += vector_guards(lowered, lanes, [
            (f"i{load.input}", TYPES[load.dtype].size) for load in moving
            if lanes.stride(load.offset) == 1 and is_vector(load, lanes)])
    pairs = {}
    for base, roots in (("@k", [parts.softmax.score]), ("@n", [parts.result])):
        lanes = pairs[base] = Lanes(space, puller, base, "", 2)
        moving = moving_loads(roots, lanes)
        lanes.rely_on_loads(moving)
        targets = [(f"i{load.input}", TYPES[load.dtype].size) for load in moving
                   if is_vector(load, lanes) and lanes.stride(load.offset) == 1]
        if base == "@n" and lanes.stride(parts.place) == 1 and lanes.aligned(parts.place):
            lanes.rely_on_vectors([parts.place])
            targets.append(("o0", TYPES[lowered.program.outputs[0].dtype].size))
        vectors = vectors and divides(lanes, planned)
        guards += vector_guards(lowered, lanes, targets)
    parts = replace(parts, accesses=tuple(made), along_keys=pairs["@k"], along_columns=pairs["@n"], vectors=vectors)
    return parts, tuple(dict.fromkeys(guards))
