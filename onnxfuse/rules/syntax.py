"""The two little languages of the rules as trees: patterns ("y = Relu(x + b)") and conditions ("rank(x) == 1").

Both are parsed by lark; every tree remembers its place in the text, so that errors found later can point at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedInput, UnexpectedToken, v_args
from lark.exceptions import VisitError

MAX_TEXT = 20_000
"""Characters of the longest pattern or condition that is read."""

MAX_DEPTH = 60
"""Deepest nesting of parentheses and brackets that is read."""

MAX_INFIX = 100
"""Infix operators that one pattern or condition may hold."""


class TextError(Exception):
    """A fault in a pattern or condition: message, span of characters, and what mends it."""

    def __init__(self, message: str, start: int, end: int, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message, self.start, self.end, self.remedy = message, start, end, remedy


@dataclass(frozen=True)
class Number:
    value: float
    start: int
    end: int

    @property
    def figure(self) -> int | float:
        """The value, an integer where it is one."""
        return int(self.value) if self.value.is_integer() else self.value


@dataclass(frozen=True)
class String:
    value: str
    start: int
    end: int


@dataclass(frozen=True)
class Name:
    """A name; ``optional`` where a question mark follows.  Dots: "y.axis" in a condition."""

    name: str
    start: int
    end: int
    optional: bool = False


@dataclass(frozen=True)
class Sequence:
    items: tuple[Tree, ...]
    start: int
    end: int

    @cached_property
    def numbers(self) -> list[Any] | None:
        """What is in it where that is nothing but numbers, and lists of them; None elsewhere."""
        found = [item.figure if isinstance(item, Number) else item.numbers if isinstance(item, Sequence) else None
                 for item in self.items]
        return None if None in found else found


@dataclass(frozen=True)
class Call:
    """``name(arguments, key=value, ...)``; in conditions operators are calls as well ("==", "and")."""

    name: str
    arguments: tuple[Tree, ...]
    start: int
    end: int
    keywords: tuple[tuple[str, Tree], ...] = ()
    rest: bool = False
    infix: bool = False


Tree = Number | String | Name | Sequence | Call


@dataclass(frozen=True)
class Statement:
    targets: tuple[Name, ...]
    expression: Tree


_GRAMMAR = r"""
pattern: _NL? statement (_NL statement)* _NL?
statement: targets "=" sum
targets: NAME ("," NAME)*
?sum: product | sum "+" product -> add | sum "-" product -> sub
?product: unary | product "*" unary -> mul | product "/" unary -> div
?unary: "-" unary -> neg | atom
?atom: NUMBER -> number | NAME -> name | NAME "?" -> optional | call | "(" sum ")"
call: NAME "(" [argument ("," argument)* [","]] ")"
?argument: NAME "=" value -> keyword | REST -> rest | sum
?value: sum | STRING -> string | "[" [value ("," value)*] "]" -> sequence

?condition: conjunction | condition "or" conjunction -> either
?conjunction: negation | conjunction "and" negation -> both
?negation: comparison | "not" negation -> negate
?comparison: total | total COMPARE total -> compare | total "in" total -> within | total "not" "in" total -> without
?total: term | total "+" term -> add | total "-" term -> sub
?term: factor | term "*" factor -> mul | term "/" factor -> div | term "//" factor -> floordiv | term "%" factor -> mod
?factor: "-" factor -> neg | leaf
?leaf: NUMBER -> number | STRING -> string | NAME -> name | "(" condition ")"
    | NAME "(" [condition ("," condition)*] ")" -> call
    | "[" [condition ("," condition)*] "]" -> sequence

COMPARE: "==" | "!=" | "<=" | ">=" | "<" | ">"
REST: "..."
_NL: /\n+/
NAME: /[A-Za-z_]\w*(\.[A-Za-z_]\w*)*/
NUMBER: /(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?/
STRING: /"[^"\n]*"|'[^'\n]*'/
%import common.WS_INLINE
%ignore WS_INLINE
"""

_INFIX = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


@v_args(meta=True)
class _Build(Transformer[Token, Any]):
    """Lark's tree to ours; ``names`` says what infix operators are called."""

    def __init__(self, names: dict[str, str], negation: str) -> None:
        super().__init__()
        self.names, self.negation = names, negation

    def pattern(self, meta: Any, children: list[Any]) -> tuple[Statement, ...]:
        return tuple(children)

    def statement(self, meta: Any, children: list[Any]) -> Statement:
        return Statement(children[0], children[1])

    def targets(self, meta: Any, children: list[Any]) -> tuple[Name, ...]:
        return tuple(Name(str(token), token.start_pos, token.end_pos) for token in children)

    def number(self, meta: Any, children: list[Any]) -> Number:
        return Number(float(children[0]), meta.start_pos, meta.end_pos)

    def string(self, meta: Any, children: list[Any]) -> String:
        return String(str(children[0])[1:-1], meta.start_pos, meta.end_pos)

    def name(self, meta: Any, children: list[Any]) -> Tree:
        if children[0] == "inf":
            return Number(float("inf"), meta.start_pos, meta.end_pos)
        return Name(str(children[0]), meta.start_pos, meta.end_pos)

    def optional(self, meta: Any, children: list[Any]) -> Name:
        return Name(str(children[0]), meta.start_pos, meta.end_pos, True)

    def sequence(self, meta: Any, children: list[Any]) -> Sequence:
        return Sequence(tuple(child for child in children if child is not None), meta.start_pos, meta.end_pos)

    def keyword(self, meta: Any, children: list[Any]) -> tuple[str, Tree]:
        return str(children[0]), children[1]

    def rest(self, meta: Any, children: list[Any]) -> Token:
        token: Token = children[0]
        return token

    def call(self, meta: Any, children: list[Any]) -> Call:
        name, *given = children
        arguments: list[Tree] = []
        keywords: list[tuple[str, Tree]] = []
        rest: Token | None = None
        for child in given:
            if child is None:
                continue
            if isinstance(child, Token):
                rest = child
            elif isinstance(child, tuple):
                if any(key == child[0] for key, _ in keywords):
                    raise TextError(f"{child[0]} is given twice.", meta.start_pos, meta.end_pos, "Give it once.")
                keywords.append(child)
            elif keywords or rest is not None:
                raise TextError("An input follows keywords.", child.start, child.end, "Write inputs first.")
            else:
                arguments.append(child)
        return Call(
            str(name), tuple(arguments), meta.start_pos, meta.end_pos, tuple(keywords), rest is not None
        )

    def neg(self, meta: Any, children: list[Any]) -> Tree:
        (operand,) = children
        if isinstance(operand, Number):
            return Number(-operand.value, meta.start_pos, meta.end_pos)
        return Call(self.negation, (operand,), meta.start_pos, meta.end_pos, infix=True)

    def compare(self, meta: Any, children: list[Any]) -> Call:
        left, operator, right = children
        return Call(str(operator), (left, right), meta.start_pos, meta.end_pos, infix=True)

    def __default__(self, data: Any, children: list[Any], meta: Any) -> Call:
        return Call(self.names[str(data)], tuple(children), meta.start_pos, meta.end_pos, infix=True)


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", propagate_positions=True, start=["pattern", "condition"])


def parse_pattern(text: str) -> tuple[Statement, ...]:
    """The statements of a pattern.

    Raises:
        TextError: the text is no pattern.
    """
    tree = _parse(_join_lines(text), "pattern")
    statements: tuple[Statement, ...] = _transform(_Build(_INFIX, "Neg"), tree)
    return statements


def parse_condition(text: str) -> Tree:
    """The tree of a condition, or of any expression over what a pattern bound.

    Raises:
        TextError: the text is no expression.
    """
    names = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
             "either": "or", "both": "and", "negate": "not", "within": "in", "without": "not in"}
    tree = _parse(text.replace("\n", " "), "condition")
    if isinstance(tree, Token):
        raise TextError("Nothing to read.", 0, len(text))
    result: Tree = _transform(_Build(names, "neg"), tree)
    return result


def _transform(build: _Build, tree: Any) -> Any:
    try:
        return build.transform(tree)
    except VisitError as error:
        if isinstance(error.orig_exc, TextError):
            raise error.orig_exc from None
        raise


_READABLE = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "EQUAL": "'='", "LPAR": "'('", "RPAR": "')'",
    "LSQB": "'['", "RSQB": "']'", "COMMA": "','", "_NL": "a new line", "$END": "the end", "PLUS": "'+'",
    "MINUS": "'-'", "STAR": "'*'", "SLASH": "'/'", "QMARK": "'?'", "REST": "'...'", "COMPARE": "a comparison",
}


def _parse(text: str, what: str) -> Any:
    if len(text) > MAX_TEXT:
        raise TextError(f"The {what} has {len(text)} characters; the limit is {MAX_TEXT}.", 0, 1)
    _check_limits(text, what)
    try:
        return _parser().parse(text, start=what)
    except UnexpectedCharacters as error:
        start = error.pos_in_stream or 0
        raise TextError(f"Unexpected character {text[start]!r} in the {what}.", start, start + 1) from None
    except UnexpectedToken as error:
        start = len(text.rstrip()) if error.token.type == "$END" else (error.token.start_pos or 0)
        end = start + max(len(str(error.token).rstrip("\n")), 1)
        expected = sorted(_READABLE.get(name, f"'{name.lower()}'") for name in error.expected)
        shown = str(error.token) if error.token.type not in ("$END", "_NL") else _READABLE[error.token.type]
        message = f"Syntax error in the {what} at {shown}."
        remedy = f"Expected {', '.join(expected[:-1])} or {expected[-1]}." if len(expected) > 1 else None
        raise TextError(message, start, end, remedy or f"Expected {expected[0]}.") from None
    except UnexpectedInput as error:
        position = error.pos_in_stream or 0
        raise TextError(f"Syntax error in the {what}.", position, position + 1) from None


def _check_limits(text: str, what: str) -> None:
    opened: list[int] = []
    bare = re.sub(r"\"[^\"\n]*\"|'[^'\n]*'", lambda found: "_" * len(found.group()), text)
    for position, character in enumerate(bare):
        if character in "([":
            opened.append(position)
            if len(opened) > MAX_DEPTH:
                raise TextError(
                    f"The {what} nests deeper than {MAX_DEPTH} brackets.", position, position + 1,
                    "Give inner parts a name.",
                )
        elif character in ")]" and (not opened or "([".index(text[opened.pop()]) != ")]".index(character)):
            raise TextError(f"{character!r} closes nothing in the {what}.", position, position + 1)
    infix = list(re.finditer(r"[+\-*/%]", bare))
    if len(infix) > MAX_INFIX:
        at = infix[MAX_INFIX].start()
        raise TextError(
            f"The {what} has more than {MAX_INFIX} infix operators.", at, at + 1, "Give inner parts a name, or fewer."
        )
    if opened:
        raise TextError(
            f"{text[opened[-1]]!r} is never closed in the {what}.", opened[-1], opened[-1] + 1,
            "Add ')'." if text[opened[-1]] == "(" else "Add ']'.",
        )


def _join_lines(text: str) -> str:
    """Comments and line ends inside brackets as blanks; offsets stay what they were."""
    text = re.sub(r"#[^\n]*", lambda found: " " * len(found.group()), text)
    depth, out = 0, []
    for character in text:
        depth += (character in "([") - (character in ")]")
        out.append(" " if character == "\n" and depth > 0 else character)
    joined = "".join(out)
    # blank lines hold nothing but spaces: a run of line ends is one token only where no spaces are between
    return re.sub(r"\n[ \t\n]*\n", lambda found: "\n" * len(found.group()), joined)


def calls(tree: Tree) -> Iterator[Call]:
    """Every call in an expression, operators that stand between their operands too."""
    if isinstance(tree, Call):
        yield tree
        for argument in tree.arguments:
            yield from calls(argument)
