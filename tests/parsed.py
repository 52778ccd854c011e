"""Python files as trees, each parsed once: tests that look at all of them run in one process, those of ``GROUP``."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

GROUP = pytest.mark.xdist_group("parsed")


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file; none may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree."""
    return tuple(ast.walk(parsed(path)))
