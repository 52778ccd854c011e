"""How a schedule runs a region, as a value: what tuning tries, and what a measurement is kept under."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Choice:
    """A way to run a region.

    Attributes:
        schedule: id of the schedule that it is for.
        threads: that share a row; in a pointwise kernel, of a block.
        width: elements of a vector.
        items: vectors that a thread keeps of its row, 0 where it streams; in a pointwise kernel, vectors a thread.
        block: threads of a block.
    """

    schedule: str
    threads: int
    width: int
    items: int
    block: int

    @property
    def name(self) -> str:
        """A kernel's name for it."""
        kind = f"x{self.items}" if self.items else "stream"
        return f"{self.schedule}_{self.threads}_w{self.width}_{kind}_b{self.block}"

    def __str__(self) -> str:
        """As text; ``parse_choice`` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def words(self) -> str:
        """For people: "32 threads a row, width 8, 4 vectors, blocks of 128"."""
        each = "streaming" if not self.items else f"{self.items} vector{'s' * (self.items > 1)}"
        if self.schedule == "pointwise":
            return f"blocks of {self.block}, width {self.width}, {each} a thread"
        return f"{self.threads} threads a row, width {self.width}, {each}, blocks of {self.block}"


def parse_choice(text: str) -> Choice | None:
    """The choice that a text spells; None where it spells none of this release's."""
    try:
        raw = json.loads(text)
        choice = Choice(**raw)
    except (ValueError, TypeError):
        return None
    numbers = (choice.threads, choice.width, choice.items, choice.block)
    return choice if isinstance(choice.schedule, str) and all(type(number) is int for number in numbers) else None
