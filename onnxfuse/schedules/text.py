"""C++ text of scalar expressions.

The text of a kernel has four scopes, each inside the one before: the kernel, a row, a vector of neighbouring
elements, and one lane of that vector.  An expression is written once, into the outermost scope in which it is known:
an index that is the same for all lanes is computed before them, neighbouring elements of a tensor are loaded as one
vector.  ``Lanes`` decides which is which, and notes what must divide by the vector width for it to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.ir.scalars import BFLOAT16, BOOL, DOUBLE, FLOAT16, FUNCTIONS, TYPES
from onnxfuse.ir.tensors import Number
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.pull import Apply, Condition, Constant, Index, Load, Puller, Reduced, Scalar, Select, children


class Scope(IntEnum):
    """Where an expression is known, outermost first."""

    KERNEL = 0
    ROW = 1
    VECTOR = 2
    LANE = 3


class Sizes:
    """What size symbols are called in one text, and which of those names it uses."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.used: set[str] = set()

    def __contains__(self, symbol: str) -> bool:
        return symbol in self.names

    def __getitem__(self, symbol: str) -> str:
        """The name of a size; it counts as used."""
        self.used.add(self.names[symbol])
        return self.names[symbol]


@dataclass
class Lanes:
    """How indices move along the lanes of a vector.

    Attributes:
        space: the loop variables; ``puller`` knows which are indices read from memory.
        element: the base whose neighbours make a vector; ``row`` the base of rows, or "".  Where they are the same,
            the lanes of a vector are of neighbouring rows.
        width: lanes of a vector, a power of two.
        multiples: sizes that must be multiples of the width; guards make sure of those that are not constant.
    """

    space: IndexSpace
    puller: Puller
    element: str
    row: str
    width: int
    multiples: dict[Dim, None] = field(default_factory=dict)
    _moving: dict[Scalar, bool] = field(default_factory=dict)

    @property
    def across(self) -> bool:
        """Whether each lane belongs to a row of its own."""
        return self.element == self.row

    def stride(self, index: Dim) -> Dim | None:
        """By how much an index grows from lane to lane; None where that is no constant step."""
        total = dim(0)
        for monomial, factor in index.terms.items():
            for atom, power in monomial:
                if atom.kind != "symbol" or not self._moves(atom.name):
                    continue
                step = self._step(atom.name)
                if step is None or power > 1:
                    return None
                if step != 0:
                    scale = Dim({monomial: factor}).divide(symbol(atom.name))
                    if scale is None or any(self._moves(name) for name in scale.symbols):
                        return None
                    total = total + scale * step
        return total

    def _step(self, name: str) -> Dim | None:
        if name in self.space.derived:
            inner = self.stride(self.space.derived[name])
            return dim(0) if inner == 0 else None
        digit = self.space.variable(name)
        if name == self.element:
            return dim(1)
        if digit is None or digit.base != self.element:
            base = digit.base if digit is not None else name
            return self._step(base) if base != name and self._moves(base) else (None if self._moves(base) else dim(0))
        if digit.step == 1:
            return dim(1) if digit.size is not None and self._multiple(digit.size) else None
        return dim(0) if self._multiple(digit.step) else None

    def _moves(self, name: str) -> bool:
        """Whether a variable depends on the element at all."""
        if name == self.element:
            return True
        if name in self.space.derived:
            return any(self._moves(part) for part in self.space.derived[name].symbols)
        if name in self.puller.gathered:
            return self.moves(self.puller.gathered[name])
        digit = self.space.digits.get(name)
        return digit is not None and self._moves(digit.base)

    def moves(self, scalar: Scalar) -> bool:
        """Whether an expression depends on the element."""
        if scalar not in self._moving:
            self._moving[scalar] = self._depends(scalar)
        return self._moving[scalar]

    def _depends(self, scalar: Scalar) -> bool:
        indices = []
        if isinstance(scalar, Load):
            indices = [scalar.offset, *(condition.index for condition in scalar.conditions)]
        elif isinstance(scalar, Index):
            indices = [scalar.index]
        elif isinstance(scalar, Select):
            indices = [scalar.condition.index]
        elif isinstance(scalar, Reduced):
            return self.across
        return any(self._moves(name) for index in indices for name in index.symbols) or any(
            self.moves(child) for child in children(scalar)
        )

    def _multiple(self, size: Dim) -> bool:
        if size.multiple_of() % self.width == 0:
            return True
        if size.value is not None:
            return False
        self.multiples[size] = None
        return True

    def aligned(self, index: Dim) -> bool:
        """Whether an index is a multiple of the width at the first lane."""
        for monomial, factor in index.terms.items():
            term = Dim({monomial: factor})
            for name in term.symbols:
                if name == self.element or (name in self.space.digits and self._step(name) == 1):
                    break
                if self.space.is_variable(name):
                    term = term.divide(symbol(name)) or term
            else:
                if not self._multiple(term):
                    return False
        return True

    def uniform(self, condition: Condition) -> bool:
        """Whether a condition is the same for all lanes of a vector."""
        stride = self.stride(condition.index)
        if stride == 0:
            return True
        limits = [limit for limit in (condition.low, condition.high) if limit is not None]
        return stride == 1 and self.aligned(condition.index) and all(self._multiple(limit) for limit in limits)

    def scope(self, index: Dim) -> Scope:
        """Where the value of an index is known."""
        if any(self._moves(name) for name in index.symbols):
            return Scope.VECTOR if self.stride(index) == 0 else Scope.LANE
        return Scope.ROW if any(self.space.is_variable(name) for name in index.symbols) else Scope.KERNEL


def literal(number: Number, dtype: int) -> str:
    """A number as C++ in the type that ``dtype`` is computed in."""
    kind = TYPES[dtype]
    if dtype == BOOL:
        return "true" if number else "false"
    if not kind.is_floating:
        suffix = {"long long": "LL", "unsigned long long": "ULL", "unsigned int": "U"}.get(kind.compute, "")
        if kind.size < 4:  # there are no literals of these types: a function of two of one type would see two types
            return f"(({kind.compute}){int(number)})"
        if int(number) == -(2 ** (8 * kind.size - 1)):  # the minus is no part of a literal
            return f"({int(number) + 1}{suffix} - 1)"
        return f"{int(number)}{suffix}" if number >= 0 else f"({int(number)}{suffix})"
    value = float(number)
    if np.isnan(value):
        return f"({kind.compute})OF_NAN"
    if np.isinf(value):
        return f"({kind.compute}){'-' if value < 0 else ''}OF_INFINITY"
    text = repr(value) if dtype == DOUBLE else str(np.float32(value))
    if not any(mark in text for mark in ".e"):
        text += ".0"
    text += "" if dtype == DOUBLE else "f"
    return text if value >= 0 and not text.startswith("-") else f"({text})"


def converted(text: str, source: int, target: int) -> str:
    """A value of one type rounded to another, in the type that is computed in."""
    if target == BOOL:
        return f"{text} != 0"
    kind = TYPES[target]
    if target in (FLOAT16, BFLOAT16):
        return f"of::round_to<{kind.storage}>((float){text})"
    if not kind.is_floating and TYPES[source].is_floating:
        return f"of::to_integer<{kind.compute}>({text})"
    return text if TYPES[source].compute == kind.compute else f"({kind.compute}){text}"


class Writer:
    """Writes expressions into scopes.

    Args:
        lanes: how indices move.
        sizes: names of size symbols; writers of one text share them.
        hook: called before an expression is written; may give its text (for values kept from an earlier phase).
    """

    def __init__(
        self, lanes: Lanes, sizes: Sizes, hook: Callable[[Scalar], str | None] | None = None
    ) -> None:
        self.lanes = lanes
        self.sizes = sizes
        self.hook = hook
        self.lines: dict[Scope, list[str]] = {scope: [] for scope in Scope}
        self.names: dict[Scope, dict[object, str]] = {scope: {} for scope in Scope}
        self._taken: dict[str, Scope] = {}
        self._next: dict[str, int] = {}
        self._scopes: dict[Scalar, Scope] = {}

    def leave(self, scope: Scope) -> list[str]:
        """Close a scope and those inside it; gives its lines, and forgets its names."""
        lines = self.lines[scope]
        for inner in Scope:
            if inner >= scope:
                self.lines[inner] = []
                self.names[inner] = {}
        self._taken = {name: where for name, where in self._taken.items() if where < scope}
        self._next = {}
        return lines

    def fresh(self, word: str, scope: Scope = Scope.KERNEL) -> str:
        """A name that begins with a word, for something of a scope: no other until that scope is left has it.  Words
        that end with "_" are names already, and are numbered from the second on."""
        number = self._next.get(word, 0)
        while (name := f"{word}{number}" if number or word[-1] != "_" else word[:-1]) in self._taken:
            number += 1
        self._next[word] = number + 1
        self._taken[name] = scope
        return name

    def define(self, key: object, scope: Scope, kind: str, text: str, word: str) -> str:
        """A named constant of a scope, its name begins with a word that says what it holds; the same key gives the
        same name again."""
        for outer in Scope:
            if key in self.names[outer]:
                return self.names[outer][key]
        name = self.fresh(word, scope)
        self.names[scope][key] = name
        self.lines[scope].append(f"const {kind} {name} = {text};")
        return name

    def size(self, size: Dim) -> str:
        """A size, or an index of which every variable is already text, as an operand."""
        text = self._polynomial(size, lambda name: self.sizes[name])
        return text if text.isalnum() else f"({text})"

    def index(self, index: Dim, lane: bool = False) -> str:
        """An index as an operand: for the first lane of the vector, or for the lane at hand."""
        return self._polynomial(index, lambda name: self._variable(name, lane))

    def _polynomial(self, index: Dim, atom_text: Callable[[str], str]) -> str:
        terms = []
        for monomial, factor in index.terms.items():
            parts = []
            for atom, power in monomial:
                if atom.kind == "symbol":
                    text = atom_text(atom.name)
                else:
                    a, b = (self._polynomial(operand, atom_text) for operand in atom.operands)
                    text = f"of::{_OPERATIONS[atom.kind]}((idx)({a}), (idx)({b}))"
                parts += [text] * power
            if factor != 1 or not parts:
                parts.insert(0, f"(idx){factor}" if parts else str(factor))
            terms.append(" * ".join(parts))
        return " + ".join(terms) or "0"

    def _variable(self, name: str, lane: bool) -> str:
        lanes = self.lanes
        if name in self.sizes and not lanes.space.is_variable(name):
            return self.sizes[name]
        lane = lane and lanes._moves(name)
        if name in lanes.space.extents and name not in lanes.space.derived and name not in lanes.puller.gathered:
            text = name.removeprefix("@")  # a loop's variable
            return f"({text} + v)" if lane else text
        scope = Scope.LANE if lane else Scope.VECTOR if lanes._moves(name) else Scope.ROW
        key = ("variable", name, lane)
        if name in lanes.space.derived:
            return self.define(key, scope, "idx", self.index(lanes.space.derived[name], lane), "place")
        if name in lanes.puller.gathered:
            return self.define(key, scope, "idx", f"(idx){self.scalar(lanes.puller.gathered[name])}", "index")
        digit = lanes.space.digits[name]
        text = self._variable(digit.base, lane)
        if digit.step != 1:
            text = f"{text} / {self.size(digit.step)}"
        if digit.size is not None and not digit.top:
            text = f"{text} % {self.size(digit.size)}"
        return self.define(key, scope, "idx", text, "digit")

    def condition(self, condition: Condition) -> tuple[str, Scope]:
        """A condition as text, and where it is known."""
        uniform = self.lanes.uniform(condition)
        scope = self.lanes.scope(condition.index)
        scope = min(scope, Scope.VECTOR) if uniform else Scope.LANE
        index = self.index(condition.index, lane=not uniform)
        parts = []
        if condition.low is not None:
            parts.append(f"{index} >= {self.size(condition.low)}")
        if condition.high is not None:
            parts.append(f"{index} < {self.size(condition.high)}")
        return " && ".join(parts) or "true", scope

    def scalar(self, scalar: Scalar) -> str:
        """An expression's name or text; its definition is written where it belongs."""
        if isinstance(scalar, Constant):
            return literal(scalar.number, scalar.dtype)
        for scope in Scope:
            if scalar in self.names[scope]:
                return self.names[scope][scalar]
        kept = self.hook(scalar) if self.hook is not None else None
        if kept is not None:
            return kept
        kind = TYPES[scalar.dtype].compute
        match scalar:
            case Load():
                return self._load(scalar)
            case Index():
                if scalar.index.value is not None and not TYPES[scalar.dtype].is_floating:
                    return literal(scalar.index.value, scalar.dtype)
                scope = self.lanes.scope(scalar.index)
                text = f"({kind})({self.index(scalar.index, scope is Scope.LANE)})"
                return self.define(scalar, scope, kind, text, "place")
            case Select():
                chosen = [self.scalar(operand) for operand in scalar.operands]
                condition, where = self.condition(scalar.condition)
                scope = max(where, *(self.scope(operand) for operand in scalar.operands))
                return self.define(scalar, scope, kind, f"{condition} ? {chosen[0]} : {chosen[1]}", "chosen")
            case Apply():
                operands = [self.scalar(operand) for operand in scalar.operands]
                text = self._apply(scalar, operands)
                # What only declares another type is its operand, by the operand's name.
                return text if text in operands else self.define(
                    scalar, self.scope(scalar), kind, text, scalar.function)
        raise AssertionError(scalar)

    def scope(self, scalar: Scalar) -> Scope:
        """Where an expression is known."""
        if scalar not in self._scopes:
            self._scopes[scalar] = self._scope(scalar)
        return self._scopes[scalar]

    def _scope(self, scalar: Scalar) -> Scope:
        match scalar:
            case Constant():
                return Scope.KERNEL
            case Reduced():
                return Scope.LANE if self.lanes.across else Scope.ROW
            case Index():
                return self.lanes.scope(scalar.index)
            case Load():
                where = self.lanes.scope(scalar.offset)
                return max(where, *(self.lanes.scope(c.index) for c in scalar.conditions), Scope.ROW)
            case Select():
                _, where = self.condition(scalar.condition)
                return max(where, *(self.scope(operand) for operand in scalar.operands))
        return max((self.scope(operand) for operand in children(scalar)), default=Scope.KERNEL)

    def _load(self, load: Load) -> str:
        lanes, kind = self.lanes, TYPES[load.dtype]
        conditions = [self.condition(condition) for condition in load.conditions]
        allowed = " && ".join(f"({text})" for text, _ in conditions if text != "true")
        where = max((scope for _, scope in conditions), default=Scope.KERNEL)
        stride = lanes.stride(load.offset)
        if stride == 0 and where <= Scope.VECTOR:
            scope = max(lanes.scope(load.offset), where, Scope.ROW)
            return self.define(load, scope, kind.compute, self._one(load, allowed, lane=False), element_of(load))
        if stride == 1 and where <= Scope.VECTOR and lanes.aligned(load.offset):
            text = f"of::load<width>({self.address(load)})"
            if allowed:
                text = f"{allowed} ? {text} : of::Vector<{kind.storage}, width>{{}}"
            return self.of_vector(load, text)
        return self.define(load, Scope.LANE, kind.compute, self._one(load, allowed, lane=True), element_of(load))

    def of_vector(self, load: Load, text: str) -> str:
        """The lane's element of a vector of an input that is ``text``."""
        kind = TYPES[load.dtype]
        vector = self.define(
            ("vector", load), Scope.VECTOR, f"of::Vector<{kind.storage}, width>", text, f"vector{load.input}_")
        return self.define(load, Scope.LANE, kind.compute, f"of::value({vector}.at[v])", element_of(load))

    def address(self, load: Load) -> str:
        """Where the first element of a load's vector lies."""
        return pointer(f"i{load.input}", self.index(load.offset))

    def _one(self, load: Load, allowed: str, lane: bool) -> str:
        text = f"of::value(i{load.input}[{self.index(load.offset, lane)}])"
        return f"{allowed} ? {text} : ({TYPES[load.dtype].compute})0" if allowed else text

    def _apply(self, scalar: Apply, operands: Sequence[str]) -> str:
        if scalar.function == "cast":
            return converted(operands[0], scalar.operands[0].dtype, scalar.dtype)
        if scalar.function == "rounded":
            return f"of::round_to<{TYPES[scalar.dtype].storage}>({operands[0]})"
        if scalar.function == "narrow":
            return operands[0]
        function = FUNCTIONS[scalar.function]
        kind = TYPES[scalar.operands[-1].dtype]
        template = function.floating if kind.is_floating else function.integer
        if function.narrow is not None and TYPES[scalar.dtype].is_narrow and kind.is_narrow:
            template = function.narrow
        assert template is not None, scalar.function
        return template.format(*operands)


def element_of(load: Load) -> str:
    """What names of an input's elements begin with."""
    return f"x{load.input}_"


def pointer(base: str, index: str) -> str:
    """A pointer ``index`` elements past another; one sum of indices, which may be of 32 bits, before it is added."""
    return f"{base} + {index}" if index.isidentifier() else f"{base} + ({index})"


_OPERATIONS = {"//": "quotient", "%": "remainder", "min": "imin", "max": "imax", "bcast": "bcast"}
