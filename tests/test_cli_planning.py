"""The options of `optimize` that decide what is planned for: what they change, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_models import CHAIN, run, write
from test_hardware import PROFILE

BRANCHES = """
g (float[batch, 4096] x, float[batch, 4096] z)
  => (float[batch, 4096] y, float[batch, 4096] a, float[batch, 4096] b) {
  e = Exp(x)
  y = Neg(e)
  a = Exp(z)
  b = Neg(a)
}
"""


def fused(path: Path, *options: object) -> list[int]:
    """Nodes of each region that is planned."""
    result = run("optimize", path, "--dim", "batch=4096", "--target", "H200", "--no-verify", "--dry-run", "--json",
                 *options)
    assert result.exit_code == 0, result.output
    return [len(fusion["replaces"]) for fusion in json.loads(result.output)["fusions"]]


def test_hints_and_thresholds(tmp_path: Path) -> None:
    path = write(tmp_path, BRANCHES)
    assert fused(path) == [2, 2]
    assert fused(path, "--hint", "memory-pressure=0.9") == [2]
    assert fused(path, "--hint", "memory-pressure=0.9", "--hint", "pressure-threshold=0.95") == [2, 2]
    assert fused(path, "--hint", "compute-pressure=0.9", "--hint", "pressed-gain=50") == []
    assert fused(path, "--least-gain", "50") == []


@pytest.mark.parametrize("strategy", ["auto", "all-in-one", "memory", "dynamic"])
def test_every_strategy_plans(strategy: str, tmp_path: Path) -> None:
    assert fused(write(tmp_path, CHAIN), "--strategy", strategy) == [5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hint", "memory-pressure"],
         "Error: Invalid value for '--hint': 'memory-pressure' is not of the form NAME=NUMBER, such as "
         "memory-pressure=0.9.\n"),
        (["--hint", "memory-pressure=much"],
         "Error: Invalid value for '--hint': 'memory-pressure=much' is not of the form NAME=NUMBER, such as "
         "memory-pressure=0.9.\n"),
        (["--hint", "memory-pressure=2"],
         "Error: Invalid value for '--hint': the hint memory-pressure must be between 0 and 1, not 2.\n"),
        (["--hint", "pressure=0.5"],
         "Error: Invalid value for '--hint': there is no hint \"pressure\"; did you mean \"memory-pressure\"?\n"),
        (["--strategy", "fast"],
         "Error: Invalid value for '--strategy': 'fast' is not one of 'auto', 'all-in-one', 'memory', 'dynamic'.\n"),
        (["--provider-option", "prefer_nhwc"],
         "Error: Invalid value for '--provider-option': 'prefer_nhwc' is not of the form NAME=VALUE, such as "
         "device_id=0.\n"),
    ],
)
def test_wrong_usage(options: list[str], message: str, tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, CHAIN), *options)
    assert result.exit_code == 2
    assert result.output.endswith(message)


def test_a_profile_of_the_users_own(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    folder = tmp_path / "mine" / "hardware"
    folder.mkdir(parents=True)
    (folder / "gpu.yaml").write_text(PROFILE + "limits: {operators: 2}\n", encoding="utf-8")
    for options in (("--target", folder / "gpu.yaml"), ("--rules", tmp_path / "mine", "--target", "Mine")):
        assert max(fused(path, *options)) == 2
    listed = run("targets", "--rules", tmp_path / "mine")
    assert any(line.startswith("Mine ") for line in listed.output.splitlines())
    missing = run("optimize", path, "--target", tmp_path / "none.yaml")
    assert missing.exit_code == 1
    assert missing.output == (
        f"error: The hardware profile cannot be read: No such file or directory.\n--> {tmp_path / 'none.yaml'}\n"
        "help: Give the path of a text file.\n")


def test_a_target_that_is_for_planning_only_says_so(tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, CHAIN), "--target", "Ascend 910", "--dry-run", "--no-verify")
    words = " ".join(result.output.split())
    assert ("warning: Ascend 910 is for planning only: It runs no CUDA; the profile shows what would be fused under "
            "its limits.") in words


def test_report_plans_with_the_same_options(tmp_path: Path) -> None:
    result = run("report", write(tmp_path, BRANCHES), "--dim", "batch=4096", "--target", "H200", "--hint",
                 "memory-pressure=0.9", "--json")
    assert result.exit_code == 0
    assert len(json.loads(result.output)["fusions"]) == 1
