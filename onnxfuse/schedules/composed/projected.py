"""Attentions with the product that gives their queries, keys and values, as ONNX Runtime's own Attention is.

    rows ─ product, bias ─┬─ queries ─┐
                          ├─ keys ────┼─ attention ─▶
                          └─ values ──┘

Both kernels are those that regions of these alone have, two launches of one node: the product leaves all three side by
side in memory, where it has them, and the attention reads each head of them as it lies, which nothing lays out anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product as product_of

from onnxfuse.ir.tensors import Reduce, postorder
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.attention import Attention
from onnxfuse.schedules.attentions.shape import HOPPER
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.composed.in_parts import Launches, joined
from onnxfuse.schedules.kernel import Kernel, Pace, contractions
from onnxfuse.schedules.products.in_two import Divided, ProductDivided, divided, is_divided, reduces
from onnxfuse.schedules.products.product import Product
from onnxfuse.schedules.schedule import Expected, Request

NAME = "projected"

ATTENTION, PRODUCT = Attention(), Product()


class Projected(ProductDivided):
    """Attentions with the product of their operands."""

    name = NAME
    settings = ATTENTION.settings
    optional = ATTENTION.optional
    products = 3
    hides = True
    # As an attention's own: what lies between is rounded as the nodes round it.
    tolerance = ATTENTION.tolerance

    def leeway(self, kernel: Kernel) -> float:
        """See ``Schedule``."""
        return max(self.tolerance, super().leeway(kernel))

    def template(self, choice: Choice) -> str:
        """See ``Schedule``; a choice is one of either kernel's, the other's is the schedule's own."""
        return (PRODUCT if _is_products(choice) else ATTENTION).template(choice)

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Two kernels; what is between counts as scratch memory."""
        return None if _found(Request(lowered, sizes=sizes)) is None else Expected(2)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with a product ahead of an attention; None where another schedule may have one."""
        found = _found(request)
        return None if found is None else _kernel(found)


def _found(request: Request) -> Divided | None:
    """A region divided between a product and an attention whose operands are of it; None of others."""
    program, products = request.lowered.program, contractions(request.lowered)
    if len(products) != 3:
        return None
    first, scores, last = products
    if first not in postorder(scores.operands) or scores not in postorder(last.operands):
        return None
    softmax = any(isinstance(each, Reduce) and each.kind.startswith("max") and scores in postorder((each,))
                  for each in postorder(last.operands))
    if not softmax or reduces(first) or not any(map(reduces, program.outputs)):
        return None
    return divided(request, first) if is_divided(request, first) else None


def _kernel(region: Divided) -> Kernel | Refusal:
    """Both kernels' launches one behind the other."""
    choice = region.request.choice
    made: list[Kernel] = []
    offered: list[Choice] = []
    for schedule, program in ((PRODUCT, region.ahead), (ATTENTION, region.behind())):
        asked = None if choice is None or _is_products(choice) != (schedule is PRODUCT) else (
            replace(choice, schedule=schedule.name))
        found = region.made((schedule,), program, asked)
        if isinstance(found, Refusal):
            return found
        made.append(found)
        # What a library runs is no kernel that could stand in a text with another.
        offered += [replace(each, schedule=NAME) for each in found.choices if not _is_librarys(each)]
    product, attention = made
    chosen = next((replace(each.choice, schedule=NAME) for each in made if each.choice is not None), None)
    parts = Launches(region.request, list(region.scratch))
    parts.add(product, "of_product", region.outputs_ahead())
    parts.add(attention, "of_attention", {
        **region.outputs_behind(), **region.reads(region.stand_in, region.pointer)})
    return parts.kernel(NAME, _together(parts.ways), choice=chosen, choices=tuple(offered), hides=attention.hides,
                        pace=_pace(made))


def _together(ways: Sequence[Sequence[Variant]]) -> list[Variant]:
    """Each way to launch the product with each to launch the attention, the best of both first: what sizes and
    addresses admit of one tells nothing of the other.  An attention of what only some GPUs have stands behind no
    product that any has, where there is one that these have.  The last of each runs anything."""
    products, attentions = (each[:-1] or each for each in ways)
    special = any(HOPPER in each.guards for each in products)
    pairs = [(one, other) for one, other in product_of(products, attentions)
             if not special or HOPPER in one.guards or HOPPER not in other.guards]
    return [*(joined(*pair) for pair in pairs), joined(*(each[-1] for each in ways))]


def _pace(kernels: Sequence[Kernel]) -> Pace | None:
    """Each kernel's, where both are known."""
    paces = tuple(each.pace for each in kernels if each.pace is not None)
    return Pace(0, 0, 0, parts=paces) if len(paces) == len(kernels) else None


def _is_products(choice: Choice) -> bool:
    """Whether a choice is of the product's kernel."""
    return "rows" in dict(choice.settings)


def _is_librarys(choice: Choice) -> bool:
    """Whether a library runs what a choice says."""
    return not dict(choice.settings).keys().isdisjoint(("library", "cudnn"))
