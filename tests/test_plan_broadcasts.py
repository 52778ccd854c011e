"""Operands that are broadcast, and that first-level caches do not hold: how often a pointwise kernel asks for them, and
what that makes of plans."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import pytest
from kernel_harness import parse

from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.broadcasts import NEAR, cached_seconds, read_again_cached
from onnxfuse.planning.costs.hardware import resolve_profile
from onnxfuse.planning.costs.traffic import KernelTraffic, Ledger

H200 = resolve_profile("H200")


def traffic(operand: str, result: str) -> KernelTraffic:
    """Of a sum of two tensors, one of which has the result's shape."""
    graph = load_graph(parse(f"g (float16[{operand}] a, float16[{result}] b) => (float16[{result}] y) {{ y = Add(a, b) }}"))
    return Ledger(graph, {}).node(graph.nodes[0])


@pytest.mark.parametrize(("operand", "times"), [
    ("512,512", 24),  # of 25
    ("1,1,512,512", 24),
    ("512", 0),  # the first-level cache holds it
    ("25,1,512", 0),
    ("25,512,512", 0),
])
def test_what_is_read_again(operand: str, times: int) -> None:
    found = traffic(operand, "25,512,512")
    assert read_again_cached(found) == times * 512 * 512 * 2


def test_it_takes_the_time_where_it_is_most_of_what_is_read() -> None:
    """Of six tables that are added up and then to a result each is read for each image."""
    names = [f"t{place}" for place in range(6)]
    tables = ", ".join(f"float16[512,512] {name}" for name in names)
    graph = load_graph(parse(f"g ({tables}, float16[25,512,512] b) => (float16[25,512,512] y) {{ y = Sum(b, {', '.join(names)}) }}"))
    found = Ledger(graph, {}).node(graph.nodes[0])
    moved = found.bytes + 6 * 24 * 512 * 512 * 2
    assert cached_seconds(found, H200, 0.5) == pytest.approx(
        H200.floor_us * 1e-6 + moved / (0.5 * H200.bandwidth * H200.l2_gain))
    assert cached_seconds(traffic("512,512", "25,512,512"), H200, 0.5) == 0


def test_what_neighbours_read_is_asked_for_once() -> None:
    """A number for each row, and an index for each row of a table."""
    graph = load_graph(parse("g (float16[32,12] t, int64[512,512] i) => (float16[512,512,12] y) { y = Gather(t, i) }"))
    for found in (traffic("256,512,1", "256,512,64"), Ledger(graph, {}).node(graph.nodes[0])):
        assert max(found.reads.values()) > NEAR and read_again_cached(found) == 0


def test_what_is_put_together_is_read_once() -> None:
    """A result larger than an operand is none that this is broadcast to."""
    text = "g (float16[8,300,512] a, float16[8,200,512] b) => (float16[8,500,512] y) { y = Concat<axis = 1>(a, b) }"
    graph = load_graph(parse(text))
    assert read_again_cached(Ledger(graph, {}).node(graph.nodes[0])) == 0


BUCKETS = """g (int64[256,256] d, int64[256,256] e, bool[256,256] f, float16[32,12] t, bool[B,1,256,256] m)
  => (float16[B,12,256,256] y) <int64 half = {16}, float16 low = {-60000}> {
  l = Min(d, e) w = Where(f, d, l) c = Cast<to = 7>(f) h = Mul(c, half) i = Add(w, h) g = Gather(t, i)
  p = Transpose<perm = [2,0,1]>(g) y = Where(m, p, low) }"""


def test_what_is_the_same_for_all_images_is_computed_once() -> None:
    """Biases of an attention by how far places are apart: beside what chooses by the mask their tables would be read
    for each image and head."""
    made = optimise(parse(BUCKETS), Options(target="H200", verify=False, database=False, dims={"B": 16}))
    found = [[node.op for node in region.view] for region in made.plan.fusions]
    assert len(found) == 2 and {"Min", "Mul", "Gather"} <= set(found[0]) and found[1][-1] == "Where"
