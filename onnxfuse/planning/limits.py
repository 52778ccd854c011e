"""What a hardware profile lets a region be: how many operators, how efficient, how much on chip."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import shape_of
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.facts import Facts
from onnxfuse.planning.hardware import KIB, Profile
from onnxfuse.planning.region import Region
from onnxfuse.planning.traffic import chosen_variant
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


def efficiency(region: Region, costs: CostModel) -> float:
    """Share of the roofline that a region's kernel is predicted to reach, without what every launch costs.

    The roofline is that of ``Profile.bandwidth``, the plain float32 cores, and each tensor moved once; a kernel that
    the second-level cache serves counts 1.
    """
    counted = costs.ledger.region(region)
    seconds = costs.seconds(counted, again=costs.read_again(region)) - counted.kernels * costs.profile.floor_us * 1e-6
    least = max(
        (counted.bytes - counted.scratch) / costs.profile.bandwidth,
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
    shapes = [shape for value in region.tensors if (shape := shape_of(value, costs.ledger.sizes)) is not None]
    if len(shapes) < len(region.tensors):
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
