"""The documentation names commands, options, targets and files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from cli_models import ROOT
from doc_commands import PAGES

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
