"""Constants of the cost model that fit measured kernels: ``predictions.py --fit``.

The model is the planner's own (``onnxfuse.planning.costs.cost.kernel_time``): a floor, and bytes over the bandwidth
that a schedule reaches, with a second-level cache some times faster.  The constants minimise the squared logarithms of
predicted over measured, far-off kernels at less weight (Levenberg-Marquardt, weights of Cauchy; Holland and Welsch,
"Robust regression using iteratively reweighted least-squares", 1977).  A kernel counts as often as nodes run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import table
from numpy.typing import NDArray

from onnxfuse.planning.costs import cost
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.schedules import SCHEDULES

Vector = NDArray[np.float64]

STEPS = 60
SCALE = 0.25
"""Distance (of logarithms) from which on a kernel counts less."""

NEAR = 0.25
"""Largest distance of a prediction from the measured time, as a share of that, that counts as right."""

LEAST = {"floor_us": 0.2, "l2_gain": 1.0, "efficiency": 0.02}
MOST = {"floor_us": 20.0, "l2_gain": 12.0, "efficiency": 1.5}


def seconds(region: Any, profile: Profile, efficiency: float, floor_us: float | None = None) -> float:
    """Predicted time of a region, as ``CostModel.seconds`` has it, with these constants."""
    floor = profile.floor_us if floor_us is None else floor_us
    if region.schedule in SCHEDULES and not SCHEDULES[region.schedule].cached:
        efficiency *= cost.uncached(region.reads + region.writes, profile)
    first = cost.kernel_time(region.reads, region.writes, region.flops, profile, efficiency=efficiency)
    more: float = ((region.kernels - 1) * floor + floor - profile.floor_us) * 1e-6
    return first + more + float(region.scratch / profile.bandwidth)


def planned_efficiency(schedule: str) -> float:
    """The share of the bandwidth that the planner takes a schedule to reach: of the device memory's where it moves
    the innermost axis."""
    return SCHEDULES[schedule].efficiency if schedule in SCHEDULES else cost.STREAMING


def fit(regions: Sequence[Any], measured: Vector, weights: Vector, profile: Profile,
        floors: bool = False) -> tuple[dict[str, float], Vector]:
    """Constants by name, and the regions' predicted microseconds with them.

    Args:
        measured: microseconds; weights: how often a region counts.
        floors: whether each schedule has a floor of its own.
    """
    schedules = sorted({region.schedule for region in regions})
    names = [f"floor_us {schedule}" for schedule in schedules] if floors else ["floor_us"]
    names += ["l2_gain", *(f"efficiency {schedule}" for schedule in schedules)]
    start = [profile.floor_us] * (len(schedules) if floors else 1) + [profile.l2_gain]
    start += [planned_efficiency(schedule) for schedule in schedules]
    low, high = (np.log([limits[name.split()[0]] for name in names]) for limits in (LEAST, MOST))

    def predicted(logs: Vector) -> Vector:
        values = dict(zip(names, np.exp(logs), strict=True))
        changed = profile.model_copy(update={"l2_gain": float(values["l2_gain"]),
                                             "floor_us": float(values.get("floor_us", profile.floor_us))})
        return np.array([
            1e6 * seconds(region, changed, float(values[f"efficiency {region.schedule}"]),
                          float(values[f"floor_us {region.schedule}"]) if floors else None) for region in regions])

    logs = minimise(lambda logs: np.log(predicted(logs) / measured), np.clip(np.log(start), low, high), weights, low,
                    high)
    return dict(zip(names, map(float, np.exp(logs)), strict=True)), predicted(logs)


def minimise(residuals: Callable[[Vector], Vector], start: Vector, weights: Vector, low: Vector,
             high: Vector) -> Vector:
    """Where the weighted sum of log(1 + (r / SCALE)²) is least, near ``start`` and between ``low`` and ``high``."""

    def loss(r: Vector) -> float:
        return float(weights @ np.log1p((r / SCALE) ** 2))

    at, damping = start, 1e-2
    r = residuals(at)
    for _ in range(STEPS):
        slope = np.stack([(residuals(at + 1e-4 * unit) - r) / 1e-4 for unit in np.eye(len(at))], axis=1)
        weight = weights / (1 + (r / SCALE) ** 2)
        normal, gradient = slope.T @ (weight[:, None] * slope), slope.T @ (weight * r)
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            there = np.clip(at + np.clip(step, -0.5, 0.5), low, high)
            tried = residuals(there)
            if loss(tried) < loss(r):
                break
            damping *= 4
        else:
            break
        gained = loss(r) - loss(tried)
        at, r, damping = there, tried, damping / 4
        if gained < 1e-7 * loss(r):
            break
    return at


def fit_text(compared: Sequence[Any], target: str) -> str:
    """What the constants should be, as Markdown.

    Args:
        compared: ``predictions.Compared``; target: the profile whose constants are looked at.
    """
    told = [one for one in compared if one.measured]
    if not told:
        return "## Fit\n\nNothing was measured."
    groups = Counter((one.row, one.region.launches, one.region.bytes) for one in told)
    distinct = {(one.row, one.region.launches, one.region.bytes): one for one in told}
    regions = [one.region for one in distinct.values()]
    measured = np.array([one.measured for one in distinct.values()])
    weights = np.array([groups[key] for key in distinct], np.float64)
    profile = resolve_profile(target)
    now = np.array([region.predicted for region in regions])

    def near(predicted: Vector) -> str:
        return f"{np.average(np.abs(predicted / measured - 1) <= NEAR, weights=weights):.1%}"

    plain, fitted = fit(regions, measured, weights, profile)
    own, fitted_own = fit(regions, measured, weights, profile, floors=True)
    lines = [["within 25%", near(now), near(fitted), near(fitted_own)]]
    for name in dict.fromkeys((*plain, *own)):
        what, _, schedule = name.partition(" ")
        planned = planned_efficiency(schedule) if what == "efficiency" else getattr(profile, what)
        lines.append([name, f"{planned:.3g}", *(f"{found[name]:.3g}" if name in found else "-"
                                                for found in (plain, own))])
    parts = [f"## Fit for {profile.name}", "",
             table(["constant", "now", "one floor", "a floor for each schedule"], lines)]
    same = np.array([1e6 * seconds(region, profile, planned_efficiency(region.schedule)) for region in regions])
    other = int(np.sum(np.abs(same / now - 1) > 0.01))
    if other:
        parts += ["", f"The planner predicts {other} of {len(regions)} distinct kernels otherwise than this fit does: "
                  "it has constants that are not fitted here, or these were measured with others."]
    return "\n".join(parts)
