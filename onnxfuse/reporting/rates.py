"""What measured runs come to beside what the GPU reaches: bytes and arithmetic that the report counts, over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import LoadedModel, bind, load_model
from onnxfuse.measuring import BenchResult, Side
from onnxfuse.measuring.results import Ceiling, Rates
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import chosen_target
from onnxfuse.planning.costs.cost import is_measured, product_peak
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.region import Region
from onnxfuse.reporting.gather import input_sizes, is_fused
from onnxfuse.reporting.held import counted_region
from onnxfuse.rewriting import original, read_fused


def with_rates(result: BenchResult) -> BenchResult:
    """A measurement with the rates of its models and what the GPU reaches; a note where a model cannot be counted."""
    profile, assumed = chosen_target(None)
    notes, types = list(result.notes), set[int | None]()

    def counted(side: Side) -> Side:
        try:
            ledger, regions = _counted(load_model(Path(side.model)), result.dims, profile)
        except OnnxfuseError as error:
            notes.append(f"The bytes of {Path(side.model).name} were not counted: {error.message}")
            return side
        types.add(_product_type(ledger))
        return replace(side, rates=_rates(side, ledger, regions))

    first, second = counted(result.original), result.fused and counted(result.fused)
    known = not assumed and profile.is_called(result.device) and types
    ceiling = _ceiling(profile, next(iter(types))) if known else None
    return replace(result, original=first, fused=second, notes=tuple(notes), ceiling=ceiling)


def _counted(loaded: LoadedModel, dims: Mapping[str, int], profile: Profile) -> tuple[Ledger, list[Region]]:
    """The ledger of a model at these sizes, of the original in it where it is fused, and the fused regions.

    Raises:
        ModelError: the records of a fused model are damaged.
    """
    source = original(loaded, folded=True) if is_fused(loaded.proto) else loaded
    graph = load_graph(source)
    names = input_sizes(graph, bind(graph, {}))
    ledger = Ledger(graph, bind(graph, {name: size for name, size in dims.items() if name in names}))
    nodes = read_fused(loaded.proto) if source is not loaded else []
    return ledger, [counted_region(node, graph.part(node.body), ledger, profile) for node in nodes]


def _product_type(ledger: Ledger) -> int | None:
    """The type of the operands of the product that computes most; None where there is none."""
    products = [node for graph in ledger.graph.walk() for node in graph.nodes if ledger.node(node).product]
    most = max(products, key=lambda node: ledger.node(node).flops, default=None)
    operand = most.inputs[0] if most is not None else None
    return None if operand is None else operand.dtype


def _rates(side: Side, ledger: Ledger, regions: list[Region]) -> Rates:
    traffic = ledger.total(regions)
    moved = traffic.bytes_products + traffic.bytes_other
    seconds = (side.gpu or side.latency).median / 1e3
    return Rates(moved, traffic.flops, len(traffic.unknown), "GPU time" if side.gpu else "latency",
                 moved / seconds / 1e9, traffic.flops / seconds / 1e12)


def _ceiling(profile: Profile, dtype: int | None) -> Ceiling:
    """What a GPU reaches with products of a type; of a model without products, what the plain cores compute."""
    measured, peaks = profile.measured, profile.peaks
    plain = dtype is None
    product = peaks.float32 if plain else product_peak(dtype, profile)
    on_matrix = not plain and product > peaks.float32
    own, rate = is_measured(dtype, profile), "teraflops_per_second"
    known = {"gigabytes_per_second": measured.copy_gb_s is not None, rate: on_matrix and own}
    scaled = (rate,) if on_matrix and measured.product_tflops is not None and not own else ()
    return Ceiling(profile.name, profile.bandwidth / 1e9, product, tuple(name for name, at in known.items() if at),
                   scaled)
