"""What loops over the elements of rows compute in a kernel's text, read line by line.

Of a text's lines this knows only which loops they stand in and which names they give a value, whichever scopes the
writer meant them for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LANE = "v"
"""What runs over the lanes of a vector; a loop over these alone is none over elements."""

_LOOP = re.compile(r"for \((?:int|idx) (\w+) =")
_GIVEN = re.compile(r"(\w+)(?:\[[^=\]]*\])? (?:[+*/-]?=) ([^;]*);")
_GATHERED = re.compile(r"(\w+)(?:\[[^=\]]*\])? [+*/-]= ")
_CONSTANT = re.compile(r"const [\w:<>, ]+ \w+ = (.*);")
_NAME = re.compile(r"\b[A-Za-z_]\w*")


def element_loops(body: str) -> Iterator[list[str]]:
    """The lines of each loop over elements, those of loops inside it among them."""
    around: list[str | None] = []
    lines: list[str] = []
    for line in map(str.strip, body.splitlines()):
        opened, closed = line.count("{"), line.count("}")
        del around[len(around) - max(closed - opened, 0):]
        loop = _LOOP.search(line)
        names = [name for name in (*around, loop and loop[1]) if name not in (None, LANE)]
        if names:
            lines.append(line)
        elif lines:
            yield lines
            lines = []
        around += [loop and loop[1]] * max(opened - closed, 0)
    assert not around and not lines, "braces do not match"


def same_for_all(lines: list[str]) -> list[str]:
    """What a loop names that depends neither on its element nor on what it reads and gathers."""
    changing = {name[1] for line in lines for name in _LOOP.finditer(line) if name[1] != LANE}
    changing |= {name[1] for line in lines for name in _GATHERED.finditer(line)}
    before = -1
    while before < len(changing):
        before = len(changing)
        for line in lines:
            changing |= {given[1] for given in _GIVEN.finditer(line)
                         if changing.intersection(_NAME.findall(line[given.start():given.end()]))}
    return [line for line in lines if _CONSTANT.fullmatch(line) and not changing.intersection(_NAME.findall(line))]
