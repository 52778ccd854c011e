"""Work in processes that end or never end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from patience import ENDED, patiently


def work(item: str) -> str:
    if item == "hangs":
        time.sleep(1000)
    if item == "ends":
        os._exit(3)
    return item.upper()


@pytest.mark.parametrize("workers", [1, 3])
def test_what_hangs_or_ends_its_process_stops_nothing_else(workers: int) -> None:
    items = ["a", "hangs", "b", "ends", "c", "hangs", "d"]
    found = dict(patiently(work, items, workers, 1.0))
    assert [found[place] for place in range(len(items))] == [
        "A", "does not end in 1 s", "B", ENDED, "C", "does not end in 1 s", "D"]


def refuses(item: str) -> str:
    raise ValueError(item)


def test_an_error_is_an_end() -> None:
    assert dict(patiently(refuses, ["a", "b"], 2, 5.0)) == {0: ENDED, 1: ENDED}


def test_nothing_to_do() -> None:
    assert list(patiently(work, [], 2, 1.0)) == []
