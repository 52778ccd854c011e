"""How long verification may take, and how much memory a run may hold.

A model may loop for ever, or have sizes that no memory holds:

    before a run ─ what its known sizes come to ─▶ smaller sizes, or no run
    in a run     ─ the time that is left ────────▶ ONNX Runtime is told to end it
                 ─ what no size tells ───────────▶ an allocation past the limit fails, and so does the run
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import onnxruntime

from onnxfuse.errors import VerificationError
from onnxfuse.graph.sizes import bytes_of
from onnxfuse.planning.costs.memory import peak_memory
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.wording import option

Result = TypeVar("Result")

SECONDS = 600.0
"""Seconds for the whole of a verification, where nobody says otherwise."""

GRACE = 10.0
"""Seconds that ONNX Runtime has to end a run once it is told to: it looks after every node."""

SHARE = 0.8
"""Of the memory that is free when verification begins, what its runs may hold."""

_LACK = ("bad_alloc", "Failed to allocate memory", "Unable to allocate", "Cannot allocate memory")
"""What ONNX Runtime, and the system, say where there is no memory left."""

_GROUPS = (("memory.max", "memory.current", "memory.stat", "inactive_file"),
           ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
            "total_inactive_file"))
"""Of a control group of version 2 and of version 1: files of what it may hold, of what it holds, of details, and what
these call memory that the system gives back when it is asked for."""


class BoundsError(VerificationError):
    """A verification has used what it may use."""


class OutOfTimeError(BoundsError):
    """The time for a verification is up."""


class OutOfMemoryError(BoundsError):
    """A run would hold, or held, more memory than it may."""

    def __init__(self, message: str = "A run takes more memory than it may hold here.") -> None:
        super().__init__(message, remedy=f"Give smaller sizes, {option('dim', 'NAME=N')}, or verify on a machine with "
                                         "more memory.")


@dataclass(frozen=True)
class Bounds:
    """What a verification may use.

    Attributes:
        seconds: for all of it, counted from when this was made; None for as many as it takes.
        memory: bytes that a run may hold beside what the process holds already; None for all that there are.
    """

    seconds: float | None = None
    memory: int | None = None
    start: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(seconds: float = SECONDS) -> Bounds:
        """So many seconds from now on, 0 for as many as it takes, and a share of the memory that is free."""
        free = available_memory()
        return Bounds(seconds or None, None if free is None else int(SHARE * free))

    def left(self) -> float | None:
        """Seconds that are left.

        Raises:
            OutOfTimeError: none are.
        """
        if self.is_over:
            raise self._late()
        return None if self.seconds is None else max(self.start + self.seconds - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.seconds is not None and time.monotonic() >= self.start + self.seconds

    def _late(self) -> OutOfTimeError:
        return OutOfTimeError(
            f"Verification was ended after {self.seconds:g} s.",
            remedy=f"Give it more time, {option('verify-seconds', 'N')}, or smaller sizes, "
                   f"{option('dim', 'NAME=N')}.",
        )

    def result(self, future: Future[Result]) -> Result:
        """What comes of work in another thread.

        Raises:
            OutOfTimeError: it takes longer than there is time.
        """
        while not future.done():
            wait([future], self.left())
        return future.result()

    def check_memory(self, ledger: Ledger) -> None:
        """Look at what a run of a ledger's graph at its sizes would hold, as far as these are known before it.

        Raises:
            OutOfMemoryError: more than it may.
        """
        needed = 0 if self.memory is None else run_bytes(ledger)
        if self.memory is not None and needed > self.memory:
            raise OutOfMemoryError(
                f"A run would hold {needed / 1e9:,.1f} GB, and may hold {self.memory / 1e9:,.1f} GB here.")

    def holds(self, ledger: Ledger, times: int, more: int = 0) -> bool:
        """Whether so many runs of a ledger's graph at once, and some bytes beside them, hold no more than they may;
        not where a size shows in a run alone."""
        if self.memory is None:
            return True
        given = {name for value in ledger.graph.inputs for size in value.shape or () for name in size.symbols}
        sizes = {name: ledger.sizes[name] for name in given}
        values = (value for part in ledger.graph.walk() for value in part.values.values())
        known = all(bytes_of(value, sizes) is not None for value in values)
        return known and times * run_bytes(ledger) + more <= self.memory

    def run(self, work: Callable[[onnxruntime.RunOptions], Result]) -> Result:
        """What ``work`` gives, which must run under these options: in a thread of its own, so that no run can hold up
        the program.  One that does not end when it is told to is left behind.

        Raises:
            OutOfTimeError: it took longer than there was time.
        """
        options = onnxruntime.RunOptions()
        left = self.left()
        if left is None:
            return work(options)
        under_way = Beside(lambda: work(options))
        late = True
        try:
            late = not under_way.ends_within(left)
        finally:
            if late:
                options.terminate = True
                under_way.ends_within(GRACE)
        if late:
            raise self._late()
        return under_way.result()

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Let allocations fail, while it lasts, that would take the process past the limit: without that the system
        would end some process instead, as it gives memory away that it does not have."""
        held = _data_bytes()
        if self.memory is None or held is None:
            yield
            return
        with _CHANGING:
            soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
            before = _data_limit(held + self.memory if soft == resource.RLIM_INFINITY
                                 else min(held + self.memory, soft))
        try:
            yield
        finally:
            with _CHANGING:
                _data_limit(before)


_CHANGING = Lock()
"""Held while the process's limit is another than before and after."""


def _data_limit(limit: int | None) -> int:
    """Let the process's data take no more than this, or, where None, all that it may; what the limit was."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard if limit is None else limit, hard))
    return before


class Beside(Generic[Result]):
    """Work in a thread of its own, which starts whatever ``within_memory`` leaves: a thread that finds no memory
    before it has said that it runs is waited for for ever by ``Thread.start``."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), name="onnxfuse-beside", daemon=True)
        with _CHANGING:
            before = _data_limit(None)
            try:
                self._thread.start()
            finally:
                _data_limit(before)

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._results.append(work())
        except BaseException as error:  # it belongs to whoever waits
            self._error = error

    def __enter__(self) -> Beside[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, after so many seconds at most."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result:
        """What comes of it, or what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


NONE = Bounds()
"""No bounds."""


@dataclass(frozen=True)
class UntilEnded(Bounds):
    """Those of runs that another thread may end."""

    options: onnxruntime.RunOptions = field(default_factory=onnxruntime.RunOptions)

    def run(self, work: Callable[[onnxruntime.RunOptions], Result]) -> Result:
        """What ``work`` gives; it fails once it is ended."""
        return work(self.options)

    def end(self) -> None:
        """Tell ONNX Runtime to end what runs, and what will."""
        self.options.terminate = True


class BoundSession:
    """A session whose runs end when the time is up."""

    def __init__(self, session: Any, bounds: Bounds) -> None:
        self._session, self._bounds = session, bounds

    def run(self, names: list[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """As ``InferenceSession.run``.

        Raises:
            OutOfTimeError: the time is up.
        """
        return self._bounds.run(lambda options: self._session.run(names, dict(feeds), options))

    def within(self, bounds: Bounds) -> BoundSession:
        """The same session with other bounds."""
        return BoundSession(self._session, bounds)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: ONNX Runtime has no exception of its own for that."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _LACK)


def run_bytes(ledger: Ledger) -> int:
    """Bytes that a run holds at once on the CPU, where nothing is fused: what is alive at the worst moment, and the
    results once more, or the most that one node reads and writes; sizes that are not known count nothing."""
    graph, sizes = ledger.graph, ledger.sizes
    results = sum(ledger.bytes_of(value) or 0 for value in graph.outputs)
    given = sum(ledger.bytes_of(value) or 0 for value in graph.inputs)
    alone = [sum(bytes_of(value, sizes) or 0 for value in {*node.reads(), *filter(None, node.outputs)})
             for part in graph.walk() for node in part.nodes]
    return max(peak_memory(ledger).peak + results, given + results, *alone, 0)


def available_memory() -> int | None:
    """Bytes that the process could still get without pushing anything out: what is free, also of what its control group
    may have; None where the system does not tell."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(1024 * _entry(Path("/proc/meminfo"), "MemAvailable:"))
    folder = Path("/sys/fs/cgroup")
    for most, used, details, cached in _GROUPS:
        with suppress(OSError, ValueError, KeyError):  # "max" where there is no limit
            limit, held = int((folder / most).read_text()), int((folder / used).read_text())
            found.append(limit - held + _entry(folder / details, cached))
    return max(min(found), 0) if found else None


def _data_bytes() -> int | None:
    """What the process holds of what RLIMIT_DATA limits."""
    with suppress(OSError, ValueError, KeyError):
        return 1024 * _entry(Path("/proc/self/status"), "VmData:")
    return None


def _entry(path: Path, name: str) -> int:
    """A number in a file of lines of names and numbers.

    Raises:
        KeyError: it has no such line.
    """
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise KeyError(name)
