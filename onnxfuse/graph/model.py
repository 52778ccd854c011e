"""The graph that every stage after loading looks at: nodes, values, and who uses what.

It is a view: the ONNX model that was loaded stays the truth, and the rewriting edits a copy of that.  Its nodes stand
in an order of their own (``graph.sequence``), whatever order the file has; a result's name leads back to the node of
the model.  A node of the canonical view stands for several originals.
Nothing here changes once built; stages that see the graph differently build another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from onnxfuse.graph.dims import Dim

Shape = tuple[Dim, ...]

Place = tuple[tuple[int, str], ...]
"""Where a graph is in the model: from the main graph, which is (), inwards the position of each node that owns a body
and the name of the attribute that holds it."""


@dataclass(frozen=True)
class Body:
    """A body of an If, a Loop or a Scan: what messages call it ("Loop_3/body"), and where it is in the model."""

    label: str
    place: Place


@dataclass(eq=False)
class Value:
    """A tensor of the graph.

    Attributes:
        name: its name in the model, unique in the graph.
        dtype: element type, a number of ``onnx.TensorProto.DataType``, or None where unknown.
        shape: its sizes, or None where even the rank is unknown.
        constant: contents known at optimise time (initialisers, Constant nodes), read on demand and only where
            small (``graph.constants.SMALL_ELEMENTS``); else None.
        is_constant: whether it is an initialiser or a Constant's output, however large.
        contents: reads a constant that is too large for ``constant``; None elsewhere.
        external: whether it is an initialiser whose contents lie in a file of their own.
        numbers: contents of a small float tensor that sizes are computed by; None where unknown.
        elements: contents of a small integer tensor as sizes (what a chain of Shape, Gather and Concat computes),
            in row-major order; None where unknown.
        producer: the node that computes it; None for graph inputs and initialisers.
        consumers: nodes that read it, each once, in graph order; includes nodes whose subgraphs capture it.
        is_input, is_output: whether it is an input or an output of the whole graph, or of the body that it is in.
        declared: the shape that the model file states (a hint: exporters may be wrong), or None.
        outer: in a body, the value of the graph around that is read by name; None for the body's own values.
        inner: values of bodies that are this one there: read by name, or handed in by the Loop or Scan.
    """

    name: str
    dtype: int | None = None
    shape: Shape | None = None
    constant: np.ndarray | None = None
    is_constant: bool = False
    elements: tuple[Dim, ...] | None = None
    numbers: np.ndarray | None = None
    producer: Node | None = None
    consumers: list[Node] = field(default_factory=list)
    is_input: bool = False
    is_output: bool = False
    declared: Shape | None = None
    outer: Value | None = None
    inner: list[Value] = field(default_factory=list)
    contents: Callable[[], np.ndarray] | None = None
    external: bool = False

    @property
    def rank(self) -> int | None:
        """Number of axes, or None where unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_local(self) -> bool:
        """Whether nobody outside of its graph knows it: neither who runs that nor a body."""
        return not self.is_output and not self.inner and not any(reader.has_subgraph for reader in self.consumers)

    def __repr__(self) -> str:
        shape = "?" if self.shape is None else ", ".join(map(str, self.shape))
        return f"<{self.name}: {self.dtype}[{shape}]>"


@dataclass(eq=False)
class Node:
    """An operation of the graph.

    Attributes:
        index: position among the graph's nodes, which stand in topological order.
        op: operator type; domain: its domain, "" for the standard one ("ai.onnx" is written "").
        attributes: decoded attributes by name: int, float, str, list, ``np.ndarray`` for tensors; subgraphs are
            left out (``has_subgraph`` tells).
        inputs: values read; None where an optional input is absent.
        outputs: values written; None where an optional output is not asked for.
        captures: values of this graph that its subgraphs (If, Loop, Scan) read by name.
        originals: the nodes of the model that it stands for; itself alone outside the canonical view.
        passed: nodes of the model through which it reads what it reads, as the canonical view leaves them out: each
            gives its operand back, and others may read the result too.
        dead: whether the canonical view knows that no output of the graph depends on it.
        rule: id of the canonical rule that made it, or None.
        body: the body that it is in; None in the main graph.
        broken: whether it breaks its operator's rules, as inference found: ONNX Runtime will say so.
    """

    index: int
    name: str
    op: str
    domain: str
    attributes: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    captures: tuple[Value, ...] = ()
    has_subgraph: bool = False
    originals: tuple[Node, ...] = ()
    passed: tuple[Node, ...] = ()
    dead: bool = False
    rule: str | None = None
    body: Body | None = None
    broken: bool = False

    def __post_init__(self) -> None:
        if not self.originals:
            self.originals = (self,)

    @property
    def qualified_op(self) -> str:
        """Operator type with its domain, as users write it: "Add", "com.microsoft.BiasGelu"."""
        return f"{self.domain}.{self.op}" if self.domain else self.op

    @property
    def label(self) -> str:
        """How messages call the node: its name, or its type and first output where it has none, after its body's."""
        first = next((value.name for value in self.outputs if value is not None), "?")
        name = self.name or f"{self.qualified_op} -> {first}"
        return name if self.body is None else f"{self.body.label}: {name}"

    @property
    def place(self) -> Place:
        """Where its graph is in the model."""
        return () if self.body is None else self.body.place

    @property
    def copied(self) -> tuple[Node, ...]:
        """The nodes of the model that a region which holds it holds: those that it stands for, and those between."""
        return (*self.passed, *self.originals)

    def reads(self) -> Iterable[Value]:
        """Every value that it depends on, each once, captures included."""
        return dict.fromkeys(value for value in (*self.inputs, *self.captures) if value is not None)

    def __repr__(self) -> str:
        return f"<{self.index} {self.qualified_op} {[v.name if v else '' for v in self.outputs]}>"


def root(value: Value) -> Value:
    """The value itself, looked at through Identity nodes."""
    while (
        not value.is_constant
        and value.producer is not None
        and value.producer.op == "Identity"
        and value.producer.domain == ""
        and value.producer.inputs
        and value.producer.inputs[0] is not None
    ):
        value = value.producer.inputs[0]
    return value


class Assumption(NamedTuple):
    """A size that was taken from the model file because the operators leave it open.

    Attributes:
        value: name of the value; axis: which of its axes.
        taken: the size that the file states.
        instead: the size that follows from the operators alone.
    """

    value: str
    axis: int
    taken: Dim
    instead: Dim


Ask = Literal["equal", "broadcast", "multiple", "within", "room"]


class Demand(NamedTuple):
    """What an operator asks of sizes, where they are not the same for all: it fails where they do not agree.

    Attributes:
        node: label of the node.
        left, right: the sizes.
        kind: "equal"; "broadcast", equal or one of them 1; "multiple", the left one a multiple of the right one;
            "within", the left one no more than the right one, of rows that are looked up, and "room", of others.
    """

    node: str
    left: Dim
    right: Dim
    kind: Ask


@dataclass(eq=False)
class Graph:
    """A model's main graph, or a body of an If, a Loop or a Scan.

    A body is a graph of its own: what it reads by name from the graphs around is among its values, with no producer,
    and ``Value.outer`` leads to where it is computed.

    Attributes:
        nodes: in topological order, that of ``graph.sequence``; ``nodes[i].index == i``.
        values: every value by name.
        inputs, outputs: of the graph, initialisers left out.
        opsets: version by domain ("" for the standard one).
        functions: (domain, name) of the model's own functions.
        assumptions: sizes taken from what the file states, where the operators leave them open.
        demands: what its operators ask of sizes, each once, the first node's.
        body: which body it is; None for the main graph.
        owner: the node of the graph around that runs it; None for the main graph.
        bodies: graphs of the bodies in it, those of one node beside one another, in the order of their nodes.
        first: of symbols that a body's carried values have of their own, the sizes before its first run.
        same: by symbol of the file's the one in its place, which it has to be equal to.
    """

    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opsets: Mapping[str, int]
    functions: frozenset[tuple[str, str]] = frozenset()
    assumptions: tuple[Assumption, ...] = ()
    demands: tuple[Demand, ...] = ()
    body: Body | None = None
    owner: Node | None = None
    bodies: tuple[Graph, ...] = ()
    first: Mapping[str, Dim] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Where it is in the model."""
        return () if self.body is None else self.body.place

    def walk(self) -> Iterator[Graph]:
        """The graph itself and every body in it, each before those inside it."""
        yield self
        for inner in self.bodies:
            yield from inner.walk()

    def part(self, body: Body | None) -> Graph:
        """The graph of a body, which another file of the same model may have at another place.

        Raises:
            KeyError: there is no body of that label.
        """
        if body is None:
            return self
        return self._parts[body.label]

    @cached_property
    def _parts(self) -> Mapping[str, Graph]:
        """The bodies by label, of several of one label the first."""
        return {found.body.label: found for found in reversed(list(self.walk())) if found.body is not None}

    @property
    def opset(self) -> int:
        """Version of the standard operator set."""
        return self.opsets.get("", 1)
