"""What is known of regions by their structure alone: equal ones have equal kernels, whichever form of a model they
stand in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from onnxfuse.lowering.structure import structure
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, Request


@dataclass
class KnownKernels:
    """Kept as long as one model is planned.

    Attributes:
        made: by what was asked (``asked_for``) and a schedule's name, its kernel, or None where it has none.
        digests: by structure and schedule, of kernels with no sizes planned for (``identity``).
        transposing: by what was asked, why a region that moves the innermost axis is not read well (``grow``).
    """

    made: dict[Hashable, Kernel | None] = field(default_factory=dict)
    digests: dict[Hashable, str | None] = field(default_factory=dict)
    transposing: dict[Hashable, Refusal | None] = field(default_factory=dict)


def asked_for(request: Request) -> Hashable:
    """A key that requests share to which every schedule has the same answer."""
    nearby = tuple(map(_plain, request.nearby))
    return structure(request.lowered), request.rule, request.choice, _plain(request.sizes), nearby


def _plain(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))
