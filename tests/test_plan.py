"""Which regions the planner makes: named, grown, and refused."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from unmeasured import UNMEASURED

from onnxfuse.lowering.alike import Lowerings
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.admission import Facts, node_facts
from onnxfuse.planning.passes import DRAFTING, FINISHING
from onnxfuse.reporting import report_of
from onnxfuse.rules.load import STAGES

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'


def fuse(text: str, **options: object) -> Optimised:
    return optimise(onnx.parser.parse_model(HEAD + text), Options(verify=False, target=UNMEASURED, **options))  # type: ignore[arg-type]


def regions(optimised: Optimised) -> list[tuple[str, list[str]]]:
    return [(fusion.rule, [node.op for node in fusion.view]) for fusion in optimised.plan.fusions]


def codes(optimised: Optimised) -> set[str]:
    return {refusal.code for refusal in optimised.refusals}


def test_rows_of_different_lengths_do_not_meet() -> None:
    # Both reductions have symbolic rows, and each on its own would call them alike.
    made = fuse("""g (float[A, B] x, float[C, D] z) => (float[A, B] y, float[C, D] w) <int64[1] last = {-1}> {
        m = ReduceMean(x, last) y = Sub(x, m)
        n = ReduceMean(z, last) w = Sub(z, n)
    }""", dims={"A": 4096, "B": 1024, "C": 2048, "D": 512})
    assert [ops for _, ops in regions(made)] == [["ReduceMean", "Sub"], ["ReduceMean", "Sub"]]


def test_a_few_long_rows_are_split() -> None:
    """Two kernels, whose cost and scratch are counted, and shown."""
    made = fuse("""g (float16[B, S] x) => (float16[B, S] y) {
        a = Abs(x) m = ReduceMax<keepdims = 1>(a) y = Div(x, m)
    }""", dims={"B": 8, "S": 1000000})
    (fusion,) = made.plan.fusions
    assert [node.op for node in fusion.view] == ["Abs", "ReduceMax", "Div"] and fusion.kernel.schedule == "split"
    assert (fusion.steps, fusion.cost.kernels_after) == (2, 2) and 0 < fusion.scratch < 10_000
    assert fusion.cost.bytes_after == 2 * 16_000_000 + fusion.scratch
    (entry,) = report_of(made).fusions
    assert (entry.schedule, entry.kernels_after, entry.bytes_after) == ("split", 2, fusion.cost.bytes_after)
    assert not codes(made) & {"few-rows", "reduction-axis"}


@pytest.mark.parametrize(("body", "schedule"), [
    ("(float16[N, 64, 56, 56] y) { a = Abs(x) s = Softmax<axis = 1>(a) y = Mul(s, x) }", "columns"),
    ("(float16[N, 1, 56, 56] y) <int64[1] c = {1}> { a = Abs(x) s = ReduceMean(a, c) y = Tanh(s) }", "columns"),
    ("(float16[64] y) <int64[3] c = {0, 2, 3}> { a = Abs(x) s = ReduceMean<keepdims = 0>(a, c) y = Tanh(s) }", "split"),
    ("(float16[N, 64, 1, 1] y) <int64[2] c = {2, 3}> { a = Abs(x) s = ReduceMean(a, c) y = Tanh(s) }", "rows"),
    ("(float16[64, 56, 56] y) <int64[1] c = {0}> { a = Abs(x) s = ReduceSum<keepdims = 0>(a, c) y = Tanh(s) }",
     "columns"),
], ids=["softmax over channels", "mean over channels", "statistics of channels", "pooling", "sum over the batch"])
def test_reductions_over_other_axes_fuse(body: str, schedule: str) -> None:
    made = fuse(f"g (float16[N, 64, 56, 56] x) => {body}", dims={"N": 32})
    (fusion,) = made.plan.fusions
    assert len(fusion.view) == 3 and fusion.kernel.schedule == schedule


def test_reductions_over_different_axes_do_not_meet() -> None:
    made = fuse("""g (float[N, 64, 56, 56] x) => (float[N, 64, 56, 56] y, float[N, 64, 56, 56] z)
        <int64[1] a = {1}, int64[1] b = {3}> {
        m = ReduceMax(x, a) s = Sub(x, m) n = ReduceMax(s, b) y = Sub(s, n) z = Tanh(s)
    }""", dims={"N": 32})
    assert [ops for _, ops in regions(made)] == [["ReduceMax"], ["Sub", "ReduceMax", "Sub", "Tanh"]]
    (refusal,) = (refusal for refusal in made.refusals if refusal.code == "reduction-structure")
    assert refusal.message == "rows of 64 elements and rows of 56 meet at 'm'"


def test_a_transpose_of_the_innermost_axis_joins_what_is_pointwise() -> None:
    made = fuse("""g (float[N, 64, 4096] x, float[64, 1] b) => (float[N, 4096, 64] y) {
        a = Add(x, b) r = Tanh(a) y = Transpose<perm = [0, 2, 1]>(r)
    }""", dims={"N": 32})
    assert regions(made) == [("grow-pointwise", ["Add", "Tanh", "Transpose"])]
    assert made.plan.fusions[0].kernel.schedule == "tiled"


@pytest.mark.parametrize(("columns", "schedule"), [(1, "pointwise"), (64, "tiled")])
def test_a_transpose_that_is_undone_needs_no_tiles(columns: int, schedule: str) -> None:
    """But an operand that lies the other way is read far apart for every one of the results that it is spread over."""
    made = fuse(f"""g (float[N, 64, 4096] x, float[4096, {columns}] b) => (float[N, 64, 4096] y) {{
        t = Transpose<perm = [0, 2, 1]>(x) a = Add(t, b) y = Transpose<perm = [0, 2, 1]>(a)
    }}""", dims={"N": 32})
    assert regions(made) == [("grow-pointwise", ["Transpose", "Add", "Transpose"])]
    assert made.plan.fusions[0].kernel.schedule == schedule


@pytest.mark.parametrize(("nodes", "shapes", "schedule"), [
    ("e = Exp(x) t = Transpose<perm = [0, 2, 1]>(e) a = Abs(t) n = LayerNormalization(a, w, b) y = Neg(n)",
     ("N, 64, 4096", "N, 4096, 64"), "transposed"),
    ("n = LayerNormalization(x, w, b) y = Transpose<perm = [0, 2, 1]>(n)",
     ("N, 4096, 64", "N, 64, 4096"), "transposed"),
    ("t = Transpose<perm = [0, 2, 1]>(x) n = LayerNormalization(t, w, b) y = Transpose<perm = [0, 2, 1]>(n)",
     ("N, 64, 4096", "N, 64, 4096"), "columns"),
    ("s = Softmax<axis = 1>(x) y = Transpose<perm = [0, 2, 1]>(s)", ("N, 64, 4096", "N, 4096, 64"), "transposed"),
], ids=["before", "after", "there and back", "softmax"])
def test_rows_take_in_transposes_of_the_innermost_axis(nodes: str, shapes: tuple[str, str], schedule: str) -> None:
    made = fuse(f"g (float[{shapes[0]}] x, float[64] w, float[64] b) => (float[{shapes[1]}] y) {{ {nodes} }}",
                dims={"N": 32})
    (fusion,) = made.plan.fusions
    assert fusion.kernel.schedule == schedule and fusion.kernel.scattered == ()
    assert [node.op for node in fusion.nodes] == re.findall(r"= (\w+)(?:<.*?>)?\(", nodes)


def test_blocks_of_convnext_take_in_their_transposes() -> None:
    """Between convolutions and products, and between stages; each tensor is read and written once."""
    made = fuse("""g (float16[N, 96, 56, 56] x, float16[96, 1, 7, 7] k, float16[96] w, float16[96] b,
        float16[96, 384] u, float16[384, 96] d, float16[192, 96, 2, 2] s) => (float16[N, 192, 28, 28] y) {
        c = Conv<group = 96, pads = [3, 3, 3, 3]>(x, k) t = Transpose<perm = [0, 2, 3, 1]>(c)
        n = LayerNormalization(t, w, b) p = MatMul(n, u) g = Gelu(p) q = MatMul(g, d) v = Mul(q, w)
        r = Transpose<perm = [0, 3, 1, 2]>(v) a = Add(r, x)
        f = Transpose<perm = [0, 2, 3, 1]>(a) m = LayerNormalization(f, w, b) h = Transpose<perm = [0, 3, 1, 2]>(m)
        y = Conv<strides = [2, 2]>(h, s)
    }""", dims={"N": 32})
    found = {tuple(node.op for node in fusion.nodes): fusion for fusion in made.plan.fusions}
    first, last = (found[ops] for ops in (
        ("Transpose", "LayerNormalization"),
        ("Mul", "Transpose", "Add", "Transpose", "LayerNormalization", "Transpose")))
    assert first.kernel.schedule == last.kernel.schedule == "transposed"
    image = 32 * 96 * 56 * 56 * 2
    assert first.cost.bytes_after == 2 * image + 2 * 192 and last.cost.bytes_after == 3 * image + 2 * 192
    assert first.cost.seconds_after < first.cost.seconds_before / 1.2


def test_rows_do_not_take_in_a_third_layout() -> None:
    # What could join either joins the rows.
    made = fuse("""g (float[512, 64, N] x, float[N, 512, 64] z, float[64] w, float[64] b) => (float[N, 64, 512] y) {
        e = Exp(x) t = Transpose<perm = [2, 0, 1]>(e) a = Abs(t) s = Add(a, z) n = LayerNormalization(s, w, b)
        m = Neg(n) y = Transpose<perm = [0, 2, 1]>(m)
    }""", dims={"N": 512})
    assert [ops for _, ops in regions(made)] == [
        ["Exp", "Transpose"], ["Abs", "Add", "LayerNormalization", "Neg", "Transpose"]]
    (refusal,) = (refusal for refusal in made.refusals if refusal.code == "transposing")
    assert refusal.message == (
        "a transpose of the innermost axis and rows of 64 elements meet at 't': the rows would be read element by "
        "element"
    )


def test_what_a_reduction_gives_indexes_nothing_in_its_own_region() -> None:
    """As trees of decisions do it: the sum of a row says which row of a table comes next."""
    made = fuse("""g (float[N, 64] x, float[10, 64] table) => (float[N, 64] y) <int64[1] last = {-1}> {
        s = ReduceSum<keepdims = 0>(x, last) c = Cast<to = 7>(s) g = Gather<axis = 0>(table, c)
        a = Add(g, x) y = Tanh(a)
    }""", dims={"N": 4096})
    assert [ops for _, ops in regions(made)] == [["ReduceSum"], ["Cast", "Gather", "Add", "Tanh"]]
    (refusal,) = (refusal for refusal in made.refusals if refusal.code == "reduced-index")
    assert refusal.message == "a tensor is indexed by what a reduction of the same region gives"


def test_what_nobody_reads_is_left_alone() -> None:
    made = fuse("""g (float[N, 64] x) => (float[N, 64] y) {
        a = Exp(x) y = Neg(a) d = Tanh(x) e = Sigmoid(d)
    }""", dims={"N": 4096})
    assert [ops for _, ops in regions(made)] == [["Exp", "Neg"]]
    assert "unused" in codes(made)


def test_a_small_transposed_operand_does_not_slow_rows_down() -> None:
    """What turning saves must be worth what it costs the rest: a mask is transposed apart."""
    made = fuse("""g (float16[N, 4096, 512] x, float16[512, 4096] k) => (float16[N, 4096, 512] y) {
        t = Transpose(k) a = Add(x, t) y = Softmax(a)
    }""", dims={"N": 64})
    assert [ops for _, ops in regions(made)] == [["Add", "Softmax"]]
    assert made.plan.fusions[0].kernel.schedule == "rows"


@pytest.mark.parametrize("nodes", [
    "y = Transpose<perm = [0, 3, 1, 2]>(x)",
    "r = Reshape(x, s) y = Transpose<perm = [0, 3, 1, 2]>(r)",
])
def test_a_lone_transpose_is_left_to_the_runtime(nodes: str) -> None:
    made = fuse(f"""g (float[N, 64, 64, 96] x) => (float[N, 96, 64, 64] y) <int64[4] s = {{0, 64, 64, 96}}> {{
        {nodes}
    }}""", dims={"N": 32})
    assert made.plan.fusions == ()
    assert [refusal.message for refusal in made.refusals if refusal.code == "lone-transpose"] == [
        "a transpose with nothing that computes beside it stays one kernel, and the runtime has a good one"
    ]


def test_a_third_layout_is_cut_off() -> None:
    # One tile turns one axis into another; the second transpose would need a third.
    made = fuse("""g (float[N, 64, 512] x, float[512, N, 64] z) => (float[64, 512, N] y) {
        a = Exp(x) b = Neg(a) t = Transpose<perm = [1, 2, 0]>(b) c = Exp(z) d = Neg(c)
        u = Transpose<perm = [2, 0, 1]>(d) y = Add(t, u)
    }""", dims={"N": 256})
    assert all(not fusion.kernel.scattered for fusion in made.plan.fusions)
    assert "scattered-access" in codes(made)


def test_a_first_node_without_a_kernel_of_its_own_goes() -> None:
    """A lone transpose stays the runtime's; the rest of what has no kernel together is one region."""
    made = fuse("""g (float[N, 64, 512] x, float[512, N, 64] z) => (float[64, 512, N] y) {
        t = Transpose<perm = [1, 2, 0]>(x) u = Transpose<perm = [2, 0, 1]>(z) y = Add(t, u)
    }""", dims={"N": 256})
    assert [ops for _, ops in regions(made)] == [["Transpose", "Add"]]


def test_the_largest_of_what_is_read_far_apart_is_named() -> None:
    made = fuse("""g (float[A, B, C, D] x, float16[D, A, B, C] z, float[D, C, A, B] u) => (float[D, C, B, A] y) {
        f = Cast<to = 1>(z) a = Exp(x) t = Transpose<perm = [3, 2, 1, 0]>(a) s = Transpose<perm = [0, 3, 2, 1]>(f)
        e = Add(t, s) g = Tanh(u) w = Transpose<perm = [0, 1, 3, 2]>(g) y = Add(e, w)
    }""", dims=dict.fromkeys("ABCD", 64))
    (refusal, *_) = (refusal for refusal in made.refusals if refusal.code == "scattered-access")
    assert refusal.message == "neighbouring results need elements of 'x' that lie far apart"


def test_a_small_part_that_is_read_far_apart_needs_no_tiles() -> None:
    """A byte of every thirteen, each of them once."""
    made = fuse("""g (float[N, 64, 4096] x, float[N, 64, 4096] p, float[N, 64, 4096] q, uint8[N, 4096, 64] b)
      => (float[N, 64, 4096] y) {
        a = Add(x, p) c = Mul(a, q) d = Cast<to = 1>(b) t = Transpose<perm = [0, 2, 1]>(d) y = Add(c, t)
    }""", dims={"N": 32})
    (fusion,) = made.plan.fusions
    assert (fusion.kernel.schedule, fusion.kernel.scattered) == ("pointwise", (3,))


@pytest.mark.parametrize(("count", "inside"), [(8, [10]), (9, [9])])
def test_a_region_takes_as_many_shape_operands_as_a_node_has_room_for(count: int, inside: list[int]) -> None:
    reads = ", ".join(f"float[A{place}] m{place}" for place in range(count))
    nodes = " ".join(f"s{place} = Shape(m{place}) t{place + 1} = Expand(t{place}, s{place})" for place in range(count))
    made = fuse(f"g (float[N, 1] x, {reads}) => (float[M, K] y) {{ t0 = Exp(x) {nodes} y = Neg(t{count}) }}",
                dims={"N": 4096})
    assert [len(ops) for _, ops in regions(made)] == inside
    messages = [refusal.message for refusal in made.refusals if refusal.code == "host-operands"]
    assert messages == ["9 operands decide sizes; a fused node has room for 8"] * (count - 8)


def test_a_value_that_is_an_output_is_written_too() -> None:
    made = fuse("""g (float[N, 4096] x) => (float[N, 4096] y, float[N, 4096] a) {
        a = Abs(x) b = Exp(a) y = Neg(b)
    }""", dims={"N": 4096})
    (fusion,) = made.plan.fusions
    assert [value.name for value in fusion.outputs] == ["a", "y"]


def test_fusing_does_not_make_a_cycle() -> None:
    # All but MatMul would be one region, but it lies between them.
    made = fuse("""g (float[N, 64] x, float[64, 64] w) => (float[N, 64] y) {
        a = Abs(x) b = Exp(a) m = MatMul(b, w) c = Sub(m, a) y = Tanh(c)
    }""", dims={"N": 100000})
    assert [ops for _, ops in regions(made)] == [["Abs", "Exp"], ["Abs", "Sub", "Tanh"]]


def test_small_work_is_not_worth_a_kernel_of_its_own() -> None:
    made = fuse("g (float[8] x) => (float[8] y) { y = Exp(x) }")
    assert made.plan.fusions == ()


@pytest.mark.parametrize("gain, count", [(1.2, 1), (100.0, 0)])
def test_a_region_must_gain_enough(gain: float, count: int) -> None:
    text = "g (float[N, 4096] x) => (float[N, 4096] y) { a = Exp(x) y = Neg(a) }"
    made = fuse(text, dims={"N": 4096}, least_gain=gain)
    assert len(made.plan.fusions) == count


def test_disabling_a_rule_changes_the_name_not_the_region() -> None:
    text = """g (float16[B, S, 768] x, float16[B, S, 768] r, float16[768] w, float16[768] b)
      => (float16[B, S, 768] y, float16[B, S, 768] s) {
        s = Add(x, r) n = LayerNormalization(s, w, b) y = Relu(n)
    }"""
    dims = {"B": 32, "S": 384}
    (named,) = fuse(text, dims=dims).plan.fusions
    (grown,) = fuse(text, dims=dims, disable=[named.rule, "norm-activation"]).plan.fusions
    assert named.rule == "residual-layer-norm"
    assert grown.rule == "grow-row-reduction"
    assert [node.name for node in named.nodes] == [node.name for node in grown.nodes]


def test_equal_regions_share_their_text_whatever_the_model_calls_its_sizes() -> None:
    one = fuse("g (float[N, M] x) => (float[N, M] y) { a = Exp(x) y = Neg(a) }", dims={"N": 4096, "M": 4096})
    two = fuse("g (float[rows, columns] x) => (float[rows, columns] y) { a = Exp(x) y = Neg(a) }",
               dims={"rows": 4096, "columns": 4096})
    assert one.plan.fusions[0].kernel.source == two.plan.fusions[0].kernel.source


def considered(optimised: Optimised) -> list[tuple[str, list[str], str]]:
    return [(each.verdict, [node.op for node in each.nodes], each.lost_to) for each in optimised.plan.considered]


def test_every_region_that_was_weighed_is_on_record() -> None:
    made = fuse("""g (float[N, 4096] x, float[8] s) => (float[N, 4096] y, float[8] t) {
        a = Exp(x) b = Neg(a) y = Tanh(b) c = Exp(s) t = MatMul(c, c)
    }""", dims={"N": 4096})
    first = made.plan.fusions[0].view[0].label
    assert considered(made) == [
        ("chosen", ["Exp", "Neg", "Tanh"], ""), ("lost", ["Neg", "Tanh"], first), ("no-gain", ["Exp"], ""),
    ]
    chosen, lost, single = made.plan.considered
    assert chosen.cost == made.plan.fusions[0].cost and chosen.cost is not None
    assert chosen.reason == (
        f"It is predicted to run {chosen.cost.estimated_speedup:.2f}x as fast and to save "
        f"{chosen.cost.seconds_saved * 1e6:.1f} µs and 268,435,456 bytes a run."
    )
    assert lost.cost is not None and lost.reason == (
        f"It would save {lost.cost.seconds_saved * 1e6:.1f} µs a run; the region of {first}, with the same nodes, "
        f"{chosen.cost.seconds_saved * 1e6:.1f} µs."
    )
    assert single.reason.startswith("1 node would run 1.00x as fast, under 1.2x: ")
    assert made.plan.candidates == sum(each.cost is not None and each.verdict != "lost" for each in (chosen, single))


def test_what_no_kernel_is_made_for_is_on_record_with_its_parts() -> None:
    made = fuse("""g (float[N, 64, 4096] x, float[64, 1] b) => (float[N, 4096, 64] y, float[N, 64, 4096] z) {
        a = Add(x, b) z = Tanh(a) y = Transpose<perm = [0, 2, 1]>(z)
    }""", dims={"N": 32})
    verdicts = {verdict for verdict, ops, _ in considered(made) if ops == ["Add", "Tanh"]}
    assert verdicts & {"chosen", "lost"}


OVERLAPPING = """\
id: first
kind: fuse
summary: A chain.
why: A test.
pattern: |
  y = Neg(Exp(x)) + z
examples: []
---
id: second
kind: fuse
summary: Its end, and what follows.
why: A test.
pattern: |
  y = Tanh(a + b)
examples: []
"""


def test_a_match_that_lost_its_nodes_to_a_larger_one_wins_where_it_gains_more(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(OVERLAPPING, encoding="utf-8")
    made = fuse(
        "g (float[N, 1] x, float[N, 4096] z) => (float[N, 4096] y) { e = Exp(x) n = Neg(e) s = Add(n, z) y = Tanh(s) }",
        dims={"N": 16384}, rules=[tmp_path], disable=["grow-pointwise", "grow-row-reduction", "grow-scan"],
    )
    # The first match is seeded first, being larger; its inner values are small, and that of the second is not.
    assert "already-fused" in codes(made)
    assert regions(made) == [("grow", ["Exp", "Neg"]), ("second", ["Add", "Tanh"])]
    lost = [each for each in made.plan.considered if each.verdict == "lost" and each.rule == "first"]
    assert [[node.op for node in each.nodes] for each in lost] == [["Exp", "Neg", "Add"]]


PRODUCTS = [
    ("MatMul", "float[64, 64]", ""), ("Gemm", "float[64, 64]", ""), ("Conv", "float[64, 64, 1]", ""),
    ("Einsum", "float[64, 64]", "<equation = \"ij,jk->ik\">"),
]


@pytest.mark.parametrize(("op", "weight", "attributes"), PRODUCTS)
def test_a_product_is_in_no_region(tmp_path: Path, op: str, weight: str, attributes: str) -> None:
    """Not even where a rule names one by a set, the only way that it may: it has a meaning as tensors, and no schedule
    holds it alone."""
    rule = OVERLAPPING.partition("---")[0].replace("Neg(Exp(x)) + z", "Neg(Exp(chosen(x, w, ...)))")
    (tmp_path / "rules.yaml").write_text(f"{rule.rstrip()}\nsets: {{chosen: [{op}]}}\n", encoding="utf-8")
    sizes = "[N, 64]" if weight.count(",") == 1 else "[1, 64, N]"
    made = fuse(f"""g (float{sizes} x, {weight} w) => (float{sizes} y) {{
        a = {op}{attributes}(x, w) b = Exp(a) y = Neg(b)
    }}""", dims={"N": 65536}, rules=[tmp_path])
    assert [ops for _, ops in regions(made)] == [["Exp", "Neg"]]
    assert "not-fusable" in codes(made) and "no-schedule" not in codes(made)
    product = made.graph.nodes[0]
    facts = node_facts(product, made.graph, made.ledger.placement, Lowerings())
    assert facts == Facts(None, view=False, contracts=True)


def test_a_rule_does_not_name_a_region_of_different_rows(tmp_path: Path) -> None:
    """Its nodes are as free as any others; the second reduction is the one that does not fit."""
    rule = OVERLAPPING.partition("---")[0].replace("Neg(Exp(x)) + z", "Softmax(Softmax(x))")
    (tmp_path / "rules.yaml").write_text(rule, encoding="utf-8")
    made = fuse("""g (float[N, 64, 64] x) => (float[N, 64, 64] y) {
        e = Exp(x) s = Softmax<axis = 1>(e) t = Softmax<axis = -1>(s) y = Neg(t)
    }""", dims={"N": 512}, rules=[tmp_path])
    assert regions(made) == [("grow-row-reduction", ["Exp", "Softmax"]), ("grow-row-reduction", ["Softmax", "Neg"])]
    assert ("Softmax -> t", "reductions over different rows meet in one region") in [
        (refusal.node, refusal.message) for refusal in made.refusals]


def test_neighbours_that_rules_named_are_joined_where_that_is_better(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(OVERLAPPING.replace("Tanh(a + b)", "Abs(Tanh(a))"), encoding="utf-8")
    text = "g (float[N, 4096] x, float[N, 4096] z) => (float[N, 4096] y) { e = Exp(x) n = Neg(e) s = Add(n, z) " \
           "t = Tanh(s) y = Abs(t) }"
    made = fuse(text, dims={"N": 4096}, rules=[tmp_path])
    assert "two-rules" in codes(made)
    assert regions(made) == [("grow-pointwise", ["Exp", "Neg", "Add", "Tanh", "Abs"])]
    growth = ["grow-pointwise", "grow-row-reduction", "grow-scan"]
    apart = fuse(text, dims={"N": 4096}, rules=[tmp_path], disable=growth)
    assert regions(apart) == [("first", ["Exp", "Neg", "Add"]), ("second", ["Tanh", "Abs"])]


def test_a_part_is_fused_where_the_whole_gains_too_little() -> None:
    # Tensors of one size: all four move 10 of them apart and 6 together (predicted 2.0x), the last two 4 and 2 (2.4x).
    made = fuse("""g (float[N, 4096] x, float[N, 4096] p, float[N, 4096] q)
      => (float[N, 4096] a, float[N, 4096] b, float[N, 4096] y) {
        a = Add(x, p) b = Add(a, q) c = Exp(b) y = Tanh(c)
    }""", dims={"N": 65536}, least_gain=2.2)
    assert regions(made) == [("grow-pointwise", ["Exp", "Tanh"])]
    assert considered(made)[0] == ("no-gain", ["Add", "Add", "Exp", "Tanh"], "")


def test_regions_of_one_structure_share_their_kernel() -> None:
    body = " ".join(f"a{i} = Exp(x{i}) b{i} = Neg(a{i}) c{i} = Tanh(b{i}) y{i} = MatMul(c{i}, w) x{i + 1} = Abs(y{i})"
                    for i in range(3))
    made = fuse(f"g (float[N, 512] x0, float[512, 512] w) => (float[N, 512] x3) {{ {body} }}", dims={"N": 8192})
    first, *_ = [fusion.kernel for fusion in made.plan.fusions]
    kernels = [fusion.kernel for fusion in made.plan.fusions if len(fusion.nodes) == 4]
    assert len(kernels) == 2 and kernels[0] is kernels[1] and kernels[0] is not first


def test_what_a_refused_region_leaves_grows_anew() -> None:
    """A shifted window: norm, roll, and windows to the front.  The roll reads the norm in two pieces, so that no kernel
    holds both; once the norm has its own, the pieces are one kernel too, and a second optimisation finds no more."""
    text = """g (float16[N, 56, 56, 96] x, float16[N, 56, 56, 96] r, float16[96] s, float16[96] b) =>
        (float16[M, 7, 7, 96] y, float16[N, 56, 56, 96] z)
        <int64[1] low = {3}, int64[1] end = {99999}, int64[1] none = {0}, int64[1] axis = {1},
         int64[6] windows = {-1, 8, 7, 8, 7, 96}, int64[4] flat = {-1, 7, 7, 96}> {
        z = Add(x, r) n = LayerNormalization(z, s, b)
        upper = Slice(n, low, end, axis) lower = Slice(n, none, low, axis) rolled = Concat<axis = 1>(upper, lower)
        split = Reshape(rolled, windows) moved = Transpose<perm = [0, 1, 3, 2, 4, 5]>(split) y = Reshape(moved, flat)
    }"""
    made = fuse(text, dims={"N": 8})
    found = [ops for _, ops in regions(made)]
    assert ["Add", "LayerNormalization"] in found
    assert any({"Slice", "Concat", "Transpose"} <= set(ops) for ops in found)
    again = optimise(made.model, Options(verify=False, target="H200", dims={"N": 8}))
    assert not again.plan.fusions


def test_a_norm_of_heads_and_the_rotation_of_its_halves() -> None:
    """Rows are normalised and read again in halves: no kernel holds both, so that the norm is one and the rotation
    another, and nothing between them is left."""
    text = """g (float16[N, 256, 6, 64] q, float16[64] w, float16[1, 1, 256, 64] c, float16[1, 1, 256, 64] s) =>
        (float16[N, 6, 256, 64] y)
        <int64[1] none = {0}, int64[1] half = {32}, int64[1] end = {99999}, int64[1] axis = {3}, float two = {2.0},
         int64[1] last = {-1}, float eps = {1.0e-6}> {
        f = Cast<to = 1>(q) p = Pow(f, two) m = ReduceMean(p, last) e = Add(m, eps) r = Sqrt(e) i = Reciprocal(r)
        n = Mul(f, i) b = Cast<to = 10>(n) v = Mul(w, b) t = Transpose<perm = [0, 2, 1, 3]>(v)
        a = Mul(t, c) upper = Slice(t, half, end, axis) lower = Slice(t, none, half, axis) minus = Neg(upper)
        turned = Concat<axis = -1>(minus, lower) d = Mul(turned, s) y = Add(a, d)
    }"""
    made = fuse(text, dims={"N": 8})
    found = [set(ops) for _, ops in regions(made)]
    assert any({"ReduceMean", "Sqrt"} <= ops or "RMSNormalization" in ops for ops in found)
    assert any({"Neg", "Concat", "Add"} <= ops for ops in found)
    assert len(made.model.graph.node) <= 3


def test_only_stages_that_have_ids_can_be_left_out() -> None:
    """A user's rule may be called as a pass is, and be disabled."""
    ids = {name for name, _ in (*DRAFTING, *FINISHING)}
    assert ids - {""} <= STAGES and len(ids) > 2
