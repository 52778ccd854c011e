"""The examples that rules carry, run: each must match, or be refused with the code that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
from google.protobuf.message import DecodeError, EncodeError

from onnxfuse.errors import OnnxfuseError, RuleError
from onnxfuse.graph import load_model
from onnxfuse.graph.model import Graph
from onnxfuse.operators import load_graph
from onnxfuse.refusal import Refusal
from onnxfuse.rules.canonical import canonicalise
from onnxfuse.rules.forbid import prohibitions
from onnxfuse.rules.growth import components
from onnxfuse.rules.kinds import (
    CanonicalRule,
    Example,
    ForbidRule,
    FuseRule,
    GrowRule,
    NameRule,
    PatternRule,
    Rule,
    RuleSet,
    RuntimeRule,
)
from onnxfuse.rules.matcher import match
from onnxfuse.rules.runtime import told
from onnxfuse.visible import visible

MAX_DEPTH = 40
"""Deepest nesting of brackets in an example's model: onnx's parser calls itself for each, and has no limit."""

Compute = Callable[[onnx.ModelProto, Rule, Example], str | None]
"""Computes an example's model fused and unfused and compares; a sentence where they differ, None where they agree."""


@dataclass(frozen=True)
class ExampleOutcome:
    """How one example went.  ``fault`` says what is wrong, None where all is well; ``refusals`` are what the rule
    said of the example."""

    rule: Rule
    example: Example
    fault: str | None
    refusals: tuple[Refusal, ...] = ()


def example_model(example: Example) -> onnx.ModelProto:
    """The example's model, checked.

    Raises:
        RuleError: it is no model.
    """
    if example.file:
        return _checked(load_model(example.file).proto, example)
    at = _too_deep(example.model)
    if at is not None:
        raise _wrong(example, f"it nests deeper than {MAX_DEPTH} brackets, at its line {at}", "No example needs that.")
    try:
        return _checked(onnx.parser.parse_model(_with_bits(example.model)), example)
    except Exception as error:  # besides its own, onnx's parser lets pass what C++ says of a number
        if isinstance(error, OnnxfuseError):
            raise
        raise _wrong(example, _message(error)) from error


def _checked(model: onnx.ModelProto, example: Example) -> onnx.ModelProto:
    try:
        onnx.checker.check_model(_standard_part(model))
    except (onnx.checker.ValidationError, DecodeError, EncodeError, RuntimeError, ValueError) as error:
        raise _wrong(example, _message(error)) from error
    return model


def _wrong(example: Example, what: str, remedy: str = "Check it with onnx.parser.parse_model.") -> RuleError:
    first = next((line for line in what.splitlines() if line.strip()), "")
    return RuleError(
        f"The model of the example {example.name!r} is wrong: {first.strip()}", place=example.place, remedy=remedy,
    )


_TEXT = re.compile(r'"(?:\\.|[^"\\])*"?|#[^\n]*|[({\[<]|=>|[)}\]>]', re.DOTALL)
"""Strings, comments and brackets of ONNX text; the arrow is none."""


def _too_deep(text: str) -> int | None:
    """The line where brackets nest deeper than is read; None where they nowhere do."""
    depth = 0
    for found in _TEXT.finditer(text):
        mark = found.group()
        depth += (mark in "({[<") - (mark in ")}]>" and depth > 0)
        if depth > MAX_DEPTH:
            return text.count("\n", 0, found.start()) + 1
    return None


def _message(error: Exception) -> str:
    """The error's text; onnx gives some of it as bytes."""
    text = error.args[0] if error.args else ""
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


_SHORT_FLOATS = re.compile(r"\b(float16|bfloat16)((?:\[\d+(?:\s*,\s*\d+)*\])?\s*\w+\s*=\s*)\{([^}]*)\}")


def _with_bits(text: str) -> str:
    """ONNX text with the numbers of float16 and bfloat16 constants as the bits that its parser wants."""

    def bits(found: re.Match[str]) -> str:
        dtype = np.dtype(np.float16) if found[1] == "float16" else np.dtype(ml_dtypes.bfloat16)
        numbers = [float(part) for part in found[3].split(",") if part.strip()]
        return f"{found[1]}{found[2]}{{{', '.join(str(b) for b in np.array(numbers, dtype).view(np.uint16))}}}"

    return _SHORT_FLOATS.sub(bits, text)


def _standard_part(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the import of com.microsoft where it uses none of it, which the checker does not know."""
    if any(node.domain for node in model.graph.node):
        return model
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.opset_import[:]
    bare.opset_import.extend(entry for entry in model.opset_import if not entry.domain)
    return bare


def check_examples(
    rules: RuleSet, only: Iterable[str] | None = None, compute: Compute | None = None
) -> list[ExampleOutcome]:
    """Run the examples of the rules, or of those named in ``only``.

    Fuse, grow, forbid and name rules see the canonical view that the canonical rules of the set make, runtime rules the
    model as it is.  Where ``compute`` is given, an example that matches is computed as well.
    """
    chosen = None if only is None else set(only)
    outcomes = []
    for rule in rules.all:
        if chosen is not None and rule.id not in chosen:
            continue
        for example in rule.examples:
            outcomes.append(_run(rule, example, rules, compute))
    return outcomes


def _run(rule: Rule, example: Example, rules: RuleSet, compute: Compute | None) -> ExampleOutcome:
    try:
        model = example_model(example)
        matched, refusals = _try(rule, load_graph(model), rules)
    except OnnxfuseError as error:
        return ExampleOutcome(rule, example, str(error))
    codes = sorted({refusal.code for refusal in refusals})
    if example.refused is None:
        if not matched:
            said = "; ".join(f"{refusal.code}: {refusal.message}" for refusal in refusals) or "nothing came near"
            return ExampleOutcome(rule, example, visible(f"It does not match ({said})."), refusals)
        fault = compute(model, rule, example) if compute else None
        return ExampleOutcome(rule, example, None if fault is None else visible(fault), refusals)
    if matched:
        return ExampleOutcome(rule, example, f"It matches; expected a refusal with {example.refused}.", refusals)
    if example.refused not in codes:
        said = visible(", ".join(codes)) or "nothing"
        return ExampleOutcome(rule, example, f"It was refused with {said}; expected {example.refused}.", refusals)
    return ExampleOutcome(rule, example, None, refusals)


def _try(rule: Rule, graph: Graph, rules: RuleSet) -> tuple[bool, tuple[Refusal, ...]]:
    """Whether the rule matches, or applies, somewhere in the graph, and what it said otherwise."""
    if isinstance(rule, CanonicalRule):
        view = canonicalise(graph, rules.canonical, tell_all=True)
        refusals = tuple(refusal for refusal in view.refusals if refusal.rule == rule.id)
        return any(node.rule == rule.id for node in view.made), refusals
    if isinstance(rule, RuntimeRule):
        return told(rule, graph, rules.runtime)
    view = canonicalise(graph, rules.canonical)
    if isinstance(rule, GrowRule):
        found, refusals = components(rule, view.graph)
        return bool(found), refusals
    if isinstance(rule, ForbidRule):
        return _try_forbid(rule, view.graph, rules)
    assert isinstance(rule, FuseRule | NameRule)
    result = match(rule, view.graph, forbidden={} if isinstance(rule, NameRule) else rules.conditions)
    return bool(result.matches), result.near_misses


def _try_forbid(rule: ForbidRule, graph: Graph, rules: RuleSet) -> tuple[bool, tuple[Refusal, ...]]:
    """A forbid rule "matches" where what it forbids is not there, and refuses with its id where it is."""
    alone = RuleSet(forbid=(rule,))
    if rule.condition is not None:
        for other in rules.fuse:
            result = match(other, graph, forbidden={rule.condition: rule})
            found = tuple(miss for miss in result.near_misses if miss.code == rule.condition)
            if found:
                return False, found
        return True, ()
    said = prohibitions(graph, alone)
    if rule.edge is not None:
        refusal = said.refuses(graph.nodes)
        return refusal is None, () if refusal is None else (refusal,)
    assert isinstance(rule, PatternRule)
    if not said.found:
        return True, ()
    prohibition = said.found[0]
    refusal = said.refuses(prohibition.leave[:1] if prohibition.leave else prohibition.nodes)
    return refusal is None, () if refusal is None else (refusal,)
