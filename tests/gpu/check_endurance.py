"""Many threads in shared sessions for a long time: right answers, every call counted, and no growth of memory.

    python tests/gpu/check_endurance.py [--seconds 3600] [--threads 16] [--json FILE]

All threads share one session of each of four kinds of model: a transformer, a convolutional network, a pyramid of
linear layers with norms, and a quantised network.  Each call takes a model and one of many sizes of its inputs at
random, models in equal shares of the time: ONNX Runtime's convolutions keep all threads waiting at a new size.  Answers
are compared with the first of the same inputs, and those with the original model's on the same GPU.
All sessions record statistics (``ONNXFUSE_STATISTICS``), whose counts must be those of the calls.

Resident memory and free GPU memory are read at ten-second intervals; between the first quarter and the end neither may
grow by more than 64 MiB.  Needs what check_runtime.py needs.  ``--rehearse fake_cuda.so`` runs hand-written nodes over
the stand-in of tests/native instead, in ONNX Runtime's CPU provider.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from building import ROOT, build

sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
build()

import fused_models as make  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import quantized_models  # noqa: E402
from runtime_sessions import REHEARSAL, expect, plus, session, with_images  # noqa: E402

from onnxfuse.pipeline import Options, optimise  # noqa: E402

GROWTH = 64 << 20
"""Bytes that the process, or what it holds of the GPU, may grow by between the first quarter and the end."""

ORIGINALS = "--originals" in sys.argv
"""Run the models as they were, with none of our nodes: what they grow by is ONNX Runtime's own."""

SHARE = 0.02
"""Elements of a quantised model that may round the other way."""

Feeds = dict[str, np.ndarray]


@dataclass
class Kind:
    """A session that all threads share, the inputs that they take, and what answers it owes.

    ``wanted`` fills with the first answers; ``tolerance`` is relative to the largest element of an output.
    """

    name: str
    session: onnxruntime.InferenceSession
    statistics: Path | None
    feeds: list[Feeds]
    tolerance: float
    share: float = 0.0
    """How many elements may be further off."""
    wanted: list[list[np.ndarray]] = field(default_factory=list)
    calls: int = 0
    identical: int = 0
    seconds: float = 0.0

    def check(self, got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], place: int) -> bool:
        """Whether all bits agree; raises AssertionError where an answer is wrong."""
        if all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
               for a, b in zip(got, wanted, strict=True)):
            return True
        for a, b in zip(got, wanted, strict=True):
            expect(a.dtype == b.dtype and a.shape == b.shape, self.name, place, a.dtype, a.shape, b.dtype, b.shape)
            a, b = a.astype(np.float64), b.astype(np.float64)
            expect(np.array_equal(np.isfinite(a), np.isfinite(b)), self.name, place, "not finite")
            off = float(np.mean(~(np.abs(a - b) <= self.tolerance * np.abs(b).max(initial=1e-30))))
            expect(off <= self.share, self.name, place, "share of elements that are off", off)
        return False


def random_sizes(count: int, *ranges: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Distinct sizes, each within its range."""
    generator, seen = np.random.default_rng(0), set()
    while len(seen) < count:
        sizes = tuple(int(generator.integers(low, high + 1)) for low, high in ranges)
        if sizes not in seen:
            seen.add(sizes)
            yield sizes


def watched(folder: Path, name: str, model: onnx.ModelProto) -> tuple[onnxruntime.InferenceSession, Path]:
    """A session that records statistics, and their file."""
    path = folder / f"{name}.json"
    os.environ["ONNXFUSE_STATISTICS"] = str(path)
    try:
        return session(model), path
    finally:
        del os.environ["ONNXFUSE_STATISTICS"]


def against_original(folder: Path, name: str, original: onnx.ModelProto, feeds: list[Feeds], tolerance: float,
                     share: float = 0.0) -> Kind:
    """A kind whose first answers agree with the original model's."""
    own = session(original, registered=False)
    if ORIGINALS:
        return Kind(name, own, None, feeds, tolerance, share, [own.run(None, given) for given in feeds], len(feeds))
    fused = optimise(original, Options(verify=False, database=False)).model
    nodes = sum(node.domain == "onnxfuse" for node in fused.graph.node)
    expect(nodes > 0, name, "has no fused node")
    kind = Kind(name, *watched(folder, name, fused), feeds, tolerance, share)
    for place, given in enumerate(feeds):
        first = kind.session.run(None, given)
        kind.check(first, own.run(None, given), place)
        kind.wanted.append(first)
        kind.calls += 1
    print(f"{name}: {nodes} fused nodes, {len(feeds)} sizes agree with the original", flush=True)
    return kind


def real_kinds(folder: Path) -> list[Kind]:
    """The four kinds of models."""
    from common import ZOO, hydrate

    rows = json.loads((ZOO / "zoo.json").read_text())
    chosen: list[tuple[str, list[tuple[int, ...]], float]] = [
        ("distilbert_fp32", list(random_sizes(100, (1, 6), (1, 128))), 2e-2),
        ("resnet50_fp16", list(random_sizes(12, (1, 12))), 5e-2),
        ("tower_fp32", list(random_sizes(100, (1, 900))), 2e-2),
    ]
    kinds = []
    for name, sizes, tolerance in chosen:
        model = hydrate().hydrate(ZOO / f"{name}.onnx.xz")
        feeds = [hydrate().feeds(rows[name], some, place) for place, some in enumerate(sizes)]
        kinds.append(against_original(folder, name, model, feeds, tolerance))
    feeds = [quantized_models.inputs(batch) for batch in range(200)]
    kinds.append(against_original(folder, "quantised", quantized_models.integers(), feeds, 1e-4, SHARE))
    return kinds


def rehearsed_kinds(folder: Path) -> list[Kind]:
    """Hand-written nodes that the stand-in can run: with scratch, with host inputs, many small ones."""
    kinds = []
    vectors = [np.random.default_rng(place).standard_normal(size, np.float32)
               for place, (size,) in enumerate(random_sizes(100, (0, 20_000)))]
    written: list[tuple[str, onnx.ModelProto, Callable[[np.ndarray], Feeds], int]] = [
        ("scratch", make.chain(with_images(make.add_two()), 5), lambda x: {"x": x}, 10),
        ("many", make.chain(with_images(make.add_one()), 20), lambda x: {"x": x}, 20),
        ("hosts", make.chain(with_images(make.add_host()), 3, ["shape"]),
         lambda x: {"x": x, "shape": np.array([len(x), 1])}, 3),
    ]
    for name, model, feeds, by in written:
        kinds.append(Kind(name, *watched(folder, name, model), [feeds(x) for x in vectors], 0.0,
                          wanted=[[plus(x, by)] for x in vectors]))
    return kinds


class Memory:
    """Resident memory and GPU memory in use, in bytes, as time goes by."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, int, int]] = []

    def take(self, at: float) -> None:
        """Note what is in use ``at`` seconds; what was freed and is kept by the allocator of the C library is not."""
        ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        device = 0
        if not REHEARSAL:
            import cupy

            free, total = cupy.cuda.runtime.memGetInfo()
            device = total - free
        self.taken.append((at, resident, device))

    def growth(self, seconds: float) -> tuple[int, int]:
        """What the process and the GPU's memory have grown by since the first quarter, at most."""
        def most(index: int, low: float, high: float) -> int:
            return int(max((entry[index] for entry in self.taken if low <= entry[0] <= high), default=0))

        early, late = (0, seconds / 4), (seconds / 4, 2 * seconds)
        return most(1, *late) - most(1, *early), most(2, *late) - most(2, *early)


def endure(kinds: Sequence[Kind], seconds: float, threads: int) -> Memory:
    """Call the sessions from all threads until the time is over, or an answer is wrong."""
    wrong: list[str] = []
    lock = threading.Lock()
    began = time.monotonic()
    memory = Memory()

    def work(number: int) -> None:
        generator = np.random.default_rng(number)
        try:
            while time.monotonic() - began < seconds and not wrong:
                mean = sum(kind.seconds for kind in kinds) / len(kinds)
                behind = [kind for kind in kinds if kind.seconds <= mean] or kinds
                kind = behind[int(generator.integers(len(behind)))]
                place, start = int(generator.integers(len(kind.feeds))), time.monotonic()
                same = kind.check(kind.session.run(None, kind.feeds[place]), kind.wanted[place], place)
                with lock:
                    kind.calls += 1
                    kind.identical += same
                    kind.seconds += time.monotonic() - start
        except Exception:  # whatever it is, it is this run's outcome
            wrong.append(traceback.format_exc())

    pool = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    every = min(10.0, seconds / 20)
    while any(thread.is_alive() for thread in pool):
        at = time.monotonic() - began
        memory.take(at)
        if len(memory.taken) % 6 == 1:
            _, resident, device = memory.taken[-1]
            print(f"{at:6.0f} s  {sum(kind.calls for kind in kinds):9,} calls, {resident >> 20:,} MiB resident, "
                  f"{device >> 20:,} MiB of the GPU", flush=True)
        time.sleep(every)
    for thread in pool:
        thread.join()
    expect(not wrong, *wrong)
    return memory


def check_counts(kind: Kind) -> int:
    """Whether the statistics of a session that has ended count each call of each node; how many nodes there are."""
    if kind.statistics is None:
        return 0
    nodes = json.loads(kind.statistics.read_text())["nodes"]
    for node in nodes:
        counted = node["unrecorded"] + sum(run["calls"] for run in node["runs"])
        expect(counted == kind.calls, kind.name, node["node"], "counted", counted, "of", kind.calls)
    return len(nodes)


def main() -> int:
    """Run the sessions, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the threads run")
    parser.add_argument("--threads", type=int, default=16, help="how many share the sessions")
    parser.add_argument("--originals", action="store_true", help="run the models as they were, with no fused node")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--rehearse", metavar="FAKE_CUDA", help="the stand-in of the driver, built")
    arguments = parser.parse_args()
    if arguments.rehearse and not REHEARSAL:
        os.environ.update(ONNXFUSE_REHEARSAL="1", ONNXFUSE_LIBCUDA=arguments.rehearse)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="onnxfuse-endurance-") as folder:
        os.environ["ONNXFUSE_CACHE_DIR"] = f"{folder}/cache"
        kinds = (rehearsed_kinds if REHEARSAL else real_kinds)(Path(folder))
        memory = endure(kinds, arguments.seconds, arguments.threads)
        found: dict[str, Any] = {"seconds": arguments.seconds, "threads": arguments.threads, "kinds": {}}
        while kinds:
            kind = kinds.pop()
            del kind.session  # its statistics are written when it ends
            found["kinds"][kind.name] = {"calls": kind.calls, "identical": kind.identical, "nodes": check_counts(kind)}
    resident, device = memory.growth(arguments.seconds)
    found |= {"resident_growth": resident, "device_growth": device, "memory": memory.taken[::6]}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, values in found["kinds"].items():
        print(f"{name}: {values['calls']:,} calls, {values['identical']:,} equal to the first in every bit, "
              f"all counted at {values['nodes']} nodes")
    print(f"after the first quarter: {resident / 2**20:+.1f} MiB resident, {device / 2**20:+.1f} MiB of the GPU")
    return 1 if max(resident, device) > GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
