"""Choosing among conflicting candidates: exact against every choice there is, greedy against exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import onnx
import pytest

from onnxfuse.operators import load_graph
from onnxfuse.planning import selection
from onnxfuse.planning.selection import Candidate, Selection, joint_cycles, select

GAP = 0.02
"""Worth that greedy with repair may lose against exact, on average over the random graphs."""


def candidates(seed: int, count: int, items: int) -> list[Candidate]:
    chance = random.Random(seed)
    return [
        Candidate(frozenset(chance.sample(range(items), chance.randint(1, 6))), chance.randint(1, 1000) / 10)
        for _ in range(count)
    ]


def best(given: list[Candidate], barred: frozenset[int] = frozenset()) -> float:
    """Every choice, tried."""
    record = 0.0
    for size in range(len(given) + 1):
        for chosen in combinations(range(len(given)), size):
            members = [member for place in chosen for member in given[place].members]
            if len(members) == len(set(members)) and not (barred and barred <= set(chosen)):
                record = max(record, sum(given[place].worth for place in chosen))
    return record


def sound(given: list[Candidate], found: Selection) -> bool:
    members = [member for place in found.chosen for member in given[place].members]
    return len(members) == len(set(members)) and found.worth == pytest.approx(
        sum(given[place].worth for place in found.chosen))


@pytest.mark.parametrize("seed", range(60))
def test_exact_is_the_best_of_all_choices(seed: int) -> None:
    given = candidates(seed, 11, 18)
    found = select(given)
    assert sound(given, found) and found.exact
    assert found.worth == pytest.approx(best(given))


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_best_by_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun with nothing: what it is begun with is the best already as a rule, and hides what the search leaves out."""
    monkeypatch.setattr(selection._Problem, "greedy", lambda self: set())
    given = candidates(seed, 12, 24)
    found = select(given)
    assert sound(given, found) and found.exact
    assert found.worth == pytest.approx(best(given))


def test_a_search_that_is_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = random.Random(3)
    given = [Candidate(frozenset([place, place + 1, place + 3]), worth.randint(1, 1000) / 10) for place in range(30)]
    assert select(given).exact and not select(given, most_exact=29).exact and select(given, most_exact=30).exact
    monkeypatch.setattr(selection, "MOST_STEPS", 5)
    found = select(given)
    assert sound(given, found) and not found.exact
    assert found.worth >= select(given, most_exact=0).worth


@pytest.mark.parametrize("seed", range(30))
def test_exact_under_a_bar_is_the_best_of_what_is_left(seed: int) -> None:
    given = candidates(seed, 10, 24)
    barred = frozenset(select(given).chosen[:2])

    def cycles(chosen: object) -> list[frozenset[int]]:
        return [barred] if barred <= set(chosen) else []  # type: ignore[call-overload]

    found = select(given, cycles)
    assert sound(given, found) and found.exact
    assert not barred <= set(found.chosen)
    assert found.worth == pytest.approx(best(given, barred))


def test_greedy_with_repair_against_exact(record_property: pytest.RecordProperty) -> None:
    """200 random conflict graphs of 30 candidates; the gap is reported, and small."""
    gaps = []
    for seed in range(200):
        given = candidates(1000 + seed, 30, 40)
        exact, greedy = select(given), select(given, most_exact=0)
        assert exact.exact and sound(given, greedy) and sound(given, exact)
        assert greedy.worth <= exact.worth * (1 + 1e-9)
        gaps.append(1 - greedy.worth / exact.worth)
    mean, worst = sum(gaps) / len(gaps), max(gaps)
    record_property("greedy_gap_mean", mean)
    record_property("greedy_gap_worst", worst)
    print(f"greedy against exact: {sum(gap < 1e-9 for gap in gaps)} of {len(gaps)} alike, "
          f"mean gap {mean:.2%}, worst {worst:.2%}")
    assert mean < GAP and worst < 0.2


def test_large_components_are_solved_greedily() -> None:
    given = candidates(1, 500, 300)
    found = select(given)
    assert sound(given, found) and not found.exact


def test_what_is_worth_nothing_is_left_out() -> None:
    assert select([Candidate(frozenset([0]), 0.0), Candidate(frozenset([1]), 1.0)]).chosen == (1,)


def test_cycles_without_end_leave_out_the_least() -> None:
    """A finder that never has enough: the search ends all the same, with nothing."""
    given = [Candidate(frozenset([place]), 1.0 + place) for place in range(12)]
    found = select(given, lambda chosen: [frozenset(chosen[:2])] if chosen else [])
    assert found.chosen == ()


def test_many_cycles_are_barred_at_once() -> None:
    """Thousands of pairs that must not be chosen together take few turns: each looks at the whole graph."""
    pairs, turns = 2000, 0
    given = [Candidate(frozenset([place]), 1.0 + place % 2) for place in range(2 * pairs)]

    def cycles(chosen: Sequence[int]) -> list[frozenset[int]]:
        nonlocal turns
        turns += 1
        known = set(chosen)
        return [frozenset([place, place + 1]) for place in range(0, 2 * pairs, 2) if {place, place + 1} <= known]

    found = select(given, cycles)
    assert turns < 20 and found.chosen == tuple(range(1, 2 * pairs, 2))


def test_a_cycle_names_the_groups_on_it() -> None:
    graph = load_graph(onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      g (float[N] x, float[N] z) => (float[N] d, float[N] h, float[N] k) {
        a = Abs(x) b = Exp(z) c = Neg(b) d = Tanh(a) e = Add(c, a) h = Mul(b, d) k = Relu(e)
      }"""))
    nodes = {node.outputs[0].name: node for node in graph.nodes if node.outputs[0] is not None}
    # a -> d and b -> c are apart; {a, c} reads b and is read by d, {b, d} reads a and is read by c.
    groups = [[nodes["e"], nodes["k"]], [nodes["a"], nodes["c"]], [nodes["b"], nodes["d"]]]
    assert joint_cycles(graph, groups) == [{1, 2}]
    assert joint_cycles(graph, groups[:2]) == []
    assert joint_cycles(graph, [[nodes["b"], nodes["h"]], [nodes["a"], nodes["d"]]]) == []


def test_cycles_that_have_nothing_in_common_are_found_together() -> None:
    steps = "\n".join(f"a{i} = Abs(x) b{i} = Exp(x) c{i} = Neg(b{i}) d{i} = Tanh(a{i})" for i in range(30))
    results = ", ".join(f"float[N] c{i}, float[N] d{i}" for i in range(30))
    graph = load_graph(onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => ({results}) {{ {steps} }}"""))
    nodes = {node.outputs[0].name: node for node in graph.nodes if node.outputs[0] is not None}
    groups = [[nodes[f"{one}{i}"], nodes[f"{two}{i}"]] for i in range(30) for one, two in ("ac", "bd")]
    assert sorted(map(sorted, joint_cycles(graph, groups))) == [[place, place + 1] for place in range(0, 60, 2)]
