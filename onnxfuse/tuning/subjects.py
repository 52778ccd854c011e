"""What there is to measure in a model: its distinct regions, each with the ways to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.lowering.lower import Lowered
from onnxfuse.measurements import text_of
from onnxfuse.measuring.database import DEFAULT
from onnxfuse.pipeline import Optimised
from onnxfuse.planning.candidates import Fusion, Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.identity import Identities, Identity
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Kernel, Request, make_kernel
from onnxfuse.schedules.together import SCHEDULE as TOGETHER


@dataclass(frozen=True)
class Subject:
    """A region at sizes, wherever in the model it occurs.

    Attributes:
        what: its key in the database.
        fusion: the first region that is it; count: how many are.
        lowered: its tensors, which kernels are made of.
    """

    what: Identity
    fusion: Fusion
    count: int
    lowered: Lowered

    @property
    def shapes(self) -> str:
        """The region's shapes as the database writes them."""
        return text_of(self.what)

    @property
    def label(self) -> str:
        """Its first node."""
        return self.fusion.nodes[0].label

    def kernels(self, sizes: Mapping[str, int]) -> dict[str, Kernel]:
        """Its kernels by candidate, the schedule's own choice (``DEFAULT``) first."""
        own = self.fusion.kernel
        found = {DEFAULT: own}
        for choice in own.choices:
            made = make_kernel(Request(self.lowered, self.fusion.rule, sizes, choice), own.schedule)
            if isinstance(made, Kernel) and made.choice == choice:
                found[str(choice)] = made
        return found


def subjects_of(optimised: Optimised) -> tuple[list[Subject], list[Refusal]]:
    """The distinct regions of a plan, those that take longest first, and why others cannot be measured."""
    costs = CostModel(optimised.ledger, optimised.profile)
    makers = Context(optimised.canonical.graph, optimised.rules, costs).makers
    identities = Identities(optimised.graph, optimised.ledger.sizes)
    found: dict[Identity, list[tuple[Fusion, Lowered]]] = {}
    refusals = []
    for fusion in optimised.plan.fusions:
        keyed = _keyed(fusion, makers[fusion.nodes[0].place], identities)
        if isinstance(keyed, Refusal):
            refusals.append(keyed)
        else:
            found.setdefault(keyed[0], []).append((fusion, keyed[1]))
    subjects = [Subject(what, same[0][0], len(same), same[0][1]) for what, same in found.items()]
    subjects.sort(key=lambda subject: -subject.count * subject.fusion.cost.seconds_before)
    return subjects, refusals


def distinct(plans: Sequence[Optimised]) -> tuple[list[Subject], list[Refusal]]:
    """The distinct regions of several plans of one model, and why others cannot be measured; see ``subjects_of``."""
    found = [subjects_of(plan) for plan in plans]
    subjects = list({subject.what: subject for each, _ in reversed(found) for subject in each}.values())
    subjects.sort(key=lambda subject: -subject.count * subject.fusion.cost.seconds_before)
    return subjects, list(dict.fromkeys(refusal for _, refusals in found for refusal in refusals))


def _keyed(fusion: Fusion, maker: Maker, identities: Identities) -> tuple[Identity, Lowered] | Refusal:
    label, schedule = fusion.nodes[0].label, fusion.kernel.schedule
    if schedule == TOGETHER:
        return Refusal("joined", "several regions in one launch; they are measured apart", label, fusion.rule)
    if schedule not in SCHEDULES:
        return Refusal("user-kernel", "a kernel of the user's own is not weighed", label, fusion.rule)
    lowered = maker.tensors_of(fusion)
    if isinstance(lowered, Refusal):
        return lowered
    sizes = identities.sizes
    what = identities.of(fusion, lowered, schedule)
    if what is None:
        return Refusal("unknown-size", "a size is not known before a run", label, fusion.rule)
    for value in fusion.hosts:
        if value.elements is None or any(not size.symbols <= sizes.keys() for size in value.elements):
            return Refusal("unknown-operand", f"what '{value.name}' holds is not known before a run", label,
                           fusion.rule)
    return what, lowered
