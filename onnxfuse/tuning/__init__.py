"""Tuning: what a model's kernels and ONNX Runtime's own nodes take on the GPU at hand, measured and kept."""

from onnxfuse.tuning.products import measure_products
from onnxfuse.tuning.timer import Timed, Timer, find_timer
from onnxfuse.tuning.tune import Tuned, TunedRegion, TuneOptions, tune
from onnxfuse.tuning.watch import Watch

__all__ = ["Timed", "Timer", "TuneOptions", "Tuned", "TunedRegion", "Watch", "find_timer", "measure_products", "tune"]
