"""What computations around products are called, and in how many kernels a report says that they run."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse

from onnxfuse.measuring.database import open_database
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import report_of
from onnxfuse.rewriting import NamedRecord
from onnxfuse.tuning import TuneOptions, tune

pytestmark = pytest.mark.usefixtures("few_ways")

BLOCK = """g (float16[8, 128, 64] x, float16[64, 64] a, float16[64, 64] d, float16[64, 64] v, float16[64, 256] w,
           float16[256, 64] u, float16[64] s) => (float16[8, 128, 64] y) {
    q = MatMul(x, a) k = MatMul(x, d) l = MatMul(x, v)
    t = Transpose <perm = [0, 2, 1]> (k)
    z = MatMul(q, t) p = Softmax <axis = -1> (z) o = MatMul(p, l)
    r = Add(o, x)
    n = LayerNormalization <axis = -1> (r, s)
    h = MatMul(n, w) g = Gelu(h) f = MatMul(g, u) e = Add(f, n)
    y = LayerNormalization <axis = -1> (e, s)
}"""


def named(model: onnx.ModelProto, **options: object) -> tuple[NamedRecord, ...]:
    wanted = {"target": "H100", "verify": False, "database": False, **options}
    return report_of(optimise(model, Options(**wanted))).named  # type: ignore[arg-type]


def test_what_nothing_was_measured_of_is_the_runtimes() -> None:
    found = {each.name: each for each in named(parse(BLOCK), target="A100")}
    assert list(found) == ["softmax-attention", "projection-residual-norm", "feed-forward"]
    assert {(each.places, each.one, each.several, each.left) for each in found.values()} == {(1, 0, 0, 1)}


def test_they_run_in_one_kernel_or_in_several(tmp_path: Path) -> None:
    """An attention is one, as the two products of a feed-forward layer are not."""
    path = tmp_path / "measurements.sqlite"
    with open_database(path) as kept:
        tune(parse(BLOCK), FakeTimer(lambda name: 50.0 if name == RUNTIME else 5.0), kept, TuneOptions())
    report = report_of(optimise(parse(BLOCK), Options(target="H100", verify=False, database=path)))
    assert report.named == (
        NamedRecord("softmax-attention", 1, 1, 0, 0, ("attention",)),
        NamedRecord("projection-residual-norm", 1, 1, 0, 0, ("products",)),
        NamedRecord("feed-forward", 1, 0, 1, 0, ("products",)),
    )
    assert report.to_json()["named"][2]["several"] == 1
    assert "1 × <code>feed-forward</code> (0 fused in one kernel, 1 in several, 0 left)" in report.to_html()
    assert ("named: 1 softmax-attention (fused); 1 projection-residual-norm (fused); "
            "1 feed-forward (fused in several kernels)") in " ".join(report.to_text(200).split())


def test_names_can_be_left_out() -> None:
    found = named(parse(BLOCK), disable=["feed-forward", "softmax-attention"])
    assert [each.name for each in found] == ["projection-residual-norm"]
    assert named(parse("g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")) == ()
