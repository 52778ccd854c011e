"""The report as one HTML page that needs nothing else.

Every figure is the JSON report's, as ``value`` of a ``data`` element.  Whatever the model names is text: it is escaped,
characters that hide are written out, and no script runs but the page's own, which its policy names by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from onnxfuse.reporting import plots, text
from onnxfuse.reporting.findings import Findings, as_json
from onnxfuse.rewriting import FUSED
from onnxfuse.visible import visible, visible_lines

BARS = 9
"""Operators in a plot, the others as one; the table has all."""

KERNELS = 64
"""Rows, the dearest, that show the text of their kernel: some 20 kB each."""

LISTED = 100
"""Near misses listed of a kind."""

LARGEST, LEAST = 1e30, 1e-30
"""Figures between which a plot has room; a fused file's may be anybody's."""

NAME = 26
"""Characters of an operator's name in a plot."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Fused nodes that are alike.

    Attributes:
        number: what plots call them; entries: those of the JSON report; kernel: the text of their kernel, or "".
    """

    number: int
    entries: Sequence[Entry]
    kernel: str

    @property
    def entry(self) -> Entry:
        """The first of them, whose figures all have."""
        return self.entries[0]


def page(report: Findings) -> str:
    """The page."""
    environment = _environment()
    content, rows = as_json(report), _rows(report)
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    reasons = text.grouped(content["refusals"], lambda refusal: (refusal["rule"], refusal["code"]))
    points = list(_points(rows))
    return environment.get_template("report.html").render(
        report=content,
        rows=rows,
        points={point.number: point for point in points},
        listed=LISTED,
        measured=any(row.entry["measured"] for row in rows),
        broken=text.grouped((each for each in content["broken"] if each["seconds"] > 0), lambda each: each["rule"]),
        reasons=sorted(reasons.values(), key=lambda group: -len(group)),
        traffic=_bars(content["operators"], "bytes", "Bytes through device memory", _BYTES),
        time=_bars(content["operators"], "seconds", "Predicted GPU time", _SECONDS),
        roofline=_roofline(points, content["roofline"]),
        still=sum(len(row.entries) for row in rows) - sum(len(rows[point.number - 1].entries) for point in points),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("onnxfuse", "reporting/page"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )
    environment.filters |= {
        "size": text.size, "duration": text.duration, "verification": text.verification_text,
        "runs": lambda operators: text.operator_runs(operators, 120), "operator": _operator,
        "flops": lambda number: f"{text.size(number)[:-1]}FLOP",
        "alike": text.alike,
        "lines": lambda kernel: Markup(escape(visible_lines(kernel))),
    }
    return environment


def _shown(value: Any) -> Any:
    """What an expression gives, on its way to the page."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _operator(name: str) -> str:
    return "fused nodes" if name == FUSED else name


def _rows(report: Findings) -> list[Row]:
    """Fused nodes that share a kernel and all figures, those first that take most of the predicted time."""
    apart = {"node", "replaces", "inputs", "outputs", "body", "recomputes"}

    def figures(entry: Entry) -> str:
        return json.dumps({name: value for name, value in entry.items() if name not in apart}, default=list)

    groups = text.grouped(as_json(report)["fusions"], figures).values()
    order = sorted(groups, key=lambda group: -group[0]["seconds_after"] * len(group))
    return [Row(place + 1, group, report.kernels.get(group[0]["kernel"], "") if place < KERNELS else "")
            for place, group in enumerate(order)]


_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
_SECONDS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))


def _bars(operators: Sequence[Entry], figure: str, title: str, units: Sequence[tuple[str, float]]) -> Markup:
    """A plot of what operators cost before and after."""
    found = [(_operator(row["operator"]), row[f"{figure}_before"], row[f"{figure}_after"]) for row in operators]
    found = sorted((row for row in found if 0 < max(row[1:]) < LARGEST), key=lambda row: -max(row[1:]))
    if not found:
        return Markup()
    rest = found[BARS:]
    if len(rest) > 1:
        found = [*found[:BARS], (f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest))]
    unit, scale = max((each for each in units if each[1] <= max(found[0][1:])), key=lambda each: each[1],
                      default=units[0])
    rows = [(visible(name) if len(name) <= NAME else f"{visible(name)[:NAME - 1]}…", before / scale, after / scale)
            for name, before, after in found]
    said = "; ".join(f"{name} {before:.3g} before, {after:.3g} after" for name, before, after in rows)
    return plots.bars(rows, f"{title} ({unit})", f"{title} by operator in {unit}: {said}")


def _points(rows: Sequence[Row]) -> Iterator[plots.Point]:
    """Rows on the roofline: those that compute something."""
    for row in rows:
        entry, measured = row.entry, row.entry["measured"]
        seconds = 0.0 if measured is None else measured["microseconds"] * 1e-6
        point = plots.Point(row.number, _quotient(entry["flops"], entry["bytes_after"]),
                            _quotient(entry["flops"] * entry["runs"], entry["seconds_after"]),
                            _quotient(entry["flops"], seconds) or None)
        if point.intensity and point.predicted:
            yield point


def _quotient(part: float, whole: float) -> float:
    """A quotient that a logarithmic axis has room for, else 0."""
    found = part / whole if whole > LEAST else 0.0
    return found if LEAST < found < LARGEST else 0.0


def _roofline(points: Sequence[plots.Point], roof: Mapping[str, float]) -> Markup:
    if not points or not roof:
        return Markup()
    said = "; ".join(f"{point.number}: {point.intensity:.3g} operations a byte, {point.predicted / 1e9:,.0f} GFLOP/s"
                     for point in points[:BARS])
    return plots.roofline(points, roof, f"Roofline, fused nodes by their number, as predicted: {said}"
                          + (f"; and {len(points) - BARS} more" if len(points) > BARS else ""))
