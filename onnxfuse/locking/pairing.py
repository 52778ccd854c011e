"""Which fusions of a lock are still there, whatever they are called now.

    same structure at the same names ─▶ held
    same structure elsewhere, where the names are gone ─▶ held: renamed
    all of it inside one fused node of another structure, or every edge of it inside some ─▶ held in another way
    the rest ─▶ lost, and what nothing of the lock stands for ─▶ new
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from onnxfuse.locking.gather import Found
from onnxfuse.locking.names import Locked, Names, originals
from onnxfuse.locking.structure import edges


@dataclass
class Pairing:
    """A lock's places beside those of now.

    Attributes:
        held: those that are as they were; renamed: those of other names; changed: those that are fused in another way,
            or by another rule.
        lost: not fused any more; new: fused now, and nothing of the lock stands for them.
    """

    held: list[tuple[Locked, Found]] = field(default_factory=list)
    renamed: list[tuple[Locked, Found]] = field(default_factory=list)
    changed: list[tuple[Locked, Found]] = field(default_factory=list)
    lost: list[Locked] = field(default_factory=list)
    new: list[Found] = field(default_factory=list)


def paired(locked: Sequence[Locked], found: Sequence[Found], names: Names, around: Sequence[Found] = ()) -> Pairing:
    """A lock's places beside those of now.

    Args:
        found: what is fused now; ``around``: what else holds nodes that run as one.
        names: of the graph that the nodes of ``found`` are in.
    """
    result = Pairing()
    rest, left = _same(locked, found, lambda one: (one.words, *one.spot.nodes), result)
    rest, left = _same(rest, left, lambda one: (one.words, *one.spot.writes), result)
    rest = _renamed(rest, left, names, result)
    for one in rest:
        home = _home(one, names, [*found, *around]) or _parted(one, names, found) or _alike(one, left, names)
        if home is None:
            result.lost.append(one)
        else:
            result.changed.append((one, home))
            left = [each for each in left if each is not home]
    result.new = left
    return result


_Rest = tuple[list[Locked], list[Found]]


def _same(locked: Sequence[Locked], found: Sequence[Found], key: Callable[[Locked | Found], object], result: Pairing
          ) -> _Rest:
    """What is left of both without those of one key."""
    waiting: dict[object, list[Found]] = {}
    for each in found:
        waiting.setdefault(key(each), []).append(each)
    rest = []
    for one in locked:
        if not waiting.get(key(one)):
            rest.append(one)
            continue
        twin = waiting[key(one)].pop(0)
        (result.held if twin.rule == one.rule else result.changed).append((one, twin))
    kept = {id(each) for group in waiting.values() for each in group}
    return rest, [each for each in found if id(each) in kept]


def _renamed(rest: Iterable[Locked], left: list[Found], names: Names, result: Pairing) -> list[Locked]:
    """What is left of the lock without those that have the structure of one in ``left``, which goes from there; a place
    all of whose nodes are still there is not elsewhere."""
    lost = []
    for one in rest:
        twin = next((each for each in left if each.words == one.words), None)
        if twin is None or names.stands(one):
            lost.append(one)
        else:
            left.remove(twin)
            result.renamed.append((one, twin))
    return lost


def _home(one: Locked, names: Names, found: Iterable[Found]) -> Found | None:
    """What holds all of a place that is left of it by name, computes all that it gave, and reads or computes all that
    it read: then what lies between is in it too, whatever that is called and however it is spelled."""
    makers = [names.maker(value) for value in one.spot.writes]
    if not makers or None in makers:
        return None
    nodes = set(originals([*names.of(one), *makers]))
    return next((each for each in found if nodes <= each.holds and _takes(each, one.spot.reads)), None)


def _takes(found: Found, values: Iterable[str]) -> bool:
    """Whether what is fused reads these values, or computes them."""
    known = set(found.spot.reads) | {value.name for node in found.holds for value in node.outputs if value is not None}
    return known.issuperset(values)


def _parted(one: Locked, names: Names, found: Sequence[Found]) -> Found | None:
    """The first of several that hold a place together, such as the parts of a launch that is none any more: each of its
    nodes is in one, and each of its edges too."""
    nodes = names.of(one)
    homes = [[each for each in found if node is not None and set(node.originals) <= each.holds] for node in nodes]
    if len(nodes) != len(one.words) or not all(homes):
        return None
    whole = all(any(each in homes[below] for each in homes[above]) for above, below in edges(one.words))
    return homes[0][0] if homes and whole else None


def _alike(one: Locked, left: Iterable[Found], names: Names) -> Found | None:
    """Where no name of a place is left: what has all of its operators, and more."""
    if names.knows(one):
        return None
    wanted = Counter(one.operators)
    return next((each for each in left if wanted <= Counter(each.operators)), None)
