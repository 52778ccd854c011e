"""Subject ``profiles``: the hardware profiles that ship, damaged, read and planned for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import cli_models
from damage import TEXTS, damage_bytes
from ends import FaultError

import rules as rule_files
from onnxfuse import api, pipeline
from onnxfuse.planning.costs.hardware import read_profiles, shipped_profiles
from onnxfuse.reporting import as_json

NUMBERS = ("0", "-1", "1", "1e-300", "5e-324", "1e9", "1e308", "1e400", "-0.0", "9" * 18, "9" * 19, "9" * 400, "1e-9",
           "0.5", ".5", "1_0", "0b1", "true", "80 GB")
pipeline.load_rules = lambda *_: rule_files.SHIPPED  # reading them takes longer than most cases


@cache
def entries() -> tuple[str, ...]:
    """The profiles, a text each."""
    return tuple(
        f"- {entry.strip()}\n" for file in sorted(shipped_profiles().glob("*.yaml"))
        for entry in f"\n{file.read_text()}".split("\n- ")[1:]
    )


@cache
def model() -> Any:
    return cli_models.parse(cli_models.CHAIN)


def make(seed: int, folder: Path) -> list[Path]:
    """A file of one profile or two."""
    rng = Random(seed)
    text = rng.choice(entries())
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = text.split()
        numbers = [word.strip(",}") for word in words if word.strip(",}").replace(".", "").isdigit()]
        match rng.randrange(5):
            case 0 | 1 | 2 if numbers:
                text = text.replace(f" {rng.choice(numbers)}", f" {rng.choice(NUMBERS)}", 1)
            case 3:
                text = text.replace(rng.choice(words), rng.choice((*words, *TEXTS)), 1)
            case _:
                text = rule_files.damaged(text, rng)
    if rng.random() < 0.2:
        text += rng.choice(entries())
    if rng.random() < 0.3:
        text = "\n".join(line[2:] for line in text.split("\n"))  # a lone mapping
    path = folder / "profile.yaml"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damage_bytes(data, rng) if rng.random() < 0.1 else data)
    return [path]


def attempt(files: Sequence[Path]) -> str:
    """Read the file, and plan a small model for its first profile."""
    (profile, *_) = (*read_profiles(files[0]), None)
    if profile is None:
        return "none"
    result = api.optimize(model(), target=profile, verify=False, database=False)
    content = as_json(result.report)
    json.dumps(content, allow_nan=False)
    if not isfinite(content["estimated_speedup"]):
        raise FaultError("wrong", f"a speed-up of {content['estimated_speedup']}")
    return "fused" if result.report.fusions else "nothing"
