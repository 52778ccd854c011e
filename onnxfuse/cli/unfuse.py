"""``onnxfuse unfuse``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.output import check_folder
from onnxfuse.cli.parameters import FILE, model_argument

if TYPE_CHECKING:
    from onnxfuse.rewriting.saving import External


@click.command(short_help="Put the original nodes back.")
@model_argument
@click.option("-o", "--output", type=FILE, metavar="OUT", required=True, help="File to write.")
@click.option("--external-data", type=click.Choice(["keep", "copy", "inline"]), default="keep", show_default=True,
              help="What becomes of weights outside the model's file.")
def unfuse(model: Path, output: Path, external_data: External) -> None:
    """Write the original of the fused model MODEL: its nodes under their own names, and nothing of onnxfuse."""
    from onnxfuse import rewriting
    from onnxfuse.graph import load_model

    check_folder(output)
    loaded = load_model(model)
    count = len(rewriting.read_fused(loaded.proto))
    rewriting.save(rewriting.unfuse(loaded.proto), output, source=loaded, external=external_data)
    said = "1 fused node" if count == 1 else f"{count} fused nodes"
    click.echo(f"{said} put back; written: {output}" if count else f"nothing was fused; written: {output}")
