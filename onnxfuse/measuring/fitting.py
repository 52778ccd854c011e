"""Which sizes no model can run at: some break its rules, and some end the process that tries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from onnxfuse.graph import Graph, Node
from onnxfuse.graph.dims import Dim
from onnxfuse.measuring.analysis import Analysis
from onnxfuse.measuring.demands import WHOLE_DIVISIONS
from onnxfuse.measuring.intervals import Facts, is_whole


def misfit(graph: Graph, sizes: Mapping[str, int]) -> str:
    """Why a model cannot run at these sizes of its inputs, in a sentence; "" where nothing is known against them.

    An axis that a convolution, a slice or a window would leave less than nothing of; an integer divided by zero and a
    Fourier transform of nothing, which end the process that runs them.
    """
    given = frozenset(name for value in graph.inputs for size in value.shape or () for name in size.symbols)
    known = {name: size for name, size in sizes.items() if name in given}
    # What operators leave open is seldom longer than what they read.
    longest = max(known.values(), default=1)
    facts, open_ends = Facts(known), Facts(defaultdict(lambda: longest, known))
    analysis = Analysis(facts, {})
    numbers: dict[Dim, int | None] = {}
    for part in graph.walk():
        for value in part.values.values():
            for size in value.shape or ():
                if size not in numbers:
                    numbers[size] = facts.size(size)
                number = numbers[size]
                if number is not None and number < 0:
                    return f"'{value.name}' would have {number} elements along an axis."
        for node in part.nodes:
            if node.domain == "" and node.op in _CHECKED and len(node.inputs) > _CHECKED[node.op].operand:
                reason = _CHECKED[node.op].refuse(node, open_ends if node.op == "DFT" else facts, analysis)
                if reason:
                    return f"{node.label} {reason}"
    return ""


def _by_zero(node: Node, facts: Facts, analysis: Analysis) -> str:
    divisor = node.inputs[1]
    zero = divisor is not None and is_whole(divisor.dtype) and analysis.of(divisor) == (0, 0)
    return "would divide by zero." if zero else ""


def _of_nothing(node: Node, facts: Facts, analysis: Analysis) -> str:
    return "would transform nothing." if facts.count(node.inputs[0]) == 0 else ""


class _Check(NamedTuple):
    """What refuses a node, which has an operand of this number."""

    operand: int
    refuse: Callable[[Node, Facts, Analysis], str]


_CHECKED: Mapping[str, _Check] = {
    "DFT": _Check(0, _of_nothing), **{op: _Check(1, _by_zero) for op in WHOLE_DIVISIONS},
}
