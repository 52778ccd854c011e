"""Bytes, kernels, arithmetic and memory against figures worked out by hand, and against the independent recount.

All counts are integers and compared exactly.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.graph import Graph
from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import bytes_of
from onnxfuse.lowering.launch import DOMAIN, LaunchPlan, Output, Step, Variant
from onnxfuse.operators import flops_of, load_graph
from onnxfuse.planning.costs.memory import memory_saved, peak_memory
from onnxfuse.planning.costs.traffic import Ledger, plan_cost, traffic
from onnxfuse.planning.legality import boundary
from onnxfuse.region import Region

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
recount = importlib.import_module("recount")


def region_traffic(ledger: Ledger, region: Region) -> tuple[int, int]:
    """Bytes through device memory of a region's nodes one by one, and of the fused node."""
    return sum(ledger.node(node).bytes for node in region.own), ledger.region(region).bytes


def model(inputs: str, outputs: str, body: str, constants: str = "", opset: int = 17) -> onnx.ModelProto:
    held = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {held} {{ {body} }}'
    )


def graph(*parts: str, opset: int = 17) -> Graph:
    return load_graph(model(*parts, opset=opset))


def nodes(graph: Graph, *ops: str) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes if node.op in ops)


def fuse(graph: Graph, *ops: str) -> Region:
    """All nodes of these operators as one region."""
    members = nodes(graph, *ops)
    edge = boundary(members)
    return Region(members, edge.inputs, edge.outputs)


CHAIN = (
    "float[B,4] x", "float[B,4] y", "a = Add(x, c) r = Relu(a) y = Mul(r, v)",
    "float c = {1.0}, float[4] v = {1.0, 2.0, 3.0, 4.0}",
)


def test_each_node_reads_its_inputs_and_writes_its_outputs_once() -> None:
    counted = traffic(graph(*CHAIN), {"B": 8})
    # x and y: 8 x 4 x 4 = 128 bytes.  Add 128 + 4 + 128, Relu 128 + 128, Mul 128 + 16 + 128.
    assert counted.bytes_other == 260 + 256 + 272
    assert counted.bytes_products == 0
    assert counted.kernels == 3
    assert counted.flops == 3 * 32
    assert counted.unknown == ()


def test_fused_chain_moves_its_operands_and_its_result() -> None:
    loaded = graph(*CHAIN)
    region = fuse(loaded, "Add", "Relu", "Mul")
    counted = traffic(loaded, {"B": 8}, [region])
    assert counted.bytes_other == 128 + 4 + 16 + 128
    assert (counted.kernels, counted.flops) == (1, 96)
    ledger = Ledger(loaded, {"B": 8})
    assert region_traffic(ledger, region) == (788, 276)
    assert memory_saved(ledger, region) == 2 * 128


def test_an_input_read_twice_counts_once() -> None:
    counted = traffic(graph("float[8] x", "float[8] y", "y = Mul(x, x)"), {})
    assert counted.bytes_other == 32 + 32


def test_broadcast_operands_and_types_count_their_own_size() -> None:
    counted = traffic(
        graph("bool[2,1,4] k, float16[2,3,4] x, float16 z", "float16[2,3,4] y", "y = Where(k, x, z)"), {},
    )
    assert counted.bytes_other == 8 + 48 + 2 + 48


def test_products_are_kept_apart() -> None:
    counted = traffic(
        graph("float[8,4] x, float[4,6] w", "float[8,6] y", "t = MatMul(x, w) y = Relu(t)"), {},
    )
    assert counted.bytes_products == 128 + 96 + 192
    assert counted.bytes_other == 192 + 192
    assert counted.flops == 2 * 8 * 6 * 4 + 48


@pytest.mark.parametrize("between", [
    "t = Div(table, one)", "t = Identity(table)", "u = Mul(one, table) t = Dropout(u)"])
def test_rows_are_looked_up_through_what_gives_its_operand_back(between: str) -> None:
    """6 rows of 16 floats, not 1000, and 6 ids."""
    loaded = graph("float[1000,16] raw, int64[B,3] ids", "float[B,3,16] y",
                   f"table = Neg(raw) {between} g = Gather(t, ids) y = Exp(g)", "float one = {1.0}")
    region = fuse(loaded, "Div", "Identity", "Mul", "Dropout", "Gather", "Exp")
    _, after = region_traffic(Ledger(loaded, {"B": 2}), region)
    assert after == 2 * 6 * 16 * 4 + 6 * 8


def test_gather_reads_what_it_gathers() -> None:
    loaded = graph("float16[1000,16] table, int64[B,3] ids", "float16[B,3,16] y", "y = Gather(table, ids)")
    assert traffic(loaded, {"B": 2}).bytes_other == 192 + 48 + 192
    # 1000 x 16 x 2 bytes is all there is to read, however often a row is asked for.
    assert traffic(loaded, {"B": 1000}).bytes_other == 32000 + 24000 + 96000


ROTARY = (
    "float[2,8] x", "float[2,8] y",
    "a = Slice(x, zero, four, one) b = Slice(x, four, eight, one) n = Neg(b) y = Concat<axis=1>(n, a)",
    "int64[1] zero = {0}, int64[1] four = {4}, int64[1] eight = {8}, int64[1] one = {1}",
)


def test_slices_read_their_part_and_a_fused_node_the_parts_together() -> None:
    loaded = graph(*ROTARY)
    # (As axes = [1]:) each Slice reads 32 bytes of x, three operands of 8 bytes, and writes 32; Neg and Concat.
    assert traffic(loaded, {}).bytes_other == 2 * (32 + 24 + 32) + 64 + 128
    members = nodes(loaded, "Slice", "Neg", "Concat")
    whole = Region(members, (loaded.values["x"],), (loaded.values["y"],))
    assert region_traffic(Ledger(loaded, {}), whole)[1] == 64 + 64
    half = Region(members[:1], (loaded.values["x"],), (loaded.values["a"],))
    assert region_traffic(Ledger(loaded, {}), half)[1] == 32 + 32


def test_a_fused_node_looks_through_views() -> None:
    loaded = graph(
        "float[4,4] x", "float[2] y", "f = Reshape(x, flat) s = Slice(f, zero, two) y = Relu(s)",
        "int64[1] flat = {16}, int64[1] zero = {0}, int64[1] two = {2}",
    )
    region = Region(nodes(loaded, "Reshape", "Slice", "Relu"), (loaded.values["x"],), (loaded.values["y"],))
    assert region_traffic(Ledger(loaded, {}), region) == ((8 + 16 + 8) + 16, 8 + 8)


def test_views_host_arithmetic_and_folded_nodes_cost_nothing() -> None:
    counted = traffic(
        graph(
            "float[B,4] x", "float[B,2,2] y",
            "s = Shape(x) n = Gather(s, i) t = Concat<axis=0>(n, two, two) "
            "d = Add(w, w) e = Relu(d) v = Reshape(x, t) y = Mul(v, e)",
            "int64[1] i = {0}, int64[1] two = {2}, float[2] w = {1.0, 2.0}",
        ),
        {"B": 8},
    )
    assert counted.kernels == 1
    assert counted.bytes_other == 128 + 8 + 128


def test_each_branch_of_an_if_counts_half() -> None:
    loaded = graph(
        "bool c, float[8] x, float[8] z", "float[8] y",
        "y = If (c) <then_branch = t () => (float[8] p) { p = Add(x, z) }, "
        "else_branch = e () => (float[8] q) { q = Neg(x) }>",
    )
    counted = traffic(loaded, {})
    assert counted.kernels == 1
    assert counted.bytes_other == (32 + 32 + 32) / 2 + (32 + 32) / 2


def test_sizes_that_nobody_knows_are_listed_and_count_nothing() -> None:
    counted = traffic(graph("float[B,4] x", "float[B,4] y", "y = Relu(x)"), {})
    assert counted.unknown == ("x", "y")
    assert counted.bytes_other == 0
    assert counted.kernels == 1


def test_packed_types_round_up_to_whole_bytes() -> None:
    loaded = graph("float[3] x", "float[3] y", "y = Relu(x)")
    assert bytes_of(replace_type(loaded.values["x"], TensorProto.INT4), {}) == 2
    assert bytes_of(replace_type(loaded.values["x"], TensorProto.BFLOAT16), {}) == 6
    assert bytes_of(replace_type(loaded.values["x"], TensorProto.STRING), {}) is None


def replace_type(value: Value, dtype: int) -> Value:
    return replace(value, dtype=dtype)


def resize(result: tuple[int, ...], attributes: str, sizes: str = "") -> tuple[str, ...]:
    """A Resize of ``float[2,3,4,6] x``; ``sizes`` where not all axes are named."""
    sizes = sizes or ",".join(map(str, result))
    return ("float[2,3,4,6] x", f"float[{','.join(map(str, result))}] y", f"y = Resize<{attributes}>(x, cut, , sizes)",
            f"int64[{sizes.count(',') + 1}] sizes = {{{sizes}}}, float[4] cut = {{0.0, 0.0, 0.5, 1.0}}")


FLOPS: list[tuple[str, tuple[str, ...], int]] = [
    # y = 2 x 5 x 6 x 6 elements of 3 / 1 x 3 x 3 products each, and the bias
    ("convolution", ("float[2,3,8,8] x, float[5,3,3,3] w, float[5] b", "float[2,5,6,6] y", "y = Conv(x, w, b)"),
     2 * 360 * 27 + 360),
    ("grouped convolution", ("float[1,4,8,8] x, float[4,1,3,3] w", "float[1,4,6,6] y", "y = Conv<group=4>(x, w)"),
     2 * 144 * 9),
    ("transposed convolution", ("float[1,2,4,4] x, float[2,3,2,2] w", "float[1,3,5,5] y", "y = ConvTranspose(x, w)"),
     2 * 32 * 12),
    ("product of batches", ("float[2,3,4] x, float[2,4,5] w", "float[2,3,5] y", "y = MatMul(x, w)"), 2 * 30 * 4),
    ("Gemm, transposed, with bias",
     ("float[4,3] x, float[4,5] w, float[5] b", "float[3,5] y", "y = Gemm<transA=1>(x, w, b)"), 2 * 15 * 4 + 15),
    ("einsum", ("float[2,3,4] x, float[2,4,5] w", "float[2,3,5] y", 'y = Einsum<equation="bij,bjk->bik">(x, w)'), 240),
    ("exponential", ("float[10] x", "float[10] y", "y = Exp(x)"), 80),
    ("division", ("float[10] x, float[10] z", "float[10] y", "y = Div(x, z)"), 40),
    ("square", ("float[10] x", "float[10] y", "y = Pow(x, two)", "float two = {2.0}"), 10),
    ("cube", ("float[10] x", "float[10] y", "y = Pow(x, three)", "float three = {3.0}"), 160),
    ("mean of rows", ("float[3,10] x", "float[3,1] y", "y = ReduceMean<axes=[1]>(x)"), 30),
    ("softmax", ("float[3,10] x", "float[3,10] y", "y = Softmax(x)"), 30 * 15),
    ("layer norm", ("float[3,10] x, float[10] g", "float[3,10] y", "y = LayerNormalization(x, g)"), 30 * 7),
    ("sum of three", ("float[10] x, float[10] z", "float[10] y", "y = Sum(x, z, z)"), 30),
    ("pooling", ("float[1,1,8,8] x", "float[1,1,7,7] y", "y = MaxPool<kernel_shape=[2,2]>(x)"), 49 * 4),
    ("transpose", ("float[3,10] x", "float[10,3] y", "y = Transpose(x)"), 0),
    ("cast", ("float[3] x", "float16[3] y", "y = Cast<to=10>(x)"), 0),
]

NEWER: list[tuple[str, tuple[str, ...], int]] = [
    ("resize, the nearest", resize((2, 3, 8, 12), 'mode="nearest"'), 0),
    # Each of y's elements is made of 2 x 2, or 4 x 4, of the images' axes alone.
    ("resize, linear", resize((2, 3, 8, 12), 'mode="linear"'), 576 * 2 * 4),
    ("resize, cubic", resize((2, 3, 8, 12), 'mode="cubic"'), 576 * 2 * 16),
    ("resize of one axis", resize((2, 3, 4, 12), 'mode="cubic"'), 288 * 2 * 4),
    ("resize of no axis", resize((2, 3, 4, 6), 'mode="cubic"'), 0),
    ("resize of named axes, cut out", resize((2, 3, 4, 12),
     'mode="linear", axes=[2,-1], coordinate_transformation_mode="tf_crop_and_resize"', "4,12"), 288 * 2 * 4),
    ("resize to less, smoothed", resize((2, 3, 2, 12), 'mode="linear", antialias=1'), 144 * 2 * (4 * 2)),
    ("resize to less", resize((2, 3, 2, 12), 'mode="linear"'), 144 * 2 * (2 * 2)),
    ("scatter", ("float[8,5] x, int64[2,1] i, float[2,5] u", "float[8,5] y", "y = ScatterND(x, i, u)"), 0),
    ("scatter that adds", ("float[8,5] x, int64[2,1] i, float[2,5] u", "float[8,5] y",
     'y = ScatterND<reduction="add">(x, i, u)'), 10),
    ("scatter that compares", ("float[8,5] x, int64[2,3] i, float[2,3] u", "float[8,5] y",
     'y = ScatterElements<reduction="max">(x, i, u)'), 6),
    ("scatter of elements", ("float[8,5] x, int64[2,3] i, float[2,3] u", "float[8,5] y",
     "y = ScatterElements(x, i, u)"), 0),
]


@pytest.mark.parametrize(("opset", "parts", "expected"), [
    pytest.param(opset, *case[1:], id=case[0]) for opset, cases in ((17, FLOPS), (19, NEWER)) for case in cases])
def test_arithmetic(opset: int, parts: tuple[str, ...], expected: int) -> None:
    (node,) = (node for node in graph(*parts, opset=opset).nodes if node.op != "Constant")
    assert flops_of(node, {}) == expected


def test_arithmetic_of_unknown_sizes_is_unknown() -> None:
    (node,) = graph("float[B] x", "float[B] y", "y = Exp(x)").nodes
    assert flops_of(node, {}) is None


def test_peak_memory_by_liveness() -> None:
    loaded = graph(*CHAIN)
    ledger = Ledger(loaded, {"B": 8})
    # Constants 4 + 16, x for the whole run, a and r together while Relu runs; fused: x and y.
    assert peak_memory(ledger).peak == 20 + 3 * 128
    assert peak_memory(ledger).constants == 20
    region = fuse(loaded, "Add", "Relu", "Mul")
    assert peak_memory(ledger, [region]).peak == 20 + 2 * 128
    # Scratch is written and read, and held once.
    assert peak_memory(ledger, [replace(region, scratch=2 * 1000)]).peak == 20 + 2 * 128 + 1000


def test_peak_memory_leaves_out_what_bodies_make() -> None:
    loaded = load_graph(MODELS["branches"]())
    ledger = Ledger(loaded, {})
    (branch, _) = (body for body in loaded.walk() if body is not loaded)
    region = Region(branch.nodes, (loaded.values["x"], loaded.values["z"]), tuple(branch.outputs))
    assert peak_memory(ledger, [region]) == peak_memory(ledger)


def test_peak_memory_holds_what_a_region_writes_beside_a_first_result_that_nobody_reads() -> None:
    loaded = graph("float[8] x", "float[4] y", "e = Exp(x) a, b = Split(e, half) y = Neg(b)", "int64[2] half = {4, 4}")
    members = nodes(loaded, "Exp", "Split")
    region = Region(members, (loaded.values["x"],), (loaded.values["b"],))
    # x, b and y.
    assert peak_memory(Ledger(loaded, {}), [region]).peak == 32 + 16 + 16


def test_peak_memory_holds_what_a_view_shows_and_graph_outputs_to_the_end() -> None:
    loaded = graph(
        "float[4,4] x", "float[16] p, float[4] z",
        "a = Relu(x) p = Reshape(a, flat) b = ReduceSum(x) c = Expand(b, four) z = Neg(c)",
        "int64[1] flat = {16}, int64[1] four = {4}",
    )
    # x 64, a 64 (p shows it), the shape operand of Expand 8; then c 16 and z 16 at the end; b [1,1] is dead by then.
    assert peak_memory(Ledger(loaded, {})).peak == 64 + 64 + 8 + 32


def test_regions_that_make_a_cycle_have_no_peak() -> None:
    loaded = graph("float[4] x", "float[4] y", "a = Relu(x) b = Neg(a) y = Add(a, b)")
    with pytest.raises(ValueError, match="fusing would make a cycle"):
        peak_memory(Ledger(loaded, {}), [fuse(loaded, "Relu", "Add")])


def plan(variants: tuple[Variant, ...], scratch: tuple[str, ...] = ()) -> LaunchPlan:
    return LaunchPlan("test", 1, ("i0.0", "h0.0"), (), (Output(1, ("s0",)),), variants, scratch)


def step(*arguments: str) -> Step:
    return Step("k", ("1", "1", "1"), ("32", "1", "1"), arguments)


def test_kernels_and_scratch_come_from_the_variant_that_runs() -> None:
    short = Variant("short", (step("i0", "o0"),), ("s0 100 <=",))
    host = Variant("host", (step("i0", "o0"),), ("h0.0",))
    long = Variant("long", (step("i0", "t0"), step("t0", "o0")))
    whole = plan((host, short, long), ("s0 4 *", "1000"))
    assert plan_cost(whole, [(100,)], 90, 132) == (1, 0)
    assert plan_cost(whole, [(101,)], 90, 132) == (2, 2 * 404)


def test_the_recount_is_independent() -> None:
    """It imports the standard library, NumPy and onnx; and a part of itself."""
    for name in ("recount", "recount_shapes"):
        tree = ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        others = {module.partition(".")[0] for module in found} - sys.stdlib_module_names
        assert others <= {"numpy", "onnx", "recount_shapes"}, name


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "chain": lambda: model(*CHAIN),
    "rotary": lambda: model(*ROTARY),
    "embedding": lambda: model(
        "int64[B,3] ids", "float16[B,3,4] y", "e = Gather(table, ids) y = Mul(e, e)", "float16[5,4] table = {"
        + ", ".join(["1"] * 20) + "}",
    ),
    "shape arithmetic": lambda: model(
        "float[B,S,8] x", "float[B,S,2,4] y, float[S] r",
        "s = Shape(x) l = Slice(s, zero, two) t = Concat<axis=0>(l, tail) v = Reshape(x, t) y = Softmax(v) "
        "n = Gather(s, one) p = Range(k, n, one) q = Cast<to=1>(p) r = Exp(q)",
        "int64[1] zero = {0}, int64[1] two = {2}, int64[2] tail = {2, 4}, int64 one = {1}, int64 k = {0}",
    ),
    "products": lambda: model(
        "float[B,4] x", "float[B,4] y", "t = Transpose(w) m = MatMul(x, t) a = Add(m, m) y = Gemm(a, w)",
        "float[4,4] w = {" + ", ".join(["0.5"] * 16) + "}",
    ),
    "branches": lambda: model(
        "bool c, float[8] x", "float[8] y",
        "z = Relu(x) y = If (c) <then_branch = t () => (float[8] p) { p = Add(x, z) }, "
        "else_branch = e () => (float[8] q) { q = Neg(x) }>",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_recount_agrees_on_plain_models(name: str) -> None:
    sizes = {"B": 7, "S": 3}
    mine, theirs = traffic(load_graph(MODELS[name]()), sizes), recount.count(MODELS[name](), sizes)
    assert (theirs.products, theirs.other, theirs.kernels) == (mine.bytes_products, mine.bytes_other, mine.kernels)
    assert not theirs.unknown


def fused_file(original: onnx.ModelProto, region: Region, launch: LaunchPlan) -> onnx.ModelProto:
    """The model with the region as one fused node whose body names nothing of the model."""
    names = {value.name: f"i{place}" for place, value in enumerate(region.tensors)}
    names |= {value.name: f"o{place}" for place, value in enumerate(region.outputs)}
    inside = [original.graph.node[node.index] for node in region.nodes]
    body = []
    for node in inside:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.setdefault(name, f"v{len(names)}") if name else "" for name in node.input]
        copy.output[:] = [names.setdefault(name, f"v{len(names)}") for name in node.output]
        body.append(copy)
    hosts = [f"h{place}" for place in range(8)]
    formal = [*hosts, *(names[value.name] for value in region.tensors)]
    function = helper.make_function(
        DOMAIN, "Region0", formal, [names[value.name] for value in region.outputs], body, original.opset_import,
    )
    call = helper.make_node(
        "Region0", [""] * 8 + [value.name for value in region.tensors], [value.name for value in region.outputs],
        domain=DOMAIN, plan=launch.to_json(),
    )
    result = onnx.ModelProto()
    result.CopyFrom(original)
    kept = [node for node in original.graph.node if node not in inside]
    place = next(i for i, node in enumerate(original.graph.node) if node == inside[0])
    del result.graph.node[:]
    result.graph.node.extend([*kept[:place], call, *kept[place:]])
    result.functions.append(function)
    result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return result


@pytest.mark.parametrize(
    ("name", "ops"),
    [("chain", ("Add", "Relu", "Mul")), ("rotary", ("Slice", "Neg", "Concat")), ("embedding", ("Gather", "Mul"))],
)
def test_the_recount_agrees_on_fused_files(name: str, ops: tuple[str, ...]) -> None:
    original = MODELS[name]()
    loaded = load_graph(original)
    region = fuse(loaded, *ops)
    launch = LaunchPlan(
        "test", len(region.tensors), ("i0.0",), (), (Output(1, ("s0",)),),
        (Variant("two passes", (step("i0", "t0"), step("t0", "o0"))),), ("s0 4 *",),
    )
    rows = next(size.evaluate({"B": 7}) for size in region.tensors[0].shape or ())
    region = replace(region, steps=2, scratch=2 * 4 * rows)
    mine = traffic(loaded, {"B": 7}, [region])
    theirs = recount.count(fused_file(original, region, launch), {"B": 7})
    assert (theirs.products, theirs.other, theirs.kernels) == (mine.bytes_products, mine.bytes_other, mine.kernels)


def test_the_recount_compares_with_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(MODELS["chain"](), tmp_path / "a.onnx")
    report = tmp_path / "report.json"
    report.write_text('{"bytes_before": 788, "bytes_after": 800, "kernels_before": 3}', encoding="utf-8")
    arguments = [str(tmp_path / "a.onnx"), str(tmp_path / "a.onnx"), "--dim", "B=8", "--report", str(report)]
    assert recount.main(arguments) == 0
    assert "bytes_after                   788  report              800  off by 1.52%" in capsys.readouterr().out
    report.write_text('{"bytes_before": 788, "bytes_after": 900}', encoding="utf-8")
    assert recount.main(arguments) == 1
