"""The measured table of edge values: its cases as models, several of which make one region."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from edge_operands import element_type, limits, parsed  # noqa: E402, F401 (what tests take from here, too)
from edge_values import EdgeCase, read  # noqa: E402

from onnxfuse.operators import lowered  # noqa: E402

MEASURED = ROOT / "benchmarks" / "results" / "2026-11-22-h200-edge-values.json"
Array = np.ndarray


@cache
def measured() -> tuple[EdgeCase, ...]:
    """Every case of the table that a provider has a kernel for, and there is a lowering of."""
    return tuple(case for case in read(MEASURED) if case.given and is_lowered(case))


def is_lowered(case: EdgeCase) -> bool:
    """Whether the library makes kernels of an operator for these types."""
    kind, operator = type_of(case), case.operator
    if operator.startswith("Reduce") and "int" in kind:
        return operator in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd")
    if operator == "Pow" and "int" in kind:
        return not case.form.startswith("by")
    return (case.domain, operator) in lowered()


def type_of(case: EdgeCase) -> str:
    """The element type that a case is of."""
    return case.runs[0][1 if case.operator == "Where" else 0].type


@dataclass(frozen=True)
class Group:
    """Cases whose nodes make one model, and for each input its case and operand.

    Elementwise ones are made equally long, so that one kernel does them all.
    """

    model: onnx.ModelProto
    cases: tuple[EdgeCase, ...]
    inputs: dict[str, tuple[EdgeCase, int]]
    length: int = 0

    def feeds(self, run: int) -> dict[str, Array]:
        """The inputs of one run."""
        return {name: lengthened(case.runs[run][place].array(), self.length)
                for name, (case, place) in self.inputs.items()}


def lengthened(array: Array, length: int) -> Array:
    """A vector of many elements, its own again and again; what is no vector, or has one element, stays."""
    return np.resize(array, length) if length and array.ndim == 1 and array.size > 1 else array


def is_elementwise(case: EdgeCase) -> bool:
    """Whether an element of the result hangs on those at its place alone."""
    rows = case.operator.startswith(("Reduce", "Global", "OneHot")) or "orm" in case.operator
    return not rows and "oftmax" not in case.operator and len(case.runs[0][0].shape) == 1


def grouped(cases: Sequence[EdgeCase], most: int) -> Iterator[Group]:
    """Cases of equally many runs, of equal shapes and versions, up to ``most`` at a time."""
    found: dict[tuple[object, ...], list[EdgeCase]] = {}
    for case in cases:
        same = is_elementwise(case) or (case.runs[0][0].array().shape, case.form, "orm" in case.operator)
        found.setdefault((len(case.runs), case.opset, same), []).append(case)
    for members in found.values():
        for start in range(0, len(members), most):
            yield group_of(members[start:start + most])


def group_of(cases: Sequence[EdgeCase]) -> Group:
    """One model of some cases."""
    alike = is_elementwise(cases[0]) and len(cases) > 1
    longest = max(case.runs[0][0].array().size for case in cases) if alike else 0
    nodes, inputs, outputs, constants, known = [], [], [], [], {}
    places: dict[str, tuple[EdgeCase, int]] = {}
    for number, case in enumerate(cases):
        names = []
        for place, tensor in enumerate(case.runs[0]):
            key = tuple(json.dumps(vars(run[place]) if run[place] else None) for run in case.runs)
            if tensor is not None and key not in known:
                known[key] = f"x{len(known)}"
                array = lengthened(tensor.array(), longest)
                if tensor.constant:
                    constants.append(onnx.numpy_helper.from_array(array, known[key]))
                else:
                    inputs.append(helper.make_tensor_value_info(known[key], element_type(tensor.type), array.shape))
                    places[known[key]] = case, place
            names.append("" if tensor is None else known[key])
        outputs.append(helper.make_tensor_value_info(f"y{number}", element_type(case.output), None))
        nodes.append(helper.make_node(case.operator, names, [f"y{number}"], domain=case.domain, **case.attributes))
    opsets = [helper.make_opsetid("", cases[0].opset), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "edges", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Group(model, tuple(cases), places, longest)
