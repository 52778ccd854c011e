"""Views at the border of a region: taken in where that costs the kernel nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from rewriting_models import run, same_bits

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.rewriting import unfuse

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
HELD = "<int64[3] three = {0, 8, 64}, int64[2] two = {-1, 512}, int64[1] one = {-1}, int64[1] at = {1}>"


def fuse(text: str, **options: object) -> Optimised:
    """Plan for b = 4096 rows; the fused model gives the original's bits, and the original comes back."""
    model = onnx.parser.parse_model(HEAD + text)
    wanted = {"target": "H200", "dims": {"b": 4096}, "verify": False, "database": False, **options}
    made = optimise(model, Options(**wanted))  # type: ignore[arg-type]
    onnx.checker.check_model(made.model, full_check=True)
    assert unfuse(made.model) == model
    generator = np.random.default_rng(0)
    for batch in (3, 1):
        feeds = {}
        for info in model.graph.input:
            kind = info.type.tensor_type
            shape = [entry.dim_value or batch for entry in kind.shape.dim]
            numbers = [batch, 8, 64] if info.name == "sizes" else generator.normal(size=shape)
            feeds[info.name] = np.asarray(numbers, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        assert same_bits(run(made.model, feeds), run(model, feeds))  # float32, no tolerance
    return made


def members(made: Optimised) -> list[list[str]]:
    return [[node.op for node in fusion.view] for fusion in made.plan.fusions]


def test_views_on_both_sides_come_in() -> None:
    made = fuse(f"""g (float[b, 512] x) => (float[b, 512] y) {HELD} {{
        z = Reshape(x, three) e = Exp(z) f = Mul(e, z) u = Unsqueeze(f, at) w = Reshape(u, three) y = Reshape(w, two)
    }}""")
    assert members(made) == [["Reshape", "Exp", "Mul", "Unsqueeze", "Reshape", "Reshape"]]
    (fusion,) = made.plan.fusions
    assert ([value.name for value in fusion.tensors], [value.name for value in fusion.outputs]) == (["x"], ["y"])
    assert not fusion.hosts and len(made.model.graph.node) == 1


def test_a_view_of_rows_comes_in() -> None:
    made = fuse(f"""g (float[b, 8, 64] x) => (float[b, 512] y) {HELD} {{
        e = Exp(x) s = Softmax<axis = -1>(e) y = Reshape(s, two)
    }}""")
    assert members(made) == [["Exp", "Softmax", "Reshape"]]


@pytest.mark.parametrize(("body", "outputs"), [
    ("z = Reshape(x, three) e = Exp(z) y = Mul(e, z)", "float[b, 8, 64] y, float[b, 8, 64] z"),
    ("z = Reshape(x, three) e = Exp(z) y = Mul(e, z) c = Hardmax(z)", "float[b, 8, 64] y, float[b, 8, 64] c"),
    ("e = Exp(x) f = Mul(e, x) z = Reshape(f, three) c = Hardmax(f)", "float[b, 8, 64] z, float[b, 512] c"),
    ("e = Exp(x) f = Mul(e, x) z = Reshape(f, three)", "float[b, 8, 64] z, float[b, 512] f"),
], ids=["an output before", "a reader before", "a reader after", "an output after"])
def test_what_others_read_stays_outside(body: str, outputs: str) -> None:
    made = fuse(f"g (float[b, 512] x) => ({outputs}) {HELD} {{ {body} }}")
    assert members(made) == [["Exp", "Mul"]]


def test_a_view_with_an_operand_of_its_own_stays_outside() -> None:
    made = fuse("""g (float[b, 512] x, int64[3] sizes) => (float[p, q, r] y) {
        e = Exp(x) f = Mul(e, x) y = Reshape(f, sizes)
    }""")
    assert members(made) == [["Exp", "Mul"]]


def test_a_gpu_whose_views_cost_nothing_leaves_them() -> None:
    profile = find_profile("H200").model_copy(update={"view_us": 0.0})
    made = fuse(f"""g (float[b, 512] x) => (float[b, 8, 64] y) {HELD} {{
        e = Exp(x) f = Mul(e, x) y = Reshape(f, three)
    }}""", target=profile)
    assert members(made) == [["Exp", "Mul"]]


def test_a_view_between_regions_goes_to_one_of_them() -> None:
    made = fuse("""g (float[b, 512] x) => (float[b, 8, 64] y) <int64[3] three = {0, 8, 64}> {
        e = Exp(x) f = Mul(e, x) s = Softmax<axis = -1>(f) z = Reshape(s, three) t = Tanh(z) q = Mul(t, z)
        y = Softmax<axis = -1>(q)
    }""")
    assert sum(ops.count("Reshape") for ops in members(made)) == 1
    assert len(made.model.graph.node) == len(made.plan.fusions) == 2


def test_a_view_that_comes_first_changes_only_the_order_of_inputs() -> None:
    made = fuse(f"""g (float[b, 512] x, float[b, 8, 64] w) => (float[b, 8, 64] y) {HELD} {{
        z = Reshape(x, three) e = Exp(w) y = Sub(z, e)
    }}""")
    assert members(made) == [["Reshape", "Exp", "Sub"]]
    assert [value.name for value in made.plan.fusions[0].tensors] == ["x", "w"]  # and "w", "z" without it


def test_a_view_of_what_the_kernel_reads_anyway_stays_outside() -> None:
    made = fuse("""g (float[1024, 1] x) => (float[1024, 1024] y) <int64[1] flat = {1024}> {
        z = Reshape(x, flat) e = Exp(z) y = Mul(x, e)
    }""", dims={})
    assert members(made) == [["Exp", "Mul"]]
