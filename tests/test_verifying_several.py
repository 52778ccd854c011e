"""Several nodes verified at one time: what comes of it is what comes of one after the other.

Kernels run in the emulator, or ONNX Runtime's CPU provider stands in for CUDA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Barrier, Lock, current_thread, main_thread
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import parse
from emulated import EmulatedRunner, FaultyRunner
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime import Gpu
from onnxfuse.verifying import CudaRunner, NodeResult, Verification, several, verify
from onnxfuse.verifying.bounds import Bounds
from onnxfuse.verifying.capture import GROUP_BYTES, Captured

Array = NDArray[Any]

KINDS = """g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) {
  a = Exp(x) b = Neg(a) c = MatMul(b, w) d = Tanh(c) e = Abs(d) f = MatMul(e, w) h = Sigmoid(f) i = Neg(h)
  j = MatMul(i, w) k = Exp(j) y = Neg(k) }"""
"""Four nodes of three kernels: the first and the last have one."""


@pytest.fixture(scope="module")
def subject() -> Optimised:
    made = optimise(parse(KINDS), Options(verify=False, least_gain=0.0, dims={"n": 16}, target="H100", database=False))
    ops = [node.op for node in read_fused(made.model)]
    assert len(ops) == 4 and len(set(ops)) == 3 and ops[0] == ops[3]
    return made


class Several(EmulatedRunner):
    """Runs three nodes at one time; before a kernel runs it is told of that, from the node's thread."""

    workers = 3

    def __init__(self, told: Callable[[FusedNode], None] = lambda node: None) -> None:
        super().__init__()
        self._told, self._emulator = told, Lock()

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        self._told(node)
        with self._emulator:
            return super().kernel(node, model, feeds, variant)


class SeveralFaulty(FaultyRunner):
    workers = 3
    kernels = Lock()

    def kernel(self, *given: Any) -> list[Array]:
        with self.kernels:
            return super().kernel(*given)


def beside() -> bool:
    """Whether this is no thread in which nodes are verified one after the other."""
    return current_thread() is not main_thread()


def told(result: Verification) -> tuple[Any, ...]:
    return result.nodes, result.runs, result.whole, result.notes, result.text()


def test_nodes_are_verified_at_one_time(subject: Optimised) -> None:
    """Each thread waits in its first kernel until three are there."""
    met, waiting = set[str](), Barrier(3, timeout=20)

    def meet(node: FusedNode) -> None:
        assert beside()
        if node.op not in met:
            met.add(node.op)
            waiting.wait()

    runner, alone = Several(meet), EmulatedRunner()
    assert told(verify(subject, runner)) == told(verify(subject, alone))
    assert runner.runs == alone.runs and len(met) == 3


def test_what_fails_is_the_same(subject: Optimised) -> None:
    wanted = verify(subject, FaultyRunner())
    assert len(wanted.failed) == 4 and told(verify(subject, SeveralFaulty())) == told(wanted)


@pytest.mark.parametrize("error", [KernelError("no memory"), VerificationError("no memory")])
def test_what_does_not_pass_beside_others_is_verified_alone(error: Exception, subject: Optimised) -> None:
    def lacking(node: FusedNode) -> None:
        if beside():
            raise error

    wanted = verify(subject, EmulatedRunner())
    assert wanted.passed and told(verify(subject, Several(lacking))) == told(wanted)


def test_the_users_inputs_too(subject: Optimised) -> None:
    """Of which every node is verified on its own, and edges with the first of its kernel."""
    given = {"x": np.ones((4, 64), np.float32), "w": np.eye(64, dtype=np.float32)}
    wanted = verify(subject, EmulatedRunner(), given)
    assert told(verify(subject, Several(), given)) == told(wanted) and wanted.nodes[3].shared == wanted.nodes[0].node


@pytest.mark.parametrize(("more", "together"), [(0, True), (-1, False)])
def test_memory_decides_how_many(more: int, together: bool, subject: Optimised) -> None:
    """What a node reads, 32 times over, for each that may be verified beside it."""
    node = read_fused(subject.model)[0]
    batch = [Captured(node, {"x0": np.zeros(100, np.float32)}), Captured(read_fused(subject.model)[1], {})]
    asked: list[str] = []

    def verified(taken: Captured) -> Any:
        asked.append(taken.node.name)
        raise VerificationError("asked")

    bounds = Bounds(memory=3 * several.HELD * 400 + more)
    with pytest.raises(VerificationError):
        several.passed(batch, verified, Several(), bounds)
    assert (node.name in asked) is together


def test_nodes_of_one_kernel_stay_in_their_order(subject: Optimised) -> None:
    """And no two of them are verified at one time."""
    first, second, _, last = read_fused(subject.model)
    running: dict[str, int] = {}
    order: list[str] = []

    def verified(taken: Captured) -> NodeResult:
        op, name = taken.node.op, taken.node.name
        running[op] = running.get(op, 0) + 1
        assert running[op] == 1
        time.sleep(0.2)
        running[op] -= 1
        order.append(name)
        return NodeResult(name, op, "", "passed")

    batch = [Captured(node, {}) for node in (first, last, second)]
    found, ended = several.passed(batch, verified, Several(), Bounds())
    assert set(found) == {first.name, second.name, last.name} and ended is None
    assert order.index(first.name) < order.index(last.name) and order[-1] == last.name


def test_as_many_as_are_in_memory() -> None:
    """A batch ends where its nodes read more than a group of nodes may."""
    large = np.broadcast_to(np.zeros(1, np.uint8), (GROUP_BYTES // 2,))
    taken = [Captured(None, {"x0": large}) for _ in range(7)]  # type: ignore[arg-type]
    assert [len(batch) for batch in several.batches(taken, Several())] == [3, 3, 1]
    assert [len(batch) for batch in several.batches(taken, EmulatedRunner())] == [1] * 7


class OnCpu(CudaRunner):
    """The GPU's runner with the CPU provider in CUDA's place: nodes run as their functions.  The device ends when a
    kernel of ``fatal`` runs, and fails then whatever is asked of it."""

    memory = "cpu"

    def __init__(self, fatal: str = "") -> None:
        self.device, self.gpu = 0, Gpu(0, "no GPU", (9, 0), 132, (13, 0))
        self.name, self.providers = self.gpu.name, ["CPUExecutionProvider"]
        self._one_node, self._bodies = self._session, self._body_session
        self.fatal, self.living = fatal, True

    def prepare(self, model: onnx.ModelProto) -> None:
        pass

    def alive(self) -> bool:
        return self.living

    def _session(self, raw: bytes) -> Any:
        (node,) = onnx.ModelProto.FromString(raw).graph.node
        return Ending(self, super()._session(raw), node.op_type == self.fatal)


class Ending:
    """A session on a device that may end."""

    def __init__(self, runner: OnCpu, session: Any, fatal: bool) -> None:
        self._runner, self._session, self._fatal = runner, session, fatal
        self.io_binding, self.get_outputs = session.io_binding, session.get_outputs

    def run_with_iobinding(self, binding: Any) -> None:
        self._runner.living = self._runner.living and not self._fatal
        if not self._runner.living:
            raise RuntimeError("an illegal memory access was encountered")
        self._session.run_with_iobinding(binding)


def test_a_kernel_that_ends_the_device_is_known(subject: Optimised) -> None:
    """Nothing else fails, though others meet the device after that."""
    assert verify(subject, OnCpu()).kernels_run
    nodes = read_fused(subject.model)
    for place in (0, 1, 2):
        result = verify(subject, OnCpu(nodes[place].op))
        failed = [node for node in result.failed if not node.message.startswith("the kernel that it shares")]
        assert [node.op for node in failed] == [nodes[place].op], result.text()
        assert failed[0].message.endswith("a run failed: an illegal memory access was encountered")
        assert result.notes[-1].endswith(f"the GPU stopped answering when {failed[0].node} ran")
        assert {node.verdict for node in result.nodes if node.op != nodes[place].op} <= {"passed", "not run"}


def test_what_fails_behind_the_devices_end_is_no_fault(subject: Optimised) -> None:
    runner = OnCpu()
    node = read_fused(subject.model)[0]
    feeds = {f"x{place}": np.ones((4, 64), np.float32) for place in range(len(node.tensors))}
    assert runner.kernel(node, subject.model, feeds, None)
    runner.fatal = node.op
    with pytest.raises(KernelError, match="a run failed: an illegal memory access"):
        runner.kernel(node, subject.model, feeds, None)
    with pytest.raises(VerificationError, match="does not answer any more"):
        runner.kernel(node, subject.model, feeds, None)


@pytest.mark.parametrize(("ended", "error"), [(True, VerificationError), (False, KernelError)])
def test_copies_that_fail(ended: bool, error: type[Exception], subject: Optimised,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of what another kernel did, or not."""
    def failing(*_: object) -> None:
        raise RuntimeError("no copy")

    runner = OnCpu()
    runner._ended = ended
    monkeypatch.setattr(runner, "_bound", failing)
    node = read_fused(subject.model)[0]
    feeds = {f"x{place}": np.ones((4, 64), np.float32) for place in range(len(node.tensors))}
    with pytest.raises(error, match="a run failed: no copy" if not ended else "does not answer any more"):
        runner.kernel(node, subject.model, feeds, None)


def test_references_of_threads_are_their_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    runner = OnCpu()
    mine = runner._references
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: runner._references).result()
    assert mine is runner._references and other is not mine and other._known is mine._known
