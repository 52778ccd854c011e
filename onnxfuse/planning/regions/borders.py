"""Views at the border of a chosen region, taken into it where that costs its kernel nothing, and halves of pairs of
transposes, left out where the other half has no region.

A Reshape that stays outside moves no byte, and still the runtime spends host time on it at every run; inside, its
kernel finds the same elements in the same places.  One is taken in where it brings no operand of its own, nobody else
reads what lies between, no rule or fusion of the runtime's own wants it, and the kernel stays what it was but for the
order of its inputs and outputs: it reads and writes as wide and as near, with no index more to compute.

A Transpose that others take back is in a region so that its readers find the value as they want it
(``folding.layouts``).  Where those that take it back are all left to the runtime they would run, each a kernel; with
this one left to it too the runtime takes the pairs out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.graph.model import Node, Value
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.choosing import planned
from onnxfuse.planning.context import Context
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.region import Region
from onnxfuse.rules import Prohibitions


def bordered(plan: Plan, _: Context) -> Plan:
    """The plan with views beside the chosen regions that cost less inside, but for transposes that nothing takes back
    in one."""
    for space in plan.spaces:
        taken = set[Node]().union(*space.fixed)
        borders = Borders(space.maker, space.facts, space.forbidden, space.growth.group.keys(), taken)
        pool = space.pool.pool
        for each in sorted(space.chosen, key=lambda each: pool[each].view[0].index):
            if each.isdisjoint(space.products):  # with products there are such with their views
                pool[each] = borders.widened(borders.unpaired(pool[each]))
    return planned(plan.spaces)


@dataclass
class Borders:
    """Takes views into regions of one graph, and leaves halves of pairs out.

    Attributes:
        maker: makes the kernels; facts: of the nodes that regions may hold.
        forbidden: what the rules keep apart; admitted: nodes that a grow rule lists.
        taken: nodes of the canonical view that regions hold.
    """

    maker: Maker
    facts: Mapping[Node, Facts]
    forbidden: Prohibitions
    admitted: Collection[Node]
    taken: set[Node] = field(default_factory=set)

    def widened(self, fusion: Region) -> Region:
        """The region with the views at its border that are better inside: all of them, or one by one."""
        every = self._reached(fusion)
        whole = self._with(fusion, every) if len(every) > 1 else None
        if whole is not None:
            return whole
        refused: set[Node] = set()
        while True:
            node = next((each for each in self._beside(set(fusion.view)) if each not in refused), None)
            if node is None:
                return fusion
            found = self._with(fusion, [node])
            if found is None:
                refused.add(node)
            else:
                fusion = found

    def unpaired(self, fusion: Region) -> Region:
        """The region without the transposes that are taken back outside of all regions, where that takes less time."""
        for node in fusion.view:
            result = node.outputs[0]
            if not self.facts[node].leaves or result is None or not self.taken.isdisjoint(result.consumers):
                continue
            members = set(fusion.view) - {node}
            made = None if all(self.facts[each].view for each in members) else self._made(members, fusion)
            lone, _ = self.maker.costs.unfused(original for reader in result.consumers for original in reader.originals)
            if made is not None and made.cost.seconds_after < fusion.cost.seconds_after + lone:
                self.taken.discard(node)
                fusion = made
        return fusion

    def _reached(self, fusion: Region) -> list[Node]:
        """The views at the border, those behind them, and so on."""
        members, found = set(fusion.view), []
        while (node := next(self._beside(members), None)) is not None:
            members.add(node)
            found.append(node)
        return found

    def _beside(self, members: set[Node]) -> Iterator[Node]:
        """Views that only the region reads, or that alone read one of its results."""
        for node in sorted(members, key=lambda node: node.index):
            for value in node.reads():
                view = value.producer
                if view is None or view in members or value.is_output or not members.issuperset(value.consumers):
                    continue
                if self._is_free(view):
                    yield view
            for output in node.outputs:
                if output is not None and len(output.consumers) == 1 and not output.is_output:
                    (view,) = output.consumers
                    if view not in members and self._is_free(view) and view.inputs[0] is output:
                        yield view

    def _is_free(self, node: Node) -> bool:
        facts = self.facts.get(node)
        return (
            facts is not None and facts.view and node in self.admitted and node not in self.taken
            and all(value is None or value.is_constant for value in node.inputs[1:])
            and not any(self.maker.costs.is_grouped(original) for original in node.originals)
        )

    def _with(self, fusion: Region, views: Sequence[Node]) -> Region | None:
        """The region with some views, or None where it is better without."""
        made = self._made({*fusion.view, *views}, fusion)
        if made is None:
            return None
        more = made.cost.seconds_after - fusion.cost.seconds_after
        if more >= self.maker.costs.dispatch_seconds(views) or not self._same_work(made, fusion):
            return None
        self.taken.update(views)
        return made

    def _made(self, members: set[Node], instead: Region) -> Region | None:
        """A region in another's place, where there is one that needs no more of the host."""
        if self.forbidden.refuses(members) is not None:
            return None
        made = self.maker.fusion(members, instead.rule)
        return made if isinstance(made, Region) and len(made.hosts) <= len(instead.hosts) else None

    def _same_work(self, wider: Region, fusion: Region) -> bool:
        """Whether the kernel with views is the one without them, but for the order of its inputs and outputs."""
        if wider.kernel.schedule != fusion.kernel.schedule or fusion.lowered is None or wider.lowered is None:
            return False
        views = set(wider.view).difference(fusion.view)
        read = dict.fromkeys(_before(value, views) for value in fusion.lowered.tensors)
        written = dict.fromkeys(_behind(value, views) for value in escaping(set(fusion.view)))
        kernel = wider.kernel
        if tuple(read) != wider.lowered.tensors or list(written) != escaping(set(wider.view)):
            found = self.maker.rearranged(wider, tuple(read), tuple(written))
            if found is None:
                return False
            kernel = found
        return kernel.code == fusion.kernel.code


def _before(value: Value, views: Collection[Node]) -> Value:
    """What is read where some views of it are inside."""
    view = value.producer
    if view is None or view not in views:
        return value
    source = view.inputs[0]
    assert source is not None, view.label
    return _before(source, views)


def _behind(value: Value, views: Collection[Node]) -> Value:
    """What is written where some views of it are inside."""
    view = next((each for each in value.consumers if each in views), None)
    result = None if view is None else view.outputs[0]
    return value if result is None else _behind(result, views)
