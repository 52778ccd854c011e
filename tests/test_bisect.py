"""Bisection without a GPU: the search with oracles made up, kernels in the emulator, functions on the CPU.

Functions are compared bit for bit; kernels within the tolerances of ``verifying.tolerances``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, encoder, run, write
from emulated import EmulatedRunner
from numpy.typing import NDArray
from planted import broken, changeable, damaged, kernels, plant

from onnxfuse.debugging import Outcome, Pair, bisect_answers, bisect_times
from onnxfuse.debugging.answers import NO_KERNELS
from onnxfuse.debugging.search import Asked, culprits, smallest
from onnxfuse.debugging.times import BenchTimer, Ratio, node_pair
from onnxfuse.debugging.variants import Outputs, Variants
from onnxfuse.errors import KernelError, ModelError
from onnxfuse.graph import from_proto, load_model
from onnxfuse.measuring.machine import find_machine
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import FusedNode, Rewritten, read_fused, unfuse
from onnxfuse.verifying.capture import Source, capture, run_model
from onnxfuse.verifying.closeness import default_tolerance
from onnxfuse.verifying.runs import Recipe
from onnxfuse.verifying.sharing import sharing

Array = NDArray[Any]

DIMS = {"batch": 2, "sequence": 8}


@pytest.fixture(scope="module")
def fused() -> Optimised:
    """A transformer encoder of two layers in float32, everything fused that can be."""
    return optimise(encoder(2), Options(verify=False, least_gain=0.0, dims=DIMS))


def pair_of(optimised: Optimised, rewritten: Rewritten | None = None) -> Pair:
    model = (rewritten or optimised.rewritten).model
    return Pair.of(optimised.loaded, from_proto(model), DIMS)


def nodes_of(optimised: Optimised, op: str) -> list[str]:
    return [node.name for node in read_fused(optimised.model) if node.op == op]


# The search


@pytest.mark.parametrize("wanted", [{3}, {0, 7}, {1, 2, 6}, set(range(8)), {5, 40, 63}])
def test_the_smallest_set_is_found(wanted: set[int]) -> None:
    asked: list[int] = []

    def differs(items: Sequence[str]) -> bool:
        asked.append(len(items))
        return wanted <= set(map(int, items))

    items = [str(number) for number in range(64 if max(wanted) > 7 else 8)]
    assert set(map(int, smallest(items, differs))) == wanted
    assert len(asked) <= len(items) ** 2 + 3 * len(items)  # the bound that the paper gives


def test_a_single_culprit_takes_two_runs_a_halving() -> None:
    asked: list[frozenset[str]] = []

    def differs(items: Sequence[str]) -> bool:
        asked.append(frozenset(items))
        return "700" in items

    assert smallest([str(number) for number in range(1024)], differs) == ("700",)
    assert len(asked) <= 20


def test_several_culprits_and_an_interaction() -> None:
    """Single faults, and one that only two nodes make together; deterministic, and no set is asked twice."""
    faults = [{"a3"}, {"b1", "c2"}, {"d0"}]
    names = {f"{letter}{number}": f"{letter}{number}" for letter in "abcd" for number in range(5)}
    runs: list[frozenset[str]] = []

    def oracle(kept: frozenset[str]) -> Outcome:
        runs.append(kept)
        shown = [fault for fault in faults if fault <= kept]
        return Outcome(bool(shown), f"{len(shown)} faults")

    found = [culprits(names, Asked(oracle), "model") for _ in range(2)]
    assert found[0] == found[1]
    assert sorted(map(sorted, (culprit.nodes for culprit in found[0]))) == [["a3"], ["b1", "c2"], ["d0"]]
    assert {culprit.detail for culprit in found[0]} == {"1 faults"}
    assert len(runs) == 2 * len(set(runs))


def test_nodes_of_one_kernel_are_found_together() -> None:
    kernels = {f"n{number}": f"Region{number % 3}" for number in range(12)}
    found = culprits(kernels, Asked(lambda kept: Outcome(any(kernels[name] == "Region1" for name in kept))), "model")
    assert [(culprit.nodes, culprit.kernels, culprit.alike) for culprit in found] == [
        (("n1",), ("Region1",), ("n4", "n7", "n10"))]


def test_random_faults_are_all_explained() -> None:
    """Whatever the faults, what is left after the culprits are put back agrees, and every culprit is one."""
    for seed in range(200):
        rng = random.Random(seed)
        names = {f"n{number}": f"Region{rng.randrange(8)}" for number in range(rng.randint(1, 20))}
        faults = [set(rng.sample(sorted(names), min(len(names), rng.randint(1, 3)))) for _ in range(rng.randint(0, 4))]

        def differs(kept: frozenset[str], faults: Sequence[set[str]] = faults) -> bool:
            return any(fault <= kept for fault in faults)

        found = culprits(names, Asked(lambda kept, differs=differs: Outcome(differs(kept))), "model")  # type: ignore[misc]
        left = frozenset(names).difference(*({*culprit.nodes, *culprit.alike} for culprit in found))
        assert not differs(left)
        for culprit in found:
            assert differs(frozenset(culprit.nodes))
            assert not any(differs(frozenset(culprit.nodes) - {name}) for name in culprit.nodes)


# Variants


def test_variants_hold_the_original_nodes_again(fused: Optimised) -> None:
    variants = Variants(fused.loaded, from_proto(fused.model))
    names = list(variants.nodes)
    nothing = variants.model(fused.model, ())
    assert not read_fused(nothing)
    assert sorted(node.SerializeToString() for node in nothing.graph.node) == sorted(
        node.SerializeToString() for node in fused.loaded.proto.graph.node)
    half = variants.model(fused.model, names[::2])
    onnx.checker.check_model(half)
    assert sorted(node.name for node in read_fused(half)) == sorted(names[::2])


def test_an_oracle_with_sessions_that_take_kernels(fused: Optimised) -> None:
    """On the CPU such a session runs the functions: every variant of a sound model agrees, of a damaged one not."""
    run_of_all = Recipe(DIMS).make(fused.graph)
    op = changeable(fused.rewritten)[0]
    for rewritten, differs in ((fused.rewritten, False), (damaged(fused.rewritten, op), True)):
        pair = pair_of(fused, rewritten)
        variants = Variants(pair.loaded, pair.fused)
        with sharing(pair.loaded, pair.fused.proto) as slims:
            runs = [(run_of_all, run_model(slims[0].session(), slims[0].model, run_of_all))]
            oracle = Outputs(slims, variants, runs, 1e-3, kernels=True)
            assert not oracle(frozenset()).differs
            assert oracle(frozenset(variants.nodes)).differs is differs


def test_the_tolerance_follows_the_narrowest_type() -> None:
    for dtype, limit in (("float32", 1e-3), ("float16", 1e-2)):
        assert default_tolerance(optimise(encoder(dtype=dtype), Options(verify=False)).graph) == limit


# Answers


def test_a_sound_model_has_no_culprit(fused: Optimised) -> None:
    result = bisect_answers(pair_of(fused))
    assert (result.culprits, result.outside, result.device) == ((), "", None)
    assert result.notes == (NO_KERNELS,)
    assert result.summary == "no fusion changes the answer without kernels; kernels were not run"


@pytest.mark.parametrize("count", [1, 2])
def test_damaged_functions_are_found_without_a_gpu(fused: Optimised, count: int) -> None:
    ops = changeable(fused.rewritten)[:count]
    assert len(ops) == count
    result = bisect_answers(pair_of(fused, damaged(fused.rewritten, *ops)))
    assert {culprit.kind for culprit in result.culprits} == {"function"}
    assert sorted(culprit.kernels[0] for culprit in result.culprits) == sorted(ops)
    for culprit in result.culprits:
        assert len(culprit.nodes) == 1 and {*culprit.nodes, *culprit.alike} == set(nodes_of(fused, culprit.kernels[0]))
        assert "of its largest magnitude (bit for bit) on generated, seed 0 (batch=2, sequence=8)" in culprit.detail
        assert culprit.replaces and set(culprit.replaces) <= {node.label for node in fused.graph.nodes}


def test_a_tolerance_lets_small_differences_pass(fused: Optimised) -> None:
    """An epsilon that is a millionth larger changes the answer, and by less than a tenth of its magnitude."""
    model = onnx.ModelProto()
    model.CopyFrom(fused.model)
    changed = 0
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                if attribute.name == "epsilon":
                    attribute.f += 1e-6
                    changed += 1
    assert changed
    pair = pair_of(fused, Rewritten(model, ()))
    assert bisect_answers(pair).culprits
    with_room = bisect_answers(pair, tolerance=0.1)
    assert not with_room.culprits and with_room.tolerance == 0.1


def test_a_fault_in_a_kernel_is_found_alone(fused: Optimised) -> None:
    op = kernels(fused.rewritten)[0]
    result = bisect_answers(pair_of(fused, plant(fused.rewritten, op)), EmulatedRunner())
    assert [(culprit.kind, culprit.kernels) for culprit in result.culprits] == [("kernel", (op,))]
    (culprit,) = result.culprits
    assert [*culprit.nodes, *culprit.alike] == nodes_of(fused, op)
    assert "elements are wrong" in culprit.detail
    assert (result.device, result.summary) == ("the CPU emulator", "1 fusion changes the answer")


def test_a_kernel_that_does_not_compile_is_found(fused: Optimised) -> None:
    op = kernels(fused.rewritten)[-1]
    result = bisect_answers(pair_of(fused, broken(fused.rewritten, op)), EmulatedRunner())
    assert [culprit.kernels for culprit in result.culprits] == [(op,)]


def test_what_only_the_whole_model_shows_is_searched_for(fused: Optimised) -> None:
    """Kernels that are right alone and wrong together: a function, a kernel and an interaction in one model."""
    ops = [op for op in kernels(fused.rewritten) if op in changeable(fused.rewritten)]
    names = [node.name for node in read_fused(fused.model) if node.op not in ops[:2]]
    together = {names[0], names[-1]}
    seen: list[frozenset[str]] = []

    def oracle(kept: frozenset[str]) -> Outcome:
        seen.append(kept)
        return Outcome(together <= kept, "output 'y' is off")

    model = damaged(plant(fused.rewritten, ops[0]), ops[1])
    result = bisect_answers(pair_of(fused, model), EmulatedRunner(), oracle=oracle)
    assert [culprit.kind for culprit in result.culprits] == ["function", "kernel", "model"]
    assert set(result.culprits[2].nodes) == together
    gone = set(nodes_of(fused, ops[0])) | set(nodes_of(fused, ops[1]))
    assert all(not kept & gone for kept in seen)
    assert result.tried > len(seen) and result.tolerance == 1e-3
    json.dumps(result.to_json())


def test_a_difference_outside_the_fused_nodes_is_told_apart(fused: Optimised) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(fused.model)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    model.graph.node.insert(list(model.graph.node).index(product) + 1, onnx.helper.make_node(
        "Neg", [f"{product.output[0]}.old"], [product.output[0]]))
    product.output[0] += ".old"
    result = bisect_answers(pair_of(fused, Rewritten(model, ())))
    assert not result.culprits and "is off by" in result.outside
    assert result.summary.startswith("the difference is no fusion's: with every fused node put back, output ")


def test_a_file_of_another_model(fused: Optimised, tmp_path: Path) -> None:
    write(tmp_path, CHAIN)
    onnx.save(fused.model, tmp_path / "other.onnx")
    result = run("bisect", tmp_path / "model.onnx", tmp_path / "other.onnx")
    first = read_fused(fused.model)[0]
    name = next(name for name in first.inputs if name)
    assert result.exit_code == 1
    lines = result.output.replace(str(tmp_path), "FOLDER").splitlines()
    assert lines[0].startswith(f"error: The fused node {first.name!r} speaks of '")
    assert lines[0].endswith("', and the original model has no such value.")
    assert lines[1:] == ["--> FOLDER/other.onnx", "help: Give the model that the file was fused from."] and name


# Times


class FakeTimer:
    """Milliseconds by operator type."""

    device = "a clock"
    providers: Sequence[Any] = ("CPUExecutionProvider",)

    def __init__(self, after: Mapping[str, float], fails: str = "") -> None:
        self.after, self.fails = after, fails
        self.asked: list[str] = []
        self.left: list[int] = []

    def node(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[float, float, Ratio]:
        self.asked.append(node.name)
        if node.op == self.fails:
            raise KernelError("it was not measured")
        first, second, rest = node_pair(node, model, feeds)
        assert {info.name for info in first.graph.input} == rest.keys() == {info.name for info in second.graph.input}
        onnx.checker.check_model(first)
        after = self.after.get(node.op, 0.5)
        return 1.0, after, (1 / after, 0.99 / after, 1.01 / after)

    def whole(self, pair: Pair, fused: onnx.ModelProto, feeds: Mapping[str, Array]) -> Ratio:
        self.left.append(len(read_fused(fused)))
        return (1.2, 1.1, 1.3) if len(self.left) == 1 else (1.4, 1.3, 1.5)


def test_nodes_that_cost_time_come_first(fused: Optimised) -> None:
    ops = kernels(fused.rewritten)
    timer = FakeTimer({ops[0]: 1.5, ops[1]: 1.005})
    result = bisect_times(pair_of(fused), timer)
    (slow,) = result.culprits
    assert result.times[0] is slow and slow.kernel == ops[0]
    assert {slow.node, *slow.alike} == set(nodes_of(fused, ops[0]))
    count = 1 + len(slow.alike)
    assert slow.lost == pytest.approx(0.5 * count)
    assert result.summary == f"{count} of {result.fused} fused nodes cost time: {500.0 * count:.1f} µs a run"
    assert timer.left == [result.fused, result.fused - count]
    assert (result.whole, result.mended) == ((1.2, 1.1, 1.3), (1.4, 1.3, 1.5))
    assert len(timer.asked) == len(result.times) <= result.fused
    json.dumps(result.to_json())


def test_nodes_that_cannot_be_timed_are_named(fused: Optimised) -> None:
    op = kernels(fused.rewritten)[0]
    result = bisect_times(pair_of(fused), FakeTimer({}, fails=op))
    assert next(time.reason for time in result.times if time.kernel == op) == "it was not measured"
    assert not result.culprits and result.whole is None
    assert result.summary == "no fused node is slower than the nodes it replaced"


def test_the_real_timer_measures_through_bench(fused: Optimised, tmp_path: Path) -> None:
    """On the CPU all that there is to see is that both models run, and that no GPU time comes of it."""
    onnx.save(fused.loaded.proto, tmp_path / "m.onnx")
    pair = Pair.of(load_model(tmp_path / "m.onnx"), from_proto(fused.model), DIMS)
    timer = BenchTimer.__new__(BenchTimer)
    timer.device, timer.providers = "none", ["CPUExecutionProvider"]
    if find_machine().gpu is not None:
        pytest.skip("there is a GPU")
    run_of_all = Recipe(pair.ledger.sizes).make(pair.graph)
    with sharing(pair.loaded, pair.fused.proto) as (slim, _):
        nodes = read_fused(fused.model)[:1]
        (taken,) = capture(nodes, Source(pair.loaded, pair.graph, run_of_all), slim, pair.ledger.sizes, timer.providers)
    for measure in (lambda: timer.node(taken.node, fused.model, taken.feeds),
                    lambda: timer.whole(pair, fused.model, run_of_all.feeds)):
        with pytest.raises(KernelError, match="both models ran on the CPU"):
            measure()


# The command


def written(folder: Path, fused: Optimised, model: onnx.ModelProto) -> tuple[Path, Path]:
    paths = folder / "m.onnx", folder / "m.fused.onnx"
    for path, proto in zip(paths, (fused.loaded.proto, model), strict=True):
        onnx.save(proto, path)
    return paths


def test_the_command_without_a_gpu(fused: Optimised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.debugging.find_runner", lambda: None)
    op = changeable(fused.rewritten)[0]
    original, path = written(tmp_path, fused, damaged(fused.rewritten, op).model)
    sizes = ["--dim", "batch=2", "--dim", "sequence=8"]
    result = run("bisect", original, *sizes)
    assert result.exit_code == 0, result.output
    assert f"note: {NO_KERNELS}" in result.output
    assert "\n1 fusion changes the answer\n" in result.output
    assert ": the nodes in the file are not the original's\n" in result.output
    assert "help: fuse the original again; the functions of this file were changed" in result.output
    data = json.loads(run("bisect", original, path, *sizes, "--json").output)
    assert (data["by"], data["summary"], data["device"]) == ("answer", "1 fusion changes the answer", None)
    assert set(data) == {"by", "summary", "device", "inputs", "tolerance", "fused", "tried", "outside", "culprits",
                         "notes"}
    assert set(data["culprits"][0]) == {"kind", "nodes", "kernels", "alike", "detail", "rules", "replaces"}


def test_the_command_names_the_way_out(fused: Optimised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's fused nodes are put back by the command that is printed."""
    monkeypatch.setattr("onnxfuse.debugging.find_runner", EmulatedRunner)
    op = kernels(fused.rewritten)[0]
    original, path = written(tmp_path, fused, plant(fused.rewritten, op).model)
    result = run("bisect", original, path, "--dim", "batch=2", "--dim", "sequence=8")
    names = nodes_of(fused, op)
    (line,) = [line.strip() for line in result.output.splitlines() if line.strip().startswith("help: onnxfuse unfuse")]
    only = " ".join(f"--only {name}" for name in names)
    assert line == f"help: onnxfuse unfuse {path} {only} -o {tmp_path / 'm.fused'}.mended.onnx"
    mended = run(*line.split()[2:])
    said = "1 fused node" if len(names) == 1 else f"{len(names)} fused nodes"
    assert mended.output == f"{said} put back; written: {tmp_path / 'm.fused'}.mended.onnx\n"
    left = onnx.load(tmp_path / "m.fused.mended.onnx")
    assert not set(names) & {node.name for node in read_fused(left)}
    assert unfuse(left).SerializeToString(deterministic=True) == fused.loaded.proto.SerializeToString(
        deterministic=True)


def test_times_need_a_gpu(fused: Optimised, tmp_path: Path) -> None:
    original, path = written(tmp_path, fused, fused.model)
    if find_machine().gpu is not None:
        pytest.skip("there is a GPU")
    result = run("bisect", original, path, "--by", "time", "--dim", "batch=2", "--dim", "sequence=8")
    assert (result.exit_code, result.output) == (1, (
        "error: Times are measured on a GPU, and there is none here that ONNX Runtime can use.\n"
        "help: Run this where the GPU is; --by answer compares the functions without one.\n"
    ))


def test_times_as_text(fused: Optimised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = kernels(fused.rewritten)
    monkeypatch.setattr("onnxfuse.debugging.times.BenchTimer", lambda: FakeTimer({ops[0]: 2.0}, fails=ops[1]))
    original, path = written(tmp_path, fused, fused.model)
    output = run("bisect", original, path, "--by", "time", "--dim", "batch=2", "--dim", "sequence=8").output
    assert "timed on a clock, generated, seed 0 (batch=2, sequence=8)" in output
    assert "0.50 (0.49 to 0.51)" in output and "costs time" in output
    assert ": it was not measured\n" in output
    assert "the whole model: 1.20x as fast as the original; 1.40x (1.30 to 1.50) with these put back\n" in output
    assert "help: onnxfuse unfuse " in output


def test_wrong_names_of_files(tmp_path: Path) -> None:
    write(tmp_path, CHAIN)
    result = run("bisect", tmp_path / "model.onnx")
    assert (result.exit_code, result.output.replace(str(tmp_path), "FOLDER")) == (1, (
        "error: There is no such file.\n"
        "--> FOLDER/model.fused.onnx\n"
        "help: Check the path and the working directory.\n"
    ))


def test_inputs_that_do_not_fit(fused: Optimised) -> None:
    with pytest.raises(ModelError, match="The model has no input 'nothing'"):
        bisect_answers(pair_of(fused), inputs={"nothing": np.zeros(1, np.float32)})
