"""The pointwise schedule: one thread a vector of neighbouring output elements.

The loop runs over the row-major place ``L`` in the outputs, which all have the same number of elements.  An operand
that is laid out like the outputs is read at ``L`` itself; broadcast and moved operands are read where the index
arithmetic says, as vectors where neighbouring outputs need neighbouring elements.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.graph.dims import product
from onnxfuse.lowering.context import Unlowerable
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.launch import Step, Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Puller, Scalar
from onnxfuse.lowering.scalars import TYPES
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import (
    Kernel,
    Signature,
    best_width,
    fits_narrow,
    header,
    is_vector,
    make_plan,
    moving_loads,
    narrow_guards,
    scattered_inputs,
    vector_guards,
)
from onnxfuse.schedules.text import Lanes, Scope, Writer

THREADS = 256


def pointwise_kernel(lowered: Lowered, rule: str, sizes: Mapping[str, int]) -> Kernel | Refusal:
    """A kernel for a region without reductions, or why there is none."""
    outputs = lowered.program.outputs
    total = product(outputs[0].shape)
    if any(product(output.shape) != total for output in outputs):
        names = lowered.binding.names
        shapes = ", ".join(str([str(size.substitute(names)) for size in output.shape]) for output in outputs)
        return Refusal("iteration-shape", f"the outputs have different numbers of elements: {shapes}")
    space = IndexSpace()
    place = space.base("@L", total)
    puller = Puller(space)
    try:
        roots = [puller.element(output, space.delinear(place, output.shape)) for output in outputs]
    except Unlowerable as stopped:
        return stopped.refusal
    lanes_of = {width: Lanes(space, puller, "@L", "", width) for width in (1, 2, 4, 8)}
    loads = moving_loads([*roots, *puller.gathered.values()], lanes_of[1])
    dtypes = [output.dtype for output in outputs] + [load.dtype for load in loads]
    width = best_width(lanes_of, loads, total, dtypes)
    lanes = Lanes(space, puller, "@L", "", width)
    lanes._multiple(total)
    signature = Signature(lowered)
    body = _body(Writer(lanes, signature.sizes), roots, lowered)
    size = Writer(lanes, signature.sizes).size(total)
    used = f"{body} {size}"
    source = [
        header(),
        f"// {rule}: {', '.join(lowered.program.operators)}\n",
        "template <int width, typename idx> __device__ __forceinline__ void pointwise("
        f"{signature.parameters(used, 'idx')}) {{\n"
        f"  const idx L = ((idx)blockIdx.x * {THREADS} + threadIdx.x) * width;\n"
        f"  if (L >= {size}) return;\n{body}}}\n",
    ]
    vectors = [(f"o{index}", TYPES[output.dtype].size) for index, output in enumerate(outputs)]
    vectors += [
        (f"i{load.input}", TYPES[load.dtype].size)
        for load in loads
        if lanes.stride(load.offset) == 1 and is_vector(load, lanes)
    ]
    count, variants = expression(total, lowered.binding.symbols), []
    narrow = narrow_guards(lowered)
    wanted = [(width, 32, narrow + vector_guards(lowered, lanes, vectors))] if fits_narrow(lowered) else []
    for lane_count, bits, guards in [*wanted, (1, 64, ())]:
        name, index = f"pointwise_{lane_count}_{bits}", "int" if bits == 32 else "long long"
        source.append(signature.entry(name, f"pointwise<{lane_count}, {index}>", used, index, THREADS))
        grid = f"{count} {THREADS * lane_count} ceil"
        step = Step(name, (grid, "1", "1"), (str(THREADS), "1", "1"), signature.arguments(used, bits))
        variants.append(Variant(f"width {lane_count}, {bits}-bit", (step,), guards))
    plan = make_plan(lowered, rule, puller, variants)
    return Kernel("pointwise", "".join(source), plan, scattered_inputs(loads, lanes_of))


def _body(writer: Writer, roots: list[Scalar], lowered: Lowered) -> str:
    stores = []
    for index, (root, output) in enumerate(zip(roots, lowered.program.outputs, strict=True)):
        stores.append((index, TYPES[output.dtype], writer.scalar(root)))
    lane = writer.lines[Scope.LANE]
    outer = [line for scope in (Scope.KERNEL, Scope.ROW, Scope.VECTOR) for line in writer.lines[scope]]
    outer += [f"{kind.compute} w{index}[width];" for index, kind, _ in stores]
    inner = [*lane, *(f"w{index}[v] = {text};" for index, _, text in stores)]
    after = [f"of::store(o{index} + L, of::pack<{kind.storage}>(w{index}));" for index, kind, _ in stores]
    lines = [
        *(f"  {line}" for line in outer),
        "#pragma unroll",
        "  for (int v = 0; v < width; ++v) {",
        *(f"    {line}" for line in inner),
        "  }",
        *(f"  {line}" for line in after),
    ]
    return "\n".join(lines) + "\n"
