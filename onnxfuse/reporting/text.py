"""What reports, explanations and measurements are written with: names, tables, figures in words."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich import markup
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from onnxfuse.reporting.findings import Assumed, FusionEntry
from onnxfuse.reporting.tables import FittedTable
from onnxfuse.visible import visible, visible_lines
from onnxfuse.wording import option

COMPILER = "does-not-compile"
"""Code of the refusal whose message holds a compiler's log."""


def escape(text: str) -> str:
    """A name or a sentence as part of what a console prints: in one line, without marks or characters that steer."""
    return markup.escape(visible(text))


def escape_lines(text: str) -> str:
    """The same for a text of several lines whose parts were made visible, such as an error's."""
    return markup.escape(visible_lines(text))


def in_lines(show: Callable[[Console], None], width: int) -> str:
    """What something prints, as plain text in lines of so many characters at most."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return captured.get()


class _Planned(Protocol):
    """What has a heading: a report, an explanation."""

    @property
    def model(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def dims(self) -> Mapping[str, int]: ...
    @property
    def assumed(self) -> Assumed: ...


def show_heading(planned: _Planned, console: Console) -> None:
    """Print which model was planned for what, and what of that nobody said."""
    sizes = ", ".join(f"{name}={number}" for name, number in planned.dims.items())
    console.print(f"[bold]{escape(planned.model)}[/]  planned for {escape(planned.target)}"
                  + (f", {escape(sizes)}" if sizes else ""))
    if planned.assumed.target:
        console.print(f"[yellow]{escape(planned.target)}: assumed[/], no GPU was there; {option('target')}")
    guessed = ", ".join(f"{name}={planned.dims[name]}" for name in planned.assumed.dims if name in planned.dims)
    if guessed:
        console.print(f"[yellow]{escape(guessed)}: assumed[/]; {option('dim')}")


def indented(console: Console, words: str, style: str = "", by: int = 8, *, lines: bool = False) -> None:
    """A paragraph whose every line is indented; ``lines`` where the words have lines of their own, as a log has."""
    shown = visible_lines(words) if lines else visible(words)
    console.print(Padding(Text(shown, style), (0, 0, 0, by), expand=False))


def verification_text(verification: Mapping[str, Any]) -> str:
    """The verification's result as a sentence."""
    return str(verification.get("summary", verification["status"]))


def plain_table(
    *heads: str, left: Sequence[int] = (0,), wrap: Sequence[int] = (), drop: Sequence[int] = ()
) -> FittedTable:
    """A table without lines that cuts no number however narrow it is shown (``tables``).

    Args:
        left: columns of text, which are aligned to the left and may wrap anywhere.
        wrap: columns of figures that may wrap between words.
        drop: columns that may go where all of them do not fit, the first to go first.
    """
    return FittedTable(heads, left, wrap, drop)


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


def alike(names: Sequence[str], shown: int = 3) -> str:
    """Names on one line: those that differ in numbers alone, as those of repeated layers do, once, with ``*``."""
    patterns = []
    for group in grouped(names, lambda name: re.sub(r"\d+", "0", name)).values():
        split = [re.split(r"(\d+)", name) for name in group]
        same = ["".join(parts) if len(set(parts)) == 1 else None for parts in zip(*split, strict=True)]
        pattern = "".join("*" if part is None else split[0][place] for place, part in enumerate(same))
        patterns.append(group[0] if len(group) == 1 else f"{pattern} ({len(group)} nodes, from {group[0]})")
    rest = f" and {len(patterns) - shown} more" if len(patterns) > shown else ""
    return ", ".join(patterns[:shown]) + rest


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
