"""Which fusion changed an answer, or costs time.

    original ┐                     ┌─ answer: nodes that fail on their own, then the smallest sets that change an output
             ├─ variants ─ oracle ─┤
    fused ───┘                     └─ time: every fused node against the nodes it replaced

The searches ask an oracle and know nothing of ONNX Runtime.
"""

from onnxfuse.debugging.answers import bisect_answers
from onnxfuse.debugging.results import AnswerResult, Culprit, NodeTime, TimeResult
from onnxfuse.debugging.search import Outcome
from onnxfuse.debugging.times import bisect_times
from onnxfuse.verifying import find_runner
from onnxfuse.verifying.pair import Pair

__all__ = [
    "AnswerResult", "Culprit", "NodeTime", "Outcome", "Pair", "TimeResult", "bisect_answers", "bisect_times",
    "find_runner",
]
