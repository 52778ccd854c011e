"""``onnxfuse bench``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress
from onnxfuse.cli.parameters import FILE, dim_option, model_argument, read_settings


@click.command(short_help="Measure a model, and its fused form beside it.")
@model_argument
@click.argument("fused", type=FILE, required=False)
@dim_option
@click.option("--inputs", type=FILE, metavar="FILE.npz", help="Arrays by input name; those missing are made up.")
@click.option("--cuda-graph", is_flag=True, help="Replay a CUDA graph, of each model that has no nodes on the CPU.")
@click.option("--runs", type=click.IntRange(min=1), metavar="N",
              help="Timed runs of each model, and of each thread; by default as many as take a second.")
@click.option("--threads", type=click.IntRange(min=1, max=256), default=1, show_default=True, metavar="N",
              help="Threads that run each model at once, on one session and each with inputs and outputs of its own, "
                   "for its throughput; the other figures are those of one thread.")
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
    threads: int,
    settings: dict[str, str],
    as_data: bool,
) -> None:
    """Measure MODEL and FUSED by turns in one process: percentiles of latency, throughput, GPU time, bytes and
    arithmetic a second beside what the GPU reaches, kernels, memory, and the ratio.

    Without FUSED it is MODEL.fused.onnx beside the model; where there is no such file, MODEL is measured alone.

    Without a GPU that ONNX Runtime can use the models run on the CPU, fused nodes through their functions; a note says
    so.  Items are what the inputs' first axis counts, where that is a batch.  Sizes at which the model cannot run are
    refused.

    \b
    Examples:
      onnxfuse bench model.onnx --dim batch=8 --dim sequence=128
      onnxfuse bench model.onnx model.fused.onnx --inputs real.npz --threads 4
      onnxfuse bench model.onnx --cuda-graph --runs 1000 --json
    """
    from onnxfuse import api
    from onnxfuse.reporting import measured

    hush_runtime()
    if fused is None:
        beside = api.default_output(model)
        fused = beside if os.path.isfile(beside) else None
    with progress(as_data) as tell:
        result = api.bench(model, fused, dims=dims, inputs=inputs, threads=threads, runs=runs, cuda_graph=cuda_graph,
                           provider_options=settings, tell=tell)
    if as_data:
        print_json(result.to_json())
    else:
        measured.show(result, console())
