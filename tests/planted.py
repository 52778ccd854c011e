"""Faults of one percent planted in the kernels of fused models.

A kernel that spoils the outputs is added to the text, and a step that launches it to the launch plan: whatever
schedule or user wrote the text, it is wrong by as much.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx
from onnx import TensorProto

from onnxfuse.lowering.launch import DOMAIN, LaunchPlan, Step
from onnxfuse.optimised import Optimised
from onnxfuse.rewriting import Rewritten, read_fused, rewrite
from onnxfuse.schedules.source import Given

_TYPES = {
    TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double", TensorProto.FLOAT16: "__half",
    TensorProto.BFLOAT16: "__nv_bfloat16", TensorProto.BOOL: "bool", TensorProto.INT8: "signed char",
    TensorProto.UINT8: "unsigned char", TensorProto.INT16: "short", TensorProto.UINT16: "unsigned short",
    TensorProto.INT32: "int", TensorProto.UINT32: "unsigned int", TensorProto.INT64: "long long",
    TensorProto.UINT64: "unsigned long long",
}
_SPOILED = {
    TensorProto.FLOAT: "y[i] * 1.01f", TensorProto.DOUBLE: "y[i] * 1.01", TensorProto.BOOL: "!y[i]",
    TensorProto.FLOAT16: "__float2half_rn(__half2float(y[i]) * 1.01f)",
    TensorProto.BFLOAT16: "__float2bfloat16_rn(__bfloat162float(y[i]) * 1.01f)",
}
"""A hundredth more; an integer is one more."""

HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
"""What the text of a fault needs."""

THREADS = 256
"""Of a fault's block; one for each element."""


def fault(dtype: int, place: int = 0) -> tuple[str, str]:
    """Name and text of a kernel that spoils an output of this type: ``y``, of ``n`` elements."""
    name = f"planted_fault_{place}"
    return name, (f'\nextern "C" __global__ void {name}({_TYPES[dtype]}* __restrict__ y, const long long n) {{\n'
                  f"  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
                  f"  if (i < n) y[i] = {_SPOILED.get(dtype, 'y[i] + 1')};\n}}\n")


def spoiled(plan: LaunchPlan, source: str, variants: Collection[int] | None = None) -> tuple[LaunchPlan, str]:
    """A plan and its text with every output spoiled, in these variants or in all."""
    text = HEADERS + source
    steps = []
    for place, output in enumerate(plan.outputs):
        count = " ".join(["1", *(f"{size} *" for size in output.shape)])
        name, kernel = fault(output.dtype, place)
        text += kernel
        steps.append(Step(name, (f"{count} {THREADS} ceil", "1", "1"), (str(THREADS), "1", "1"),
                          (f"o{place}", f"i64:{count}")))
    changed = [replace(variant, steps=(*variant.steps, *steps)) if variants is None or place in variants else variant
               for place, variant in enumerate(plan.variants)]
    return replace(plan, variants=tuple(changed)), text


def plant(rewritten: Rewritten, op: str, variants: Collection[int] | None = None) -> Rewritten:
    """The fused model with a fault in the kernel of an operator type, in every node that has it."""
    model = onnx.ModelProto()
    model.CopyFrom(rewritten.model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == op:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            plan, text = spoiled(LaunchPlan.from_json(attributes["plan"].s.decode()),
                                 attributes["source"].s.decode(), variants)
            attributes["plan"].s, attributes["source"].s = plan.to_json().encode(), text.encode()
    return replace(rewritten, model=model)


def planted_regions(optimised: Optimised, op: str) -> Optimised:
    """The same before it is verified, with a fault in the kernel of an operator type, in every region that has it."""
    lost = {placed.region for placed in optimised.rewritten.placed if placed.op == op}
    regions = []
    for place, region in enumerate(optimised.regions):
        kernel = region.kernel
        plan, text = spoiled(kernel.plan, kernel.source) if place in lost else (kernel.plan, kernel.source)
        regions.append(replace(region, made=replace(kernel, code=Given(text), plan=plan)))
    rewritten = rewrite(optimised.folded.proto, optimised.graph, regions)
    return replace(optimised, regions=tuple(regions), rewritten=rewritten)


def broken(rewritten: Rewritten, op: str) -> Rewritten:
    """The fused model with a text that does not compile in every node of an operator type."""
    model = onnx.ModelProto()
    model.CopyFrom(rewritten.model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == op:
            for attribute in node.attribute:
                if attribute.name == "source":
                    attribute.s += b"\nint broken = nowhere;\n"
    return replace(rewritten, model=model)


def kernels(rewritten: Rewritten) -> list[str]:
    """Operator types of the fused nodes, each once."""
    return list(dict.fromkeys(node.op for node in read_fused(rewritten.model)))


def damaged(rewritten: Rewritten, *ops: str) -> Rewritten:
    """The fused model with the first Add, Mul or Sub of these functions turned into another."""
    model = onnx.ModelProto()
    model.CopyFrom(rewritten.model)
    for function in model.functions:
        if function.name in ops:
            node = next(node for node in function.node if node.op_type in ("Add", "Mul", "Sub"))
            node.op_type = "Sub" if node.op_type == "Add" else "Add"
    return Rewritten(model, rewritten.placed)


def changeable(rewritten: Rewritten) -> list[str]:
    """Functions that ``damaged`` can change."""
    return [function.name for function in rewritten.model.functions
            if any(node.op_type in ("Add", "Mul", "Sub") for node in function.node)]
