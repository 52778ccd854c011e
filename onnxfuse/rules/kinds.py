"""The six kinds of rules, as the stages after loading read them.  All frozen.

    Rule
    ├── PatternRule              has a pattern and conditions
    │   ├── CanonicalRule        many spellings become one node of the internal view
    │   ├── FuseRule             the matched nodes become one fused node
    │   ├── RuntimeRule          what ONNX Runtime makes one node of by itself
    │   ├── NameRule             what a computation around products is called
    │   └── ForbidRule           what must not be joined (by pattern, edge or condition)
    └── GrowRule                 classes of operators that may join
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxfuse.errors import Place
from onnxfuse.rules.conditions import Condition
from onnxfuse.rules.operators import OperatorKey
from onnxfuse.rules.pattern import CompiledPattern
from onnxfuse.rules.syntax import Tree


@dataclass(frozen=True)
class Example:
    """A model that the rule must match, or refuse with ``refused`` as the code.

    Attributes:
        model: ONNX text, or "" where ``file`` names a model.
        dims: sizes for symbols when the example is computed; inputs: (low, high) of random inputs by name.
        place: where in the rule file it stands.
    """

    name: str
    refused: str | None
    place: Place
    model: str = ""
    file: Path | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """What every rule has."""

    id: str
    summary: str
    why: str
    place: Place
    examples: tuple[Example, ...]
    quiet: bool
    """Whether its near misses are too common to be worth telling."""

    @property
    def kind(self) -> str:
        """canonical, fuse, runtime, name, grow or forbid."""
        return type(self).__name__.removesuffix("Rule").lower()


@dataclass(frozen=True)
class PatternRule(Rule):
    pattern: CompiledPattern | None
    pattern_text: str
    where: tuple[Condition, ...]


@dataclass(frozen=True)
class Becomes:
    """The node that takes the pattern's place: its operator, names of its inputs (None where absent), and its
    attributes as expressions over what the pattern bound."""

    domain: str
    op: str
    inputs: tuple[str | None, ...]
    attributes: tuple[tuple[str, Tree], ...]


@dataclass(frozen=True)
class CanonicalRule(PatternRule):
    becomes: Becomes


@dataclass(frozen=True)
class RuntimeRule(PatternRule):
    """``level``: of ONNX Runtime's optimisations.  ``core``: name of the value whose node takes in as many of the
    others as there are; None where it takes all of them or none."""

    becomes: Becomes
    level: str
    core: str | None


@dataclass(frozen=True)
class NameRule(PatternRule):
    """The pattern of a computation that reports call by the rule's id, whatever fuses which of its nodes."""


@dataclass(frozen=True)
class Kernel:
    """A user's own kernel for a fused region.

    Attributes:
        file: the CUDA source; source: its text; entry: name of the ``extern "C" __global__`` function.
        inputs, outputs: names of the pattern, in the order of the kernel's arguments.
        arguments: further integer arguments as (type, expression): i32 or i64.
        grid, block: three sizes each; shared: bytes of dynamic shared memory.  All are expressions over
            ``dim(x, axis)``, ``size(x)``, ``ceil(a, b)``, integers and + - * // % (``kernels.postfix`` translates).
    """

    file: Path
    source: str
    entry: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[tuple[str, Tree], ...]
    grid: tuple[Tree, Tree, Tree]
    block: tuple[Tree, Tree, Tree]
    shared: Tree


@dataclass(frozen=True)
class Growth:
    """How a region may grow: for ``before`` (all inputs), ``after`` (all results) or a name of the pattern, the
    operators that may join on that edge."""

    edges: Mapping[str, frozenset[OperatorKey]] = field(default_factory=dict)


@dataclass(frozen=True)
class FuseRule(PatternRule):
    growth: Growth
    kernel: Kernel | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class GrowRule(Rule):
    """``classes`` are the names in the rule; ``operators`` what they stand for.  Limits are None where not set."""

    classes: tuple[str, ...]
    operators: frozenset[OperatorKey]
    max_nodes: int | None = None
    max_inputs: int | None = None
    max_outputs: int | None = None


@dataclass(frozen=True)
class ForbidRule(PatternRule):
    """What must not be joined; exactly one of ``pattern``, ``edge`` and ``condition`` is set.

    Attributes:
        reason: shown to the user.
        edge: operators of a node, and of one that it feeds (directly or not), that no region may hold together.
        condition: a refusal code of the engine: a pattern whose match fails for it is refused while the rule stands.
        leave: names of the pattern whose nodes are left to the runtime: no region takes them from the rest of
            the pattern.  Where empty, no region holds all of the pattern's nodes.
        unless_made: inputs of the pattern: a region that computes all of them takes what is left all the same.
    """

    reason: str
    edge: tuple[frozenset[OperatorKey], frozenset[OperatorKey]] | None = None
    condition: str | None = None
    leave: tuple[str, ...] = ()
    unless_made: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleSet:
    """All rules in force, each kind in the order of loading.  ``disabled`` are the ids left out."""

    canonical: tuple[CanonicalRule, ...] = ()
    fuse: tuple[FuseRule, ...] = ()
    grow: tuple[GrowRule, ...] = ()
    forbid: tuple[ForbidRule, ...] = ()
    runtime: tuple[RuntimeRule, ...] = ()
    name: tuple[NameRule, ...] = ()
    disabled: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Rule, ...]:
        return (*self.canonical, *self.fuse, *self.grow, *self.forbid, *self.runtime, *self.name)

    @property
    def by_id(self) -> Mapping[str, Rule]:
        return {rule.id: rule for rule in self.all}

    @property
    def conditions(self) -> Mapping[str, ForbidRule]:
        """Rules that forbid by condition, by its code."""
        return {rule.condition: rule for rule in self.forbid if rule.condition is not None}


def attribute_value(value: Any) -> Any:
    """A keyword's value as a node's attribute holds it: tuples and arrays become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value
