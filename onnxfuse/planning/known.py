"""What is known of regions by their structure alone: equal ones have equal kernels, whichever form of a model they
stand in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, Request


@dataclass
class KnownKernels:
    """Kept as long as one model is planned, in whatever forms and with whatever stages.

    Attributes:
        made: by what was asked and for which rule, by a schedule's name, its kernel, or None where it has none.
        digests: by structure and schedule, of kernels with no sizes planned for (``identity``).
        transposing: by what was asked, why a region that moves the innermost axis is not read well (``grow``).
        found: by what was asked, what schedules found for it (``Request.once``).
    """

    made: dict[Hashable, dict[str, Kernel | None]] = field(default_factory=dict)
    digests: dict[Hashable, str | None] = field(default_factory=dict)
    transposing: dict[Hashable, Refusal | None] = field(default_factory=dict)
    found: dict[Hashable, dict[object, object]] = field(default_factory=dict)

    def shared(self, request: Request) -> Request:
        """The request, for which schedules know what they found for equal ones."""
        return replace(request, _found=self.found.setdefault(asked_for(request), {}))


def asked_for(request: Request) -> Hashable:
    """A key that requests share to which every schedule has the same answer, but for the rule that kernels name."""
    return request.lowered.structure, request.choice, _plain(request.sizes), tuple(map(_plain, request.nearby))


def _plain(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))
