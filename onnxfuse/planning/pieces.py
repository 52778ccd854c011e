"""Regions that may be joined, and what several of them read and write together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxfuse.graph.model import Node
from onnxfuse.lowering.launch import HOST_INPUTS
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.shares import Share, exchanged
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules import sharing
from onnxfuse.schedules.together import Part

MOST_POINTERS = 48
"""Tensors that one kernel reads and writes."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A region that may be joined with others.

    Attributes:
        fusion: it, with its kernel.
        members: its nodes of the view, those that other regions compute too left out (``legality.apart``).
        chosen: whether the plan has it; else its nodes run as the runtime runs them.
        planned: variant of its kernel that runs at the planned sizes; blocks: how many that launches.
        pieces: the regions it was joined of; none where the plan, or the runtime, has it.
    """

    fusion: Region
    members: frozenset[Node]
    chosen: bool
    planned: int
    blocks: int
    pieces: tuple[Piece, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted time of its nodes without the join at hand."""
        cost = self.fusion.cost
        return cost.seconds_after if self.chosen or self.pieces else cost.seconds_before

    @property
    def saved(self) -> float:
        """Seconds that are saved with its nodes without the join at hand."""
        return self.fusion.cost.seconds_saved if self.chosen or self.pieces else 0.0

    @property
    def first(self) -> int:
        """Position of its first node."""
        return self.fusion.view[0].index

    @property
    def leaves(self) -> tuple[Piece, ...]:
        """Regions that are joined of no others."""
        return tuple(leaf for piece in self.pieces for leaf in piece.leaves) or (self,)

    @property
    def reason(self) -> str:
        """Why a join was made."""
        alone = sum(leaf.seconds for leaf in self.leaves)
        return (
            f"{len(self.leaves)} independent regions as one kernel are predicted to take "
            f"{self.fusion.cost.seconds_after * 1e6:.1f} µs; apart, {alone * 1e6:.1f} µs."
        )


def piece_of(
    fusion: Region, costs: CostModel, *, chosen: bool, pieces: tuple[Piece, ...] = (),
    members: frozenset[Node] | None = None,
) -> Piece | None:
    """A region whose kernel can share a launch at the planned sizes; None for others.

    Args: as ``Piece`` has them; all nodes of the region where ``members`` is None.
    """
    kernel = fusion.kernel
    places = sharing(kernel) if fusion.cost.executions else ()
    situation = costs.situation(fusion) if places else None
    if situation is None:
        return None
    planned = situation.place(kernel.plan)
    if planned not in places:
        return None
    blocks = situation.evaluate(kernel.plan.variants[planned].launches[0].grid[0])
    members = frozenset(fusion.view) if members is None else members
    return Piece(fusion, members, chosen, planned, blocks, pieces) if blocks else None


def may_be_one(whole: Region) -> bool:
    """Whether what several regions read and write together is no more than one node can, and no value of it is needed
    in device memory and elsewhere too."""
    return (
        len(whole.hosts) <= HOST_INPUTS and len(whole.tensors) + len(whole.outputs) <= MOST_POINTERS
        and set(whole.tensors).isdisjoint((*whole.hosts, *whole.inlined))
    )


def parts_of(whole: Region, pieces: Sequence[Piece]) -> list[Part]:
    """Where the kernel of each piece finds its own among what the whole reads and writes."""
    read, asked, written = (
        {value: number for number, value in enumerate(values)} for values in (whole.tensors, whole.hosts, whole.outputs)
    )
    return [
        Part(
            piece.fusion.kernel, piece.planned, tuple(read[value] for value in piece.fusion.tensors),
            tuple(asked[value] for value in piece.fusion.hosts),
            tuple(written[value] for value in piece.fusion.outputs),
        )
        for piece in pieces
    ]


def regions(own: Sequence[Region], joins: Sequence[Piece]) -> list[Region]:
    """Regions as the ledger counts them, with joins in place of what they were made of."""
    inside = {leaf.fusion.view for join in joins for leaf in join.leaves}
    return [*(fusion for fusion in own if fusion.view not in inside), *(join.fusion for join in joins)]


def with_joins(share: Share, joins: Sequence[Piece]) -> Share:
    """A graph's share of a plan with joins in place of the regions that they were made of."""
    went = {
        leaf.fusion.view: (join.fusion, f"It is part of the region of {join.fusion.label}. {join.reason}")
        for join in joins for leaf in join.leaves
    }
    return exchanged(share, regions(share.fusions, joins), {join.fusion.view: join.reason for join in joins}, went)


def not_in(joins: Iterable[Piece], refusals: Sequence[Refusal]) -> list[Refusal]:
    """The refusals without those of regions that gain nothing alone and are part of a join."""
    gone = {leaf.fusion.nodes[0].label for join in joins for leaf in join.leaves if not leaf.chosen}
    return [each for each in refusals if each.code != "no-gain" or each.node not in gone]
