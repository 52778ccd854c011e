"""Measuring models on the machine at hand: latency, GPU time, kernels, memory; two models in one process by turns."""

from onnxfuse.measuring.bench import bench
from onnxfuse.measuring.cupti import KernelTimer
from onnxfuse.measuring.inputs import make_inputs, read_inputs
from onnxfuse.measuring.results import BenchResult, KernelShare, OutputError, Side
from onnxfuse.measuring.statistics import Ratio, Spread, ratio

__all__ = [
    "BenchResult", "KernelShare", "KernelTimer", "OutputError", "Ratio", "Side", "Spread", "bench", "make_inputs",
    "ratio", "read_inputs",
]
