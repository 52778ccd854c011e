"""Models with fused nodes made by hand, for tests of the runtime that need no other stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from onnxfuse.lowering.launch import DOMAIN, HOST_INPUTS, Check, LaunchPlan, Output, Step, Variant

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

HOSTS = [f"h{index}" for index in range(HOST_INPUTS)]

ADD_ONE = r"""
extern "C" __global__ void add_one(const float* x, float* y, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
    y[i] = x[i] + 1.0f;
}
"""

KERNELS = r"""
extern "C" __global__ void plain(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.f;
}
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
  float kept[100], sum = 0;
  #pragma unroll
  for (int k = 0; k < 100; k++) kept[k] = x[threadIdx.x + k * 1024];
  #pragma unroll
  for (int k = 0; k < 100; k++) sum += kept[k] * kept[k];
  #pragma unroll
  for (int k = 0; k < 100; k++) x[threadIdx.x + k * 1024] = kept[k] / sum;
}
extern "C" __global__ void sharing(float* x, int n) {
  __shared__ float still[777];
  extern __shared__ float moving[];
  still[threadIdx.x] = x[threadIdx.x];
  moving[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = still[n] + moving[n];
}
extern "C" __global__ void picking(int* x, int n) {
  volatile int kept[16];
  for (int k = 0; k < 16; k++) kept[(k ^ n) & 15] = x[k] * n;
  x[threadIdx.x] = kept[x[n] & 15];
}
extern "C" __global__ void calling(long long* x, long long y) { x[threadIdx.x] = x[threadIdx.x + 1] % y / (y + 3); }
"""
"""Kernels with nothing to see, spilled values, shared memory of both kinds, an array indexed at run time, and calls."""

TWICE = r"""
extern "C" __global__ void add_one(const float* x, float* y, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
    y[i] = x[i] + 1.0f;
}
extern "C" __global__ void add_more(const float* x, float* y, int by, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
    y[i] = x[i] + by;
}
"""


@dataclass(frozen=True)
class Fused:
    """A fused node: its plan, kernel text and body; the body reads h0 to h7 and the tensors, and writes y."""

    plan: LaunchPlan
    source: str
    body: Sequence[onnx.NodeProto]
    tensors: Sequence[str] = ("x",)
    images: Mapping[str, bytes] = field(default_factory=dict)

    def node(self, name: str, op: str, hosts: Sequence[str], tensors: Sequence[str], output: str) -> onnx.NodeProto:
        """The node; absent hosts are empty names."""
        padded = [*hosts, *[""] * (HOST_INPUTS - len(hosts))]
        node = helper.make_node(op, [*padded, *tensors], [output], name, domain=DOMAIN,
                                plan=self.plan.to_json(), source=self.source)
        for architecture, image in self.images.items():
            tensor = helper.make_tensor("image", TensorProto.UINT8, [len(image)], image, raw=True)
            node.attribute.append(helper.make_attribute(f"image_{architecture}", tensor))
        return node

    def function(self, op: str, opset: int = 17) -> onnx.FunctionProto:
        """The body as a function of the model."""
        return helper.make_function(DOMAIN, op, [*HOSTS, *self.tensors], ["y"], self.body,
                                    [helper.make_opsetid("", opset)])


def elementwise(kernel: str, arguments: tuple[str, ...]) -> Step:
    """A step with a thread per element of tensor input 0."""
    return Step(kernel, ("i0.n 128 ceil 1024 min", "1", "1"), ("128", "1", "1"), arguments)


def constant(name: str, value: float) -> onnx.NodeProto:
    """A scalar float32 Constant."""
    return helper.make_node("Constant", [], [name], value=helper.make_tensor("value", FLOAT, [], [value]))


def add_one(images: Mapping[str, bytes] | None = None, source: str = ADD_ONE) -> Fused:
    """y = x + 1 on a float32 vector of any size."""
    plan = LaunchPlan("add-one", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),),
                      (Variant("plain", (elementwise("add_one", ("i0", "o0", "i64:i0.n")),)),))
    body = [constant("one", 1.0), helper.make_node("Add", ["x", "one"], ["y"])]
    return Fused(plan, source, body, images=images or {})


def add_aligned(images: Mapping[str, bytes] | None = None) -> Fused:
    """y = x + 1 with a variant for addresses that are multiples of 16."""
    step = elementwise("add_one", ("i0", "o0", "i64:s0"))
    plan = LaunchPlan("add-aligned", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),),
                      (Variant("wide", (step,), ("s0 1000 <", "i0.addr 16 % 0 ==", "o0.addr 16 % 0 ==")),
                       Variant("odd", (step,), ("i0.addr 8 % 4 ==",)), Variant("rest", (step,))))
    return Fused(plan, ADD_ONE, add_one().body, images=images or {})


def add_two() -> Fused:
    """y = x + 1 + 1 through a scratch buffer."""
    plan = LaunchPlan(
        "add-two", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),),
        (Variant("scratch", (elementwise("add_one", ("i0", "t0", "i64:s0")),
                             elementwise("add_one", ("t0", "o0", "i64:s0")))),),
        scratch=("s0 4 *",),
    )
    body = [constant("two", 2.0), helper.make_node("Add", ["x", "two"], ["y"])]
    return Fused(plan, ADD_ONE, body)


def add_host() -> Fused:
    """y = x + h0[1], the number in host memory; x must have h0[0] elements."""
    plan = LaunchPlan(
        "add-host", 1, ("i0.0", "h0.1"), (Check("h0.n 2 ==", "two numbers are wanted"),
                                          Check("s0 h0.0 ==", "x has not the size that was promised")),
        (Output(FLOAT, ("s0",)),),
        (Variant("hopper", (elementwise("add_more", ("i0", "o0", "i32:s1", "i64:s0")),), ("sm 90 ==",)),
         Variant("rest", (elementwise("add_more", ("i0", "o0", "i32:s1", "i64:s0")),))),
    )
    body = [
        helper.make_node("Constant", [], ["at"], value=helper.make_tensor("value", INT64, [1], [1])),
        helper.make_node("Gather", ["h0", "at"], ["by"]), helper.make_node("Cast", ["by"], ["by32"], to=FLOAT),
        helper.make_node("Add", ["x", "by32"], ["y"]),
    ]
    return Fused(plan, TWICE, body)


def chain(fused: Fused, count: int, hosts: Sequence[str] = (), size: int | str = "n") -> onnx.ModelProto:
    """A model of ``count`` nodes in a row from ``x`` to ``y``; ``hosts`` are int64 inputs of two elements."""
    names = ["x", *(f"v{index}" for index in range(1, count)), "y"]
    nodes = [fused.node(f"node{i}", "Region0", hosts, [names[i]], names[i + 1]) for i in range(count)]
    inputs = [helper.make_tensor_value_info("x", FLOAT, [size])]
    inputs += [helper.make_tensor_value_info(host, INT64, [2]) for host in hosts]
    graph = helper.make_graph(
        nodes, "chain", inputs, [helper.make_tensor_value_info("y", FLOAT, [size])],
        value_info=[helper.make_tensor_value_info(name, FLOAT, [size]) for name in names[1:-1]],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=[fused.function("Region0")], ir_version=9,
    )


def bodies(fused: Fused) -> onnx.ModelProto:
    """y = x and ``m`` times a node's result of it, in a Loop, in each branch of an If in that: with ``flag`` there are
    two nodes in a row, else one."""
    def value(name: str, kind: int = FLOAT, sizes: Sequence[int | str] | None = ("n",)) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, sizes)

    twice = helper.make_graph(
        [fused.node("first", "Region0", [], ["state"], "once"), fused.node("second", "Region0", [], ["once"], "two")],
        "then", [], [value("two", sizes=None)], value_info=[value("once")])
    once = helper.make_graph([fused.node("only", "Region0", [], ["state"], "one")], "else", [],
                             [value("one", sizes=None)])
    step = [helper.make_node("Identity", ["on"], ["going"]),
            helper.make_node("If", ["flag"], ["next"], "branches", then_branch=twice, else_branch=once)]
    body = helper.make_graph(
        step, "body", [value("i", INT64, []), value("on", TensorProto.BOOL, []), value("state", sizes=None)],
        [value("going", TensorProto.BOOL, []), value("next", sizes=None)])
    graph = helper.make_graph(
        [helper.make_node("Loop", ["m", "", "x"], ["y"], "loop", body=body)], "bodies",
        [value("x"), value("m", INT64, []), value("flag", TensorProto.BOOL, [])], [value("y")])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=[fused.function("Region0")], ir_version=9,
    )


STEP = 0.25
"""The scale of ``quantized`` and of ``quantized_bodies``; their zero point is 3, and their type uint8."""


def _rounded(fused: Fused, name: str, x: str, y: str) -> list[onnx.NodeProto]:
    """A node's result as a row, rounded to quantised numbers, and a vector again: ONNX Runtime moves the rounding in
    front of Unsqueeze, and the node's output gets a new name."""
    return [
        fused.node(name, "Region0", [], [x], f"{y}_plain"),
        helper.make_node("Unsqueeze", [f"{y}_plain", "axes"], [f"{y}_row"]),
        helper.make_node("QuantizeLinear", [f"{y}_row", "step", "zero"], [f"{y}_q"]),
        helper.make_node("DequantizeLinear", [f"{y}_q", "step", "zero"], [f"{y}_steps"]),
        helper.make_node("Squeeze", [f"{y}_steps", "axes"], [y]),
    ]


def _quantization() -> list[onnx.TensorProto]:
    return [
        helper.make_tensor("axes", INT64, [1], [0]), helper.make_tensor("step", FLOAT, [], [STEP]),
        helper.make_tensor("zero", TensorProto.UINT8, [], [3]),
    ]


def quantized(fused: Fused) -> onnx.ModelProto:
    """y = two nodes in a row, each followed by rounding to quantised numbers."""
    size = [helper.make_tensor_value_info(name, FLOAT, ["n"]) for name in ("x", "y", "once_plain", "y_plain")]
    graph = helper.make_graph(
        [*_rounded(fused, "first", "x", "once"), *_rounded(fused, "second", "once", "y")], "quantized", size[:1],
        size[1:2], _quantization(), value_info=size[2:])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=[fused.function("Region0")], ir_version=9)


def quantized_bodies(fused: Fused) -> onnx.ModelProto:
    """The same in a Loop of ``m`` trips, in both branches of an If in that."""
    def value(name: str, kind: int = FLOAT, sizes: Sequence[int | str] | None = ("n",)) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, sizes)

    branches = [
        helper.make_graph(_rounded(fused, name, "state", name), name, [], [value(name, sizes=None)],
                          value_info=[value(f"{name}_plain")]) for name in ("yes", "no")
    ]
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["going"]),
         helper.make_node("If", ["flag"], ["next"], "branches", then_branch=branches[0], else_branch=branches[1])],
        "body", [value("i", INT64, []), value("on", TensorProto.BOOL, []), value("state", sizes=None)],
        [value("going", TensorProto.BOOL, []), value("next", sizes=None)])
    graph = helper.make_graph(
        [helper.make_node("Loop", ["m", "", "x"], ["y"], "loop", body=body)], "quantized_bodies",
        [value("x"), value("m", INT64, []), value("flag", TensorProto.BOOL, [])], [value("y")], _quantization())
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=[fused.function("Region0")], ir_version=9)


def quantized_scan(fused: Fused) -> onnx.ModelProto:
    """The same of each row of ``x``, in a Scan."""
    def value(name: str, sizes: Sequence[int | str] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, FLOAT, sizes)

    body = helper.make_graph(_rounded(fused, "only", "row", "done"), "body", [value("row", None)],
                             [value("done", None)], value_info=[value("done_plain", ["n"])])
    graph = helper.make_graph(
        [helper.make_node("Scan", ["x"], ["y"], "scan", body=body, num_scan_inputs=1)], "quantized_scan",
        [value("x", ["k", "n"])], [value("y", ["k", "n"])], _quantization())
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)],
        functions=[fused.function("Region0")], ir_version=9)


KINDS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
         TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32,
         TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64)
SIZES = ((), ("s0",), ("7", "s0"), ("s0 2 *",), ("s0", "i0.1"), ("0",))
"""The sizes of the outputs of ``undeclared``, which come round; its input has the sizes n and 5."""


def undeclared() -> onnx.ModelProto:
    """A node with an output of each type, one of them not wanted, and none of them declared: the model's outputs show
    what the runtime knows of each."""
    plan = LaunchPlan(
        "undeclared", 1, ("i0.0", "i0.1"), (),
        tuple(Output(kind, SIZES[place % len(SIZES)]) for place, kind in enumerate(KINDS)), (Variant("plain", ()),))
    inner = [f"v{place}" if place != 1 else "" for place in range(len(KINDS))]
    fused = Fused(plan, ADD_ONE, ())
    node = fused.node("only", "Region0", [], ["x"], "v0")
    node.output[:] = inner
    shown = [(place, name) for place, name in enumerate(inner) if name]
    graph = helper.make_graph(
        [node, *(helper.make_node("Identity", [name], [f"y{place}"]) for place, name in shown)], "undeclared",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 5])],
        [helper.make_tensor_value_info(f"y{place}", KINDS[place], None) for place, _ in shown])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)], ir_version=9)
