"""Options that several commands share, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType):
    """``NAME=N``: a size for a symbolic dimension."""

    name = "NAME=N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        name, sign, number = str(value).rpartition("=")
        if not sign or not name or not re.fullmatch(r"-?\d+", number.strip()):
            self.fail(f"{value!r} is not of the form NAME=N, such as batch=8", param, ctx)
        return name.strip(), int(number)


class Architectures(click.ParamType):
    """``sm_80,sm_90``: GPU architectures."""

    name = "ARCH,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        found = tuple(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        for part in found:
            if not re.fullmatch(r"sm_\d{2,3}[af]?", part):
                self.fail(f"{part!r} is no architecture such as sm_80 or sm_90", param, ctx)
        if not found:
            self.fail("no architecture is named", param, ctx)
        return found


FILE = click.Path(path_type=Path)
"""A path; that it is there is for the stages to say, in their own words."""

model_argument = click.argument("model", type=FILE)


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


dim_option = click.option("--dim", "dims", type=Size(), multiple=True, metavar="NAME=N",
                          help="Size of a symbolic dimension to plan and count for; may repeat.")
