"""How an attention's tensors are brought in and its results stored: by vectors, where these lie so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxfuse.lowering.pull import Load
from onnxfuse.schedules.attentions.parts import Access, AttentionParts
from onnxfuse.schedules.kernel import (
    divides,
    is_vector,
    moving_loads,
    sources,
    targets,
    vector_guards,
    vector_loads,
)
from onnxfuse.schedules.lanes import Lanes


def accesses(parts: AttentionParts, sizes: Mapping[str, int]) -> tuple[AttentionParts, tuple[str, ...]]:
    """With how each tensor is brought in and the result stored, and the guards under which that is by vectors."""
    space, puller, lowered = parts.puller.space, parts.puller, parts.lowered
    guards: list[str] = []
    made = []
    planned = lowered.binding.planned(sizes)
    vectors = True
    sides = ((parts.queries, "@d", parts.depth), (parts.keys, "@d", parts.depth), (parts.values, "@n", parts.columns))
    for scalar, base, extent in sides:
        lanes = Lanes(space, puller, base, "", parts.width)
        along = _across(parts, planned) if scalar is parts.keys else None
        lanes = along or lanes
        moving = moving_loads([scalar, *puller.gathered.values()], lanes)
        lanes.rely_on_loads(moving)
        whole = along is not None or extent.multiple_of() % parts.width == 0
        alike = all(is_vector(load, lanes) for load in moving)
        vectors = vectors and whole and divides(lanes, planned)
        copied = isinstance(scalar, Load) and alike and lanes.stride(scalar.offset) == 1
        made.append(Access(scalar, lanes, copied, along is not None))
        guards += vector_guards(lowered, lanes, sources(vector_loads(moving, lanes)))
    pairs = {}
    for base, roots, stored in (("@k", [parts.softmax.score], parts.kept), ("@n", [], (parts.result,))):
        lanes = pairs[base] = Lanes(space, puller, base, "", 2)
        moving = moving_loads([*roots, *(each.scalar for each in stored)], lanes)
        lanes.rely_on_loads(moving)
        pointers = sources(vector_loads(moving, lanes))
        for each in stored:
            if lanes.stride(each.place) == 1 and lanes.aligned(each.place):
                lanes.rely_on_vectors([each.place])
                pointers.append(targets(lowered)[each.output])
        vectors = vectors and divides(lanes, planned)
        guards += vector_guards(lowered, lanes, pointers)
    parts = replace(parts, accesses=tuple(made), along_keys=pairs["@k"], along_columns=pairs["@n"], vectors=vectors)
    return parts, tuple(dict.fromkeys(guards))


def _across(parts: AttentionParts, planned: Mapping[str, int]) -> Lanes | None:
    """Lanes along the keys, where these lie side by side, at the planned sizes too, and what a head is of does not."""
    space, puller = parts.puller.space, parts.puller
    lanes, other = (Lanes(space, puller, base, "", parts.width) for base in ("@k", "@d"))
    loads = moving_loads([parts.keys], lanes)
    if not loads or not lanes.may_divide(parts.length) or not all(is_vector(load, lanes) for load in loads):
        return None
    if all(other.stride(load.offset) in (0, 1) for load in moving_loads([parts.keys], other)):
        return None
    lanes.rely_on_size(parts.length)
    lanes.rely_on_loads(loads)
    return lanes if divides(lanes, planned) else None
