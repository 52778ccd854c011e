"""Verification of whole models without a GPU: kernels run in the emulator.

Tolerances are those of ``verifying.tolerances``; the references are the functions' bodies in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from cli_models import CHAIN, encoder, parse
from emulated import EmulatedRunner
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from planted import broken, kernels, plant

from onnxfuse.errors import KernelError, ModelError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime import Gpu
from onnxfuse.verifying import CudaRunner, Verification, failed_regions, find_runner, verify
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.runner import node_model
from onnxfuse.verifying.runs import shrunk
from onnxfuse.verifying.sharing import Slim
from onnxfuse.verifying.whole import Whole, compared

Array = NDArray[Any]

BLOCK = """
block (float16[rows, 64] x, float16[rows, 64] r, float16[64] w, float16[64] b, float16[rows, 64] mask)
  => (float16[rows, 64] y, float16[rows, 64] p) {
  s = Add(x, r)
  n = LayerNormalization <axis = -1> (s, w, b)
  g = Sigmoid(n)
  y = Mul(n, g)
  m = Add(s, mask)
  p = Softmax <axis = -1> (m)
}
"""


def fused(model: onnx.ModelProto | Path, **options: Any) -> Optimised:
    """A fused model that was not verified; everything that can be fused is."""
    return optimise(model, Options(verify=False, least_gain=0.0, **options))


def in_type(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """A float16 model in another float type."""
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = kind
    return model


@pytest.fixture(scope="module", params=["float32", "float16"])
def transformer(request: pytest.FixtureRequest) -> Optimised:
    return fused(encoder(1, dtype=request.param), dims={"batch": 2, "sequence": 24})


def test_without_a_runner_the_graph_alone_is_verified(transformer: Optimised) -> None:
    result = verify(transformer)
    assert result.summary == "graph verified, kernels not run"
    assert (result.passed, result.kernels_run, result.runner) == (True, False, None)
    assert {node.verdict for node in result.nodes} == {"not run"}
    assert [str(run) for run in result.runs] == [
        "generated, seed 0 (batch=2, sequence=24)", "generated, seed 1 (batch=3, sequence=25)",
        "generated, seed 2 (batch=3, sequence=5)"]
    assert (result.whole.checked, result.whole.identical, result.whole.differences) == (True, True, ())


def test_every_kernel_is_verified_on_captured_and_edge_inputs(transformer: Optimised) -> None:
    runner = EmulatedRunner()
    result = verify(transformer, runner)
    assert result.passed and result.kernels_run, result.text()
    assert result.summary == f"graph verified, {len(result.nodes)} kernels verified on the CPU emulator"
    assert {node.node for node in result.nodes} == {n.name for n in read_fused(transformer.model)}
    firsts = [node for node in result.nodes if not node.shared]
    # A kernel is compared once, whatever nodes share it.
    assert set(runner.runs) == {node.node for node in firsts} and len(firsts) == len({node.op for node in result.nodes})
    for node in result.nodes:
        assert "captured, run 1" in node.inputs and node.ratio <= 1
        assert not node.shared or any(first.node == node.shared and first.op == node.op for first in firsts)
    assert all("captured, run 2" in node.inputs for node in firsts)
    assert len(firsts) == len(kernels(transformer.rewritten))
    softmax = next(node for node in firsts if "softmax" in node.rule)
    assert {"zeros", "large", "tiny", "negative", "not-a-number"} <= set(softmax.inputs)
    assert any(label.startswith("masked x") for label in softmax.inputs)
    assert any(len(node.variants) > 1 for node in firsts)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_fault_of_one_percent_in_any_kernel_is_caught(transformer: Optimised) -> None:
    rewritten = transformer.rewritten
    for op in kernels(rewritten):
        rewritten = plant(rewritten, op)
    result = verify(replace(transformer, rewritten=rewritten), EmulatedRunner())
    assert result.whole.passed and not result.passed
    assert [node.verdict for node in result.nodes] == ["failed"] * len(result.nodes)
    assert result.summary == (
        f"graph verified, {len(result.nodes)} of {len(result.nodes)} kernels failed on the CPU emulator")


def test_a_node_that_fails_is_taken_back(transformer: Optimised) -> None:
    op = kernels(transformer.rewritten)[-1]
    wrong = replace(transformer, rewritten=plant(transformer.rewritten, op))
    result = verify(wrong, EmulatedRunner())
    assert {node.op for node in result.failed} == {op}
    lost = failed_regions(result, wrong.rewritten.placed)
    assert len(lost) == sum(node.op == op for node in read_fused(wrong.model))
    again = verify(transformer.without(lost), EmulatedRunner())
    assert again.passed and again.kernels_run
    assert len(again.nodes) == len(result.nodes) - len(lost)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_faults_in_every_type(kind: int) -> None:
    """bfloat16 models do not run on the CPU provider: their nodes are verified on inputs made here."""
    from onnxfuse.verifying.nodes import NodeVerifier

    subject = fused(in_type(parse(BLOCK), kind))
    rng = np.random.default_rng(0)
    nodes = read_fused(subject.model)
    assert nodes

    def verdict(chosen: Optimised, node: FusedNode) -> str:
        feeds = {f"x{place}": rng.standard_normal((17, 64) if node.types[f"x{place}"][1] != ("64",) else 64)
                 .astype(helper.tensor_dtype_to_np_dtype(kind)) for place in range(len(node.tensors))}
        return NodeVerifier(chosen.model, EmulatedRunner()).verify(node, feeds, "made").verdict

    for node in nodes:
        assert verdict(subject, node) == "passed"
        wrong = replace(subject, rewritten=plant(subject.rewritten, node.op))
        assert verdict(wrong, next(n for n in read_fused(wrong.model) if n.name == node.name)) == "failed"


def test_the_whole_model_alone_hides_faults() -> None:
    """A kernel one percent wrong before a softmax that saturates: no output changes, the node's verification fails."""
    rng = np.random.default_rng(0)
    model = parse("""
        g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) {
          t = Tanh(x)
          u = Mul(t, x)
          v = MatMul(u, w)
          y = Softmax <axis = -1> (v)
        }""")
    weight = (rng.standard_normal((64, 64)) * 50).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    del model.graph.input[1]
    subject = fused(model, dims={"n": 16})
    op = next(node.op for node in read_fused(subject.model) if len(node.replaces) == 2)
    wrong = replace(subject, rewritten=plant(subject.rewritten, op))
    feeds = {"x": rng.standard_normal((16, 64)).astype(np.float32)}

    def output(chosen: Optimised) -> Array:
        """The model with the kernel's own result where the node was."""
        runner = EmulatedRunner()
        node = next(node for node in read_fused(chosen.model) if node.op == op)
        (inner,) = runner.kernel(node, chosen.model, {"x0": feeds["x"]}, None)
        scores = inner.astype(np.float64) @ weight.astype(np.float64)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        whole: Array = powers / powers.sum(-1, keepdims=True)
        return whole

    np.testing.assert_allclose(output(wrong), output(subject), atol=2e-2)  # a usual whole-model tolerance
    result = verify(wrong, EmulatedRunner())
    assert result.whole.passed
    assert [node.op for node in result.failed] == [op]


def test_a_changed_body_is_caught_without_kernels(transformer: Optimised) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(transformer.model)
    function = next(f for f in model.functions if any(node.op_type == "Softmax" for node in f.node))
    node = next(node for node in function.node if node.op_type == "Softmax")
    node.op_type = "LogSoftmax"
    result = verify(replace(transformer, rewritten=replace(transformer.rewritten, model=model)))
    assert not result.passed
    assert result.summary == (
        "verification failed: without kernels the fused model differs from the original in 'last_hidden_state'")
    assert result.whole.differences[0].error > 0


def test_what_the_checker_says_against_a_model(transformer: Optimised) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(transformer.model)
    model.graph.node[0].input[0] = "nowhere"
    result = verify(replace(transformer, rewritten=replace(transformer.rewritten, model=model)))
    assert (result.passed, result.whole.checked, result.whole.identical) == (False, False, None)
    assert result.summary.startswith("verification failed: onnx.checker refuses the fused model: Nodes in a graph must")


def test_what_the_checker_says_against_the_original_already() -> None:
    """An output without a shape, which many exporters leave: onnx.checker refuses it, ONNX Runtime does not."""
    model = parse("g (float[2, 4] x) => (float[2, 4] y) { a = Exp(x) y = Neg(a) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = verify(fused(model), EmulatedRunner())
    assert result.passed and result.whole.identical
    assert result.notes == (
        "onnx.checker has something against the original model already: Field 'shape' of 'type' is required but "
        "missing.",)


def test_scalars_are_read_and_written_as_scalars() -> None:
    model = parse("g (float s, float t, float[4] x) => (float r, float[4] y) { r = Mul(s, t) y = Add(x, r) }")
    result = verify(fused(model), EmulatedRunner())
    assert result.passed and {node.verdict for node in result.nodes} == {"passed"}


def test_a_kernel_that_cannot_run_fails_with_the_reason(transformer: Optimised) -> None:
    op = kernels(transformer.rewritten)[-1]
    wrong = replace(transformer, rewritten=broken(transformer.rewritten, op))
    failed = verify(wrong, EmulatedRunner()).failed
    assert {node.op for node in failed} == {op}
    assert failed[0].message.startswith("on captured, run 1, variant ") and "nowhere" in failed[0].message


def test_a_variant_that_seldom_runs_is_verified_too() -> None:
    subject = fused(parse(CHAIN), dims={"batch": 4})
    (node,) = read_fused(subject.model)
    last = len(node.plan.variants) - 1
    wrong = replace(subject, rewritten=plant(subject.rewritten, node.op, [last]))
    assert last > 0
    (failed,) = verify(wrong, EmulatedRunner()).failed
    where = f"captured, run 1, variant {node.plan.variants[last].name}"
    assert failed.message.startswith(f"output 0 of 1 on {where}: 16384 of 16384 elements are wrong; ")


def test_the_users_own_inputs() -> None:
    subject = fused(parse(CHAIN))
    x = np.linspace(-4, 4, 3 * 4096, dtype=np.float32).reshape(3, 4096)
    own = {"x": x, "w": np.ones(4096, np.float32)}
    runner = EmulatedRunner()
    result = verify(subject, runner, own)
    assert [str(run) for run in result.runs] == ["your inputs"]
    assert result.nodes[0].inputs[0] == "captured"
    assert result.kernels_run and result.passed
    with pytest.raises(ModelError, match=r"^The model has no input 'z'\."):
        verify(subject, runner, {"z": x})
    with pytest.raises(ModelError, match=r"^Input 'x' has type float32, and the array given is float64\."):
        verify(subject, runner, {"x": x.astype(np.float64)})


def test_inputs_that_do_not_fit_stay_off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read past the end of a table and say nothing."""
    class Elsewhere(EmulatedRunner):
        providers = ("CUDAExecutionProvider",)

    tried: list[list[Any]] = []
    begin = Whole.__init__

    def told(whole: Whole, original: Slim, fused: Slim, providers: Sequence[Any], *more: Any) -> None:
        tried.append(list(providers))
        begin(whole, original, fused, providers, *more)

    monkeypatch.setattr(Whole, "__init__", told)
    subject = fused(parse("""
        g (float[50, 4096] table, int64[n] ids) => (float[n, 4096] y) {
          a = Gather(table, ids) b = Exp(a) c = Neg(b) y = Tanh(c) }"""), dims={"n": 4096})
    given = {"table": np.zeros((50, 4096), np.float32), "ids": np.array([50])}
    result = verify(subject, Elsewhere(), given)
    assert tried == [["CPUExecutionProvider"]] and result.whole.identical is None


def test_outputs_of_other_shapes_differ_everywhere() -> None:
    (found,) = compared(["y"], [np.zeros((2, 3))], [np.zeros(12)])
    assert (found.elements, found.error) == (12, np.inf)


def test_weights_in_another_file_stay_there(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = encoder(1)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=256)
    subject = fused(path, dims={"batch": 1, "sequence": 16})
    before = sorted(entry.name for entry in tmp_path.iterdir())
    result = verify(subject, EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_full_disk_is_no_obstacle(transformer: Optimised, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxfuse.verifying.sharing.tempfile.TemporaryDirectory", full)
    assert verify(transformer).summary == "graph verified, kernels not run"


def test_large_sizes_are_halved_together() -> None:
    subject = fused(encoder(1), dims={"batch": 64, "sequence": 512})
    sizes = shrunk(subject.ledger, subject.ledger.sizes, flops=10**8)
    assert sizes[0] == {"batch": 64, "sequence": 512}
    assert sizes[1] == {"batch": 64, "sequence": 256}
    assert {"batch": 32, "sequence": 32} in sizes
    assert sizes[-1]["batch"] >= 2 and sizes[-1]["sequence"] >= 16
    assert shrunk(subject.ledger, subject.ledger.sizes, flops=1)[-1] == {"batch": 2, "sequence": 16}
    assert shrunk(subject.ledger, {"batch": 2, "sequence": 16}) == [{"batch": 2, "sequence": 16}]


def test_a_model_in_which_nothing_was_fused() -> None:
    subject = fused(parse("g (float[2, 4] x, float[4, 4] w) => (float[2, 4] y) { y = MatMul(x, w) }"))
    result = verify(subject, EmulatedRunner())
    assert (result.summary, result.passed) == ("graph verified, nothing was fused", True)


def test_a_model_that_cannot_be_run_here_says_so() -> None:
    subject = fused(in_type(parse(BLOCK), TensorProto.BFLOAT16))
    result = verify(subject, EmulatedRunner())
    assert (result.passed, result.kernels_run, result.whole.identical) == (True, False, None)
    assert result.summary.startswith("graph checked, not run (ONNX Runtime refuses the model: ")
    assert all(node.verdict == "not run" for node in result.nodes)


def test_progress_counts_up(transformer: Optimised) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(transformer, EmulatedRunner(), progress=lambda *entry: seen.append(entry))
    assert seen[0] == ("checking the fused model", 0, 1)
    counts = [done for stage, done, _ in seen if stage.startswith("verifying ")]
    assert counts == sorted(counts) and counts
    assert all(done <= of for _, done, of in seen)


class _Original(EmulatedRunner):
    """A runner whose device computes the original's nodes too; its kernels' results are ``off`` by that share."""

    name = "a device"

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.off = off
        self.asked = 0

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        results = super().kernel(node, model, feeds, variant)
        return [(result * (1 + self.off)).astype(result.dtype) for result in results] if self.off else results

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        self.asked += 1


def test_the_runners_own_result_of_the_original_is_asked_for_where_it_decides(transformer: Optimised) -> None:
    """It only ever widens what passes."""
    exact, off = _Original(), _Original(0.02)
    assert verify(transformer, exact).passed and not exact.asked
    result: Verification = verify(transformer, off)
    assert not result.passed and off.asked >= sum(not node.shared for node in result.failed)


class _Dies(EmulatedRunner):
    """A runner that does not survive the first kernel."""

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        raise KernelError("a run failed: an illegal memory access was encountered")

    def alive(self) -> bool:
        return False


def test_a_kernel_that_takes_the_gpu_along_condemns_no_other(transformer: Optimised) -> None:
    result = verify(transformer, _Dies())
    (failed,) = result.failed
    assert failed.message.endswith(": a run failed: an illegal memory access was encountered")
    assert [node.verdict for node in result.nodes if node.op != failed.op] == ["not run"] * (len(result.nodes) - 1)
    assert result.notes == (f"Nodes were left out in run 1: the GPU stopped answering when {failed.node} ran",)
    assert not result.kernels_run


def test_no_runner_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert find_runner() is None


def test_no_runner_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nobody can compile are not run; none of them is wrong for that."""
    def none() -> None:
        asked.append(1)
        raise KernelError("no CUDA compiler")

    asked: list[int] = []
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxfuse.runtime.gpus", lambda: [Gpu(0, "H100", (9, 0), 132, (13, 0))])
    monkeypatch.setattr("onnxfuse.runtime.nvrtc.headers", none)
    assert find_runner() is None and asked


class _OnCpu(CudaRunner):
    """The GPU's runner with ONNX Runtime's CPU provider in place of CUDA's: nodes run as their functions."""

    memory = "cpu"

    def __init__(self) -> None:
        self.device, self.gpu = 0, Gpu(0, "no GPU", (9, 0), 132, (13, 0))
        self.name, self.providers = self.gpu.name, ["CPUExecutionProvider"]
        self._one_node, self._bodies = self._session, self._body_session

    def prepare(self, model: onnx.ModelProto) -> None:
        pass

    def alive(self) -> bool:
        return True


def test_the_gpus_runner_as_far_as_it_goes_without_one(transformer: Optimised) -> None:
    """One-node models, bound and poisoned outputs, variants: the function in place of the kernel gives the same."""
    runner = _OnCpu()
    result = verify(transformer, runner)
    assert result.passed and result.kernels_run, result.text()
    node = read_fused(transformer.model)[0]
    single = node_model(node, transformer.model, node.plan, {})
    assert [len(part) for part in (single.graph.node, single.functions)] == [1, 1]
    assert {entry.name for entry in single.graph.node[0].attribute} == {"plan", "source"}


def test_one_node_models_of_every_type() -> None:
    """bfloat16 crosses the border as float32; tolerance 1e-6, the reference is NumPy's float32."""
    text = """
    g (float[rows, 64] x, bool[rows, 64] c) => (float[rows, 64] y) {
      z = Cast <to = 16> (x)
      n = Cast <to = 1> (z)
      t = Tanh(n)
      y = Where(c, t, x)
    }"""
    subject = fused(parse(text), dims={"rows": 4})
    (node,) = read_fused(subject.model)
    rng = np.random.default_rng(0)
    feeds = {"x0": rng.standard_normal((4, 64)).astype(np.float32), "x1": rng.random((4, 64)) < 0.5}
    feeds = {f"x{place}": feeds["x0" if node.types[f"x{place}"][0] == "FLOAT" else "x1"] for place in range(2)}
    runner = _OnCpu()
    (got,) = runner.kernel(node, subject.model, feeds, runner.variants(node.plan, feeds)[-1])
    x, c = (feeds[name] for name in sorted(feeds, key=lambda name: feeds[name].dtype.kind == "b"))
    wanted = np.where(c, np.tanh(x.astype(ml_dtypes.bfloat16).astype(np.float32)), x)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_rows_masked_before_they_are_scaled() -> None:
    """The lowest number of float16 times twelve is none of float16, and has four digits behind the point in float32 no
    more: the original has no number there, and a kernel's is as near as float32 allows.  (18944 are the bits of 12.)"""
    text = """g (float16[4, 64] x, float16[64] b) => (float16[4, 64] y) <float16 twelve = {18944}> {
        s = Mul(x, twelve) a = Add(s, b) d = Add(a, b) y = Softmax <axis = -1> (d) }"""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
    optimised = optimise(model, Options(verify=False, least_gain=0.0, target="H100", database=False))
    (node,) = read_fused(optimised.model)
    generator = np.random.default_rng(5)
    feeds = {"x0": generator.standard_normal((4, 64)).astype(np.float16),
             "x1": (3 * generator.standard_normal(64)).astype(np.float16)}
    if optimised.plan.fusions[0].tensors[0].name != "x":
        feeds = {"x0": feeds["x1"], "x1": feeds["x0"]}
    result = NodeVerifier(optimised.model, EmulatedRunner()).verify(node, feeds, "given")
    assert result.verdict == "passed", result.message
    assert "masked x0" in result.inputs or "masked x1" in result.inputs


def test_scores_that_no_float16_is() -> None:
    """Fourth powers of 512 have no place in float16: the original gives no number, and so does a kernel that has one
    between them, rather than an infinite share."""
    text = """g (float16[64, 49] x, float16[64, 49] b, float16[64, 49] c, float16[64, 49] d) => (float16[64, 49] y) {
        s = Mul(x, b) t = Mul(s, c) u = Mul(t, d) y = Softmax <axis = -1> (u) }"""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
    optimised = optimise(model, Options(verify=False, least_gain=0.0, target="H100", database=False))
    (node,) = read_fused(optimised.model)
    generator = np.random.default_rng(5)
    feeds = dict.fromkeys((f"x{place}" for place in range(4)), generator.standard_normal((64, 49)).astype(np.float16))
    result = NodeVerifier(optimised.model, EmulatedRunner()).verify(node, feeds, "given")
    assert result.verdict == "passed", result.message
    assert "large" in result.inputs
