"""The documentation names commands, options, targets and files that exist, and so do comments."""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

import click
import pytest
from cli_models import ROOT
from doc_commands import PAGES
from parsed import GROUP, nodes

import onnxfuse
from onnxfuse.cli import main


def split(text: str) -> tuple[list[tuple[str, str]], str]:
    """Fenced blocks with their language, and the text without them."""
    blocks: list[tuple[str, str]] = []
    rest: list[str] = []
    language: str | None = None
    for line in text.splitlines():
        if line.startswith("```"):
            if language is None:
                language = line.removeprefix("```")
                blocks.append((language, ""))
            else:
                language = None
        elif language is None:
            rest.append(line)
        else:
            blocks[-1] = (language, f"{blocks[-1][1]}{line}\n")
    assert language is None, "a block is not closed"
    return blocks, "\n".join(rest)


def command_lines(page: Path) -> list[list[str]]:
    """Every `onnxfuse ...` in code, as words."""
    blocks, rest = split(page.read_text(encoding="utf-8"))
    lines = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    lines += re.findall(r"`(onnxfuse [^`]*)`", rest)
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["onnxfuse"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    for words in command_lines(page):
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page.name}: onnxfuse {' '.join(words)}"
            command, words = command.commands[words[0]], words[1:]
        options = {name for parameter in command.params if isinstance(parameter, click.Option)
                   for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        for word in words:
            for part in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", word):
                assert part in options, f"{page.name}: {part} of {command.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_headings_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_names_exist(page: Path) -> None:
    for name in re.findall(r"\bonnxfuse\.([a-z_]+)\(", page.read_text(encoding="utf-8")):
        assert name in onnxfuse.__all__, f"{page.name}: onnxfuse.{name}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"),
                           re.MULTILINE))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_command_is_documented() -> None:
    named = {words[0] for words in command_lines(ROOT / "README.md") if words}
    assert main.commands.keys() <= named


def test_the_two_commands_come_first() -> None:
    blocks, _ = split((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [line.split("#")[0].split() for line in blocks[0][1].splitlines()] == [["make", "demo"], ["make", "test"]]


def test_folders_are_listed_in_the_order_of_the_data() -> None:
    blocks, _ = split((ROOT / "README.md").read_text(encoding="utf-8"))
    block = next(block for _, block in blocks if "graph/" in block)
    folders = re.findall(r"^  ([a-z]+)/", block, re.MULTILINE)
    stages = [folder for folder in folders if (ROOT / "onnxfuse" / folder).is_dir()]
    assert stages == ["graph", "ir", "operators", "provider", "folding", "rules", "planning", "lowering", "schedules",
                      "rewriting", "verifying", "reporting", "locking", "runtime", "measuring", "tuning", "debugging",
                      "emulator", "checking", "doctor", "cli"]


WAYS = {"A new operator": 3, "A rule for a new activation": 3, "A value that is computed again": 3,
        "A launch's grid": 3, "A new schedule": 3}
"""Changes that come up most, and the most files that each may lead to; others may lead to five."""


def test_the_ways_of_changes_lead_to_few_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ways = dict(re.findall(r"^\*\*(.*?)\.\*\* (.*)$", text, re.MULTILINE))
    assert WAYS.keys() <= ways.keys()
    for title, way in ways.items():
        named = set(re.findall(r"`((?:onnxfuse|rules|tests)/[^`]*)`", way))
        assert named and all((ROOT / name).exists() for name in named), title
        assert sum((ROOT / name).is_file() for name in named) <= WAYS.get(title, 5), title
        others = set(re.findall(r"`([\w/]+\.(?:py|cuh|cc|yaml))`", way)) - named
        beside = [ROOT, *(folder for name in named for folder in (ROOT / name).parents if ROOT in folder.parents)]
        missing = [name for name in others if not any((folder / name).exists() for folder in beside)]
        assert not missing, title


@cache
def files() -> frozenset[str]:
    """Of the project, as paths from its root and as every end of these."""
    found = [path.relative_to(ROOT) for folder in ("onnxfuse", "benchmarks", "docs", "examples", "rules", "tests")
             for path in (ROOT / folder).rglob("*")]
    found += [path.relative_to(ROOT) for path in ROOT.glob("*.*")]
    return frozenset(str(PurePath(*path.parts[place:])) for path in found for place in range(len(path.parts)))


def comments(path: Path) -> Iterator[str]:
    """Comments and docstrings of a module, those of attributes too."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield re.sub(r"\s+", " ", node.value.value)


def named_files(comment: str) -> Iterator[str]:
    """Files that it names: sources, documents, and what was measured, "(benchmarks/results, ways and spills)"."""
    yield from re.findall(r"(?<![\w./-])[\w/-]+\.(?:py|cc|cuh|md)\b", comment)
    for names in re.findall(r"benchmarks/results, ([\w, -]+)", comment):
        for name in re.split(r", | and ", names):
            found = sorted((ROOT / "benchmarks" / "results").glob(f"*-{name}.md"))
            yield found[-1].name if found else name


@GROUP
@pytest.mark.parametrize("folder", ["onnxfuse", "benchmarks", "tests"])
def test_comments_name_files_that_are_there(folder: str) -> None:
    missing = [(str(path.relative_to(ROOT)), name) for path in sorted((ROOT / folder).rglob("*.py"))
               for comment in comments(path) for name in named_files(comment) if name not in files()]
    assert not missing


def test_a_file_that_is_not_there_is_seen() -> None:
    text = "As planning/flops.py does (benchmarks/results, ways and row layouts), unlike `text.py`."
    assert [name for name in named_files(text) if name not in files()] == ["planning/flops.py", "row layouts"]
