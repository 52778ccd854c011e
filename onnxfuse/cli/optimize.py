"""``onnxfuse optimize``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxfuse.cli.output import check_folder, console, progress, write_text
from onnxfuse.cli.parameters import FILE, Architectures, model_argument, planning_options

if TYPE_CHECKING:
    from onnxfuse.rewriting.saving import External


@click.command(short_help="Fuse a model.")
@model_argument
@click.option("-o", "--output", type=FILE, metavar="OUT",
              help="File to write; by default MODEL.fused.onnx beside the model.")
@planning_options
@click.option("--embed", type=Architectures(), metavar="ARCH,...", default=(),
              help="Compile the kernels for these architectures (sm_80,sm_90) and put them into the model.")
@click.option("--report", "report_file", type=FILE, metavar="FILE.json", help="Write the report as JSON.")
@click.option("--dry-run", is_flag=True, help="Plan and report; write no model.")
@click.option("--explain", is_flag=True, help="Show every near miss: node, condition and remedy.")
@click.option("--verify/--no-verify", default=True, show_default=True,
              help="Run every fused node against what it replaced; take back those that fail.")
@click.option("--inputs", type=FILE, metavar="FILE.npz", help="Arrays by input name, to verify with beside made ones.")
@click.option("--external-data", type=click.Choice(["keep", "copy", "inline"]), default="keep", show_default=True,
              help="What becomes of weights outside the model's file.")
@click.option("--json", "as_data", is_flag=True, help="Print the report as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def optimize(
    model: Path,
    output: Path | None,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: tuple[tuple[str, int], ...],
    target: str | None,
    embed: tuple[str, ...],
    report_file: Path | None,
    dry_run: bool,
    explain: bool,
    verify: bool,
    inputs: Path | None,
    external_data: External,
    as_data: bool,
    quiet: bool,
) -> None:
    """Fuse MODEL: write a model that runs its fused parts as generated CUDA kernels, and the original everywhere else.

    The exit code is 0 on success, also where nothing could be fused; 1 on an error in the model or a rule; 2 on wrong
    usage.
    """
    from dataclasses import replace

    from onnxfuse import api
    from onnxfuse.reporting import as_json, text

    if not dry_run:
        output = output or api.default_output(model)
    check_folder(report_file)
    check_folder(None if dry_run else output)
    with progress(quiet or as_data) as tell:
        result = api.optimize(
            model, rules=rules, disable=disable, dims=dict(dims), target=target, embed=embed, verify=verify,
            inputs=read_inputs(inputs), tell=tell,
        )
        report = result.report
        if not dry_run:
            path = result.save(
                output, external=external_data, progress=lambda done, of: tell("writing the data file", done, of),
            )
            report = replace(report, output=str(path))
    content = as_json(report)
    if report_file is not None:
        write_text(report_file, json.dumps(content, indent=1) + "\n")
    if as_data:
        click.echo(json.dumps(content, indent=1))
    else:
        text.show(report, console(quiet=quiet), explain=explain)


def read_inputs(path: Path | None) -> dict[str, Any] | None:
    """The arrays of an .npz file.

    Raises:
        ModelError: it cannot be read.
    """
    if path is None:
        return None
    import zipfile

    import numpy as np

    from onnxfuse.errors import ModelError

    try:
        with np.load(path, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise ValueError("it holds one array without a name")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(
            f"The inputs cannot be read: {reason}.", place=str(path),
            remedy="Write them with numpy.savez(path, input_name=array).",
        ) from error
