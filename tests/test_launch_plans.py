"""Launch plans as JSON: what earlier releases wrote stays as it was, and what they do not know has its own version."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fused_models import add_host, add_two
from launch_models import CLUSTERED, clustered

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.runtime.compile import compile_cubin

ADD = '{"kernel":"add_one","grid":["i0.n 128 ceil 1024 min","1","1"],"block":["128","1","1"],"shared":"0",'
WRITTEN = (
    '{"version":1,"region":"add-two","inputs":1,"symbols":["i0.0"],"checks":[],"outputs":[{"dtype":1,"shape":["s0"]}],'
    '"scratch":["s0 4 *"],"options":[],"variants":[{"name":"scratch","guards":[],"steps":['
    + ADD + '"args":["i0","t0","i64:s0"]},' + ADD + '"args":["t0","o0","i64:s0"]}]}]}')
"""A plan as the first release wrote it."""


def test_a_plan_of_version_1_is_written_as_it_always_was() -> None:
    plan = add_two().plan
    assert plan.to_json() == WRITTEN
    assert LaunchPlan.from_json(WRITTEN) == plan


@pytest.mark.parametrize("plan", [add_host().plan, clustered().plan])
def test_a_plan_is_read_as_it_was_written(plan: LaunchPlan) -> None:
    assert LaunchPlan.from_json(plan.to_json()) == plan
    assert LaunchPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_only_a_plan_that_asks_for_more_has_the_newer_version() -> None:
    def version(plan: LaunchPlan) -> Any:
        return json.loads(plan.to_json())["version"]

    plan = clustered().plan
    (step,) = plan.variants[0].steps
    assert version(plan) == 2
    for less, wanted in (({"cluster": None}, 2), ({"dependent": False}, 2), ({"cluster": None, "dependent": False}, 1)):
        steps = (replace(step, **less),)
        assert version(replace(plan, variants=(replace(plan.variants[0], steps=steps), *plan.variants[1:]))) == wanted


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 3}, "launch plan of version 3; this release reads 1 and 2"),
    ({"version": 1}, "a launch plan of version 1 that asks for what version 2 has"),
    ({"cluster": ["1"]}, "not enough values to unpack (expected 3, got 1)"),
    ({"cluster": [1, 1, 1]}, "not a launch plan: 1 is no text"),
    ({"dependent": 1}, "not a launch plan: 1 is neither true nor false"),
], ids=str)
def test_wrong_plans_of_the_newer_version(change: dict[str, Any], message: str) -> None:
    raw = json.loads(clustered().plan.to_json())
    raw["version"] = change.pop("version", 2)
    raw["variants"][0]["steps"][0] |= change
    with pytest.raises(ValueError) as error:
        LaunchPlan.from_json(json.dumps(raw))
    assert str(error.value) == message


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("source", [CLUSTERED], ids=["clustered"])
def test_kernels_for_the_gpu_compile(source: str, architecture: str) -> None:
    assert compile_cubin(source, architecture)
