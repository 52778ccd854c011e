"""Rules that can be read and can never work: refused where they are written, with what mends them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_models import ROOT, run

from onnxfuse.checking import check_rules
from onnxfuse.errors import RuleError
from onnxfuse.rules import load_rules

EXAMPLES = ROOT / "examples" / "rules"


def rule(folder: Path, pattern: str, name: str = "r", more: str = "") -> Path:
    """A file of a fuse rule with this pattern, and no examples."""
    lines = "".join(f"  {line}\n" for line in pattern.splitlines())
    path = folder / f"{name}.yaml"
    path.write_text(f"id: {name}\nkind: fuse\nsummary: s.\nwhy: w.\npattern: |\n{lines}{more}")
    return path


@pytest.mark.parametrize(("pattern", "message", "help_"), [
    ("y = Tanh(x, b) * b", "Tanh(...) takes 1 input, not 2.", "Leave out what it does not take."),
    ("y = Tanh() * b", "Tanh(...) takes 1 input, not 0.", "Write _ for an input that may be anything."),
    ("y = Where(x, b)", "Where(...) takes 3 inputs, not 2.", "Write _ for an input that may be anything."),
    ("y = Silu(x, b)", "Silu(...) takes 1 input, not 2.", "Leave out what it does not take."),
    ("y = com.micrsoft.Gelu(x)", "Unknown domain com.micrsoft.", "Did you mean com.microsoft.Gelu?"),
    ("z = Relu(x)\ny = Tanh(x)", "No line reads z, and it is no result.",
     "Leave the line out, or name it among the results: results: [..., z]."),
    ("y = Relu(Conv(x, w))", "onnxfuse makes no kernel that holds Conv.",
     "Leave it out of the pattern, as an input, or give the rule a kernel of its own (kernel: ...)."),
    ("y = MatMul(x, w) + b", "onnxfuse makes no kernel that holds MatMul.",
     "Leave it out of the pattern, as an input, or give the rule a kernel of its own (kernel: ...)."),
])
def test_patterns_that_cannot_match_or_be_fused(pattern: str, message: str, help_: str, tmp_path: Path) -> None:
    path = rule(tmp_path, pattern)
    with pytest.raises(RuleError) as caught:
        load_rules([path])
    lines = str(caught.value).splitlines()
    assert (lines[0], lines[-1]) == (message, f"help: {help_}")
    assert lines[1].startswith(f"--> {path}:6:")


@pytest.mark.parametrize(("pattern", "more"), [
    ("y = Where(_, x, b)", ""), ("y = Max(a, b, c, d)", ""), ("y = Clip(x)", ""),
    ("y = LayerNormalization(x, s, b?)", ""), ("y = my.domain.Thing(x)", ""),
    ("z = Relu(x)\ny = Tanh(x)", "results: [y, z]\n"), ("q, _, _ = Split(x)\ny = Relu(q)", ""),
    ("s = MatMul(q, k)\ny = MatMul(Softmax(s), v)", ""),
])
def test_patterns_that_may(pattern: str, more: str, tmp_path: Path) -> None:
    assert [each.id for each in load_rules([rule(tmp_path, pattern, more=more)]).fuse] == ["r"]


@pytest.mark.parametrize(("key", "size", "message", "help_"), [
    ("block", "2048", "No launch has 2,048 threads of a block along x.", "There may be 1 to 1,024."),
    ("block", "16 * 0", "No launch has 0 threads of a block along x.", "There may be 1 to 1,024."),
    ("block", "[1, 1, 128]", "No launch has 128 threads of a block along z.", "There may be 1 to 64."),
    ("block", "[32, 32, 4]", "A block cannot have 4,096 threads.", "It has 1,024 at most, along all axes together."),
    ("grid", "[1, 70000]", "No launch has 70,000 blocks along y.", "There may be 1 to 65,535."),
    ("grid", "3 - 4", "No launch has -1 blocks along x.", "There may be 1 to 2,147,483,647."),
    ("shared", "400000", "No launch has 400,000 bytes of shared memory.", "There may be 0 to 232,448."),
])
def test_launches_that_no_gpu_takes(key: str, size: str, message: str, help_: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "softcap.cu", tmp_path)
    text = (EXAMPLES / "softcap.yaml").read_text()
    old = next((line for line in text.splitlines() if line.startswith(f"  {key}: ")), "  block: 256")
    kept = f"{old}\n" if key == "shared" else ""
    (tmp_path / "r.yaml").write_text(text.replace(old, f"{kept}  {key}: {size}"))
    with pytest.raises(RuleError) as caught:
        load_rules([tmp_path / "r.yaml"])
    lines = str(caught.value).splitlines()
    assert (lines[0], lines[-1]) == (message, f"help: {help_}")


@pytest.mark.parametrize("size", ["[32, 32]", "min(size(x), 4096)", "256 % 0 + 1", "ceil(1000, 32)"])
def test_launches_of_which_nothing_is_known_or_wrong(size: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "softcap.cu", tmp_path)
    text = (EXAMPLES / "softcap.yaml").read_text()
    (tmp_path / "r.yaml").write_text(text.replace("  block: 256", f"  block: {size if size[0] == '[' else repr(size)}"))
    assert load_rules([tmp_path / "r.yaml"]).fuse[0].kernel is not None


def test_all_files_of_a_folder_are_read_before_it_stops(tmp_path: Path) -> None:
    rule(tmp_path, "y = Tanh(x, b)", "first")
    rule(tmp_path, "y = Tanh(x)", "good")
    rule(tmp_path, "y = Tahn(x)", "third")
    with pytest.raises(RuleError) as caught:
        check_rules([tmp_path])
    faults = str(caught.value).split("\n\n")
    assert [fault.splitlines()[0] for fault in faults] == [
        "Tanh(...) takes 1 input, not 2.", "Unknown operator Tahn.", "2 rule files are wrong."]
    done = run("rules", "check", tmp_path)
    assert done.exit_code == 1 and done.output == f"error: {caught.value}\n"
