"""Random attentions over caches: heads, lengths, windows, rotations and types, against float64, in ways that tuning may
run them, over caches apart from the past and in its memory, behind whose sequences are no numbers.

    python -m pytest tests/test_random_caches.py --seed 1 --graphs 500
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from emulator import run_plan
from kernel_harness import Made, arguments, failures, make, short_inputs, told
from reference import Array, difference, evaluate

QUICK = 8
"""Attentions that are tried where no more are asked for."""


class Drawn:
    """One random attention: its text, sizes, and the last places of its sequences."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = self.choose("float16", "bfloat16", "float")
        self.own, self.shared = self.rng.randint(1, 3), self.choose(1, 2, 3, 4, 7)
        self.depth, self.packed = self.choose(16, 32, 48, 64, 80, 128), self.choose(True, False)
        self.rotates = self.choose(True, False)
        self.sizes, self.ends = self._first_prompt() if self.choose(True, False, False) else self._later()
        self.sizes["M"], self.sizes["N"] = self.sizes["L"] + 3, max(self.sizes["P"], self.sizes["L"])
        self.fixed = self.choose(True, False)

    def choose(self, *what: Any) -> Any:
        return self.rng.choice(what)

    def _first_prompt(self) -> tuple[dict[str, int], list[int]]:
        """All rows are new; some are of no sequence."""
        batch, rows = self.rng.randint(1, 3), self.choose(1, 3, 17, 33, 70, 130)
        ends = [rows - 1, *(self.rng.randrange(rows) for _ in range(batch - 1))]
        return {"B": batch, "S": rows, "P": self.choose(0, rows, rows + 9, 300), "L": rows}, ends

    def _later(self) -> tuple[dict[str, int], list[int]]:
        """New rows behind others, into a cache that grows or has room."""
        batch, rows, past = self.rng.randint(1, 3), self.choose(1, 1, 2, 16, 31, 65), self.choose(1, 15, 64, 257, 300)
        total = past + rows
        ends = [total - 1, *(self.rng.randrange(rows - 1, total) for _ in range(batch - 1))]
        return {"B": batch, "S": rows, "P": self.choose(past, total + self.rng.randrange(20)), "L": total}, ends

    @property
    def text(self) -> str:
        heads, depth, own = self.own * self.shared, self.depth, self.own
        rotation = f", do_rotary = 1, rotary_interleaved = {self.choose(0, 1)}" if self.rotates else ""
        more = "".join(each for each in (f", local_window_size = {self.choose(1, 5, 64, 100)}", ", softcap = 2.5", ", scale = 0.2")
                       if self.choose(True, False, False))
        sides = f"T[B,S,{(heads + 2 * own) * depth}] q" if self.packed else (
            f"T[B,S,{heads * depth}] q, T[B,S,{own * depth}] k, T[B,S,{own * depth}] v")
        half = self.choose(8, depth // 2)
        tables = f", T[M,{half}] cos, T[M,{half}] sin" if self.rotates else ""
        operands = f"{'q, , ' if self.packed else 'q, k, v'}, a, c, n, t{', cos, sin' if self.rotates else ''}"
        caches = [f"T[B,{own},P,{depth}] {name}" for name in "ac"], [f"T[B,{own},N,{depth}] {name}" for name in "de"]
        text = (f"g ({sides}, {', '.join(caches[0])}, int32[B] n, int64[B,L] mask{tables}) => (T[B,S,{heads * depth}] y, {', '.join(caches[1])}) "
                "{ s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s) "
                f"y, d, e = com.microsoft.GroupQueryAttention<num_heads = {heads}, kv_num_heads = {own}{rotation}{more}>({operands}) }}")
        for name, size in self.sizes.items() if self.fixed else ():
            text = text.replace(f"[{name},", f"[{size},").replace(f",{name},", f",{size},").replace(f",{name}]", f",{size}]").replace(
                f"[{name}]", f"[{size}]")
        return text.replace("T[", f"{self.kind}[")

    def made(self) -> Made:
        """As its schedule runs it, or in another way."""
        made = make(self.text, planned=self.choose({}, self.sizes))
        assert made.kernel.schedule == "cached"
        return told(made, self.choose(None, *made.kernel.choices), self.sizes)

    def inputs(self, made: Made, seed: int) -> dict[str, Array]:
        found = short_inputs(made, {} if self.fixed else self.sizes, seed)
        found["n"][:] = self.ends
        for sequence, end in enumerate(self.ends):
            for cache in "ac":
                found[cache][sequence, :, max(end + 1 - self.sizes["S"], 0):] = np.nan
        return found


def wrong_in_place(made: Made, inputs: dict[str, Array], total: int, slack: float) -> list[str]:
    """What is wrong where the caches are the past's memory."""
    names, expected = [value.name for value in made.lowered.tensors], evaluate(made.model, inputs)
    got = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs), [np.array([total])],
                   shared={1: names.index("a"), 2: names.index("c")})
    kinds = (info.type.tensor_type.elem_type for info in made.model.graph.output)
    found = [difference(array, expected[name], kind, length=130, slack=slack)
             for name, array, kind in zip("yde", got, kinds, strict=True)]
    return [each for each in found if each]


def test_caches(seeds: Callable[[int], range]) -> None:
    together = 0
    for seed in seeds(QUICK):
        drawn = Drawn(seed)
        made = drawn.made()
        inputs, slack = drawn.inputs(made, seed), 400.0 if drawn.kind == "float" else 4.0  # multiplied as TF32
        with np.errstate(all="ignore"):
            found = failures(made, inputs, length=130, misalign=False, slack=slack, limit=2)
            if drawn.sizes["P"] >= drawn.sizes["L"]:
                together += 1
                found += wrong_in_place(made, inputs, drawn.sizes["L"], slack)
        assert not found, (seed, drawn.text, drawn.sizes, drawn.ends, found[:2])
    assert together
