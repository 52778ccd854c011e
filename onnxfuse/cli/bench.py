"""``onnxfuse bench``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress
from onnxfuse.cli.parameters import FILE, dim_option, model_argument, read_settings


@click.command(short_help="Measure a model against its fused form.")
@model_argument
@click.argument("fused", type=FILE, required=False)
@dim_option
@click.option("--inputs", type=FILE, metavar="FILE.npz", help="Arrays by input name; those missing are made up.")
@click.option("--cuda-graph", is_flag=True, help="Replay a CUDA graph, of each model that has no nodes on the CPU.")
@click.option("--runs", type=click.IntRange(min=1), metavar="N",
              help="Timed runs of each model; by default as many as take a second.")
@click.option("--provider-option", "settings", multiple=True, metavar="NAME=VALUE", callback=read_settings,
              help="Option of the CUDA provider, such as device_id=1, for both models; may repeat.")
@click.option("--json", "as_data", is_flag=True, help="Print the measurement as JSON.")
def bench(
    model: Path,
    fused: Path | None,
    dims: dict[str, int],
    inputs: Path | None,
    cuda_graph: bool,
    runs: int | None,
    settings: dict[str, str],
    as_data: bool,
) -> None:
    """Measure MODEL and FUSED by turns in one process: latency, GPU time, kernels, memory, and the ratio.

    Without FUSED it is MODEL.fused.onnx beside the model; where there is no such file, MODEL is measured alone.
    """
    from onnxfuse import api, measuring
    from onnxfuse.reporting import measured

    hush_runtime()
    if fused is None:
        beside = api.default_output(model)
        fused = beside if os.path.isfile(beside) else None
    with progress(as_data) as tell:
        result = measuring.bench(
            model, fused, dims, inputs=None if inputs is None else measuring.read_inputs(inputs),
            cuda_graph=cuda_graph, runs=runs, provider_options=settings,
            progress=lambda stage: tell(stage, 0, 0),
        )
    if as_data:
        print_json(result.to_json())
    else:
        measured.show(result, console())
