#!/usr/bin/env python3
"""What ONNX Runtime's kernels give for NaN, infinity, the largest numbers, -0 and integers at their limits.

    python benchmarks/edge_values.py FILE.json [--only OPERATOR ...] [--seconds S]

Every case is a model of one node, with the runtime's optimisations off, run on the CUDA provider (no node may fall back
to the CPU) and on the CPU provider; what either gives is kept as text, so that -0.0 and nan stay apart.  A case that
ends its process (an integer division by zero on the CPU), or that does not end, is noted as such.  It needs NumPy, onnx
and onnxruntime alone.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from edge_operands import (
    FLOATS,
    INF,
    INTEGERS,
    NAN,
    SIGNED,
    UNSIGNED,
    Tensor,
    both,
    element_type,
    few,
    integers,
    limits,
    not_zero,
    numpy_type,
    operand,
    ordinary,
    row_operands,
    rows,
    text_of,
)
from onnx import TensorProto, helper
from patience import patiently

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
WORKERS = 6
SECONDS = 20.0
"""For all runs of a case; the first in a process loads the provider's libraries too."""

UNARY = {
    "": [
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp",
        "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg",
        "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign",
        "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
    ],
    "com.microsoft": ["Gelu", "FastGelu", "QuickGelu"],
}
BINARY = [
    "Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "PRelu", "Equal", "Less", "LessOrEqual", "Greater",
    "GreaterOrEqual",
]
REDUCTIONS = [
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp",
]
OPSETS = {"Swish": 24, "RMSNormalization": 23}
LONG = {"": 1, "300 columns": 75, "2100 columns": 525}
"""Columns of which a row has its four this often: kernels differ by the length of rows."""


@dataclass
class EdgeCase:
    """One node and the operands of each of its runs, and what came of it: outputs by run, or why there are none."""

    operator: str
    form: str
    runs: list[list[Tensor | None]]
    output: str
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 21
    columns: int = 0
    """Of an output's last axis that are kept; 0 for all."""
    cuda: list[str] | str = ""
    cpu: list[str] | str = ""

    @property
    def given(self) -> list[str]:
        """What the CUDA provider gave, by run; what the CPU provider did where that has no kernel: there it runs."""
        return next((side for side in (self.cuda, self.cpu) if isinstance(side, list)), [])


def write(path: Path, about: Mapping[str, Any], cases: Sequence[EdgeCase]) -> None:
    """Keep cases, each operand once, and what the CPU provider gave only where it is not what the CUDA provider did."""
    tensors: dict[str, int] = {}

    def place(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensors.setdefault(json.dumps(asdict(tensor)), len(tensors))

    entries = []
    for case in cases:
        entry = {name: value for name, value in vars(case).items() if value not in ("", {}, 0)}
        entry["runs"] = [[place(tensor) for tensor in run] for run in case.runs]
        if case.cpu == case.cuda:
            entry["cpu"] = None
        entries.append(json.dumps(entry))
    lines = [json.dumps(about), "[\n" + ",\n".join(tensors) + "\n]", "[\n" + ",\n".join(entries) + "\n]"]
    path.write_text('{{"environment": {},\n"tensors": {},\n"cases": {}}}\n'.format(*lines), encoding="utf-8")


def read(path: Path) -> list[EdgeCase]:
    """The cases of a file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    tensors = [Tensor(**entry) for entry in found["tensors"]]
    cases = []
    for entry in found["cases"]:
        runs = [[None if place is None else tensors[place] for place in run] for run in entry.pop("runs")]
        if entry.get("cpu", "") is None:
            entry["cpu"] = entry["cuda"]
        cases.append(EdgeCase(runs=runs, **{"form": "", **entry}))
    return cases


def opset_of(operator: str) -> int:
    """A recent version that has the operator."""
    return OPSETS.get(operator, 21)


def cases() -> Iterator[EdgeCase]:
    """All of them."""
    yield from elementwise()
    yield from casts()
    yield from reductions()
    yield from totals()
    yield from normalisations()


def elementwise() -> Iterator[EdgeCase]:
    """Operators of one element each."""
    yield from unary()
    yield from binary()
    yield from of_several()
    yield from powers()
    yield from clips()
    yield from quantised()
    yield from one_hot()


def unary() -> Iterator[EdgeCase]:
    """Of one operand."""
    for domain, operators in UNARY.items():
        for operator, kind in product(operators, (*FLOATS, *INTEGERS)):
            if kind not in FLOATS and (domain or operator not in ("Abs", "Neg", "Relu", "Sign", "Identity")):
                continue
            output = "bool" if operator in ("IsInf", "IsNaN") else kind
            yield EdgeCase(operator, "", [[operand(kind, ordinary(kind))]], output, domain, opset=opset_of(operator))
    for kind in FLOATS:
        yield EdgeCase("Gelu", "tanh", [[operand(kind, ordinary(kind))]], kind, attributes={"approximate": "tanh"})
        yield EdgeCase("LeakyRelu", "alpha 0", [[operand(kind, ordinary(kind))]], kind, attributes={"alpha": 0.0})
        yield EdgeCase("ThresholdedRelu", "alpha 0", [[operand(kind, ordinary(kind))]], kind, attributes={"alpha": 0.0})
        yield EdgeCase("IsInf", "positive", [[operand(kind, ordinary(kind))]], "bool",
                       attributes={"detect_negative": 0})


def binary() -> Iterator[EdgeCase]:
    """Of two operands in all types, and of more where an operator takes them."""
    for operator, kind in product(BINARY, (*FLOATS, *INTEGERS)):
        if kind not in FLOATS and operator in ("Mean", "Sum", "PRelu"):
            continue
        output = "bool" if operator in BINARY[-5:] else kind
        yield EdgeCase(operator, "", [list(both(kind))], output)
        if operator == "Div" and kind not in FLOATS:
            yield EdgeCase(operator, "not by 0", [list(both(kind, second=not_zero(kind)))], output)
        if operator in ("Max", "Min", "Sum", "Mean"):
            a, b = both(kind)
            yield EdgeCase(operator, "three operands", [[a, b, operand(kind, [few(kind)[-2]])]], output)


def of_several() -> Iterator[EdgeCase]:
    """Of two or three operands in some types."""
    for kind in FLOATS:
        yield EdgeCase("BiasGelu", "", [[operand(kind, ordinary(kind)), operand(kind, [0.0] * len(ordinary(kind)))]],
                       kind, "com.microsoft")
        a, b = both(kind)
        yield EdgeCase("Mod", "fmod", [[a, b]], kind, attributes={"fmod": 1})
        yield EdgeCase("Where", "", [[operand("bool", [1, 0] * (len(few(kind)) ** 2 // 2) + [1]), a, b]], kind)
    for kind in (*SIGNED, *UNSIGNED):
        a, b = both(kind)
        yield EdgeCase("Mod", "", [[a, b]], kind)
        yield EdgeCase("Mod", "fmod", [[a, b]], kind, attributes={"fmod": 1})
        a, b = both(kind, second=not_zero(kind))
        yield EdgeCase("Mod", "not by 0", [[a, b]], kind)
        yield EdgeCase("Mod", "fmod, not by 0", [[a, b]], kind, attributes={"fmod": 1})
        if kind in UNSIGNED:
            value, by = both(kind, second=[0, 1, 7, 8, 9, 31, 32, 63, 64, 65])
            for direction in ("LEFT", "RIGHT"):
                yield EdgeCase("BitShift", direction.lower(), [[value, by]], kind, attributes={"direction": direction})


def quantised() -> Iterator[EdgeCase]:
    """To integers and back, by scales of every kind."""
    for kind in FLOATS[:1] + FLOATS[2:3]:
        for zero in ("uint8", "int8", "uint16", "int16"):
            x = operand(kind, [*ordinary(kind), 127.0, 128.0, 255.0, 256.0, -128.0, -129.0])
            runs: list[list[Tensor | None]] = [[x, operand(kind, scale, []), operand(zero, 3, [])]
                                               for scale in (1.0, -1.0, 0.0, NAN, INF)]
            yield EdgeCase("QuantizeLinear", zero, runs, zero)
            yield EdgeCase("QuantizeLinear", zero, runs, zero, "com.microsoft")
            back = operand(zero, ordinary(zero))
            runs = [[back, operand(kind, scale, []), operand(zero, 3, [])] for scale in (1.0, -1.0, 0.0, NAN, INF)]
            yield EdgeCase("DequantizeLinear", zero, runs, kind)
            yield EdgeCase("DequantizeLinear", zero, runs, kind, "com.microsoft")


def one_hot() -> Iterator[EdgeCase]:
    """Of indices that are there and that are not."""
    for kind in ("int64", "int32", "float32"):
        indices: list[float] = [-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5]
        if kind == "float32":
            indices += [0.5, 1.7, -0.5, NAN, INF, -INF]
        yield EdgeCase("OneHot", kind, [[operand(kind, indices), operand("int64", [3], constant=True),
                                         operand("float32", [7.0, 9.0])]], "float32")


def powers() -> Iterator[EdgeCase]:
    """Pow by exponents of several types, fed and constant."""
    for kind in (*FLOATS, "int32", "int64"):
        more = [*few(kind), *([0.5, -0.5, 2.0, 3.0, -2.0, -8.0] if kind in FLOATS else [3, 63, -2])]
        pairs = list(product(more, more))
        a, b = zip(*pairs, strict=True)
        yield EdgeCase("Pow", "", [[operand(kind, a), operand(kind, b)]], kind)
        for exponent in (2, 3, 0.5, 1, -1, 0):
            if kind in FLOATS or exponent == int(exponent):
                power = operand(kind, exponent, [], constant=True)
                yield EdgeCase("Pow", f"constant {exponent}", [[operand(kind, ordinary(kind)), power]], kind)
        for other in ("int32", "int64", "float32", "float64"):
            if other != kind:
                left, right = both(kind, other)
                yield EdgeCase("Pow", f"by {other}", [[left, right]], kind)


def clips() -> Iterator[EdgeCase]:
    """Clip between limits that are absent, NaN, infinite or the wrong way round."""
    for kind in (*FLOATS, *INTEGERS):
        x = operand(kind, ordinary(kind))
        pairs: list[tuple[Any, Any]] = [(1, 3), (7, 2)]
        if kind in FLOATS:
            pairs += [(-1.0, 1.0), (NAN, 1.0), (-1.0, NAN), (-INF, INF), (INF, -INF), (0.0, INF), (-0.0, 0.0)]
        yield EdgeCase("Clip", "both", [[x, operand(kind, low, []), operand(kind, high, [])] for low, high in pairs],
                       kind)
        yield EdgeCase("Clip", "least", [[x, operand(kind, low, [])] for low, _ in pairs], kind)
        yield EdgeCase("Clip", "most", [[x, None, operand(kind, high, [])] for _, high in pairs], kind)
        yield EdgeCase("Clip", "none", [[x]], kind)


def casts() -> Iterator[EdgeCase]:
    """From every type to every other, saturating or not being of 8-bit floats alone."""
    every = (*FLOATS, *SIGNED, *UNSIGNED, "bool")
    for source, target in product(every, every):
        if source == target:
            continue
        if source == "bool":
            values: list[Any] = [0, 1]
        elif source in FLOATS:
            edges = [2.0**power for power in (7, 8, 15, 16, 31, 32, 63, 64, 70)]
            values = [*ordinary(source), *edges, *(-edge for edge in edges), 127.5, 128.5, 200.0, 255.5, -128.5, -129.5,
                      300.0, 65504.0, 65519.0, 65520.0, -0.9, 0.9, 1e-8, 1e20, -1e20, 1e39, -1e39]
        else:
            lowest, highest = limits(source)
            values = [value for value in (*ordinary(source), 127, 128, 255, 256, -128, -129, 2049, 65504, 65519, 65520,
                                          2**31 - 1, 2**31, -(2**31) - 1, 2**24 + 1, 2**53 + 1)
                      if lowest <= value <= highest]
        yield EdgeCase("Cast", f"{source} to {target}", [[operand(source, values)]], target,
                       attributes={"to": element_type(target)})


def reductions() -> Iterator[EdgeCase]:
    """Over rows, columns and all; and pools over an image, and over its windows."""
    for operator, kind in product(REDUCTIONS, (*FLOATS, *INTEGERS)):
        for form, repeat in list(LONG.items())[:2]:
            yield EdgeCase(operator, f"rows {form}".strip(), [[row_operands(kind, repeat), integers(-1)]], kind)
        turned = operand(kind, np.array(rows(kind), dtype=object).T.tolist())
        yield EdgeCase(operator, "columns", [[turned, integers(0)]], kind)
        yield EdgeCase(operator, "all", [[operand(kind, row)] for row in rows(kind)], kind)
    for operator, kind in product(("GlobalMaxPool", "GlobalAveragePool"), FLOATS):
        image = operand(kind, [[[entry[:2], entry[2:]] for entry in rows(kind)]])
        yield EdgeCase(operator, "", [[image]], kind)
    for operator, kind, pads in product(("MaxPool", "AveragePool"), FLOATS, (0, 1)):
        image = operand(kind, [[[entry[:2], entry[2:]] for entry in rows(kind)]])
        yield EdgeCase(operator, "padded" * pads, [[image]], kind,
                       attributes={"kernel_shape": [2, 2], "pads": [pads] * 4})


def totals() -> Iterator[EdgeCase]:
    """Running totals along rows and columns, and what a Scatter makes of two numbers."""
    for kind, exclusive, reverse in product((*FLOATS, "int32", "int64"), (0, 1), (0, 1)):
        form = " ".join([*["exclusive"] * exclusive, *["reverse"] * reverse])
        given = {"exclusive": exclusive, "reverse": reverse}
        yield EdgeCase("CumSum", f"rows {form}".strip(), [[row_operands(kind), integers(-1)]], kind,
                       attributes=given)
        turned = operand(kind, np.array(rows(kind), dtype=object).T.tolist())
        yield EdgeCase("CumSum", f"columns {form}".strip(), [[turned, integers(0)]], kind, attributes=given)
    for kind, reduction in product((*FLOATS, "int32", "int64"), ("add", "mul", "max", "min")):
        a, b = both(kind)
        places = operand("int64", [[place] for place in range(a.array().size)], constant=True)
        yield EdgeCase("ScatterND", reduction, [[a, places, b]], kind, attributes={"reduction": reduction})


def normalisations() -> Iterator[EdgeCase]:
    """Softmax and norms."""
    for kind in FLOATS:
        for operator in ("Softmax", "LogSoftmax"):
            for form, repeat in LONG.items():
                yield EdgeCase(operator, f"rows {form}".strip(), [[row_operands(kind, repeat)]], kind, columns=4)
            turned = operand(kind, np.array(rows(kind), dtype=object).T.tolist())
            yield EdgeCase(operator, "columns", [[turned]], kind, attributes={"axis": 0})
        x, count = row_operands(kind), len(rows(kind))
        ones, zeros = operand(kind, [1.0] * 4), operand(kind, [0.0] * 4)
        none = operand(kind, [[0.0] * 4] * count)
        yield EdgeCase("LayerNormalization", "", [[x, ones, zeros]], kind)
        yield EdgeCase("RMSNormalization", "", [[x, ones]], kind, opset=23)
        yield EdgeCase("SimplifiedLayerNormalization", "", [[x, ones]], kind)
        yield EdgeCase("SkipLayerNormalization", "", [[x, none, ones, zeros]], kind, "com.microsoft")
        yield EdgeCase("SkipSimplifiedLayerNormalization", "", [[x, none, ones]], kind, "com.microsoft")
        yield EdgeCase("BiasAdd", "", [[operand(kind, [rows(kind)]), zeros, operand(kind, [[[0.0] * 4] * count])]],
                       kind, "com.microsoft")
        image = operand(kind, [rows(kind)])
        wide = [operand(kind, [value] * count) for value in (1.0, 0.0)]
        yield EdgeCase("InstanceNormalization", "", [[image, *wide]], kind)
        yield EdgeCase("GroupNormalization", "", [[image, *wide]], kind, attributes={"num_groups": count})
        yield EdgeCase("LpNormalization", "p 1", [[x]], kind, attributes={"p": 1})
        yield EdgeCase("LpNormalization", "p 2", [[x]], kind, attributes={"p": 2})
        yield EdgeCase("GlobalLpPool", "", [[image]], kind)
        channels = [operand(kind, values) for values in ([1.0] * 4, [0.0] * 4, [0.0] * 4, [1.0, INF, NAN, -1.0])]
        yield EdgeCase("BatchNormalization", "", [[x, *channels]], kind)


# ---- Running. ----


def model_of(case: EdgeCase) -> bytes:
    """The one node, operands that are no constants being inputs."""
    names = ["" if tensor is None else f"x{place}" for place, tensor in enumerate(case.runs[0])]
    node = helper.make_node(case.operator, names, ["y"], domain=case.domain, **case.attributes)
    given = [(name, tensor) for name, tensor in zip(names, case.runs[0], strict=True) if tensor is not None]
    graph = helper.make_graph(
        [node], "edge",
        [helper.make_tensor_value_info(name, element_type(tensor.type), list(tensor.array().shape))
         for name, tensor in given if not tensor.constant],
        [helper.make_tensor_value_info("y", element_type(case.output), None)],
        [onnx.numpy_helper.from_array(tensor.array(), name) for name, tensor in given if tensor.constant])
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def outputs(case: EdgeCase, provider: str) -> list[str] | str:
    """What each run gives, or why there is nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if provider == CUDA:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = onnxruntime.InferenceSession(model_of(case), options, providers=[provider])
        if session.get_providers()[0] != provider:
            return "no such provider"
        found = []
        for run in case.runs:
            feeds = {f"x{place}": ortvalue(tensor.array()) for place, tensor in enumerate(run)
                     if tensor is not None and not tensor.constant}
            (value,) = session.run_with_ort_values(["y"], feeds)
            shape = value.shape()
            size = int(np.prod(shape)) * numpy_type(case.output).itemsize
            raw = np.frombuffer(ctypes.string_at(value.data_ptr(), size), np.uint8)
            array = raw.view(numpy_type(case.output)).reshape(shape)
            found.append(text_of(array[..., :case.columns] if case.columns else array))
    except Exception as error:  # ONNX Runtime has an exception type per status
        text = str(error).splitlines()[0]
        # The last is how it says that neither provider has one, where nothing may fall back.
        signs = ("NOT_IMPLEMENTED", "not been assigned", "fallback", "transformer_memcpy")
        missing = any(sign in text for sign in signs)
        return "no kernel" if missing else f"error: {text[:160]}"
    return found


def ortvalue(array: np.ndarray) -> onnxruntime.OrtValue:
    """An operand; NumPy has no bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def on_cpu(case: EdgeCase) -> list[str] | str:
    """For a process that it may end."""
    return outputs(case, CPU)


def on_cuda(case: EdgeCase) -> list[str] | str:
    """The same for the GPU."""
    return outputs(case, CUDA)


def environment() -> dict[str, Any]:
    """Where this ran."""
    try:
        gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                             capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = ""
    versions = {name: importlib.metadata.version(name) for name in ("onnx", "numpy")}
    return {"date": date.today().isoformat(), "gpu": gpu, "onnxruntime": onnxruntime.__version__, **versions}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="a case may take")
    chosen = parser.parse_args()
    found = [case for case in cases() if not chosen.only or case.operator in chosen.only]
    start = time.time()
    for place, result in patiently(on_cpu, found, WORKERS, chosen.seconds):
        found[place].cpu = result
    found = [case for case in found if "INVALID_GRAPH" not in case.cpu]  # types that the operator does not take
    print(f"{len(found)} cases on the CPU in {time.time() - start:.0f} s", flush=True)

    write(chosen.target, environment(), found)
    if not chosen.no_cuda:
        for number, (place, result) in enumerate(patiently(on_cuda, found, WORKERS, chosen.seconds)):
            found[place].cuda = result
            if number % 100 == 0:
                print(f"{number} on CUDA after {time.time() - start:.0f} s", flush=True)
                write(chosen.target, environment(), found)
    write(chosen.target, environment(), found)
    for provider in ("cpu", "cuda"):
        results = [getattr(case, provider) for case in found]
        kept = sum(isinstance(result, list) for result in results)
        print(f"{provider}: {kept} with results, {sum(result == 'no kernel' for result in results)} without a kernel")
        for case, result in zip(found, results, strict=True):
            if isinstance(result, str) and result not in ("no kernel", "", "no such provider"):
                types = [tensor.type for tensor in case.runs[0] if tensor is not None]
                print(f"  {case.operator} {types[0]} {case.form}: {result}")


if __name__ == "__main__":
    main()
