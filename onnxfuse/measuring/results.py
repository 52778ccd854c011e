"""What ``bench`` found, as frozen dataclasses that can be written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
class Throughput:
    """Runs that a session gets done when every thread starts its next run as soon as its last has ended.

    Attributes:
        threads: how many, on one session, each with inputs and outputs of its own.
        runs_per_second: of all threads together.
        items_per_second: the same times the items of a run (``BenchResult.items``); None where these are not known.
        latencies: of the runs of each thread.
    """

    threads: int
    runs_per_second: float
    items_per_second: float | None
    latencies: tuple[Spread, ...]


@dataclass(frozen=True)
class Rates:
    """What a run moves and computes, by the report's count (docs/bytes.md), and what that comes to a second.

    Attributes:
        bytes: through device memory; flops: floating-point operations.
        unknown: tensors that count nothing, since their size is not known before a run.
        of: the time that both are divided by: "GPU time", or "latency" where that was not measured.
        gigabytes_per_second, teraflops_per_second: 10^9 bytes and 10^12 operations.
    """

    bytes: int
    flops: int
    unknown: int
    of: str
    gigabytes_per_second: float
    teraflops_per_second: float


@dataclass(frozen=True)
class Ceiling:
    """What the GPU reaches, by its profile.

    Attributes:
        target: name of the profile.
        gigabytes_per_second: of a copy, reads and writes; teraflops_per_second: of a large matrix product of the type
            that the model's products have.
        measured: names of those of the two that were measured; scaled: of those that are in the same proportion to
            the data sheet's as what was measured of float16; the others are a share of what the data sheet says.
    """

    target: str
    gigabytes_per_second: float
    teraflops_per_second: float
    measured: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One of the models.

    Attributes:
        model: its path.
        creation_seconds: time to create a session, once CUDA and its libraries were up.
        latency: of a run, inputs and outputs bound to the device, in milliseconds.
        gpu: milliseconds of a run in which kernels ran; None without a GPU or CUPTI.
        kernels, copies: launched in a run; copies include fills.
        kernel_shares: the kernels of a run, most expensive first.
        peak_bytes: most device memory that the session held at once: weights, tensors and workspaces, without the
            inputs and the CUDA context; None where it was not measured.
        throughput: runs a second, of as many threads as were asked for.
        rates: bytes and arithmetic a second; None where they were not counted.
    """

    model: str
    creation_seconds: float
    latency: Spread
    gpu: Spread | None = None
    kernels: int | None = None
    copies: int | None = None
    kernel_shares: tuple[KernelShare, ...] = ()
    peak_bytes: int | None = None
    throughput: Throughput | None = None
    rates: Rates | None = None


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
        dims: sizes of the inputs' symbolic dimensions.
        items: how many a run computes: the size of the inputs' first axis where that is a batch; None where it is not
            known to be one.
        ceiling: what the GPU reaches; None without one that a profile describes.
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
    dims: Mapping[str, int] = field(default_factory=dict)
    items: int | None = None
    ceiling: Ceiling | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything, as dictionaries, lists, texts and numbers."""
        return asdict(self)
