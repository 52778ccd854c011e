"""``onnxfuse report``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from onnxfuse.cli.output import check_folder, console, progress, write_text
from onnxfuse.cli.parameters import FILE, model_argument, planning_options


@click.command(short_help="Show what optimize would do, or what a fused model holds.")
@model_argument
@planning_options
@click.option("--explain", is_flag=True, help="Show every near miss: node, condition and remedy.")
@click.option("--json", "as_data", is_flag=True, help="Print the report as JSON.")
@click.option("--html", "html_file", type=FILE, metavar="FILE", help="Write the report as one HTML page.")
def report(
    model: Path,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: dict[str, int],
    target: str | None,
    explain: bool,
    as_data: bool,
    html_file: Path | None,
) -> None:
    """Show what `optimize` would do to MODEL; where MODEL is fused, what it holds, read from the file itself."""
    from onnxfuse import api
    from onnxfuse.reporting import as_json, text

    check_folder(html_file)
    with progress(as_data) as tell:
        found = api.report(model, rules=rules, disable=disable, dims=dims, target=target, tell=tell)
    if html_file is not None:
        from onnxfuse.reporting.html import page

        write_text(html_file, page(found))
    if as_data:
        click.echo(json.dumps(as_json(found), indent=1))
    else:
        text.show(found, console(), explain=explain)
