"""What check_sanitizer.py does around the GPU: which kernels it runs, and how it reads the tools' reports."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.lowering.launch import LaunchPlan

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

sanitizer = importlib.import_module("check_sanitizer")

REPORT = '{"kernels": 3, "launches": 8, "failures": []}\n'
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
DIRTY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at grow_pointwise_f0c491_pointwise_4_32+0x90
========= ERROR SUMMARY: 1 error
"""


def test_a_clean_report():
    one = sanitizer.outcome("memcheck", 0, f"words\n{REPORT}", "", CLEAN, 2.0)
    assert one == sanitizer.Outcome("memcheck", True, "0 errors", 3, 8, 2.0)
    hazards = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert sanitizer.outcome("racecheck", 0, REPORT, "", hazards, 2.0).clean


@pytest.mark.parametrize(("code", "stdout", "log"), [
    (9, REPORT, DIRTY),
    (0, REPORT, DIRTY),
    (0, REPORT, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"),
    (0, "", CLEAN),
    (0, REPORT, ""),
    (1, '{"kernels": 3, "launches": 8, "failures": ["graph 7: it failed"]}', CLEAN),
])
def test_a_report_that_is_not_clean(code, stdout, log):
    one = sanitizer.outcome("memcheck", code, stdout, "a trace\n", log, 2.0)
    assert not one.clean and f"exit code {code}" in one.log and "a trace" in one.log
    assert all(line in one.log for line in log.splitlines())


def test_random_graphs_become_jobs_that_run():
    """The same graphs for the same seed; every plan's first variant runs in the emulator, misaligned too."""
    jobs, skipped = sanitizer.collect([lambda: sanitizer.graph_jobs(4, 3, 12, "H200")])
    again, _ = sanitizer.collect([lambda: sanitizer.graph_jobs(4, 3, 12, "H200")])
    assert [job.source for job in jobs] == [job.source for job in again] and jobs and not skipped
    launched, failures = sanitizer.emulate(jobs[:4])
    assert launched >= 2 * len(jobs[:4]) and not failures


def test_random_contractions_become_jobs_that_run():
    """Of each kind one, as its schedule runs it and in another way; no two are the same."""
    jobs, skipped = sanitizer.collect([lambda: sanitizer.drawn_jobs(3, 6, "H200")])
    plans = [LaunchPlan.from_json(job.plan).variants[0].name for job in jobs]
    assert not skipped and len({job.name.partition(",")[0] for job in jobs}) == 3 and 4 <= len(jobs) <= 6
    assert any("queries" in plan for plan in plans) and any("tiles of" in plan for plan in plans)
    launched, failures = sanitizer.emulate(jobs[:2])
    assert launched >= 4 and not failures


def test_a_fault_in_a_kernel_is_seen():
    """A bias read four bytes past its place: past the end of memory that is exactly as large as it."""
    jobs, _ = sanitizer.collect([lambda: sanitizer.model_jobs(["tower_fp32:1"], "H200")])
    job = max(jobs, key=lambda job: len(job.inputs))
    assert [array.dtype for array in job.inputs] == [np.float32] * 4
    broken = dataclasses.replace(job, name="broken", source=job.source.replace("(i3 + digit0)", "(i3 + (digit0 + 4))"))
    assert broken.source != job.source
    _, failures = sanitizer.emulate([broken])
    assert len(failures) == 1 and failures[0].startswith("broken: ")
