"""The form of a model that is planned and rewritten, and its plan.

The bias of a convolution or a product is a sum behind it wherever a region that the plan chooses takes that in; all
others keep their own.  Which these are, planning tells: with all biases apart first, and again with those that found a
place.  Then values around convolutions may lie channels-last: that form and its plan are taken if they are predicted
to take less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxfuse.folding import BIAS_CODE, BIAS_KEPT, Bias, Paired, paired, separable
from onnxfuse.graph import Graph, LoadedModel, build_graph
from onnxfuse.graph.binding import Bound, bound, check_sizes
from onnxfuse.graph.model import Node
from onnxfuse.measurements import observing
from onnxfuse.operators import infer
from onnxfuse.planning.contractions import measured_cost
from onnxfuse.planning.cost import STREAMING, CostModel
from onnxfuse.planning.hardware import Profile
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.traffic import Ledger
from onnxfuse.planning.weighing import Considered
from onnxfuse.provider.fusions import with_biases
from onnxfuse.provider.kernels import Biased, biased
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import lay_out, separate, separated_sums
from onnxfuse.rules import CanonicalGraph, RuleSet, canonicalise, groups_of

MOST_PLANS = 3
"""Plans with biases apart after which all stay where they were: in each of them one more found no place."""

BETTER = 0.98
"""Share of the time of values as the model has them that another layout must stay under: less is noise."""


@dataclass(frozen=True)
class Form:
    """A model in one form, and what planning needs of it.

    Attributes:
        loaded: the model; graph: of it, and canonical: as rules see it; sizes: to plan for; costs: at these.
        notes: what a user should know of all that.
    """

    loaded: LoadedModel
    graph: Graph
    canonical: CanonicalGraph
    sizes: Bound
    costs: CostModel
    notes: tuple[str, ...]


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
        graph = infer(build_graph(loaded))
        canonical = canonicalise(graph, self.rules.canonical)
        sizes = bound(graph, self.dims)
        doubts = check_sizes(graph, sizes.sizes, self.dims)
        ledger, notes = observing(Ledger(graph, sizes.sizes), self.profile, loaded.proto, self.run_profile)
        groups = with_biases(groups_of(graph, self.rules.runtime), separated_sums(loaded.proto))
        costs = CostModel(ledger, self.profile, groups)
        return Form(loaded, graph, canonical, sizes, costs, (*sizes.notes, *doubts, *notes))

    def apart(self, form: Form, biases: Mapping[str, Bias]) -> Form:
        """The same model with biases apart, given by what their convolutions and products compute."""
        made = self.form(replace(form.loaded, proto=separate(form.loaded.proto, biases)))
        costs = _shared(made.costs, biases) if made.costs.ledger.observed else made.costs
        return replace(made, costs=costs, notes=form.notes)

    def laid_out(self, form: Form, pairs: Sequence[Paired]) -> Form:
        """The same model with pairs of transposes behind some values."""
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


def with_biases_apart(
    form: Form, forming: Forming, planned: Callable[[Form], Plan], least_gain: float
) -> tuple[Form, Plan]:
    """The form in which those biases are apart that fused nodes take in, and its plan.

    Args:
        least_gain: predicted speed-up that a region must pass.
    """
    biases, told = separable(form.graph, form.costs.groups, forming.convolutions)
    biases, idle = _wanted(form, biases, least_gain)
    told += idle
    for _ in range(MOST_PLANS if biases else 0):
        tried = forming.apart(form, biases)
        plan = planned(tried)
        taken = {value.name for region in plan.fusions for node in region.nodes for value in node.outputs if value}
        lost = biases.keys() - taken
        if not lost:
            return tried, replace(plan, refusals=(*plan.refusals, *told))
        told += tuple(_kept(form.graph, tried.graph, [name for name in biases if name in lost], plan))
        biases = {name: bias for name, bias in biases.items() if name in taken}
        if not biases:
            break
    plan = planned(form)
    return form, replace(plan, refusals=(*plan.refusals, *told))


def with_layouts(
    form: Form, plan: Plan, forming: Forming, planned: Callable[[Form], Plan], *, eager: bool = False
) -> tuple[Form, Plan]:
    """The form in which values lie channels-last between fused nodes, and its plan, where that is predicted to take
    less time than the form and the plan at hand; these elsewhere.

    Args:
        eager: take it also where it is not, to measure it.
    """
    pairs = paired(form.graph, form.canonical.graph)
    if not pairs:
        return form, plan
    tried = forming.laid_out(form, pairs)
    found = planned(tried)
    if eager:
        return tried, found
    return (tried, found) if seconds(tried, found) < BETTER * seconds(form, plan) else (form, plan)


def seconds(form: Form, plan: Plan) -> float:
    """What one run takes on the GPU: as predicted, but for regions that were measured."""
    every = (node for graph in form.graph.walk() for node in graph.nodes)
    unfused, _ = form.costs.unfused(every)
    costs = ((measured_cost(region) or region.cost) for region in plan.fusions)
    return unfused - sum(cost.seconds_saved for cost in costs)


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
