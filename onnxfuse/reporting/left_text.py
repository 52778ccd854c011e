"""What ONNX Runtime keeps as text: one wording for the report and for explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from onnxfuse.refusal import Refusal
from onnxfuse.reporting.findings import LeftRegions, MatchEntry
from onnxfuse.reporting.text import COMPILER, alike, count, escape, grouped, indented, operator_runs
from onnxfuse.rewriting import NamedRecord
from onnxfuse.wording import as_data, verbose

SHOWN = 24
"""Groups of regions, and reasons, that are listed."""

NAMES = 8
"""Nodes named per near miss of one wording before the line goes on below."""


def show_left(left: Sequence[LeftRegions], model: str, console: Console, *, brief: bool = False) -> None:
    """Print the regions that are left to the runtime, the headline first; ``brief`` as part of a report, which sends
    the reader on to the explanation."""
    if not left:
        return
    number, best = sum(len(found.nodes) for found in left), max(found.speedup for found in left)
    more = f"; `onnxfuse explain {escape(model)}` says more" if brief else ""
    console.print(f"\n[bold]{count(number, 'region')} left to ONNX Runtime:[/] best {best:.2f}x predicted{more}")
    for found in left[:SHOWN]:
        words = escape(operator_runs(found.operators))
        console.print(f"{len(found.nodes):>6} x {words}  [bold]{escape(found.code)}[/]")
        indented(console, found.reason)
        if not brief:
            indented(console, alike(found.nodes), "cyan")
    if len(left) > SHOWN:
        rest = sum(len(found.nodes) for found in left[SHOWN:])
        console.print(f"        and {count(rest, 'region')} more; {as_data()} lists all of them")


def show_recognised(canonical: Mapping[str, int], console: Console) -> None:
    """Print how often each canonical rule took several nodes as one operator."""
    if canonical:
        console.print("recognised: " + ", ".join(f"{number} {escape(rule)}" for rule, number in canonical.items()))


def show_named(named: Sequence[NamedRecord], console: Console) -> None:
    """Print what name rules call by a name, and in how many kernels its products run."""
    if named:
        console.print("named: " + "; ".join(f"{found.places} {escape(found.name)} {_fates(found)}" for found in named))


def _fates(found: NamedRecord) -> str:
    """What became of the products of places, in brackets."""
    rest = found.places - found.one - found.several - found.left
    fates = [(found.one, "fused"), (found.several, "fused in several kernels"), (rest, "fused in part"),
             (found.left, "left")]
    told = (words if number == found.places else f"{number} {words}" for number, words in fates if number)
    return f"({', '.join(told)})"


def show_matches(matches: Sequence[MatchEntry], console: Console) -> None:
    """Print what became of every match of the user's own rules, those of one fate together."""
    for rule, entries in grouped(matches, lambda entry: entry.rule).items():
        fates = {fate: sum(entry.became == fate for entry in entries) for fate in ("fused", "lost", "left")}
        told = ", ".join(f"{number} {fate}" for fate, number in fates.items() if number)
        console.print(f"\nyour rule [bold]{escape(rule)}[/] matched {count(len(entries), 'time')}: {told}")
        for same in list(grouped(entries, lambda entry: (entry.became, entry.to, entry.reason)).values())[:SHOWN]:
            first = same[0]
            words = " to ".join(part for part in (first.became, first.to) if part) if first.became != "fused" else (
                f"fused as part of {first.to}")
            if first.to or first.reason:
                indented(console, f"{alike([entry.node for entry in same])}: {words}"
                         + (f": {first.reason}" if first.reason else ""))


def show_near(near: Sequence[Refusal], rest: int, console: Console, *, each: bool = False) -> None:
    """Print near misses by reason, the most frequent first.

    Args:
        near: those to print.
        rest: how many more there are, which -v shows.
        each: whether every one is named with its node; else one of a reason speaks for all of them.
    """
    if near:
        more = f" (and {rest:,} that nothing you can change would mend: {verbose()})" if rest else ""
        console.print(f"\n[bold]Not fused:[/] {count(len(near), 'near miss', 'near misses')}{more}")
    elif rest:
        console.print(f"\n{count(rest, 'near miss', 'near misses')} that nothing you can change would mend: "
                      f"{verbose()}")
    groups = grouped(near, lambda refusal: (refusal.rule, refusal.code))
    order = sorted(groups.values(), key=_mendable)
    for group in order if each else order[:SHOWN]:
        console.print(f"{len(group):>6}  [bold]{escape(group[0].code)}[/]"
                      + (f" ({escape(group[0].rule)})" if group[0].rule else ""))
        if each:
            _each(group, console)
        else:
            first = group[0]
            indented(console, first.message, lines=first.code == COMPILER)
            _help(next((refusal.remedy for refusal in group if refusal.remedy), ""), console, 8)
    if not each and len(order) > SHOWN:
        console.print(f"        and {count(len(order) - SHOWN, 'reason')} more")


def _each(group: Sequence[Refusal], console: Console) -> None:
    """Near misses of one reason: node, condition, remedy; those of one wording together."""
    for same in grouped(group, lambda refusal: (refusal.message, refusal.remedy)).values():
        nodes = list(dict.fromkeys(refusal.node or "the model" for refusal in same))
        for start in range(0, len(nodes), NAMES):
            more = "," if start + NAMES < len(nodes) else ":"
            indented(console, ", ".join(nodes[start:start + NAMES]) + more, "cyan")
        indented(console, same[0].message, by=12, lines=same[0].code == COMPILER)
        _help(same[0].remedy, console, 12)


def _help(remedy: str, console: Console, by: int) -> None:
    if remedy:
        indented(console, f"help: {remedy}", "dim", by=by)


def _mendable(group: Sequence[Refusal]) -> tuple[bool, int]:
    """Where a group of near misses comes in the list: those that can be mended first, then the most frequent."""
    return not any(refusal.remedy for refusal in group), -len(group)
