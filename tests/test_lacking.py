"""Operators that the CPU runs for want of a kernel on the GPU: which they are, and what that is worth to a plan."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from cli_models import parse
from edge_table import measured
from edge_values import EdgeCase, model_of
from fake_timer import RUNTIME, FakeTimer
from quantized_layers import planned

from onnxfuse.graph import from_proto
from onnxfuse.graph.model import Node
from onnxfuse.measuring.database import open_database
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.provider.lacking import BUS, COPY_SECONDS, HOST, host_seconds, lacks_kernel, left_to_the_cpu
from onnxfuse.tuning import TuneOptions, tune

OTHER = {
    ("", "GroupNormalization"): "runs as the standard's function, of whose nodes some compute sizes on the CPU",
    ("com.microsoft", "QuantizeLinear"): "has kernels by the type of its scale, and none to 16 bits",
    ("com.microsoft", "DequantizeLinear"): "the same",
}
"""What a session that may not fall back refuses, and is not counted, and why."""


def node_of(case: EdgeCase) -> Node:
    (node,) = load_graph(from_proto(onnx.ModelProto.FromString(model_of(case)))).nodes
    return node


@pytest.mark.parametrize("operator", sorted({(case.domain, case.operator) for case in measured()} - OTHER.keys()))
def test_what_was_measured(operator: tuple[str, str]) -> None:
    """Every operator with every type, on an H200: those without a kernel there and no others."""
    for case in measured():
        if (case.domain, case.operator) == operator and (isinstance(case.cuda, list) or case.cuda == "no kernel"):
            assert lacks_kernel(node_of(case)) == (case.cuda == "no kernel"), (case.form, case.runs[0])


def nodes(text: str) -> dict[str, Node]:
    return {node.op: node for node in load_graph(from_proto(parse(text))).nodes}


def test_copies_that_are_counted() -> None:
    """From and to the GPU, not between nodes of the CPU nor of what the model is given; and the CPU's own reads."""
    found = nodes("g (float[n, 64] x) => (float[n, 64] y) "
                  "{ a = Exp(x) b = Atan(a) c = Tan(b) d = Neg(c) e = Acos(x) y = Add(d, e) }")
    tensor = 10 * 64 * 4
    assert [name for name, node in found.items() if lacks_kernel(node)] == ["Atan", "Tan", "Acos"]
    for name in ("Atan", "Tan", "Acos"):
        wanted = tensor / BUS + 2 * tensor / HOST + COPY_SECONDS
        assert host_seconds(found[name], {"n": 10}) == pytest.approx(wanted)
    alone = nodes("g (float[n, 64] x) => (float[n, 64] y) { a = Exp(x) b = Atan(a) y = Neg(b) }")["Atan"]
    assert host_seconds(alone, {"n": 10}) == pytest.approx(2 * tensor / BUS + 2 * tensor / HOST + 2 * COPY_SECONDS)


@pytest.mark.parametrize(("reader", "copied"), [("z = Expand(x, p)", False), ("z = Mul(x, p)", True)])
def test_what_the_gpus_kernels_read_on_the_host(reader: str, copied: bool) -> None:
    """As sizes: a kernel on the GPU would have to send them back."""
    found = nodes(f"g (int64[n] x, int64[n] k) => (int64[m] z) {{ p = ReduceProd<keepdims = 1>(k) {reader} }}")
    assert (host_seconds(found["ReduceProd"], {"n": 8}) > COPY_SECONDS) == copied


def fused(model: onnx.ModelProto, **more: object) -> list[list[str]]:
    made = optimise(model, Options(verify=False, target="H100", dims={"n": 4096}, database=False, **more))  # type: ignore[arg-type]
    return [[node.op for node in region.nodes] for region in made.regions]


def test_a_lone_one_is_fused() -> None:
    """A kernel for it alone is worth more than two copies; one that has a kernel is left where it is."""
    text = "g (float[n, 64] x, float[64, 64] w) => (float[n, 64] y) { a = MatMul(x, w) b = Atan(a) y = MatMul(b, w) }"
    assert fused(parse(text)) == [["Atan"]] and fused(parse(text.replace("Atan", "Sin"))) == []


@pytest.mark.parametrize(("kind", "taken"), [("uint8", True), ("int8", False)])
def test_a_gpus_time_has_nothing_of_the_cpu(kind: str, taken: bool, tmp_path: Path) -> None:
    """The runtime's nodes are measured in kernels, of which those on the CPU have none: what is predicted counts."""
    weights = ",".join(["1"] * 64 * 96)
    model = parse(f"g ({kind}[rows,64] a, {kind} z, float s) => (float[rows,96] y) <int8[64,96] w = {{{weights}}}> "
                  "{ p = MatMulInteger(a, w, z) q = Cast<to = 1>(p) f = Mul(q, s) y = Relu(f) }")
    path = tmp_path / "measurements.sqlite"
    with open_database(path) as kept:
        tune(model, FakeTimer(lambda kernel: 1.0 if kernel == RUNTIME else 3.0), kept, TuneOptions(dims={"rows": 96}))
    made = planned(model, database=path)
    products = [region for region in made.plan.fusions if any(node.op == "MatMulInteger" for node in region.nodes)]
    assert [region.measured is not None for region in products] == [True] * taken


def test_what_is_left_to_the_cpu_is_said() -> None:
    """Of what is fused nothing is."""
    model = parse("g (uint8[n, 64] x, int8[64, 64] w) => (float[n, 64] y, int32[n, 64] p) "
                  "{ p = MatMulInteger(x, w) f = Cast <to = 1> (p) y = Atan(f) }")
    made = optimise(model, Options(verify=False, target="H100", dims={"n": 64}, database=False))
    assert [note for note in made.notes if "no kernel" in note] == [
        "ONNX Runtime has no kernel on the GPU for nodes that are left to it: MatMulInteger (1). The CPU runs them, "
        "and their tensors are copied there and back."]
    known = nodes("g (float[n] x) => (float[n] y) { a = Tan(x) b = Atan(a) c = Atan(b) d = Sinh(c) e = Cosh(d) "
                  "f = Acos(e) h = Asin(f) y = Exp(h) }")
    (said,) = left_to_the_cpu([*known.values(), known["Atan"]])
    assert ": Atan (2), Acos (1), Asin (1), Cosh (1), Sinh (1) and 1 more. " in said
    assert left_to_the_cpu([known["Exp"]]) == ()
