"""Recurrent layers as kernels, in every variant, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_harness import Made, check, failures, make, random_inputs, refused, short_inputs
from reference import Array

from onnxfuse.schedules.reductions.streaming import BLOCK_SHARED
from onnxfuse.schedules.source import Source

GATES = {"LSTM": 4, "GRU": 3}


@dataclass(frozen=True)
class Layer:
    """A layer of so many units over so many inputs; ``extra``: attributes; ``given``: what else it reads; ``wanted``:
    which of its results are read."""

    op: str = "LSTM"
    units: int = 16
    inputs: int = 12
    direction: str = "forward"
    extra: str = ""
    given: str = "bhc"
    wanted: str = "yhc"

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def text(self, kind: str) -> str:
        rows, count = GATES[self.op] * self.units, self.directions
        lstm = self.op == "LSTM"
        operands = {"b": f"T[{count},{2 * rows}] b", "h": f"T[{count},B,{self.units}] h"}
        results = {"y": f"T[S,{count},B,{self.units}] y", "h": f"T[{count},B,{self.units}] last"}
        if lstm:
            operands["c"], results["c"] = f"T[{count},B,{self.units}] c", f"T[{count},B,{self.units}] cell"
        read = ", ".join(operands[name] for name in self.given if name in operands)
        written = ", ".join(results[name] for name in self.wanted if name in results)
        names = [name if name in self.given else "" for name in ("b", "h", "c")]
        put = [{"y": "y", "h": "last", "c": "cell"}[name] if name in self.wanted else "_" for name in results]
        reset = "" if lstm else ", linear_before_reset = 1"
        inputs = f"x, w, r, {names[0]}, , {names[1]}{f', {names[2]}' if lstm else ''}"
        text = (f"g (T[S,B,{self.inputs}] x, T[{count},{rows},{self.inputs}] w, T[{count},{rows},{self.units}] r"
                f"{f', {read}' if read else ''}) => ({written}) {{ {', '.join(put)} = {self.op}"
                f'<hidden_size = {self.units}, direction = "{self.direction}"{reset}{self.extra}>({inputs}) }}')
        return text.replace("T[", f"{kind}[")


def made_of(layer: Layer, kind: str, steps: int, batch: int) -> Made:
    made = make(layer.text(kind), planned={"S": steps, "B": batch})
    assert made.kernel.schedule == "recurrent"
    return made


def inputs_of(made: Made, steps: int, batch: int) -> dict[str, Array]:
    """Weights that keep sums about one, so that gates are neither open nor shut."""
    given = short_inputs(made, {"S": steps, "B": batch})
    return {name: (array * 2.0 ** -round(np.log2(array.shape[-1]) / 2)).astype(array.dtype) if name in "wr" else array
            for name, array in given.items()}  # by powers of two, which leaves as many digits


LAYERS = {
    "lstm": Layer(), "gru": Layer("GRU"), "both ways": Layer(direction="bidirectional"),
    "backwards": Layer(direction="reverse"), "gru, both ways": Layer("GRU", direction="bidirectional"),
    "many units": Layer(units=100, inputs=20), "units and inputs that no vector divides": Layer("GRU", 33, 15),
    "one unit": Layer(units=1, inputs=1), "nothing but inputs": Layer(given=""), "no bias": Layer(given="hc"),
    "no cell": Layer(given="bh"), "the steps alone": Layer(wanted="y"), "the last state alone": Layer(wanted="h"),
    "the last cell alone": Layer(wanted="c"), "a gru without states": Layer("GRU", given="b", wanted="h"),
}


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, kind: str) -> None:
    made = made_of(LAYERS[name], kind, 4, 3)
    check(made, inputs_of(made, 4, 3), length=100, slack=1.5)


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 9), (3, 33), (0, 3), (3, 0)])
def test_other_sizes_than_were_planned(steps: int, batch: int, kind: str) -> None:
    """Also no step, whose last state is the first, and no sequence."""
    for layer in (Layer(direction="bidirectional"), Layer("GRU", units=24)):
        made = made_of(layer, kind, 5, 4)
        check(made, inputs_of(made, steps, batch), length=100, slack=1.5)


@pytest.mark.parametrize(("kind", "batch", "rows"), [
    ("float16", 1, 8), ("float16", 128, 8), ("float16", 129, 16), ("float16", 4096, 32), ("float", 1, 1),
    ("float", 17, 2), ("float", 4096, 8)])
def test_as_many_sequences_a_cluster_as_let_all_run_at_once(kind: str, batch: int, rows: int) -> None:
    made = made_of(Layer(), kind, 5, batch)
    step = made.kernel.plan.variants[0].launches[-1]
    both = made_of(Layer(direction="bidirectional"), kind, 5, -(-batch // 2)).kernel.plan.variants[0].launches[-1]
    assert batch == 1 or f" {rows} ceil" in both.grid[0]
    assert step.cluster == ("8", "1", "1") and f" {rows} ceil" in step.grid[0]
    for sequences in {3, min(batch, 40)}:
        check(made, inputs_of(made, 2, sequences), length=100, slack=1.5)


@pytest.mark.parametrize(("units", "kept"), [(352, "22, 0"), (512, "22, 10")])
def test_weights_that_registers_do_not_hold_lie_in_shared_memory(units: int, kept: str) -> None:
    made = made_of(Layer(units=units, inputs=8, wanted="h"), "float16", 2, 1)
    assert f", {kept}, __half>" in made.kernel.source
    check(made, inputs_of(made, 2, 1), length=600, slack=1.5)


@pytest.mark.parametrize(("layer", "kind", "asked"), [
    (Layer(units=512), "float16", True), (Layer(units=256), "float16", False), (Layer(units=256), "float", True)])
def test_what_not_every_gpu_holds_is_asked_for(layer: Layer, kind: str, asked: bool) -> None:
    """Of those that have clusters some have less shared memory; what runs anywhere asks for little."""
    *fast, general = made_of(layer, kind, 4, 2).kernel.plan.variants
    for variant in fast:
        assert variant.guards[0] == "90 sm <="
        assert any(guard.endswith(f"{BLOCK_SHARED} <=") for guard in variant.guards[1:2]) is asked
    assert not general.guards and all(int(step.shared) <= 48 * 1024 for step in general.launches)


def test_what_is_no_number_stays_in_its_sequence() -> None:
    for kind in ("float16", "float"):
        made = made_of(Layer(), kind, 3, 3)
        inputs = inputs_of(made, 3, 3)
        inputs["x"][1, 1] = np.nan
        inputs["h"][0, 0], inputs["c"][0, 2] = 3e4, -3e4
        check(made, inputs, length=100, slack=1.5)


@pytest.mark.parametrize(("layer", "says"), [
    (Layer("GRU", extra=", activations = [\"Sigmoid\", \"Relu\"]"), "activations of its own"),
    (Layer(extra=", clip = 3.0"), "a clip"), (Layer(extra=", input_forget = 1"), "a coupled forget gate"),
    (Layer(units=520), "512 at most"), (replace(Layer(), extra=", layout = 1"), "the batch before the steps")])
def test_what_is_left(layer: Layer, says: str) -> None:
    assert says in refused(layer.text("float16"), 14).message


@pytest.mark.parametrize(("text", "says"), [
    ("y, a, b = LSTM<hidden_size = 16>(x, w, r, , n)", "lengths of their own"),
    ("y, a, b = LSTM<hidden_size = 16>(x, w, r, , , , , p)", "weights of its cells"),
    ("y, a = GRU<hidden_size = 16>(x, v, s)", "a reset before the product"),
    ("z, a, b = LSTM<hidden_size = 16>(x, w, r) y = Relu(z)", "by itself alone"),
    ("q = Relu(r) y, a, b = LSTM<hidden_size = 16>(x, w, q)", "read from memory")])
def test_other_forms_are_left(text: str, says: str) -> None:
    inputs = ("float16[S,B,8] x, float16[1,64,8] w, float16[1,64,16] r, float16[1,48,8] v, float16[1,48,16] s, "
              "int32[B] n, float16[1,48] p")
    assert says in refused(f"g ({inputs}) => (float16[S,1,B,16] y) {{ {text} }}").message


def test_what_inputs_add_lies_in_scratch_memory() -> None:
    """Where the product of all steps writes nothing of the layer's own, and nothing hangs on where that lies."""
    plan = made_of(Layer(units=64), "float16", 40, 16).kernel.plan
    assert len(plan.scratch) == 1
    for variant in plan.variants:
        before, behind = variant.launches
        assert "t0" in before.arguments and not any(each.startswith("o") for each in before.arguments)
        assert {"t0", "o0", "o1", "o2"} <= set(behind.arguments)
        assert not any(guard.startswith("o0.") for guard in variant.guards)


def test_usual_activations_may_be_named() -> None:
    made = made_of(Layer(extra=', activations = ["sigmoid", "Tanh", "TANH"]'), "float16", 2, 2)
    check(made, inputs_of(made, 2, 2), length=100, slack=1.5)


FAULTS = {
    "gates change places": ("gates[2]) * cell + gate(gates[0])", "gates[0]) * cell + gate(gates[2])"),
    "states of the step before": ("step % 2 * rows * pitch", "(step + 1) % 2 * rows * pitch"),
    "a block of the cluster": ("i < pieces * blocks", "i < pieces * (blocks - 1)"),
    "inputs of this step again": ("at, step + 1, sequence + tile", "at, step, sequence + tile"),
    "the first state": ("from(first_of<hidden>(at.first, at,", "from(0 * first_of<hidden>(at.first, at,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    """A fault in the header's text shows in results."""
    made = made_of(Layer(units=64), "float16", 4, 3)
    right, wrong = FAULTS[fault]
    assert isinstance(made.kernel.code, Source) and right in made.kernel.source
    inputs = random_inputs(made, {"S": 4, "B": 3}) | inputs_of(made, 4, 3)
    assert failures(made, inputs, length=100, slack=1.5, source=made.kernel.source.replace(right, wrong), limit=1)
