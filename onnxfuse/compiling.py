"""Kernels compiled before anything runs: what the compiler made of them, in the planner's terms.

NVRTC needs no GPU and no driver.  Images come from the cache on disk where they are, and go there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from onnxfuse.errors import KernelError
from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.planning.hardware import Profile
from onnxfuse.runtime.compile import Compiler, KernelSource, check_architecture, default_compiler
from onnxfuse.runtime.figures import KernelFigures, read_figures
from onnxfuse.schedules import Kernel

Progress = Callable[[int, int], None]
"""Called with the images that are done and those that there will be."""

Task = tuple[KernelSource, str]
"""A kernel, and the architecture to compile it for."""

COMPILING = "compiling kernels"
"""What a stage is called that compiles."""

_MOST_WORKERS = 16

_PROBE = KernelSource('extern "C" __global__ void probe() {}', (), ("probe",))
"""Shows whether this machine's compiler compiles, and whether its images can be read."""


def compile_all(
    tasks: Sequence[Task], progress: Progress | None = None, compiler: Compiler | None = None
) -> Iterator[tuple[Task, bytes | KernelError]]:
    """The images of several kernels as they come, compiled in parallel, or why there is none.

    Args:
        tasks: each once.
        progress: called in this thread, after each image.
        compiler: with its cache; by default the one that sessions of this process use.

    Raises:
        OutputError: a kernel cannot be dumped.
    """
    maker = compiler or default_compiler()
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1), "onnxfuse-compile") as pool:
        running = {pool.submit(maker.image, *task): task for task in tasks}
        try:
            for done, future in enumerate(as_completed(running), 1):
                try:
                    image: bytes | KernelError = future.result()
                except KernelError as error:
                    image = error
                if progress is not None:
                    progress(done, len(tasks))
                yield running[future], image
        finally:
            pool.shutdown(cancel_futures=True)


class ReadBack:
    """``planning.spills.Compiled`` from NVRTC's images for one architecture."""

    def __init__(self, architecture: str, progress: Progress | None = None, compiler: Compiler | None = None) -> None:
        self.architecture = architecture
        self._progress, self._compiler = progress, compiler
        self._known: dict[KernelSource, Mapping[str, KernelFigures] | KernelError] = {}

    def figures(self, kernels: Sequence[Kernel]) -> list[Mapping[str, KernelFigures] | KernelError]:
        """See ``Compiled``.

        Raises:
            KernelError: an image cannot be read.
            OutputError: as ``compile_all``.
        """
        sources = [source_of(kernel.source, kernel.plan) for kernel in kernels]
        missing = [source for source in dict.fromkeys(sources) if source not in self._known]
        tasks = [(source, self.architecture) for source in missing]
        for (source, _), image in compile_all(tasks, self._progress, self._compiler):
            self._known[source] = image if isinstance(image, KernelError) else _figures(source, image)
        return [self._known[source] for source in sources]


def _figures(source: KernelSource, image: bytes) -> Mapping[str, KernelFigures] | KernelError:
    """The figures of all kernels that an image must hold."""
    found = read_figures(image)
    missing = [name for name in source.kernels if name not in found]
    return KernelError(f"its text has no kernel called {missing[0]!r}") if missing else found


def source_of(text: str, plan: LaunchPlan) -> KernelSource:
    """A region's kernels as the compiler takes them."""
    names = sorted({step.kernel for variant in plan.variants for step in variant.steps})
    return KernelSource(text, tuple(plan.options), tuple(names))


def read_back(profile: Profile, progress: Progress | None = None) -> tuple[ReadBack | None, tuple[str, ...]]:
    """What reads back the kernels for a GPU, or None; and what there is to say where there should be one."""
    if not profile.architecture:
        return None, ()
    try:
        check_architecture(profile.architecture)
        read_figures(default_compiler().image(_PROBE, profile.architecture))
    except KernelError as error:
        return None, (f"kernels were not compiled, so that none was looked at for spilled registers: {error.message}",)
    return ReadBack(profile.architecture, progress), ()
