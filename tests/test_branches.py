"""Ifs that sizes decide: what is known of their results, what stands in their place, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from body_models import BOOL, INT64, WIDTH, chain, constant, model, node, value
from branch_models import CONDITIONS, NUMBERS, ROW, by_rate, graph, in_turn, is_one, squeezed
from emulated import EmulatedRunner
from onnx import helper
from rewriting_models import run, same_bits
from sizes_models import folded, operators, packed, same_at

from onnxfuse.debugging import Pair, bisect_answers
from onnxfuse.graph import Graph, from_proto
from onnxfuse.graph.dims import dim, symbol
from onnxfuse.operators import infer, load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import report_of
from onnxfuse.reporting.explaining import explain
from onnxfuse.rewriting import fold, save, unfuse
from onnxfuse.verifying import verify

N = symbol("n")


def known(made: onnx.ModelProto) -> Graph:
    return infer(load_graph(made))


def fused(made: onnx.ModelProto, *disable: str, **dims: int) -> Optimised:
    return optimise(made, Options(verify=False, target="H100", least_gain=0.0, dims=dims, disable=disable))


def regions(optimised: Optimised) -> list[list[str]]:
    return [[node.op for node in fusion.nodes] for fusion in optimised.plan.fusions]


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_squeeze_is_decided_by_sizes(name: str) -> None:
    _, holds = CONDITIONS[name]
    found = known(squeezed(name)).values["b"]
    assert found.shape == ((N, dim(WIDTH)) if holds else (N, dim(1), dim(WIDTH)))


def test_ifs_in_turn_are_decided() -> None:
    found = known(in_turn()).values
    assert found["b"].shape == found["g"].shape == found["y"].shape == (N, dim(WIDTH))


def test_sizes_that_a_branch_computes_come_out_of_it() -> None:
    """Contents as sizes, of the branch that is taken, or of both where they agree."""
    sizes = graph("then", [node("Shape", "x", "s")], "s"), graph("else", [node("Shape", "x", "t")], "t")
    other = graph("else", [node("Neg", "pair", "t")], "t")
    for condition, second, contents in (
        ("flag", sizes[1], (N, dim(WIDTH))), ("flag", other, None), ("true", other, (N, dim(WIDTH))),
    ):
        made = model(
            [node("If", condition, "z", then_branch=sizes[0], else_branch=second)],
            [value("x", ["n", WIDTH]), value("flag", [], onnx.TensorProto.BOOL)],
            [value("z", [2], onnx.TensorProto.INT64)], [constant("true", True, bool), constant("pair", [1, 2], int)],
        )
        assert known(made).values["z"].elements == contents


def test_one_kernel_lies_on_either_side_of_a_decided_squeeze() -> None:
    for stages in ([], ["shape-arithmetic"]):
        made = fused(squeezed(), *stages)
        assert not [each for each in made.refusals if each.code == "unknown-shape"]
        ops = regions(made)
        assert sum(found.count("Tanh") for found in ops) == 2


def test_a_branch_that_never_runs_is_left_alone() -> None:
    """Nothing is fused there, and nothing said of it; the branch that runs counts as if it stood outside."""
    never = graph("else", [node("NonZero", "x", "w"), node("Squeeze", "w", "u"), *chain("x", "no", "x")], "no")
    made = model(
        [node("If", "true", "y", then_branch=graph("then", chain("x", "yes", "x"), "yes"), else_branch=never)],
        [value("x", ["n", WIDTH])], [value("y", ["n", WIDTH])], [*NUMBERS, constant("true", True, bool)],
    )
    found = fused(made, "shape-arithmetic")
    assert [{node.body.place[-1][1] for node in fusion.nodes if node.body} for fusion in found.plan.fusions] == [
        {"then_branch"}]
    assert found.plan.fusions[0].cost.executions == 1.0
    assert not [each for each in found.refusals if "else_branch" in each.node]


def test_where_sizes_leave_an_if_open_the_refusals_say_so() -> None:
    made = fused(squeezed(middle="m"))
    found = [each for each in made.refusals if each.code == "unknown-shape" and not each.rule]
    assert found and all("both branches of If_b" in each.message for each in found)
    assert all("make_dynamic_shape_fixed" in each.remedy for each in found)


def test_branches_of_one_rank_have_their_sizes_together() -> None:
    """An axis on which they differ has a size of its own: what reads the result is fused all the same."""
    then = graph("then", [node("Concat", "x x", "long", axis=0), node("Neg", "long", "yes")], "yes")
    made = model(
        [node("If", "flag", "b", then_branch=then, else_branch=graph("else", [node("Abs", "x", "no")], "no")),
         *chain("b", "y", "b")],
        [value("x", ["n", WIDTH]), value("flag", [], onnx.TensorProto.BOOL)], [value("y", ["rows", WIDTH])], NUMBERS,
    )
    (rows, width) = known(made).values["b"].shape or ()
    assert rows != N and width == dim(WIDTH)
    assert ["Mul", "Sigmoid", "Add", "Tanh", "Mul"] in regions(fused(made))


def test_bodies_by_an_input_are_fused_on_either_side_of_their_squeezes() -> None:
    made = fused(by_rate())
    assert sum(found.count("Tanh") for found in regions(made)) == 4
    assert not [each for each in made.refusals if each.code == "unknown-shape"]


RANKLESS = "u = Squeeze(x) "
"""A value whose rank is not known."""


@pytest.mark.parametrize(("body", "shape"), [
    ("y = Conv(u, k)", (None, 8, None)),
    ("y = ConvTranspose<group = 2>(u, k)", (None, 8, None)),
    ("y = MaxPool<kernel_shape = [2, 2]>(u)", (None, None, None, None)),
    ("y = AveragePool<kernel_shape = [2]>(u)", (None, None, None)),
    ("a, y, b = LSTM<hidden_size = 16>(u, k, k)", (1, None, 16)),
    ('a, y = GRU<hidden_size = 16, direction = "bidirectional">(u, k, k)', (2, None, 16)),
    ("a, y, b = LSTM<hidden_size = 16>(u, k, k, , , s)", (1, 5, 16)),
    ("y, a, b = LSTM<hidden_size = 16, layout = 1>(u, k, k)", (None, None, 1, 16)),
])
def test_operators_that_fix_the_rank_of_their_results_give_it_back(
    body: str, shape: tuple[int | None, ...]
) -> None:
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[a, b, c, d] x, float[8, 4, 3] k, float[1, 5, 16] s) => '
        f"(float[n] y) {{ {RANKLESS} {body} }}"
    )
    del made.graph.output[0].type.tensor_type.shape.dim[:]
    made.graph.output[0].type.tensor_type.ClearField("shape")
    found = known(made).values["y"].shape
    assert found is not None and tuple(size.value for size in found) == shape


# In the place of an If


def ifs(made: onnx.ModelProto) -> int:
    return sum(node.op_type == "If" for node in made.graph.node)


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_branch_taken_stands_in_the_place_of_its_if(name: str) -> None:
    """And what computed the condition is gone.  Types: float32; tolerance: none, at every size."""
    original = squeezed(name)
    made = folded(original)
    assert ifs(original) == 1 and not ifs(made)
    assert operators(made).keys() <= {"Mul", "Sigmoid", "Add", "Tanh", "Squeeze", "Identity", "Flatten"}
    same_at(original, made, {"n": 1}, {"n": 5}, {"n": 0})


def test_an_if_that_sizes_leave_open_stays() -> None:
    original = squeezed(middle="m")
    assert fold(from_proto(original)).proto is original


def test_branches_come_out_of_branches() -> None:
    original = in_turn()
    made = folded(original)
    assert ifs(original) == 2 and not ifs(made)
    same_at(original, made, {"n": 1}, {"n": 7})


def awkward(kind: str) -> onnx.ModelProto:
    """Branches that hold what makes them hard to take out."""
    taken = node("Squeeze", "x axis", "t")
    after = [node("Neg", "b", "t_2"), node("Exp", "t_2", "y"), ROW]
    then, other = graph("then", [taken], "t"), graph("else", [node("Abs", "x", "t")], "t")
    results, before = "b", [node("Exp", "x", "heavy")]
    if kind == "names":  # a name of both branches, of which the next free one is another value's
        then = graph("then", [taken, node("Abs", "t", "u")], "u")
    elif kind == "weights":
        then = graph("then", [taken, node("Mul", "t factor", "u")], "u")
        then.initializer.append(constant("factor", np.linspace(1, 2, WIDTH)))
    elif kind == "constants out":  # what a branch gives out is no node's result
        then = graph("then", [taken, node("Neg", "t", "v")], "v", "held")
        then.initializer.append(constant("held", np.linspace(1, 2, WIDTH)))
        other = graph("else", [node("Abs", "x", "t"), node("Neg", "x", "e")], "t", "e")
        results, after = "b d", [node("Sub", "b d", "w"), node("Exp", "w", "y"), ROW]
    elif kind == "nested":  # an If that stays, which reads what gets another name
        inner = node("If", "flag", "u", then_branch=graph("yes", [node("Neg", "t", "p")], "p"),
                     else_branch=graph("no", [node("Abs", "t", "q")], "q"))
        then = graph("then", [taken, inner], "u")
    elif kind == "other reads":  # what only the branch reads that is not taken
        other = graph("else", [node("Abs", "heavy", "t")], "t")
    elif kind == "foreign":  # the same of an operator of which nothing is known
        other, before = graph("else", [node("Abs", "strange", "t")], "t"), [node("Erf", "x", "strange"), *before]
    elif kind == "node names":  # of a branch as of the main graph, and of another branch that is taken
        then.node[0].name = "Exp_heavy"
        twin = node("If", "c", "d", then_branch=graph("then", [node("Squeeze", "x axis", "p", "Exp_heavy")], "p"),
                    else_branch=graph("else", [node("Abs", "x", "q")], "q"))
        after = [twin, node("Add", "b d", "w", "Exp_heavy_2"), node("Exp", "w", "y"), ROW]
    elif kind == "hidden":  # a value of the branch, by the state of a Loop in it
        body = helper.make_graph(
            [node("Identity", "going", "on"), node("Add", "s_0 u", "r")], "body",
            [value("i", [], INT64), value("going", [], BOOL), value("s_0", None)],
            [value("on", [], BOOL), value("r", None)])
        then = graph("then", [taken, node("Neg", "t", "u"), node("Loop", "three _ t", "s", body=body)], "u", "s")
        other = graph("else", [node("Abs", "x", "t"), node("Neg", "x", "e")], "t", "e")
        results, after = "b d", [node("Sub", "b d", "w"), node("Exp", "w", "y"), ROW]
    elif kind == "statements":
        then.value_info.append(value("t", ["n", WIDTH]))
    made = model(
        [*before, *is_one("x", "second", "c"),
         node("If", "c", results, then_branch=then, else_branch=other), *after],
        [value("x", ["n", 1, WIDTH]), value("flag", [1], onnx.TensorProto.BOOL)], [value("z", [1, "total"])],
        NUMBERS,
    )
    if kind == "foreign":
        made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        made.graph.node[0].op_type, made.graph.node[0].domain = "Gelu", "com.microsoft"
    if kind == "hidden":  # ONNX Runtime takes that, and onnx's checker does not
        owner = next(each for each in made.graph.node if each.op_type == "If")
        branch = next(attribute.g for attribute in owner.attribute if attribute.name == "then_branch")
        body = branch.node[-1].attribute[0].g
        body.input[2].name = body.node[1].input[0] = "t"
    return made


@pytest.mark.parametrize("kind", ["names", "weights", "constants out", "nested", "other reads", "foreign", "node names",
                                  "hidden", "statements"])
def test_awkward_branches(kind: str) -> None:
    original = awkward(kind)
    made = folded(original)
    assert ifs(made) == (kind == "nested")
    assert ("Gelu" in [each.op_type for each in made.graph.node]) == (kind == "foreign")
    assert ("Exp" in [each.op_type for each in made.graph.node if each.output[0] == "heavy"]) == (kind != "other reads")
    same_at(original, made, {"n": 3})


def test_a_large_if_stays() -> None:
    """The record holds what goes: a large branch would be in the model twice.  Its shape is known all the same."""
    original = awkward("weights")
    body = next(node for node in original.graph.node if node.op_type == "If").attribute[0].g
    body.initializer.append(constant("unread", np.zeros(1 << 17)))
    assert ifs(fold(from_proto(original)).proto) == 1
    assert known(original).values["y"].shape == (N, dim(WIDTH))


@pytest.mark.parametrize("make", [squeezed, in_turn, by_rate, lambda: awkward("nested"),
                                  lambda: awkward("node names"), lambda: squeezed(middle="m")])
def test_fused_models_give_the_originals_bits_and_the_original_back(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    """Through a file too; nothing is done a second time, and every kernel is verified on the emulator.

    Types: float32; tolerance: none between functions and the original, ``verifying.tolerances`` for kernels.
    """
    original = make()
    original.metadata_props.add(key="author", value="somebody")
    for each in original.graph.node:
        each.doc_string = f"about {each.name}"
    before = packed(original)
    symbols = {"n", "m"} & {entry.dim_param for entry in original.graph.input[0].type.tensor_type.shape.dim}
    made = fused(original, **dict.fromkeys(symbols, 24))
    assert packed(original) == before
    assert made.plan.fusions
    save(made.model, tmp_path / "fused.onnx", source=made.loaded)
    file = onnx.load(tmp_path / "fused.onnx")
    assert packed(unfuse(file)) == before
    sizes = [{"n": 1, "m": 2, "u": 3}, {"n": 6, "m": 1, "u": 3}]
    for flag in (False, True):
        for chosen in sizes:
            feeds = inputs(original, chosen, flag)
            assert same_bits(run(file, feeds), run(original, feeds))
    again = fused(file)
    assert [fusion.rule for fusion in again.plan.fusions] == []
    result = verify(made, EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()
    assert {each.verdict for each in result.nodes} == {"passed"}


@pytest.mark.parametrize("make", [squeezed, lambda: awkward("nested")])
def test_bisecting_speaks_of_the_planned_form(make: Callable[[], onnx.ModelProto]) -> None:
    """Kernels are verified on what they read, which lies in a branch of the original."""
    made = fused(make(), n=8)
    pair = Pair.of(made.loaded, from_proto(made.model), {})
    result = bisect_answers(pair, EmulatedRunner())
    assert (result.outside, result.culprits, result.notes) == ("", (), ())
    assert result.fused == len(made.plan.fusions) > 0


def test_reports_tell_of_an_if_that_went() -> None:
    made = fused(squeezed())
    assert report_of(made).sizes.nodes == 4  # the If and what computed its condition
    told = explain(made, "If_b").node
    assert told is not None and (told.state, "stands in its place" in told.summary) == ("removed", True)


def inputs(made: onnx.ModelProto, sizes: dict[str, int], flag: bool) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    found: dict[str, np.ndarray] = {}
    for info in made.graph.input:
        kind = info.type.tensor_type
        shape = [sizes[entry.dim_param] if entry.dim_param else entry.dim_value for entry in kind.shape.dim]
        if info.name == "x":
            found[info.name] = generator.standard_normal(shape).astype(np.float32)
        else:
            array = np.full(shape, flag if info.name == "flag" else 16000 * flag)
            found[info.name] = array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return found
