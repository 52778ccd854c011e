"""The original's first runs, on the CPU and on the GPU, made beside planning: verification begins with them, and they
need no plan.

Planning takes one processor.  The others and the GPU would wait for it, and it would wait for them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.errors import ModelError, VerificationError
from onnxfuse.graph import LoadedModel
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.processors import processors
from onnxfuse.verifying.bounds import Bounds, BoundSession, UntilEnded, run_bytes
from onnxfuse.verifying.capture import GROUP_BYTES, run_model
from onnxfuse.verifying.runner import CudaRunner
from onnxfuse.verifying.runs import Recipe, Run, first_recipes
from onnxfuse.verifying.sharing import Slim, Weights, sharing, weight_bytes
from onnxfuse.verifying.whole import results_on_device

BESIDE_FLOPS = 10**8
"""Work of a run from which on another one is made beside it: less is done before a thread has begun."""


@dataclass(frozen=True)
class _Made:
    slim: Slim
    session: BoundSession
    outputs: list[Any]


@dataclass(frozen=True)
class FirstRun:
    """A run that was begun.

    Attributes:
        weights: where those lie that its session maps; recipe: how its inputs are made; run: these.
        ledger: of the original at its sizes.
    """

    weights: Weights
    recipe: Recipe
    run: Run
    ledger: Ledger
    _original: Future[Slim]
    _made: Future[_Made | None]
    _on_device: Future[list[Any] | None]

    def outputs(self, recipe: Recipe, slim: Slim) -> tuple[Run, list[Any]] | None:
        """The run and its outputs, where it was of this model, by this recipe, and the model took its inputs.

        Raises:
            OutOfTimeError: it takes longer than the model's bounds leave.
        """
        made = self._of(slim) if recipe == self.recipe else None
        return None if made is None else (self.run, made.outputs)

    def on_device(self, slim: Slim, runs: Sequence[Run]) -> list[list[Any]] | None:
        """The outputs in some runs on the runner's device, where there is one, of this model and in this run alone.

        Raises:
            OutOfTimeError: as ``outputs``.
        """
        if self._of(slim) is None or len(runs) != 1 or runs[0] is not self.run:
            return None
        found = slim.bounds.result(self._on_device)
        return None if found is None else [found]

    def wait(self, bounds: Bounds) -> None:
        """Until nothing of it runs.

        Raises:
            OutOfTimeError: it takes longer than there is time.
        """
        bounds.result(self._on_device)

    def session(self, slim: Slim) -> BoundSession | None:
        """A model's session, where the run was of this model, and the model took its inputs.

        Raises:
            OutOfTimeError: as ``outputs``.
        """
        made = self._of(slim)
        return None if made is None else made.session.within(slim.bounds)

    def slims(self, fused: onnx.ModelProto, bounds: Bounds, folder: Path | None) -> tuple[Slim, Slim]:
        """The original and a fused model as ``sharing`` gives them, weights beside those of the run."""
        original = replace(self._original.result(), bounds=bounds, earlier=self)
        return original, self.weights.slim(fused, folder or original.folder, bounds)

    def _of(self, slim: Slim) -> _Made | None:
        made = slim.bounds.result(self._made)
        return made if made is not None and made.slim.model == slim.model else None


@contextmanager
def sharing_first(first: FirstRun | None, loaded: LoadedModel, fused: onnx.ModelProto, bounds: Bounds,
                  folder: Path | None) -> Iterator[tuple[Slim, Slim]]:
    """As ``sharing``; with the session of the first run where that was of the very original."""
    if first is None:
        with sharing(loaded, fused, bounds, folder) as pair:
            yield pair
        return
    yield first.slims(fused, bounds, folder)


@dataclass(frozen=True)
class Written:
    """A model whose weights a thread writes to the file that its first run maps, before it is known how it runs.

    Attributes:
        weights: what has the file; slim: the model, its weights there.
    """

    loaded: LoadedModel
    weights: Weights
    slim: Future[Slim]
    _pool: ThreadPoolExecutor

    def run(self, spelled: Callable[[onnx.ModelProto], onnx.ModelProto], ledger: Ledger, bounds: Bounds,
            runner: Future[CudaRunner | None] | None = None) -> FirstRun | None:
        """Begin the first run, where that is worth a thread and it fits into memory beside what else there is.

        Args:
            spelled: gives the original, weights in files, in the form that the fused model will be compared with, as
                far as that is known.
            ledger: of the original at the sizes that are planned for.
            runner: what will run kernels.
        """
        # Beside it is what planning holds, and what a session may copy.
        held = weight_bytes(self.loaded.proto)
        found = _worth_it(ledger, bounds, 3 * GROUP_BYTES + held)
        if found is None:
            self._pool.submit(self.weights.close)  # once it is written: another file may be, and room is not for both
            return None
        recipe, at, run = found
        made = self._pool.submit(_run, self.slim, spelled, run)
        on_device = self._pool.submit(_run_on_device, made, runner, run_bytes(at) + held, run)
        return FirstRun(self.weights, recipe, run, at, self.slim, made, on_device)


@contextmanager
def writing(loaded: LoadedModel) -> Iterator[Written | None]:
    """Begin with that, where there is a processor for it; it, and the run, are ended with the context."""
    if processors() < 2:
        yield None
        return
    until = UntilEnded()
    with Weights() as weights, ThreadPoolExecutor(1, "onnxfuse-first-run") as pool:
        try:
            yield Written(loaded, weights, pool.submit(weights.slim, loaded.proto, loaded.folder, until), pool)
        finally:
            until.end()


def _worth_it(ledger: Ledger, bounds: Bounds, beside: int) -> tuple[Recipe, Ledger, Run] | None:
    """How the inputs of the run are made, the ledger at its sizes, and the inputs; None where it is not worth a thread,
    or does not fit ``beside`` so many bytes."""
    recipe = next(iter(first_recipes(ledger)), None)
    if recipe is None:
        return None
    at = ledger.at(recipe.sizes)
    if at.total().flops < BESIDE_FLOPS or not bounds.holds(at, 1, beside):
        return None
    try:
        return recipe, at, recipe.make(at.graph)
    except (ModelError, VerificationError, MemoryError):
        return None  # verification will say it


def _run(original: Future[Slim], spelled: Callable[[onnx.ModelProto], onnx.ModelProto], run: Run) -> _Made | None:
    """None where the original does not run on these inputs, or there is no memory: verification tries others."""
    try:
        own = original.result()
        slim = own.of(spelled(own.model))
        session = slim.session()
        return _Made(slim, session, run_model(session, slim.model, run))
    except (VerificationError, MemoryError):
        return None


def _run_on_device(made: Future[_Made | None], runner: Future[CudaRunner | None] | None, needed: int, run: Run
                   ) -> list[Any] | None:
    """None where the CPU did not run it, as what does not fit the model may end a device, or there is no device, or it
    has no room for that: verification tries it in its turn."""
    known, there = made.result(), None if runner is None else runner.result()
    if known is None or there is None or not there.has_room(needed):
        return None
    try:
        return results_on_device(known.slim, [run], there.providers)[0]
    except (VerificationError, MemoryError):
        return None
