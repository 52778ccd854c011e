"""The models of the zoo with weights, fused at the sizes of their rows, and kernels that are run on the emulator."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from emulated import EmulatedRunner, FaultyRunner
from numpy.typing import NDArray
from quick_compiler import quickly

from onnxfuse.errors import KernelError
from onnxfuse.graph import bind
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.known import KnownKernels
from onnxfuse.rewriting import FusedNode, planned_form, read_fused
from onnxfuse.runtime.compile import architectures, compile_cubin
from onnxfuse.verifying import RunInputs
from onnxfuse.verifying.capture import Source, capture
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import sharing

Array = NDArray[Any]

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
FOLDER = BENCHMARKS / "zoo"
ZOO: dict[str, dict[str, Any]] = json.loads((FOLDER / "zoo.json").read_text())
MODELS = sorted(ZOO, key=lambda name: -ZOO[name]["nodes"])
"""Names, those that take longest first."""
LATER = frozenset(name for name, entry in ZOO.items() if not entry.get("in_mean", True))
"""Those that the first ones stand for where time is short."""

TARGET = "H100"
MANY_BYTES = 100_000_000

SMALL = {1: (1,), 2: (2, 24)}
"""Sizes to run at on the CPU, by the number of symbolic axes."""
OWN_SIZES = {"llama_fp16": (1, 24), "llama_decode_fp16": (1, 1, 24), "tower_fp32": (24,)}


def script(path: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hydrating = script(FOLDER / "hydrate.py")


@dataclass(frozen=True)
class Sized:
    """A model fused for one row of the zoo; ``seconds`` of CPU time it took, loading included."""

    dims: Mapping[str, int]
    optimised: Optimised
    seconds: float


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo; ``path`` is its file with weights, ``kernels`` what is known from one plan to the next."""

    name: str
    path: Path
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False, compare=False)

    @classmethod
    def hydrate(cls, name: str, folder: Path) -> ZooModel:
        """Write the model's file into a folder; the same bytes each time.  Weights of more than ``MANY_BYTES`` lie in a
        file beside it, so that they are neither copied nor compared wherever the model is."""
        path = folder / f"{name}.onnx"
        made = hydrating.hydrate(FOLDER / f"{name}.onnx.xz")
        beside = sum(len(tensor.raw_data) for tensor in made.graph.initializer) > MANY_BYTES
        onnx.save(made, path, save_as_external_data=beside, location=f"{name}.weights")
        return cls(name, path)

    def dims(self, sizes: Sequence[int]) -> dict[str, int]:
        """Sizes of the symbols, given by the place of the axis."""
        return {size: sizes[axis] for spec in ZOO[self.name]["inputs"].values()
                for axis, size in enumerate(spec["shape"]) if isinstance(size, str)}

    @cached_property
    def rows(self) -> tuple[Sized, ...]:
        """The model fused for each of its rows."""
        return tuple(self.fused(self.dims(sizes)) for sizes in ZOO[self.name]["sizes"])

    def fused(self, dims: Mapping[str, int]) -> Sized:
        """The model fused without verification."""
        # CPU time of the one thread that works, because others may keep the machine busy.
        start = time.process_time()
        optimised = optimise(self.path, Options(dims=dims, target=TARGET, verify=False, kernels=self.kernels))
        return Sized(dims, optimised, time.process_time() - start)

    @property
    def small(self) -> tuple[int, ...]:
        """Sizes to run at on the CPU, by the place of the axis."""
        return OWN_SIZES.get(self.name) or SMALL[len(ZOO[self.name]["sizes"][0])]

    def feeds(self) -> dict[str, Array]:
        """Inputs of the small sizes; the last quarter of each mask's last row is masked."""
        made: dict[str, Array] = hydrating.feeds(ZOO[self.name], self.small)
        for name, array in made.items():
            if "mask" in name:
                array[-1, -(array.shape[1] // 4):] = 0
        return made


def distinct(models: Sequence[Optimised]) -> dict[str, tuple[Optimised, FusedNode]]:
    """By kernel text, the first fused node that has it and its model."""
    found: dict[str, tuple[Optimised, FusedNode]] = {}
    for model in models:
        for node in read_fused(model.model):
            found.setdefault(node.source, (model, node))
    return found


def compile_failures(kernels: Mapping[str, tuple[str, Sequence[str]]], every: bool = False) -> list[str]:
    """Kernels that do not compile, with the compiler's log.

    Args:
        kernels: by text, what to call it and its plan's compiler options.
        every: compile for every architecture, with all optimisation; else every other one for the oldest, which lacks
            what others have, and the rest for one of these in turn: texts differ less between architectures than from
            each other.
    """

    def attempt(text: str, architecture: int) -> str | None:
        name, options = kernels[text]
        try:
            image = compile_cubin(text, f"sm_{architecture}", options)
        except KernelError as error:
            return f"{name}: {error}"
        return None if image[:4] == b"\x7fELF" else f"{name}: no image for sm_{architecture}"

    oldest, *others = architectures()
    jobs = [(text, architecture) for place, text in enumerate(kernels)
            for architecture in (architectures() if every else
                                 (others[place // 2 % len(others)] if place % 2 else oldest,))]
    with nullcontext() if every else quickly(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [failure for failure in pool.map(lambda job: attempt(*job), jobs) if failure is not None]


def captured(model: Optimised, nodes: Sequence[FusedNode], run: Mapping[str, Array], dims: Mapping[str, int]
             ) -> Iterator[tuple[FusedNode, dict[str, Array]]]:
    """What nodes read when ONNX Runtime's CPU provider runs the original on these inputs."""
    loaded = planned_form(model.loaded, model.model)
    with sharing(loaded, model.model) as (original, _):
        sizes = bind(model.graph, dims)
        source = Source(loaded, model.graph, Run(RunInputs("made"), dict(run)))
        for taken in capture(nodes, source, original, sizes, CPU):
            yield taken.node, dict(taken.feeds)


@dataclass
class Emulation:
    """Kernels of one model against their bodies in float64, and against themselves with a fault of one percent.

    Every variant that holds runs on the inputs given, the first of them on edge inputs too (``verifying.feeds``).
    Tolerances are those of ``verifying.tolerances``.
    """

    right: NodeVerifier
    wrong: NodeVerifier

    @classmethod
    def of(cls, model: Optimised) -> Emulation:
        right, wrong = NodeVerifier(model.model, EmulatedRunner()), NodeVerifier(model.model, FaultyRunner())
        wrong._references = right._references  # A body's sessions take longer to make than to run.
        return cls(right, wrong)

    def failures(self, node: FusedNode, feeds: Mapping[str, Array]) -> list[str]:
        """What is wrong with a kernel, and whether its fault is missed."""
        shapes = {name: (str(array.dtype), array.shape) for name, array in feeds.items()}
        about = f"{node.name} ({node.rule}, {shapes})"
        result = self.right.verify(node, feeds, "given")
        if result.verdict != "passed":
            return [f"{about}: {result.verdict}: {result.message}"]
        result = self.wrong.verify(node, feeds, "given")
        told = f"{about}: a fault of one percent is {result.verdict}: {result.message}"
        return [] if result.verdict == "failed" else [told]


def bits(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    """An array's type, shape and bytes."""
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()
