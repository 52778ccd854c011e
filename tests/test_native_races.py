"""The native library under the thread sanitizer, over stand-ins for ONNX Runtime and the driver: native/fuzz.cc."""

from __future__ import annotations

from pathlib import Path

import pytest
from native import sanitized


@pytest.fixture(scope="module")
def program() -> Path:
    return sanitized.build("thread")


@pytest.mark.slow
def test_sessions_of_two_runtimes_begin_run_and_end_while_others_do(program: Path, tmp_path: Path) -> None:
    """Pools of every size are registered, statistics are asked for and written, plans are evaluated meanwhile."""
    done = sanitized.run(program, "races", program / "seeds", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_damaged_nodes_are_made_and_run_in_four_threads(program: Path, tmp_path: Path) -> None:
    done = sanitized.run(program, "cases", program / "seeds", 0, 10_000, 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
