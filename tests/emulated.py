"""Kernel runners without a GPU: the library's own, which counts here, and one whose kernels are at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from emulator import Emulator
from numpy.typing import NDArray
from planted import HEADERS, THREADS, fault

from onnxfuse.checking.emulated import EmulatedRunner as PlainRunner
from onnxfuse.lowering.launch import HOST_INPUTS, LaunchPlan
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.runner import host_values

Array = NDArray[Any]


class EmulatedRunner(PlainRunner):
    """Runs kernel text on the CPU; counts its runs by node."""

    def __init__(self, sm: int = 90) -> None:
        super().__init__(sm)
        self.runs: dict[str, int] = {}

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        self.runs[node.name] = self.runs.get(node.name, 0) + 1
        return super().kernel(node, model, feeds, variant)

    def variants(self, plan: LaunchPlan, feeds: Mapping[str, Array]) -> list[int]:
        assert len(host_values(feeds)) == HOST_INPUTS
        return super().variants(plan, feeds)


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
