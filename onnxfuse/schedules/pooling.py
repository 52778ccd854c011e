"""The pooling schedule: maxima and means of windows, with maps before and behind, as the pointwise schedule runs them.

Each element of a result reads its whole window, and what windows share comes from the caches: of memory every byte is
moved about once.  With channels innermost a thread has a vector of them at every place of the window; else neighbouring
threads have neighbouring windows, so that what a warp reads lies together whatever the stride.  What is computed of the
image before is computed once for every window that an element is in, so that it must be little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.graph.model import Shape as Sizes
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract, Map, Pool, Tensor, postorder
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Puller
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel, has_reductions, is_vector, pools, widest
from onnxfuse.schedules.pointwise import Loop, Pointwise, kernel_of
from onnxfuse.schedules.schedule import Does, Expected, Request

SIMPLE = frozenset({
    "add", "sub", "mul", "min", "max", "at_least", "at_most", "neg", "abs", "where", "relu", "floor", "ceil", "round",
    "isnan", "isinf", "ispinf", "isninf", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not",
})
"""Functions that take one instruction or two."""

NOTHING = frozenset({"copy", "narrow", "cast"})
"""Those that take none to speak of."""

DEAR = 8
"""What others take, in such."""

MOST_BEFORE = 24
"""Functions, of one instruction or two, that are computed of an element for all windows that it is in."""


MOST_BYTES = 256
"""Of all vectors of a thread: a quarter of its registers, so that a multiprocessor holds several blocks."""


class Pooling(Pointwise):
    """Windows without rows; shares not measured: what lies in several windows comes from the caches again, and each of
    its elements is converted, compared, and chosen where padding is near."""

    name = "pooling"
    efficiency = 0.6
    arithmetic = 0.15

    def runs(self, does: Does) -> bool:
        """Windows, with maps around them."""
        return Does.POOLS in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """As the pointwise schedule."""
        return super().expected(lowered, sizes, multiprocessors) if pools(lowered) else None

    def refuses(self, request: Request) -> Refusal | None:
        """Where windows meet what would be computed anew for each."""
        return refusal_of(request.lowered)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with windows that is worth having."""
        if not pools(request.lowered):
            return None
        return refusal_of(request.lowered) or kernel_of(request, self.name, _width)


def _width(loops: Sequence[Loop], puller: Puller) -> int:
    """The widest vectors by which all is read that moves, where registers hold them; one element where something is
    not."""
    most = widest((1, 2, 4, 8), [dtype for loop in loops for dtype in loop.dtypes])
    element = max(sum(TYPES[load.dtype].size for load in loop.loads) for loop in loops)
    fitting = (width for width in (8, 4, 2) if width <= most and width * element <= MOST_BYTES and all(
        is_vector(load, loop.lanes(puller, width)) for loop in loops for load in loop.loads))
    return next(fitting, 1)


def refusal_of(lowered: Lowered) -> Refusal | None:
    """Why a region with windows has no kernel that is worth having; None where it has no window, or one."""
    found = pools(lowered)
    if not found:
        return None
    if has_reductions(lowered) or any(isinstance(tensor, Contract) for tensor in lowered.program.tensors):
        return Refusal("pool-structure", "windows meet rows, or a product, which would be computed anew for each")
    for each in found:
        before = postorder((each.operand,))
        if any(isinstance(tensor, Pool) for tensor in before):
            return Refusal("pool-structure", "a window is of what other windows give: each of these would be computed "
                           "anew for every window that it is in")
        dear = _cost(before, each.operand.shape) * each.overlap
        if each.overlap > 1 and dear > MOST_BEFORE:
            return Refusal("pool-structure", f"what is computed before the windows would be computed {each.overlap} "
                           "times, for every window that an element is in")
    return None


def _cost(tensors: Sequence[Tensor], shape: Sizes) -> int:
    """What the functions of whole images among tensors take, in simple ones."""
    functions = [tensor.function for tensor in tensors if isinstance(tensor, Map) and tensor.shape == shape]
    return sum(function in SIMPLE or DEAR * (function not in NOTHING) for function in functions)
