"""From a group of nodes to a region: its kernel, what it reads and writes, and what it gains."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property

from onnxfuse.cuda_options import TF32
from onnxfuse.errors import RuleError
from onnxfuse.graph.model import Graph, Node, Place, Value
from onnxfuse.graph.sizes import bytes_of, elements_of, shapes_of
from onnxfuse.ir.exact import exactly
from onnxfuse.lowering.launch import HOST_INPUTS
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.lower import hosts as size_operands
from onnxfuse.operators.classes import moves_innermost
from onnxfuse.planning.admission import within_chip
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.traffic import plan_cost
from onnxfuse.planning.custom import custom_kernel
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.legality import boundary, check_host_inputs, copied
from onnxfuse.planning.regions.grow import escaping, spread
from onnxfuse.planning.weights.collapsing import Fold, Folds
from onnxfuse.planning.weights.joining import Joins
from onnxfuse.provider.removed import is_same_memory
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.rules import Match, RuleSet
from onnxfuse.schedules import SCHEDULES, Does, Kernel, Request, family, running
from onnxfuse.schedules.kernel import has_reductions
from onnxfuse.wording import option

SCATTERED_SHARE = 0.1
"""Share of a region's bytes that may be read element by element from far apart."""

TF32_FROM = 80
"""The first GPUs that multiply TF32: "sm_80"."""

NEAR_BYTES = 32 * 1024
"""What a multiprocessor's first-level cache serves however it is read."""


@dataclass
class Maker:
    """Makes regions of one graph.

    Attributes:
        graph: the model's graph; view: its canonical view.
        costs: of the model's graph.
        nearby: further sizes to make variants of kernels for.
        wanted: by the id of a rule the one schedule that makes kernels of its regions; all of them do for others.
        kernels: those known already.
        tf32: whether kernels may round operands of float32 products to TF32, where the GPU multiplies these.
        rounding: whether constants may be folded into weights where that rounds these anew.
    """

    graph: Graph
    view: Graph
    costs: CostModel
    nearby: tuple[Mapping[str, int], ...] = ()
    wanted: Mapping[str, str] = field(default_factory=dict)
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)
    tf32: bool = True
    rounding: bool = False
    _lowered: dict[Hashable, Lowered | Refusal] = field(default_factory=dict, repr=False)
    _fitting: dict[Hashable, tuple[Kernel, Kernel, tuple[int, int]]] = field(default_factory=dict, repr=False)

    @property
    def tuning_options(self) -> str:
        """With what `onnxfuse tune` measures for such plans."""
        return "" if self.tf32 else f" with {option('provider-option', f'{TF32}=0')}"

    @property
    def tuning(self) -> str:
        """What to do where something was not measured."""
        return f"run onnxfuse tune on that GPU{self.tuning_options}"

    @cached_property
    def folds(self) -> Folds:
        """What can be folded into weights."""
        return Folds(self.graph, self.rounding)

    @cached_property
    def joins(self) -> Joins:
        """Which products can be one by weights side by side."""
        return Joins(self.folds)

    def lowered(
        self, members: Collection[Node], outputs: Sequence[Value] | None = None, first: Collection[Node] = (),
        fold: Fold | None = None,
    ) -> Lowered | Refusal:
        """Nodes of the canonical view as tensors, or why they cannot be.

        Args:
            outputs: values of the view that are used outside; all that other nodes read where None.
            first: nodes that come before the others, wherever the graph has them; they read nothing of these.
            fold: what stands for some of them.
        """
        used = escaping(set(members)) if outputs is None else outputs
        key = frozenset(members), tuple(used), frozenset(first), None if fold is None else fold.made
        if key not in self._lowered:
            ordered = _ordered(members, first)
            if fold is not None:
                ordered = [each for node in ordered for each in fold.instead.get(node, (node,))]
            self._lowered[key] = self._lower(ordered, used)
        return self._lowered[key]

    def _lower(self, nodes: Sequence[Node], used: Sequence[Value], first: Sequence[Value] = ()) -> Lowered | Refusal:
        """Nodes as tensors; products of float32 as exact ones where the runtime keeps these."""
        found = self.kernels.lowerings.lower(nodes, used, self.view, first)
        if self.tf32 or isinstance(found, Refusal):
            return found
        program = exactly(found.program)
        return found if program is found.program else replace(found, program=program)

    def region(
        self, members: Collection[Node], rule: str, outputs: Sequence[Value] | None = None,
        first: Collection[Node] = (), fold: Fold | None = None,
    ) -> Region | Refusal:
        """Nodes of the canonical view as a region with its cost, or why they are none.  No kernel is made yet.

        Args:
            outputs, first, fold: as ``lowered`` takes them.
        """
        outputs = escaping(set(members)) if outputs is None else outputs
        ordered = _ordered(members, first)
        if not outputs:
            return Refusal("unused", "nothing reads what it computes", ordered[0].label, rule)
        lowered = self.lowered(members, outputs, first, fold)
        if isinstance(lowered, Refusal):
            return lowered
        lone = _lone_transpose(ordered)
        if lone is not None:
            return lone
        names = [value.name for value in size_operands(lowered.sized)]
        sizes, multiprocessors = self.costs.ledger.sizes, self.costs.profile.multiprocessors
        expected = self.kernels.expected(Request(lowered, sizes=sizes), multiprocessors)
        if expected is None:
            return Refusal("no-schedule", "no schedule has kernels for such a region", ordered[0].label, rule)
        refusal = None if expected.apart else running(Does.POOLS).refuses(Request(lowered))
        # Of what is folded products compute all results, and what comes before them is computed once.
        if refusal is None and not has_reductions(lowered) and fold is None:
            refusal = spread(members, outputs)
        if refusal is not None:
            return replace(refusal, rule=rule)
        region = self._bound(ordered, rule, lowered.tensors, outputs, names, fold)
        if fold is not None and isinstance(region, Region):
            region = replace(region, folded=fold.made, folding=fold.words, collapses=fold.collapses)
        return region if isinstance(region, Refusal) else self._weighed(
            replace(region, lowered=lowered, steps=expected.steps, read_again=expected.read_again))

    def fusion(self, members: Collection[Node], rule: str) -> Region | Refusal:
        """Nodes of the canonical view as a region with its kernel, or why there is none."""
        found = self.region(members, rule)
        return found if isinstance(found, Refusal) else self.with_kernel(found)

    def with_kernel(self, region: Region) -> Region | Refusal:
        """The region with its kernel, or why no schedule has one: that of the first schedule whose kernel does not read
        too much element by element."""
        asked = self.kernels.ask(region.request(self.costs.ledger.sizes, nearby=self.nearby))
        kernel: Kernel | None = None
        for schedule in family(self.wanted.get(region.rule)):
            made = asked.of(schedule)
            if isinstance(made, Kernel):
                if made.rounds and (refusal := self.keeps_float32()) is not None:
                    return replace(refusal, node=region.nodes[0].label, rule=region.rule)
                kernel = made
                if not self._is_scattered(kernel, region):
                    return self._with(region, kernel)
            elif made is not None and kernel is None:
                return made
        if kernel is None:
            own = self.wanted.get(region.rule)
            words = "no schedule has kernels" if own is None else f"the schedule {own} has no kernel"
            rule = "" if own is None else region.rule
            return Refusal("no-schedule", f"{words} for such a region", region.nodes[0].label, rule)
        return self._scattered(kernel, region)

    def keeps_float32(self) -> Refusal | None:
        """Why products of float32 stay with the runtime; None where kernels may round their operands to TF32."""
        profile = self.costs.profile
        if profile.sm < TF32_FROM:
            return Refusal(
                "float32-products", f"{profile.name} has no tensor cores for float32, and without them the runtime's "
                "products are hard to beat")
        return None

    def rearranged(self, region: Region, read: Sequence[Value], written: Sequence[Value]) -> Kernel | None:
        """A region's kernel as it would be if it read and wrote these values of the view, which are its own, in this
        order; None where its schedule has none."""
        lowered = self._lower(region.view, written, read)
        if isinstance(lowered, Refusal):
            return None
        request = replace(region, lowered=lowered).request(self.costs.ledger.sizes, nearby=self.nearby)
        made = self.kernels.ask(request).of(SCHEDULES[region.kernel.schedule])
        return made if isinstance(made, Kernel) else None

    def custom(self, match: Match) -> Region | Refusal:
        """The region of a match whose rule brings its own kernel."""
        made = custom_kernel(match)
        if isinstance(made, Refusal):
            return made
        kernel, tensors, outputs = made
        escapes = escaping(set(match.nodes))
        if set(escapes) != set(outputs):
            names = ", ".join(value.name for value in escapes)
            return Refusal(
                "kernel-outputs",
                f"used outside are {names}: not what the kernel writes",
                match.nodes[-1].label,
                match.rule.id,
            )
        region = self._bound(match.nodes, match.rule.id, tensors, outputs, [])
        if isinstance(region, Refusal):
            return region
        if region.hosts:
            return Refusal(
                "kernel-operand",
                f"the pattern also reads '{region.hosts[0].name}', and the kernel does not",
                match.nodes[-1].label,
                match.rule.id,
            )
        return self._with(self._weighed(region), kernel)

    def _weighed(self, region: Region) -> Region:
        """The region with what it gains."""
        return replace(region, counted=self.costs.region(region))

    def _with(self, region: Region, kernel: Kernel) -> Region:
        """The region with its kernel, its cost that of the plan's own steps and scratch."""
        sizes, profile = self.costs.ledger.sizes, self.costs.profile
        shapes = shapes_of(region.tensors, sizes)
        steps, scratch = len(kernel.plan.variants[0].steps), 0
        if shapes is not None:
            key = id(kernel), shapes
            if key not in self._fitting:
                fitting = within_chip(kernel, shapes, profile)
                costs = plan_cost(fitting.plan, shapes, profile.sm, profile.multiprocessors)
                self._fitting[key] = kernel, fitting, costs
            _, kernel, (steps, scratch) = self._fitting[key]
        region = replace(region, made=kernel, steps=steps, scratch=scratch)
        return region if (steps, scratch) == (1, 0) else self._weighed(region)

    def _apart(self, kernel: Kernel, region: Region) -> dict[int, int]:
        """By scattered input, bytes that are read element by element from far apart: again for every result, where
        the tensor is spread over them."""
        sizes = self.costs.ledger.sizes
        results = max((elements_of(value, sizes) or 0 for value in region.outputs), default=0)
        found = {}
        for place in kernel.scattered:
            value = region.tensors[place]
            size, count = bytes_of(value, sizes) or 0, elements_of(value, sizes) or 0
            found[place] = size if size <= NEAR_BYTES else size * max(1, results // max(count, 1))
        return found

    def _is_scattered(self, kernel: Kernel, region: Region) -> bool:
        """Whether too much is read element by element from far apart."""
        everything = sum(bytes_of(value, self.costs.ledger.sizes) or 0 for value in region.tensors)
        return sum(self._apart(kernel, region).values()) > SCATTERED_SHARE * max(everything, 1)

    def _scattered(self, kernel: Kernel, region: Region) -> Refusal:
        """Why a kernel that reads so is not worth having."""
        count = self._apart(kernel, region)
        worst = region.tensors[max(count, key=count.__getitem__)]
        moving = [node.label for node in region.view if moves_innermost(node)]
        return Refusal(
            "scattered-access",
            f"neighbouring results need elements of '{worst.name}' that lie far apart",
            moving[-1] if moving else worst.name,
            remedy="leave the transpose of the innermost axis outside",
        )

    def _bound(
        self,
        members: Sequence[Node],
        rule: str,
        read: Sequence[Value],
        written: Sequence[Value],
        sizes: Sequence[str],
        fold: Fold | None = None,
    ) -> Region | Refusal:
        """Sort what the original nodes read into what the kernel reads, what decides sizes, and small constants;
        ``fold``: what stands for those of the members whose constants are in other weights."""
        beneath = () if fold is None else fold.beneath
        originals = copied((*members, *beneath))
        values = self.graph.values
        tensors = tuple(values.get(value.name, value) for value in read)
        rest = [value for value in boundary(originals).inputs if value not in tensors]
        # Nodes that are alike but for what was folded have one function, which must not hold that.
        folded = () if fold is None else (*fold.nodes, *beneath)
        apart = {value.name for node in folded for value in node.reads()}
        inlined = tuple(value for value in rest if value.constant is not None and (
            value.constant.size == 1 or value.name not in apart))
        hosts = tuple(dict.fromkeys([*(values[name] for name in sizes), *(
            value for value in rest if value not in inlined)]))
        label = members[-1].label
        known = {value.name for member in (*members, *beneath) for value in member.reads()}
        strange = next((value for value in rest if value not in inlined and value.name not in known), None)
        if strange is not None:
            return Refusal(
                "different-value", f"it also reads '{strange.name}', which the nodes that it is seen as do not", label,
                rule,
            )
        if len(hosts) > HOST_INPUTS:
            return Refusal(
                "host-operands", f"{len(hosts)} operands decide sizes; a fused node has room for {HOST_INPUTS}", label
            )
        refusal = check_host_inputs(tensors, self.graph, label)
        if refusal is not None:
            return refusal
        outputs = tuple(values[value.name] for value in written)
        return Region(originals, tensors, outputs, rule, tuple(members), hosts, inlined)


def makers_of(
    view: Graph, costs: CostModel, rules: RuleSet, kernels: KnownKernels, tf32: bool = True, rounding: bool = False
) -> dict[Place, Maker]:
    """A maker for each graph of a model, by place; ``view`` is the canonical view of all of it, ``tf32`` and
    ``rounding`` as ``Maker`` has them.

    Raises:
        RuleError: a rule names a schedule that is not there.
    """
    wanted = wanted_schedules(rules)
    return {each.place: Maker(each, of_each, costs, wanted=wanted, kernels=kernels, tf32=tf32, rounding=rounding)
            for each, of_each in zip(costs.ledger.graph.walk(), view.walk(), strict=True)}


def wanted_schedules(rules: RuleSet) -> dict[str, str]:
    """By their ids, rules that name a schedule for their regions.

    Raises:
        RuleError: there is no schedule of that name.
    """
    found = {rule.id: rule.schedule for rule in rules.fuse if rule.schedule is not None}
    for rule, name in found.items():
        if name not in SCHEDULES:
            near = get_close_matches(name, SCHEDULES, 1)
            raise RuleError(
                f"The rule {rule} names a schedule {name!r}, which is not there.", place=rules.by_id[rule].place,
                remedy=f"Did you mean {near[0]}?" if near else f"There are: {', '.join(SCHEDULES)}.",
            )
    return found


def _ordered(members: Collection[Node], first: Collection[Node]) -> list[Node]:
    """Nodes in graph order, but that some come first."""
    return sorted(members, key=lambda node: (node not in first, node.index))


def _lone_transpose(members: Sequence[Node]) -> Refusal | None:
    """Nothing is gained where a transpose would stay the one kernel that it is: the runtime has good ones."""
    working = [node for node in members if not all(is_same_memory(original) for original in node.originals)]
    if len(working) != 1 or not moves_innermost(working[0]):
        return None
    return Refusal(
        "lone-transpose",
        "a transpose with nothing that computes beside it stays one kernel, and the runtime has a good one",
        working[0].label,
    )
