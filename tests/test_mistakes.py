"""What users get wrong is answered: in one line, with what was meant, and exit code 2 where the command was wrong."""

from __future__ import annotations

import codecs
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, PRODUCT, encoder, environment, parse, run, write
from click.testing import CliRunner

from onnxfuse.cli import main
from onnxfuse.cli.output import PLAINLY
from onnxfuse.cli.parameters import PROVIDER_OPTIONS
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.schedules import SCHEDULES

DASH = ("'-' stands for no stream here: give the name of a file (./- for one called so); --json prints what a command "
        "found as data.")


@pytest.mark.parametrize(("arguments", "message"), [
    (["optimize", "M", "--provider-option", "prefer_nhcw=1"],
     "Invalid value for '--provider-option': the CUDA provider has no option 'prefer_nhcw'. Did you mean "
     "'prefer_nhwc'?"),
    (["bench", "M", "--provider-option", "device=0"],
     "Invalid value for '--provider-option': the CUDA provider has no option 'device'. Did you mean 'device_id'?"),
    (["optimize", "M", "--provider-option", "prefer_nhwc=ture"],
     "Invalid value for '--provider-option': prefer_nhwc is 0 or 1, not 'ture'."),
    (["optimize", "M", "--provider-option", "fuse_conv_bias=ture"],
     "Invalid value for '--provider-option': fuse_conv_bias is 0 or 1, not 'ture'."),
    (["optimize", "M", "--provider-option", "use_tf32=off"],
     "Invalid value for '--provider-option': use_tf32 is 0 or 1, not 'off'."),
    (["optimize", "M", "--provider-option", "use_tf32=0", "--provider-option", "use_tf32=1"],
     "Invalid value for '--provider-option': 'use_tf32' is given twice: 0 and 1."),
    (["optimize", "M", "--dim", "batch=1", "--dim", "batch=2"],
     "Invalid value for '--dim': 'batch' is given twice: 1 and 2."),
    (["explain", "M", "--hint", "memory-pressure=0.1", "--hint", "memory_pressure=0.2"],
     "Invalid value for '--hint': 'memory-pressure' is given twice: 0.1 and 0.2."),
    (["optimize", "-"], f"Invalid value for 'MODEL': {DASH}"),
    (["optimize", "M", "-o", "-"], f"Invalid value for '-o' / '--output': {DASH}"),
    (["optimize", "M", "--report", "-"], f"Invalid value for '--report': {DASH}"),
    (["report", "M", "--html", "-"], f"Invalid value for '--html': {DASH}"),
    (["report", "M", "--html", "x", "--graph", "x"], "--html and --graph name the same file."),
    (["report", "M", "--graph", "-"], f"Invalid value for '--graph': {DASH}"),
    (["bench", "M", "-"], f"Invalid value for '[FUSED]': {DASH}"),
])
def test_the_command_line_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write(tmp_path, CHAIN)
    result = run(*(path if word == "M" else word for word in arguments))
    assert result.exit_code == 2
    assert " ".join(result.output.splitlines()[-1].split()) == f"Error: {message}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("arguments", [
    ["optimize", "M", "--dim", "bach=3"], ["optimize", "M", "--dim", "batch=-3"],
    ["optimize", "M", "--target", "H1000"],
    ["report", "M", "--disable", "gated-silo"], ["optimize", "M", "--embed", "sm_12"], ["explain", "M", "nosuch"],
    ["explain", "M", "x"], ["rules", "show", "silo"], ["unfuse", "M", "-o", "out.onnx", "--only", "nosuch"],
    ["bench", "M", "--dim", "bach=3"],
])
def test_names_and_sizes_that_are_not_there_are_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    path = write(tmp_path, CHAIN)
    result = run(*(path if word == "M" else word for word in arguments))
    assert (result.exit_code, result.output[:7]) == (2, "error: ")


def test_the_same_size_twice_is_no_contradiction(tmp_path: Path) -> None:
    assert run("report", write(tmp_path, CHAIN), "--dim", "batch=2", "--dim", "batch=2").exit_code == 0


def test_options_of_newer_runtimes_pass(tmp_path: Path) -> None:
    assert run("report", write(tmp_path, CHAIN), "--provider-option", "quantum_mode=1").exit_code == 0


def test_options_are_spelled_as_the_runtime_spells_them() -> None:
    """Those that this release of the runtime's Python package lists for its own CUDA provider, where it has one."""
    assert list(PROVIDER_OPTIONS) == sorted(set(PROVIDER_OPTIONS)) and "prefer_nhwc" in PROVIDER_OPTIONS
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return
    model = parse(PRODUCT).SerializeToString()
    options = onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"]).get_provider_options()
    assert set(options.get("CUDAExecutionProvider", {})) <= set(PROVIDER_OPTIONS)


# A fused model given again


def test_a_fused_model_given_again_is_warned_of_and_nothing_is_written(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "m.onnx")
    run("optimize", tmp_path / "m.onnx", "--no-verify", "-q")
    result = run("optimize", tmp_path / "m.fused.onnx", "--json", "--report", tmp_path / "r.json")
    assert result.exit_code == 0
    path = tmp_path / "m.fused.onnx"
    assert result.output.startswith(f"warning: {path} is fused already, and nothing was written.\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.fused.onnx", "m.onnx", "r.json"]
    # one that was edited since is a model like any other
    model = onnx.load(tmp_path / "m.fused.onnx")
    model.graph.node[0].doc_string = "edited"
    onnx.save(model, tmp_path / "m.fused.onnx")
    assert "is fused already" not in run("optimize", tmp_path / "m.fused.onnx", "--no-verify").output


# Rules


RULE = """
id: mine
kind: fuse
summary: A rule of mine.
why: For a test.
pattern: y = {pattern}
{more}
examples:
  - name: one
    expect: {expect}
    model: |
      g (float[n, 64] x) => (float[n, 64] y) {{
        a = Exp(x)
        y = Softmax(a)
      }}
"""


@pytest.mark.parametrize(("expect", "message", "remedy"), [
    ("mathced", "An example expects matched, or {refused: CODE}, not mathced.", "Did you mean matched?"),
    ("refuse", "An example expects matched, or {refused: CODE}, not refuse.", "Did you mean {refused: CODE}?"),
    ("{refusd: attribute}", "Unknown key refusd.", "Did you mean refused?"),
])
def test_a_misspelt_expectation(tmp_path: Path, expect: str, message: str, remedy: str) -> None:
    (tmp_path / "r.yaml").write_text(RULE.format(expect=expect, pattern="Softmax(Exp(x))", more=""))
    result = run("rules", "check", tmp_path)
    lines = result.output.splitlines()
    assert (result.exit_code, lines[0], lines[-1]) == (1, f"error: {message}", f"help: {remedy}")


@pytest.mark.parametrize("command", ["check", "report"])
def test_a_misspelt_schedule(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "r.yaml").write_text(RULE.format(expect="matched", pattern="Softmax(Exp(x))", more="schedule: row"))
    arguments = ["rules", "check", folder] if command == "check" else ["report", write(tmp_path, CHAIN), "--rules",
                                                                      folder]
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: The rule mine names a schedule 'row', which is not there.\n--> ")
    assert result.output.endswith("help: Did you mean rows?\n")


@pytest.mark.parametrize(("schedule", "fused"), [("rows", True), ("tiled", False)])
def test_a_rules_schedule_makes_the_kernels_of_its_regions(tmp_path: Path, schedule: str, fused: bool) -> None:
    assert schedule in SCHEDULES
    (tmp_path / "r.yaml").write_text(
        RULE.format(expect="matched", pattern="Softmax(Exp(x))", more=f"schedule: {schedule}"))
    model = parse("g (float[64, 512] x) => (float[64, 512] y) { a = Exp(x)\n y = Softmax(a) }")
    made = optimise(model, Options(rules=[tmp_path], verify=False, database=False, target="H100",
                                   disable=["grow-row-reduction", "grow-scan", "scaled-masked-softmax"]))
    assert [node.schedule for node in read_fused(made.model) if node.rule == "mine"] == [schedule] * fused
    said = {each.message for each in made.refusals if each.rule == "mine"}
    assert ("the schedule tiled has no kernel for such a region" in said) != fused


# Measuring


MISFIT = """g (float[batch, sequence, 8] x) => (float[batch, sequence, 8] y) {
  t = Constant <value = float[1, 3, 1] {1.0, 2.0, 3.0}> ()
  y = Add(x, t)
}"""

UNFORESEEN = """g (int64[n] ids) => (float[n] y) {
  t = Constant <value = float[2] {1.0, 2.0}> ()
  f = Cast <to = 1> (ids)
  ten = Constant <value = float {10.0}> ()
  p = Abs(f)
  d = Sum(p, ten)
  i = Cast <to = 7> (d)
  y = Gather(t, i)
}"""


def test_bench_refuses_sizes_that_do_not_fit(tmp_path: Path) -> None:
    result = run("bench", write(tmp_path, MISFIT), "--dim", "sequence=5", "--runs", "1")
    assert result.exit_code == 2
    assert result.output.splitlines()[0] == (
        "error: The model does not run at these sizes: 'Add -> y' joins axes of 5 (sequence) and 3.")


def test_bench_says_in_words_what_the_runtime_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("bench", write(tmp_path, UNFORESEEN), "--runs", "1")
    assert result.exit_code == 1
    first, place, remedy = result.output.splitlines()
    assert first.startswith("error: ONNX Runtime cannot run the model on ids[1]: ")
    assert "Gather" in first and "out of data bounds" in first
    for raw in ("Status Message", ".cc:", "[ONNXRuntimeError]", "onnxruntime_src"):
        assert raw not in result.output
    assert (place, remedy[:6]) == (f"--> {tmp_path / 'model.onnx'}", "help: ")
    assert capfd.readouterr().err == ""


def test_bench_of_two_models_that_are_not_one(tmp_path: Path) -> None:
    path, other = write(tmp_path, CHAIN), write(tmp_path, MISFIT.replace("x", "z"), "other.onnx")
    result = run("bench", path, other, "--runs", "1")
    assert result.output.splitlines()[0] == "error: The model has the inputs z, and is to run on x, w."
    (tmp_path / "no.onnx").write_bytes(b"no model at all")
    result = run("bench", path, tmp_path / "no.onnx", "--runs", "1")
    assert result.output.startswith("error: The file is no ONNX model.")


# Terminals that are not UTF-8


@pytest.mark.parametrize("encoding", ["ascii", "shift_jis"])
def test_other_terminals_show_words_and_no_codes_of_our_own(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, CHAIN)
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "report", str(path), "--target", "H100"], capture_output=True, check=False,
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0"))
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding)
    (line,) = [line for line in text.splitlines() if line.startswith("GPU time, predicted")]
    assert line.split()[4] in ("us", "µs", "μs") and "\\x" not in line


def test_signs_of_ours_have_ascii_and_others_a_code() -> None:
    handle = codecs.lookup_error(PLAINLY)
    assert "2 µs → ещё…é".encode("ascii", PLAINLY) == b"2 us -> \\u0435\\u0449\\u0451...\\xe9"
    with pytest.raises(UnicodeDecodeError):
        handle(UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"))


# What the shell completes


def completed(line: str, incomplete: str = "") -> list[str]:
    """What bash would be offered for a command line."""
    words = [*line.split(), incomplete]
    done = CliRunner().invoke(main, [], prog_name="onnxfuse", env={
        "_ONNXFUSE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)})
    assert done.exit_code == 0, done.output
    return [entry.partition(",")[2] for entry in done.output.splitlines() if entry]


def test_the_shell_completes_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    assert completed(f"onnxfuse optimize {path} --dim") == ["batch="]
    assert completed(f"onnxfuse bench {path} --dim", "bat") == ["batch="]
    assert completed(f"onnxfuse check {path} --lock m.lock.yaml --dim") == ["batch="]
    assert completed("onnxfuse report m.onnx --target", "h") == ["H100", "H200"]
    assert completed("onnxfuse rules show", "scaled-m") == ["scaled-masked-softmax"]
    assert "recompute" in completed("onnxfuse optimize --disable", "r")
    assert "doctor" in completed("onnxfuse")


def test_nothing_is_completed_from_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"no model")
    for name in ("no.onnx", "none.onnx"):
        assert completed(f"onnxfuse optimize {tmp_path / name} --dim") == []
