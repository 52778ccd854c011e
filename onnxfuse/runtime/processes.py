"""A pool of processes that compile.

NVRTC's threads wait for one another: what takes one thread 8.3 s takes sixteen 2.3 s and sixteen processes 1.3 s, and
half the processors' time.  A process that a text brings down takes nothing else with it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxfuse.errors import KernelError
from onnxfuse.processors import processors
from onnxfuse.runtime import nvrtc_library
from onnxfuse.runtime.nvrtc import binding, library_path
from onnxfuse.runtime.nvrtc_library import COMPILATION, Answer, compiled

LEAST_PROCESSORS = 4
"""Fewer compile as fast in threads."""

MOST_WORKERS = 16

STARTS_WITHIN = 10.0
"""Seconds until a process that has not said anything is taken for none."""


def workers() -> int:
    """Texts that are compiled at once."""
    return min(MOST_WORKERS, processors())


class CompilerProcess:
    """A process that compiles one text after the other.

    Raises:
        OSError: it does not start, or is another compiler.
    """

    def __init__(self, library: str, version: tuple[int, int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", nvrtc_library.__file__, library],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._texts, self._answers = self._process.stdin, self._process.stdout
        try:
            ready, _, _ = select.select([self._answers], [], [], STARTS_WITHIN)
            if not ready or pickle.load(self._answers) != version:
                raise OSError(f"{sys.executable} does not compile with {library}")
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.kill()
            self.end()
            raise OSError(str(error)) from error

    def compiled(self, source: str, arguments: Sequence[str], ptx: bool) -> Answer:
        """As ``nvrtc_library.compiled``.

        Raises:
            KernelError: the process ended.
        """
        try:
            pickle.dump((source, tuple(arguments), ptx), self._texts)
            self._texts.flush()
            answer: Answer = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self.end()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise KernelError(f"the compiler ended with {how}") from error
        return answer

    def finish(self) -> None:
        """Let it end, as there is nothing more to do."""
        with suppress(OSError):  # what it did not read
            self._texts.close()

    def end(self) -> int:
        """Wait until it has ended, and say how it did."""
        self.finish()
        self._answers.close()
        return self._process.wait()


class CompilerPool:
    """Processes that are started as texts come, and end with the last context that is open."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._room = threading.Semaphore(workers())
        self._open, self._idle = 0, list[CompilerProcess]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compile in processes meanwhile, where that is worth it."""
        with self._guard:
            self._open += 1
        try:
            yield
        finally:
            with self._guard:
                self._open -= 1
                ended = [] if self._open else self._idle
                self._idle = self._idle if self._open else []
            for process in ended:
                process.finish()
            for process in ended:
                process.end()

    def compiled(self, source: str, arguments: Sequence[str], ptx: bool) -> Answer:
        """As ``nvrtc_library.compiled``; in this process where no context is open, or no other starts.

        Raises:
            KernelError: there is no compiler, or it ended at this text.
        """
        if self._open and processors() >= LEAST_PROCESSORS:
            with self._room:
                process = self._process()
                if process is not None:
                    answer = process.compiled(source, arguments, ptx)
                    self._give_back(process)
                    if not answer[2] or COMPILATION in answer[2]:
                        return answer
        # What is no fault of the text, as a library that was not found from there, is tried here.
        return compiled(binding(), source, arguments, ptx)

    def _process(self) -> CompilerProcess | None:
        with self._guard:
            if self._idle:
                return self._idle.pop()
        library, interpreter = library_path(), Path(sys.executable or "").name
        # A program that Python is embedded in, or packed into, would be started in its place.
        if library is None or not interpreter.startswith("python") or hasattr(sys, "frozen"):
            return None
        try:
            return CompilerProcess(library, binding().getVersion())
        except OSError:
            return None

    def _give_back(self, process: CompilerProcess) -> None:
        with self._guard:
            if self._open:
                self._idle.append(process)
                return
        process.end()


compiler_pool = CompilerPool()
"""That of this process."""

os.register_at_fork(after_in_child=compiler_pool.__init__)  # type: ignore[misc]
