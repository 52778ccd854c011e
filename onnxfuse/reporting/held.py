"""What a fused file holds: the record of how it was made, written after planning and read by its report.

The report of a fused file shows the figures of the record; only where somebody asks for other sizes or another GPU, or
the file has no record or was changed since, are they counted anew, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.cuda_options import BIAS, LAYOUT, TF32, spelled
from onnxfuse.errors import ModelError, TargetError
from onnxfuse.graph import LoadedModel, bind
from onnxfuse.graph.model import Graph
from onnxfuse.graph.sizes import shapes_of
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import chosen_target
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.traffic import Ledger, plan_cost
from onnxfuse.provider.fusions import with_biases
from onnxfuse.provider.layouts import is_converted
from onnxfuse.region import Region, RegionCost
from onnxfuse.reporting.costs import MOST, RATES, by_operator, roofline
from onnxfuse.reporting.findings import Assumed, BrokenEntry, Totals
from onnxfuse.reporting.gather import (
    Named,
    biases_of,
    broken_entries,
    constants_of,
    costs_before,
    embedded_bytes,
    entry_of,
    folded_in,
    input_sizes,
    layouts_of,
    name_of,
    region_held,
    sizes_of,
    total,
)
from onnxfuse.reporting.report import Report
from onnxfuse.rewriting import (
    BrokenRecord,
    FusedNode,
    MeasuredRecord,
    PlanRecord,
    VerificationRecord,
    annotate,
    has_planned_form,
    is_optimised,
    note_plan,
    original,
    plan_record,
    read_fused,
    separated_sums,
    today,
)
from onnxfuse.rules import groups_of
from onnxfuse.version import __version__

_MEASURED = ("speedup", "low", "high", "of", "device", "before", "after")
_NOT_RECORDED = "The file does not say what it was planned for: the figures are counted anew."
_CHANGED = "The file was changed since it was fused: the figures are counted anew."


def note_report(optimised: Optimised, report: Report) -> None:
    """Keep with a fused model how it was made; one that an earlier optimisation left so keeps what it has, and one of
    which nothing was fused stays as it is."""
    if report.fusions and not is_optimised(optimised.loaded.proto):
        note_plan(optimised.lean, _record(optimised, report))


def keep_measured(path: Path, measured: Mapping[str, Any]) -> None:
    """Keep in a fused file what a run of it and the original took.

    Raises:
        OutputError: the file cannot be written.
    """
    found = MeasuredRecord(**{name: measured[name] for name in _MEASURED}, date=today())

    def note(model: onnx.ModelProto) -> None:
        record = plan_record(model)
        if record is not None:
            note_plan(model, replace(record, measured=found))

    annotate(path, note)


def _record(optimised: Optimised, report: Report) -> PlanRecord:
    objective = optimised.objective
    costs = {placed.node: optimised.regions[placed.region].cost for placed in optimised.rewritten.placed}
    return PlanRecord(
        __version__, onnx.__version__, report.target, dict(report.dims), asdict(report.before), asdict(report.after),
        {name: asdict(cost) for name, cost in costs.items()}, report.assumed.target, report.assumed.dims,
        objective.strategy, asdict(objective.hints), objective.least_gain, objective.channels_last,
        tuple(sorted(optimised.rules.disabled)), spelled(optimised.provider_options), tuple(_hangs_on(optimised)),
        report.unknown, report.candidates, dict(report.canonical), report.operators, report.remaining, report.roofline,
        _verified(report.verification, optimised),
        broken=tuple(BrokenRecord(**vars(entry)) for entry in report.broken),
        named=report.named, fold_weights=optimised.fold_weights,
    )


def _hangs_on(optimised: Optimised) -> Iterator[str]:
    """Options of the CUDA provider with which the model might be planned otherwise."""
    nodes = [node for graph in optimised.graph.walk() for node in graph.nodes if node.domain == ""]
    fused = {node for region in optimised.plan.fusions for node in region.nodes}
    if any(is_converted(node) and node not in fused for node in nodes) or (
            optimised.objective.channels_last and any(map(is_converted, nodes))):
        yield LAYOUT
    if any(node.op in ("Conv", "ConvTranspose") for node in nodes):
        yield BIAS
    kept = any(region.lowered is not None and region.lowered.exact for region in optimised.plan.with_products)
    if kept or any(fusion.kernel.rounds for fusion in optimised.plan.fusions):
        yield TF32


def _verified(found: Mapping[str, Any], optimised: Optimised) -> VerificationRecord | None:
    if optimised.verification is None:
        return None
    import onnxruntime

    ran = [node for node in optimised.verification.nodes if node.verdict == "passed"]
    worst = max(ran, key=lambda node: node.ratio, default=None)
    return VerificationRecord(
        found["status"], found["summary"], today(), optimised.verification.runner or "", onnxruntime.__version__,
        tuple(map(str, optimised.verification.runs)), None if worst is None else worst.error,
        "" if worst is None else worst.node, tuple(fault["rule"] for fault in found["taken_back"]),
    )


def report_of_fused(loaded: LoadedModel, dims: Mapping[str, int], profile: Profile | None = None) -> Report:
    """The report of a fused model from the model alone; refusals are not in it.

    Args:
        dims, profile: sizes and a GPU to count for; those that the model was planned for where none are given.

    Raises:
        ModelError: the records in the model are damaged, or ``dims`` names no dimension of the model.
    """
    record, nodes = plan_record(loaded.proto), read_fused(loaded.proto)
    folded = original(loaded, folded=True)
    graph = load_graph(folded)
    bind(graph, dims)
    asked = record is not None and (
        any(record.dims.get(name) != size for name, size in dims.items())
        or (profile is not None and profile.name != record.target))
    whole = record is not None and record.nodes.keys() == {node.name for node in nodes}
    if record is None or asked or not whole or not is_optimised(loaded.proto):
        note = _NOT_RECORDED if record is None else _asked(record) if asked else _CHANGED
        return _counted(loaded, folded, graph, (dims, profile, note), record)
    entries = tuple(
        entry_of(_named(node), region_held(node, graph.part(node.body)), [*node.hosts, *node.tensors],
                 _cost(record.nodes[node.name], node.name))
        for node in nodes
    )
    return Report(
        version=__version__, model=name_of(loaded), output=None, target=record.target,
        dims={name: int(size) for name, size in record.dims.items()}, before=_totals(record.before),
        after=_totals(record.after), unknown=record.unknown, candidates=record.candidates, fusions=entries,
        refusals=(), sizes=sizes_of(loaded.proto), constants=constants_of(loaded.proto),
        biases=biases_of(loaded.proto), layouts=layouts_of(loaded.proto), folded=folded_in(loaded.proto),
        canonical=record.canonical, **_made(record),
        assumed=Assumed(record.assumed_target, record.assumed_dims), operators=record.operators,
        remaining=record.remaining, roofline=_roofline(record), kernels=_texts(nodes),
        broken=tuple(BrokenEntry(**vars(entry)) for entry in record.broken),
        named=record.named,
        embedded=embedded_bytes(node.images for node in nodes),
    )


def _asked(record: PlanRecord) -> str:
    sizes = "".join(f", {name}={size:g}" for name, size in record.dims.items())
    return f"The figures are counted anew for what you asked for; the file was planned for {record.target}{sizes}."


def _sizes(record: PlanRecord | None) -> dict[str, int]:
    return {} if record is None else {name: int(size) for name, size in record.dims.items()}


def _counted(loaded: LoadedModel, folded: LoadedModel, graph: Graph,
             wanted: tuple[Mapping[str, int], Profile | None, str], record: PlanRecord | None) -> Report:
    """The report with figures counted anew for the sizes and the GPU ``wanted``; the note says why."""
    dims, profile, note = wanted
    names = input_sizes(graph, bind(graph, {}))
    known = {**{name: size for name, size in _sizes(record).items() if name in names}, **dims}
    guessed = set(names) - known.keys() | (set() if record is None else set(record.assumed_dims) - dims.keys())
    assumed = False
    if profile is None:
        try:
            profile, assumed = chosen_target(None if record is None else record.target)
        except TargetError:  # a profile of the user's own, which is not at hand
            profile, assumed = chosen_target(None)
    source = original(loaded) if has_planned_form(folded.proto) else folded
    ledger = Ledger(graph, bind(graph, known))
    costs = CostModel(ledger, profile, with_biases(groups_of(graph), separated_sums(folded.proto)))
    regions, entries = [], []
    nodes = read_fused(loaded.proto)
    for node in nodes:
        counted = counted_region(node, graph.part(node.body), ledger, profile)
        regions.append(counted)
        entries.append(entry_of(_named(node), counted, [*node.hosts, *node.tensors], costs.region(counted)))
    sizes = input_sizes(graph, ledger.sizes)
    whole = costs_before(costs, source, folded)
    return Report(
        version=__version__, model=name_of(loaded), output=None, target=profile.name, dims=sizes,
        before=total(whole, (), source.proto), after=total(costs, regions, loaded.proto),
        unknown=ledger.total().unknown, candidates=len(entries), fusions=tuple(entries), refusals=(),
        sizes=sizes_of(loaded.proto), constants=constants_of(loaded.proto), biases=biases_of(loaded.proto),
        layouts=layouts_of(loaded.proto), folded=folded_in(loaded.proto), notes=(note,),
        assumed=Assumed(assumed, tuple(name for name in sizes if name in guessed)), kernels=_texts(nodes),
        embedded=embedded_bytes(node.images for node in nodes), broken=broken_entries(costs, entries, regions),
        operators=by_operator(whole, costs, regions),
        roofline=roofline(profile),
        **({"verification": {"status": "not recorded"}} if record is None else _made(record)),
    )


def _made(record: PlanRecord) -> dict[str, Any]:
    """What a report has of how the file was made, whatever its figures are counted for."""
    found = record.verification
    verification: dict[str, Any] = {"status": "skipped", "summary": "skipped", "taken_back": []}
    if found is not None:
        verification = {**asdict(found), "taken_back": [], "inputs": list(found.inputs)}
        where = ", ".join(part for part in (found.date, found.gpu, f"ONNX Runtime {found.onnxruntime}") if part)
        worst = "" if found.worst_error is None else (
            f"; worst error {found.worst_error:.1e} of the output's scale, in {found.worst_node}")
        verification["summary"] = f"{found.summary} ({where}){worst}"
    measured = None if record.measured is None else asdict(record.measured)
    return {"verification": verification, "measured": measured, "made": made_of(record)}


def made_of(record: PlanRecord) -> dict[str, Any]:
    """By what a model was made, and with which settings."""
    return {name: getattr(record, name) for name in (
        "onnxfuse", "onnx", "strategy", "hints", "least_gain", "channels_last", "disabled", "provider_options",
        "fold_weights")}


def counted_region(node: FusedNode, graph: Graph, ledger: Ledger, profile: Profile) -> Region:
    """The region of a graph of the original that a fused node stands for, as the target runs it."""
    region = region_held(node, graph)
    shapes = shapes_of(region.tensors, ledger.sizes)
    kernels, scratch = (
        (1, 0) if shapes is None else plan_cost(node.plan, shapes, profile.sm, profile.multiprocessors))
    return replace(region, steps=kernels, scratch=scratch)


def _named(node: FusedNode) -> Named:
    return Named(node.name, node.op, node.rule, node.schedule, node.architectures, node.figures)


def _texts(nodes: Iterable[FusedNode]) -> dict[str, str]:
    return {node.op: node.source for node in nodes}


def _roofline(record: PlanRecord) -> Mapping[str, float]:
    """What the GPU can do, as the report has it.

    Raises:
        ModelError: figures are missing, or are none of a GPU.
    """
    found = record.roofline
    if found and (found.keys() != RATES.keys() or any(not RATES[name] <= rate <= MOST for name, rate in found.items())):
        raise ModelError(
            "The record of what the GPU can do is damaged.",
            remedy="Take the file as `onnxfuse optimize` wrote it, or fuse the original again.",
        )
    return found


def _cost(figures: Mapping[str, float], node: str) -> RegionCost:
    found: RegionCost = _read(RegionCost, figures, f"the fused node {node!r}")
    return found


def _totals(figures: Mapping[str, float]) -> Totals:
    found: Totals = _read(Totals, figures, "the model")
    return found


def _read(kind: Any, figures: Mapping[str, float], of: str) -> Any:
    """Figures as a dataclass has them.

    Raises:
        ModelError: some are missing, or there are others.
    """
    try:
        return kind(**figures)
    except TypeError as error:
        raise ModelError(
            f"The record of the figures of {of} is damaged.",
            remedy="Take the file as `onnxfuse optimize` wrote it, or fuse the original again.",
        ) from error
