"""Products in the planner: what comes in with them, and that measurements decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import PRODUCT, RUNTIME, FakeTimer, PricedTimer
from kernel_harness import parse
from unmeasured import UNMEASURED

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.schedules import named
from onnxfuse.tuning import Timed, TuneOptions, tune
from onnxfuse.verifying import verify

DIMS = {"M": 128, "N": 2}

pytestmark = pytest.mark.usefixtures("few_ways")

OFFERED = {
    "bias and activation": (
        "g (T[M,64] a, T[64,72] b, T[72] c) => (T[M,72] y) { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }",
        ["MatMul", "Add", "Relu"]),
    "a Gemm and a residual": (
        "g (T[M,64] a, T[72,64] b, T[72] c, T[M,72] r) => (T[M,72] y) { p = Gemm<transB = 1>(a, b, c) y = Add(p, r) }",
        ["Gemm", "Sum", "Add"]),
    "heads": (
        "g (T[N,M,64] a, T[64,96] b, T[96] c) => (T[N,6,M,16] y) <int64[4] h = {0,0,6,16}> { p = MatMul(a, b) "
        "q = Add(p, c) r = Reshape(q, h) y = Transpose<perm = [0,2,1,3]>(r) }",
        ["MatMul", "Add", "Reshape", "Transpose"]),
    "a gate": (
        "g (T[M,64] a, T[64,72] b, T[64,72] c) => (T[M,72] y) { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) "
        "t = Mul(u, s) y = Mul(t, w) }", ["MatMul", "Sigmoid", "Mul", "MatMul", "Mul"]),
    "views of an operand, and nothing that is computed": (
        "g (T[N,4,M,16] a, T[64,72] b) => (T[N,M,72] y) <int64[3] h = {0,0,64}> { e = Relu(a) "
        "t = Transpose<perm = [0,2,1,3]>(e) r = Reshape(t, h) p = MatMul(r, b) y = Relu(p) }",
        ["Transpose", "Reshape", "MatMul", "Relu"]),
    "with rows that are reduced": (
        "g (T[M,64] a, T[64,72] b, T[M,72] c) => (T[M,72] y) { p = MatMul(a, b) s = Add(p, c) y = Softmax(s) }",
        ["MatMul", "Add", "Softmax"]),
    "up to other rows": (
        "g (T[M,64] a, T[64,72] b, T[M,72] c) => (T[M,72] y) { p = MatMul(a, b) s = Add(p, c) "
        "y = Softmax<axis = 0>(s) }", ["MatMul", "Add"]),
    "a convolution": (
        "g (T[N,16,9,9] x, T[24,16,3,3] w, T[24] b) => (T[N,24,9,9] y) { c = Conv<pads = [1,1,1,1]>(x, w, b) "
        "y = Relu(c) }", ["Transpose", "Conv", "Relu"]),
    "alone": ("g (T[M,64] a, T[64,72] b) => (T[M,72] y) { y = MatMul(a, b) }", ["MatMul"]),
}


def fuse(model: onnx.ModelProto, **options: object) -> Optimised:
    wanted = {"dims": {name: DIMS[name] for name in sizes_of(model)}, "target": UNMEASURED, "verify": False,
              "database": False, **options}
    return optimise(model, Options(**wanted))  # type: ignore[arg-type]


def sizes_of(model: onnx.ModelProto) -> list[str]:
    dims = (dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim)
    return sorted({name for name in dims if name})


def model_of(name: str, kind: str = "float16") -> onnx.ModelProto:
    return parse(OFFERED[name][0].replace("T[", f"{kind}["))


def held(made: Optimised, *, chosen: bool = False) -> list[list[str]]:
    """Operators of the regions with products, the largest first."""
    regions = made.plan.fusions if chosen else made.plan.with_products
    found = [[node.op for node in region.nodes if node.op != "Constant"] for region in regions
             if region.rule == "products"]
    return sorted(found, key=len, reverse=True)


@pytest.mark.parametrize("name", OFFERED)
def test_what_comes_in(name: str) -> None:
    """Is offered for measurement, and not taken without one."""
    made = fuse(model_of(name), eager=True)
    assert held(made)[0] == OFFERED[name][1] and not held(made, chosen=True)


@pytest.mark.parametrize(("second", "offered"), [("k = Slice(t, one, two)", True), ("k = Neg(q)", False)])
def test_what_several_read_is_offered_as_it_lies_too(second: str, offered: bool) -> None:
    """An attention may read queries, keys and values of a joint projection where they lie."""
    model = parse(
        "g (float16[N,M,64] a, float16[64,192] b, float16[192] c) => (float16[1,N,4,M,16] y, float16[1,N,4,M,16] z) "
        "<int64[5] h = {0,0,3,4,16}, int64[1] nought = {0}, int64[1] one = {1}, int64[1] two = {2}> { p = MatMul(a, b) "
        "s = Add(p, c) r = Reshape(s, h) t = Transpose<perm = [2,0,3,1,4]>(r) q = Slice(t, nought, one) "
        f"{second} y = Softmax(q) z = Softmax(k) }}")
    found = held(fuse(model, eager=True))
    assert ["MatMul", "Add", "Reshape", "Transpose"] in found and (["MatMul", "Add"] in found) is offered


@pytest.mark.parametrize(("branch", "offered"), [
    ("r = Relu(s) k = MatMul(r, b)", ["MatMul", "Add", "Relu"]),
    ("r = Mul(two, s) e = Erf(r) k = MatMul(e, b)", ["MatMul", "Add", "Mul", "Erf"]),
    ("r = Mul(s, c) k = MatMul(r, b)", None),
    ("r = Reshape(s, h) k = Softmax(r)", None),
], ids=["an activation", "a chain", "another tensor", "a view"])
def test_what_is_computed_of_a_result_that_others_read_is_given_out_too(branch: str, offered: list[str] | None) -> None:
    """As a sum that goes around a block, and is rounded or activated for it."""
    model = parse("g (float16[M,64] a, float16[64,64] b, float16[M,64] c) => (float16[M,64] s, float16[?,?] k) "
                  "<float16 two = {2}, int64[2] h = {-1, 32}> { p = MatMul(a, b) s = Add(p, c) " + branch + " }")
    regions = fuse(model, eager=True).plan.with_products
    found = [[node.op for node in region.nodes if node.op != "Constant"] for region in regions
             if len(region.outputs) == 2]
    assert found == ([] if offered is None else [offered])


APART = {
    "queries, keys and values": (
        "q = Add(p, c) qr = Reshape(q, h) qt = Transpose<perm = [0,2,1,3]>(qr) qs = Mul(qt, e) "
        "kr = Reshape(k, h) kt = Transpose<perm = [0,2,3,1]>(kr) ks = Mul(kt, e) "
        "s = MatMul(qs, ks) m = Softmax(s) vr = Reshape(v, h) vt = Transpose<perm = [0,2,1,3]>(vr) y = MatMul(m, vt)",
        [["MatMul", "Add", "Reshape", "Transpose", "Mul", "MatMul", "Reshape", "MatMul", "Reshape", "Transpose"],
         ["MatMul", "Add", "Reshape", "Transpose", "Mul", "MatMul", "MatMul"]]),
    "two that meet, and one": (
        "q = Add(p, c) g = Sigmoid(q) s = Mul(g, k) w = Transpose<perm = [0,2,1]>(v) t = MatMul(s, w) "
        "y = MatMul(t, a)", []),
}


@pytest.mark.parametrize("case", APART)
def test_products_whose_results_go_ways_of_their_own(case: str) -> None:
    """One kernel for all of them, with what is computed of each while neighbours stay neighbours, as heads or as they
    lie: another transpose is for whoever reads it.  What meets is a region of its own."""
    lines, offered = APART[case]
    shape = "N,4,M,16" if offered else "N,M,64"
    model = parse(
        "g (float16[N,M,64] a, float16[64,64] b, float16[64,64] d, float16[64,64] f, float16[64] c, float16 e) => "
        f"(float16[{shape}] y) "
        "<int64[4] h = {0,0,4,16}> "
        f"{{ p = MatMul(a, b) k = MatMul(a, d) v = MatMul(a, f) {lines} }}")
    found = [each for each in held(fuse(model, eager=True)) if each.count("MatMul") == 3]
    assert found == offered


@pytest.mark.parametrize(("rows", "offered"), [(1, False), (4, False), (5, True), (128, True)])
def test_products_of_so_few_rows_share_a_launch_and_no_kernel(rows: int, offered: bool) -> None:
    """Of one kernel each they leave room for more of them: measured 62 us for 82, eight times queries, keys, values."""
    model = parse("g (float16[M,64] a, float16[64,64] b, float16[64,64] c) => (float16[M,64] y, float16[M,64] z) "
                  "{ p = MatMul(a, b) y = Softmax(p) q = MatMul(a, c) z = Softmax(q) }")
    assert (["MatMul", "MatMul"] in held(fuse(model, eager=True, dims={"M": rows}))) is offered


def test_two_that_meet_behind_what_no_region_holds() -> None:
    """They are one kernel with what makes one value of both, or bare: nothing between."""
    model = parse(
        "g (float16[M,64] a, float16[64,72] b, float16[64,72] c) => (float16[M,72] y) { p = MatMul(a, b) "
        "q = MatMul(a, c) r = Relu(p) s = Relu(q) m = ReduceMax<keepdims = 1>(r) y = Mul(m, s) }")
    assert [each for each in held(fuse(model, eager=True)) if each.count("MatMul") == 2] == [["MatMul", "MatMul"]]


@pytest.mark.parametrize(("count", "groups"), [(2, [2]), (4, [4]), (5, [3, 2]), (9, [3, 3, 3])])
def test_as_few_kernels_as_hold_them_of_much_the_same_size(count: int, groups: list[int]) -> None:
    products = " ".join(f"p{place} = MatMul(a, w{place}) y{place} = Softmax(p{place})" for place in range(count))
    weights, results = (", ".join(f"float16[{shape}] {name}{place}" for place in range(count))
                        for shape, name in (("64,72", "w"), ("M,72", "y")))
    model = parse(f"g (float16[M,64] a, {weights}) => ({results}) {{ {products} }}")
    found = [each.count("MatMul") for each in held(fuse(model, eager=True))]
    assert sorted((each for each in found if each > 1), reverse=True) == groups


def test_nothing_is_looked_at_where_nothing_can_be_known() -> None:
    assert not fuse(model_of("a gate")).plan.with_products


def test_the_stage_can_be_left_out() -> None:
    assert not fuse(model_of("a gate"), eager=True, disable=["products"]).plan.with_products


def test_other_types_are_left() -> None:
    assert not fuse(model_of("alone", "double"), eager=True).plan.with_products


@pytest.mark.parametrize("name", ["bias and activation", "a gate", "a convolution"])
def test_float32_is_multiplied_where_the_runtime_rounds_it_too(name: str) -> None:
    """By a GPU that can, in a session that may; said where something is around the product."""
    model = model_of(name, "float")
    assert held(fuse(model, eager=True))[0] == OFFERED[name][1]
    made = fuse(model, eager=True, target="T4")
    told = [each.message for each in made.refusals if each.code == "float32-products"]
    assert not made.plan.with_products and told and all("T4 has no tensor cores for float32" in each for each in told)
    alone = fuse(model_of("alone", "float"), eager=True, target="T4")
    assert not alone.plan.with_products and not alone.refusals


@pytest.mark.parametrize("name", ["bias and activation", "a gate", "a convolution"])
def test_float32_is_kept_where_the_runtime_keeps_it(name: str, tmp_path: Path) -> None:
    """By kernels whose operands are not rounded, where these were measured faster than the runtime's."""
    model, options = model_of(name, "float"), {"provider_options": {"use_tf32": "0"}}
    made = fuse(model, eager=True, **options)
    assert held(made)[0] == OFFERED[name][1] and not held(made, chosen=True)
    assert all(not region.kernel.rounds and region.kernel.pace is None for region in made.plan.with_products)
    assert any("--provider-option use_tf32=0" in each.remedy or "use_tf32" in each.remedy for each in made.refusals
               if each.code == "unmeasured")
    timer = FakeTimer(lambda kernel: 50.0 if kernel == RUNTIME else 20.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(model, timer, kept, TuneOptions(dims={each: DIMS[each] for each in sizes_of(model)}, tf32=False))
    assert timer.provider_options == {"use_tf32": "0"}
    taken = fuse(model, database=tmp_path / "measurements.sqlite", target="H100", least_gain=1.0, **options)
    assert held(taken, chosen=True) and not any(region.kernel.rounds for region in taken.plan.fusions)
    rounding = fuse(model, database=tmp_path / "measurements.sqlite", target="H100", least_gain=1.0)
    assert not any(region.measured for region in rounding.plan.with_products)
    results = [node for node in verify(taken, EmulatedRunner()).nodes if node.rule == "products"]
    assert results and {each.verdict for each in results} == {"passed"}, results


def test_what_was_not_measured_is_told_where_something_is_around_it(tmp_path: Path) -> None:
    told = {name: [each.code for each in fuse(model_of(name), eager=True).refusals if each.rule == "products"]
            for name in ("alone", "bias and activation")}
    assert told == {"alone": [], "bias and activation": ["unmeasured"]}


def measured(name: str, database: Path, kind: str = "float16", **microseconds: float) -> Optimised:
    """Planned by what kernels with products, and the runtime's nodes, are said to take."""
    model = model_of(name, kind)
    timer = FakeTimer(lambda kernel: microseconds["runtime"] if kernel == RUNTIME
                      else microseconds["product"] if kernel.startswith(PRODUCT) else 10.0)
    with open_database(database) as kept:
        tune(model, timer, kept, TuneOptions(dims={each: DIMS[each] for each in sizes_of(model)}))
    return fuse(model, database=database, target="H100", least_gain=1.0)


@pytest.mark.parametrize("name", OFFERED)
def test_what_was_measured_faster_is_taken(name: str, tmp_path: Path) -> None:
    """And the file is right wherever it runs, and is taken apart again."""
    made = measured(name, tmp_path / "measurements.sqlite", product=20.0, runtime=50.0)
    assert held(made, chosen=True)
    onnx.checker.check_model(made.model, full_check=True)
    assert [node.op_type for node in unfuse(made.model).graph.node] == [
        node.op_type for node in model_of(name).graph.node]


@pytest.mark.parametrize(("product", "least_gain", "taken"), [
    (49.5, 1.2, True), (49.5, 1.4, False), (45.0, 1.4, True), (45.0, 2.0, False)])
def test_a_measured_gain_needs_not_be_as_large_as_a_predicted_one(
    product: float, least_gain: float, taken: bool, tmp_path: Path
) -> None:
    """A quarter of what is asked of predictions; what is around a product is predicted still."""
    database = tmp_path / "measurements.sqlite"
    measured("bias and activation", database, product=product, runtime=50.0)
    made = fuse(model_of("bias and activation"), database=database, target="H100", least_gain=least_gain)
    assert bool(held(made, chosen=True)) is taken


def test_products_of_one_operand_are_not_joined_unmeasured(tmp_path: Path) -> None:
    """However much their bytes say: queries and keys are what was measured, each by itself."""
    model = parse("g (float16[4096,1024] x, float16[1024,64] w, float16[64] b, float16[1024,64] v, float16[64] c) "
                  "=> (float16[4096,64] y, float16[4096,64] z) "
                  "{ p = MatMul(x, w) y = Add(p, b) q = MatMul(x, v) z = Add(q, c) }")
    timer = FakeTimer(lambda kernel: 50.0 if kernel == RUNTIME else 20.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(model, timer, kept, TuneOptions())
    made = fuse(model, database=tmp_path / "measurements.sqlite", target="H100", least_gain=1.0)
    assert made.plan.fusions and all(
        region.measured or region.kernel.schedule == "together" for region in made.plan.fusions)


def test_what_was_measured_of_rounded_operands_says_nothing_of_others(tmp_path: Path) -> None:
    """Neither of kernels nor of the runtime's own products."""
    database = tmp_path / "measurements.sqlite"
    assert held(measured("a gate", database, "float", product=20.0, runtime=50.0), chosen=True)
    for value, known in (("1", True), ("0", False)):
        made = fuse(model_of("a gate", "float"), database=database, target="H100", least_gain=1.0,
                    provider_options={"use_tf32": value})
        assert bool(held(made, chosen=True)) == known and made.plan.with_products
        products = [node for node in made.graph.nodes if node.op == "MatMul"]
        assert [made.costs.is_learned(node) for node in products] == [known] * 2


def test_what_was_measured_slower_is_left(tmp_path: Path) -> None:
    assert not held(measured("a gate", tmp_path / "measurements.sqlite", product=60.0, runtime=50.0), chosen=True)


@pytest.mark.parametrize(("runner", "kind"), [
    (EmulatedRunner, "float16"), (FaultyRunner, "float16"), (EmulatedRunner, "float"), (FaultyRunner, "float")])
def test_verification(runner: type[EmulatedRunner], kind: str, tmp_path: Path) -> None:
    """The kernel is right, and a hundredth more is not."""
    made = measured("a gate", tmp_path / "measurements.sqlite", kind, product=20.0, runtime=50.0)
    results = [node for node in verify(made, runner()).nodes if node.rule == "products"]
    assert {each.verdict for each in results} == {"passed" if runner is EmulatedRunner else "failed"}, results


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification_of_products_that_share_a_launch(runner: type[EmulatedRunner], tmp_path: Path) -> None:
    """Each rounds its operands as it does alone, and a hundredth more is as wrong."""
    model = parse("g (float[M,64] a, float[M,64] b, float[64,72] v, float[64,72] w) => (float[M,72] y, float[M,72] z) "
                  "{ y = MatMul(a, v) z = MatMul(b, w) }")
    timer = FakeTimer(lambda kernel: 50.0 if kernel == RUNTIME else 20.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(model, timer, kept, TuneOptions(dims={"M": 128}))
    made = fuse(model, database=tmp_path / "measurements.sqlite", target="H100")
    assert [(region.kernel.schedule, region.kernel.rounds) for region in made.plan.fusions] == [("together", True)]
    assert {each.verdict for each in verify(made, runner()).nodes} == {
        "passed" if runner is EmulatedRunner else "failed"}


def test_what_is_around_it_may_be_quick_by_itself(tmp_path: Path) -> None:
    """A kernel that is quicker than all of the nodes apart, and no quicker than the product and a kernel of the rest,
    is left, however slow the runtime is at the rest."""
    model = parse(OFFERED["bias and activation"][0].replace("T[M", "float16[4096").replace("T[", "float16["))
    region = fuse(model, eager=True).plan.with_products[0]
    assert [node.op for node in region.view] == OFFERED["bias and activation"][1]
    for alone, chosen in ((60.0, 1), (30.0, 0)):
        timer = PricedTimer({("MatMul",): alone, ("MatMul", "Add", "Relu"): 300.0}, 50.0)
        database = tmp_path / f"{alone}.sqlite"
        with open_database(database) as kept:
            tune(model, timer, kept, TuneOptions())
        assert len(held(fuse(model, database=database, target="H100"), chosen=True)) == chosen



NORM = """g (float16[8,512,768] a, float16[768,768] b, float16[768] c, float16[8,512,768] r, float16[768] s) =>
  (float16[8,512,768] y) { p = MatMul(a, b) u = Add(p, c) v = Add(u, r) y = LayerNormalization<axis = -1>(v, s, c) }"""


@pytest.mark.parametrize(("text", "chosen"), [
    (NORM, 0), (NORM.replace("LayerNormalization<axis = -1>(v, s, c)", "Identity(v)"), 1)])
def test_what_it_leaves_of_a_fusion_of_the_runtimes_counts(text: str, chosen: int, tmp_path: Path) -> None:
    """The runtime runs a residual and the norm behind it as one, and the norm alone badly."""
    timer = PricedTimer({("MatMul",): 30.0, ("MatMul", "Add", "Add"): 100.0,
                         ("MatMul", "Add", "Add", "LayerNormalization"): 30.5}, 31.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(parse(text), timer, kept, TuneOptions(stages=("products",)))
    made = fuse(parse(text), database=tmp_path / "measurements.sqlite", target="H100")
    assert len(held(made, chosen=True)) == chosen


PROJECTIONS = """g (float16[M,256] a, float16[256,256] q, float16[256,64] k, float16[256,64] v)
  => (float16[M,256] x, float16[M,64] y, float16[M,64] z) { x = MatMul(a, q) y = MatMul(a, k) z = MatMul(a, v) }"""


@dataclass
class _Sized(FakeTimer):
    """Kernels of some columns, and so many inputs, take a time of their own."""

    sized: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        timed = super().time(model, fused=fused)
        (output, *_) = model.graph.output
        columns = output.type.tensor_type.shape.dim[-1].dim_value
        return replace(timed, microseconds=self.sized.get((columns, len(model.graph.input)), timed.microseconds)
                       ) if fused else timed


@pytest.mark.parametrize(("rows", "large", "launches"), [(1, 25.0, 1), (1, 48.0, 1), (1, 60.0, 2), (128, 25.0, 3)])
def test_products_of_few_rows_share_a_launch(tmp_path: Path, rows: int, large: float, launches: int) -> None:
    """Also one that gains too little alone, but none that is slower.  Of large tiles only those of one text do."""
    database, model = tmp_path / "measurements.sqlite", parse(PROJECTIONS)
    timer = _Sized(lambda kernel: 50.0 if kernel == RUNTIME else 25.0, sized={(256, 2): large})
    with open_database(database) as kept:
        tune(model, timer, kept, TuneOptions(dims={"M": rows}))
    made = optimise(model, Options(dims={"M": rows}, target="H100", verify=False, database=database))
    assert [len(fusion.outputs) for fusion in made.plan.fusions] == {1: [3], 2: [2], 3: [1, 2]}[launches]
    assert verify(made, EmulatedRunner()).passed


def test_a_product_that_gains_too_little_alone_is_kept_for_a_launch(tmp_path: Path) -> None:
    """Also where it gains enough with the views behind it, which a kernel of what follows may take."""
    database, model = tmp_path / "measurements.sqlite", parse("""
        g (float16[M,256] a, float16[256,256] q, float16[256,64] k, float16[256,64] v, float16[8,1,32] s)
          => (float16[8,M,32] x, float16[M,64] y, float16[M,64] z) <int64[3] heads = {0,8,32}> {
          p = MatMul(a, q) r = Reshape(p, heads) t = Transpose<perm = [1,0,2]>(r) u = Softmax(t) w = Mul(u, s)
          c = Sin(w) d = Mul(c, s) e = Cos(d) f = Mul(e, s) h = Sin(f) i = Mul(h, s) j = Cos(i) l = Mul(j, s)
          x = Add(l, s) y = MatMul(a, k) z = MatMul(a, v) }""")
    timer = _Sized(lambda kernel: 50.0 if kernel == RUNTIME else 25.0 if kernel.startswith(PRODUCT) else 2.0,
                   sized={(256, 2): 48.0, (32, 2): 40.0, (32, 3): 60.0})
    with open_database(database) as kept:
        tune(model, timer, kept, TuneOptions(dims={"M": 1}))
    made = optimise(model, Options(dims={"M": 1}, target="H100", verify=False, database=database))
    weighed = [(each.verdict, [node.op for node in each.nodes]) for each in made.plan.considered
               if each.rule == "products"]
    assert ("no-gain", ["MatMul"]) in weighed and ("lost", ["MatMul", "Reshape", "Transpose"]) in weighed
    assert verify(made, EmulatedRunner()).passed


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_what_a_library_does_faster_is_taken(kind: str, tmp_path: Path) -> None:
    """Where it was measured so; what is generated stands behind it in the file, for where there is no library."""
    database, model = tmp_path / "measurements.sqlite", model_of("a Gemm and a residual", kind)
    timer = FakeTimer(lambda kernel: {RUNTIME: 50.0, "gemm_bias_add 0": 10.0}.get(kernel, 20.0))
    with open_database(database) as kept:
        tuned = tune(model, timer, kept, TuneOptions(dims={"M": 128}))
    assert [region.choice for region in tuned.regions if len(region.operators) == 3] == [
        "by cuBLASLt, algorithm 0 of those that it proposes"]
    made = fuse(model, database=database, target="H100", least_gain=1.0)
    (region,) = (each for each in made.plan.fusions if each.rule == "products")
    first, *behind = region.kernel.plan.variants
    assert first.calls and len(behind) > 1 and not any(variant.calls for variant in behind)
    assert region.measured is not None and region.measured.fused == 10.0
    assert verify(made, EmulatedRunner()).passed and not verify(made, FaultyRunner()).passed
    (node,) = read_fused(made.model)
    assert node.plan == LaunchPlan.from_json(named(region.kernel).plan.to_json())
    assert not held(fuse(model, eager=True), chosen=True)
