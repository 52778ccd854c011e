"""YAML with places: plain data, and where in the file each part of it stands.

A rule file, or a hardware profile, is taken as data from a stranger: anchors, aliases and tags are refused, and so are
files too large or nested too deep.  Scalars are strings, integers, floats, true, false and null; nothing else is
guessed: no dates, no numbers in other bases.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from onnxfuse.bounded import read_bytes
from onnxfuse.errors import Place, RuleError
from onnxfuse.rules.syntax import TextError

MAX_DEPTH = 12
MAX_FILES = 5_000
MAX_EXCERPT = 160
MAX_COLUMN = 500

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

@dataclass(frozen=True)
class Bounds:
    """How large a file may be: bytes, and parts that its YAML has."""

    nbytes: int = 1_000_000
    parts: int = 50_000


OF_RULES = Bounds()
"""Of rule files and hardware profiles."""

Path_ = tuple[str | int, ...]
"""Keys and positions that lead from a document's top to a part of it."""


@dataclass
class Document:
    """One YAML document.

    Attributes:
        file: as messages name it; lines: of the whole file; data: plain Python.
        values, keys: nodes by path: of the part itself, and of its key.
    """

    file: Path
    lines: list[str]
    data: Any
    values: dict[Path_, yaml.Node] = field(default_factory=dict)
    keys: dict[Path_, yaml.Node] = field(default_factory=dict)

    def place(self, path: Path_, *, key: bool = False) -> Place:
        """Where a part stands, or the nearest part around it."""
        for end in range(len(path), -1, -1):
            node = (self.keys if key else self.values).get(path[:end]) or self.values.get(path[:end])
            if node is not None:
                return self._place(node.start_mark.line, node.start_mark.column, _width(node))
        return Place(str(self.file))

    def text_place(self, path: Path_, start: int, end: int) -> Place:
        """Where characters ``start`` to ``end`` of a string stand."""
        node = self.values.get(path)
        if not isinstance(node, yaml.ScalarNode):
            return self.place(path)
        text: str = node.value
        row = text.count("\n", 0, start)
        column = start - (text.rfind("\n", 0, start) + 1)
        stop = text.find("\n", start)
        length = max(1, min(end, stop if stop >= 0 else len(text)) - start)
        line, indent = node.start_mark.line, node.start_mark.column
        if node.style == "|":
            line += 1 + row
            first = next((k for k, content in enumerate(text.split("\n")) if content.strip()), 0)
            below = node.start_mark.line + 1 + first
            source = self.lines[below] if below < len(self.lines) else ""
            content = text.split("\n")[first]
            indent = len(source) - len(source.lstrip(" ")) - (len(content) - len(content.lstrip(" ")))
        elif row or node.start_mark.line != node.end_mark.line or node.style == ">":
            return self.place(path)
        elif node.style:
            indent += 1
        return self._place(line, indent + column, length)

    def _place(self, line: int, column: int, length: int) -> Place:
        excerpt = _excerpt(self.lines, line, column, length)
        length = 1 if excerpt is None else max(1, min(length, len(excerpt) - column))
        return Place(str(self.file), line + 1, column + 1, excerpt, length)

    def error(self, path: Path_, message: str, remedy: str | None = None, *, key: bool = False) -> RuleError:
        """An error about a part of the document."""
        return RuleError(message, place=self.place(path, key=key), remedy=remedy)

    def text_error(self, path: Path_, error: TextError, offset: int = 0) -> RuleError:
        """An error about characters of a string of the document; the error counts from ``offset`` characters on."""
        place = self.text_place(path, max(error.start - offset, 0), max(error.end - offset, 1))
        return RuleError(error.message, place=place, remedy=error.remedy)


def read(file: Path, what: str = "rule file") -> list[Document]:
    """The documents of a file.

    Args:
        what: what messages call such a file.

    Raises:
        RuleError: the file cannot be read, is no YAML, or holds what rule files may not hold.
    """
    return documents(file, read_text(file, what), what)


def documents(file: Path, text: str, what: str = "rule file", bounds: Bounds = OF_RULES) -> list[Document]:
    """The documents of a file's text; as ``read`` with what ``read_text`` gives.

    Raises:
        RuleError: the text is no YAML, or holds what rule files may not hold.
    """
    lines = _BREAK.split(text)
    try:
        _check_events(file, text, lines, what, bounds)
        return [_document(file, lines, node) for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = None if mark is None else _mark_place(file, lines, mark)
        raise RuleError(
            f"This is not YAML: {error.problem or error.context}.", place=place or str(file),
            remedy="Check indentation, colons and quotes around this place.",
        ) from error
    except yaml.reader.ReaderError as error:
        number = error.character if isinstance(error.character, int) else ord(str(error.character)[0])
        raise RuleError(
            f"The {what} holds a character that YAML does not allow (U+{number:04X}).", place=str(file),
            remedy="Remove it.",
        ) from error


_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""What ends a line for YAML."""


def read_text(file: Path, what: str = "rule file", bounds: Bounds = OF_RULES) -> str:
    """A file's text, lines ending as everywhere.

    Raises:
        RuleError: the file cannot be read, or is no text of a decent size.
    """
    try:
        raw = read_bytes(file, bounds.nbytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise RuleError(
                f"The {what} is larger than {bounds.nbytes} bytes.", place=str(file),
                remedy="Split it into several files.",
            ) from error
        raise RuleError(
            f"The {what} cannot be read: {error.strerror}.", place=str(file), remedy="Give the path of a text file.",
        ) from error
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RuleError(f"The {what} is not UTF-8 text.", place=Place(str(file), line), remedy="Save it as UTF-8."
                        ) from error


def _check_events(file: Path, text: str, lines: list[str], what: str, bounds: Bounds) -> None:
    depth = 0
    kinds = f"{what[:1].upper()}{what[1:]}s"
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise RuleError(
                f"{kinds} may not hold anchors and aliases.", place=_mark_place(file, lines, event.start_mark),
                remedy="Write the part out where it is needed.",
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise RuleError(
                f"{kinds} may not hold tags ({tag}).", place=_mark_place(file, lines, event.start_mark),
                remedy="Remove the tag.",
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or count > bounds.parts:
            raise RuleError(
                f"The {what} is nested deeper than {MAX_DEPTH} levels." if depth > MAX_DEPTH
                else f"The {what} has more than {bounds.parts} parts.",
                place=_mark_place(file, lines, event.start_mark), remedy="None needs that.",
            )


def _mark_place(file: Path, lines: list[str], mark: Any) -> Place:
    return Place(str(file), mark.line + 1, mark.column + 1, _excerpt(lines, mark.line, mark.column))


def _excerpt(lines: list[str], line: int, column: int, length: int = 0) -> str | None:
    """A line for a message, cut after the place where it is long; None where the place is far to the right."""
    if column > MAX_COLUMN:
        return None
    text = lines[line] if line < len(lines) else ""
    end = max(min(column + length, MAX_COLUMN), MAX_EXCERPT)
    return text if len(text) <= end else text[:end] + "..."


def _width(node: yaml.Node) -> int:
    if node.start_mark.line == node.end_mark.line:
        return max(1, int(node.end_mark.column - node.start_mark.column))
    return 1


def _document(file: Path, lines: list[str], node: yaml.Node) -> Document:
    document = Document(file, lines, None)
    document.data = _data(document, node, ())
    return document


def _data(document: Document, node: yaml.Node, path: Path_) -> Any:
    document.values[path] = node
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise RuleError(
                    "A key must be a plain word.", place=_mark_place(document.file, document.lines, key_node.start_mark)
                )
            key = key_node.value
            document.keys[*path, key] = key_node
            if key in mapping:
                raise document.error((*path, key), f"The key {key} is given twice.", "Give it once.", key=True)
            mapping[key] = _data(document, value_node, (*path, key))
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_data(document, item, (*path, position)) for position, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node)


_INTEGER = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style:
        return text
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "null", "~"):
        return None
    if _INTEGER.fullmatch(text) and len(text) < 20:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def rule_files(path: Path) -> Iterator[Path]:
    """The rule files that a path names: itself, or every ``*.yaml`` below a folder but in folders "hardware".

    Raises:
        RuleError: there is no such path, or no rule file below it.
    """
    if os.path.isdir(path):
        found = sorted(islice((
            file for ending in ("*.yaml", "*.yml") for file in path.rglob(ending)
            if "hardware" not in file.relative_to(path).parts
        ), MAX_FILES + 1))
        if len(found) > MAX_FILES:
            raise RuleError(f"The folder holds more than {MAX_FILES:,} rule files.", place=str(path),
                            remedy="Give the folder that holds the rules alone.")
        if not found and not os.path.isdir(path / "hardware"):
            raise RuleError("The folder holds no rule files.", place=str(path), remedy="Rule files end in .yaml.")
        yield from found
    elif os.path.exists(path):
        yield path
    else:
        raise RuleError("There is no such rule file or folder.", place=str(path), remedy="Check the path.")
