"""The report as text, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxfuse.refusal import Refusal
from onnxfuse.reporting.report import FusionEntry, Report
from onnxfuse.visible import visible, visible_lines

SHOWN = 24
"""Kernels and reasons listed without --explain."""

OTHER_COLUMNS = 62
"""Characters of a line of the table of kernels beside its rule and operators."""

COMPILER = "does-not-compile"
"""Code of the refusal whose message holds a compiler's log."""

NAMES = 8
"""Nodes named per near miss of one wording before the line goes on below."""


def escape(text: str) -> str:
    """A name or a sentence as part of what a console prints: in one line, without marks or characters that steer."""
    return markup.escape(visible(text))


def escape_lines(text: str) -> str:
    """The same for a text of several lines whose parts were made visible, such as an error's."""
    return markup.escape(visible_lines(text))


def show(report: Report, console: Console, *, explain: bool = False) -> None:
    """Print a report: totals, what was fused, what was not, verification."""
    _head(report, console)
    _totals(report, console)
    _fusions(report, console)
    if report.refusals:
        (_explain if explain else _reasons)(report.refusals, console)
    elif explain:
        console.print("\nNo near misses.")
    _ending(report, console)


def _head(report: Report, console: Console) -> None:
    sizes = ", ".join(f"{name}={size}" for name, size in report.dims.items())
    console.print(f"[bold]{escape(report.model)}[/]  planned for {escape(report.target)}"
                  + (f", {escape(sizes)}" if sizes else ""))
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape_lines(warning)}")
    for note in report.notes:
        console.print(f"note: {escape(note)}")


def _totals(report: Report, console: Console) -> None:
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
    if report.unknown:
        names = ", ".join(report.unknown[:3]) + (", ..." if len(report.unknown) > 3 else "")
        console.print(f"{len(report.unknown)} tensors of unknown size count as 0 bytes: {escape(names)}")


def _fusions(report: Report, console: Console) -> None:
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
    table = plain_table(*heads, *(["measured"] if with_measured else []), left=(1, 2, 3))
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


def _figure(entries: Sequence[FusionEntry]) -> str:
    """The least speed-up that was measured of nodes that share a kernel, or its time alone."""
    found = [entry.measured for entry in entries if entry.measured is not None]
    speedups = [figure["speedup"] for figure in found if figure["speedup"] is not None]
    if speedups:
        return f"{min(speedups):.2f}x"
    return duration(max(figure["microseconds"] for figure in found) * 1e-6) if found else "unmeasured"


def _reasons(refusals: Sequence[Refusal], console: Console) -> None:
    """Near misses by reason, those that can be mended first, then the most frequent, with one remedy each."""
    console.print(f"\n[bold]Not fused:[/] {count(len(refusals), 'near miss', 'near misses')} (--explain shows each)")
    groups = grouped(refusals, lambda refusal: (refusal.rule, refusal.code))
    order = sorted(groups.values(), key=_mendable)
    for group in order[:SHOWN]:
        first = group[0]
        console.print(f"{len(group):>6}  {_reason(first)}")
        indented(console, first.message, lines=first.code == COMPILER)
        remedy = next((refusal.remedy for refusal in group if refusal.remedy), "")
        if remedy:
            indented(console, f"help: {remedy}", "dim")
    if len(order) > SHOWN:
        console.print(f"        and {count(len(order) - SHOWN, 'reason')} more")


def _explain(refusals: Sequence[Refusal], console: Console) -> None:
    """Every near miss: node, condition, remedy; those of one wording together, those that can be mended first."""
    console.print(f"\n[bold]Not fused:[/] {count(len(refusals), 'near miss', 'near misses')}")
    groups = grouped(refusals, lambda refusal: (refusal.rule, refusal.code))
    for group in sorted(groups.values(), key=_mendable):
        console.print(f"\n{len(group):>6}  {_reason(group[0])}")
        for same in grouped(group, lambda refusal: (refusal.message, refusal.remedy)).values():
            nodes = list(dict.fromkeys(refusal.node or "the model" for refusal in same))
            for start in range(0, len(nodes), NAMES):
                more = "," if start + NAMES < len(nodes) else ":"
                indented(console, ", ".join(nodes[start:start + NAMES]) + more, "cyan")
            indented(console, same[0].message, by=12, lines=same[0].code == COMPILER)
            if same[0].remedy:
                indented(console, f"help: {same[0].remedy}", "dim", by=12)


def _mendable(group: Sequence[Refusal]) -> tuple[bool, int]:
    """Where a group of near misses comes in the list."""
    return not any(refusal.remedy for refusal in group), -len(group)


def indented(console: Console, words: str, style: str = "", by: int = 8, *, lines: bool = False) -> None:
    """A paragraph whose every line is indented; ``lines`` where the words have lines of their own, as a log has."""
    shown = visible_lines(words) if lines else visible(words)
    console.print(Padding(Text(shown, style), (0, 0, 0, by), expand=False))


def _ending(report: Report, console: Console) -> None:
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


def _measured(measured: Mapping[str, Any] | None) -> str:
    """The measured speed-up, or why there is none."""
    if measured is None:
        return "unmeasured"
    if "speedup" not in measured:
        return f"unmeasured ({escape(str(measured['reason']))})"
    return (f"measured {measured['speedup']:.2f}x of the {measured['of']} on {escape(str(measured['device']))} "
            f"({measured['low']:.2f} to {measured['high']:.2f})")


def verification_text(verification: Mapping[str, Any]) -> str:
    """The verification's result as a sentence."""
    return str(verification.get("summary", verification["status"]))


def _reason(refusal: Refusal) -> str:
    rule = f" ({escape(refusal.rule)})" if refusal.rule else ""
    return f"[bold]{escape(refusal.code)}[/]{rule}"


def plain_table(*heads: str, left: Sequence[int] = (0,), wrap: Sequence[int] = ()) -> Table:
    """A table without lines; the columns ``left`` are aligned to the left, the columns ``wrap`` may be narrowed."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place in left else "right", no_wrap=place not in wrap)
    return table


def operators(entry: FusionEntry, longest: int = 60) -> str:
    """A region's operators in graph order, repetitions counted: "Add, 2 Mul, Softmax"."""
    return operator_runs(entry.operators, longest)


def operator_runs(names: Iterable[str], longest: int = 60) -> str:
    """Operators in order, repetitions counted, in the middle cut to ``longest`` characters."""
    runs: list[tuple[str, int]] = []
    for operator in names:
        if runs and runs[-1][0] == operator:
            runs[-1] = (operator, runs[-1][1] + 1)
        else:
            runs.append((operator, 1))
    words = [operator if number == 1 else f"{number} {operator}" for operator, number in runs]
    text = ", ".join(words)
    while len(text) > longest and len(words) > 2:
        del words[len(words) // 2]
        half = (len(words) + 1) // 2
        text = ", ".join([*words[:half], "...", *words[half:]])
    return text


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Items by key, in the order in which the keys appear."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def size(number: float) -> str:
    """Bytes in decimal units: "1.25 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds in a unit that suits: "12.3 µs"."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
