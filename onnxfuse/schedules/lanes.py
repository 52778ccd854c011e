"""How indices move along the lanes of a vector, and in which scope of a kernel's text they are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from onnxfuse.graph.dims import Dim, cofactor, dim, symbol
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

Sizes = tuple[Dim, ...]
"""What an answer takes to be multiples of the width."""


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
        return self._stride(index)[0]

    def _stride(self, index: Dim) -> tuple[Dim | None, Sizes]:
        """The same, with the sizes that it takes to be multiples of the width, as in what follows."""
        total = dim(0)
        taken: Sizes = ()
        for monomial, factor in index.terms.items():
            for atom, power in monomial:
                if atom.kind != "symbol" or not self._moves(atom.name):
                    continue
                step, more = self._step(atom.name)
                taken += more
                if step is None or power > 1:
                    return None, taken
                if step != 0:
                    scale = cofactor((monomial, factor), atom.name)
                    if any(self._moves(name) for name in scale.symbols):
                        return None, taken
                    total = total + scale * step
        return total, taken

    def _step(self, name: str) -> tuple[Dim | None, Sizes]:
        if name in self.space.derived:
            inner, taken = self._stride(self.space.derived[name])
            return dim(0) if inner == 0 else None, taken
        digit = self.space.variable(name)
        if name == self.element:
            return dim(1), ()
        read = self.puller.gathered.get(name if digit is None else digit.base)
        if read is not None and self._follows(read, self.element):
            same, taken = self._same(read)
            return dim(0) if same else None, taken
        taken = ()
        if digit is None or digit.base != self.element:
            base = digit.base if digit is not None else name
            if digit is None or base == name or not self._moves(base):
                return None if self._moves(base) else dim(0), ()
            counts, taken = self._counts(base)
            if not counts:
                return self._step(base)
        size, step = (digit.size, dim(1)) if digit.step == 1 else (digit.step, dim(0))
        divides, more = (False, ()) if size is None else self._multiple(size)
        return step if divides else None, taken + more

    def is_same(self, name: str) -> bool:
        """Whether a variable is the same for all lanes by what is relied on already."""
        step, taken = self._step(name)
        return step is not None and step == 0 and all(size in self.multiples for size in taken)

    def _same(self, scalar: Scalar) -> tuple[bool, Sizes]:
        """Whether an expression is the same for all lanes of a vector, as none of its places moves along them."""
        if isinstance(scalar, Reduced | Scanned | Contracted):
            return False, ()
        taken: Sizes = ()
        for index in indices(scalar):
            stride, more = self._stride(index)
            taken += more
            if stride != 0:
                return False, taken
        for child in children(scalar):
            same, more = self._same(child)
            taken += more
            if not same:
                return False, taken
        return True, taken

    def _counts(self, base: str) -> tuple[bool, Sizes]:
        """Whether a base that is derived grows by one from lane to lane, and is a multiple of the width at the first,
        so that its digits are as those of the element's own base."""
        index = self.space.derived.get(base)
        stride, taken = (None, ()) if index is None else self._stride(index)
        if index is None or stride != 1:
            return False, ()
        aligned, more = self._aligned(index)
        return aligned, taken + more if aligned else ()

    def may_divide(self, size: Dim) -> bool:
        """Whether a size is a multiple of the width, or may be one when the kernel runs."""
        return self._multiple(size)[0]

    def _multiple(self, size: Dim) -> tuple[bool, Sizes]:
        if size.multiple_of() % self.width == 0:
            return True, ()
        return (False, ()) if size.value is not None else (True, (size,))

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
        return self._aligned(index)[0]

    def _aligned(self, index: Dim) -> tuple[bool, Sizes]:
        taken: Sizes = ()
        for monomial, factor in index.terms.items():
            term = Dim({monomial: factor})
            for name in term.symbols:
                if name == self.element:
                    break
                if name in self.space.digits:
                    step, more = self._step(name)
                    taken += more
                    if step == 1:
                        break
                if self.space.is_variable(name):
                    term = term.divide(symbol(name)) or term
            else:
                divides, more = self._multiple(term)
                taken += more
                if not divides:
                    return False, taken
        return True, taken

    def uniform(self, condition: Condition) -> bool:
        """Whether a condition is the same for all lanes of a vector."""
        return self._uniform(condition)[0]

    def _uniform(self, condition: Condition) -> tuple[bool, Sizes]:
        stride, taken = self._stride(condition.index)
        if stride != 1:
            return stride == 0, taken
        holds, more = self._aligned(condition.index)
        taken += more
        for limit in (condition.low, condition.high):
            if holds and limit is not None:
                holds, more = self._multiple(limit)
                taken += more
        return holds, taken

    def _note(self, taken: Sizes) -> None:
        self.multiples.update(dict.fromkeys(taken))

    def rely(self, index: Dim) -> None:
        """Note what must hold for what ``stride`` and ``scope`` say of an index."""
        self._note(self._stride(index)[1])

    def rely_on_vectors(self, indices: Iterable[Dim]) -> None:
        """The same, and for what ``aligned`` says of each where neighbours lie side by side."""
        for index in indices:
            stride, taken = self._stride(index)
            self._note(taken)
            if stride == 1:
                self._note(self._aligned(index)[1])

    def rely_on_condition(self, condition: Condition) -> None:
        """Note what must hold for what ``uniform`` and ``scope`` say of a condition."""
        self._note(self._uniform(condition)[1])

    def rely_on_size(self, size: Dim) -> None:
        """Note that a size must be a multiple of the width, if it may be one."""
        self._note(self._multiple(size)[1])

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
