"""Layer and RMS norms in every spelling, with and without scale and bias: one canonical node, and one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from rewriting_models import run, same_bits

from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.resources import rules_folder
from onnxfuse.rules import RuleSet, canonicalise, load_rules
from onnxfuse.verifying import verify

ROOTS = {
    "quotient": "sd = Sqrt(ve) n = Div({0}, sd)",
    "reciprocal": "sd = Sqrt(ve) r = Reciprocal(sd) n = Mul({0}, r)",
    "one over": "sd = Sqrt(ve) r = Div(one, sd) n = Mul(r, {0})",
    "root of one over": "q = Reciprocal(ve) r = Sqrt(q) n = Mul({0}, r)",
    "power": "r = Pow(ve, half) n = Mul({0}, r)",
}
"""x over the root of the variance ``ve``."""

TYPES = {"float": "float", "float16": "float16", "whole in float32": "float16", "variance in float32": "float16"}
"""Where casts stand, and the type of the tensors outside."""


@dataclass(frozen=True)
class Spelling:
    """One way to write a norm; ``centred`` for a layer norm, ``opset`` 18 for axes as an input."""

    centred: bool
    scale: bool
    bias: bool
    casts: str = "float"
    root: str = "quotient"
    power: bool = True
    opset: int = 14
    modulated: bool = False

    @property
    def model(self) -> onnx.ModelProto:
        kind = TYPES[self.casts]
        inner = "float16" if self.casts == "float16" else "float"
        body, x = [], "x"
        if self.casts == "whole in float32":
            body, x = ["x32 = Cast <to = 1> (x)"], "x32"
        if self.centred:
            body += [self._mean("m", x), f"d = Sub({x}, m)"]
            x = "d"
        if self.casts == "variance in float32":
            body.append(f"d32 = Cast <to = 1> ({x})")
            x = "d32"
        body.append(f"p = Pow({x}, two)" if self.power else f"p = Mul({x}, {x})")
        body += [self._mean("v", "p"), "ve = Add(v, eps)", ROOTS[self.root].format(x)]
        y = "n"
        if kind != inner:
            body.append("c = Cast <to = 10> (n)")
            y = "c"
        if self.scale:
            body.append(f"ns = Mul({y}, scale)")
            y = "ns"
        if self.bias:
            body.append(f"nb = Add(bias, {y})")
            y = "nb"
        if self.modulated:
            body.append(f"more = Add(gain, unit) nm = Mul({y}, more) no = Add(nm, shift)")
            y = "no"
        operands = [f"{kind}[b, s, 64] x"]
        operands += [f"{kind}[64] {name}" for name in ("scale", "bias") if getattr(self, name)]
        operands += [f"{kind}[b, 1, 64] {name}" for name in ("gain", "shift") if self.modulated]
        numbers = {"eps": 1e-3, "two": 2.0, "one": 1.0, "half": -0.5}
        held = [f"{inner} {name} = {{{_text(number, inner)}}}" for name, number in numbers.items()]
        held += [f"{kind} unit = {{{_text(1.0, kind)}}}", "int64[1] last = {-1}"]
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : {self.opset}]> g ({", ".join(operands)}) => ({kind}[b, s, 64] {y}) '
            f"<{', '.join(held)}> {{ {' '.join(body)} }}"
        )

    def _mean(self, result: str, x: str) -> str:
        return f"{result} = ReduceMean({x}, last)" if self.opset >= 18 else f"{result} = ReduceMean <axes = [-1]> ({x})"


def _text(number: float, kind: str) -> str:
    return str(np.float16(number).view(np.uint16)) if kind == "float16" else str(number)


@cache
def shipped() -> RuleSet:
    return load_rules([rules_folder()])


@pytest.mark.parametrize("casts", TYPES)
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
def test_every_spelling_is_one_node(centred: bool, casts: str) -> None:
    """The view's node reads the scale and the bias that are there; an RMSNorm has no bias, which stays an Add."""
    for scale, bias, root, power, opset in product((0, 1), (0, 1), ROOTS, (True, False), (14, 18)):
        spelling = Spelling(centred, bool(scale), bool(bias), casts, root, power, opset)
        if not centred and casts == "variance in float32":
            continue
        view = canonicalise(load_graph(spelling.model), shipped().canonical).graph
        norm, *rest = view.nodes
        assert norm.op == ("LayerNormalization" if centred else "RMSNormalization"), spelling
        assert [node.op for node in rest] == ["Add"] * bool(bias and not centred), spelling
        names = [None if value is None else value.name for value in norm.inputs]
        wanted = ["x", "scale" if scale else None, "bias" if bias and centred else None]
        assert names == wanted[:max(place for place, name in enumerate(wanted) if name) + 1], spelling


def fused(model: onnx.ModelProto) -> Optimised:
    return optimise(model, Options(verify=False, target="H100", dims={"b": 8, "s": 256}))


CASES = [
    Spelling(centred, scale, bias, casts, root, power, opset, modulated)
    for (centred, scale, bias, modulated), (casts, root, power, opset) in zip(
        product((True, False), (False, True), (False, True), (False, True)),
        [(casts, root, bool(place % 2), 14 + 4 * (place // 2 % 2))
         for place, (root, casts) in enumerate(product(
             [*ROOTS][:4], ["float", "whole in float32", "float16", "float"]))],
        strict=True,
    )
]


@pytest.mark.parametrize("spelling", CASES, ids=str)
def test_every_norm_is_one_kernel(spelling: Spelling) -> None:
    """Scale, bias and a modulation by the image included: as many kernels as nodes become one.

    Types: as the case says; the kernel on the emulator against the body in float64, by the tolerances of
    ``verifying.tolerances``; the functions against the original, bit for bit.
    """
    model = spelling.model
    made = fused(model)
    assert [len(fusion.nodes) for fusion in made.plan.fusions] == [len(model.graph.node)]
    assert made.plan.fusions[0].cost.kernels_after == 1
    result = verify(made, EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()
    rng = np.random.default_rng(3)
    feeds = {
        info.name: rng.standard_normal([{"b": 2, "s": 3}.get(size.dim_param, size.dim_value)
                                        for size in info.type.tensor_type.shape.dim]).astype(
            onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
        for info in model.graph.input
    }
    assert same_bits(run(model, feeds), run(made.model, feeds))
