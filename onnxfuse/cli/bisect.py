"""``onnxfuse bisect``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress
from onnxfuse.cli.parameters import FILE, dim_option, model_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from onnxfuse.debugging import AnswerResult, Culprit, TimeResult

_KINDS = {
    "function": "the nodes in the file are not the original's",
    "kernel": "the kernel differs from its own nodes",
    "model": "the model differs with it",
}
_SHOWN = 16
"""Fused nodes listed with their times, beside the slower ones."""


@click.command(short_help="Find the fusion that changed an answer or costs time.")
@model_argument
@click.argument("fused", type=FILE, required=False)
@click.option("--by", type=click.Choice(["answer", "time"]), default="answer", show_default=True,
              help="What to look for.")
@dim_option
@click.option("--inputs", type=FILE, metavar="FILE.npz", help="Arrays by input name; those missing are made up.")
@click.option("--tolerance", type=click.FloatRange(min=0), metavar="X",
              help="Error of an output, over its largest magnitude, that is no difference; by default none without "
                   "kernels, and with them 0.001 for float32, 0.01 for float16 and 0.05 for bfloat16 models.")
@click.option("--json", "as_data", is_flag=True, help="Print the result as JSON.")
def bisect(model: Path, fused: Path | None, by: str, dims: dict[str, int], inputs: Path | None,
           tolerance: float | None, as_data: bool) -> None:
    """Find the fused nodes of FUSED that give another answer than MODEL, or cost time.

    Without FUSED it is MODEL.fused.onnx beside the model.  Answers: every kernel is run against the nodes it replaced,
    then the whole model with fewer and fewer nodes fused, until the smallest sets are left that make a difference.
    Without a GPU the functions in the file are compared, and no kernel is run.  Times: every fused node is measured
    against the nodes it replaced; this needs a GPU.

    The exit code is 0 where the search came to its end, whatever it found.

    \b
      onnxfuse bisect model.onnx model.fused.onnx --inputs real.npz
      onnxfuse bisect model.onnx --by time --dim batch=8
    """
    from onnxfuse import api, debugging, measuring
    from onnxfuse.graph import load_model

    hush_runtime()
    path = fused or api.default_output(model)
    arrays = None if inputs is None else measuring.read_inputs(inputs)
    pair = debugging.Pair.of(load_model(model), load_model(path), dims)
    with progress(as_data) as tell:
        result: AnswerResult | TimeResult
        if by == "time":
            result = debugging.bisect_times(pair, inputs=arrays, progress=tell)
        else:
            result = debugging.bisect_answers(
                pair, debugging.find_runner(), inputs=arrays, tolerance=tolerance, progress=tell,
            )
    if as_data:
        print_json(result.to_json())
    elif isinstance(result, debugging.AnswerResult):
        _show_answers(result, path, console())
    else:
        _show_times(result, path, console())


def _show_answers(result: AnswerResult, path: Path, out: Console) -> None:
    from onnxfuse.reporting.text import count, escape

    where = f"kernels on {result.device}" if result.device else "without kernels"
    out.print(f"[bold]{escape(str(path))}[/]  {count(result.fused, 'fused node')}, {where}, "
              f"{count(result.tried, 'variant')} run on {escape('; '.join(result.inputs))}")
    for note in result.notes:
        out.print(f"note: {escape(note)}")
    out.print(f"\n[bold]{escape(result.summary)}[/]")
    for culprit in result.culprits:
        _show_culprit(culprit, path, out)


def _show_culprit(culprit: Culprit, path: Path, out: Console) -> None:
    from onnxfuse.reporting.text import alike, count, escape, indented

    together = "" if len(culprit.nodes) == 1 else ", together only"
    out.print(f"\n[yellow]{escape(', '.join(culprit.nodes))}[/] ({escape(', '.join(culprit.rules))})"
              f": {_KINDS[culprit.kind]}{together}")
    indented(out, f"{', '.join(culprit.kernels)} for {', '.join(culprit.replaces)}", "cyan", by=4)
    indented(out, culprit.detail, by=4)
    if culprit.alike:
        indented(out, f"{count(len(culprit.alike), 'more fused node')} with the same kernel: {alike(culprit.alike)}",
                 by=4)
    if culprit.kind == "function":
        indented(out, "help: fuse the original again; the functions of this file were changed", "dim", by=4)
    else:
        indented(out, f"help: {_command(path, (*culprit.nodes, *culprit.alike))}", "dim", by=4)


def _show_times(result: TimeResult, path: Path, out: Console) -> None:
    from onnxfuse.reporting.text import count, escape, plain_table

    out.print(f"[bold]{escape(str(path))}[/]  {count(result.fused, 'fused node')}, "
              f"{count(len(result.times), 'distinct kernel')} timed on {escape(result.device)}, "
              f"{escape('; '.join(result.inputs))}")
    out.print(f"\n[bold]{escape(result.summary)}[/]")
    table = plain_table("times", "node", "rule", "nodes, µs", "fused, µs", "speed-up", "", left=(1, 2, 6), wrap=(5,),
                        drop=(2,))
    shown = [time for time in result.times if not time.reason]
    for time in shown[:max(_SHOWN, len(result.culprits))]:
        table.add_row(str(1 + len(time.alike)), escape(time.node), escape(time.rule), f"{1000 * time.before:.2f}",
                      f"{1000 * time.after:.2f}", f"{time.speedup:.2f} ({time.low:.2f} to {time.high:.2f})",
                      "[yellow]costs time[/]" if time.slower else "")
    if shown:
        out.print(table)
    for time in result.times:
        if time.reason:
            out.print(f"not timed: {escape(time.node)}: {escape(time.reason)}")
    if result.whole is not None and result.mended is not None:
        out.print(f"the whole model: {result.whole[0]:.2f}x as fast as the original; {result.mended[0]:.2f}x "
                  f"({result.mended[1]:.2f} to {result.mended[2]:.2f}) with these put back")
        names = [name for time in result.culprits for name in (time.node, *time.alike)]
        out.print(f"help: {escape(_command(path, names))}", style="dim")


def _command(path: Path, names: Sequence[str]) -> str:
    """How to put fused nodes back."""
    only = [part for name in names for part in ("--only", name)]
    return shlex.join(["onnxfuse", "unfuse", str(path), *only, "-o", str(path.with_suffix("")) + ".mended.onnx"])
