"""Random regions that may have no kernel, but not many in a row."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol, TypeVar

from kernel_harness import Made, attempt, parse


class Drawn(Protocol):
    """A random region; ``text``: its graph."""

    @property
    def text(self) -> str: ...


Region = TypeVar("Region", bound=Drawn)


class Text:
    """A random graph as it comes, of elements of one type.

    Attributes:
        kind: the type; inputs: shapes by name; lines: nodes.
        results: names of the results; shape: theirs.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = self.rng.choice(("float16", "float16", "bfloat16", "float"))
        self.inputs: dict[str, str] = {}
        self.lines: list[str] = []
        self.results: list[str] = []
        self.shape = ""

    def say(self, op: str, *operands: str) -> str:
        """One more node; the name of its result."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {op}({', '.join(operands)})")
        return name

    def read(self, *sizes: int) -> str:
        """One more input."""
        name = f"i{len(self.inputs)}"
        self.inputs[name] = ",".join(map(str, sizes))
        return name

    @property
    def text(self) -> str:
        """See ``Drawn``."""
        inputs = ", ".join(f"{self.kind}[{shape}] {name}" for name, shape in self.inputs.items())
        results = ", ".join(f"{self.kind}[{self.shape}] {name}" for name in self.results)
        return f"g ({inputs}) => ({results}) {{ {' '.join(self.lines)} }}"


def made_regions(
    seeds: Iterable[int], draw: Callable[[int], Region], opset: int, codes: Collection[str], most: int
) -> Iterator[tuple[int, Region, Made]]:
    """Those of the regions of some seeds that have a kernel.  Others are refused for one of some reasons, fewer than so
    many in a row."""
    without = 0
    for seed in seeds:
        drawn = draw(seed)
        made = attempt(parse(drawn.text, opset))
        if isinstance(made, Made):
            without = 0
            yield seed, drawn, made
        else:
            without += 1
            assert made.code in codes, (seed, made)
            assert without < most, (seed, made, drawn.text)
