"""A lock of what is fused, and later models beside it: what is written, what is found lost, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import body_models
import numpy as np
import onnx
import pytest
from cli_models import encoder, parse, run
from graph_strategies import seeded
from lock_models import layers, lines, optimised, renamed, written
from onnx import numpy_helper
from plain_session import RELEASE
from reordered import rewritten

import onnxfuse
from onnxfuse.locking import Lock, lock_text, read_lock
from onnxfuse.locking.lock import Fusion, Spot
from onnxfuse.locking.result import CheckResult
from onnxfuse.locking.structure import arranged, structure
from onnxfuse.operators import load_graph
from onnxfuse.rewriting import read_fused

GROWTH = ("grow-pointwise", "grow-row-reduction", "grow-scan")

modelled = pytest.mark.skipif(RELEASE < (1, 31), reason="the fusions of ONNX Runtime 1.31 are modelled")


def checked(model: onnx.ModelProto, lock: Lock, **options: object) -> CheckResult:
    return onnxfuse.check(model, lock, database=False, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lock() -> Lock:
    """Of three layers with norms as operators, each one fused node."""
    return optimised(layers()).lock()


@pytest.fixture
def file(lock: Lock, tmp_path: Path) -> Path:
    return written(lock, tmp_path)


# What is written


@modelled
def test_the_file_says_what_is_fused_and_where(lock: Lock) -> None:
    made, done = lock.made, "after: fused, seen: true"
    assert lock_text(lock).splitlines()[2:] == f"""\
lock: 1
made:
  onnxfuse: "{made.onnxfuse}"
  onnxruntime: "{made.onnxruntime}"
  onnx: "{made.onnx}"
plan:
  target: H100
  dims: {{batch: 1, seq: 128}}
model:
  file: g
  opsets:
    ai.onnx: 17
  inputs:
    x: [float, batch, seq, 256]
  outputs:
    z2: [float, batch, seq, 256]
kernels: {{before: 15, after: 6}}
rules:
  residual-layer-norm: 3
fusions:
  - rule: residual-layer-norm
    structure: [Add, Add(1), LayerNormalization(2), Tanh(3)]
    times: 3
    at:
      - {{nodes: [Add -> c0, Add -> s0, LayerNormalization -> y0, Tanh -> z0], reads: [t0, x], writes: [z0]}}
      - {{nodes: [Add -> c1, Add -> s1, LayerNormalization -> y1, Tanh -> z1], reads: [t1, z0], writes: [z1]}}
      - {{nodes: [Add -> c2, Add -> s2, LayerNormalization -> y2, Tanh -> z2], reads: [t2, z1], writes: [z2]}}
runtime:
  - rule: ort-skip-layer-norm
    structure: [Add, Add(1), LayerNormalization(2)]
    before: 3
    after: 0
    at:
      - {{nodes: [Add -> c0, Add -> s0, LayerNormalization -> y0], reads: [t0, x], writes: [y0], {done}}}
      - {{nodes: [Add -> c1, Add -> s1, LayerNormalization -> y1], reads: [t1, z0], writes: [y1], {done}}}
      - {{nodes: [Add -> c2, Add -> s2, LayerNormalization -> y2], reads: [t2, z1], writes: [y2], {done}}}
""".splitlines()


@pytest.mark.parametrize("model", [layers, encoder, body_models.nested], ids=["layers", "encoder", "bodies"])
def test_the_order_of_a_models_nodes_is_no_matter(model: Callable[[], onnx.ModelProto]) -> None:
    texts = {lock_text(optimised(each).lock())
             for each in (model(), *(rewritten(model(), seed, rename=False).model for seed in range(3)))}
    assert len(texts) == 1


def test_a_structure_hangs_on_nothing_outside_it() -> None:
    """Which of two chains is computed first is the graph's affair."""
    graphs = [load_graph(parse(f"""
        g (float[4] x) => ({outputs}) {{ a = Sigmoid(x) y = Tanh(a) b = Exp(x) c = Sigmoid(b) u = Mul(c, b) }}"""))
        for outputs in ("float[4] y, float[4] u", "float[4] u, float[4] y")]
    assert len({structure(graph.nodes) for graph in graphs}) == 2
    assert {structure(arranged(graph.nodes)) for graph in graphs} == {
        ("Exp", "Sigmoid", "Sigmoid(1)", "Tanh(2)", "Mul(1 3)")}


def test_settings_that_are_not_usual_are_kept() -> None:
    usual = optimised(layers(number=1), provider_options={"fuse_conv_bias": "1", "use_tf32": "0"}).lock()
    assert usual.plan.model_dump(exclude_defaults=True).keys() == {
        "target", "dims", "keeps_biases", "keeps_float32"}
    assert checked(layers(number=1), usual).now == usual
    made = optimised(layers(number=1), strategy="memory", least_gain=1.5, disable=["gelu-erf"], dims={"batch": 3},
                     hints=onnxfuse.Hints(memory_pressure=0.5), provider_options={"prefer_nhwc": "1"}).lock()
    assert checked(layers(number=1), made).now == made
    assert made.plan.model_dump(exclude_defaults=True) == {
        "target": "H100", "dims": {"batch": 3, "seq": 128}, "strategy": "memory", "hints": {"memory_pressure": 0.5},
        "least_gain": 1.5, "channels_last": True, "keeps_biases": True, "disabled": ["gelu-erf"]}


def test_what_becomes_of_the_runtimes_own_fusions() -> None:
    made = optimised(encoder(2), dims={"batch": 8}, target="B200").lock()
    found = {entry.rule: (entry.before, entry.after, {spot.after for spot in entry.at}) for entry in made.runtime}
    assert found["ort-gelu+ort-bias-gelu"] == (2, 2, {"fires"})
    assert found["ort-skip-layer-norm"] == (4, 0, {"fused"})
    for entries in (made.fusions, made.runtime):  # whichever comes first in the graph
        order = [(entry.rule, entry.structure) for entry in entries]
        assert len(order) > 2 and order == sorted(order)
    product = parse("""
        g (float[B, 12, 512, 64] q, float[B, 12, 512, 64] k) => (float[B, 12, 512, 512] y)
        <float c = {8.0}, float half = {0.5}> {
          t = Transpose <perm = [0, 1, 3, 2]> (k) m = MatMul(q, t) d = Div(m, c)
          e = Sigmoid(d) f = Mul(e, half) y = Add(f, d) }""")
    (entry,) = optimised(product, dims={"B": 8}, target="B200").lock().runtime
    assert (entry.rule, entry.before, entry.after) == ("ort-matmul-transpose+ort-matmul-scale", 1, 1)
    assert [spot.after for spot in entry.at] == ["partly"]


NAMES = ["a: b", "true", "1e5", "12", "~", "a # b", "line\nline", "\x1b[2J", "\u202e", "'", '"', "- a", "{a}", "日本",
         " a ", "null", "a, b", "?", "a" * 400, "2001-01-01", "yes", "=", "<<", ""]


def test_any_name_comes_back(lock: Lock, tmp_path: Path) -> None:
    spot = Spot(nodes=NAMES, reads=NAMES, writes=NAMES)
    strange = lock.model_copy(update={
        "fusions": [Fusion(rule=name, structure=NAMES, times=1, at=[spot]) for name in NAMES],
        "model": lock.model.model_copy(update={"inputs": {name: ["float", name, 3] for name in NAMES}})})
    path = tmp_path / "lock.yaml"
    path.write_text(lock_text(strange), encoding="utf-8")
    assert read_lock(path) == strange
    assert path.read_text("utf-8").replace("\n", "").isprintable()


def test_the_command_writes_it_without_the_model_too(tmp_path: Path) -> None:
    onnx.save(layers(number=1), tmp_path / "m.onnx")
    path = tmp_path / "m.lock.yaml"
    path.write_text("what was there before")
    result = run("optimize", tmp_path / "m.onnx", "--dry-run", "--no-verify", "--no-database", "--target", "H100",
                 "--dim", "batch=2", "--lock", path)
    assert result.output.splitlines()[-1] == f"lock: {path}"
    assert result.exit_code == 0 and sorted(each.name for each in tmp_path.iterdir()) == ["m.lock.yaml", "m.onnx"]
    assert read_lock(path) == optimised(tmp_path / "m.onnx", dims={"batch": 2}).lock()


def test_a_lock_that_cannot_be_written_is_said_before_anything_is_planned(tmp_path: Path) -> None:
    onnx.save(layers(number=1), tmp_path / "m.onnx")
    result = run("optimize", tmp_path / "m.onnx", "--lock", tmp_path / "none" / "lock.yaml")
    assert result.exit_code == 1 and result.output.startswith("error: The folder ")
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


# What holds


def respelled(norm: str) -> Callable[[], onnx.ModelProto]:
    return lambda: layers(norm)


@pytest.mark.parametrize(("model", "told"), [
    (layers, {}),
    (respelled("chain"), {"changes": ("opset of ai.onnx 17 -> 13",)}),
    (respelled("axes as an input"), {"changes": ("opset of ai.onnx 17 -> 18",)}),
    (lambda: renamed(layers()), {"renamed": 2}),
    (lambda: rewritten(layers(), 1, rename=False).model, {}),
], ids=["as it was", "before the operator", "axes as an input", "renamed", "in another order"])
def test_the_same_structure_holds(lock: Lock, model: Callable[[], onnx.ModelProto], told: dict[str, object]) -> None:
    result = checked(model(), lock)
    assert result.holds and result.exit_code == 0
    assert result.summary == "holds: 3 fusions, and 0 of ONNX Runtime's own"
    assert not (result.new or result.new_runtime or result.otherwise)
    assert {"changes": result.changes, "renamed": result.renamed} == {"changes": (), "renamed": 0, **told}


def test_a_fused_model_is_checked_by_the_original_in_it(lock: Lock) -> None:
    note = "The file is fused already: this is about the original in it, planned anew"
    whole = checked(optimised(layers()).model, lock)
    assert whole.holds and whole.notes == (f"{note}.",)
    fused = optimised(layers()).model
    other = checked(onnxfuse.unfuse(fused, [read_fused(fused)[0].name]), lock)
    assert other.holds and other.notes == (f"{note}; the file holds 2 fused nodes, and 3 are planned.",)


@pytest.mark.parametrize("seed", range(6))
def test_random_models_hold_under_any_names_and_in_any_order(seed: int) -> None:
    model = seeded(seed, 30).model
    made = optimised(model, least_gain=0.0).lock()
    assert made.fusions and checked(model, made).holds
    result = checked(rewritten(model, seed).model, made)
    assert not (result.lost or result.new or result.new_runtime or result.otherwise) and result.interface


def test_models_with_bodies() -> None:
    model = body_models.nested()
    made = optimised(model).lock()
    assert any(": " in label for entry in made.fusions for spot in entry.at for label in spot.nodes)
    assert checked(model, made).holds


def test_what_another_rule_fuses_holds_and_is_told(lock: Lock, file: Path, tmp_path: Path) -> None:
    """Growth takes what the named rule leaves; it reads what a spelling that no rule knows leaves, too."""
    for options in (["residual-layer-norm"], ["residual-layer-norm", "layer-norm"]):
        model = layers("chain") if len(options) > 1 else layers()
        result = checked(model, lock, disable=options)
        assert result.holds and len(result.otherwise) == 3
        assert {each.to.rule for each in result.otherwise} <= {"norm-activation", "grow-row-reduction"}
    code, told = lines(tmp_path, layers(), file, "--disable", "residual-layer-norm", "--disable", "norm-activation")
    assert code == 0 and told[2:4] == [
        "since the lock: disabled none -> norm-activation, residual-layer-norm",
        "fused in another way: 3 x residual-layer-norm, by grow-row-reduction: Add -> c* (3 nodes, from Add -> c0)"]


def test_a_larger_fused_node_holds_what_it_takes_in(lock: Lock) -> None:
    result = checked(layers(tail="p{i} = Tanh(y{i})\n z{i} = Neg(p{i})"), lock)
    assert result.holds and [len(each.to.words) for each in result.otherwise] == [5] * 3


def test_a_launch_that_is_parted_holds_where_no_edge_is_cut() -> None:
    """What was joined for its launch alone is fused all the same."""
    made = optimised(encoder(1), dims={"batch": 1}, target="B200").lock()
    assert any(entry.structure.count("Add") == 3 for entry in made.fusions)
    result = checked(encoder(1), made, disable=["horizontal-joins"])
    assert result.holds and any("horizontal-joins" in change for change in result.changes) and result.otherwise


def test_what_is_new_is_no_failure(lock: Lock, file: Path, tmp_path: Path) -> None:
    (entry,) = lock.fusions
    fewer = lock.model_copy(update={"fusions": [entry.model_copy(update={"at": entry.at[:1], "times": 1})]})
    file.write_text(lock_text(fewer))
    code, told = lines(tmp_path, layers(), file)
    assert code == 0 and told[1:] == [
        "holds: 1 fusion, and 0 of ONNX Runtime's own", "",
        "new   2 x residual-layer-norm: 2 Add, LayerNormalization, Tanh", "Add -> c* (2 nodes, from Add -> c1)",
        "help: onnxfuse optimize FOLDER/m.onnx --lock FOLDER/m.lock.yaml  takes in what is new"]


# What is lost: exporters and operator sets


def test_a_norm_that_no_rule_knows_any_more(file: Path, tmp_path: Path) -> None:
    """The operator respelled by another operator set, in a way that nothing takes for a norm."""
    code, told = lines(tmp_path, layers("mean-variance"), file)
    assert code == 1 and told[:9] == [
        "FOLDER/m.onnx and FOLDER/m.lock.yaml",
        "lost: 3 of 3 fusions",
        "since the lock: opset of ai.onnx 17 -> 13", "",
        "lost  3 x residual-layer-norm: 2 Add, LayerNormalization, Tanh",
        "Add -> c* (3 nodes, from Add -> c0)",
        "between 'Add -> s0' and 'LayerNormalization -> y0': there is no LayerNormalization 'LayerNormalization -> y0' "
        "any more",
        "spelling at Add -> y0: in place of LayerNormalization there is MeanVarianceNormalization, Mul, Add, which no "
        "rule takes for it",
        "help: Export it as before, or in a spelling that `onnxfuse rules list` has."]
    assert told[-1] == ("help: onnxfuse optimize FOLDER/m.onnx --lock FOLDER/m.lock.yaml  writes the lock anew, where "
                        "this is meant")


def test_a_norm_whose_axes_are_not_known_any_more(file: Path, tmp_path: Path) -> None:
    """A spelling of a later operator set that the canonical rule nearly takes: it says what stands in the way."""
    code, told = lines(tmp_path, layers("axes as an input", overridable=True), file)
    assert code == 1 and "lost: 3 of 3 fusions" in told[1]
    assert ("reduction-axis (layer-norm) at ReduceMean -> m0: axes of ReduceMean -> m0 is not known before the model "
            "runs; the rule needs [-1].") in told


def test_the_operator_that_becomes_a_chain_without_its_rule(lock: Lock) -> None:
    """And the reverse: a chain that was taken for the operator is what it is now."""
    result = checked(layers("chain"), lock, disable=["layer-norm", "residual-layer-norm", *GROWTH])
    assert [each.stopped.because[0].code for each in result.lost] == ["disabled"] * 3
    assert {why.rule for each in result.lost for why in each.stopped.because} >= {"residual-layer-norm", "layer-norm"}
    spelled = optimised(layers("chain")).lock()
    assert all(spot.spelled == ["layer-norm"] for entry in spelled.fusions for spot in entry.at)
    assert checked(layers(), spelled).holds
    assert len(checked(layers("mean-variance"), spelled).lost) == 3


def test_a_norm_that_is_renamed_and_respelled_at_once(lock: Lock) -> None:
    """Nothing is found by name: what nothing of the lock stands for is looked through in order."""
    result = checked(renamed(layers("mean-variance")), lock)
    assert [each.stopped.edge for each in result.lost] == [
        (f"new_{7 * place + 2}", f"LayerNormalization -> y{place}") for place in range(3)]
    assert {each.stopped.because[0].code for each in result.lost} == {"spelling"}


def test_a_layer_that_is_gone(lock: Lock) -> None:
    result = checked(layers(number=2), lock)
    (lost,) = result.lost
    assert lost.locked.label == "Add -> c2" and lost.stopped.node == ""
    assert lost.stopped.words == "its nodes are not in the model any more, renamed or gone"


def test_an_operator_that_is_gone(lock: Lock) -> None:
    """All that is left of the place is where it was, and what it gave is not."""
    model = layers(number=1)
    made = optimised(model).lock()
    model.graph.output[0].name = model.graph.node.pop().input[0]
    result = checked(model, made)
    (lost,) = result.lost
    assert lost.stopped.words == "there is no Tanh 'Tanh -> z0' any more"
    assert lost.stopped.edge == ("LayerNormalization -> y0", "Tanh -> z0")


APART = """
g (float[n, 64] x, float[n, 32] z) => (float[n, 64] y, float[n, 32] u) {
  a = Sigmoid(x)
  b = Tanh(a)
  y = Mul(b, x)
  c = Sigmoid(z)
  d = Tanh(c)
  u = Mul(d, z)
}
"""

LEFT = """
id: left-alone
kind: forbid
summary: A hyperbolic tangent of rows of one length stays the runtime's.
why: It is to be looked at.
reason: it is to be looked at
pattern: y = Tanh(x)
where: ["dim(x, -1) == SIZE"]
leave: [y]
"""


def test_a_fusion_of_the_same_structure_elsewhere_is_another(tmp_path: Path) -> None:
    """The place is there by name, operator by operator, and what is fused now is at other nodes."""
    files = [tmp_path / f"{size}.yaml" for size in (64, 32)]
    for path in files:
        path.write_text(LEFT.replace("SIZE", path.stem))
    made = optimised(parse(APART), rules=files[:1], disable=["horizontal-joins"]).lock()
    result = checked(parse(APART), made, rules=files[1:])
    assert [each.locked.label for each in result.lost] == ["Sigmoid -> c"]
    assert [each.spot.nodes[0] for each in result.new] == ["Sigmoid -> a"]
    assert result.lost[0].stopped.because[0].rule == "left-alone"


# What is lost: inputs and outputs


@pytest.mark.parametrize(("new", "told"), [
    ({"z2": "out"}, "the output 'z2' is called 'out'"),
    ({"x": "hidden_states"}, "the input 'x' is called 'hidden_states'"),
])
def test_what_others_call_the_model_by_is_reported(
    file: Path, tmp_path: Path, new: dict[str, str], told: str
) -> None:
    code, said = lines(tmp_path, renamed(layers(), new), file)
    assert (code, said[1:3]) == (1, ["lost: the model's inputs and outputs are others", told])


def wider(model: onnx.ModelProto) -> None:
    model.graph.output.append(onnx.helper.make_tensor_value_info("t0", onnx.TensorProto.FLOAT, None))


def fixed(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4


def symbols(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for size, name in zip(value.type.tensor_type.shape.dim, ("s0", "s1"), strict=False):
            size.dim_param = name


@pytest.mark.parametrize(("change", "told"), [
    (wider, ("the output 't0' is new",)),
    (fixed, ("the input 'x' is float[4, seq, 256] in place of float[batch, seq, 256]",)),
    (symbols, ()),
])
def test_types_and_sizes_count_and_names_of_symbols_do_not(
    lock: Lock, change: Callable[[onnx.ModelProto], None], told: tuple[str, ...]
) -> None:
    model = layers()
    change(model)
    result = checked(model, lock)
    assert result.interface[:1] == told and not result.lost


def test_sizes_go_with_the_places_of_symbols() -> None:
    made = optimised(layers(number=1), dims={"batch": 5, "seq": 7}).lock()
    model = layers(number=1)
    symbols(model)
    assert checked(model, made).now.plan.dims == {"s0": 5, "s1": 7}
    assert checked(model, made, dims={"s0": 2}).now.plan.dims == {"s0": 2, "s1": 7}
    assert checked(renamed(model, {"x": "hidden_states"}), made).now.plan.dims == {"s0": 5, "s1": 7}


# What is lost: rules


def test_rules_that_are_left_out(file: Path, tmp_path: Path) -> None:
    rules = ("residual-layer-norm", "norm-activation", *GROWTH)
    code, told = lines(tmp_path, layers(), file, *(word for rule in rules for word in ("--disable", rule)))
    assert code == 1 and told[1] == "lost: 3 of 3 fusions"
    assert told[4:8] == [
        "lost  3 x residual-layer-norm: 2 Add, LayerNormalization, Tanh", "Add -> c* (3 nodes, from Add -> c0)",
        "between 'Add -> c0' and 'Add -> s0': its nodes are left to ONNX Runtime",
        "disabled (residual-layer-norm): the rule residual-layer-norm is left out"]
    assert told[8] == "help: Plan without --disable residual-layer-norm."


CONVOLUTION = """
g (float16[N, 64, 128, 128] x) => (float16[N, 64, 128, 128] y) {
  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w, b)
  s = Sigmoid(c)
  m = Mul(c, s)
  y = Add(m, x)
}
"""


@pytest.mark.parametrize(("options", "code"), [
    ({"disable": ["biases"]}, "disabled"),
    ({"provider_options": {"fuse_conv_bias": "1"}}, "bias"),
])
def test_a_stage_that_is_left_out(options: dict[str, object], code: str) -> None:
    """The bias is taken into the fused node behind its convolution, and then it is not."""
    model = parse(CONVOLUTION)
    for name, shape in (("w", (64, 64, 3, 3)), ("b", (64,))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float16), name))
    made = optimised(model, dims={"N": 8}, target="A100").lock()  # whose convolutions want to be measured
    assert checked(model, made).holds
    (lost,) = checked(model, made, **options).lost
    assert [why.code for why in lost.stopped.because] == [code]
    assert lost.stopped.words == "there is no Add 'Add -> c' any more"


def test_a_rule_that_is_not_there(lock: Lock) -> None:
    (entry,) = lock.fusions
    own = lock.model_copy(update={"fusions": [entry.model_copy(update={"rule": "my-norm"})]})
    result = checked(layers("mean-variance"), own)
    why = result.lost[0].stopped.because[0]
    assert (why.code, why.rule, why.message) == ("no-rule", "my-norm", "there is no rule my-norm here")
    assert why.remedy == "If it is a rule of your own, give its file: rules=[\"PATH\"]."


def test_an_edge_that_is_cut(lock: Lock) -> None:
    """What stands between runs in no kernel of ours: the fusion is in two."""
    result = checked(layers("pooled"), lock)
    assert [each.stopped.edge for each in result.lost] == [
        (f"Add -> s{place}", f"LayerNormalization -> y{place}") for place in range(3)]
    assert all(each.stopped.words.startswith("its nodes are no longer in one kernel: the region of Add -> c")
               for each in result.lost)
    assert [why.message for why in result.lost[0].stopped.because] == ["it reads LpPool -> h0, and not Add -> s0"]
