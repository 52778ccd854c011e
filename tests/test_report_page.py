"""The HTML report as a browser shows it: no script fails, nothing is cut off, its figures are the JSON's, and names of
a model that means harm are text."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from chromium import BINARY, Page, browser
from cli_models import CHAIN, ROOT, encoder, parse

import onnxfuse
from onnxfuse.reporting import Report
from onnxfuse.rewriting import FUSED
from onnxfuse.rewriting.provenance import KEY
from onnxfuse.visible import visible

STYLE = (ROOT / "onnxfuse" / "reporting" / "page" / "page.css").read_text(encoding="utf-8")

HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</title></svg></script><script>alert(3)</script>",
    "{{ 7 * 7 }}", "\x1b]0;title\x07", "\u202etxet", "$\\frac{1}{2}$", "]]> -->",
)


def model() -> onnx.ModelProto:
    """An encoder whose names mean harm, with an operator of the same kind that nothing fuses."""
    made = encoder(layers=2)
    for place, node in enumerate(made.graph.node):
        node.name = f"{HOSTILE[place % len(HOSTILE)]}{place}"
    made.graph.name = HOSTILE[0]
    (output,) = made.graph.output
    made.graph.node.append(onnx.helper.make_node("Softmax", [output.name], ["<b>last</b>"], HOSTILE[1]))
    made.graph.output.append(onnx.helper.make_tensor_value_info("<b>last</b>", output.type.tensor_type.elem_type, None))
    return made


@pytest.fixture(scope="module")
def report() -> Report:
    """Of that model, with an operator's name that means harm and a fused node that was measured."""
    found = onnxfuse.report(model(), dims={"batch": 8, "sequence": 128}, target="H100")
    measured = {"microseconds": 7.5, "runtime_microseconds": 15.0, "speedup": 2.0, "gpu": HOSTILE[0],
                "date": "2026-01-01", "source": "tune"}
    first, *rest = found.fusions
    return replace(
        found, fusions=(replace(first, measured=measured), *rest), notes=(HOSTILE[2],),
        operators=tuple(replace(row, operator=HOSTILE[1]) if row.operator == "MatMul" else row
                        for row in found.operators),
        kernels={name: f"// {HOSTILE[2]}\n{text}" for name, text in found.kernels.items()},
    )


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.to_html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if BINARY is None or subprocess.run([BINARY, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no chromium: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


chromium = pytest.mark.xdist_group("chromium")


def opened(page: Page) -> None:
    page.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")


@chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_script_fails_and_nothing_scrolls_sideways(page: Page, file: Path, width: int, scheme: str) -> None:
    page.faults.clear()
    page.requests.clear()
    page.open(file, width, scheme=scheme)
    for _ in range(2):
        assert page.run("document.documentElement.scrollWidth") <= width == page.run("innerWidth")
        opened(page)
    assert page.faults == []
    assert page.requests == [file.resolve().as_uri()], "it needs nothing else"
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@chromium
def test_figures_are_those_of_the_json(page: Page, file: Path, report: Report) -> None:
    content = report.to_json()
    page.open(file, 1280)

    def values(rows: str) -> list[list[float]]:
        found: list[list[float]] = page.run(
            f"[...document.querySelectorAll('{rows}')].map(row => "
            "[...row.querySelectorAll('data')].map(each => Number(each.value)))")
        return found

    assert values("#whole tbody tr") == [[content[f"{name}_before"], content[f"{name}_after"]] for name in (
        "nodes", "kernels", "flops")] + [[content["bytes_products"], content["bytes_products_after"]]] + [
        [content[f"{name}_before"], content[f"{name}_after"]] for name in ("bytes", "peak_bytes", "estimated_seconds")]
    assert values("#by-operator tbody tr") == [
        [row[f"{name}_{side}"] for name in ("kernels", "bytes", "seconds") for side in ("before", "after")]
        for row in content["operators"]]
    assert values("#remaining tbody tr:first-child") == [
        [group["times"], group["seconds"], group["bytes"]] for group in content["remaining"]]
    rows = values("#fusions tbody tr:first-child")
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row[1] for row in rows) == len(content["fusions"])
    assert {tuple(row[2:]) for row in rows} == {
        (entry["bytes_before"], entry["bytes_after"], entry["seconds_before"], entry["seconds_after"],
         entry["estimated_speedup"], *([entry["measured"]["speedup"]] if entry["measured"] else []))
        for entry in content["fusions"]}
    told = page.run("document.querySelector('#fusion-1 dl').textContent")
    first = next(entry for entry in content["fusions"] if entry["node"] in page.run(
        "document.querySelector('#fusion-1 .nodes code').textContent"))
    assert f"{first['flops'] / first['bytes_after']:.3g} operations a byte" in told and "FLOP/s predicted" in told
    drawn = page.run("[...document.querySelectorAll('#operators figure:last-child text')].map(one => one.textContent)")
    assert f"{report.operators[0].seconds_before * 1e6:.3g}" in drawn and "Predicted GPU time (µs)" in drawn


@chromium
def test_hostile_names_are_text(page: Page, file: Path, report: Report) -> None:
    page.open(file, 1280)
    opened(page)
    shown = page.run("document.body.textContent")
    assert page.run("[document.images.length, document.scripts.length, document.querySelectorAll('b b, main img')"
                    ".length]") == [0, 1, 0]
    for entry in report.fusions:
        for name in entry.replaces:
            assert visible(name) in shown
    for name in HOSTILE:
        assert visible(name) in shown, name
    labels = page.run("[...document.querySelectorAll('svg text')].map(each => each.textContent)")
    assert any(label.startswith('"><img src=x onerror=ale') for label in labels)
    assert page.run("document.title") == f"{HOSTILE[0]}: fusion report"


@chromium
def test_fusions_are_sorted_and_searched(page: Page, file: Path, report: Report) -> None:
    page.open(file, 1280)
    speedups = ("[...document.querySelectorAll('#fusions tbody:not([hidden])')].map("
                "each => Number(each.rows[0].cells[7].querySelector('data').value))")
    button = "document.querySelector('#fusions thead').rows[0].cells[7].firstElementChild"
    page.run(f"{button}.click()")
    assert page.run(speedups) == sorted(page.run(speedups), reverse=True)
    assert page.run(f"{button}.parentElement.ariaSort") == "descending"
    page.run(f"{button}.click()")
    assert page.run(speedups) == sorted(page.run(speedups)) and len(page.run(speedups)) > 2
    everything = page.run(speedups)
    assert len({entry.rule for entry in report.fusions}) > 1
    words = f"{report.fusions[0].operators[-1].lower()} {report.fusions[0].rule.upper()}"
    page.run(f"search.value = {words!r}; search.dispatchEvent(new Event('input'))")
    assert 0 < len(page.run(speedups)) < len(everything)
    assert page.run("found.textContent") == f"{len(page.run(speedups))} of {len(everything)} rows"
    assert page.faults == []


@chromium
def test_a_screen_reader_is_told_everything(page: Page, file: Path) -> None:
    page.open(file, 1280)
    opened(page)
    told = page.tree()
    for role in ("image", "table", "searchbox", "button", "region", "navigation"):
        named = [node["name"] for node in told if node["role"] == role]
        assert named and all(named), role
    (traffic, time, roof) = [node["name"] for node in told if node["role"] == "image"]
    assert "fused nodes 0 before" in traffic and "in µs" in time and "1: " in roof and "GFLOP/s" in roof
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert page.run("[...document.querySelectorAll('table')].every(each => each.caption)")
    assert page.run("[...document.querySelectorAll('th')].every(each => ['col', 'row'].includes(each.scope))")
    assert page.run("document.documentElement.lang") == "en"


@chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_the_graph_is_shown_as_text(page: Page, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "graph.svg"
    file.write_text(onnxfuse.optimize(model(), target="H100", verify=False).to_svg(), encoding="utf-8")
    page.faults.clear()
    page.requests.clear()
    page.open(file, 1280, scheme=scheme)
    assert page.faults == [] and page.requests == [file.resolve().as_uri()]
    assert page.run("[document.querySelectorAll('script, image, a').length, document.title.length > 0]") == [0, True]
    told = page.run("document.documentElement.textContent")
    assert HOSTILE[0] in told and HOSTILE[1] in told and visible(HOSTILE[4]) in told
    paper = page.run("getComputedStyle(document.documentElement).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@chromium
def test_it_prints_on_white_paper(page: Page, file: Path, tmp_path: Path) -> None:
    page.open(file, 1280, scheme="dark")
    page.call("Emulation.setEmulatedMedia", media="print",
              features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.run("document.querySelector('.tools').offsetHeight") == 0
    page.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def luminance(colour: str) -> float:
    """As WCAG has it, of "#rgb" or "#rrggbb"."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place:place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", range(3), ids=["light", "dark", "print"])
def test_colours_stand_out(scheme: int) -> None:
    colours = dict(re.findall(r"--(\w+): (#\w+);", re.findall(r":root \{([^}]*)\}", STYLE)[scheme]))

    def contrast(name: str, ground: str) -> float:
        low, high = sorted((luminance(colours[name]), luminance(colours[ground])))
        return (high + 0.05) / (low + 0.05)

    for name in ("ink", "soft", "link"):
        assert contrast(name, "paper") >= 4.5 and contrast(name, "tint") >= 4.5, name
    for name in ("before", "after"):
        assert contrast(name, "paper") >= 2.8, name


def test_the_page_is_the_same_each_time_and_whatever_the_settings(
        report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    first = report.to_html()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    assert report.to_html() == first
    assert matplotlib.rcParams["font.size"] == 30


ODD = (1e308, -1.0, 5e-324, 0.0)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("part", ["nodes", "operators", "remaining", "roofline", "after"])
def test_a_page_of_a_file_that_means_harm(part: str, shift: int) -> None:
    """Figures of its record are made odd ones: there is a page, or an error that says what is damaged."""
    fused = onnxfuse.optimize(parse(CHAIN), target="H100", verify=False).model
    entry = next(entry for entry in fused.metadata_props if entry.key == KEY)
    record = json.loads(entry.value)
    held = record[part]
    groups = [held] if part in ("roofline", "after") else list(held.values() if part == "nodes" else held)
    for place, group in enumerate(groups):
        figures = [name for name, value in group.items() if isinstance(value, float) or name in ("flops", "bytes")]
        group.update((name, ODD[(place + shift + each) % len(ODD)]) for each, name in enumerate(figures))
    entry.value = json.dumps(record)
    try:
        assert onnxfuse.report(fused).to_html().endswith("</html>")
    except onnxfuse.ModelError as error:
        assert part == "roofline" and "The record of what the GPU can do is damaged." in str(error)


def test_a_page_of_few_figures() -> None:
    """A report of an older record: no costs by operator, no roofline, nothing fused."""
    plain = onnxfuse.report(parse(CHAIN), target="H100", least_gain=50.0)
    bare: Any = replace(plain, operators=(), remaining=(), roofline={}, left=(), refusals=())
    shown = bare.to_html()
    assert "Nothing was fused." in shown
    assert "<svg" not in shown and "Roofline" not in shown and 'href="#operators"' not in shown
    assert FUSED not in plain.to_html()
