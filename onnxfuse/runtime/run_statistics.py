"""The file that ``ONNXFUSE_STATISTICS`` names: calls and GPU time of fused nodes, as the native library writes it.

``docs/statistics.md`` describes the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from onnxfuse.bounded import read_bytes
from onnxfuse.errors import MeasurementError

FORMAT = "onnxfuse statistics 1"

LARGEST = 64_000_000
"""Bytes of the largest file that is read; the library keeps 256 sets of shapes of a node."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[int, Field(ge=0, le=253_402_300_799)]
Shape = tuple[Count, ...]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class RecordedGpu(_Part):
    """A GPU: ordinal, name, compute capability as 90 for sm_90, multiprocessors."""

    ordinal: Count
    name: str
    capability: Count
    multiprocessors: Count


class RecordedRun(_Part):
    """A fused node's calls of one variant at one set of shapes.

    Attributes:
        variant: of the launch plan.
        inputs, outputs: shapes of the tensors; None for an absent input.
        calls: all of them; timed: those with a time; captured: those that went into a CUDA graph.
        total_ns, least_ns, median_ns: of the timed calls, the median of the latest 31; 0 where there are none.
    """

    variant: str
    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape, ...]
    calls: Count
    timed: Count
    captured: Count
    total_ns: Count
    least_ns: Count
    median_ns: Count

    @model_validator(mode="after")
    def _agree(self) -> RecordedRun:
        if self.timed + self.captured > self.calls:
            raise ValueError("more calls are timed or captured than there are")
        return self

    @property
    def mean_seconds(self) -> float | None:
        """GPU time of a call on average; None where none was timed."""
        return self.total_ns / self.timed * 1e-9 if self.timed else None


class RecordedNode(_Part):
    """A fused node.

    Attributes:
        node, op: its name and operator; region: its rule.
        kernel: ``runtime.cache.digest`` of its kernel text and options; plan: SHA-256 of its launch plan.
        gpu: ordinal.
        unrecorded: calls at shapes past the most that are kept.
    """

    node: str
    op: str
    region: str
    kernel: str
    plan: str
    gpu: Count
    unrecorded: Count
    runs: tuple[RecordedRun, ...]


class RunStatistics(_Part):
    """What one process recorded.

    Attributes:
        onnxfuse, onnxruntime: versions; driver: the newest CUDA that the driver runs, as 13000; driver_release: as
            "580.65.06", "" where unknown; compiler: as "nvrtc-13.0.88", "" where kernels came without one.
        process: its id; started, written: seconds since 1970.
        notes: what a reader should know, such as why there are calls without a time.
    """

    format: Literal["onnxfuse statistics 1"]
    onnxfuse: str
    onnxruntime: str
    driver: Count
    driver_release: str
    compiler: str
    process: Count
    started: Seconds
    written: Seconds
    gpus: tuple[RecordedGpu, ...]
    notes: tuple[str, ...]
    nodes: tuple[RecordedNode, ...]

    @model_validator(mode="after")
    def _agree(self) -> RunStatistics:
        known = {gpu.ordinal for gpu in self.gpus}
        for node in self.nodes:
            if node.gpu not in known:
                raise ValueError(f"node '{node.node}' ran on GPU {node.gpu}, which is not among the GPUs")
        return self

    def gpu(self, ordinal: int) -> RecordedGpu:
        """The GPU of a node."""
        return next(gpu for gpu in self.gpus if gpu.ordinal == ordinal)


def read_statistics(path: Path) -> RunStatistics:
    """The statistics in a file.

    Raises:
        MeasurementError: it cannot be read, or is no statistics file of this release's format.
    """
    try:
        raw = read_bytes(path, LARGEST)
    except OSError as error:
        raise MeasurementError(
            f"The statistics cannot be read: {error.strerror}.", place=str(path),
            remedy="Run the model with ONNXFUSE_STATISTICS=FILE in the environment; the file is there when its "
                   "sessions have ended.",
        ) from error
    try:
        content = from_json(raw)
    except ValueError as error:
        raise MeasurementError(
            f"The file is no statistics file: it is not JSON: {error}.", place=str(path), remedy=_REMEDY,
        ) from error
    _check_kind(content, path)
    try:
        return RunStatistics.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        spot = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise MeasurementError(
            f"The statistics file is damaged: {spot + ': ' if spot else ''}{message[:1].lower()}{message[1:]}.",
            place=str(path), remedy="Run the model again with ONNXFUSE_STATISTICS=FILE.",
        ) from error


_REMEDY = "Give the file that a run with ONNXFUSE_STATISTICS=FILE in the environment wrote."


def _check_kind(content: Any, path: Path) -> None:
    """Say of a file that is something else what it is.

    Raises:
        MeasurementError: it is.
    """
    if isinstance(content, list) and content and all(isinstance(item, dict) and "ph" in item for item in content):
        raise MeasurementError(
            "The file is ONNX Runtime's own profile of a run, not the statistics of fused nodes.", place=str(path),
            remedy=f"{_REMEDY} `onnxfuse optimize --profile` takes the runtime's.",
        )
    found = content.get("format") if isinstance(content, dict) else None
    if found == FORMAT:
        return
    if isinstance(found, str) and found.startswith("onnxfuse statistics "):
        raise MeasurementError(
            f"The statistics file has the format '{found}'; this release reads '{FORMAT}'.", place=str(path),
            remedy="Use the release of onnxfuse that wrote it.",
        )
    raise MeasurementError("The file is no statistics file.", place=str(path), remedy=_REMEDY)
