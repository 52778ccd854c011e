"""From rule files to rules: every fault is a ``RuleError`` that shows the file, the line and what mends it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onnxfuse.bounded import read_bytes
from onnxfuse.errors import RuleError
from onnxfuse.operators import OPERATORS, OperatorClass
from onnxfuse.rules import conditions, cuda, kernels, schema, syntax, yamlfile
from onnxfuse.rules.attempt import ESCAPE_CODES
from onnxfuse.rules.classes import CLASSES
from onnxfuse.rules.compiler import FUNCTIONS, compile_pattern
from onnxfuse.rules.conditions import Condition
from onnxfuse.rules.kinds import (
    Becomes,
    CanonicalRule,
    Example,
    ForbidRule,
    FuseRule,
    GrowRule,
    Growth,
    Kernel,
    NameRule,
    Rule,
    RuleSet,
    RuntimeRule,
)
from onnxfuse.rules.operators import OperatorKey, operator_key, operator_names
from onnxfuse.rules.pattern import CompiledPattern, suggestion
from onnxfuse.rules.shapes import shape_error
from onnxfuse.rules.syntax import Call, Name, TextError
from onnxfuse.rules.yamlfile import Document, Path_
from onnxfuse.wording import option

STAGES = frozenset({
    "attention", "biases", "constants", "depthwise", "dequantised", "horizontal-joins", "layouts", "products",
    "recompute", "shape-arithmetic"})
"""Ids of stages without rules of their own that can be disabled as a rule can."""

MAX_SOURCE = 1_000_000
"""Bytes of the largest kernel file."""

MOST_KEPT = 100
"""Files whose rules are kept from one load to the next."""

_KEPT: dict[tuple[Path, str], tuple[Rule, ...]] = {}
"""The rules, which nothing changes, of files by path and text."""

_Common = dict[str, Any]
"""What every rule has, as keywords of its class."""


def load_rules(paths: Iterable[str | Path], disable: Iterable[str] = ()) -> RuleSet:
    """Read rule files.

    Args:
        paths: files, or folders whose ``*.yaml`` files are read in order of their names.
        disable: ids of rules, and of stages, to leave out.

    Raises:
        RuleError: a file, or one of its rules, is wrong; an id is not unique, or to be disabled and unknown.
    """
    rules: dict[str, Rule] = {}
    warnings: list[str] = []
    for path in paths:
        for file in yamlfile.rule_files(Path(path)):
            for rule in _rules(file):
                if rule.id in rules:
                    raise RuleError(
                        f"There are two rules called {rule.id}.", place=rule.place,
                        remedy=f"Rename one; the other is in {rules[rule.id].place.file}:{rules[rule.id].place.line}.",
                    )
                rules[rule.id] = rule
                if not any(example.refused is None for example in rule.examples):
                    warnings.append(f"The rule {rule.id} has no example that matches.\n{rule.place}")
                if not any(example.refused is not None for example in rule.examples):
                    warnings.append(f"The rule {rule.id} has no example that is refused.\n{rule.place}")
    disabled = frozenset(disable)
    for name in sorted(disabled - rules.keys() - STAGES):
        close = suggestion(name, [*rules, *STAGES])
        raise RuleError(
            f"No rule is called {name}.", place=option("disable", name),
            remedy=f"Did you mean {close}?" if close else "`onnxfuse rules list` shows them all.", usage=True,
        )
    kept = [rule for rule in rules.values() if rule.id not in disabled]
    return RuleSet(
        tuple(rule for rule in kept if isinstance(rule, CanonicalRule)),
        tuple(rule for rule in kept if isinstance(rule, FuseRule)),
        tuple(rule for rule in kept if isinstance(rule, GrowRule)),
        tuple(rule for rule in kept if isinstance(rule, ForbidRule)),
        tuple(rule for rule in kept if isinstance(rule, RuntimeRule)),
        tuple(rule for rule in kept if isinstance(rule, NameRule)),
        disabled,
        tuple(warnings),
    )


def _rules(file: Path) -> Iterator[Rule]:
    """The rules of a file, kept from the last time where its text is the same and all that they are made of: the text
    takes a hundred times as long to understand as to read, and who fuses many models reads the same rules each time.

    Raises:
        RuleError: the file, or one of its rules, is wrong.
    """
    name = (file, yamlfile.read_text(file))
    kept = _KEPT.get(name)
    if kept is not None:
        yield from kept
        return
    found = []
    for document in yamlfile.documents(*name):
        found.append(_rule(document))
        yield found[-1]
    if not any(_reads_files(rule) for rule in found):
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        _KEPT[name] = tuple(found)


def _reads_files(rule: Rule) -> bool:
    """Whether a rule is made of more than its own file's text."""
    return any(example.file is not None for example in rule.examples) or (
        isinstance(rule, FuseRule) and rule.kernel is not None)


def _rule(document: Document) -> Rule:
    data = document.data
    if not isinstance(data, dict):
        raise document.error((), "A rule is a mapping with the keys id, kind, summary, why and so on.",
                             "Separate the rules of a file by lines of three dashes (---).")
    kind = data.get("kind")
    if "kind" not in data:
        close = next((key for key in data if key != "id" and suggestion(key, ["kind"])), None)
        if close is not None:
            raise document.error((close,), f"Unknown key {close}.", "Did you mean kind?", key=True)
        raise document.error((), "The key kind is missing.", f"It is one of {', '.join(schema.KINDS)}.")
    if not isinstance(kind, str) or kind not in schema.KINDS:
        close = suggestion(str(kind), schema.KINDS)
        raise document.error(
            ("kind",), f"Unknown kind {kind}.",
            f"Did you mean {close}?" if close else f"It is one of {', '.join(schema.KINDS)}.",
        )
    try:
        part = schema.KINDS[kind].model_validate(data)
    except ValidationError as error:
        raise shape_error(document, error, schema.KINDS[kind]) from None
    common: _Common = {
        "id": part.id, "summary": part.summary.strip(), "why": part.why.strip(), "place": document.place(("id",)),
        "examples": _examples(document, part), "quiet": part.quiet,
    }
    if isinstance(part, schema.RuntimePart):
        return _runtime(document, part, common)
    if isinstance(part, schema.CanonicalPart):
        return CanonicalRule(**common, **_made(document, part))
    if isinstance(part, schema.NamePart):
        return NameRule(**common, **_matched(document, part))
    if isinstance(part, schema.FusePart):
        return _fuse(document, part, common)
    if isinstance(part, schema.GrowPart):
        operators = _operators(document, ("operators",), part.operators)
        limits: _Common = {"max_nodes": part.max_nodes, "max_inputs": part.max_inputs, "max_outputs": part.max_outputs}
        return GrowRule(**common, classes=tuple(part.operators), operators=operators, **limits)
    assert isinstance(part, schema.ForbidPart)
    return _forbid(document, part, common)


def _examples(document: Document, part: schema.RulePart) -> tuple[Example, ...]:
    examples = []
    for number, example in enumerate(part.examples):
        path: Path_ = ("examples", number)
        if (example.model is None) == (example.file is None):
            raise document.error(path, "An example has either a model or a file.", "Add model: | and ONNX text.")
        if (example.expect.matched is None) == (example.expect.refused is None):
            raise document.error(
                (*path, "expect"), "An example expects matched, or {refused: CODE}.", "Write expect: matched"
            )
        file = None
        if example.file is not None:
            file = _inside(document, (*path, "file"), example.file)
        model = example.model or ""
        if model and not model.lstrip().startswith("<"):
            model = f'<ir_version: 8, opset_import: ["" : {example.opset}, "com.microsoft" : 1]>\n{model}'
        inputs = {name: (float(low), float(high)) for name, (low, high) in example.inputs.items()}
        examples.append(
            Example(example.name, example.expect.refused, document.place(path), model, file, example.dims, inputs)
        )
    return tuple(examples)


def _inside(document: Document, path: Path_, name: str) -> Path:
    """A file named by a rule, which must lie in the rule file's folder."""
    try:
        folder = Path(os.path.realpath(document.file)).parent
        file = Path(os.path.realpath(folder / name))
    except ValueError:  # a NUL
        raise document.error(path, f"{name} can be no file's name.", "Check the name.") from None
    if not file.is_relative_to(folder):
        raise document.error(path, f"{name} is outside the rule's folder.", "Put the file beside the rule file.")
    if not os.path.isfile(file):
        raise document.error(path, f"There is no file {name} beside the rule file.", "Check the name.")
    return file


def _operators(document: Document, path: Path_, names: Sequence[str]) -> frozenset[OperatorKey]:
    """Operators by class or by name."""
    found: set[OperatorKey] = set()
    for number, name in enumerate(names):
        key = operator_key(name)
        if name in CLASSES:
            found |= CLASSES[name]
        elif key is not None:
            found.add(key)
        else:
            close = suggestion(name, [*CLASSES, *operator_names()])
            raise document.error(
                (*path, number), f"Unknown operator or class {name}.",
                f"Did you mean {close}?" if close else f"The classes are {', '.join(CLASSES)}.",
            )
    return frozenset(found)


def _pattern(
    document: Document, text: str, results: Sequence[str] | None, sets: Mapping[str, Sequence[str]]
) -> CompiledPattern:
    known = {name: operators for name, operators in CLASSES.items() if name not in FUNCTIONS}
    for name, operators in sets.items():
        if not name.isidentifier() or name in FUNCTIONS or operator_key(name) is not None:
            raise document.error(("sets", name), f"A set cannot be called {name}.", "Choose another name.", key=True)
        known[name] = _operators(document, ("sets", name), operators)
    chosen = None
    if results is not None:
        chosen = [Name(name.rstrip("?"), 0, len(name), name.endswith("?")) for name in results]
        if not chosen:
            raise document.error(("results",), "A pattern has at least one result.", "Leave the key out.")
    try:
        statements = syntax.parse_pattern(text)
        if chosen is not None:
            assigned = {target.name for statement in statements for target in statement.targets}
            for number, result in enumerate(chosen):
                if result.name not in assigned:
                    close = suggestion(result.name, assigned)
                    raise document.error(
                        ("results", number), f"The result {result.name} is assigned by no line of the pattern.",
                        f"Did you mean {close}?" if close else f"Choose among {', '.join(sorted(assigned))}.",
                    )
        return compile_pattern(statements, chosen, known)
    except TextError as error:
        raise document.text_error(("pattern",), error) from None


def _conditions(
    document: Document, parts: Sequence[schema.ConditionPart], pattern: CompiledPattern
) -> tuple[Condition, ...]:
    found = []
    for number, part in enumerate(parts):
        path: Path_ = ("where", number)
        path = (*path, "test") if (*path, "test") in document.values else path
        try:
            tree = syntax.parse_condition(part.test)
            conditions.verify(tree, pattern.names)
        except TextError as error:
            if "never closed" in error.message:  # in a list between brackets YAML ends an entry at a comma
                error.remedy = "Put quotes around a condition that holds a comma, or give it a line of its own."
            raise document.text_error(path, error) from None
        found.append(Condition(part.test, tree, part.code or "", part.message or "", part.remedy or ""))
    return tuple(found)


def _matched(document: Document, part: schema.CanonicalPart | schema.FusePart | schema.NamePart) -> _Common:
    """A pattern and its conditions, as keywords."""
    pattern = _pattern(document, part.pattern, part.results, part.sets)
    return {"pattern": pattern, "pattern_text": part.pattern, "where": _conditions(document, part.where, pattern)}


def _made(document: Document, part: schema.CanonicalPart) -> _Common:
    """A pattern and what it becomes, as keywords."""
    matched = _matched(document, part)
    pattern: CompiledPattern = matched["pattern"]
    if pattern.optional_results and not isinstance(part, schema.RuntimePart):
        raise document.error(("results",), "A canonical rule has no optional results.", "Remove the question mark.")
    offset = len("y = ")
    try:
        statements = syntax.parse_pattern("y = " + part.becomes)
        becomes = _becomes(statements[0].expression, pattern)
        if len(statements) != 1:
            raise TextError("becomes holds one node.", offset, offset + len(part.becomes))
    except TextError as error:
        raise document.text_error(("becomes",), error, offset) from None
    return matched | {"becomes": becomes}


def _assigned(document: Document, path: Path_, name: str, pattern: CompiledPattern) -> None:
    """Check that a line of a pattern assigns a name.

    Raises:
        RuleError: none does.
    """
    if name not in pattern.names or name in pattern.inputs:
        close = suggestion(name, pattern.names - set(pattern.inputs))
        raise document.error(
            path, f"No line of the pattern assigns {name}.", f"Did you mean {close}?" if close else None
        )


def _runtime(document: Document, part: schema.RuntimePart, common: _Common) -> RuntimeRule:
    made = _made(document, part)
    pattern: CompiledPattern = made["pattern"]
    if part.core is not None:
        _assigned(document, ("core",), part.core, pattern)
    if pattern.optional_results.issuperset(pattern.results):
        raise document.error(("results",), "What the runtime makes has a result that is not optional.",
                             "Remove a question mark.")
    return RuntimeRule(**common, **made, level=part.level, core=part.core)


def _becomes(tree: syntax.Tree, pattern: CompiledPattern) -> Becomes:
    if not isinstance(tree, Call) or tree.infix or tree.rest:
        raise TextError("becomes holds one operator.", tree.start, tree.end, "Write becomes: Gelu(x)")
    key = operator_key(tree.name)
    if key is None:
        close = suggestion(tree.name, operator_names())
        raise TextError(
            f"Unknown operator {tree.name}.", tree.start, tree.start + len(tree.name),
            f"Did you mean {close}?" if close else None,
        )
    inputs: list[str | None] = []
    for argument in tree.arguments:
        if not isinstance(argument, Name):
            raise TextError("The inputs of becomes are names of the pattern.", argument.start, argument.end)
        conditions.verify(argument, pattern.names)
        inputs.append(argument.name)
    for _, value in tree.keywords:
        conditions.verify(value, pattern.names)
    return Becomes(*key, tuple(inputs), tree.keywords)


def _fuse(document: Document, part: schema.FusePart, common: _Common) -> FuseRule:
    matched = _matched(document, part)
    pattern: CompiledPattern = matched["pattern"]
    edges = {}
    for name, operators in part.grow.items():
        if name not in ("before", "after") and name not in pattern.inputs and name not in pattern.results:
            choices = ["before", "after", *pattern.inputs, *pattern.results]
            close = suggestion(name, choices)
            raise document.error(
                ("grow", name), f"The region cannot grow on {name}.",
                f"Did you mean {close}?" if close else f"It grows on {', '.join(choices)}.", key=True,
            )
        edges[name] = _operators(document, ("grow", name), operators)
    if part.kernel is None:
        _check_light(document, part.pattern)
    kernel = _kernel(document, part.kernel, pattern) if part.kernel is not None else None
    return FuseRule(**common, **matched, growth=Growth(edges), kernel=kernel, schedule=part.schedule)


def _check_light(document: Document, text: str) -> None:
    """Refuse products in a pattern for which onnxfuse is to make the kernel; two may be attention, which has one."""
    heavy = []
    for call in (call for each in syntax.parse_pattern(text) for call in syntax.calls(each.expression)):
        found = OPERATORS.get(operator_key(call.name) or ("", ""))
        if found is not None and found.kind is OperatorClass.HEAVY:
            heavy.append(call)
    if heavy and [call.name for call in heavy] != ["MatMul", "MatMul"]:
        first = heavy[0]
        error = TextError(
            f"onnxfuse makes no kernel that holds {first.name}.", first.start, first.start + len(first.name),
            "Leave it out of the pattern, as an input, or give the rule a kernel of its own (kernel: ...).")
        raise document.text_error(("pattern",), error)


def _kernel(document: Document, part: schema.KernelPart, pattern: CompiledPattern) -> Kernel:
    file = _inside(document, ("kernel", "file"), part.file)
    source = _source(document, part, file)
    _check_operands(document, part, pattern)
    fault = cuda.fault(source, part.entry, len(part.inputs) + len(part.outputs), len(part.arguments))
    if fault is not None:
        raise document.error(
            ("kernel", "entry"), f"{part.file} {fault}.",
            f'Declare extern "C" __global__ void {part.entry}(...) in it, with a pointer for each input and output, in '
            "this order, and then the arguments.",
        )
    names = (*part.inputs, *part.outputs)

    def size(path: Path_, text: str) -> syntax.Tree:
        try:
            return kernels.parse_size(text, names)
        except TextError as error:
            raise document.text_error(path, error) from None

    def three(key: str, texts: Sequence[str]) -> tuple[syntax.Tree, syntax.Tree, syntax.Tree]:
        paths = [("kernel", key, n) if ("kernel", key, n) in document.values else ("kernel", key) for n in range(3)]
        x, y, z = (size(path, text) for path, text in zip(paths, [*texts, "1", "1"][:3], strict=True))
        _check_limits(document, key, (x, y, z))
        return x, y, z

    shared = size(("kernel", "shared"), part.shared)
    _check_limits(document, "shared", (shared,))
    return Kernel(
        file, source, part.entry, tuple(part.inputs), tuple(part.outputs),
        tuple(
            (argument.kind, size(("kernel", "arguments", number, argument.kind), argument.size))
            for number, argument in enumerate(part.arguments)
        ),
        three("grid", part.grid), three("block", part.block), shared,
    )


def _check_limits(document: Document, key: str, trees: Sequence[syntax.Tree]) -> None:
    try:
        kernels.check_limits(key, trees)
    except TextError as error:
        raise document.text_error(("kernel", key), error) from None


def _source(document: Document, part: schema.KernelPart, file: Path) -> str:
    try:
        return read_bytes(file, MAX_SOURCE).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError as error:
        raise document.error(("kernel", "file"), f"{part.file} cannot be read: {error.strerror}.", "Check the file."
                             ) from error


def _check_operands(document: Document, part: schema.KernelPart, pattern: CompiledPattern) -> None:
    """Check that a kernel reads inputs of the pattern and writes its results, all of them.

    Raises:
        RuleError: it does not.
    """
    for key, chosen, allowed in (
        ("inputs", part.inputs, pattern.inputs), ("outputs", part.outputs, pattern.results)
    ):
        for number, name in enumerate(chosen):
            if name not in allowed:
                close = suggestion(name, allowed)
                raise document.error(
                    ("kernel", key, number), f"{name} is none of the pattern's {key}.",
                    f"Did you mean {close}?" if close else f"They are {', '.join(allowed)}.",
                )
    for name in pattern.results:
        if name not in part.outputs:
            raise document.error(
                ("kernel", "outputs"), f"The kernel does not write the result {name}.", f"Add {name} to its outputs."
            )


def _forbid(document: Document, part: schema.ForbidPart, common: _Common) -> ForbidRule:
    chosen = [key for key in ("pattern", "edge", "condition") if getattr(part, key) is not None]
    if len(chosen) != 1:
        raise document.error(
            (), "A forbid rule has one of pattern, edge and condition.", f"It has {', '.join(chosen) or 'none'}."
        )
    reason = part.reason.strip()
    if part.pattern is not None:
        return _forbid_pattern(document, part, part.pattern, {**common, "reason": reason})
    for key in ("where", "leave", "unless_made", "sets"):
        if getattr(part, key):
            raise document.error((key,), f"{key} needs a pattern.", "Remove it, or write a pattern.", key=True)
    empty: _Common = {**common, "pattern": None, "pattern_text": "", "where": (), "reason": reason}
    if part.edge is not None:
        edge = (
            _operators(document, ("edge", "from"), part.edge.from_), _operators(document, ("edge", "to"), part.edge.to)
        )
        return ForbidRule(**empty, edge=edge)
    if part.condition not in ESCAPE_CODES:
        close = suggestion(str(part.condition), ESCAPE_CODES)
        raise document.error(
            ("condition",), f"Unknown condition {part.condition}.",
            f"Did you mean {close}?" if close else f"There are {', '.join(ESCAPE_CODES)}.",
        )
    return ForbidRule(**empty, condition=part.condition)


def _forbid_pattern(document: Document, part: schema.ForbidPart, text: str, common: _Common) -> ForbidRule:
    """A rule that forbids to fuse what a pattern matches; ``common`` has its reason too."""
    pattern = _pattern(document, text, None, part.sets)
    where = _conditions(document, part.where, pattern)
    path: Path_
    for number, name in enumerate(part.leave):
        path = ("leave", number)
        _assigned(document, path if path in document.values else ("leave",), name, pattern)
    if part.unless_made and not part.leave:
        raise document.error(("unless_made",), "unless_made needs leave.", "Say what is left otherwise.", key=True)
    for number, name in enumerate(part.unless_made):
        if name not in pattern.inputs:
            close = suggestion(name, pattern.inputs)
            path = ("unless_made", number)
            raise document.error(
                path if path in document.values else ("unless_made",),
                f"{name} is no input of the pattern.", f"Did you mean {close}?" if close else None
            )
    return ForbidRule(
        **common, pattern=pattern, pattern_text=text, where=where, leave=tuple(part.leave),
        unless_made=tuple(part.unless_made),
    )
