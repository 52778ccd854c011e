"""What an attention is made of: expressions over five loops.

    b  batches: of what keys, values and queries differ by      m  queries      k  keys
    n  columns of the values                                    d  the head
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.scalars import FUNCTIONS, TYPES
from onnxfuse.ir.tensors import Contract, Reduce, Tensor, postorder
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.index import Coordinates, IndexSpace
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import (
    Apply,
    Constant,
    Contracted,
    Load,
    Puller,
    Reduced,
    Rows,
    Scalar,
    Scanned,
    indices,
)
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.visible import Visible, simplified, visible_keys
from onnxfuse.schedules.kernel import walk
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import reached
from onnxfuse.schedules.multiplied import Multiplied, unmultiplied
from onnxfuse.schedules.reductions.online import bare, online_sums
from onnxfuse.wording import option

OTHER = "no-attention"
"""Code of the refusal of two products that are no attention at all."""

MOST_DEPTH = 256
"""The largest head size; a tile of keys and one of values, and the queries, must fit shared memory together."""


@dataclass(frozen=True)
class Access:
    """How a tile of an operand is filled: its elements, the lanes of its vectors, whether these are copied as they lie
    in memory, and whether they are of neighbouring keys, and not of neighbours along the head."""

    scalar: Scalar
    lanes: Lanes
    copied: bool
    across: bool = False


@dataclass(frozen=True)
class Softmax:
    """Attributes:
        score: what it is of, at (b, m, k), over the first product's sum.
        largest: the row's maximum.
        guarded: whether a row without a number gives zeros; zeroed: whether one that is masked everywhere does.
    """

    score: Scalar
    largest: Reduced
    guarded: bool
    zeroed: bool = False


@dataclass(frozen=True)
class Stored:
    """A result: which output it is, its element over the loops, and where that lies."""

    output: int
    scalar: Scalar
    place: Dim


@dataclass(frozen=True)
class AttentionParts(Multiplied):
    """An attention over the loops b (batch), m (queries), k (keys), n (columns of the values) and d (the head).

    Attributes:
        lowered: the region; puller: pulled its elements.
        batch, rows, length, columns, depth: extents of the loops; ``length`` is the number of keys.
        queries, keys, values: their elements, at (b, m, d), (b, k, d) and (b, k, n).
        factor: what sums are multiplied by in place of the keys, so that these are copied as they lie.
        softmax: of the scores; visible: the keys that a query sees by its place, where some are masked so.
        result: what is made of the second product's sum at (b, m, n).
        share: a score's of the sum of its row; kept: what is made of scores, or of shares, and wanted outside, at
            (b, m, k).
        accesses: how queries, keys and values are read; along_keys, along_columns: lanes of a pair of scores, and of
            results; vectors: whether the planned sizes admit vectors.
    """

    lowered: Lowered
    puller: Puller
    batch: Dim
    rows: Dim
    length: Dim
    columns: Dim
    depth: Dim
    queries: Scalar
    keys: Scalar
    values: Scalar
    softmax: Softmax
    result: Stored
    share: Scalar
    kept: tuple[Stored, ...] = ()
    factor: float = 1.0
    visible: Visible | None = None
    accesses: tuple[Access, ...] = ()
    along_keys: Lanes | None = None
    along_columns: Lanes | None = None
    vectors: bool = False

    @property
    def operand(self) -> int:
        """Their type."""
        return self.queries.dtype

    @property
    def has_costly_scores(self) -> bool:
        """Whether scores take functions of many instructions; divisions are by numbers."""
        applied = {scalar.function for scalar in walk([self.softmax.score]) if isinstance(scalar, Apply)} - {"div"}
        return any(FUNCTIONS[name].instructions > 1 for name in applied if name in FUNCTIONS)

    def is_of_share(self, scalar: Scalar) -> bool:
        """Whether an expression is of a score's share, and not of the score alone."""
        return self.share in walk([scalar])


def _refused(message: str, remedy: str = "") -> Refusal:
    return Refusal("attention-structure", message, remedy=remedy)


def _other(message: str) -> Refusal:
    return Refusal(OTHER, message)


def parts_of(lowered: Lowered, scores: Contract, values: Contract) -> AttentionParts | Refusal:
    """The region as an attention.

    Raises:
        Unlowerable: something is used at other places than an attention has it.
    """
    found = _placed(lowered, scores, values)
    if isinstance(found, AttentionParts) and (shared := _sharing(found, values)) > 1:
        # Heads that share keys and values are rows of one tile, which reads these once.
        closer = _placed(lowered, scores, values, shared)
        found = closer if isinstance(closer, AttentionParts) else found
    if isinstance(found, Refusal):
        return found
    if named := unmultiplied((scores, values)):
        return _refused(f"products of {named}; its kernels have those of float16, bfloat16 or float32")
    depth, columns = found.depth.value, found.columns.value
    if depth is None or columns is None:
        return _refused(f"the head size, {found.depth} and {found.columns}, is known only when it runs",
                        f"state the size of a head, or give it: {option('dim', 'NAME=N')}")
    most = 2 * MOST_DEPTH // found.size
    if not 0 < depth <= most or not 0 < columns <= most:
        kind = TYPES[found.operand].name
        return _refused(f"a head size of {max(depth, columns)}; its kernels of {kind} have those up to {most}")
    return found


def _sharing(parts: AttentionParts, values: Contract) -> int:
    """How many neighbours along the innermost axis of the batch have keys and values in common."""
    loop, steps = _innermost(values), list(_steps(parts))
    known = [step.value for step in steps if step.value is not None]
    shared = min(known, default=1)
    alike = len(known) == len(steps) and all(step % shared == 0 for step in known)
    return shared if loop is not None and alike and values.loops[loop].divide(dim(shared)) is not None else 1


def _innermost(values: Contract) -> int | None:
    """The innermost loop of the batch that has more than one turn."""
    return next((loop for loop in reversed(values.batch) if values.loops[loop] != 1), None)


def _steps(parts: AttentionParts) -> Iterator[Dim]:
    """By what the batch is divided wherever keys and values are read."""
    space, puller = parts.puller.space, parts.puller
    seen: set[str] = set()
    waiting = [name for scalar in walk([parts.keys, parts.values]) for index in indices(scalar)
               for name in index.symbols]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        digit = space.digits.get(name)
        if name == "@b":
            yield dim(1)
        elif name in space.derived:
            waiting += space.derived[name].symbols
        elif name in puller.gathered:
            waiting += [each for scalar in walk([puller.gathered[name]]) for index in indices(scalar)
                        for each in index.symbols]
        elif digit is not None and digit.base == "@b":
            yield digit.step
        elif digit is not None:
            waiting.append(digit.base)


def _loops(values: Contract, space: IndexSpace, shared: int) -> tuple[dict[str, Dim], dict[int, Dim]]:
    """The extents of the bases, and where each loop of the second product is; ``shared`` neighbours of the batch are
    rows."""
    groups = {"@b": values.batch, "@m": values.rows, "@n": values.columns,
              "@k": tuple(range(values.rank, len(values.loops)))}
    sizes = {name: [values.loops[loop] for loop in loops] for name, loops in groups.items()}
    loop = _innermost(values)
    if loop is not None:
        left = values.loops[loop].divide(dim(shared))
        assert left is not None
        sizes["@b"][values.batch.index(loop)] = left
    sizes["@m"].insert(0, dim(shared))
    extents = {name: product(each) for name, each in sizes.items()}
    bases = {name: space.base(name, extent) if extent != 1 else dim(0) for name, extent in extents.items()}
    places = {name: space.delinear(bases[name], tuple(each)) for name, each in sizes.items()}
    neighbour, places["@m"] = places["@m"][0], places["@m"][1:]
    at: dict[int, Dim] = {}
    for name, loops in groups.items():
        at |= zip(loops, places[name], strict=True)
    if loop is not None:
        at[loop] = at[loop] * shared + neighbour
    return extents, at


def _placed(lowered: Lowered, scores: Contract, values: Contract, shared: int = 1) -> AttentionParts | Refusal:
    """The region's expressions over the loops, as ``_loops`` has them."""
    space = IndexSpace()
    extents, at = _loops(values, space, shared)
    inner = range(values.rank, len(values.loops))
    place = tuple(at[axis] for axis in range(values.rank))
    reductions = [tensor for tensor in postorder(values.operands) if isinstance(tensor, Reduce)]
    if not reductions:
        return _other("between its products is no softmax")
    key = space.linear(tuple(at[loop] for loop in inner), tuple(values.loops[loop] for loop in inner))
    rows = Rows(None, key, arrangement(reductions[0].operand.shape, reductions[0].axes))
    puller = Puller(space, rows, sums={values: place})
    operands = [puller.element(operand, tuple(at[loop] for loop in axes))
                for operand, axes in zip(values.operands, values.axes, strict=True)]
    softmax = _softmax(operands[0])
    if softmax is None or Lanes(space, puller, "@m", "", 1).moves(operands[1]):
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
    share, every = bare(operands[0], casts=True), product((extents["@b"], extents["@m"], extents["@k"]))
    left = tuple(at[loop] for loop in values.axes[0])
    results = _results(lowered, puller, {values: place}, {scores: puller.sums[scores], values.operands[0]: left}, every)
    if isinstance(results, Refusal):
        return results
    result, *kept = results
    if not all(_is_kept(each.scalar, share) for each in kept):
        return _refused("what is made of its scores and used outside is neither of scores alone nor of the softmax")
    depth, (queries, (keys, factor)) = product(scores.summed), (sides[0], _factored(sides[1]))
    # What somebody reads is rounded as the model says.
    softmax = replace(softmax, score=simplified(softmax.score, {}, exact=bool(kept)))
    return AttentionParts(
        lowered, puller, extents["@b"], extents["@m"], extents["@k"], extents["@n"], depth, queries, keys, operands[1],
        softmax, result, share, tuple(kept), factor, visible_keys(softmax.score, puller, bool(kept)),
    )


def _results(
    lowered: Lowered, puller: Puller, behind: Mapping[Tensor, Coordinates], beside: Mapping[Tensor, Coordinates],
    scores: Dim,
) -> list[Stored] | Refusal:
    """The outputs, that first which is made of the second product.

    Args:
        behind: the place of that; beside: places of scores and their shares; scores: how many there are.
    """
    (values,), found, others = behind, list[Stored](), list[Stored]()
    for number, output in enumerate(lowered.program.outputs):
        follows = values in postorder((output,))
        at = reached(lowered.program, puller.space, behind if follows else beside).get(id(output))
        if at is None or (not follows and product(output.shape) != scores):
            what = "follows the second product" if follows else "is made of scores and used outside"
            return _refused(f"what {what} changes the number of its elements")
        one = Stored(number, puller.element(output, at), puller.space.linear(at, output.shape))
        (found if follows else others).append(one)
    return [*found, *others] if len(found) == 1 else _refused("what follows its second product has several results")


def _is_kept(scalar: Scalar, share: Scalar) -> bool:
    """Whether an expression is of one score, or of its share, and of nothing else that is computed of scores."""
    inner = walk([scalar], leaf=share)
    if any(isinstance(each, Reduced | Scanned) for each in inner):
        return False
    return (share in inner) != any(isinstance(each, Contracted) for each in inner)


def multiple_of(scalar: Scalar) -> tuple[Scalar, float]:
    """What is multiplied by a number, and the number; itself and one where it is no such product."""
    whole = bare(scalar)
    if isinstance(whole, Apply) and whole.function in ("mul", "div"):
        one, other = map(bare, whole.operands)
        if isinstance(one, Constant) and whole.function == "mul":
            one, other = other, one
        if isinstance(other, Constant) and math.isfinite(other.number) and other.number:
            return one, float(other.number) if whole.function == "mul" else 1 / float(other.number)
    return whole, 1.0


def _factored(scalar: Scalar) -> tuple[Scalar, float]:
    """What lies in memory, and the number that it is multiplied by, where that is all there is: exporters scale queries
    and keys by the root of a scale each."""
    found, factor = multiple_of(scalar)
    return (found, factor) if isinstance(found, Load) and factor != 1.0 else (scalar, 1.0)


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
    power, guarded, empty = bare(scalar, casts=True), False, None
    if isinstance(power, Apply) and power.function == "where":
        test, instead, power = power.operands[0], power.operands[1], bare(power.operands[2], casts=True)
        if not isinstance(test, Apply) or not isinstance(instead, Constant) or instead.number != 0:
            return None
        guarded = test.function == "isnan" and bare(test.operands[0], casts=True) is power
        empty = _empty(test)
        if not guarded and empty is None:
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
    if divisor is not summed or numerator is not bare(summed.element) or empty not in (None, found.largest):
        return None
    return Softmax(bare(found.largest.element), found.largest, guarded, empty is not None)


def _empty(test: Apply) -> Scalar | None:
    """The row's maximum where a test says whether that is minus infinity."""
    if test.function != "eq" or not isinstance(number := test.operands[1], Constant) or number.number != -math.inf:
        return None
    return bare(test.operands[0])
