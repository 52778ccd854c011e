"""``onnxfuse export-triton``."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.parameters import FILE, model_argument
from onnxfuse.visible import visible


def _read_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from onnxfuse.triton import NAME

    if not NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no folder's name of letters, digits, '_', '-' and '.'.", ctx, param)
    return value


@click.command(name="export-triton", short_help="Write a model repository for Triton Inference Server.")
@model_argument
@click.option("--name", metavar="NAME", required=True, callback=_read_name, help="Name that clients call the model by.")
@click.option("-o", "--output", type=FILE, metavar="REPOSITORY", required=True,
              help="Folder of the server's models; it is made where it is not there.")
@click.option("--version", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Version of the model; others in the repository stay.")
@click.option("--server-path", metavar="PATH",
              help="Where the server sees REPOSITORY, such as /models in a container; by default its own path.")
@click.option("--max-batch", type=click.IntRange(min=0), default=0, metavar="N",
              help="Let the server put requests together to batches of up to N, along the first axis of every input "
                   "and output; by default requests run as they come.")
def export_triton(model: Path, name: str, output: Path, version: int, server_path: str | None, max_batch: int) -> None:
    """Write the fused model MODEL, its configuration and the native library into REPOSITORY.

    \b
      onnxfuse optimize model.onnx --embed sm_80,sm_90
      onnxfuse export-triton model.fused.onnx --name encoder --output repository --server-path /models
      tritonserver --model-repository /models

    The model must hold compiled kernels (--embed): the server has no compiler.
    """
    from onnxfuse.graph import load_model
    from onnxfuse.triton import RepositoryPlace, export

    done = export(load_model(model), RepositoryPlace(output, name, version, server_path), max_batch)
    said = "1 fused node" if done.fused == 1 else f"{done.fused} fused nodes"
    kernels = f" for {', '.join(done.architectures)}" if done.architectures else ""
    click.echo(f"{said}{kernels}; written: {visible(str(done.folder))}" if done.fused
               else f"nothing is fused in this model; written: {visible(str(done.folder))}")
