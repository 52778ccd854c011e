"""Random products of whose results rows are reduced: what is computed before, behind and beside that, which results,
lengths of rows and types, against float64, in the ways that tuning may run them and in two launches.

    python -m pytest tests/test_random_reduced.py --seed 1 --graphs 300
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from kernel_harness import Made, check, only, short_inputs, told
from random_regions import made_regions

QUICK = 8
"""Regions that are tried where no more are asked for."""

COLUMNS = (64, 72, 96, 128, 136, 192, 200, 256, 384, 520, 768, 1000)

MOST_LIVE = 3
"""Of so many regions in a row one has a kernel at least: what keeps two elements of wide rows has none."""


class Drawn:
    """One random region: its text, and sizes to run it at."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = self.rng.choice(("float16", "float16", "bfloat16", "float"))
        self.columns = self.rng.choice(COLUMNS)
        self.batch = "" if self.kind == "float" else self.rng.choice(("", "2,"))
        self.inputs = {"a": f"{self.batch}M,K"}
        self.lines: list[str] = []
        self.results: list[str] = []
        self.count = 0
        value = self.product()
        for _ in range(self.rng.randint(0, 3)):
            value = self.pointwise(value)
        if self.rng.random() < 0.4 and self.lines:
            self.results.append(value)
        value = self.reduced(value)
        for _ in range(self.rng.randint(0, 2)):
            value = self.pointwise(value)
        self.results.insert(self.rng.randint(0, len(self.results)), value)

    def say(self, op: str, *operands: str) -> str:
        """One more node; the name of its result."""
        self.count += 1
        name = f"t{self.count}"
        self.lines.append(f"{name} = {op}({', '.join(operands)})")
        return name

    def read(self, shape: str) -> str:
        """One more input, or one that was read before."""
        same = [name for name, known in self.inputs.items() if known == shape and name not in "ab"]
        if same and self.rng.random() < 0.3:
            return self.rng.choice(same)
        name = f"i{len(self.inputs)}"
        self.inputs[name] = shape
        return name

    def product(self) -> str:
        """By weights that lie either way; of float32 those that lie along the sum."""
        if not self.batch and (self.kind == "float" or self.rng.random() < 0.5):
            self.inputs["b"] = f"{self.columns},K"
            return self.say("Gemm<transB = 1>", "a", "b", *([self.read(str(self.columns))] if self.rng.random() < 0.5 else ()))
        self.inputs["b"] = f"K,{self.columns}"
        return self.say("MatMul", "a", "b")

    def pointwise(self, value: str) -> str:
        """A bias, a residual, a factor or an activation."""
        row, whole = str(self.columns), f"{self.batch}M,{self.columns}"
        match self.rng.choice(("bias", "residual", "residual", "scale", "rows", "activation")):
            case "bias":
                return self.say("Add", *self.turned(value, self.read(row)))
            case "residual":
                return self.say("Add", *self.turned(value, self.read(whole)))
            case "scale":
                return self.say("Mul", *self.turned(value, self.read(row)))
            case "rows":
                return self.say("Add", value, self.read("M,1"))
        return self.say(self.rng.choice(("Relu", "Sigmoid", "Tanh")), value)

    def turned(self, one: str, other: str) -> tuple[str, str]:
        return (one, other) if self.rng.random() < 0.5 else (other, one)

    def reduced(self, value: str) -> str:
        """Norms, softmaxes, and what is spelled out."""
        row = str(self.columns)
        match self.rng.choice(("layer", "layer", "rms", "softmax", "log", "largest", "length")):
            case "layer":
                return self.say("LayerNormalization", value, self.read(row), *([self.read(row)] if self.rng.random() < 0.7 else ()))
            case "rms":
                return self.say("com.microsoft.SimplifiedLayerNormalization", value, self.read(row))
            case "softmax":
                return self.say("Softmax", value)
            case "log":
                return self.say("LogSoftmax", value)
            case "largest":
                return self.say("Sub", value, self.say("ReduceMax", value, "last"))
        return self.say("Div", value, self.say("Sqrt", self.say("Add", self.say("ReduceSumSquare", value, "last"), "one")))

    @property
    def text(self) -> str:
        inputs = ", ".join(f"{self.kind}[{shape}] {name}" for name, shape in self.inputs.items())
        results = ", ".join(f"{self.kind}[{self.batch}M,{self.columns}] {name}" for name in self.results)
        return (f"g ({inputs}) => ({results}) <int64[1] last = {{-1}}> {{ one32 = Constant<value_float = 1.0>() "
                f"one = CastLike(one32, a) {' '.join(self.lines)} }}")

    def sizes(self) -> dict[str, int]:
        return {"M": self.rng.choice((1, 17, 49, 65, 130)), "K": 8 * self.rng.randint(1, 70)}


def ways(made: Made, drawn: Drawn) -> list[Made]:
    """As its schedule would run it, in another way, and in two launches."""
    others = [told(made, drawn.rng.choice(made.kernel.choices), {})] if made.kernel.choices else []
    first = [only(each, [replace(each.kernel.plan.variants[0], guards=())]) for each in (made, *others)]
    return [*first, only(made, [replace(drawn.rng.choice(made.kernel.plan.variants[2:]), guards=())])]


def test_regions(seeds: Callable[[int], range]) -> None:
    """Most have a kernel; what has one is right in all its ways."""
    codes = ("product-structure", "reduction-structure")
    for seed, drawn, made in made_regions(seeds(QUICK), Drawn, 21, codes, MOST_LIVE):
        assert made.kernel.schedule == "product_rows"
        for run, way in enumerate(ways(made, drawn)):
            sizes = drawn.sizes()
            inputs = short_inputs(way, sizes, seed + run)
            # Sums are no larger than what is added to them: what is between two launches has the type's few digits.
            inputs["b"] = (inputs["b"] / 2 ** (sizes["K"].bit_length() // 2)).astype(inputs["b"].dtype)
            try:
                check(way, inputs, length=max(sizes["K"], 64), misalign=False, slack=4.0)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {sizes}: {drawn.text}") from error
