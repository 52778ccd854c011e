"""The form of a model that is planned and rewritten, and its plan.

The bias of a convolution or a product is a sum behind it wherever a region that the plan chooses takes that in; all
others keep their own.  Which these are, planning tells: with all biases apart first, and again with those that found a
place.  Then values around convolutions may lie channels-last: that form and its plan are taken if they are predicted
to take less time.  Only the kernels of the form that is taken are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path

from onnxfuse.folding import (
    BIAS_CODE,
    BIAS_KEPT,
    BIASES,
    CONSTANTS,
    DEQUANTISED,
    LAYOUTS,
    Bias,
    Shared,
    is_turnable,
    kept_for_their_type,
    paired,
    separable,
    shared,
)
from onnxfuse.graph import Graph, LoadedModel
from onnxfuse.graph.binding import Bound, bound, check_sizes
from onnxfuse.graph.model import Node
from onnxfuse.measurements import observing
from onnxfuse.operators import is_contraction, load_graph
from onnxfuse.operators.classes import is_convolution
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import STREAMING, CostModel
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.library import converting_seconds, is_laid_anew, laying_seconds, left_seconds
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.evidence import Evidence
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.passes import drafted, finished
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.contractions import measured_cost
from onnxfuse.planning.spills import Compiled, Spills
from onnxfuse.planning.weighing import Considered
from onnxfuse.provider.fusions import with_biases
from onnxfuse.provider.kernels import Biased, biased
from onnxfuse.provider.lacking import lacks_kernel
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import (
    Folded,
    dequantise_apart,
    dequantised_record,
    lay_out,
    separate,
    separated_sums,
    widen,
    with_weights,
)
from onnxfuse.rules import CanonicalGraph, RuleSet, canonicalise, groups_of

MOST_PLANS = 3
"""Plans with biases apart after which all stay where they were: in each of them one more found no place."""

MOST_FORESEEN = 820
"""Nodes of a graph that is planned in another layout too where nothing was measured: of more that takes five seconds
and more."""

LAYS_OUT = 0.1
"""Share of its time on the GPU that ONNX Runtime lays images out in of a larger graph that is planned channels-last
alone."""


@dataclass(frozen=True)
class Form:
    """A model in one form, and what planning needs of it.

    Attributes:
        loaded: the model; graph: of it; sizes: to plan for; costs: at these.
        seen: gives the graph as rules see it, which a form that another is made of is not asked for.
        notes: what a user should know of all that.
    """

    loaded: LoadedModel
    graph: Graph
    seen: Callable[[], CanonicalGraph]
    sizes: Bound
    costs: CostModel
    notes: tuple[str, ...]

    @property
    def canonical(self) -> CanonicalGraph:
        """The graph as rules see it."""
        return self.seen()


@dataclass(frozen=True)
class Forming:
    """What makes forms of models.

    Attributes:
        rules: in force; profile: the GPU to plan for; dims: sizes that the user gave.
        run_profile: ONNX Runtime's profile of a run on CUDA, or None.
        convolutions: whether biases of convolutions may stand behind these.
    """

    rules: RuleSet
    profile: Profile
    dims: Mapping[str, int]
    run_profile: str | Path | None = None
    convolutions: bool = True

    def form(self, loaded: LoadedModel) -> Form:
        """A model as it stands."""
        graph = load_graph(loaded)
        sizes = bound(graph, self.dims)
        doubts = check_sizes(graph, sizes.sizes, self.dims)
        ledger, notes = observing(Ledger(graph, sizes.sizes), self.profile, loaded.proto, self.run_profile)
        groups = with_biases(groups_of(graph, self.rules.runtime), separated_sums(loaded.proto))
        costs = CostModel(ledger, self.profile, groups)
        seen = cache(partial(canonicalise, graph, self.rules.canonical))
        return Form(loaded, graph, seen, sizes, costs, (*sizes.notes, *doubts, *notes))

    def planned(self, loaded: LoadedModel) -> Form:
        """A model with what is computed of its constants in float32 where that is computed once so."""
        form = self.form(loaded)
        nodes = () if CONSTANTS in self.rules.disabled else kept_for_their_type(form.graph)
        proto = widen(loaded.proto, nodes) if nodes else loaded.proto
        return form if proto is loaded.proto else self.form(replace(loaded, proto=proto))

    def dequantised(self, form: Form, values: Sequence[Shared]) -> Form:
        """The same model with some values dequantised for each of their readers."""
        made = self.form(replace(form.loaded, proto=dequantise_apart(form.loaded.proto, values)))
        return replace(made, notes=form.notes)

    def apart(self, form: Form, biases: Mapping[str, Bias]) -> Form:
        """The same model with biases apart, given by what their convolutions and products compute."""
        made = self.form(replace(form.loaded, proto=separate(form.loaded.proto, biases)))
        costs = _shared(made.costs, biases) if made.costs.ledger.observed else made.costs
        return replace(made, costs=costs, notes=form.notes)

    def separable(self, form: Form, least_gain: float) -> tuple[dict[str, Bias], tuple[Refusal, ...]]:
        """Biases of a model as it stands that may stand apart, by what their convolutions and products compute, and why
        others do not."""
        if BIASES in self.rules.disabled:
            return {}, ()
        biases, told = separable(form.graph, self.convolutions)
        biases, idle = _wanted(form, biases, least_gain)
        return biases, (*told, *idle)

    def channels_last(self, form: Form, turns: bool) -> Form:
        """The same model with pairs of transposes behind all values that may gain by them; ``turns``: behind weights of
        products too."""
        pairs = paired(form.graph, form.canonical.graph, turns)
        if not pairs:
            return form
        made = self.form(replace(form.loaded, proto=lay_out(form.loaded.proto, pairs)))
        return replace(made, notes=form.notes)


def _shared(costs: CostModel, names: Iterable[str]) -> CostModel:
    """Costs in which what a profile shows of a convolution or a product is shared with the sum that took its bias."""
    ledger = costs.ledger
    observed = dict(ledger.observed)
    for name in names:
        value = ledger.graph.values[name]
        added = value.producer
        bare = None if added is None or added.inputs[0] is None else added.inputs[0].producer
        seen = None if bare is None else observed.get(bare)
        if added is not None and bare is not None and seen is not None and seen.seconds is not None:
            own = min(costs.bias_seconds(Biased(value, bare.op == "Conv")), seen.seconds)
            observed[bare], observed[added] = replace(seen, seconds=seen.seconds - own), replace(seen, seconds=own)
    return CostModel(Ledger(ledger.graph, ledger.sizes, ledger.placement, observed), costs.profile, costs.groups)


@dataclass(frozen=True)
class Draft:
    """A form's plan before the compiler is asked.

    Attributes:
        form: what is planned, in this context; plan: as ``passes.drafted`` made it.
        told: why biases stay where they were.
    """

    form: Form
    context: Context
    plan: Plan
    told: tuple[Refusal, ...] = ()

    @cached_property
    def uncompiled(self) -> Plan:
        """The whole plan as it is with nothing compiled."""
        return finished(self.plan, self.context)

    def compiled(self, compiled: Compiled | None) -> Plan:
        """The whole plan after what the compiler says, where it is asked."""
        return self.uncompiled if compiled is None else finished(self.plan, self.context.compiling(compiled))

    def begin(self, compiled: Compiled) -> None:
        """Have the compiler begin with the kernels that it will be asked for, beside what is planned with nothing
        compiled, and with those of regions that this joins."""
        spills = Spills(self.context.costs, self.context.objective, compiled, self.context.kernels)
        spills.begin(self.plan.fusions)
        spills.begin([region for region in self.uncompiled.fusions if region.parts])

    def seconds(self, plan: Plan) -> float:
        """What one run takes on the GPU by a whole plan: as predicted, but for regions that were measured, and what
        convolutions that it leaves to the runtime mostly take beyond that."""
        costs, every = self.form.costs, self._every
        unfused, _ = costs.unfused(every)
        found = (measured_cost(region, costs) or region.cost for region in plan.fusions)
        return unfused - sum(cost.seconds_saved for cost in found) + left_seconds(self.left(plan), costs)

    def left(self, plan: Plan) -> set[Node]:
        """The nodes that a plan leaves to the runtime."""
        return set(self._every) - {node for region in plan.fusions for node in region.nodes}

    @cached_property
    def _every(self) -> list[Node]:
        return [node for graph in self.form.graph.walk() for node in graph.nodes]


@dataclass(frozen=True)
class Expected:
    """What is chosen unless the compiler has a prediction changed.

    Attributes:
        start: the form that drafts were made of; drafts: the model's own layout first; eager: see ``Drafting``.
    """

    start: Form
    drafts: Sequence[Draft]
    eager: bool

    @cached_property
    def best(self) -> Draft:
        """The draft that is taken then, whose whole plan is ``uncompiled``."""
        return self.drafts[_best(self.drafts, [draft.uncompiled for draft in self.drafts], self.eager)]

    def seconds(self, converts: bool) -> float:
        """What a run of that takes; ``converts``: where the runtime converts layouts around convolutions and poolings
        that are left to it, which the plan was not made for."""
        draft = self.best
        more = converting_seconds(draft.left(draft.uncompiled), draft.form.costs) if converts else 0.0
        return draft.seconds(draft.uncompiled) + more


@dataclass(frozen=True)
class Drafting:
    """What makes drafts of a model's forms.

    Attributes:
        forming: makes the forms; objective: what their plans are to be good at.
        evidence: what was measured on the GPU to plan for, None where nothing was.
        eager: take a layout, and what else ``Context`` says, also where it is not predicted to take less time, to
            measure it.
        kernels: what is known of regions by their structure.
        rounding: whether constants may be folded into weights where that rounds these anew.
    """

    forming: Forming
    objective: Objective = field(default_factory=Objective)
    evidence: Evidence | None = None
    eager: bool = False
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)
    rounding: bool = False

    def context(self, form: Form) -> Context:
        """What a form is planned with."""
        context = Context(form.canonical.graph, self.forming.rules, form.costs, self.objective, self.eager,
                          kernels=self.kernels, rounding=self.rounding)
        return context.knowing(self.evidence)

    def expected(self, form: Form, compiled: Compiled | None = None) -> Expected:
        """What ``chosen`` is told by predictions alone; values are dequantised for each of their readers where there
        are any, in case a product takes in a node that does that.

        Args:
            form: the model as it stands; compiled: begins to compile kernels of drafts that will hardly lose to others.
        """
        # Products are looked at only where something was measured, is to be, or is foreseen by the GPU's rates.
        looks = DEQUANTISED not in self.forming.rules.disabled and (self._measures or form.costs.knows_tiles)
        values = shared(form.graph) if looks else ()
        start = self.forming.dequantised(form, values) if values else form
        return Expected(start, self._drafts(start, compiled), self.eager)

    def chosen(self, form: Form, compiled: Compiled | None, expected: Expected | None = None) -> tuple[Form, Plan]:
        """The form of a model that is worth most, and its plan.

        Args:
            form: the model as it stands; compiled: compiles kernels for the GPU to plan for; expected: of this form.
        """
        expected = expected or self.expected(form, compiled)
        found, plan = self._chosen(expected, compiled)
        if expected.start is form or _takes_in(plan, found, self.eager):
            return found, plan
        return self._chosen(Expected(form, self._drafts(form, compiled), self.eager), compiled)

    def _chosen(self, expected: Expected, compiled: Compiled | None) -> tuple[Form, Plan]:
        """The same of what may become of biases and layouts.  Where a bias finds no place any more once kernels are
        compiled, that is decided anew without it."""
        form = expected.start
        kept: set[str] = set()
        told: tuple[Refusal, ...] = ()
        for number in range(MOST_PLANS):
            drafts = self._drafts(form, compiled, kept, told) if number else expected.drafts
            draft, plan = self._better(drafts, compiled)
            sums = separated_sums(draft.form.loaded.proto)
            lost = sorted((sums & _results(draft.uncompiled)) - _results(plan))
            if not lost:
                break
            kept.update(lost)
            told += tuple(_kept(form.graph, draft.form.graph, lost, plan))
        else:
            draft, plan = self._better(self._in_layouts(self.draft(form, told)), compiled)
        return _with_weights(draft.form, plan), replace(plan, refusals=(*plan.refusals, *draft.told))

    def _drafts(self, form: Form, compiled: Compiled | None, kept: Collection[str] = (), told: tuple[Refusal, ...] = ()
                ) -> list[Draft]:
        """With biases apart, in each layout."""
        return self._in_layouts(self.with_biases_apart(form, kept, told, compiled))

    def draft(self, form: Form, told: Iterable[Refusal] = ()) -> Draft:
        """The draft of a form as it stands."""
        context = self.context(form)
        return Draft(form, context, drafted(context), tuple(told))

    def with_biases_apart(self, form: Form, kept: Collection[str] = (), why: tuple[Refusal, ...] = (),
                          compiled: Compiled | None = None) -> Draft:
        """The form in which those biases are apart that fused nodes take in, but for some that are ``kept``, by what
        their convolutions and products compute, and why.  ``compiled`` begins with kernels of a draft that will hardly
        lose to another, beside what is planned with nothing compiled."""
        biases, told = self.forming.separable(form, self.objective.least_gain)
        biases = {name: bias for name, bias in biases.items() if name not in kept}
        told += why
        for _ in range(MOST_PLANS if biases else 0):
            tried = _begun(self.draft(self._lying(self.forming.apart(form, biases)), told), compiled)
            taken = _results(tried.uncompiled)
            lost = [name for name in biases if name not in taken]
            if not lost:
                return tried
            told += tuple(_kept(form.graph, tried.form.graph, lost, tried.uncompiled))
            biases = {name: bias for name, bias in biases.items() if name in taken}
            if not biases:
                break
        return _begun(self.draft(self._lying(form), told), compiled)

    def _lying(self, form: Form) -> Form:
        """A form as it is planned first: channels-last where it will be that, and is too large to be planned twice."""
        if not self._allows_layouts or self._measures or not form.costs.knows_tiles:
            return form
        if len(form.canonical.graph.nodes) <= MOST_FORESEEN:
            return form
        unfused, _ = form.costs.unfused(node for node in form.graph.nodes if not lacks_kernel(node))
        if laying_seconds(form.graph.nodes, form.costs) < LAYS_OUT * unfused:
            return form
        return self.forming.channels_last(form, self.objective.tf32)

    @property
    def _allows_layouts(self) -> bool:
        """Whether values may lie otherwise; with the objective's channels last, ONNX Runtime lays images out itself."""
        return LAYOUTS not in self.forming.rules.disabled and not self.objective.channels_last

    @property
    def _measures(self) -> bool:
        """Whether anything was measured, or is to be."""
        return self.eager or self.evidence is not None

    def _better(self, drafts: Sequence[Draft], compiled: Compiled | None) -> tuple[Draft, Plan]:
        """The form at hand, or that in which values lie channels-last between fused nodes where that is predicted to
        take less time, with its whole plan.  The other one's kernels are compiled only where the compiler has the
        prediction changed."""
        plans = [draft.uncompiled for draft in drafts]
        done: set[int] = set()
        while True:
            best = _best(drafts, plans, self.eager)
            if best in done:
                return drafts[best], plans[best]
            if compiled is not None:
                drafts[best].begin(compiled)  # what joins regions is compiled beside these, not after them
            plans[best] = drafts[best].compiled(compiled)
            done.add(best)

    def _in_layouts(self, own: Draft) -> list[Draft]:
        """A draft, and the same with values channels-last where that may come to something."""
        looks = self._allows_layouts and _may_lie_otherwise(own)
        laid = self.forming.channels_last(own.form, _turns(own)) if looks else own.form
        return [own] if laid is own.form else [own, self.draft(laid, own.told)]


def _best(drafts: Sequence[Draft], plans: Sequence[Plan], eager: bool) -> int:
    """Which of a form and, where there is one, the same with values laid out otherwise, by their plans: the latter
    where convolutions or products are fused, without which it comes to nothing."""
    if len(drafts) < 2 or eager:
        return len(drafts) - 1
    fused = any(is_contraction(node) for region in plans[1].fusions for node in region.view)
    return int(fused and drafts[1].seconds(plans[1]) < drafts[0].seconds(plans[0]))


def _begun(draft: Draft, compiled: Compiled | None) -> Draft:
    """A draft, which the compiler begins with where it will hardly lose to another."""
    if compiled is not None and not _may_lie_otherwise(draft):
        draft.begin(compiled)
    return draft


def _with_weights(form: Form, plan: Plan) -> Form:
    """The form with the weights that kernels of a plan read in the place of its own."""
    regions = [region for region in plan.fusions if region.folded]
    if not regions:
        return form
    made = [Folded(value.name, value.dtype or 0, region.folding, region.label)
            for whole in regions for region in whole.leaves for value in region.folded]
    arrays = {value.name: value.contents() for region in regions for value in region.folded
              if value.contents is not None}
    values = {value.name: value for region in regions for value in region.folded}
    proto = with_weights(form.loaded.proto, made, arrays, form.loaded.store)
    return replace(form, loaded=replace(form.loaded, proto=proto),
                   graph=replace(form.graph, values={**form.graph.values, **values}))


def _takes_in(plan: Plan, form: Form, eager: bool) -> bool:
    """Whether a region with a product, chosen or, where ``eager``, to be measured, holds a node that dequantises for it
    alone what others read too."""
    regions = plan.with_products if eager else plan.fusions
    record = dequantised_record(form.loaded.proto)
    copies = set() if record is None else {copy for each in record.dequantised for copy in each.copies}
    computed = (value for region in regions if any(map(is_contraction, region.nodes))
                for node in region.nodes for value in node.outputs)
    return any(value is not None and value.name in copies for value in computed)


def _may_lie_otherwise(draft: Draft) -> bool:
    """Whether another layout may come to something: what gains by it are convolutions that are fused, which are looked
    at only where something was measured; where it is known how fast their kernels are, those that the runtime lays out
    itself, unless there is much to plan; and products whose weights may lie transposed."""
    nodes = draft.context.view.nodes
    if draft.context.measures:
        convolutions = any(is_convolution(node) for region in draft.plan.with_products for node in region.view)
    elif draft.form.costs.knows_tiles and len(nodes) <= MOST_FORESEEN:
        convolutions = any(map(is_laid_anew, nodes))
    else:
        return False
    return convolutions or (_turns(draft) and any(map(is_turnable, nodes)))


def _turns(draft: Draft) -> bool:
    """Whether weights of products of float32 may lie transposed for kernels that the GPU to plan for is known for."""
    return draft.context.objective.tf32 and draft.form.costs.knows_tiles


def _results(plan: Plan) -> set[str]:
    """Names of what the nodes of a plan's regions compute."""
    return {value.name for region in plan.fusions for node in region.nodes for value in node.outputs if value}


def _wanted(form: Form, biases: Mapping[str, Bias], least_gain: float) -> tuple[dict[str, Bias], tuple[Refusal, ...]]:
    """Those of the biases that may come to something, and why others do not: nothing reads the result, and a kernel of
    ours would add the bias no faster."""
    wanted: dict[str, Bias] = {}
    refusals = []
    for name, bias in biases.items():
        value = form.graph.values[name]
        own = None if value.producer is None else biased([value.producer])
        before = 0.0 if own is None else form.costs.bias_seconds(own)
        after = form.costs.bias_seconds(Biased(value, True), STREAMING)
        if value.consumers or before > least_gain * after or value.producer is None:
            wanted[name] = bias
        else:
            words = f"no node reads what it computes, and a kernel of its own would run {before / after:.2f}x as fast"
            refusals.append(Refusal(BIAS_CODE, f"{value.producer.op} {BIAS_KEPT}: {words}, under {least_gain:g}x",
                                    value.producer.label))
    return wanted, tuple(refusals)


def _kept(graph: Graph, apart: Graph, names: Iterable[str], plan: Plan) -> Iterator[Refusal]:
    """Why biases stay where they were, after the plan in which they stood apart: the best region that held one says it,
    else what was refused there."""
    weighed: dict[Node, Considered] = {}
    for each in sorted(plan.considered, key=lambda each: 0.0 if each.cost is None else each.cost.seconds_saved):
        weighed.update((node, each) for member in each.nodes for node in member.originals)
    refused = {refusal.node: refusal.message for refusal in reversed(plan.refusals)}
    for name in names:
        owner, added = graph.values[name].producer, apart.values[name].producer
        if owner is not None and added is not None:
            why = weighed[added].reason if added in weighed else refused.get(
                added.label, "nothing beside it can be fused with it")
            yield Refusal(BIAS_CODE, f"{owner.op} {BIAS_KEPT}: as a sum behind it, {why}", owner.label)
