"""``onnxfuse unfuse``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.output import check_folder
from onnxfuse.cli.parameters import FILE, model_argument
from onnxfuse.visible import visible

if TYPE_CHECKING:
    from onnxfuse.rewriting.saving import External


@click.command(short_help="Put the original nodes back.")
@model_argument
@click.option("-o", "--output", type=FILE, metavar="OUT", required=True, help="File to write.")
@click.option("--external-data", type=click.Choice(["keep", "copy", "inline"]), default="keep", show_default=True,
              help="What becomes of weights outside the model's file.")
@click.option("--only", multiple=True, metavar="NAME",
              help="Put back this fused node alone; may repeat.  The others stay fused.")
def unfuse(model: Path, output: Path, external_data: External, only: tuple[str, ...]) -> None:
    """Write the original of the fused model MODEL: its nodes under their own names, and nothing of onnxfuse.

    With --only, the nodes of some fused nodes come back, and the others stay as they are:

    \b
      onnxfuse unfuse model.fused.onnx -o model.onnx
      onnxfuse unfuse model.fused.onnx --only node_Add_12.residual-layer-norm -o mended.onnx
    """
    from onnxfuse import rewriting
    from onnxfuse.graph import load_model

    check_folder(output)
    loaded = load_model(model)
    count = len(set(only)) if only else len(rewriting.read_fused(loaded.proto))
    rewriting.save(rewriting.original(loaded, only or None).proto, output, source=loaded, external=external_data)
    said = "1 fused node" if count == 1 else f"{count} fused nodes"
    if not count and rewriting.sizes_record(loaded.proto) is not None:
        count, said = 1, "arithmetic on sizes"
    if not count and rewriting.constants_record(loaded.proto) is not None:
        count, said = 1, "arithmetic on constants"
    if not count and rewriting.bias_record(loaded.proto) is not None:
        count, said = 1, "biases"
    if not count and rewriting.layout_record(loaded.proto) is not None:
        count, said = 1, "layouts"
    written = f"written: {visible(str(output))}"
    click.echo(f"{said} put back; {written}" if count else f"nothing was fused; {written}")
