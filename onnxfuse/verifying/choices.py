"""All variants of a launch plan in one session: a host input that no plan uses says which of them runs.

A session of one variant takes a GPU's machine tens of milliseconds, and its first run as many, in which the provider
makes what its libraries want; a node has three variants or four, and runs by its own guards on edges of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.lowering.launch import HOST_INPUTS, Atom, LaunchPlan, Variant
from onnxfuse.rewriting import FusedNode

Array = NDArray[Any]

_PLACE = HOST_INPUTS - 1
_NAME = f"h{_PLACE}"
_BY_GUARDS = -1
"""What the input holds where the plan's own guards are to choose."""


def chosen(node: FusedNode, feeds: Mapping[str, Array], variant: int | None) -> tuple[LaunchPlan, Mapping[str, Array]]:
    """A plan, and inputs with which a variant of the node's plan runs; None for the one whose guards hold first.

    The plan is the same for all variants, unless the node has no host input to spare.
    """
    plan = node.plan
    if len(plan.variants) == 1:
        return plan, feeds
    if _NAME in feeds or any(node.inputs[_PLACE:HOST_INPUTS]):
        return plan if variant is None else single_variant(plan, variant), feeds
    return with_choice(plan), {**feeds, _NAME: np.array([_BY_GUARDS if variant is None else variant], np.int64)}


def with_choice(plan: LaunchPlan) -> LaunchPlan:
    """The plan with each variant once more before all others, which runs where the last host input has its number."""
    forced = [entry for place in range(len(plan.variants)) for entry in _forced(plan, place)]
    return replace(plan, variants=(*forced, *plan.variants))


def single_variant(plan: LaunchPlan, variant: int) -> LaunchPlan:
    """The plan with one variant alone, which then needs no guard; one that calls a library keeps those behind it, which
    run where the library has no way."""
    chosen, behind = plan.variants[variant], plan.variants[variant + 1:]
    return replace(plan, variants=(replace(chosen, guards=()), *(behind if chosen.calls else ())))


def _forced(plan: LaunchPlan, place: int) -> Iterator[Variant]:
    """A variant, and what may run in its place, where the input has its number.  Guards of its own are left out, so
    that it is this one that runs, but those that hang on the GPU alone: a library refuses a plan that asks for what the
    GPU does not have."""
    choice = f"{_NAME}.0 {place} =="
    first, *behind = single_variant(plan, place).variants
    yield replace(first, guards=(choice, *filter(_of_gpu, plan.variants[place].guards)))
    for variant in behind:
        yield replace(variant, guards=(choice, *variant.guards))


def _of_gpu(guard: str) -> bool:
    return not any(map(Atom.read, guard.split()))
