"""What the inputs of fused nodes are in a run of the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import ModelError, VerificationError
from onnxfuse.graph import Graph, Value
from onnxfuse.graph.constants import numpy_type, read
from onnxfuse.graph.load import LoadedModel
from onnxfuse.graph.model import Body
from onnxfuse.graph.order import graphs_of
from onnxfuse.graph.sizes import Sizes, bytes_of
from onnxfuse.measuring.inputs import draw
from onnxfuse.rewriting import FusedNode
from onnxfuse.runtime.words import runtime_words
from onnxfuse.verifying.bounds import OutOfMemoryError, OutOfTimeError, is_lack_of_memory
from onnxfuse.verifying.evaluate import array_type, plain_feeds
from onnxfuse.verifying.inside import Exposed, Inner, expose
from onnxfuse.verifying.reference import formal_names
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim
from onnxfuse.wording import option

Array = NDArray[Any]

GROUP_BYTES = 1 << 30
"""Captured values that are in memory at a time, as far as their sizes are known before the run."""


@dataclass(frozen=True)
class Captured:
    """A fused node and what it reads, by formal name; ``how`` says where that is from: "captured" in a run,
    "captured in the last run of its body", or "generated" where its body did not run."""

    node: FusedNode
    feeds: Mapping[str, Array]
    how: str = "captured"


def capture(nodes: Sequence[FusedNode], source: Source, slim: Slim | Callable[[], Slim], sizes: Sizes,
            providers: Sequence[Any], known: Mapping[str, Array] = MappingProxyType({})) -> Iterator[Captured]:
    """The inputs of each node, from one run of the original for every group of nodes that fits in memory.

    Nodes in bodies come after the others.  What they read in a run that does not get there is drawn in the types and
    sizes that it has in the graph; a node for which that cannot be done either is left out.

    Args:
        slim: for sessions, or what makes it where a run is needed.
        known: values of the main graph in the source's run, of which none need be run for again.

    Raises:
        VerificationError: ONNX Runtime cannot run the original.
    """
    graph, run = source.graph, source.run
    def made() -> Slim:
        return slim if isinstance(slim, Slim) else slim()

    outside = [node for node in nodes if node.body is None]
    for group in _groups(outside, graph, sizes):
        wanted = dict.fromkeys(value for node in group for value in source.computed(node))
        names = [value.name for value in wanted if value.name not in known]
        found = {**known, **(_run(made(), run, graph, names, providers) if names else {})}
        values = {value: found[value.name] for value in wanted}
        for node in group:
            feeds = source.feeds(node, values)
            assert feeds is not None, "what the main graph computes is in every run"
            yield Captured(node, feeds)
    for group in _groups([node for node in nodes if node.body is not None], graph, sizes):
        values = _inside(dict.fromkeys(value for node in group for value in source.computed(node)), source, made(),
                         providers)
        for node in group:
            feeds = source.feeds(node, values)
            if feeds is not None:
                inner = any(source.place[value] for value in source.computed(node))
                yield Captured(node, feeds, "captured in the last run of its body" if inner else "captured")
                continue
            feeds = source.drawn(node, sizes)
            if feeds is not None:
                yield Captured(node, feeds, "generated")


def read_first(nodes: Sequence[FusedNode], graph: Graph, sizes: Sizes) -> dict[str, int]:
    """What the first group of nodes reads that is computed, as the fused model computes it too: values by name, with
    their types; without those of a type that is not known."""
    outside = [node for node in nodes if node.body is None]
    values = [graph.values[name] for node in next(_groups(outside, graph, sizes), ())
              for name in formal_names(node).values()]
    return {value.name: value.dtype for value in values if value.producer is not None and value.dtype is not None}


def _label(body: Body | None) -> str:
    return "" if body is None else body.label


class Source:
    """What fused nodes read, in the graphs of the original and one run of it."""

    def __init__(self, loaded: LoadedModel, graph: Graph, run: Run) -> None:
        self._loaded, self.graph, self.run = loaded, graph, run
        # The planned graph may have other nodes: a body is where its label is in the model that runs.
        places = {_label(body): () if body is None else body.place for body, _ in graphs_of(loaded.proto)}
        self._constants = {(() if body is None else body.place, tensor.name): tensor
                           for body, part in graphs_of(loaded.proto) for tensor in part.initializer}
        self.place = {value: places[_label(part.body)] for part in graph.walk() for value in part.values.values()
                      if value.outer is None}

    def values(self, node: FusedNode) -> dict[str, Value]:
        """By formal name, the value in the graph that it is of."""
        part, found = self.graph.part(node.body), {}
        for formal, name in formal_names(node).items():
            value = part.values[name]
            while value.outer is not None:
                value = value.outer
            found[formal] = value
        return found

    def computed(self, node: FusedNode) -> list[Value]:
        """Those that are neither inputs of the model nor initialisers."""
        return [value for value in self.values(node).values() if self._given(value) is None]

    def feeds(self, node: FusedNode, computed: Mapping[Value, Array]) -> dict[str, Array] | None:
        """Arrays by formal name; None where one was not computed."""
        feeds = {}
        for formal, value in self.values(node).items():
            given = self._given(value)
            if given is None:
                if value not in computed:
                    return None
                given = computed[value]
            feeds[formal] = given
        return feeds

    def drawn(self, node: FusedNode, sizes: Sizes) -> dict[str, Array] | None:
        """Arrays by formal name, all but initialisers drawn, so that their sizes fit; None where one cannot be."""
        generator = np.random.default_rng(0)
        try:
            return {formal: self._drawn(formal, value, sizes, generator)
                    for formal, value in self.values(node).items()}
        except (ModelError, KeyError):
            return None

    def _drawn(self, formal: str, value: Value, sizes: Sizes, generator: np.random.Generator) -> Array:
        stored = self._stored(value)
        if stored is not None:
            return stored
        if formal.startswith("h"):
            if value.elements is None or value.dtype is None or value.shape is None:
                raise ModelError(f"What '{value.name}' holds is not known before a run.")
            numbers = [size.evaluate(sizes) for size in value.elements]
            return np.array(numbers, numpy_type(value.dtype)).reshape([size.evaluate(sizes) for size in value.shape])
        return draw(value, sizes, generator)

    def _given(self, value: Value) -> Array | None:
        if not self.place[value] and value.name in self.run.feeds:
            return self.run.feeds[value.name]
        return self._stored(value)

    def _stored(self, value: Value) -> Array | None:
        tensor = self._constants.get((self.place[value], value.name))
        return None if tensor is None else read(tensor, self._loaded.folder)


def _inside(wanted: Iterable[Value], source: Source, slim: Slim, providers: Sequence[Any]) -> dict[Value, Array]:
    """What values of bodies, and of the main graph, were in a run; without those that were not computed in it."""
    values = [value for value in wanted if value.dtype is not None]
    inner = [value for value in values if source.place[value]]
    model, exposed = expose(slim.model, [Inner(source.place[v], v.name, v.dtype or 0, v.rank) for v in inner])
    names = {value: Exposed(value.name, 0) for value in values} | dict(zip(inner, exposed, strict=True))
    kinds = {names[value].name: value.dtype or 0 for value in values}
    arrays = results_of(Slim(model, slim.folder, slim.bounds), source.run, kinds, providers) if values else {}
    found = {value: names[value].last(arrays[names[value].name]) if source.place[value] else
             arrays[names[value].name] for value in values}
    return {value: array for value, array in found.items() if array is not None}


def run_model(session: Any, model: onnx.ModelProto, run: Run) -> list[Array]:
    """The results of a session of a model that has plain borders.

    Raises:
        VerificationError: the run fails.
        BoundsError: it takes more time or memory than it may.
    """
    kinds = {info.name: info.type.tensor_type.elem_type for info in model.graph.input if info.name in run.feeds}
    try:
        results: list[Any] = session.run(None, plain_feeds(run.feeds, kinds))
    except OutOfTimeError:
        raise
    except Exception as error:  # ONNX Runtime has an exception type per status
        if is_lack_of_memory(error):
            raise OutOfMemoryError from error
        raise VerificationError(
            f"A run of the model fails on {run.about}: {runtime_words(error)}",
            remedy=f"Give inputs that the model takes: {option('inputs', 'FILE.npz')}, or sizes: "
                   f"{option('dim', 'NAME=N')}.",
        ) from error
    return results


def _run(slim: Slim, run: Run, graph: Graph, names: Sequence[str], providers: Sequence[Any]) -> dict[str, Array]:
    kinds: dict[str, int] = {}
    for name in names:
        kind = graph.values[name].dtype
        if kind is None:
            raise VerificationError(f"The type of '{name}' is not known.")
        kinds[name] = kind
    return results_of(slim, run, kinds, providers)


def results_of(slim: Slim, run: Run, kinds: Mapping[str, int], providers: Sequence[Any]) -> dict[str, Array]:
    """What values of the main graph, given with their types, are in a run."""
    present = {info.name for info in slim.model.graph.output}
    extra = [(name, kind) for name, kind in kinds.items() if name not in present]
    session = slim.session(providers, extra)
    return named(slim, extra, run_model(session, slim.model, run), kinds)


def named(slim: Slim, extra: Sequence[tuple[str, int]], results: Sequence[Array], kinds: Mapping[str, int]
          ) -> dict[str, Array]:
    """Of the results of a session that gives out further values too, those of these types."""
    outputs = [info.name for info in slim.model.graph.output] + [name for name, _ in extra]
    found = dict(zip(outputs, results, strict=True))
    return {name: np.asarray(found[name]).astype(array_type(kind), copy=False) for name, kind in kinds.items()}


def _groups(nodes: Sequence[FusedNode], graph: Graph, sizes: Sizes) -> Iterator[list[FusedNode]]:
    group: list[FusedNode] = []
    held: set[str] = set()
    total = 0
    for node in nodes:
        fresh = set(formal_names(node).values()) - held
        part = graph.part(node.body)
        size = sum(bytes_of(part.values[name], sizes) or 0 for name in fresh)
        if group and total + size > GROUP_BYTES:
            yield group
            group, held, total = [], set(), 0
            fresh = set(formal_names(node).values())
        group.append(node)
        held |= fresh
        total += size
    if group:
        yield group
