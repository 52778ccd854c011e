"""Bytes through device memory, kernels and arithmetic of one run.

The definition, which docs/bytes.md gives in full: each node that launches a kernel reads each distinct input tensor
once and writes each output once; a tensor is its number of elements times the size of its type, so a broadcast operand
counts at its own size.  Gather, GatherElements, GatherND, Slice and Split read of their data as many bytes as they
write, and no more than the whole.  Constant folding, views and shape arithmetic on the host (``placement``) cost
nothing.  What an If, a Loop or a Scan costs is what its bodies hold, as often as they run (``executions``); a Loop also
copies the results that it stacks.  Another node with subgraphs is one kernel that reads its inputs and captures and
writes its outputs.

A fused node reads of each tensor what the nodes of its body read of it together, looking through views, and no more
than the whole; it writes each output once.  That is what a kernel that keeps its rows on chip does: one that passes
over long rows more than once reads more, and the count leaves that to the cost model and the measurement.  Scratch
that a launch plan asks for counts twice: written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import Sizes, bytes_of
from onnxfuse.lowering.launch import LaunchPlan, Situation, Variant
from onnxfuse.operators import flops_of
from onnxfuse.planning.costs.executions import runs_of
from onnxfuse.planning.costs.placement import Kind, Placement, place
from onnxfuse.provider.removed import given_back, same_memory, source
from onnxfuse.region import Region

PARTIAL = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split"})
"""Operators that read only what they write of their first input."""


@dataclass(frozen=True)
class KernelTraffic:
    """One node, or one fused region: bytes read of each input, bytes written of each output, arithmetic.

    ``scratch`` are bytes that pass through scratch memory; ``kernels`` is 0 where nothing is launched; ``unknown``
    names tensors whose size is not known: they count 0.
    """

    product: bool
    reads: Mapping[Value, int]
    writes: Mapping[Value, int]
    flops: int
    kernels: int = 1
    scratch: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values()) + self.scratch


@dataclass(frozen=True)
class Traffic:
    """One run of a graph.

    Attributes:
        kernels: kernels launched.
        bytes_products: bytes through device memory in matrix products and convolutions; bytes_other: in all else.
        flops: floating-point operations, as ``operators.arithmetic`` counts them.
        unknown: names of tensors that count 0 because their size is not known before a run, each once.
    """

    kernels: int
    bytes_products: int
    bytes_other: int
    flops: int
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """What a profile of the model shows of a node: GPU seconds in one run of the model, None where it does not say;
    and how often the node ran in it."""

    seconds: float | None
    executions: float


class Ledger:
    """The traffic of a graph at given sizes, counted once a node and kept.

    Attributes:
        observed: what a profile of a run at these sizes shows, by node.
    """

    def __init__(
        self, graph: Graph, sizes: Sizes, placement: Placement | None = None,
        observed: Mapping[Node, Observation] | None = None,
    ) -> None:
        self.graph = graph
        self.observed = observed or {}
        self.sizes = sizes
        self.placement = placement if placement is not None else place(graph)
        self._runs = runs_of(graph, sizes)
        for body in graph.walk() if self.observed else ():
            seen = [self.observed[node].executions for node in body.nodes if node in self.observed]
            if seen and body is not graph:
                self._runs[body.place] = max(seen)
        self._bytes: dict[Value, int | None] = {}
        self._nodes: dict[Node, KernelTraffic] = {}

    def at(self, sizes: Sizes) -> Ledger:
        """The same graph's, some sizes others; what was observed is not of these."""
        return Ledger(self.graph, {**self.sizes, **sizes}, self.placement)

    def bytes_of(self, value: Value) -> int | None:
        """Bytes of a tensor, or None where unknown."""
        if value not in self._bytes:
            self._bytes[value] = bytes_of(value, self.sizes)
        return self._bytes[value]

    def executions(self, nodes: Iterable[Node]) -> float:
        """How often nodes of one graph run together in one run of the model: as a profile shows, else as often as
        their body."""
        counted = list(nodes)
        seen = [self.observed[node].executions for node in counted if node in self.observed]
        return max(seen) if seen else self._runs[counted[0].place if counted else self.graph.place]

    def runs(self, node: Node) -> float:
        """How often the graph that a node is in runs in one run of the model, by which totals count it."""
        return self._runs[node.place]

    def node(self, node: Node) -> KernelTraffic:
        """What one node of the graph costs on its own."""
        if node not in self._nodes:
            self._nodes[node] = self._count(node)
        return self._nodes[node]

    def _count(self, node: Node) -> KernelTraffic:
        kind = self.placement.kinds[node]
        if kind is Kind.CONTROL:
            return self._stacking(node)
        if not kind.launches:
            return KernelTraffic(False, {}, {}, 0, kernels=0)
        reads = {value: self._read(node, value) for value in map(source, node.reads())}
        writes = {value: self.bytes_of(value) for value in node.outputs if value is not None}
        return KernelTraffic(
            kind is Kind.PRODUCT, _sized(reads), _sized(writes), flops_of(node, self.sizes) or 0,
            unknown=_unsized(reads, writes),
        )

    def _stacking(self, node: Node) -> KernelTraffic:
        """What a Loop copies when its results of each run become one tensor; an If and a Scan copy nothing."""
        results = node.outputs[max(len(node.inputs) - 2, 0) :] if node.op == "Loop" else ()
        stacked = {value: self.bytes_of(value) for value in results if value is not None}
        copied = _sized(stacked)
        return KernelTraffic(False, copied, copied, 0, kernels=len(stacked), unknown=_unsized(stacked))

    def _read(self, node: Node, value: Value) -> int | None:
        """Bytes that a node which launches reads of one of its inputs, or of what that gives back."""
        value = source(value)
        whole = self.bytes_of(value)
        if node.domain or node.op not in PARTIAL:
            return whole
        operands = [operand and source(operand) for operand in node.inputs]
        if operands[0] is value and value not in operands[1:]:
            written = [self.bytes_of(output) for output in node.outputs if output is not None]
            known = sum(size for size in written if size is not None)
            if None in written:
                return whole
            return known if whole is None else min(whole, known)
        return whole

    def region(self, region: Region) -> KernelTraffic:
        """What a region costs as one fused node."""
        members, written = set(region.nodes), tuple(dict.fromkeys(region.outputs))
        wanted, given = region.tensors, frozenset(written)
        readers = self._readers(members, wanted, given)
        reads = {value: self.bytes_of(value) if value in region.folded else self._demand(value, readers, given)
                 for value in wanted}
        writes = {value: self.bytes_of(value) for value in written}
        counted = [self.node(node) for node in members]
        return KernelTraffic(
            any(traffic.product for traffic in counted), _sized(reads), _sized(writes),
            sum(traffic.flops for traffic in counted), region.steps, region.scratch, _unsized(reads, writes),
        )

    def _readers(self, members: set[Node], inputs: Iterable[Value], outputs: frozenset[Value]
                 ) -> dict[Value, list[Node]]:
        """Which members read each value, and which other nodes on the way to them give it back.

        Others that read an input, of which there may be any number, are not looked at.
        """
        found: dict[Value, list[Node]] = {}
        for node in members:
            for value in node.reads():
                found.setdefault(value, []).append(node)
        seen = set(inputs)
        for start in (*found, *outputs):
            value = start
            while value not in seen:
                seen.add(value)
                maker = value.producer
                if maker is None or maker in members or maker.outputs[0] is not value:
                    break
                operand = given_back(maker)
                if operand is None:
                    break
                found.setdefault(operand, []).append(maker)
                value = operand
        return found

    def _demand(self, value: Value, readers: Mapping[Value, Sequence[Node]], outputs: frozenset[Value]) -> int | None:
        """Bytes that the members of a region read of a value, together, looking through views, and also through what
        the runtime takes out between."""
        order, waiting = [], [value]
        while waiting:
            order.append(waiting.pop())
            waiting += [target for node in readers.get(order[-1], ())
                        if (target := node.outputs[0]) is not None and target not in outputs
                        and same_memory(node) is order[-1] and self.bytes_of(order[-1]) is not None]
        demands: dict[Value, int | None] = {}
        for each in reversed(order):  # what is viewed after its views
            whole = self.bytes_of(each)
            demands[each] = whole if whole is None else min(
                whole, sum(self._demanded(node, each, whole, demands, outputs) for node in readers.get(each, ())))
        return demands[value]

    def _demanded(self, node: Node, value: Value, whole: int, demands: Mapping[Value, int | None],
                  outputs: frozenset[Value]) -> int:
        """Bytes that one node asks for of a value of which there are ``whole``; ``demands`` tells of its views."""
        target = node.outputs[0]
        if same_memory(node) is value and target is not None:
            seen = whole if target in outputs else demands[target]
        else:
            seen = self._read(node, value) if self.placement.kinds[node].launches else 0
        return whole if seen is None else seen

    def total(self, fused: Sequence[Region] = ()) -> Traffic:
        """One run of the whole graph and its bodies, with these regions fused."""
        inside = Needs(fused).inside()
        counted = [
            (self._runs[each.place], self.node(node))
            for each in self.graph.walk() for node in each.nodes if node not in inside
        ]
        counted += [(self._runs[region.nodes[0].place], self.region(region)) for region in fused]
        return Traffic(
            round(sum(runs * traffic.kernels for runs, traffic in counted)),
            round(sum(runs * traffic.bytes for runs, traffic in counted if traffic.product)),
            round(sum(runs * traffic.bytes for runs, traffic in counted if not traffic.product)),
            round(sum(runs * traffic.flops for runs, traffic in counted)),
            tuple(dict.fromkeys(name for _, traffic in counted for name in traffic.unknown)),
        )


def _sized(tensors: Mapping[Value, int | None]) -> dict[Value, int]:
    return {value: size for value, size in tensors.items() if size is not None}


def _unsized(*groups: Mapping[Value, int | None]) -> tuple[str, ...]:
    return tuple(value.name for group in groups for value, size in group.items() if size is None)


class Needs:
    """What is needed of what regions, and nodes outside of them, write."""

    def __init__(self, fusions: Sequence[Region]) -> None:
        self.held = {node for fusion in fusions for node in fusion.nodes if node not in fusion.beside}
        self.beside = {node for fusion in fusions for node in fusion.beside}
        self.read = {value.name for fusion in fusions for value in (*fusion.tensors, *fusion.hosts)}

    def value(self, value: Value) -> bool:
        """Whether a value of the graph is read, or an output of it."""
        if value.is_output or value.name in self.read:
            return True
        return any(self._node(node) for node in value.consumers)

    def _node(self, node: Node) -> bool:
        """Whether a node that reads a value stays, so that it is read."""
        if node in self.held:
            return False  # a region reads what it names
        return node not in self.beside or any(self.value(each) for each in node.outputs if each is not None)

    def inside(self) -> set[Node]:
        """The nodes that run in the regions' kernels alone: nothing else needs their results."""
        return self.held | {node for node in self.beside if not any(map(self.value, filter(None, node.outputs)))}


def shared(fused: Iterable[Region]) -> frozenset[Node]:
    """Nodes that several of some regions hold; Constants, which bodies hold copies of, left out."""
    return frozenset(node for region in fused for node in region.again if node.op != "Constant")


def traffic(graph: Graph, sizes: Sizes, fused: Sequence[Region] = ()) -> Traffic:
    """The traffic of one run of ``graph`` at ``sizes``, with the regions ``fused``, if any, run as one node each."""
    return Ledger(graph, sizes).total(fused)


def plan_cost(plan: LaunchPlan, shapes: Sequence[tuple[int, ...]], sm: int, multiprocessors: int) -> tuple[int, int]:
    """Kernels that a launch plan starts for inputs of these shapes, and the bytes that pass through its scratch; a
    library's workspace, of which most algorithms take nothing, is not counted.

    The variant is the first whose guards hold for aligned tensors of these sizes on a GPU of that generation; one
    whose guards or scratch depend on the contents of host operands is passed over, and the last one is taken then.
    """
    chosen, value = chosen_variant(plan, shapes, sm, multiprocessors)
    workspaces = {name for call in chosen.calls for name in call.workspace}
    scratch = sum(2 * (value(plan.scratch[place]) or 0) for place in plan.scratch_of(chosen)
                  if f"t{place}" not in workspaces)
    return len(chosen.steps), scratch


def chosen_variant(
    plan: LaunchPlan, shapes: Sequence[tuple[int, ...]], sm: int, multiprocessors: int
) -> tuple[Variant, Callable[[str], int | None]]:
    """The variant that runs for inputs of these shapes (see ``plan_cost``), and what the plan's expressions are."""
    situation = Situation(inputs=shapes, sm=sm, multiprocessors=multiprocessors)
    for text in plan.symbols:
        # A symbol bound by the contents of a host operand is not known here; it stands as 0, and what reads it too.
        situation.symbols.append(_known(situation, text) or 0)

    def value(text: str) -> int | None:
        return _known(situation, text)

    fitting = (variant for variant in plan.variants if all(value(guard) for guard in variant.guards))
    return next(fitting, plan.variants[-1]), value


def _known(situation: Situation, text: str) -> int | None:
    """The value of an expression, or None where it reads a host operand."""
    if any(token.startswith("h") for token in text.split()):
        return None
    return situation.evaluate(text)
