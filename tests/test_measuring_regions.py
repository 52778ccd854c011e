"""The benchmark scripts of single regions, as far as they go without a GPU."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_models import apart
from click.testing import CliRunner
from fake_timer import RUNTIME, FakeTimer

from onnxfuse.planning.costs.hardware import find_profile

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
spills, ways, attention, claims, depthwise, odd_rows, products, kernels = map(importlib.import_module, (
    "spills", "ways", "attention", "claims", "depthwise", "odd_rows", "products", "kernels"))


def spill_result(own: float, taken: float, best: float) -> object:
    ways = [spills.Way(f"rows_{name}", 64, local, time) for name, local, time in
            (("own", 100, own), ("taken", 0, taken), ("best", 0, best))]
    return spills.SpillResult("softmax float, 1 x 65536", ways[0], ways[1], tuple(ways))


@pytest.mark.parametrize(("times", "passes", "words"), [
    ((20.0, 10.0, 10.0), True, "takes 1.000 times as long as the best way in the mean, is within 5% of it in 1 of 1"),
    ((20.0, 10.6, 10.0), False, "takes 1.060 times as long as the best way in the mean, is within 5% of it in 0 of 1"),
    ((10.0, 10.4, 10.4), False, "and slower than the own way in 1"),
])
def test_what_the_table_of_spills_says(times, passes, words):
    text, good = spills.show([spill_result(*times)])
    assert good is passes
    assert words in text


def test_a_dry_run_of_spills(tmp_path):
    arguments = ["--lengths", "1024,65536", "--cases", "layer-norm float16", "--dry-run", "--target", "H200",
                 "--out", str(tmp_path)]
    result = CliRunner().invoke(spills.main, arguments)
    assert result.exit_code == 0, result.output
    lines = [line.split("|")[1:] for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 4
    for case, own, spilled, taken, left, *times in ([cell.strip() for cell in line] for line in lines):
        assert not any(times)
        assert int(left) <= int(spilled)
        assert (own == taken) is (int(spilled) == int(left))
        assert "65536" in case or own == taken
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("own", "passes"), [(11.0, True), (12.0, False)])
def test_what_the_table_of_ways_says(own, passes):
    times = {"rows_own": own, "rows_other": 10.0, "rows_third": 40.0}
    text, good = ways.show([ways.WaysResult("mean", 9.0, 30.0, times)])
    assert good is passes
    assert f"takes {own / 10:.3f} times as long as the best in the mean" in text
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    assert cells == ["mean", "rows_own", "3", "30.00", "9.00", f"{own:.2f}", "10.00", "rows_other", f"{own / 10:.2f}"]


def test_ways_are_timed_and_so_is_the_runtime(monkeypatch):
    timer = FakeTimer(lambda name: 30.0 if name == RUNTIME else 4.0 if name.endswith("x2_32") else 5.0)
    monkeypatch.setattr("onnxfuse.tuning.find_timer", lambda: timer)
    case, text = next((case, text) for case, text in ways.cases() if case.startswith("squeeze"))
    result = ways.measure(case, text, find_profile("H200"), dry_run=False)
    assert (result.runtime, result.own, result.best) == (30.0, "pointwise_w8_32", "pointwise_w8_x2_32")
    assert result.over == 1.25 and set(timer.timed) == {RUNTIME, *result.ways}


@pytest.mark.parametrize(("shape", "own", "again"), [
    ((200, 50_257), "rows_1024_w8_x7_peeled_32", 3.0), ((4096, 197), "rows_32_w8_x1_peeled_32", None),
])
def test_odd_rows_are_timed_by_vectors_and_by_elements(shape, own, again, monkeypatch):
    times = {"stream_peeled": 3.0, "_x7_peeled": 2.0, "32_w8_x1_peeled_32": 1.0, "peeled": 4.0, "w1": 8.0, "w8": 1.5}
    timer = FakeTimer(lambda name: next(taken for part, taken in times.items() if part in name))
    monkeypatch.setattr("onnxfuse.tuning.find_timer", lambda: timer)
    result = odd_rows.measure("softmax", "float16", shape, find_profile("H200"), dry_run=False)
    assert result.kernel.startswith(own) and (result.again, result.elements, result.divided) == (again, 8.0, 1.5)
    assert result.gain == 8.0 / result.own and result.nbytes == 4 * math.prod(shape)
    assert round(result.least * 4.3e6 / result.nbytes) == 1


def test_ways_that_were_not_timed_are_not_the_best():
    result = ways.WaysResult("mean", 9.0, None, {"rows_own": None, "rows_other": 10.0})
    assert (result.best, result.over) == ("rows_other", None)


def test_what_spills_is_timed_every_way(monkeypatch):
    timer = FakeTimer(lambda name: 5.0)
    monkeypatch.setattr("onnxfuse.tuning.find_timer", lambda: timer)
    result = spills.measure(spills.SpillCase("layer-norm", "float16", 1, 65536), find_profile("H200"), dry_run=False)
    assert {way.kernel for way in result.ways} == set(timer.timed) and len(result.ways) > 3
    assert result.own.spilled_bytes > 0 == result.taken.spilled_bytes and result.taken.microseconds == 5.0


def test_a_dry_run_of_ways(tmp_path):
    result = apart().invoke(ways.main, ["--dry-run", "--target", "H200", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()[2:]]
    assert len(lines) == len(list(ways.cases()))
    for _, own, count, runtime, predicted, *times in lines:
        assert own.startswith(("rows_", "scans_", "pointwise_w8", "split0_pieces_"))
        assert int(count) >= 1 and float(predicted) > 1
        assert not runtime and not any(times)
    assert not list(tmp_path.iterdir())


def test_spills_from_an_earlier_run(tmp_path):
    """Times of kernels by name; what is taken is found anew."""
    kept = BENCHMARKS / "results" / "2026-11-22-h200-spills.json"
    result = CliRunner().invoke(spills.main, ["--from", str(kept), "--lengths", "40960", "--cases", "softmax",
                                          "--out", str(tmp_path)])
    assert "what is taken is by the rule at commit" in result.output
    written = json.loads((tmp_path / kept.name).read_text())
    assert written["environment"] == json.loads(kept.read_text())["environment"]
    assert len(written["cases"]) == 4
    assert any(way["microseconds"] for case in written["cases"] for way in case["ways"])


@pytest.mark.parametrize("named", ["float16", "bfloat16", "float32"])
def test_attentions_of_all_types_are_timed(named: str) -> None:
    """None that has no kernel."""
    found = CliRunner().invoke(attention.main, ["--cases", "bert 8,decode 1:32768,wide", "--type", named, "--dry-run",
                                                "--target", "H100"])
    assert found.exit_code == 0, found.output
    assert ("wide 2048" in found.output) is (named != "float32")
    assert ("_w8_32" in found.output) is (named != "float32") and ("_w4_32" in found.output) is (named == "float32")


def test_attentions_that_are_timed_are_one_kernel() -> None:
    """All of a case's nodes; its text says what its numbers say."""
    profile = find_profile("H200")
    for case in (attention.CASES[0], attention.CASES[3], attention.CASES[9]):
        found = attention.prepare(case, profile).timed(dry_run=True)
        assert found.own.startswith("attention_") and set(found.ways.values()) == {None}
    split = attention.prepare(attention.CASES[9], profile).timed(dry_run=True)
    assert split.own.endswith("_split") and split.case.flops == 4 * 32 * 2049 * 64
    few = attention.prepare(attention.CASES[9], profile, most=2).timed(dry_run=True)
    assert [*few.ways] == [*split.ways][:2]
    (plain,) = attention.with_torch([split], 0)
    timed = replace(plain, torch=10.0, backend="flash", ways={"a": 12.0, "b": 11.0})
    text, passes = attention.show([timed])
    assert timed.best == "b" and " 1.10 |" in text and not passes
    assert attention.show([replace(timed, torch=11.0)])[1]


@pytest.mark.parametrize(("name", "tflops"), [
    ("bert 8:128 up", 4.8), ("bert 8:128 up, GELU", 4.8), ("bert 8:128 down, residual", 4.8), ("llama gate", 47.2),
    ("resnet 14, 3 x 3", 7.4), ("resnet 56, 64 to 256", 3.3)])
def test_products_that_are_timed_are_one_kernel(name: str, tflops: float) -> None:
    """With what follows them, and transposes of what lies channels-last."""
    case = next(each for each in products.CASES if each.name == name)
    for kind in ("float", *(["bfloat16"] if not case.window else []), "float16"):
        found = products.prepare(replace(case, kind=kind), find_profile("H200")).timed(dry_run=True)
        assert case.window or "_specialised" in found.own
    assert found.own.startswith("product_") and set(found.ways.values()) == {None} and len(found.ways) > 4
    few = products.prepare(case, find_profile("H200"), most=1).timed(dry_run=True)
    libraries = [way for way in found.ways if not way.startswith("product_")]
    assert [*few.ways] == [way for way in found.ways if way in (found.own, *libraries)]
    assert case.flops == pytest.approx(tflops * 1e9, rel=0.05)
    (plain,) = products.with_torch([found], 0)
    timed = replace(plain, torch=10.0, ways={"a": 12.0, "b": 11.0}, case=replace(case, follows="relu"))
    text, passes = products.show([timed])
    assert " 1.10 |" in text and passes and not products.show([replace(timed, torch=9.0)])[1]


@pytest.mark.parametrize(("runtime", "library", "passes"), [(10.0, 10.0, True), (9.8, 10.0, False), (10.0, 8.0, False)])
def test_bare_products_are_held_beside_the_runtime_and_ours_beside_the_library(
        runtime: float, library: float, passes: bool) -> None:
    """The best of both beside the runtime's, our own kernels beside the library's best."""
    ways = {"product_a": 11.0, "product_b": 10.0, "gemm_0": library, "gemm_1": 20.0}
    found = products.ProductResult(products.CASES[0], 9.0, runtime, ways)
    text, good = products.show([found])
    assert good is passes
    assert f"take {10 / library:.3f} times as long as cuBLASLt's best" in text
    assert f"take {min(10, library) / runtime:.3f} times as long as ONNX Runtime's" in text


def test_no_case_is_timed_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor PyTorch's: what there is is written."""
    monkeypatch.setattr("region_times.measured_on", lambda *_: products_environment())
    timer = FakeTimer(lambda name: 4.0)
    monkeypatch.setattr("onnxfuse.tuning.find_timer", lambda: timer)
    monkeypatch.setattr(products, "torch_beside", lambda *_: pytest.fail("too late"))
    found = CliRunner().invoke(products.main, ["--cases", "bert 8:128 up", "--ways", "1", "--within", "0", "--out",
                                               str(tmp_path)])
    assert not timer.timed and found.exit_code == 0, found.output
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["cases"] == []


def products_environment() -> object:
    """Of a GPU that is not here."""
    return importlib.import_module("common").Environment("2026-11-30", "NVIDIA H200", "1", "13.0", {}, None)


def test_only_some_are_timed_within_the_time() -> None:
    each_within = importlib.import_module("region_times").each_within
    waited = each_within([0.0, 0.2, 0.0], lambda case: time.sleep(case) or 1, 0.1, None)
    assert waited == [1, 1, None]


def test_what_the_runtime_has_no_kernel_for_is_timed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is none, and why is said."""
    timer = FakeTimer(lambda name: 4.0, broken=frozenset({RUNTIME}))
    monkeypatch.setattr("onnxfuse.tuning.find_timer", lambda: timer)
    found = products.prepare(products.CASES[4], find_profile("H200"), most=1).timed()
    assert found.runtime is None and found.ways[found.best] == 4.0


def test_depthwise_convolutions_that_are_timed_are_one_kernel() -> None:
    """Their floors are of bytes or of products, whichever takes longer; a wrong result fails."""
    profile = find_profile("H200")
    for case in (depthwise.CASES[0], depthwise.CASES[5], depthwise.CASES[-3]):
        found = depthwise.measure(case, profile, dry_run=True)
        assert found.own.startswith("stencil_") and set(found.ways.values()) == {None}
    lasts = [case for case in depthwise.CASES if case.last]
    for case in (lasts[0], lasts[-1]):
        assert depthwise.measure(case, profile, dry_run=True).own.startswith("stencil_last_")
    assert lasts[0].name == "last convnext 96 x 56, 7" and lasts[0].bytes == depthwise.CASES[0].bytes
    first = depthwise.CASES[0]
    assert first.bytes == 2 * (2 * 32 * 96 * 56 * 56 + 96 * 50) and first.flops == 2 * 49 * 32 * 96 * 56 * 56
    assert first.floor(4e12, 60e12) == pytest.approx(15.7, rel=0.01)
    assert first.floor(4e11, 60e12) == pytest.approx(96.3, rel=0.01)
    timed = replace(depthwise.measure(first, profile, dry_run=True), runtime=100.0, floor=10.0,
                    ways={"a": 14.0, "b": 12.0}, errors={"a": 0.001, "b": 0.002})
    text, passes = depthwise.show([timed])
    assert timed.best == "b" and " 1.20 |" in text and " 8.33 |" in text and passes
    assert not depthwise.show([replace(timed, errors={"a": 0.001, "b": 0.5})])[1]
    assert not depthwise.show([replace(timed, floor=9.0)])[1]
    text, passes = depthwise.show([replace(timed, errors={"a": "it did not run", "b": 0.0})])
    assert not passes and text.endswith(", a: it did not run")


def test_claims_are_of_blocks_that_fuse():
    case = claims.ClaimCase(claims.CLAIMS[3], 2, 8)
    model = case.model()
    assert [info.name for info in model.graph.input] == ["x"]
    assert claims.flops(model) == 2 * 2 * 16 * 768 * 3072
    found = claims.planned(case, find_profile("H200"))
    timed = replace(found, times=(0.4, 0.3, 0.2), kernels=(9, 6, 2), peaks=(2**20, 2**20, None), floor=0.1)
    text, passes = claims.show([found, timed, replace(timed, times=(0.8, 0.3, 0.2))])
    assert passes and "refuted" in text and "reproduced" in text and "9 → 6 → 2" in text and "1 → 1 → -" in text
