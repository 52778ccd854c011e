"""The standard's own test cases, which onnx brings along: every model fuses without a crash, computes what it computed,
and where it becomes one kernel as a whole, the kernel gives the results that the standard expects.

CI looks at one case of twenty, ``make test-long`` at all of them (``--every 1``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from emulator import prepare
from onnx import numpy_helper
from plain_session import session
from reference import FLOATS, difference

from onnxfuse.errors import ModelError
from onnxfuse.lowering.launch import DOMAIN
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.verifying.reference import formal_names

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
CASES = 2000
"""Cases that there are, about."""

CHUNK = 12
"""Cases of one test, whose kernels are compiled together."""

LENGTH = 4096
"""Longest reduction in the cases."""

SLACK = 8.0
"""The expected results were computed in the type itself, in steps that round."""


@cache
def cases() -> tuple[Any, ...]:
    """All cases, by name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases overflow on purpose
        found = [case for kind in KINDS for case in load_model_tests(kind=kind)]
    return tuple(sorted(found, key=lambda case: case.name))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without the cases themselves, which take seconds in every process that asks for them: of some of them, only one
    does."""
    if "chunk" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        count = -(-CASES // (every * CHUNK))
        marks = [pytest.mark.xdist_group("standard-cases")] if every > 1 else []
        metafunc.parametrize("chunk", [
            pytest.param(slice(every * place, None, every * count), marks=marks, id=str(place))
            for place in range(count)])


def model_of(case: Any) -> onnx.ModelProto:
    return case.model if case.model is not None else onnx.load(Path(case.model_dir) / "model.onnx")


def data_of(case: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Inputs and expected outputs, as arrays where they are tensors."""
    for inputs, outputs in case.data_sets or ():
        yield [_array(value) for value in inputs], [_array(value) for value in outputs]
    graph = model_of(case).graph if case.data_sets is None else onnx.GraphProto()
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")) if case.data_sets is None else ():
        yield _read(folder, "input", graph.input), _read(folder, "output", graph.output)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(folder: Path, kind: str, declared: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    """What is no tensor is left as it is."""
    count = len(list(folder.glob(f"{kind}_*.pb")))
    contents = [(folder / f"{kind}_{number}.pb").read_bytes() for number in range(count)]
    return [numpy_helper.to_array(onnx.TensorProto.FromString(content)) if info.type.HasField("tensor_type")
            else content for content, info in zip(contents, declared, strict=False)]


def fused(case: Any) -> Optimised | None:
    """All that can be fused, whether or not it gains; None where the opset is too old."""
    try:
        return optimise(model_of(case), Options(target="H100", verify=False, least_gain=0.0, database=False))
    except ModelError as error:
        if "opset" in str(error):
            return None
        raise


def blamed(result: Optimised) -> list[str]:
    """Nodes of which onnxfuse says that they break the standard's rules, which its own cases do not."""
    return [str(refusal) for refusal in result.refusals if refusal.code == "broken-node"]


def whole(result: Optimised, nodes: Sequence[FusedNode]) -> bool:
    """Whether one fused node is all that is left."""
    left = [node for node in result.model.graph.node if node.op_type != "Constant"]
    return len(nodes) == len(left) == 1 and left[0].domain == DOMAIN


def test_cases(chunk: slice) -> None:
    chosen = cases()[chunk]
    assert chosen
    made = [(case, result, list(read_fused(result.model)))
            for case in chosen if (result := fused(case)) is not None]
    prepare(list({node.source: None for _, _, nodes in made for node in nodes}))
    failures = [f"{case.name}: {failure}" for case, result, nodes in made
                for failure in (*blamed(result), *differences(case, result), *errors(case, result, nodes))]
    assert not failures, "\n".join(failures)


def differences(case: Any, result: Optimised) -> Iterator[str]:
    """Outputs in which the fused model differs from the original where no kernel runs."""
    before, after = session(result.loaded.proto), session(result.model)
    if before is None:
        return
    if after is None:
        yield "the fused model has no session"
        return
    for inputs, _ in data_of(case):
        if not all(isinstance(value, np.ndarray) for value in inputs):
            continue
        feeds = dict(zip((value.name for value in before.get_inputs()), inputs, strict=True))
        try:
            wanted = before.run(None, feeds)
        except Exception:  # the case is for another opset's meaning, or the provider lacks it
            continue
        for output, a, b in zip(before.get_outputs(), wanted, after.run(None, feeds), strict=True):
            if isinstance(a, np.ndarray) and a.dtype != object and (a.dtype, a.shape, a.tobytes()) != (
                    b.dtype, b.shape, b.tobytes()):
                yield f"'{output.name}' changed"


def errors(case: Any, result: Optimised, nodes: Sequence[FusedNode]) -> Iterator[str]:
    """Outputs that a kernel computes otherwise than the standard expects."""
    if not whole(result, nodes):
        return
    (node,) = nodes
    graph = result.loaded.proto.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    names = [value.name for value in graph.output]
    (call,) = (each for each in result.model.graph.node if each.domain == DOMAIN)
    for inputs, outputs in data_of(case):
        given = constants | dict(zip((value.name for value in graph.input), inputs, strict=False))
        feeds = {formal: given[name] for formal, name in formal_names(node).items()}
        found = EmulatedRunner().kernel(node, result.model, feeds, None)
        for array, name in zip(found, (name for name in call.output if name), strict=True):
            wanted = outputs[names.index(name)]
            kind = onnx.helper.np_dtype_to_tensor_dtype(wanted.dtype)
            exact = wanted.astype(np.float64) if kind in FLOATS else wanted
            if message := difference(array, exact, kind, length=LENGTH, slack=SLACK):
                yield f"'{name}': {message}"


@pytest.mark.xdist_group("standard-cases")
def test_many_cases_are_whole_kernels() -> None:
    """One case of 32 is enough to see some that one kernel computes."""
    made = [result for case in cases()[::32] if (result := fused(case)) is not None]
    assert sum(whole(result, list(read_fused(result.model))) for result in made) >= 8
