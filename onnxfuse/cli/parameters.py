"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

class _File(click.Path):
    """A path; that it is there is for the stages to say, in their own words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail(f"{str(value)!r} can be no file's name.", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)


def read_sizes(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    """``NAME=N`` several times: sizes of symbolic dimensions."""
    sizes: dict[str, int] = {}
    for value in values:
        name, sign, number = value.rpartition("=")
        if not sign or not name.strip() or not re.fullmatch(r"-?\d+", number.strip()):
            raise click.BadParameter(f"{value!r} is not of the form NAME=N, such as batch=8.", ctx, param)
        sizes[name.strip()] = int(number)
    return sizes


def read_settings(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` several times: options of an execution provider."""
    settings: dict[str, str] = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE, such as device_id=0.", ctx, param)
        settings[name.strip()] = text
    return settings


def read_hints(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    """``NAME=NUMBER`` several times: hints to the planner; which there are is for ``Hints`` to say."""
    hints: dict[str, float] = {}
    for value in values:
        name, sign, number = value.partition("=")
        try:
            hints[name.strip()] = float(number)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise click.BadParameter(
                f"{value!r} is not of the form NAME=NUMBER, such as memory-pressure=0.9.", ctx, param)
    return hints


def read_architectures(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """``sm_80,sm_90``: GPU architectures; whether they are known is for ``embedding`` to say."""
    if value is None:
        return ()
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise click.BadParameter("no architecture is named.", ctx, param)
    return found


model_argument = click.argument("model", type=FILE)

dim_option = click.option("--dim", "dims", multiple=True, metavar="NAME=N", callback=read_sizes,
                          help="Size of a symbolic dimension to plan and count for; may repeat.")


verbose_option = click.option("-v", "--verbose", is_flag=True,
                              help="List near misses too that nothing you can change would mend.")


STRATEGIES = ("auto", "all-in-one", "memory", "dynamic")
"""``planning.objective.STRATEGIES``, which would be slow to load for --help."""


def objective_options(command: F) -> F:
    """What the plan is to be good at; the command gets it as ``wanted``: keywords of ``api.optimize``."""
    for option in reversed((
        click.option("--strategy", type=click.Choice(STRATEGIES), default="auto", show_default=True,
                     help="auto: the least predicted time.  all-in-one: the fewest kernels.  memory: the fewest bytes "
                          "of tensors.  dynamic: no loss at a quarter or four times the sizes either, and kernels "
                          "with variants for them."),
        click.option("--hint", "hints", metavar="NAME=NUMBER", multiple=True, callback=read_hints,
                     help="memory-pressure=0.9: fuse only what saves memory.  compute-pressure=0.9: fuse only what is "
                          "predicted to gain pressed-gain (1.5).  Pressures count past pressure-threshold (0.8).  "
                          "May repeat."),
        click.option("--least-gain", type=click.FloatRange(min=0), metavar="X",
                     help="Predicted speed-up that a region must pass to be fused; by default 1.2."),
        click.option("--provider-option", "provider_options", multiple=True, metavar="NAME=VALUE",
                     callback=read_settings,
                     help="Option of the CUDA provider that the model will run with; prefer_nhwc=1 leaves what lies "
                          "beside convolutions alone.  May repeat."),
    )):
        command = option(command)

    @functools.wraps(command)
    def gathered(*, strategy: str, hints: dict[str, float], least_gain: float | None,
                 provider_options: dict[str, str], **rest: Any) -> Any:
        from onnxfuse.planning.objective import read_hints

        try:
            known = read_hints(hints)
        except ValueError as error:
            end = "" if str(error).endswith("?") else "."
            raise click.BadParameter(f"{error}{end}", param_hint="'--hint'") from error
        wanted = {"strategy": strategy, "hints": known, "least_gain": least_gain, "provider_options": provider_options}
        return command(wanted=wanted, **rest)

    return gathered  # type: ignore[return-value]


database_option = click.option(
    "--database", type=FILE, metavar="FILE",
    help="Database of measurements; by default $ONNXFUSE_DATABASE, else measurements.sqlite in the cache folder.")


def measurement_options(command: F) -> F:
    """What was measured; the command gets it in ``wanted``, as from ``objective_options``, which stands above."""
    for option in reversed((
        database_option,
        click.option("--no-database", is_flag=True, help="Plan by predictions alone."),
        click.option("--profile", "run_profile", type=FILE, metavar="FILE",
                     help="Weigh regions by time and executions in this profile: what ONNX Runtime wrote "
                          "(enable_profiling) of a run of the model on CUDA."),
    )):
        command = option(command)

    @functools.wraps(command)
    def gathered(*, wanted: dict[str, Any], database: Path | None, no_database: bool, run_profile: Path | None,
                 **rest: Any) -> Any:
        if no_database and database is not None:
            raise click.BadParameter("it contradicts --no-database.", param_hint="'--database'")
        measured = {"database": False if no_database else database, "run_profile": run_profile}
        return command(wanted={**wanted, **measured}, **rest)

    return gathered  # type: ignore[return-value]


def planning_options(command: F) -> F:
    """What decides the plan."""
    for option in reversed((
        click.option("--rules", "rules", type=FILE, multiple=True, metavar="PATH",
                     help="Rule file, or folder of them, to use beside the shipped ones; may repeat."),
        click.option("--disable", multiple=True, metavar="ID",
                     help="Rule to leave out, or a stage: shape-arithmetic (folding of size operands), "
                          "attention (as one kernel), "
                          "recompute (values computed again rather than read), "
                          "horizontal-joins (independent regions in one kernel); may repeat."),
        dim_option,
        click.option("--target", metavar="GPU",
                     help="GPU to plan for (`onnxfuse targets` lists them), or a YAML file that describes one; the one "
                          "present, else the H100."),
    )):
        command = option(command)
    return command
