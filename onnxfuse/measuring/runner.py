"""A session with its inputs and outputs bound to the device, ready to be run again and again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.cuda_options import PlannedOtherwiseWarning
from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.graph import load_model
from onnxfuse.measuring.machine import Machine, Placed, as_array
from onnxfuse.runtime import session as fused_session
from onnxfuse.runtime.words import runtime_words
from onnxfuse.wording import option

QUIET = 4
"""Severity of messages that sessions print: what ends the process; all else is an exception as well."""


CUDA_GRAPH = "enable_cuda_graph"
"""The provider's option by which runs after the first few replay a CUDA graph."""

NO_CAPTURE = "cannot use the graph capture feature"
"""What ONNX Runtime says of a model that does not run on the GPU as a whole."""


def create_session(path: str, machine: Machine, options: Mapping[str, str], *, fused: bool) -> tuple[Any, float]:
    """An ONNX Runtime session, and the seconds that creating it took.

    Raises:
        ModelError: ONNX Runtime refuses the model, or cannot start the provider.
        OnnxfuseError: the kernels cannot be had.
    """
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = QUIET
    providers = machine.providers(options)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlannedOtherwiseWarning)  # a note of the measurement says it
            session: Any = (
                fused_session(path, providers, settings) if fused
                else onnxruntime.InferenceSession(path, settings, providers=providers, enable_fallback=0)
            )
    except OnnxfuseError:
        raise
    except Exception as error:  # ONNX Runtime has an exception type per status, all of them plain
        load_model(path)  # a file that is no model is said to be none
        raise ModelError(f"ONNX Runtime refuses the model: {runtime_words(error)}", place=path) from error
    seconds = time.perf_counter() - start
    if machine.provider not in session.get_providers():
        raise ModelError(
            f"ONNX Runtime could not start {machine.provider}.", place=path,
            remedy="Install what it needs: pip install 'onnxfuse[cuda]'.",
        )
    return session, seconds


def _session(path: str, machine: Machine, options: Mapping[str, str], *, fused: bool) -> tuple[Any, float, bool]:
    """A session, the seconds that creating it took, and whether it was refused a CUDA graph and is without."""
    try:
        return *create_session(path, machine, options, fused=fused), False
    except ModelError as error:
        if CUDA_GRAPH not in options or NO_CAPTURE not in str(error.__cause__ or error):
            raise
    plain = {name: value for name, value in options.items() if name != CUDA_GRAPH}
    return *create_session(path, machine, plain, fused=fused), True


class Runner:
    """One model at work.

    Attributes:
        creation_seconds: what creating the session took.
        uncaptured: whether a CUDA graph was wanted and ONNX Runtime refused it: it has nodes on the CPU.
    """

    def __init__(
        self,
        path: str | Path,
        machine: Machine,
        inputs: Mapping[str, NDArray[Any] | Placed],
        options: Mapping[str, str],
        *,
        fused: bool,
        together: Mapping[str, str] | None = None,
    ) -> None:
        """Create the session and run it once.

        Args:
            path: the model; ``fused``: whether its fused nodes run as kernels.
            inputs: arrays, or where they lie on the device.
            options: of the CUDA provider.
            together: outputs that are written to the memory of an input, by its name; of the same type and sizes.

        Raises:
            ModelError: ONNX Runtime refuses the model or the inputs.
            OnnxfuseError: the kernels cannot be had.
        """
        self.path = str(path)
        self._machine, self._together = machine, together or {}
        self.session, self.creation_seconds, self.uncaptured = _session(self.path, machine, options, fused=fused)
        self._memory = machine.memory()
        self.outputs = [output.name for output in self.session.get_outputs()]
        self._check_names(inputs)
        self._shapes = ", ".join(f"{name}[{'x'.join(map(str, array.shape))}]" for name, array in inputs.items())
        self.binding = self.bound(inputs)

    def _failed(self, error: Exception) -> ModelError:
        """What ONNX Runtime says of a run, as an error."""
        return ModelError(
            f"ONNX Runtime cannot run the model on {self._shapes}: {runtime_words(error)}", place=self.path,
            remedy=f"Give sizes that it runs at ({option('dim', 'NAME=N')}), or inputs of your own "
                   f"({option('inputs', 'FILE.npz')}).",
        )

    def _check_names(self, inputs: Mapping[str, Any]) -> None:
        """Say so where the model has other inputs: it is another one."""
        names = [each.name for each in self.session.get_inputs()]
        if set(names) != set(inputs):
            raise ModelError(
                f"The model has the inputs {', '.join(names) or 'none'}, and is to run on "
                f"{', '.join(inputs) or 'none'}.",
                place=self.path, remedy="Give a model and its own fused form.",
            )

    def bound(self, inputs: Mapping[str, NDArray[Any] | Placed]) -> Any:
        """``bind``, and what ONNX Runtime says against it as an error.

        Raises:
            ModelError: ONNX Runtime cannot run the model on these inputs.
            OnnxfuseError: they have no room on the device.
        """
        try:
            return self.bind(inputs)
        except OnnxfuseError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def bind(self, inputs: Mapping[str, NDArray[Any] | Placed], outputs: Any = None, *, run: bool = True) -> Any:
        """A binding of inputs, copied to the device unless they lie there, and outputs, at addresses that stay.

        Args:
            outputs: another binding, whose outputs are written; by default the first run allocates new ones.
            run: whether it is run once.
        """
        binding, device = self.session.io_binding(), (self._machine.kind, self._machine.ordinal)
        laid: dict[str, tuple[Any, ...]] = {}
        for name, array in inputs.items():
            placed = array if isinstance(array, Placed) else self._placed(array)
            laid[name] = helper.np_dtype_to_tensor_dtype(placed.dtype), placed.shape, placed.address
            binding.bind_input(name, *device, *laid[name])
        own = {name: laid[given] for name, given in self._together.items() if given in laid}
        if outputs is None:
            for name in self.outputs:
                binding.bind_output(name, *device)
            self.session.run_with_iobinding(binding)
            outputs = binding
        values = outputs.get_outputs()
        for name, value in zip(self.outputs, values, strict=True):
            if name in own:
                binding.bind_output(name, *device, *own[name])
            elif value.is_tensor():
                binding.bind_ortvalue_output(name, value)
        if run:
            self.session.run_with_iobinding(binding)
        return binding

    def _placed(self, array: NDArray[Any]) -> Placed:
        array = np.asarray(array, order="C")
        return Placed(self._memory.place(array), array.dtype, array.shape)

    def run(self) -> None:
        """One run, to its end.

        Raises:
            ModelError: ONNX Runtime failed.
        """
        self.timed()

    def timed(self, binding: Any = None) -> float:
        """Milliseconds of one run, of another binding where one is given.

        Raises:
            ModelError: ONNX Runtime failed.
        """
        start = time.perf_counter()
        try:
            self.session.run_with_iobinding(binding or self.binding)
        except Exception as error:
            raise self._failed(error) from error
        return (time.perf_counter() - start) * 1e3

    def results(self) -> dict[str, NDArray[Any]]:
        """The outputs of the last run that are tensors of numbers."""
        found = {name: as_array(value, self._memory)
                 for name, value in zip(self.outputs, self.binding.get_outputs(), strict=True)}
        return {name: array for name, array in found.items() if array is not None}
