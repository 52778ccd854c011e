"""Verification of a fused model: as a whole without kernels, and kernel by kernel where something runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, ModelError, OnnxfuseError, VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.load import LoadedModel
from onnxfuse.measuring.sets import InputSet
from onnxfuse.planning.traffic import Ledger
from onnxfuse.provider.words import is_lacking
from onnxfuse.rewriting import FusedNode, Placed, Rewritten, exact_form, planned_form, read_fused
from onnxfuse.verifying.bounds import NONE, Bounds, BoundsError, OutOfMemoryError, OutOfTimeError
from onnxfuse.verifying.capture import GROUP_BYTES, Captured, Source, capture, read_first
from onnxfuse.verifying.closeness import EXACT, Closeness
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.locating import first_apart
from onnxfuse.verifying.nodes import NodeVerifier, with_their_kernels
from onnxfuse.verifying.results import NodeResult, OutputDifference, Verification, WholeResult
from onnxfuse.verifying.runner import CUDA, CudaRunner, KernelRunner
from onnxfuse.verifying.runs import (
    Inputs,
    Recipe,
    Run,
    first_recipes,
    input_sets,
    second_recipes,
    small_recipes,
    telling_recipes,
    users_run,
)
from onnxfuse.verifying.sharing import Slim, sharing
from onnxfuse.verifying.whole import Compared, Whole, checker_message, keep_worst, on_device
from onnxfuse.wording import option

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


NO_GPU = "no GPU that ONNX Runtime can use"
_UNREACHED = "its body did not run, and what it reads there cannot be made up"


class Subject(Protocol):
    """What is verified: ``optimised.Optimised``."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def rewritten(self) -> Rewritten: ...
    @property
    def folder(self) -> Path | None: ...


def find_runner(device: int = 0, settings: Mapping[str, str] | None = None) -> CudaRunner | None:
    """The GPU, where there is one and ONNX Runtime can use it; runs have these options of the CUDA provider."""
    import onnxruntime

    if CUDA not in onnxruntime.get_available_providers():
        return None
    try:
        return CudaRunner(device, settings)
    except OnnxfuseError:
        return None


@dataclass(frozen=True)
class Allowed:
    """How far the model's outputs may be off, without kernels and with them."""

    plain: Closeness = EXACT
    kernels: Closeness = EXACT


def verify(subject: Subject, runner: KernelRunner | None = None, inputs: Inputs = None,
           progress: Progress | None = None, bounds: Bounds = NONE, allowed: Allowed | None = None) -> Verification:
    """Compare a fused model with the original, and every kernel with the nodes that it replaced.

    The model runs on the user's inputs, or on generated ones: of the sizes that were planned for, halved while a run of
    the original would take long; with every symbolic size one larger and masks with padding; and of small odd sizes.
    Where the original does not take them, other integers and other sizes are tried (``runs``).  What the bounds leave
    no time or memory for is left out, and the result says so.

    Args:
        runner: what runs kernels, such as ``find_runner()``; None leaves them unrun, and the result says so.
        inputs: the user's own, by name, or several sets of them.
        bounds: of the time and memory that all this may take.
        allowed: how far outputs may be off; nothing without kernels where None.  With kernels it decides nothing here:
            the differences say how many elements are further off.

    Raises:
        ModelError: ``inputs`` do not fit the model.
    """
    rewritten = subject.rewritten
    nodes = read_fused(rewritten.model)
    step = progress or (lambda *_: None)
    allowed = allowed or Allowed()
    work = _Work(subject, input_sets(inputs), nodes, runner, step, allowed.plain)
    notes = work.notes
    step("checking the fused model", 0, 1)
    message = checker_message(rewritten.model)
    if message and (own := checker_message(subject.loaded.proto)):
        notes.append(f"onnx.checker has something against the original model already: {own.splitlines()[0]}")
        message = ""
    exact = exact_form(subject.loaded, rewritten.model)
    if exact is not subject.loaded:
        notes.append("Fused nodes add biases of products, which come last then: the original was spelled so for "
                     "comparison.")
    with sharing(exact, rewritten.model, bounds, subject.folder) as (original, fused):
        compared = work.first_that_runs(original, fused)
        if isinstance(compared, VerificationError):
            whole = WholeResult(not message, None, message=message or compared.message)
            return Verification(None, (), whole, _not_run(nodes, compared.message), tuple(notes))
        runs, found = compared.runs, tuple(compared.differences.values())
        work.compared_on = compared.providers
        results = _not_run(nodes, NO_GPU)
        device: tuple[OutputDifference, ...] = ()
        if runner is not None and nodes:
            results = work.kernels((original, fused), compared, runner)
            if CUDA in str(runner.providers) and all(result.verdict != "failed" for result in results):
                device = work.on_device((original, fused), runs, runner, allowed.kernels)
        first = "" if compared.apart is None else first_apart(
            subject.graph, nodes, (original, fused), compared.apart, compared.providers, allowed.plain)
    whole = WholeResult(not message, not found, found, device, message or compared.message,
                        tuple(compared.outputs.values()), first)
    return Verification(runner.name if runner else None, tuple(run.about for run in runs), whole, results, tuple(notes))


def failed_regions(verification: Verification, placed: Sequence[Placed]) -> frozenset[int]:
    """Positions, among the regions that were given to ``rewrite``, of those to leave out when it is done again."""
    names = {result.node for result in verification.failed}
    return frozenset(entry.region for entry in placed if entry.node in names)


@dataclass
class _Comparison:
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
BESIDE_FLOPS = 10**8
"""Work of a run from which on the fused model runs beside the original: less is done before a thread has begun."""
_TRIED_FIRST = (
    "The model was run on other inputs than the first choice", "Other sizes near the planned ones were tried first",
    "Small odd sizes were tried",
)
"""What notes say of the runs of which a first choice failed."""


@dataclass
class _Work:
    """A verification under way: what it is of, the user's inputs, the fused nodes, what runs kernels, what is told how
    far it is, what the result will note, and where the model as a whole was compared."""

    subject: Subject
    sets: Sequence[InputSet]
    fused: Sequence[FusedNode]
    runner: KernelRunner | None
    step: Progress
    closeness: Closeness = EXACT
    notes: list[str] = field(default_factory=list)
    compared_on: Sequence[Any] = ()

    def first_that_runs(self, original: Slim, fused: Slim) -> VerificationError | _Comparison:
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

    def whole(self, original: Slim, fused: Slim, providers: Sequence[Any]) -> _Comparison:
        """Compare on the user's inputs, or on generated ones of as many sets of sizes as the model can have.

        Raises:
            VerificationError: ONNX Runtime refuses the model, or no run can be made within the bounds.
            ModelError: the user's inputs do not fit the model.
        """
        self.step("comparing with the original", 0, 2)
        whole = Whole(original, fused, providers, self.closeness)
        self._give(whole)
        comparison = _Comparison(providers)
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

    def _compare_once(self, whole: Whole, comparison: _Comparison, number: int) -> list[OnnxfuseError]:
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

    def _give(self, whole: Whole) -> None:
        """Have the runs that are compared give what fused nodes read in them, so that none need be made for that: not
        of the user's inputs, which the kernels' device runs, and where there is memory for it."""
        ledger = self.subject.ledger
        recipe = next(iter(first_recipes(ledger)), None)
        if self.runner is None or self.sets or recipe is None:
            return
        sizes = {**ledger.sizes, **recipe.sizes}
        if whole.bounds.holds(Ledger(ledger.graph, sizes, ledger.placement), 1, GROUP_BYTES):
            whole.give(read_first(self.fused, self.subject.graph, sizes))

    def _first_half(self, whole: Whole, recipe: Recipe, number: int, beside: bool = False) -> tuple[Run, list[Any]]:
        """Inputs, and what the original makes of them; ``beside``: while the fused model runs, where that is worth a
        thread and there is memory for both.

        Raises:
            VerificationError: it does not run on them, or not within the bounds.
            ModelError: the inputs cannot be made, or the user's do not fit.
        """
        ledger, graph = self.subject.ledger, self.subject.graph
        if not self.sets:
            wanted = Ledger(ledger.graph, {**ledger.sizes, **recipe.sizes}, ledger.placement)
            whole.bounds.check_memory(wanted)
            beside = beside and wanted.total().flops >= BESIDE_FLOPS and whole.bounds.holds(wanted, 2, 2 * GROUP_BYTES)
        try:
            given = self.sets[number] if self.sets else None
            run = recipe.make(graph) if given is None else users_run(graph, given.arrays, given.label)
            return run, whole.original(run, beside and not self.sets)
        except MemoryError as error:
            raise OutOfMemoryError from error

    def _recipes(self, comparison: _Comparison, number: int) -> Iterable[Recipe]:
        """Ways to make the inputs of a run, the preferred first."""
        ledger = self.subject.ledger
        if self.sets or not number:
            return [Recipe({})] if self.sets else first_recipes(ledger)
        first = comparison.recipes[0]
        if number == 1:
            return second_recipes(ledger, first)
        return small_recipes(ledger, first, [recipe.sizes for recipe in comparison.recipes])

    def kernels(self, pair: tuple[Slim, Slim], compared: _Comparison, runner: KernelRunner) -> tuple[NodeResult, ...]:
        """``nodes``, of the form of the original whose values the fused nodes read."""
        original, fused = pair
        loaded, model = self.subject.loaded, self.subject.rewritten.model
        planned = planned_form(loaded, model)
        with nullcontext((original, fused)) if planned is loaded else sharing(
            planned, model, original.bounds
        ) as (source, _):
            return self.nodes(planned, source, compared, runner)

    def on_device(self, pair: tuple[Slim, Slim], runs: Sequence[Run], runner: KernelRunner, closeness: Closeness
                  ) -> tuple[OutputDifference, ...]:
        """The whole model with its kernels running, on the first of made inputs or on all of the user's."""
        try:
            return on_device(*pair, runs if self.sets else runs[:1], runner.providers, closeness)
        except (VerificationError, KernelError) as error:
            self.notes.append(f"The whole model was not run with kernels: {error.message}")
        except MemoryError:
            self.notes.append(f"The whole model was not run with kernels: {OutOfMemoryError().message}")
        return ()

    def _captured(self, source: Source, original: Slim, inner: Mapping[str, Array], runner: KernelRunner
                  ) -> Iterator[Captured]:
        """``capture`` where the model ran before on inputs that are made up: they are few, and a GPU's libraries take
        seconds for the first run at any size.  The user's own run on the runner's device; what that does not give, on
        the CPU.  ``inner``: values of the run that are known.
        """
        nodes, sizes = self.fused, {**self.subject.ledger.sizes, **source.run.about.sizes}
        done: set[str] = set()
        providers = runner.providers if self.sets else self.compared_on
        try:
            for taken in capture(nodes, source, original, sizes, providers, inner):
                done.add(taken.node.name)
                yield taken
            return
        except BoundsError:
            raise
        except VerificationError as error:
            if list(providers) == CPU or not runner.alive():
                raise
            said = f"The original does not run on {runner.name}; what its nodes read is from the CPU: {error.message}"
            self.notes += [] if said in self.notes else [said]
        left = [node for node in nodes if node.name not in done]
        for taken in capture(left, source, original, sizes, CPU):
            yield replace(taken, how=f"{taken.how} on the CPU")

    def nodes(self, planned: LoadedModel, original: Slim, compared: _Comparison, runner: KernelRunner
              ) -> tuple[NodeResult, ...]:
        """Every kernel against the nodes that it replaced, on what they read in the runs.

        Args:
            planned: the model whose values the fused nodes read; original: that for sessions.
        """
        subject, nodes, runs = self.subject, self.fused, compared.runs
        runner.prepare(subject.rewritten.model)
        verifier = NodeVerifier(subject.rewritten.model, runner, original.bounds)
        results: dict[str, NodeResult] = {}
        total = len(nodes) * len(runs)
        for number, run in enumerate(runs):
            turn = "" if len(runs) == 1 else f", run {number + 1}"
            done: set[str] = set()
            try:
                source = Source(planned, subject.graph, run)
                for taken in self._captured(source, original, compared.inner[number], runner):
                    node = taken.node
                    original.bounds.left()
                    self.step(f"verifying {node.name}", number * len(nodes) + len(done), total)
                    done.add(node.name)
                    if (earlier := results.get(node.name)) is not None and earlier.verdict == "failed":
                        continue
                    # Inputs that are made up show nothing new of a kernel that was compared at these shapes.
                    if not self.sets and (standing := verifier.standing(node, taken.feeds)) is not None:
                        results.setdefault(node.name, standing)
                        continue
                    results[node.name] = _joined(earlier, verifier.verify(node, taken.feeds, f"{taken.how}{turn}"))
                    if results[node.name].verdict == "failed" and not runner.alive():
                        raise VerificationError(f"the GPU stopped answering when {node.name} ran")
                original.bounds.left()
            except (VerificationError, MemoryError) as problem:
                error = OutOfMemoryError() if isinstance(problem, MemoryError) else problem
                left = "Nodes, or some of their inputs," if isinstance(error, OutOfTimeError) else "Nodes"
                self.notes.append(f"{left} were left out in run {number + 1}: {error.message}")
                for node in nodes:
                    results.setdefault(node.name, _not_run((node,), error.message)[0])
                if isinstance(error, OutOfTimeError) or not runner.alive():
                    break
        for node in nodes:
            results.setdefault(node.name, _not_run((node,), _UNREACHED)[0])
        return tuple(with_their_kernels([results[node.name] for node in nodes]))


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


def _joined(first: NodeResult | None, second: NodeResult) -> NodeResult:
    """What two runs together say of a node."""
    if first is None or first.verdict == "not run":
        return second
    if second.verdict == "not run":
        return first
    worst = second if second.verdict == "failed" or second.ratio > first.ratio else first
    return NodeResult(
        worst.node, worst.op, worst.rule, worst.verdict, worst.error, worst.tolerance, worst.ratio,
        tuple(dict.fromkeys((*first.inputs, *second.inputs))),
        tuple(dict.fromkeys((*first.variants, *second.variants))), first.shared and second.shared,
        first.rounded or second.rounded, worst.message, worst.where,
    )


def _not_run(nodes: Sequence[FusedNode], message: str) -> tuple[NodeResult, ...]:
    return tuple(NodeResult(node.name, node.op, node.rule, "not run", message=message) for node in nodes)

