"""Caches that a region puts rows into, and where callers have them."""

from __future__ import annotations

from onnxfuse.graph.sizes import Sizes, shape_of
from onnxfuse.operators.classes import caches
from onnxfuse.region import Region


def bound_together(region: Region, sizes: Sizes) -> dict[int, int]:
    """Places of its outputs that a caller may bind to the memory of a tensor that it reads, with that one's place:
    caches that the model gives out as large as it takes them in."""
    found: dict[int, int] = {}
    for node in region.nodes:
        for place, operand in caches(node).items():
            given, kept = node.inputs[operand] if operand < len(node.inputs) else None, (
                node.outputs[place] if place < len(node.outputs) else None)
            if given in region.tensors and kept in region.outputs and given is not None and kept is not None and (
                    given.is_input and kept.is_output and shape_of(given, sizes) == shape_of(kept, sizes) is not None):
                found[region.outputs.index(kept)] = region.tensors.index(given)
    return found


def addresses_of(region: Region, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses of its tensors and outputs as its plan may see them: apart, and those together that a caller binds
    so."""
    count, together = len(region.tensors), bound_together(region, sizes)
    places = [together.get(place, count + place) for place in range(len(region.outputs))]
    return tuple((place + 1) << 40 for place in range(count)), tuple((place + 1) << 40 for place in places)
