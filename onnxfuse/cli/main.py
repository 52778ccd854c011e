"""The command group, and what becomes of errors.

Exit codes: 0 success; 1 an error in the model, a rule or the machine; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

from onnxfuse.cli.bench import bench
from onnxfuse.cli.bisect import bisect
from onnxfuse.cli.explain import explain
from onnxfuse.cli.optimize import optimize
from onnxfuse.cli.output import DEBUG
from onnxfuse.cli.report import report
from onnxfuse.cli.rules import rules
from onnxfuse.cli.targets import targets
from onnxfuse.cli.tune import tune
from onnxfuse.cli.unfuse import unfuse
from onnxfuse.errors import OnnxfuseError
from onnxfuse.version import __version__

INTERRUPTED = 130


class Commands(click.Group):
    """A group that turns errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except OnnxfuseError as error:
            _show_traceback()
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True, color=_colour())
            ctx.exit(error.exit_code)
        except Exception as error:
            _show_traceback()
            text = (str(error).splitlines() or [""])[0]
            click.echo(
                f"{click.style('internal error:', fg='red', bold=True)} {type(error).__name__}: {text}\n"
                f"help: run again with {DEBUG}=1 for the traceback, and report it", err=True, color=_colour(),
            )
            ctx.exit(1)


def _show_traceback() -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc(file=sys.stderr)


def _colour() -> bool | None:
    """Whether to colour messages: never under NO_COLOR, else where stderr is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(name="onnxfuse", cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, message="onnxfuse %(version)s")
def main() -> None:
    """Makes ONNX models faster on NVIDIA GPUs by fusing operators."""


for command in (optimize, report, explain, bench, tune, rules, unfuse, bisect, targets):
    main.add_command(command)
