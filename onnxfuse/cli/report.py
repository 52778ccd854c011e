"""``onnxfuse report``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxfuse.cli.output import check_folder, console, print_json, progress
from onnxfuse.cli.parameters import (
    FILE,
    database_option,
    model_argument,
    objective_options,
    planning_options,
    verbose_option,
)
from onnxfuse.files import write_text

if TYPE_CHECKING:
    from onnxfuse.measuring.database import Database


@click.command(short_help="Show what optimize would do, or what a fused model holds.")
@model_argument
@planning_options
@objective_options
@click.option("--explain", is_flag=True, help="Say why as well: what `onnxfuse explain MODEL` prints.")
@verbose_option
@click.option("--json", "as_data", is_flag=True, help="Print the report as JSON.")
@click.option("--profile", "statistics", type=FILE, metavar="FILE",
              help="Show what the fused nodes took in a run, beside what was predicted: the file that the run wrote "
                   "with ONNXFUSE_STATISTICS=FILE in its environment.")
@click.option("--learn", is_flag=True,
              help="With --profile: keep these times in the database of measurements, which optimize plans by.")
@database_option
@click.option("--html", "html_file", type=FILE, metavar="FILE",
              help="Write the report as one HTML page: plots, what remains and why, a table to sort and search.")
@click.option("--graph", "graph_file", type=FILE, metavar="FILE.svg",
              help="Draw the fused graph: each fused node with the nodes that it replaces, what repeats once.")
def report(
    model: Path,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: dict[str, int],
    target: str | None,
    explain: bool,
    verbose: bool,
    as_data: bool,
    statistics: Path | None,
    learn: bool,
    database: Path | None,
    html_file: Path | None,
    graph_file: Path | None,
    wanted: dict[str, Any],
) -> None:
    """Show what `optimize` would do to MODEL; where MODEL is fused, what it holds, read from the file itself.

    \b
    onnxfuse report model.onnx --dim batch=8 --explain
    onnxfuse report model.fused.onnx --html report.html --graph graph.svg
    onnxfuse report model.fused.onnx --profile statistics.json --learn
    """
    from onnxfuse import api
    from onnxfuse.reporting import as_json, drawing, report_text

    _check(learn, statistics, database, (html_file, graph_file))
    if statistics is not None:
        if explain or html_file is not None or graph_file is not None:
            raise click.UsageError("--profile shows a table of its own: leave --explain, --html and --graph out.")
        with nullcontext() if not learn else _database(database) as kept:
            _profile(model, statistics, as_data, target=target, rules=rules, dims=dims, learn=kept)
        return
    with progress(as_data) as tell:
        found, explanation, fused = api.looked_at(
            model, rules=rules, disable=disable, dims=dims, target=target, tell=tell, why=explain, **wanted)
    # Both are made before either is written: one that cannot be made leaves nothing behind.
    texts = [] if html_file is None else [(html_file, found.to_html())]
    texts += [] if graph_file is None else [(graph_file, drawing.picture(fused, model.name))]
    for file, text in texts:
        write_text(file, text)
    if as_data:
        print_json(as_json(found))
    else:
        report_text.show(found, console(), explanation=explanation, verbose=verbose)


def _check(learn: bool, statistics: Path | None, database: Path | None, files: tuple[Path | None, Path | None]) -> None:
    """Refuse options that do not go together, and files that cannot be written, before anything long runs."""
    if learn and statistics is None:
        raise click.UsageError("--learn keeps what --profile FILE shows: name the file.")
    if database is not None and not learn:
        raise click.UsageError("--database is for --learn.")
    html_file, graph_file = files
    if html_file is not None and html_file == graph_file:
        raise click.UsageError("--html and --graph name the same file.")
    for file in files:
        check_folder(file)


def _database(file: Path | None) -> Database:
    """The database to write to; an error where it cannot be, as nothing would be learned.

    Raises:
        MeasurementError: it cannot be written, or there is no place for it.
    """
    from onnxfuse.errors import MeasurementError
    from onnxfuse.measuring.database import VARIABLE, default_path, open_database

    path = file or default_path()
    if path is None:
        raise MeasurementError("There is no folder for the database of measurements: HOME is not set.",
                               remedy=f"Name a file: --database FILE, or {VARIABLE}=FILE in the environment.")
    return open_database(path)


def _profile(model: Path, statistics: Path, as_data: bool, **options: Any) -> None:
    """Show a recorded run."""
    from onnxfuse.reporting import profile, profile_text

    found = profile.profile_of_run(model, statistics, **options)
    if as_data:
        print_json(profile.as_json(found))
    else:
        profile_text.show(found, console())
