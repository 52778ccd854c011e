"""Faults in the shape of a rule, keys and the types of what they hold, in words of ours."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from onnxfuse.errors import RuleError
from onnxfuse.rules import schema
from onnxfuse.rules.pattern import suggestion
from onnxfuse.rules.yamlfile import Document, Path_

# Messages for pydantic's kinds of error; {name} is the key.
_SHAPE_MESSAGES = {
    "string_type": "{name} must be a string.",
    "int_type": "{name} must be an integer.",
    "float_type": "{name} must be a number.",
    "list_type": "{name} must be a list.",
    "dict_type": "{name} must be a mapping.",
    "model_type": "{name} must be a mapping.",
    "greater_than": "{name} must be greater than 0.",
    "string_pattern_mismatch": "{name} must be lower-case words joined by dashes.",
    "too_short": "{name} has too few entries.",
    "too_long": "{name} has too many entries.",
}


def shape_error(document: Document, error: ValidationError, model: type[schema.RulePart]) -> RuleError:
    """The first fault that pydantic found in a rule, as one that shows the line and what mends it."""
    found = error.errors(include_url=False)
    # an unknown key first: where a required one is missing too, it is most often the same key misspelt
    chosen = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    path: Path_ = tuple(chosen["loc"])
    name = next((part for part in reversed(path) if isinstance(part, str) and part != "test"), "the rule")
    if chosen["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        close = suggestion(str(path[-1]), known)
        return document.error(
            path, f"Unknown key {path[-1]}.",
            f"Did you mean {close}?" if close else f"The keys here are {', '.join(known)}.", key=True,
        )
    if chosen["type"] == "missing":
        return document.error(path[:-1], f"The key {path[-1]} is missing.", f"Add {path[-1]}: ...", key=True)
    if name == "expect" and isinstance(chosen["input"], str):
        close = suggestion(chosen["input"], ["matched", "refused"])
        return document.error(
            path, f"An example expects matched, or {{refused: CODE}}, not {chosen['input']}.",
            {"matched": "Did you mean matched?", "refused": "Did you mean {refused: CODE}?"}.get(close or ""),
        )
    template = _SHAPE_MESSAGES.get(chosen["type"])
    message = template.format(name=name) if template else f"{name}: {chosen['msg']}."
    if chosen["type"] == "string_pattern_mismatch" and name == "entry":
        message = "entry must be the name of a function."
    return document.error(path, message, None)


def _known_keys(model: type[schema.Part], path: Path_) -> list[str]:
    current: Any = model
    nested = {
        "examples": schema.ExamplePart, "where": schema.ConditionPart, "expect": schema.Expectation,
        "kernel": schema.KernelPart, "edge": schema.EdgePart, "arguments": schema.ArgumentPart,
    }
    for part in path:
        current = nested.get(str(part), current)
    return [field.alias or name for name, field in current.model_fields.items()]
