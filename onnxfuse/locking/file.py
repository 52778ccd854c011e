"""The lock's file: YAML in one order, fusions that are alike together with a mapping for each place, so that a diff
shows what changed and nothing else."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from onnxfuse.errors import LockError, Place, RuleError
from onnxfuse.locking import lock as shape
from onnxfuse.locking.lock import VERSION, Lock
from onnxfuse.rules.yamlfile import Bounds, Document, Path_, documents, read_text
from onnxfuse.version import __version__
from onnxfuse.visible import visible

HEAD = """\
# What is fused in this model: `onnxfuse check MODEL --lock FILE` fails where any of it is gone, and
# `onnxfuse optimize MODEL --lock FILE` writes the file anew.
"""

WHAT = "lock file"
BOUNDS = Bounds(nbytes=64_000_000, parts=4_000_000)
"""Of a lock: one of thousands of fusions is larger than any rule file."""

AGAIN = "`onnxfuse optimize MODEL --lock FILE` writes it anew."

WIDTH = 120

_PLAIN = re.compile(r"[A-Za-z_/][\w/.+()-]*( [\w/.+()>-]+)*", re.ASCII)
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Texts that some reader of YAML takes for something else."""


class _Dumper(yaml.SafeDumper):
    """Texts that are no plain names in quotes, nothing by reference, and lists of texts on one line."""

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """Write characters that show nothing, or steer what shows the file, as their codes."""
        before, self.allow_unicode = self.allow_unicode, text.isprintable()
        super().write_double_quoted(text, split)
        self.allow_unicode = before

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _line(dumper: yaml.SafeDumper, content: _Line) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", content.items(), flow_style=True)


def _list(dumper: yaml.SafeDumper, content: list[Any]) -> yaml.Node:
    flow = all(isinstance(each, str | int) for each in content)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", content, flow_style=flow)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_Line, _line)
_Dumper.add_representer(list, _list)


def lock_text(lock: Lock) -> str:
    """What the file of a lock holds; ``read_lock`` makes the same lock of it."""
    content = lock.model_dump(exclude_defaults=True) | {"lock": lock.lock}
    for entry in (*content["fusions"], *content["runtime"]):
        entry["at"] = [_Line(spot) for spot in entry["at"]]
    content["plan"] = {name: _Line(each) if isinstance(each, dict) else each for name, each in content["plan"].items()}
    content["kernels"] = _Line(content["kernels"])
    order = [name for name in Lock.model_fields if name in content]
    return HEAD + "".join(
        yaml.dump({name: content[name]}, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
        for name in order)


def read_lock(path: Path) -> Lock:
    """The lock in a file.

    Raises:
        LockError: it cannot be read, is no lock, or one of a newer release.
    """
    try:
        found = documents(path, read_text(path, WHAT, BOUNDS), WHAT, BOUNDS)
    except RuleError as error:
        remedy = f"Mend this place. {AGAIN}" if isinstance(error.place, Place) else AGAIN
        raise LockError(error.message, place=error.place, remedy=remedy) from error
    if len(found) != 1 or not isinstance(found[0].data, dict) or "lock" not in found[0].data:
        raise LockError("The file is no lock of onnxfuse.", place=str(path),
                        remedy="Name the file that `onnxfuse optimize MODEL --lock FILE` wrote.")
    (document,) = found
    _check_version(document)
    try:
        return Lock.model_validate(document.data)
    except ValidationError as error:
        raise _fault(document, error) from None


def _check_version(document: Document) -> None:
    """Whether this release knows the file's shape.

    Raises:
        LockError: it does not.
    """
    version = document.data["lock"]
    if version == VERSION and not isinstance(version, bool):
        return
    place = document.place(("lock",))
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise LockError(f"The lock's version is a number from 1 on, not {version!r}.", place=place, remedy=AGAIN)
    made = document.data.get("made")
    by = made.get("onnxfuse") if isinstance(made, dict) else None
    who = f"onnxfuse {visible(by)}" if isinstance(by, str) else "a newer onnxfuse"
    raise LockError(
        f"The lock was written by {who}, in version {version} of the file; onnxfuse {__version__} reads {VERSION}.",
        place=place, remedy=f"Update onnxfuse; or, with this release, {AGAIN}")


def _fault(document: Document, error: ValidationError) -> LockError:
    """The first of pydantic's findings, at the line where it is; an unknown key before others: it is most often one
    that is missing, misspelt."""
    found = error.errors(include_url=False)
    chosen = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    path: Path_ = tuple(chosen["loc"])
    name = ".".join(str(part) for part in path if part not in ("str", "int"))  # pydantic's words for either type
    known = {key for each in vars(shape).values() if isinstance(each, type) and issubclass(each, BaseModel)
             for key in each.model_fields}
    if chosen["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1])[:100], sorted(known), 1)
        message, remedy = f"The lock has an unknown key {name}.", f"Did you mean {near[0]}?" if near else AGAIN
    elif chosen["type"] == "missing":
        message, remedy = f"The lock has lost its key {name}.", AGAIN
    else:
        said = chosen["msg"].removeprefix("Value error, ")
        message, remedy = f"{name} of the lock: {said[:1].lower()}{said[1:]}.", AGAIN
    where = document.place(path, key=chosen["type"] in ("extra_forbidden", "missing"))
    return LockError(visible(message), place=where, remedy=remedy)
