"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
"""A path; that it is there is for the stages to say, in their own words."""


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


def planning_options(command: F) -> F:
    """What decides the plan."""
    for option in reversed((
        click.option("--rules", "rules", type=FILE, multiple=True, metavar="PATH",
                     help="Rule file, or folder of them, to use beside the shipped ones; may repeat."),
        click.option("--disable", multiple=True, metavar="ID", help="Rule to leave out; may repeat."),
        dim_option,
        click.option("--target", metavar="GPU",
                     help="GPU to plan for (`onnxfuse targets` lists them); the one present, else the H100."),
    )):
        command = option(command)
    return command
