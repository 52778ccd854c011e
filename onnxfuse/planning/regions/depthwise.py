"""Regions that hold a depthwise convolution, found by its operator.

    image ─ pointwise ─ convolution ─ bias, activation, residual ─▶

Such a convolution is bound by bytes, which are known, and by the float32 cores, and the runtime's kernels are far from
either.  So these regions are weighed by predictions, as pointwise ones are, and by what was measured where it was:
bare, with what is computed of the result element by element, and with what is computed of the image before.
"""

from __future__ import annotations

from onnxfuse.operators.classes import slides
from onnxfuse.planning.context import Context
from onnxfuse.planning.regions.beside import Beside, Offer
from onnxfuse.planning.weighing import CandidatePool, ordered

STAGE = "depthwise"
"""Id of these regions, under which ``--disable`` leaves them out."""


def offer_depthwise(pool: CandidatePool, context: Context) -> None:
    """Weigh the depthwise convolutions of a graph, each with less and with more of what is around it."""
    for node in ordered(node for node in pool.facts if pool.facts[node].contracts and slides(node)):
        Offer(pool, context, STAGE).around(Beside([node], pool.maker.view, pool.facts))
        pair = Beside([node], pool.maker.view, pool.facts, transposes=True)
        numbers = Beside([node], pool.maker.view, pool.facts, transposes=True, numbers=True)
        if len(pair.core) > 1:  # its image lies channels-last
            Offer(pool, context, STAGE).around(pair)
        if numbers.dequantising:
            Offer(pool, context, STAGE).around(numbers)
