"""``onnxfuse optimize``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxfuse.cli.output import Tell, check_folder, console, hush_runtime, json_text, print_json, progress
from onnxfuse.cli.parameters import (
    FILE,
    measurement_options,
    model_argument,
    objective_options,
    planning_options,
    read_architectures,
    verbose_option,
)
from onnxfuse.cli.targets import gpus_present
from onnxfuse.files import write_text

if TYPE_CHECKING:
    from onnxfuse.api import Result
    from onnxfuse.graph import LoadedModel
    from onnxfuse.reporting import Explanation, Report
    from onnxfuse.rewriting.saving import External


@click.command(short_help="Fuse a model.")
@model_argument
@click.option("-o", "--output", type=FILE, metavar="OUT",
              help="File to write; by default MODEL.fused.onnx beside the model.")
@planning_options
@objective_options
@measurement_options
@click.option("--embed", metavar="ARCH,...", callback=read_architectures,
              help="Compile the kernels for these architectures (sm_80,sm_90) and put them into the model, with PTX of "
                   "the newest for later GPUs.")
@click.option("--report", "report_file", type=FILE, metavar="FILE.json", help="Write the report as JSON.")
@click.option("--lock", "lock_file", type=FILE, metavar="FILE",
              help="Write what is fused, by onnxfuse and by ONNX Runtime itself, as YAML: `onnxfuse check MODEL --lock "
                   "FILE` holds later models against it.")
@click.option("--dry-run", is_flag=True, help="Plan and report; write no model.")
@click.option("--explain", is_flag=True, help="Say why as well: what `onnxfuse explain MODEL` prints.")
@verbose_option
@click.option("--verify/--no-verify", default=True, show_default=True,
              help="Compile every kernel for the target and see which spill registers; run every fused node against "
                   "what it replaced and take back those that fail.")
@click.option("--verify-seconds", type=click.FloatRange(min=0), default=600.0, show_default=True, metavar="N",
              help="Time for verification; what it does not do for is left out, and the report says so.  0: no limit.")
@click.option("--inputs", type=FILE, metavar="FILE.npz",
              help="Arrays by input name, to verify and measure with beside made ones.")
@click.option("--measure-seconds", type=click.FloatRange(min=0), default=60.0, show_default=True, metavar="N",
              help="Where the GPU to plan for is here: measure regions with products that the database does not know, "
                   "which are fused only where that is faster, or predicted to be where time did not suffice; after N "
                   "seconds begin no measurement.  0: none at all.")
@click.option("--measure/--no-measure", default=None,
              help="Run both models on the GPU and report the speed-up; by default where there is a GPU.")
@click.option("--external-data", type=click.Choice(["keep", "copy", "inline"]), default="keep", show_default=True,
              help="What becomes of weights outside the model's file.")
@click.option("--json", "as_data", is_flag=True, help="Print the report as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def optimize(
    model: Path,
    output: Path | None,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: dict[str, int],
    target: str | None,
    embed: tuple[str, ...],
    dry_run: bool,
    verify: bool,
    verify_seconds: float,
    inputs: Path | None,
    measure: bool | None,
    measure_seconds: float,
    external_data: External,
    wanted: dict[str, Any],
    **shown: Any,
) -> None:
    """Fuse MODEL: write a model that runs its fused parts as generated CUDA kernels, and the original everywhere else.

    The exit code is 0 on success, also where nothing could be fused; 1 on an error in the model or a rule; 2 on wrong
    usage.

    \b
    Example:
      onnxfuse optimize model.onnx --dim batch=8 --fold-weights
    """
    from onnxfuse import api, measuring
    from onnxfuse.graph import load_model
    from onnxfuse.rewriting import is_optimised

    hush_runtime()
    target_file = None if dry_run else output or api.default_output(model)
    _check_files(model, target_file, {"--report": shown["report_file"], "--lock": shown["lock_file"]})
    arrays = None if inputs is None else measuring.read_inputs(inputs)
    if is_optimised((loaded := load_model(model, lean=True)).proto):
        _already(model, loaded, **shown)
        return
    with progress(shown["quiet"] or shown["as_data"]) as tell:
        result = api.optimize(
            loaded, rules=rules, disable=disable, dims=dims, target=target, embed=embed, verify=verify,
            verify_seconds=verify_seconds, inputs=arrays, measure_seconds=measure_seconds, tell=tell, **wanted,
        )
        report = result.report
        if target_file is not None:
            report = _saved(result, target_file, external_data, tell)
            if _is_measured(report, measure):
                report = replace(report, measured=_measured(model, target_file, dims, arrays, wanted, tell))
    _show(result, report, **shown)


def _check_files(model: Path, target: Path | None, more: Mapping[str, Path | None]) -> None:
    """Say before anything long runs that a file could not be written, or that a report or a lock, by their options,
    would stand where a model or the other one does."""
    taken = {os.path.realpath(path) for path in (model, target) if path is not None}
    for option, file in more.items():
        check_folder(file)
        if file is not None and os.path.realpath(file) in taken:
            raise click.BadParameter(f"{str(file)!r} is another file of this command.", param_hint=f"'{option}'")
        taken |= set() if file is None else {os.path.realpath(file)}
    check_folder(target)


def _saved(result: Result, file: Path, external_data: External, tell: Tell) -> Report:
    """Write the model; the report with its path, and the files beside it that hold weights of its."""
    saved = result.write(file, external=external_data, progress=lambda done, of: tell("writing the weights", done, of))
    return replace(result.report, output=str(saved.path), weights=tuple(map(str, saved.weights)))


def _already(model: Path, loaded: LoadedModel, *, report_file: Path | None, lock_file: Path | None, as_data: bool,
             explain: bool, verbose: bool, quiet: bool) -> None:
    """Say of a model that an earlier optimisation left so what it holds; nothing is written but the report."""
    from onnxfuse.reporting import report_of_fused
    from onnxfuse.visible import visible

    click.echo(f"warning: {visible(str(model))} is fused already, and nothing was written.\n"
               "help: To plan it anew, as for another GPU or other sizes, put it back first: onnxfuse unfuse MODEL -o "
               "ORIGINAL.", err=True)
    _print(report_of_fused(loaded, {}), None, report_file, as_data=as_data, verbose=verbose, quiet=quiet)


def _is_measured(report: Report, measure: bool | None) -> bool:
    """Whether both models are to run; by default where there is a GPU and they have run within the bounds of
    verification: what did not would not here."""
    ran = report.verification["status"] != "not run"
    return bool(report.fusions and (measure or (measure is None and ran and gpus_present())))


def _show(result: Result, report: Report, *, report_file: Path | None, lock_file: Path | None, as_data: bool,
          explain: bool, verbose: bool, quiet: bool) -> None:
    """Write the lock, and the report as JSON, where they were asked for, and print the report."""
    from onnxfuse import reporting
    from onnxfuse.reporting.text import escape

    if lock_file is not None:
        result.save_lock(lock_file)
    why = reporting.explain(result.optimised) if explain and not as_data and not quiet else None
    _print(report, why, report_file, as_data=as_data, verbose=verbose, quiet=quiet)
    if lock_file is not None and not as_data and not quiet:
        console().print(f"lock: {escape(str(lock_file))}")


def _print(report: Report, why: Explanation | None, report_file: Path | None, *, as_data: bool, verbose: bool,
           quiet: bool) -> None:
    from onnxfuse.reporting import as_json, report_text

    content = as_json(report)
    if report_file is not None:
        write_text(report_file, json_text(content) + "\n")
    if as_data:
        print_json(content)
    elif not quiet:
        report_text.show(report, console(), verbose=verbose, explanation=why)


def _measured(model: Path, fused: Path, dims: dict[str, int], inputs: Mapping[str, Any] | None,
              wanted: Mapping[str, Any], tell: Tell) -> dict[str, object]:
    """What a run of both models shows, which the fused file keeps; the reason where they cannot be run."""
    from onnxfuse import measuring
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.reporting import keep_measured, measured

    try:
        found = measuring.bench(
            model, fused, dims, inputs=inputs, memory=False, provider_options=wanted["provider_options"],
            progress=lambda stage: tell(stage, 0, 0),
        )
    except OnnxfuseError as error:
        return {"reason": error.message}
    summary = measured.summary(found)
    keep_measured(fused, summary)
    return summary
