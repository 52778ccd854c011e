"""What a schedule is: for which regions it has kernels, what these are expected to cost, and the ways to run them.

The planner walks the registered schedules (``schedules.SCHEDULES``) in their order: the first that answers has the
region.  A schedule that has no kernel for a kind of region answers None; a refusal is an answer.  What differs from
schedule to schedule is asked of it, and nobody goes by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from types import MappingProxyType
from typing import ClassVar, TypeVar

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.source import Given, Source

Found = TypeVar("Found")


class Does(Flag):
    """What nodes do that makes kernels differ."""

    REDUCES = auto()
    SCANS = auto()
    TRANSPOSES = auto()
    """They move the innermost axis."""
    CONTRACTS = auto()
    SLIDES = auto()
    """They sum up windows of each channel by itself: a depthwise convolution."""
    POOLS = auto()
    """They take the maximum, or the mean, of windows."""


@dataclass(frozen=True, eq=False)
class Request:
    """A region to make a kernel of.

    Attributes:
        lowered: the region; rule: id for the plan and the text's comment.
        sizes: what symbols are planned to be: a variant made for them comes first, others follow.
        choice: what the first variant is to be, in place of the schedule's own choice, where the region admits it.
        nearby: further sizes to make variants for, where the best way depends on the sizes.
    """

    lowered: Lowered
    rule: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    choice: Choice | None = None
    nearby: Sequence[Mapping[str, int]] = ()
    _found: dict[object, object] = field(default_factory=dict, repr=False)

    def once(self, find: Callable[[Request], Found]) -> Found:
        """What ``find`` finds for this request; schedules that are asked one after the other share it."""
        if find not in self._found:
            self._found[find] = find(self)
        return self._found[find]  # type: ignore[return-value]


@dataclass(frozen=True)
class Expected:
    """What a region's kernel will take, before it is made: kernels to launch, and bytes, over the graph's symbols, that
    are read more than once; ``apart``: whether windows have launches of their own, whatever stands beside them."""

    steps: int = 1
    read_again: Dim = field(default_factory=lambda: dim(0))
    apart: bool = False


class Schedule(ABC):
    """A way to make kernels of regions.

    Attributes:
        name: as plans and reports have it.
        family: schedules of one family stand in for one another at other sizes; "" where there is no other.
        settings: what tuning may change, in words: each setting by its name in braces.
        optional: the same of settings that only some choices have, by their names.
        each: what a thread keeps ``items`` of, where that is a setting.
        efficiency: share of the memory's bandwidth that its kernels reach, or of a large product's rate where they
            contract; ``benchmarks/predictions.py`` fits it to measured kernels.
        arithmetic: share of what the float32 cores could make, where that is what takes the time.
        waits_us: microseconds that its kernels take beyond the least that any takes.
        cached: whether the second-level cache makes them faster.
        products: the most products, or convolutions, that a region of its own holds.
        other: code of its refusals of regions that are something else altogether, "" where it has no such.
        hides: whether its kernels may leave out what a mask hides.
        tolerance: share of the largest result by which ways to run a region may differ.
    """

    name: ClassVar[str]
    family: ClassVar[str] = ""
    settings: ClassVar[str]
    optional: ClassVar[Mapping[str, str]] = MappingProxyType({})
    each: ClassVar[str] = ""
    efficiency: ClassVar[float]
    arithmetic: ClassVar[float] = 1.0
    waits_us: ClassVar[float] = 0.0
    cached: ClassVar[bool] = True
    products: ClassVar[int] = 0
    other: ClassVar[str] = ""
    hides: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.0

    @abstractmethod
    def runs(self, does: Does) -> bool:
        """Whether it is what runs nodes that do all this together: what costs are estimated by before nodes are
        lowered."""

    @abstractmethod
    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """What a region will take at these sizes on a GPU with so many multiprocessors, before its kernel is made; None
        for regions that are not this schedule's."""

    @abstractmethod
    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region, why there is none, or None where the region is not this schedule's."""

    def refuses(self, request: Request) -> Refusal | None:
        """Why a region of nodes that it runs has no kernel worth having, as far as that is known before one is made:
        nodes that are refused so stay in regions of their own.  None where nothing is against it."""
        return None

    def sharing(self, kernel: Kernel) -> tuple[int, ...]:
        """Variants of one of its kernels, by place, that may share a launch with other kernels' (``together``): those
        of one launch along one axis, without scratch memory and tensor maps.  Empty where the last one, which runs
        anything, is none; ``Kernel.heavy`` says which of them fit together."""
        if isinstance(kernel.code, Given):
            return ()
        found = tuple(place for place, variant in enumerate(kernel.plan.variants) if _is_plain(variant, kernel.code))
        return found if found and found[-1] == len(kernel.plan.variants) - 1 else ()

    def leeway(self, kernel: Kernel) -> float:
        """Share of the largest result by which one of its kernels may differ from the region's own."""
        return self.tolerance

    def words(self, choice: Choice) -> str:
        """A choice for people: "32 threads a row, width 8, 4 vectors, blocks of 128".

        Raises:
            KeyError: the choice lacks a setting.
        """
        told: dict[str, object] = dict(choice.settings)
        if "items" in told:
            items = choice["items"]
            told["items"] = _count(items, self.each) if items > 0 else "in shared memory" if items else "streaming"
        if "vectors" in told:
            told["vectors"] = _count(choice["vectors"], "vector")
        return self.template(choice).format(**told)

    def template(self, choice: Choice) -> str:
        """The words for the settings that a choice has, each by its name in braces."""
        more = (text for name, text in self.optional.items() if name in dict(choice.settings))
        return ", ".join([self.settings, *more])


def _is_plain(variant: Variant, source: Source) -> bool:
    """Whether a variant is one launch along one axis, without scratch memory and tensor maps."""
    if len(variant.steps) != 1 or not variant.launches:
        return False
    (step,) = variant.launches
    entry = source.entry(step.kernel)
    return (
        entry is not None and step == entry.step(step.grid[0], shared=step.shared) and entry.threads % 32 == 0
        and not any(argument.startswith(("t", "m")) for argument in step.arguments)
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
