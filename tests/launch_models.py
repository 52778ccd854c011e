"""Fused nodes whose launches ask for what GPUs have from sm_90 on, made by hand.

Over the stand-in for the driver they run as C functions of the kernels' names; on a GPU their texts run, which give a
wrong result where a launch is not what the plan asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fused_models import FLOAT, Fused, add_one, add_two, elementwise

from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant

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


def through_scratch(images: Mapping[str, bytes] | None = None) -> Fused:
    """y = x + 1 + 1 in clusters through a scratch buffer: the second launch waits for the first one in its kernel."""
    plan = LaunchPlan(
        "add-two-clustered", 1, ("i0.0",), (), (Output(FLOAT, ("s0",)),),
        (Variant("scratch", (in_clusters(("i0", "t0", "i64:s0")), in_clusters(("t0", "o0", "i64:s0")))),),
        scratch=("s0 4 *",),
    )
    return Fused(plan, CLUSTERED, add_two().body, images=images or {})
