"""Kernels compiled ahead of their turn, while the GPU measures others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import KernelSource
from onnxfuse.runtime.processes import compiler_pool, workers
from onnxfuse.schedules import Kernel
from onnxfuse.tuning.timer import Timer

AHEAD = 2
"""Kernels that wait to be compiled, times the workers: an order that changes makes few of them useless."""


class Ahead:
    """Workers that compile.  What is not begun at the end never is."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._workers = workers()
        self._pool = ThreadPoolExecutor(self._workers, "onnxfuse-ahead")
        self._processes = compiler_pool()
        self._asked: dict[KernelSource, Future[None]] = {}
        self._waiting: list[Future[None]] = []

    def __enter__(self) -> Ahead:
        self._processes.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._processes.__exit__(kind, error, trace)

    @property
    def full(self) -> bool:
        """Whether enough kernels wait for the workers."""
        self._waiting = [each for each in self._waiting if not each.done()]
        return len(self._waiting) >= (1 + AHEAD) * self._workers

    def add(self, kernel: Kernel) -> None:
        """Begin to compile a kernel, behind those that were added before."""
        source = source_of(kernel.source, kernel.plan)
        if source.kernels and source not in self._asked:
            self._asked[source] = self._pool.submit(self._timer.compile, [source])
            self._waiting.append(self._asked[source])

    def finish(self, kernel: Kernel) -> None:
        """Wait until a kernel is compiled; one that does not compile says so where it is to run."""
        self.add(kernel)
        done = self._asked.get(source_of(kernel.source, kernel.plan))
        if done is not None:
            wait([done])
