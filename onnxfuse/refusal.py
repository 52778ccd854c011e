"""Why something was not done, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A fusion that was not made.

    Attributes:
        code: short and stable, for tests and tools: "reduction-axis", "inner-value-used-outside".
        message: one sentence: what stood in the way, with the sizes, types and names at hand.
        node: label of the node where it stopped.
        rule: id of the rule that was tried, or "" where a stage below the rules refused.
        remedy: what would mend it, or "" where nothing can.
    """

    code: str
    message: str
    node: str = ""
    rule: str = ""
    remedy: str = ""
