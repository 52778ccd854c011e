"""The original's first run, made while the model is planned: what verification finds is what it finds without it.

Every model runs in ONNX Runtime's CPU provider.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, current_thread
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import parse
from numpy.typing import NDArray
from onnx import numpy_helper
from test_verifying_beside import OnDevice, table

from onnxfuse import pipeline
from onnxfuse.errors import VerificationError
from onnxfuse.graph import LoadedModel, from_proto
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.verifying import first_run as first
from onnxfuse.verifying import kernels, sharing, whole
from onnxfuse.verifying.bounds import Bounds, BoundSession, OutOfTimeError, run_bytes
from onnxfuse.verifying.capture import GROUP_BYTES
from onnxfuse.verifying.first_run import FirstRun, writing
from onnxfuse.verifying.runs import first_recipes

Array = NDArray[Any]

PLAIN = "g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) { a = MatMul(x, w) b = Exp(a) y = Neg(b) }"
BIASED = """g (float[n, 64] x, float[64, 64] w, float[64] b) => (float[n, 64] y) {
  a = Gemm(x, w, b) t = Tanh(a) e = Exp(t) y = Neg(e) }"""
"""The bias stands behind the product once it is planned, and so in the original that is compared."""
LOOP = """g (float[1024] x, int64 trips, bool go) => (float[1024] y) {
  z = Loop (trips, go, x) <body = b (int64 i, bool c, float[1024] s) => (bool d, float[1024] t)
    { d = Identity(c) t = Cos(s) }> y = Neg(z) }"""
"""As long as ``trips`` says."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FirstRun]]:
    """The runs that were begun; all are, as if they took long."""
    found: list[FirstRun] = []
    real = FirstRun.__init__

    def noted(self: FirstRun, *given: Any) -> None:
        real(self, *given)
        found.append(self)

    monkeypatch.setattr(first, "BESIDE_FLOPS", 1)
    monkeypatch.setattr(first, "processors", lambda: 2)
    monkeypatch.setattr(FirstRun, "__init__", noted)
    yield found


def fused(model: onnx.ModelProto, **more: Any) -> Optimised:
    given: dict[str, Any] = {"least_gain": 0.0, "dims": {"n": 16}, "target": "H100", "compile": False}
    return optimise(model, Options(**{**given, "database": False, **more}))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What verification ran after that."""
    found: list[str] = []
    real = whole.run_model

    def noted(session: Any, model: onnx.ModelProto, run: Any) -> list[Array]:
        found.append(f"{'fused' if model.functions else 'original'}, {run.about}")
        return real(session, model, run)

    monkeypatch.setattr(whole, "run_model", noted)
    return found


@pytest.mark.parametrize("model", [parse(PLAIN), parse(BIASED)], ids=["plain", "biased"])
def test_the_original_does_not_run_again(model: onnx.ModelProto, begun: list[FirstRun], ran: list[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = onnxruntime.InferenceSession
    monkeypatch.setattr("onnxfuse.verifying.sharing.onnxruntime.InferenceSession",
                        lambda *given, **more: made.append(real(*given, **more)) or made[-1])
    result = fused(model)
    assert len(made) == 2
    alone = [entry for entry in ran if entry.startswith("original")]
    assert len(begun) == 1 and len(alone) == 2 and len(ran) == 5, ran
    assert str(begun[0].run.about) not in " ".join(alone)
    assert result.verification is not None and result.verification.passed and result.first_run is None
    monkeypatch.setattr(first, "BESIDE_FLOPS", 10**12)
    assert fused(model).verification == result.verification and len(ran) == 11 and len(begun) == 1


def test_a_bias_that_finds_no_place(begun: list[FirstRun], ran: list[str]) -> None:
    """It was taken for apart when the run began; the original that is compared has it, and runs."""
    result = fused(parse(BIASED), least_gain=1e9)
    assert begun and result.verification is not None and result.verification.passed and not result.plan.fusions
    assert len([entry for entry in ran if entry.startswith("original")]) == len(ran) == 6


def test_inputs_that_the_original_does_not_take(begun: list[FirstRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are tried, as they are without it."""
    result = fused(table()).verification
    assert result is not None and result.passed and result.runs and begun
    monkeypatch.setattr(first, "BESIDE_FLOPS", 10**12)
    assert fused(table()).verification == result and len(begun) == 1


@pytest.mark.parametrize("given", [
    {"verify": False}, {"inputs": {"x": np.ones((16, 64), np.float32)}}], ids=["unverified", "users"])
def test_none_is_begun(given: dict[str, Any], begun: list[FirstRun]) -> None:
    fused(parse(PLAIN), **given)
    assert not begun


@pytest.mark.parametrize("module_setting", [("processors", lambda: 1), ("BESIDE_FLOPS", 10**12)])
def test_none_is_begun_where_it_gains_nothing(module_setting: tuple[str, Any], begun: list[FirstRun],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, *module_setting)
    fused(parse(PLAIN))
    assert not begun


def ledger(model: onnx.ModelProto, **sizes: int) -> tuple[LoadedModel, Ledger]:
    loaded = from_proto(model)
    return loaded, Ledger(load_graph(loaded), sizes)


def test_none_is_begun_where_memory_is_short(begun: list[FirstRun]) -> None:
    """What else there is meanwhile has room beside it."""
    weighty = parse(PLAIN.replace(", float[64, 64] w)", ")"))
    weighty.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    loaded, at = ledger(weighty, n=16)
    enough = run_bytes(at) + 3 * GROUP_BYTES + 64 * 64 * 4
    for memory, wanted in ((enough, True), (enough - 1, False)):
        with first_run(loaded, at, Bounds(memory=memory)) as run:
            assert (run is not None) == wanted
    unknown, at = ledger(parse("g (int64[1] n) => (float[k] y) { e = ConstantOfShape(n) y = Neg(e) }"))
    with first_run(unknown, at, Bounds(memory=1 << 50)) as run:
        assert run is None


def test_another_model_does_not_have_its_results(begun: list[FirstRun]) -> None:
    loaded, at = ledger(parse(PLAIN), n=16)
    other = parse(PLAIN.replace("Neg", "Abs"))
    recipe = next(iter(first_recipes(at)))
    with first_run(loaded, at, Bounds()) as run:
        assert run is not None
        own, stranger = (run.weights.slim(model, None) for model in (loaded.proto, other))
        outputs = run.outputs(recipe, own)
        assert outputs is not None and outputs[1][0].shape == (16, 64) and isinstance(run.session(own), BoundSession)
        assert run.outputs(recipe, stranger) is None and run.session(stranger) is None
        assert run.outputs(next(iter(first_recipes(Ledger(at.graph, {"n": 8})))), own) is None


@contextmanager
def first_run(loaded: LoadedModel, *given: Any) -> Iterator[FirstRun | None]:
    """One of a model as it is."""
    with writing(loaded) as file:
        assert file is not None
        yield file.run(lambda slim: slim, *given)


def started(runner: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(runner)
    return future


@pytest.mark.parametrize("text", [PLAIN, PLAIN.replace("MatMul(x, w)", "MatMul(w, x)")], ids=["runs", "fails"])
def test_the_device_runs_what_the_cpu_ran(text: str, begun: list[FirstRun]) -> None:
    """That model and that run alone, and nothing that the CPU refuses, where there is room."""
    (_, at), given = ledger(parse(PLAIN), n=16), from_proto(parse(text))
    runner, short = OnDevice(), OnDevice(room=0)
    futures = started(runner), started(short), started(None), None
    for there, has in zip(futures, (text == PLAIN, False, False, False), strict=True):
        with first_run(given, at, Bounds(), there) as run:
            assert run is not None
            own, stranger = (run.weights.slim(parse(each), None) for each in (text, PLAIN.replace("Neg", "Abs")))
            found = run.on_device(own, [run.run])
            assert (found is not None) == has
            if found is not None:
                outputs = run.outputs(run.recipe, own)
                assert outputs is not None and np.array_equal(found[0][0], outputs[1][0])
                assert run.on_device(stranger, [run.run]) is None and run.on_device(own, [replace(run.run)]) is None
                assert run.on_device(own, [run.run, run.run]) is None
    assert [each.asked > 0 for each in (runner, short)] == [text == PLAIN] * 2


def test_the_device_does_not_run_it_again(begun: list[FirstRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is found is what is found without that."""
    runs: list[Any] = []
    real = kernels.results_on_device
    monkeypatch.setattr(kernels, "CUDA", "CPUExecutionProvider")
    monkeypatch.setattr(kernels, "results_on_device", lambda *given: (runs.append(given), real(*given))[1])
    monkeypatch.setattr("onnxfuse.delivery.find_runner", lambda **_: OnDevice())
    result = fused(parse(BIASED)).verification
    assert result is not None and result.passed and [entry.output for entry in result.whole.device] == ["y"]
    assert begun and not runs
    monkeypatch.setattr(first, "BESIDE_FLOPS", 10**12)
    assert fused(parse(BIASED)).verification == result and len(runs) == 1


def endless(begun: list[FirstRun], monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedModel, Ledger]:
    """A model that loops for half a minute on the inputs that are made."""
    real = first.first_recipes

    def looping(at: Ledger) -> Iterator[Any]:
        recipe = next(iter(real(at)))
        monkeypatch.setattr(type(recipe), "make", lambda *_: made)
        return iter([recipe])

    loaded, at = ledger(parse(LOOP))
    made = next(iter(first_recipes(at))).make(at.graph)
    made.feeds["trips"] = np.array(3_000_000)  # type: ignore[index]
    made.feeds["go"] = np.array(True)  # type: ignore[index]
    monkeypatch.setattr(first, "first_recipes", looping)
    monkeypatch.setattr(Bounds, "holds", lambda *_: True)
    return loaded, at


def test_a_run_that_does_not_end(begun: list[FirstRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it waits as long as there is time; it ends with what it was begun for, also where that fails."""
    loaded, at = endless(begun, monkeypatch)
    start = time.monotonic()
    with first_run(loaded, at, Bounds()) as run:
        assert run is not None
        slim = run.weights.slim(loaded.proto, None, Bounds(seconds=0.2))
        with pytest.raises(OutOfTimeError):
            run.session(slim)
    with pytest.raises(VerificationError, match="planning fails"), first_run(loaded, at, Bounds()):
        raise VerificationError("planning fails")
    assert time.monotonic() - start < 20


def test_it_runs_beside_planning(begun: list[FirstRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning waits here until it has run, which it does in a thread of its own."""
    done, threads = Event(), set[str]()
    real = first.run_model

    def noted(*given: Any) -> list[Array]:
        results = real(*given)
        threads.add(current_thread().name)
        done.set()
        return results

    monkeypatch.setattr(first, "run_model", noted)
    chosen = pipeline._Optimisation._chosen
    waited: list[bool] = []

    def waiting(*given: Any) -> Any:
        waited.append(done.wait(20))
        return chosen(*given)

    monkeypatch.setattr(pipeline._Optimisation, "_chosen", waiting)
    assert fused(parse(PLAIN)).verification is not None
    assert waited == [True] and threads == {"onnxfuse-first-run_0"}


def test_threads_write_weights_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that wrote to one end of the file would write over one another."""
    inside: list[int] = []
    most: list[int] = []
    real = sharing._slim

    def slow(*given: Any) -> onnx.ModelProto:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        result = real(*given)
        inside.pop()
        return result

    monkeypatch.setattr(sharing, "_slim", slow)
    models = []
    for value in range(4):
        models.append(parse(PLAIN.replace(", float[64, 64] w)", ")")))
        weights = np.full((64, 64), value / 64, np.float32)
        models[-1].graph.initializer.append(numpy_helper.from_array(weights, "w"))
    with sharing.Weights() as file, ThreadPoolExecutor(4) as pool:
        slims = list(pool.map(lambda model: file.slim(model, None), models))
        results = [slim.session().run(None, {"x": np.ones((1, 64), np.float32)})[0] for slim in slims]
    assert set(most) == {1}
    np.testing.assert_allclose([result[0, 0] for result in results], -np.exp(np.arange(4.0)), rtol=1e-6)
