"""From ONNX text to a kernel, and every way to run that kernel compared with float64."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import onnx
from emulator import prepare, run_plan, variants_that_hold
from onnx import TensorProto, numpy_helper
from reference import FLOATS, Array, difference, element_types, evaluate, numpy_type

from onnxfuse.graph import Graph, Value
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered, hosts, lower
from onnxfuse.operators import load_graph
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Choice, Kernel, Request, make_kernel
from onnxfuse.schedules.source import Given, Source

NAMES = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "double": TensorProto.DOUBLE,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
    "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
}
FLOATING = ("float", "float16", "bfloat16", "double")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED

KERNEL = re.compile(r'extern "C" (__global__ void __launch_bounds__\([^)]*\)\s+(\w+)\()')
SHAPE, QUOTED = re.compile(r"\b(?:b?float|double|u?int|bool)\d*\[[^\]]*\]"), re.compile(r'"([^"]*)"')


@dataclass(frozen=True)
class Region:
    """A whole model as one region's tensors."""

    model: onnx.ModelProto
    graph: Graph
    lowered: Lowered


@dataclass(frozen=True)
class Made(Region):
    """A region, from model to kernel."""

    kernel: Kernel


def with_constants(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model, whose inputs of these names became its initialisers."""
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    kept = [info for info in model.graph.input if info.name not in arrays]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def parse(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model from the text of its graph; an output called "_" is absent, constants of 16-bit floats are whole.

    A size in quotes may have any name; the parser of onnx 1.19 takes only words, which stand for them there.
    """
    imports = f'"" : {opset}, "com.microsoft" : 1, "onnxfuse.canonical" : 1'
    names: dict[str, str] = {}
    plain = SHAPE.sub(lambda shape: QUOTED.sub(
        lambda size: names.setdefault(size[1], f"quoted{len(names)}"), shape[0]), text)
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{plain}")
    quoted = {word: name for name, word in names.items()}
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in quoted:
                size.dim_param = quoted[size.dim_param]
    for node in model.graph.node:
        node.output[:] = ["" if name == "_" else name for name in node.output]
    for tensor in model.graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            # The parser takes the numbers for bit patterns.
            whole = np.array(tensor.int32_data, FLOATS[tensor.data_type]).reshape(tuple(tensor.dims))
            tensor.CopyFrom(
                onnx.helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, whole.tobytes(), raw=True)
            )
    return model


def attempt(
    model: onnx.ModelProto, planned: Mapping[str, int] | None = None, schedule: str | None = None
) -> Made | Refusal:
    """The whole model as one region; ``planned`` are sizes to make variants for; ``schedule`` is the first that has a
    kernel where it is None."""
    region = region_of(model)
    if isinstance(region, Refusal):
        return region
    kernel = make_kernel(Request(region.lowered, "test", planned or {}), schedule)
    return kernel if isinstance(kernel, Refusal) else Made(**vars(region), kernel=kernel)


def region_of(model: onnx.ModelProto) -> Region | Refusal:
    """The whole model as one region's tensors, but for what only decides sizes."""
    graph = load_graph(model)
    computed = [node for node in graph.nodes if node.op != "Constant"]
    nodes = [node for node in computed if not all(_is_size(value) for value in node.outputs)]
    lowered = lower(nodes, graph.outputs, graph)
    return lowered if isinstance(lowered, Refusal) else Region(model, graph, lowered)


def _is_size(value: Value | None) -> bool:
    """Whether a value only decides sizes: its contents are known from them, and nobody else looks at it."""
    return value is None or (value.elements is not None and not value.is_output)


def make(
    text: str, opset: int = 20, planned: Mapping[str, int] | None = None, schedule: str | None = None
) -> Made:
    """The whole model as one region, which must be possible; see ``attempt``."""
    made = attempt(parse(text, opset), planned, schedule)
    assert isinstance(made, Made), made
    return made


def told(made: Made, choice: Choice | None, planned: Mapping[str, int]) -> Made:
    """The region with another kernel of its schedule: what tuning tells it to be."""
    kernel = make_kernel(Request(made.lowered, "test", planned, choice), made.kernel.schedule)
    assert isinstance(kernel, Kernel), kernel
    return replace(made, kernel=kernel)


def refused(text: str, opset: int = 20) -> Refusal:
    """Why a model is no region."""
    made = attempt(parse(text, opset))
    assert isinstance(made, Refusal)
    return made


def only(made: Made, variants: Sequence[Variant]) -> Made:
    """The kernel with these variants alone. Of the others' kernels the compiler reads every line and makes no code,
    which is most of its work."""
    assert variants, [each.name for each in made.kernel.plan.variants]
    launched = {step.kernel for variant in variants for step in variant.launches}
    source = KERNEL.sub(lambda found: found[0] if found[2] in launched else f"static {found[1]}", made.kernel.source)
    plan = replace(made.kernel.plan, variants=tuple(variants))
    return replace(made, kernel=replace(made.kernel, plan=plan, code=Given(source)))


def compile_all(made: Sequence[Made]) -> None:
    """Compile the texts for the emulator, two at a time."""
    prepare([one.kernel.source for one in made])


def shapes_of(made: Region, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's inputs for sizes of its symbols."""
    return {
        value.name: tuple(size.evaluate(sizes) for size in value.declared or value.shape) for value in made.graph.inputs
    }


def random_array(dtype: int, shape: Sequence[int], rng: np.random.Generator, low: int = -4, high: int = 5) -> Array:
    """Normal floats, integers of [low, high), or booleans."""
    if dtype in FLOATS:
        return rng.standard_normal(shape).astype(FLOATS[dtype])
    if dtype == TensorProto.BOOL:
        return rng.random(shape) < 0.5
    kind = numpy_type(dtype)
    return rng.integers(0 if kind.kind == "u" else low, high, shape).astype(kind)


def random_inputs(made: Region, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Inputs of a model by name."""
    rng = np.random.default_rng(seed)
    types = element_types(made.model)
    return {name: random_array(types[name], shape, rng) for name, shape in shapes_of(made, sizes).items()}


def short_inputs(made: Region, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """The same, float32 of as many digits as tensor cores keep, so that products of it are as exact as sums."""
    return {name: short(array) if array.dtype == np.float32 else array
            for name, array in random_inputs(made, sizes, seed).items()}


def short(array: Array) -> Array:
    """Numbers of float32 with as many digits as TF32 has."""
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def arguments(made: Region, inputs: Mapping[str, Array]) -> list[Array]:
    """The kernel's tensor inputs."""
    constants = {tensor.name: tensor for tensor in made.model.graph.initializer}
    return [
        inputs[value.name]
        if value.name in inputs
        else value.constant
        if value.name not in constants
        else numpy_helper.to_array(constants[value.name])
        for value in made.lowered.tensors
    ]


def alone(kernel: Kernel, variants: Collection[str]) -> str:
    """A kernel's text with what these variants launch alone: the others need not be compiled."""
    if not isinstance(kernel.code, Source):
        return kernel.source
    return kernel.code.keeping({step.kernel for variant in kernel.plan.variants if variant.name in variants
                                for step in variant.launches}).text


def wrong_results(
    made: Made,
    inputs: Mapping[str, Array],
    *,
    length: int = 1,
    slack: float = 1.0,
    scales: Mapping[str, float] | None = None,
    orders: Sequence[str | int] = ("forward",),
    misalign: bool = True,
    source: str | None = None,
    limit: int | None = None,
    multiprocessors: int = 132,
) -> Iterator[str]:
    """What is wrong with a kernel on these inputs, as it is found: every variant that holds, aligned and not, in
    several orders.

    Args:
        length, slack, scales: see ``reference.difference``; ``scales`` by output.
        source: another text to run instead of the kernel's.
        limit: how many variants to run at most, those first in the plan.
        multiprocessors: those that the plan sees.
    """
    plan, text = made.kernel.plan, made.kernel.source if source is None else source
    given = arguments(made, inputs)
    expected = evaluate(made.model, inputs)
    host = [expected[value.name] for value in hosts(made.lowered.sized)]
    outputs = [(info.name, info.type.tensor_type.elem_type) for info in made.model.graph.output]
    skewed = {place: 1 for place, array in enumerate(given) if array.size}
    placements = ({}, skewed) if misalign and skewed else ({},)
    held = [variants_that_hold(plan, given, host, misalign=placement)[:limit] for placement in placements]
    if source is None and limit is not None:
        text = alone(made.kernel, {variant for each in held for variant in each})
    right: set[tuple[object, ...]] = set()  # most variants give the same bits
    for placement, variants in zip(placements, held, strict=True):
        for variant, order in product(variants, orders):
            actual = run_plan(plan, text, given, host, variant=variant, order=order, misalign=placement,
                              multiprocessors=multiprocessors)
            for (name, dtype), array in zip(outputs, actual, strict=True):
                result = (name, array.dtype, array.shape, array.tobytes())
                if result in right:
                    continue
                scale = (scales or {}).get(name)
                wrong = difference(array, expected[name], dtype, length=length, slack=slack, scale=scale)
                if wrong:
                    yield f"output {name}, variant {variant}, misaligned {sorted(placement)}, order {order}: {wrong}"
                else:
                    right.add(result)


def failures(made: Made, inputs: Mapping[str, Array], **options: object) -> list[str]:
    """All of ``wrong_results``."""
    return list(wrong_results(made, inputs, **options))  # type: ignore[arg-type]


def fails(made: Made, inputs: Mapping[str, Array], **options: object) -> bool:
    """Whether there are any: looked for no further than to the first."""
    return any(wrong_results(made, inputs, **options))  # type: ignore[arg-type]


def check(made: Made, inputs: Mapping[str, Array], **options: object) -> None:
    """Assert that a kernel is right on these inputs; see ``failures``."""
    found = failures(made, inputs, **options)  # type: ignore[arg-type]
    assert not found, "\n".join(found[:4])


def sweep(text: str, *sizes: Mapping[str, int], opset: int = 20, **options: object) -> Made:
    """Make a kernel and check it on random inputs at several sizes."""
    made = make(text, opset)
    for seed, one in enumerate(sizes or ({},)):
        check(made, random_inputs(made, one, seed), **options)
    return made
