"""C++ text of scalar expressions.

The text of a kernel has scopes, each inside the one before: the kernel, a row, a vector of neighbouring elements, and
one lane of that vector; where each lane has a row of its own, also what is known before the loop over their elements,
of all of them or of each lane.  An expression is written once, into the outermost scope in which it is known:
an index that is the same for all lanes is computed before them, neighbouring elements of a tensor are loaded as one
vector.  ``Lanes`` decides which is which, and is told what the text relies on: what must divide by the vector width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.scalars import BFLOAT16, BOOL, DOUBLE, FLOAT16, FUNCTIONS, TYPES
from onnxfuse.ir.tensors import Number
from onnxfuse.lowering.pull import (
    Apply,
    Condition,
    Constant,
    Contracted,
    Index,
    Load,
    Reduced,
    Scalar,
    Scanned,
    Select,
    children,
)
from onnxfuse.schedules.lanes import Lanes, Scope


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


def indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    """Lines inside so many braces; a directive stands at the margin."""
    return [line if line.startswith("#") else "  " * depth + line for line in lines]


def added(*terms: object) -> str:
    """A sum as text, without zeros."""
    return " + ".join(str(term) for term in terms if str(term) != "0") or "0"


def multiplied(*factors: object) -> str:
    """A product of operands as text, without ones."""
    return " * ".join(str(factor) for factor in factors if str(factor) != "1") or "1"


def unrolled(head: str, body: Iterable[str], by: int = 0) -> list[str]:
    """A loop that the compiler unrolls, wholly or by so many."""
    return [f"#pragma unroll{f' {by}' if by else ''}", f"for ({head}) {{", *indented(body), "}"]


class Writer:
    """Writes expressions into scopes.

    Args:
        lanes: how indices move.
        sizes: names of size symbols; writers of one text share them.
        hook: called before an expression is written; may give its text (for values kept from an earlier phase).
        prefix: what all names begin with, where another writer's lines are around this one's.
    """

    def __init__(
        self, lanes: Lanes, sizes: Sizes, hook: Callable[[Scalar], str | None] | None = None, prefix: str = ""
    ) -> None:
        self.lanes = lanes
        self.prefix = prefix
        self.sizes = sizes
        self.hook = hook
        self.lines: dict[Scope, list[str]] = {scope: [] for scope in Scope}
        self.names: dict[Scope, dict[object, str]] = {scope: {} for scope in Scope}
        self.constants: dict[Scope, list[tuple[str, str]]] = {scope: [] for scope in Scope}  # types and names
        self._taken: dict[str, Scope] = {}
        self._next: dict[str, int] = {}
        self._scopes: dict[Scalar, Scope] = {}
        self._exported: dict[Scalar, str] = {}
        self._reciprocals: dict[Scalar, Scalar] = {}
        self._divided: dict[str, list[Dim]] = {}

    def leave(self, scope: Scope) -> list[str]:
        """Close a scope and those inside it; gives its lines, and forgets its names."""
        lines = self.lines[scope]
        for inner in Scope:
            if inner >= scope:
                self.lines[inner] = []
                self.names[inner] = {}
                self.constants[inner] = []
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
        name = self.fresh(self.prefix + word, scope)
        self.names[scope][key] = name
        self.lines[scope].append(f"const {kind} {name} = {text};")
        self.constants[scope].append((kind, name))
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
        lane = lane and lanes._moves(name) and not lanes.is_same(name)
        if name in lanes.space.extents and name not in lanes.space.derived and name not in lanes.puller.gathered:
            text = name.removeprefix("@")  # a loop's variable
            return f"({text} + v)" if lane else text
        scope = Scope.LANE if lane else Scope.VECTOR if lanes._moves(name) else Scope.ROW
        if scope is Scope.VECTOR and lanes.once([name]):
            scope = Scope.ROWS
        key = ("variable", name, lane)
        if name in lanes.space.derived:
            return self.define(key, scope, "idx", self.index(lanes.space.derived[name], lane), "place")
        if name in lanes.puller.gathered:
            return self.define(key, scope, "idx", f"(idx){self.scalar(lanes.puller.gathered[name])}", "index")
        digit = lanes.space.digits[name]
        quotient = self._quotient(digit.base, digit.step, scope, lane)
        if digit.size is None or digit.top:
            return quotient
        text = f"{quotient} % {self.size(digit.size)}"
        return self.define(key, scope, "idx", text, "digit")

    def _steps(self, base: str) -> list[Dim]:
        """What a base is divided by anyway: steps of digits that are used, what a remainder among these is taken by,
        which is the same division, and constants, which are as good as none."""
        if base not in self._divided:
            used = [digit for digit in self.lanes.puller.digits() if digit.base == base]
            constant = [digit.step for digit in self.lanes.space.digits.values()
                        if digit.base == base and digit.step.value is not None]
            remainders = [digit.step * digit.size for digit in used if digit.size is not None and not digit.top]
            self._divided[base] = list(dict.fromkeys([*constant, *(digit.step for digit in used), *remainders]))
        return self._divided[base]

    def _quotient(self, base: str, step: Dim, scope: Scope, lane: bool) -> str:
        """``base // step``, from the quotient by the longest step that divides this one: so that no two divisions by
        the same size are made, and constant factors are constants to divide by.  By a constant it is quickest alone;
        and once a row, each from the row's number, none waits for another."""
        text, rest = self._variable(base, lane), step
        if step == 1:
            return text
        longest = dim(1)
        for other in self._steps(base) if step.value is None and scope is not Scope.ROW else ():
            ratio = step.divide(other)
            if ratio is not None and ratio != 1 and other.divide(longest) is not None:
                longest, rest = other, ratio
        if longest != 1:
            text = self._quotient(base, longest, scope, lane)
        return self.define(("quotient", base, step, lane), scope, "idx", f"{text} / {self.size(rest)}", "quotient")

    def condition(self, condition: Condition) -> tuple[str, Scope]:
        """A condition as text, and where it is known."""
        uniform = self.lanes.uniform(condition)
        self.lanes.rely_on_condition(condition)
        scope = self._where(condition.index)
        scope = min(scope, Scope.VECTOR) if uniform else Scope.LANE
        index = self.index(condition.index, lane=not uniform)
        parts = []
        if condition.low is not None:
            parts.append(f"{index} >= {self.size(condition.low)}")
        if condition.high is not None:
            parts.append(f"{index} < {self.size(condition.high)}")
        return " && ".join(parts) or "true", scope

    def scalar(self, scalar: Scalar, each_row: bool = False) -> str:
        """An expression's name or text; its definition is written where it belongs.

        Args:
            each_row: whether that is wanted before the loop over the elements of rows, where lanes are rows.
        """
        if isinstance(scalar, Constant):
            return literal(scalar.number, scalar.dtype)
        if scalar in self._exported:
            return self._exported[scalar]
        for scope in Scope:
            if scalar in self.names[scope]:
                name = self.names[scope][scalar]
                return self._export(scalar, name) if scope is Scope.EACH_ROW and not each_row else name
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
                scope = self._where(scalar.index)
                text = f"({kind})({self.index(scalar.index, scope is Scope.LANE)})"
                return self.define(scalar, scope, kind, text, "place")
            case Select():
                chosen = [self.scalar(operand) for operand in scalar.operands]
                condition, where = self.condition(scalar.condition)
                scope = _innermost([where, *(self.scope(operand) for operand in scalar.operands), Scope.ROW])
                return self.define(scalar, scope, kind, f"{condition} ? {chosen[0]} : {chosen[1]}", "chosen")
            case Apply():
                where = self.scope(scalar)
                shared = self._divides_many(scalar)
                given = (scalar.operands[0], self._reciprocal(scalar.operands[1])) if shared else scalar.operands
                operands = [self.scalar(operand, where is Scope.EACH_ROW) for operand in given]
                text = " * ".join(operands) if shared else self._apply(scalar, operands)
                if text in operands:  # What only declares another type is its operand, by the operand's name.
                    return self.scalar(given[operands.index(text)], each_row)
                name = self.define(scalar, where, kind, text, scalar.function)
                return self._export(scalar, name) if where is Scope.EACH_ROW and not each_row else name
        raise AssertionError(scalar)

    def _divides_many(self, scalar: Apply) -> bool:
        """Whether a division is one of many by the same divisor, so that a product with its reciprocal is quicker.

        That errs by one more rounding of float32, of which float16 shows nothing: also where a quotient is a number of
        float16 it is that one when it is rounded.  In the wider types x / x would no longer be one, and a reciprocal of
        what bfloat16 has below 2**-128 would be infinite.
        """
        return (
            scalar.function == "div" and all(operand.dtype == FLOAT16 for operand in scalar.operands)
            and self.scope(scalar) is Scope.LANE and self.scope(scalar.operands[1]) is not Scope.LANE
        )

    def _reciprocal(self, scalar: Scalar) -> Scalar:
        if scalar not in self._reciprocals:
            self._reciprocals[scalar] = Apply(scalar.dtype, False, "reciprocal", (scalar,))
        return self._reciprocals[scalar]

    def _export(self, scalar: Scalar, name: str) -> str:
        """The element of an array that holds what is known of each row before the loop over the rows' elements."""
        array, kind = self.fresh(f"rows_{name}_", Scope.ROWS), TYPES[scalar.dtype].compute
        self.lines[Scope.ROWS].append(f"{kind} {array}[width];")
        self.lines[Scope.EACH_ROW].append(f"{array}[v] = {name};")
        self._exported[scalar] = f"{array}[v]"
        return self._exported[scalar]

    def upto(self, last: Scope) -> list[str]:
        """Lines of all scopes from the outermost to this one."""
        return [line for scope in Scope if scope <= last for line in self.lines[scope]]

    def known_upto(self, last: Scope) -> list[tuple[str, str]]:
        """Types and names of the constants in these lines."""
        return [constant for scope in Scope if scope <= last for constant in self.constants[scope]]

    def outside(self) -> list[str]:
        """Close the scopes that are around a loop over a row's elements, but for their names."""
        if not self.lanes.across:
            lines = self.lines[Scope.KERNEL] + self.lines[Scope.ROW]
            self.lines[Scope.KERNEL], self.lines[Scope.ROW] = [], []
            return lines
        each = self.leave(Scope.EACH_ROW)
        lines = self.lines[Scope.KERNEL] + self.lines[Scope.ROWS]
        self.lines[Scope.KERNEL], self.lines[Scope.ROWS] = [], []
        loop = unrolled("int v = 0; v < width; ++v", each)
        return lines + (loop if each else [])

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
                return Scope.EACH_ROW if self.lanes.across else Scope.ROW
            case Scanned() | Contracted():
                return Scope.LANE
            case Index():
                return self._where(scalar.index)
            case Load():
                where = self._where(scalar.offset)
                return max(where, *(self._where(c.index) for c in scalar.conditions), self._once)
            case Select():
                _, where = self.condition(scalar.condition)
                return _innermost([where, *(self.scope(operand) for operand in scalar.operands), Scope.ROW])
        return _innermost([self.scope(operand) for operand in children(scalar)])

    def _where(self, index: Dim) -> Scope:
        """Where the value of an index is known, on which the text relies."""
        self.lanes.rely(index)
        return self.lanes.scope(index)

    @property
    def _once(self) -> Scope:
        """Where memory is read at the outermost."""
        return Scope.ROWS if self.lanes.across else Scope.ROW

    def _load(self, load: Load) -> str:
        lanes, kind = self.lanes, TYPES[load.dtype]
        conditions = [self.condition(condition) for condition in load.conditions]
        allowed = " && ".join(f"({text})" for text, _ in conditions if text != "true")
        where = max((scope for _, scope in conditions), default=Scope.KERNEL)
        stride = lanes.stride(load.offset)
        lanes.rely(load.offset)
        if stride == 0 and where <= Scope.VECTOR:
            scope = max(self._where(load.offset), where, self._once)
            return self.define(load, scope, kind.compute, self._one(load, allowed, lane=False), element_of(load))
        if stride == 1 and where <= Scope.VECTOR:
            lanes.rely_on_vectors([load.offset])
        if stride == 1 and where <= Scope.VECTOR and lanes.aligned(load.offset):
            text = f"of::load<width>({self.address(load)})"
            if allowed:
                text = f"{allowed} ? {text} : of::Vector<{kind.storage}, width>{{}}"
            return self.of_vector(load, text, Scope.ROWS if lanes.once(load.offset.symbols) and where <= Scope.ROWS
                                  else Scope.VECTOR)
        return self.define(load, Scope.LANE, kind.compute, self._one(load, allowed, lane=True), element_of(load))

    def of_vector(self, load: Load, text: str, scope: Scope = Scope.VECTOR) -> str:
        """The lane's element of a vector of an input that is ``text``, and known in a scope."""
        kind = TYPES[load.dtype]
        vector = self.define(
            ("vector", load), scope, f"of::Vector<{kind.storage}, width>", text, f"vector{load.input}_")
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


def _innermost(scopes: Sequence[Scope]) -> Scope:
    """Where an expression of operands that are known in these scopes is known."""
    innermost = max(scopes, default=Scope.KERNEL)
    # What differs from lane to lane, with what changes from element to element.
    return Scope.LANE if Scope.EACH_ROW in scopes and innermost > Scope.EACH_ROW else innermost


def element_of(load: Load) -> str:
    """What names of an input's elements begin with."""
    return f"x{load.input}_"


def pointer(base: str, index: str) -> str:
    """A pointer ``index`` elements past another; one sum of indices, which may be of 32 bits, before it is added."""
    return f"{base} + {index}" if index.isidentifier() else f"{base} + ({index})"


_OPERATIONS = {"//": "quotient", "%": "remainder", "min": "imin", "max": "imax", "bcast": "bcast"}
