"""Nothing in the library is there for the tests alone: each name that it defines is used in it, or is a user's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cli_models import ROOT
from parsed import GROUP, nodes, parsed

import onnxfuse

PACKAGE = ROOT / "onnxfuse"

OTHERS = {
    "_default_config": "Olive", "_run_for_config": "Olive",
    "string": "lark", "ignore_aliases": "PyYAML",
    "seekable": "zipfile", "writelines": "click",
    "copy_rate": "benchmarks/kernels.py",
}
"""What else calls a name."""


pytestmark = GROUP


@cache
def trees() -> dict[Path, ast.Module]:
    """The library's modules."""
    return {path: parsed(path) for path in sorted(PACKAGE.rglob("*.py"))}


def defined(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str, ast.FunctionDef | ast.ClassDef]]:
    """Functions, classes and methods, with the class that they are of; those inside functions left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield owner, node.name, node
            if isinstance(node, ast.ClassDef):
                yield from defined(node, node.name)


@cache
def used() -> set[str]:
    """Names that are read, called or written as a word somewhere in the library, in pages too."""
    found: set[str] = set()
    for path in trees():
        for node in nodes(path):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    for page in PACKAGE.rglob("*.html"):
        found.update(re.findall(r"\w+", page.read_text(encoding="utf-8")))
    return found


def is_public(owner: str, name: str) -> bool:
    """Whether Python code of a user's has it: exported, or of an exported class."""
    return not name.startswith("_") and (owner or name) in onnxfuse.__all__


def test_nothing_is_there_for_the_tests_alone() -> None:
    names = used()
    unused = [
        f"{path.relative_to(ROOT)}:{node.lineno} {owner}{'.' if owner else ''}{name}"
        for path, tree in trees().items() for owner, name, node in defined(tree)
        if name not in names and name not in OTHERS and not name.startswith("__") and not is_public(owner, name)
        and not any(re.search("command|validator|serializer", ast.unparse(each)) for each in node.decorator_list)
    ]
    assert unused == []


def test_what_others_call_is_there_and_not_called_here() -> None:
    names, every = used(), {name for tree in trees().values() for _, name, _ in defined(tree)}
    assert OTHERS.keys() <= every and not OTHERS.keys() & names
