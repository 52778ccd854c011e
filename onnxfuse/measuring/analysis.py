"""Intervals carried forward through a graph."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from onnxfuse.graph import Value
from onnxfuse.measuring.interval_rules import rule
from onnxfuse.measuring.intervals import Facts, Interval, Step


class Analysis:
    """Intervals of values, given those of some (``sources``)."""

    def __init__(self, facts: Facts, sources: Mapping[Value, Interval]) -> None:
        self.facts, self._found = facts, dict[Value, Interval | None](sources)

    def of(self, value: Value) -> Interval | None:
        """Of one value; None where nothing is known."""
        waiting = [value]
        while waiting:
            here = waiting[-1]
            if here in self._found:
                waiting.pop()
                continue
            needs = self._needs(here)
            missing = [value for value in needs if value not in self._found]
            if missing:
                waiting += missing
                continue
            self._found[here] = self._computed(here)
            waiting.pop()
        return self._found[value]

    def _needs(self, value: Value) -> list[Value]:
        """What its interval follows from; an outer value in a body, operands elsewhere."""
        around = self.facts.around(value)
        if around is not None:
            return [around]
        node = value.producer
        if node is None or self.facts.known(value) is not None or rule(node) is None:
            return []
        return [operand for operand in node.inputs if operand is not None]

    def _computed(self, value: Value) -> Interval | None:
        around = self.facts.around(value)
        if around is not None:
            return self._found[around]
        known = self.facts.known(value)
        step = None if value.producer is None else rule(value.producer)
        if known is not None or step is None or value.producer is None:
            return known
        node = value.producer
        operands = [None if operand is None else self._found[operand] for operand in node.inputs]
        found = step(Step(node, operands, self.facts, value))
        return None if found is None or isnan(found.low) or isnan(found.high) else found
