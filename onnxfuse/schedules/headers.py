"""The headers of generated kernels, definition by definition: a text begins with what it uses of them.

A header is C++ of one form (``cuda/*.cuh``): everything in namespace ``of``, each definition begins and ends on lines
of its own, and texts call them by ``of::name``, macros by ``OF_NAME``.  What a definition uses itself comes along.  One
that is for a type of 16 bits alone, as an overload or a specialization, only comes where the text has such elements,
and so does the toolkit's header for that type, which is much of what a small kernel takes to compile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

QUALIFIER, MACRO = "of::", "OF_"
"""What a text calls definitions by, and what the names of macros begin with."""

BASE = ("onnxfuse", "reductions")
"""Those that every text may use."""

HEADERS = (*BASE, "columns", "pieces", "scan", "tile", "stencil", "mma", "tf32", "int8", "warpgroup", "tensor_copies",
           "moments", "cluster", "patch", "patch_tf32", "tall", "few_rows", "int8_together", "tf32_together",
           "recurrent")
"""All of them, those first that others use."""

INCLUDES = {"half": "#include <cuda_fp16.h>\n", "bfloat16": "#include <cuda_bf16.h>\n"}
"""The toolkit's header for each type of 16 bits, by a part of all of its names."""

STORED = {"half": "__half", "bfloat16": "__nv_bfloat16"}
"""The types of elements that these are."""

_OPEN, _CLOSE = "namespace of {\n", "}  // namespace of\n"
_COMMENT = re.compile(r"\s*//.*$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"[A-Za-z_]\w*")
_MACRO = re.compile(r"#(?:define|undef) (\w+)|(OF_\w+)\((\w+)", re.ASCII)
_HEAD = re.compile(r"\b(?:struct(?: alignas\(.*?\))?|using) (\w+)|(\w+)(?:<[^()=]*>)?\s*(?:\(|=|;)", re.ASCII)


@dataclass(frozen=True)
class Definition:
    """A definition of a header.

    Attributes:
        names: what it defines; uses: all names in it.
        kinds: the types of 16 bits that it is for alone, those that stand before its body.
    """

    text: str
    names: frozenset[str]
    uses: frozenset[str]
    kinds: frozenset[str]


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Headers in the order in which a text begins with them."""
    return tuple(name for name in HEADERS if name in names)


@cache
def header(name: str = "onnxfuse") -> str:
    """A header, without its comments."""
    text = files("onnxfuse.schedules").joinpath(f"cuda/{name}.cuh").read_text(encoding="utf-8")
    lines = (_COMMENT.sub("", line) for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip()) + "\n"


@cache
def definitions(name: str) -> tuple[Definition, ...]:
    """The definitions of a header, in their order."""
    lines = header(name).splitlines(keepends=True)
    begin = lines.index(_OPEN)
    return tuple(_definition(text) for text in _pieces(lines[begin + 1:-1]))


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Lines that belong together: up to where all brackets and conditions of the preprocessor are closed, and the last
    line ends a definition."""
    piece, depth, conditions = "", 0, 0
    for line in lines:
        piece += line
        bare = _STRING.sub("", line).strip()
        directive = bare.startswith("#")
        conditions += bare.startswith("#if") - bare.startswith("#endif")
        if not directive:
            depth += sum(bare.count(each) for each in "({[") - sum(bare.count(each) for each in ")}]")
        whole = bare.endswith(("}", ";", ")")) or (directive and not bare.startswith("#pragma"))
        if depth == conditions == 0 and whole and not piece.endswith("\\\n"):
            yield piece
            piece = ""


def _definition(text: str) -> Definition:
    macro = _MACRO.match(text)
    uses = frozenset(_NAME.findall(_STRING.sub("", text)))
    if macro is not None:
        names = frozenset(name for name in (macro[1] or macro[3],) if name)
        return Definition(text, names, uses, frozenset())
    if text.startswith("#"):  # under a condition, of which no other definition is the other side
        inner = [line for line in text.splitlines(keepends=True) if not line.startswith(("#if", "#el", "#endif"))]
        parts = [_definition(piece) for piece in _pieces(inner)]
        return Definition(text, frozenset().union(*(part.names for part in parts)), uses, frozenset())
    head = _without_template(text.split("{", 1)[0])
    found = _HEAD.search(head + (" ;" if "(" not in head else ""))
    if found is None:
        raise ValueError(f"no definition: {text[:80]!r}")
    kinds = frozenset(kind for kind, name in STORED.items() if name in head)
    return Definition(text, frozenset({found[1] or found[2]}), uses, kinds)


def _without_template(head: str) -> str:
    """What stands before a body, without the parameters of its template."""
    if not head.startswith("template <"):
        return head
    depth = 0
    for place, letter in enumerate(head):
        depth += (letter == "<") - (letter == ">")
        if letter == ">" and depth == 0:
            return head[place + 1:]
    return head


def used_in(text: str) -> frozenset[str]:
    """What a text uses of headers: names that it qualifies, macros, and its elements' types of 16 bits."""
    called = (_NAME.match(part) for part in text.split(QUALIFIER)[1:])
    macros = (_NAME.match(part) for part in text.split(MACRO)[1:])
    return frozenset([
        *(found[0] for found in called if found), *(MACRO + found[0] for found in macros if found),
        *(name for name in STORED.values() if name in text)])


@cache
def all_definitions() -> str:
    """Those of all headers, after what they include."""
    return "".join([*INCLUDES.values(), *map(header, HEADERS)])


@cache
def declarations(mark: str) -> str:
    """The same, but definitions of functions that bear a mark are declarations."""
    text = all_definitions()
    for each in (each.text for name in HEADERS for each in definitions(name)):
        head, body, _ = each.partition(" {\n")
        if body and mark in head:
            text = text.replace(each, f"{head};\n")
    return text


def without_definitions(text: str) -> str | None:
    """What is left of a text that begins with definitions of the headers, as they stand there; None of any other."""
    rest = text
    for line in INCLUDES.values():
        rest = rest.removeprefix(line)
    begin, found, rest = rest.partition(_CLOSE)
    if not found or not begin.startswith(_OPEN):
        return None
    pieces = _pieces(begin.removeprefix(_OPEN).splitlines(keepends=True))
    return rest if _known().issuperset(pieces) else None


@cache
def _known() -> frozenset[str]:
    return frozenset(each.text for name in HEADERS for each in definitions(name))


@lru_cache(maxsize=1024)
def linked(names: tuple[str, ...], used: frozenset[str]) -> str:
    """What is used of headers, those that every text may use first, and what that uses, in their order, with the
    toolkit's headers before it."""
    given = [each for name in dict.fromkeys((*BASE, *names)) for each in definitions(name)]
    kinds = {kind for kind, name in STORED.items() if name in used}
    by_name: dict[str, list[int]] = {}
    for place, each in enumerate(given):
        if each.kinds <= kinds:
            for name in each.names:
                by_name.setdefault(name, []).append(place)
    wanted: set[int] = set()
    waiting = [name for name in used if name in by_name]
    while waiting:
        for place in by_name.pop(waiting.pop(), ()):
            wanted.add(place)
            waiting += [name for name in given[place].uses if name in by_name]
    kept = [given[place] for place in sorted(wanted)]
    told = used.union(*(each.uses for each in kept))
    includes = [line for kind, line in INCLUDES.items() if any(kind in name for name in told)]
    body = "".join(each.text for each in kept)
    return "".join([*includes, *([_OPEN, body, _CLOSE] if body else [])])
