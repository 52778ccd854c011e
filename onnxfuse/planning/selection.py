"""Which of several conflicting candidates to take: a set packing of the most worth, free of cycles.

Candidates conflict where they share a member.  Conflicting ones form components; each is solved by branch and bound,
whose bound is a cover of what is left by cliques (at most one candidate of each can be taken), and greedily with
repair where the component is large or the search too long.  That the chosen ones close no cycle together is checked
last: each cycle that is found bars its candidates from being chosen together, and what it touches is solved again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from onnxfuse.graph.model import Graph, Node
from onnxfuse.graph.sorting import Sorting
from onnxfuse.planning.legality import successors

MOST_EXACT = 40
"""Candidates of the largest component that is solved exactly."""

MOST_STEPS = 20_000
"""Steps of one search, after which the best that it has seen is taken."""

MOST_REPAIRS = 20_000_000
"""Looks at a candidate in the repair of one greedy choice, after which that stays as it is."""

ONE_BY_ONE = 8
"""Turns in which one cycle is barred; in later ones all that are found."""

MOST_ROUNDS = 100
"""Cycles that may be barred before the least candidate of each further one is left out for good."""


@dataclass(frozen=True)
class Candidate:
    """Members that may be taken together, and what that is worth (above 0)."""

    members: frozenset[int]
    worth: float


@dataclass(frozen=True)
class Selection:
    """What was chosen, as places among the candidates, in their order.

    ``exact``: no choice without a cycle is worth more.
    """

    chosen: tuple[int, ...]
    worth: float
    exact: bool


Cycles = Callable[[Sequence[int]], Sequence[frozenset[int]]]
"""Told what is chosen; returns sets of those that close a cycle together, no two with one in common."""


def select(
    candidates: Sequence[Candidate], cycles: Cycles | None = None, *, most_exact: int = MOST_EXACT
) -> Selection:
    """The disjoint candidates of the most worth.

    Args:
        candidates: what there is to choose from.
        cycles: finds cycles among what is chosen, if that matters.
        most_exact: size of the largest component that is solved exactly; 0 to solve all of them greedily.
    """
    barred: list[frozenset[int]] = []
    solved: dict[tuple[tuple[int, ...], tuple[frozenset[int], ...]], tuple[tuple[int, ...], bool]] = {}
    exact = True
    for turn in count():
        chosen: list[int] = []
        exact = len(barred) <= MOST_ROUNDS
        for part, bars in _components(candidates, barred):
            if (part, bars) not in solved:
                solved[part, bars] = _solve(candidates, part, bars, most_exact)
            found, certain = solved[part, bars]
            chosen += found
            exact = exact and certain
        chosen.sort()
        closed = cycles(chosen) if cycles is not None else ()
        if not closed:
            return Selection(tuple(chosen), sum(candidates[place].worth for place in chosen), exact)
        # What bars one may do away with others; where there are many, they are barred at once.
        for each in closed[:1] if turn < ONE_BY_ONE else closed:
            least = min(each, key=lambda place: candidates[place].worth)
            barred.append(frozenset([least]) if len(barred) >= MOST_ROUNDS else each)
    raise AssertionError("each turn bars something more")


def joint_cycles(graph: Graph, groups: Sequence[Collection[Node]]) -> list[frozenset[int]]:
    """The groups, by place, that lie on one cycle when each is contracted to one node, for each of some cycles that
    have no node in common: one at least, where there are any.

    Args:
        graph: the graph; groups: disjoint sets of its nodes.
    """
    unit = list(range(len(graph.nodes)))
    group_of: dict[int, int] = {}
    for place, group in enumerate(groups):
        first = min(node.index for node in group)
        group_of[first] = place
        for node in group:
            unit[node.index] = first
    before: dict[int, set[int]] = {each: set() for each in unit}
    for node in graph.nodes:
        for reader in successors(node):
            if unit[reader.index] != unit[node.index]:
                before[unit[reader.index]].add(unit[node.index])
    sorting = Sorting(before)
    sorting.run()
    found: list[frozenset[int]] = []
    for start in sorted(before):
        if start not in sorting.waiting:
            continue
        # Every unit that is left has one before it that is left: walking back ends in a cycle.
        path, seen = [start], {start: 0}
        while (needed := min(each for each in before[path[-1]] if each in sorting.waiting)) not in seen:
            seen[needed] = len(path)
            path.append(needed)
        circle = path[seen[needed] :]
        found.append(frozenset(group_of[each] for each in circle if each in group_of))
        sorting.release(circle)
        sorting.run()
    return found


def _components(
    candidates: Sequence[Candidate], barred: Sequence[frozenset[int]]
) -> list[tuple[tuple[int, ...], tuple[frozenset[int], ...]]]:
    """Candidates that conflict, directly or not, and the bars among them."""
    leader = list(range(len(candidates)))

    def find(place: int) -> int:
        while leader[place] != place:
            leader[place] = leader[leader[place]]
            place = leader[place]
        return place

    owner: dict[int, int] = {}
    for place, candidate in enumerate(candidates):
        for member in candidate.members:
            leader[find(place)] = find(owner.setdefault(member, place))
    for bar in barred:
        first, *others = bar
        for place in others:
            leader[find(place)] = find(first)
    parts: dict[int, list[int]] = {}
    for place in range(len(candidates)):
        parts.setdefault(find(place), []).append(place)
    bars: dict[int, list[frozenset[int]]] = {}
    for bar in barred:
        bars.setdefault(find(min(bar)), []).append(bar)
    return [(tuple(part), tuple(bars.get(root, ()))) for root, part in parts.items()]


def _solve(
    candidates: Sequence[Candidate], part: tuple[int, ...], bars: tuple[frozenset[int], ...], most_exact: int
) -> tuple[tuple[int, ...], bool]:
    """The places chosen of one component, and whether nothing is better."""
    if len(part) == 1 and not bars:
        return (part, True) if candidates[part[0]].worth > 0 else ((), True)
    problem = _Problem(candidates, part, bars)
    chosen = problem.greedy()
    exact = len(part) <= most_exact
    if exact:
        chosen, exact = problem.exact(chosen)
    return tuple(sorted(problem.order[place] for place in chosen)), exact


class _Problem:
    """One component; its candidates are numbered by worth, the most first, and sets of them are bit masks."""

    def __init__(self, candidates: Sequence[Candidate], part: Sequence[int], bars: Sequence[frozenset[int]]) -> None:
        self.order = sorted(
            (place for place in part if candidates[place].worth > 0),
            key=lambda place: (-candidates[place].worth, place),
        )
        self.worth = [candidates[place].worth for place in self.order]
        self.members = [candidates[place].members for place in self.order]
        number = {place: each for each, place in enumerate(self.order)}
        holders: dict[int, int] = {}
        for each, members in enumerate(self.members):
            for member in members:
                holders[member] = holders.get(member, 0) | 1 << each
        self.conflicts = [0] * len(self.order)
        for each, members in enumerate(self.members):
            for member in members:
                self.conflicts[each] |= holders[member]
        self.bars = [sum(1 << number[place] for place in bar) for bar in bars if all(place in number for place in bar)]
        self.cliques = self._cover(list(holders.values()))

    def _cover(self, cliques: list[int]) -> list[int]:
        """Disjoint sets of candidates, of each of which one at most can be taken; together they are all."""
        # A heap with stale counts: a clique's count only falls as others take its candidates.
        heap = [(-clique.bit_count(), clique) for clique in set(cliques)]
        heap.sort()
        covered, found = 0, []
        while heap:
            _, clique = heappop(heap)
            left = clique & ~covered
            if left != clique:
                if left:
                    heappush(heap, (-left.bit_count(), left))
                continue
            found.append(clique)
            covered |= clique
        return found

    def allowed(self, chosen: int, more: int) -> bool:
        """Whether no bar forbids taking one more."""
        together = chosen | 1 << more
        return not any(bar & together == bar for bar in self.bars)

    def greedy(self) -> set[int]:
        """A good choice: by worth, or by worth a member, each repaired; whichever is better."""
        found = []
        by_share = sorted(range(len(self.order)), key=lambda each: -self.worth[each] / len(self.members[each]))
        for order in (range(len(self.order)), by_share):
            chosen = 0
            for each in order:
                if not self.conflicts[each] & chosen and self.allowed(chosen, each):
                    chosen |= 1 << each
            found.append(self._repaired(chosen))
        best = max(found, key=lambda chosen: sum(self.worth[each] for each in _bits(chosen)))
        return set(_bits(best))

    def _repaired(self, chosen: int) -> int:
        """Take in what is worth more than all that it replaces, and take out what hinders more than it is worth."""
        improved, left = True, MOST_REPAIRS
        while improved:
            improved = False
            for each in range(len(self.order)):
                left -= len(self.order)
                if left < 0:
                    return chosen
                if chosen >> each & 1:
                    tried = self._filled(chosen & ~(1 << each), without=each)
                else:
                    tried = chosen & ~self.conflicts[each]
                    if not self.allowed(tried, each):
                        continue
                    tried = self._filled(tried | 1 << each)
                if self._total(tried) > self._total(chosen) * (1 + 1e-12):
                    chosen, improved = tried, True
        return chosen

    def _filled(self, chosen: int, without: int = -1) -> int:
        for each in range(len(self.order)):
            if each != without and not chosen >> each & 1 and not self.conflicts[each] & chosen \
                    and self.allowed(chosen, each):
                chosen |= 1 << each
        return chosen

    def _total(self, chosen: int) -> float:
        return sum(self.worth[each] for each in _bits(chosen))

    def exact(self, start: set[int]) -> tuple[set[int], bool]:
        """The best choice, and whether the search came to its end; ``start`` is a choice to begin with."""
        best, record = sum(1 << each for each in start), sum(self.worth[each] for each in start)
        steps = 0
        waiting = [((1 << len(self.order)) - 1, 0, 0.0)]
        while waiting:
            steps += 1
            if steps > MOST_STEPS:
                return set(_bits(best)), False
            left, chosen, worth = waiting.pop()
            if worth > record:
                best, record = chosen, worth
            bound = worth
            for clique in self.cliques:
                rest = clique & left
                if rest:
                    bound += self.worth[(rest & -rest).bit_length() - 1]
            if not left or bound <= record * (1 + 1e-12):
                continue
            each = (left & -left).bit_length() - 1
            waiting.append((left & ~(1 << each), chosen, worth))
            if self.allowed(chosen, each):
                rest = left & ~self.conflicts[each] & ~(1 << each)
                waiting.append((rest, chosen | 1 << each, worth + self.worth[each]))
        return set(_bits(best)), True


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
