"""What verification does at one time, and what it does once: the original and the fused model run beside one another,
and what fused nodes read is of these runs.

Every model runs in ONNX Runtime's CPU provider; kernels run in the emulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, current_thread, main_thread
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import parse
from emulated import EmulatedRunner
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxfuse.errors import OutputError, VerificationError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.processors import processors, share, threads
from onnxfuse.verifying import Verification, capture, kernels, verify, whole, whole_runs
from onnxfuse.verifying.bounds import Bounds, OutOfMemoryError, run_bytes
from onnxfuse.verifying.evaluate import exact_options
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.sharing import Slim

Array = NDArray[Any]

LAYERS = """g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) {
  a = Exp(x) b = Neg(a) c = MatMul(b, w) d = Tanh(c) e = Neg(d) f = MatMul(e, w) h = Exp(f) y = Neg(h) }"""
COMPUTED = 2
"""What fused nodes read of it that no input is."""

TABLE = """g (int64[n, 6] ids) => (float[n, 6, 4] y) {
  f = Cast <to = 1> (ids) t = MatMul(f, same) k = Cast <to = 7> (t) x = Gather(table, k) e = Exp(x) y = Neg(e) }"""
"""Takes two ids alone, of which nothing tells."""

ROOT = """g (float[n, 8] x) => (float[n, 8] y) {
  one = Constant <value_float = 1.0> () s = Mul(x, x) d = Sub(one, s) r = Sqrt(d) l = Log(r) y = Neg(l) }"""
"""Of floats up to one, not those that are tried first."""


def fused(model: onnx.ModelProto, **dims: int) -> Optimised:
    return optimise(model, Options(verify=False, least_gain=0.0, dims=dims, target="H100", database=False))


def table() -> onnx.ModelProto:
    model = parse(TABLE)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 4), np.float32), "table"))
    model.graph.initializer.append(numpy_helper.from_array(np.eye(6, dtype=np.float32), "same"))
    return model


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many results each run of a model gave."""
    found: list[int] = []
    real = capture.run_model

    def counted(*arguments: Any) -> list[Array]:
        results = real(*arguments)
        found.append(len(results))
        return results

    monkeypatch.setattr(capture, "run_model", counted)
    monkeypatch.setattr(whole, "run_model", counted)
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Array]]:
    """What nodes were verified on, by their names and what the inputs are called."""
    found: dict[str, dict[str, Array]] = {}
    real = NodeVerifier.verify

    def noted(self: NodeVerifier, node: Any, feeds: Mapping[str, Array], label: str, *more: Any) -> Any:
        found[f"{node.name} {label}"] = dict(feeds)
        return real(self, node, feeds, label, *more)

    monkeypatch.setattr(NodeVerifier, "verify", noted)
    return found


def same(one: dict[str, dict[str, Array]], other: dict[str, dict[str, Array]]) -> bool:
    return one.keys() == other.keys() and all(
        feeds.keys() == other[name].keys() and all(
            array.dtype == other[name][formal].dtype and np.array_equal(array, other[name][formal])
            for formal, array in feeds.items())
        for name, feeds in one.items())


def test_no_run_is_made_for_what_kernels_read(given: list[int], read: dict[str, dict[str, Array]],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bit for bit what a run of the original gives."""
    subject = fused(parse(LAYERS), n=16)
    result = verify(subject, EmulatedRunner())
    assert result.passed and result.kernels_run and len(result.runs) == 3, result.text()
    assert given == [1, 1 + COMPUTED] * len(result.runs)
    ours = dict(read)
    read.clear()
    given.clear()
    monkeypatch.setattr(whole_runs.WholeRuns, "_given", lambda self, bounds: None)
    assert verify(subject, EmulatedRunner()) == result
    assert len(given) == 3 * len(result.runs) and same(ours, read)


@pytest.mark.parametrize("text", ["without", "inputs", "memory"])
def test_values_that_nobody_needs_or_has_memory_for(text: str, given: list[int],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """No runner; the user's inputs, which the kernels' device runs; a bound that a run with these values may pass."""
    subject = fused(parse(LAYERS), n=16)
    rng = np.random.default_rng(0)
    inputs = {"x": rng.random((16, 64), np.float32), "w": rng.random((64, 64), np.float32)}
    runner = None if text == "without" else EmulatedRunner()
    memory = run_bytes(subject.ledger) + capture.GROUP_BYTES - 1 if text == "memory" else None
    result = verify(subject, runner, inputs if text == "inputs" else None, bounds=Bounds(memory=memory))
    assert result.passed and given[:2] == [1, 1]
    assert len(given) == (2 if text == "without" else 3) * len(result.runs)


def test_values_that_are_too_many_are_run_for(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first and third run fit, of the second no more."""
    held = 20 * 64 * 4 * COMPUTED
    monkeypatch.setattr(whole_runs, "GROUP_BYTES", held)
    result = verify(fused(parse(LAYERS), n=16), EmulatedRunner())
    assert result.passed and result.kernels_run
    assert [run.sizes["n"] for run in result.runs] == [16, 17, 3] and len(given) == 2 * 3 + 1


def test_the_fused_model_as_it_is_decides(given: list[int], read: dict[str, dict[str, Array]],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it gives something else with further outputs it runs without, and kernels read what the original has."""
    subject = fused(parse(LAYERS), n=16)
    result = verify(subject, EmulatedRunner())
    ours = dict(read)
    read.clear()
    real = whole.run_model

    def off(*arguments: Any) -> list[Array]:
        results = real(*arguments)
        return results if len(results) == 1 else [array + np.float32(1) for array in results]

    monkeypatch.setattr(whole, "run_model", off)
    assert verify(subject, EmulatedRunner()) == result and same(ours, read)


def test_further_outputs_that_the_runtime_refuses(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = fused(parse(LAYERS), n=16)
    result = verify(subject, EmulatedRunner())
    real = capture.read_first
    monkeypatch.setattr(whole_runs, "read_first", lambda *known: {**real(*known), "nobody": 1})
    given.clear()
    assert verify(subject, EmulatedRunner()) == result and given[:2] == [1, 1]


def test_runs_with_further_outputs_that_fail(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = fused(parse(LAYERS), n=16)
    result = verify(subject, EmulatedRunner())
    real = whole.run_model

    def lacking(*arguments: Any) -> list[Array]:
        results = real(*arguments)
        if len(results) > 1:
            raise OutOfMemoryError
        return results

    monkeypatch.setattr(whole, "run_model", lacking)
    assert verify(subject, EmulatedRunner()) == result


def besides(monkeypatch: pytest.MonkeyPatch, memory: int | None = None) -> Verification:
    """Of a model of which every run waits until the other model's has begun, for a second at most."""
    both = Barrier(2, timeout=1)
    real = capture.run_model

    def waiting(*arguments: Any) -> list[Array]:
        both.wait()
        return real(*arguments)

    monkeypatch.setattr(whole_runs, "BESIDE_FLOPS", 0)
    monkeypatch.setattr(whole_runs, "processors", lambda: 4)
    monkeypatch.setattr(whole, "run_model", waiting)
    return verify(fused(parse(LAYERS), n=16), EmulatedRunner(), bounds=Bounds(memory=memory))


def test_both_models_run_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = verify(fused(parse(LAYERS), n=16), EmulatedRunner())
    assert besides(monkeypatch) == wanted


def test_one_model_after_the_other_where_processors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_runs, "BESIDE_PROCESSORS", 5)
    with pytest.raises(Exception, match=r"^$"):
        besides(monkeypatch)


@pytest.mark.parametrize(("files", "wanted"), [
    ({"cpu.max": "1600000 100000\n"}, 16), ({"cpu.max": "max 100000\n"}, None), ({}, None),
    ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None)])
def test_a_containers_share_of_the_machine(files: dict[str, str], wanted: float | None, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions have no more threads than that."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert share(tmp_path) == wanted
    monkeypatch.setattr("onnxfuse.processors._FOLDER", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    processors.cache_clear()
    assert processors() == (96 if wanted is None else round(wanted))
    assert threads() == (0 if wanted is None else processors()) == exact_options().intra_op_num_threads
    processors.cache_clear()


def test_one_model_after_the_other_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    once = run_bytes(fused(parse(LAYERS), n=16).ledger)
    with pytest.raises(Exception, match=r"^$"):  # the barrier's: the original waits alone
        besides(monkeypatch, 2 * once + 2 * capture.GROUP_BYTES - 1)


def test_sizes_that_a_run_alone_shows() -> None:
    """Nothing tells before it what runs of such a model hold."""
    bounds = Bounds(memory=1 << 40)
    assert bounds.holds(fused(parse(LAYERS), n=16).ledger, 2)
    unknown = fused(parse("g (int64[1] n) => (float[k] y) { e = ConstantOfShape(n) y = Neg(e) }"))
    assert not bounds.holds(unknown.ledger, 1) and Bounds().holds(unknown.ledger, 2)


@pytest.mark.parametrize("model", [parse(LAYERS), table(), parse(ROOT)], ids=["layers", "table", "root"])
def test_what_comes_of_it_is_the_same(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the original refuses what was tried first, and the fused model with it, or gives no numbers then."""
    subject = fused(model, n=16)
    wanted, plain = verify(subject, EmulatedRunner()), verify(subject)
    monkeypatch.setattr(whole_runs, "BESIDE_FLOPS", 0)
    monkeypatch.setattr(whole_runs, "processors", lambda: 4)
    assert verify(subject, EmulatedRunner()) == wanted and wanted.passed and len(wanted.runs) == 3
    assert verify(subject) == plain and plain.passed


class Compiling(EmulatedRunner):
    """What is prepared is ready once a model has ``begun`` to run, and a kernel has: it waits a second for each at
    most."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.waited, self.ran, self.beside, self.ready = Event(), False, Event(), False, False

    def prepare(self, model: onnx.ModelProto) -> None:
        self.waited = self.begun.wait(1)
        self.beside = self.ran.wait(1)
        self.ready = True

    def kernel(self, *given: Any) -> list[Array]:
        self.ran.set()
        return super().kernel(*given)


def prepared(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Compiling:
    """The runner that a verification ran kernels on."""
    runner, real = Compiling(), capture.run_model

    def running(*arguments: Any) -> list[Array]:
        runner.begun.set()
        return real(*arguments)

    monkeypatch.setattr(whole, "run_model", running)
    result = verify(fused(parse(LAYERS), n=16), runner, **given)
    assert result.passed and result.kernels_run and runner.ready
    return runner


def test_kernels_are_compiled_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = prepared(monkeypatch)
    assert runner.waited and runner.beside


def test_what_cannot_be_prepared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's text that cannot be dumped, say."""
    def failing(self: Compiling, model: onnx.ModelProto) -> None:
        raise OutputError("there is no room")

    monkeypatch.setattr(Compiling, "prepare", failing)
    with pytest.raises(OutputError, match="there is no room"):
        verify(fused(parse(LAYERS), n=16), Compiling())


def test_kernels_are_compiled_before_runs_that_may_need_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that gets none ends the program.  Of the user's inputs nothing is known."""
    once = run_bytes(fused(parse(LAYERS), n=16).ledger)
    assert not prepared(monkeypatch, bounds=Bounds(memory=2 * once + 3 * capture.GROUP_BYTES - 1)).waited
    assert not prepared(monkeypatch, inputs={"x": np.ones((4, 64), np.float32)}).waited


class OnDevice(EmulatedRunner):
    """Has memory for ``room`` bytes beside kernels, the first of which waits until the original has begun, for a second
    at most."""

    def __init__(self, room: int = 1 << 40) -> None:
        super().__init__()
        self.room, self.begun, self.waited, self.asked = room, Event(), False, 0

    def has_room(self, needed: int) -> bool:
        self.asked = needed
        return needed <= self.room

    def kernel(self, *given: Any) -> list[Array]:
        self.waited = self.waited or self.begun.wait(0.0 if self.runs else 1.0)
        return super().kernel(*given)


def on_device(monkeypatch: pytest.MonkeyPatch, runner: OnDevice, failing: int = 0, **given: Any
              ) -> tuple[Verification, int]:
    """What is verified where the CPU stands in for the GPU, and how often the original ran there, first in vain."""
    real, begun = kernels.results_on_device, []

    def running(*arguments: Any) -> list[list[Any]]:
        runner.begun.set()
        begun.append(arguments)
        if len(begun) <= failing:
            raise VerificationError("there is no memory")
        return real(*arguments)

    monkeypatch.setattr(kernels, "CUDA", "CPUExecutionProvider")
    monkeypatch.setattr(kernels, "results_on_device", running)
    result = verify(fused(parse(LAYERS), n=16), runner, **given)
    assert result.passed and result.kernels_run
    return result, len(begun)


def test_the_original_runs_on_the_device_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes of it is the same as behind them, where memory is short, or as on the second try."""
    runner, short, after = OnDevice(), OnDevice(), OnDevice()
    result, count = on_device(monkeypatch, runner)
    assert runner.waited and count == 1 and [entry.output for entry in result.whole.device] == ["y"]
    assert runner.asked == run_bytes(fused(parse(LAYERS), n=16).ledger)
    short.room = runner.asked - 1
    assert on_device(monkeypatch, short) == (result, 1) and not short.waited
    monkeypatch.undo()
    assert on_device(monkeypatch, after, failing=1) == (result, 2) and after.waited


def test_the_session_with_kernels_is_made_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, where it can be; where it fails it is made again behind them, and what fails then is told."""
    real, made = Slim.fused_session, list[bool]()

    def making(self: Slim, providers: Any) -> Any:
        made.append(current_thread() is main_thread())
        if len(made) <= failing:
            raise RuntimeError("CUDA failure 2: out of memory")
        return real(self, providers)

    monkeypatch.setattr(Slim, "fused_session", making)
    failing = 0
    result, _ = on_device(monkeypatch, OnDevice())
    assert made == [False] and result.whole.device
    made.clear()
    failing = 1
    assert on_device(monkeypatch, OnDevice())[0] == result and made == [False, True]


def test_weights_count_where_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = OnDevice()
    monkeypatch.setattr(kernels, "CUDA", "CPUExecutionProvider")
    subject = fused(table(), n=16)
    assert verify(subject, runner).passed
    assert runner.asked == run_bytes(subject.ledger) + (2 * 4 + 6 * 6) * 4


def test_a_device_that_does_not_run_the_original_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    result, count = on_device(monkeypatch, OnDevice(), failing=2)
    assert count == 2 and not result.whole.device
    assert result.notes == ("The whole model was not run with kernels: there is no memory",)


def test_the_users_inputs_have_the_device_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = OnDevice()
    result, count = on_device(monkeypatch, runner, inputs={"x": np.ones((4, 64), np.float32)})
    assert not runner.waited and count == 1 and result.whole.device


def test_a_wrong_body_is_caught_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = fused(parse(LAYERS), n=16)
    model = onnx.ModelProto()
    model.CopyFrom(subject.model)
    (tanh,) = [node for function in model.functions for node in function.node if node.op_type == "Tanh"]
    tanh.op_type = "Sigmoid"
    wrong = replace(subject, rewritten=replace(subject.rewritten, model=model))
    wanted = verify(wrong, EmulatedRunner())
    assert not wanted.whole.passed and wanted.whole.first
    monkeypatch.setattr(whole_runs, "BESIDE_FLOPS", 0)
    monkeypatch.setattr(whole_runs, "processors", lambda: 4)
    assert verify(wrong, EmulatedRunner()) == wanted
