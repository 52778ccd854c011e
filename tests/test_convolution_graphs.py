"""Random networks of convolutions through everything: planned with their biases apart, compared, and put back.

    pytest tests/test_convolution_graphs.py --graphs 2000 --seed 1000

makes a quarter as many: most of their time is the emulator's compilation.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from onnx import TensorProto, helper, numpy_helper
from rewriting_models import run, same_bits
from sizes_models import packed

from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import separated_sums, unfuse
from onnxfuse.verifying import verify

KINDS = (TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT)
CHANNELS_LAST = "_channels_last"
"""What ends the names of values that are laid out."""

ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "HardSwish", "LeakyRelu", "Softplus", "Neg")


class Network:
    """A network of a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = Random(seed), np.random.default_rng(seed)
        self.dtype = self.random.choice(KINDS)
        self.rank = self.random.choice((3, 4, 4, 4, 5))
        self.side = self.random.choice((5, 7, 8))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values = [("x", 3)]
        self.biases: dict[int, list[str]] = {}
        for _ in range(self.random.randint(2, 7)):
            self.step()

    def constant(self, *shape: int) -> str:
        name = f"p{len(self.weights)}"
        array = self.numbers.uniform(0.2, 1.0, shape).astype(helper.tensor_dtype_to_np_dtype(self.dtype))
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def make(self, op: str, inputs: list[str], channels: int, **attributes: object) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"node_{name}", **attributes))
        self.values.append((name, channels))

    def step(self) -> None:
        """A convolution, or what stands around one."""
        value, channels = self.values[-1] if self.random.random() < 0.7 else self.random.choice(self.values)
        kind = self.random.random()
        if kind < 0.5:
            self.convolution(value, channels)
        elif kind < 0.75:
            self.make(self.random.choice(ACTIVATIONS), [value], channels)
        elif kind < 0.9:
            others = [name for name, count in self.values if count == channels]
            self.make(self.random.choice(("Add", "Mul")), [value, self.random.choice(others)], channels)
        else:
            self.make("BatchNormalization", [value, *(self.constant(channels) for _ in range(4))], channels)

    def convolution(self, value: str, channels: int) -> None:
        """One that keeps the sides, with pads of any kind, grouped, dilated; some share their bias."""
        group = self.random.choice([n for n in (1, 1, channels) if channels % n == 0])
        features = group * self.random.choice((1, 2)) if group > 1 else self.random.choice((4, 5, 8))
        reach, dilation = self.random.choice((1, 2, 3)), self.random.choice((1, 2))
        inputs = [value, self.constant(features, channels // group, *[reach] * (self.rank - 2))]
        if self.random.random() < 0.8:
            known = self.biases.setdefault(features, [])
            if not known or self.random.random() < 0.7:
                known.append(self.constant(features))
            inputs.append(self.random.choice(known))
        free = dilation * (reach - 1)
        before = [self.random.randint(0, free) for _ in range(self.rank - 2)]
        own: dict[str, object] = {"dilations": [dilation] * (self.rank - 2),
                                  "pads": [*before, *(free - pad for pad in before)]}
        if self.random.random() < 0.3:
            own = {"auto_pad": self.random.choice(("SAME_UPPER", "SAME_LOWER"))}
        self.make("Conv", inputs, features, group=group, **own)

    def model(self) -> onnx.ModelProto:
        read = Counter(name for node in self.nodes for name in node.input)
        ends = {name: count for name, count in self.values[1:] if not read[name] or self.random.random() < 0.1}
        sides = ["side"] * (self.rank - 2)
        return helper.make_model(helper.make_graph(
            self.nodes, "network", [helper.make_tensor_value_info("x", self.dtype, ["batch", 3, *sides])],
            [helper.make_tensor_value_info(name, self.dtype, ["batch", count, *sides]) for name, count in ends.items()],
            self.weights,
        ), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CHUNK = 6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = metafunc.config.getoption("--seed"), max(metafunc.config.getoption("--graphs") // 4, CHUNK)
    metafunc.parametrize("seeds", [range(start, min(start + CHUNK, first + count))
                                   for start in range(first, first + count, CHUNK)])


def test_networks_compute_what_they_did(seeds: range) -> None:
    taken = stencils = 0
    for seed in seeds:
        network = Network(seed)
        original = network.model()
        made = optimise(original, Options(dims={"batch": 2, "side": network.side}, target="H200", verify=False,
                                          database=False, least_gain=0.0))
        onnx.checker.check_model(made.model)
        taken += len(separated_sums(made.model))
        stencils += sum(region.kernel.schedule in ("stencil", "stencil_last") for region in made.plan.fusions)
        found = verify(made, EmulatedRunner())
        assert found.passed and found.whole.identical, f"seed {seed}: {found.summary}"
        assert all(node.verdict == "passed" for node in found.nodes), f"seed {seed}: {found.summary}"
        feeds = {"x": network.numbers.normal(size=(1, 3, *[5] * (network.rank - 2))).astype(
            helper.tensor_dtype_to_np_dtype(network.dtype))}
        # Pairs of transposes keep casts apart that the runtime else leaves out, unless it takes the pairs out before.
        basic = CHANNELS_LAST in str(made.model)
        assert same_bits(run(made.model, feeds, basic), run(original, feeds, basic)), f"seed {seed}"
        assert packed(unfuse(made.model)) == packed(original), f"seed {seed}"
    # Of six networks of other seeds there may be none with a depthwise convolution that is fused.
    assert (taken and (stencils or seeds.start)) or len(seeds) < CHUNK
