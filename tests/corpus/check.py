"""Every model of the corpus through the tool: optimise, verify, compare, unfuse, optimise again.

    python tests/corpus/check.py [--only TEXT] [--exports] [--jobs N] [--seconds N] [--json FILE]

Each model has a process of its own.  Kernels run on the GPU, else in the tests' emulator.  A model passes where

- it is optimised, or refused in the words that the manifest expects;
- the fused model gives the original's results without kernels, bit for bit, and every kernel gives its nodes';
- unfusing gives the original's bytes, and optimising the fused model again changes nothing.

Exits with 1 where one does not pass, or where more than 3 in 100 verifications were not run, reasons given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]

from fetch import Model, models  # noqa: E402

MOST_NOT_RUN = 0.03
"""Share of verifications that may be left out."""
PLANNED_FOR = "H100"


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    Attributes:
        fault: what is wrong, or "".
        not_run: why its verification left something out, or "".
        kernels: launches before and after fusion; verified: fused nodes whose kernels were run and compared.
    """

    model: str
    publisher: str
    seconds: float = 0.0
    fault: str = ""
    not_run: str = ""
    refused: str = ""
    nodes: int = 0
    regions: int = 0
    verified: int = 0
    kernels: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """A word for the table."""
        return "FAULT" if self.fault else "refused" if self.refused else "not run" if self.not_run else "ok"


def tried(model: Model) -> Outcome:
    """One model, in this process."""
    from onnxfuse import errors

    start = time.perf_counter()

    def outcome(**more: Any) -> Outcome:
        return Outcome(model.name, model.publisher, time.perf_counter() - start, **more)

    try:
        return outcome(**_steps(model))
    except errors.OnnxfuseError as error:
        text = str(error)
        if model.refused and model.refused in text:
            return outcome(refused=error.message)
        return outcome(fault=f"{type(error).__name__}: {text}")
    except Exception:  # a crash of any sort is what is looked for
        return outcome(fault=f"internal error: {traceback.format_exc()}")


def _steps(model: Model) -> dict[str, Any]:
    from emulated import EmulatedRunner

    import onnxfuse.delivery
    from onnxfuse.pipeline import Options, load, optimise
    from onnxfuse.rewriting import unfuse
    from onnxfuse.verifying import find_runner

    runner = find_runner() or EmulatedRunner()
    # The command verifies on the GPU alone; here the emulator stands in for it.
    onnxfuse.delivery.find_runner = lambda **_: runner  # type: ignore[assignment,return-value]
    target = None if runner.providers != EmulatedRunner.providers else PLANNED_FOR
    loaded = load(model.path)
    before = loaded.proto.SerializeToString(deterministic=True)
    result = optimise(loaded, Options(dims=model.dims, target=target, database=False))
    verification = result.verification
    assert verification is not None
    faults = [f"taken back: {refusal}" for refusal in result.taken_back]
    if loaded.proto.SerializeToString(deterministic=True) != before:
        faults.append("optimising changed the model that was given")
    restored = unfuse(result.model).SerializeToString(deterministic=True)
    if restored != before:
        faults.append("unfusing does not give the original back")
    again = optimise(result.model, Options(dims=model.dims, target=target, database=False, verify=False))
    if again.model.SerializeToString(deterministic=True) != result.model.SerializeToString(deterministic=True):
        faults.append("optimising the fused model again changes it")
    left = [f"{node.node}: {node.message}" for node in verification.nodes if node.verdict == "not run"]
    whole = [] if verification.whole.identical is not None else [verification.whole.message or "the model was not run"]
    ledgers = [fusion.cost for fusion in result.plan.fusions]
    return {
        "fault": "; ".join(faults), "not_run": "; ".join([*whole, *left[:3]]),
        "nodes": len(loaded.proto.graph.node), "regions": len(verification.nodes),
        "verified": sum(node.verdict == "passed" for node in verification.nodes),
        "kernels": (sum(cost.kernels_before for cost in ledgers), sum(cost.kernels_after for cost in ledgers)),
        "notes": verification.notes,
    }


def apart(model: Model, seconds: float) -> Outcome:
    """One model in a process of its own, which may crash or take too long."""
    start = time.perf_counter()
    call = [sys.executable, str(HERE / "check.py"), "--one", json.dumps({**asdict(model), "path": str(model.path)})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return Outcome(model.name, model.publisher, seconds, not_run=f"it took longer than {seconds:.0f} s")
    try:
        last = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(model.name, model.publisher, time.perf_counter() - start,
                       fault=f"the process ended with {done.returncode}: {done.stderr[-1000:]}")
    return Outcome(**{**last, "kernels": tuple(last["kernels"]), "notes": tuple(last["notes"])})


def table(outcomes: Iterable[Outcome]) -> str:
    """A line each; faults and what was not run below."""
    outcomes = list(outcomes)
    lines = [f"{each.state:8}{each.seconds:7.1f} s  {each.nodes:5} nodes  {each.kernels[0]:5} -> {each.kernels[1]:<5}"
             f"{each.verified:4} of {each.regions:<4} verified  {each.model}" for each in outcomes]
    lines += [f"\n{each.model}\n  {each.fault or each.not_run or each.refused}"
              for each in outcomes if each.fault or each.not_run or each.refused]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--exports", action="store_true", help="the exports too; they are made once")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for a model")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        fields = json.loads(chosen.one)
        print(json.dumps(asdict(tried(Model(**{**fields, "path": Path(fields["path"])})))))
        return 0
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        waiting = [pool.submit(apart, model, chosen.seconds) for model in models(chosen.only, chosen.exports)]
        for number, future in enumerate(waiting, 1):
            outcomes.append(future.result())
            print(f"{number}/{len(waiting)} {outcomes[-1].state:8} {outcomes[-1].model}", file=sys.stderr, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    print(table(outcomes))
    faults = sum(bool(each.fault) for each in outcomes)
    left = sum(bool(each.not_run) for each in outcomes)
    publishers = len({each.publisher for each in outcomes})
    print(f"\n{len(outcomes)} models of {publishers} publishers: {faults} faults, {left} verifications not run in full")
    return int(not outcomes or faults > 0 or left > MOST_NOT_RUN * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
