"""Damaged input of one kind, as much of it as there is time for: whatever it is, one clear message or a good result.

    python tests/fuzz/run.py SUBJECT [--count N | --seconds S] [--seed K] [--jobs J] [--keep DIR]
    python tests/fuzz/run.py --list

Subjects are the modules beside this one that have ``make`` and ``attempt`` (``ends.py`` says what these do).  A case is
a function of its subject and its seed: ``--seed K --count 1`` runs one again.  Of each cause of failure the inputs of
the first few cases are kept in DIR/SUBJECT-SEED, with what happened in ``end.txt``.

Exits with 1 where a case crashes, shows a traceback or an internal error, takes more than 20 s or 4 GB, or where its
result is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from ends import FINE, End  # noqa: E402
from workers import Worker, folder_for_cases, subjects  # noqa: E402

KEPT = 3
"""Inputs that are kept of each cause of failure."""


@dataclass
class Tally:
    """What came of a run."""

    kinds: Counter[str] = field(default_factory=Counter)
    causes: dict[str, list[tuple[int, End]]] = field(default_factory=dict)
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    largest: tuple[int, int] = (0, 0)
    """The most time and the most memory that a case took, and its seed."""

    @property
    def failures(self) -> int:
        return sum(count for kind, count in self.kinds.items() if kind not in FINE)

    def add(self, seed: int, end: End) -> bool:
        """Count an end; whether its input is one to keep."""
        self.kinds[end.kind] += 1
        self.slowest = max(self.slowest, (end.seconds, seed))
        self.largest = max(self.largest, (end.megabytes, seed))
        if end.fine:
            return False
        known = self.causes.setdefault(end.signature, [])
        known.append((seed, end))
        return len(known) <= KEPT

    def __str__(self) -> str:
        cases = sum(self.kinds.values())
        parts = [f"{self.kinds[kind]} {kind}" for kind in (*FINE, *sorted(set(self.kinds) - set(FINE)))]
        return (f"{cases} cases in {self.seconds:.0f} s, at most {self.slowest[0]:.1f} s (seed {self.slowest[1]}) "
                f"and {self.largest[0]} MB ({self.largest[1]}): {', '.join(parts)}; {self.failures} failures")


def fuzz(subject: str, seeds: Iterator[int], *, seconds: float = float("inf"), jobs: int = 1,
         keep: Path | None = None, tell: Callable[[str], None] = lambda line: None) -> Tally:
    """Run cases until the seeds or the time are used up: each worker's on the processor, at most ten times as long by
    the clock."""
    sys.modules.pop(subject, None)
    if "\ndef prepare(" in (HERE / f"{subject}.py").read_text():
        importlib.import_module(subject).prepare()
    tally, lock = Tally(), threading.Lock()
    began = time.monotonic()

    def work(worker: Worker) -> None:
        try:
            while max(worker.spent, (time.monotonic() - began) / 10) < seconds:
                with lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                end = worker.run(seed)
                with lock:
                    if tally.add(seed, end):
                        tell(f"seed {seed}: {end.kind}: {end.first_line}\n    {end.signature}")
                        if keep is not None:
                            kept(keep / f"{subject}-{seed}", worker.case, end)
        finally:
            worker.close()

    with folder_for_cases() as folder, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, [Worker(subject, Path(folder) / str(number)) for number in range(jobs)]))
    tally.seconds = time.monotonic() - began
    return tally


def kept(target: Path, case: Path, end: End) -> None:
    """Keep the input of a failure, and what happened."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(case, target, symlinks=True)
    (target / "end.txt").write_text(f"{end.kind}\n{end.text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("subject", nargs="?", choices=subjects())
    parser.add_argument("--list", action="store_true", help="print the subjects")
    parser.add_argument("--count", type=int, help="cases; 1,000 where no time is given")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the inputs of failures")
    wanted = parser.parse_args()
    if wanted.list or wanted.subject is None:
        print("\n".join(subjects()))
        return 0
    count = wanted.count or (1000 if wanted.seconds == float("inf") else None)
    last = None if count is None else wanted.seed + count
    seeds = itertools.count(wanted.seed) if last is None else iter(range(wanted.seed, last))
    tally = fuzz(wanted.subject, seeds, seconds=wanted.seconds, jobs=wanted.jobs, keep=wanted.keep,
                 tell=lambda line: print(line, flush=True))
    for cause, found in tally.causes.items():
        print(f"{len(found)} times {cause}, seeds {', '.join(str(seed) for seed, _ in found[:6])}")
    print(f"{wanted.subject}: {tally}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
