"""``onnxfuse explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfuse.cli.output import console, print_json, progress
from onnxfuse.cli.parameters import (
    measurement_options,
    model_argument,
    objective_options,
    planning_options,
    verbose_option,
)


@click.command(short_help="Say why a node is fused as it is, or what traffic remains.")
@model_argument
@click.argument("node", required=False)
@planning_options
@objective_options
@measurement_options
@verbose_option
@click.option("--json", "as_data", is_flag=True, help="Print the explanation as JSON.")
def explain(
    model: Path,
    node: str | None,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: dict[str, int],
    target: str | None,
    verbose: bool,
    as_data: bool,
    wanted: dict[str, Any],
) -> None:
    """Say why MODEL would be fused as it is.

    With NODE, the name of a node, of a value or of a fused node: the regions that were considered around it, what
    each would save, why one was chosen and the others were not.  Without it: the regions that are left to ONNX
    Runtime, what still passes through device memory after fusion, most bytes first, why, and what would mend it.  A
    fused MODEL is explained from the original in it.

    \b
      onnxfuse explain model.onnx
      onnxfuse explain model.onnx /encoder/layer.0/Add_2 --dim batch=8
      onnxfuse explain model.fused.onnx node_Add_12.residual-layer-norm --target A100
    """
    from onnxfuse import api
    from onnxfuse.reporting import explain_text, explanation_json

    with progress(as_data) as tell:
        found = api.explain(model, node, rules=rules, disable=disable, dims=dims, target=target, tell=tell, **wanted)
    if as_data:
        print_json(explanation_json(found))
    else:
        explain_text.show(found, console(), verbose=verbose)
