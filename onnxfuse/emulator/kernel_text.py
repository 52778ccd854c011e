"""What the emulator reads from kernel text, and the little it must rewrite before host g++ can compile it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*", re.MULTILINE)
_KERNEL = re.compile(r'extern\s*"C"\s*__global__\b')
_BOUNDS = re.compile(r"__launch_bounds__\s*\(")
_ALIGNMENT = re.compile(r"(?:alignas|__align__)\s*\(\s*([^()]*)\)")
_DYNAMIC = re.compile(r'\bextern\s+([^;{}"]*?__shared__[^;{}"]*?)\b(\w+)\s*\[\s*\]\s*;')
_SHARED_ALIGNED = re.compile(r"\b__shared__\s+(alignas\s*\([^()]*\))")
_TRANSPARENT = re.compile(r'(?:\bnamespace(?:\s+[\w:]+)?|extern\s*"C")\s*$')


@dataclass(frozen=True)
class HostText:
    """Text for host g++: ``kernels`` maps each kernel's name to the thread bound of its launch bounds, as written
    ("0" where there are none); ``shared_alignment`` is that of its dynamic shared memory, in bytes."""

    text: str
    kernels: dict[str, str]
    shared_alignment: int


@lru_cache(maxsize=512)
def for_host(source: str) -> HostText:
    """The text with dynamic shared memory as pointers and a table of its kernels at the end; lines keep their
    numbers."""
    bare = _blank(source)
    alignment = 16
    pieces, last = [], 0
    for match in _DYNAMIC.finditer(bare):
        declared, name = match.groups()
        for wanted in _ALIGNMENT.findall(declared):
            alignment = max(alignment, int(wanted) if wanted.strip().isdigit() else 128)
        kind = " ".join(_ALIGNMENT.sub("", declared).replace("__shared__", "").replace("volatile", "").split())
        if _in_function(bare, match.start()):
            text = f"{kind}* const {name} = static_cast<{kind}*>(onnxfuse_emulator_dynamic_shared);"
        else:
            # Among the initialised data, where it is not taken for shared memory itself.
            attribute = '__attribute__((section(".data")))'
            text = f"{attribute} static {kind}* {name} = onnxfuse_emulator::dynamic_shared_later(&{name});"
        pieces += [source[last : match.start()], text, "\n" * match.group().count("\n")]
        last = match.end()
    text = _SHARED_ALIGNED.sub(r"\1 __shared__", "".join(pieces) + source[last:])
    kernels = _kernels(bare)
    table = "".join(
        f'extern "C" __attribute__((visibility("default"))) const onnxfuse_emulator::Kernel '
        f"onnxfuse_kernel_{name} = onnxfuse_emulator::Entry<{name}>::describe({bound});\n"
        for name, bound in kernels.items()
    )
    return HostText(f'#line 1 "kernel"\n{text}\n#line 1 "table"\n{table}{_SHARED_RANGE}', kernels, alignment)


# Static shared memory is all of the library's zero-initialised data, which the linker delimits.
_SHARED_RANGE = """
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
extern "C" __attribute__((visibility("default"))) char* const onnxfuse_shared_begin = __bss_start;
extern "C" __attribute__((visibility("default"))) char* const onnxfuse_shared_end = _end;
"""


def _blank(source: str) -> str:
    """The text with comments and the insides of strings as spaces, every character in its place."""

    def spaces(match: re.Match[str]) -> str:
        found = match.group()
        if found == '"C"':
            return found
        return re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(spaces, source)


def _in_function(bare: str, position: int) -> bool:
    """Whether a brace other than a namespace's or a linkage block's is open there."""
    open_braces: list[bool] = []
    last = 0
    for match in re.finditer(r"[{}]", bare[:position]):
        if match.group() == "}":
            if open_braces:
                open_braces.pop()
        else:
            open_braces.append(_TRANSPARENT.search(bare[last : match.start()]) is None)
        last = match.end()  # What stands before the next one has no brace in it.
    return any(open_braces)


def _kernels(bare: str) -> dict[str, str]:
    """Each kernel that the text spells out (not what a macro makes) and its launch bounds' first argument."""
    bare = _DEFINE.sub("", bare)
    kernels = {}
    for match in _KERNEL.finditer(bare):
        head = bare[match.end() : match.end() + 4096]
        bound = "0"
        bounds = _BOUNDS.search(head, 0, head.find("{") if "{" in head else len(head))
        if bounds is not None:
            inside, end = _balanced(head, bounds.end())
            bound = _first_argument(inside)
            head = head[: bounds.start()] + head[end:]
        name = re.search(r"(\w+)\s*\(", head)
        if name is not None:
            kernels[name.group(1)] = bound
    return kernels


def _balanced(text: str, start: int) -> tuple[str, int]:
    """What stands between a parenthesis opened just before ``start`` and its partner, and where that one ends."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at], at + 1
    return text[start:], len(text)


def _first_argument(text: str) -> str:
    depth = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            return text[:at].strip()
    return text.strip()
