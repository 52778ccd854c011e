"""Runs a whole launch plan in the emulator, as the native library does on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.machine import Argument, Emulator, Order
from onnxfuse.emulator.memory import CANARY, Array, Buffer, Placement
from onnxfuse.emulator.routines import call
from onnxfuse.lowering.launch import LaunchPlan, Situation, Step, Variant
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.lowering.tensor_map import TYPES, TensorMap

Hosts = Sequence["Sequence[int] | Array | None"]

_SECOND_POISON = 0x5A
_SCRATCH_POISON = 0xFF


def element_type(dtype: int) -> np.dtype[Any]:
    """The NumPy type of a ``TensorProto.DataType``; ``ml_dtypes.bfloat16`` for bfloat16."""
    kind: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    return np.dtype(ml_dtypes.bfloat16) if dtype == TensorProto.BFLOAT16 else kind


def run_plan(
    plan: LaunchPlan,
    source: str,
    inputs: Sequence[Array],
    hosts: Hosts = (),
    variant: str | int | None = None,
    sm: int = 90,
    *,
    order: Order = "forward",
    misalign: Mapping[int, int] | None = None,
    includes: Sequence[Path] = (),
    multiprocessors: int = 132,
    shared: Mapping[int, int] = MappingProxyType({}),
) -> list[Array]:
    """Evaluate the plan for these inputs, launch its steps and return the outputs.

    Args:
        source: the text of the plan's kernels.
        inputs: the tensor inputs.
        hosts: the host inputs; None for one that is absent.
        variant: name or number of the variant to force; by default the first whose guards hold.
        sm: the compute capability that the plan sees.
        order: in which order threads take turns.
        misalign: by number of an input, elements that its address is past a multiple of 16 bytes.
        includes: folders of headers that the text includes, if any.
        multiprocessors: those that the plan sees.
        shared: by number of an output, the input whose memory it is, as a caller may bind it; of the same bytes.

    Raises:
        EmulatorError: the plan does not fit the inputs, a check or the forced variant's guards do not hold, a launch
            went wrong, or an element of an output was left unwritten.
    """
    misalign = misalign or {}
    situation, shapes = situate(plan, inputs, hosts, sm, misalign, shared)
    situation.multiprocessors = multiprocessors
    chosen = _choose(plan, situation, variant)
    run = partial(_run, plan, _emulator(source, tuple(includes)), inputs, situation, shapes, chosen, order=order,
                  misalign=misalign, shared=shared)
    outputs = run(poison=CANARY)
    suspicious = [_poisoned(output, CANARY) for output in outputs]
    if any(mask.any() for mask in suspicious):
        # A value may look like the poison; what was never written looks like another poison too.
        for number, (mask, output) in enumerate(zip(suspicious, run(poison=_SECOND_POISON), strict=True)):
            unwritten = np.argwhere(mask & _poisoned(output, _SECOND_POISON))
            if len(unwritten):
                raise EmulatorError(
                    f"region {plan.region}, variant {chosen.name}: {len(unwritten)} of {output.size} elements of "
                    f"output {number} were not written, the first at {tuple(map(int, unwritten[0]))}")
    return outputs


@lru_cache(maxsize=64)
def _emulator(source: str, includes: tuple[Path, ...]) -> Emulator:
    """A text's kernels; most texts run many times, in other variants and on other inputs."""
    return Emulator(source, includes)


def situate(
    plan: LaunchPlan, inputs: Sequence[Array], hosts: Hosts, sm: int, misalign: Mapping[int, int],
    shared: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Situation, list[tuple[int, ...]]]:
    """What the plan's atoms mean, and the outputs' shapes."""
    if len(inputs) != plan.inputs:
        raise EmulatorError(f"region {plan.region} has {plan.inputs} tensor inputs, not {len(inputs)}")
    situation = Situation(
        [array.shape for array in inputs],
        [[] if host is None else [int(value) for value in np.asarray(host).reshape(-1)] for host in hosts],
        [_apart(number, _placement(array, misalign.get(number, 0))) for number, array in enumerate(inputs)],
        sm=sm,
    )
    try:
        situation.bind(plan)
    except ValueError as error:
        raise EmulatorError(f"region {plan.region}: {error}") from error
    shapes = [tuple(situation.evaluate(size) for size in output.shape) for output in plan.outputs]
    for number, shape in enumerate(shapes):
        if any(size < 0 for size in shape):
            raise EmulatorError(f"region {plan.region}: output {number} cannot have shape {shape}")
    places = [Placement(prod(shape) * element_type(output.dtype).itemsize)
              for output, shape in zip(plan.outputs, shapes, strict=True)]
    situation.output_addresses = [
        situation.input_addresses[shared[number]] if number in shared else _apart(len(inputs) + number, place)
        for number, place in enumerate(places)]
    for number, given in shared.items():
        if places[number].size != inputs[given].nbytes:
            raise EmulatorError(f"region {plan.region}: output {number} has not the bytes of input {given}")
    return situation, shapes


def _apart(number: int, place: Placement) -> int:
    """An address for a plan to see, of so manieth a buffer: no two are the same."""
    return (number + 1 << 40) + place.address


def _placement(array: Array, elements: int) -> Placement:
    return Placement(array.nbytes, elements * array.itemsize)


def holds(variant: Variant, situation: Situation) -> bool:
    return all(situation.evaluate(guard) for guard in variant.guards)


def _choose(plan: LaunchPlan, situation: Situation, wanted: str | int | None) -> Variant:
    if wanted is None:
        for variant in plan.variants:
            if holds(variant, situation):
                return variant
        raise EmulatorError(f"region {plan.region}: no variant's guards hold")
    named = [v for number, v in enumerate(plan.variants) if wanted in (v.name, number)]
    if not named:
        raise EmulatorError(f"region {plan.region} has no variant {wanted!r}")
    for guard in named[0].guards:
        if not situation.evaluate(guard):
            raise EmulatorError(f"region {plan.region}, variant {named[0].name}: the guard {guard!r} does not hold")
    return named[0]


def _run(
    plan: LaunchPlan,
    emulator: Emulator,
    inputs: Sequence[Array],
    situation: Situation,
    shapes: Sequence[tuple[int, ...]],
    variant: Variant,
    *,
    order: Order,
    misalign: Mapping[int, int],
    shared: Mapping[int, int],
    poison: int,
) -> list[Array]:
    """Launch the variant's steps over outputs filled with ``poison``, but for those that are an input's memory."""
    with ExitStack() as stack:
        buffers: dict[str, Buffer] = {}
        for number, array in enumerate(inputs):
            offset = misalign.get(number, 0) * array.itemsize
            buffer = stack.enter_context(Buffer(f"input i{number}", array.nbytes, None, offset))
            buffer.write(array, read_only=number not in shared.values())
            buffers[f"i{number}"] = buffer
        types = [element_type(output.dtype) for output in plan.outputs]
        for number, (kind, shape) in enumerate(zip(types, shapes, strict=True)):
            if number in shared:
                buffers[f"o{number}"] = buffers[f"i{shared[number]}"]
                continue
            size = prod(shape) * kind.itemsize
            buffers[f"o{number}"] = stack.enter_context(Buffer(f"output o{number}", size, poison))
        for number, text in enumerate(plan.scratch):
            size = situation.evaluate(text)
            buffers[f"t{number}"] = stack.enter_context(Buffer(f"scratch t{number}", size, _SCRATCH_POISON))
        for step in variant.steps:
            if isinstance(step, LibraryCall):
                call(step, buffers, [situation.evaluate(size) for size in step.sizes])
                continue
            if step.dependent or (step.cluster or ())[1:] not in ((), ("1", "1")):
                raise EmulatorError(f"region {plan.region}: a step asks for what is not emulated: {step}")
            _launch(plan, emulator, step, buffers, situation, order)
        return [buffers[f"o{number}"].read(kind, shape)
                for number, (kind, shape) in enumerate(zip(types, shapes, strict=True))]


def _launch(
    plan: LaunchPlan, emulator: Emulator, step: Step, buffers: Mapping[str, Buffer], situation: Situation, order: Order
) -> None:
    """A step's launch; none where its grid has no block."""
    grid, block = ([situation.evaluate(size) for size in sizes] for sizes in (step.grid, step.block))
    if 0 in grid:
        return
    arguments = [
        _encoded(plan.maps[int(text[1:])], buffers, situation) if text.startswith("m") else
        _argument(text, buffers, situation) for text in step.arguments]
    cluster = 1 if step.cluster is None else situation.evaluate(step.cluster[0])
    emulator.launch(step.kernel, grid, block, arguments, situation.evaluate(step.shared), order, cluster=cluster)


def _argument(text: str, buffers: Mapping[str, Buffer], situation: Situation) -> Argument:
    kind, colon, size = text.partition(":")
    if not colon:
        if text not in buffers:
            raise EmulatorError(f"the plan passes {text!r}, which it does not have")
        return buffers[text]
    if kind not in ("i32", "i64"):
        raise EmulatorError(f"the plan passes {text!r}; integers are i32 or i64")
    value = situation.evaluate(size)
    bits = int(kind[1:])
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise EmulatorError(f"the plan passes {value}, which {text!r} cannot hold")
    return np.int32(value) if bits == 32 else np.int64(value)


def _encoded(tensor_map: TensorMap, buffers: Mapping[str, Buffer], situation: Situation) -> bytes:
    """A tensor map as the emulator's ``TensorMap``.

    Raises:
        EmulatorError: the driver would refuse it, or the emulator does not know what it asks for.
    """
    if tensor_map.interleave or tensor_map.element_strides[0] != 1:
        raise EmulatorError(f"a tensor map asks for what is not emulated: {tensor_map}")
    element, _ = TYPES[tensor_map.dtype]
    address = buffers[tensor_map.base].address
    sizes = [situation.evaluate(size) for size in tensor_map.sizes]
    strides = [situation.evaluate(stride) for stride in tensor_map.strides]
    possible = all(0 <= stride < 2**40 and stride % 16 == 0 for stride in strides)
    if address % 16 or not possible or not all(1 <= size <= 2**31 for size in sizes):
        raise EmulatorError(f"no tensor map has address {address:#x}, sizes {sizes} and strides {strides}")

    def five(values: Sequence[int]) -> list[int]:
        return [*values, *[1] * (5 - len(values))]

    copied = [-(-extent // step) for extent, step in zip(tensor_map.box, tensor_map.element_strides, strict=True)]
    return struct.pack(
        "<Q5Q5Q5I3B5B", address, *five(sizes), *five([element, *strides]), *five(copied), len(sizes),
        tensor_map.swizzle, tensor_map.dtype == "tfloat32", *five(tensor_map.element_strides))


def _poisoned(array: Array, poison: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which elements are wholly made of the poison's byte."""
    whole = np.dtype(f"u{array.itemsize}")
    return np.asarray(array.view(whole) == whole.type(int.from_bytes(bytes([poison]) * array.itemsize, "little")))
