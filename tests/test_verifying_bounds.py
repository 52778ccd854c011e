"""Models that run for ever, or hold more than there is: verification ends, and says what it left out."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, parse, run
from emulated import EmulatedRunner
from numpy.typing import NDArray
from onnx import TensorProto, helper

import onnxfuse
from onnxfuse.graph import from_proto
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying import bounds, verify
from onnxfuse.verifying.bounds import Beside, Bounds, OutOfMemoryError, OutOfTimeError
from onnxfuse.verifying.sharing import sharing

LONG = 30.0
"""Seconds that nothing here takes on a busy machine, and an endless run does."""


def endless() -> onnx.ModelProto:
    """Pointwise nodes before and in a Loop without a trip count whose condition stays true."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["more"], ["again"]), helper.make_node("Neg", ["s"], ["t"])], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("more", TensorProto.BOOL, []),
         helper.make_tensor_value_info("s", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("again", TensorProto.BOOL, []),
         helper.make_tensor_value_info("t", TensorProto.FLOAT, ["n"])])
    model = parse("g (float[n] x) => (float[n] y) { e = Exp(x) a = Neg(e) y = Identity(a) }")
    model.graph.initializer.append(helper.make_tensor("true", TensorProto.BOOL, [], [True]))
    model.graph.node[-1].CopyFrom(helper.make_node("Loop", ["", "true", "a"], ["y"], body=body))
    return model


def fused(model: onnx.ModelProto) -> Optimised:
    return optimise(model, Options(verify=False, least_gain=0.0))


def test_a_loop_without_an_end() -> None:
    start = time.monotonic()
    result = onnxfuse.optimize(endless(), verify_seconds=0.5, compile=False, least_gain=0.0)
    assert time.monotonic() - start < LONG
    assert len(result.report.fusions) == 2
    told = result.report.verification
    assert told["status"] == "not run"
    assert told["summary"] == "graph checked, not run (Verification was ended after 0.5 s.), kernels not run"
    assert [node["verdict"] for node in told["nodes"]] == ["not run"] * 2


def test_the_command_says_so_and_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(endless(), path)
    result = run("optimize", path, "--verify-seconds", "0.5", "--least-gain", "0", "--json")
    assert result.exit_code == 0, result.output
    assert "Verification was ended after 0.5 s." in json.loads(result.output)["verification"]["summary"]
    assert (tmp_path / "model.fused.onnx").is_file()


def test_a_run_that_does_not_listen_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "GRACE", 0.05)
    start = time.monotonic()
    with pytest.raises(OutOfTimeError, match=r"ended after 0\.05 s"):
        Bounds(0.05).run(lambda options: time.sleep(2))
    assert time.monotonic() - start < 1.5


def test_what_a_run_raises_is_raised() -> None:
    def work(options: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Bounds(LONG).run(work)
    assert Bounds(LONG).run(lambda options: 7) == 7


class Slow(EmulatedRunner):
    """Takes half a second for every kernel."""

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]],
               variant: int | None) -> list[NDArray[Any]]:
        time.sleep(0.5)
        return super().kernel(node, model, feeds, variant)


def test_nodes_that_no_time_is_left_for() -> None:
    subject = fused(parse(f"""g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) {{
        {' '.join(f'e{i} = Exp({"x" if i == 0 else f"m{i - 1}"}) n{i} = Neg(e{i}) m{i} = MatMul(n{i}, w)'
                  for i in range(3))} y = Identity(m2) }}"""))
    result = verify(subject, Slow(), bounds=Bounds(1.5))
    verdicts = [node.verdict for node in result.nodes]
    assert verdicts[0] == "passed" and verdicts[-1] == "not run", result.text()
    assert result.passed and not result.kernels_run
    assert result.nodes[-1].message == "Verification was ended after 1.5 s."
    assert f"{verdicts.count('not run')} not run" in result.summary
    assert any(note.startswith("Nodes, or some of their inputs, were left out in run 1") for note in result.notes)


HUGE = "g (float[100000, 100000] x) => (float[100000, 100000] y) { e = Exp(x) y = Neg(e) }"


def test_sizes_that_no_memory_holds() -> None:
    """40 GB each."""
    result = verify(fused(parse(HUGE)), EmulatedRunner(), bounds=Bounds(memory=1 << 30))
    assert result.whole.identical is None and result.passed
    assert result.summary.startswith("graph checked, not run (A run would hold 160.0 GB, and may hold 1.1 GB here.")
    assert {node.verdict for node in result.nodes} == {"not run"}


def test_sizes_that_may_be_smaller() -> None:
    """What was planned for is 800 MB; the runs are of less."""
    subject = optimise(parse(CHAIN), Options(verify=False, dims={"batch": 50_000}))
    result = verify(subject, bounds=Bounds(memory=100 << 20))
    assert result.whole.identical and result.runs[0].sizes["batch"] < 10_000, result.text()


@pytest.mark.parametrize("memory", [1 << 20, 60 << 20])
def test_memory_that_a_run_just_does_not_have(memory: int) -> None:
    """Wherever it is that it ends."""
    result = verify(optimise(parse(CHAIN), Options(verify=False, dims={"batch": 50_000})), bounds=Bounds(memory=memory))
    assert result.whole.identical or "memory" in result.whole.message, result.text()


def test_threads_that_start_where_no_memory_is_left() -> None:
    """Not as many as there are stacks to use again, nor as many as there is room for."""
    limit = Bounds(memory=1 << 20)
    with limit.within_memory():
        within = resource.getrlimit(resource.RLIMIT_DATA)
        many = [Beside(lambda number=number: number) for number in range(40)]
        assert resource.getrlimit(resource.RLIMIT_DATA) == within
    assert [each.result() for each in many] == list(range(40)) and within[0] != resource.RLIM_INFINITY
    with pytest.raises(ZeroDivisionError):
        Beside(lambda: 1 // 0).result()


def test_sizes_that_show_in_a_run_alone() -> None:
    """A tensor of as many elements as an input says, 1 GB here."""
    model = parse("g (int64[1] n) => (float[k] y) { e = ConstantOfShape(n) y = Neg(e) }")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = Bounds(memory=300 << 20)
    with limit.within_memory(), sharing(from_proto(model), model, limit) as (original, _):
        session = original.session()
        assert session.run(None, {"n": np.array([9])})[0].shape == (9,)
        with pytest.raises(Exception, match=r"allocate|bad_alloc") as caught:
            session.run(None, {"n": np.array([1 << 28])})
        assert bounds.is_lack_of_memory(caught.value)
        with pytest.raises(MemoryError):
            np.ones(1 << 27)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_fused_model_is_not_wrong_because_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run has its outputs in memory when the second begins."""
    import onnxfuse.verifying.whole as whole

    real, runs = whole.run_model, []

    def scarce(*arguments: Any) -> list[NDArray[Any]]:
        runs.append(arguments)
        if len(runs) > 1:
            raise OutOfMemoryError
        return real(*arguments)

    monkeypatch.setattr(whole, "run_model", scarce)
    result = verify(fused(parse(CHAIN)))
    assert result.passed and result.whole.identical is None
    assert "more memory than it may hold" in result.summary


def test_what_is_free() -> None:
    free = bounds.available_memory()
    assert free is not None and free > 0
    assert Bounds.of(0).seconds is None and Bounds.of(5).memory == pytest.approx(bounds.SHARE * free, rel=0.5)
