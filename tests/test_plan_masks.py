"""Masks of places in the planner: attentions compute them themselves, whoever else needs what they are made of."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from fake_timer import FakeTimer, attentive
from kernel_harness import parse
from sizes_models import packed
from test_plan_attention import attentions, fuse, times

from onnxfuse.measuring.database import RUNTIME, open_database
from onnxfuse.optimised import Optimised
from onnxfuse.rewriting import unfuse
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import hidden, reference, verify
from onnxfuse.verifying.evaluate import Evaluator

pytestmark = pytest.mark.usefixtures("few_ways")

LAYER = """
  q{n} = MatMul(x{n}, w) qr{n} = Reshape(q{n}, heads) qt{n} = Transpose<perm = [0,2,1,3]>(qr{n})
  kt{n} = Transpose<perm = [0,2,3,1]>(qr{n}) s{n} = MatMul(qt{n}, kt{n}) d{n} = Div(s{n}, f) m{n} = Add(d{n}, mask)
  p{n} = Softmax(m{n}) o{n} = MatMul(p{n}, qt{n}) z{n} = Transpose<perm = [0,2,1,3]>(o{n}) {result} = Reshape(z{n}, joined)"""

CAUSAL = ("sh = Shape<start = 1, end = 2>(x0) S0 = Squeeze(sh) places = Range(nought, S0, once) "
          "rows = Unsqueeze(places, axis) le = LessOrEqual(places, rows) ")
PADDED = "one = Cast<to = 9>(given) pad = Unsqueeze(one, axes) "


def model(mask: str, extra: str = "", output: str = "", layers: int = 2) -> str:
    """Layers with a mask in common, which is what ``mask`` calls so."""
    text = "".join(LAYER.format(n=n, result=f"x{n + 1}" if n < layers - 1 else "y") for n in range(layers))
    return (
        f"g (float16[B,S,64] x0, int64[B,S] given, float16[64,64] w) => (float16[B,S,64] y{output}) "
        "<int64[4] heads = {0,0,2,32}, int64[3] joined = {0,0,64}, float16 f = {6}, int64 nought = {0}, "
        "int64 once = {1}, int64[1] axis = {1}, int64[2] axes = {1,2}, "
        "int64[1] nil = {0}, int64[3] outer = {1,2,3}, int64[3] queries = {0,1,3}, int64[3] others = {0,1,2}, int64[1] last = {-1}, float16 zero = {0}, float16 least = {-60000}> "
        f"{{ {mask} {extra} {text} }}")


PACKED = (
    "sh = Shape<start = 1, end = 2>(x0) S0 = Squeeze(sh) bs = Shape<end = 1>(x0) B0 = Squeeze(bs) places = Range(nought, S0, once) "
    "row = Unsqueeze(places, nil) all = Concat<axis = 0>(bs, sh) position = Expand(row, all) "
    "batches = Range(nought, B0, once) b = Unsqueeze(batches, outer) u = Unsqueeze(places, queries) v = Unsqueeze(places, others) "
    "bq = Max(b, u) sq = Shape(bq) bk = Max(b, v) sk = Shape(bk) bq1 = Expand(b, sq) u1 = Expand(u, sq) bk1 = Expand(b, sk) v1 = Expand(v, sk) "
    "bq2 = Unsqueeze(bq1, last) u2 = Unsqueeze(u1, last) bk2 = Unsqueeze(bk1, last) v2 = Unsqueeze(v1, last) "
    "qi = Concat<axis = -1>(bq2, u2) ki = Concat<axis = -1>(bk2, v2) "
    "document = CumSum(given, once) dq = GatherND(document, qi) dk = GatherND(document, ki) same = Equal(dq, dk) "
    "pq = GatherND(position, qi) pk = GatherND(position, ki) le = LessOrEqual(pk, pq) see = And(same, le) mask = Where(see, zero, least)")
"""As transformers 5 and PyTorch's exporter have it, for sequences of several documents."""

BOTH = CAUSAL + PADDED + "see = And(le, pad) mask = Where(see, zero, least)"


def fused(text: str, dims: Mapping[str, int] | None = None) -> Optimised:
    made = fuse(text, target=attentive(), dims=dims or {"B": 4, "S": 256}, least_gain=0.0)
    onnx.checker.check_model(made.model, full_check=True)
    assert packed(unfuse(made.model)) == packed(parse(text))
    return made


def hiding(made: Optimised) -> int:
    return sum(fusion.kernel.hides for fusion in made.plan.fusions)


def left(made: Optimised) -> Counter[str]:
    return Counter(node.op_type for node in made.model.graph.node)


def test_numbers_that_are_cast_are_known() -> None:
    """As exporters write a number for any type."""
    cast = "number = Constant<value_float = -60000.0>() deep = CastLike(number, x0) "
    assert hiding(fused(model(CAUSAL + cast + "mask = Where(le, zero, deep)"))) == 2
    inside = CAUSAL + cast + "mask = Identity(le)"
    assert hiding(fused(model(inside).replace("m0 = Add(d0, mask)", "m0 = Where(mask, d0, deep)")
                        .replace("m1 = Add(d1, mask)", "m1 = Where(mask, d1, deep)"))) == 2


def test_each_attention_computes_the_mask() -> None:
    """From sizes, and from the mask that is in memory; nothing writes it."""
    made = fused(model(BOTH))
    assert hiding(made) == 2 and len(attentions(made)) == 2
    assert left(made) == Counter({"Shape": 1, "Squeeze": 1, "MatMul": 2, "Region0": 2})
    assert {value.name for fusion in made.plan.fusions for value in fusion.tensors} == {"q0", "q1", "given"}


def test_masks_that_gather_places() -> None:
    """Indices that count are places, however they are spread, joined and looked up."""
    made = fused(model(PACKED))
    assert hiding(made) == 2
    read = {value.name for fusion in made.plan.fusions if fusion.kernel.hides for value in fusion.tensors}
    assert read == {"q0", "q1", "document"}


@pytest.mark.parametrize(("extra", "output", "stays"), [
    ("e = Cast<to = 1>(places) ", ", float[S] e", {"Range"}),
    ("e = Where(le, once, nought) t = Transpose(e) ", ", int64[S,S] t", {"Range", "Unsqueeze"}),
    ("e = Identity(mask) ", ", float16[B,1,S,S] e", set()),
])
def test_what_others_need_stays(extra: str, output: str, stays: set[str]) -> None:
    """Beside the fused nodes, or in the region that computes it."""
    made = fused(model(BOTH, extra, output))
    assert hiding(made) == 2
    assert stays <= left(made).keys()
    assert verify(made, None).whole.identical


@pytest.mark.parametrize("extra", ["", "e = Where(le, once, nought) t = Transpose(e) "])
def test_each_fused_node_is_taken_apart_by_itself(extra: str) -> None:
    """In any order: what another holds too comes back with the first, and stays."""
    text = model(BOTH, extra, ", int64[S,S] t" if extra else "")
    made = fused(text)
    for order in permutations(node.name for node in made.model.graph.node if node.domain == "onnxfuse"):
        left = made.model
        for name in order:
            left = unfuse(left, [name])
            onnx.checker.check_model(left, full_check=True)
        assert packed(left) == packed(parse(text))


@pytest.mark.parametrize("mask", [
    PADDED + "mask = Where(pad, zero, least)",
    CAUSAL + "mask = Where(le, zero, f)",
    CAUSAL + "n = CumSum(given, once) many = Greater(n, once) pad = Unsqueeze(many, axes) mask = Where(pad, zero, least)",
])
def test_masks_that_hide_nothing_stay_in_memory(mask: str) -> None:
    made = fused(model(mask))
    assert not hiding(made) and len(attentions(made)) == 2
    assert any(value.name == "mask" for fusion in made.plan.fusions for value in fusion.tensors)


def test_verification_accepts_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that outweigh a finite mask, and what is no number, are not owed; without that rule they would be."""
    made = fused(model(BOTH, layers=1), {"B": 1, "S": 80})
    (found,) = verify(made, EmulatedRunner()).nodes
    monkeypatch.setattr(reference, "may_hide", lambda body: False)
    (strict,) = verify(made, EmulatedRunner()).nodes
    assert found.verdict == "passed" and strict.verdict == "failed"
    assert "not-a-number" in strict.message or "large" in strict.message


def test_what_is_hidden_does_not_show() -> None:
    """The second reference is of inputs that are finite, but for minus infinity in masks, and of masks that no score
    outweighs; numbers that are no mask's stay."""
    feeds = {name: np.array([np.nan, np.inf, -np.inf, 2], np.float16) for name in ("x0", "x1")} | {"x2": np.array([3])}
    found = hidden.shown(feeds, {"x1"})
    assert [found[name].tolist() for name in feeds] == [[0, 0, 0, 2], [0, 0, -np.inf, 2], [3]]
    tensors = [onnx.numpy_helper.from_array(np.array(number)) for number in (-60000.0, -900.0, -np.inf)]
    body = onnx.helper.make_model(onnx.helper.make_graph(
        [onnx.helper.make_node("Constant", [], [f"y{place}"], value=tensor) for place, tensor in enumerate(tensors)], "body",
        [], [onnx.helper.make_tensor_value_info(f"y{place}", onnx.TensorProto.DOUBLE, []) for place in range(3)]),
        ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    assert [float(each) for each in Evaluator(hidden.outweighed_model(body)).run({})] == [-1e30, -900.0, -np.inf]


def test_attentions_with_their_masks_are_measured(tmp_path: Path) -> None:
    """As they are planned, so that the plan after a measurement knows what they take."""
    given = {"dims": {"B": 4, "S": 128}}
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(parse(model(BOTH)), times(5.0), kept, TuneOptions(**given))
    made = fuse(model(BOTH), database=Path(kept.name), target="H100", disable=["products"], **given)
    found = [fusion for fusion in made.plan.fusions if fusion.kernel.hides]
    assert len(found) == 2 and all(fusion.measured is not None for fusion in found)


class MaskTimer(FakeTimer):
    """An attention that reads a mask takes 6 microseconds, one that computes it so many."""

    def __init__(self, computed: float) -> None:
        named = {RUNTIME: 50.0, "product": 60.0}
        super().__init__(lambda name: named.get(name.split("_")[0], 10.0) if not name.startswith("attention") else (
            6.0 if any(array.shape[-2:] == (128, 128) for array in self.feeds.values()) else computed))


@pytest.mark.parametrize(("computed", "taken"), [(5.0, True), (5.95, False)])
def test_masks_made_of_little_are_computed_where_that_was_measured_faster(
        tmp_path: Path, computed: float, taken: bool) -> None:
    """A number a key in place of one a pair; whoever else needed the mask."""
    given = {"dims": {"B": 4, "S": 128}}
    padded = PADDED + "wide = Expand(pad, all) mask = Where(wide, zero, least)"
    text = model("sh = Shape<start = 1, end = 2>(x0) bs = Shape<end = 1>(x0) "
                 "all = Concat<axis = 0>(bs, once1, sh, sh) " + padded).replace(
                     "int64[1] nil", "int64[1] once1 = {1}, int64[1] nil")
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(parse(text), MaskTimer(computed), kept, TuneOptions(**given))
    made = fuse(text, database=Path(kept.name), target="H100", disable=["products"], **given)
    found = [fusion for fusion in made.plan.fusions if fusion.kernel.schedule == "attention"]
    read = {value.name for fusion in found for value in fusion.tensors}
    assert len(found) == 2 and not hiding(made)
    assert ("mask" not in read and "given" in read) is taken
    assert any(value.name == "mask" for fusion in made.plan.fusions for value in fusion.outputs) is not taken
    assert packed(unfuse(made.model)) == packed(parse(text))
    if taken:
        assert {node.verdict for node in verify(made, EmulatedRunner()).nodes} == {"passed"}


@pytest.mark.parametrize("hidden_one", [False, True])
def test_masks_that_are_known_to_hide_nothing_are_not_read(hidden_one: bool) -> None:
    """A constant of truths, spread over a batch whose size is known when it runs; but for one."""
    truths = ",".join(["1"] * 47 + ["0" if hidden_one else "1"])
    mask = ("bs = Shape<end = 1>(x0) all = Concat<axis = 0>(bs, one, more, more) wide = Expand(seen, all) "
            "mask = Where(wide, zero, least)")
    text = model(mask).replace("[B,S,64]", "[B,48,64]").replace(
        "int64[1] nil", f"bool[1,1,48,1] seen = {{{truths}}}, int64[1] one = {{1}}, int64[1] more = {{48}}, int64[1] nil")
    made = fused(text, {"B": 64})
    assert not hiding(made) and len(attentions(made)) == 2
    known = [fusion for fusion in made.plan.fusions if fusion.rule == "attention"
             and not {"mask", "seen"} & {value.name for value in fusion.tensors}]
    reasons = [record.reason for record in made.plan.considered if record.verdict == "chosen" and record.nodes in {
        fusion.view for fusion in known}]
    assert len(known) == len(reasons) == (0 if hidden_one else 2)
    assert all("it hides nothing" in reason for reason in reasons)
    if known:
        assert {node.verdict for node in verify(made, EmulatedRunner()).nodes} == {"passed"}
