"""A measurement as text."""

from __future__ import annotations

from rich.console import Console

from onnxfuse.measuring import BenchResult, Side
from onnxfuse.measuring.statistics import Spread
from onnxfuse.reporting.text import escape, plain_table, size


def show(result: BenchResult, console: Console) -> None:
    """Print a measurement: both models side by side, the ratios with their 95% intervals, the notes."""
    shapes = ", ".join(f"{name}[{'x'.join(map(str, shape))}]" for name, shape in result.inputs.items())
    graph = ", CUDA graph" if result.cuda_graph else ""
    console.print(f"{escape(result.device)} ({escape(result.provider)}{graph})  {escape(shapes)}")
    sides = [result.original] if result.fused is None else [result.original, result.fused]
    ratio = result.fused is not None
    table = plain_table("", "original", *(("fused", "ratio (95% interval)") if ratio else ()), wrap=(1, 2, 3))
    rows: list[tuple[str, list[str], str]] = [
        ("latency", [_spread(side.latency) for side in sides], str(result.latency_ratio or "")),
        ("GPU time", [_spread(side.gpu) for side in sides], str(result.gpu_ratio or "")),
        ("kernels", [_number(side.kernels) for side in sides], ""),
        ("copies and fills", [_number(side.copies) for side in sides], ""),
        ("peak memory", ["not measured" if side.peak_bytes is None else size(side.peak_bytes) for side in sides], ""),
        ("session creation", [f"{side.creation_seconds:.2f} s" for side in sides], ""),
    ]
    for name, cells, last in rows:
        table.add_row(name, *cells, *([last] if ratio else []))
    console.print(table)
    for error in result.errors:
        console.print(f"output {escape(error.name)}: largest difference {error.error:.2g} of its largest magnitude")
    for note in result.notes:
        console.print(f"note: {escape(note)}")


def summary(result: BenchResult) -> dict[str, object]:
    """What the report of a fused model keeps of a measurement: GPU time where it was had, else latency."""
    ratio = result.gpu_ratio or result.latency_ratio
    if ratio is None or result.fused is None:
        raise ValueError("one model was measured, and not two")
    return {
        "speedup": ratio.value, "low": ratio.low, "high": ratio.high,
        "of": "GPU time" if result.gpu_ratio else "latency", "device": result.device,
        "before": _milliseconds(result.original), "after": _milliseconds(result.fused),
    }


def _milliseconds(side: Side) -> float:
    return (side.gpu or side.latency).median


def _spread(times: Spread | None) -> str:
    if times is None:
        return "not measured"
    return f"{times.median:.3f} ms ({times.lower_quartile:.3f} to {times.upper_quartile:.3f})"


def _number(number: int | None) -> str:
    return "not measured" if number is None else str(number)
