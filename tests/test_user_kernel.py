"""Rules that bring their own CUDA kernel, from the YAML file to the kernel's numbers.

Kernels run in the emulator and are compared with the original in float64: float32 within 1e-5 and float16 within two
units in the last place of the output's scale.  The fused model's function on the CPU equals the original bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulator import run_plan
from reference import Array, difference, evaluate

from onnxfuse.errors import RuleError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.rules import load_rules
from onnxfuse.runtime.compile import architectures, compile_cubin

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "rules"

SOFTCAP = """g (float[b, s] x) => (float[b, s] y) {
    cap = Constant <value = float {3.0}> () d = Div(x, cap) t = Tanh(d) y = Mul(t, cap) }"""

RULE = """\
id: bias-squared-relu
kind: fuse
summary: Squared ReLU of a biased input, in float16.
why: Three kernels, and float16 rounds between them.
pattern: |
  r = Relu(x + bias)
  y = r * r
where:
  - dtype(x) == float16
  - rank(bias) == 1
  - test: dim(x, -1) == dim(bias, 0)
    code: bias
    message: The bias is spread over columns.
kernel:
  file: kernel.cu
  entry: bias_squared_relu
  inputs: [x, bias]
  outputs: [y]
  arguments: [{i64: "size(x) // dim(x, -1)"}, {i32: "dim(x, -1)"}]
  grid: ["size(x) // dim(x, -1)", "ceil(dim(x, -1), 64)"]
  block: 64
  shared: "dim(bias, 0) * 2"
"""

KERNEL = r"""
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(64) bias_squared_relu(
    const __half* x, const __half* bias, __half* y, long long rows, int columns) {
  extern __shared__ __half row[];
  for (int i = threadIdx.x; i < columns; i += blockDim.x) row[i] = bias[i];
  __syncthreads();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x >= rows || column >= columns) return;
  const long long at = blockIdx.x * (long long)columns + column;
  const float biased = fmaxf(__half2float(x[at]) + __half2float(row[column]), 0.0f);
  y[at] = __float2half_rn(biased * biased);
}
"""

SQUARED = """g (float16[b, 4, n] x, float16[n] bias) => (float16[b, 4, n] y) {
    a = Add(x, bias) r = Relu(a) y = Mul(r, r) }"""


def parse(text: str) -> onnx.ModelProto:
    """A model from the text of its graph."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')


def fuse(text: str, rules: Path) -> Optimised:
    """The model with the rules of a folder, fused by them and not by the shipped ones alone."""
    return optimise(parse(text), Options(rules=[rules], verify=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with one rule and its kernel."""
    (tmp_path / "rule.yaml").write_text(RULE)
    (tmp_path / "kernel.cu").write_text(KERNEL)
    return tmp_path


def run(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    """The output on the CPU, with ONNX Runtime's own optimisations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out: Array = session.run(None, inputs)[0]
    return out


def check(text: str, made: Optimised, sizes: list[dict[str, Array]], constants: dict[str, Array]) -> None:
    """One fused node of a user's kernel: its function on the CPU, its text in the emulator, and NVRTC."""
    (region,) = made.regions
    assert region.kernel.schedule == "user"
    onnx.checker.check_model(made.model)
    (node,) = read_fused(made.model)
    assert [variant.name for variant in node.plan.variants] == ["user"]
    original = parse(text)
    for inputs in sizes:
        assert run(made.model, inputs).tobytes() == run(original, inputs).tobytes()
        wanted = evaluate(original, inputs)["y"]
        for order in ("forward", "backward", 7):
            tensors = [{**inputs, **constants}[name] for name in node.tensors]
            (y,) = run_plan(node.plan, node.source, tensors, order=order)
            assert difference(y, wanted, original.graph.output[0].type.tensor_type.elem_type) == ""
    for architecture in architectures():
        assert compile_cubin(node.source, f"sm_{architecture}", node.plan.options)[:4] == b"\x7fELF"


def test_the_shipped_example() -> None:
    made = fuse(SOFTCAP, EXAMPLES)
    assert [fusion.rule for fusion in made.plan.fusions] == ["softcap"]
    random = np.random.default_rng(0)
    sizes = [{"x": (random.standard_normal(shape) * 10).astype(np.float32)} for shape in ((3, 100), (1, 1), (300, 7))]
    check(SOFTCAP, made, [*sizes, {"x": np.zeros((0, 5), np.float32)}], {"cap": np.array(3, np.float32)})


def test_a_kernel_with_sizes_and_shared_memory(folder: Path) -> None:
    made = fuse(SQUARED, folder)
    assert [fusion.rule for fusion in made.plan.fusions] == ["bias-squared-relu"]
    (step,) = made.plan.fusions[0].kernel.plan.variants[0].steps
    assert step.arguments == ("i0", "i1", "o0", "i64:i0.n i0.2 //", "i32:i0.2")
    assert (step.grid, step.block, step.shared) == (
        ("i0.n i0.2 //", "i0.2 64 ceil", "1"), ("64", "1", "1"), "i1.0 2 *")
    random = np.random.default_rng(1)
    sizes = [
        {"x": random.standard_normal((b, 4, n)).astype(np.float16),
         "bias": random.standard_normal(n).astype(np.float16)}
        for b, n in ((2, 64), (1, 1), (3, 130))
    ]
    check(SQUARED, made, sizes, {})


@pytest.mark.parametrize(("old", "new", "code"), [
    ("float16[n] bias", "float16[4, n] bias", "rank"),
    ("y = Mul(r, r)", "q = Neg(r) y = Mul(r, q)", "different-value"),
    ("float16", "float", "type"),
])
def test_what_the_rule_refuses_stays(folder: Path, old: str, new: str, code: str) -> None:
    made = fuse(SQUARED.replace(old, new), folder)
    assert [fusion for fusion in made.plan.fusions if fusion.rule == "bias-squared-relu"] == []
    assert code in {refusal.code for refusal in made.refusals if refusal.rule == "bias-squared-relu"}


def test_an_axis_that_a_value_lacks_is_a_refusal(folder: Path) -> None:
    (folder / "rule.yaml").write_text(RULE.replace('{i32: "dim(x, -1)"}', '{i32: "dim(x, -4)"}'))
    made = fuse(SQUARED, folder)
    (refusal,) = (refusal for refusal in made.refusals if refusal.rule == "bias-squared-relu")
    assert (refusal.code, refusal.message) == (
        "rank", "the kernel's launch asks for axis -4 of 'x', which has 3 axes here")


DECLARE = (
    'help: Declare extern "C" __global__ void bias_squared_relu(...) in it, with a pointer for each input and output, '
    "in this order, and then the arguments."
)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("__global__ void __launch_bounds__(64) bias_squared_relu", "__global__ void squared",
     "kernel.cu has no function bias_squared_relu."),
    ("__global__ void __launch_bounds__(64) bias", "__device__ void bias",
     "kernel.cu has no __global__ function bias_squared_relu."),
    ('extern "C" ', "", 'kernel.cu declares bias_squared_relu without extern "C".'),
    (", int columns)", ")",
     "kernel.cu declares bias_squared_relu with 4 parameters, and the rule passes 5."),
    ("long long rows", "const long long* rows",
     "kernel.cu declares parameter 4 of bias_squared_relu as a pointer, and the rule passes an integer."),
    (KERNEL, '// extern "C" __global__ void bias_squared_relu()', "kernel.cu has no function bias_squared_relu."),
])
def test_a_kernel_that_does_not_fit_its_rule(folder: Path, old: str, new: str, message: str) -> None:
    assert old in KERNEL
    (folder / "kernel.cu").write_text(KERNEL.replace(old, new))
    with pytest.raises(RuleError) as raised:
        load_rules([folder])
    place = f"{folder}/rule.yaml:16:10"
    excerpt = "   |\n16 |   entry: bias_squared_relu\n   |          ^^^^^^^^^^^^^^^^^"
    assert str(raised.value) == f"{message}\n--> {place}\n{excerpt}\n{DECLARE}"


def test_a_missing_kernel_file(folder: Path) -> None:
    (folder / "kernel.cu").unlink()
    with pytest.raises(RuleError) as raised:
        load_rules([folder])
    assert str(raised.value) == (
        f"There is no file kernel.cu beside the rule file.\n--> {folder}/rule.yaml:15:9\n   |\n"
        "15 |   file: kernel.cu\n   |         ^^^^^^^^^\nhelp: Check the name."
    )


@pytest.mark.parametrize("text", [
    KERNEL,
    KERNEL.replace('extern "C" ', "").replace("__global__", 'extern "C" {\n__global__') + "}",
    KERNEL.replace("int columns", "Pair<int, int> columns /* ) , */"),
    '#define MAKE(name, ...) extern "C" __global__ void name(__VA_ARGS__) {}\nMAKE(bias_squared_relu, int* x)',
])
def test_kernels_that_are_accepted(folder: Path, text: str) -> None:
    (folder / "kernel.cu").write_text(text)
    (rule,) = load_rules([folder]).fuse
    assert rule.kernel is not None and rule.kernel.source == text


def test_a_kernel_that_does_not_compile_for_the_target_is_left(folder: Path) -> None:
    hopper = KERNEL.replace('extern "C"', "#if __CUDA_ARCH__ < 900\n#error made for Hopper\n#endif\nextern \"C\"")
    (folder / "kernel.cu").write_text(hopper)
    for target, fused in (("H100", 1), ("A100", 0)):
        made = optimise(parse(SQUARED), Options(rules=[folder], verify=False, compile=True, target=target))
        assert len(made.regions) == fused
        refused = [refusal for refusal in made.refusals if refusal.code == "does-not-compile"]
        assert len(refused) == 1 - fused
    assert refused[0].rule == "bias-squared-relu"
    assert "made for Hopper" in refused[0].message
    assert refused[0].remedy == "Mend the rule's kernel, or plan for a GPU that it compiles for: target=\"GPU\"."
