"""What tuning found, as text and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from onnxfuse.reporting.text import count, escape, operator_runs, plain_table
from onnxfuse.tuning import Tuned, TunedRegion


def show(tuned: Tuned, console: Console) -> None:
    """Print the regions with their times, then what was done."""
    console.print(f"{escape(tuned.gpu)}: {count(len(tuned.regions), 'distinct region')}, "
                  f"{count(tuned.measured, 'measurement')} made, {tuned.known} in the database already")
    if tuned.regions:
        table = plain_table("times", "rule", "operators", "runtime", "default", "best", "", "best schedule",
                            left=(1, 2, 6, 7), drop=(1, 2))
        for region in tuned.regions:
            table.add_row(str(region.count), escape(region.rule), escape(operator_runs(region.operators, 40)),
                          _time(region.runtime), _time(region.default), _time(region.best), region.verdict,
                          escape(region.choice or ("the default" if region.best is not None else "")))
        console.print(table)
    for region in tuned.regions:
        for fault in region.faults:
            console.print(f"[yellow]not used:[/] {escape(region.node)}, {escape(fault)}")
        if region.reason:
            console.print(f"left to ONNX Runtime: {escape(region.node)}: {escape(region.reason)}")
    for refusal in tuned.refusals:
        console.print(f"not measured: {escape(refusal.node)}: {escape(refusal.message)}")
    if tuned.left:
        console.print(f"{count(tuned.left, 'measurement')} left; run the same command again to go on")
    console.print(_saved(tuned))
    console.print(f"kept in {escape(tuned.database)}; `onnxfuse optimize` uses it")


def _time(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.2f} µs"


def _saved(tuned: Tuned) -> str:
    """What the measured regions take in one run of the model."""
    known = [region for region in tuned.regions if region.verdict != "unmeasured"]
    runtime = sum(region.count * (region.runtime or 0.0) for region in known)
    default = sum(region.count * (region.default or region.best or 0.0) for region in known)
    best = sum(region.count * (_best(region) or 0.0) for region in known)
    return (f"one run of the model spends {runtime:.1f} µs in these regions as ONNX Runtime runs them, "
            f"{default:.1f} µs fused, {best:.1f} µs tuned")


def _best(region: TunedRegion) -> float | None:
    """What a region takes as it is left."""
    return region.best if region.verdict == "fused" else region.runtime


def as_json(tuned: Tuned) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "gpu": tuned.gpu, "database": tuned.database, "seconds": round(tuned.seconds, 3), "measured": tuned.measured,
        "known": tuned.known, "left": tuned.left, "regions": [asdict(region) for region in tuned.regions],
        "refusals": [asdict(refusal) for refusal in tuned.refusals],
    }
