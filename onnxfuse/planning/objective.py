"""What a plan is to be good at: the strategy, hints about the machine's state, and the thresholds.

    strategy     takes the regions that together
    auto         save the most predicted time
    all-in-one   leave the fewest kernels: regions as large as they can be, where that is predicted to cost no time
    memory       make the fewest bytes of tensors, where that is predicted to cost no time
    dynamic      save the most predicted time and lose at no size near the planned ones; kernels get variants for them

Hints narrow that: past ``pressure_threshold`` a memory pressure admits only regions that save memory, a compute
pressure only regions predicted to gain ``pressed_gain``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Literal, get_args

from onnxfuse.refusal import Refusal
from onnxfuse.region import RegionCost

LEAST_GAIN = 1.2
"""Predicted speed-up of a region below which it is left to ONNX Runtime, where nothing was measured."""

MEASURED_SHARE = 0.25
"""Of what a predicted speed-up must pass, how much one must where the kernel and the runtime's products were measured:
only what is around the products is predicted then."""

Strategy = Literal["auto", "all-in-one", "memory", "dynamic"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

REFUSALS = frozenset({"no-gain", "memory-pressure", "compute-pressure", "slower-elsewhere"})
"""Codes of the refusals of an objective: there is a kernel, and it is not wanted."""

SPREAD = (0.25, 4.0)
"""Sizes that "dynamic" plans for beside the planned ones, as multiples of them."""


@dataclass(frozen=True)
class Hints:
    """What is known of the machine that the model will run on.

    Attributes:
        memory_pressure, compute_pressure: 0 (plenty) to 1 (none left).
        pressure_threshold: pressures past it count.
        pressed_gain: predicted speed-up that a region must pass under compute pressure.

    Raises:
        ValueError: a pressure or the threshold is not between 0 and 1, or the gain is negative.
    """

    memory_pressure: float = 0.0
    compute_pressure: float = 0.0
    pressure_threshold: float = 0.8
    pressed_gain: float = 1.5

    def __post_init__(self) -> None:
        for name in HINTS:
            value = getattr(self, name)
            most = math.inf if name == "pressed_gain" else 1.0
            if not 0 <= value <= most or math.isinf(value):
                wanted = "finite and not negative" if most > 1 else "between 0 and 1"
                raise ValueError(f"the hint {spelling(name)} must be {wanted}, not {value:g}")


HINTS = tuple(each.name for each in fields(Hints))
"""Names of the hints."""


def spelling(name: str) -> str:
    """A field's name as users write it."""
    return name.replace("_", "-")


def read_hints(given: Mapping[str, float]) -> Hints:
    """Hints by name, with dashes or underscores.

    Raises:
        ValueError: there is no such hint, or its value is out of range.
    """
    values = {name.replace("-", "_"): value for name, value in given.items()}
    for name in values:
        if name not in HINTS:
            near = get_close_matches(name, HINTS, 1)
            rest = f'did you mean "{spelling(near[0])}"?' if near else f"known: {', '.join(map(spelling, HINTS))}"
            raise ValueError(f'there is no hint "{spelling(name)}"; {rest}')
    return Hints(**values)


@dataclass(frozen=True)
class Objective:
    """What to plan for.

    Attributes:
        strategy: one of ``STRATEGIES``.
        hints: of the machine's state.
        least_gain: predicted speed-up that a region must pass; one that serves the strategies "all-in-one" or
            "memory" must only gain something.
        channels_last: whether the runtime lays out images channels-last (``layout``).
        tf32: whether the runtime rounds operands of float32 products to TF32, so that kernels may.

    Raises:
        ValueError: there is no such strategy.
    """

    strategy: str = "auto"
    hints: Hints = field(default_factory=Hints)
    least_gain: float = LEAST_GAIN
    channels_last: bool = False
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f'there is no strategy "{self.strategy}"; known: {", ".join(STRATEGIES)}')

    @property
    def spread(self) -> tuple[float, ...]:
        """Multiples of the planned sizes to plan for as well."""
        return SPREAD if self.strategy == "dynamic" else ()

    @property
    def saves_memory(self) -> bool:
        """Whether memory is what is short."""
        return self.strategy == "memory" or self.hints.memory_pressure > self.hints.pressure_threshold

    def worth(self, cost: RegionCost) -> float:
        """What taking a region is worth, in units of the strategy; 0 where nothing is gained."""
        saved = max(cost.seconds_saved, 0.0)
        if self.strategy == "all-in-one":
            return max(cost.kernels_before - cost.kernels_after, 0) + min(saved, 0.5)
        if self.strategy == "memory":
            # A second less is no byte: time only decides between equals.
            return cost.memory_saved + min(saved, 0.5)
        return saved

    def refuses(
        self, cost: RegionCost, count: int, node: str, rule: str, *, measured: bool = False
    ) -> Refusal | None:
        """Why a region of ``count`` nodes, its first one labelled ``node``, may not be taken, or None; ``measured``:
        whether most of its cost was."""
        if not cost.executions:
            return Refusal("never-ran", f"{_nodes(count)} never ran in the profile: not worth fusing", node, rule)
        hints = self.hints
        if hints.memory_pressure > hints.pressure_threshold and cost.memory_saved <= 0:
            return Refusal(
                "memory-pressure",
                f"fusing {_nodes(count)} saves no memory, and the memory pressure is {hints.memory_pressure:g} "
                f"(past {hints.pressure_threshold:g} only what saves memory is fused)",
                node, rule, "lower the hint memory-pressure, or raise pressure-threshold",
            )
        least = 1.0 + MEASURED_SHARE * (self.least_gain - 1.0) if measured else self.least_gain
        least = min(least, 1.0) if self._serves(cost) else least
        if cost.estimated_speedup <= least:
            return _no_gain(cost, count, least, node, rule)
        if hints.compute_pressure > hints.pressure_threshold and cost.estimated_speedup <= hints.pressed_gain:
            return Refusal(
                "compute-pressure",
                f"{_nodes(count)} would run {cost.estimated_speedup:.2f}x as fast, under the "
                f"{hints.pressed_gain:g}x asked for at a compute pressure of {hints.compute_pressure:g} "
                f"(past {hints.pressure_threshold:g})",
                node, rule, "lower the hint compute-pressure, or pressed-gain",
            )
        return None

    def _serves(self, cost: RegionCost) -> bool:
        """Whether a region does what the strategy is after, time aside."""
        if self.strategy == "all-in-one":
            return cost.kernels_after < cost.kernels_before
        return self.strategy == "memory" and cost.memory_saved > 0

    def refuses_elsewhere(self, costs: Mapping[str, RegionCost], node: str, rule: str) -> Refusal | None:
        """Why a region that gains at the planned sizes may not be taken for what it costs at others, by their text."""
        for sizes, cost in costs.items():
            if cost.estimated_speedup < min(self.least_gain, 1.0):
                return Refusal(
                    "slower-elsewhere",
                    f"at {sizes} it would run {cost.estimated_speedup:.2f}x as fast: "
                    f"{cost.seconds_before * 1e6:.1f} µs as the runtime runs it, "
                    f"{cost.seconds_after * 1e6:.1f} µs fused",
                    node, rule, "plan with the strategy auto, which looks at the planned sizes alone",
                )
        return None


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _no_gain(cost: RegionCost, count: int, least_gain: float, node: str, rule: str) -> Refusal:
    return Refusal(
        "no-gain",
        f"{_nodes(count)} would run {cost.estimated_speedup:.2f}x as fast, under {least_gain:g}x: "
        f"{cost.seconds_before * 1e6:.1f} µs as the runtime runs them "
        f"({cost.kernels_before} kernel{'' if cost.kernels_before == 1 else 's'}), "
        f"{cost.seconds_after * 1e6:.1f} µs fused",
        node, rule,
    )
