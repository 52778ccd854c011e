"""The report of an optimisation, and of a fused file from what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from onnxfuse.graph import Graph, LoadedModel, bind, load_graph
from onnxfuse.graph.model import Node, Value
from onnxfuse.pipeline import Optimised, profile_of, region_of
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.hardware import Profile
from onnxfuse.planning.memory import peak_memory
from onnxfuse.planning.traffic import Fused, Ledger, fused, plan_cost
from onnxfuse.planning.sizes import shape_of
from onnxfuse.reporting.report import FusionEntry, Report, Totals
from onnxfuse.rewriting import FusedNode, FusedRegion, read_fused, unfuse


def report_of(optimised: Optimised, *, version: str, output: str | None = None) -> Report:
    """The report of a fused model, from the plan that it was made by."""
    kept = [optimised.plan.fusions[placed.region] for placed in optimised.rewritten.placed]
    regions = [region_of(fusion) for fusion in kept]
    sizes = optimised.ledger.sizes
    counted = [fused(region, sizes) for region in regions]
    costs = CostModel(optimised.ledger, optimised.profile)
    entries = []
    for placed, fusion, region, count in zip(optimised.rewritten.placed, kept, regions, counted, strict=True):
        entries.append(_entry(placed.node, placed.op, region, count, costs))
    before, after = _totals(costs, len(optimised.loaded.proto.graph.node), counted, len(optimised.model.graph.node))
    return Report(
        version=version,
        model=name_of(optimised.loaded),
        output=output,
        target=optimised.profile.name,
        dims=input_sizes(optimised.graph, sizes),
        before=before,
        after=after,
        unknown=optimised.ledger.total().unknown,
        candidates=optimised.plan.candidates,
        fusions=tuple(entries),
        refusals=optimised.refusals,
        warnings=optimised.rules.warnings,
    )
