"""Fused nodes made by hand whose launches ask for what GPUs have from sm_90 on, share scratch or call a library.

Over the stand-in for the driver they run as C functions of the kernels' names; on a GPU their texts run, which give a
wrong result where a launch is not what the plan asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fused_models import ADD_ONE, DOMAIN, FLOAT, Fused, add_one, add_two, constant, elementwise
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant
from onnxfuse.lowering.routines import ACTIVATIONS, LibraryCall
from onnxfuse.lowering.tensor_map import TensorMap

CLUSTERED = r"""
extern "C" __global__ void add_one(const float* x, float* y, long long n) {
  unsigned blocks = 2;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
    y[i] = x[i] + (blocks == 2 ? 1.0f : 1000.0f);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
"""
"""Adds 1 in clusters of two blocks, and a thousand in others."""

TILED = r"""
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

// A tile of 256 elements through shared memory, which the tensor memory accelerator fills and empties: its first
// coordinate is x, and where ROWS, its second is y.
template <bool ROWS>
__device__ void add(const TensorMap* in, const TensorMap* out, int x, int y) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(1024) float tile[256];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned to = __cvta_generic_to_shared(tile), full = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(full) : "memory");
    if constexpr (ROWS)
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {%3, %4}], [%2];" :: "r"(to), "l"(in), "r"(full), "r"(x), "r"(y) : "memory");
    else
      asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {%3}], [%2];" :: "r"(to), "l"(in), "r"(full), "r"(x) : "memory");
  }
  for (unsigned done = 0; done == 0;)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(full) : "memory");
  tile[threadIdx.x] += 1.0f;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    if constexpr (ROWS)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                   :: "l"(out), "r"(to), "r"(x), "r"(y) : "memory");
    else
      asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];"
                   :: "l"(out), "r"(to), "r"(x) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#endif
}
extern "C" __global__ void add_tiles(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out) {
  add<true>(&in, &out, 0, 8 * blockIdx.x);
}
extern "C" __global__ void add_rows(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out) {
  add<false>(&in, &out, 256 * blockIdx.x, 0);
}
"""
"""Adds 1 to tiles of eight rows of 32 elements, and to 256 elements of a vector."""

HOPPER = "90 sm <="
"""The guard of a variant that asks for what GPUs have from sm_90 on."""


def in_clusters(arguments: tuple[str, ...] = ("i0", "o0", "i64:s0")) -> Step:
    """A launch of ``add_one`` in clusters of two blocks, that may begin before the one before it ends."""
    return Step("add_one", ("i0.n 256 ceil 512 min 2 *", "1", "1"), ("128", "1", "1"), arguments,
                cluster=("2", "1", "1"), dependent=True)


def clustered(images: Mapping[str, bytes] | None = None, guarded: bool = True) -> Fused:
    """y = x + 1 in clusters; where it is guarded, older GPUs have a variant of their own."""
    plain = add_one(images, CLUSTERED)
    variants = [Variant("clusters", (in_clusters(),), (HOPPER,) if guarded else ())]
    if guarded:
        variants.append(Variant("plain", (elementwise("add_one", ("i0", "o0", "i64:s0")),)))
    return replace(plain, plan=replace(plain.plan, region="add-clustered", variants=tuple(variants)))


def tiled(images: Mapping[str, bytes] | None = None) -> Fused:
    """y = x + 1 by tensor maps of rank 2, where rows of 32 are whole, and else of rank 1."""
    def step(kernel: str, *arguments: str) -> Step:
        return Step(kernel, ("s0 256 ceil", "1", "1"), ("256", "1", "1"), arguments)

    maps = [
        *(TensorMap(base, "float32", ("32", "s0 32 //"), ("128",), (32, 8), swizzle=128, promotion=256)
          for base in ("i0", "o0")),
        *(TensorMap(base, "float32", ("s0",), (), (256,), fill="nan") for base in ("i0", "o0")),
    ]
    variants = (Variant("tiles", (step("add_tiles", "m0", "m1"),), ("s0 32 % 0 ==",)),
                Variant("vector", (step("add_rows", "m2", "m3"),)))
    plain = add_one(images, TILED)
    return replace(plain, plan=replace(plain.plan, region="add-tiled", variants=variants, maps=tuple(maps)))


def through_scratch(images: Mapping[str, bytes] | None = None) -> Fused:
    """y = x + 1 + 1 in clusters through a scratch buffer: the second launch waits for the first one in its kernel."""
    plan = LaunchPlan(
        "add-two-clustered", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),),
        (Variant("scratch", (in_clusters(("i0", "t0", "i64:s0")), in_clusters(("t0", "o0", "i64:s0")))),),
        scratch=("s0 4 *",),
    )
    return Fused(plan, CLUSTERED, add_two().body, images=images or {})


def add_four(images: Mapping[str, bytes] | None = None) -> Fused:
    """y = x + 1 + 1 + 1 + 1 through three scratch buffers, or through two of the same in another variant."""
    def steps(*ways: str) -> tuple[Step, ...]:
        return tuple(elementwise("add_one", (*way.split(), "i64:s0")) for way in ways)

    variants = (Variant("three", steps("i0 t0", "t0 t1", "t1 t2", "t2 o0"), ("s0 200 <",)),
                Variant("two", steps("i0 t1", "t1 t0", "t0 t1", "t1 o0")))
    plan = LaunchPlan("add-four", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),), variants, scratch=("s0 4 *",) * 3)
    body = [constant("four", 4.0), helper.make_node("Add", ["x", "four"], ["y"])]
    return Fused(plan, ADD_ONE, body, images=images or {})


TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float32": FLOAT, "tf32": FLOAT}


@dataclass(frozen=True)
class Product:
    """y = f(a b + c) for a batch of matrices; ``a`` and ``b`` may be stored transposed, and ``b`` may be one for all.

    ``fallback``: behind the call stands a variant that gives ``a + 1``, and one that gives ``a + 2``, for square
    matrices, so that results tell which one ran.
    """

    dtype: str = "float32"
    transpose_a: bool = False
    transpose_b: bool = False
    one_b: bool = False
    workspace: int = 0
    activation: str = ""
    bias: bool = False
    algorithm: int = 0
    fallback: bool = False
    added: bool = False

    def sizes(self) -> tuple[str, ...]:
        """Those of the call: s0 matrices of s1 by s3, with s2 terms."""
        turned = (str(int(self.transpose_a)), str(int(self.transpose_b)))
        more = (str(ACTIVATIONS.index(self.activation)), str(self.algorithm))
        return ("s1", "s3", "s2", "s0", "s1 s2 *", "0" if self.one_b else "s2 s3 *", "s1 s3 *", *turned, *more)

    def call(self, *arguments: str) -> LibraryCall:
        """The call, with a workspace where there is one."""
        room = ("t0",) if self.workspace else ()
        *read, written = arguments
        more = tuple(f"i{2 + place}" for place in range(self.bias + self.added))
        routine = f"gemm{'_bias' * self.bias}{'_add' * self.added}"
        return LibraryCall(routine, self.dtype, (*read, *more, written, *room), self.sizes())

    def fused(self) -> Fused:
        """A node that has no kernel of its own."""
        a = ("i0.2", "i0.1") if self.transpose_a else ("i0.1", "i0.2")
        own = 0 if self.one_b else 1
        variants = [Variant("library", (self.call("i0", "i1", "o0"),), ("1 s2 <=",) if self.fallback else ())]
        if self.fallback:
            ways = ("i0 o0", "i0 t1", "t1 o0")
            add, first, second = (elementwise("add_one", (*way.split(), "i64:i0.n")) for way in ways)
            variants += [Variant("generated", (add,), ("0 s2 <=",)), Variant("last", (first, second))]
        plan = LaunchPlan(
            "product", 2 + self.bias + self.added, ("i0.0", *a, f"i1.{own if self.transpose_b else own + 1}"), (),
            (Output(TYPES[self.dtype], ("s0", "s1", "s3")),), tuple(variants),
            scratch=(str(self.workspace), *(["i0.n 4 *"] if self.fallback else [])) if self.workspace else (),
        )
        return Fused(plan, ADD_ONE, self.body("a"), self.inputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what the node reads."""
        return ("a", "b", *(["c"] if self.bias else []), *(["d"] if self.added else []))

    def body(self, a: str) -> list[NodeProto]:
        """The product as ONNX nodes, of ``a`` and b."""
        swap_b = [1, 0] if self.one_b else [0, 2, 1]
        turned_a = helper.make_node("Transpose" if self.transpose_a else "Identity", [a], ["left"],
                                    **({"perm": [0, 2, 1]} if self.transpose_a else {}))
        turned_b = helper.make_node("Transpose" if self.transpose_b else "Identity", ["b"], ["right"],
                                    **({"perm": swap_b} if self.transpose_b else {}))
        function = {"": "Identity", "relu": "Relu", "gelu_tanh": "Gelu"}[self.activation]
        attributes = {"approximate": "tanh"} if function == "Gelu" else {}
        added = helper.make_node("Add" if self.bias else "Identity", ["p", "c"] if self.bias else ["p"], ["s"])
        more = helper.make_node("Add" if self.added else "Identity", ["s", "d"] if self.added else ["s"], ["t"])
        return [turned_a, turned_b, helper.make_node("MatMul", ["left", "right"], ["p"]), added, more,
                helper.make_node(function, ["t"], ["y"], **attributes)]

    def of_sum(self, images: Mapping[str, bytes] | None = None) -> Fused:
        """y = (a + 1) b: a kernel writes scratch that the library reads, and its workspace is scratch too."""
        plain = self.fused()
        add = Step("add_one", ("i0.n 128 ceil 1024 min", "1", "1"), ("128", "1", "1"), ("i0", "t1", "i64:i0.n"))
        plan = replace(
            plain.plan, region="product-of-sum", scratch=(str(self.workspace), "i0.n 4 *"),
            variants=(Variant("library", (add, self.call("t1", "i1", "o0"))),))
        one = [constant("one", 1.0), helper.make_node("Add", ["a", "one"], ["sum"])]
        return replace(plain, plan=plan, body=[*one, *self.body("sum")], images=images or {})

    def model(self, fused: Fused) -> ModelProto:
        """A model of one node with inputs and an output of float32, which are rounded to the node's type."""
        def value(name: str, kind: int, rank: int) -> ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(rank)])

        kind, rank = TYPES[self.dtype], 2 if self.one_b else 3
        nodes = [
            helper.make_node("Cast", ["x"], ["a"], to=kind), helper.make_node("Cast", ["w"], ["b"], to=kind),
            *([helper.make_node("Cast", ["v"], ["c"], to=kind)] if self.bias else []),
            *([helper.make_node("Cast", ["u"], ["d"], to=kind)] if self.added else []),
            fused.node("node0", "Region0", [], self.inputs, "y"), helper.make_node("Cast", ["y"], ["z"], to=FLOAT),
        ]
        read = [value("x", FLOAT, 3), value("w", FLOAT, rank), *([value("v", FLOAT, 1)] if self.bias else []),
                *([value("u", FLOAT, 3)] if self.added else [])]
        graph = helper.make_graph(
            nodes, "product", read, [value("z", FLOAT, 3)], value_info=[value("y", kind, 3)])
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)],
            functions=[fused.function("Region0")], ir_version=9)


PRODUCTS = {
    "product": Product(), "product_float16": Product("float16", transpose_b=True, workspace=1 << 12),
    "product_bfloat16": Product("bfloat16", transpose_a=True, one_b=True),
    "product_turned": Product(transpose_a=True, transpose_b=True, one_b=True, workspace=1 << 20),
    "product_tf32": Product("tf32", one_b=True, activation="relu"),
    "product_bias": Product("float16", one_b=True, bias=True, workspace=1 << 12, algorithm=2),
    "product_bias_relu": Product("float32", transpose_b=True, bias=True, activation="relu", algorithm=15),
    "product_gelu": Product("float32", activation="gelu_tanh"),
    "product_bias_gelu": Product("float32", one_b=True, bias=True, activation="gelu_tanh"),
    "product_add": Product("bfloat16", one_b=True, added=True, workspace=1 << 12),
    "product_bias_add": Product("float32", transpose_a=True, bias=True, added=True, activation="relu"),
    "product_or_sum": Product(one_b=True, workspace=1 << 12, fallback=True),
}
"""By the names of their models."""
