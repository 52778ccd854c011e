"""Models with convolutions, in ONNX's text form, and their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

TYPES = {"float": np.float32, "float16": np.float16, "double": np.float64}

WEIGHTS = {"w": (16, 8, 3, 3), "v": (16, 16, 1, 1), "d": (16, 1, 3, 3), "b": (16,), "b2": (16,), "s": (16,)}
"""Of a first convolution of 8 channels, of one of 16, of a depthwise one; biases; what a BatchNormalization reads."""


def conv_model(body: str, inputs: str = "T[N, 8, H, W] x", outputs: str = "T[N, 16, A, B] y", kind: str = "float16",
               weights: Mapping[str, Sequence[int]] = WEIGHTS, opset: int = 17) -> onnx.ModelProto:
    """A model; ``T`` stands for its type, nodes are named after what they compute, and the weights that it reads are
    its initialisers, positive ones."""
    text = re.sub(r"\bT\[", f"{kind}[", f"convolutions ({inputs}) => ({outputs}) {{\n{body}\n}}")
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    generator = np.random.default_rng(0)
    read = {name for node in made.graph.node for name in node.input}
    for name, shape in weights.items():
        array = generator.random(shape).astype(TYPES[kind]) + TYPES[kind](0.1)
        if name in read:
            made.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in made.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.checker.check_model(made)
    return made
