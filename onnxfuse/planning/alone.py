"""What the runtime takes for each product or convolution alone, where that was measured.

Regions that hold the same product are compared by what the runtime would take for their nodes.  How long a product
takes is predicted badly; so it is learned before any region is weighed, and counts the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.graph.model import Node
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.region import Region

RULE = "products"
"""Of a product by itself."""


def learn_products(maker: Maker, facts: Mapping[Node, Facts], context: Context) -> None:
    """Tell the cost model of those nodes of a graph's view that are a product or a convolution and were measured."""
    if context.runtime is None:
        return
    for node in facts:
        made = maker.fusion({node}, RULE) if facts[node].contracts and not facts[node].maxima else None
        if not isinstance(made, Region):
            continue
        own = [each for each in made.nodes if each.op != "Constant"]
        taken = context.runtime(made) if len(own) == 1 else None
        if taken is not None:
            maker.costs.learn(own[0], 1e-6 * taken)
