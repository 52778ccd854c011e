"""Kernels compiled before anything runs: what the compiler made of them, in the planner's terms.

NVRTC needs no GPU and no driver.  Images come from the cache on disk where they are, and go there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

from onnxfuse.errors import KernelError
from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.runtime.compile import Compiler, KernelSource, check_architecture, default_compiler
from onnxfuse.runtime.figures import KernelFigures
from onnxfuse.runtime.library import native_architecture, present_gpus
from onnxfuse.runtime.processes import compiler_pool, workers
from onnxfuse.schedules import Kernel

Progress = Callable[[int, int], None]
"""Called with the images that are done and those that there will be."""

Made = TypeVar("Made")

Task = tuple[KernelSource, str]
"""A kernel, and the architecture to compile it for."""

COMPILING = "compiling kernels"
"""What a stage is called that compiles."""

_PROBE = KernelSource('extern "C" __global__ void probe() {}', (), ("probe",))
"""Shows whether this machine's compiler compiles, and whether it is understood."""


def compile_all(
    tasks: Sequence[Task], make: Callable[[KernelSource, str], Made], progress: Progress | None = None
) -> Iterator[tuple[Task, Made | KernelError]]:
    """What a compiler makes of several kernels, as it comes, or why there is none; several at once.

    Args:
        tasks: each once.
        make: a method of a ``Compiler``.
        progress: called in this thread, after each kernel.

    Raises:
        OutputError: a kernel cannot be dumped.
    """
    with compiler_pool(), ThreadPoolExecutor(workers(), "onnxfuse-compile") as pool:
        running = {pool.submit(make, *task): task for task in _longest_first(tasks)}
        try:
            for done, future in enumerate(as_completed(running), 1):
                try:
                    made: Made | KernelError = future.result()
                except KernelError as error:
                    made = error
                if progress is not None:
                    progress(done, len(tasks))
                yield running[future], made
        finally:
            pool.shutdown(cancel_futures=True)


def _longest_first(tasks: Sequence[Task]) -> list[Task]:
    """A long text that were begun last would have the processors to itself."""
    return sorted(tasks, key=lambda task: -len(task[0].source))


class ReadBack:
    """``planning.spills.Compiled`` from what NVRTC says for one architecture."""

    def __init__(self, architecture: str, progress: Progress | None = None, compiler: Compiler | None = None,
                 whole: bool = True) -> None:
        self.architecture, self.whole = architecture, whole
        self._asked = _as_sessions_do(architecture)
        self._progress, self._compiler = progress, compiler or default_compiler()
        self._known: dict[KernelSource, Mapping[str, KernelFigures] | KernelError | None] = {}
        self._begun: dict[KernelSource, Future[dict[str, KernelFigures] | None]] = {}

    def begin(self, kernels: Sequence[Kernel]) -> None:
        """See ``Compiled``."""
        pool = ThreadPoolExecutor(workers(), "onnxfuse-compile")
        for source, architecture in _longest_first(self._missing(kernels)):
            if source not in self._begun:
                self._begun[source] = pool.submit(self._compiler.figures, source, architecture)
        pool.shutdown(wait=False)  # its threads end behind the last of them

    def arriving(self, kernels: Sequence[Kernel]) -> Iterator[Kernel]:
        """See ``Compiled``."""
        texts = {source_of(kernel.source, kernel.plan): kernel for kernel in kernels}
        missing = self._missing(kernels)
        asked = {source for source, _ in missing}
        yield from (kernel for source, kernel in texts.items() if source not in asked)
        for (source, _), found in compile_all(missing, self._made, self._progress):
            lost = [name for name in source.kernels if name not in found] if isinstance(found, dict) else []
            self._known[source] = KernelError(f"its text has no kernel called {lost[0]!r}") if lost else found
            yield texts[source]

    def figures(self, kernels: Sequence[Kernel]) -> list[Mapping[str, KernelFigures] | KernelError | None]:
        """See ``Compiled``."""
        deque(self.arriving(kernels), 0)
        return [self._known.get(source_of(kernel.source, kernel.plan)) for kernel in kernels]

    def _missing(self, kernels: Sequence[Kernel]) -> list[Task]:
        sources = dict.fromkeys(source_of(kernel.source, kernel.plan) for kernel in kernels)
        return [(source, self._asked) for source in sources if source not in self._known and source.kernels]

    def _made(self, source: KernelSource, architecture: str) -> Mapping[str, KernelFigures] | None:
        begun = self._begun.pop(source, None)
        return self._compiler.figures(source, architecture) if begun is None else begun.result()


def source_of(text: str, plan: LaunchPlan) -> KernelSource:
    """A region's kernels as the compiler takes them."""
    return KernelSource(text, tuple(plan.options), plan.kernels)


def _is_here(sm: int) -> bool:
    """Whether sessions on this machine run on such a GPU."""
    return any(gpu.capability == divmod(sm, 10) for gpu in present_gpus())


def _as_sessions_do(architecture: str) -> str:
    """What a session compiles for on a GPU of that architecture, so that it finds here what it would compile again."""
    return native_architecture(int(architecture.removeprefix("sm_")))


def read_back(profile: Profile, progress: Progress | None = None) -> tuple[ReadBack | None, tuple[str, ...]]:
    """What reads back the kernels for a GPU, or None; and what there is to say where there should be one.  Where this
    machine has such a GPU, all is compiled that its sessions ask for."""
    if not profile.architecture:
        return None, ()
    try:
        check_architecture(profile.architecture)
        understood = default_compiler().figures(_PROBE, _as_sessions_do(profile.architecture))
    except KernelError as error:
        return None, (f"kernels were not compiled, so that none was looked at for spilled registers: {error.message}",)
    if understood is None:
        return None, ("no kernel was looked at for spilled registers: this release does not understand what the "
                      "compiler says of its kernels",)
    return ReadBack(profile.architecture, progress, whole=_is_here(profile.sm)), ()
