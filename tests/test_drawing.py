"""The fused graph as a picture: every fused node is in sight, boxes do not cover each other, and names are text."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import body_models
import onnx
import pytest
from cli_models import encoder, run, write
from hypothesis import given
from hypothesis import strategies as st

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.reporting.drawing import picture, svg
from onnxfuse.reporting.drawing.boxes import Box, Drawing, folded, joined
from onnxfuse.reporting.drawing.layout import layout
from onnxfuse.rewriting import read_fused

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    """Up to 24 boxes of three looks, some of them fused nodes, and edges that lead forward."""
    kinds = draw(st.lists(st.sampled_from(["fused", "runtime"]), max_size=24))
    boxes = tuple(Box(kind, draw(st.sampled_from("ABC")), ("Add",), (str(place),))  # type: ignore[arg-type]
                  for place, kind in enumerate(kinds))
    pairs = list(combinations(range(len(boxes)), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=40)) if pairs else []
    return Drawing(boxes, tuple(sorted(edges)))


def nodes(drawing: Drawing) -> list[str]:
    return sorted(name for box in drawing.boxes for name in box.nodes)


@given(drawings())
def test_what_is_joined_keeps_fused_nodes_and_ways(drawing: Drawing) -> None:
    found = joined(drawing)
    assert nodes(found) == nodes(drawing)
    assert sum(box.kind == "fused" for box in found.boxes) == sum(box.kind == "fused" for box in drawing.boxes)
    home = {name: place for place, box in enumerate(found.boxes) for name in box.nodes}
    assert set(found.edges) == {(home[str(source)], home[str(target)]) for source, target in drawing.edges
                                if home[str(source)] != home[str(target)]}
    assert all(source < target for source, target in found.edges), "there is no cycle"


@given(drawings())
def test_what_is_folded_stands_for_all(drawing: Drawing) -> None:
    found = folded(drawing)
    assert nodes(found) == nodes(drawing)
    assert sum(box.times for box in found.boxes) == len(drawing.boxes)
    looks = [(box.kind, box.title, box.times) for box in found.boxes]
    assert all(left != right for left, right in pairwise(looks)), "what repeats is drawn once"
    assert all(source < target for source, target in found.edges)


def chain(titles: str) -> Drawing:
    """Fused nodes one after another."""
    boxes = tuple(Box("fused", title, (title,), (str(place),)) for place, title in enumerate(titles))
    return Drawing(boxes, tuple(pairwise(range(len(boxes)))))


@pytest.mark.parametrize(("titles", "shown"), [
    ("ABABAB", "3A 3B"), ("XABCABCY", "1X 2A 2B 2C 1Y"), ("AABAAB", "4A 2B"), ("ABC", "1A 1B 1C"),
    ("S" + "ABCDE" * 200 + "T", "1S 200A 200B 200C 200D 200E 1T"),
])
def test_layers_that_repeat_are_drawn_once(titles: str, shown: str) -> None:
    found = folded(chain(titles))
    assert " ".join(f"{box.times}{box.title}" for box in found.boxes) == shown
    assert found.edges == tuple(pairwise(range(len(found.boxes)))), "and read what is before them"


@given(drawings())
def test_boxes_lie_apart_and_edges_lead_down(drawing: Drawing) -> None:
    heights = [20.0 + place for place in range(len(drawing.boxes))]
    found = layout(drawing, 100.0, heights)
    for (x, y), height in zip(found.places, heights, strict=True):
        assert 50 <= x <= found.width - 50 + 1e-6 and y >= 0 and y + height <= found.height
    for (one, (x, y)), (other, (to, lower)) in combinations(enumerate(found.places), 2):
        assert abs(x - to) >= 100 or y + heights[one] < lower or lower + heights[other] < y
    for (source, target), way in zip(drawing.edges, found.ways, strict=True):
        assert way[0] == (found.places[source][0], found.places[source][1] + heights[source])
        assert way[-1] == found.places[target]
        assert all(upper[1] <= lower[1] for upper, lower in pairwise(way))


def texts(picture: str, kind: str) -> list[str]:
    """What the boxes of a kind are called."""
    root = ElementTree.fromstring(picture)
    return [box.findtext(f"{SVG}text") or "" for box in root.iter(f"{SVG}g") if box.get("class") == kind]


@pytest.mark.parametrize("layers", [1, 4])
def test_a_model_shows_each_region_with_its_function(layers: int) -> None:
    """One layer is drawn node by node; of four, whose picture would be long, what repeats is drawn once."""
    result = onnxfuse.optimize(encoder(layers=layers), verify=False, target="H100")
    drawn = result.to_svg()
    titles = texts(drawn, "fused")
    times = [int(title.split(" × ")[0]) if " × " in title else 1 for title in titles]
    assert sum(times) == len(result.report.fusions)
    names = {title.split(" × ")[-1] for title in titles}
    rules = {fusion.rule for fusion in result.report.fusions}
    # A box is too narrow for the rules of several regions in one launch.
    assert all(any(rule.startswith(name.removesuffix("…")) for name in names) for rule in rules)
    assert all(any(rule.startswith(name.removesuffix("…")) for rule in rules) for name in names)
    root = ElementTree.fromstring(drawn)
    assert root.findtext(f"{SVG}title") == "encoder: fused graph"
    told = root.findtext(f"{SVG}desc") or ""
    assert all(title.split(" × ")[-1] in told for title in titles)
    assert ("What repeats is drawn once" in drawn) == (layers == 4) == (max(times) > 1)
    assert len(texts(drawn, "input")) == 2 and len(texts(drawn, "output")) == 1
    names = " ".join(element.text or "" for element in root.iter(f"{SVG}title"))
    assert result.report.fusions[0].replaces[0] in names


def test_bodies_are_drawn_below() -> None:
    model = onnxfuse.optimize(body_models.loop(), verify=False, target="H100").model
    (body,) = {node.body.label for node in read_fused(model) if node.body is not None}
    root = ElementTree.fromstring(picture(model, "loop"))
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "head"] == ["loop", body]


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "MOST", 5)
    onnx.save(encoder(), tmp_path / "model.onnx")
    done = run("report", tmp_path / "model.onnx", "--graph", tmp_path / "graph.svg", "--html", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "The graph is too large to draw: " in done.output and "5 can be looked at" in done.output
    assert "Netron" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"], "nothing is written where one cannot be"
    with pytest.raises(ModelError):
        onnxfuse.optimize(encoder(), verify=False).to_svg()


def test_a_fused_file_is_drawn_as_its_original_would_be(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "model.onnx")
    assert run("optimize", tmp_path / "model.onnx", "--no-verify").exit_code == 0
    drawn = []
    for name in ("model", "model.fused"):
        done = run("report", tmp_path / f"{name}.onnx", "--graph", tmp_path / f"{name}.svg")
        assert done.exit_code == 0, done.output
        drawn.append((tmp_path / f"{name}.svg").read_text(encoding="utf-8").replace(f"{name}.onnx", "NAME"))
    assert drawn[0] == drawn[1] and 'class="fused"' in drawn[0]


def test_names_are_text_and_none_is_cut_off_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "g (float[n, 64] x) => (float[n, 64] y) { a = Exp(x) y = Neg(a) }")
    model = onnx.load(path)
    names = ["</title></svg><script>alert(1)</script>", "]]>\x1b[2J\u202e<img src=x>"]
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    model.graph.node[1].output[0] = model.graph.output[0].name = '"><b>' + 60 * "y"
    onnx.save(model, path)
    assert run("report", path, "--graph", tmp_path / "graph.svg").exit_code == 0
    drawn = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawn)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "style", "defs", "marker", "path", "g", "rect", "text"}
    told = " ".join(element.text or "" for element in root.iter(f"{SVG}title"))
    assert names[0] in told and "]]>\\x1b[2J\\u202e<img src=x>" in told and '"><b>' + 60 * "y" in told
    assert texts(drawn, "output") == ['"><b>' + 24 * "y" + "…"]


def test_the_picture_in_the_docs_is_of_the_command_beside_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command draws it now, but for figures of plans that change: its rules and inputs."""
    from cli_models import ROOT

    onnx.save(encoder(layers=4, hidden=256), tmp_path / "encoder.onnx")
    assert run("report", tmp_path / "encoder.onnx", "--target", "H100", "--graph",
               tmp_path / "graph.svg").exit_code == 0
    kept, made = ((folder / "graph.svg").read_text(encoding="utf-8") for folder in (
        ROOT / "docs" / "pictures", tmp_path))
    for kind in ("input", "fused", "output"):
        assert texts(kept, kind) == texts(made, kind), "draw docs/pictures/graph.svg anew, as docs/report.md says"
