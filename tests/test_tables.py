"""Tables of every command fit the terminal, and no number in them is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_models import ROOT, encoder, run
from rich.cells import cell_len
from rich.console import Console

import onnxfuse
from onnxfuse.cli.bisect import _show_times as show_times
from onnxfuse.debugging.results import NodeTime, TimeResult
from onnxfuse.measuring.results import BenchResult, Ceiling, Rates, Side, Throughput
from onnxfuse.measuring.statistics import Ratio, Spread
from onnxfuse.reporting import measured, profile_text, report_text, tuned
from onnxfuse.reporting.profile import ProfiledRun, RunProfile
from onnxfuse.reporting.text import plain_table
from onnxfuse.tuning import Tuned, TunedRegion

WIDTHS = (20, 40, 60, 80, 100, 200)


def printed(show: Callable[[Console], None], width: int) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False))
    return file.getvalue()


def figures(text: str) -> set[str]:
    """Words that are numbers, with what is beside their digits; names of nodes and rules are none."""
    return {word for word in text.split() if re.fullmatch(r"\(?[\d.,]+[x%)]*", word)}


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_fit_and_figures_are_whole(width: int) -> None:
    rows = [["12", "a-rule-of-a-very-long-name+another-rule", "Add, Mul, LayerNormalization, Add", "1,234,567.89 MB",
             "12.345 ms (12.300 to 12.400)"],
            ["3", "short", "Add", "9.5 kB", "0.001 ms (0.000 to 0.002)"]]
    table = plain_table("times", "rule", "operators", "bytes", "time", left=(1, 2), wrap=(4,), drop=(2,))
    for row in rows:
        table.add_row(*row)
    output = printed(lambda console: console.print(table), width)
    assert max(map(cell_len, output.splitlines())) <= width
    assert "…" not in output
    for row in rows:
        for figure in (row[0], *row[3].split(), *row[4].split()):
            assert figure in output.split(), figure
    flat = re.sub(r"\s+", "", output)
    assert rows[1][1] in flat


def test_texts_wrap_before_columns_go_and_rows_become_records_last() -> None:
    def shown(width: int) -> str:
        table = plain_table("n", "name", "more", "figure", left=(1, 2), drop=(2,))
        table.add_row("1", "one two three four", "five six seven eight", "123,456")
        return printed(lambda console: console.print(table), width)

    assert shown(60) == ("n  name                more                   figure\n"
                         "1  one two three four  five six seven eight  123,456\n")
    assert [line.split() for line in shown(40).splitlines()] == [
        ["n", "name", "more", "figure"], ["1", "one", "two", "three", "five", "six", "123,456"],
        ["four", "seven", "eight"]]
    narrow, narrower = ([line.rstrip() for line in shown(width).splitlines()] for width in (30, 15))
    assert narrow == ["n  name                 figure", "1  one two three four  123,456"]
    assert narrower == ["n  1", "name  one two", "three four", "more  five six", "seven eight", "figure  123,456"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_report(width: int) -> None:
    report = onnxfuse.report(encoder(2), target="H100")
    output = printed(lambda console: report_text.show(report, console), width)
    table = output[output.index("Fused:"):output.index("recognised:")]
    assert "…" not in table and max(map(cell_len, table.splitlines())) <= width
    whole = printed(lambda console: report_text.show(report, console), 4000)
    figures = re.findall(r"\d\S* (?:B|kB|MB|µs)|\d+\.\d+x", whole[whole.index("Fused:"):whole.index("recognised:")])
    assert figures and all(figure in table for figure in figures)


LONG = "/encoder/layer.0/attention/self/Add_1.scaled-masked-softmax"

TUNED = Tuned("a GPU", "db", (TunedRegion(
    "grow-pointwise+residual-layer-norm", "rows", LONG, ("Add",) * 3, "float[8, 128]", 12, 123.45, 45.67, 12.34,
    "rows, 4 a block, width 8", 3, 2, 0, (), "fused"),), (), 1.0)

RUN = RunProfile("m.onnx", "s.json", ("a GPU",), ("H100",), 12_345.0, (ProfiledRun(
    LONG, "scaled-masked-softmax", "Region0", "warp", "a GPU", ((8, 12, 128, 128), (8, 1, 1, 128)),
    ((8, 12, 128, 128),), 12_345, 100, 0, 11.1, 12.3, 12.0, 1.11, 151_843.5, 0.987),), (), ())

TIMES = Spread(12.345, 12.301, 12.402, 12.2, 12.5, 12.441, 12.487, 100)
SIDE = Side("m.onnx", 1.23, TIMES, TIMES, 1_234, 56, (), 987_000_000,
            Throughput(2, 12_345.6, 98_765.4, (TIMES, TIMES)),
            Rates(1_234_567_890, 98_765_432_100, 3, "GPU time", 3_210.9, 456.7))
MEASURED = BenchResult("a GPU", "CUDAExecutionProvider", {}, False, {"x": (8, 128)}, SIDE, SIDE,
                       Ratio(1.234, 1.203, 1.267), Ratio(2.345, 2.301, 2.389),
                       ceiling=Ceiling("H200", 4_300.0, 790.0, ("gigabytes_per_second",)))

TIMED = TimeResult("a GPU", ("inputs of x[8x128]",), 12, (NodeTime(
    LONG, "Region0", "scaled-masked-softmax", ("Add_1",), ("b",), 0.01234, 0.00567, 2.18, 2.11, 2.25),))

SHOWN: dict[str, Callable[[Console], None]] = {
    "tune": lambda console: tuned.show(TUNED, console),
    "report --profile": lambda console: profile_text.show(RUN, console),
    "bench": lambda console: measured.show(MEASURED, console),
    "bisect": lambda console: show_times(TIMED, Path("m.onnx"), console),
}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("name", SHOWN)
def test_figures_of_other_commands(name: str, width: int) -> None:
    output, whole = (printed(SHOWN[name], each) for each in (width, 4000))
    assert "…" not in output
    lost = figures(whole) - figures(output)
    assert not {each for each in lost if not any(each in column for column in GONE.get(name, ()))}, lost


GONE = {"report --profile": ("8x12x128x128,", "8x1x1x128", "152", "1.11"), "tune": ("rows, 4 a block, width 8",)}
"""Figures of columns that may go."""


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("arguments", [["targets"], ["rules", "list"], ["rules", "check", ROOT / "examples" / "rules"]])
def test_lists(arguments: list[object], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run(*arguments).output
    monkeypatch.setattr("onnxfuse.cli.output.PLAIN_WIDTH", width)
    output = run(*arguments).output
    assert "…" not in output
    gone = figures(wide) - figures(output)
    assert not gone if width >= 100 else len(gone) < len(figures(wide)) / 2


def test_a_measurement_says_what_its_rates_are_held_against() -> None:
    said = printed(lambda console: measured.show(MEASURED, console), 200)
    for part in ("12.345 / 12.441 / 12.487 ms", "12,346 runs/s, 98,765 items/s, 2 threads", "3,211 GB/s (75%)",
                 "457 TFLOP/s (58%)",
                 "rates: 1.23 GB, 1.23 GB a run, as the report counts them, over GPU time, without 3 tensors whose "
                 "size is not known before a run",
                 "H200 reaches 4,300 GB/s (measured) and 790 TFLOP/s (by the data sheet)"):
        assert part in said, part
    assert said.count("2       12.345 / 12.441 / 12.487 ms") == 1
