"""A graph that grows by operators of the standard, each drawn with its schema and tried on what is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from schema_values import (
    BOOL,
    FLOAT,
    FLOATS,
    INT64,
    MOST_ELEMENTS,
    TENSORS,
    Array,
    Given,
    Known,
    Runtime,
    Size,
    element_type,
    flip,
    numpy_type,
    random_array,
    reads_of,
)

Pair = tuple[int, int]
Axes = Sequence[Pair]


@cache
def allowed(schema: onnx.defs.OpSchema) -> dict[str, tuple[int, ...]]:
    """Element types of each type parameter, and of each type that a schema writes out."""
    found = {constraint.type_param_str: tuple(sorted(TENSORS[name] for name in constraint.allowed_type_strs
                                                     if name in TENSORS))
             for constraint in schema.type_constraints}
    written = {formal.type_str for formal in (*schema.inputs, *schema.outputs)}
    return found | {name: (TENSORS[name],) for name in written if name in TENSORS}


@dataclass
class Builder:
    """A graph, or a body, that is growing.

    Attributes:
        kind: the floating type of which most is made; situations: sizes of the symbols.
        prefix: of all names that are made here.
        outer: values of the graphs around, in a body.
        closed: whether nothing but nodes can be added: in a function, which has no initializers.
        identities: share of the reads that pass through a node that changes nothing; common: of nodes that fusing is
            about.
        functions: of the model; grow: adds a node or a few, of whatever sort.
    """

    rng: Random
    opset: int
    kind: int
    situations: tuple[Mapping[str, int], Mapping[str, int]]
    prefix: str = ""
    outer: tuple[Known, ...] = ()
    closed: bool = False
    identities: float = 0.0
    common: float = 0.3
    depth: int = 0
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    inputs: list[Given] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    pending: dict[str, Known] = field(default_factory=dict)
    count: int = 0
    seed: int = 0
    grow: Callable[[Builder], object] = lambda builder: None

    # ---- Values. ----

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{self.prefix}{stem}{self.count}"

    def flip(self, share: float = 0.5) -> bool:
        return flip(self.rng, share)

    @property
    def around(self) -> list[Known]:
        """All that can be read."""
        return [*self.outer, *self.known]

    def find(self, accept: Callable[[Known], bool]) -> Known | None:
        """A value that is there, later ones more often."""
        found = [value for value in self.around if accept(value)]
        return self.rng.choice(found[-5:] if self.flip() else found) if found else None

    def constant(self, *arrays: Array) -> Known:
        """An initializer, or a Constant's output; one array, the same in both situations."""
        (array,) = arrays
        if self.closed or self.flip(0.15):
            name = self.emit("Constant", [], value=numpy_helper.from_array(array))[0]
        else:
            name = self.fresh("c")
            self.constants.append(numpy_helper.from_array(array, name))
        made = Known(name, element_type(array), (array, array), True)
        self.pending[name] = made
        return made

    def ints(self, *values: int, dtype: int = INT64) -> Known:
        return self.constant(np.array(values, numpy_type(dtype)))

    def scalar(self, value: float, dtype: int) -> Known:
        return self.constant(np.array(value).astype(numpy_type(dtype)))

    def _input(self, dtype: int, dims: Sequence[Size], low: int = -4, high: int = 5) -> Known:
        given = Given(self.fresh("x"), dtype, tuple(dims), low, high)
        self.inputs.append(given)
        arrays = [given.array(sizes, self.seed) for sizes in self.situations]
        return self._pend(Known(given.name, dtype, (arrays[0], arrays[1])))

    def _pend(self, value: Known) -> Known:
        self.pending[value.name] = value
        return value

    def dims(self, axes: Axes) -> list[Size] | None:
        """Declared sizes for axes that are so long in the two situations; None where no symbol is."""
        found: list[Size] = []
        for pair in axes:
            named = [name for name, size in self.situations[0].items() if (size, self.situations[1][name]) == pair]
            if named and (pair[0] != pair[1] or self.flip()):
                found.append(self.rng.choice(named))
            elif pair[0] == pair[1]:
                found.append(pair[0])
            else:
                return None
        return found

    def fill(self, dtype: int, axes: Axes, low: int = -4, high: int = 5) -> Known | None:
        """A new value of these sizes: an input or, where the sizes never change, a constant."""
        fixed = all(a == b for a, b in axes)
        if self.depth or (fixed and self.flip(0.7)):
            if not fixed:
                return None
            rng = np.random.default_rng(self.rng.randint(0, 2**31))
            return self.constant(random_array(dtype, [a for a, _ in axes], rng, low, high))
        dims = self.dims(axes)
        return None if dims is None else self._input(dtype, dims, low, high)

    def random_axes(self, rank: int) -> list[Pair]:
        """Sizes of numbers and of symbols."""
        symbols = [(self.situations[0][name], self.situations[1][name]) for name in self.situations[0]]
        numbers = [(n, n) for n in (1, 2, 3, 3, 4, 5, 7, 8)]
        if self.flip(0.02):
            numbers.append((0, 0))
        return [self.rng.choice(symbols) if symbols and not self.depth and self.flip(0.4) else self.rng.choice(numbers)
                for _ in range(rank)]

    def value(self, types: Collection[int], least: int = 0, most: int = 4,
              accept: Callable[[Known], bool] = lambda value: True) -> Known | None:
        """A value of one of the types, of ``least`` to ``most`` axes: one that is there, or a new one."""
        found = self.find(lambda v: v.dtype in types and least <= v.rank <= most and accept(v))
        if found is not None and self.flip(0.9):
            return found
        good = [dtype for dtype in (self.kind, FLOAT, INT64, BOOL) if dtype in types]
        dtype = good[0] if good and self.flip(0.6) else self.rng.choice(sorted(types))
        made = self.fill(dtype, self.random_axes(self.rng.randint(least, max(least, min(most, 4)))))
        return made if made is not None and accept(made) else found

    def broadcast(self, to: Known, dtype: int, whole: bool = False) -> Known | None:
        """A value of a type that broadcasts with another; only towards it where ``whole``."""

        def fits(value: Known) -> bool:
            pairs = list(zip(reversed(value.pairs), reversed(to.pairs), strict=False))
            if whole and (value.rank > to.rank or any(a not in (b, (1, 1)) for a, b in pairs)):
                return False
            return all(a == b or (1, 1) in (a, b) for a, b in pairs)

        found = self.find(lambda value: value.dtype == dtype and fits(value))
        if found is not None and self.flip(0.6):
            return found
        axes = list(to.pairs)[self.rng.randint(0, to.rank) if self.flip(0.3) else 0:]
        return self.fill(dtype, [(1, 1) if self.flip(0.25) or (a != b and (self.depth or self.flip(0.3))) else (a, b)
                                 for a, b in axes])

    # ---- Nodes. ----

    def emit(self, op: str, reads: Sequence[Known | str | None], outputs: int | Sequence[str] = 1, domain: str = "",
             **attributes: object) -> list[str]:
        """A node; the names of its outputs.  Reads are by name, and not passed through anything."""
        names = [self.fresh() for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        inputs = ["" if value is None else value if isinstance(value, str) else value.name for value in reads]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names

    def through(self, value: Known) -> str:
        """A read of a value, on some reads through something that changes nothing."""
        name = value.name
        while self.flip(self.identities):
            made = self.rng.choice(IDENTITIES)(self, value, name)
            name = name if made is None else made
        return name

    def attempt(self, propose: Callable[[Builder], object]) -> bool:
        """Let something be added, and take it back where ONNX Runtime does not run it in both situations."""
        marks = len(self.inputs), len(self.constants), len(self.nodes), len(self.functions)
        self.pending = {}
        made = propose(self) is not None and len(self.nodes) > marks[2] and self._accepted(marks[1], marks[2])
        if not made:
            for items, mark in zip((self.inputs, self.constants, self.nodes, self.functions), marks, strict=True):
                del items[mark:]  # type: ignore[attr-defined]
        else:
            self.known.extend(value for value in self.pending.values()
                              if value.size <= MOST_ELEMENTS and value.name not in {v.name for v in self.known})
        self.pending = {}
        return made

    def _accepted(self, constants: int, nodes: int) -> bool:
        new = self.nodes[nodes:]
        made = {name for node in new for name in node.output if name}
        held = {value.name: value for value in (*self.around, *self.pending.values())}
        read = {name for node in new for name in reads_of(node)} - made
        every = dict.fromkeys(name for node in new for name in node.output if name and node.op_type != "Optional")
        fixed = {value for value in read if value in held and held[value].constant}
        inputs = sorted(name for name in read - fixed if name in held)
        model = helper.make_model(
            helper.make_graph(
                new, "trial",
                [helper.make_tensor_value_info(value.name, value.dtype, [a if a == b else None for a, b in value.pairs])
                 for value in map(held.__getitem__, inputs)],
                [onnx.ValueInfoProto(name=name) for name in every],
                [numpy_helper.from_array(held[name].arrays[0], name) for name in sorted(fixed)]),
            opset_imports=opsets(self.opset), functions=self.functions, ir_version=10)
        found: dict[str, list[Array]] = {}
        try:
            runtime = Runtime(model)
            for situation in range(2):
                results = runtime.run({name: held[name].arrays[situation] for name in inputs})
                for name, array in results.items():
                    if array is not None:
                        found.setdefault(name, []).append(array)
        except Exception:  # whatever it is, the node is none
            return False
        for name in every:
            arrays = found.get(name, [])
            if len(arrays) != 2:
                continue
            if arrays[0].ndim != arrays[1].ndim:
                return False
            wild = any(array.dtype.kind not in "biu" and not np.all(np.abs(array.astype(np.float64)) < 1e4)
                       for array in arrays)
            if wild and not self.flip(0.1):
                return False
            constant = name in self.pending and self.pending[name].constant
            self.pending[name] = Known(name, element_type(arrays[0]), (arrays[0], arrays[1]), constant)
        return True


def opsets(version: int) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", version), helper.make_opsetid("local", 1)]


# ---- What changes nothing. ----

Identity = Callable[[Builder, Known, str], "str | None"]


def _one(op: str, number: float, first: bool = False) -> Identity:
    """An operation with a neutral element, on either side where that is the same."""

    def make(b: Builder, value: Known, name: str) -> str | None:
        if value.dtype == BOOL or (value.dtype not in (*FLOATS, TensorProto.INT32, INT64)):
            return None
        array = np.full((1,) * b.rng.randint(0, min(value.rank, 1)), number).astype(numpy_type(value.dtype))
        other = b.constant(array).name
        return b.emit(op, [other, name] if first and b.flip() else [name, other])[0]

    return make


def _plain(op: str, **attributes: object) -> Identity:
    return lambda b, value, name: b.emit(op, [name], **attributes)[0]


def _cast(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Cast", [name], to=value.dtype)[0]


def _dropout(b: Builder, value: Known, name: str) -> str | None:
    if value.dtype not in FLOATS:
        return None
    return b.emit("Dropout", [name], outputs=b.rng.choice((1, 1, 2)))[0]


def _reshape(b: Builder, value: Known, name: str) -> str | None:
    if any(0 in pair for pair in value.pairs) or not value.rank:
        return None
    target = [0] * value.rank
    if b.flip():
        target[b.rng.randrange(value.rank)] = -1
    return b.emit("Reshape", [name, b.ints(*target)])[0]


def _reshape_to_its_shape(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Reshape", [name, b.emit("Shape", [name])[0]])[0]


def _transpose(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Transpose", [name], perm=list(range(value.rank)))[0] if value.rank else None


def _turned_twice(b: Builder, value: Known, name: str) -> str | None:
    if not value.rank:
        return None
    order = b.rng.sample(range(value.rank), value.rank)
    turned = b.emit("Transpose", [name], perm=order)[0]
    return b.emit("Transpose", [turned], perm=[order.index(axis) for axis in range(value.rank)])[0]


def _slice(b: Builder, value: Known, name: str) -> str | None:
    if not value.rank:
        return None
    axis = b.rng.randrange(value.rank)
    return b.emit("Slice", [name, b.ints(0), b.ints(2**63 - 1 if b.flip() else 2**31 - 1), b.ints(axis)])[0]


def _unsqueezed_and_squeezed(b: Builder, value: Known, name: str) -> str | None:
    axis = b.rng.randint(0, value.rank)
    if b.opset >= 13:
        axes = b.ints(axis)
        return b.emit("Squeeze", [b.emit("Unsqueeze", [name, axes])[0], axes])[0]
    return b.emit("Squeeze", [b.emit("Unsqueeze", [name], axes=[axis])[0]], axes=[axis])[0]


def _where(b: Builder, value: Known, name: str) -> str | None:
    truth = b.flip()
    return b.emit("Where", [b.constant(np.array(truth)), name, name])[0]


def _expand(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Expand", [name, b.ints(*[1] * b.rng.randint(0, value.rank))])[0]


def _concat(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Concat", [name], axis=b.rng.randrange(value.rank))[0] if value.rank else None


def _split(b: Builder, value: Known, name: str) -> str | None:
    if not value.rank or b.opset < 13 or value.pairs[0][0] != value.pairs[0][1]:
        return None
    return b.emit("Split", [name, b.ints(value.pairs[0][0])], axis=0)[0]


def _pad(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Pad", [name, b.ints(*[0] * (2 * value.rank))])[0] if value.rank and value.dtype in FLOATS else None


def _tile(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Tile", [name, b.ints(*[1] * value.rank)])[0] if value.rank else None


def _flatten(b: Builder, value: Known, name: str) -> str | None:
    return b.emit("Flatten", [name], axis=1)[0] if value.rank == 2 else None


IDENTITIES: Sequence[Identity] = (
    _plain("Identity"), _plain("Identity"), _one("Mul", 1, True), _one("Add", 0, True), _one("Sub", 0), _one("Div", 1),
    _one("Pow", 1), _plain("Sum"), _plain("Max"), _plain("Mean"), _cast, _dropout, _reshape, _reshape_to_its_shape,
    _transpose, _turned_twice, _slice, _unsqueezed_and_squeezed, _where, _expand, _concat, _split, _pad, _tile,
    _flatten,
)
