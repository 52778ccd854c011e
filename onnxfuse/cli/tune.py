"""``onnxfuse tune``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress
from onnxfuse.cli.parameters import (
    database_option,
    dim_option,
    disable_option,
    fold_weights_option,
    model_argument,
    read_settings,
    rules_option,
)
from onnxfuse.cuda_options import TF32
from onnxfuse.errors import KernelError
from onnxfuse.visible import visible

if TYPE_CHECKING:
    from onnxfuse.measuring.database import Environment, Measurement


@click.command(short_help="Measure a model's kernels on this GPU.")
@model_argument
@dim_option
@rules_option
@disable_option
@fold_weights_option
@click.option("--provider-option", "provider_options", multiple=True, metavar="use_tf32=0", callback=read_settings,
              help="With use_tf32=0 products of float32 are measured whose operands are not rounded to TF32, for "
                   "models that are to run with that option of the CUDA provider.")
@database_option
@click.option("--budget", type=click.FloatRange(min=0), metavar="SECONDS",
              help="Begin no measurement after so long; regions that take longest come first.")
@click.option("--force", is_flag=True, help="Measure again what the database holds.")
@click.option("--json", "as_data", is_flag=True, help="Print the result as JSON.")
def tune(
    model: Path,
    dims: dict[str, int],
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    fold_weights: bool,
    provider_options: dict[str, str],
    database: Path | None,
    budget: float | None,
    force: bool,
    as_data: bool,
) -> None:
    """Measure, on the GPU of this machine, the ways to run each kernel that MODEL would be fused with, and what ONNX
    Runtime takes for the same nodes.

    Results go into a database as they come: a run that was interrupted goes on where it was.  `onnxfuse optimize`
    takes the fastest schedules from it, and leaves to ONNX Runtime what was measured slower.

    \b
    Example:
      onnxfuse tune model.onnx --dim batch=8 --dim sequence=128
      onnxfuse optimize model.onnx --dim batch=8 --dim sequence=128
      onnxfuse tune model.onnx --fold-weights && onnxfuse optimize model.onnx --fold-weights
    """
    from onnxfuse import tuning
    from onnxfuse.measuring.database import open_database
    from onnxfuse.reporting import tuned as reported

    others = [name for name in provider_options if name != TF32]
    if others:
        raise click.BadParameter(f"what is measured does not hang on {others[0]}.", param_hint="'--provider-option'")
    hush_runtime()
    with progress(as_data) as tell:
        tell("starting the GPU", 0, 0)
        timer = tuning.find_timer()
        watch = tuning.Watch(partial(_hung, database, timer.environment))
        options = tuning.TuneOptions(rules, disable, dims, budget, force, fold_weights=fold_weights, watch=watch,
                                     tf32=provider_options.get(TF32) != "0")
        with open_database(database) as kept:
            try:
                found = tuning.tune(model, timer, kept, options, tell)
            except KeyboardInterrupt:
                click.echo(f"What was measured is kept in {visible(kept.name)}; run the same command again to go on.",
                           err=True)
                raise
    if as_data:
        print_json(reported.as_json(found))
    else:
        reported.show(found, console())


def _hung(database: Path | None, environment: Environment, candidate: Measurement) -> None:
    """Remember a kernel that does not end, say so, and end the process: nothing else ends the kernel."""
    from onnxfuse.measuring.database import open_database
    from onnxfuse.tuning.work import candidate_words

    remedy: str | None = None
    try:
        with open_database(database) as kept:
            kept.record(environment, candidate)
        remedy = "run the same command again: it goes on behind it"
    finally:
        error = KernelError(
            f"a kernel did not end ({candidate_words(candidate.candidate)}; {candidate.shapes}), and nothing but the "
            "end of this process ends it. This is a fault of onnxfuse; report it.", remedy=remedy)
        click.echo(f"error: {error}", err=True)
        os._exit(error.exit_code)
