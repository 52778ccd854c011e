"""The lock of an optimisation: what was fused, and what ONNX Runtime fuses by itself before and after.

    plan ─ fused nodes ─▶ structures, places            fusions
    graph ─ runtime rules ─▶ groups before ─┐
    fused model's graph ─▶ groups after ────┴─▶ which still fire, which are ours, which are broken    runtime
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import onnx

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import type_name
from onnxfuse.locking.asked import ask
from onnxfuse.locking.lock import After, Fusion, Interface, Lock, Made, Plan, RuntimeFusion, RuntimeSpot, Spot
from onnxfuse.locking.structure import arranged, operator, structure
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.provider import fusions as provider
from onnxfuse.provider.removed import readers, source
from onnxfuse.reporting import Report
from onnxfuse.reporting.left import recognised
from onnxfuse.rules import groups_of
from onnxfuse.version import __version__


@dataclass(frozen=True)
class Found:
    """Something that is fused: the nodes of the view, or of the graph, in the order of the structure.

    Attributes:
        rule: id; words: its structure; spot: where it is.
        holds: the original nodes.
    """

    rule: str
    words: tuple[str, ...]
    spot: Spot
    nodes: tuple[Node, ...]
    holds: frozenset[Node]

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators of its nodes."""
        return tuple(map(operator, self.words))


def lock_of(optimised: Optimised, report: Report) -> Lock:
    """The lock of a fused model."""
    return lock_from(optimised, report, fused(optimised), runtime_fused(optimised))


def lock_from(optimised: Optimised, report: Report, ours: Sequence[Found], theirs: Sequence[Found]) -> Lock:
    """The same of what was found: ``fused`` and ``runtime_fused``."""
    return Lock(
        made=made_here(), plan=_plan(optimised, report), model=interface_of(optimised, report.model),
        kernels={"before": report.before.kernels, "after": report.after.kernels},
        rules=dict(sorted(Counter(entry.rule for entry in report.fusions).items())),
        recognised=dict(sorted(recognised(optimised).items())),
        fusions=[Fusion(rule=rule, structure=list(words), times=len(group), at=[found.spot for found in group])
                 for (rule, words), group in _alike(ours).items()],
        runtime=[_runtime_entry(rule, words, group)
                 for (rule, words), group in _alike(theirs).items()],
    )


def made_here() -> Made:
    """The releases at hand."""
    import onnxruntime

    return Made(onnxfuse=__version__, onnxruntime=onnxruntime.__version__, onnx=onnx.__version__)


def _plan(optimised: Optimised, report: Report) -> Plan:
    objective = optimised.objective
    usual = asdict(type(objective.hints)())
    return Plan(
        target=report.target, dims=dict(report.dims), strategy=objective.strategy,
        hints={name: number for name, number in asdict(objective.hints).items() if number != usual[name]},
        least_gain=objective.least_gain, channels_last=objective.channels_last,
        keeps_biases=optimised.keeps_biases,
        keeps_float32=not objective.tf32, fold_weights=optimised.fold_weights,
        disabled=sorted(optimised.rules.disabled),
        compiled=any(fusion.compiled is not None for fusion in optimised.plan.fusions),
    )


def interface_of(optimised: Optimised, file: str) -> Interface:
    """What others call a model by."""
    graph = optimised.graph
    return Interface(
        file=file.replace("\\", "/").rpartition("/")[2],
        opsets={domain or "ai.onnx": version for domain, version in sorted(graph.opsets.items())},
        inputs={value.name: typed(value) for value in graph.inputs},
        outputs={value.name: typed(value) for value in graph.outputs},
    )


def typed(value: Value) -> list[str | int]:
    """Element type and sizes of a value, as the lock has them."""
    kind = type_name(value.dtype)
    if value.shape is None:
        return [kind, "..."]
    return [kind, *(str(size) if size.value is None else size.value for size in value.shape)]


def _alike(found: Iterable[Found]) -> dict[tuple[str, tuple[str, ...]], list[Found]]:
    """By rule and structure, in the order of these: where the first of them lies is no matter."""
    groups: dict[tuple[str, tuple[str, ...]], list[Found]] = {}
    for each in found:
        groups.setdefault((each.rule, each.words), []).append(each)
    return dict(sorted(groups.items()))


def fused(optimised: Optimised) -> list[Found]:
    """Our own fused nodes, in graph order."""
    found = []
    for region in optimised.plan.fusions:
        nodes = arranged(region.view)
        spot = Spot(nodes=[node.label for node in nodes], reads=_read(nodes),
                    writes=[value.name for value in region.outputs],
                    spelled=list(dict.fromkeys(node.rule for node in nodes if node.rule is not None)))
        found.append(Found(region.rule, structure(nodes), spot, nodes, frozenset(region.nodes)))
    return found


def runtime_fused(optimised: Optimised) -> list[Found]:
    """ONNX Runtime's own fusions before, in graph order, with what becomes of them."""
    own = {node for region in optimised.plan.fusions for node in region.nodes}
    after = _After(optimised)
    costs = {broken.fusion: broken.seconds for broken in optimised.costs.broken(optimised.plan.fusions)}
    seen = ask(optimised.folded) if optimised.costs.groups else None
    found = []
    for group in optimised.costs.groups:
        if not group.rules:
            continue  # a convolution or product and the bias that is its own
        nodes = arranged(group.nodes)
        left = [node for node in nodes if node not in own]
        made = [value.name for node in nodes for value in node.outputs if value is not None]
        spot = RuntimeSpot(nodes=[node.label for node in nodes], reads=_read(nodes), writes=_written(nodes),
                           after=after.of(group, left), seen=None if seen is None else seen(made),
                           costs_us=round(costs.get(group, 0.0) * 1e6, 3))
        found.append(Found("+".join(group.rules), structure(nodes), spot, nodes, group.nodes))
    return found


def _read(nodes: Sequence[Node]) -> list[str]:
    """What nodes read of others, constants left out, as ONNX Runtime sees it."""
    read = dict.fromkeys(source(value) for node in nodes for value in node.reads())
    return [value.name for value in read if not value.is_constant and value.producer not in nodes]


def _written(nodes: Sequence[Node]) -> list[str]:
    """What nodes give to others, or to the graph."""
    inner = set(nodes)
    made = [value for node in nodes for value in node.outputs if value is not None]
    return [value.name for value in made
            if value.is_output or any(reader not in inner for reader in readers(value)) or source(value) is not value]


class _After:
    """ONNX Runtime's own fusions in the fused model, where nodes that were not fused have the names that they had."""

    def __init__(self, optimised: Optimised) -> None:
        graph = load_graph(replace(optimised.folded, proto=optimised.lean))
        groups = groups_of(graph, optimised.rules.runtime)
        self._home = {key: keys for keys in (frozenset(map(_key, group.nodes)) for group in groups) for key in keys}

    def of(self, group: provider.RuntimeFusion, left: Collection[Node]) -> After:
        """What becomes of a fusion of which these nodes are not in fused nodes."""
        if not left:
            return "fused"
        homes = {self._home.get(_key(node)) for node in left}
        home = homes.pop()
        if homes or home is None:
            return "broken"
        return "fires" if home == frozenset(map(_key, group.nodes)) else "partly"


def _key(node: Node) -> tuple[str, str]:
    """What names a node in the fused model as before: its body, and its first result."""
    first = next((value.name for value in node.outputs if value is not None), "")
    return "" if node.body is None else node.body.label, first


def _runtime_entry(rule: str, words: tuple[str, ...], group: Sequence[Found]) -> RuntimeFusion:
    spots = [found.spot for found in group if isinstance(found.spot, RuntimeSpot)]
    return RuntimeFusion(rule=rule, structure=list(words), before=len(spots), at=spots,
                         after=sum(spot.after in ("fires", "partly") for spot in spots))
