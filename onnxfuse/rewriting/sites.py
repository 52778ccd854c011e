"""Regions in terms of the model: where their nodes stand in it, their bodies, and the names of their operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from onnxfuse.graph.model import Graph, Node, Place
from onnxfuse.lowering import launch
from onnxfuse.provider.removed import passes_on
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.rewriting.body import Body, make_body
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.invariants import InvariantError, check_body, require
from onnxfuse.rewriting.located import LocatedRegion
from onnxfuse.rewriting.names import NamePool


@dataclass(frozen=True)
class Site:
    """A region in terms of the model: positions of its nodes, names of its values, its body and operator type.

    ``again`` are positions of nodes that another region holds too; ``passing`` of those that pass their operand on, or
    that a region has beside it, which others may hold too, and ``stands`` of those among them that stand beside the
    fused node.
    """

    number: int
    region: Region
    nodes: frozenset[int]
    again: frozenset[int]
    passing: frozenset[int]
    inlined: frozenset[str]
    body: Body
    op: str
    stands: frozenset[int] = frozenset()

    @property
    def actuals(self) -> tuple[str, ...]:
        """What the fused node reads, "" for absent host inputs."""
        hosts = tuple(value.name for value in self.region.hosts)
        padding = ("",) * (launch.HOST_INPUTS - len(hosts))
        return hosts + padding + tuple(value.name for value in self.region.tensors)

    @property
    def label(self) -> str:
        return _label(self.number, self.region)


def find_sites(
    model: onnx.ModelProto, graph: Graph, regions: Sequence[Region], indexes: Mapping[Place, ModelIndex]
) -> tuple[list[Site], list[Refusal]]:
    """The regions in terms of the model; and why some have none: no name is left for them, or for one that they share
    nodes with.

    Raises:
        InvariantError: a region breaks a promise of ``Region``.
    """
    graphs = {each.place: each for each in graph.walk()}
    pool = NamePool.of(model)
    sites: list[Site] = []
    refusals: list[Refusal] = []
    taken: dict[tuple[Place, int], str] = {}
    lost: set[tuple[Place, int]] = set()
    for number, region in enumerate(regions):
        label = _label(number, region)
        _check_values(graphs, region, label)
        index = indexes[region.place]
        located = resolve(index, region, label)
        again, passing = _again(index, region, located), _passing(index, region)
        _claim(index, located, again | passing, taken)
        check_body(index, located)
        body = make_body(index, located)
        op, _ = pool.name(body.function, region.kernel.plan.to_json(), region.kernel.source)
        if op is None:
            refusals.append(_out_of_names(region))
            lost.update((region.place, position) for position in located.nodes if position not in passing)
        else:
            nodes, inlined = frozenset(located.nodes), frozenset(located.inlined)
            sites.append(Site(number, region, nodes, again, passing, inlined, body, op))
    kept = _apart(sites, lost)
    return kept, refusals + [_out_of_names(site.region) for site in sites if site not in kept]


def _label(number: int, region: Region) -> str:
    """What errors call a region, by its position among those given."""
    return f"region {number} ({region.rule})"


def _check_values(graphs: Mapping[Place, Graph], region: Region, label: str) -> None:
    """Check that a region is of a graph of the model, and its values are of that."""
    require(region.place in graphs, f"{label}: its nodes are of no graph of the model")
    for value in (*region.hosts, *region.tensors, *region.inlined, *region.outputs):
        require(value.name in graphs[region.place].values, f"{label}: {value.name!r} is no value of the graph")


def _claim(index: ModelIndex, located: LocatedRegion, common: frozenset[int], taken: dict[tuple[Place, int], str]
           ) -> None:
    """Enter a region's nodes among those ``taken``, by the label of the region that holds each; but for ``common`` ones
    no other may hold them."""
    for position in located.nodes:
        shared = position in common
        other = located.label if shared else taken.setdefault((index.place, position), located.label)
        require(other == located.label, f"{located.label} and {other} share node {index.nodes[position].name!r}")


def resolve(index: ModelIndex, region: Region, label: str) -> LocatedRegion:
    """Where in the model the region's nodes stand, and the constants that its body holds.

    Constant nodes among the region's nodes are held as the inlined constants are: others may read them too.
    """
    found = set()
    inlined = {value.name: value.constant for value in region.inlined}
    written = {value.name for value in region.outputs}
    for node in region.nodes:
        for original in node.originals:
            name = _first_output(original)
            position = index.producer.get(name)
            if position is None or index.nodes[position].op_type != original.op:
                raise InvariantError(f"{label}: node {original.label!r} is not in the model")
            if index.constant_node(name) is not None and name not in written:
                inlined.setdefault(name, None)
            else:
                found.add(position)
    read = {name for position in found for name in index.reads[position]}
    listed = {value.name for value in region.inlined}
    hosts, tensors, outputs = (
        tuple(value.name for value in values) for values in (region.hosts, region.tensors, region.outputs)
    )
    return LocatedRegion(label, tuple(sorted(found)), hosts, tensors,
                         {name: array for name, array in inlined.items() if name in read | listed}, outputs,
                         frozenset(value.name for value in region.folded))


def _again(index: ModelIndex, region: Region, located: LocatedRegion) -> frozenset[int]:
    """Positions of a region's nodes that another region holds too."""
    outer = {_first_output(original) for node in region.again for original in node.originals}
    return frozenset(position for position in located.nodes if outer.intersection(index.nodes[position].output))


def _passing(index: ModelIndex, region: Region) -> frozenset[int]:
    """Positions of a region's nodes that pass their operand on, or may stand beside it, and whose result is not the
    region's."""
    beside = {original for node in region.beside for original in node.originals}
    originals = (original for node in region.nodes for original in node.originals)
    return frozenset(
        index.producer[_first_output(node)] for node in originals
        if (node in beside or passes_on(node)) and node.outputs[0] not in region.outputs
        and node.outputs[0] is not None and index.constant_node(_first_output(node)) is None
    )


def in_graph_order(index: ModelIndex, site: Site, positions: Collection[int]) -> list[int]:
    """Positions of some of a site's nodes in the order of the graph, which does not hang on how the file is sorted."""
    found = (index.producer.get(_first_output(original)) for node in site.region.nodes for original in node.originals)
    return [position for position in dict.fromkeys(found) if position is not None and position in positions]


def _first_output(node: Node) -> str:
    return next((value.name for value in node.outputs if value is not None), "")


def _out_of_names(region: Region) -> Refusal:
    return Refusal(
        "region-names",
        f"All {launch.REGION_NAMES} names for fused operators are taken by other kernels of this model.",
        region.nodes[0].label,
        region.rule,
        "Disable a rule that makes many different kernels with little gain.",
    )


def _apart(sites: Sequence[Site], without: Iterable[tuple[Place, int]]) -> list[Site]:
    """The sites that hold none of the nodes ``without`` a name, nor a node of a site that does: what a region no longer
    writes, because all that read it compute it again, nobody would write."""
    lost = set(without)
    kept, left = list(sites), len(sites) + 1
    while len(kept) < left and lost:
        left = len(kept)
        for site in kept:
            held = {(site.region.place, position) for position in site.nodes - site.passing}
            if not lost.isdisjoint(held):
                lost |= held
        kept = [site for site in kept if (site.region.place, next(iter(site.nodes - site.passing))) not in lost]
    return kept


def by_place(sites: Iterable[Site]) -> dict[Place, list[Site]]:
    """Sites by the place of their graph."""
    found: dict[Place, list[Site]] = {}
    for site in sites:
        found.setdefault(site.region.place, []).append(site)
    return found


def with_standing(indexes: Mapping[Place, ModelIndex], sites: Sequence[Site]) -> list[Site]:
    """The sites, each told which of its nodes stand beside the fused node."""
    return [replace(site, stands=site.nodes & stands)
            for place, here in by_place(sites).items() for stands in [_standing(indexes[place], here)] for site in here]


def _standing(index: ModelIndex, sites: Sequence[Site]) -> set[int]:
    """Positions of the nodes of one graph that have to stand beside the fused nodes that hold them: they pass an
    operand on, and something that stays reads it, or it is an output of the graph."""
    passing = frozenset().union(*(site.passing for site in sites))
    fixed = frozenset().union(*(site.nodes - site.passing for site in sites))
    gone = passing | fixed
    wanted = [*index.outputs]
    wanted += [name for position, names in enumerate(index.reads) if position not in gone for name in names]
    wanted += [name for site in sites for name in site.actuals if name]
    written = {value.name for site in sites for value in site.region.outputs}
    found: set[int] = set()
    while wanted:
        name = wanted.pop()
        position = index.producer.get(name)
        if position in passing and position not in fixed and position not in found and name not in written:
            found.add(position)
            wanted += index.reads[position]
    return found
