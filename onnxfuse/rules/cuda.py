"""What can be told of a user's CUDA text without compiling it: whether it has a kernel, and what that takes."""

from __future__ import annotations

import re

# What is never closed is taken in as well: else the search begins anew at each quote, and a file of quotes has no end.
# A quote behind a digit groups the digits of a number.
_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])*\'?', re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*", re.MULTILINE)
MOST = 20
"""Declarations of one name that are looked into."""

_LINKAGE = re.compile(r'extern\s*"C"')


def fault(source: str, entry: str, pointers: int, integers: int) -> str | None:
    """A sentence that says why ``entry`` cannot be launched with so many pointers and then so many integers.

    None where nothing speaks against it; a kernel that a macro makes is not looked into.
    """
    bare = _COMMENT_OR_STRING.sub(_blank, source)
    spelled = _DEFINE.sub(_blank, bare)
    heads = _heads(spelled, entry)
    kernels = [(match, head) for match, head, is_kernel in heads if is_kernel][:MOST]
    if not kernels:
        made_by_macro = any("__global__" in define for define in _DEFINE.findall(bare))
        if made_by_macro and re.search(rf"\b{re.escape(entry)}\b", spelled):
            return None
        return f"has no function {entry}" if not heads else f"has no __global__ function {entry}"
    if not any(_LINKAGE.search(spelled, head, match.start()) or _inside_linkage(spelled, head)
               for match, head in kernels):
        return f'declares {entry} without extern "C"'
    found = _parameters(spelled, kernels[0][0].end())
    if len(found) != pointers + integers:
        return f"declares {entry} with {len(found)} parameters, and the rule passes {pointers + integers}"
    for place, text in enumerate(found[pointers:], pointers + 1):
        if "*" in text:
            return f"declares parameter {place} of {entry} as a pointer, and the rule passes an integer"
    return None


def _blank(match: re.Match[str]) -> str:
    """Spaces in a text's place, but for the "C" of a linkage."""
    found = match.group()
    return found if found == '"C"' else re.sub(r"[^\n]", " ", found)


def _heads(text: str, entry: str) -> list[tuple[re.Match[str], int, bool]]:
    """Where a function is named, where each of these declarations begins, and whether it is a kernel's."""
    found: list[tuple[re.Match[str], int, bool]] = []
    head, is_kernel = 0, False
    for match in re.finditer(rf"[;{{}}]|__global__|\b{re.escape(entry)}\s*\(", text):
        if match.group() in ";{}":
            head, is_kernel = match.end(), False
        elif match.group() == "__global__":
            is_kernel = True
        else:
            found.append((match, head, is_kernel))
    return found


def _inside_linkage(text: str, position: int) -> bool:
    """Whether a block of extern "C" is open at a position."""
    open_blocks: list[bool] = []
    for match in re.finditer(r"[{}]", text[:position]):
        if match.group() == "{":
            open_blocks.append(re.search(r'extern\s*"C"\s*$', text[: match.start()]) is not None)
        elif open_blocks:
            open_blocks.pop()
    return any(open_blocks)


def _parameters(text: str, start: int) -> list[str]:
    """The parameters of a list that was opened just before ``start``."""
    found, depth, last = [], 0, start
    for at in range(start, len(text)):
        mark = text[at]
        if depth == 0 and mark in ",)":
            found.append(text[last:at].strip())
            last = at + 1
            if mark == ")":
                break
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(mark, 0)
    return [] if found in ([""], ["void"]) else found
