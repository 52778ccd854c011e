"""A recorded run as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console

from onnxfuse.reporting.profile import CLOSE, Learned, ProfiledRun, RunProfile
from onnxfuse.reporting.text import count, duration, escape, plain_table

SHOWN = 40
"""Rows of the table; JSON has all of them."""

SHAPES = 48
"""Characters of a row's shapes."""


def show(profile: RunProfile, console: Console) -> None:
    """Print a recorded run: the fused nodes by the time they took, and how good the predictions were."""
    calls = sum(run.calls for run in profile.runs)
    console.print(f"[bold]{escape(profile.model)}[/]  recorded on {escape(', '.join(profile.gpus))}")
    console.print(f"{count(len({run.node for run in profile.runs}), 'fused node')}, {count(calls, 'call')}, "
                  f"{duration(profile.total_us * 1e-6)} of GPU time\n")
    table = plain_table("node", "rule", "inputs", "calls", "predicted", "measured", "ratio", "total", "share",
                        left=(0, 1, 2), drop=(1, 2, 7, 6))
    for run in profile.runs[:SHOWN]:
        table.add_row(
            escape(run.node), escape(run.rule), shapes(run.inputs), f"{run.calls:,}", _time(run.predicted_us),
            _time(run.measured_us), "-" if run.ratio is None else f"{run.ratio:.2f}",
            "-" if not run.timed else duration(run.total_us * 1e-6), f"{run.share:.1%}" if run.timed else "-",
        )
    console.print(table)
    if len(profile.runs) > SHOWN:
        rest = profile.runs[SHOWN:]
        console.print(f"and {count(len(rest), 'row')} more with {sum(run.share for run in rest):.1%} of the time; "
                      "--json has all of them")
    _ending(profile, console)


def _ending(profile: RunProfile, console: Console) -> None:
    console.print()
    if profile.compared:
        console.print(f"predictions within {CLOSE:.0%} of what was measured: {len(profile.close)} of "
                      f"{count(len(profile.compared), 'row')} ({_share(profile.close, profile.compared):.0%} of the "
                      "time); the ratio is measured over predicted")
    if profile.idle:
        names = ", ".join(profile.idle[:3]) + (", ..." if len(profile.idle) > 3 else "")
        console.print(f"{count(len(profile.idle), 'fused node')} of the model never ran: {escape(names)}")
    for note in profile.notes:
        console.print(f"note: {escape(note)}")
    if profile.learned is not None:
        _show_learned(profile, profile.learned, console)


def _show_learned(profile: RunProfile, learned: Learned, console: Console) -> None:
    """Say what went into the database, and how it is used."""
    if not learned.kernels:
        console.print("nothing was learned: no call has a time")
        return
    console.print(f"learned: {count(learned.calls, 'timed call')} of {count(learned.kernels, 'kernel')}, each at some "
                  f"shapes, in {escape(learned.database)}")
    # A name that needs quotes is no word of a command.
    sizes = " ".join(f"--dim {shlex.quote(f'{name}={size}')}" for name, size in profile.sizes.items())
    if sizes:
        console.print(f"help: most of the time went at these sizes: onnxfuse optimize ORIGINAL {escape(sizes)}",
                      style="dim")


def _share(part: Sequence[ProfiledRun], whole: Sequence[ProfiledRun]) -> float:
    total = sum(run.total_us for run in whole)
    return sum(run.total_us for run in part) / total if total else 0.0


def _time(microseconds: float | None) -> str:
    return "-" if microseconds is None else duration(microseconds * 1e-6)


def shapes(inputs: Sequence[Sequence[int] | None], longest: int = SHAPES) -> str:
    """Shapes in one line, cut at the end: "8x128x768, 768"; a scalar is "1 value", an absent input "-"."""
    words = ["-" if shape is None else "x".join(map(str, shape)) or "1 value" for shape in inputs]
    text = ", ".join(words)
    while len(text) > longest and len(words) > 1:
        words.pop()
        text = ", ".join([*words, "..."])
    return text
