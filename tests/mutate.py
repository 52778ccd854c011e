"""Whether the tests catch faults: each mutant of ``mutants/`` planted in a copy of the tree, its tests run.

    python tests/mutate.py [--only TEXT ...] [--jobs N] [--seconds N] [--json FILE]

A mutant replaces ``old``, which stands once in its file, by ``new``.  It is caught where one of its tests fails (its
own, or those named with its file), or they take longer than ``--seconds``.  One that lives has a line, ``lives``, that
says why no test can catch it.  C++ is built again for each mutant.

Exits with 1 where a mutant lives without a reason, one that has a reason is caught, fewer than 95 in 100 are caught,
or the table does not fit the tree.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "mutants"
LEAST_CAUGHT = 0.95
LIBRARY = "onnxfuse/runtime/libonnxfuse.so"


@dataclass(frozen=True)
class Mutant:
    """A fault to plant; ``tests`` are files in ``tests/``, the first that catch most, or pytest's names of tests."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    lives: str = ""

    @property
    def name(self) -> str:
        """File and replacement, in a line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old}  ->  {new or '(nothing)'}"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``by`` is the test that caught it, or what else did."""

    mutant: str
    caught: bool
    by: str
    lives: str
    seconds: float


def mutants() -> list[Mutant]:
    """The table, checked against the tree.

    Raises:
        ValueError: an ``old`` does not stand once in its file, or a test is not there.
    """
    found = []
    for entry in (entry for table in sorted(TABLES.glob("*.yaml")) for entry in yaml.safe_load(table.read_text())):
        text = (ROOT / entry["file"]).read_text()
        for each in entry["mutants"]:
            tests = tuple(each.get("tests", entry["tests"]))
            mutant = Mutant(entry["file"], each["old"], each["new"], tests, each.get("lives", ""))
            if (count := text.count(mutant.old)) != 1:
                raise ValueError(f"{mutant.name}: 'old' stands {count} times in the file, not once")
            for test in tests:
                if not is_there(test):
                    raise ValueError(f"{mutant.name}: there is no tests/{test}")
            found.append(mutant)
    return found


def is_there(test: str) -> bool:
    """Whether there is a test of that name, or a file of tests; which of a test's parameters, running it says."""
    name, *inside = test.split("::")
    path = ROOT / "tests" / name
    return path.exists() and (not inside or f"def {inside[-1].partition('[')[0]}(" in path.read_text(encoding="utf-8"))


@contextmanager
def trees(count: int) -> Iterator[queue.Queue[Path]]:
    """Copies of the tree to plant faults in."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            tree = Path(scratch) / str(number)
            for name in [*listed, LIBRARY]:
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, tree / name)
            free.put(tree)
        yield free


def tried(mutant: Mutant, free: queue.Queue[Path], seconds: float) -> Outcome:
    """Plant one, run its tests, take it out again."""
    tree = free.get()
    file = tree / mutant.file
    text = file.read_text()
    start = time.perf_counter()
    try:
        file.write_text(text.replace(mutant.old, mutant.new))
        by = _by(mutant, tree, seconds)
    finally:
        file.write_text(text)
        if file.suffix in (".cc", ".h"):
            shutil.copy2(ROOT / LIBRARY, tree / LIBRARY)
        free.put(tree)
    return Outcome(mutant.name, bool(by), by, mutant.lives, time.perf_counter() - start)


def _by(mutant: Mutant, tree: Path, seconds: float) -> str:
    """What catches it, or "".

    Raises:
        ValueError: its tests cannot be run: there are none of that name, say.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    if mutant.file.endswith((".cc", ".h")):
        built = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"], cwd=tree,
                               capture_output=True, text=True)
        if built.returncode:
            return "the compiler"
    call = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no",
            *(f"tests/{test}" for test in mutant.tests)]
    try:
        done = subprocess.run(call, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    # A file that cannot be collected is an error in it; a test that is not there is one in nothing.
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if not failed:
        raise ValueError(f"{mutant.name}: {' '.join(mutant.tests)} cannot be run: {(done.stdout + done.stderr)[-500:]}")
    return failed[0].partition(" - ")[0]


def _outcomes(every: Sequence[Mutant], jobs: int, seconds: float) -> list[Outcome]:
    found: list[Outcome] = []
    with trees(jobs) as free, ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda mutant: tried(mutant, free, seconds), every):
            found.append(outcome)
            word = "caught" if outcome.caught else "lives" if outcome.lives else "LIVES"
            print(f"{len(found)}/{len(every)} {word:7}{outcome.seconds:6.1f} s  {outcome.mutant}"
                  f"{'  by ' + outcome.by if outcome.by else ''}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", metavar="TEXT", help="mutants whose file or text holds one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for a mutant's tests")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    chosen = parser.parse_args(arguments)
    try:
        every = [mutant for mutant in mutants() if any(text in mutant.name for text in chosen.only or [""])]
        outcomes = _outcomes(every, chosen.jobs, chosen.seconds)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    caught = sum(each.caught for each in outcomes)
    wrong = [each for each in outcomes if each.caught == bool(each.lives)]
    for each in wrong:
        print(f"{'has a reason to live and is caught' if each.caught else 'lives'}: {each.mutant}")
    print(f"{caught} of {len(outcomes)} mutants caught")
    return int(not outcomes or bool(wrong) or caught < LEAST_CAUGHT * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
