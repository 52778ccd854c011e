"""References in float64 by the CUDA provider, left on the GPU for results to be compared there.

Predicted for a norm of 33 million elements: some 20 passes over 270 MB of float64, 4 ms where the CPU takes a second,
and nothing to copy there but inputs as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from onnxfuse.errors import KernelError
from onnxfuse.measuring.machine import Memory
from onnxfuse.rewriting import value_types
from onnxfuse.verifying.device_arrays import TURN, DeviceArray
from onnxfuse.verifying.device_bodies import FINITE
from onnxfuse.verifying.device_inputs import DeviceInputs
from onnxfuse.verifying.device_values import HOST
from onnxfuse.verifying.evaluate import (
    CPU,
    Kind,
    exact_options,
    kind_of,
    opsets_of,
    probe_model,
    with_plain_borders,
)
from onnxfuse.verifying.tolerances import WIDTHS

Array = NDArray[Any]

LEAST_ELEMENTS = 1 << 20
"""Read and written: of fewer the CPU provider has computed a reference before a session is there."""

SHARE = 4
"""One part in so many of the memory that is free may be a reference's: kernels need the rest."""

_CUDA = "CUDAExecutionProvider"
_NO_CPU = ("session.disable_cpu_ep_fallback", "1")
"""Setting of a session whose nodes may not run on the CPU."""


class DeviceReferences:
    """Runs ``device_bodies`` one after another, and holds the session and inputs of one of them.

    Args:
        device: the GPU's number; memory: where tensors lie, in ONNX Runtime's words.
        known: which kinds of nodes the provider has, to be added to; others may share it.
    """

    def __init__(self, device: int = 0, memory: str = "cuda", known: dict[Kind, bool] | None = None) -> None:
        self._device, self._where = device, memory
        self._known: dict[Kind, bool] = {} if known is None else known
        self._refused: set[bytes] = set()
        self._session: tuple[bytes, Any] = b"", None
        self._inputs = DeviceInputs(device, memory)

    def outputs(self, model: onnx.ModelProto, feeds: Mapping[str, Array], shapes: Sequence[tuple[int, ...]]
                ) -> list[DeviceArray] | None:
        """What a body gives; None where that is the CPU provider's to say.

        Args:
            model: of ``device_body``; shapes: of its outputs.

        Raises:
            KernelError: the session cannot be made or run, as where memory lacks; it is not tried again.
        """
        elements = sum(feeds[info.name].size for info in model.graph.input) + sum(map(math.prod, shapes))
        if elements < LEAST_ELEMENTS:
            return None
        most = self.free_bytes() // SHARE
        if elements * np.dtype(np.float64).itemsize > most:
            return None
        raw = model.SerializeToString(deterministic=True)
        if raw in self._refused:
            return None
        try:
            return self._outputs(model, raw, feeds, most)
        except Exception as error:  # ONNX Runtime has an exception type per status
            self._refused.add(raw)
            self.forget()
            raise KernelError(f"the original nodes do not run in float64 on the GPU: {error}") from error

    def forget(self) -> None:
        """Hold no session and no inputs."""
        self._session = b"", None
        self._inputs.forget()

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        from onnxfuse.measuring.driver import device

        return device(self._device).free_bytes()

    def start(self, raw: bytes, most: int, alone: bool) -> Any:
        """A session that may hold so many bytes; ``alone``: all nodes must run on the GPU."""
        options = exact_options(1)
        if alone:
            options.add_session_config_entry(*_NO_CPU)
        # Nothing is rounded to TF32; the arena grows by what is asked for, not by powers of two.
        settings = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": str(most),
                    **({"device_id": self._device} if self._device else {})}
        return onnxruntime.InferenceSession(raw, options, enable_fallback=0,
                                            providers=[(_CUDA, settings), *([] if alone else CPU)])

    def _outputs(self, model: onnx.ModelProto, raw: bytes, feeds: Mapping[str, Array], most: int
                 ) -> list[DeviceArray] | None:
        known, session = self._session
        if fresh := known != raw:
            self.forget()
            session = self._made(model, most)
            self._session = raw, session
        binding = session.io_binding()
        for info in model.graph.input:
            held = self._inputs.placed(info.name, feeds[info.name], info.type.tensor_type.elem_type)
            binding.bind_ortvalue_input(held.name, held.value)
        for info in model.graph.output:
            binding.bind_output(info.name, *([HOST] if info.name == FINITE else [self._where, self._device]))
        with TURN:  # not for copies and sessions, which end no device
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        *results, finite = binding.get_outputs()
        if finite.numpy() != 0:
            if fresh:  # of the inputs of a run, as where a mask is infinite: edges of them will hardly do better
                self._refused.add(raw)
            return None
        return [DeviceArray(value, self._memory, value.data_ptr(), tuple(value.shape())) for value in results]

    @cached_property
    def _memory(self) -> Memory:
        from onnxfuse.measuring.machine import HostMemory, find_machine

        return HostMemory() if self._where == HOST else find_machine(self._device).memory()

    def _made(self, model: onnx.ModelProto, most: int) -> Any:
        """The session of a body.

        Raises:
            KernelError: the provider lacks an operator in float64.
        """
        if lacking := self._lacking(model, most):
            raise KernelError(f"there is no kernel for {', '.join(lacking)}")
        return self.start(with_plain_borders(model).SerializeToString(), most, alone=False)

    def _lacking(self, model: onnx.ModelProto, most: int) -> list[str]:
        """Operators of floats for which the provider has no kernel: ONNX Runtime would run them on the CPU, between
        copies.  All that are not known yet are tried together, and one by one where that fails."""
        types, opsets = value_types(model), opsets_of(model)
        kinds = {
            kind_of(node, types, opsets): node.op_type for node in model.graph.node
            if node.op_type != "Constant" and any(types.get(name) in WIDTHS for name in (*node.input, *node.output))
        }
        fresh = [kind for kind in kinds if kind not in self._known]
        together = self._has(fresh, most)
        self._known |= {kind: together or self._has([kind], most) for kind in fresh}
        return sorted({op for kind, op in kinds.items() if not self._known[kind]})

    def _has(self, kinds: Sequence[Kind], most: int) -> bool:
        """Whether the provider has the operators of these kinds."""
        try:
            return not kinds or bool(self.start(probe_model(kinds).SerializeToString(), most, alone=True))
        except Exception:  # an operator that is missing is known by nothing else
            return False
