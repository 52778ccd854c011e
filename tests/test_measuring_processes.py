"""The benchmarks' processes: what they answer, and that all others stand still while one is timed."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
processes = importlib.import_module("processes")

STEP = 0.01
"""Seconds between two marks of one that gets ready."""


def timed(start: float, seconds: float, marks: str, ready: Callable[[], None]) -> tuple[float, float, int, int]:
    """Gets ready for ``start`` seconds of its own, in which it leaves marks; then is timed for so many, and tells when,
    and how many marks everyone had left as it began and ended."""
    for _ in range(round(start / STEP)):
        with Path(marks).open("a") as file:
            file.write(".")
        time.sleep(STEP)
    ready()
    began, before = time.monotonic(), Path(marks).stat().st_size if Path(marks).exists() else 0
    time.sleep(seconds)
    return began, time.monotonic(), before, Path(marks).stat().st_size if Path(marks).exists() else 0


def fails(ready: Callable[[], None]) -> None:
    """Before its turn."""
    raise ValueError("no such model")


def ends_in_its_turn(ready: Callable[[], None]) -> None:
    """As a crash does."""
    ready()
    sys.modules["os"]._exit(3)


def answers_at_once(number: float, ready: Callable[[], None]) -> float:
    """Without a turn."""
    return math.sqrt(number)


def dies_while_it_waits(ready: Callable[[], None]) -> None:
    """As one does that the system ends for its memory."""
    threading.Thread(target=ready).start()
    time.sleep(0.05)
    os._exit(3)


def starts_another(marks: str, ready: Callable[[], None]) -> None:
    """Which leaves marks while this one gets ready."""
    text = f"import time\nwhile True:\n  open({marks!r}, 'a').write('.')\n  time.sleep({STEP})"
    with subprocess.Popen([sys.executable, "-c", text]) as other:
        time.sleep(1.5)
        other.kill()
    ready()


def sleeps(place: str) -> None:
    """Says which process it is."""
    Path(place).write_text(str(os.getpid()))
    time.sleep(60)


def test_work_in_a_process_of_its_own():
    assert processes.apart(math.sqrt, 4.0) == 2.0
    with pytest.raises(processes.ApartError, match=r"ValueError: (math domain error|expected a nonnegative)"):
        processes.apart(math.sqrt, -1.0)
    with pytest.raises(processes.ApartError, match="its process ended with exit code 3"):
        processes.apart(sys.modules["os"]._exit, 3)
    with pytest.raises(processes.ApartError, match="it took more than 1 s"):
        processes.apart(time.sleep, 60, seconds=1)


@pytest.mark.parametrize("abreast", [1, 3])
def test_all_others_stand_still_while_one_is_timed(abreast: int, tmp_path: Path) -> None:
    """No two are timed at once, and nobody leaves a mark meanwhile, but between."""
    marks = str(tmp_path / "marks")
    turns = [processes.Turn(timed, (start, 0.4, marks)) for start in (0.0, 0.5, 1.0)]
    found = list(processes.Turns(abreast, 60).taken(turns))
    assert sorted(turns.index(turn) for turn, _, _ in found) == [0, 1, 2]
    spans = sorted(answer for _, answer, _ in found)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    # One that was about to write when it was stopped wrote before the others began.
    assert all(before == after for _, _, before, after in spans)
    assert Path(marks).stat().st_size == round(1.5 / STEP)


def test_what_ends_without_a_turn_or_in_it() -> None:
    turns = [processes.Turn(fails, ()), processes.Turn(ends_in_its_turn, ()), processes.Turn(answers_at_once, (9.0,))]
    found = {turn.function: answer for turn, answer, _ in processes.Turns(2, 60).taken(turns)}
    assert found[answers_at_once] == 3.0
    assert "ValueError: no such model" in str(found[fails])
    assert str(found[ends_in_its_turn]) == "its process ended with exit code 3"


def test_standing_still_takes_none_of_the_time_to_get_ready(tmp_path: Path) -> None:
    """Three seconds are few beside what others are timed for, and enough; what takes longer itself is over."""
    marks = str(tmp_path / "marks")
    turns = [processes.Turn(timed, (start, seconds, marks)) for start, seconds in ((0, 4.0), (2.0, 0.1), (60.0, 0.1))]
    found = {turn.arguments[0]: answer for turn, answer, _ in processes.Turns(3, 5).taken(turns)}
    assert isinstance(found[0], tuple) and isinstance(found[2.0], tuple)
    assert str(found[60.0]) == "it took more than 5 s"


def test_nobody_begins_once_the_time_for_all_is_over(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    turns = [processes.Turn(timed, (60.0, 0.1, marks)), processes.Turn(timed, (61.0, 0.1, marks))]
    start = time.monotonic()
    found = list(processes.Turns(1, 600, within=1.5).taken(turns))
    assert time.monotonic() - start < 15
    assert [(turn, str(answer)) for turn, answer, _ in found] == [(turn, processes.OVER) for turn in turns]


def test_one_that_dies_while_it_waits_takes_no_other_along(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    turns = [processes.Turn(timed, (0.0, 1.5, marks)), processes.Turn(dies_while_it_waits, ()),
             processes.Turn(timed, (1.0, 0.1, marks))]
    found = {turn: answer for turn, answer, _ in processes.Turns(3, 60).taken(turns)}
    assert isinstance(found[turns[0]], tuple) and isinstance(found[turns[2]], tuple)
    assert str(found[turns[1]]) == "its process ended with exit code 3"


def test_what_another_started_stands_still_too(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    turns = [processes.Turn(timed, (0.5, 0.8, marks)), processes.Turn(starts_another, (marks,))]
    found = {turn: answer for turn, answer, _ in processes.Turns(2, 60).taken(turns)}
    *_, before, after = found[turns[0]]
    assert before == after > 0


def test_nobody_goes_on_alone(tmp_path: Path) -> None:
    """A process ends with the one that started it, however that ends."""
    place = tmp_path / "pid"
    text = (f"import sys\nsys.path[:0] = {[str(BENCHMARKS), str(Path(__file__).parent)]!r}\n"
            f"import processes, test_measuring_processes as these\n"
            f"if __name__ == '__main__':\n  processes.apart(these.sleeps, {str(place)!r})")
    script = tmp_path / "script.py"
    script.write_text(text)
    with subprocess.Popen([sys.executable, str(script)]) as parent:
        assert waited(lambda: place.exists() and place.read_text())
        parent.kill()
    assert waited(lambda: not Path(f"/proc/{place.read_text()}/cmdline").exists()
                  or not Path(f"/proc/{place.read_text()}/cmdline").read_bytes())


def waited(until: Callable[[], object], seconds: float = 20) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not (done := bool(until())) and time.monotonic() < end:
        time.sleep(0.05)
    return done
