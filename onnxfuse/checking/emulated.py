"""A kernel runner without a GPU: launch plans in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.emulator import EmulatorError, run_plan
from onnxfuse.errors import KernelError
from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.device_arrays import Values
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.extents import Extents, extents
from onnxfuse.verifying.runner import holding_variants, host_values, tensors

Array = NDArray[Any]

MULTIPROCESSORS = 132
"""Of the GPU that launch plans see: an H100's."""


class EmulatedRunner:
    """Runs kernel text on the CPU: a ``verifying.runner.KernelRunner``.

    Args:
        sm: the compute capability that launch plans see, as 90.
    """

    name = "the CPU emulator"
    providers: Sequence[Any] = CPU
    workers = 1
    most = 0

    def __init__(self, sm: int = 90) -> None:
        self.sm = sm

    def alive(self) -> bool:
        """See ``KernelRunner``; a launch that went wrong leaves nothing behind."""
        return True

    def has_room(self, needed: int) -> bool:
        """See ``KernelRunner``: kernels run on the CPU, which has other things to do."""
        return False

    def begin(self) -> None:
        """See ``KernelRunner``; there is nothing to begin with."""

    def prepare(self, model: onnx.ModelProto) -> None:
        """See ``KernelRunner``; texts are compiled when they are first run."""

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        """See ``KernelRunner``."""
        hosts = [np.array(numbers, np.int64) for numbers in host_values(feeds)]
        try:
            return run_plan(node.plan, node.source, tensors(feeds), hosts, variant, self.sm)
        except EmulatorError as error:
            raise KernelError(str(error)) from error

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        """See ``KernelRunner``: the CPU provider runs the original's nodes."""

    def exact(self, node: FusedNode, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        """See ``KernelRunner``: references are the CPU provider's."""

    def forget(self) -> None:
        """See ``KernelRunner``."""

    def measure(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> Extents:
        """See ``KernelRunner``."""
        return extents(got, reference, own, types)

    def variants(self, plan: LaunchPlan, feeds: Mapping[str, Array]) -> list[int]:
        """See ``KernelRunner``; all memory is aligned."""
        return holding_variants(plan, feeds, self.sm, MULTIPROCESSORS)
