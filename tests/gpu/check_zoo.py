"""Every fused node of every zoo model verified on a GPU, and faults of one percent planted in every kernel.

    python tests/gpu/check_zoo.py [--rows llama,tower] [--full] [--jobs 4] [--no-faults] [--json FILE]

Models are planned for their rows' sizes and verified at smaller ones, or with ``--full`` at the rows' own.  Needs what
check_runtime.py needs.  Prints a table and exits with 1 where a node fails, a kernel was not run, or a planted fault
is not caught.  ``--emulate`` runs the kernels' text on the CPU instead, for a trial without a GPU.
Tolerances and references are those of onnxfuse.verifying.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "gpu")]

UNLIMITED = 10**18


@dataclass(frozen=True)
class Checked:
    """A row: what verification said, which planted faults passed unseen, and how long it took."""

    row: str
    seconds: float
    parts: dict[str, float]
    nodes: int = 0
    kernels: int = 0
    verified: int = 0
    failed: int = 0
    ratio: float = 0.0
    device: float = 0.0
    caught: int = 0
    planted: int = 0
    missed: tuple[str, ...] = ()
    text: str = ""
    error: str = ""

    def passed(self, faults: bool) -> bool:
        """Whether everything was run and nothing is wrong."""
        return (not self.error and self.verified == self.nodes and not self.failed
                and (not faults or self.caught == self.planted))


def check(name: str, full: bool, faults: bool, emulate: bool) -> Checked:
    """One row, in this process."""
    start = time.perf_counter()
    parts: dict[str, float] = {}
    try:
        return _check(name, full, faults, emulate, start, parts)
    except Exception:  # whatever it is, it is this row's outcome, and the others go on
        return Checked(name, time.perf_counter() - start, parts, error=traceback.format_exc())


def _check(name: str, full: bool, faults: bool, emulate: bool, start: float, parts: dict[str, float]) -> Checked:
    from common import ZOO, hydrate
    from zoo_rows import choose

    from onnxfuse.errors import KernelError
    from onnxfuse.pipeline import Options, optimise
    from onnxfuse.rewriting import read_fused
    from onnxfuse.verifying import find_runner, runs, verify

    def lap(part: str) -> None:
        parts[part] = time.perf_counter() - start - sum(parts.values())

    (row,) = choose(name)
    if full:
        runs.FLOPS = runs.BYTES = UNLIMITED
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(hydrate().hydrate(ZOO / f"{row.model}.onnx.xz").SerializeToString())
        lap("hydrate")
        optimised = optimise(path, Options(dims=row.dims, verify=False, compile=True))
    lap("optimise")
    if emulate:
        from emulated import EmulatedRunner

        runner: Any = EmulatedRunner()
    else:
        runner = find_runner()
        if runner is None:
            raise KernelError("there is no GPU that ONNX Runtime can use")
    verification = verify(optimised, runner)
    lap("verify")
    missed, planted = _planted(optimised, runner) if faults else ([], 0)
    lap("faults")
    nodes = read_fused(optimised.model)
    return Checked(
        name, time.perf_counter() - start, parts, len(nodes), len({node.op for node in nodes}),
        sum(node.verdict != "not run" for node in verification.nodes), len(verification.failed),
        max((node.ratio for node in verification.nodes), default=0.0),
        max((entry.error for entry in verification.whole.device), default=0.0), planted - len(missed), planted,
        tuple(missed), verification.text(),
    )


def _planted(optimised: Any, runner: Any) -> tuple[list[str], int]:
    """Kernels in which a fault passes unseen, and how many there are."""
    from planted import kernels, plant

    from onnxfuse.rewriting import planned_form, read_fused
    from onnxfuse.verifying.capture import Source, capture
    from onnxfuse.verifying.nodes import NodeVerifier
    from onnxfuse.verifying.runs import Recipe, shrunk
    from onnxfuse.verifying.sharing import sharing

    rewritten = optimised.rewritten
    for op in kernels(rewritten):
        rewritten = plant(rewritten, op)
    firsts = {node.op: node for node in reversed(read_fused(rewritten.model))}
    runner.prepare(rewritten.model)
    verifier = NodeVerifier(rewritten.model, runner)
    missed = []
    planned = planned_form(optimised.loaded, optimised.model)
    with sharing(planned, optimised.model) as (original, _):
        run = Recipe(shrunk(optimised.ledger, optimised.ledger.sizes)[-1]).make(optimised.graph)
        sizes = {**optimised.ledger.sizes, **run.about.sizes}
        source = Source(planned, optimised.graph, run)
        for taken in capture(list(firsts.values()), source, original, sizes, runner.providers):
            result = verifier.verify(taken.node, taken.feeds, "captured")
            if result.verdict != "failed":
                missed.append(f"{taken.node.op} ({taken.node.rule}): {result.verdict} {result.message}".rstrip())
    return missed, len(firsts)


def show(results: Sequence[Checked], faults: bool) -> str:
    """The table, then what is wrong."""
    from common import table

    rows = [[
        result.row, "ok" if result.passed(faults) else "FAILED", str(result.nodes), str(result.kernels),
        str(result.verified), str(result.failed), f"{result.ratio:.2f}", f"{result.device:.1e}",
        f"{result.caught}/{result.planted}", f"{result.seconds:.1f}",
        " ".join(f"{part} {seconds:.1f}" for part, seconds in result.parts.items()),
    ] for result in results]
    lines = [table(["row", "verdict", "nodes", "kernels", "verified", "failed", "of allowed", "outputs differ",
                    "faults caught", "s", "of which"], rows)]
    for result in results:
        if not result.passed(faults):
            lines += ["", f"== {result.row}", result.error or result.text]
            lines += [f"  fault not caught: {entry}" for entry in result.missed]
    return "\n".join(lines)


def take_cores(cores: Sequence[int], jobs: int, turns: Any) -> None:
    """Keep this process on cores of its own: ONNX Runtime's threads wait by spinning, a pool for every session."""
    share = max(1, len(cores) // jobs)
    with turns.get_lock():
        first = turns.value * share % len(cores)
        turns.value += 1
    os.sched_setaffinity(0, [cores[(first + place) % len(cores)] for place in range(share)])


def main() -> int:
    """Check the rows, in several processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", metavar="NAME,...", help="rows whose names begin so; all models by default")
    parser.add_argument("--full", action="store_true", help="verify at the rows' own sizes")
    parser.add_argument("--no-faults", action="store_true", help="plant no faults")
    parser.add_argument("--emulate", action="store_true", help="run kernels in the CPU emulator")
    parser.add_argument("--jobs", type=int, default=4, help="models checked at once")
    parser.add_argument("--verbose", action="store_true", help="print every model's verification")
    parser.add_argument("--json", type=Path, help="write everything found")
    arguments = parser.parse_args()
    if not arguments.emulate:
        from building import build

        build()
    from zoo_rows import choose

    chosen = choose(arguments.rows)
    # One row of each model, unless asked for by name or at full size.
    rows = chosen if arguments.rows or arguments.full else list({row.model: row for row in reversed(chosen)}.values())
    faults = not arguments.no_faults
    start = time.perf_counter()
    results: dict[str, Checked] = {}
    cores, turns = sorted(os.sched_getaffinity(0)), get_context("spawn").Value("i", 0)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1,
                             initializer=take_cores, initargs=(cores, arguments.jobs, turns)) as pool:
        waiting = {pool.submit(check, row.name, arguments.full, faults, arguments.emulate): row.name
                   for row in sorted(rows, key=lambda row: (not row.model.startswith(("unet", "llama")), row.name))}
        for future in as_completed(waiting):
            name = waiting[future]
            try:
                results[name] = future.result()
            except Exception as error:  # a process that died
                results[name] = Checked(name, 0.0, {}, error=f"{type(error).__name__}: {error}")
            result = results[name]
            print(f"  {name}: {'ok' if result.passed(faults) else 'FAILED'} {result.seconds:.1f} s", file=sys.stderr,
                  flush=True)
            if arguments.verbose:
                print(f"== {name}\n{result.error or result.text}", flush=True)
    ordered = [results[row.name] for row in rows]
    print(show(ordered, faults))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in ordered], indent=1) + "\n")
    return 0 if all(result.passed(faults) for result in ordered) else 1


if __name__ == "__main__":
    sys.exit(main())
