"""``onnxfuse check``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxfuse.cli.output import console, print_json, progress
from onnxfuse.cli.parameters import FILE, database_option, model_argument, planning_options

if TYPE_CHECKING:
    from rich.console import Console

    from onnxfuse.api import CheckResult

SHOWN = 12
"""Kinds of fusions that are listed, of what is lost and of what is new; --json has all of them."""


@click.command(short_help="Fail where a fusion of a lock is gone.")
@model_argument
@click.option("--lock", "lock_file", type=FILE, required=True, metavar="FILE",
              help="What `onnxfuse optimize MODEL --lock FILE` wrote.")
@planning_options
@database_option
@click.option("--no-database", is_flag=True, help="Plan by predictions alone.")
@click.option("--json", "as_data", is_flag=True, help="Print the result as JSON.")
def check(
    model: Path,
    lock_file: Path,
    rules: tuple[Path, ...],
    disable: tuple[str, ...],
    dims: dict[str, int],
    target: str | None,
    database: Path | None,
    no_database: bool,
    as_data: bool,
) -> None:
    """Plan MODEL anew and compare what is fused with a lock: say which fusions are gone, of onnxfuse's and of ONNX
    Runtime's own, by which rule, and the node or the edge that stopped matching.  Nothing is written.

    It is planned for the GPU, the sizes and the settings of the lock, but for those that are named here; rules of your
    own must be named again.  What nodes and values are called is no matter where the structure is the same; what the
    model's inputs and outputs are called, and their types and sizes, is.  Fusions that are new are told and are no
    failure.  Of a fused MODEL the original in it is planned.

    \b
    Exit codes:
      0  all of the lock is there
      1  a fusion is gone, or an input or an output is another; or an error in the model, a
         rule or the lock
      2  wrong usage

    \b
    Examples:
      onnxfuse optimize model.onnx --dim batch=8 --target H100 --lock model.lock.yaml
      onnxfuse check model.onnx --lock model.lock.yaml
      onnxfuse check exported-anew.onnx --lock model.lock.yaml --json
    """
    from onnxfuse import api

    if no_database and database is not None:
        raise click.BadParameter("it contradicts --no-database.", param_hint="'--database'")
    with progress(as_data) as tell:
        result = api.check(model, lock_file, rules=rules, disable=disable, dims=dims, target=target, tell=tell,
                           database=False if no_database else database)
    if as_data:
        print_json(result.to_json())
    else:
        _show(result, console())
        if not result.holds or result.new or result.new_runtime:
            _show_way_on(model, lock_file, result.holds, console())
    click.get_current_context().exit(result.exit_code)


def _show(result: CheckResult, out: Console) -> None:
    from onnxfuse.reporting.text import escape, indented

    out.print(f"{escape(result.model)} and {escape(result.file)}")
    rest = result.summary.removeprefix(result.status)
    out.print(f"[bold {'green' if result.holds else 'red'}]{result.status}[/]{escape(rest)}")
    if result.changes:
        indented(out, f"since the lock: {'; '.join(result.changes)}")
    for sentence in result.interface:
        indented(out, sentence, "yellow")
    _show_lost(result, out)
    _show_otherwise(result, out)
    for new, whose in ((result.new, ""), (result.new_runtime, " of ONNX Runtime's own")):
        _show_new([(each.rule, each.operators, each.spot.nodes[0]) for each in new], whose, out)
    for note in result.notes:
        indented(out, f"note: {note}")


def _show_lost(result: CheckResult, out: Console) -> None:
    """What is gone, that of one kind for one reason together."""
    from onnxfuse.reporting.text import alike, escape, grouped, indented, operator_runs

    groups = list(grouped(result.lost, lambda each: (
        each.kind, each.locked.rule, each.locked.words,
        tuple((why.code, why.rule) for why in each.stopped.because))).values())
    for group in groups[:SHOWN]:
        first = group[0]
        whose = " of ONNX Runtime's own" if first.kind == "runtime" else ""
        out.print(f"\n[bold red]lost[/]  {len(group)} x [bold]{escape(first.locked.rule)}[/]{whose}: "
                  f"{escape(operator_runs(first.locked.operators))}")
        indented(out, alike([each.locked.label for each in group]), "cyan", by=6)
        if first.stopped.edge is not None:
            indented(out, f"between {' and '.join(map(repr, first.stopped.edge))}: {first.stopped.words}", by=6)
        else:
            at = f"at {first.stopped.node}: " if first.stopped.node else ""
            indented(out, f"{at}{first.stopped.words}", by=6)
        for why in first.stopped.because:
            _show_reason(why, out)
    if len(groups) > SHOWN:
        out.print(f"and {len(groups) - SHOWN} kinds more; --json lists all of them")


def _show_reason(why: Any, out: Console) -> None:
    from onnxfuse.reporting.text import indented

    rule = f" ({why.rule})" if why.rule else ""
    node = f" at {why.node}" if why.node else ""
    indented(out, f"{why.code}{rule}{node}: {why.message}", by=8)
    if why.remedy:
        indented(out, f"help: {why.remedy}", "dim", by=8)


def _show_otherwise(result: CheckResult, out: Console) -> None:
    """What is there in another way."""
    from onnxfuse.reporting.text import alike, grouped, indented

    if result.renamed:
        indented(out, f"at nodes of other names: {result.renamed}")
    for (before, now), group in list(grouped(
            result.otherwise, lambda each: (each.locked.rule, each.to.rule)).items())[:SHOWN]:
        by = "in fused nodes of other operators" if before == now else f"by {now}"
        indented(out, f"fused in another way: {len(group)} x {before}, {by}: "
                      f"{alike([each.locked.label for each in group])}")


def _show_new(new: Sequence[tuple[str, tuple[str, ...], str]], whose: str, out: Console) -> None:
    from onnxfuse.reporting.text import alike, escape, grouped, indented, operator_runs

    groups = list(grouped(new, lambda one: one[:2]).items())
    for (rule, operators), group in groups[:SHOWN]:
        out.print(f"\n[bold green]new[/]   {len(group)} x [bold]{escape(rule)}[/]{whose}: "
                  f"{escape(operator_runs(operators))}")
        indented(out, alike([node for _, _, node in group]), "cyan", by=6)
    if len(groups) > SHOWN:
        out.print(f"and {len(groups) - SHOWN} kinds more; --json lists all of them")


def _show_way_on(model: Path, lock_file: Path, holds: bool, out: Console) -> None:
    """How to take what is there now for what is to be."""
    from onnxfuse.reporting.text import indented

    words = shlex.join(["onnxfuse", "optimize", str(model), "--lock", str(lock_file)])
    meant = "takes in what is new" if holds else "writes the lock anew, where this is meant"
    indented(out, f"help: {words}  {meant}", "dim")
