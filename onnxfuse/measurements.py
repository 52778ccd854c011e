"""What was measured, in the planner's terms: the database of measurements, and a profile of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import onnx
import onnxruntime

from onnxfuse.measuring.database import (
    DEFAULT,
    RUNTIME,
    Database,
    Environment,
    Measurement,
    bucket_of,
    find_database,
    shapes_text,
)
from onnxfuse.measuring.driver import driver_version
from onnxfuse.measuring.run_profile import read_run_profile
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.identity import Identity, Shape
from onnxfuse.planning.observed import observe
from onnxfuse.region import Times
from onnxfuse.runtime.cache import digest
from onnxfuse.runtime.library import present_gpus
from onnxfuse.runtime.nvrtc import compiler
from onnxfuse.schedules import Choice, Kernel, named, parse_choice
from onnxfuse.version import __version__

Place = str | Path | Literal[False] | None
"""Where the database is: a file, the default place (None), or nowhere (False)."""

BETTER = 0.98
"""Share of the default schedule's time that another must stay under to replace it: less is noise."""


@dataclass(frozen=True)
class Measurements:
    """``planning.evidence.Evidence`` from a database, in one environment.

    Attributes:
        seen_in: environments whose statistics from production count, the preferred first: the driver and the compiler
            there may be others, the kernels' texts are not.
    """

    database: Database
    environment: Environment
    seen_in: tuple[Environment, ...] = ()

    @cached_property
    def _buckets(self) -> frozenset[str]:
        return self.database.buckets()

    def knows(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> bool:
        """See ``Evidence``."""
        return bucket_of(shapes_text(inputs, outputs)) in self._buckets

    def choice(self, what: Identity) -> Choice | None:
        """See ``Evidence``."""
        shapes = text_of(what)
        found = self.database.best(self.environment, what.kernel, shapes)
        if found is None or found.candidate == DEFAULT:
            return None
        rows = self.database.measurements(self.environment, what.kernel, found.shapes)
        default = rows.get(DEFAULT)
        if default is not None and default.status == "ok" and found.microseconds > BETTER * default.microseconds:
            return None
        return parse_choice(found.candidate)

    def times(self, what: Identity, kernel: Kernel) -> Times | None:
        """See ``Evidence``: from tuning, else from what the library recorded in production."""
        shapes = text_of(what)
        candidate = DEFAULT if kernel.choice is None else str(kernel.choice)
        fused = self.database.measurements(self.environment, what.kernel, shapes).get(candidate)
        its = self.runtime(what)
        if fused is not None and fused.status == "ok" and (candidate != DEFAULT or is_of(fused, kernel)):
            return Times(fused.microseconds, its, self.environment.gpu, fused.date)
        text = kernel_digest(kernel) if self.seen_in else ""
        found = (self.database.statistic(environment, text, shapes) for environment in self.seen_in)
        seen = next((each for each in found if each is not None), None)
        if seen is None:
            return None
        return Times(seen.microseconds, its, seen.environment.gpu, seen.last_seen, "statistics")

    def runtime(self, what: Identity) -> float | None:
        """See ``Evidence``."""
        found = self.database.measurements(self.environment, what.nodes, text_of(what)).get(RUNTIME)
        return found.microseconds if found is not None and found.status == "ok" else None


def is_of(row: Measurement, kernel: Kernel) -> bool:
    """Whether what was measured of a schedule's own choice was measured of this kernel, as far as it says of which: a
    region's own choice at some sizes may be another one since."""
    return row.status != "ok" or row.note in ("", kernel.entry)


def text_of(what: Identity) -> str:
    """A region's shapes as the database writes them."""
    return shapes_text(what.inputs, what.outputs)


def kernel_digest(kernel: Kernel) -> str:
    """Digest of a kernel's text and compiler options, as the native library computes it for its statistics."""
    text = named(kernel)
    return digest(text.source, text.plan.options)


def find_measurements(profile: Profile, path: Path | None = None) -> tuple[Measurements | None, tuple[str, ...]]:
    """What was measured on a kind of GPU, None where nothing was; and what there is to say of it.

    With that GPU in the machine only what was measured with its driver and the versions installed counts.  Without
    it the driver and the compiler may be any: the latest measurements with these releases of onnxfuse and ONNX
    Runtime count.  Statistics from production count with these releases, whatever the driver and the compiler were.

    Args:
        profile: the GPU to plan for.
        path: of the database; by default the one of ``measuring.database.default_path``, where it is there.

    Raises:
        MeasurementError: the database is damaged, or there is none at ``path``.
    """
    database = find_database(path)
    if database is None:
        return None, ()
    here = _here(profile)
    known = [environment for environment in database.environments() if profile.is_called(environment.gpu)]
    recorded = database.recorded_in()
    own = [environment for environment in known
           if (environment == here if here is not None else _same_releases(environment))]
    seen_in = tuple(environment for environment in (*own[:1], *known)
                    if environment in recorded and _same_releases(environment))
    measured = database.measured_in()
    notes = () if own else tuple(_stale(environment) for environment in known
                                 if environment in measured or environment not in seen_in)[:1]
    place = own[0] if own else here
    if place is None or not (own or seen_in):
        database.close()
        return None, notes
    return Measurements(database, place, tuple(dict.fromkeys(seen_in))), notes


def environment_of(gpu: str) -> Environment:
    """The environment of what is measured in this process on the GPU of that name."""
    return Environment(gpu, driver_version() or "", __version__, str(onnxruntime.__version__), compiler() or "")


def _here(profile: Profile) -> Environment | None:
    """The environment of this machine, where the GPU to plan for is in it."""
    return next((environment_of(gpu.name) for gpu in present_gpus() if profile.is_called(gpu.name)), None)


def _same_releases(known: Environment) -> bool:
    return (known.onnxfuse, known.onnxruntime) == (__version__, str(onnxruntime.__version__))


def _stale(known: Environment) -> str:
    return (f"database: what was measured on {known.gpu} is not used: it was with driver {known.driver or 'unknown'}, "
            f"onnxfuse {known.onnxfuse}, ONNX Runtime {known.onnxruntime} and {known.cuda or 'no compiler'}; "
            "`onnxfuse tune` measures with what is here")


@contextmanager
def opened(database: Place, profile: Profile) -> Iterator[tuple[Measurements | None, tuple[str, ...]]]:
    """What a database says of a GPU, as long as it is open, and what there is to say of it.

    Raises:
        MeasurementError: as ``find_measurements``.
    """
    if database is False:
        yield None, ()
        return
    found, notes = find_measurements(profile, None if database is None else Path(database))
    if found is None:
        yield None, notes
        return
    with found.database:
        yield found, notes


def observing(
    ledger: Ledger, profile: Profile, model: onnx.ModelProto, run_profile: str | Path | None
) -> tuple[Ledger, tuple[str, ...]]:
    """A ledger that knows what a profile of a run shows, and what there is to say of the profile; the same ledger
    where there is none.

    Args:
        model: the ledger's graph comes from it.
        run_profile: file that ONNX Runtime wrote.

    Raises:
        MeasurementError: as ``measuring.run_profile.read_run_profile``.
    """
    if run_profile is None:
        return ledger, ()
    observed = observe(read_run_profile(run_profile).nodes, ledger.graph, model, ledger, profile)
    inner = {
        node: observed.bodies[node.name]
        for body in ledger.graph.walk() for node in body.nodes
        if body is not ledger.graph and node.name in observed.bodies
    }
    return Ledger(ledger.graph, ledger.sizes, ledger.placement, {**inner, **observed.nodes}), observed.notes
