"""Weights of products of float32 that lie transposed: which, what that changes (nothing), and where it pays."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulated import EmulatedRunner
from kernel_harness import parse, with_constants

import onnxfuse
from onnxfuse.folding import paired
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import layout_record, unfuse
from onnxfuse.rules import canonicalise, load_rules
from onnxfuse.verifying import verify

WEIGHTS = {"w": (64, 96), "b": (96,), "v": (96, 40), "u": (40, 96), "t": (62, 64)}

BOTH = "g (T[M,64] x) => (T[M,40] y) { p = MatMul(x, w) s = Add(p, b) a = Relu(s) y = MatMul(a, v) }"


def model(text: str = BOTH, kind: str = "float", scale: int = 1) -> onnx.ModelProto:
    """A model with such weights, all sizes so many times as large."""
    shapes = {name: tuple(scale * size for size in shape) for name, shape in WEIGHTS.items()}
    names = [name for name in shapes if re.search(rf"[( ]{name}[),]", text)]
    declared = "".join(f", {kind}[{','.join(map(str, shapes[name]))}] {name}" for name in names)
    text = text.replace("64]", f"{64 * scale}]").replace("40]", f"{40 * scale}]").replace("T[", f"{kind}[")
    made = parse(text.replace(") =>", f"{declared}) =>", 1))
    random = np.random.default_rng(0)
    kind_of = np.dtype("float32" if kind == "float" else kind)
    return with_constants(made, {
        name: (random.standard_normal(shapes[name]) / 8).astype(kind_of) for name in names})


def pairs(made: onnx.ModelProto) -> dict[str, tuple[tuple[str, ...], ...]]:
    graph = load_graph(made)
    view = canonicalise(graph, load_rules([rules_folder()]).canonical).graph
    assert not paired(graph, view)
    return {each.value: each.readers for each in paired(graph, view, turns=True)}


@pytest.mark.parametrize(("text", "kind", "expected"), [
    (BOTH, "float", {"w": (("p",),), "v": (("y",),)}),
    (BOTH, "float16", {}),
    ("g (T[M,64] x) => (T[M,96] y) { y = Gemm(x, w, b) }", "float", {"w": (("y",),)}),
    ("g (T[M,40] x) => (T[M,96] y) { y = Gemm<transB = 1>(x, v) }", "float", {}),
    ("g (T[96,M] x) => (T[64,M] y) { y = MatMul(w, x) }", "float", {}),
    ("g (T[M,62] x) => (T[M,64] y) { y = MatMul(x, t) }", "float", {}),  # no whole vectors of what is summed over
    ("g (T[M,64] x) => (T[M,96] y, T[M,96] z) { y = MatMul(x, w) a = Relu(x) z = MatMul(a, w) }", "float",
     {"w": (("y",), ("z",))}),
    ("g (T[M,64] x) => (T[M,96] y, T[64,96] z) { y = MatMul(x, w) z = Neg(w) }", "float", {"w": (("y",),)}),
], ids=["products", "float16", "Gemm", "transposed already", "on the left", "no vectors", "of two", "read by others"])
def test_which_these_are(text: str, kind: str, expected: dict[str, tuple[tuple[str, ...], ...]]) -> None:
    assert pairs(model(text, kind)) == expected


def planned(made: onnx.ModelProto, rows: int = 8192, **options: object) -> Optimised:
    return optimise(made, Options(**{"target": "H100", "database": False, "verify": False,
                                     "dims": {"M": rows}, **options}))  # type: ignore[arg-type]


def laid(made: Optimised) -> set[str]:
    record = layout_record(made.model)
    return set() if record is None else {each.value for each in record.laid}


@pytest.mark.parametrize("options", [
    {"target": "A100"}, {"provider_options": {"use_tf32": "0"}}, {"disable": ["layouts"]}, {"disable": ["products"]},
    {"rows": 16}], ids=["another GPU", "float32 as it is", "left out", "no products", "few rows"])
def test_where_it_pays(options: dict[str, object]) -> None:
    """What is large is planned so, for kernels whose time is known; nothing is elsewhere."""
    large = model(scale=16)
    made = planned(large)
    assert laid(made) == {"w", "v"}
    assert [node.op for node in made.plan.fusions[0].view] == ["Transpose", "MatMul", "Add", "Relu"]
    assert "one copies" in made.plan.fusions[0].kernel.plan.variants[0].name
    assert unfuse(made.model).SerializeToString(deterministic=True) == large.SerializeToString(deterministic=True)
    assert not laid(planned(large, **options))  # type: ignore[arg-type]


def test_it_is_right_everywhere(tmp_path: Path) -> None:
    """The kernels as the emulator runs them; and without the library, where the runtime takes the transposes out."""
    small = model()
    made = planned(small, rows=70, least_gain=0.0, eager=True)
    assert laid(made) == {"w", "v"}
    found = verify(made, EmulatedRunner())
    assert found.passed and {node.verdict for node in found.nodes} == {"passed"}
    assert onnxfuse.verify(small, made.model, dims={"M": 70}).same
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(made.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert all(node.op_type != "Transpose" for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
