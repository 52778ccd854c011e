"""Functions and files are short enough to be read at once, functions take few things, and classes of a folder have
names of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_models import ROOT
from parsed import GROUP, nodes

pytestmark = GROUP

MODULES = [path for folder in ("onnxfuse", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

LINES_OF_A_FUNCTION, LINES_OF_A_FILE, PARAMETERS = 40, 500, 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    """All functions of a module, methods and those inside others too."""
    return (node for node in nodes(path) if isinstance(node, Function))


def lines(function: Function) -> int:
    """Lines of a function, from ``def`` on, without its docstring."""
    first = function.body[0]
    told = ast.get_docstring(function, clean=False) is not None
    return (function.end_lineno or 0) - function.lineno + 1 - (
        (first.end_lineno or 0) - first.lineno + 1 if told else 0)


def placed(function: Function) -> list[str]:
    """Names of the parameters that may be given by their place: one that must be named says what it is where it is
    given."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def is_command(function: Function) -> bool:
    """Whether click calls it, which names every parameter."""
    return any(ast.unparse(each).startswith("click.command(") for each in function.decorator_list)


def test_files_are_short() -> None:
    """Those of tests too."""
    found = {path: len(path.read_text(encoding="utf-8").splitlines())
             for path in (*MODULES, *sorted((ROOT / "tests").rglob("*.py")))}
    assert {str(path): count for path, count in found.items() if count > LINES_OF_A_FILE} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    for function in functions(path):
        assert lines(function) <= LINES_OF_A_FUNCTION, function.name
        assert is_command(function) or len(placed(function)) <= PARAMETERS, function.name


FOLDERS = sorted({path.relative_to(ROOT).parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_no_two_classes_of_a_folder_have_one_name(folder: Path) -> None:
    """Nor of the folders in it, where it is a package's."""
    found: dict[str, list[str]] = {}
    package = len(folder.parts) > 1 and folder.parts[0] == "onnxfuse"
    for path in sorted((ROOT / folder).glob("**/*.py" if package else "*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
