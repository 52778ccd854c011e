"""``onnxfuse verify``."""

from __future__ import annotations

import shlex
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress
from onnxfuse.cli.parameters import FILE, dim_option

if TYPE_CHECKING:
    from rich.console import Console

    from onnxfuse.api import VerifyResult

_COLOURS = {"same": "green", "different": "red", "inconclusive": "yellow"}


class _Limit(click.FloatRange):
    """A number of zero or more."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value!r} is no limit.", param, ctx)
        return found


@click.command(short_help="Compare a fused model with its original.")
@click.argument("original", type=FILE)
@click.argument("fused", type=FILE, required=False)
@click.option("--inputs", type=FILE, metavar="DIR|FILE.npz",
              help="Arrays by input name; those missing are made up.  A folder holds .npz files, a set of inputs each, "
                   "or ONNX test data (test_data_set_0/input_0.pb).")
@dim_option
@click.option("--rtol", type=_Limit(min=0), metavar="X", help="Let elements be off by X * |original|.")
@click.option("--atol", type=_Limit(min=0), metavar="X", help="Let elements be off by X; with --rtol, by the sum.")
@click.option("--require-kernels", is_flag=True, help="Exit code 3 where a kernel was not run, as without a GPU.")
@click.option("--verify-seconds", type=click.FloatRange(min=0), default=600.0, show_default=True, metavar="N",
              help="Time for all of it; what it does not do for is left out, and told.  0: no limit.")
@click.option("--json", "as_data", is_flag=True, help="Print the result as JSON.")
def verify(original: Path, fused: Path | None, inputs: Path | None, dims: dict[str, int], rtol: float | None,
           atol: float | None, require_kernels: bool, verify_seconds: float, as_data: bool) -> None:
    """Run ORIGINAL and FUSED on the same inputs and compare every output; run the kernel of every fused node beside the
    nodes that it replaced, these in float32 or better.  Says what is farthest off, and where.

    Without FUSED it is ORIGINAL.fused.onnx beside the model.  Where ORIGINAL is a fused model itself, it is compared
    with the original that its own records put back (as `onnxfuse unfuse` does): that shows a kernel that is wrong, and
    not that the file was made of another model.

    Without kernels outputs must be the same bit for bit: fused nodes hold the original's own nodes.  With them they may
    be off by 0.001 of an output's largest magnitude in float32, 0.01 in float16 and 0.05 in bfloat16 models.  --rtol
    and --atol stand in place of both.  An output in which the original differs from itself may differ as far.

    Kernels run on a GPU alone.  Without one the outputs are compared on the CPU, through the functions that the file
    holds, and the kernels are not run; the result says so.

    \b
    Exit codes:
      0  the same in all that was run
      1  different; or an error in a model or its inputs
      2  wrong usage
      3  inconclusive: nothing differs, but the original runs on no inputs (or not on one of
         yours), or kernels were not run with --require-kernels

    \b
    Examples:
      onnxfuse verify model.onnx model.fused.onnx --dim batch=8
      onnxfuse verify model.onnx --inputs real/ --rtol 1e-2 --atol 1e-3
      onnxfuse verify model.fused.onnx --require-kernels --json
    """
    from onnxfuse import api

    hush_runtime()
    with progress(as_data) as tell:
        result = api.verify(original, fused, inputs=inputs, dims=dims, rtol=rtol, atol=atol,
                            require_kernels=require_kernels, verify_seconds=verify_seconds, tell=tell)
    if as_data:
        print_json(result.to_json())
    else:
        _show(result, console())
        if result.status == "different" and result.verification.nodes:
            _show_way_out(original, fused, console())
    click.get_current_context().exit(result.exit_code)


def _show(result: VerifyResult, out: Console) -> None:
    from onnxfuse.reporting.text import count, escape, indented

    found = result.verification
    fused = count(len(found.nodes), "fused node")
    out.print(f"{escape(result.original)} and {escape(result.fused)} ({fused})")
    rest = result.summary.removeprefix(result.status)
    out.print(f"[bold {_COLOURS[result.status]}]{result.status}[/]{escape(rest)}")
    if found.runs:
        indented(out, f"inputs: {'; '.join(map(str, found.runs))}")
    _show_outputs(result, out)
    if found.whole.first:
        indented(out, f"first to differ: {found.whole.first}", "yellow")
    _show_kernels(result, out)
    for note in found.notes:
        indented(out, f"note: {note}")


def _show_way_out(original: Path, fused: Path | None, out: Console) -> None:
    """How to find the fused nodes at fault."""
    from onnxfuse import api
    from onnxfuse.reporting.text import indented

    own = fused is None and not api.default_output(original).exists()
    words = ["unfuse", str(original), "-o", "original.onnx"] if own else [
        "bisect", str(original), str(fused or api.default_output(original))]
    what = "writes the original, without fused nodes" if own else "finds the fused nodes at fault"
    indented(out, f"help: {shlex.join(['onnxfuse', *words])}  {what}", "dim")


def _show_outputs(result: VerifyResult, out: Console) -> None:
    """Each output, with kernels and without."""
    from onnxfuse.reporting.text import indented

    whole = result.verification.whole
    wrong = {entry.output for entry in whole.differences}
    for outputs, where in ((whole.outputs, "without kernels"), (whole.device, "with kernels")):
        for entry in outputs:
            apart = entry.beyond > 0 if where == "with kernels" else entry.output in wrong
            said = result.said_of(entry, apart)
            indented(out, f"{where}: {said}", "yellow" if apart else "")


def _show_kernels(result: VerifyResult, out: Console) -> None:
    from onnxfuse.reporting.text import indented

    found = result.verification
    for node in found.failed:
        indented(out, f"wrong kernel: {node.node} ({node.rule}): {node.message}", "yellow")
    worst = result.worst
    if worst is not None and worst.verdict == "passed":
        place = f", {worst.where}" if worst.where else ""
        indented(out, f"worst kernel: {worst.node} ({worst.rule}): off by {worst.error:.1e} of its output's largest "
                      f"magnitude, {worst.ratio:.0%} of what is allowed{place}")
    if found.runner is not None:
        for node in found.nodes:
            if node.verdict == "not run":
                indented(out, f"not run: {node.node} ({node.rule}): {node.message}")
