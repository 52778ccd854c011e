"""How indices move along the lanes of a vector, and in which scope of a kernel's text they are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.pull import (
    Condition,
    Contracted,
    Load,
    Puller,
    Reduced,
    Scalar,
    Scanned,
    children,
    indices,
)


class Scope(IntEnum):
    """Where an expression is known, outermost first.

    Where lanes run across rows, ROW is the same for all of them and may change from element to element of a row;
    ROWS is the same for all of them and for all elements, and EACH_ROW the same for all elements of a lane's row.
    """

    KERNEL = 0
    ROWS = 1
    EACH_ROW = 2
    ROW = 3
    VECTOR = 4
    LANE = 5


PLACE = "@e"
"""The base that runs over the elements of a row."""


@dataclass
class Lanes:
    """How indices move along the lanes of a vector.

    What is asked of it may hold only where sizes that are not constant are multiples of the width, and asking changes
    nothing.  Who makes a text, or a choice, of an answer says so (``rely`` and its like): that notes these sizes.

    Attributes:
        space: the loop variables; ``puller`` knows which are indices read from memory.
        element: the base whose neighbours make a vector; ``row`` the base of rows, or "".  Where they are the same,
            the lanes of a vector are of neighbouring rows.
        width: lanes of a vector, a power of two.
        multiples: sizes that must be multiples of the width for what was relied on; guards make sure of them.
    """

    space: IndexSpace
    puller: Puller
    element: str
    row: str
    width: int
    multiples: dict[Dim, None] = field(default_factory=dict)
    _following: dict[tuple[Scalar, str], bool] = field(default_factory=dict)

    @property
    def across(self) -> bool:
        """Whether each lane belongs to a row of its own."""
        return self.element == self.row

    def stride(self, index: Dim) -> Dim | None:
        """By how much an index grows from lane to lane; None where that is no constant step."""
        return self._stride(index, {})

    def _stride(self, index: Dim, taken: dict[Dim, None]) -> Dim | None:
        """The same; the sizes that it takes to be multiples of the width come to ``taken``, as in what follows."""
        total = dim(0)
        for monomial, factor in index.terms.items():
            for atom, power in monomial:
                if atom.kind != "symbol" or not self._moves(atom.name):
                    continue
                step = self._step(atom.name, taken)
                if step is None or power > 1:
                    return None
                if step != 0:
                    scale = Dim({monomial: factor}).divide(symbol(atom.name))
                    if scale is None or any(self._moves(name) for name in scale.symbols):
                        return None
                    total = total + scale * step
        return total

    def _step(self, name: str, taken: dict[Dim, None]) -> Dim | None:
        if name in self.space.derived:
            inner = self._stride(self.space.derived[name], taken)
            return dim(0) if inner == 0 else None
        digit = self.space.variable(name)
        if name == self.element:
            return dim(1)
        if digit is None or digit.base != self.element:
            base = digit.base if digit is not None else name
            if digit is None or base == name or not self._moves(base):
                return None if self._moves(base) else dim(0)
            if not self._counts(base, taken):
                return self._step(base, taken)
        if digit.step == 1:
            return dim(1) if digit.size is not None and self._multiple(digit.size, taken) else None
        return dim(0) if self._multiple(digit.step, taken) else None

    def _counts(self, base: str, taken: dict[Dim, None]) -> bool:
        """Whether a base that is derived grows by one from lane to lane, and is a multiple of the width at the first,
        so that its digits are as those of the element's own base."""
        index, more = self.space.derived.get(base), dict[Dim, None]()
        counts = index is not None and self._stride(index, more) == 1 and self._aligned(index, more)
        taken.update(more if counts else {})
        return counts

    def may_divide(self, size: Dim) -> bool:
        """Whether a size is a multiple of the width, or may be one when the kernel runs."""
        return self._multiple(size, {})

    def _multiple(self, size: Dim, taken: dict[Dim, None]) -> bool:
        if size.multiple_of() % self.width == 0:
            return True
        if size.value is not None:
            return False
        taken[size] = None
        return True

    def _moves(self, name: str) -> bool:
        """Whether a variable depends on the element at all."""
        return self._variable_follows(name, self.element)

    def _variable_follows(self, name: str, base: str) -> bool:
        if name == base:
            return True
        if name in self.space.derived:
            return any(self._variable_follows(part, base) for part in self.space.derived[name].symbols)
        if name in self.puller.gathered:
            return self._follows(self.puller.gathered[name], base)
        digit = self.space.digits.get(name)
        return digit is not None and self._variable_follows(digit.base, base)

    def moves_place(self, index: Dim) -> bool:
        """Whether an index depends on the element."""
        return any(self._variable_follows(name, self.element) for name in index.symbols)

    def moves(self, scalar: Scalar) -> bool:
        """Whether an expression depends on the element."""
        return self._follows(scalar, self.element)

    def once(self, names: Iterable[str]) -> bool:
        """Whether lanes are rows and all these variables are the same for all elements of theirs."""
        return self.across and not any(self._variable_follows(name, PLACE) for name in names)

    def _follows(self, scalar: Scalar, base: str) -> bool:
        if (scalar, base) not in self._following:
            self._following[scalar, base] = self._depends(scalar, base)
        return self._following[scalar, base]

    def _depends(self, scalar: Scalar, base: str) -> bool:
        if isinstance(scalar, Reduced):
            return self.across and base == self.element
        if isinstance(scalar, Scanned | Contracted):
            return True
        return any(self._variable_follows(name, base) for index in indices(scalar) for name in index.symbols) or any(
            self._follows(child, base) for child in children(scalar)
        )

    def aligned(self, index: Dim) -> bool:
        """Whether an index is a multiple of the width at the first lane."""
        return self._aligned(index, {})

    def _aligned(self, index: Dim, taken: dict[Dim, None]) -> bool:
        for monomial, factor in index.terms.items():
            term = Dim({monomial: factor})
            for name in term.symbols:
                if name == self.element or (name in self.space.digits and self._step(name, taken) == 1):
                    break
                if self.space.is_variable(name):
                    term = term.divide(symbol(name)) or term
            else:
                if not self._multiple(term, taken):
                    return False
        return True

    def uniform(self, condition: Condition) -> bool:
        """Whether a condition is the same for all lanes of a vector."""
        return self._uniform(condition, {})

    def _uniform(self, condition: Condition, taken: dict[Dim, None]) -> bool:
        stride = self._stride(condition.index, taken)
        if stride == 0:
            return True
        limits = [limit for limit in (condition.low, condition.high) if limit is not None]
        return stride == 1 and self._aligned(condition.index, taken) and all(
            self._multiple(limit, taken) for limit in limits)

    def rely(self, index: Dim) -> None:
        """Note what must hold for what ``stride`` and ``scope`` say of an index."""
        self._stride(index, self.multiples)

    def rely_on_vectors(self, indices: Iterable[Dim]) -> None:
        """The same, and for what ``aligned`` says of each where neighbours lie side by side."""
        for index in indices:
            if self._stride(index, self.multiples) == 1:
                self._aligned(index, self.multiples)

    def rely_on_condition(self, condition: Condition) -> None:
        """Note what must hold for what ``uniform`` and ``scope`` say of a condition."""
        self._uniform(condition, self.multiples)

    def rely_on_size(self, size: Dim) -> None:
        """Note that a size must be a multiple of the width, if it may be one."""
        self._multiple(size, self.multiples)

    def rely_on_loads(self, loads: Iterable[Load]) -> None:
        """Note what must hold for what is said of where loads read, and when."""
        for load in loads:
            self.rely_on_vectors([load.offset])
            for condition in load.conditions:
                self.rely_on_condition(condition)

    def scope(self, index: Dim) -> Scope:
        """Where the value of an index is known."""
        if any(self._moves(name) for name in index.symbols):
            uniform = Scope.ROWS if self.once(index.symbols) else Scope.VECTOR
            return uniform if self.stride(index) == 0 else Scope.LANE
        return Scope.ROW if any(self.space.is_variable(name) for name in index.symbols) else Scope.KERNEL
