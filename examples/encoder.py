"""Make a transformer encoder as ONNX, spelled as exporters spell it, with random weights.

    python examples/encoder.py encoder.onnx --layers 4 --hidden 256

Inputs are ``input_ids`` and ``attention_mask``, int64 [batch, sequence]; the output is ``last_hidden_state``, float32
or float16 [batch, sequence, hidden].  Attention is decomposed and masked, GELU is its error function's formula.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
LONGEST = 512


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder; ``dtype`` is float32 or float16."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 1000
    dtype: str = "float32"
    seed: int = 0


@dataclass
class Builder:
    """Nodes and weights of a graph in the making; ``scope`` prefixes the names."""

    config: Config
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    scope: str = ""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.config.seed)
        self.count: dict[str, int] = {}

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Add a node; returns the name of its output."""
        stem = f"{self.scope}/{kind}"
        number = self.count.get(stem, 0)
        self.count[stem] = number + 1
        name = f"{stem}_{number}" if number else stem
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_output_0"], name=name, **attributes))
        return f"{name}_output_0"

    def constant(self, value: object, dtype: str | None = None) -> str:
        """Add a Constant node."""
        array = np.asarray(value, dtype or self.config.dtype)
        return self.op("Constant", value=numpy_helper.from_array(array))

    def weight(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.02) -> str:
        """Add a random initialiser."""
        values = self.random.standard_normal(shape) * spread + mean
        self.weights.append(numpy_helper.from_array(values.astype(self.config.dtype), name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        """x W + b, with the product and the sum apart."""
        product = self.op("MatMul", x, self.weight(f"{name}.weight", rows, columns, spread=rows**-0.5))
        return self.op("Add", self.weight(f"{name}.bias", columns), product)

    def layer_norm(self, x: str, name: str) -> str:
        hidden = self.config.hidden
        weight = self.weight(f"{name}.weight", hidden, mean=1.0, spread=0.1)
        return self.op("LayerNormalization", x, weight, self.weight(f"{name}.bias", hidden), axis=-1, epsilon=1e-12)

    def gelu(self, x: str) -> str:
        erf = self.op("Erf", self.op("Div", x, self.constant(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.constant(1.0))), self.constant(0.5))

    def heads_of(self, x: str, perm: list[int]) -> str:
        """[batch, sequence, hidden] to heads."""
        config = self.config
        shape = self.constant([0, 0, config.heads, config.hidden // config.heads], "int64")
        return self.op("Transpose", self.op("Reshape", x, shape), perm=perm)

    def attention(self, x: str, mask: str, name: str) -> str:
        hidden, heads = self.config.hidden, self.config.heads
        query, key, value = (self.linear(x, f"{name}.{part}", hidden, hidden) for part in ("query", "key", "value"))
        scores = self.op("MatMul", self.heads_of(query, [0, 2, 1, 3]), self.heads_of(key, [0, 2, 3, 1]))
        scaled = self.op("Div", scores, self.constant((hidden // heads) ** 0.5))
        probabilities = self.op("Softmax", self.op("Add", scaled, mask), axis=-1)
        mixed = self.op("MatMul", probabilities, self.heads_of(value, [0, 2, 1, 3]))
        flat = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", flat, self.constant([0, 0, hidden], "int64")), f"{name}.output",
                           hidden, hidden)

    def layer(self, x: str, mask: str, name: str) -> str:
        hidden = self.config.hidden
        attended = self.layer_norm(self.op("Add", self.attention(x, mask, f"{name}.attention"), x), f"{name}.norm1")
        inner = self.gelu(self.linear(attended, f"{name}.intermediate", hidden, 4 * hidden))
        return self.layer_norm(self.op("Add", self.linear(inner, f"{name}.output", 4 * hidden, hidden), attended),
                               f"{name}.norm2")

    def embeddings(self) -> str:
        hidden = self.config.hidden
        words = self.op("Gather", self.weight("embeddings.word", self.config.vocabulary, hidden), "input_ids")
        length = self.op("Gather", self.op("Shape", "input_ids"), self.constant(1, "int64"), axis=0)
        end = self.op("Unsqueeze", length, self.constant([0], "int64"))
        positions = self.op("Slice", self.weight("embeddings.position", LONGEST, hidden),
                            self.constant([0], "int64"), end, self.constant([0], "int64"))
        return self.layer_norm(self.op("Add", words, positions), "embeddings.norm")

    def mask(self) -> str:
        """0 where there is a token and the lowest number where there is none, [batch, 1, 1, sequence]."""
        dtype = np.dtype(self.config.dtype)
        wide = self.op("Unsqueeze", "attention_mask", self.constant([1, 2], "int64"))
        kept = self.op("Cast", wide, to=helper.np_dtype_to_tensor_dtype(dtype))
        return self.op("Mul", self.op("Sub", self.constant(1.0), kept), self.constant(np.finfo(dtype).min))


def encoder(config: Config) -> onnx.ModelProto:
    """The model."""
    if config.hidden % config.heads:
        raise ValueError(f"{config.heads} heads do not divide {config.hidden} columns")
    build = Builder(config, scope="/embeddings")
    x = build.embeddings()
    build.scope = ""
    mask = build.mask()
    for number in range(config.layers):
        build.scope = f"/encoder/layer.{number}"
        x = build.layer(x, mask, f"encoder.layer.{number}")
    build.nodes[-1].output[0] = "last_hidden_state"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(config.dtype))
    graph = helper.make_graph(
        build.nodes,
        "encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
         for name in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("last_hidden_state", kind, ["batch", "sequence", config.hidden])],
        build.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    model.producer_name = "examples/encoder.py"
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a transformer encoder as ONNX.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--hidden", type=int, default=Config.hidden)
    parser.add_argument("--heads", type=int, default=Config.heads)
    parser.add_argument("--dtype", choices=["float32", "float16"], default=Config.dtype)
    chosen = parser.parse_args()
    config = Config(layers=chosen.layers, hidden=chosen.hidden, heads=chosen.heads, dtype=chosen.dtype)
    onnx.save(encoder(config), chosen.output)
    print(f"{chosen.output}: {config.layers} layers of {config.hidden} columns, {config.dtype}")


if __name__ == "__main__":
    main()
