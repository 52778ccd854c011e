"""A kernel runner without a GPU: the launch plan in the emulator, the original's own result from the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from emulator import Emulator, EmulatorError, run_plan
from numpy.typing import NDArray
from planted import HEADERS, THREADS, fault

from onnxfuse.errors import KernelError
from onnxfuse.lowering.launch import HOST_INPUTS, LaunchPlan
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.runner import holding_variants, host_values, tensors

Array = NDArray[Any]


class EmulatedRunner:
    """Runs kernel text on the CPU; counts its runs by node."""

    name = "the CPU emulator"
    providers: Sequence[Any] = ("CPUExecutionProvider",)

    def __init__(self, sm: int = 90) -> None:
        self.sm = sm
        self.runs: dict[str, int] = {}

    def alive(self) -> bool:
        return True

    def prepare(self, model: onnx.ModelProto) -> None:
        pass

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        self.runs[node.name] = self.runs.get(node.name, 0) + 1
        hosts = [feeds.get(f"h{place}") for place in range(HOST_INPUTS)]
        try:
            return run_plan(node.plan, node.source, tensors(feeds), hosts, variant, self.sm)
        except EmulatorError as error:
            raise KernelError(str(error)) from error

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        return None

    def variants(self, plan: LaunchPlan, feeds: Mapping[str, Array]) -> list[int]:
        assert len(host_values(feeds)) == HOST_INPUTS
        return holding_variants(plan, feeds, self.sm, 132)


class FaultyRunner(EmulatedRunner):
    """Spoils every output behind the kernel, by a hundredth.

    The fault is a launch of its own, as ``planted.plant`` plants it in a model, but of a text of its own: one for each
    element type in place of each kernel's text once more, most of whose time is its compilation.
    """

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        outputs = super().kernel(node, model, feeds, variant)
        for output, array in zip(node.plan.outputs, outputs, strict=True):
            if array.size:
                name, text = fault(output.dtype)
                Emulator(HEADERS + text).launch(name, -(-array.size // THREADS), THREADS, [array, array.size])
        return outputs
