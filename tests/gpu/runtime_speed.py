"""What fused nodes cost in time, for check_runtime.py: each node, creating a session, a cold start."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fused_models as make
import numpy as np
import onnx
from building import ROOT
from onnx import helper
from runtime_sessions import REHEARSAL, Bound, child, expect, plus, session, with_images

from onnxfuse.lowering.launch import Variant

NODES = 200
BAR = 4.0
"""What a fused node of a chain may cost, in microseconds."""


class PerNode:
    """Microseconds that a node of a chain costs: a chain against one node of it."""

    def __init__(self, chain: Callable[[int], onnx.ModelProto], **settings: Any) -> None:
        x = np.arange(64, dtype=np.float32)
        self.long, self.short = (Bound(session(chain(count), **settings), x) for count in (NODES, 1))
        for warming in range(30):
            y = self.long.result(x * warming)
            self.short.run()
        self.right = np.array_equal(y, plus(x * 29, NODES))

    def measure(self, runs: int = 30) -> float:
        """The median of some runs."""
        return (self.long.microseconds(runs) - self.short.microseconds(runs)) / (NODES - 1)


class BareLaunch:
    """The same kernels launched with nothing around them, their arguments as pointers or as one block."""

    def __init__(self) -> None:
        import cupy

        folder = tempfile.mkdtemp(prefix="onnxfuse-bare-")
        path = f"{folder}/bare.so"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(ROOT / "tests" / "native" / "bare_launch.c"), "-o", path],
                       check=True)
        self.function = ctypes.CDLL(path).bare_launches
        self.function.restype = ctypes.c_double
        self.function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int, ctypes.c_uint] + [ctypes.c_void_p] * 2 + [
            ctypes.c_size_t]
        driver = ctypes.CDLL("libcuda.so.1")
        kernel = cupy.RawKernel(make.ADD_ONE, "add_one")
        kernel.compile()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.x, self.y = cupy.zeros(64, cupy.float32), cupy.zeros(64, cupy.float32)
        self.values = (ctypes.c_uint64 * 3)(self.x.data.ptr, self.y.data.ptr, 64)
        self.pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(self.values) + 8 * i for i in range(3)))
        self.fixed = [ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p),
                      ctypes.cast(driver.cuStreamSynchronize, ctypes.c_void_p), kernel.kernel.ptr, self.stream.ptr]

    def measure(self, block: bool = False, runs: int = 30) -> float:
        """Microseconds a launch: 200 against one, medians."""
        def median(count: int) -> float:
            times = [self.function(*self.fixed, count, 128, self.pointers, self.values, 24 if block else 0)
                     for _ in range(runs)]
            expect(min(times) > 0, "a launch failed", times)
            return statistics.median(times)

        return (median(NODES) - median(1)) / (NODES - 1)


def plain_chain(count: int) -> onnx.ModelProto:
    """The same chain of ONNX Runtime's own Add nodes."""
    names = ["x", *(f"v{i}" for i in range(1, count)), "y"]
    one = helper.make_tensor("one", make.FLOAT, [], [1.0])
    nodes = [helper.make_node("Add", [names[i], "one"], [names[i + 1]]) for i in range(count)]
    value = [helper.make_tensor_value_info(name, make.FLOAT, [64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "plain", value[:1], value[1:], [one])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def fused_chain(count: int) -> onnx.ModelProto:
    """A chain of fused nodes on 64 elements."""
    return make.chain(with_images(make.add_one()), count, size=64)


def silent_chain(count: int) -> onnx.ModelProto:
    """The same chain of fused nodes that launch nothing: what is left is ONNX Runtime's work and the library's."""
    fused = with_images(make.add_one())
    plan = replace(fused.plan, variants=(Variant("silent", ()),))
    return make.chain(replace(fused, plan=plan), count, size=64)


def figures_of(measures: Mapping[str, Callable[[], float]], blocks: int = 15) -> dict[str, list[float]]:
    """Each measure in turn, again and again, so that what disturbs the machine disturbs all."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(blocks):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def shown(found: Mapping[str, Sequence[float]]) -> str:
    """Medians and least values, in microseconds a node."""
    return "; ".join(f"{name} {statistics.median(times):.2f} (least {min(times):.2f})" for name, times in found.items())


def compared(found: Mapping[str, Sequence[float]]) -> str:
    """At most 4 µs a node.

    Where a bare launch and ONNX Runtime's own work on a node are more together, so that its own Add needs more too, the
    machine is called slow, and a fused node may cost 1.05 times that Add.
    """
    medians = {name: statistics.median(times) for name, times in found.items()}
    ours, theirs = medians["fused node"], medians["built-in Add"]
    text = shown(found)
    if ours <= BAR:
        return f"us: {text}"
    least = medians.get("bare cuLaunchKernel", 0.0) + medians.get("fused node without launch", 0.0)
    expect(theirs > BAR and least > BAR, f"more than {BAR} us: {text}")
    expect(ours <= 1.05 * theirs, f"slow machine, and more than 1.05 times the built-in Add: {text}")
    return f"slow machine, whose launches do not fit {BAR} us, us: {text}"


def dispatch() -> str:
    """200 chained nodes on 64 elements: at most 4 µs a node."""
    ours, theirs, silent = PerNode(fused_chain), PerNode(plain_chain), PerNode(silent_chain)
    expect(ours.right and theirs.right, "wrong result of a chain")
    measures = {"fused node": ours.measure, "built-in Add": theirs.measure, "fused node without launch": silent.measure}
    if not REHEARSAL:
        bare = BareLaunch()
        measures |= {"bare cuLaunchKernel": bare.measure, "with packed arguments": lambda: bare.measure(block=True)}
    return compared(figures_of(measures))


def cuda_graph() -> str:
    """The same under CUDA graphs, with inputs that change after the capture."""
    if REHEARSAL:
        return "not in a rehearsal"
    ours, theirs = (PerNode(chain, enable_cuda_graph="1") for chain in (fused_chain, plain_chain))
    expect(ours.right and theirs.right, "wrong result of a chain")
    return compared(figures_of({"fused node": ours.measure, "built-in Add": theirs.measure}, blocks=5))


def watched_dispatch() -> str:
    """What statistics cost a node; the bar of ``dispatch`` holds without them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ONNXFUSE_STATISTICS"] = f"{folder}/statistics.json"
        try:
            watched = PerNode(fused_chain)
        finally:
            del os.environ["ONNXFUSE_STATISTICS"]
        plain = PerNode(fused_chain)
        found = figures_of({"with statistics": watched.measure, "without": plain.measure}, blocks=5)
        expect(watched.right and plain.right, "wrong result of a chain")
        del watched
    return f"us: {shown(found)}"


def creation() -> str:
    """A session of 200 fused nodes whose kernels are there: at most 0.1 s more than one of 200 built-in nodes, both
    with the library registered, which may take 0.25 s."""
    def least(model: onnx.ModelProto, registered: bool) -> float:
        times = []
        for _ in range(6):
            start = time.perf_counter()
            session(model, registered=registered)
            times.append(time.perf_counter() - start)
        return min(times[1:]) * 1e3

    ours, same, plain = (
        least(model, registered) for model, registered in
        ((fused_chain(NODES), True), (plain_chain(NODES), True), (plain_chain(NODES), False)))
    text = f"{ours:.1f} ms; built-in nodes {plain:.1f} ms, {same:.1f} ms with the library registered"
    expect(ours - same <= 100 and same - plain <= 250, text)
    return text


def distinct(count: int) -> onnx.ModelProto:
    """A chain of nodes, each with a kernel text of its own."""
    model = make.chain(with_images(make.add_one()), count)
    for number, node in enumerate(model.graph.node):
        for attribute in node.attribute:
            if attribute.name == "source":
                attribute.s = f"// kernel {number}\n{make.ADD_ONE}".encode()
    return model


def cold_start() -> str:
    """A session with 20 distinct kernels: at most 10 s more with an empty cache, 0.5 s more with a warm one."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "model.onnx", Path(folder) / "cache"
        onnx.save(distinct(20), path)
        plain = min(child("plain", path, 20, cache) for _ in range(2)) if not REHEARSAL else 0.0
        cold = child("registered", path, 20, cache)
        entries = len(list(cache.glob("*/*.cubin")))
        warm = min(child("registered", path, 20, cache) for _ in range(2))
    text = f"plain {plain:.2f} s, cold {cold:.2f} s, warm {warm:.2f} s"
    expect(REHEARSAL or entries == 20, entries, "entries in the cache", text)
    expect(cold - plain <= 10 and warm - plain <= 0.5, text)
    return text
