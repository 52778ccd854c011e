"""Recurrent layers in plans: taken where they are predicted to gain, with what lies before them, and left elsewhere."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from kernel_harness import parse, with_constants

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.library import RECURRENT_STEP, recurrent_seconds
from onnxfuse.rewriting import unfuse
from onnxfuse.verifying import verify

NETWORK = """g (T[S,B,24] x) => (T[S,B,32] y) <int64[3] flat = {0, 0, -1}, int64[1] one = {1}> {
    a, b, c = LSTM<hidden_size = 16, direction = "bidirectional">(x, w1, r1, b1)
    t = Transpose<perm = [0, 2, 1, 3]>(a)
    u = Reshape(t, flat)
    d, e = GRU<hidden_size = 32, linear_before_reset = 1>(u, w2, r2, b2)
    y = Squeeze(d, one)
}"""
SHAPES = {"w1": (2, 64, 24), "r1": (2, 64, 16), "b1": (2, 128), "w2": (1, 96, 32), "r2": (1, 96, 32), "b2": (1, 192)}


def network(kind: str = "float16", text: str = NETWORK) -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    dtype = np.float16 if kind == "float16" else np.float32
    model = with_constants(parse(text.replace("T[", f"{kind}[")), {
        name: (0.2 * rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()})
    return model


def planned(model: onnx.ModelProto, steps: int = 20, **options: object) -> Optimised:
    wanted = {"dims": {"S": steps, "B": 3}, "target": "H100", "verify": False, "database": False, **options}
    return optimise(model, Options(**wanted))  # type: ignore[arg-type]


def layers(made: Optimised) -> list[list[str]]:
    return [[node.op for node in region.view] for region in made.plan.fusions if region.kernel.schedule == "recurrent"]


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_layers_are_taken_and_right(kind: str) -> None:
    """The second with the views before it; each node right, and the model what it was when they are put back."""
    model = network(kind)
    made = planned(model)
    assert layers(made) == [["LSTM"], ["Transpose", "Reshape", "GRU"]]
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()
    assert unfuse(made.model) == model


@pytest.mark.parametrize("options", [{"target": "A100"}, {"disable": ["products"]}],
                         ids=["another architecture", "left out"])
def test_where_layers_stay(options: dict[str, object]) -> None:
    assert not layers(planned(network(), **options))  # type: ignore[arg-type]


def test_without_tf32_layers_of_float32_stay() -> None:
    """What inputs add is a product of float32, of which nothing was measured where that is not rounded."""
    made = planned(network("float"), provider_options={"use_tf32": "0"}, eager=True)
    assert not layers(made)
    kernels = [region.kernel for region in made.plan.with_products if region.kernel.schedule == "recurrent"]
    assert kernels and not any(kernel.rounds or kernel.pace for kernel in kernels)


@pytest.mark.parametrize(("op", "steps", "batch", "inputs", "units", "both", "kind", "measured"), [
    ("LSTM", 80, 16, 512, 256, True, "float16", 131), ("LSTM", 80, 64, 512, 256, True, "float16", 181),
    ("LSTM", 75, 2, 512, 512, False, "float16", 184), ("LSTM", 300, 1, 128, 128, False, "float16", 327),
    ("LSTM", 50, 256, 64, 64, False, "float16", 79), ("GRU", 100, 16, 256, 256, True, "float16", 169),
    ("GRU", 100, 4, 80, 384, False, "float16", 187), ("GRU", 20, 1024, 64, 128, False, "float16", 167),
    ("LSTM", 80, 16, 512, 256, True, "float", 290), ("LSTM", 80, 64, 512, 256, True, "float", 574),
    ("LSTM", 300, 1, 128, 128, False, "float", 310), ("LSTM", 50, 256, 64, 64, False, "float", 210),
    ("GRU", 100, 16, 256, 256, True, "float", 234), ("GRU", 20, 1024, 64, 128, False, "float", 299)])
def test_layers_took_no_longer_than_is_predicted(
        op: str, steps: int, batch: int, inputs: int, units: int, both: bool, kind: str, measured: float) -> None:
    """Microseconds as an H200 measured them; where the runtime's launches may be quicker layers stay."""
    count, rows = 1 + both, {"LSTM": 4, "GRU": 3}[op] * units
    options = f'direction = "{"bidirectional" if both else "forward"}"{", linear_before_reset = 1" * (op == "GRU")}'
    text = (f"g (T[{steps},{batch},{inputs}] x, T[{count},{rows},{inputs}] w, T[{count},{rows},{units}] r) => "
            f"(T[{steps},{count},{batch},{units}] y) {{ y = {op}<hidden_size = {units}, {options}>(x, w, r) }}")
    text = text.replace("T[", f"{kind}[")
    made = optimise(parse(text), Options(target="H200", verify=False, database=False, eager=True))
    (region,) = (each for each in made.plan.with_products if each.kernel.schedule == "recurrent")
    assert measured * 0.98 < 1e6 * made.costs.kernel_seconds(region) < 1.65 * measured
    left = planned(parse(text), dims={}, target="H200")
    assert bool(layers(left)) == (batch < (64 if kind == "float" else 1024))


def test_what_the_runtime_takes() -> None:
    """By its steps and directions, whatever else."""
    made = planned(network(), disable=["products"])
    one, other = (node for node in made.graph.nodes if node.op in ("LSTM", "GRU"))
    assert recurrent_seconds(one, made.costs) == pytest.approx(2 * 20 * RECURRENT_STEP, rel=0.01)
    assert recurrent_seconds(other, made.costs) == pytest.approx(20 * RECURRENT_STEP, rel=0.01)
    squeeze = next(node for node in made.graph.nodes if node.op == "Squeeze")
    assert recurrent_seconds(squeeze, made.costs) is None
