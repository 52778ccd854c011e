"""Tuning where a kernel ends the GPU, or does not end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from cli_models import CHAIN, run, write
from fake_timer import RUNTIME, FakeTimer

from onnxfuse import tuning
from onnxfuse.errors import KernelError
from onnxfuse.measuring.database import Measurement, open_database
from onnxfuse.tuning import Timed, Tuned, TuneOptions, Watch, tune
from onnxfuse.tuning.work import candidate_words

DEFAULT = "pointwise_w4_32"
FAST = "pointwise_w4_x2_32_b512"

HANGING = """
import sys
from functools import partial
from onnxfuse import tuning
from onnxfuse.cli import main
from test_tuning_watch import HangingTimer

tuning.find_timer = HangingTimer
tuning.Watch = partial(tuning.Watch, seconds=0.5)
sys.argv[0] = "onnxfuse"
main()
"""


def times(name: str) -> float:
    return 20.0 if name == RUNTIME else 10.0


class HangingTimer(FakeTimer):
    """Does not come back from one kernel."""

    def __init__(self) -> None:
        super().__init__(times)

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        timed = super().time(model, fused=fused)
        if self.timed[-1] == FAST:
            time.sleep(600)
        return timed


def tuned(model: Path, timer: FakeTimer, database: Path, watch: Watch | None = None) -> Tuned:
    with open_database(database) as kept:
        return tune(model, timer, kept, TuneOptions(dims={"batch": 64}, watch=watch))


@pytest.mark.parametrize("broken", [DEFAULT, FAST, RUNTIME])
def test_tuning_goes_on_behind_what_ended_the_gpu(broken: str, tmp_path: Path) -> None:
    """But the runtime's own nodes are tried again."""
    model, database = write(tmp_path, CHAIN), tmp_path / "measurements.sqlite"
    with pytest.raises(KernelError, match="The GPU stopped answering when a kernel of Mul -> a ran"):
        tuned(model, FakeTimer(times, broken=frozenset({broken}), living=False), database)
    timer = FakeTimer(times)
    (region,) = tuned(model, timer, database).regions
    assert (broken in timer.timed) == (broken == RUNTIME)
    assert [fault.partition(": ")[2] for fault in region.faults] == ["too many registers"] * (broken != RUNTIME)


def test_each_candidate_is_watched_while_it_runs(tmp_path: Path) -> None:
    hung: list[Measurement] = []
    slow = FAST

    class Slow(FakeTimer):
        def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
            timed = super().time(model, fused=fused)
            if self.timed[-1] == slow:
                time.sleep(1.5)
            return timed

    database = tmp_path / "measurements.sqlite"
    found = tuned(write(tmp_path, CHAIN), Slow(times), database, Watch(hung.append, seconds=1.0))
    (row,) = hung
    assert (row.status, row.note) == ("failed", "it did not end")
    assert candidate_words(row.candidate) == "blocks of 512, width 4, 2 vectors a thread"
    assert not found.regions[0].faults  # in the end it did


def test_a_kernel_that_does_not_end_is_passed_over_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, database = write(tmp_path, CHAIN), tmp_path / "measurements.sqlite"
    words = ["tune", str(model), "--dim", "batch=64", "--database", str(database)]
    ended = subprocess.run([sys.executable, "-c", HANGING, *words], cwd=Path(__file__).parent, capture_output=True,
                           text=True, check=False, timeout=300)
    assert ended.returncode == 1
    assert "error: a kernel did not end (blocks of 512, width 4, 2 vectors a thread; " in ended.stderr
    assert ended.stderr.endswith("help: run the same command again: it goes on behind it\n")
    timer = FakeTimer(times)
    monkeypatch.setattr(tuning, "find_timer", lambda: timer)
    again = run(*words)
    assert again.exit_code == 0 and "it did not end" in again.output
    assert timer.timed and FAST not in timer.timed
