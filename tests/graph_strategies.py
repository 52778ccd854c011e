"""Random graphs of operators that can be lowered.

A graph grows node by node from what is there, so values are shared, and several of those that nobody reads are
outputs.  Sizes are numbers and symbols; opsets and floating types are mixed.  Each value knows a bound of its
magnitude, so that nothing overflows, and whether its elements are ``exact`` (the same in any precision): only such ones
reach operators whose result jumps.  All is drawn from one random number generator: a seed's, or hypothesis's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

# Each fills GROWERS, whose order decides what a seed draws.
import grow_elementwise  # noqa: F401
import grow_layouts  # noqa: F401
import grow_rows  # noqa: F401
import onnx
from graph_builder import FLOAT, GROWERS, Builder, Known, RandomGraph, takes
from hypothesis import strategies as st
from onnx import TensorProto, helper
from reference import FLOATS

from onnxfuse.graph.dims import dim, symbol

KINDS = (FLOAT, FLOAT, FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
OPSETS = (11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 21, 21, 22, 23, 24)
SYMBOLS = ("N", "L")
RARE = ("GroupNormalization", "InstanceNormalization", "RMSNormalization", "SpaceToDepth", "DepthToSpace", "Swish",
        "com.microsoft.BiasGelu", "com.microsoft.SkipLayerNormalization",
        "com.microsoft.SkipSimplifiedLayerNormalization")
"""Operators that few values suit: they are tried more often."""
ALL = (*GROWERS, *RARE, *RARE)
ELSEWHERE = ("com.microsoft.BiasAdd", "com.microsoft.SimplifiedLayerNormalization")
"""Operators that ONNX Runtime's CPU provider lacks."""


def grown(rng: Random, most: int = 60, kinds: Sequence[int] = KINDS, names: Sequence[str] = ALL,
          opsets: Sequence[int] = OPSETS, target: int | None = None) -> RandomGraph:
    """A model of up to about ``most`` nodes, or of ``target`` and a few: the first of the same larger model.

    Most are such that ONNX Runtime's CPU provider has kernels for all of their operators and types.
    """
    sizes = {name: rng.randint(1, 9) for name in SYMBOLS}
    kind, opset, portable = rng.choice(kinds), rng.choice(opsets), rng.randint(0, 3) > 0
    kind = FLOAT if portable and FLOAT in kinds else kind
    b = Builder(rng, kind, sizes, max(opset, 16) if kind == TensorProto.BFLOAT16 else opset, portable)
    axes = [*map(symbol, SYMBOLS), dim(1), dim(3), dim(4), dim(8), dim(12)]
    shape = tuple(rng.choice(axes) for _ in range(rng.randint(1, 4)))
    for place in range(rng.randint(1, 3)):
        b.known.append(b.input(Known("", kind, shape[rng.randint(0, len(shape) - 1) if place else 0 :], 2.0, True)))
    wanted = rng.randint(1, most)
    for _ in range(3 * most):
        if len(b.nodes) >= (wanted if target is None else target):
            break
        b.kind = rng.choice([kind, *dict.fromkeys(value.dtype for value in b.known if value.dtype in FLOATS)])
        name = rng.choice(names if portable or names is not ALL else (*names, *ELSEWHERE, *ELSEWHERE, *ELSEWHERE))
        if takes(name, b.opset, b.kind) and not (portable and name in ELSEWHERE):
            GROWERS[name](b)
    if not b.nodes:
        b.add("Neg", [b.inputs[0]], b.inputs[0].shape, 2.0, dtype=kind)
    return finished(b)


def seeded(seed: int, most: int = 60, target: int | None = None) -> RandomGraph:
    """The graph of a seed."""
    return grown(Random(seed), most, target=target)


@st.composite
def graphs(draw: st.DrawFn, most: int = 25, kinds: Sequence[int] = KINDS[:-1],
           names: Sequence[str] = tuple(GROWERS), opsets: Sequence[int] = (21,)) -> RandomGraph:
    """The same for hypothesis, which then finds the smallest graph that fails."""
    return grown(draw(st.randoms(use_true_random=False)), most, kinds, names, opsets)


def finished(b: Builder) -> RandomGraph:
    """The model: outputs are what nobody reads, and one value that somebody does."""
    read = {name for node in b.nodes for name in node.input}
    made = [value for value in b.known if value not in b.inputs]
    outputs = [value for value in made if value.name not in read]
    inner = [value for value in made if value.name in read]
    if inner and b.flip():
        outputs.append(b.rng.choice(inner))
    used = [value for value in b.inputs if value.name in read]
    model = helper.make_model(
        helper.make_graph(
            b.nodes, "random", [info(value) for value in used], [info(value) for value in outputs], b.constants
        ),
        opset_imports=[helper.make_opsetid("", b.opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    named = {name for value in used for size in value.shape for name in size.symbols}
    sizes = {name: number for name, number in b.sizes.items() if name in named}
    standard = all(node.domain or onnx.defs.has(node.op_type) for node in b.nodes)
    return RandomGraph(model, sizes, tuple(used), b.rng.randint(0, 2**32 - 1), standard)


def info(value: Known) -> onnx.ValueInfoProto:
    plain = [
        size.value if size.value is not None else str(size) if str(size).isidentifier() else None
        for size in value.shape
    ]
    return helper.make_tensor_value_info(value.name, value.dtype, plain)
