"""Damaged files of every kind: each input that was ever found at fault, and a short run of new ones.

``make fuzz`` runs for hours; ``tests/fuzz/run.py`` says how.  A case kept in ``tests/fuzz/cases/SUBJECT`` is all files
of one name, ``NAME.*``, of which ``NAME.message`` holds what the product must say: an error's text, with FOLDER for the
folder of the files; or "ok" and what the attempt returns.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent / "fuzz"
sys.path.insert(0, str(FUZZ))

from ends import End, FaultError, end_of  # noqa: E402
from run import fuzz  # noqa: E402
from workers import Worker, subjects  # noqa: E402

from onnxfuse.errors import ModelError  # noqa: E402

SHARE = {"native_library": 1.25}
"""How many times the others' seconds a subject has."""

CASES = sorted(path.relative_to(FUZZ / "cases") for path in (FUZZ / "cases").glob("*/*.message"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """A worker for each subject, started when it is first asked."""
    made = {subject: Worker(subject, tmp_path_factory.mktemp(subject)) for subject in subjects()}
    yield made
    for worker in made.values():
        worker.close()


@pytest.mark.xdist_group("fuzz-cases")
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.with_suffix("")))
def test_inputs_once_at_fault(case: Path, workers: dict[str, Worker], tmp_path: Path) -> None:
    here = FUZZ / "cases" / case.parent
    files = [Path(shutil.copy(path, tmp_path)) for path in sorted(here.iterdir())
             if path.name.startswith(f"{case.stem}.") and path.suffix != ".message"]
    assert files
    end = workers[case.parts[0]].attempt(files)
    said = end.text if end.kind == "refused" else f"{end.kind} {end.text}"
    assert said.replace(str(tmp_path), "FOLDER").strip() == (FUZZ / "cases" / case).read_text().strip()


@pytest.mark.parametrize("subject", subjects())
def test_new_inputs(subject: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    seconds = float(pytestconfig.getoption("--fuzz-seconds")) * SHARE.get(subject, 1.0)
    tally = fuzz(subject, itertools.count(int(pytestconfig.getoption("--seed"))), seconds=seconds, keep=tmp_path)
    assert not tally.causes, f"{tally}; kept in {tmp_path}"
    assert sum(tally.kinds.values()) > seconds / 2, "cases take milliseconds each"
    assert tally.kinds["refused"], "nothing was damaged"


SUBJECT = '''
import os, time
from ends import FaultError, beyond
from onnxfuse.errors import ModelError

ENDS = ("ok", "refused", "traceback", "wrong", "crash", "hang", "memory", "exit", "beyond")

def make(seed, folder):
    path = folder / "case"
    path.write_text(ENDS[seed])
    return [path]

def attempt(files):
    match files[0].read_text():
        case "refused": raise ModelError("No.")
        case "traceback": raise KeyError("axis")
        case "wrong": raise FaultError("wrong", "it changed")
        case "crash": os.kill(os.getpid(), 11)
        case "hang": time.sleep(60)
        case "memory": return str(len(bytearray(os.urandom(1)) * 300_000_000))
        case "exit": os._exit(3)
        case "beyond":
            with beyond("the runtime"): os._exit(4)
    return "fused"
'''


@pytest.fixture
def odd_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker whose cases end in every way, under limits that are soon reached."""
    (tmp_path / "odd.py").write_text(SUBJECT)
    monkeypatch.setattr("workers.SECONDS", 2.0)
    monkeypatch.setattr("workers.MEGABYTES", 250)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("odd", tmp_path / "worker")
    yield worker
    worker.close()


def test_every_end_is_told_apart(odd_worker: Worker) -> None:
    """A worker that dies is replaced, so that each case is judged by itself."""
    ends = [odd_worker.run(seed) for seed in range(9)]
    assert [end.kind for end in ends] == [
        "ok", "refused", "traceback", "wrong", "crash", "hang", "memory", "crash", "beyond"]
    assert [end.first_line for end in ends[:5]] == ["fused", "No.", "KeyError: 'axis'", "it changed", "signal SIGSEGV"]
    assert ends[7].first_line == "exit 3"
    assert odd_worker.run(0).kind == "ok"


def test_what_an_attempt_lets_pass() -> None:
    def fails(error: Exception) -> End:
        def attempt() -> str:
            raise error
        return end_of(attempt)

    assert fails(ModelError("No.", place="m.onnx", remedy="Yes.")) == End(
        "refused", "No.\n--> m.onnx\nhelp: Yes.")
    assert fails(FaultError("wrong", "it changed")).kind == "wrong"
    assert fails(MemoryError()).kind == "memory"
    assert "in attempt" in fails(ZeroDivisionError("one")).signature
