"""What a region may hold: which nodes, how many of them, and how much their kernel may ask of the GPU.

A node that can be fused is lowered once on its own; what comes out tells its row structure.  Two nodes fit into one
region where their arrangements agree: that is checked on sizes alone, cheaply and often, and the schedule has the last
word.  The hardware profile says how many operators, how efficient, how much on chip.

Where ONNX Runtime lays out images channels-last itself (``prefer_nhwc=1``), it puts a layout conversion around each
convolution and pooling, and moves it through the pointwise nodes between them until it meets another one and both go
away.  A fused node is a wall to it: the conversions stay, so that such nodes are left alone, and convolutions too,
unless a plan that holds these is predicted to take less (``pipeline``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import shapes_of
from onnxfuse.ir.tensors import Reduce, Scan
from onnxfuse.lowering.alike import Lowerings
from onnxfuse.lowering.arrangement import Arrangement, arrangement
from onnxfuse.operators import is_contraction, lowering_of
from onnxfuse.operators.classes import is_undone, moves_innermost, undoes
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import KIB, Profile
from onnxfuse.planning.costs.placement import Kind, Placement
from onnxfuse.planning.costs.traffic import chosen_variant
from onnxfuse.planning.legality import check_nodes
from onnxfuse.provider.layouts import is_converted
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules.kernel import USER, Kernel
from onnxfuse.wording import option

MOST_OPERANDS = 128
"""Tensors that one node of a region reads, or writes: each neighbour that is tried costs a look at all of them."""


@dataclass(frozen=True)
class Facts:
    """A node that can be fused; ``rows`` is how its reductions arrange elements, ``view`` whether it costs nothing on
    its own, ``transposes`` whether it moves the innermost axis, so that only tiled and transposed kernels run it
    well, ``contracts`` whether it is a product, which only regions of their own kind hold (``contractions``),
    ``maxima`` whether it takes maxima of rows, as a softmax does, ``leaves`` whether it is a transpose that others take
    back, and ``returns`` whether it takes one back: between them a value lies another way (``folding.layouts``)."""

    rows: Arrangement | None
    view: bool
    transposes: bool = False
    contracts: bool = False
    maxima: bool = False
    leaves: bool = False
    returns: bool = False


def node_facts(node: Node, graph: Graph, placement: Placement, lowerings: Lowerings) -> Facts | Refusal:
    """Facts of a node of the canonical view, or why no region can hold it."""
    if lowering_of(node) is None:
        return Refusal("no-lowering", f"{node.qualified_op} has no lowering", node.label)
    if len(node.inputs) > MOST_OPERANDS or len(node.outputs) > MOST_OPERANDS:
        count = max(len(node.inputs), len(node.outputs))
        return Refusal(
            "operands", f"{node.qualified_op} reads or writes {count:,} tensors, and a region's nodes no more than "
            f"{MOST_OPERANDS}", node.label)
    kind = placement.kinds[node]
    # Of weights too the first half alone is done when the model is loaded, where a region holds the other.
    if kind in (Kind.HOST, Kind.FOLDED) and undoes(node) is None:
        return Refusal("on-host", f"{node.qualified_op} runs on the CPU, or once when the model is loaded", node.label)
    refusal = check_nodes([node], graph.opset)
    if refusal is not None:
        return refusal
    outputs = [value for value in node.outputs if value is not None and (value.consumers or value.is_output)]
    unstated = next((value for value in outputs if value.is_output and value.declared is None), None)
    if unstated is not None and graph.owner is not None and graph.owner.op == "Scan":
        # ONNX Runtime knows the shape of a fused node's output from the file alone, and a Scan needs it beforehand.
        return Refusal(
            "scan-output", f"'{unstated.name}' is an output of a Scan's body, and the model does not state its shape",
            node.label, remedy="state the shapes of the body's outputs",
        )
    lowered = lowerings.lower([node], outputs, graph)
    if isinstance(lowered, Refusal):
        return lowered
    sums = [tensor for tensor in lowered.program.tensors if isinstance(tensor, Reduce | Scan)]
    maxima = any(isinstance(tensor, Reduce) and tensor.kind.startswith("max") for tensor in sums)
    if is_contraction(node):
        return Facts(None, view=False, contracts=True, maxima=maxima)
    rows: Arrangement | None = None
    for tensor in sums:
        # The program speaks of sizes by names of its own; nodes are compared by the graph's.
        found = arrangement(tensor.operand.shape, tensor.axes).substitute(lowered.binding.names)
        if rows is not None and rows != found:
            return Refusal("reduction-structure", f"{node.qualified_op} reduces over different rows", node.label)
        rows = found
    leaves, returns = is_undone(node), undoes(node) is not None
    moves = moves_innermost(node) and not leaves and not returns  # between them nothing is moved
    return Facts(rows, kind is Kind.VIEW, moves, maxima=maxima, leaves=leaves, returns=returns)


def beside_convolutions(graph: Graph, facts: Mapping[Node, Facts]) -> list[tuple[Refusal, Node]]:
    """Nodes that could be fused but that the runtime moves layout conversions through, and why they are left.

    These are the pointwise nodes that a convolution or pooling feeds or that feed one, and so on from those.
    """
    found: dict[Node, Node] = {}
    waiting = deque((node, node) for node in graph.nodes if is_converted(node))
    while waiting:
        node, source = waiting.popleft()
        values: list[Value] = [value for value in (*node.reads(), *node.outputs) if value is not None]
        for value in values:
            if value.is_constant or (value.rank is not None and value.rank < 3):
                continue
            for other in ([value.producer] if value.producer is not None else []) + value.consumers:
                known = facts.get(other)
                if known is not None and known.rows is None and not known.view and other not in found:
                    found[other] = source
                    waiting.append((other, source))
    return [
        (
            Refusal(
                "channels-last",
                f"{node.qualified_op} lies beside {source.label} ({source.op}): with prefer_nhwc=1 the runtime moves "
                "its layout conversions through it, and a fused node would stop them",
                node.label, remedy=f"plan without {option('provider-option', 'prefer_nhwc=1')}",
            ),
            node,
        )
        for node, source in sorted(found.items(), key=lambda pair: pair[0].index)
    ]


def converted(nodes: Iterable[Node]) -> list[tuple[Refusal, Node]]:
    """Those nodes that the runtime runs channels-last itself, and why they are left to it."""
    return [
        (Refusal(
            "channels-last", f"{node.qualified_op} runs channels-last with prefer_nhwc=1, and beside a fused node the "
            "runtime would lay out its image anew", node.label,
            remedy=f"plan without {option('provider-option', 'prefer_nhwc=1')}"), node)
        for node in nodes if is_converted(node)]


def operators(members: Collection[Node], facts: Mapping[Node, Facts]) -> int:
    """Operators that a region's kernel computes: nodes of the canonical view, those that only view memory left out."""
    return sum(not facts[node].view for node in members)


def limited(members: Collection[Node], facts: Mapping[Node, Facts]) -> int:
    """Those of them that a profile's limit counts: what lays a value another way between regions moves nothing."""
    return sum(not (facts[node].view or facts[node].returns or facts[node].leaves) for node in members)


def too_many(count: int, profile: Profile, node: str, rule: str) -> Refusal | None:
    """A refusal where a region has more operators than the profile takes."""
    if count <= profile.limits.operators:
        return None
    return Refusal(
        "operators",
        f"{count} operators, and the profile of {profile.name} takes {profile.limits.operators} in one region",
        node, rule, "its best parts are fused; raise limits.operators in a profile of your own to join them",
    )


def efficiency(region: Region, costs: CostModel) -> float:
    """Share of the roofline that a region's kernel is predicted to reach, without what every launch costs.

    The roofline is that of ``Profile.bandwidth``, the plain float32 cores, and each tensor moved once, or once by each
    launch for which rows are too long to stay on chip; a kernel that the second-level cache serves counts 1.
    """
    counted, again = costs.ledger.region(region), costs.read_again(region)
    seconds = costs.seconds(counted, again=again) - counted.kernels * costs.profile.floor_us * 1e-6
    least = max(
        (counted.bytes - counted.scratch + (again if region.steps > 1 else 0)) / costs.profile.bandwidth,
        counted.flops / (costs.profile.peaks.float32 * 1e12),
    )
    return min(1.0, least / seconds) if seconds > 0 else 1.0


def inefficient(region: Region, costs: CostModel) -> Refusal | None:
    """A refusal where a region's kernel is predicted to reach less of the roofline than the profile asks for."""
    share, least = efficiency(region, costs), costs.profile.limits.efficiency
    if share >= least:
        return None
    return Refusal(
        "efficiency",
        f"its kernel is predicted to reach {share:.2f} of the roofline, and the profile of {costs.profile.name} "
        f"asks for {least:g}",
        region.label, region.rule, "lower limits.efficiency in a profile of your own",
    )


def too_large(region: Region, costs: CostModel) -> Refusal | None:
    """A refusal where a region's kernel asks, at the planned sizes, for more shared memory than a block may plan with.
    """
    profile = costs.profile
    shapes = shapes_of(region.tensors, costs.ledger.sizes)
    if shapes is None:
        return None
    variant, evaluate = chosen_variant(region.kernel.plan, shapes, profile.sm, profile.multiprocessors)
    asked = max((evaluate(step.shared) or 0 for step in variant.launches), default=0)
    if asked <= profile.on_chip_bytes:
        return None
    return Refusal(
        "on-chip",
        f"a block of its kernel asks for {asked / KIB:.0f} KiB on chip, and the profile of {profile.name} "
        f"has {profile.on_chip_bytes / KIB:.0f}",
        region.label, region.rule,
    )


def within_chip(kernel: Kernel, shapes: Sequence[tuple[int, ...]], profile: Profile) -> Kernel:
    """A schedule's kernel without the variants that ask, for inputs of these shapes, for more shared memory than a
    block may plan with: the last one, which runs anything, asks for none.  A rule's kernel is as it is."""
    _, evaluate = chosen_variant(kernel.plan, shapes, profile.sm, profile.multiprocessors)
    most = profile.on_chip_bytes
    fitting = tuple(each for each in kernel.plan.variants
                    if all((evaluate(step.shared) or 0) <= most for step in each.launches))
    if kernel.schedule == USER or len(fitting) == len(kernel.plan.variants):
        return kernel
    return replace(kernel, plan=replace(kernel.plan, variants=fitting))
