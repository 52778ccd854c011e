"""The most device memory that a run holds at once, by liveness.

A tensor is held from the node that writes it to the last that reads it, both included; graph inputs for the whole run,
graph outputs from their node to the end, constants that some kernel reads for the whole run.  A view holds what it
views; values on the host and the inner values of a fused region hold nothing.  Nothing is computed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxfuse.graph.model import Node, Value
from onnxfuse.planning.costs.placement import Kind
from onnxfuse.planning.costs.traffic import Ledger, shared
from onnxfuse.planning.legality import Contraction, apart
from onnxfuse.provider.removed import passes_on, same_memory
from onnxfuse.region import Region

ROUNDING = 0.001
"""Share of a peak that makes no difference: allocators round up by more."""

GRANULE = 2 << 20
"""Bytes that make none in any case: CUDA hands out memory in pieces of this size."""


@dataclass(frozen=True)
class Memory:
    """Bytes held at the worst moment, the constants among them, and the node that runs then (None: no node runs)."""

    peak: int
    constants: int
    at: Node | None


def peak_memory(ledger: Ledger, fused: Sequence[Region] = ()) -> Memory:
    """The peak of one run, with these regions fused.  What is made inside a body holds nothing.

    Nodes run in graph order; a fused node runs where a topological order of the contracted graph puts it.

    Raises:
        ValueError: the regions overlap, or fusing them all makes a cycle.
    """
    steps = [step for step in _steps(ledger, fused) if step.nodes]
    root = _roots(ledger, fused)
    last: dict[Value, int] = {}
    born: dict[Value, int] = {}
    constants: set[Value] = set()
    for place, step in enumerate(steps):
        for value in step.reads:
            source = root.get(value, value)
            if source in ledger.placement.constants:
                constants.add(source)
            elif source not in ledger.placement.host:
                last[source] = place
        for value in step.writes:
            if value not in ledger.placement.host:
                born.setdefault(value, place)
                last.setdefault(value, place)
    for value in ledger.graph.outputs:
        source = root.get(value, value)
        if source not in ledger.placement.constants:
            last[source] = len(steps)
    held = sum(ledger.bytes_of(value) or 0 for value in constants)
    live = held + sum(ledger.bytes_of(value) or 0 for value in ledger.graph.inputs)
    dying: dict[int, list[Value]] = {}
    for value in born:
        dying.setdefault(last[value], []).append(value)
    starting: dict[int, list[Value]] = {}
    for value, place in born.items():
        starting.setdefault(place, []).append(value)
    peak, at = live, None
    for place, step in enumerate(steps):
        live += sum(ledger.bytes_of(value) or 0 for value in starting.get(place, ()))
        if live + step.scratch > peak:
            peak, at = live + step.scratch, step.nodes[-1]
        live -= sum(ledger.bytes_of(value) or 0 for value in dying.get(place, ()))
    return Memory(peak, held, at)


def most_held(ledger: Ledger, fused: Sequence[Region], *, short: bool) -> int:
    """Bytes that a plan with these regions may hold when it is changed: what it holds as it is, and where memory is not
    ``short`` what the model holds unfused, if that is more."""
    most = peak_memory(ledger, fused).peak
    return most if short else max(most, peak_memory(ledger).peak)


def rounded(peak: int) -> int:
    """Bytes at a peak as an allocator may round them up."""
    return peak + max(round(peak * ROUNDING), GRANULE)


def memory_saved(ledger: Ledger, region: Region) -> int:
    """Bytes of a region's inner values, which the fused node never puts into device memory."""
    outputs = set(region.outputs)
    return sum(
        size
        for node in region.own
        for value, size in ledger.node(node).writes.items()
        if value not in outputs
    )


@dataclass(frozen=True)
class _Step:
    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    scratch: int = 0


def _steps(ledger: Ledger, fused: Sequence[Region]) -> Iterable[_Step]:
    """What runs, in order: nodes that launch, and regions."""
    fused = [region for region in fused if region.nodes[0].place == ledger.graph.place]
    # What passes its operand on is no matter, and may stand beside the regions that hold copies of it.
    common = shared(fused) | {
        node for region in fused for node in region.nodes
        if passes_on(node) and node.outputs[0] not in region.outputs
    }
    members = apart([region.nodes for region in fused], common)
    region_of = dict(zip(members, fused, strict=True))
    if fused:
        contraction = Contraction(ledger.graph)
        for held in members:
            refusal = contraction.contract(held)
            if refusal is not None:
                raise ValueError(refusal.message)
        units = contraction.order()
    else:
        units = tuple((node,) for node in ledger.graph.nodes)
    for unit in units:
        found = region_of.get(frozenset(unit))
        if found is not None:
            yield _Step(unit, found.tensors, found.outputs, found.scratch // 2)
        elif unit[0] not in common and (
            ledger.placement.kinds[unit[0]].launches or ledger.placement.kinds[unit[0]] is Kind.CONTROL
        ):
            node = unit[0]
            yield _Step(unit, tuple(node.reads()), tuple(value for value in node.outputs if value is not None))


def _roots(ledger: Ledger, fused: Sequence[Region]) -> dict[Value, Value]:
    """What each view outside the regions is a view of."""
    inside = {node for region in fused for node in region.nodes}
    root: dict[Value, Value] = {}
    for node in ledger.graph.nodes:
        if node in inside or ledger.placement.kinds[node] is not Kind.VIEW:
            continue
        source, target = same_memory(node), node.outputs[0]
        if source is not None and target is not None:
            root[target] = root.get(source, source)
    return root
