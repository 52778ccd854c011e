"""The fused model beside the original on several runs, without kernels: on which inputs, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxfuse.errors import ModelError, OnnxfuseError, VerificationError
from onnxfuse.graph import LoadedModel
from onnxfuse.measuring.sets import InputSet
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.processors import processors
from onnxfuse.provider.words import is_lacking
from onnxfuse.rewriting import FusedNode, planned_form
from onnxfuse.verifying.bounds import Bounds, BoundsError, OutOfMemoryError, OutOfTimeError
from onnxfuse.verifying.capture import GROUP_BYTES, read_first
from onnxfuse.verifying.closeness import EXACT, Closeness
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.first_run import BESIDE_FLOPS
from onnxfuse.verifying.kernels import Progress, Subject
from onnxfuse.verifying.results import OutputDifference
from onnxfuse.verifying.runner import KernelRunner
from onnxfuse.verifying.runs import (
    Recipe,
    Run,
    first_recipes,
    second_recipes,
    small_recipes,
    telling_recipes,
    users_run,
)
from onnxfuse.verifying.sharing import Slim
from onnxfuse.verifying.whole import Compared, Whole, checker_message, keep_worst
from onnxfuse.wording import option

Array = NDArray[Any]
Made = TypeVar("Made")


@dataclass
class WholeComparison:
    """The model as a whole: what it ran on, the runs that were made and how, the outputs that differed in them, how far
    every output was off, the first run in which one was further than it may be, and what is held of what fused nodes
    read in each run."""

    providers: Sequence[Any]

    runs: list[Run] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    differences: dict[str, OutputDifference] = field(default_factory=dict)
    message: str = ""
    outputs: dict[str, OutputDifference] = field(default_factory=dict)
    apart: Run | None = None
    inner: list[Mapping[str, Array]] = field(default_factory=list)

    def add(self, run: Run, recipe: Recipe, names: Sequence[str], found: Compared) -> None:
        """One run more, of a model with outputs of these names."""
        self.runs.append(run)
        self.recipes.append(recipe)
        self.inner.append(found.inner if _bytes([*self.inner, found.inner]) <= GROUP_BYTES else {})
        keep_worst(self.differences, found.differences, run)
        if found.differences and not found.message:
            self.apart = self.apart or run
        keep_worst(self.outputs, [OutputDifference(name, 0, 0.0) for name in names], run)
        keep_worst(self.outputs, found.seen, run)
        self.message = self.message or found.message


class _NoRunError(VerificationError):
    """The original runs on none of the inputs tried; ``lacking`` where the provider has an operator not at all."""

    def __init__(self, failures: Sequence[OnnxfuseError]) -> None:
        super().__init__(_told(failures), place=failures[0].place, remedy=failures[0].remedy)
        self.lacking = is_lacking(failures[-1])


_RUNS = 3
BESIDE_PROCESSORS = 4
"""Of two each run takes what the other wants: measured, 4.4 s for both of a VAE's decoder, and 3.7 s one by one."""
_TRIED_FIRST = (
    "The model was run on other inputs than the first choice", "Other sizes near the planned ones were tried first",
    "Small odd sizes were tried",
)
"""What notes say of the runs of which a first choice failed."""


@dataclass(frozen=True)
class Preparing:
    """What is under way beside a comparison: the model whose values fused nodes read, and the runner's compilation."""

    planned: Future[LoadedModel]
    kernels: Future[None]


@dataclass
class WholeRuns:
    """A verification under way: what it is of, the user's inputs, the fused nodes, what runs kernels, what is told how
    far it is, and what the result will note."""

    subject: Subject
    sets: Sequence[InputSet]
    fused: Sequence[FusedNode]
    runner: KernelRunner | None
    step: Progress
    closeness: Closeness = EXACT
    notes: list[str] = field(default_factory=list)

    def checked(self) -> str:
        """What ``onnx.checker`` has against the fused model and not against the original."""
        self.step("checking the fused model", 0, 1)
        message = checker_message(self.subject.lean)
        if message and (own := checker_message(self.subject.loaded.proto)):
            self.notes.append(f"onnx.checker has something against the original model already: {own.splitlines()[0]}")
            return ""
        return message

    def first_that_runs(self, original: Slim, fused: Slim) -> VerificationError | WholeComparison:
        """``whole`` on the CPU; on the runner's device where the CPU provider lacks an operator or a type.

        Not where inputs do not fit the model: a GPU reads past the end of a table and says nothing.
        """
        try:
            # On a GPU's machine the driver takes memory of its own accord, which no limit should stand in the way of.
            with original.bounds.within_memory():
                return self.whole(original, fused, CPU)
        except BoundsError as error:
            return error
        except _NoRunError as error:
            if self.runner is None or list(self.runner.providers) == CPU or not error.lacking:
                return error
        except VerificationError as error:
            if self.runner is None or list(self.runner.providers) == CPU:
                return error
        try:
            result = self.whole(original, fused, self.runner.providers)
        except VerificationError as error:
            return error
        self.notes.append("The CPU provider cannot run the model; it was compared without kernels on the GPU.")
        return result

    def whole(self, original: Slim, fused: Slim, providers: Sequence[Any]) -> WholeComparison:
        """Compare on the user's inputs, or on generated ones of as many sets of sizes as the model can have.

        Raises:
            VerificationError: ONNX Runtime refuses the model, or no run can be made within the bounds.
            ModelError: the user's inputs do not fit the model.
        """
        self.step("comparing with the original", 0, 2)
        whole = Whole(original, fused, providers, self.closeness, self._given(original.bounds))
        comparison = WholeComparison(providers)
        turns = len(self.sets) or _RUNS
        try:
            for number in range(turns):
                failures = self._compare_once(whole, comparison, number)
                if not comparison.runs and number + 1 >= (len(self.sets) or 1):
                    raise _NoRunError(failures)
                if failures:
                    told = f"{self.sets[number].label}: left out" if self.sets else _TRIED_FIRST[number]
                    self.notes.append(f"{told}: {_told(failures)}")
                self.step("comparing with the original", min(number + 1, turns - 1), turns - 1)
        except BoundsError as error:
            if not comparison.runs:
                raise
            self.notes.append(f"Further runs of the model were left out: {error.message}")
        return comparison

    def _compare_once(self, whole: Whole, comparison: WholeComparison, number: int) -> list[OnnxfuseError]:
        """Add one run to a comparison, of the first inputs that the original takes; what those before it failed with.

        Raises:
            ModelError: the user's inputs do not fit the model.
            BoundsError: the time is up, or the fused model's run takes more memory than it may.
        """
        failures: list[OnnxfuseError] = []
        for recipe in self._recipes(comparison, number):
            try:
                run, wanted = self._first_half(whole, recipe, number, beside=True)
            except OutOfTimeError:
                raise
            except (VerificationError, ModelError) as problem:
                if self.sets and isinstance(problem, ModelError):
                    raise
                failures.append(problem)
                if is_lacking(problem) or isinstance(problem, ModelError):
                    break
                continue
            try:
                if not self.sets and number == 0:
                    recipe, run, wanted = self._with_numbers(whole, recipe, (run, wanted))
                found = whole.compare(run, wanted)
            except (MemoryError, OutOfMemoryError) as error:
                lack = error if isinstance(error, OutOfMemoryError) else OutOfMemoryError()
                if comparison.runs or self.sets:
                    raise lack from error
                failures.append(lack)  # comparing takes more than the run itself, which was foreseen
                del run, wanted
                continue
            comparison.add(run, recipe, whole.names, found)
            self.notes += [found.note] if found.note else []
            break
        return failures

    def _with_numbers(self, whole: Whole, recipe: Recipe, half: tuple[Run, list[Any]]
                      ) -> tuple[Recipe, Run, list[Any]]:
        """A recipe with what ``_first_half`` gives for it.  Where outputs of the first are undefined in part, another
        of which fewer are: where nothing is a number, nothing shows."""
        chosen = recipe, *half
        for other in telling_recipes(self.subject.ledger, recipe) if _undefined(half[1]) else ():
            with suppress(VerificationError, ModelError):
                tried = self._first_half(whole, other, 0)
                if len(_undefined(tried[1])) < len(_undefined(chosen[2])):
                    chosen = other, *tried
            if not _undefined(chosen[2]):
                break
        if chosen[0] is not recipe:
            self.notes.append(f"The first choice was not taken, {half[0].about}: the model makes of it what is no "
                              "number.")
        left = [repr(whole.names[place]) for place in _undefined(chosen[2])]
        if left:
            self.notes.append(f"Elements of {', '.join(left)} are no numbers on inputs that are made up, which hides "
                              f"what differs; give real ones, {option('inputs')}.")
        return chosen

    def preparing(self, pool: ThreadPoolExecutor, bounds: Bounds) -> Preparing:
        """Have the model made that gives what nodes read, and the runner compile what it will run: beside the first
        runs, where they leave memory for that, and the compiler beside the first nodes, which wait for their own
        kernels."""
        runner, model = self.runner, self.subject.lean
        if runner is None or not self.fused:
            return Preparing(_done(self.subject.loaded), _done(None))
        ledger = self._first_ledger
        if ledger is not None and bounds.holds(ledger, 2, 3 * GROUP_BYTES):
            return Preparing(pool.submit(planned_form, self.subject.loaded, model), pool.submit(runner.prepare, model))
        runner.prepare(model)
        return Preparing(_done(planned_form(self.subject.loaded, model)), _done(None))

    @cached_property
    def _first_ledger(self) -> Ledger | None:
        """Of the first run on inputs that are made up; None where these are the user's."""
        ledger = self.subject.ledger
        recipe = None if self.sets else next(iter(first_recipes(ledger)), None)
        return None if recipe is None else ledger.at(recipe.sizes)

    def _given(self, bounds: Bounds) -> Mapping[str, int] | None:
        """What the runs that are compared are to give of what fused nodes read in them, so that none need be made for
        that: not of the user's inputs, which the kernels' device runs, and where there is memory for it."""
        ledger = None if self.runner is None else self._first_ledger
        if ledger is None or not bounds.holds(ledger, 1, GROUP_BYTES):
            return None
        return read_first(self.fused, self.subject.graph, ledger.sizes)

    def _first_half(self, whole: Whole, recipe: Recipe, number: int, beside: bool = False) -> tuple[Run, list[Any]]:
        """Inputs, and what the original makes of them; ``beside``: while the fused model runs, where that is worth a
        thread and there is memory for both.

        Raises:
            VerificationError: it does not run on them, or not within the bounds.
            ModelError: the inputs cannot be made, or the user's do not fit.
        """
        ledger, graph = self.subject.ledger, self.subject.graph
        if not self.sets:
            wanted = ledger.at(recipe.sizes)
            whole.bounds.check_memory(wanted)
            beside = (beside and processors() >= BESIDE_PROCESSORS and wanted.total().flops >= BESIDE_FLOPS
                      and whole.bounds.holds(wanted, 2, 2 * GROUP_BYTES))
        try:
            first, slim = self.subject.first_run, whole.on_cpu
            known = None if first is None or slim is None or number else first.outputs(recipe, slim)
            if known is not None:
                return known
            given = self.sets[number] if self.sets else None
            run = recipe.make(graph) if given is None else users_run(graph, given.arrays, given.label)
            return run, whole.original(run, beside and not self.sets)
        except MemoryError as error:
            raise OutOfMemoryError from error

    def _recipes(self, comparison: WholeComparison, number: int) -> Iterable[Recipe]:
        """Ways to make the inputs of a run, the preferred first."""
        ledger = self.subject.ledger
        if self.sets or not number:
            return [Recipe({})] if self.sets else first_recipes(ledger)
        first = comparison.recipes[0]
        if number == 1:
            return second_recipes(ledger, first)
        return small_recipes(ledger, first, [recipe.sizes for recipe in comparison.recipes])


def _done(result: Made) -> Future[Made]:
    done: Future[Made] = Future()
    done.set_result(result)
    return done


def _bytes(held: Iterable[Mapping[str, Array]]) -> int:
    """Of all arrays."""
    return sum(array.nbytes for each in held for array in each.values())


def _undefined(outputs: Sequence[Any]) -> list[int]:
    """Which outputs have elements that are no number."""
    return [place for place, array in enumerate(outputs)
            if isinstance(array, np.ndarray) and array.dtype.kind in "fc" and np.isnan(array).any()]


def _told(failures: Sequence[OnnxfuseError]) -> str:
    """What came of inputs that a model did not take: the first in full, further reasons, and how many there were."""
    first, *others = dict.fromkeys(failure.message for failure in failures)
    text = first
    if len(failures) > 1:
        text += f" {len(failures) - 1} more sets of inputs failed"
        text += f", the last: {others[-1]}" if others else " in the same way."
    return text
