"""A timer without a GPU: times are what the test says, results are made up; a GPU on which attention was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper
from unmeasured import measured

from onnxfuse.errors import KernelError
from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.measurements import environment_of
from onnxfuse.measuring.database import Environment
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.runtime.compile import KernelSource
from onnxfuse.tuning import Timed
from onnxfuse.verifying.given_biases import with_biases

Array = NDArray[Any]

OWN = "the schedule's own choice"
RUNTIME = "runtime"

PRODUCT = ("product", "gemm", "conv")
"""What names of kernels of products, and of routines of a library for them, begin with."""

MANY = 1 << 20
"""Elements of all inputs from which on nodes are not run."""


@dataclass
class FakeTimer:
    """Asks ``microseconds`` what a candidate takes: "runtime" for the original nodes, else the first variant's kernel.

    ``wrong`` and ``broken`` name kernels whose result is wrong and which do not run; ``timed`` counts what was timed.
    The original nodes are run by ONNX Runtime on the CPU, large ones loaded alone, so that one that it refuses shows.
    """

    microseconds: Callable[[str], float]
    wrong: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    environment: Environment = field(default_factory=lambda: environment_of("NVIDIA H100 80GB HBM3"))
    timed: list[str] = field(default_factory=list)
    compiled: list[KernelSource] = field(default_factory=list)
    interrupt_after: int | None = None
    feeds: dict[str, Array] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    living: bool = True
    provider_options: Mapping[str, str] = field(default_factory=dict)

    def compile(self, kernels: Sequence[KernelSource]) -> None:
        self.compiled += kernels

    @contextlib.contextmanager
    def bench(self, feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None,
              bound: Mapping[str, str] | None = None) -> Iterator[FakeTimer]:
        self.feeds, self.bound = dict(feeds), dict(bound or {})
        yield self

    def alive(self) -> bool:
        return self.living

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        if self.interrupt_after is not None and len(self.timed) >= self.interrupt_after:
            raise KeyboardInterrupt
        onnx.checker.check_model(model)
        name = RUNTIME if not fused else first_kernel(model)
        self.timed.append(name)
        if name in self.broken:
            raise KernelError("too many registers")
        if not fused:
            raw = with_biases(model).SerializeToString()
            session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
            if sum(array.size for array in self.feeds.values()) < MANY:
                session.run(None, self.feeds)
        outputs = {info.name: made_up(info, 1 + (name in self.wrong)) for info in model.graph.output}
        return Timed(self.microseconds(name), 0.1, 24, outputs)


def first_kernel(model: onnx.ModelProto) -> str:
    """The kernel that the model's one node runs first, or the routine of a library and the rank of its algorithm."""
    (node,) = model.graph.node
    attributes = {attribute.name: attribute for attribute in node.attribute}
    plan = LaunchPlan.from_json(attributes["plan"].s.decode())
    step = plan.variants[0].steps[0]
    if isinstance(step, LibraryCall):
        return f"{step.routine} {step.sizes[-1]}"
    assert step.kernel in attributes["source"].s.decode()
    return step.kernel


def made_up(info: onnx.ValueInfoProto, number: int) -> Array:
    kind = info.type.tensor_type
    shape = [size.dim_value for size in kind.shape.dim]
    return np.full(shape, number, helper.tensor_dtype_to_np_dtype(kind.elem_type))


class PricedTimer(FakeTimer):
    """Says what the runtime takes for the nodes of these operators, 50 for others; ``kernel``: what kernels take, by
    their schedules where they differ."""

    def __init__(self, runtime: Mapping[tuple[str, ...], float], kernel: float | Mapping[str, float]) -> None:
        super().__init__(lambda name: kernel.get(name.split("_")[0], 50.0) if isinstance(kernel, Mapping) else kernel)
        self.runtime = runtime

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        timed = super().time(model, fused=fused)
        operators = tuple(node.op_type for node in model.graph.node)
        return timed if fused else replace(timed, microseconds=self.runtime.get(operators, 50.0))


def attentive(tflops: float = 300.0) -> Profile:
    """A GPU on which attention was measured, and no product."""
    return measured(tile_tflops=None, attention_tflops=tflops)
