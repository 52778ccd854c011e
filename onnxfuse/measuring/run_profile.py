"""ONNX Runtime's own profile of a run (``SessionOptions.enable_profiling``), read.

The file is a list of events of Chrome's trace format.  An event of category "Node" whose name ends in ``_kernel_time``
is one execution of a node: ``dur`` is what the *host* spent on it, in microseconds.  On CUDA the GPU works on after
that.  An ONNX Runtime that was built with CUDA profiling writes an event of category "Kernel" after the node's for
each kernel that the node launched: its ``dur`` is GPU time.  An event "model_run" of category "Session" ends each run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from onnxfuse.bounded import parse_json, read_bytes
from onnxfuse.errors import MeasurementError

LARGEST = 100_000_000
"""Bytes of the largest file that is read; Python needs some twenty times as many."""

LONGEST = 1e12
"""Microseconds of the longest event: eleven days."""

_SUFFIX = "_kernel_time"
_CUDA = "CUDAExecutionProvider"
_RECORD = ("Record one: set enable_profiling on the SessionOptions of a session on CUDAExecutionProvider, run the "
           "model a few times, and call session.end_profiling().")


@dataclass(frozen=True)
class NodeRuns:
    """What a profile shows of one node of the runtime's graph.

    Attributes:
        name: as the runtime calls it: the model's name, or operator and place for a node without one.
        op: operator type; provider: execution provider.
        executions: in one run of the model, on average.
        host: median seconds of one execution on the host.
        gpu: median seconds of one execution in GPU kernels; None where the profile has no kernels at all.
    """

    name: str
    op: str
    provider: str
    executions: float
    host: float
    gpu: float | None

    @property
    def on_gpu(self) -> bool:
        """Whether the CUDA provider ran it."""
        return self.provider == _CUDA


@dataclass(frozen=True)
class RunProfile:
    """A profile: ``nodes`` by name, ``runs`` of the model, ``has_kernels`` where it holds GPU kernels."""

    path: str
    runs: int
    nodes: Mapping[str, NodeRuns]
    has_kernels: bool


@dataclass
class _Seen:
    op: str
    provider: str
    host: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)


def read_run_profile(path: str | Path) -> RunProfile:
    """Read a profile.

    Raises:
        MeasurementError: the file cannot be read, is no profile or a cut one, holds no whole run, or no node of it ran
            on the CUDA provider: what a CPU took says nothing of a GPU.
    """
    place = str(path)
    seen: dict[str, _Seen] = {}
    latest: dict[str, _Seen] = {}
    runs, has_kernels = 0, False
    for number, event in enumerate(_events(place)):
        category, name, args = event.get("cat"), event.get("name"), event.get("args") or {}
        if category == "Session" and name == "model_run":
            runs += 1
        if category not in ("Node", "Kernel"):
            continue
        duration = _time(event.get("dur"))
        if not isinstance(name, str) or not isinstance(args, dict) or duration is None:
            raise MeasurementError(
                f"The profile is damaged: event {number} has no name, duration or arguments.", place=place,
                remedy=_RECORD,
            )
        op = str(args.get("op_name", ""))
        if category == "Kernel":
            has_kernels = True
            if op in latest and latest[op].gpu:
                latest[op].gpu[-1] += duration * 1e-6
        elif name.endswith(_SUFFIX):
            node = seen.setdefault(name.removesuffix(_SUFFIX), _Seen(op, str(args.get("provider", ""))))
            node.host.append(duration * 1e-6)
            node.gpu.append(0.0)
            latest[op] = node
    _check(place, runs, seen)
    nodes = {
        name: NodeRuns(name, node.op, node.provider, len(node.host) / runs, median(node.host),
                       median(node.gpu) if has_kernels else None)
        for name, node in seen.items()
    }
    return RunProfile(place, runs, nodes, has_kernels)


def _events(place: str) -> list[dict[str, Any]]:
    try:
        content = parse_json(read_bytes(place, LARGEST))
    except OSError as error:
        raise MeasurementError(f"The profile cannot be read: {error.strerror}.", place=place, remedy=_RECORD) from error
    except ValueError as error:
        raise MeasurementError(
            f"The profile is no JSON, or is cut short: {error}.", place=place,
            remedy="A profile is whole after session.end_profiling().",
        ) from error
    if not isinstance(content, list) or not all(isinstance(event, dict) for event in content):
        raise MeasurementError("The file is no profile of ONNX Runtime: it is not a list of events.", place=place,
                               remedy=_RECORD)
    return content


def _time(duration: object) -> float | None:
    """A duration, or None where it is none."""
    if isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 <= duration <= LONGEST:
        return None
    return float(duration)


def _check(place: str, runs: int, seen: Mapping[str, _Seen]) -> None:
    if not seen:
        raise MeasurementError("The profile holds no nodes.", place=place, remedy=_RECORD)
    if not runs:
        raise MeasurementError("The profile holds no whole run of the model.", place=place, remedy=_RECORD)
    providers = Counter(node.provider for node in seen.values())
    if _CUDA not in providers:
        ran = ", ".join(f"{provider or 'no provider named'} ({count} nodes)"
                        for provider, count in providers.most_common())
        raise MeasurementError(
            f"The profile says nothing about GPU time: no node ran on {_CUDA}, but on {ran}.", place=place,
            remedy=_RECORD,
        )
