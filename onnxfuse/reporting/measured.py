"""A measurement as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from onnxfuse.measuring import BenchResult, Side
from onnxfuse.measuring.results import Ceiling, Rates, Throughput
from onnxfuse.measuring.statistics import Spread
from onnxfuse.reporting.text import count, escape, plain_table, size

_UNITS = {"gigabytes_per_second": "GB/s", "teraflops_per_second": "TFLOP/s"}


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
        ("latency, p50 / p90 / p99", [_percentiles(side.latency) for side in sides], ""),
        ("throughput", [_throughput(side.throughput) for side in sides], ""),
        ("GPU time", [_spread(side.gpu) for side in sides], str(result.gpu_ratio or "")),
        ("bandwidth", [_rate(side.rates, "gigabytes_per_second", result.ceiling) for side in sides], ""),
        ("arithmetic", [_rate(side.rates, "teraflops_per_second", result.ceiling) for side in sides], ""),
        ("kernels", [_number(side.kernels) for side in sides], ""),
        ("copies and fills", [_number(side.copies) for side in sides], ""),
        ("peak memory", ["not measured" if side.peak_bytes is None else size(side.peak_bytes) for side in sides], ""),
        ("session creation", [f"{side.creation_seconds:.2f} s" for side in sides], ""),
    ]
    for name, cells, last in rows:
        table.add_row(name, *cells, *([last] if ratio else []))
    console.print(table)
    _show_threads(sides, console)
    _show_basis(sides, result.ceiling, console)
    for error in result.errors:
        console.print(f"output {escape(error.name)}: largest difference {error.error:.2g} of its largest magnitude")
    for note in result.notes:
        console.print(f"note: {escape(note)}")


def _show_threads(sides: Sequence[Side], console: Console) -> None:
    """The latencies of each thread, where there are several."""
    done = [side.throughput for side in sides if side.throughput is not None and side.throughput.threads > 1]
    if not done:
        return
    heads = ["p50 / p90 / p99"] if len(done) == 1 else ["original, p50 / p90 / p99", "fused, p50 / p90 / p99"]
    table = plain_table("thread", *heads, wrap=(1, 2))
    for number, latencies in enumerate(zip(*(each.latencies for each in done), strict=True), 1):
        table.add_row(str(number), *map(_percentiles, latencies))
    console.print(table)


def _show_basis(sides: Sequence[Side], ceiling: Ceiling | None, console: Console) -> None:
    """What the rates are made of, and what they are held against."""
    rates = [side.rates for side in sides if side.rates is not None]
    if not rates:
        return
    moved = ", ".join(size(each.bytes) for each in rates)
    unknown = max(each.unknown for each in rates)
    rest = f", without {count(unknown, 'tensor')} whose size is not known before a run" if unknown else ""
    console.print(f"rates: {moved} a run, as the report counts them, over {rates[0].of}{rest}")
    if ceiling is not None:
        bandwidth, product = (
            "measured" if name in ceiling.measured else "scaled from float16's, which was measured"
            if name in ceiling.scaled else "by the data sheet" for name in _UNITS)
        console.print(f"{escape(ceiling.target)} reaches {ceiling.gigabytes_per_second:,.0f} GB/s ({bandwidth}) and "
                      f"{ceiling.teraflops_per_second:,.3g} TFLOP/s ({product})")


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


def _percentiles(times: Spread) -> str:
    return f"{times.median:.3f} / {times.p90:.3f} / {times.p99:.3f} ms"


def _throughput(found: Throughput | None) -> str:
    if found is None:
        return "not measured"
    threads = f", {found.threads} threads" if found.threads > 1 else ""
    items = "" if found.items_per_second is None else f", {_figure(found.items_per_second)} items/s"
    return f"{_figure(found.runs_per_second)} runs/s{items}{threads}"


def _rate(rates: Rates | None, name: str, ceiling: Ceiling | None) -> str:
    """A rate, and the share that it is of what the GPU reaches."""
    if rates is None:
        return "not counted"
    rate = float(getattr(rates, name))
    share = "" if ceiling is None else f" ({rate / getattr(ceiling, name):.0%})"
    return f"{_figure(rate)} {_UNITS[name]}{share}"


def _figure(number: float) -> str:
    """Three digits, and all of a number that has more before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _number(number: int | None) -> str:
    return "not measured" if number is None else str(number)
