"""Work in processes of its own, so that a crash there ends nothing here; and several that get ready side by side, of
which one is timed at a time."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
Ready = Callable[[], None]

SETTLED = 0.1
"""Seconds after which the GPU is done with what a process had launched that was stopped."""

DEATH_SIGNAL = 1
"""Linux's number (PR_SET_PDEATHSIG) of what a process gets when the one dies that started it."""

PATIENCE = 10.0
"""Seconds that one has to end once it has answered."""

OVER = "not measured: the time for all was over"
"""What becomes of those that had no turn."""


class ApartError(Exception):
    """Work in a process of its own failed; the message says how."""

    @property
    def brief(self) -> str:
        """The last line of it."""
        return str(self).strip().splitlines()[-1]


@dataclass(frozen=True)
class Turn:
    """A function of a module and what it is given, and, last, what it calls once it is ready to be timed, which returns
    when its turn has come."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class Turns:
    """Functions that get ready, ``abreast`` at most, and stand still while one of them is timed.

    Each may take ``seconds`` to get ready and as many when it is its turn; none starts, nor has its turn, once
    ``within`` seconds are over.
    """

    abreast: int = 1
    seconds: float = 600
    within: float = inf
    _working: dict[Connection, tuple[Turn, _Process]] = field(default_factory=dict)

    def taken(self, turns: Sequence[Turn]) -> Iterator[tuple[Turn, Any, float]]:
        """Each with what it gave, or the ApartError that tells why it gave nothing, and the seconds of its process, as
        they end."""
        waiting, until = list(reversed(turns)), time.monotonic() + self.within
        try:
            while (waiting or self._working) and time.monotonic() < until:
                while waiting and len(self._working) < self.abreast:
                    turn = waiting.pop()
                    process = _Process(turn.function, turn.arguments, self.seconds, waits=True)
                    self._working[process.connection] = turn, process
                yield from self._next(until)
            for turn in [*(turn for turn, _ in self._working.values()), *reversed(waiting)]:
                yield turn, ApartError(OVER), 0.0
        finally:
            for _, process in self._working.values():
                process.end()
            self._working.clear()

    def _next(self, until: float) -> Iterator[tuple[Turn, Any, float]]:
        """Those that end next, if any do before one's time is over."""
        patience = min(until, *(process.until for _, process in self._working.values())) - time.monotonic()
        heard = wait(list(self._working), max(0.0, patience))
        for turn, process in [self._working[each] for each in list(self._working) if each in heard]:
            answer = self._answer(process, until)
            yield turn, answer, self._ended(process, 0 if isinstance(answer, ApartError) else PATIENCE)
        for turn, process in list(self._working.values()):
            if process.until <= time.monotonic():
                yield turn, ApartError(f"it took more than {self.seconds:.0f} s"), self._ended(process, 0)

    def _answer(self, process: _Process, until: float) -> Any:
        """What one has that said something; its turn, if it is ready."""
        try:
            answer = process.answer(0)
            if answer is not _State.READY:
                return answer
            if (left := until - time.monotonic()) <= 0:
                return ApartError(OVER)
            with self._alone(process):
                process.go_on()
                return process.answer(min(self.seconds, left))
        except ApartError as error:
            return error

    def _ended(self, process: _Process, patience: float) -> float:
        del self._working[process.connection]
        return process.end(patience)

    @contextmanager
    def _alone(self, process: _Process) -> Iterator[None]:
        """While the others stand still, which costs them none of their time."""
        start, others = time.monotonic(), [each for _, each in self._working.values() if each is not process]
        for other in others:
            other.signal(signal.SIGSTOP)
        try:
            time.sleep(SETTLED if others else 0)
            yield
        finally:
            for other in others:
                other.until += time.monotonic() - start
                other.signal(signal.SIGCONT)


def apart(function: Callable[..., Result], *arguments: Any, seconds: float = 600) -> Result:
    """The result of a function of a module, computed in a fresh process: a crash there ends nothing here.

    Raises:
        ApartError: it raised, died or took more than ``seconds``.
    """
    process, patience = _Process(function, arguments, seconds), 0.0
    try:
        result: Result = process.answer(seconds)
        patience = PATIENCE
        return result
    except ApartError:
        patience = PATIENCE if time.monotonic() < process.until else 0.0
        raise
    finally:
        process.end(patience)


class _State(Enum):
    """Of one that has no answer yet."""

    READY = "ready"


class _Process:
    """One that works; ``until``: when it has had its time to get ready."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], seconds: float, waits: bool = False
                 ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.started = time.monotonic()
        self.until = self.started + seconds
        self._process = context.Process(target=_answer, args=(theirs, function, arguments, waits))
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """What it has computed by then, or that it is ready.

        Raises:
            ApartError: it raised, died or took longer.
        """
        if not self.connection.poll(max(0.0, seconds)):
            raise ApartError(f"it took more than {seconds:.0f} s")
        try:
            failed, answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if failed:
            raise ApartError(answer)
        return answer

    def go_on(self) -> None:
        """Tell it that its turn has come.

        Raises:
            ApartError: it died.
        """
        try:
            self.connection.send(None)
        except OSError:
            raise self._died() from None

    def _died(self) -> ApartError:
        self._process.join(PATIENCE)
        return ApartError(f"its process ended with exit code {self._process.exitcode}")

    def signal(self, number: signal.Signals) -> None:
        """Stop it and what it started, or have them go on, or end; nothing where it has ended."""
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:  # it has not begun yet, or is gone
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def end(self, patience: float = 0) -> float:
        """It is there no more, whatever it did; the seconds that it was."""
        if self._process.is_alive():
            self._process.join(patience)
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join()
        return time.monotonic() - self.started


def _answer(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any], waits: bool) -> None:
    os.setsid()  # so that what it starts is stopped with it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # nobody else would have it go on
    if waits:
        arguments = (*arguments, partial(_ready, connection))
    try:
        answer = False, function(*arguments)
    except Exception:
        answer = True, traceback.format_exc()
    connection.send(answer)
    connection.close()


def _ready(connection: Connection) -> None:
    connection.send((False, _State.READY))
    connection.recv()
