"""The fused model beside the original, as a whole.

Without kernels every output must be the original's bit for bit: the functions hold the very nodes.  That is looked at
on the CPU, or on the GPU where the CPU provider lacks an operator or a type.  A model that draws random numbers, adds
in no fixed order or hangs on what the runtime makes of it differs from itself: the fused model may differ as far as
the original does when it runs again, and when the runtime may rewrite it.  With kernels the differences are reported
and decide nothing: most faults of single nodes do not show in a model's outputs, and harmless roundings of a float16
model do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.verifying.bounds import Beside, BoundsError
from onnxfuse.verifying.capture import named, run_model
from onnxfuse.verifying.closeness import EXACT, Closeness, difference, measured
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.results import OutputDifference
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim, without_weights

Array = NDArray[Any]


def checker_message(model: onnx.ModelProto) -> str:
    """What ``onnx.checker`` says against a model; "" where it passes."""
    try:
        onnx.checker.check_model(without_weights(model))
    except onnx.checker.ValidationError as error:
        return str(error).strip()
    return ""


AGAIN = 2
"""How often the original runs again where the fused model differs."""

BESIDE = 4.0
"""Times its own difference from itself that the fused model's may be: a few runs do not show the largest."""

RANDOM = 1e-3
"""A difference between two runs of this share of the scale is none of rounding: how far two such runs are apart says
nothing of a third."""


@dataclass(frozen=True)
class Compared:
    """The fused model beside the original on one set of inputs.

    Attributes:
        differences: outputs that differ, by more than is allowed, and further than the original's from themselves.
        note: where the original differs from itself, in a sentence; message: why the fused model does not run.
        seen: all outputs that differ.
        inner: values that ``Whole`` was asked for beside, where no output differs.
    """

    differences: tuple[OutputDifference, ...] = ()
    note: str = ""
    message: str = ""
    seen: tuple[OutputDifference, ...] = ()
    inner: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class _Giving:
    """A session of the fused model that gives out further values too, and their types by name."""

    session: Any
    extra: Sequence[tuple[str, int]]
    kinds: Mapping[str, int]


_Results = tuple[list[Any], Mapping[str, Array]]
"""A fused model's outputs, and further values by name."""


class Whole:
    """The original's and the fused model's sessions without kernels."""

    def __init__(self, original: Slim, fused: Slim, providers: Sequence[Any], closeness: Closeness = EXACT,
                 kinds: Mapping[str, int] | None = None) -> None:
        """Create them, both at one time.

        Args:
            closeness: how far outputs may be off.
            kinds: values of its main graph that the fused model's runs are to give too, by name and type; not where the
                runtime refuses that, as it may say once more of what it ran without.

        Raises:
            VerificationError: ONNX Runtime refuses one of them.
        """
        self._original, self._fused, self._providers, self._closeness = original, fused, providers, closeness
        self.bounds, self.on_cpu = original.bounds, original if list(providers) == CPU else None
        self.names = [info.name for info in original.model.graph.output]
        self._begun: tuple[Run, Beside[_Results]] | None = None
        with Beside(partial(self._made, kinds)) as giving:
            self._session = original.session(providers)
        self._giving = giving.result()

    def _made(self, kinds: Mapping[str, int] | None) -> _Giving | None:
        """The fused model's session that gives these values too; where there is none, that without them is made."""
        extra = [(name, kind) for name, kind in (kinds or {}).items() if name not in self.names]
        if kinds is not None:
            with suppress(VerificationError):
                return _Giving(self._fused.session(self._providers, extra), extra, kinds)
        _ = self._plain
        return None

    @cached_property
    def _plain(self) -> Any:
        """A session of the fused model that gives its outputs alone."""
        return self._fused.session(self._providers)

    def original(self, run: Run, beside: bool = False) -> list[Any]:
        """The original's outputs; ``beside``: while the fused model runs already, for ``compare`` of this very run.

        Raises:
            VerificationError: the run fails.
        """
        if not beside:
            return run_model(self._session, self._original.model, run)
        with Beside(partial(self._fused_results, run)) as begun:  # where the original fails, the other has ended too
            self._begun = run, begun
            return run_model(self._session, self._original.model, run)

    def _results(self, run: Run) -> _Results:
        """What the fused model gives: what it gave beside the original if it ran there.

        Raises:
            VerificationError: the run fails.
        """
        begun, self._begun = self._begun, None
        return begun[1].result() if begun is not None and begun[0] is run else self._fused_results(run)

    def _fused_results(self, run: Run) -> _Results:
        giving = self._giving
        if giving is not None:
            with suppress(VerificationError):  # of no memory for all that, say
                results = run_model(giving.session, self._fused.model, run)
                return results[:len(self.names)], named(self._fused, giving.extra, results, giving.kinds)
        return run_model(self._plain, self._fused.model, run), {}

    def compare(self, run: Run, wanted: Sequence[Any]) -> Compared:
        """The fused model's outputs beside the original's, ``wanted``; all outputs differ where it does not run on
        these inputs and the original does whenever it is asked.

        Raises:
            BoundsError: the runs take more time or memory than they may.
        """
        try:
            got, inner = self._results(run)
            seen = compared(self.names, got, wanted, self._closeness)
            if seen and inner:
                # Where a value leaves the graph the runtime may keep a cast that it leaves out else.
                got, inner = run_model(self._plain, self._fused.model, run), {}
                seen = compared(self.names, got, wanted, self._closeness)
        except BoundsError:
            raise
        except VerificationError as error:
            found = tuple(OutputDifference(name, 0, float("inf")) for name in self.names)
            return self._beside(run, wanted, found, error.message)
        found = seen if self._closeness == EXACT else tuple(entry for entry in seen if entry.beyond)
        return replace(self._beside(run, wanted, found, ""), seen=seen) if found else Compared(
            seen=seen, inner=inner)

    def _beside(self, run: Run, wanted: Sequence[Any], found: tuple[OutputDifference, ...], message: str) -> Compared:
        """What is left of differences beside the original's from itself."""
        again: dict[str, float] = {}
        rewritten: dict[str, float] = {}
        try:
            for _ in range(AGAIN):
                _worst(again, compared(self.names, self.original(run), wanted))
        except BoundsError:
            raise
        except VerificationError as error:
            return Compared(note=f"The original does not run twice on {run.about}: {error.message}")
        try:
            session = self._original.session(self._providers, optimised=True)
            _worst(rewritten, compared(self.names, run_model(session, self._original.model, run), wanted))
        except BoundsError:
            raise
        except VerificationError as error:
            if message:
                return Compared(note=f"The original does not run on {run.about} with the runtime's optimisations, nor "
                                     f"does the fused model without: {error.message}")
        if message:
            return Compared(found, message=message)
        left = tuple(entry for entry in found if again.get(entry.output, 0.0) < RANDOM and entry.error > BESIDE * max(
            again.get(entry.output, 0.0), rewritten.get(entry.output, 0.0)))
        names = [entry.output for entry in found if entry not in left]
        how = "when it runs again" if any(name in again for name in names) else (
            "when the runtime may rewrite it")
        return Compared(left, "" if not names else f"The original differs from itself in {', '.join(map(repr, names))} "
                                                   f"{how}, and the fused model from it no further.")


def _worst(known: dict[str, float], found: Sequence[OutputDifference]) -> None:
    for entry in found:
        known[entry.output] = max(known.get(entry.output, 0.0), entry.error)


@dataclass(frozen=True)
class Begun:
    """What ``on_device`` compares, as far as it may be had before the kernels are known to be sound: none of them runs.

    Attributes:
        wanted: the original's outputs in each run; kernels: a session of the fused model with its kernels, if one could
            be made.
    """

    wanted: Sequence[Sequence[Any]]
    kernels: Any | None = None


def results_on_device(original: Slim, runs: Sequence[Run], providers: Sequence[Any]) -> list[list[Any]]:
    """The original's outputs in runs on a device.

    Raises:
        VerificationError: a run fails.
    """
    plain = original.session(providers)
    return [run_model(plain, original.model, run) for run in runs]


def on_device(begun: Begun, fused: Slim, runs: Sequence[Run], providers: Sequence[Any], closeness: Closeness = EXACT
              ) -> tuple[OutputDifference, ...]:
    """Every output with the kernels running beside the original's on the same device, where it is farthest off.

    Raises:
        VerificationError: a run fails.
        KernelError: a kernel cannot be had.
    """
    names = [info.name for info in fused.model.graph.output]
    kernels = begun.kernels or fused.fused_session(providers)
    worst: dict[str, OutputDifference] = {}
    for run, theirs in zip(runs, begun.wanted, strict=True):
        got = run_model(kernels, fused.model, run)
        keep_worst(worst, [measured(name, a, b, closeness) for name, a, b in zip(names, got, theirs, strict=True)
                           if isinstance(a, np.ndarray) and isinstance(b, np.ndarray)], run)
    return tuple(worst.values())


def keep_worst(known: dict[str, OutputDifference], found: Sequence[OutputDifference], run: Run) -> None:
    """Put what was found in a run in the place of what is nearer."""
    for entry in found:
        earlier = known.get(entry.output)
        if earlier is None or (entry.beyond > 0, entry.error) > (earlier.beyond > 0, earlier.error):
            known[entry.output] = replace(entry, inputs=str(run.about))


def compared(names: Sequence[str], got: Sequence[Any], wanted: Sequence[Any], closeness: Closeness = EXACT
             ) -> tuple[OutputDifference, ...]:
    """Outputs that differ in a single bit."""
    found = [difference(name, a, b, closeness) for name, a, b in zip(names, got, wanted, strict=True)]
    return tuple(entry for entry in found if entry is not None)
