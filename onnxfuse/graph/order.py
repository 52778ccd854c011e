"""Check that a graph's names are defined once, before they are used, and that it has no cycle; sort its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.model import Body
from onnxfuse.graph.sorting import topological

MOST_STANDING = 4_000_000
"""Nodes of functions, each counted as often as it is called: ONNX Runtime makes so many nodes of it, and a function
that calls another twice, which calls another twice, doubles them with every line."""

SHOWN_NAMES = 8
"""Nodes of a cycle, or functions, that a message names."""

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

STANDARD_DOMAINS = ("", "ai.onnx")
"""How the domain of the standard operators may be spelled."""


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        yield from graphs_in(attribute)


def graphs_in(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs


OWNERS = frozenset({("", "If"), ("", "Loop"), ("", "Scan")})
"""Domain and operator of the nodes whose bodies are graphs like any other; bodies of other operators stay closed."""


def bodies_of(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of an If, a Loop or a Scan by the attributes that hold them; none for other nodes."""
    if ("" if node.domain == "ai.onnx" else node.domain, node.op_type) in OWNERS:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.name, attribute.g


def graphs_of(model: onnx.ModelProto) -> Iterator[tuple[Body | None, onnx.GraphProto]]:
    """The main graph of a model and every body in it, each before those inside it, as ``Graph.walk`` has them."""
    yield from _graphs(None, model.graph)


def _graphs(body: Body | None, graph: onnx.GraphProto) -> Iterator[tuple[Body | None, onnx.GraphProto]]:
    yield body, graph
    for _, inside, inner in bodies_in(body, graph):
        yield from _graphs(inside, inner)


def bodies_in(around: Body | None, graph: onnx.GraphProto) -> Iterator[tuple[int, Body, onnx.GraphProto]]:
    """The bodies in the main graph, or in the body ``around``: the position of the node, the body, and its graph."""
    owners = [(index, node) for index, node in enumerate(graph.node) if any(True for _ in bodies_of(node))]
    names = Counter(node.name for _, node in owners)
    for index, owner in owners:
        called = label(owner) if names[owner.name] == 1 else label_of_result(owner)
        for attribute, inner in bodies_of(owner):
            text = f"{called}/{attribute}"
            if around is None:
                yield index, Body(text, ((index, attribute),)), inner
            else:
                yield index, Body(f"{around.label}/{text}", (*around.place, (index, attribute))), inner


def depth(model: onnx.ModelProto) -> int:
    """How many bodies are around the innermost one, itself counted; 0 where there is none."""
    deepest = 0
    waiting = [(model.graph.node, 0), *((function.node, 0) for function in model.functions)]
    while waiting:
        nodes, level = waiting.pop()
        deepest = max(deepest, level)
        waiting += [(inner.node, level + 1) for node in nodes if node.attribute for inner in subgraphs(node)]
    return deepest


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Names from outside that a node's subgraphs read, at any depth, each once.

    A name that a subgraph defines hides the outer one from there on.
    """
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        inner = local_names(graph)
        for child in graph.node:
            for name in (*child.input, *captured_names(child)):
                if name and name not in inner:
                    found[name] = None
            inner.update(child.output)
        for output in graph.output:
            if output.name and output.name not in inner:
                found[output.name] = None
    return list(found)


class Scope:
    """Names that a graph may read: its own and those of the graphs around it, which stay in their collections, for a
    set of all of them in each body would be work of the bodies times the names."""

    def __init__(self, *layers: Container[str]) -> None:
        self._layers = layers

    def __contains__(self, name: object) -> bool:
        return any(name in layer for layer in self._layers)

    def inside(self, own: Container[str]) -> Scope:
        """With what one more graph defines, as it does so."""
        return Scope(own, *self._layers)


NOTHING = Scope()
"""What may be read where nothing is around."""


def local_names(graph: onnx.GraphProto) -> set[str]:
    """Names of a graph's inputs and initialisers."""
    names = {value.name for value in graph.input}
    names.update(tensor.name for tensor in graph.initializer)
    names.update(tensor.values.name for tensor in graph.sparse_initializer)
    return names


def label(node: onnx.NodeProto) -> str:
    """How messages call a node."""
    return node.name or label_of_result(node)


def label_of_result(node: onnx.NodeProto) -> str:
    """How messages call a node without a name."""
    return f"{node.op_type} -> {next((name for name in node.output if name), '?')}"


def in_order(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with the nodes of every graph and function in topological order, as near as can be to the order that
    they had, and what had to be sorted: "the main graph", "a body of 'If_3'", "function 'f'".

    The model itself where all are sorted; else a copy.  Nodes of a cycle stay where they are.
    """
    if _is_sorted(model.graph.node, model.graph, NOTHING) and all(
            _is_sorted(function.node, None, NOTHING) for function in model.functions):
        return model, ()
    result = onnx.ModelProto()
    result.CopyFrom(model)
    found: list[str] = []
    _sort(result.graph.node, result.graph, NOTHING, "the main graph", found)
    for function in result.functions:
        _sort(function.node, None, NOTHING, f"function '{function.name}'", found)
    return result, tuple(dict.fromkeys(found))


def _is_sorted(nodes: Sequence[onnx.NodeProto], graph: onnx.GraphProto | None, outer: Scope) -> bool:
    """Whether every node, in subgraphs too, stands after those whose results it reads."""
    later = {name for node in nodes for name in node.output if name and name not in outer}
    if graph is not None:
        later -= local_names(graph)
    scope = None
    for node in nodes:
        if not later.isdisjoint(node.input):
            return False
        for inner in subgraphs(node):
            scope = _scope(nodes, graph, outer) if scope is None else scope
            if not _is_sorted(inner.node, inner, scope):
                return False
        if any(True for _ in subgraphs(node)) and not later.isdisjoint(captured_names(node)):
            return False
        later.difference_update(node.output)
    return True


def _sort(items: Any, graph: onnx.GraphProto | None, outer: Scope, about: str, found: list[str]) -> None:
    """Sort a list of nodes in place, those of subgraphs first, and note what was not sorted."""
    nodes = list(items)
    scope = _scope(nodes, graph, outer)
    for node in nodes:
        for inner in subgraphs(node):
            _sort(inner.node, inner, scope, f"a body of '{label(node)}'", found)
    if _is_sorted(nodes, graph, outer):
        return
    found.append(about)
    given = local_names(graph) if graph is not None else set()
    needs = {place: set(found) - {place} for place, found in enumerate(_needs(nodes, given, outer))}
    order, stuck = topological(needs)
    if not stuck:
        rank = {place: number for number, place in enumerate(order)}
        keys = iter([rank[place] for place in range(len(nodes))])
        items.sort(key=lambda _: next(keys))  # sort asks once an item, in order


def _needs(nodes: Sequence[onnx.NodeProto], given: Collection[str], outer: Container[str]) -> list[list[int]]:
    """Of each node the places of those whose results it reads, in its bodies too, itself among them.

    Args:
        given: names that are defined beside the nodes.
        outer: names that are defined around them: a node reads its like from there where it is computed later.
    """
    producers = {name: place for place, node in enumerate(nodes) for name in node.output if name and name not in given}
    return [
        [producers[name] for name in (*node.input, *captured_names(node))
         if name in producers and (name not in outer or producers[name] < place)]
        for place, node in enumerate(nodes)
    ]


def _scope(nodes: Iterable[onnx.NodeProto], graph: onnx.GraphProto | None, outer: Scope) -> Scope:
    """Names that subgraphs of these nodes may read."""
    own = local_names(graph) if graph is not None else set()
    return outer.inside(own.union(name for node in nodes for name in node.output))


def check_order(graph: onnx.GraphProto, place: str | None, outer: Scope = NOTHING) -> None:
    """Check a graph and its subgraphs, whose nodes ``in_order`` has sorted.

    Args:
        place: for messages: the model's file.
        outer: names that are defined around the graph.

    Raises:
        ModelError: a name defined twice or not at all, a cycle.
    """
    _check_unique(graph, place)
    _check_nodes(graph.node, local_names(graph), place, outer)
    _check_outputs([value.name for value in graph.output], graph.node, outer.inside(local_names(graph)), place)


def check_functions(proto: onnx.ModelProto, place: str | None) -> None:
    """Check the model's own functions, whose nodes ``in_order`` has sorted.

    Raises:
        ModelError: a name defined twice or not at all, a cycle; two functions of one name; functions that call one
            another in a circle.
    """
    known: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    for function in proto.functions:
        where = f"{place}, function '{function.name}'" if place else f"function '{function.name}'"
        key = function.domain, function.name, getattr(function, "overload", "")
        for names in (function.input, function.output):
            if len(set(names)) < len(names) or key in known:
                raise ModelError(
                    f"The function '{function.name}' has two inputs or outputs of one name, or stands twice.",
                    place=where, remedy="Export the model again.")
        known[key] = function
        _check_nodes(function.node, set(function.input), where, NOTHING)
        _check_outputs(function.output, function.node, set(function.input), where)
    calls = {
        key: [called for node in all_nodes(function.node) if (called := _called(node)) in known]
        for key, function in known.items()
    }
    places = {key: number for number, key in enumerate(known)}
    order, stuck = topological({places[key]: {places[each] for each in found} for key, found in calls.items()})
    if stuck:
        names = ", ".join(f"'{name}'" for number, (_, name, _) in enumerate(known) if number in stuck[:SHOWN_NAMES])
        raise ModelError(f"Functions of the model call one another in a circle: {names}.", place=place,
                         remedy="Export the model again.")
    keys, standing = list(known), dict.fromkeys(known, 0)
    for key in (keys[number] for number in order):  # what is called before its callers
        standing[key] = sum(standing.get(_called(node), 1) for node in all_nodes(known[key].node))
    total = sum(standing.get(_called(node), 0) for node in all_nodes(proto.graph.node)) if known else 0
    if total > MOST_STANDING:
        raise ModelError(
            f"The model's functions stand for {total:,} nodes where they are called, and onnxfuse takes "
            f"{MOST_STANDING:,}.", place=place, remedy="Export the model with fewer calls in one another.")


def _called(node: onnx.NodeProto) -> tuple[str, str, str]:
    """Domain, name and overload of the function that a node would call."""
    return node.domain, node.op_type, getattr(node, "overload", "")


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and the nodes of their subgraphs, at any depth, each before those in it."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def _check_nodes(nodes: Sequence[onnx.NodeProto], defined: set[str], place: str | None, outer: Scope) -> None:
    """Check what nodes read and compute, ``defined`` before them."""
    given = frozenset(defined)
    computed = {name for node in nodes for name in node.output if name}
    for index, node in enumerate(nodes):
        where = _where(node, place)
        captured = captured_names(node) if any(True for _ in subgraphs(node)) else []
        for name in (*node.input, *captured):
            if name and name not in defined and name not in outer:
                if name not in computed:
                    for inner in subgraphs(node):  # whose own fault it may be
                        check_order(inner, place, outer.inside(defined | computed))
                    raise ModelError(
                        f"Node '{label(node)}' reads '{name}', which nothing computes.", place=where,
                        remedy="Export the model again.",
                    )
                # A cycle keeps nodes from being sorted that have no part in it.
                cycle = _cycle(_needs(nodes, given, outer), index)
                if not cycle:
                    raise ModelError(
                        f"Node '{label(node)}' reads '{name}', which a later node computes.", place=where,
                        remedy="Export the model again.",
                    )
                raise ModelError(
                    f"The graph has a cycle: {_described(nodes, cycle)}.", place=_where(nodes[cycle[0]], place),
                    remedy="Export the model again.",
                )
        for name in node.output:
            if name in defined:
                raise ModelError(
                    f"The name '{name}' is defined twice.", place=where, remedy="Export the model again.",
                )
            if name:
                defined.add(name)
        if captured or any(True for _ in subgraphs(node)):
            scope = outer.inside(defined)
            for inner in subgraphs(node):
                check_order(inner, place, scope)


def _check_outputs(outputs: Iterable[str], nodes: Iterable[onnx.NodeProto], given: Container[str],
                   place: str | None) -> None:
    made = {name for node in nodes for name in node.output}
    for name in outputs:
        if name not in made and name not in given:
            raise ModelError(
                f"The graph's output '{name}' is computed by no node.", place=place, remedy="Export the model again.",
            )


def _where(node: onnx.NodeProto, place: str | None) -> str:
    return f"{place}, node '{label(node)}'" if place else f"node '{label(node)}'"


def _check_unique(graph: onnx.GraphProto, place: str | None) -> None:
    stored = [tensor.name for tensor in graph.initializer]
    stored += [tensor.values.name for tensor in graph.sparse_initializer]
    for names in ([value.name for value in graph.input], stored, [value.name for value in graph.output]):
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ModelError(f"The name '{twice}' is defined twice.", place=place, remedy="Export the model again.")


def _described(nodes: Sequence[onnx.NodeProto], cycle: list[int]) -> str:
    names = [f"'{label(nodes[index])}'" for index in cycle]
    if len(names) > SHOWN_NAMES:
        names[SHOWN_NAMES - 1:-1] = [f"{len(names) - SHOWN_NAMES} more"]
    return " -> ".join([*names, names[0]])


def _cycle(needs: Sequence[Sequence[int]], first: int) -> list[int]:
    """Places of nodes on a cycle, each feeding the next: one that ``first`` depends on, else any; [] where none is."""
    done: set[int] = set()
    for start in (first, *range(len(needs))):
        path, pending, on_path = [start], [iter(needs[start])], {start}
        while path and start not in done:
            following = next(pending[-1], None)
            if following is None:
                pending.pop()
                finished = path.pop()
                on_path.discard(finished)
                done.add(finished)
            elif following in on_path:
                cycle = path[path.index(following):][::-1]
                earliest = cycle.index(min(cycle))
                return cycle[earliest:] + cycle[:earliest]
            elif following not in done:
                path.append(following)
                pending.append(iter(needs[following]))
                on_path.add(following)
    return []
