"""How a schedule runs a region, as a value: what tuning tries, and what a measurement is kept under."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Shape = TypeVar("Shape")

WORDS = {
    "pointwise": "blocks of {block}, width {width}, {vectors} a thread",
    "rows": "{threads} threads a row, width {width}, {items}, blocks of {block}",
    "columns": "{deep} threads a column, {across} side by side, width {width}, {items}",
    "turned": "{deep} threads a column, {across} side by side, width {width}, {items}, chunks of {chunk}, "
              "width {wide} along them",
    "split": "blocks of {threads}, {blocks} a multiprocessor",
    "tiled": "tiles of {rows} x {columns}, {batch} a block, vectors of {tall} x {width}",
}
"""By schedule: its settings, in words.

``items`` are the vectors (of a row) or elements (of a column) that a thread keeps, 0 where it streams.
"""

_EACH = {"rows": "vector", "columns": "element", "turned": "element"}
"""What a thread keeps ``items`` of."""

_BY_LENGTH = frozenset({"items", "chunk"})
"""Settings that follow from how long a row is."""


@dataclass(frozen=True)
class Choice:
    """A way to run a region: the schedule that it is for, and the schedule's settings by name, in their order."""

    schedule: str
    settings: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, schedule: str, **settings: int) -> Choice:
        """A choice with these settings."""
        return cls(schedule, tuple(settings.items()))

    def __getitem__(self, name: str) -> int:
        """A setting."""
        return dict(self.settings)[name]

    def __str__(self) -> str:
        """As text; ``parse_choice`` reads it."""
        return json.dumps({"schedule": self.schedule, **dict(self.settings)}, separators=(",", ":"))

    @property
    def words(self) -> str:
        """For people: "32 threads a row, width 8, 4 vectors, blocks of 128"."""
        told: dict[str, object] = dict(self.settings)
        if "items" in told:
            each = _EACH[self.schedule]
            told["items"] = _count(self["items"], each) if self["items"] else "streaming"
        if "vectors" in told:
            told["vectors"] = _count(self["vectors"], "vector")
        return WORDS[self.schedule].format(**told)

    @property
    def kind(self) -> tuple[object, ...]:
        """What it has in common with choices for rows of other lengths."""
        return self.schedule, *(
            (name, number > 0 if name in _BY_LENGTH else number) for name, number in self.settings
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def told(choice: Choice | None, offered: Mapping[Choice, Shape]) -> tuple[Choice | None, Shape | None]:
    """What a choice means, of what a schedule offers: itself, else what it would be for rows of this length; nothing
    where the region does not admit it."""
    if choice is None:
        return None, None
    found = choice if choice in offered else next((each for each in offered if each.kind == choice.kind), None)
    return (None, None) if found is None else (found, offered[found])


def parse_choice(text: str) -> Choice | None:
    """The choice that a text spells; None where it spells none of this release's."""
    try:
        raw = json.loads(text)
        choice = Choice.of(raw.pop("schedule"), **raw)
        words = WORDS[choice.schedule] if choice.words else ""
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    # Its words name all that it must set, and nothing else.
    right = all(f"{{{name}}}" in words and type(number) is int for name, number in choice.settings)
    return choice if right else None
