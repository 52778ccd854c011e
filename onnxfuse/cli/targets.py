"""``onnxfuse targets``."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.output import console, print_json
from onnxfuse.cli.parameters import FILE


@click.command(short_help="List the GPUs that can be planned for.")
@click.option("--rules", type=FILE, multiple=True, metavar="FOLDER",
              help="Folder of rules whose folder hardware holds further profiles; may repeat.")
@click.option("--json", "as_data", is_flag=True, help="Print the profiles as JSON.")
def targets(rules: tuple[Path, ...], as_data: bool) -> None:
    """List the hardware profiles, and the GPUs present."""
    from onnxfuse.planning.costs.hardware import known_profiles

    profiles = known_profiles(rules)
    if as_data:
        print_json([profile.model_dump() for profile in profiles])
        return
    from onnxfuse.reporting.text import escape, plain_table

    out = console()
    table = plain_table("name", "architecture", "memory", "bandwidth", "L2", "SMs", "", left=(0, 1, 6), drop=(4, 5))
    for profile in profiles:
        table.add_row(
            escape(profile.name), profile.architecture, f"{profile.memory_gb:.0f} GB",
            f"{profile.bandwidth_gb_s:,.0f} GB/s", f"{profile.l2_mb:g} MB", str(profile.multiprocessors),
            "planning only" if profile.planning_only else "",
        )
    out.print(table)
    present = gpus_present()
    if present:
        for gpu in present:
            out.print(f"present: {escape(gpu)}")
    else:
        out.print("no GPU here")


def gpus_present() -> list[str]:
    """Names of the GPUs in the machine; none where there is no driver or no native library."""
    from onnxfuse.runtime.library import present_gpus

    return [f"{gpu.name} ({gpu.architecture})" for gpu in present_gpus()]
