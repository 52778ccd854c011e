"""The picture's text: one SVG file that needs nothing else, for light and dark screens and for paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.order import graphs_of
from onnxfuse.lowering import launch
from onnxfuse.reporting.drawing.boxes import Box, Drawing, boxes, folded, joined
from onnxfuse.reporting.drawing.layout import layout
from onnxfuse.reporting.text import operator_runs
from onnxfuse.rewriting import read_fused
from onnxfuse.visible import visible

EACH = 60
"""Boxes of a graph up to which every node has one of its own."""

FOLDABLE = 1000
"""Boxes in which repetitions are looked for."""

MOST = 300
"""Boxes that a picture may have."""

WIDTH, LINE, MARGIN = 196.0, 15.0, 24.0
LETTERS, LINES, NAMES = 30, 4, 12
"""Letters of a line and lines of operators in a box; names of nodes that it tells when it is pointed at."""

STYLE = """
svg { background: var(--paper); font: 11px system-ui, sans-serif; --paper: #fff; --ink: #1b1f24; --soft: #57606a;
  --edge: #8c959f; --plain: #f3f5f8; --fused: #dbeafe; --line: #1769d6; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181d; --ink: #e4e8ed; --soft: #a3adb8; --edge: #6b7683;
  --plain: #232a32; --fused: #12335c; --line: #5ba4ff; } }
@media print { svg { --paper: #fff; --ink: #000; --soft: #444; --edge: #888; --plain: #fff; --fused: #eef4ff;
  --line: #1757b0; } }
text { fill: var(--ink); text-anchor: middle; }
.head, .note { text-anchor: start; }
.head { font-size: 15px; font-weight: 600; }
.note, .line { fill: var(--soft); }
.title { font-weight: 600; }
rect { fill: var(--plain); stroke: var(--edge); }
.fused rect { fill: var(--fused); stroke: var(--line); stroke-width: 1.5; }
.input rect, .output rect { fill: none; stroke-dasharray: 3 3; }
.way { fill: none; stroke: var(--edge); }
.tip { fill: var(--edge); }
"""


@dataclass(frozen=True)
class _Panel:
    """A graph of the model: what it is called, its boxes, and what was done to them."""

    name: str
    drawing: Drawing
    notes: tuple[str, ...]


def picture(model: onnx.ModelProto, name: str) -> str:
    """A fused model as SVG; graphs of bodies that hold fused nodes come below the main one.

    Raises:
        ModelError: there is more to draw than can be looked at.
    """
    panels = _panels(model)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    SubElement(root, "title").text = visible(f"{name}: fused graph")
    SubElement(root, "desc").text = visible(_description(panels))
    SubElement(root, "style").text = STYLE
    tip = SubElement(SubElement(root, "defs"), "marker", {
        "id": "tip", "orient": "auto", "refX": "7", "refY": "4", "markerWidth": "8", "markerHeight": "8"})
    SubElement(tip, "path", {"class": "tip", "d": "M0 0 L8 4 L0 8 z"})
    y = _words(root, MARGIN, name, (
        "Blue: one kernel, by its rule; below it the nodes that its function holds. Grey: what ONNX Runtime runs.",))
    width = 0.0
    for panel in panels:
        y = _words(root, y + LINE, panel.name, panel.notes)
        right, y = _draw(root, panel.drawing, y)
        width = max(width, right)
    across, down = f"{max(width, 640.0) + 2 * MARGIN:.0f}", f"{y + MARGIN:.0f}"
    root.attrib |= {"viewBox": f"0 0 {across} {down}", "width": across, "height": down}
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _panels(model: onnx.ModelProto) -> list[_Panel]:
    functions = {function.name: function for function in model.functions if function.domain == launch.DOMAIN}
    fused = read_fused(model)
    panels = []
    for body, graph in graphs_of(model):
        held = {node.name: node for node in fused if (node.body and node.body.place) == (body and body.place)}
        if held or body is None:
            panels.append(_simple("" if body is None else body.label, boxes(graph, functions, held)))
    total = sum(len(panel.drawing.boxes) for panel in panels)
    if total > MOST:
        raise ModelError(
            f"The graph is too large to draw: {total:,} boxes are left of it where what repeats is drawn once, and "
            f"{MOST} can be looked at.",
            remedy="Open the fused file in Netron, where the ƒ of a fused node shows its function.",
        )
    return panels


def _simple(name: str, drawing: Drawing) -> _Panel:
    """As many boxes as can be looked at, and what was left out for it."""
    if len(drawing.boxes) <= EACH:
        return _Panel(name, drawing, ())
    notes = []
    before, drawing = drawing, joined(drawing)
    if len(drawing.boxes) < len(before.boxes):
        notes.append("Nodes that ONNX Runtime runs between the same fused nodes are drawn as one box.")
    if len(drawing.boxes) <= FOLDABLE:
        drawing = folded(drawing)
        if any(box.times > 1 for box in drawing.boxes):
            notes.append("What repeats is drawn once: 12 × stands for twelve in a row.")
    return _Panel(name, drawing, tuple(notes))


def _description(panels: Sequence[_Panel]) -> str:
    """The picture in words, for who does not see it: fused nodes in the order of the data."""
    said = [f"{box.times} × {_label(box)}: {operator_runs(box.operators, 80)}" for panel in panels
            for box in panel.drawing.boxes if box.kind == "fused"]
    return f"Fused nodes in the order of the data: {'; '.join(said) or 'none'}."


def _label(box: Box) -> str:
    return f"{box.title[:LETTERS - 1]}…" if len(box.title) > LETTERS else box.title


def _lines(box: Box) -> list[str]:
    """The operators in a box, where its title does not say it all."""
    if len(box.operators) < 2:
        return []
    # "2 Add" stays on one line.
    lines = wrap(re.sub(r"(\d) ", "\\1\xa0", visible(operator_runs(box.operators, LETTERS * LINES))), LETTERS)
    return lines if len(lines) <= LINES else [*lines[:LINES - 1], "…"]


def _words(root: Element, y: float, head: str, notes: Sequence[str]) -> float:
    """A heading with notes; returns where they end."""
    for words, kind in ((head, "head"), *((note, "note") for note in notes)):
        if words:
            y += LINE
            _text(root, visible(words), MARGIN, y, kind)
    return y


def _draw(root: Element, drawing: Drawing, y: float) -> tuple[float, float]:
    """The boxes with their edges, below ``y``; returns how far they go to the right and down."""
    lines = [_lines(box) for box in drawing.boxes]
    heights = [LINE * (1 + len(each)) + 12 for each in lines]
    found = layout(drawing, WIDTH, heights)
    top = y + LINE
    group = SubElement(root, "g", transform=f"translate({MARGIN:.0f} {top:.0f})")
    for way in found.ways:
        parts = [f"M{way[0][0]:.1f} {way[0][1]:.1f}"]
        for (x, start), (to, end) in pairwise(way):
            half = (start + end) / 2
            parts.append(f"C{x:.1f} {half:.1f} {to:.1f} {half:.1f} {to:.1f} {end:.1f}")
        SubElement(group, "path", {"class": "way", "d": " ".join(parts), "marker-end": "url(#tip)"})
    for box, (x, above), height, inside in zip(drawing.boxes, found.places, heights, lines, strict=True):
        element = SubElement(group, "g", {"class": box.kind})
        more = f" and {len(box.nodes) - NAMES} more" if len(box.nodes) > NAMES else ""
        SubElement(element, "title").text = visible(", ".join(box.nodes[:NAMES])) + more
        SubElement(element, "rect", _attributes(x=x - WIDTH / 2, y=above, width=WIDTH, height=height, rx=5))
        times = f"{box.times} × " if box.times > 1 else ""
        _text(element, times + visible(_label(box)), x, above + LINE + 2, "title")
        for place, words in enumerate(inside):
            _text(element, words, x, above + LINE * (place + 2) + 2, "line")
    return found.width, top + found.height


def _text(parent: Element, words: str, x: float, y: float, kind: str) -> None:
    SubElement(parent, "text", {"class": kind, **_attributes(x=x, y=y)}).text = words


def _attributes(**figures: float) -> dict[str, str]:
    return {name: f"{figure:g}" for name, figure in figures.items()}
