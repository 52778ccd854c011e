"""The fused model beside the original while its kernels are compiled: without kernels no run of it waits for them.

What the compiler says may change a plan.  So the model that is expected is compared, and what came of it holds for the
model that there is where that differs in kernels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
from onnxfuse.verifying.sharing import Slim
from onnxfuse.verifying.whole_runs import BESIDE_PROCESSORS, WholeComparison, WholeRuns


@dataclass(frozen=True)
class Foreseen:
    """What was found of a model.

    Attributes:
        message: see ``WholeRuns.checked``; compared: its runs; notes: of all that.
    """

    message: str
    compared: WholeComparison
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Models:
    """What is compared, weights in files: the original, and the fused model ``without_kernels``."""

    original: onnx.ModelProto
    fused: onnx.ModelProto


@dataclass(frozen=True)
class Foreseeing:
    """A comparison under way: of which models, which is known before, what is found, and what ends it."""

    _models: Future[Models | None]
    _found: Future[Foreseen | None]
    _until: UntilEnded

    def of(self, original: onnx.ModelProto, fused: onnx.ModelProto, bounds: Bounds) -> Foreseen | None:
        """What holds of these models too, weights in the same files; None where nothing does: then it is ended.

        Raises:
            OutOfTimeError: it takes longer than the bounds leave.
        """
        if bounds.result(self._models) != Models(original, without_kernels(fused)):
            self._until.end()
            return None
        return bounds.result(self._found)


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
            made = pool.submit(_prepared, subject, first, until)
            models = pool.submit(_models, made)
            yield Foreseeing(models, pool.submit(_foreseen, made, runner), until)
        finally:
            until.end()


@dataclass(frozen=True)
class _Prepared:
    subject: Subject
    original: Slim
    fused: Slim


def _prepared(subject: Callable[[], Subject], first: FirstRun, until: UntilEnded) -> _Prepared | None:
    """The model that is expected, and both for sessions; None where that cannot be had: it will be said of the model
    that there is."""
    try:
        made = subject()
        original, fused = first.slims(made.lean, until, made.folder)
        return _Prepared(made, original.of(exact_form(original.model, fused.model)), fused)
    except (OnnxfuseError, MemoryError):
        return None


def _models(made: Future[_Prepared | None]) -> Models | None:
    prepared = made.result()
    return None if prepared is None else Models(prepared.original.model, without_kernels(prepared.fused.model))


def _foreseen(made: Future[_Prepared | None], runner: Future[CudaRunner | None]) -> Foreseen | None:
    """None where it cannot be had on the CPU, or at all: verification says why."""
    prepared = made.result()
    if prepared is None:
        return None
    try:
        subject = prepared.subject
        runs = WholeRuns(subject, (), read_fused(subject.lean), runner.result(), lambda *_: None)
        message = runs.checked()
        compared = runs.whole(prepared.original, prepared.fused, CPU)
    except (OnnxfuseError, MemoryError):
        return None
    return Foreseen(message, compared, tuple(runs.notes))


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
