"""Products by constant weights with constants beside them, and plans in which what is folded was measured faster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fake_timer import FakeTimer, made_up
from kernel_harness import parse
from onnx import TensorProto, helper, numpy_helper
from sizes_models import packed

from onnxfuse.graph.constants import numpy_type
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.region import Region
from onnxfuse.rewriting import unfuse
from onnxfuse.tuning import Timed, TuneOptions, tune

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float": TensorProto.FLOAT}


class WeightTimer(FakeTimer):
    """Says that kernels take the longer, the more they read and the longer their text is; runs nothing, since the CPU
    provider lacks products of bfloat16."""

    def __init__(self) -> None:
        super().__init__(lambda kernel: 20.0)

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        onnx.checker.check_model(model)
        outputs = {info.name: made_up(info, 1) for info in model.graph.output}
        if not fused:
            return Timed(500.0, 0.1, 24, outputs)
        (node,) = model.graph.node
        text = next(each.s for each in node.attribute if each.name == "source")
        return Timed(20.0 + len(model.graph.input) + 1e-5 * len(text), 0.1, 24, outputs)


def model_of(
    text: str, shapes: Mapping[str, tuple[int, ...]], kind: str = "float16", given: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """A model whose constants have these shapes and are drawn, but for those that are given: "s" and "g" are factors
    near one, "v" a variance, all else is normal."""
    model, generator = parse(text.replace("T[", f"{kind}[")), np.random.default_rng(seed)
    for name, shape in shapes.items():
        array = generator.standard_normal(shape)
        array = 0.5 + np.abs(array) if name[0] in "sgv" else array * (0.2 if len(shape) > 1 else 0.5)
        array = np.broadcast_to((given or {}).get(name, array), shape)
        stored = helper.make_tensor(name, KINDS[kind], shape, array.astype(numpy_type(KINDS[kind])).tobytes(), raw=True)
        model.graph.initializer.append(stored)
    return model


def fused(model: onnx.ModelProto, folder: Path, *, rows: int = 33, **options: Any) -> Optimised:
    """Planned by measurements that say that a kernel is the faster, the less it reads, and back."""
    made, before = planned(model, folder, rows=rows, **options), packed(model)
    assert packed(unfuse(made.model)) == before
    onnx.checker.check_model(made.model, full_check=True)
    return made


def planned(model: onnx.ModelProto, folder: Path, *, rows: int = 33, **options: Any) -> Optimised:
    """The same, where the model may hold fused nodes already."""
    database = folder / "measurements.sqlite"
    used = {size.dim_param for info in model.graph.input for size in info.type.tensor_type.shape.dim}
    dims = {name: rows for name in used if name}
    wanted = {"fold_weights": True, **options}
    # Where values lie otherwise, or biases stand apart, others are the regions with products.
    wanted["disable"] = ("layouts", "biases")
    with open_database(database) as kept:
        tune(model, WeightTimer(), kept, TuneOptions(
            dims=dims, disable=wanted["disable"], fold_weights=wanted["fold_weights"]))
    before = packed(model)
    made = optimise(model, Options(dims=dims, target="H100", verify=False, database=database, least_gain=1.0,
                                   **wanted))
    assert packed(model) == before
    return made


def folding(made: Optimised) -> list[Region]:
    """The regions whose kernels read other weights."""
    return [region for region in made.regions if region.folded]


def rows(body: str, k: int = 64, n: int = 72, out: int | None = None) -> str:
    """A graph of rows of k channels, whose result has n, or ``out``."""
    return f"g (T[M,{k}] x) => (T[M,{n if out is None else out}] y) {{ {body} }}"


def image(body: str, c: int = 16, m: int = 24) -> str:
    """A graph of images of c channels, whose result has m."""
    return f"g (T[2,{c},9,7] x) => (T[2,{m},A,B] y) {{ {body} }}"


NORMS = {"s": (72,), "h": (72,), "m": (72,), "v": (72,)}
MATRIX: dict[str, tuple[int, ...]] = {"w": (64, 72)}
"""Shapes of constants of ``rows``."""

CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], list[str]]] = {
    "a scale behind": (rows("p = MatMul(x, w) y = Mul(p, g)"), {**MATRIX, "g": (72,)}, ["MatMul", "Mul"]),
    "a bias and a layer scale": (
        rows("p = MatMul(x, w) a = Add(b, p) q = Mul(g, a) y = Relu(q)"), {**MATRIX, "b": (72,), "g": (1, 72)},
        ["MatMul", "Add", "Mul", "Relu"]),
    "a quotient and a difference": (
        rows("p = MatMul(x, w) a = Div(p, g) y = Sub(a, b)"), {**MATRIX, "b": (72,), "g": (72,)},
        ["MatMul", "Div", "Sub"]),
    "a constant less the result": (
        rows("p = MatMul(x, w) a = Sub(b, p) y = Neg(a)"), {**MATRIX, "b": (72,)}, ["MatMul", "Sub", "Neg"]),
    "a number": (rows("p = MatMul(x, w) y = Mul(p, g)"), {**MATRIX, "g": ()}, ["MatMul", "Mul"]),
    "a number behind heads": (
        "g (T[2,M,64] x) => (T[2,6,M,16] y) <int64[4] h = {0,0,6,16}> { p = MatMul(x, w) a = Add(p, b) "
        "r = Reshape(a, h) t = Transpose<perm = [0,2,1,3]>(r) y = Mul(t, g) }",
        {"w": (64, 96), "b": (96,), "g": ()}, ["MatMul", "Add", "Reshape", "Transpose", "Mul"]),
    "a scale behind a transpose": (
        "g (T[2,M,64] x) => (T[72,2,M] y) { p = MatMul(x, w) t = Transpose<perm = [2,0,1]>(p) y = Mul(t, g) }",
        {**MATRIX, "g": (72, 1, 1)}, ["MatMul", "Transpose", "Mul"]),
    "a normalisation behind": (
        rows("p = MatMul(x, w) y = BatchNormalization(p, s, h, m, v)"), {**MATRIX, **NORMS},
        ["MatMul", "BatchNormalization"]),
    "a scale before": (rows("a = Mul(x, s) y = MatMul(a, w)"), {**MATRIX, "s": (64,)}, ["Mul", "MatMul"]),
    "a shift before": (rows("a = Add(x, d) y = MatMul(a, w)"), {**MATRIX, "d": (64,)}, ["Add", "MatMul"]),
    "scale and shift before, and a bias": (
        rows("a = Mul(x, s) c = Add(a, d) p = MatMul(c, w) q = Add(p, b) y = Relu(q)"),
        {**MATRIX, "s": (64,), "d": (64,), "b": (72,)}, ["Mul", "Add", "MatMul", "Add", "Relu"]),
    "an order behind": (rows("p = MatMul(x, w) y = Gather<axis = 1>(p, order)"), MATRIX, ["MatMul", "Gather"]),
    "an order before": (rows("a = Gather<axis = 1>(x, order) y = MatMul(a, w)", n=64), {"w": (64, 64)},
                        ["Gather", "MatMul"]),
    "alpha and beta": (
        rows("y = Gemm<alpha = 0.3, beta = 0.7, transB = 1>(x, w, b)"), {"w": (72, 64), "b": (72,)}, ["Gemm"]),
    "alpha, and rows that stay": (
        "g (T[M,64] x, T[M,72] r) => (T[M,72] y) { y = Gemm<alpha = 0.3, beta = 0.7>(x, w, r) }", MATRIX, ["Gemm"]),
    "a product before": (
        rows("p = MatMul(x, w) y = MatMul(p, u)", k=40, n=96, out=31), {"w": (40, 96), "u": (96, 31)},
        ["MatMul", "MatMul"]),
    "products with biases, and what follows": (
        rows("p = MatMul(x, w) a = Add(p, b) q = MatMul(a, u) r = Add(q, d) z = Mul(r, g) y = Tanh(z)", k=40, out=33),
        {"w": (40, 72), "b": (72,), "u": (72, 33), "d": (33,), "g": (33,)},
        ["MatMul", "Add", "MatMul", "Add", "Mul", "Tanh"]),
    "Gemms": (
        rows("p = Gemm<transB = 1>(x, w, b) y = Gemm<alpha = 2.0>(p, u, d)", k=40, out=33),
        {"w": (72, 40), "b": (72,), "u": (72, 33), "d": (33,)}, ["Gemm", "Gemm"]),
    "a convolution and its scale": (
        image("c = Conv<pads = [1,1,1,1]>(x, w, b) y = Mul(c, g)"), {"w": (24, 16, 3, 3), "b": (24,), "g": (24, 1, 1)},
        ["Transpose", "Conv", "Mul"]),
    "a convolution in groups and its normalisation": (
        image("c = Conv<group = 2>(x, w) y = BatchNormalization(c, s, h, m, v)"),
        {"w": (24, 8, 3, 3), "s": (24,), "h": (24,), "m": (24,), "v": (24,)},
        ["Transpose", "Conv", "BatchNormalization"]),
    "a normalisation before a convolution": (
        image("a = BatchNormalization(x, s, h, m, v) y = Conv(a, w, b)"),
        {"w": (24, 16, 1, 1), "b": (24,), "s": (16,), "h": (16,), "m": (16,), "v": (16,)},
        ["BatchNormalization", "Conv"]),
    "a scale before padding": (
        image("a = Mul(x, s) y = Conv<pads = [1,1,1,1]>(a, w)"), {"w": (24, 16, 3, 3), "s": (16, 1, 1)},
        ["Mul", "Conv"]),
    "a bias that is not looked at": (
        rows("p = Gemm<beta = 0.0>(x, w, b) y = Mul(p, g)"), {**MATRIX, "b": (72,), "g": (72,)}, ["Gemm", "Mul"]),
    "a convolution and one by one pixel": (
        image("c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w, b) y = Conv(c, u)", m=8),
        {"w": (24, 16, 3, 3), "b": (24,), "u": (8, 24, 1, 1)}, ["Conv", "Conv"]),
}


def case(name: str, kind: str = "float16", **more: Any) -> onnx.ModelProto:
    """The model of a case."""
    text, shapes, _ = CASES[name]
    model = model_of(text, shapes, kind, **more)
    if "order" in text:
        size = next(iter(shapes.values()))[1 if "behind" in name else 0]
        order = np.random.default_rng(5).permutation(size) - (size if "behind" in name else 0)
        model.graph.initializer.append(numpy_helper.from_array(order.astype(np.int64), "order"))
    return model
