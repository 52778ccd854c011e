"""A graph that grows node by node, for random tests: what is there, and how large and how exact its elements are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from reference import FLOATS, numpy_type

from onnxfuse.graph.dims import Dim, dim

FLOAT, INT32, INT64, UINT32, BOOL = (
    TensorProto.FLOAT,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT32,
    TensorProto.BOOL,
)
MOST_ELEMENTS = 3000
FAR = 100.0
LARGEST = 13
"""The largest size of a symbol."""

EXACT_TO = {TensorProto.DOUBLE: 1e6, TensorProto.FLOAT: 1e6, TensorProto.FLOAT16: 256.0, TensorProto.BFLOAT16: 32.0}
"""Up to which magnitude a type holds quarters."""


@dataclass(frozen=True)
class Known:
    """A value of the graph that is growing; all its elements lie within ``bound``, and ``exact`` ones are quarters."""

    name: str
    dtype: int
    shape: tuple[Dim, ...]
    bound: float
    exact: bool


@dataclass(frozen=True)
class RandomGraph:
    """A model, its inputs, and what its symbols are in them.

    Attributes:
        wanted: the model's inputs as they were drawn; seed: of the inputs' elements.
        standard: whether all operators are of the standard or of a domain that the checker passes over.
    """

    model: onnx.ModelProto
    sizes: Mapping[str, int]
    wanted: tuple[Known, ...]
    seed: int
    standard: bool = True

    @property
    def inputs(self) -> Mapping[str, NDArray[np.generic]]:
        """Arrays at the sizes that were drawn."""
        return self.arrays(self.sizes)

    @property
    def opset(self) -> int:
        """Of the standard operators."""
        return next(entry.version for entry in self.model.opset_import if not entry.domain)

    def arrays(self, sizes: Mapping[str, int]) -> Mapping[str, NDArray[np.generic]]:
        """Inputs at any sizes: quarters between -2 and 2, exact in every type and equal often enough; indices."""
        rng = np.random.default_rng(self.seed)
        found: dict[str, NDArray[np.generic]] = {}
        for value in self.wanted:
            shape = [size.evaluate(sizes) for size in value.shape]
            index = value.dtype in (INT32, INT64)
            whole = rng.integers(0, int(value.bound) + 1, shape) if index else rng.integers(-8, 9, shape) / 4
            found[value.name] = whole.astype(numpy_type(value.dtype))
        return found


@dataclass
class Builder:
    """A graph that is growing; ``kind`` is the floating type that is grown with just now, ``portable`` graphs have no
    other."""

    rng: Random
    kind: int
    sizes: dict[str, int]
    opset: int
    portable: bool = False
    known: list[Known] = field(default_factory=list)
    inputs: list[Known] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)

    def actual(self, shape: Sequence[Dim]) -> list[int]:
        return [size.evaluate(self.sizes) for size in shape]

    @property
    def limits(self) -> dict[str, int]:
        """The largest sizes that symbols take."""
        return dict.fromkeys(self.sizes, LARGEST)

    def flip(self) -> bool:
        return bool(self.rng.randint(0, 1))

    def choose(self, accept: Callable[[Known], bool]) -> Known | None:
        """A value that is acceptable, later ones more often, or None."""
        found = [value for value in self.known if accept(value)]
        return self.rng.choice(found[-6:] if self.flip() else found) if found else None

    def floating(self, rank: int = 0, exact: bool = False) -> Known | None:
        return self.choose(lambda v: v.dtype == self.kind and len(v.shape) >= rank and (v.exact or not exact))

    def of_type(self, dtype: int) -> Known | None:
        return self.choose(lambda v: v.dtype == dtype)

    def integer(self) -> Known | None:
        """A value of int32, made of exact floats where there is none."""
        found = self.of_type(INT32)
        x = found or self.floating(exact=True)
        return found or (x and self.add("Cast", [x], x.shape, x.bound, dtype=INT32, exact=True, to=INT32))

    def truth(self) -> Known | None:
        """A value of truth values, made of exact floats where there is none."""
        found = self.of_type(BOOL)
        x = found or self.floating(exact=True)
        return found or (x and self.add("Greater", [x, self.number(0.25)], x.shape, 1, dtype=BOOL, exact=True))

    def input(self, value: Known) -> Known:
        """One more input of the graph, which is no operand for others."""
        self.inputs.append(replace(value, name=f"x{len(self.inputs)}"))
        return self.inputs[-1]

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

    def hidden(self, op: str, operands: Sequence[Known | str], shape: Sequence[Dim] = (), dtype: int = INT64,
               **attributes: object) -> Known:
        """A node whose output nobody else reads."""
        made = self.add(op, operands, shape, FAR, dtype=dtype, exact=True, **attributes)
        self.known.remove(made)
        return made

    def axes(self, op: str, since: int, axes: Sequence[int]) -> tuple[list[str], dict[str, object]]:
        """Axes as the operator has them: a further input from opset ``since`` on, an attribute before."""
        return ([self.ints(*axes)], {}) if self.opset >= since else ([], {"axes": list(axes)})

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

    def size_of(self, value: Known, axis: int) -> Known:
        """A size as a tensor of no axes, as exporters take it from a shape."""
        shape = self.hidden("Shape", [value], [dim(len(value.shape))])
        return self.hidden("Gather", [shape, self.constant(np.array(axis, np.int64))], [])


Grow = Callable[[Builder], "Known | None"]
GROWERS: dict[str, Grow] = {}


def grows(*names: str) -> Callable[[Callable[[Builder, str], Known | None]], Callable[[Builder, str], Known | None]]:
    """Register a grower under operators' names, "domain.Op" where they are not of the standard; it is told which."""

    def register(grow: Callable[[Builder, str], Known | None]) -> Callable[[Builder, str], Known | None]:
        for name in names:
            GROWERS[name] = lambda builder, name=name: grow(builder, name)  # type: ignore[misc]
        return grow

    return register


@cache
def takes(name: str, opset: int, kind: int) -> bool:
    """Whether the standard of that opset has an operator, and for that floating type; others are taken to."""
    if "." in name or not onnx.defs.has(name):
        return True
    if not onnx.defs.has(name, opset):
        return False
    schema = onnx.defs.get_schema(name, opset)
    if schema.deprecated:
        return False
    types = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    named = {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}
    wanted = f"tensor({TensorProto.DataType.Name(kind).lower()})"
    each = [types.get(entry.type_str, {entry.type_str}) & named for entry in schema.inputs]
    return all(wanted in floats for floats in each if floats)
