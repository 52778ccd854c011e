"""Who runs a fused node's kernel: the GPU here, an emulator in the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from threading import local
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import KernelError, OnnxfuseError, VerificationError
from onnxfuse.graph.order import all_nodes
from onnxfuse.lowering import launch
from onnxfuse.measuring.machine import Memory, find_machine
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.bounds import OutOfMemoryError
from onnxfuse.verifying.choices import chosen
from onnxfuse.verifying.device_arrays import TURN, DeviceArray, Values, on_host
from onnxfuse.verifying.device_extents import DeviceExtents, source
from onnxfuse.verifying.device_inputs import DeviceInputs
from onnxfuse.verifying.device_references import SHARE, DeviceReferences
from onnxfuse.verifying.device_values import HOST, copied, filled
from onnxfuse.verifying.evaluate import Kind, array_type, exact_options, with_plain_borders
from onnxfuse.verifying.extents import Extents

Array = NDArray[Any]

CUDA = "CUDAExecutionProvider"
_POISON = 0xFF
"""Byte that outputs are filled with before a kernel runs: not a number, minus one, and no boolean."""
_KEPT = 256
"""Sessions of single nodes that are kept."""

_QUICK = {"cudnn_conv_algo_search": "HEURISTIC"}
"""Else every convolution of every session tries all of cuDNN's algorithms first: seconds for each model."""


class KernelRunner(Protocol):
    """Runs kernels and, where it can, the original's nodes on the same device."""

    name: str
    """What it runs on, for the report."""
    providers: Sequence[Any]
    """ONNX Runtime's providers for runs of the original from which inputs are taken."""
    workers: int
    """How many nodes may be verified at one time, each from a thread of its own."""
    most: int
    """Elements of a result up to which ``measure`` goes through all, with a reference on the device, sooner than a
    sample of them is there."""

    def alive(self) -> bool:
        """Whether it can go on after a failed run: a kernel that broke its memory takes the GPU's context along."""
        ...

    def has_room(self, needed: int) -> bool:
        """Whether so many bytes are a small part of the device's memory that is free: something may run beside kernels
        then."""
        ...

    def begin(self) -> None:
        """Called where there is time before there is a model."""
        ...

    def prepare(self, model: onnx.ModelProto) -> None:
        """Called once before a model's nodes are run, in a thread of its own perhaps, which may not have ended when the
        first of them are; a kernel that cannot be had is no error yet."""
        ...

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> Sequence[Values]:
        """The outputs of a node's kernel, left on its device where results are compared there.

        Args:
            node: of ``model``.
            feeds: by formal name.
            variant: which variant of the launch plan, whose guards hold; None for the one that would run.

        Raises:
            KernelError: it cannot be compiled or run.
        """
        ...

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array] | None:
        """The original nodes' outputs, in their own types, on the kernels' device; None where it has no means to.

        Raises:
            KernelError: they cannot be run.
        """
        ...

    def exact(self, node: FusedNode, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[DeviceArray] | None:
        """The outputs in float64 of a node's ``device_body``, left on the kernels' device; None where it has no means
        to, or the CPU provider's are to be taken.

        Raises:
            KernelError: they cannot be computed.
        """
        ...

    def forget(self) -> None:
        """Hold nothing for the next call of ``exact``."""
        ...

    def measure(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> Extents:
        """An ``extents.Measure``."""
        ...

    def variants(self, plan: launch.LaunchPlan, feeds: Mapping[str, Array]) -> list[int]:
        """Variants of a plan whose guards hold for these inputs."""
        ...


class CudaRunner:
    """Kernels through one-node models in ONNX Runtime's CUDA provider, as a deployment runs them."""

    memory = "cuda"
    """Where tensors lie, in ONNX Runtime's words."""
    workers = 3
    """Some make inputs while another's kernel runs; more wait for Python's lock.  By turns a U-Net took 20.6 to 22.4 s
    with two and 19.2 with three on one machine, 12.3 to 14.2 and 12.5 to 12.7 on another
    (benchmarks/results, h100-processes)."""
    most = 1 << 22
    """Predicted: 8 MB of float16 are on the GPU in a millisecond, and what it says of their blocks is read in four; a
    sample is 257 copies from the GPU, and one back."""
    _ended = False

    def __init__(self, device: int = 0, settings: Mapping[str, str] | None = None) -> None:
        """Find the GPU and start ONNX Runtime's CUDA provider on it, with these options of it, and convolutions by the
        algorithms that cuDNN takes for the best where they do not say.

        Raises:
            KernelError: no driver, no such GPU, no compiler or its headers, or a provider that does not start.
        """
        from onnxfuse.measuring.machine import find_machine
        from onnxfuse.runtime import gpus
        from onnxfuse.runtime.nvrtc import headers

        found = gpus()
        if device >= len(found):
            raise KernelError(f"there is no GPU {device}: the driver shows {len(found)}")
        headers()  # without a compiler every kernel would seem wrong
        self.device, self.gpu = device, found[device]
        self.name = self.gpu.name
        self.providers: Sequence[Any] = [(CUDA, options_of(device, settings)), "CPUExecutionProvider"]
        self._one_node = lru_cache(_KEPT)(self._session)
        self._bodies = lru_cache(_KEPT)(self._body_session)
        find_machine(device)  # lets the provider find cuBLAS and cuDNN
        self._probe = self._body_session(_probe_model())
        if self._probe.get_providers()[0] != CUDA:  # all that ONNX Runtime does without them is to warn
            raise KernelError("ONNX Runtime's CUDA provider does not start: its libraries (cuBLAS, cuDNN) are missing",
                              remedy="Install them: pip install 'onnxfuse[cuda]'.")

    def alive(self) -> bool:
        """See ``KernelRunner``."""
        try:
            self._probe.run(None, {"x": np.ones(1, np.float32)})
        except Exception:  # ONNX Runtime has an exception type per status
            return False
        return True

    def has_room(self, needed: int) -> bool:
        """See ``KernelRunner``."""
        return needed <= self._references.free_bytes() // SHARE

    def begin(self) -> None:
        """Compile what looks at large results."""
        with suppress(KernelError):  # NumPy looks at them then
            self._extents.compile()

    def prepare(self, model: onnx.ModelProto) -> None:
        """Compile the model's distinct kernels in parallel, and what looks at large results, into the cache that
        sessions look into."""
        from onnxfuse.runtime.compile import default_compiler
        from onnxfuse.runtime.nodes import kernel_sources

        architecture = self.gpu.architecture
        with suppress(KernelError):  # the node whose kernel does not compile fails with the compiler's words
            default_compiler().images([*kernel_sources(model, architecture), source()], architecture)

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> Sequence[Values]:
        """See ``KernelRunner``; outputs are poisoned before the run where their shape is known and type allows."""
        plan, given = chosen(node, feeds, variant)
        kinds = {name: element_type(array) for name, array in given.items()}
        session = self._made(self._text(node, model, plan, given))
        shapes = output_shapes(node.plan, feeds, self.gpu.capability[0] * 10 + self.gpu.capability[1])
        return self._run(session, given, kinds, [output.dtype for output in node.plan.outputs], shapes)

    def _text(self, node: FusedNode, model: onnx.ModelProto, plan: launch.LaunchPlan, feeds: Mapping[str, Array]
              ) -> bytes:
        """A ``node_model`` as bytes: of this thread's last node not made again, which runs on edge after edge."""
        asked = node, plan, {name: (array.dtype, array.ndim) for name, array in feeds.items()}
        known = self._of_threads.__dict__
        if known.get("model") is not model or known["asked"] != asked:
            known.update(model=model, asked=asked, text=node_model(node, model, plan, feeds).SerializeToString())
        text: bytes = known["text"]
        return text

    def _made(self, raw: bytes) -> Any:
        """The session of a one-node model: nodes that are equal share it."""
        try:
            return self._one_node(raw)
        except KernelError:
            self._check_turn()
            raise

    def own(self, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
        """See ``KernelRunner``."""
        kinds = {info.name: info.type.tensor_type.elem_type for info in body.graph.input}
        session = self._bodies(body.SerializeToString(deterministic=True))
        outputs = [info.type.tensor_type.elem_type for info in body.graph.output]
        taken = {name: feeds[name] for name in kinds}
        return [on_host(each) for each in self._run(session, taken, kinds, outputs, None)]

    def exact(self, node: FusedNode, body: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[DeviceArray] | None:
        """See ``KernelRunner``."""
        try:
            shapes = output_shapes(node.plan, feeds, self.gpu.capability[0] * 10 + self.gpu.capability[1])
        except ValueError:  # the kernel will be told of it
            return None
        return self._references.outputs(body, feeds, shapes)

    def forget(self) -> None:
        """See ``KernelRunner``."""
        self._references.forget()
        self._inputs.forget()

    @property
    def _references(self) -> DeviceReferences:
        """Of this thread, whose nodes leave inputs there from one edge to the next."""
        try:
            found: DeviceReferences = self._of_threads.references
        except AttributeError:
            found = self._of_threads.references = DeviceReferences(self.device, self.memory, self._kinds)
        return found

    @property
    def _inputs(self) -> DeviceInputs:
        """Of kernels that this thread runs; references have their own, which no kernel may write to."""
        found: DeviceInputs = self._of_threads.__dict__.setdefault("inputs", DeviceInputs(self.device, self.memory))
        return found

    @cached_property
    def _of_threads(self) -> local:
        return local()

    @cached_property
    def _kinds(self) -> dict[Kind, bool]:
        return {}

    def measure(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> Extents:
        """See ``KernelRunner``."""
        return self._extents(got, reference, own, types)

    @cached_property
    def _extents(self) -> DeviceExtents:
        return DeviceExtents(self.device, self.gpu.architecture)

    def variants(self, plan: launch.LaunchPlan, feeds: Mapping[str, Array]) -> list[int]:
        """See ``KernelRunner``; device memory is aligned to 256 bytes."""
        return holding_variants(plan, feeds, self.gpu.capability[0] * 10 + self.gpu.capability[1],
                                self.gpu.multiprocessors)

    def _session(self, raw: bytes) -> Any:
        from onnxfuse.runtime import session

        return session(raw, self.providers, exact_options(1))

    def _body_session(self, raw: bytes) -> Any:
        import onnxruntime

        plain = with_plain_borders(onnx.ModelProto.FromString(raw)).SerializeToString()
        try:
            return onnxruntime.InferenceSession(plain, exact_options(), enable_fallback=0,
                                                providers=self.providers)
        except Exception as error:  # ONNX Runtime has an exception type per status
            raise KernelError(f"the original nodes do not run on the GPU: {error}") from error

    def _run(self, session: Any, feeds: Mapping[str, Array], kinds: Mapping[str, int], outputs: Sequence[int],
             shapes: Sequence[tuple[int, ...]] | None) -> list[Values]:
        """Copy there and run; results stay there, but for those of types that ONNX Runtime has no arrays of.

        Raises:
            KernelError: the run fails.
            VerificationError: another one has ended the device.
        """
        kept: list[Array] = []  # in host memory ONNX Runtime works in the arrays themselves
        try:
            try:
                binding = self._bound(session, feeds, kinds, outputs, shapes, kept)
            except KernelError:
                self._check_turn()
                raise
            with TURN:
                results = self._in_turn(session, binding, outputs)
        except MemoryError as error:  # the host's, which is no fault of a kernel
            raise OutOfMemoryError from error
        except OnnxfuseError:
            raise
        except Exception as error:  # ONNX Runtime has an exception type per status
            self._check_turn()
            raise KernelError(f"a run failed: {error}") from error
        return results

    def _in_turn(self, session: Any, binding: Any, kinds: Sequence[int]) -> list[Values]:
        """Run while nothing else runs."""
        self._check_turn()
        try:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            return [self._result(value, kind) for value, kind in zip(binding.get_outputs(), kinds, strict=True)]
        except MemoryError:
            raise
        except Exception as error:
            self._ended = not self.alive()
            raise KernelError(f"a run failed: {error}") from error

    def _result(self, value: Any, kind: int) -> Values:
        """An output; on the host where it is there, or is of another type than the kernel's."""
        dtype, shape = array_type(kind), tuple(value.shape())
        if self.memory != HOST and value.element_type() == kind and 0 not in shape:
            return DeviceArray(value, self._memory, value.data_ptr(), shape, dtype)
        return value.numpy().astype(dtype, copy=self.memory == HOST)  # type: ignore[no-any-return]

    @cached_property
    def _memory(self) -> Memory:
        return find_machine(self.device).memory()

    def _check_turn(self) -> None:
        """See, between turns, whether a kernel or the original's nodes have ended the device.

        Raises:
            VerificationError: they have; what fails from then on is no fault of its own.
        """
        with TURN:
            if self._ended:
                raise VerificationError("the GPU does not answer any more")

    def _bound(self, session: Any, feeds: Mapping[str, Array], kinds: Mapping[str, int], outputs: Sequence[int],
               shapes: Sequence[tuple[int, ...]] | None, kept: list[Array]) -> Any:
        """Inputs and poisoned outputs on the device; ``kept``: what of these has to stay in host memory meanwhile."""
        binding = session.io_binding()
        for name, kind in kinds.items():
            held = self._inputs.placed(name, feeds[name], kind)
            binding.bind_ortvalue_input(held.name, held.value)
        names = [output.name for output in session.get_outputs()]
        for place, (name, kind) in enumerate(zip(names, outputs, strict=True)):
            if shapes is not None and kind != TensorProto.BFLOAT16 and 0 not in shapes[place]:
                binding.bind_ortvalue_output(name, self._poisoned(shapes[place], array_type(kind), kept))
            else:
                binding.bind_output(name, self.memory, self.device)
        return binding

    def _poisoned(self, shape: tuple[int, ...], dtype: np.dtype[Any], kept: list[Array]) -> Any:
        """An output that a kernel has to write to; ``kept``: as in ``_bound``."""
        if self.memory != HOST:
            return filled(shape, dtype, _POISON, self.device)
        kept.append(np.full(int(np.prod(shape)) * dtype.itemsize, _POISON, np.uint8).view(dtype).reshape(shape))
        return copied(kept[-1], HOST, self.device)


def options_of(device: int, settings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of the CUDA provider for verification on a GPU: those that are given, and what saves time beside them."""
    # Told which device, even the first, ONNX Runtime warns in every session that no plugin offers it.
    return {**_QUICK, **(settings or {}), **({"device_id": device} if device else {})}


def _probe_model() -> bytes:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", infos[:1], infos[1:])
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def element_type(array: Array) -> int:
    """The element type of an array."""
    return int(TensorProto.BFLOAT16 if array.dtype == array_type(TensorProto.BFLOAT16)
               else helper.np_dtype_to_tensor_dtype(array.dtype))


def node_model(node: FusedNode, model: onnx.ModelProto, plan: launch.LaunchPlan,
               feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """A model of one fused node, its inputs and outputs under their formal names."""
    every = all_nodes(iter(model.graph.node))
    original = next(entry for entry in every if entry.domain == launch.DOMAIN and entry.name == node.name)
    call = onnx.NodeProto()
    call.CopyFrom(original)
    call.name = node.op
    call.input[:] = [f"h{place}" if place < launch.HOST_INPUTS and (name or f"h{place}" in feeds) else
                     "" if place < launch.HOST_INPUTS else f"x{place - launch.HOST_INPUTS}"
                     for place, name in enumerate(original.input)]
    call.output[:] = [f"y{place}" for place in range(len(original.output))]
    for place in reversed(range(len(call.attribute))):
        # What a kernel does not need would make equal nodes different sessions.
        name = call.attribute[place].name
        if name == "plan":
            call.attribute[place].s = plan.to_json().encode()
        elif name != "source" and (not name.startswith("image_") or plan.kernels != node.plan.kernels):
            del call.attribute[place]
    inputs = [helper.make_tensor_value_info(name, element_type(array), [None] * array.ndim)
              for name, array in feeds.items()]
    outputs = [helper.make_tensor_value_info(f"y{place}", output.dtype, [None] * len(output.shape))
               for place, output in enumerate(plan.outputs)]
    function = next(f for f in model.functions if f.domain == launch.DOMAIN and f.name == node.op)
    opsets = [*(entry for entry in model.opset_import)]
    graph = helper.make_graph([call], node.op, inputs, outputs)
    single = helper.make_model(graph, opset_imports=opsets, ir_version=max(model.ir_version, 8), functions=[function])
    return with_plain_borders(single)


def holding_variants(plan: launch.LaunchPlan, feeds: Mapping[str, Array], sm: int, multiprocessors: int) -> list[int]:
    """Variants whose guards hold for these inputs, all memory aligned.

    Raises:
        ValueError: a check of the plan does not hold.
    """
    situation = _situation(plan, feeds, sm, multiprocessors)
    return [place for place, variant in enumerate(plan.variants)
            if all(situation.evaluate(guard) for guard in variant.guards)]


def output_shapes(plan: launch.LaunchPlan, feeds: Mapping[str, Array], sm: int = 90) -> list[tuple[int, ...]]:
    """Shapes of the outputs for these inputs.

    Raises:
        ValueError: a check of the plan does not hold.
    """
    situation = _situation(plan, feeds, sm, 1)
    return [tuple(situation.evaluate(size) for size in output.shape) for output in plan.outputs]


def host_values(feeds: Mapping[str, Array]) -> list[list[int]]:
    """Contents of the host inputs, [] for one that is absent, and for weights, which no plan asks for."""
    arrays = [np.asarray(feeds.get(f"h{place}", ())) for place in range(launch.HOST_INPUTS)]
    return [array.reshape(-1).tolist() if array.dtype.kind in "iu" else [] for array in arrays]


def tensors(feeds: Mapping[str, Array]) -> list[Array]:
    """The tensor inputs in order."""
    count = sum(name.startswith("x") for name in feeds)
    return [feeds[f"x{place}"] for place in range(count)]


def _situation(plan: launch.LaunchPlan, feeds: Mapping[str, Array], sm: int, multiprocessors: int) -> launch.Situation:
    situation = launch.Situation([array.shape for array in tensors(feeds)], host_values(feeds), sm=sm,
                                 multiprocessors=multiprocessors)
    situation.bind(plan)
    return situation

