"""The report as text, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from onnxfuse.reporting.explain import Explained
from onnxfuse.reporting.explain_text import show_whole
from onnxfuse.reporting.findings import Findings, FusionEntry
from onnxfuse.reporting.left_text import (
    NAMES,
    SHOWN,
    show_left,
    show_matches,
    show_named,
    show_near,
    show_recognised,
)
from onnxfuse.reporting.text import (
    alike,
    count,
    duration,
    escape,
    escape_lines,
    grouped,
    operators,
    plain_table,
    show_heading,
    size,
    verification_text,
)

OTHER_COLUMNS = 62
"""Characters of a line of the table of kernels beside its rule and operators."""


def show(report: Findings, console: Console, *, explanation: Explained | None = None, verbose: bool = False) -> None:
    """Print a report: totals, what was fused, what was not, verification.

    Args:
        explanation: of the whole model, to print in place of a few words on what was not fused.
        verbose: list near misses that nothing a user can change would mend as well.
    """
    _head(report, console)
    _totals(report, console)
    _fusions(report, console)
    _broken(report, console)
    show_recognised(report.canonical, console)
    show_named(report.named, console)
    if explanation is not None and explanation.whole is not None:
        console.print()
        show_whole(explanation.whole, console, verbose=verbose)
    else:
        show_matches(report.matches, console)
        show_left(report.left, report.model, console, brief=True)
        near = report.refusals if verbose else report.advice
        show_near(near, len(report.refusals) - len(near), console)
    _ending(report, console)


def _head(report: Findings, console: Console) -> None:
    show_heading(report, console)
    if report.made is not None:
        console.print(f"fused by onnxfuse {escape(str(report.made['onnxfuse']))}, strategy "
                      f"{escape(str(report.made['strategy']))}")
        given = ", ".join(f"{name}={text}" for name, text in report.made["provider_options"].items())
        if given:
            console.print(f"planned for options of the CUDA provider: {escape(given)}")
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape_lines(warning)}")
    for note in report.notes:
        console.print(f"note: {escape(note)}")


def _totals(report: Findings, console: Console) -> None:
    before, after = report.before, report.after
    table = plain_table("", "before", "after")
    table.add_row("nodes", f"{before.nodes:,}", f"{after.nodes:,}")
    table.add_row("kernels", f"{before.kernels:,}", f"{after.kernels:,}")
    table.add_row("bytes, products and convolutions", size(before.bytes_products), size(after.bytes_products))
    table.add_row("bytes, all else", size(before.bytes), size(after.bytes))
    table.add_row("peak memory", size(before.peak_bytes), size(after.peak_bytes))
    table.add_row("GPU time, predicted", duration(before.seconds), duration(after.seconds))
    console.print()
    console.print(table)
    if report.sizes.nodes:
        console.print(f"size operands folded: {report.sizes.operands:,}, {count(report.sizes.nodes, 'node')} removed")
    if report.constants:
        console.print(f"nodes of constants that run once: {report.constants:,}")
    if report.biases:
        console.print(f"biases that fused nodes add: {report.biases:,}")
    if report.layouts:
        console.print(f"values that lie channels-last: {report.layouts:,}")
    if report.folded:
        larger = size(sum(entry.bytes for entry in report.folded))
        console.print(f"folded into weights that kernels read, {larger} of them: "
                      f"{escape(alike([entry.what for entry in report.folded]))}")
    if report.embedded:
        console.print("embedded kernels: " + ", ".join(
            f"{escape(name)} {size(count)}{', PTX for later GPUs' * name.startswith('compute_')}"
            for name, count in sorted(report.embedded.items(), key=lambda one: (one[0].startswith("compute_"), one))))
    if report.unknown:
        names = ", ".join(report.unknown[:3]) + (", ..." if len(report.unknown) > 3 else "")
        console.print(f"{len(report.unknown)} tensors of unknown size count as 0 bytes: {escape(names)}")


def _fusions(report: Findings, console: Console) -> None:
    console.print()
    if not report.fusions:
        console.print("[bold]Nothing was fused.[/]")
        return
    kernels = grouped(report.fusions, lambda entry: entry.kernel)
    again = sum(len(entry.recomputes) for entry in report.fusions)
    replaced = sum(len(entry.operators) for entry in report.fusions) - again
    more = f"; {again:,} of them computed again rather than read" if again else ""
    console.print(f"[bold]Fused:[/] {count(replaced, 'node')} into {len(report.fusions)}, "
                  f"{count(len(kernels), 'distinct kernel')}{more}")
    heads = ["times", "rule", "schedule", "operators", "bytes before", "after", "predicted"]
    with_measured = any(entry.measured for entry in report.fusions)
    table = plain_table(*heads, *(["measured"] if with_measured else []), left=(1, 2, 3), drop=(2, 3))
    rest = OTHER_COLUMNS + (13 if with_measured else 0)
    room = max(20, console.width - max(len(entry.rule) for entry in report.fusions) - rest)
    order = sorted(kernels.values(), key=lambda entries: -sum(e.bytes_before - e.bytes_after for e in entries))
    for entries in order[:SHOWN]:
        before, after = sum(e.bytes_before for e in entries), sum(e.bytes_after for e in entries)
        speedup = min(entry.estimated_speedup for entry in entries)
        table.add_row(str(len(entries)), escape(entries[0].rule), escape(entries[0].schedule),
                      escape(operators(entries[0], min(room, 60))), size(before), size(after), f"{speedup:.2f}x",
                      *([_figure(entries)] if with_measured else []))
    console.print(table)
    if len(order) > SHOWN:
        console.print(f"and {count(len(order) - SHOWN, 'kernel')} more; the JSON report lists all of them")
    _spilled(list(kernels.values()), console)
    for body, inside in grouped((entry for entry in report.fusions if entry.body), lambda entry: entry.body).items():
        console.print(f"in {escape(body)}, counted {inside[0].runs:g} times a run: "
                      f"{escape(', '.join(dict.fromkeys(entry.node for entry in inside)))}")


def _spilled(kernels: Sequence[Sequence[FusionEntry]], console: Console) -> None:
    """Kernels whose values registers do not hold, those of the most bytes first."""
    found = [(entries[0].compiled, entries) for entries in kernels if entries[0].compiled is not None]
    spilled = sorted(((figures, entries) for figures, entries in found if figures["spilled_bytes"]),
                     key=lambda one: -int(one[0]["spilled_bytes"]))
    if spilled:
        which = ", ".join(f"{entries[0].node} {figures['spilled_bytes']:,} bytes a thread"
                          for figures, entries in spilled[:NAMES])
        more = f" and {len(spilled) - NAMES} more" if len(spilled) > NAMES else ""
        console.print(f"{count(len(spilled), 'kernel')} with values that registers do not hold "
                      f"({escape(spilled[0][0]['architecture'])}): {escape(which)}{more}")


def _broken(report: Findings, console: Console) -> None:
    """What is lost of ONNX Runtime's own fusions, by rule, and what that is predicted to cost."""
    for rule, entries in grouped((entry for entry in report.broken if entry.seconds > 0),
                                 lambda entry: entry.rule).items():
        lost = sum(entry.seconds for entry in entries)
        console.print(f"taken apart: {len(entries)} x {escape(rule)} of ONNX Runtime's own fusions; what it keeps of "
                      f"{'it' if len(entries) == 1 else 'them'} takes {duration(lost)} predicted, counted above: "
                      f"{escape(alike([entry.left[0] for entry in entries]))}")


def _figure(entries: Sequence[FusionEntry]) -> str:
    """The least speed-up that was measured of nodes that share a kernel, or its time alone."""
    found = [entry.measured for entry in entries if entry.measured is not None]
    speedups = [figure["speedup"] for figure in found if figure["speedup"] is not None]
    if speedups:
        return f"{min(speedups):.2f}x"
    return duration(max(figure["microseconds"] for figure in found) * 1e-6) if found else "unmeasured"


def _ending(report: Findings, console: Console) -> None:
    console.print()
    console.print(f"predicted speed-up: {report.estimated_speedup:.2f}x of the GPU time, {_measured(report.measured)}")
    console.print(f"verification: {escape(verification_text(report.verification))}")
    for fault in report.verification.get("taken_back", ()):
        console.print(f"  [yellow]taken back:[/] {escape(fault['node'])} ({escape(fault['rule'])}): "
                      f"{escape(fault['message'])}")
    for note in report.verification.get("notes", ()):
        console.print(f"  note: {escape(note)}")
    if report.output is not None:
        console.print(f"written: [bold]{escape(report.output)}[/]")
        if report.weights:
            console.print(f"weights: {escape(', '.join(report.weights))}; keep them beside it")


def _measured(measured: Mapping[str, Any] | None) -> str:
    """The measured speed-up, or why there is none."""
    if measured is None:
        return "unmeasured"
    if "speedup" not in measured:
        return f"unmeasured ({escape(str(measured['reason']))})"
    return (f"measured {measured['speedup']:.2f}x of the {measured['of']} on {escape(str(measured['device']))} "
            f"({measured['low']:.2f} to {measured['high']:.2f})")
