"""Tuning on a GPU: a small encoder and two zoo rows, within a budget; what it keeps, and what it gains.

    python tests/gpu/check_tune.py [--rows bert,llama] [--budget 60] [--database FILE] [--json FILE] [--dry-run]

For each model: ``tune`` with a share of the budget, ``tune`` again, which must measure nothing that is known,
``optimize`` with what was measured, every node verified, and the GPU time of the original, the fused and the tuned
model.  A profile that ONNX Runtime writes of the encoder is read too.  Prints tables and exits with 1 where a candidate
is wrong or does not run, a second run measures again, a node fails, or the tuned model is over 3% slower than the
untuned one.  Needs what check_runtime.py needs.  ``--dry-run`` makes times up and runs no model: a trial without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "gpu")]

SLOWER = 1.03
"""Times the untuned model's GPU time that the tuned one may take: what is measured varies."""

PROFILER = """
import sys
import numpy as np, onnxruntime
from onnxfuse.measuring.machine import find_machine
from onnxfuse.graph import build_graph, load_model
from onnxfuse.measuring import make_inputs
machine = find_machine()
options = onnxruntime.SessionOptions()
options.enable_profiling = True
options.profile_file_prefix = sys.argv[2]
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=machine.providers({}))
feeds = make_inputs(build_graph(load_model(sys.argv[1])), {"batch": 8, "sequence": 128})
for _ in range(5):
    session.run(None, feeds)
print(session.end_profiling())
"""


@dataclass
class Checked:
    """One model: counts of tuning, microseconds of its regions, GPU milliseconds of the models, and what is wrong."""

    model: str
    seconds: float = 0.0
    regions: int = 0
    measured: int = 0
    left: int = 0
    lost: int = 0
    runtime_us: float = 0.0
    default_us: float = 0.0
    best_us: float = 0.0
    original_ms: float = 0.0
    fused_ms: float = 0.0
    tuned_ms: float = 0.0
    faults: list[str] = field(default_factory=list)


def check(name: str, path: Path, dims: Mapping[str, int], budget: float, database: Path, dry: bool) -> tuple[
        Checked, Any]:
    """Tune one model, twice, and measure what came of it."""
    from onnxfuse.measuring.database import open_database
    from onnxfuse.tuning import TuneOptions, find_timer, tune

    start = time.perf_counter()
    timer = fake() if dry else find_timer()
    with open_database(database) as kept:
        found = tune(path, timer, kept, TuneOptions(dims=dims, budget=budget), say)
        again = tune(path, timer, kept, TuneOptions(dims=dims, budget=0.0))
    known = [region for region in found.regions if region.verdict != "unmeasured"]
    result = Checked(
        name, 0.0, len(found.regions), found.measured, found.left,
        sum(region.verdict == "left to ONNX Runtime" for region in known),
        *(sum(region.count * (getattr(region, field) or 0.0) for region in known)
          for field in ("runtime", "default", "best")),
        # What the runtime runs on the CPU when it stands alone has no GPU time: no fault of ours, and shown above.
        faults=[f"{region.node}: {fault}" for region in found.regions for fault in region.faults
                if not fault.startswith("runtime: ")],
    )
    if again.measured or again.left < found.left:
        result.faults.append(f"a second run measured {again.measured} and left {again.left} of {found.left}")
    if not known:
        result.faults.append("no region was measured within the budget")
    result.faults += gains(result, path, dims, database, dry)
    result.seconds = time.perf_counter() - start
    return result, found


def gains(result: Checked, path: Path, dims: Mapping[str, int], database: Path, dry: bool) -> list[str]:
    """Fuse with and without what was measured, verify, and measure all three models; what is wrong."""
    from onnxfuse import api
    from onnxfuse.measuring import bench

    models = {}
    target = "NVIDIA H100 80GB HBM3" if dry else None
    for kind, where in (("fused", False), ("tuned", database)):
        made = api.optimize(path, dims=dims, database=where, verify=not dry, target=target)
        models[kind] = made.save(path.with_suffix(f".{kind}.onnx"))
        if made.optimised.taken_back:
            return [f"{kind}: {refusal.node}: {refusal.message}" for refusal in made.optimised.taken_back]
    if dry:
        return []
    for kind, model in models.items():
        found = bench(path, model, dims, memory=False)
        if found.original.gpu is None or found.fused is None or found.fused.gpu is None:
            return [f"no GPU time: {'; '.join(found.notes)}"]
        result.original_ms = found.original.gpu.median
        setattr(result, f"{kind}_ms", found.fused.gpu.median)
    if result.tuned_ms > SLOWER * result.fused_ms:
        return [f"tuned it takes {result.tuned_ms:.3f} ms, untuned {result.fused_ms:.3f} ms"]
    return []


def profiled(path: Path, folder: Path) -> list[str]:
    """Read what ONNX Runtime writes of a run, as it is and with launches that wait; what is wrong."""
    from onnxfuse import api

    wrong = []
    for blocking in ("0", "1"):
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking, "PYTHONPATH": os.pathsep.join(
            (str(ROOT), os.environ.get("PYTHONPATH", "")))}
        done = subprocess.run([sys.executable, "-c", PROFILER, str(path), str(folder / f"profile{blocking}")],
                              env=environment, capture_output=True, text=True)
        if done.returncode:
            wrong.append(f"profile: {done.stderr.strip().splitlines()[-1]}")
            continue
        made = api.optimize(path, dims={"batch": 8, "sequence": 128}, database=False, verify=False,
                            run_profile=done.stdout.strip().splitlines()[-1])
        print(f"profile, CUDA_LAUNCH_BLOCKING={blocking}: {len(made.optimised.plan.fusions)} fusions, "
              f"{made.report.before.seconds * 1e6:.1f} µs before")
        for note in made.report.notes:
            print(f"  {note}")
        if "none" in made.report.notes[0].split(";")[0]:
            wrong.append(made.report.notes[0])
    return wrong


def fake() -> Any:
    """A timer that makes times up."""
    from fake_timer import RUNTIME, FakeTimer

    class Unrun(FakeTimer):
        def time(self, model: Any, *, fused: bool) -> Any:
            from fake_timer import first_kernel, made_up

            from onnxfuse.tuning import Timed

            name = first_kernel(model) if fused else RUNTIME
            return Timed(20.0 if name == RUNTIME else 5.0 + len(name) % 7, 0.1, 24,
                         {info.name: made_up(info) for info in model.graph.output})

    return Unrun(lambda name: 0.0)


def say(stage: str, done: int, of: int) -> None:
    """A line now and then."""
    if stage.startswith("measuring") and done % 20 == 0:
        print(f"  {stage}, {done} of {of}", file=sys.stderr, flush=True)


def models(folder: Path, rows: str) -> list[tuple[str, Path, Mapping[str, int]]]:
    """The models: name, file, sizes."""
    import onnx
    from cli_models import encoder
    from common import ZOO, hydrate
    from zoo_rows import choose

    path = folder / "encoder.onnx"
    onnx.save(encoder(layers=2, hidden=768, heads=12, dtype="float16"), path)
    found: list[tuple[str, Path, Mapping[str, int]]] = [("encoder", path, {"batch": 8, "sequence": 128})]
    chosen: dict[str, Any] = {}
    for row in choose(rows):
        chosen.setdefault(row.model, row)
    for row in chosen.values():
        path = folder / f"{row.model}.onnx"
        path.write_bytes(hydrate().hydrate(ZOO / f"{row.model}.onnx.xz").SerializeToString())
        found.append((row.name, path, row.dims))
    return found


def main() -> int:
    """Tune the models and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="gpt2,llama", help="zoo rows whose names begin so")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of tuning, all models together")
    parser.add_argument("--database", type=Path, help="keep measurements there; by default nowhere")
    parser.add_argument("--json", type=Path, help="write everything found")
    parser.add_argument("--dry-run", action="store_true", help="make times up; no GPU is needed")
    arguments = parser.parse_args()
    if not arguments.dry_run:
        from building import build

        build()
    from common import table
    from rich.console import Console

    from onnxfuse.reporting import tuned

    results, wrong = [], []
    with tempfile.TemporaryDirectory(prefix="onnxfuse-tune-") as name:
        folder = Path(name)
        database = arguments.database or folder / "measurements.sqlite"
        waiting = models(folder, arguments.rows)
        for place, (label, path, dims) in enumerate(waiting):
            start = time.perf_counter()
            share = arguments.budget / (len(waiting) - place)
            result, found = check(label, path, dims, share, database, arguments.dry_run)
            arguments.budget = max(0.0, arguments.budget - (time.perf_counter() - start))
            print(f"\n== {label}", flush=True)
            tuned.show(found, Console(width=170, highlight=False))
            results.append(result)
        if not arguments.dry_run:
            wrong = profiled(folder / "encoder.onnx", folder)
    print()
    print(table(
        ["model", "regions", "measured", "left", "lost", "runtime µs", "default µs", "best µs", "original ms",
         "fused ms", "tuned ms", "s", ""],
        [[r.model, str(r.regions), str(r.measured), str(r.left), str(r.lost), f"{r.runtime_us:.1f}",
          f"{r.default_us:.1f}", f"{r.best_us:.1f}", f"{r.original_ms:.3f}", f"{r.fused_ms:.3f}", f"{r.tuned_ms:.3f}",
          f"{r.seconds:.0f}", "FAIL" if r.faults else "ok"] for r in results]))
    for result in results:
        for fault in result.faults:
            print(f"{result.model}: {fault}")
    for fault in wrong:
        print(fault)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if wrong or any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
