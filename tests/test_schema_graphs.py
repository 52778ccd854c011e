"""Random graphs of whatever the standard has, through the whole pipeline: what ONNX Runtime runs is optimised without
a crash, gives the same bits, comes back byte for byte, and has right kernels.

Fused models must equal their originals bit for bit where no kernels are registered (any NaN is as good as another; of
float16 see ``rounds_otherwise``), at the planned sizes, at others and at 0 or 1.  Kernels are compared in the emulator
with float64 on what ONNX Runtime gives for the values that they read; tolerances are those of test_random_graphs.py.

    pytest tests/test_schema_graphs.py --schema-graphs 10000 --seed 1000

A failure names its seed and shows the smallest model that fails alike, found by leaving out nodes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from emulator import EmulatorError, prepare, run_plan, variants_that_hold
from onnx import helper, numpy_helper
from reference import FLOATS, difference, evaluate_nodes, tolerance
from schema_graphs import SchemaGraph, accepted, all_operators, operators_of, runs, seeded
from schema_shrink import shrunk
from schema_values import Array, Runtime, element_type, reads_of
from test_random_graphs import GIVES_BACK, check_regions, rules, target

from onnxfuse.graph import from_proto
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import constants_record, exact_form, planned_form, read_fused, unfuse
from onnxfuse.rewriting.order import is_sorted
from onnxfuse.verifying import RunInputs
from onnxfuse.verifying.capture import Source, capture
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import sharing

FLOAT16 = onnx.TensorProto.FLOAT16

PRODUCTS = ("MatMul", "Gemm")

CHUNK = 20
"""Models of one test, whose kernels are compiled together."""

def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(name) for name in ("--seed", "--schema-graphs"))
        chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=[f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks])


@pytest.fixture(autouse=True)
def _shipped_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped rules and profiles are read once, not for each of thousands of models."""
    monkeypatch.setattr("onnxfuse.pipeline.load_rules", lambda places, disable: rules())


def fused(graph: SchemaGraph, model: onnx.ModelProto | None = None) -> Optimised:
    named = {dim.dim_param for value in graph.model.graph.input for dim in value.type.tensor_type.shape.dim}
    sizes = {name: size for name, size in graph.situations[0].items() if name in named}
    return optimise(model or graph.model, Options(dims=sizes, target=target(), least_gain=0.0, verify=False,
                                                  database=False))


def packed(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def check(graph: SchemaGraph, result: Optimised) -> None:
    """All that is promised of an optimised model."""
    same_answers(graph, result)
    if valid(graph.model):
        onnx.checker.check_model(result.model)
    assert packed(unfuse(result.model)) == packed(original(graph)), "unfused, it is not the original"
    assert packed(fused(graph, result.model).model) == packed(result.model), "optimised again, it changes"
    broken = [refusal.message for refusal in result.refusals if refusal.code == "broken-node"]
    assert not broken or ranks_differ(graph, result), broken
    right_kernels(graph, result)
    right_bodies(graph, result)


def ranks_differ(graph: SchemaGraph, result: Optimised) -> bool:
    """Whether ONNX Runtime gives values another rank than they have: a Loop that runs no time makes a list of a scalar,
    and what follows may be a node that breaks its operator's rules."""
    values = every_value(graph, original(graph))[0] or {}
    return any(value.rank not in (None, values[name].ndim) for name, value in result.graph.values.items()
               if name in values)


def original(graph: SchemaGraph) -> onnx.ModelProto:
    """The model as it is read: its nodes sorted, and names told apart, where a note says so."""
    read = from_proto(graph.model)
    if not read.notes:
        return graph.model
    assert is_sorted(list(read.proto.graph.node))
    assert sorted(str(list(node.output)) for node in read.proto.graph.node) == sorted(
        str(list(node.output)) for node in graph.model.graph.node)
    return read.proto


def valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


def same_answers(graph: SchemaGraph, result: Optimised) -> None:
    # ONNX Runtime's CPU provider leaves out roundings of 16-bit constants, also before a Cast to a longer type.
    widened = constants_record(result.folded.proto) is not None
    before = runs(graph, exact_form(graph.model, result.model) if widened else None)
    after = runs(graph, result.model)
    assert before is not None
    if after is None:
        with pytest.raises(Exception) as caught:
            Runtime(result.model)
        raise AssertionError(f"the fused model does not load: {caught.value}")
    for place, (sizes, wanted, found) in enumerate(zip(graph.situations, before, after, strict=True)):
        # What refused may be a node that nothing read, and that went with the branch or the arithmetic around it.
        more = wanted is None and result.folded.proto is not result.loaded.proto
        assert more or (wanted is None) == (found is None), f"one of the models does not run at {sizes}"
        for name, array in (wanted or {}).items():
            if array is not None and found is not None:
                assert (same_bits(array, found[name])
                        or rounds_otherwise(result, array, found[name], subtracted(graph, place, name))
                        or left_unwritten(graph, place, name)), f"{name} differs at {sizes}"


def subtracted(graph: SchemaGraph, place: int, name: str) -> float | None:
    """The largest number of what a sum or a difference is of, which its roundings are measured by: 0 may be left; None
    of other values."""
    maker = next((node for node in original(graph).graph.node if name in node.output), None)
    if maker is None or maker.op_type not in ("Add", "Sub", "Sum"):
        return None
    values = every_value(graph, graph.model)[place]
    assert values is not None
    return max(float(np.abs(values[each].astype(np.float64)).max(initial=0.0)) for each in maker.input)


def left_unwritten(graph: SchemaGraph, place: int, name: str) -> bool:
    """Whether an output of the original depends on a product of no elements, whose result ONNX Runtime's CPU provider
    leaves as the memory was."""
    values = every_value(graph, graph.model)[place]
    assert values is not None
    unwritten: set[str] = set()
    for node in original(graph).graph.node:
        empty = node.op_type in PRODUCTS and not all(values[each].size for each in node.input[:2])
        if empty or not unwritten.isdisjoint(reads_of(node)):
            unwritten.update(node.output)
    return name in unwritten


def rounds_otherwise(result: Optimised, array: Array, found: Array | None, scale: float | None) -> bool:
    """Whether two arrays are the same but for roundings to float16 that ONNX Runtime's CPU provider leaves out,
    measured by ``scale`` where given.

    It has few kernels of that type: it computes in float32, and rounds between two nodes only where another stands
    there, which may be one that gives its operand back and that a region reads through, or an If that sizes decide.
    """
    through = any(node.op in GIVES_BACK and node.outputs[0] is not None and node.outputs[0].dtype == FLOAT16
                  for fusion in result.plan.fusions for node in fusion.nodes)
    return ((through or result.folded.proto is not result.loaded.proto)
            and found is not None and array.dtype == found.dtype == np.float16 and array.shape == found.shape
            and not difference(found, array.astype(np.float64), FLOAT16, scale=scale))


def same_bits(a: Array, b: Array | None) -> bool:
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype.kind in "biu":
        return a.tobytes() == b.tobytes()
    missing = np.isnan(a)
    return bool(np.array_equal(missing, np.isnan(b))) and a[~missing].tobytes() == b[~missing].tobytes()


# ---- Kernels. ----


def right_kernels(graph: SchemaGraph, result: Optimised) -> None:
    """Regions of the main graph are legal, and their kernels right on the values that ONNX Runtime gives."""
    main = tuple(fusion for fusion in result.plan.fusions if fusion.nodes[0].body is None)
    model = result.folded.proto
    everything = [value for value in every_value(graph, model) if value is not None]
    if not everything or not main:
        return
    types = {name: element_type(array) for name, array in everything[0].items()}
    described = with_captures(model, types)
    check_regions(described, replace(result, plan=replace(result.plan, fusions=main)))
    makers = {name: node for node in model.graph.node for name in node.output}
    for sizes, values in zip(graph.situations, everything, strict=False):
        for fusion in main:
            if any(value.rank is not None and value.rank != values[value.name].ndim for value in fusion.tensors):
                continue  # the model states a rank of an If's result that one of its branches has not
            if any(size.value not in (None, length) for value in fusion.tensors for size, length in
                   zip(value.shape or (), values[value.name].shape, strict=False)
                   ) and not all(array.size for array in values.values()):
                continue  # the runtime's reduction over axes of no elements has a shape that the standard denies
            nodes = [makers[next(value.name for value in node.outputs if value is not None)] for node in fusion.nodes]
            inside = {name for node in nodes for name in node.output}
            outside = {name: array for name, array in values.items() if name not in inside}
            try:
                by = 2.0**-11 if fusion.kernel.rounds else 1e-7  # to TF32
                exact, *disturbed = (evaluate_nodes(described, nodes, outside, noise, by) for noise in (
                    None, *map(np.random.default_rng, range(3))))
            except ValueError:
                if all(array.size for array in values.values()):
                    raise
                continue  # NumPy has no maximum of nothing
            try:
                given, hosts = ([values[value.name] for value in each] for each in (fusion.tensors, fusion.hosts))
                for variant in variants_that_hold(fusion.kernel.plan, given, hosts):
                    actual = run_plan(fusion.kernel.plan, fusion.kernel.source, given, hosts, variant=variant)
                    for value, array in zip(fusion.outputs, actual, strict=True):
                        wrong = judged(array, values[value.name], exact[value.name],
                                       [other[value.name] for other in disturbed])
                        assert not wrong, f"{value.name}, variant {variant}: {wrong}"
            except (AssertionError, EmulatorError) as error:
                ops = ", ".join(node.op_type for node in nodes)
                raise AssertionError(f"kernel of {fusion.rule} of {ops} at {sizes}: {error}") from error


def right_bodies(graph: SchemaGraph, result: Optimised) -> None:
    """Kernels in bodies are right, as the verification looks at them: on what the last run of the body reads."""
    nodes = [node for node in read_fused(result.model) if node.body is not None]
    if not nodes:
        return
    verifier = NodeVerifier(result.model, EmulatedRunner())
    planned = planned_form(result.loaded, result.model)
    with sharing(planned, result.model) as (original, _):
        run = Run(RunInputs("schema"), graph.feeds[0])
        for taken in capture(nodes, Source(planned, result.graph, run), original, result.ledger.sizes, CPU):
            found = verifier.verify(taken.node, taken.feeds, taken.how)
            assert found.verdict != "failed", f"kernel {taken.node.name} in a body: {found.message}"


def judged(found: Array, own: Array, exact: Array, disturbed: Sequence[Array]) -> str:
    """What is wrong with what a kernel gives, or "".

    Args:
        own: what ONNX Runtime gives: nobody can ask for anything else, but where axes of no elements lead it astray.
        exact: in float64; disturbed: with a few roundings of float32 at every operator, which move results by what the
            region's condition makes of them, and across the steps of those that jump.
    """
    if own.shape != exact.shape:
        own = exact.astype(own.dtype)
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        return f"{found.dtype}{found.shape} instead of {own.dtype}{own.shape}"
    kind = element_type(own)
    with np.errstate(all="ignore"):
        excused = found == own
        if kind not in FLOATS:
            for other in disturbed:
                excused |= other != exact
            return difference(np.where(excused, exact, found).astype(own.dtype), exact, kind)
        excused |= np.isnan(found) & np.isnan(own)
        moved = [np.nan_to_num(np.abs(other - exact), nan=0.0, posinf=0.0) for other in disturbed]
        largest = float(np.nanmax(np.abs(exact), initial=0.0, where=np.isfinite(exact)))
        most = max(float(np.max(each, initial=0.0)) for each in moved)
        return difference(np.where(excused, exact.astype(own.dtype), found), exact, kind, length=64,
                          scale=largest + 8 * most / tolerance(kind, 64))


def every_value(graph: SchemaGraph, model: onnx.ModelProto) -> list[dict[str, Array] | None]:
    """Every tensor of the main graph of a model, the graph's or a form of it, in each situation in which it runs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    there = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(
        name for node in exposed.graph.node for name in node.output if name and name not in there))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in exposed.graph.initializer}
    found = runs(graph, exposed)
    return [None if each is None else
            {**constants, **feeds, **{name: array for name, array in each.items() if array is not None}}
            for feeds, each in zip(graph.feeds, found or [], strict=False)]


def with_captures(model: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """The model with every type written down, and what bodies read of it as further inputs of the nodes that own them:
    to look at, not to run."""
    described = onnx.ModelProto()
    described.CopyFrom(model)
    graph = described.graph
    del graph.value_info[:]
    named = {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}
    graph.value_info.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()
                            if name not in named)
    for node in graph.node:
        captured = dict.fromkeys(name for name in reads_of(node) if name in types and name not in node.input)
        if captured:  # nothing that inference looks into
            node.input.extend(captured)
            node.domain = "local"
            del node.attribute[:]
    return described


# ---- The tests. ----


def failure(graph: SchemaGraph) -> str | None:
    """What is wrong with a graph, if anything."""
    try:
        check(graph, fused(graph))
    except Exception as error:  # a crash of any sort is what is looked for
        return f"{type(error).__name__}: {error}"
    return None


def explained(graph: SchemaGraph, found: str) -> str:
    """A failure with the smallest model that fails alike."""
    kind = found[:40]
    smaller = shrunk(graph, lambda candidate: (failure(candidate) or "")[:40] == kind)
    return (f"seed {graph.seed}: pytest tests/test_schema_graphs.py --schema-graphs 1 --seed {graph.seed}\n"
            f"{failure(smaller) or found}\nsizes {smaller.situations}\n{onnx.printer.to_text(smaller.model)}")


def test_models(seeds: range) -> None:
    graphs = [graph for graph in map(seeded, seeds) if accepted(graph)]
    made: list[tuple[SchemaGraph, Optimised]] = []
    failed: dict[int, tuple[SchemaGraph, str]] = {}
    for graph in graphs:
        try:
            made.append((graph, fused(graph)))
        except Exception as error:  # a crash of any sort is what is looked for
            failed[graph.seed] = graph, f"{type(error).__name__}: {error}"
    prepare([fusion.kernel.source for _, result in made for fusion in result.plan.fusions])
    for graph, result in made:
        try:
            check(graph, result)
        except Exception as error:
            failed[graph.seed] = graph, f"{type(error).__name__}: {error}"
    if failed:
        (graph, text), *others = failed.values()
        pytest.fail("\n".join([explained(graph, text),
                               *(f"seed {other.seed}: {more[:500]}" for other, more in others)]))


def test_what_is_drawn() -> None:
    """Most graphs are accepted, and nearly every operator is among those of CI's; what the tests look for is there."""
    graphs = [seeded(seed) for seed in range(300)]
    good = [graph for graph in graphs if accepted(graph)]
    assert len(good) > len(graphs) / 2
    seen = Counter(op for graph in good for op in operators_of(graph.model))
    assert len(set(seen) & all_operators()) > 0.85 * len(all_operators()), all_operators() - set(seen)
    dead, duplicate, unsorted, bodies = (0,) * 4
    for graph in good:
        nodes = list(graph.model.graph.node)
        read = {name for node in nodes for name in reads_of(node)} | {value.name for value in graph.model.graph.output}
        dead += any(read.isdisjoint(node.output) for node in nodes)
        duplicate += any(len(set(node.input)) < len(node.input) for node in nodes)
        unsorted += not is_sorted(nodes)
        bodies += any(attribute.HasField("g") for node in nodes for attribute in node.attribute)
    assert min(dead, duplicate, unsorted, bodies) > 15, (dead, duplicate, unsorted, bodies)


def test_a_seed_is_a_graph() -> None:
    """Whatever the hashes of strings are."""
    text = ("import hashlib, schema_graphs\nfor seed in range(40):\n    graph = schema_graphs.seeded(seed)\n"
            "    print(hashlib.sha256(graph.model.SerializeToString(deterministic=True)).hexdigest())")
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.run([sys.executable, "-c", text], env=given | {"PYTHONHASHSEED": number}, text=True, check=True,
                           capture_output=True).stdout for number in ("1", "2")]
    assert runs[0] == runs[1]
    assert runs[0].split()[7] == hashlib.sha256(packed(seeded(7).model)).hexdigest()


def test_a_failure_is_made_small() -> None:
    """What is left of a graph has the node that is blamed, and hardly another."""
    graph = next(graph for graph in map(seeded, range(50)) if "Tanh" in {n.op_type for n in graph.model.graph.node})
    small = shrunk(graph, lambda candidate: any(node.op_type == "Tanh" for node in candidate.model.graph.node))
    assert len(graph.model.graph.node) > len(small.model.graph.node) <= 2


def test_a_wrong_kernel_is_seen() -> None:
    exact = np.linspace(0.0, 1.0, 5)
    own = exact.astype(np.float32)
    assert not judged(own, own, exact, [exact])
    assert judged(own + np.float32(1e-3), own, exact, [exact])
    assert not judged(own + np.float32(1e-3), own, exact, [exact + 1e-3])
    whole = np.arange(3)
    assert judged(whole + 1, whole, whole, [whole]) and not judged(whole + 1, whole, whole, [whole + 1])
    assert judged(whole, whole.astype(np.int32), whole, [])
