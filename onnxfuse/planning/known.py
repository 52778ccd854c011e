"""What is known of regions by their structure alone: equal ones have equal kernels, whichever form of a model they
stand in.  All that planning has schedules make of regions is made here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from onnxfuse.lowering.alike import Lowerings
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Expected, Kernel, Request, Schedule, asked, family, first_answer


@dataclass(frozen=True)
class Asked:
    """A request to schedules.

    Attributes:
        made: by a schedule's name, what it made of an equal one; None where it has no kernel.
    """

    request: Request
    made: dict[str, Kernel | None]

    def of(self, schedule: Schedule) -> Kernel | Refusal | None:
        """What a schedule makes of it.  Refusals are not kept: they name values of one graph."""
        if schedule.name not in self.made:
            found = asked(schedule, self.request)
            if isinstance(found, Refusal):
                return found
            self.made[schedule.name] = found
        return self.made[schedule.name]

    def kernel(self, schedule: str) -> Kernel | Refusal:
        """What the schedule of that name, or one that stands in for it, makes of it."""
        return first_answer(map(self.of, family(schedule)))


@dataclass
class KnownKernels:
    """Kept as long as one model is planned, in whatever forms and with whatever stages.

    Attributes:
        made: by what was asked and for which rule, by a schedule's name, its kernel, or None where it has none.
        digests: by structure and schedule, of kernels with no sizes planned for (``identity``).
        transposing: by what was asked, why a region that moves the innermost axis is not read well (``grow``).
        expecting: by what was asked and the processors there are, the first schedule that expects to have a kernel.
        found: by what was asked, what schedules found for it (``Request.once``).
        lowerings: what regions are as tensors.
    """

    made: dict[Hashable, dict[str, Kernel | None]] = field(default_factory=dict)
    digests: dict[Hashable, str | None] = field(default_factory=dict)
    transposing: dict[Hashable, Refusal | None] = field(default_factory=dict)
    expecting: dict[Hashable, Schedule | None] = field(default_factory=dict)
    found: dict[Hashable, dict[object, object]] = field(default_factory=dict)
    lowerings: Lowerings = field(default_factory=Lowerings)

    def ask(self, request: Request) -> Asked:
        """A request to schedules, with what is known of equal ones."""
        return Asked(self.shared(request), self.made.setdefault((asked_for(request), request.rule), {}))

    def expected(self, request: Request, multiprocessors: int) -> Expected | None:
        """What the first schedule that will have a kernel for a request expects of it; None where none will.  Which one
        that is, equal requests share; what it says speaks of their graphs."""
        key = asked_for(request), multiprocessors
        if key not in self.expecting:
            told = ((each, each.expected(request.lowered, request.sizes, multiprocessors))
                    for each in SCHEDULES.values())
            self.expecting[key], found = next((each for each in told if each[1] is not None), (None, None))
            return found
        first = self.expecting[key]
        return None if first is None else first.expected(request.lowered, request.sizes, multiprocessors)

    def shared(self, request: Request) -> Request:
        """The request, for which schedules know what they found for equal ones."""
        return replace(request, _found=self.found.setdefault(asked_for(request), {}))


def asked_for(request: Request) -> Hashable:
    """A key that requests share to which every schedule has the same answer, but for the rule that kernels name."""
    return request.lowered.structure, request.choice, _plain(request.sizes), tuple(map(_plain, request.nearby))


def _plain(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))
