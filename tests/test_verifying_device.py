"""References of the kernels' device: with them a kernel passes, and by the CPU's alone it fails.

Kernels run in the emulator, and ONNX Runtime's CPU provider stands in for CUDA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import parse
from emulated import EmulatedRunner, FaultyRunner
from numpy.typing import NDArray

from onnxfuse.errors import KernelError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime import Gpu
from onnxfuse.verifying import device_references, verify
from onnxfuse.verifying.blocks import BLOCK, MOST, sample
from onnxfuse.verifying.comparison import compared
from onnxfuse.verifying.device_arrays import DeviceArray, on_host
from onnxfuse.verifying.device_bodies import FINITE, device_body, unsuited
from onnxfuse.verifying.device_extents import DeviceExtents
from onnxfuse.verifying.device_inputs import DeviceInputs
from onnxfuse.verifying.device_references import DeviceReferences
from onnxfuse.verifying.evaluate import CPU, exact_options
from onnxfuse.verifying.extents import extents
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.reference import Reference
from onnxfuse.verifying.results import NodeResult
from onnxfuse.verifying.runner import CudaRunner

Array = NDArray[Any]

NORM = """g (float16[n, 64] x, float16[64] w) => (float16[n, 64] y) {
  t = Tanh(x) m = ReduceMean <axes = [-1], keepdims = 1> (t) c = Sub(t, m) y = Mul(c, w) }"""
X = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float16)
W = np.random.default_rng(1).standard_normal(64).astype(np.float16)
FINITE_EDGES = ["given", "zeros", "large", "tiny", "negative"]


class References(DeviceReferences):
    """The CPU provider in place of CUDA's.  As it is told it has so much memory, lacks an operator, starts no session,
    and ends the device when it is asked for so many references."""

    def __init__(self) -> None:
        super().__init__(0, "cpu")
        self.free, self.lacks, self.breaks = 1 << 34, "", False
        self.ends = 0
        self.sessions, self.probes, self.asked, self.taken = 0, 0, 0, 0

    def free_bytes(self) -> int:
        return self.free

    def start(self, raw: bytes, most: int, alone: bool) -> Any:
        assert most == self.free // device_references.SHARE
        self.probes += alone
        self.sessions += not alone
        nodes = onnx.ModelProto.FromString(raw).graph.node
        if alone and any(node.op_type == self.lacks for node in nodes):
            raise RuntimeError("nodes are assigned to the CPU")
        if self.breaks and not alone:
            raise RuntimeError("no memory")
        return onnxruntime.InferenceSession(raw, exact_options(), providers=CPU)

    def outputs(self, *given: Any) -> list[DeviceArray] | None:
        self.asked += 1
        if self.asked == self.ends:
            raise KernelError("an illegal memory access was encountered")
        result = super().outputs(*given)
        self.taken += result is not None
        return result


class OnDevice(EmulatedRunner):
    """Has references of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.references = self._references = References()
        self.gpu, self.factor = Gpu(0, "no GPU", (9, 0), 132, (13, 0)), 1.0

    def alive(self) -> bool:
        return not 0 < self.references.ends <= self.references.asked

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        if not self.alive():
            raise KernelError("an illegal memory access was encountered")
        results = super().kernel(node, model, feeds, variant)
        return [(array * self.factor).astype(array.dtype) for array in results] if self.factor != 1 else results

    exact = CudaRunner.exact  # type: ignore[assignment]
    forget = CudaRunner.forget  # type: ignore[assignment]
    _inputs = DeviceInputs(0, "cpu")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """Everything is large enough for it."""
    monkeypatch.setattr(device_references, "LEAST_ELEMENTS", 1)
    return OnDevice()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of what the CPU's references were computed for."""
    found: list[int] = []
    outputs = Reference.outputs
    monkeypatch.setattr(Reference, "outputs", lambda self, feeds: (
        found.append(sum(array.size for array in feeds.values())), outputs(self, feeds))[1])
    return found


def fused(text: str) -> tuple[Optimised, FusedNode]:
    made = optimise(parse(text), Options(verify=False, least_gain=0.0, target="H100", database=False))
    (node,) = read_fused(made.model)
    return made, node


def judged(runner: EmulatedRunner, text: str = NORM, **given: Array) -> NodeResult:
    made, node = fused(text)
    feeds = {f"x{place}": (given or {"x": X, "w": W})[name] for place, name in enumerate(node.tensors)}
    return NodeVerifier(made.model, runner).verify(node, feeds, "given")


def test_the_cpu_is_not_asked_where_the_device_agrees(runner: OnDevice, on_cpu: list[int]) -> None:
    """But of numbers that are none."""
    result = judged(runner)
    assert result.verdict == "passed" and list(result.inputs) == [*FINITE_EDGES, "not-a-number"]
    assert runner.references.asked == runner.references.taken == len(FINITE_EDGES) and len(on_cpu) == 1
    assert (runner.references.sessions, runner.references.probes) == (1, 1)
    alone = judged(EmulatedRunner())
    assert (alone.verdict, alone.inputs, alone.variants) == (result.verdict, result.inputs, result.variants)
    assert result.ratio == pytest.approx(alone.ratio) and result.where == alone.where
    assert len(on_cpu) == 2 + len(FINITE_EDGES)


def test_a_hundredth_is_caught_by_the_cpus(runner: OnDevice, on_cpu: list[int]) -> None:
    runner.factor = 1.01
    result = judged(runner)
    assert result.verdict == "failed" and runner.references.taken == 1 and len(on_cpu) == 1
    assert result.message == judged(_Faulty()).message


class _Faulty(FaultyRunner):
    """The same fault without a device."""

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        return [(array * 1.01).astype(array.dtype)
                for array in EmulatedRunner.kernel(self, node, model, feeds, variant)]


def test_a_reference_that_is_wrong_fails_no_kernel(runner: OnDevice, on_cpu: list[int],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    body = device_body

    def doubled(model: onnx.ModelProto, declared: Mapping[str, int]) -> onnx.ModelProto:
        result = body(model, declared)
        (node,) = (node for node in result.graph.node if "y0" in node.output)
        node.op_type = "Add"
        return result

    monkeypatch.setattr("onnxfuse.verifying.reference.device_body", doubled)
    assert judged(runner).verdict == "passed"
    assert runner.references.taken == len(FINITE_EDGES) and len(on_cpu) == len(FINITE_EDGES)  # zeros are zeros


@pytest.mark.parametrize(("lacks", "breaks", "sessions"), [("Tanh", False, 0), ("", True, 1)])
def test_what_the_device_cannot_run_the_cpu_does(lacks: str, breaks: bool, sessions: int, runner: OnDevice,
                                                 on_cpu: list[int]) -> None:
    """An operator that the provider lacks, found among others by trying, and a session that fails: once is enough."""
    references = runner.references
    references.lacks, references.breaks = lacks, breaks
    assert judged(runner).verdict == "passed" and len(on_cpu) == len(FINITE_EDGES) + 1
    assert references.taken == 0 and references.sessions == sessions
    kinds = len(references._known)
    assert references.probes == (1 + kinds if lacks else 1)
    assert judged(runner).verdict == "passed"
    assert references.probes == (1 + kinds if lacks else 1)


@pytest.mark.parametrize("ends", [1, 2])
def test_references_that_end_the_device_are_no_fault_of_the_kernel(ends: int, runner: OnDevice) -> None:
    """On the run's inputs, or on an edge of them."""
    runner.references.ends = ends
    result = judged(runner)
    assert result.verdict == "not run" and result.message == (
        "the original's own nodes end the device's work: an illegal memory access was encountered")


@pytest.mark.parametrize(("least", "free"), [(5 * 64 * 2 + 64 + 1, 1 << 34), (1, 8 * 4 * (5 * 64 * 2 + 64) - 1)])
def test_little_work_and_little_memory_are_the_cpus(least: int, free: int, runner: OnDevice, on_cpu: list[int],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and written decides: x, w and y."""
    monkeypatch.setattr(device_references, "LEAST_ELEMENTS", least)
    runner.references.free = free
    assert judged(runner).verdict == "passed"
    assert runner.references.sessions == 0 and len(on_cpu) == len(FINITE_EDGES) + 1
    monkeypatch.setattr(device_references, "LEAST_ELEMENTS", min(least, 5 * 64 * 2 + 64))
    runner.references.free = max(free, 8 * 4 * (5 * 64 * 2 + 64))
    assert judged(runner).verdict == "passed" and runner.references.taken == len(FINITE_EDGES)


@pytest.mark.parametrize(("text", "given"), [
    ("l = Log(x) y = Exp(l)", {"zeros"}),  # through minus infinity to zero
    ("s = Mul(x, x) e = Exp(s) y = Reciprocal(e)", {"large"}),
])
def test_what_is_not_finite_on_the_way_is_the_cpus(text: str, given: set[str], runner: OnDevice) -> None:
    """A finite result is not enough: what comes of infinity on the way to it is not the same everywhere."""
    seen: dict[str, bool] = {}
    made, node = fused(f"g (float[n, 64] x) => (float[n, 64] y) {{ {text} }}")
    reference = Reference(node, made.model)
    body = reference.device_body
    assert body is not None
    x = np.abs(X).astype(np.float32) + 0.5
    for label, array in (("given", x), ("zeros", 0 * x), ("large", 512 * x / x.max())):
        found = runner.references.outputs(body, {"x0": array}, [array.shape])
        seen[label] = found is None
        assert found is None or np.allclose(on_host(found[0]), reference.outputs({"x0": array})[0], rtol=1e-15)
        assert np.isfinite(reference.outputs({"x0": array})[0]).all()
    assert {label for label, refused in seen.items() if refused} == given


def test_inputs_of_a_run_that_are_not_finite(runner: OnDevice, on_cpu: list[int]) -> None:
    """Not tried again on edges of them."""
    x = X.copy()
    x[0, 0] = -np.inf
    assert judged(runner, x=x, w=W).verdict == "passed"
    assert runner.references.taken == 0 and runner.references.sessions == 1 and len(on_cpu) == len(FINITE_EDGES) + 1


@pytest.mark.parametrize(("text", "why"), [
    ("g (double[4] x) => (bool[4] y) { y = Less(x, x) }", "a result that is no float"),
    ("g (double[4, 4] x, int64[2] i) => (double[2, 4] y) { y = Gather(x, i) }", "Gather of indices that are given"),
    ("g (double[4, 4] x) => (double[1, 4] y) <int64[1] i = {1}> { y = Gather(x, i) }", ""),
    ("g (double[1, 3, 8, 8] x, double[4, 3, 3, 3] w) => (double[1, 4, 6, 6] y) { y = Conv(x, w) }", "Conv"),
    ("g (double[4, 4] x, double[4, 4] w) => (double[4, 4] y) { y = MatMul(x, w) }", ""),
    ("g (double[4] x, int64[4] i) => (double[4] y) { j = Div(i, i) k = Cast <to = 11> (j) y = Add(x, k) }",
     "Div of integers"),
    ("g (double[4] x, int64[4] i) => (double[4] y) { j = Add(i, i) k = Cast <to = 11> (j) y = Add(x, k) }", ""),
    ("g (double[4, 4] x) => (double[2, 8] y) <int64[1] two = {2}, int64[1] none = {-1}> "
     "{ s = Shape(x) f = Gather(s, two) d = Div(f, two) e = Concat <axis = 0> (d, none) y = Reshape(x, e) }", ""),
    ("g (double[4] x) => (double[4] y) <double n = {7}> { y = Max(x, n) }", "Max of a constant that is not finite"),
    ("g (double[4] x) => (double[4] y) <double n = {7}> { c = Less(n, x) y = Where(c, x, n) }", ""),
    ("g (double[4] x) => (double[4] y) { y = com.microsoft.Gelu(x) }", "com.microsoft.Gelu"),
    ("g (double[4] x, bool c) => (double[4] y) { "
     "y = If (c) <then_branch = t () => (double[4] a) { a = Abs(x) }, "
     "else_branch = e () => (double[4] b) { b = Neg(x) }> }",
     "the graphs of If"),
])
def test_what_is_the_cpus_alone(text: str, why: str) -> None:
    """(The parser has no number that is not finite: 7 stands for it.)"""
    model = parse(text)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for tensor in model.graph.initializer:
        if tensor.double_data == [7.0]:
            tensor.double_data[:] = [-np.inf]
    assert unsuited(model) == why


def test_inputs_cross_the_bus_in_their_own_types(runner: OnDevice) -> None:
    """bfloat16 as float32, as at every border; what stays is copied once."""
    made, node = fused("""g (bfloat16[n, 64] x, bfloat16[64] w) => (float[n, 64] y) {
      a = Cast <to = 1> (x) b = Cast <to = 1> (w) t = Tanh(a) y = Mul(t, b) }""")
    reference = Reference(node, made.model)
    body = reference.device_body
    assert body is not None and body.graph.output[-1].name == FINITE
    assert {info.type.tensor_type.elem_type for info in body.graph.input} == {onnx.TensorProto.BFLOAT16}
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    feeds = {f"x{place}": (X if name == "x" else W).astype(kind) for place, name in enumerate(node.tensors)}
    weights = f"x{list(node.tensors).index('w')}"
    (found,), (wanted,) = (each or [] for each in (
        runner.references.outputs(body, feeds, [X.shape]), reference.outputs(feeds)))
    assert np.array_equal(on_host(found), wanted)
    held = runner.references._inputs.held[weights].value
    runner.references.outputs(body, {name: array if name == weights else array + 1 for name, array in feeds.items()},
                              [X.shape])
    assert runner.references._inputs.held[weights].value is held
    runner.references.forget()
    assert not runner.references._inputs.held


def test_a_device_that_does_not_answer_any_more(runner: OnDevice, on_cpu: list[int],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: DeviceArray, part: slice) -> Array:
        raise KernelError("cuMemcpyDtoH_v2 failed")

    monkeypatch.setattr(DeviceArray, "__getitem__", read)
    assert judged(runner).verdict == "passed" and len(on_cpu) == len(FINITE_EDGES) + 1


def test_the_originals_own_result_widens_what_the_cpu_lets_pass(runner: OnDevice, on_cpu: list[int]) -> None:
    """Each node's result rounded, as the original does it: off by more than a kernel's own rounding."""
    made, node = fused(NORM)
    reference = Reference(node, made.model)
    runner.kernel = lambda node, model, feeds, variant: reference.own(feeds)  # type: ignore[method-assign]
    assert judged(runner).verdict == "passed"
    assert runner.references.taken == len(FINITE_EDGES) and len(on_cpu) > 2


def test_of_a_sample_no_more_leaves_the_device(runner: OnDevice, on_cpu: list[int],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    together: list[int] = []
    read, gather = DeviceArray.__getitem__, DeviceArray.gathered
    monkeypatch.setattr(DeviceArray, "__getitem__", lambda self, part: (
        sizes.append(part.stop - part.start), read(self, part))[1])
    monkeypatch.setattr(DeviceArray, "gathered", lambda self, pieces: (
        together.append(sum(end - start for start, end in pieces)), gather(self, pieces))[1])
    x = np.random.default_rng(0).uniform(1, 2, (MOST // 64 + 1, 64)).astype(np.float32)
    result = judged(runner, "g (float[n, 64] x) => (float[n, 64] y) { t = Tanh(x) y = Mul(t, x) }", x=x)
    chosen = sample(x.size)
    assert result.verdict == "passed" and len(on_cpu) == 1 and chosen is not None
    assert together == 4 * [len(chosen)] and max(sizes) <= BLOCK


@pytest.mark.parametrize(("more", "samples"), [(0, 0), (-1, 4)])
def test_all_is_compared_where_that_is_quicker(more: int, samples: int, runner: OnDevice, on_cpu: list[int],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the runner says."""
    taken: list[int] = []
    gather = DeviceArray.gathered
    monkeypatch.setattr(DeviceArray, "gathered", lambda self, pieces: (taken.append(1), gather(self, pieces))[1])
    x = np.random.default_rng(0).uniform(1, 2, (MOST // 64 + 1, 64)).astype(np.float32)
    text = "g (float[n, 64] x) => (float[n, 64] y) { t = Tanh(x) y = Mul(t, x) }"
    runner.most = x.size + more
    result, alone = judged(runner, text, x=x), judged(EmulatedRunner(), text, x=x)
    assert (result.verdict, result.inputs, result.variants) == (alone.verdict, alone.inputs, alone.variants)
    assert result.verdict == "passed" and len(taken) == samples and len(on_cpu) == 2 + len(FINITE_EDGES)


def test_one_wrong_element_that_no_sample_has(runner: OnDevice, on_cpu: list[int]) -> None:
    """On edges of the inputs, where all elements are looked at on the device."""
    x = np.random.default_rng(0).uniform(1, 2, (MOST // 16, 64)).astype(np.float32)
    chosen = sample(x.size)
    assert chosen is not None
    place = min({*range(x.size)} - {*chosen.tolist()})
    real = runner.kernel

    def spoiled(node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array], variant: int | None
                ) -> list[Array]:
        (result,) = real(node, model, feeds, variant)
        if np.array_equal(feeds["x0"], -x):
            result.reshape(-1)[place] *= 1.01
        return [result]

    runner.kernel = spoiled  # type: ignore[method-assign]
    text = "g (float[n, 64] x) => (float[n, 64] y) { t = Tanh(x) y = Mul(t, x) }"
    assert judged(runner, text, x=x).verdict == "passed"
    runner.most = x.size
    result = judged(runner, text, x=x)
    assert result.verdict == "failed" and result.message.startswith("output 0 of 1 on negative: 1 of")


def test_arrays_on_a_device_are_compared_as_others(runner: OnDevice) -> None:
    """Worst element, errors and shapes are told alike."""
    made, node = fused(NORM)
    reference = Reference(node, made.model)
    assert reference.device_body is not None
    feeds = {f"x{place}": {"x": X, "w": W}[name] for place, name in enumerate(node.tensors)}
    (wanted,) = runner.references.outputs(reference.device_body, feeds, [X.shape]) or []
    exact, types = on_host(wanted), (onnx.TensorProto.FLOAT16,) * 2
    got = exact.astype(np.float16)
    got[3, 7] += 1
    for measure in (extents, DeviceExtents(0, "sm_90")):  # to which this is too little to copy
        assert compared(got, [wanted], None, types, measure=measure) == compared(got, [exact], None, types)
    assert compared(got[:4], [wanted], None, types) == compared(got[:4], [exact], None, types)
    assert wanted.size == exact.size and np.array_equal(wanted.reshape(-1)[60:70], exact.reshape(-1)[60:70])


def test_a_model_is_verified_with_them(runner: OnDevice, on_cpu: list[int]) -> None:
    """As without a device, but for who computes."""
    made, _ = fused(NORM)
    result, alone = verify(made, runner), verify(made, EmulatedRunner())
    assert result.passed and result.kernels_run and runner.references.taken > 2 * len(FINITE_EDGES)
    assert [(node.verdict, node.inputs) for node in result.nodes] == [
        (node.verdict, node.inputs) for node in alone.nodes]
    assert runner.references._session == (b"", None)


@pytest.mark.parametrize(("text", "there"), [
    ("g (float16[n, 64] x) => (float16[n, 64] y, float16[n, 64] z) { z = Neg(x) y = Tanh(z) }", True),
    ("g (double[n, 64] x) => (double[n, 64] y) { z = Neg(x) y = Tanh(z) }", False),
    ("g (float16[n, 64] x) => (float16[64, n] y) { z = Neg(x) y = Transpose(z) }", False),
])
def test_what_is_computed_in_float64_or_not_at_all(text: str, there: bool, runner: OnDevice) -> None:
    made, node = fused(text)
    assert (Reference(node, made.model).device_body is not None) == there
    x = X.astype(np.float64 if "double" in text else np.float16)
    assert judged(runner, text, x=x).verdict == "passed" and (runner.references.taken > 0) == there
