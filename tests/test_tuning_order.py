"""What tuning measures first, what it compares, and that it prepares on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import encoder
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse

from onnxfuse.measuring.database import DEFAULT, Measurement, in_memory, open_database
from onnxfuse.measuring.database import RUNTIME as NODES
from onnxfuse.measuring.machine import DeviceMemory, HostMemory
from onnxfuse.pipeline import Options, optimise
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.tuning.order import FIRST, FURTHER, LAST, Known, urgency
from onnxfuse.tuning.samples import disagreement, sampled
from onnxfuse.verifying.blocks import MOST, pieces

REGION = Known(count=12, predicted=40.0, runtime=50.0, best=20.0, opened=True, tried=1, products=True)

BIAS = parse("g (float16[256,64] a, float16[64,72] b, float16[72] c) => (float16[256,72] y) "
             "{ p = MatMul(a, b) s = Add(p, c) y = Relu(s) }")


@pytest.mark.parametrize(("sooner", "later"), [
    (replace(REGION, opened=False, count=1), REGION),  # what is not known at all comes first
    (REGION, replace(REGION, count=6)),
    (REGION, replace(REGION, tried=2)),
    (REGION, replace(REGION, best=10.0)),  # there is less to save
    (REGION, replace(REGION, products=False)),
    (REGION, replace(REGION, best=70.0)),  # near the runtime's time the way there counts
    (replace(REGION, best=70.0), replace(REGION, best=72.0)),
    # The library's product takes longer than its bytes do, and there is more to be had than by other ways.
    (replace(REGION, bare=True, best=None, after=30.0), REGION),
    (REGION, replace(REGION, bare=True, best=None, after=60.0)),
    (REGION, replace(REGION, best=None, after=30.0)),  # its own choice does not run
    (replace(REGION, best=70.0), replace(REGION, count=99, best=80.0)),
])
def test_what_may_save_most_comes_first(sooner: Known, later: Known) -> None:
    assert urgency(sooner, ()) > urgency(later, ())


def test_what_can_hardly_be_taken_comes_last() -> None:
    part = replace(REGION, best=5.0)
    beaten = replace(REGION, best=20.0)
    assert urgency(beaten, ())[0] == FURTHER and urgency(beaten, [part])[0] == LAST
    assert urgency(beaten, [replace(part, best=60.0)]) == urgency(beaten, ())
    assert urgency(replace(REGION, best=80.0), ())[0] == LAST
    bare = Known(count=48, predicted=40.0, products=True, bare=True)
    assert urgency(bare, ())[0] == LAST and urgency(replace(bare, holder=1.0), ())[0] == FIRST
    assert urgency(replace(bare, opened=True, runtime=40.0), ())[0] == LAST


def test_what_another_region_holds_waits_for_it() -> None:
    """But for what the library takes for a product, which is asked for with the region that it is judged by."""
    whole, other = (Known(count=2, predicted=time, products=True) for time in (50.0, 30.0))
    part = Known(count=2, predicted=40.0, products=True, holder=100.0)
    ranked = [whole, replace(part, predicted=10.0, bare=True), other, part, replace(REGION, opened=True)]
    assert sorted(ranked, key=lambda known: urgency(known, ()), reverse=True) == ranked


class Order(FakeTimer):
    """Notes the operators of the runtime's nodes, and how many operands a kernel has."""

    def __init__(self, microseconds: Any = lambda name: 50.0 if name == RUNTIME else 20.0) -> None:
        super().__init__(microseconds)
        self.order: list[tuple[str, ...] | int] = []

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Any:
        timed = super().time(model, fused=fused)
        self.order.append(len(model.graph.input) if fused else tuple(node.op_type for node in model.graph.node))
        return timed


def test_a_round_over_all_regions_is_first(tmp_path: Path) -> None:
    """The runtime's nodes and the own kernel of each; what stands in no plan, and a product's own kernel, later."""
    timer = Order()
    with open_database(tmp_path / "measurements.sqlite") as kept:
        found = tune(BIAS, timer, kept, TuneOptions())
    assert found.left == 0 and len(found.regions) == 3
    whole, bare, rest = ("MatMul", "Add", "Relu"), ("MatMul",), ("Add", "Relu")
    opening, others = timer.order[:5], timer.order[5:]
    assert {each for each in opening if isinstance(each, tuple)} == {whole, bare, rest}
    assert opening.count(3) == 1 and opening.count(2) == 1  # of the whole, and of what follows the product
    own = sum(region.measured for region in found.regions if region.operators == bare) - 1
    late = own // 2  # the further ways of the others have lost what they could gain by then
    assert others[-late:] == [2] * late and others.count(3) > 1 and all(isinstance(each, int) for each in others)


def test_the_first_round_decides(tmp_path: Path) -> None:
    """What the library takes for the product is enough to judge a region around it; its own kernel need not run."""
    timer, path = Order(), tmp_path / "measurements.sqlite"
    timer.interrupt_after = 5
    with open_database(path) as kept, pytest.raises(KeyboardInterrupt):
        tune(BIAS, timer, kept, TuneOptions())
    made = optimise(BIAS, Options(target="H100", verify=False, database=path, least_gain=1.0))
    assert [[node.op for node in fusion.nodes] for fusion in made.plan.fusions] == [["MatMul", "Add", "Relu"]]


def test_what_was_fastest_elsewhere_is_measured_first() -> None:
    """On another GPU, or on this one with another driver, which counts before it however old."""
    timer = FakeTimer(lambda name: 50.0 if name == RUNTIME else 10.0 + crc32(name.encode()) % 97)
    here, other = timer.environment, replace(timer.environment, gpu="NVIDIA H200")
    with in_memory() as kept:
        tune(BIAS, timer, kept, TuneOptions())
        known = [row for where, row in kept if row.candidate not in (NODES, DEFAULT)]
        keys = {(row.subject, row.shapes) for row in known}
        for number, row in enumerate(known):
            kept.record(other, replace(row, microseconds=float(number), date="2099-01-01"))
        timer.environment = replace(here, driver="999")
        ranked = {key: kept.ranking(timer.environment, *key) for key in keys}
        told: list[Measurement] = []
        record = kept.record
        kept.record = lambda where, row: (told.append(row), record(where, row))[-1]  # type: ignore[method-assign]
        tune(BIAS, timer, kept, TuneOptions())
    for key, names in ranked.items():
        order = [row.candidate for row in told if (row.subject, row.shapes) == key and row.candidate != DEFAULT]
        times = [row.microseconds for row in told if (row.subject, row.shapes) == key and row.candidate != DEFAULT]
        assert order == [name for name in names if name != DEFAULT] and times == sorted(times) and len(order) > 5


def test_kernels_are_compiled_for_what_runs_alone(tmp_path: Path) -> None:
    timer = FakeTimer(lambda name: 10.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(BIAS, timer, kept, TuneOptions())
    assert all(len(each.kernels) == each.source.count("__global__") == 1 for each in timer.compiled)
    assert len({each.kernels for each in timer.compiled}) > 5


def test_ways_that_a_gpu_has_not_are_left_out(tmp_path: Path) -> None:
    """No A100 multiplies by four warps, or copies by tensor maps: what is told to runs as something else, which is not
    measured twice."""
    model = parse("g (float16[1024,512] a, float16[512,1024] b) => (float16[1024,1024] y) "
                  "{ p = MatMul(a, b) y = Relu(p) }")
    counts = []
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
        timer = FakeTimer(lambda name: 10.0)
        timer.environment = replace(timer.environment, gpu=gpu)
        with open_database(tmp_path / f"{gpu}.sqlite") as kept:
            found = tune(model, timer, kept, TuneOptions(stages=("products",)))
        assert found.left == 0 and len(timer.timed) == found.measured
        products = [name for name in timer.timed if name.startswith("product")]
        assert len(products) == 2 * len(set(products))  # bare, and with what follows
        counts.append(sum("together" in name or "specialised" in name for name in products))
    assert counts[0] > counts[1] == 0


def test_progress_is_of_the_whole(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with open_database(tmp_path / "measurements.sqlite") as kept:
        found = tune(encoder(layers=1), FakeTimer(lambda name: 10.0), kept,
                     TuneOptions(dims={"batch": 2, "sequence": 16}), lambda *each: told.append(each))
    steps = [(done, of) for stage, done, of in told if stage.startswith("measuring")]
    assert [done for done, _ in steps] == list(range(len(steps))) and steps[-1][1] == found.measured == len(steps)


@pytest.mark.parametrize("shape", [(32, 197, 768), (32, 12, 197, 197), (1, 1024, 5632), (4096, 4096), (64, 81920)])
def test_a_sample_shows_faults(shape: tuple[int, ...]) -> None:
    """Of a tile's border, of the last rows and columns that tiles do not fill, of one matrix of several."""
    right = np.ones(shape, np.float16)
    faults: list[Any] = [np.s_[..., -1, :], np.s_[..., -(shape[-1] % 64 or 64):], np.s_[..., 63::64, :]]
    faults += [np.s_[..., ::128], (-1,) * len(shape), (0,) * len(shape)]
    faults += [np.s_[-1:]] if shape[0] in (32, 64) else []
    for fault in faults:
        wrong = right.copy()
        wrong[fault] = 2.0
        got, wanted = (taken(each) for each in (wrong, right))
        assert disagreement({"y": got}, {"y": wanted}, 64), (shape, fault)


def taken(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = sampled(onnxruntime.OrtValue.ortvalue_from_numpy(array.view(np.int16)), HostMemory())
    assert found is not None
    return found.view(array.dtype)


def test_a_sample_is_small_and_reaches_both_ends() -> None:
    assert pieces(0) == [(0, 0)] and pieces(MOST) == [(0, MOST)]
    for count in (MOST + 1, 38_000_000, 2**31 + 5):
        found = pieces(count)
        assert min(found)[0] == 0 and max(found)[1] == count and sum(end - start for start, end in found) < 2 * MOST


def test_inputs_are_copied_to_the_gpu_once() -> None:
    done: list[tuple[Any, ...]] = []
    device = SimpleNamespace(
        allocate=lambda size: done.append(("allocate", size)) or 4096,
        upload=lambda *each: done.append(("upload", each[2])), copy=lambda *each: done.append(("copy", *each)),
        synchronise=lambda: done.append(("wait",)), free=lambda address: done.append(("free", address)))
    memory = DeviceMemory(device)  # type: ignore[arg-type]
    assert memory.repeat(np.zeros(65, np.float32), 3) == [4096, 4608, 5120]
    assert done == [
        ("allocate", 1536), ("upload", 260), ("copy", 4608, 4096, 260), ("copy", 5120, 4096, 260), ("wait",)]
    del memory
    assert done[-1] == ("free", 4096)
