"""What computes masks, taken into the attentions that read them.

    Range ─ views ─ LessOrEqual ─ And ─ Where ─▶ a mask, which layers of attention read
              ▲                    ▲
           sizes                   another mask, in memory

Exporters compute such a mask once, for all layers.  An attention that computes it again, from the places themselves,
need not look at the keys that it hides (``schedules.attentions.visible``): of a causal mask half of all work.  So each
attention of the plan is tried with what computes a mask that it reads, back to what is in memory, and taken so where
its kernel then leaves keys out.  A mask that is made of far less than it takes itself, as one of padding is of a number
a key, is computed again where that was measured faster.  These nodes stand beside it for as long as something else
needs their results; a region that only computed masks for attentions goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.operators import OperatorClass, classify, lowering_of
from onnxfuse.planning.admission import too_large
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.traffic import Needs
from onnxfuse.planning.legality import check_nodes, copied
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.contractions import COMPUTES
from onnxfuse.planning.shares import Share, exchanged, put_together, shares_of
from onnxfuse.planning.space import SearchSpace
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules import schedule_of

MOST_NODES = 64
"""Nodes that compute a mask."""

MOST_OPERATORS = 12
"""Operators among them that compute, rather than view or count places."""

COMPARE = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Trilu"})
"""Operators without one of which a mask compares no places."""

SMALLER = 8
"""How many times more bytes a mask has than what it is made of, from which on it may be better computed than read."""

BETTER = 0.98
"""Share of the time of the attention that reads it which it must stay under then: less is noise."""

_PLACES = "It computes its mask from the places of queries and keys, and leaves out the keys that this hides."
_NOTHING = "It reads no mask: what computes that shows that it hides nothing."
_AGAIN = "It computes its mask again from what that is made of, which was measured to take less than reading it."


def with_masks(plan: Plan, context: Context) -> Plan:
    """A plan whose attentions compute masks themselves, those of places, and others where that was measured faster."""
    # What is not chosen matters where it is to be measured.
    beside = plan.with_products if context.measures else ()
    if not any(map(_may_hide, (*plan.fusions, *beside))):
        return plan
    shares = shares_of(plan)
    changed: dict[Place, Share] = {}
    more: list[Region] = []
    for space in plan.spaces:
        place = space.maker.graph.place
        share = shares.get(place, Share())
        stage = _Masks(space, context, share.fusions)
        products = [region for region in beside if region.nodes[0].place == place]
        more += [made for region in products if (made := stage.offered(region)) is not None]
        after = stage.planned(share)
        if after is not None:
            changed[place] = after
    plan = replace(plan, with_products=(*plan.with_products, *more))
    return put_together(plan, context.graph, changed)


@dataclass
class _Masks:
    """One graph."""

    space: SearchSpace
    context: Context
    fusions: Sequence[Region]
    known: dict[tuple[Node, ...], Region | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.maker = self.space.maker
        self.home = {node: fusion for fusion in self.fusions for node in fusion.view}

    def offered(self, region: Region) -> Region | None:
        """An attention with its masks, as it is to be measured or to be taken; None where there is none."""
        if region.view not in self.known:
            self.known[region.view] = self._offered(region) if _may_hide(region) else None
        return self.known[region.view]

    def made(self, region: Region) -> Region | None:
        """An attention with its masks; None where that leaves no keys out, shows none to hide nothing, and was not
        measured to take less time."""
        made = self.offered(region)
        if made is None or not (made.kernel.hides or _is_without(made, region) or _is_faster(made, region)):
            return None
        return made

    def _offered(self, region: Region) -> Region | None:
        if region.kernel.hides:
            return None
        cones = [(tensor, cone) for tensor in region.tensors if (cone := self._cone(tensor.name, region))]
        # A number that is cast before it masks is computed too.
        numbers = frozenset[Node]().union(
            *(cone for tensor, cone in cones if all(size == 1 for size in tensor.shape or ())))
        for _, cone in cones:
            if any(each.op in COMPARE for node in cone for each in node.originals):
                made = self._with(region, cone | numbers)
                if made is not None and made.kernel.hides:
                    return None if _is_faster(region, made) else made
        little = frozenset[Node]().union(*(cone for tensor, cone in cones if self._is_little(tensor, cone)))
        return self._with(region, little) if little else None

    # ---- What computes a mask. ----

    def _cone(self, name: str, region: Region) -> frozenset[Node]:
        """The nodes that compute a value from what is in memory, and sizes; none where they are not cheap, or many."""
        found: set[Node] = set()
        waiting = [value] if (value := self.maker.view.values.get(name)) is not None else []
        while waiting:
            each = waiting.pop()
            node = each.producer
            if node is None or node in found or each.elements is not None or each.constant is not None:
                continue
            cheap = self._is_cheap(node)
            if node in region.view or not (cheap or self._is_written(each)):
                return frozenset()
            if not cheap:
                continue
            found.add(node)
            waiting += node.reads()
            if len(found) > MOST_NODES:
                return frozenset()
        computing = sum(classify(each, self.maker.graph) is OperatorClass.POINTWISE
                        for node in found for each in node.originals)
        return frozenset(found) if computing <= MOST_OPERATORS else frozenset()

    def _is_cheap(self, node: Node) -> bool:
        return (
            lowering_of(node) is not None and check_nodes([node], self.maker.view.opset) is None and not node.captures
            and sum(value is not None for value in node.outputs) == 1
            and all(each.op == "Constant" or classify(each, self.maker.graph) in COMPUTES for each in node.originals)
        )

    def _is_little(self, tensor: Value, cone: frozenset[Node]) -> bool:
        """Whether a value is made of far less than it takes itself."""
        bytes_of = self.maker.costs.ledger.bytes_of
        read = {value.name: value for node in cone for value in node.reads()
                if value.producer not in cone and value.elements is None and value.constant is None}
        sizes = [bytes_of(value) for value in read.values()]
        own = bytes_of(tensor)
        return own is not None and None not in sizes and SMALLER * sum(size or 0 for size in sizes) <= own

    def _is_written(self, value: Value) -> bool:
        """Whether a value is in memory: no region keeps it to itself."""
        home = None if value.producer is None else self.home.get(value.producer)
        return home is None or any(output.name == value.name for output in home.outputs)

    def _with(self, region: Region, cone: frozenset[Node]) -> Region | None:
        """A region with what computes a mask, with what was measured of it; None where it has no kernel."""
        values = self.maker.view.values
        outputs = tuple(values[output.name] for output in region.outputs)
        # Layers are alike, wherever among their nodes a mask is computed.
        found = self.maker.region(cone.union(region.view), region.rule, outputs, cone)
        made = found if isinstance(found, Refusal) else self.maker.with_kernel(found)
        if isinstance(made, Refusal) or too_large(made, self.maker.costs) is not None:
            return None
        made = replace(made, beside=copied(cone))
        revised = made if self.context.measured is None else self.context.measured.revision(made)
        return None if isinstance(revised, Refusal) else revised

    # ---- The plan. ----

    def planned(self, share: Share) -> Share | None:
        """A graph's share of the plan with these attentions; None where there are none."""
        came = {fusion.view: made for fusion in self.fusions if (made := self.made(fusion)) is not None}
        if not came:
            return None
        found = self._apart(self._needed([came.get(fusion.view, fusion) for fusion in self.fusions]))
        if found is None:
            return None
        after = self._counted(found, {made.view: old for old, made in zip(
            (fusion for fusion in self.fusions if fusion.view in came), came.values(), strict=True)})
        stay = {fusion.view for fusion in after}
        words = {fusion.view: _words(came[fusion.view], fusion) for fusion in self.fusions if fusion.view in came}
        (first, *_) = came
        went = {fusion.view: (came.get(fusion.view, came[first]), words.get(fusion.view, words[first]))
                for fusion in self.fusions if fusion.view not in stay}
        return exchanged(share, after, {made.view: words[view] for view, made in came.items()}, went)

    def _needed(self, fusions: list[Region]) -> list[Region]:
        """The regions without those whose results nobody needs any more."""
        while True:
            needs = Needs(fusions)
            kept = [fusion for fusion in fusions if fusion.beside or any(map(needs.value, fusion.outputs))]
            if len(kept) == len(fusions):
                return kept
            fusions = kept

    def _apart(self, fusions: Sequence[Region]) -> list[Region] | None:
        """The regions, none of which writes what attentions compute again: one that did writes the rest, or reads it;
        None where one has no kernel then."""
        values, needs = self.maker.view.values, Needs(fusions)
        cone = {node for node in self.maker.view.nodes if any(
            each in fusion.beside for fusion in fusions for each in copied([node]))}
        found = []
        for fusion in fusions:
            outputs = [values[output.name] for output in fusion.outputs]
            if fusion.beside or all(output.producer not in cone for output in outputs):
                found.append(fusion)
                continue
            wanted = [own for output, own in zip(fusion.outputs, outputs, strict=True) if needs.value(output)]
            inner = _leading(wanted, fusion.view)
            if any(output.producer in cone for output in wanted):  # these stand beside, and are read
                wanted, inner = [own for own in wanted if own.producer not in cone], inner - cone
            if not wanted:
                continue
            region = self.maker.region(inner, fusion.rule, tuple(wanted))
            made = region if isinstance(region, Refusal) else self.maker.with_kernel(region)
            if isinstance(made, Refusal):
                return None
            found.append(made)
        return found

    def _counted(self, fusions: list[Region], before: Mapping[tuple[Node, ...], Region]) -> list[Region]:
        """The regions, each node counted once: with the first that holds it, or the one that it is not beside of."""
        taken = {node for fusion in fusions for node in fusion.nodes if node not in fusion.beside}
        found = []
        for fusion in fusions:
            again = tuple(node for node in fusion.beside if node in taken and node.op != "Constant")
            taken.update(fusion.nodes)
            old = before.get(fusion.view)
            if old is not None:
                cost = self.maker.costs.region(replace(fusion, again=again))
                cost = replace(cost, seconds_before=old.cost.seconds_before, seconds_after=old.cost.seconds_after)
                fusion = replace(fusion, again=again, counted=cost)
            found.append(fusion)
        return found


def _may_hide(region: Region) -> bool:
    """Whether kernels as a region's may leave out keys that a mask hides."""
    schedule = schedule_of(region.kernel)
    return schedule is not None and schedule.hides


def _words(made: Region, region: Region) -> str:
    """Why an attention computes its masks, which ``region`` reads."""
    if made.kernel.hides:
        return _PLACES
    return _NOTHING if _is_without(made, region) else _AGAIN


def _is_without(made: Region, region: Region) -> bool:
    """Whether a region that computes masks reads nothing in the place of one that another reads, and counts no places:
    then that is a number, which is nothing where it is zero."""
    less = {value.name for value in made.tensors} < {value.name for value in region.tensors}
    return less and not any(node.op in COMPARE or node.op == "Range" for node in made.beside)


def _microseconds(region: Region) -> float | None:
    return None if region.measured is None else region.measured.fused


def _is_faster(made: Region, region: Region) -> bool:
    """Whether a region was measured to take less time than another."""
    ours, theirs = _microseconds(made), _microseconds(region)
    return ours is not None and theirs is not None and ours <= BETTER * theirs


def _leading(values: Sequence[Value], among: Sequence[Node]) -> set[Node]:
    """The nodes among some that lead to values."""
    found: set[Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop().producer
        if node is not None and node in among and node not in found:
            found.add(node)
            waiting += node.reads()
    return found
