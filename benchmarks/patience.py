"""Work in processes of its own, which may end there or never end."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

STARTING = 120.0
"""Seconds in which a process must be there, its imports done."""

ENDED = "the process ends"


@dataclass
class _Worker:
    """A process, what it is at, and until when it may be."""

    process: BaseProcess
    pipe: Connection
    deadline: float
    place: int | None = None

    def stop(self) -> None:
        """At once, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def patiently(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, seconds: float,
) -> Iterator[tuple[int, Any]]:
    """Each item's place and what the function makes of it, in the order in which they are done.

    An item that ends its process gives ``ENDED``, one that takes longer than ``seconds`` says so; the others go on in a
    new process.  The function must be one that a new process can import.
    """
    left = deque(range(len(items)))
    running = [_start(function) for _ in range(min(workers, len(items)))]
    try:
        while running:
            rest = max(0.0, min(worker.deadline for worker in running) - time.monotonic())
            ready = set(wait([worker.pipe for worker in running], rest))
            for worker in list(running):
                if worker.pipe not in ready and time.monotonic() < worker.deadline:
                    continue
                running.remove(worker)
                place, result = worker.place, _answer(worker, seconds)
                if place is None and result is not None:
                    raise RuntimeError(f"a process cannot be started: {result}")
                if place is not None:
                    yield place, result
                if not left:
                    worker.stop()
                    continue
                if worker.pipe.closed:
                    running.append(_start(function))
                    continue
                worker.place, worker.deadline = left.popleft(), time.monotonic() + seconds
                worker.pipe.send(items[worker.place])
                running.append(worker)
    finally:
        for worker in running:
            worker.stop()


def _answer(worker: _Worker, seconds: float) -> Any:
    """What a process sent; of one that is over or late, which is stopped, the words for that."""
    if not worker.pipe.poll():
        worker.stop()
        return f"does not end in {seconds:g} s"
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.stop()
        return ENDED


def _start(function: Callable[[Any], Any]) -> _Worker:
    """A process that says None when it is ready."""
    context = multiprocessing.get_context("spawn")  # a fork would take over locks that threads of the runtime hold
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, time.monotonic() + STARTING)


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    pipe.send(None)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(function(item))
