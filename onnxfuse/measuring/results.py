"""What ``bench`` found, as frozen dataclasses that can be written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse.measuring.statistics import Ratio, Spread


@dataclass(frozen=True)
class KernelShare:
    """All launches of one kernel in one run: how many, and the milliseconds of them together (a median of runs)."""

    name: str
    count: float
    milliseconds: float


@dataclass(frozen=True)
class OutputError:
    """How far one output of the fused model is from the original's.

    Attributes:
        name: of the output.
        error: largest difference over the original's largest magnitude, elements that are finite in both; infinite
            where the shapes differ or one is finite, or a number, and the other is not.
    """

    name: str
    error: float


@dataclass(frozen=True)
class Side:
    """One of the models.

    Attributes:
        model: its path.
        creation_seconds: time to create a session, once CUDA and its libraries were up.
        latency: of a run, inputs and outputs bound to the device, in milliseconds.
        gpu: sum of the durations of a run's kernels, in milliseconds; None without a GPU or CUPTI.
        kernels, copies: launched in a run; copies include fills.
        kernel_shares: the kernels of a run, most expensive first.
        peak_bytes: most device memory that the session held at once: weights, tensors and workspaces, without the
            inputs and the CUDA context; None where it was not measured.
    """

    model: str
    creation_seconds: float
    latency: Spread
    gpu: Spread | None = None
    kernels: int | None = None
    copies: int | None = None
    kernel_shares: tuple[KernelShare, ...] = ()
    peak_bytes: int | None = None


@dataclass(frozen=True)
class BenchResult:
    """A measurement.

    Attributes:
        device: the GPU's name, or "CPU".
        provider: execution provider of ONNX Runtime.
        provider_options: its options, for both models.
        cuda_graph: whether runs replayed a CUDA graph.
        inputs: shape of each input.
        original: the model that was given first; fused: the other one, if any.
        latency_ratio, gpu_ratio: original over fused.
        errors: of each output that is a tensor.
        notes: what the reader has to know, a sentence each.
    """

    device: str
    provider: str
    provider_options: Mapping[str, str]
    cuda_graph: bool
    inputs: Mapping[str, tuple[int, ...]]
    original: Side
    fused: Side | None = None
    latency_ratio: Ratio | None = None
    gpu_ratio: Ratio | None = None
    errors: tuple[OutputError, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything, as dictionaries, lists, texts and numbers."""
        return asdict(self)
