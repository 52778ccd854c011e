"""Plots as SVG elements for a page: real text, colours of the page's style sheet, no script and no link.

Matplotlib draws them with its own settings, whatever the user's are.  Names from models reach it as plain text.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.7
"""Inches; at 72 units an inch the text keeps its size where a page is as wide as a phone."""

_INK, _GUIDE, _BEFORE, _AFTER = "#010101", "#020202", "#030303", "#040404"
_COLOURS = {_INK: "var(--ink)", _GUIDE: "var(--guide)", _BEFORE: "var(--before)", _AFTER: "var(--after)"}
"""What is drawn with, and what the page makes of it, which differs by day, night and on paper."""

_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "onnxfuse", "font.size": 8, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
}

_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Point:
    """A fused node on the roofline: its number in the table, operations for a byte, operations a second as predicted,
    and as measured where it was."""

    number: int
    intensity: float
    predicted: float
    measured: float | None = None


def bars(rows: Sequence[tuple[str, float, float]], axis: str, alternative: str) -> Markup:
    """Each row's name with its figure before and after, the first row on top.

    Args:
        axis: what is shown, with its unit.
        alternative: what is seen, for who does not see it.
    """
    with _figure(0.34 * len(rows) + 1.05) as (figure, axes):
        heights, names = range(len(rows)), [name for name, _, _ in rows]
        for side, (colour, label) in enumerate(((_BEFORE, "before"), (_AFTER, "after"))):
            drawn = axes.barh([place + 0.37 * (side - 0.5) for place in heights], [row[side + 1] for row in rows],
                              height=0.35, color=colour, label=label)
            axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=7)
        axes.set_yticks(list(heights), names, parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.13, y=0.02)
        axes.set_xlabel(axis)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return _element(figure, alternative)


def roofline(points: Sequence[Point], roof: Mapping[str, float], alternative: str) -> Markup:
    """Fused nodes by operations for a byte and operations a second, under what the GPU can do; both logarithmic."""
    giga, peak = 1e9, roof["flops_per_second"]
    with _figure(3.6) as (figure, axes):
        ridge = peak / roof["bytes_per_second"]
        reach = [point.intensity for point in points]
        ends = (min([*reach, ridge]) / 3, max([*reach, ridge]) * 3)
        for name, style, rate in (("device memory", "-", "bytes_per_second"), ("second-level cache", ":",
                                                                              "cached_bytes_per_second")):
            places = sorted({*ends, peak / roof[rate]})
            axes.plot(places, [min(place * roof[rate], peak) / giga for place in places], style, color=_INK,
                      linewidth=1, label=f"most that {name} and float32 cores allow")
        if any(point.predicted > peak for point in points) and roof["matrix_flops_per_second"]:
            axes.plot(ends, [roof["matrix_flops_per_second"] / giga] * 2, "--", color=_INK, linewidth=1,
                      label="matrix units, float16")
        axes.plot(reach, [point.predicted / giga for point in points], "o", color=_AFTER, markersize=5,
                  label="fused node, predicted")
        measured = [(point.intensity, point.measured / giga) for point in points if point.measured is not None]
        if measured:
            axes.plot(*zip(*measured, strict=True), "^", color=_BEFORE, markersize=5, label="fused node, measured")
        _numbered(axes, points)
        axes.set(xscale="log", yscale="log", xlabel="operations for a byte through device memory (1/B)",
                 ylabel="operations a second (GFLOP/s)", xlim=ends)
        for side in (axes.xaxis, axes.yaxis):
            side.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.grid(color=_GUIDE, linewidth=0.5)
        figure.legend(loc="outside lower center", frameon=False)
        return _element(figure, alternative)


def _numbered(axes: Axes, points: Sequence[Point]) -> None:
    """Numbers beside points, but where one would cover another."""
    taken: list[Point] = []
    for point in points:
        if all(max(point.intensity / other.intensity, other.intensity / point.intensity) > 1.25
               or max(point.predicted / other.predicted, other.predicted / point.predicted) > 1.6 for other in taken):
            taken.append(point)
            axes.annotate(str(point.number), (point.intensity, point.predicted / 1e9), (4, 3),
                          textcoords="offset points", fontsize=7)


@contextmanager
def _figure(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw in, with nothing of the user's settings, and no words on what fonts lack."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            import matplotlib
            from matplotlib.figure import Figure

            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                matplotlib.rcParams.update(_SETTINGS)
                figure = Figure(figsize=(WIDTH, height), layout="constrained")
                yield figure, figure.add_subplot()
    finally:
        logger.setLevel(level)


def _element(figure: Figure, alternative: str) -> Markup:
    """The figure as an element of a page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for part in ("metadata", "defs"):  # links; a style for all elements of the page
        for found in root.findall(f"{_SVG}{part}"):
            root.remove(found)
    own = f"{re.sub('[^a-z]+', '-', alternative.lower())[:24]}-"
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib = {name.split("}")[-1]: _told(name, value, own) for name, value in element.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": alternative}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _told(name: str, value: str, own: str) -> str:
    """An attribute as the page has it: names of its ``own``, colours and fonts of the style sheet."""
    if name == "id":
        return own + value
    if name.endswith("href"):
        return value.replace("#", f"#{own}", 1)
    if name == "style":
        for colour, variable in _COLOURS.items():
            value = value.replace(colour, variable)
        value = re.sub(r"font-family: [^;]*;", "", re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", value))
    return value.replace("url(#", f"url(#{own}")
