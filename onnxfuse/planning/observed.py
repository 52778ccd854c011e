"""What a profile of a run says of the nodes of a model: their time, and how often they ran.

The runtime changes the graph before it runs it: nodes that it fused, folded or renamed are not found in the profile by
the model's names.  They keep their predicted time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx

from onnxfuse.graph.model import Graph, Node
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.placement import Kind
from onnxfuse.planning.costs.traffic import Ledger, Observation

LARGE_SECONDS = 20e-6
"""A node that no GPU of the target's kind runs faster than this shows whether the host waited for the GPU."""

WAITED, MOST = 0.5, 0.9
"""The host waited where ``MOST`` of the large nodes took ``WAITED`` of their least GPU time, or more."""


class NodeTime(Protocol):
    """``measuring.run_profile.NodeRuns``."""

    @property
    def executions(self) -> float: ...
    @property
    def host(self) -> float: ...
    @property
    def gpu(self) -> float | None: ...
    @property
    def on_gpu(self) -> bool: ...


@dataclass(frozen=True)
class Observed:
    """What a profile shows of a model.

    Attributes:
        nodes: by node of the graph; bodies: by name, of nodes in bodies of If, Loop and Scan.
        notes: what a user should know of how the profile was used, a sentence each.
    """

    nodes: Mapping[Node, Observation]
    bodies: Mapping[str, Observation]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Body:
    """A body in the model: the name of the node that owns it, what it is called there, and names of its nodes."""

    owner: str
    attribute: str
    nodes: tuple[str, ...]


def observe(times: Mapping[str, NodeTime], graph: Graph, model: onnx.ModelProto, ledger: Ledger,
            profile: Profile) -> Observed:
    """Map a profile onto a model.

    Args:
        times: by the runtime's names.
        graph: the model's graph; model: the model itself, for the bodies.
        ledger: traffic of ``graph``; profile: the GPU to plan for.
    """
    found: dict[Node, NodeTime] = {}
    names = runtime_names(graph)
    for node, name in names.items():
        # What a profile shows of an If, a Loop or a Scan holds all that runs in its bodies.
        alone = ledger.node(node).kernels and ledger.placement.kinds[node] is not Kind.CONTROL
        if name in times and alone and times[name].on_gpu:
            found[node] = times[name]
    seconds = _seconds(found, ledger, profile)
    nodes = {node: Observation(None if seconds is None else seconds[node] * time.executions, time.executions)
             for node, time in found.items()}
    bodies = list(_bodies(model.graph))
    inner, never = _in_bodies(bodies, times)
    known = {*names.values(), *inner, *(name for body in bodies for name in body.nodes)}
    return Observed(nodes, inner, tuple(_notes(times, known, ledger, nodes, seconds is None, never)))


def runtime_names(graph: Graph) -> dict[Node, str]:
    """What the runtime calls each node: its name, else its operator and its place among those that are not Constant."""
    names, place = {}, 0
    for node in graph.nodes:
        if node.op == "Constant" and not node.domain:
            continue
        names[node] = node.name or f"{node.op}_{place}"
        place += 1
    return names


def _seconds(found: Mapping[Node, NodeTime], ledger: Ledger, profile: Profile) -> dict[Node, float] | None:
    """GPU seconds of one execution by node; None where the profile has none.

    Without kernels in the profile its times are the host's.  They are GPU times where the host waited for each kernel
    (CUDA_LAUNCH_BLOCKING=1), but for what launching takes.  It did if large nodes took as long as they must.
    """
    kernels = {node: time.gpu for node, time in found.items() if time.gpu is not None}
    if len(kernels) == len(found):
        return kernels
    least = {node: ledger.node(node).bytes / (profile.bandwidth_gb_s * 1e9 * profile.l2_gain) for node in found}
    large = [node for node in found if least[node] >= LARGE_SECONDS]
    waited = sum(found[node].host >= WAITED * least[node] for node in large)
    if not large or waited < MOST * len(large):
        return None
    launching = min(time.host for time in found.values())
    return {node: max(time.host - launching, 0.0) + profile.floor_us * 1e-6 for node, time in found.items()}


def _bodies(graph: onnx.GraphProto) -> Iterator[_Body]:
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names = tuple(inner.name for inner in body.node if inner.name and inner.op_type != "Constant")
                yield _Body(node.name, attribute.name, names)
                yield from _bodies(body)


def _in_bodies(bodies: Sequence[_Body], times: Mapping[str, NodeTime]) -> tuple[dict[str, Observation], list[_Body]]:
    """Observations of nodes in bodies, by name, and the bodies that never ran: their owner did, and no node of them."""
    inner: dict[str, Observation] = {}
    never: list[_Body] = []
    for body in bodies:
        ran = [times[name] for name in body.nodes if name in times]
        if not ran and (not body.nodes or body.owner not in times):
            continue
        executions = max((time.executions for time in ran), default=0.0)
        if not ran:
            never.append(body)
        for name in body.nodes:
            time = times.get(name)
            gpu = time.gpu * time.executions if time is not None and time.gpu is not None else None
            inner[name] = Observation(gpu, executions if time is None else time.executions)
    return inner, never


def _notes(times: Mapping[str, NodeTime], known: set[str], ledger: Ledger,
           nodes: Mapping[Node, Observation], untimed: bool, never: Sequence[_Body]) -> Iterator[str]:
    graph = ledger.graph
    inside = [node for body in graph.walk() if body is not graph for node in body.nodes]
    launched = sum(ledger.node(node).kernels > 0 for node in (*graph.nodes, *inside))
    named = len(nodes) + sum(node.name in times and ledger.node(node).kernels > 0 for node in inside)
    strange = sum(name not in known for name in times)
    yield (f"profile: {named} of {launched} nodes that launch kernels are in it by name; {strange} of its "
           f"{len(times)} nodes are none of the model's (the runtime fused or renamed them)")
    if not named:
        yield "profile: it names no node of this model; was it recorded with another?"
    elif untimed:
        yield ("profile: its times are the host's, not the GPU's: it tells how often nodes ran, and times stay "
               "predicted; record it with CUDA_LAUNCH_BLOCKING=1 in the environment to have GPU times")
    for body in never:
        yield (f"profile: {body.attribute} of '{body.owner}' never ran: its {len(body.nodes)} named nodes are not "
               "worth fusing")
