"""The library's emulator, and what tests alone ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onnxfuse.emulator import Argument, Buffer, Emulator, EmulatorError, Order, element_type, run_plan
from onnxfuse.emulator.kernel_text import for_host
from onnxfuse.emulator.memory import Array
from onnxfuse.emulator.plan import Hosts, holds, situate
from onnxfuse.emulator.toolchain import build, parts
from onnxfuse.lowering.launch import LaunchPlan

__all__ = [
    "Argument", "Buffer", "Emulator", "EmulatorError", "Order", "element_type", "prepare", "run_plan",
    "variants_that_hold",
]


def variants_that_hold(
    plan: LaunchPlan,
    inputs: Sequence[Array],
    hosts: Hosts = (),
    sm: int = 90,
    misalign: Mapping[int, int] | None = None,
) -> list[str]:
    """Names of the variants whose guards hold for these inputs, in the plan's order; arguments as ``run_plan``'s.

    Raises:
        EmulatorError: a check of the plan does not hold.
    """
    situation, _ = situate(plan, inputs, hosts, sm, misalign or {})
    return [variant.name for variant in plan.variants if holds(variant, situation)]


def prepare(sources: Iterable[str], includes: Sequence[Path] = (), workers: int = 2) -> None:
    """Compile distinct texts, ``workers`` at a time, so that later emulators find them.

    Raises:
        EmulatorError: one does not compile.
    """
    distinct = [*dict.fromkeys(sources)]
    for source in distinct:
        parts(for_host(source).text)  # The headers, which threads would each precompile.
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda source: build(source, includes), distinct):
            pass
