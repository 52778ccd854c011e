"""The fused model beside the original while its kernels are compiled: what is found is what is found afterwards.

Every model runs in ONNX Runtime's CPU provider; a stand-in says what a compiler makes of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import parse
from numpy.typing import NDArray
from onnx import numpy_helper
from test_first_run import first_run as one_first_run
from test_spills import LONG, Said, planned

from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.schedules import Kernel
from onnxfuse.verifying import first_run, foreseen, whole_runs
from onnxfuse.verifying.bounds import Bounds, OutOfTimeError, UntilEnded, run_bytes
from onnxfuse.verifying.capture import GROUP_BYTES
from onnxfuse.verifying.foreseen import Foreseeing, Foreseen, Models, foreseeing, without_kernels

Array = NDArray[Any]

MODEL = """g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) {
  a = Exp(x) b = Neg(a) c = MatMul(b, w) d = Tanh(c) e = Neg(d) f = MatMul(e, w) h = Softmax(f) y = Neg(h) }"""


class Refusing(Said):
    """Of kernels in whose names there is so much it says that they do not compile."""

    def figures(self, kernels: Any) -> Any:
        found = super().figures(kernels)
        return [KernelError("no") if any(part in kernel.source for part in self.spilled) else figures
                for kernel, figures in zip(kernels, found, strict=True)]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether what was foreseen held, each time that it was asked for; it is begun for small models too."""
    found: list[bool] = []
    real = Foreseeing.of

    def noted(self: Foreseeing, *given: Any) -> Foreseen | None:
        found.append((seen := real(self, *given)) is not None)
        return seen

    for module in (first_run, foreseen):
        monkeypatch.setattr(module, "processors", lambda: 4)
    monkeypatch.setattr(first_run, "BESIDE_FLOPS", 1)
    monkeypatch.setattr("onnxfuse.delivery.find_runner", lambda **_: None)
    monkeypatch.setattr(Foreseeing, "of", noted)
    yield found


def fused(compiler: Said, monkeypatch: pytest.MonkeyPatch, tell: Callable[..., None] = lambda *_: None,
          **more: Any) -> Optimised:
    monkeypatch.setattr("onnxfuse.pipeline.read_back", lambda *_: (compiler, ()))
    given: dict[str, Any] = {"least_gain": 0.0, "dims": {"n": 16}, "target": "H100", "compile": True}
    return optimise(parse(MODEL), Options(**{**given, "database": False, **more}), tell)


def test_nothing_is_compared_again(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    stages: dict[str, None] = {}
    seen = fused(Said({}), monkeypatch, lambda stage, *_: stages.setdefault(stage))
    assert used == [True] and "comparing with the original" not in stages and seen.foreseen is None
    monkeypatch.setattr(foreseen, "processors", lambda: 1)
    stages.clear()
    later = fused(Said({}), monkeypatch, lambda stage, *_: stages.setdefault(stage))
    assert used == [True] and "comparing with the original" in stages
    assert later.verification == seen.verification and later.model == seen.model
    assert later.verification is not None and later.verification.passed and len(later.verification.runs) == 3


def test_a_plan_that_the_compiler_changes(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model was not foreseen, and is compared when it is there."""
    made = fused(Refusing({"expf": 1}), monkeypatch)
    assert used == [False] and made.verification is not None and made.verification.passed
    assert len(made.plan.fusions) < len(fused(Said({}), monkeypatch).plan.fusions) and used == [False, True]


def test_a_kernel_that_the_compiler_changes(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are what they were."""
    plain = planned(LONG, verify=True, compile=False)
    monkeypatch.setattr("onnxfuse.pipeline.read_back", lambda *_: (Said({"_x": 1000}), ()))
    made = planned(LONG, verify=True, compile=True)
    assert made.plan.fusions[0].kernel.plan != plain.plan.fusions[0].kernel.plan
    assert used == [True] and made.verification is not None and made.verification.passed


def held(model: onnx.ModelProto, of: Optimised) -> bool:
    """Whether what was foreseen of one model holds for another."""
    return seen_of(of.loaded.proto, of).of(of.loaded.proto, model, Bounds()) is not None


def seen_of(original: onnx.ModelProto, of: Optimised) -> Foreseeing:
    """What was foreseen of a fused model of an original."""
    models: Future[Models | None] = Future()
    models.set_result(Models(original, without_kernels(of.model)))
    found: Future[Foreseen | None] = Future()
    found.set_result(Foreseen("", whole_runs.WholeComparison([]), ()))
    return Foreseeing(models, found, UntilEnded())


@pytest.fixture
def model() -> Optimised:
    return optimise(parse(MODEL), Options(verify=False, least_gain=0.0, dims={"n": 16}, target="H100", database=False))


def test_what_differs_in_kernels_alone(model: Optimised) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(model.model)
    node = next(node for node in other.graph.node if node.domain == "onnxfuse")
    function = next(function for function in other.functions if function.name == node.op_type)
    node.op_type = function.name = "another"
    assert held(other, model)
    del node.attribute[:]
    assert held(other, model)


def test_what_differs_in_more(model: Optimised) -> None:
    """In what a function does, in which node has which function, in what a node reads, in a weight, in the original."""
    assert held(model.model, model)
    made = [onnx.ModelProto() for _ in range(3)]
    for each in made:
        each.CopyFrom(model.model)
    first, second, third = made
    first.functions[0].node[-1].op_type = "Abs"
    fused_nodes = [node for node in second.graph.node if node.domain == "onnxfuse"]
    one, two = fused_nodes[0], next(node for node in fused_nodes if node.op_type != fused_nodes[0].op_type)
    one.op_type, two.op_type = two.op_type, one.op_type
    third.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "more"))
    assert not any(held(each, model) for each in made)
    other = parse(MODEL.replace("Tanh", "Sin"))
    assert seen_of(other, model).of(model.loaded.proto, model.model, Bounds()) is None


def test_one_that_takes_too_long(model: Optimised) -> None:
    with pytest.raises(OutOfTimeError):
        Foreseeing(Future(), Future(), UntilEnded()).of(model.loaded.proto, model.model, Bounds(seconds=0.1))
    known = seen_of(model.loaded.proto, model)
    with pytest.raises(OutOfTimeError):
        replace(known, _found=Future()).of(model.loaded.proto, model.model, Bounds(seconds=0.1))


def test_another_model_waits_for_nothing(model: Optimised) -> None:
    """What is under way of the one that was expected is ended."""
    seen = replace(seen_of(parse(MODEL.replace("Tanh", "Sin")), model), _found=Future())
    assert seen.of(model.loaded.proto, model.model, Bounds(seconds=60)) is None
    assert seen._until.options.terminate


def begun(memory: int | None, model: Optimised) -> bool:
    runner: Future[None] = Future()
    runner.set_result(None)
    with (one_first_run(model.loaded, model.ledger, Bounds()) as first,
          foreseeing(lambda: model, first, runner, Bounds(memory=memory)) as found):  # type: ignore[arg-type]
        assert first is not None
        return found is not None


def test_none_is_begun_where_memory_is_short(used: list[bool], model: Optimised) -> None:
    enough = 2 * run_bytes(model.ledger) + 3 * GROUP_BYTES
    assert begun(enough, model) and begun(None, model) and not begun(enough - 1, model)


def test_none_is_begun_where_it_gains_nothing(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processors each is the compilers'."""
    monkeypatch.setattr(foreseen, "processors", lambda: 2)
    assert fused(Said({}), monkeypatch).verification is not None and not used


def test_a_compiler_that_fails(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Said):
        def arriving(self, kernels: Any) -> Iterator[Kernel]:
            raise KernelError("the compiler fails")

    with pytest.raises(KernelError, match="the compiler fails"):
        fused(Failing({}), monkeypatch)
    assert not used


def test_a_model_that_cannot_be_foreseen(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Why is said by the comparison that follows."""
    def failing(*_: Any) -> None:
        raise VerificationError("it fails")

    real = whole_runs.WholeRuns.whole
    monkeypatch.setattr(whole_runs.WholeRuns, "whole", failing)
    monkeypatch.setattr(whole_runs.WholeRuns, "first_that_runs", lambda self, *pair: real(self, *pair, foreseen.CPU))
    made = fused(Said({}), monkeypatch)
    assert used == [False] and made.verification is not None and made.verification.passed
