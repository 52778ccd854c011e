"""The command group, and what becomes of errors.

Exit codes: 0 success; 1 an error in the model, a rule or the machine, or what ``check`` finds lost; 2 wrong usage; 130
interrupted.  ``verify`` has some of its own.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from onnxfuse.cli.bench import bench
from onnxfuse.cli.bisect import bisect
from onnxfuse.cli.check import check
from onnxfuse.cli.doctor import doctor
from onnxfuse.cli.explain import explain
from onnxfuse.cli.export_triton import export_triton
from onnxfuse.cli.optimize import optimize
from onnxfuse.cli.output import console, guarded
from onnxfuse.cli.report import report
from onnxfuse.cli.rules import rules
from onnxfuse.cli.targets import targets
from onnxfuse.cli.tune import tune
from onnxfuse.cli.unfuse import unfuse
from onnxfuse.cli.verify import verify
from onnxfuse.errors import InternalError, OnnxfuseError
from onnxfuse.unforeseen import DEBUG
from onnxfuse.version import __version__
from onnxfuse.visible import visible
from onnxfuse.wording import command_line

INTERRUPTED = 130

_ARGUMENTS = "onnxfuse.arguments"
"""Where the context keeps the command line."""


class Commands(click.Group):
    """A group that turns errors into messages and exit codes."""

    def main(self, *arguments: Any, **more: Any) -> Any:
        with guarded(), command_line():
            return super().main(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _visible_options():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            _show_traceback()
            known = error if isinstance(error, OnnxfuseError) else None
            if known is None or isinstance(known, InternalError):
                known = _unforeseen(error, ctx)
            word = "internal error:" if isinstance(known, InternalError) else "error:"
            _show(word, str(known))
            ctx.exit(known.exit_code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        with _visible_options():
            return super().parse_args(ctx, args)


@contextmanager
def _visible_options() -> Iterator[None]:
    """Name an unknown option visibly: older releases of click repeat it as it was given."""
    try:
        yield
    except click.NoSuchOption as error:
        raise click.UsageError(visible(error.format_message()), error.ctx) from None


def _unforeseen(error: Exception, ctx: click.Context) -> OnnxfuseError:
    """The error to show for a fault of onnxfuse: with the files of the command line, and that itself."""
    from onnxfuse.unforeseen import unforeseen

    arguments: tuple[str, ...] = ctx.meta.get(_ARGUMENTS, ())
    cause = error.__cause__ if isinstance(error, InternalError) else error
    files = [argument for argument in arguments[1:] if os.path.isfile(argument)]
    return unforeseen(cause if isinstance(cause, Exception) else error, files,
                      shlex.join(["onnxfuse", *arguments]))


def _show_traceback() -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc(file=sys.stderr)


def _show(kind: str, text: str) -> None:
    """Print an error; its first word is red where stderr is a terminal, but never under NO_COLOR."""
    from rich.text import Text

    console(stderr=True).print(Text.assemble((kind, "bold red"), " ", text), soft_wrap=True)


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(name="onnxfuse", cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, message="onnxfuse %(version)s")
def main() -> None:
    """Makes ONNX models faster on NVIDIA GPUs by fusing operators."""


for command in (optimize, report, explain, verify, check, bench, tune, rules, unfuse, bisect, targets, doctor,
                export_triton):
    main.add_command(command)
