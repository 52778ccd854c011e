"""``onnxfuse doctor``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.output import console, hush_runtime, print_json, progress

if TYPE_CHECKING:
    from rich.console import Console

    from onnxfuse.doctor import Diagnosis

_COLOURS = {"ok": "green", "absent": "dim", "limited": "yellow", "broken": "bold red"}


@click.command(short_help="See whether this machine has all that onnxfuse uses.")
@click.option("--require-gpu", is_flag=True, help="Exit code 1 where there is no GPU, as for what is broken.")
@click.option("--json", "as_data", is_flag=True, help="Print the result as JSON.")
def doctor(require_gpu: bool, as_data: bool) -> None:
    """Look at the NVIDIA driver, the GPUs, ONNX Runtime and its CUDA provider, onnxfuse's native library, CuPy, the
    compiler NVRTC and its headers, the cache of compiled kernels and the database of measurements: state, version,
    path, and how to mend what is broken.

    A part is "ok", "absent" (not on this machine, and nothing is wrong with that), "limited" (it works with less, or
    slower) or "broken".

    \b
    Exit codes:
      0  nothing is broken; a machine without a GPU is not
      1  something is broken, or there is no GPU with --require-gpu
      2  wrong usage

    \b
    Examples:
      onnxfuse doctor
      onnxfuse doctor --require-gpu --json
    """
    from onnxfuse.doctor import examine

    with suppress(Exception):  # an ONNX Runtime that does not load is what is to be told
        hush_runtime()
    with progress(as_data) as tell:
        tell("looking at this machine", 0, 0)
        found = examine(needs_gpu=require_gpu)
    if as_data:
        print_json(found.to_json())
    else:
        _show(found, console())
    click.get_current_context().exit(found.exit_code)


def _show(found: Diagnosis, out: Console) -> None:
    from onnxfuse.reporting.text import escape, indented

    system = found.system
    out.print(f"onnxfuse {system['onnxfuse']}, Python {system['python']}, {system['platform']}")
    for name, value in found.environment.items():
        indented(out, f"{name}={value}", "dim", by=2)
    width = max(len(finding.part) for finding in found.findings)
    for finding in found.findings:
        wrong = finding in found.faults
        told = "  ".join(part for part in (finding.version, finding.path) if part)
        out.print(f"[{'bold red' if wrong else _COLOURS[finding.state]}]{finding.state:8}[/]"
                  f"{finding.part:{width}}  {escape(told)}".rstrip())
        for text, style in ((finding.message, ""), (f"help: {finding.remedy}" if finding.remedy else "", "dim")):
            if text:
                indented(out, text, style, by=8)
    out.print(f"[bold]{escape(found.summary)}[/]")
