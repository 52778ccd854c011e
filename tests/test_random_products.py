"""Random matrix products with what surrounds them, in ways that tuning may run them, against their nodes in float64.

Batches that either operand lacks, up to four products of one operand with results of their own, operands and results
that lie transposed, few rows and odd sizes, biases, gates, activations, residuals, heads; float16, bfloat16 and
float32; planned for other sizes than they run at; kernels in the emulator.

    python -m pytest tests/test_random_products.py --seed 1 --graphs 500
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kernel_harness import attempt, check, only, parse, short_inputs, told

from onnxfuse.emulator import EmulatorError
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.products import tall

QUICK = 16
"""Products that are tried where no more are asked for."""

ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 33, 64, 65, 130)
INNER = (1, 7, 8, 16, 31, 40, 64, 72, 136, 264)
COLUMNS = (1, 8, 13, 16, 24, 33, 64, 72, 136)


class Drawn:
    """One random product: its text, and sizes to plan and to run it at."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = self.choose("float16", "float16", "bfloat16", "float")
        self.inner, self.columns = self.choose(*INNER), self.choose(*COLUMNS)
        self.rows: int | str = self.choose("M", "M", *ROWS)
        self.batch = self.choose([], [], [], ["B"], [3], ["B", 2])
        self.inputs: dict[str, list[Any]] = {}
        self.lines: list[str] = []
        self.text = self._text()

    def choose(self, *what: Any) -> Any:
        return self.rng.choice(what)

    def _operand(self, name: str, shape: list[Any], transposed: bool) -> str:
        """An operand, which may lie with its last axes changed."""
        if not transposed:
            self.inputs[name] = shape
            return name
        self.inputs[name] = [*shape[:-2], shape[-1], shape[-2]]
        axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        self.lines.append(f"{name}t = Transpose<perm = {axes}>({name})")
        return f"{name}t"

    def _text(self) -> str:
        left, right = self.batch, self.choose(self.batch, [])
        a = self._operand("a", [*left, self.rows, self.inner], self.choose(False, False, False, True))
        outputs: list[str] = []
        for place in range(self.choose(1, 1, 1, 2, 3, 3, 4)):
            w = self._operand(f"w{place}", [*right, self.inner, self.columns], self.choose(False, False, True))
            self.lines.append(f"p{place} = MatMul({a}, {w})")
            result, shape = f"p{place}", [*left, self.rows, self.columns]
            for number in range(self.rng.randint(0, 3)):
                result = self._behind(result, shape, f"r{place}{number}", (a, right))
            result, shape = self._laid(result, shape, f"l{place}")
            outputs.append(f"{self.kind}[{', '.join(map(str, shape))}] y{place}")
            self.lines.append(f"y{place} = Identity({result})")
        inputs = [f"{self.kind}[{', '.join(map(str, sizes))}] {name}" for name, sizes in self.inputs.items()]
        return f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(self.lines)} }}"

    def _behind(self, result: str, shape: list[Any], name: str, gated: tuple[str, list[Any]]) -> str:
        """Something that is computed of a result."""
        match self.choose("bias", "residual", "rows", "Relu", "Tanh", "Sigmoid", "gate"):
            case "bias":
                self.inputs[name + "b"] = [self.columns]
                self.lines.append(f"{name} = Add({result}, {name}b)")
            case "residual":
                self.inputs[name + "b"] = shape
                self.lines.append(f"{name} = Add({name}b, {result})")
            case "rows":
                self.inputs[name + "b"] = [self.rows, 1]
                self.lines.append(f"{name} = Mul({result}, {name}b)")
            case "gate" if "v" not in self.inputs:
                a, right = gated
                v = self._operand("v", [*right, self.inner, self.columns], self.choose(False, False, True))
                self.lines.append(f"{name}v = MatMul({a}, {v}) {name} = Mul({result}, {name}v)")
            case "gate":
                self.lines.append(f"{name} = Neg({result})")
            case op:
                self.lines.append(f"{name} = {op}({result})")
        return name

    def _laid(self, result: str, shape: list[Any], name: str) -> tuple[str, list[Any]]:
        """As it is, with its last axes changed, or split into heads before the rows."""
        way = self.choose("", "", "transposed", "heads")
        if way == "transposed":
            axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            self.lines.append(f"{name} = Transpose<perm = {axes}>({result})")
            return name, [shape[place] for place in axes]
        if way == "heads" and self.columns % 8 == 0 and len(shape) <= 3:
            depth, rank = self.columns // self.choose(1, 2, 4, 8), len(shape)
            sizes = [*["0"] * (rank - 1), str(self.columns // depth), str(depth)]
            axes = [*range(rank - 2), rank - 1, rank - 2, rank]
            self.lines.append(f"{name}s = Constant<value_ints = [{', '.join(sizes)}]>() "
                              f"{name}h = Reshape({result}, {name}s) {name} = Transpose<perm = {axes}>({name}h)")
            whole = [*shape[:-1], self.columns // depth, depth]
            return name, [whole[place] for place in axes]
        return result, shape

    def sizes(self) -> dict[str, int]:
        return {"M": self.choose(*ROWS), "B": self.rng.randint(1, 3)}


def test_products(seeds: Callable[[int], range]) -> None:
    """Nearly all of them have a kernel; why one has none is told."""
    drawn, ran = seeds(QUICK), 0
    for seed in drawn:
        one = Drawn(seed)
        planned = one.sizes()
        made = attempt(parse(one.text), planned)
        if isinstance(made, Refusal):
            assert made.code and made.message, one.text
            continue
        assert made.kernel.schedule == "product", one.text
        ran += 1
        choice = one.choose(None, *made.kernel.choices)
        for sizes, run in ((planned, made), (one.sizes(), told(made, choice, planned))):
            try:
                # Of a gate's two sums one may be large where the other nearly vanishes.
                check(run, short_inputs(run, sizes, seed), length=2 * one.inner, misalign=one.choose(False, True),
                      slack=4.0)
            except (AssertionError, EmulatorError) as error:
                raise AssertionError(f"seed {seed}, planned {planned}, {sizes}, {choice}: {one.text}") from error
    assert ran >= len(drawn) * 3 // 4


def test_tall_and_skinny_products(seeds: Callable[[int], range], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any that warps may go through by themselves, however few rows it has."""
    monkeypatch.setattr(tall, "LEAST_ROWS", 0)
    drawn, ran = seeds(2 * QUICK), 0
    for seed in drawn:
        one = Drawn(seed)
        planned = one.sizes()
        made = attempt(parse(one.text), planned)
        ways = [] if isinstance(made, Refusal) else [made, *(
            told(made, choice, planned) for choice in made.kernel.choices if "alone" in dict(choice.settings))]
        for way in ways:
            variants = [replace(each, guards=()) for each in way.kernel.plan.variants
                        if each.launches and each.launches[0].kernel.startswith(tall.TALL)]
            if not variants:
                continue
            ran += 1
            for sizes in (planned, one.sizes()):
                try:
                    run = only(way, variants[:1])
                    check(run, short_inputs(run, sizes, seed), length=2 * one.inner, misalign=False, slack=4.0)
                except (AssertionError, EmulatorError) as error:
                    raise AssertionError(f"seed {seed}, planned {planned}, {sizes}: {one.text}") from error
    assert ran >= len(drawn) // 16
