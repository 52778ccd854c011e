"""Layers with residual norms, in the ways in which exporters of several releases write them, and their locks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from cli_models import parse, run
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.locking import Lock, lock_text

HIDDEN = 256

PLAN = {"verify": False, "target": "H100", "database": False}
NORM = ["Add", "Add(1)", "LayerNormalization(2)", "Tanh(3)"]
"""The structure of a layer's fused node."""

CHAIN = """m{i} = ReduceMean {axes}
 d{i} = Sub(s{i}, m{i})
 q{i} = Pow(d{i}, two)
 v{i} = ReduceMean {inner}
 e{i} = Add(v{i}, eps)
 r{i} = Sqrt(e{i})
 n{i} = Div(d{i}, r{i})
 g{i} = Mul(n{i}, w)
 y{i} = Add(g{i}, b)"""

NORMS: Mapping[str, tuple[int, str]] = {
    "operator": (17, "y{i} = LayerNormalization <axis = -1> (s{i}, w, b)"),
    "chain": (13, CHAIN.replace("{axes}", "<axes = [-1]> (s{i})").replace("{inner}", "<axes = [-1]> (q{i})")),
    "axes as an input": (18, CHAIN.replace("{axes}", "(s{i}, last)").replace("{inner}", "(q{i}, last)")),
    "pooled": (17, "h{i} = LpPool <kernel_shape = [1]> (s{i})\n y{i} = LayerNormalization <axis = -1> (h{i}, w, b)"),
    "mean-variance": (13, "n{i} = MeanVarianceNormalization <axes = [-1]> (s{i})\n g{i} = Mul(n{i}, w)\n"
                          " y{i} = Add(g{i}, b)"),
}
"""A layer norm of ``s`` in ``y``, and the operator set that has it so."""

WEIGHTS = {
    "k": np.full((HIDDEN, HIDDEN), 0.01, np.float32), "w": np.ones(HIDDEN, np.float32),
    "b": np.zeros(HIDDEN, np.float32), "two": np.array(2, np.float32), "eps": np.array(1e-5, np.float32),
    "last": np.array([-1]),
}


def layers(norm: str = "operator", number: int = 3, *, tail: str = "z{i} = Tanh(y{i})", overridable: bool = False
           ) -> onnx.ModelProto:
    """Layers of a product, a bias, a residual sum, a norm and what reads that.

    Args:
        tail: gives ``z`` of ``y``.
        overridable: whether an initialiser is an input too, as some exporters have it: then its contents are not known.
    """
    opset, text = NORMS[norm]
    body, x = [], "x"
    for i in range(number):
        body.append(f"t{i} = MatMul({x}, k)\n c{i} = Add(t{i}, b)\n s{i} = Add(c{i}, {x})")
        body += [text.replace("{i}", str(i)), tail.replace("{i}", str(i))]
        x = f"z{i}"
    shape = f"[batch, seq, {HIDDEN}]"
    model = parse(f"g (float{shape} x) => (float{shape} {x}) {{ {chr(10).join(body)} }}", opset)
    read = {name for node in model.graph.node for name in node.input}
    for name, array in WEIGHTS.items():
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        if name in read and overridable and name == "last":
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    return model


def renamed(model: onnx.ModelProto, more: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The model with other names for all nodes and all inner values, and those names that ``more`` gives."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    kept = {value.name for value in (*made.graph.input, *made.graph.output)}
    new = {name: f"v{place}.new" for place, name in enumerate(
        dict.fromkeys(name for node in made.graph.node for name in node.output)) if name not in kept}
    new |= {tensor.name: f"{tensor.name}.new" for tensor in made.graph.initializer if tensor.name not in kept}
    new |= more or {}
    for place, node in enumerate(made.graph.node):
        node.name = f"new_{place}"
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
    for item in (*made.graph.input, *made.graph.output, *made.graph.initializer, *made.graph.value_info):
        item.name = new.get(item.name, item.name)
    return made


def optimised(model: onnx.ModelProto | Path, **options: object) -> onnxfuse.Result:
    return onnxfuse.optimize(model, **{**PLAN, **options})  # type: ignore[arg-type]


def written(lock: Lock, folder: Path) -> Path:
    """The lock as a file."""
    path = folder / "m.lock.yaml"
    path.write_text(lock_text(lock))
    return path


def lines(folder: Path, model: onnx.ModelProto, file: Path, *options: object) -> tuple[int, list[str]]:
    """The exit code of check, and what it prints without the folder's name and margins."""
    path = folder / "m.onnx"
    onnx.save(model, path)
    result = run("check", path, "--lock", file, "--no-database", *options)
    return result.exit_code, [line.strip() for line in result.output.replace(str(folder), "FOLDER").splitlines()]
