"""What fused nodes did in production, as the database keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from onnxfuse.measuring.database import Environment, Statistic, shapes_text
from onnxfuse.runtime.run_statistics import RecordedRun, RunStatistics

MOST_CALLS = (1 << 62) - 1
"""Calls that are counted at most: a sum of a file's numbers may be longer than any integer of a database's."""


def statistics_of(recorded: RunStatistics) -> tuple[Statistic, ...]:
    """One entry per kernel, shapes and GPU with a time; nodes that share a kernel add up, and so do its variants.

    ``kernel`` is ``runtime.cache.digest`` of text and options; the time is the mean of the timed calls, and only these
    count.  An absent input has no place among the shapes.  ``source`` is the process: a later file of its own says all
    that this one does.
    """
    found: dict[tuple[str, str, int], list[RecordedRun]] = {}
    for node in recorded.nodes:
        for run in node.runs:
            if run.timed:
                inputs = [shape for shape in run.inputs if shape is not None]
                found.setdefault((node.kernel, shapes_text(inputs, run.outputs), node.gpu), []).append(run)
    environments: Mapping[int, Environment] = {
        gpu.ordinal: Environment(
            gpu.name, recorded.driver_release, recorded.onnxfuse, recorded.onnxruntime, recorded.compiler
        )
        for gpu in recorded.gpus
    }
    seen = datetime.fromtimestamp(recorded.written, UTC).isoformat(timespec="seconds")
    return tuple(
        Statistic(
            kernel, shapes, sum(run.total_ns for run in runs) / sum(run.timed for run in runs) * 1e-3,
            min(sum(run.timed for run in runs), MOST_CALLS), environments[gpu], seen,
            f"{recorded.process} of {recorded.started}",
        )
        for (kernel, shapes, gpu), runs in found.items()
    )
