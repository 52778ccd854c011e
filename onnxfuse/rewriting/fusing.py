"""Fused nodes and their functions into a copy of the model.

    regions ─ check ─▶ bodies ─ name ─▶ functions ─┐
                                                   ├─▶ copy of the model: nodes replaced, constants that nobody
    the model ────────────── copy ─────────────────┘   reads any more removed, types of the outputs declared

What was removed is recorded in the fused nodes (``metadata``), so that ``unfuse`` can put it back.  Bodies of If, Loop
and Scan are graphs like the main one, the innermost done first; a constant of a graph around them goes with the last
that reads it, and that graph's record keeps it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import helper

from onnxfuse.graph.constants import is_external
from onnxfuse.graph.model import Graph, Place
from onnxfuse.graph.order import all_nodes
from onnxfuse.graph.sorting import topological
from onnxfuse.lowering import launch
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.rewriting.body import value_record
from onnxfuse.rewriting.index import ModelIndex, graph_at, notes_of, reads_of, users_of
from onnxfuse.rewriting.invariants import InvariantError, check_cover, require
from onnxfuse.rewriting.mark import note_optimised
from onnxfuse.rewriting.metadata import (
    IR_VERSION,
    KEY,
    FusedRecord,
    IdleRecord,
    NodeRecord,
    ValueRecord,
    packed,
    to_json,
)
from onnxfuse.rewriting.names import Names, node_stem
from onnxfuse.rewriting.order import rearrange
from onnxfuse.rewriting.origin import Origin, first_output
from onnxfuse.rewriting.sites import Site, by_place, find_sites, in_graph_order, with_standing
from onnxfuse.rewriting.types import region_names, symbol_names, type_of, value_info


@dataclass(frozen=True)
class Placed:
    """A region that became a node: its position among the regions given, the node's name and operator type."""

    region: int
    node: str
    op: str


@dataclass(frozen=True)
class Rewritten:
    """A fused model, the regions it holds, and those that were left out and why."""

    model: onnx.ModelProto
    placed: tuple[Placed, ...]
    refusals: tuple[Refusal, ...] = ()


_Gone = dict[int, list[Site]]
"""The sites that hold a node, by its position; one of them but for what is computed again."""


def rewrite(model: onnx.ModelProto, graph: Graph, regions: Sequence[Region]) -> Rewritten:
    """Replace each region by one node of domain ``onnxfuse`` whose body is a function of the model.

    Args:
        model: what was loaded; it is not changed.  Weights in its file are copied once, others are not read.
        graph: the view of ``model`` in which the regions were found.
        regions: convex, together without a cycle between them, and disjoint but for what they compute again and for
            nodes that pass their operand on.

    Where something outside reads what a node passes on that regions hold, the node stands beside their fused nodes.

    Raises:
        InvariantError: a region breaks a promise of ``Region``.
    """
    indexes = ModelIndex.each(model, [(), *(region.place for region in regions)])
    sites, refusals = find_sites(model, graph, regions, indexes)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    if not sites:
        return Rewritten(result, (), tuple(refusals))
    _add_functions(result, sites)
    sites = with_standing(indexes, sites)
    names = Names(_names(model, indexes, sites))
    placed: list[Placed] = []
    sites_at, symbols = by_place(sites), symbol_names(model)
    # To reorder a graph moves its nodes, and with them the bodies inside.
    for place in sorted(indexes, key=lambda place: (-len(place), place)):
        placed += _apply(result, indexes[place], sites_at.get(place, []), names, symbols)
    _import_domain(result)
    note_optimised(result)
    return Rewritten(result, tuple(sorted(placed, key=lambda entry: entry.region)), tuple(refusals))


def _add_functions(model: onnx.ModelProto, sites: Sequence[Site]) -> None:
    """Give a model the bodies of the sites that it has not yet, under the names of their operators."""
    present = {function.name for function in model.functions if function.domain == launch.DOMAIN}
    for op, body in {site.op: site.body for site in sites if site.op not in present}.items():
        function = model.functions.add()
        function.CopyFrom(body.function)
        function.name = op


def _names(model: onnx.ModelProto, indexes: Mapping[Place, ModelIndex], sites: Sequence[Site]) -> set[str]:
    """Names of the nodes that stay, in all graphs of the model."""
    names = Counter(node.name for node in all_nodes(iter(model.graph.node)))
    gone = {(site.region.place, position) for site in sites for position in site.nodes - site.stands}
    names.subtract(indexes[place].nodes[position].name for place, position in gone)
    return {name for name, count in names.items() if count > 0}


def _apply(model: onnx.ModelProto, index: ModelIndex, sites: Sequence[Site], names: Names,
           symbols: frozenset[str]) -> list[Placed]:
    """Put fused nodes into one graph of the copy of the model that ``index`` is of."""
    gone = _nodes_gone(sites)
    reads = _reads(index, gone)
    users = users_of(reads)
    _check_covers(index, sites, gone, users)
    unread = _unread_constants(index, sites, gone, users)
    origin = Origin.of(index)
    idle = _idle_constants(graph_at(model, index.place), index, reads, gone, unread, origin)
    if index.place and not sites and not idle:
        return []
    left = unread | {entry.name for entry in idle}
    dropped = {index.producer[name] for name in left if name in index.producer}
    first = {site.number: _first(site, gone) for site in sites}
    rank = {item: place for place, item in enumerate(_order(index, reads, gone, first, dropped))}
    graph = graph_at(model, index.place)
    keys = [
        len(rank) if position in gone or position in dropped else rank[position]
        for position in range(len(index.nodes))
    ]
    placed: list[Placed] = []
    for site in sites:
        own = in_graph_order(index, site, _own(site, gone))
        stem = node_stem([index.nodes[position] for position in own], site.region.rule)
        name = names.give(stem)
        fresh = [v for v in site.region.outputs if v.name not in index.infos and v.name not in index.outputs]
        record = _record(index, site, gone, origin, unread, tuple(value.name for value in fresh))
        graph.node.append(_node(site, name, record))
        keys.append(rank[first[site.number]])
        graph.value_info.extend(value_info(value, symbols, site.label) for value in fresh)
        placed.append(Placed(site.number, name, site.op))
    rearrange(graph.node, keys)
    del graph.node[len(rank) :]
    _remove(graph, index, gone, left)
    known = replace(origin.record, idle=(*origin.record.idle, *idle))
    _mark(model, index, replace(origin, record=known), [position for position in rank if position not in gone])
    return placed


def _nodes_gone(sites: Sequence[Site]) -> _Gone:
    """The nodes that fused nodes take the place of, by position, with the sites that hold them."""
    gone: _Gone = {}
    for site in sites:
        for position in site.nodes - site.stands:
            gone.setdefault(position, []).append(site)
    return gone


def _check_covers(index: ModelIndex, sites: Sequence[Site], gone: _Gone, users: dict[str, list[int]]) -> None:
    """Check that nothing that stays reads what vanishes with the sites."""
    holders = {position: [site.nodes for site in found] for position, found in gone.items()}
    for site in sites:
        check_cover(index, site.label, site.nodes, {v.name for v in site.region.outputs}, users, holders)


def _reads(index: ModelIndex, gone: _Gone) -> tuple[tuple[str, ...], ...]:
    """What each node depends on, without the constants that the bodies of all its regions will hold a copy of."""
    return tuple(
        tuple(name for name in names if any(name not in site.inlined for site in gone[position]))
        if position in gone else names
        for position, names in enumerate(index.reads)
    )


def _own(site: Site, gone: _Gone) -> list[int]:
    """The nodes of a site that no other holds, in order."""
    return sorted(position for position in site.nodes if len(gone.get(position, ())) == 1)


def _first(site: Site, gone: _Gone) -> int:
    """The first node of a site that no other holds: it stands for the site."""
    own = _own(site, gone)
    require(bool(own), f"{site.label}: other regions hold all of its nodes")
    return own[0]


def _unread_constants(
    index: ModelIndex, sites: Sequence[Site], gone: _Gone, users: Mapping[str, list[int]]
) -> frozenset[str]:
    """Inlined constants that nothing reads any more."""
    names = {name for site in sites for name in site.inlined}
    return frozenset(
        name
        for name in names
        if name not in users
        and index.defines(name)
        and name not in index.outputs
        and name not in index.bound
        and index.producer.get(name) not in gone
    )


def _idle_constants(
    graph: onnx.GraphProto, index: ModelIndex, reads: Sequence[Sequence[str]], gone: _Gone,
    unread: Collection[str], origin: Origin,
) -> list[IdleRecord]:
    """Constants that only bodies read, and that these hold copies of in fused nodes now; ``graph`` has those bodies."""
    owners = dict.fromkeys(position for position in range(len(index.nodes)) if index.has_subgraph(position))
    users = {name for position, names in enumerate(reads) if position not in owners for name in names}
    users.update(name for position in owners for name in reads_of(graph.node[position]))
    found = []
    for name in dict.fromkeys(name for position in owners for name in index.reads[position]):
        if name in users or name in unread or name in index.outputs or name in index.bound or not index.defines(name):
            continue
        if not index.is_constant(name) or index.producer.get(name) in gone:
            continue
        at = index.infos.get(name)
        info, place = ("", None) if at is None else (packed(index.graph.value_info[at]), origin.infos.get(at))
        node = index.constant_node(name)
        position = origin.nodes.get(index.producer[name]) if node is not None else origin.initializers.get(
            index.initializers[name])
        if position is None or (at is not None and place is None):
            continue  # the file was edited: nobody could put it back where it was
        if node is not None:
            found.append(IdleRecord(name, position, node=packed(node), info=info, place=place))
            continue
        tensor = index.graph.initializer[index.initializers[name]]
        if not is_external(tensor):  # a record cannot follow a file that moves
            found.append(IdleRecord(name, position, tensor=packed(tensor), info=info, place=place))
    return found


def _order(
    index: ModelIndex, reads: Sequence[Sequence[str]], gone: _Gone, first: Mapping[int, int], dropped: Collection[int]
) -> list[int]:
    """Positions of the nodes that stay, and of each region's first node (``first``, by its number) for the region, in
    topological order."""
    sites = {site.number: site for found in gone.values() for site in found}.values()
    item = {value.name: first[site.number] for site in sites for value in site.region.outputs}
    wanted = {position: names for position, names in enumerate(reads) if position not in gone}
    wanted |= {first[site.number]: site.actuals for site in sites}
    needs: dict[int, set[int]] = {}
    for own, names in wanted.items():
        if own not in dropped:
            made = {item.get(name, index.producer[name]) for name in names if name in index.producer}
            needs[own] = made - {own, *dropped}
    order, stuck = topological(needs)
    if stuck:
        cycle = [gone[n][0].label if n in gone else f"node {index.nodes[n].name!r}" for n in _cycle(stuck, needs)]
        raise InvariantError(f"no order of the nodes is possible: a cycle runs through {', '.join(cycle)}")
    return order


def _cycle(stuck: Sequence[int], needs: Mapping[int, Collection[int]]) -> list[int]:
    """Items each of which needs the next, and the last the first; every item of ``stuck`` needs another of it."""
    path = [stuck[0]]
    while True:
        following = min(set(needs[path[-1]]) & set(stuck))
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def _record(
    index: ModelIndex, site: Site, gone: _Gone, origin: Origin, unread: Collection[str], added: tuple[str, ...]
) -> FusedRecord:
    """What the site's fused node remembers, in positions of the original model."""
    body, region = site.body, site.region
    stands = {name for position in site.stands for name in index.nodes[position].output}

    def moved(node: NodeRecord) -> NodeRecord:
        if node.position in site.stands:
            return replace(node, position=None, stands=True)
        return replace(node, position=None if node.position is None else origin.nodes[node.position])

    def value(record: ValueRecord) -> ValueRecord:
        if record.name in stands:
            return ValueRecord(record.name)
        return replace(record, position=None if record.position is None else origin.infos.get(record.position))

    constants = {}
    values = dict(body.values)
    for formal, constant in body.constants.items():
        if constant.name not in unread:
            node = None if constant.node is None else replace(constant.node, position=None)
            constants[formal] = replace(constant, position=None, node=node)
            continue
        place = None if constant.position is None else origin.initializers[constant.position]
        node = None if constant.node is None else moved(constant.node)
        constants[formal] = replace(constant, position=place, node=node)
        if constant.name in index.infos:
            values[formal] = value_record(index, constant.name)
    return FusedRecord(
        region.rule,
        region.kernel.schedule,
        region.figures(),
        tuple(map(moved, body.nodes)),
        {formal: value(record) for formal, record in values.items()},
        constants,
        {formal: type_of(v) for formal, v in region_names(region)},
        added,
        tuple(_again(index, site, gone)),
        region.kernel.rounds, region.collapses,
    )


def _again(index: ModelIndex, site: Site, gone: _Gone) -> Iterator[str]:
    """Inner values, by their formal names, that another region computes too."""
    again = site.again | {position for position in site.passing if len(gone.get(position, ())) > 1}
    names = {name for position in again for name in index.nodes[position].output if name}
    return (formal for formal, value in site.body.values.items() if value.name in names)


def _node(site: Site, name: str, record: FusedRecord) -> onnx.NodeProto:
    region = site.region
    node = helper.make_node(
        site.op,
        site.actuals,
        [value.name for value in region.outputs],
        name=name,
        domain=launch.DOMAIN,
        **{"plan": region.kernel.plan.to_json(), "source": region.kernel.source, KEY: to_json(record)},
    )
    for architecture, image in sorted(region.images.items()):
        tensor = helper.make_tensor("", onnx.TensorProto.UINT8, [len(image)], image, raw=True)
        node.attribute.append(helper.make_attribute(f"image_{architecture}", tensor))
    return node


def _remove(graph: onnx.GraphProto, index: ModelIndex, gone: _Gone, unread: Collection[str]) -> None:
    """Drop constants that nothing reads and ``value_info`` of values that are no more."""
    vanished = set(unread)
    for position, sites in gone.items():
        vanished |= set(index.nodes[position].output) - {v.name for site in sites for v in site.region.outputs}
    for place in sorted((index.infos[name] for name in vanished if name in index.infos), reverse=True):
        del graph.value_info[place]
    for place in sorted((index.initializers[n] for n in unread if n in index.initializers), reverse=True):
        del graph.initializer[place]


def _mark(model: onnx.ModelProto, index: ModelIndex, origin: Origin, plain: Sequence[int]) -> None:
    """Record what the original of a graph had, and drop inputs that a newer IR version would not take for constants.

    ``plain`` gives former positions of the nodes that are not fused now, in their new order.
    """
    record = origin.record
    if not index.place and model.ir_version != max(record.ir_version, IR_VERSION):
        # Of a fused model whose version was changed since, all that goes with the version stays as it was changed.
        functions = sum(entry.domain != launch.DOMAIN for entry in model.functions)
        record = replace(record, ir_version=model.ir_version, inputs=(), functions=functions)
    if not index.place and all(entry.domain != launch.DOMAIN for entry in model.opset_import):
        record = replace(record, opset_added=True)
    if not index.place and model.ir_version < 4:
        # Below version 4 an initialiser is constant although it is listed as an input; above it would not be.
        dropped = [
            (place, info) for place, info in enumerate(model.graph.input) if info.name in index.initializers
        ]
        record = replace(record, inputs=tuple((place, packed(info)) for place, info in dropped))
        for place, _ in reversed(dropped):
            del model.graph.input[place]
    before = [origin.nodes[position] for position in plain if position not in origin.fused]
    known = [position for position in before if position is not None]
    if len(known) == len(before):
        moved = {}
        stay = [position for position in plain if position not in origin.fused]
        for position, place, free in zip(stay, known, sorted(known), strict=True):
            if place != free:
                moved[first_output(index.nodes[position])] = place
        record = replace(record, moved=moved, nodes=None if "" in moved else record.nodes)
    notes = notes_of(model, index.place)
    for place, entry in enumerate(notes):
        if entry.key == KEY:
            del notes[place]
            break
    notes.add(key=KEY, value=to_json(record))


def _import_domain(model: onnx.ModelProto) -> None:
    """Make the model one that may hold functions of our domain."""
    if all(entry.domain != launch.DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(launch.DOMAIN, 1))
    model.ir_version = max(model.ir_version, IR_VERSION)
