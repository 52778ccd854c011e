"""The fused model beside the original while its kernels are compiled: without kernels no run of it waits for them.

What the compiler says may change a plan.  So the model that is expected is compared, and what came of it holds for the
model that there is where that differs in kernels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256

import onnx

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.order import all_nodes
from onnxfuse.lowering.launch import DOMAIN
from onnxfuse.processors import processors
from onnxfuse.rewriting import exact_form, read_fused
from onnxfuse.verifying.bounds import Bounds, UntilEnded
from onnxfuse.verifying.capture import GROUP_BYTES
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.first_run import FirstRun
from onnxfuse.verifying.kernels import Subject
from onnxfuse.verifying.runner import CudaRunner
from onnxfuse.verifying.whole_runs import BESIDE_PROCESSORS, WholeComparison, WholeRuns


@dataclass(frozen=True)
class Foreseen:
    """What was found of a model.

    Attributes:
        message: see ``WholeRuns.checked``; compared: its runs; notes: of all that.
        original, fused: what was compared, weights in files, the fused one ``without_kernels``.
    """

    message: str
    compared: WholeComparison
    notes: tuple[str, ...]
    original: onnx.ModelProto
    fused: onnx.ModelProto


@dataclass(frozen=True)
class Foreseeing:
    """A comparison under way."""

    _found: Future[Foreseen | None]

    def of(self, original: onnx.ModelProto, fused: onnx.ModelProto, bounds: Bounds) -> Foreseen | None:
        """What holds of these models too, weights in the same files; None where nothing does.

        Raises:
            OutOfTimeError: it takes longer than the bounds leave.
        """
        while True:
            with suppress(TimeoutError):  # then no time is left, and that is what is raised
                found = self._found.result(bounds.left())
                same = found is not None and found.original == original and found.fused == without_kernels(fused)
                return found if same else None


@contextmanager
def foreseeing(subject: Callable[[], Subject], first: FirstRun | None, runner: Future[CudaRunner | None] | None,
               bounds: Bounds) -> Iterator[Foreseeing | None]:
    """Begin it, where a first run was begun, and there are processors and memory for it beside compilers; it is ended
    with the context.

    Args:
        subject: makes the model that is expected; runner: what will run its kernels.
    """
    if first is None or runner is None or processors() < BESIDE_PROCESSORS or not bounds.holds(
            first.ledger, 2, 3 * GROUP_BYTES):
        yield None
        return
    until = UntilEnded()
    with ThreadPoolExecutor(1, "onnxfuse-foreseen") as pool:
        try:
            yield Foreseeing(pool.submit(_foreseen, subject, first, runner, until))
        finally:
            until.end()


def _foreseen(subject: Callable[[], Subject], first: FirstRun, runner: Future[CudaRunner | None], until: UntilEnded
              ) -> Foreseen | None:
    """None where it cannot be had on the CPU, or at all: verification says why."""
    try:
        made = subject()
        model = made.rewritten.model
        runs = WholeRuns(made, (), read_fused(model), runner.result(), lambda *_: None)
        message = runs.checked()
        original, fused = first.slims(made.loaded, model, until, made.folder)
        exact = exact_form(original.model, model)
        compared = runs.whole(original.of(exact), fused, CPU)
    except OnnxfuseError:
        return None
    return Foreseen(message, compared, tuple(runs.notes), exact, without_kernels(fused.model))


def without_kernels(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a fused model in which fused nodes are called by what their functions do, and have no kernels."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.metadata_props[:]
    del result.functions[:]
    functions: dict[str, onnx.FunctionProto] = {}
    names: dict[str, str] = {}
    for function in model.functions:
        copy = onnx.FunctionProto()
        copy.CopyFrom(function)
        if function.domain == DOMAIN:
            copy.name = ""
            copy.name = names[function.name] = sha256(copy.SerializeToString(deterministic=True)).hexdigest()
        functions[f"{copy.domain}:{copy.name}"] = copy
    result.functions.extend(functions[name] for name in sorted(functions))
    for node in all_nodes(result.graph.node):
        if node.domain == DOMAIN:
            node.op_type = names.get(node.op_type, node.op_type)
            del node.attribute[:]
            del node.metadata_props[:]
    return result
