"""What a hardware profile lets a region be: how many operators, how efficient, how much on chip."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import Sizes, shape_of
from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.facts import Facts
from onnxfuse.planning.hardware import KIB, Profile
from onnxfuse.planning.traffic import Fused, chosen_variant
from onnxfuse.refusal import Refusal


def operators(members: Collection[Node], facts: Mapping[Node, Facts]) -> int:
    """Operators that a region's kernel computes: nodes of the canonical view, those that only view memory left out."""
    return sum(not facts[node].view for node in members)


def too_many(count: int, profile: Profile, node: str, rule: str) -> Refusal | None:
    """A refusal where a region has more operators than the profile takes."""
    if count <= profile.limits.operators:
        return None
    return Refusal(
        "operators",
        f"{count} operators, and the profile of {profile.name} takes {profile.limits.operators} in one region",
        node, rule, "its best parts are fused; raise limits.operators in a profile of your own to join them",
    )


def efficiency(fused: Fused, costs: CostModel) -> float:
    """Share of the roofline that a region's kernel is predicted to reach, without what every launch costs.

    The roofline is that of ``Profile.bandwidth``, the plain float32 cores, and each tensor moved once; a kernel that
    the second-level cache serves counts 1.
    """
    counted = costs.ledger.region(fused.nodes, fused.inputs, fused.outputs, fused.kernels, fused.scratch)
    seconds = costs.seconds(counted, again=costs.read_again(fused)) - counted.kernels * costs.profile.floor_us * 1e-6
    least = max(
        (counted.bytes - counted.scratch) / costs.profile.bandwidth,
        counted.flops / (costs.profile.peaks.float32 * 1e12),
    )
    return min(1.0, least / seconds) if seconds > 0 else 1.0


def inefficient(fused: Fused, costs: CostModel, node: str, rule: str) -> Refusal | None:
    """A refusal where a region's kernel is predicted to reach less of the roofline than the profile asks for."""
    share, least = efficiency(fused, costs), costs.profile.limits.efficiency
    if share >= least:
        return None
    return Refusal(
        "efficiency",
        f"its kernel is predicted to reach {share:.2f} of the roofline, and the profile of {costs.profile.name} "
        f"asks for {least:g}",
        node, rule, "lower limits.efficiency in a profile of your own",
    )


def too_large(
    plan: LaunchPlan, tensors: Sequence[Value], sizes: Sizes, profile: Profile, node: str, rule: str
) -> Refusal | None:
    """A refusal where a kernel asks, at the planned sizes, for more shared memory than a block may plan with."""
    shapes = [shape for value in tensors if (shape := shape_of(value, sizes)) is not None]
    if len(shapes) < len(tensors):
        return None
    variant, evaluate = chosen_variant(plan, shapes, profile.sm, profile.multiprocessors)
    asked = max((evaluate(step.shared) or 0 for step in variant.steps), default=0)
    if asked <= profile.on_chip_bytes:
        return None
    return Refusal(
        "on-chip",
        f"a block of its kernel asks for {asked / KIB:.0f} KiB on chip, and the profile of {profile.name} "
        f"has {profile.on_chip_bytes / KIB:.0f}",
        node, rule,
    )
