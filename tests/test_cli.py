"""The commands: what they print, write and return."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, PRODUCT, ROOT, encoder, environment, run, run_apart, write
from onnx import helper

from onnxfuse.rewriting import read_fused
from onnxfuse.rules import NameRule, load_rules


def test_optimize_writes_the_fused_model_beside_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    result = run("optimize", path)
    assert result.exit_code == 0, result.output
    fused = tmp_path / "model.fused.onnx"
    (node,) = read_fused(onnx.load(fused))
    assert len(node.replaces) == 5
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert "Fused: 5 nodes into 1, 1 distinct kernel" in lines
    assert "verification: graph verified, kernels not run" in lines
    assert f"written: {fused}" in lines
    assert any(line.startswith("predicted speed-up: ") and line.endswith(", unmeasured") for line in lines)
    kernels = next(line.split() for line in lines if line.startswith("kernels "))
    assert kernels == ["kernels", "5", "1"]


def test_nothing_to_fuse_is_success(tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, PRODUCT))
    assert result.exit_code == 0
    assert "Nothing was fused." in result.output
    assert (tmp_path / "model.fused.onnx").is_file()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    result = run("optimize", path, "--dry-run", "--report", tmp_path / "report.json")
    assert result.exit_code == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["output"] is None


def test_optimising_twice_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(), path)
    assert run("optimize", path, "-o", tmp_path / "once.onnx").exit_code == 0
    before = (tmp_path / "once.onnx").read_bytes()
    result = run_apart("optimize", tmp_path / "once.onnx", "-o", tmp_path / "twice.onnx")
    assert result.exit_code == 0
    assert result.stderr == (
        f"warning: {tmp_path / 'once.onnx'} is fused already, and nothing was written.\n"
        "help: To plan it anew, as for another GPU or other sizes, put it back first: onnxfuse unfuse MODEL -o "
        "ORIGINAL.\n")
    assert result.stdout == run("report", tmp_path / "once.onnx").output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "once.onnx"]
    assert (tmp_path / "once.onnx").read_bytes() == before


def test_optimising_twice_for_something_else_changes_nothing_either(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "model.onnx")
    once, twice = tmp_path / "once.onnx", tmp_path / "twice.onnx"
    assert run("optimize", tmp_path / "model.onnx", "-o", once, "--no-verify").exit_code == 0
    result = run("optimize", once, "-o", twice, "--target", "T4", "--strategy", "all-in-one", "--no-verify")
    assert result.exit_code == 0 and "onnxfuse unfuse MODEL" in result.output
    assert not twice.exists()
    # an edit makes it a model like any other
    model = onnx.load(once)
    name = model.graph.output[0].name
    model.graph.node.extend([helper.make_node("Neg", [name], ["minus"]), helper.make_node("Exp", ["minus"], ["power"]),
                             helper.make_node("Add", ["power", "minus"], ["more"])])
    model.graph.output.append(helper.make_tensor_value_info("more", model.graph.output[0].type.tensor_type.elem_type,
                                                            None))
    onnx.save(model, once)
    result = run("optimize", once, "-o", twice, "--no-verify", "--report", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "report.json").read_text())["fusions"]) == 1


def test_unfuse_gives_the_original_back(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(), path)
    run("optimize", path, "-q")
    result = run("unfuse", tmp_path / "model.fused.onnx", "-o", tmp_path / "again.onnx")
    count = len(read_fused(onnx.load(tmp_path / "model.fused.onnx")))
    assert count > 1
    assert result.output == f"{count} fused nodes put back; written: {tmp_path / 'again.onnx'}\n"
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, CHAIN), "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_explain_shows_every_near_miss_with_node_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(2), path)
    result = run("optimize", path, "--explain", "-v", "--no-verify", "--report", tmp_path / "report.json")
    assert result.exit_code == 0
    refusals = json.loads((tmp_path / "report.json").read_text())["refusals"]
    assert refusals
    for refusal in refusals:
        assert refusal["message"] in result.output
        assert refusal["node"] in result.output
        assert refusal["code"] in result.output
        assert not refusal["remedy"] or f"help: {refusal['remedy']}" in result.output


def test_disable_leaves_a_rule_out(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    result = run("optimize", path, "--disable", "grow-pointwise", "--disable", "grow-row-reduction",
                 "--disable", "grow-scan")
    assert "Nothing was fused." in result.output


def test_dim_changes_what_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    counts = []
    for batch in (2, 4):
        run("optimize", path, "--dim", f"batch={batch}", "--dry-run", "--no-verify",
            "--report", tmp_path / f"{batch}.json")
        report = json.loads((tmp_path / f"{batch}.json").read_text())
        assert report["dims"] == {"batch": batch}
        counts.append(report["bytes_after"])
    # One kernel reads x[batch, 4096] and w[4096] once and writes y, float32.
    assert counts == [4 * 4096 * (2 + 2 + 1), 4 * 4096 * (4 + 4 + 1)]


def test_target_is_what_is_planned_for(tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, CHAIN), "--target", "t4", "--no-verify")
    assert result.output.splitlines()[0] == f"{tmp_path / 'model.onnx'}  planned for T4, batch=1"


def test_user_rule_with_its_own_kernel_is_fused_and_compiles(tmp_path: Path) -> None:
    path = write(tmp_path, """
g (float[batch, 1000] x) => (float[batch, 1000] y) {
  cap = Constant <value = float {30.0}> ()
  s = Div(x, cap)
  t = Tanh(s)
  y = Mul(t, cap)
}
""")
    result = run("optimize", path, "--rules", ROOT / "examples" / "rules", "--embed", "sm_80,sm_90")
    assert result.exit_code == 0, result.output
    (node,) = read_fused(onnx.load(tmp_path / "model.fused.onnx"))
    assert (node.rule, node.tensors) == ("softcap", ("x", "cap"))
    assert node.architectures == ("compute_90", "sm_80", "sm_90")
    assert "embedded kernels: sm_80 " in result.output and "kB, PTX for later GPUs\n" in result.output
    told = json.loads(run("report", tmp_path / "model.fused.onnx", "--json").output)["embedded"]
    assert told == dict(node.images) and min(told.values()) > 1000
    (step,) = node.plan.variants[0].steps
    assert (step.kernel, step.arguments) == ("softcap", ("i0", "i1", "o0", "i64:i0.n"))


def test_inputs_are_used_to_verify(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    np.savez(tmp_path / "x.npz", x=np.ones((3, 4096), np.float32), w=np.ones(4096, np.float32))
    result = run("optimize", path, "--inputs", tmp_path / "x.npz", "--json")
    assert result.exit_code == 0, result.output
    assert [entry["label"] for entry in json.loads(result.output)["verification"]["runs"]] == ["your inputs"]


def test_external_data(tmp_path: Path) -> None:
    model = encoder()
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=64)
    for choice, files in (("keep", 0), ("copy", 1), ("inline", 0)):
        folder = tmp_path / choice
        folder.mkdir()
        target = tmp_path / "out.onnx" if choice == "keep" else folder / "out.onnx"
        result = run("optimize", tmp_path / "model.onnx", "-o", target, "--external-data", choice, "--no-verify")
        assert result.exit_code == 0, result.output
        data = [entry.name for entry in folder.iterdir() if entry.name != "out.onnx"]
        assert len(data) == files and all(re.fullmatch(r"out\.onnx\.[0-9a-f]{16}\.data", name) for name in data)
        assert len(read_fused(onnx.load(target))) > 1
        beside = {"keep": [tmp_path / "weights.bin"], "copy": [folder / name for name in data], "inline": []}[choice]
        told = [line for line in result.output.splitlines() if line.startswith("weights: ")]
        assert told == [f"weights: {file}; keep them beside it" for file in beside]


def test_report_of_a_plain_model_is_what_optimize_would_do(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    would = json.loads(run("report", path, "--json").output)
    did = json.loads(run("optimize", path, "--json").output)
    assert would["output"] is None and would["verification"]["status"] == "skipped"
    assert {**would, "output": did["output"], "verification": did["verification"]} == did
    assert len(would["fusions"]) == 1


def test_report_of_a_fused_model_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(), path)
    did = json.loads(run("optimize", path, "--json", "--dim", "batch=2", "--dim", "sequence=32").output)
    path.unlink()
    fused = tmp_path / "model.fused.onnx"
    held = json.loads(run("report", fused, "--json", "--dim", "batch=2", "--dim", "sequence=32").output)
    assert held["model"] == str(fused)
    assert held["verification"]["status"] == did["verification"]["status"] == "graph verified"
    for name, value in did.items():
        if name in ("model", "output", "candidates", "refusals", "verification", "left", "matches", "advice",
                    "made"):
            continue
        assert held[name] == value, name


def test_report_as_html_escapes_names(tmp_path: Path) -> None:
    path = write(tmp_path, 'g (float[n, 64] x) => (float[n, 64] y) {\n  a = Exp(x)\n  y = Neg(a)\n}')
    model = onnx.load(path)
    model.graph.node[0].name = "<script>alert(1)</script>"
    onnx.save(model, path)
    result = run("report", path, "--html", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script>") == 1 and "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "grow-pointwise" in page
    assert "http:" not in page and "https:" not in page
    assert "Assumed sizes: n." in page and "Left to ONNX Runtime" not in page


def test_report_as_html_names_what_is_left(tmp_path: Path) -> None:
    run("report", write(tmp_path, CHAIN), "--least-gain", "50", "--html", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<p>Regions: 1; the best " in page and "1 × Mul, Tanh, Add, Sigmoid, Mul: no-gain" in page


def test_rules_list_names_every_shipped_rule() -> None:
    listed = json.loads(run("rules", "list", "--json").output)
    kinds = {rule["kind"] for rule in listed}
    assert kinds == {"canonical", "fuse", "grow", "forbid", "runtime", "name"}
    plain = run("rules", "list").output
    for rule in listed:
        assert rule["id"] in plain
        assert rule["examples"] >= 4


def test_rules_show_prints_the_rule_as_written() -> None:
    result = run("rules", "show", "softcap", "--rules", ROOT / "examples" / "rules")
    text = (ROOT / "examples" / "rules" / "softcap.yaml").read_text()
    assert result.exit_code == 0
    assert result.output.splitlines()[0].endswith("softcap.yaml:3")
    assert text.strip() in result.output


def test_rules_check_computes_the_examples() -> None:
    result = run("rules", "check", ROOT / "examples" / "rules", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["rules"], found["failed"]) == (1, 0)
    assert [(entry["expected"], entry["computed"]) for entry in found["examples"]] == [
        ("matched", True), ("matched", True), ("different-value", False), ("cap-not-scalar", False),
    ]


def test_rules_check_fails_where_an_example_goes_another_way(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "rules" / "softcap.yaml").read_text()
    (tmp_path / "softcap.cu").write_bytes((ROOT / "examples" / "rules" / "softcap.cu").read_bytes())
    (tmp_path / "mine.yaml").write_text(text.replace("refused: different-value", "refused: attribute"))
    result = run("rules", "check", tmp_path)
    assert result.exit_code == 1
    assert "It was refused with different-value; expected attribute." in result.output
    assert result.output.rstrip().endswith("1 rule, 4 examples, 1 failed")


def test_targets_lists_the_profiles() -> None:
    names = [profile["name"] for profile in json.loads(run("targets", "--json").output)]
    assert {"T4", "V100", "A10", "A6000", "L4", "L40S", "H100", "H200", "B200", "Ascend 910"} <= set(names)
    plain = run("targets").output
    assert all(name in plain for name in names)


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("onnxfuse ")


def test_bench_on_the_cpu_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    run("optimize", path, "-q")
    plain = run("bench", path, "--runs", "10", "--dim", "batch=2")
    assert plain.exit_code == 0, plain.output
    data = json.loads(run("bench", path, tmp_path / "model.fused.onnx", "--runs", "10", "--json").output)
    assert data["fused"]["model"] == str(tmp_path / "model.fused.onnx")
    assert data["errors"] == [{"name": "y", "error": 0.0}]
    assert data["latency_ratio"]["low"] <= data["latency_ratio"]["value"] <= data["latency_ratio"]["high"]
    if data["provider"] == "CPUExecutionProvider":
        assert "both models ran on the CPU" in plain.output


@pytest.mark.parametrize("arguments", [
    ["optimize"], ["optimize", "x.onnx", "--bogus"], ["optimize", "x.onnx", "--dim", "8"],
    ["optimize", "x.onnx", "--embed", ","], ["bench", "x.onnx", "--runs", "0"], ["rules", "check"], ["bogus"],
    ["unfuse", "x.onnx"],
])
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage: onnxfuse" in result.output


def test_output_to_a_pipe_is_plain(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "optimize", str(path), "--explain"], env=environment(), text=True,
        capture_output=True, check=True,
    )
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_broken_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m onnxfuse rules list | head -n 1"
    done = subprocess.run(command, shell=True, env=environment(), text=True, capture_output=True, check=True)
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_interrupt_is_clean(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(), path)
    # The verification waits on a pipe as if it took long; the signal comes while it does.
    ready = tmp_path / "ready"
    # A shell that runs the tests in its background has their processes ignore interrupts.
    script = (
        "import signal, sys, time, pathlib, onnxfuse.pipeline as pipeline\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(*_):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
        "pipeline.verified = wait\n"
        "from onnxfuse.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "optimize", str(path)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    # An interrupt before that would end Python among its imports.
    deadline = time.monotonic() + 300
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ready.exists(), process.kill() or process.communicate()
    for patience in (10, 10, 60):
        # Python drops an interrupt that comes within a destructor; a user presses again.
        os.kill(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=patience)
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "ready"]


def test_shipped_rules_pass_their_own_check() -> None:
    result = run("rules", "check", ROOT / "rules", "--json")
    found, shipped = json.loads(result.output), load_rules([ROOT / "rules"]).by_id
    assert [(entry["rule"], entry["fault"]) for entry in found["examples"] if entry["fault"]] == []
    assert result.exit_code == 0
    matched = [entry for entry in found["examples"]
               if entry["expected"] == "matched" and not entry["rule"].startswith("ort-")
               and not isinstance(shipped[entry["rule"]], NameRule)]
    # A few cannot be computed here: types and operators that the CPU provider lacks, and rules that forbid.
    assert sum(entry["computed"] for entry in matched) >= 0.9 * len(matched)


def test_rules_check_catches_a_canonical_rule_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("""
id: wrong-relu
kind: canonical
summary: Says that a leaky ReLU is a plain one.
why: To be caught.
pattern: y = LeakyRelu(x, alpha=a)
becomes: Relu(x)
examples:
  - name: slope
    expect: matched
    model: |
      g (float[8, 16] x) => (float[8, 16] y) {
        y = LeakyRelu <alpha = 0.3> (x)
      }
""")
    result = run("rules", "check", tmp_path)
    assert result.exit_code == 1
    assert "The rule makes Relu of what computes y, and the two differ by " in result.output
