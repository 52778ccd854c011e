"""NaN, infinity, the largest numbers, -0 and integers at their limits: kernels, references and the tests' own oracles
against what was measured of ONNX Runtime's CUDA kernels (docs/edge-values.md).

Elements are compared by what they are: NaN, an infinity, an integer exactly; finite floats to 0.02 and three
hundredths, by which the runtime's own kernels for bfloat16 are off.  Where something else is owed than the CUDA
provider gives, ``DEPARTURES`` says so, and the oracle says what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
from edge_table import ROOT, Array, EdgeCase, Group, group_of, grouped, limits, measured, parsed, type_of
from emulator import prepare, run_plan, variants_that_hold
from kernel_harness import Made, alone, arguments, attempt
from plain_session import takes
from reference import FLOATS, evaluate

from onnxfuse.operators import lowered
from onnxfuse.rewriting import value_types
from onnxfuse.rewriting.standalone import _lift
from onnxfuse.verifying.evaluate import Evaluator

QUICK = ("", "rows")
"""Forms of reductions that are compiled in CI; the others are as many kernels again."""

DOCUMENT = ROOT / "docs" / "edge-values.md"

MOST = 60
"""Cases that are one kernel."""

MOVING = frozenset({
    "Concat", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
    "NegativeLogLikelihoodLoss", "Not", "And", "Or", "Xor", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "Pad", "Range", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu",
    "Unsqueeze", "CastLike", "ScatterND", "ScatterElements",
})
"""Operators whose results are elements of their operands, or bits of them, whatever these are; CastLike is a Cast, and
of a Scatter's sums and extrema test_lowering_values tells."""

UNMEASURED = frozenset({"CumSum", "MaxPool", "AveragePool", "DynamicQuantizeLinear", "GridSample"})
"""Operators that compute, with cases in benchmarks/edge_values.py that wait for a GPU, but for the last two, of which
one has no kernel there and the other one of float32 alone; test_schedules_scans, test_schedules_pooling and
test_quantized tell of their edge values what the standard says, test_lowering_values of a GridSample what the runtime
does on a CPU."""


def operands(case: EdgeCase, run: int) -> list[Array]:
    """The operands of a run as far as they are there, in float64 or as Python's integers."""
    found = [tensor.array() for tensor in case.runs[run] if tensor is not None]
    with np.errstate(all="ignore"):
        return [array.astype(np.float64 if array.dtype in FLOATS.values() else object) for array in found]


def by_zero(case: EdgeCase, x: Array, y: Array, *rest: Array) -> Array:
    return y == 0


def at_zero(case: EdgeCase, x: Array, *rest: Array) -> Array:
    return x == 0


def past_32_bits(case: EdgeCase, x: Array, scale: Array, zero: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.abs(x / scale) + 3 >= 2.0**31


def exact_power(case: EdgeCase, x: Array, y: Array) -> Array:
    return (y == 1) | (np.abs(x) == 1) | (np.abs(y) > 2**53) | np.zeros(x.shape, bool)


def every(case: EdgeCase, x: Array, *rest: Array) -> Array:
    return np.ones((), bool)


def axis_of(case: EdgeCase, x: Array) -> int | tuple[int, ...]:
    return 0 if case.form == "columns" else tuple(range(2, x.ndim)) if case.operator.startswith("Global") else -1


def infinite_rows(case: EdgeCase, x: Array, *rest: Array) -> Array:
    return np.isinf(x).all(axis=axis_of(case, x))


def largest_rows(case: EdgeCase, x: Array, *rest: Array) -> Array:
    largest = np.abs(x) == limits(type_of(case))[1]
    if case.operator == "Mean":
        return largest | (np.abs(rest[0]) == limits(type_of(case))[1])
    found = largest.any(axis=axis_of(case, x), keepdims=True)
    wide = "orm" in case.operator or "oftmax" in case.operator
    return np.broadcast_to(found, (*x.shape[:-1], case.columns or x.shape[-1])) if wide else found


def unknown_quotient(case: EdgeCase, x: Array, scale: Array, zero: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.isnan(x / scale) & bool(case.domain) & (case.output in ("int8", "uint8"))


@dataclass(frozen=True)
class Departure:
    """Elements for which something else is owed than the CUDA provider gives.

    Attributes:
        why: and by what.
        types: of the operand; any where empty.
        where: of a case and its operands, the elements; oracle: whether the tests' reference says what is owed there,
            or nothing is.
    """

    why: str
    operators: tuple[str, ...]
    where: Callable[..., Array]
    types: tuple[str, ...] = ()
    oracle: bool = True

    def holds(self, case: EdgeCase) -> bool:
        return case.operator in self.operators and (not self.types or type_of(case) in self.types)


FLOATING, INTEGERS = ("float16", "bfloat16", "float32", "float64"), ("int8", "int32", "int64", "uint8")
DEPARTURES = (
    Departure("an integer divided by zero is undefined: the CPU provider stops, the GPU gives bits, a kernel 0",
              ("Div", "Mod"), by_zero, (*INTEGERS, "int16", "uint16", "uint32", "uint64")),
    Departure("PRelu is x where x is 0, whatever the slope; the CUDA kernel multiplies", ("PRelu",), at_zero),
    Departure("QuantizeLinear saturates; a 32-bit integer overflows in the CUDA kernel",
              ("QuantizeLinear",), past_32_bits),
    Departure("QuantizeLinear of NaN to 8 bits is the zero point of com.microsoft's too, without a CUDA kernel",
              ("QuantizeLinear",), unknown_quotient, ("float32",)),
    Departure("a power of integers that the type has is exact; the CUDA kernel goes by way of float64, a little less",
              ("Pow",), exact_power, ("int32", "int64")),
    Departure("reductions of 64-bit integers are exact, their lowest 64 bits; the CUDA kernels go by way of float64",
              ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"), every, ("int64",)),
    Departure("the extremum of a row of infinities is infinite; the CUDA kernels begin with the largest number",
              ("ReduceMax", "ReduceMin", "GlobalMaxPool"), infinite_rows, FLOATING),
    Departure("Clip without limits makes infinity the largest number, in bfloat16 too, where the runtime copies",
              ("Clip",), every, ("bfloat16",)),
    Departure("sums of the largest numbers overflow or not by the order they are taken in: nothing is owed",
              ("ReduceSum", "ReduceMean", "ReduceLogSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd",
               "Mean", "GlobalAveragePool", "GlobalLpPool", "LayerNormalization", "RMSNormalization",
               "InstanceNormalization", "GroupNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
               "LogSoftmax", "SkipSimplifiedLayerNormalization", "LpNormalization"), largest_rows, FLOATING,
              oracle=False),
)


def owed(case: EdgeCase, run: int) -> tuple[Array, Array]:
    """What is owed, flat, and where anything is."""
    wanted = parsed(case.given[run], case.output)
    free = np.zeros(wanted.shape, bool)
    for departure in DEPARTURES:
        if not departure.holds(case):
            continue
        with np.errstate(all="ignore"):
            found = np.asarray(departure.where(case, *operands(case, run))).astype(bool).reshape(-1)
        found = np.broadcast_to(found, wanted.shape)
        if departure.oracle and found.any():
            wanted = np.where(found, kept(case, by_oracle(case, run)), wanted).astype(wanted.dtype)
        elif not departure.oracle:
            free |= found
    return wanted, ~free


def by_oracle(case: EdgeCase, run: int) -> Array:
    """What the tests' reference gives, in the declared type."""
    group = group_of([case])
    (name,) = (info.name for info in group.model.graph.output)
    with np.errstate(all="ignore"):
        return np.asarray(evaluate(group.model, group.feeds(run))[name]).astype(parsed("0", case.output).dtype)


def kept(case: EdgeCase, found: Array) -> Array:
    """The elements of a result that the table has, flat."""
    return (found[..., :case.columns] if case.columns else found).reshape(-1)


def unlike(found: Array, wanted: Array, matters: Array) -> Array:
    """Places of elements that are something else."""
    if wanted.dtype not in FLOATS.values():
        return np.flatnonzero((found != wanted) & matters)
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), wanted.astype(np.float64)
        near = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= 0.02 + 0.03 * np.abs(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | near
    return np.flatnonzero(~same & matters)


def complaints(case: EdgeCase, run: int, found: Array, what: str) -> list[str]:
    """What is wrong with a result, one line at most."""
    wanted, matters = owed(case, run)
    wrong = unlike(kept(case, found), wanted, matters)
    if not wrong.size:
        return []
    place = int(wrong[0])
    name = f"{case.domain}{'.' if case.domain else ''}{case.operator} {type_of(case)} {case.form}"
    return [f"{what} of {name}, run {run}: "
            f"{wrong.size} of {wanted.size} wrong, at {place} {kept(case, found)[place]} instead of {wanted[place]}"]


def named(cases: Sequence[EdgeCase]) -> list[str]:
    return sorted({case.operator for case in cases})


@pytest.mark.parametrize("operator", named(measured()))
def test_oracles_agree_with_the_table(operator: str) -> None:
    """The tests' reference gives what was measured, but for the departures."""
    found = []
    for case in measured():
        if case.operator != operator:
            continue
        for run in range(len(case.runs)):
            found += complaints(case, run, by_oracle(case, run), "the oracle")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("operator", named(measured()))
def test_references_agree_with_the_table(operator: str) -> None:
    """Verification's references give the same, in float64 as everywhere and in the types as they are."""
    found = []
    for case in measured():
        if case.operator != operator or operator == "BiasAdd":  # the CPU provider lacks it
            continue
        group = group_of([case])
        if not takes(group.model.opset_import[0].version):
            pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no opset {group.model.opset_import[0].version}")
        kind = value_types(group.model)[group.model.graph.node[0].input[0]]
        if kind == onnx.TensorProto.DOUBLE and len(case.runs) == 1 and case.operator not in UNCHANGED:
            continue  # what the CPU provider lacks in float64 is computed in float32, which has other largest numbers
        if (operator, type_of(case)) in INEXACT:
            continue
        evaluator = Evaluator(_lift(group.model, "float64"), {"y0": kind})
        for run in range(len(case.runs)):
            if operator in ("Div", "Mod") and "not by 0" not in case.form and case.output not in FLOATING:
                continue  # the CPU provider refuses to divide by zero
            if operator == "QuantizeLinear" and case.runs[run][1].values == "0.0":
                continue  # the smallest number stands for it, which is none for numbers as small
            with np.errstate(all="ignore"):
                result = evaluator.run(group.feeds(run))[0].astype(parsed("0", case.output).dtype)
            found += complaints(case, run, result, "the reference")
    assert not found, "\n".join(found)


INEXACT = {("Pow", "int64"), ("Pow", "bfloat16"), ("Mod", "uint64"), ("ReduceProd", "int64")}
"""Where a reference goes by way of float64, or the CPU provider lacks the constant's type."""

UNCHANGED = ("Cast", "ReduceMax", "ReduceMin", "ReduceLogSumExp", "GlobalMaxPool", "LogSoftmax", "Sign", "Clip")


def kernels(cases: Sequence[EdgeCase]) -> list[tuple[Group, Made]]:
    """Kernels of as many cases together as can be."""
    found = []
    for group in grouped(cases, MOST):
        made = attempt(group.model)
        if isinstance(made, Made):
            found.append((group, made))
            continue
        if len(group.cases) == 1:
            raise AssertionError(made)
        middle = len(group.cases) // 2
        found += [entry for part in (group.cases[:middle], group.cases[middle:]) for entry in kernels(part)]
    return found


def text_of(group: Group, made: Made) -> str:
    """A kernel's text with what the runs of its cases launch alone: the first variant that holds."""
    plan, runs = made.kernel.plan, range(len(group.cases[0].runs))
    return alone(made.kernel, [variants_that_hold(plan, arguments(made, group.feeds(run)))[0] for run in runs])


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_agree_with_the_table(quick: bool) -> None:
    """Every kernel gives in the emulator what is owed, for each operator, type and form."""
    rows = [case for case in measured() if case.operator.startswith("Reduce") or "oftmax" in case.operator]
    chosen = [case for case in measured() if case not in rows] + [case for case in rows if case.form in QUICK]
    made = kernels(chosen if quick else [case for case in rows if case.form not in QUICK])
    assert {case.operator for group, _ in made for case in group.cases} == {case.operator for case in (
        chosen if quick else rows)}
    texts = [text_of(group, one) for group, one in made]
    prepare(texts)
    found = []
    for (group, one), text in zip(made, texts, strict=True):
        for run in range(len(group.cases[0].runs)):
            results = run_plan(one.kernel.plan, text, arguments(one, group.feeds(run)), [])
            for case, result in zip(group.cases, results, strict=True):
                whole = result[:case.runs[run][0].array().size] if group.length else result
                found += complaints(case, run, whole, "the kernel")
    assert not found, "\n".join(found)


def test_the_table_is_whole() -> None:
    """Every operator that is lowered and computes something was measured, but for those that are known not to be."""
    operators = {op for domain, op in lowered() if domain != "onnxfuse.canonical"}
    unmeasured = operators - MOVING - UNMEASURED - {case.operator for case in measured()}
    assert not unmeasured


@pytest.mark.parametrize("departure", DEPARTURES, ids=lambda departure: departure.operators[0])
def test_departures_are_documented(departure: Departure) -> None:
    assert departure.why in " ".join(DOCUMENT.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("departure", DEPARTURES, ids=lambda departure: departure.operators[0])
def test_departures_are_some(departure: Departure) -> None:
    """Each of them is one: the CUDA provider gives something else somewhere."""
    for case in measured():
        if departure.holds(case):
            for run in range(len(case.runs)):
                values = parsed(case.given[run], case.output)
                places = np.asarray(departure.where(case, *operands(case, run))).astype(bool).reshape(-1)
                matters = np.broadcast_to(places, values.shape)
                if matters.any() and unlike(kept(case, by_oracle(case, run)), values, matters).size:
                    return
    pytest.fail("no element departs")
