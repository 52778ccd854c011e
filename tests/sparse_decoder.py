"""A decoder as large as LLaMA's of 7 billion weights, spelled as exporters spell it, whose weights take no disk.

    python tests/sparse_decoder.py FOLDER [--layers 32]

Every weight lies in ``weights.bin`` beside the model, a file of 13 GB of which no byte was ever written.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
DATA = "weights.bin"


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder; by default LLaMA-7B's."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    inner: int = 11008
    vocabulary: int = 32000
    longest: int = 2048


@dataclass
class Builder:
    """Nodes and weights of a graph in the making; ``size`` is that of the data file so far."""

    config: Config
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    size: int = 0
    scope: str = ""

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Add a node; the name of its output."""
        name = f"{self.scope}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_output"], name, **attributes))
        return f"{name}_output"

    def weight(self, name: str, *shape: int) -> str:
        """Add float16 numbers in the data file."""
        tensor = TensorProto(name=f"{self.scope}.{name}", data_type=TensorProto.FLOAT16, dims=shape,
                             data_location=TensorProto.EXTERNAL)
        length = 2 * prod(shape)
        for key, value in (("location", DATA), ("offset", str(self.size)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        self.size += -(-length // 4096) * 4096
        self.weights.append(tensor)
        return tensor.name

    def constant(self, value: object, kind: type = np.int64) -> str:
        """Add a small constant."""
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, kind), name))
        return name

    def linear(self, x: str, name: str, inner: int, outer: int) -> str:
        """A product with a weight."""
        return self.op("MatMul", x, self.weight(name, inner, outer))

    def norm(self, x: str, name: str) -> str:
        """Root-mean-square normalisation in float32."""
        wide = self.op("Cast", x, to=TensorProto.FLOAT)
        square = self.op("ReduceMean", self.op("Pow", wide, self.constant(2, np.float32)), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", square, self.constant(1e-6, np.float32)))
        scaled = self.op("Mul", wide, self.op("Reciprocal", root))
        narrow = self.op("Cast", scaled, to=TensorProto.FLOAT16)
        return self.op("Mul", self.weight(name, self.config.hidden), narrow)

    def split(self, x: str) -> str:
        """Heads apart: [batch, heads, sequence, width]."""
        heads = self.config.heads
        apart = self.op("Reshape", x, self.constant([0, 0, heads, self.config.hidden // heads]))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3])

    def turned(self, x: str, cos: str, sin: str) -> str:
        """Rotary embedding."""
        half, end = self.constant([self.config.hidden // self.config.heads // 2]), self.constant([2**62])
        zero, axis = self.constant([0]), self.constant([3])
        first, second = self.op("Slice", x, zero, half, axis), self.op("Slice", x, half, end, axis)
        swapped = self.op("Concat", self.op("Neg", second), first, axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", swapped, sin))

    def layer(self, x: str, bias: str, cos: str, sin: str) -> str:
        """Attention and a gated network, with what they are added to."""
        hidden, inner, heads = self.config.hidden, self.config.inner, self.config.heads
        normed = self.norm(x, "input_layernorm.weight")
        query, key, value = (self.split(self.linear(normed, f"self_attn.{name}_proj.weight", hidden, hidden))
                             for name in "qkv")
        key = self.op("Transpose", self.turned(key, cos, sin), perm=[0, 1, 3, 2])
        scores = self.op("MatMul", self.turned(query, cos, sin), key)
        scores = self.op("Div", scores, self.constant((hidden // heads) ** 0.5, np.float16))
        wide = self.op("Cast", self.op("Add", scores, bias), to=TensorProto.FLOAT)
        shares = self.op("Cast", self.op("Softmax", wide, axis=-1), to=TensorProto.FLOAT16)
        mixed = self.op("Transpose", self.op("MatMul", shares, value), perm=[0, 2, 1, 3])
        joined = self.op("Reshape", mixed, self.constant([0, 0, hidden]))
        x = self.op("Add", x, self.linear(joined, "self_attn.o_proj.weight", hidden, hidden))
        normed = self.norm(x, "post_attention_layernorm.weight")
        gate = self.linear(normed, "mlp.gate_proj.weight", hidden, inner)
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        gated = self.op("Mul", gate, self.linear(normed, "mlp.up_proj.weight", hidden, inner))
        return self.op("Add", x, self.linear(gated, "mlp.down_proj.weight", inner, hidden))


def decoder(config: Config) -> tuple[onnx.ModelProto, int]:
    """The model, and the size of its data file."""
    make = Builder(config)
    make.scope = "/model"
    x = make.op("Gather", make.weight("embed_tokens.weight", config.vocabulary, config.hidden), "input_ids")
    width = config.hidden // config.heads
    cos, sin = (make.op("Unsqueeze", make.op("Gather", make.weight(name, config.longest, width), "position_ids"),
                        make.constant([1])) for name in ("cos_cached", "sin_cached"))
    seen = make.op("Unsqueeze", make.op("Cast", "attention_mask", to=TensorProto.FLOAT16), make.constant([1, 2]))
    bias = make.op("Mul", make.op("Sub", make.constant(1, np.float16), seen), make.constant(-65504, np.float16))
    for number in range(config.layers):
        make.scope = f"/model/layers.{number}"
        x = make.layer(x, bias, cos, sin)
    make.scope = "/model"
    x = make.norm(x, "norm.weight")
    make.nodes.append(helper.make_node(
        "MatMul", [x, make.weight("lm_head.weight", config.hidden, config.vocabulary)], ["logits"], "/lm_head/MatMul"))
    names = ("input_ids", "position_ids", "attention_mask")
    graph = helper.make_graph(
        make.nodes, "decoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT16, ["batch", "sequence", config.vocabulary])],
        make.weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", OPSET)]), make.size


def write(folder: Path, config: Config | None = None) -> Path:
    """The model's file; its data beside it is as long as the weights and takes no disk."""
    model, size = decoder(config or Config())
    with (folder / DATA).open("wb") as data:
        data.truncate(size)
    path = folder / "decoder.onnx"
    onnx.save(model, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=Config.layers)
    given = parser.parse_args()
    print(write(given.folder, Config(layers=given.layers)))
