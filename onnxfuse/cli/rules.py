"""``onnxfuse rules``: list, show, check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli import completion
from onnxfuse.cli.output import console, hush_runtime, print_json
from onnxfuse.cli.parameters import FILE
from onnxfuse.visible import visible

if TYPE_CHECKING:
    from onnxfuse.checking import Checked
    from onnxfuse.rules import Rule, RuleSet

more_rules = click.option("--rules", "paths", type=FILE, multiple=True, metavar="PATH",
                          help="Rule file, or folder of them, beside the shipped ones; may repeat.")


NAMES = 5
"""Ids that stand in one line."""


@click.group(short_help="List, show and check rules.")
def rules() -> None:
    """List, show and check rules."""


@rules.command("list", short_help="List the rules.")
@more_rules
@click.option("--json", "as_data", is_flag=True, help="Print the list as JSON.")
def list_rules(paths: tuple[Path, ...], as_data: bool) -> None:
    """List the rules in force: id, kind and what each does."""
    found = _load(paths).all
    if as_data:
        print_json([_described(rule) for rule in found])
        return
    from onnxfuse.reporting.text import escape, plain_table

    table = plain_table("id", "kind", "summary", left=(0, 1, 2), drop=(1,))
    for rule in found:
        table.add_row(rule.id, rule.kind, escape(_line(rule.summary)))
    console().print(table)


@rules.command("show", short_help="Show one rule.")
@click.argument("rule_id", metavar="ID", shell_complete=completion.rules)
@more_rules
def show_rule(rule_id: str, paths: tuple[Path, ...]) -> None:
    """Show the rule ID as its file has it, with its examples."""
    import difflib

    from onnxfuse.errors import RuleError

    known = _load(paths).by_id
    if rule_id not in known:
        near = difflib.get_close_matches(rule_id, known, 1)
        raise RuleError(
            f"No rule is called {rule_id}.",
            remedy=f"Did you mean {near[0]}?" if near else "`onnxfuse rules list` shows them all.", usage=True,
        )
    rule = known[rule_id]
    click.echo(f"# {rule.kind} rule, {visible(rule.place.file)}:{rule.place.line}")
    click.echo(_document(rule))


@rules.command("check", short_help="Validate rule files and run their examples.")
@click.argument("paths", type=FILE, nargs=-1, required=True, metavar="PATH...")
@click.option("--json", "as_data", is_flag=True, help="Print the outcomes as JSON.")
def check(paths: tuple[Path, ...], as_data: bool) -> None:
    """Validate rule files, or folders of them, and run their examples.

    An example that must match is also fused and computed on the CPU, and compared with the original, but for what
    ONNX Runtime fuses by itself.  A kernel of a rule's own is compiled for every GPU generation, and run beside the
    nodes that it replaces: in an emulator where there is g++, which also finds accesses out of bounds, and on the GPU
    where there is one.  So check kernels of others only where you would run their programs.  What was not run is said,
    and why.  All files are read before one that is wrong ends it.  The exit code is 1 where a file is wrong or an
    example does not go as it says.

    \b
    Examples:
      onnxfuse rules check my-rules/
      onnxfuse rules check my-rules/softcap.yaml --json
    """
    from onnxfuse.checking import check_rules

    hush_runtime()
    checked = check_rules(paths)
    if as_data:
        print_json(_outcomes(checked))
    else:
        _show_check(checked)
    if checked.failed:
        click.get_current_context().exit(1)


def _load(paths: tuple[Path, ...]) -> RuleSet:
    from onnxfuse.resources import rules_folder
    from onnxfuse.rules import load_rules

    return load_rules([rules_folder(), *paths])


def _described(rule: Rule) -> dict[str, object]:
    return {
        "id": rule.id, "kind": rule.kind, "summary": _line(rule.summary), "why": _line(rule.why),
        "file": rule.place.file, "line": rule.place.line, "examples": len(rule.examples),
    }


def _line(text: str) -> str:
    return " ".join(text.split())


def _document(rule: Rule) -> str:
    """The rule's part of its file."""
    lines = Path(rule.place.file).read_text(encoding="utf-8").splitlines()
    at = (rule.place.line or 1) - 1
    borders = [-1, *(place for place, line in enumerate(lines) if line.rstrip() == "---"), len(lines)]
    start = max(border for border in borders if border < at) + 1
    end = min(border for border in borders if border >= at)
    return "\n".join(lines[start:end]).strip("\n")


def _outcomes(checked: Checked) -> dict[str, object]:
    return {
        "rules": len(checked.rules),
        "warnings": list(checked.warnings),
        "examples": [
            {
                "rule": outcome.rule.id, "example": outcome.example.name,
                "expected": outcome.example.refused or "matched",
                "computed": (outcome.rule.id, outcome.example.name) in checked.computed, "fault": outcome.fault,
            }
            for outcome in checked.outcomes
        ],
        "kernels": dict(checked.kernels),
        "not_run": [{"reason": reason, "rules": list(ids)} for reason, ids in checked.unrun],
        "failed": len(checked.failed),
    }


def _show_check(checked: Checked) -> None:
    from onnxfuse.reporting.text import count, escape, escape_lines, plain_table

    out = console()
    with_kernel = ["kernel"] if checked.kernels else []
    table = plain_table("rule", "kind", "matched", "refused", "computed", *with_kernel, "failed",
                        left=(0, 1), drop=(1,))
    for rule in checked.rules:
        own = [outcome for outcome in checked.outcomes if outcome.rule.id == rule.id]
        good = [outcome for outcome in own if outcome.fault is None]
        table.add_row(
            rule.id, rule.kind,
            str(sum(outcome.example.refused is None for outcome in good)),
            str(sum(outcome.example.refused is not None for outcome in good)),
            str(sum(name == rule.id for name, _ in checked.computed)),
            *([checked.kernels.get(rule.id, "")] if with_kernel else []),
            f"[red]{len(own) - len(good)}[/]" if len(own) > len(good) else "0",
        )
    out.print(table)
    for warning in checked.warnings:
        out.print(f"[yellow]warning:[/] {escape_lines(warning)}")
    for outcome in checked.failed:
        out.print(f"\n[red]failed:[/] {escape(outcome.rule.id)}, example {escape(repr(outcome.example.name))}")
        out.print(escape_lines(f"{outcome.fault}\n{outcome.example.place}"))
    if checked.unrun:
        out.print("\nnot run:")
    for reason, ids in checked.unrun:
        more = f" and {len(ids) - NAMES} more" if len(ids) > NAMES else ""
        out.print(escape_lines(f"  {', '.join(ids[:NAMES])}{more}: {reason}"))
    out.print(f"\n{count(len(checked.rules), 'rule')}, {count(len(checked.outcomes), 'example')}, "
              f"{len(checked.failed)} failed")
