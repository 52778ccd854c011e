"""The report of an optimisation, and of a fused file from what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from types import NoneType
from typing import Any

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph, LoadedModel, bind
from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.order import graphs_of
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.memory import peak_memory
from onnxfuse.planning.costs.traffic import Ledger, Observation
from onnxfuse.region import Region, RegionCost
from onnxfuse.reporting.costs import by_operator, roofline
from onnxfuse.reporting.findings import Assumed, BrokenEntry, FoldedEntry, FusionEntry, Sizes, Totals
from onnxfuse.reporting.left import left_regions, own_matches, recognised
from onnxfuse.reporting.named import named_places
from onnxfuse.reporting.reasons import advice, told
from onnxfuse.reporting.remaining import largest
from onnxfuse.reporting.report import Report
from onnxfuse.rewriting import (
    FusedNode,
    bytes_of_weights,
    constants_record,
    layout_record,
    read_fused,
    separated_sums,
    sizes_record,
    weights_record,
)
from onnxfuse.rules import RuntimeRule, groups_of
from onnxfuse.version import __version__
from onnxfuse.visible import visible

_NUMBER = (int, float)
_NOTES: dict[str, dict[str, Any]] = {
    "measured": {
        "microseconds": _NUMBER, "runtime_microseconds": (*_NUMBER, NoneType), "speedup": (*_NUMBER, NoneType),
        "gpu": str, "date": str, "source": str,
    },
    "compiled": {"architecture": str, "registers": int, "spilled_bytes": int, "local_bytes": int, "shared_bytes": int},
}
"""What the notes kept with a fused node hold, by name."""


def report_of(optimised: Optimised) -> Report:
    """The report of a fused model, from the plan that it was made by."""
    costs, (regions, entries) = optimised.costs, _fused(optimised)
    whole = costs_before(costs, optimised.loaded, optimised.folded, optimised.rules.runtime)
    before = total(whole, (), optimised.loaded.proto)
    after = total(costs, regions, optimised.lean)
    return Report(
        version=__version__,
        model=name_of(optimised.loaded),
        output=None,
        target=optimised.profile.name,
        dims=input_sizes(optimised.graph, optimised.ledger.sizes),
        before=before,
        after=after,
        unknown=optimised.ledger.total().unknown,
        candidates=optimised.plan.candidates,
        fusions=tuple(entries),
        refusals=told(optimised),
        verification=_verification(optimised),
        warnings=(*optimised.rules.warnings, *_planning_only(optimised.profile)),
        notes=optimised.notes,
        sizes=sizes_of(optimised.lean), constants=constants_of(optimised.lean), biases=biases_of(optimised.lean),
        layouts=layouts_of(optimised.lean), folded=folded_in(optimised.lean),
        left=left_regions(optimised),
        canonical=recognised(optimised),
        named=named_places(optimised),
        matches=own_matches(optimised),
        advice=advice(optimised),
        assumed=Assumed(optimised.assumed_target, optimised.assumed),
        operators=by_operator(whole, costs, regions),
        remaining=largest(optimised),
        roofline=roofline(optimised.profile),
        embedded=embedded_bytes({name: len(image) for name, image in optimised.regions[placed.region].images.items()}
                                for placed in optimised.rewritten.placed),
        kernels={placed.op: optimised.regions[placed.region].kernel.source for placed in optimised.rewritten.placed},
        broken=broken_entries(costs, entries, regions),
    )


def broken_entries(costs: CostModel, entries: Sequence[FusionEntry], regions: Sequence[Region]
                   ) -> tuple[BrokenEntry, ...]:
    """Runtime fusions that fused nodes break, of which there are entries and regions in one order."""
    return tuple(
        BrokenEntry("+".join(found.fusion.rules), tuple(node.label for node in found.left if node.op != "Constant"),
                    tuple(entry.node for entry, region in zip(entries, regions, strict=True)
                          if not found.fusion.nodes.isdisjoint(region.nodes)), found.seconds)
        for found in costs.broken(regions)
    )


def _fused(optimised: Optimised) -> tuple[list[Region], list[FusionEntry]]:
    """The fused nodes in the order of the model: what is counted of each, and what the report says of it."""
    regions, entries = [], []
    order = {node.name: place for place, node in enumerate(_all_nodes(optimised.lean))}
    for placed in sorted(optimised.rewritten.placed, key=lambda placed: order[placed.node]):
        region = optimised.regions[placed.region]
        reads = [value.name for value in (*region.hosts, *region.tensors)]
        named = Named(placed.node, placed.op, region.rule, region.kernel.schedule, tuple(sorted(region.images)),
                      region.figures())
        regions.append(region)
        entries.append(entry_of(named, region, reads, region.cost))
    return regions, entries


def embedded_bytes(nodes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes of embedded kernels by architecture, of those of each fused node."""
    found: Counter[str] = Counter()
    for images in nodes:
        found.update(images)
    return dict(sorted(found.items()))


def sizes_of(model: onnx.ModelProto) -> Sizes:
    """Arithmetic on sizes that was folded in a model."""
    record = sizes_record(model)
    return Sizes() if record is None else Sizes(record.replaced, len(record.removed))


def constants_of(model: onnx.ModelProto) -> int:
    """Nodes of constants in a model that are computed once because they are of float32 now."""
    record = constants_record(model)
    return 0 if record is None else len(record.widened)


def biases_of(model: onnx.ModelProto) -> int:
    """Convolutions and products of a fused model whose bias a fused node adds."""
    return len(separated_sums(model))


def layouts_of(model: onnx.ModelProto) -> int:
    """Values of a fused model that lie channels-last between fused nodes."""
    record = layout_record(model)
    return 0 if record is None else len(record.laid)


def folded_in(model: onnx.ModelProto) -> tuple[FoldedEntry, ...]:
    """What is folded into weights that kernels of a fused model read, and how much larger that makes the file."""
    record, sizes = weights_record(model), bytes_of_weights(model)
    found: dict[str, FoldedEntry] = {}
    for each in () if record is None else record.folded:
        before = found.get(each.what)
        found[each.what] = FoldedEntry(each.node, each.what, sizes.get(each.name, 0) + (before.bytes if before else 0))
    return tuple(found.values())


def _planning_only(profile: Profile) -> tuple[str, ...]:
    """What is to be said of a target that runs none of it."""
    note = profile.note or "its kernels were never run."
    return (visible(f"{profile.name} is for planning only: {note}"),) * profile.planning_only


def _verification(optimised: Optimised) -> dict[str, Any]:
    """The verification as data, with what was taken back."""
    found = optimised.verification
    if found is None:
        return {"status": "skipped", "summary": "skipped", "taken_back": []}
    status = "verified" if found.kernels_run else "graph verified" if found.whole.identical else "not run"
    taken_back = [{"node": refusal.node, "rule": refusal.rule, "message": refusal.message}
                  for refusal in optimised.taken_back]
    return {"status": status, **found.to_json(), "taken_back": taken_back}


def is_fused(model: onnx.ModelProto) -> bool:
    """Whether the model holds fused nodes."""
    return bool(read_fused(model))


def name_of(loaded: LoadedModel) -> str:
    """What a report calls a model: its path, or the name of its graph."""
    return str(loaded.path) if loaded.path is not None else loaded.proto.graph.name or "(in memory)"


def input_sizes(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Values of the symbols in the inputs' shapes."""
    symbols = dict.fromkeys(
        name for value in graph.inputs for size in value.shape or () for name in sorted(size.symbols)
    )
    return {name: sizes[name] for name in symbols if name in sizes}


def replaced_nodes(node: FusedNode, graph: Graph) -> tuple[Node, ...]:
    """The nodes that a fused node stands for, in the graph of the original that it is in: what lies between its inputs
    and its outputs."""
    edge = {graph.values[name] for name in (*node.hosts, *node.tensors)}
    found: dict[Node, None] = {}
    waiting: list[Value] = [graph.values[name] for name in node.outputs]
    while waiting:
        value = waiting.pop()
        if value.producer is None or value.is_constant or value in edge or value.producer in found:
            continue
        found[value.producer] = None
        waiting += value.producer.reads()
    return tuple(sorted(found, key=lambda member: member.index))


def region_held(node: FusedNode, graph: Graph) -> Region:
    """The region of a graph of the original that a fused node stands for: its nodes, what it reads and writes."""
    tensors, outputs = (tuple(graph.values[name] for name in names) for names in (node.tensors, node.outputs))
    made = (graph.values[name].producer for name in node.again if name in graph.values)
    again = tuple(sorted((maker for maker in made if maker is not None), key=lambda maker: maker.index))
    folded = tuple(value for value in tensors if value.is_constant and not value.consumers)
    return Region(replaced_nodes(node, graph), tensors, outputs, folded=folded, again=again)


@dataclass(frozen=True)
class Named:
    """A fused node as the plan, or the file, names it: its kernel, what that is due to and compiled for, and figures
    that are kept with it."""

    node: str
    kernel: str
    rule: str
    schedule: str
    architectures: tuple[str, ...]
    figures: Mapping[str, Any]


def entry_of(named: Named, region: Region, reads: Iterable[str], cost: RegionCost) -> FusionEntry:
    """A fused node as the report has it."""
    body = region.nodes[0].body
    before = "" if body is None else f"{body.label}: "
    return FusionEntry(
        rule=named.rule,
        schedule=named.schedule,
        node=named.node,
        kernel=named.kernel,
        replaces=tuple(member.label.removeprefix(before) for member in region.nodes),
        operators=tuple(member.qualified_op for member in region.nodes if member.op != "Constant"),
        inputs=tuple(reads),
        outputs=tuple(value.name for value in region.outputs),
        bytes_before=cost.bytes_before,
        bytes_after=cost.bytes_after,
        kernels_before=cost.kernels_before,
        kernels_after=cost.kernels_after,
        estimated_speedup=round(cost.estimated_speedup, 4),
        memory_saved=cost.memory_saved,
        architectures=named.architectures,
        measured=_note(named.figures, "measured", named.node),
        compiled=_note(named.figures, "compiled", named.node),
        body="" if body is None else body.label,
        runs=cost.executions,
        flops=cost.flops,
        seconds_before=round(cost.seconds_before, 9),
        seconds_after=round(cost.seconds_after, 9),
        recomputes=tuple(member.label.removeprefix(before) for member in region.again if member.op != "Constant"),
    )


def _note(figures: Mapping[str, Any], name: str, node: str) -> Mapping[str, Any] | None:
    """A note that is kept with a fused node, which anyone may have edited.

    Raises:
        ModelError: it is not as onnxfuse writes it.
    """
    found = figures.get(name)
    if found is None:
        return None
    if not isinstance(found, dict) or any(not isinstance(found.get(key), kind) for key, kind in _NOTES[name].items()):
        raise ModelError(
            f"The record of what was {name} of the fused node {node!r} is damaged.",
            remedy="Take the file as `onnxfuse optimize` wrote it, or fuse the original again.",
        )
    return found


def costs_before(
    costs: CostModel, original: LoadedModel, folded: LoadedModel, rules: Sequence[RuntimeRule] | None = None
) -> CostModel:
    """The cost model of a model as it was before its arithmetic on sizes was folded.

    Args:
        costs: of the ``folded`` model; what was observed of its nodes holds for the same nodes of the original.
        rules: what the runtime fuses itself, the shipped rules where None.
    """
    if original is folded:
        return costs
    graph, ledger = load_graph(original), costs.ledger
    known = {_first(node): seen for node, seen in ledger.observed.items()}
    known.update(_with_biases(ledger, separated_sums(folded.proto)))
    observed = {node: known[_first(node)] for each in graph.walk() for node in each.nodes if _first(node) in known}
    sizes = bind(graph, input_sizes(ledger.graph, ledger.sizes))
    return CostModel(Ledger(graph, sizes, observed=observed), costs.profile, groups_of(graph, rules))


def _with_biases(ledger: Ledger, sums: Iterable[str]) -> Iterator[tuple[str, Observation]]:
    """What was observed of convolutions and products whose biases are apart, together with these, by what they compute
    in the original."""
    for name in sums if ledger.observed else ():
        added = ledger.graph.values[name].producer
        owner = None if added is None or added.inputs[0] is None else added.inputs[0].producer
        parts = [ledger.observed[node] for node in (owner, added) if node is not None and node in ledger.observed]
        seconds = [part.seconds for part in parts if part.seconds is not None]
        if parts:
            yield name, replace(parts[0], seconds=fsum(seconds) if seconds else None)


def _first(node: Node) -> str:
    return next((value.name for value in node.outputs if value is not None), "")


def _all_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of the main graph and of bodies, fused nodes as one each."""
    return [node for _, graph in graphs_of(model) for node in graph.node]


def total(costs: CostModel, regions: Sequence[Region], model: onnx.ModelProto) -> Totals:
    """One run of a model with these regions fused."""
    traffic = costs.ledger.total(regions)
    return Totals(
        nodes=len(_all_nodes(model)),
        kernels=traffic.kernels,
        flops=traffic.flops,
        bytes_products=traffic.bytes_products,
        bytes=traffic.bytes_other,
        peak_bytes=peak_memory(costs.ledger, regions).peak,
        seconds=costs.total(regions),
    )
