"""The explanation as text, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from onnxfuse.refusal import Refusal
from onnxfuse.region import Built
from onnxfuse.reporting.explain import (
    Explained,
    ModelExplanation,
    Neighbour,
    NodeExplanation,
    Remaining,
    State,
    Weighed,
)
from onnxfuse.reporting.left_text import show_left, show_matches, show_near
from onnxfuse.reporting.text import (
    COMPILER,
    alike,
    count,
    duration,
    escape,
    indented,
    operator_runs,
    show_heading,
    size,
)
from onnxfuse.wording import as_data

SHOWN, PRODUCTS = 16, 6
"""Groups of nodes listed, and of products; the JSON has all of them."""

SHARE = 0.005
"""Share of the bytes below which a group is not listed."""

STOPPED = 12
"""Refusals listed for one node."""

NEIGHBOURS = 8
"""Neighbours listed on either side."""

_STATES: dict[State, str] = {
    "fused": "fused", "product": "product", "view": "no kernel", "host": "on the CPU", "folded": "constant",
    "control": "runs bodies", "removed": "removed",
    "alone": "not fused",
}


def show(explanation: Explained, console: Console, *, verbose: bool = False) -> None:
    """Print an explanation; ``verbose``: near misses too that nothing a user can change would mend."""
    show_heading(explanation, console)
    for note in explanation.notes:
        console.print(f"note: {escape(note)}")
    console.print()
    if explanation.node is not None:
        _node(explanation.node, console)
    if explanation.whole is not None:
        show_whole(explanation.whole, console, verbose=verbose)


def _node(node: NodeExplanation, console: Console) -> None:
    console.print(f"[bold]{escape(node.subject)}[/] ({escape(operator_runs(node.operators))}): {escape(node.summary)}")
    if node.bytes:
        console.print(f"{'node by node' if len(node.nodes) > 1 else 'on its own'}: {size(node.bytes)}, "
                      f"{duration(node.seconds)} predicted")
    for name, built in zip(node.fused_nodes, node.compiled, strict=True):
        if built is not None:
            console.print(escape(_compiled(name, built)))
    if node.runtime:
        console.print(f"ONNX Runtime itself would run it in one kernel with {escape(', '.join(node.runtime))}")
    _considered(node.considered, console)
    _refusals(node, console)
    for title, others in (("Reads", node.reads), ("Read by", node.read_by)):
        if others:
            console.print(f"\n[bold]{title}:[/]")
            for other in others[:NEIGHBOURS]:
                indented(console, _beside(other), by=2)
            if len(others) > NEIGHBOURS:
                console.print(f"  and {len(others) - NEIGHBOURS} more")


def _compiled(name: str, built: Built) -> str:
    spilled = f"{built.spilled_bytes:,} bytes of values that they do not hold" if built.spilled_bytes else (
        "which hold all its values")
    return (f"{name} compiled for {built.architecture}: {built.registers} registers a thread, {spilled}; "
            f"{built.shared_bytes:,} bytes of shared memory a block")


def _considered(considered: Sequence[Weighed], console: Console) -> None:
    if not considered:
        console.print("\n[bold]Regions considered around it:[/] none")
        return
    console.print(f"\n[bold]Regions considered around it:[/] {len(considered)}")
    for entry in considered:
        colour = "green" if entry.verdict == "chosen" else "yellow"
        words = f"  [{colour}]{entry.verdict}[/]  [bold]{escape(entry.rule)}[/]  "
        console.print(words + escape(operator_runs(entry.operators)))
        indented(console, ", ".join(entry.nodes), "cyan", by=10)
        if entry.bytes_before is not None and entry.bytes_after is not None:
            indented(console, _figures(entry), by=10)
        if entry.lost_to:
            indented(console, f"lost to the region of {entry.lost_to}", by=10)
        if entry.reason:
            indented(console, entry.reason, by=10)


def _figures(entry: Weighed) -> str:
    before, after, saved = entry.seconds_before or 0.0, entry.seconds_after or 0.0, entry.seconds_saved or 0.0
    words = (f"{size(entry.bytes_before or 0)} to {size(entry.bytes_after or 0)}, "
             f"{count(entry.kernels_before or 0, 'kernel')} to {entry.kernels_after}, "
             f"{duration(before)} to {duration(after)}: ")
    ratio = f" ({before / after:.2f}x)" if after else ""
    return words + (f"saves {duration(saved)}{ratio}" if saved >= 0 else f"costs {duration(-saved)} more{ratio}")


def _refusals(node: NodeExplanation, console: Console) -> None:
    if not node.refusals:
        return
    console.print("\n[bold]What stopped regions here:[/]")
    for refusal in node.refusals[:STOPPED]:
        where = "" if refusal.node in (node.subject, *node.nodes) else f" at {escape(refusal.node)}"
        rule = f" ({escape(refusal.rule)})" if refusal.rule and refusal.rule != refusal.code else ""
        console.print(f"  [bold]{escape(refusal.code)}[/]{rule}{where}")
        _because(refusal, console, 6)
    if len(node.refusals) > STOPPED:
        console.print(f"  and {len(node.refusals) - STOPPED} more")


def _because(refusal: Refusal, console: Console, by: int) -> None:
    indented(console, refusal.message, by=by, lines=refusal.code == COMPILER)
    if refusal.remedy:
        indented(console, f"help: {refusal.remedy}", "dim", by=by)


def _beside(other: Neighbour) -> str:
    bulk = "" if other.bytes is None else f" ({size(other.bytes)})"
    where = f"in {other.fused_node}" if other.fused_node else _STATES[other.state]
    return f"{other.value}{bulk}: {other.node} ({other.operator}), {where}"


def show_whole(whole: ModelExplanation, console: Console, *, verbose: bool = False) -> None:
    """Print why a model is fused as it is: what the runtime keeps, where the traffic that remains comes from, and near
    misses."""
    _traffic(whole, console)
    show_left(whole.left, "", console)
    show_matches(whole.matches, console)
    _remaining(whole, console)
    near = whole.refusals if verbose else whole.advice
    show_near(near, len(whole.refusals) - len(near), console, each=True)


def _traffic(whole: ModelExplanation, console: Console) -> None:
    console.print(f"Through device memory in one run, outside products and convolutions: {size(whole.bytes_before)} "
                  f"before fusion, {size(whole.bytes_after)} after")
    console.print(f"GPU time, predicted: {duration(whole.seconds_before)} before fusion, "
                  f"{duration(whole.seconds_after)} after")


def _remaining(whole: ModelExplanation, console: Console) -> None:
    rest = [found for found in whole.remaining if found.state != "product"]
    listed = [found for found in rest if found.bytes >= SHARE * whole.bytes_after][:SHOWN]
    if rest:
        console.print("\n[bold]What remains, most bytes first:[/]")
    for found in listed:
        share = f"{found.bytes / whole.bytes_after:.0%}" if whole.bytes_after else ""
        console.print(f"{size(found.bytes):>8} {share:>4}  {_what(found)}")
        own = " (fused by ONNX Runtime itself)" if found.state == "alone" and found.kernels < len(found.nodes) else ""
        indented(console, f"{count(found.kernels, 'kernel')}, {duration(found.seconds)}{own}: {found.shapes}", by=15)
        indented(console, alike(found.nodes), "cyan", by=15)
        if found.reason is not None:
            before = "no larger, " if found.state == "fused" else ""
            reason = found.reason
            _because(Refusal(reason.code, f"{before}{reason.code}: {reason.message}", remedy=reason.remedy),
                     console, 15)
    if len(rest) > len(listed):
        console.print(f"and {size(sum(found.bytes for found in rest[len(listed):]))} in "
                      f"{count(len(rest) - len(listed), 'group')} more; {as_data()} lists all of them")
    _products([found for found in whole.remaining if found.state == "product"], whole, console)


def _products(products: Sequence[Remaining], whole: ModelExplanation, console: Console) -> None:
    if not products:
        return
    number = sum(found.times for found in products)
    console.print(f"\n[bold]Products and convolutions:[/] {size(whole.bytes_products)} in {count(number, 'kernel')}, "
                  "ONNX Runtime's")
    for found in products[:PRODUCTS]:
        console.print(f"{size(found.bytes):>8}       {found.times} x {escape(operator_runs(found.operators))}: "
                      f"{escape(found.shapes)}")
    if len(products) > PRODUCTS:
        console.print(f"and {count(len(products) - PRODUCTS, 'group')} more")


def _what(found: Remaining) -> str:
    rule = f" ({escape(found.rule)})" if found.rule else ""
    return f"[bold]{_STATES[found.state]}[/]  {found.times} x {escape(operator_runs(found.operators))}{rule}"
