"""How a schedule runs a region, as a value: what tuning tries, and what a measurement is kept under."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Shape = TypeVar("Shape")

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
    def kind(self) -> tuple[object, ...]:
        """What it has in common with choices for rows of other lengths."""
        return self.schedule, *(
            (name, (number > 0) - (number < 0) if name in _BY_LENGTH else number) for name, number in self.settings
        )


def told(choice: Choice | None, offered: Mapping[Choice, Shape]) -> tuple[Choice | None, Shape | None]:
    """What a choice means, of what a schedule offers: itself, else what it would be for rows of this length; nothing
    where the region does not admit it."""
    if choice is None:
        return None, None
    found = choice if choice in offered else next((each for each in offered if each.kind == choice.kind), None)
    return (None, None) if found is None else (found, offered[found])
