"""Pairs of transposes at the ends of regions: which halves a region holds."""

from __future__ import annotations

import onnx
import pytest
from kernel_harness import parse
from sizes_models import packed

from onnxfuse.operators import load_graph
from onnxfuse.operators.classes import is_undone, undoes
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.regions.grow import trimmed
from onnxfuse.rewriting import unfuse

# Rows of pixels as they leave a block of attention: an exporter turns them into an image, which convolutions read.
LEFT = """g (float16[2,1024,256] x, float16[256] b, float16[2,1024,256] r, float16[256,256,3,3] w)
    => (float16[2,256,32,32] y)
  <int64[4] shape = {2, 32, 32, 256}> {
    a = Add(x, b)
    c = Add(a, r)
    d = Reshape(c, shape)
    t = Transpose <perm = [0,3,1,2]> (d)
    l = Transpose <perm = [0,2,3,1]> (t)
    f = Transpose <perm = [0,3,1,2]> (l)
    y = Conv <pads = [1,1,1,1]> (f, w)
  }"""
BESIDE = LEFT.replace("y = Conv", "h = Transpose <perm = [0,3,1,2]> (l) s = Sigmoid(h) k = Conv").replace(
    "(f, w)", "(f, w) y = Mul(s, k)")


@pytest.mark.parametrize(("members", "kept"), [
    ("acdtl", "acdtl"),  # the transposes of a pair in the region move nothing
    ("acdtlf", "acdtl"),  # f is for its readers
    ("acdt", "acdt"),
    ("tl", ""),
    ("lf", ""),
    ("dt", ""),
])
def test_which_transposes_stay_at_an_end(members: str, kept: str) -> None:
    graph = load_graph(parse(LEFT))
    made = {value: graph.values[value].producer for value in "acdtlf"}
    nodes = {name: node for name, node in made.items() if node is not None}
    facts = {node: Facts(None, view=node.op == "Reshape", leaves=is_undone(node), returns=undoes(node) is not None)
             for node in graph.nodes}
    left = trimmed({nodes[name] for name in members}, facts)
    assert "".join(name for name in "acdtlf" if nodes[name] in left) == kept


def fused(text: str) -> Optimised:
    model = parse(text)
    made = optimise(model, Options(target="H200", verify=False, database=False, disable=["products"]))
    onnx.checker.check_model(made.model, full_check=True)
    assert packed(unfuse(made.model)) == packed(model)
    return made


def regions(made: Optimised) -> list[tuple[list[str], str]]:
    return [([value.name for node in fusion.nodes for value in node.outputs if value], fusion.kernel.schedule)
            for fusion in made.plan.fusions]


def test_what_nothing_fused_takes_back_stays_with_it() -> None:
    """The convolution is left to the runtime, which takes the pair before it out; one region that writes as it reads
    would have it run a transpose instead."""
    assert regions(fused(LEFT)) == [(["a", "c", "d", "t"], "tiled")]


def test_a_value_lies_as_its_fused_reader_takes_it() -> None:
    """What is behind the convolution reads l too: the first region writes it, and moves nothing."""
    assert regions(fused(BESIDE)) == [(["a", "c", "d", "t", "l"], "pointwise"), (["h", "s", "y"], "tiled")]
