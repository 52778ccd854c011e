"""Inputs that a model is verified on where it does not take the first choice; a model that differs from itself.

Every model runs in ONNX Runtime's CPU provider; kernels run in the emulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import parse
from emulated import EmulatedRunner
from numpy.typing import NDArray
from onnx import numpy_helper
from plain_session import RELEASE, STRICT

import onnxfuse
from onnxfuse.delivery import verified
from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.graph import bind
from onnxfuse.measuring.fitting import misfit
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised, silent
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime.words import runtime_words
from onnxfuse.verifying import verify
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.runner import options_of
from onnxfuse.verifying.runs import first_recipes, second_recipes, small_recipes
from onnxfuse.verifying.sharing import Slim
from onnxfuse.verifying.whole import Whole

Array = NDArray[Any]


def fused(model: onnx.ModelProto, **dims: int) -> Optimised:
    return optimise(model, Options(verify=False, least_gain=0.0, dims=dims))


def test_integers_that_nothing_is_known_of() -> None:
    """An index that follows from the input by an operator that no rule is about: a table of two takes two ids alone."""
    model = parse("""
        g (int64[n, 6] ids) => (float[n, 6, 4] y) {
          f = Cast <to = 1> (ids) t = MatMul(f, same) k = Cast <to = 7> (t) x = Gather(table, k) e = Exp(x)
          y = Neg(e) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 4), np.float32), "table"))
    model.graph.initializer.append(numpy_helper.from_array(np.eye(6, dtype=np.float32), "same"))
    result = verify(fused(model), EmulatedRunner())
    assert result.kernels_run and result.passed, result.text()
    assert str(result.runs[0]).startswith("generated, seed 0, integers below 2 (")
    assert str(result.runs[1]).startswith("generated, seed 1, integers below 2 (")
    (note,) = [note for note in result.notes if note.startswith("The model was run on other inputs")]
    assert "Gather: indices element out of data bounds" in note


@pytest.mark.skipif(RELEASE < STRICT, reason="ONNX Runtime before 1.25 reflects more than there is")
def test_sizes_that_have_to_be_larger() -> None:
    """A window of 400 elements over a signal that is 128 long by default."""
    model = parse("g (float[b, samples] x) => (float[b, k] y) { p = Pad <mode = \"reflect\"> (x, pads) "
                  "e = Exp(p) y = Neg(e) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 200, 0, 200]), "pads"))
    result = verify(fused(model), EmulatedRunner())
    assert result.kernels_run and result.passed, result.text()
    assert result.runs[0].sizes["samples"] == 256


def test_sizes_that_have_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are added, and said to have sizes of their own, as if nothing were known against those planned."""
    monkeypatch.setattr("onnxfuse.forms.check_sizes", lambda *_: ())
    model = parse("g (float[b, tokens] x, float[b, width, 1] z) => (float[b, k, l] y) { "
                  "a = Squeeze(z, two) s = Add(x, a) y = Exp(s) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "two"))
    result = verify(fused(model, tokens=24, width=48), EmulatedRunner())
    assert result.whole.identical, result.text()
    sizes = result.runs[0].sizes
    assert sizes["tokens"] == sizes["width"] or 1 in (sizes["tokens"], sizes["width"])


def test_a_window_longer_than_its_signal() -> None:
    model = parse("g (float[b, samples, 1] x) => (float[b, f, k, 2] y) { s = STFT(x, step, window) y = Neg(s) }")
    model.graph.initializer.extend([numpy_helper.from_array(np.array(160), "step"),
                                    numpy_helper.from_array(np.ones(400, np.float32), "window")])
    graph = load_graph(model)
    assert "would have -1 elements" in misfit(graph, {"samples": 128})
    assert not misfit(graph, {"samples": 512})
    result = verify(fused(model))
    assert result.whole.identical and result.runs[0].sizes["samples"] >= 400


@pytest.mark.parametrize(("text", "reason"), [
    ("g (float[b, frames, 8, 1] x) => (float[b, frames, 8, 2] y) { d = DFT <axis = 2> (x) y = Neg(d) }",
     "DFT -> d would transform nothing."),
    ("g (float[b, frames] x) => (int64[k] y) { s = Shape <start = 1> (x) y = Div(one, s) }",
     "Div -> y would divide by zero."),
])
def test_sizes_that_would_end_the_process(text: str, reason: str) -> None:
    """No run is made that ONNX Runtime does not survive."""
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    graph = load_graph(model)
    assert misfit(graph, {"frames": 0}) == reason
    assert not misfit(graph, {"frames": 3})


def test_an_axis_of_less_than_nothing() -> None:
    model = parse("g (float[b, 3, side, 8] x) => (float[b, 3, k, l] y) { p = AveragePool <kernel_shape = [9, 1]> (x) "
                  "y = Exp(p) }")
    graph = load_graph(model)
    assert "would have -" in misfit(graph, {"side": 4}) and not misfit(graph, {"side": 32})


def test_why_no_run_was_made() -> None:
    """The reason is the runtime's, and how many inputs were tried is told."""
    model = parse("g (float[n, 4] x) => (float[k, l] y) { r = Reshape(x, target) y = Exp(r) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([7, 9, 11]), "target"))
    result = verify(fused(model), EmulatedRunner())
    assert result.passed and result.whole.identical is None
    assert {node.verdict for node in result.nodes} == {"not run"}
    assert "Reshape: " in result.whole.message and "more sets of inputs failed" in result.whole.message
    assert "ONNXRuntimeError" not in result.whole.message and "/onnxruntime_src" not in result.whole.message


def test_first_choices_are_few() -> None:
    ledger = _ledger(parse("g (int64[a, b, c, d] x) => (int64[a, b, c, d] y) { y = Neg(x) }"))
    recipes = list(first_recipes(ledger))
    assert 10 < len(recipes) <= 28
    assert recipes[1].gentle and [recipe.below for recipe in recipes[2:5]] == [64, 8, 2]
    assert [recipe.integers for recipe in recipes[5:7]] == [1, 0]
    with_lengths = list(first_recipes(_ledger(parse(
        "g (int64[a, b, c, d] x, int64[a] n) => (int64[a, b, c, d] y, int64[a] m) { y = Neg(x) m = Neg(n) }"))))
    assert [recipe.lengths for recipe in with_lengths[:4]] == [None, 16, 224, None]


def test_counts_that_have_to_be_a_size() -> None:
    """A mask is made of counts, as long as the largest of them, and their name tells nothing."""
    model = parse("""
        g (float[b, t, 8] x, int64[b] n) => (float[b, t, 8] y) {
          zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
          last = Constant <value_ints = [1]> () first = Constant <value_ints = [0]> ()
          most = ReduceMax <keepdims = 0> (n) places = Range(zero, most, one)
          row = Unsqueeze(places, first) column = Unsqueeze(n, last) kept = Less(row, column)
          deep = Constant <value_ints = [2]> () k = Unsqueeze(kept, deep) f = Cast <to = 1> (k)
          m = Mul(x, f) y = Exp(m) }""")
    result = verify(fused(model, b=2, t=20))
    assert result.whole.identical and str(result.runs[0]) == "generated, seed 0, lengths 20 (b=2, t=20)", result.text()


def test_sizes_of_which_one_is_the_sum_of_two() -> None:
    """What was, what is new, and all of it, under names of which nothing can be told and where no shape tells."""
    ledger = _ledger(parse("""
        g (float[b, p] past, float[b, q] new, float[b, r] kept) => (float[b, p] x, float[b, q] y, float[b, r] z) {
          x = Neg(past) y = Neg(new) z = Neg(kept) }"""))
    tried = list(first_recipes(ledger))
    size = tried[0].sizes["p"]
    sums = [recipe.sizes for recipe in tried if sorted(recipe.sizes[name] for name in "pqr") == [size, size, 2 * size]]
    assert [next(name for name in "pqr" if sizes[name] > size) for sizes in sums[:3]] == ["r", "q", "p"]


def test_lengths_are_of_several_sizes_in_the_second_run() -> None:
    """A mask is made of lengths, as long as the longest of them: that has to be the whole sequence's."""
    model = parse("""
        g (float[b, t, 8] features, int64[b] features_lens) => (float[b, t, 8] y) {
          zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
          last = Constant <value_ints = [1]> () first = Constant <value_ints = [0]> ()
          longest = ReduceMax <keepdims = 0> (features_lens) places = Range(zero, longest, one)
          row = Unsqueeze(places, first) column = Unsqueeze(features_lens, last) kept = Less(row, column)
          deep = Constant <value_ints = [2]> () k = Unsqueeze(kept, deep) f = Cast <to = 1> (k)
          m = Mul(features, f) y = Exp(m) }""")
    subject = fused(model, b=3, t=20)
    feeds = [make_inputs(subject.graph, {"b": 3, "t": 20}, seed=seed)["features_lens"].tolist() for seed in (0, 1)]
    assert feeds[0] == [20, 20, 20]
    assert feeds[1][0] == 20 and 1 <= min(feeds[1]) < 20
    result = verify(subject, EmulatedRunner())
    assert result.passed and result.kernels_run and len(result.runs) == 3, result.text()
    assert not any("Mul" in note for note in result.notes)


def test_floats_of_which_a_model_makes_no_numbers() -> None:
    """No interval tells what a product of matrices is, or that a square is at most one."""
    model = parse("""
        g (float[n, 8] x) => (float[n, 8] y) {
          one = Constant <value_float = 1.0> () s = Mul(x, x) d = Sub(one, s) r = Sqrt(d) l = Log(r) y = Neg(l) }""")
    result = verify(fused(model), EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()
    assert all(", floats between 0 and 1 (" in str(run) for run in result.runs)
    assert result.notes[:1] == (
        "The first choice was not taken, generated, seed 0 (n=1): the model makes of it what is no number.",)
    always = verify(fused(parse("""
        g (float[n, 8] x) => (float[n, 8] y) { a = Abs(x) m = Neg(a) l = Log(m) y = Neg(l) }""")))
    assert always.whole.identical and not any("floats between" in str(run) for run in always.runs)
    assert always.notes == ("Elements of 'y' are no numbers on inputs that are made up, which hides what differs; give "
                            "real ones, inputs.",)


def test_sizes_of_which_a_model_makes_no_numbers() -> None:
    """A mean of the frames from the third hundred on, of which there are none."""
    model = parse("""
        g (float[b, samples] x) => (float[b, 1] y) {
          from = Constant <value_ints = [300]> () to = Constant <value_ints = [100000]> ()
          axis = Constant <value_ints = [1]> () late = Slice(x, from, to, axis)
          total = ReduceSum(late, axis) ones = Sub(late, late) e = Exp(ones) count = ReduceSum(e, axis)
          mean = Div(total, count) y = Tanh(mean) }""")
    result = verify(fused(model), EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()
    assert result.runs[0].sizes["samples"] == 512


# Who is to blame


def test_small_sizes_are_odd_and_others_than_those_that_ran() -> None:
    ledger = _ledger(parse("g (float[n, 3, h, w] x) => (float[n, 3, h, w] y) { y = Neg(x) }"))
    first = next(first_recipes(ledger))
    recipes = list(small_recipes(ledger, first, [first.sizes]))
    assert {name: recipes[0].sizes[name] for name in "nhw"} == {"n": 5, "h": 3, "w": 7}
    assert recipes[1].sizes["n"] == 1, "an exporter may have fixed a batch of one without saying so"
    assert all(recipe.sizes != first.sizes for recipe in recipes)
    left = list(small_recipes(ledger, first, [first.sizes, recipes[1].sizes]))
    assert recipes[1].sizes not in [recipe.sizes for recipe in left] and recipes[0] in left
    two = replace(first, sizes={**first.sizes, "h": 2})
    assert next(recipe.sizes["h"] for recipe in small_recipes(ledger, two, []) if recipe.sizes["n"] == 1) == 3


@pytest.mark.parametrize(("shape", "side", "made"), [
    ("n, 3, 640, 640", 640, False), ("n, 3, 64, 64", 64, True), ("n, 3, h, 640", 640, True)])
def test_no_third_run_for_a_batch_of_another_size_alone(shape: str, side: int, made: bool) -> None:
    """But where runs are short, or other sizes are free too."""
    text = f"g (float[{shape}] x, float[16, 3, 3, 3] w) => (float[n, 16, p, q] y) {{ y = Conv(x, w) }}"
    ledger = _ledger(parse(text))
    first = next(first_recipes(ledger))
    assert bool(list(small_recipes(ledger, first, [first.sizes]))) is made
    assert list(second_recipes(ledger, first)) or side < 640


def test_convolutions_are_not_tried_by_every_algorithm() -> None:
    assert options_of(0) == {"cudnn_conv_algo_search": "HEURISTIC"}
    given = {"cudnn_conv_algo_search": "DEFAULT", "use_tf32": "0"}
    assert options_of(1, given) == {**given, "device_id": 1}


class OwnNodesFail(EmulatedRunner):
    """A device whose provider cannot run the original's nodes, which are asked for since kernels' results are ``off``
    by more than the reference allows; ``dead``: they take it along."""

    dead = False
    off = 4e-5

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        return [result * np.float32(1 + self.off) for result in super().kernel(node, model, feeds, variant)]

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        raise KernelError("the original nodes do not run on the GPU: no such kernel")

    def alive(self) -> bool:
        return not self.dead


CHAIN = "g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) { m = MatMul(x, w) e = Exp(m) t = Tanh(e) y = Neg(t) }"


def test_nodes_that_a_device_cannot_run_are_no_fault_of_the_kernel() -> None:
    runner = OwnNodesFail()
    result = verify(fused(parse(CHAIN)), runner)
    (failed,) = result.failed
    assert "elements are wrong" in failed.message or "root mean square" in failed.message
    runner.off = 0.0
    result = verify(fused(parse(CHAIN)), runner)
    assert result.passed and result.kernels_run, result.text()


def test_nodes_that_end_the_device_are_no_fault_of_the_kernel() -> None:
    runner = OwnNodesFail()
    runner.dead = True
    result = verify(fused(parse(CHAIN)), runner)
    assert result.passed and not result.kernels_run
    (node,) = result.nodes
    assert node.verdict == "not run"
    assert node.message.startswith("the original's own nodes end the device's work: ")


def test_an_original_that_runs_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels read of the user's inputs is taken from a run on the CPU where the device gives none; of others it
    always is, where the CPU runs the model."""
    class Elsewhere(EmulatedRunner):
        providers = ("NoSuchExecutionProvider",)

    session = Slim.session

    def here_alone(slim: Slim, providers: Sequence[Any] = CPU, *more: Any, **others: Any) -> Any:
        if list(providers) != CPU:  # old releases of ONNX Runtime take any name, and run on the CPU
            raise VerificationError("ONNX Runtime refuses the model: there is no such provider.")
        return session(slim, providers, *more, **others)

    monkeypatch.setattr(Slim, "session", here_alone)
    subject = fused(parse(CHAIN))
    made = verify(subject, Elsewhere())
    assert made.passed and made.kernels_run and not made.notes and "captured, run 1" in made.nodes[0].inputs
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 64), "w": (64, 64)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    result = verify(subject, Elsewhere(), given)
    assert result.passed and result.kernels_run, result.text()
    assert "captured on the CPU" in result.nodes[0].inputs
    assert result.notes == ("The original does not run on the CPU emulator; what its nodes read is from the CPU: "
                            "ONNX Runtime refuses the model: there is no such provider.",)


def test_a_kernel_that_fails_at_small_sizes_alone() -> None:
    """The launch plan's grid is one block short where rows are few: no planned size shows it."""
    subject = fused(parse("g (float[rows, 64] x) => (float[rows, 64] y) { e = Exp(x) y = Neg(e) }"), rows=128)
    (node,) = read_fused(subject.model)
    model = onnx.ModelProto()
    model.CopyFrom(subject.model)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "source":
            # Every element is 1 of tensors of fewer than 1000: a fault that hangs on the size alone.
            name = "small_fault"
            attribute.s += (f'\nextern "C" __global__ void {name}(float* y, const long long n) {{ '
                            "const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; "
                            "if (i < n && n < 1000) y[i] = 1.0f; }\n").encode()
        if attribute.name == "plan":
            from onnxfuse.lowering.launch import LaunchPlan, Step
            plan = LaunchPlan.from_json(attribute.s.decode())
            count = " ".join(["1", *(f"{size} *" for size in plan.outputs[0].shape)])
            step = Step("small_fault", (f"{count} 256 ceil", "1", "1"), ("256", "1", "1"), ("o0", f"i64:{count}"))
            attribute.s = replace(plan, variants=tuple(
                replace(variant, steps=(*variant.steps, step)) for variant in plan.variants)).to_json().encode()
    wrong = replace(subject, rewritten=replace(subject.rewritten, model=model))
    (failed,) = verify(wrong, EmulatedRunner()).failed
    assert failed.node == node.name and "run 3" in failed.message


RANDOM = """
g (float[n, 64] x) => (float[n, 64] y, float[n, 64] z) {
  t = Tanh(x) z = Neg(t) r = RandomNormalLike(x) s = Add(x, r) e = Exp(s) y = Neg(e)
}
"""


def test_a_model_that_differs_from_itself_is_not_called_wrong() -> None:
    subject = fused(parse(RANDOM), n=16)
    assert read_fused(subject.model)
    result = verify(subject, EmulatedRunner())
    assert result.passed, result.text()
    assert any(note.startswith("The original differs from itself in 'y' when it runs again") for note in result.notes)
    assert verified(subject, None, silent).verification is not None


def test_what_does_not_differ_from_itself_still_has_to_be_equal() -> None:
    """A wrong body behind an output of the same model that is no matter of chance."""
    subject = fused(parse(RANDOM), n=16)
    model = onnx.ModelProto()
    model.CopyFrom(subject.model)
    tanh = [node for function in model.functions for node in function.node if node.op_type == "Tanh"]
    assert tanh
    tanh[0].op_type = "Sigmoid"
    wrong = replace(subject, rewritten=replace(subject.rewritten, model=model))
    result = verify(wrong)
    assert not result.passed and [entry.output for entry in result.whole.differences] == ["z"]
    with pytest.raises(onnxfuse.VerificationError, match="differs from the original in 'z'"):
        verified(wrong, None, silent)


def test_a_model_that_hangs_on_the_runtimes_optimisations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs agree; what the runtime makes of it differs by more than the fused model does."""
    subject = fused(parse("g (float[n, 64] x) => (float[n, 64] y) { e = Exp(x) y = Neg(e) }"), n=16)
    import onnxfuse.verifying.whole as whole

    real = whole.run_model
    calls: list[object] = []

    def rounded(session: object, model: onnx.ModelProto, run: object) -> list[np.ndarray]:
        found = real(session, model, run)  # type: ignore[arg-type]
        calls.append(session)
        first = calls[0]
        # The first session is the original's; the others, the fused one and the rewritten one, are off by rounding.
        return found if session is first else [array * np.float32(1 + 2.0**-22) for array in found]

    monkeypatch.setattr(whole, "run_model", rounded)
    result = verify(subject)
    assert result.passed
    assert any("when the runtime may rewrite it" in note for note in result.notes)


def test_a_fused_model_that_does_not_run_where_the_original_does(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = fused(parse("g (float[n, 64] x) => (float[n, 64] y) { e = Exp(x) y = Neg(e) }"), n=16)
    real = Whole.__init__

    class Broken:
        def run(self, *_: object) -> list[np.ndarray]:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Exp node. "
                               "Name:'e' Status Message: it does not")

    def broken(self: Whole, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self._plain = Broken()

    monkeypatch.setattr(Whole, "__init__", broken)
    result = verify(subject)
    assert not result.passed
    assert result.summary == (
        "verification failed: the fused model does not run where the original does: A run of the model fails on "
        "generated, seed 0 (n=16): Exp 'e': it does not.")


@pytest.mark.parametrize(("said", "words"), [
    ("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Gather node. Name:'/emb' "
     "Status Message: indices element out of data bounds, idx=9 must be within the inclusive range [-2,1]",
     "Gather '/emb': indices element out of data bounds, idx=9 must be within the inclusive range [-2,1]."),
    ("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running If node. Name:'If_0' Status Message: "
     "Non-zero status code returned while running Add node. Name:'' Status Message: no match\nmore",
     "Add: no match."),
    ("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Reshape node. Name:'r' "
     "Status Message: /onnxruntime_src/onnxruntime/core/providers/cpu/tensor/reshape_helper.h:45 "
     "onnxruntime::ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, "
     "onnxruntime::TensorShapeVector&, bool) size != 0 was false.",
     "Reshape 'r': size != 0 was false."),
])
def test_the_runtimes_words(said: str, words: str) -> None:
    assert runtime_words(said) == words


def _ledger(model: onnx.ModelProto) -> Ledger:
    graph = load_graph(model)
    return Ledger(graph, bind(graph, {}))
