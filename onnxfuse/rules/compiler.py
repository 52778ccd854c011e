"""From a pattern's statements to the DAG that the matcher walks.

Every operator and keyword is checked, and the built-in equivalences (``square``, ``rsqrt``, ``product``, ...) are
written out, so that the matcher needs to know none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from onnxfuse.rules import syntax
from onnxfuse.rules.operators import (
    DTYPES,
    OperatorKey,
    input_counts,
    keyword_names,
    meant_domain,
    operator_key,
    operator_names,
)
from onnxfuse.rules.pattern import (
    AnyOf,
    Budget,
    Capture,
    CompiledPattern,
    Free,
    Given,
    Hole,
    Literal,
    Maybe,
    Named,
    Op,
    Output,
    Pattern,
    TooWideError,
    make_op,
    required_nodes,
    root_keys,
    suggestion,
)
from onnxfuse.rules.syntax import Call, Name, Number, Statement, String, TextError, Tree

# Equivalences that hold for every operand: parameters, then the spellings that count as one.
MACROS: dict[str, tuple[int, tuple[str, ...]]] = {
    "square": (1, ("Pow({0}, 2.0)", "{0} * {0}")),
    "cube": (1, ("Pow({0}, 3.0)", "product({0}, {0}, {0})")),
    "rsqrt": (1, ("Reciprocal(Sqrt({0}))", "1.0 / Sqrt({0})", "Pow({0}, -0.5)", "Sqrt(Reciprocal({0}))")),
    "sqrt": (1, ("Sqrt({0})", "Pow({0}, 0.5)")),
    "over_sqrt": (2, ("{0} / sqrt({1})", "{0} * rsqrt({1})")),
}

FUNCTIONS = (*MACROS, "maybe", "any_of", "output", "pointwise", "product", "sum", "times")

_MAX_FACTORS = 4

MAX_PARTS = 1000
"""Parts that a pattern may have with its equivalences written out."""

MAX_WALK = 200_000
"""Steps over its parts and alternatives that reading a pattern may take."""


def compile_pattern(
    statements: Sequence[Statement],
    results: Sequence[Name] | None,
    sets: Mapping[str, frozenset[OperatorKey]],
) -> CompiledPattern:
    """The pattern that the statements say; ``results`` default to the last statement's values.

    Raises:
        TextError: an unknown operator, keyword or function, a name assigned twice, a result that no statement
            assigns, a hole as a result.
    """
    return _Compiler(sets).compile(statements, results)


class _Compiler:
    def __init__(self, sets: Mapping[str, frozenset[OperatorKey]]) -> None:
        self.sets = sets
        self.named: dict[str, Named] = {}
        self.free: dict[str, Free] = {}
        self.captures: set[str] = set()
        self.read: set[str] = set()
        self.holes: list[str] = []
        self.parts = 0
        self.budget = Budget(MAX_WALK)

    def compile(self, statements: Sequence[Statement], results: Sequence[Name] | None) -> CompiledPattern:
        last = statements[-1]
        at = last
        try:
            for at in statements:
                self._statement(at)
            return self._compiled(statements, results)
        except (TooWideError, RecursionError):
            raise TextError(
                "The pattern leaves too many alternatives open, or nests too deep.", at.expression.start,
                at.expression.end, "Give the rule fewer alternatives, or split it in two.",
            ) from None

    def _compiled(self, statements: Sequence[Statement], results: Sequence[Name] | None) -> CompiledPattern:
        last = statements[-1]
        chosen = tuple(results) if results else last.targets
        for name in chosen:
            if name.name not in self.named:
                raise TextError(
                    f"The result {name.name} is assigned by no line of the pattern.", name.start, name.end,
                    _meant(name.name, self.named) or f"Choose among {', '.join(self.named)}.",
                )
        self._check_unused(statements, {name.name for name in chosen})
        roots = [
            self.named[target.name]
            for statement in (last, *statements[:-1])
            for target in statement.targets
            if target.name not in self.read and target.name in self.named
        ]
        if not roots:
            roots = [self.named[last.targets[0].name]]
        for root in roots:
            if root_keys(root) is None:
                target = next(t for s in statements for t in s.targets if t.name == root.name)
                raise TextError(
                    f"{root.name} is no operator: a pattern ends in one.", target.start, target.end,
                    "Grow the region after the pattern instead (grow: {after: pointwise}).",
                )
        return CompiledPattern(
            tuple(roots),
            tuple(name.name for name in chosen),
            frozenset(name.name for name in chosen if name.optional),
            frozenset(self.named) | frozenset(self.free) | self.captures,
            tuple(self.free),
            tuple(self.holes),
            required_nodes(roots, self.budget),
        )

    def _check_unused(self, statements: Sequence[Statement], chosen: Collection[str]) -> None:
        """Refuse a line before the last that nothing reads and that is no result."""
        for statement in statements[:-1]:
            names = {target.name for target in statement.targets}
            if names.isdisjoint(self.read) and names.isdisjoint(chosen):
                first = statement.targets[0]
                raise TextError(f"No line reads {first.name}, and it is no result.", first.start, first.end,
                                f"Leave the line out, or name it among the results: results: [..., {first.name}].")

    def _statement(self, statement: Statement) -> None:
        for target in statement.targets:
            if target.name in self.named or target.name in self.free or target.name in self.captures:
                raise TextError(
                    f"{target.name} is assigned after it was used.", target.start, target.end,
                    "Choose another name, or move the line up.",
                )
            if "." in target.name:
                raise TextError(f"{target.name} is no name.", target.start, target.end, "Leave out the dot.")
        if len(statement.targets) == 1:
            name = statement.targets[0].name
            self.named[name] = Named(name, self._expression(statement.expression, name))
            return
        op = self._expression(statement.expression, "")
        if not isinstance(op, Op):
            raise TextError(
                "Only one operator has several outputs.", statement.expression.start, statement.expression.end,
                "Give each line one name, or put the operator by itself.",
            )
        for index, target in enumerate(statement.targets):
            if target.name != "_":
                self.named[target.name] = Named(target.name, Output(op, index))

    def _expression(self, tree: Tree, hole: str = "") -> Pattern:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise TooWideError
        match tree:
            case Number(value=value):
                return Literal(value)
            case Name():
                return self._name(tree)
            case Call():
                return self._call(tree, hole)
            case _:
                raise TextError("A list or string can only be the value of a keyword.", tree.start, tree.end)

    def _name(self, name: Name) -> Pattern:
        if "." in name.name:
            raise TextError(f"{name.name} is no name.", name.start, name.end, "Leave out the dot.")
        if name.name == "_":
            return Free("_", name.optional)
        if name.name in self.named:
            self.read.add(name.name)
            return self.named[name.name]
        if name.name in DTYPES:
            raise TextError(f"{name.name} is an element type, not a value.", name.start, name.end)
        known = self.free.get(name.name)
        if known is None or (name.optional and not known.optional):
            self.free[name.name] = Free(name.name, name.optional)
        return self.free[name.name] if not name.optional else Free(name.name, True)

    def _call(self, call: Call, hole: str) -> Pattern:
        if call.name in MACROS:
            count, spellings = MACROS[call.name]
            self._arity(call, count)
            return AnyOf(tuple(self._spelled(spelling, call) for spelling in spellings))
        if call.name in ("product", "sum"):
            return self._associations(call)
        if call.name == "times":
            return self._times(call)
        if call.name == "maybe":
            self._arity(call, 1)
            inner = self._expression(call.arguments[0])
            if not isinstance(inner, Op) or not inner.arguments:
                raise TextError(
                    "maybe(...) holds one operator with an input.", call.start, call.end,
                    "Write maybe(Cast(x)); for other choices use any_of(a, b).",
                )
            return Maybe(inner, inner.arguments[0])
        if call.name == "any_of":
            if len(call.arguments) < 2:
                raise TextError("any_of(...) needs two alternatives.", call.start, call.end)
            return AnyOf(tuple(self._expression(argument) for argument in call.arguments))
        if call.name == "output":
            return self._output(call)
        if call.name == "pointwise":
            name = hole or f"pointwise{len(self.holes) + 1}"
            self.holes.append(name)
            return Hole(name, tuple(self._expression(argument) for argument in call.arguments))
        return self._operator(call)

    def _output(self, call: Call) -> Pattern:
        self._arity(call, 2)
        op, index = self._expression(call.arguments[0]), call.arguments[1]
        if not isinstance(op, Op) or not isinstance(index, Number) or not index.value.is_integer():
            raise TextError("output(...) takes an operator and a number.", call.start, call.end,
                            "Write output(Split(x), 1).")
        return Output(op, int(index.value))

    def _arity(self, call: Call, count: int) -> None:
        if len(call.arguments) != count or call.keywords:
            raise TextError(
                f"{call.name}(...) takes {count} argument{'s' if count != 1 else ''}, not {len(call.arguments)}.",
                call.start, call.end,
            )

    def _spelled(self, spelling: str, call: Call) -> Pattern:
        """A built-in spelling with the call's arguments in place of its parameters."""
        return self._expression(_substitute(_spelling(spelling, len(call.arguments)), call))

    def _times(self, call: Call) -> Pattern:
        self._arity(call, 2)
        operand, factor = call.arguments
        if not isinstance(factor, Number) or factor.value == 0:
            raise TextError("times(x, number) needs a number other than 0.", factor.start, factor.end)
        inverse = Number(1.0 / factor.value, factor.start, factor.end)
        return AnyOf(
            tuple(
                self._expression(Call(op, (operand, number), call.start, call.end, infix=True))
                for op, number in (("Mul", factor), ("Div", inverse))
            )
        )

    def _associations(self, call: Call) -> Pattern:
        """Every way to bracket a product or sum of up to four operands, in any order."""
        if not 2 <= len(call.arguments) <= _MAX_FACTORS or call.keywords:
            raise TextError(f"{call.name}(...) takes 2 to {_MAX_FACTORS} arguments.", call.start, call.end)
        op = "Mul" if call.name == "product" else "Add"
        parts = [self._expression(argument) for argument in call.arguments]

        def trees(indices: tuple[int, ...]) -> list[Pattern]:
            if len(indices) == 1:
                return [parts[indices[0]]]
            first, *others = indices
            built: list[Pattern] = []
            for count in range(len(others)):
                for with_first in itertools.combinations(others, count):
                    left = (first, *with_first)
                    right = tuple(index for index in indices if index not in left)
                    built += [
                        make_op(frozenset({("", op)}), op, (a, b), budget=self.budget)
                        for a in trees(left) for b in trees(right)
                    ]
            return built

        found = trees(tuple(range(len(parts))))
        return found[0] if len(found) == 1 else AnyOf(tuple(found))

    def _operator(self, call: Call) -> Op:
        keys = self.sets.get(call.name)
        if keys is None:
            key = operator_key(call.name)
            if key is None or meant_domain(call.name) is not None:
                raise _unknown(call, self.sets)
            keys = frozenset({key})
        _check_inputs(call, keys)
        allowed: set[str] = set()
        checked = True
        for key in keys:
            known = keyword_names(key)
            checked = checked and known is not None
            allowed |= known or set()
        keywords = []
        for name, value in call.keywords:
            if checked and name not in allowed:
                raise TextError(
                    f"{call.name} has neither an attribute nor an input called {name}.", value.start, value.end,
                    _meant(name, allowed),
                )
            keywords.append((name, self._keyword(value)))
        arguments = tuple(self._expression(argument) for argument in call.arguments)
        return make_op(keys, call.name, arguments, tuple(keywords), call.rest, self.budget)

    def _keyword(self, tree: Tree) -> Capture | Given | Pattern:
        match tree:
            case Number(value=value):
                return Given(value, _figure(value))
            case String(value=value):
                return Given(value, repr(value))
            case syntax.Sequence(items=items):
                numbers = []
                for item in items:
                    if not isinstance(item, Number):
                        raise TextError("A list holds numbers.", item.start, item.end)
                    numbers.append(item.value)
                return Given(tuple(numbers), f"[{', '.join(map(_figure, numbers))}]")
            case Name(name=name) if name in DTYPES:
                return Given(float(DTYPES[name]), name)
            case Name(name=name) if name not in self.named:
                self.captures.add(name)
                return Capture(name, tree.optional)
            case _:
                return self._expression(tree)


@cache
def _spelling(spelling: str, count: int) -> Tree:
    """A built-in spelling as a tree, with ``_0``, ``_1`` for its parameters."""
    return syntax.parse_pattern("y = " + spelling.format(*(f"_{i}" for i in range(count))))[0].expression


def _substitute(tree: Tree, call: Call) -> Tree:
    match tree:
        case Name(name=name) if name.startswith("_") and name[1:].isdigit():
            return call.arguments[int(name[1:])]
        case Call():
            return Call(
                tree.name, tuple(_substitute(argument, call) for argument in tree.arguments), call.start, call.end
            )
        case Number(value=value):
            return Number(value, call.start, call.end)
        case _:
            return tree


def _check_inputs(call: Call, keys: Iterable[OperatorKey]) -> None:
    """Refuse an operator with more inputs than it has at any version, or fewer than it needs."""
    counts = [input_counts(key) for key in keys]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return
    least, most = min(count[0] for count in known), max(count[1] for count in known)
    number = len(call.arguments)
    if number <= most and (number >= least or call.rest or call.keywords):
        return
    takes = f"{least}" if least == most else f"{least} or more" if most > 1000 else f"{least} to {most}"
    one = least == most == 1
    raise TextError(
        f"{call.name}(...) takes {takes} input{'' if one else 's'}, not {number}.", call.start, call.end,
        "Leave out what it does not take." if number > most else "Write _ for an input that may be anything.",
    )


def _unknown(call: Call, sets: Mapping[str, frozenset[OperatorKey]]) -> TextError:
    domain = meant_domain(call.name)
    if domain is not None:
        own, _, op = call.name.rpartition(".")
        return TextError(f"Unknown domain {own}.", call.start, call.start + len(own), f"Did you mean {domain}.{op}?")
    names = [*operator_names(), *FUNCTIONS, *sets]
    kind = "function" if call.name[0].islower() and "." not in call.name else "operator"
    return TextError(f"Unknown {kind} {call.name}.", call.start, call.start + len(call.name), _meant(call.name, names))


def _meant(name: str, choices: Iterable[str]) -> str | None:
    close = suggestion(name, choices)
    return f"Did you mean {close}?" if close else None


def _figure(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"
