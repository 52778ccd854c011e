"""Norms ahead of products: which regions are offered, and when one is taken."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse

from onnxfuse.measurements import environment_of
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.region import Region
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.tuning.subjects import subjects_of
from onnxfuse.verifying import verify

MODELS: Mapping[str, tuple[str, Counter[str]]] = {
    "layer norm and feed-forward": (
        "g (T[8,R,96] x, T[96] s, T[96] b, T[96,128] w, T[128] c) => (T[8,R,128] y) { n = LayerNormalization(x, s, b) p = MatMul(n, w) a = Add(p, c) y = Gelu(a) }",
        Counter({"LayerNormalization": 1, "MatMul": 1, "Add": 1, "Gelu": 1})),
    "a residual before, which the next layer reads": (
        "g (T[8,R,96] x, T[8,R,96] r, T[96] s, T[96,128] w) => (T[8,R,128] y, T[8,R,96] z) { z = Add(x, r) n = LayerNormalization(z, s) y = MatMul(n, w) }",
        Counter({"LayerNormalization": 1, "MatMul": 1})),
    "spelled out, and a gate": (
        "g (T[8,R,96] x, T[96] s, T[96,128] w, T[96,128] v) => (T[8,R,128] y) <int64[1] a = {2}> { h = Cast<to = 1>(x) q = Mul(h, h) m = ReduceMean<keepdims = 1>(q, a) e = Constant<value_float = 0.00001>() f = Add(m, e) "
        "r = Sqrt(f) d = Div(h, r) i = Cast<to = 10>(d) n = Mul(i, s) u = MatMul(n, w) z = MatMul(n, v) g = Sigmoid(u) j = Mul(u, g) y = Mul(j, z) }",
        Counter({"Cast": 2, "Mul": 4, "ReduceMean": 1, "Add": 1, "Sqrt": 1, "Div": 1, "MatMul": 2, "Sigmoid": 1})),
    "three projections": (
        "g (T[8,R,96] x, T[96] s, T[96,96] w, T[96,96] v, T[96,96] u) => (T[8,R,96] q, T[8,R,96] k, T[8,R,96] l) { n = LayerNormalization(x, s) q = MatMul(n, w) k = MatMul(n, v) l = MatMul(n, u) }",
        Counter({"LayerNormalization": 1, "MatMul": 3})),
    "queries and keys": (
        "g (T[1,6,R,64] q, T[1,6,R,64] k, T[1,6,R,64] v, T[64] s) => (T[1,6,R,64] y) { a = LayerNormalization(q, s) b = LayerNormalization(k, s) t = Transpose<perm = [0,1,3,2]>(b) u = MatMul(a, t) p = Softmax(u) y = MatMul(p, v) }",
        Counter({"LayerNormalization": 2, "Transpose": 1, "MatMul": 2, "Softmax": 1})),
}
"""A model, and the operators of its largest region with norms."""


def model_of(name: str) -> onnx.ModelProto:
    return parse(MODELS[name][0].replace("T[", "float16["), 20)


def fuse(name: str, **options: object) -> Optimised:
    wanted = {"dims": {"R": 160}, "target": "A100", "verify": False, "database": False, **options}
    return optimise(model_of(name), Options(**wanted))  # type: ignore[arg-type]


def normed(made: Optimised) -> list[Region]:
    return [region for region in made.plan.fusions if region.kernel.schedule == "normed"]


def operators(region: Region) -> Counter[str]:
    return Counter(node.op for node in region.nodes if node.op != "Constant")


def offered(made: Optimised) -> list[Counter[str]]:
    """Operators of the regions with norms that tuning would measure."""
    found = [subject.fusion for subject in subjects_of(made)[0]]
    return [operators(region) for region in found if region.kernel.schedule == "normed"]


@pytest.mark.parametrize("name", MODELS)
def test_it_may_be_measured(name: str) -> None:
    """Beside the products by themselves, and is not taken where nothing was: its time follows from no tiles."""
    assert not normed(fuse(name))
    assert MODELS[name][1] in offered(fuse(name, eager=True))
    assert not offered(fuse(name, eager=True, target="H100")), "a warp copies operands there, and these would have none"


def timed(microseconds: float) -> FakeTimer:
    """On an A100; what regions with norms take."""
    return FakeTimer(lambda kernel: 60.0 if kernel == RUNTIME else microseconds if kernel.startswith("of_norm") else 30.0,
                     environment=environment_of("NVIDIA A100-SXM4-80GB"))


@pytest.mark.parametrize(("microseconds", "count"), [(3.0, 1), (500.0, 0)])
@pytest.mark.parametrize("name", ["layer norm and feed-forward", "queries and keys"])
def test_what_was_measured_decides(tmp_path: Path, name: str, microseconds: float, count: int) -> None:
    database = tmp_path / "measurements.sqlite"
    timer = timed(microseconds)
    with open_database(database) as kept:
        found = tune(model_of(name), timer, kept, TuneOptions(dims={"R": 160}))
    assert "normed" in [region.schedule for region in found.regions]
    made = fuse(name, database=database)
    assert len(normed(made)) == count
    if count:
        onnx.checker.check_model(made.model, full_check=True)


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification(tmp_path: Path, runner: type[EmulatedRunner]) -> None:
    """The kernel is right, and a hundredth more is not."""
    database, name = tmp_path / "measurements.sqlite", "layer norm and feed-forward"
    timer = timed(3.0)
    with open_database(database) as kept:
        tune(model_of(name), timer, kept, TuneOptions(dims={"R": 16}))
    (result,) = verify(fuse(name, database=database, dims={"R": 16}), runner()).nodes
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result


LEFT: Mapping[str, str] = {
    "another reads the norm": "g (T[8,R,96] x, T[96] s, T[96,128] w) => (T[8,R,128] y, T[8,R,96] z) { n = LayerNormalization(x, s) y = MatMul(n, w) z = Neg(n) }",
    "the norm is a result": "g (T[8,R,96] x, T[96] s, T[96,128] w) => (T[8,R,128] y, T[8,R,96] n) { n = LayerNormalization(x, s) y = MatMul(n, w) }",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_others_read_stays_outside(name: str) -> None:
    made = optimise(parse(LEFT[name].replace("T[", "float16["), 20),
                    Options(dims={"R": 160}, target="A100", verify=False, database=False, eager=True))
    assert not offered(made)
