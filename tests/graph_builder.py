"""A graph that grows node by node, for random tests: what is there, and how large and how exact its elements are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from reference import FLOATS

from onnxfuse.graph.dims import Dim

FLOAT, INT32, INT64, UINT32, BOOL = (
    TensorProto.FLOAT,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT32,
    TensorProto.BOOL,
)
OPSET = 21
MOST_ELEMENTS = 3000
FAR = 100.0


@dataclass(frozen=True)
class Known:
    """A value of the graph that is growing."""

    name: str
    dtype: int
    shape: tuple[Dim, ...]
    bound: float
    exact: bool


@dataclass(frozen=True)
class RandomGraph:
    """A model, its inputs, and what its symbols are in them."""

    model: onnx.ModelProto
    inputs: Mapping[str, NDArray[np.generic]]
    sizes: Mapping[str, int]


@dataclass
class Builder:
    """A graph that is growing."""

    draw: st.DrawFn
    kind: int
    sizes: dict[str, int]
    known: list[Known] = field(default_factory=list)
    inputs: list[Known] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)

    def actual(self, shape: Sequence[Dim]) -> list[int]:
        return [size.evaluate(self.sizes) for size in shape]

    def choose(self, accept: Callable[[Known], bool]) -> Known | None:
        """A value that is acceptable, later ones more often, or None."""
        found = [value for value in self.known if accept(value)]
        return self.draw(st.sampled_from(found[-6:] if self.draw(st.booleans()) else found)) if found else None

    def floating(self, rank: int = 0, exact: bool = False) -> Known | None:
        return self.choose(lambda v: v.dtype == self.kind and len(v.shape) >= rank and (v.exact or not exact))

    def of_type(self, dtype: int) -> Known | None:
        return self.choose(lambda v: v.dtype == dtype)

    def constant(self, array: NDArray[np.generic]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, FLOATS[self.kind]))

    def vector(self, size: int) -> str:
        return self.constant(np.linspace(0.5, 1.0, size).astype(FLOATS[self.kind]))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(
        self,
        op: str,
        operands: Sequence[Known | str],
        shape: Sequence[Dim],
        bound: float,
        *,
        dtype: int | None = None,
        exact: bool = False,
        outputs: int = 1,
        domain: str = "",
        **attributes: object,
    ) -> Known:
        """A node; its (first) output."""
        stem = f"v{len(self.nodes)}"
        names = [stem] + [f"{stem}_{place}" for place in range(1, outputs)]
        read = [operand if isinstance(operand, str) else operand.name for operand in operands]
        self.nodes.append(helper.make_node(op, read, names, domain=domain, **attributes))
        made = Known(stem, self.kind if dtype is None else dtype, tuple(shape), bound, exact)
        self.known.append(made)
        return made

    def tamed(self, value: Known, bound: float) -> Known:
        """The value, or one made of it that is within the bound (at most 1)."""
        if value.bound <= bound:
            return value
        small = self.add("Tanh", [value], value.shape, 1.0)
        return small if bound >= 1 else self.add("Mul", [small, self.number(bound)], small.shape, bound)

    def moderate(self, value: Known) -> Known:
        return value if value.bound <= FAR else self.tamed(value, 1.0)

    def positive(self, value: Known, least: float) -> Known:
        size = self.add("Abs", [self.moderate(value)], value.shape, min(value.bound, FAR))
        return self.add("Add", [size, self.number(least)], value.shape, size.bound + least)


Grow = Callable[[Builder], "Known | None"]
GROWERS: dict[str, Grow] = {}


def grows(*names: str) -> Callable[[Callable[[Builder, str], Known | None]], Callable[[Builder, str], Known | None]]:
    """Register a grower under operators' names; it is told which."""

    def register(grow: Callable[[Builder, str], Known | None]) -> Callable[[Builder, str], Known | None]:
        for name in names:
            GROWERS[name] = lambda builder, name=name: grow(builder, name)  # type: ignore[misc]
        return grow

    return register
