"""Caches that a region puts rows into, and where callers have them."""

from __future__ import annotations

from onnxfuse.graph.sizes import Sizes
from onnxfuse.operators.classes import caches
from onnxfuse.region import Region


def bound_together(region: Region, sizes: Sizes) -> dict[int, int]:
    """Places of its outputs that a caller may bind to the memory of a tensor that it reads, with that one's place:
    caches that the model gives out as large as it takes them in."""
    return {region.outputs.index(behind): region.tensors.index(before)
            for behind, before in caches(region.nodes, sizes).items()
            if behind in region.outputs and before in region.tensors}


def addresses_of(region: Region, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses of its tensors and outputs as its plan may see them: apart, and those together that a caller binds
    so."""
    count, together = len(region.tensors), bound_together(region, sizes)
    places = [together.get(place, count + place) for place in range(len(region.outputs))]
    return tuple((place + 1) << 40 for place in range(count)), tuple((place + 1) << 40 for place in places)
