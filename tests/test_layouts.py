"""Values around convolutions channels-last: where pairs of transposes stand, what they change (nothing), and that
measurements decide."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_timer import PRODUCT, RUNTIME, FakeTimer
from kernel_harness import parse, with_constants

import onnxfuse
from onnxfuse import forms
from onnxfuse.errors import KernelError, ModelError
from onnxfuse.folding import paired
from onnxfuse.graph.model import Node
from onnxfuse.measuring.database import open_database
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.reporting.gather import report_of
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import lay_out, layout_record, unfuse
from onnxfuse.rewriting.layouts import KEY, put_straight
from onnxfuse.rules import canonicalise, load_rules
from onnxfuse.schedules import Kernel
from onnxfuse.tuning import Timed, TuneOptions, tune

pytestmark = [pytest.mark.xdist_group("layouts"), pytest.mark.usefixtures("few_ways")]  # one database

NETWORK = """g (float16[b,3,17,13] x) => (float16[b,24] y, float16[b,16,17,13] z) {
 s = Conv <pads=[1,1,1,1]> (x, w0) a = Relu(s)
 c = Conv <pads=[1,1,1,1]> (a, w1, b1) r = Relu(c) p = Conv (a, w4) d = Add(r, p) e = Relu(d)
 f = Conv (e, w2) g1 = Sigmoid(f) h = Mul(f, g1) m = MaxPool <kernel_shape=[3,3], strides=[2,2]> (h)
 k = Conv <pads=[1,1,1,1]> (m, w3) q = Relu(k) v = GlobalAveragePool(q) y = Flatten(v) z = Neg(e) }"""

WEIGHTS = {"w0": (16, 3, 3, 3), "w1": (16, 16, 3, 3), "b1": (16,), "w4": (16, 16, 1, 1), "w2": (24, 16, 1, 1),
           "w3": (24, 24, 3, 3)}


def network() -> onnx.ModelProto:
    declared = ", ".join(f"float16[{','.join(map(str, shape))}] {name}" for name, shape in WEIGHTS.items())
    model = parse(NETWORK.replace(" x) =>", f" x, {declared}) =>"))
    generator = np.random.default_rng(0)
    return with_constants(model, {
        name: (generator.standard_normal(shape) * 0.2).astype(np.float16) for name, shape in WEIGHTS.items()})


def pairs(model: onnx.ModelProto) -> dict[str, tuple[tuple[str, ...], ...]]:
    graph = load_graph(model)
    view = canonicalise(graph, load_rules([rules_folder()]).canonical).graph
    return {each.value: each.readers for each in paired(graph, view)}


def test_where_pairs_stand() -> None:
    """Before convolutions and pooling, before several readers, and at the weights of windows: not inside arithmetic on
    one value (c, r behind its convolution, f, h's two readings of f), where three channels are no vector (x, w0) or
    where a weight has one pixel (w2, w4)."""
    assert pairs(network()) == {
        "w1": (("c",),), "w3": (("k",),), "a": (("c",), ("p",)), "r": (("d",),), "p": (("d",),), "e": (("f",), ("z",)),
        "h": (("m",),), "m": (("k",),), "q": (("v",),),
    }


@pytest.mark.parametrize("old, new", [
    ("float16", "double"), ("Conv <pads=[1,1,1,1]> (m, w3)", "Conv <pads=[1,1,1,1], group=24> (m, w5)")])
def test_convolutions_that_no_kernel_reads_so(old: str, new: str) -> None:
    """None in float64; nothing around a depthwise one alone."""
    text = "g ({0}[1,24,9,9] m, {0}[24,24,3,3] w3, {0}[24,1,3,3] w5) => ({0}[1,24,9,9] y) {{ " \
           "k = Conv <pads=[1,1,1,1]> (m, w3) y = Relu(k) }}"
    assert pairs(parse(text.format("float16")))
    assert not pairs(parse(text.format("float16").replace(old, new)))


@pytest.mark.parametrize(("features", "there"), [(16, True), (32, False)])
def test_pairs_stand_ahead_of_depthwise_convolutions(features: int, there: bool) -> None:
    """Of which each channel gives one, where others lie so: ahead of more too, kernels have channels side by side."""
    text = f"g (float16[1,3,9,9] x, float16[16,3,3,3] w, float16[{features},1,3,3] d, float16[8,{features},1,1] e) " \
           "=> (float16[1,8,9,9] y) { s = Conv <pads=[1,1,1,1]> (x, w) a = Relu(s) " \
           "k = Conv <pads=[1,1,1,1], group=16> (a, d) b = Relu(k) y = Conv(b, e) }"
    assert pairs(parse(text)) == {**({"a": (("k",),)} if there else {}), "b": (("y",),)}


@pytest.mark.parametrize(("reader", "there"), [("", False), (" z = Conv(k, w)", True)])
@pytest.mark.parametrize("computed", ["k = Conv", "b = Conv"])
def test_none_stands_where_only_the_models_own_transposes_read(computed: str, reader: str, there: bool) -> None:
    """A depthwise convolution, or what is computed of it: its region takes these in, as ahead of a norm over channels.
    """
    result = ", float16[1,16,7,7] z" if reader else ""
    text = "g (float16[1,16,9,9] x, float16[16,16,3,3] w, float16[16,1,3,3] d, float16[16] s) => " \
           f"(float16[1,9,9,16] y{result}) {{ a = Conv <pads=[1,1,1,1]> (x, w) " \
           f"{computed} <pads=[1,1,1,1], group=16> (a, d) {'k = Gelu(b)' if 'b' in computed else ''} " \
           f"t = Transpose <perm=[0,2,3,1]> (k) y = LayerNormalization(t, s){reader} }}"
    found = pairs(parse(text))
    assert "a" in found and ("k" in found) is there


@pytest.mark.parametrize(("kind", "channels", "some"), [("float", 4, True), ("float16", 4, False), ("float", 6, False)])
def test_vectors_have_sixteen_bytes(kind: str, channels: int, some: bool) -> None:
    text = "g (T[1,C,9,9] m, T[8,C,3,3] w) => (T[1,8,9,9] y) { k = Conv <pads=[1,1,1,1]> (m, w) y = Relu(k) }"
    assert bool(pairs(parse(text.replace("T[", f"{kind}[").replace("C", str(channels), 2)))) == some


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], **options: object) -> list[np.ndarray]:
    session = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(session, name, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), session, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_pairs_change_nothing_and_the_runtime_takes_them_out(tmp_path: Path) -> None:
    model = network()
    graph = load_graph(model)
    made = lay_out(model, paired(graph, canonicalise(graph, load_rules([rules_folder()]).canonical).graph))
    onnx.checker.check_model(made, full_check=True)
    assert Counter(node.op_type for node in made.graph.node)["Transpose"] == 9 + 11
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 17, 13)).astype(np.float16)}
    basic = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    left = tmp_path / "optimised.onnx"
    found = run(made, feeds, graph_optimization_level=basic, optimized_model_filepath=str(left))
    assert all(map(np.array_equal, found, run(model, feeds, graph_optimization_level=basic)))
    assert all(node.op_type != "Transpose" for node in onnx.load(left).graph.node)
    put_straight(made)
    assert made == model


class Timer(FakeTimer):
    """Kernels of convolutions take so many microseconds where they read an image with its channels last, else three
    times as many; all others 2, and the runtime's nodes 30."""

    def __init__(self, last: float) -> None:
        super().__init__(lambda kernel: 30.0 if kernel == RUNTIME else last if kernel.startswith(PRODUCT) else 2.0)

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        timed = super().time(model, fused=fused)
        shapes = [[size.dim_value for size in info.type.tensor_type.shape.dim] for info in model.graph.input]
        last = any(len(shape) == 4 and shape[-1] in (16, 24) for shape in shapes)
        return timed if last or timed.microseconds in (2.0, 30.0) else replace(
            timed, microseconds=3 * timed.microseconds)


def tuned(kept: Path, last: float) -> Path:
    """A database of what kernels and the runtime's nodes are said to take."""
    with open_database(kept) as database:
        tune(network(), Timer(last), database, TuneOptions(dims={"b": 2}))
    return kept


def fuse(database: Path, **options: object) -> Optimised:
    wanted = {"dims": {"b": 2}, "target": "H100", "verify": False, "database": database, "least_gain": 1.0, **options}
    return optimise(network(), Options(**wanted))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("laid") / "measurements.sqlite", 8.0)


@pytest.fixture(scope="module")
def laid(known: Path) -> Optimised:
    return fuse(known)


def test_what_was_measured_faster_lies_so(laid: Optimised) -> None:
    """Kernels begin and end between the transposes: those that are left stand at the borders."""
    record = layout_record(laid.model)
    assert record is not None and {each.value for each in record.laid} == set(pairs(network()))
    between = {each.last for each in record.laid}
    joined = {value.name for fusion in laid.plan.fusions for value in fusion.outputs} & between
    assert {"a_channels_last", "e_channels_last", "p_channels_last"} <= joined
    left = [node for node in laid.model.graph.node if node.op_type == "Transpose"]
    assert {node.output[0] for node in left} == {"w1_channels_last", "w3_channels_last"}


def test_the_report_counts_it(laid: Optimised, tmp_path: Path) -> None:
    """That of the optimisation and that of its file; without, nothing is said."""
    onnx.save(laid.model, tmp_path / "laid.onnx")
    for report in (report_of(laid), onnxfuse.report(tmp_path / "laid.onnx")):
        assert report.to_json()["values_channels_last"] == len(pairs(network()))
        assert f"values that lie channels-last: {len(pairs(network()))}" in report.to_text()
    assert "values that lie channels-last" not in onnxfuse.report(network(), target="A100").to_text()


def test_it_is_right_everywhere(laid: Optimised, known: Path) -> None:
    """The functions where no library is registered, whatever the runtime optimises; and back."""
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 17, 13)).astype(np.float16)}
    assert all(map(np.array_equal, run(laid.model, feeds), run(network(), feeds)))
    assert unfuse(laid.model) == network()
    assert fuse(known, verify=True, compile=False).taken_back == ()


def test_what_was_measured_slower_does_not(tmp_path: Path) -> None:
    assert layout_record(fuse(tuned(tmp_path / "measurements.sqlite", 60.0)).model) is None


class Compiling:
    """Stands in for the compiler: it takes those texts that ``takes`` does, and says nothing of them.  Those that it is
    to begin with are asked for too."""

    architecture = "sm_90"
    whole = True

    def __init__(self, takes: Callable[[Kernel], bool]) -> None:
        self.takes, self.asked, self.ahead = takes, set[str](), list[set[str]]()

    def begin(self, kernels: Sequence[Kernel]) -> None:
        self.asked.update(kernel.source for kernel in kernels)

    def arriving(self, kernels: Sequence[Kernel]) -> Iterator[Kernel]:
        self.ahead.append(set(self.asked))
        self.begin(kernels)
        return iter(kernels)

    def figures(self, kernels: Sequence[Kernel]) -> list[KernelError | None]:
        self.asked.update(kernel.source for kernel in kernels)
        return [None if self.takes(kernel) else KernelError("it is not taken") for kernel in kernels]

    def fuse(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> Optimised:
        monkeypatch.setattr("onnxfuse.pipeline.read_back", lambda *_: (self, ()))
        return fuse(database, compile=True)


def test_only_the_form_that_is_taken_is_compiled(laid: Optimised, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = Compiling(lambda kernel: True)
    assert compiling.fuse(known, monkeypatch).model == laid.model
    assert compiling.asked == {region.kernel.source for region in laid.regions}
    assert compiling.ahead[0] == compiling.asked, "what is joined is begun before any is waited for"


def test_what_does_not_compile_has_the_other_form_taken(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel that the laid out form alone has compiles; then none at all, and biases go back to where they were."""
    plain = {region.kernel.source for region in fuse(known, disable=["layouts"]).regions}
    found = Compiling(lambda kernel: kernel.source in plain).fuse(known, monkeypatch)
    assert layout_record(found.model) is None and {region.kernel.source for region in found.regions} == plain
    found = Compiling(lambda kernel: False).fuse(known, monkeypatch)
    assert found.model == network()
    assert [refusal.node for refusal in found.refusals if refusal.code == "bias"] == ["Conv -> c"]


@pytest.mark.parametrize(("each", "laid"), [(1.0, True), (-1.0, False)])
def test_what_is_left_to_the_runtime_counts(each: float, laid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two forms in which nothing was measured: here a second for each convolution that is left, or that one less."""
    def left(nodes: Iterable[Node], costs: CostModel) -> float:
        return each * sum(node.op == "Conv" for node in nodes)

    monkeypatch.setattr(forms, "left_seconds", left)
    made = optimise(network(), Options(dims={"b": 32}, target="H100", verify=False, database=False, compile=False))
    assert (layout_record(made.model) is not None) == laid


def test_what_lies_far_from_what_was_measured_is_not_looked_at(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is written to tell what was measured of it."""
    looked: list[str] = []
    monkeypatch.setattr("onnxfuse.planning.identity.Identities._kernel", lambda *asked: looked.append(asked[-1]))
    fuse(known, dims={"b": 64})
    assert not looked
    fuse(known)
    assert looked


@pytest.mark.parametrize("options", [
    {"disable": ["layouts"]}, {"provider_options": {"prefer_nhwc": "1"}}])
def test_it_can_be_left_out(options: dict[str, object], known: Path) -> None:
    assert layout_record(fuse(known, **options).model) is None


def test_an_edited_model() -> None:
    """What reads a value between the transposes keeps them; all else goes."""
    graph = load_graph(network())
    made = lay_out(network(), paired(graph, canonicalise(graph, load_rules([rules_folder()]).canonical).graph))
    made.graph.node.add(op_type="Neg", input=["e_channels_last"], output=["mine"])
    put_straight(made)
    assert [node.output[0] for node in made.graph.node if node.op_type == "Transpose"] == ["e_channels_last"]
    assert len(made.graph.node) == len(network().graph.node) + 2


@pytest.mark.parametrize("text, message", [
    ("{", "The record that onnxfuse left in the model cannot be read: JSONDecodeError("),
    (json.dumps({"version": 1, "laid": [{"value": 3}]}),
     "The record that onnxfuse left in the model cannot be read: ValueError("),
    (json.dumps({"version": 7, "laid": []}),
     "Values were laid out by another release of onnxfuse (the record has version 7, this one reads 1)."),
])
def test_a_damaged_record(text: str, message: str) -> None:
    model = network()
    model.metadata_props.add(key=KEY, value=text)
    with pytest.raises(ModelError) as caught:
        put_straight(model)
    assert caught.value.message.startswith(message)
