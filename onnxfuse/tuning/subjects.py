"""What there is to measure in a model: its distinct regions, each with the ways to run it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from onnxfuse.measurements import text_of
from onnxfuse.measuring.database import DEFAULT
from onnxfuse.optimised import Optimised
from onnxfuse.planning.identity import Identities, Identity
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.plan import Plan
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, decides_sizes
from onnxfuse.schedules import USER, Choice, Kernel, make_kernel
from onnxfuse.schedules.together import SCHEDULE as TOGETHER


@dataclass(frozen=True)
class Subject:
    """A region at sizes, wherever in the model it occurs.

    Attributes:
        what: its key in the database.
        fusion: the first region that is it; count: how many are; source: the plan that has it.
        labels: of the nodes of all of them.
    """

    what: Identity
    fusion: Region
    count: int
    source: Optimised = field(repr=False, compare=False)
    labels: frozenset[str] = frozenset()

    @cached_property
    def shapes(self) -> str:
        """The region's shapes as the database writes them."""
        return text_of(self.what)

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What the database keeps measurements of its kernel, and of its nodes, under."""
        return (self.what.kernel, self.shapes), (self.what.nodes, self.shapes)

    @property
    def seconds(self) -> float:
        """What the nodes of all of them are predicted to take."""
        return self.count * self.fusion.cost.seconds_before

    @property
    def label(self) -> str:
        """Its first node."""
        return self.fusion.nodes[0].label

    @cached_property
    def candidates(self) -> dict[str, Choice | None]:
        """Ways to run it, the schedule's own choice (``DEFAULT``) first."""
        return {DEFAULT: None, **{str(choice): choice for choice in self.fusion.kernel.choices}}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the plan's symbols."""
        return self.source.ledger.sizes

    def kernel(self, candidate: str) -> Kernel | None:
        """Its kernel of a candidate; None where there is none after all."""
        own, choice = self.fusion.kernel, self.candidates[candidate]
        if choice is None:
            return own
        made = make_kernel(self.fusion.request(self.sizes, choice), own.schedule)
        return made if isinstance(made, Kernel) and made.choice == choice else None

    @property
    def kernels(self) -> dict[str, Kernel]:
        """Its kernels by candidate."""
        made = {name: self.kernel(name) for name in self.candidates}
        return {name: kernel for name, kernel in made.items() if kernel is not None}


def labels_of(region: Region) -> frozenset[str]:
    """Labels of a region's nodes."""
    return frozenset(node.label for node in region.nodes if node.op != "Constant")


def subjects_of(optimised: Optimised, kernels: KnownKernels | None = None) -> tuple[list[Subject], list[Refusal]]:
    """The distinct regions of a plan, those that take longest first, and why others cannot be measured.

    ``kernels``: what is known of them already.
    """
    identities = Identities(optimised.graph, optimised.ledger.sizes, kernels or KnownKernels())
    found: dict[Identity, list[Region]] = {}
    refusals = []
    for fusion in optimised.plan.fusions:
        what = _identity(fusion, identities)
        if isinstance(what, Refusal):
            refusals.append(what)
        else:
            found.setdefault(what, []).append(fusion)
    found |= _beside(optimised.plan, identities, found)
    subjects = [Subject(what, same[0], len(same), optimised, frozenset().union(*map(labels_of, same)))
                for what, same in found.items()]
    subjects.sort(key=lambda subject: -subject.seconds)
    return subjects, refusals


def _beside(plan: Plan, identities: Identities, known: Container[Identity]) -> dict[Identity, list[Region]]:
    """Regions that measurements are to decide on, those that the plan has left out."""
    found: dict[Identity, list[Region]] = {}
    for region in plan.beside:
        what = _identity(region, identities)
        if not isinstance(what, Refusal) and what not in known:
            found.setdefault(what, []).append(region)
    return found


def distinct(
    plans: Sequence[Optimised], kernels: KnownKernels | None = None
) -> tuple[list[Subject], list[Refusal]]:
    """The distinct regions of several plans of one model, and why others cannot be measured; see ``subjects_of``."""
    found = [subjects_of(plan, kernels) for plan in plans]
    subjects = list({subject.what: subject for each, _ in reversed(found) for subject in each}.values())
    subjects.sort(key=lambda subject: -subject.seconds)
    return subjects, list(dict.fromkeys(refusal for _, refusals in found for refusal in refusals))


def _identity(fusion: Region, identities: Identities) -> Identity | Refusal:
    label, schedule = fusion.nodes[0].label, fusion.kernel.schedule
    if schedule == TOGETHER:
        return Refusal("joined", "several regions in one launch; they are measured apart", label, fusion.rule)
    if schedule == USER:
        return Refusal("user-kernel", "a kernel of the user's own is not weighed", label, fusion.rule)
    what = identities.of(fusion)
    if what is None:
        return Refusal("unknown-size", "a size is not known before a run", label, fusion.rule)
    for value in filter(decides_sizes, fusion.hosts):
        if value.elements is None or any(not size.symbols <= identities.sizes.keys() for size in value.elements):
            return Refusal("unknown-operand", f"what '{value.name}' holds is not known before a run", label,
                           fusion.rule)
    return what
