"""Kernel text to machine code: no GPU and no driver needed.

Kernel text is complete in itself but for the CUDA toolkit's own headers, so that text, options and architecture name
an image for good (together with the compiler's version: it is a folder of the cache).

Where a GPU is present, ``load_kernels`` loads an image as a ``cupy.RawModule``.  The native library is handed the
image, not RawModule's function pointers: these die with the Python object, while a session may outlive the
interpreter that made it; and the library must load images by itself anyway, embedded ones where there is no Python.
"""

from __future__ import annotations

import functools
import re
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import KernelError
from onnxfuse.runtime.allowed import check_options, check_source
from onnxfuse.runtime.cache import Cache, default_folder, key
from onnxfuse.runtime.dump import LINE_INFORMATION, Dump
from onnxfuse.runtime.figures import VERBOSE, KernelFigures, from_bytes, read_log, to_bytes
from onnxfuse.runtime.importing import import_cupy
from onnxfuse.runtime.nvrtc import binding, compiler, headers
from onnxfuse.runtime.processes import compiler_pool, workers

if TYPE_CHECKING:
    import cupy

STANDARD_OPTIONS = ("--std=c++17",)
"""Options that every kernel is compiled with.  Denormals, division and square roots stay exact."""

_KEEPS_IMAGES = (12, 9)
"""Since this version NVRTC keeps what it makes wherever there is a driver.  An image from there comes without a word of
what the compiler made of it, and the cache here serves both."""

_NO_CACHE = "--no-cache"
"""The option that stops it."""

_FIGURES = ".figures"
"""What follows an image's name in that of what the compiler made of it."""


@dataclass(frozen=True)
class KernelSource:
    """What one image is made of: the text, extra compiler options and the kernels that it must hold."""

    source: str
    options: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


PTX = "compute_"
"""What the name of an architecture begins with whose PTX is meant, and not machine code: the compiler's own word."""

_WHOLE = {"sm_90": "sm_90a"}
"""No other GPU runs images for sm_90 than the one that runs those for sm_90a, which has products of four warps."""


def architectures() -> tuple[int, ...]:
    """Architectures that onnxfuse supports, as 90 for sm_90; every shipped kernel compiles for all of them."""
    return (75, 80, 86, 89, 90, 100, 120)


def compile_cubin(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The image alone of ``compile_told``."""
    return compile_told(source, architecture, options)[0]


def compile_told(source: str, architecture: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Machine code or PTX of a kernel text, and what the compiler said.  Takes no cache; safe from several threads.

    Args:
        source: CUDA C++, may hold several kernels.
        architecture: "sm_90" as "sm_86"; both "sm_90" and "sm_90a" mean all that Hopper has.  "compute_90" makes PTX,
            which drivers compile for GPUs from sm_90 on.
        options: options of NVRTC after the standard ones.

    Raises:
        KernelError: the text does not compile (the message holds the compiler's log) or asks for what it may not
            (``runtime.allowed``), the compiler does not know the architecture, or there is no compiler.
    """
    check_architecture(architecture)
    check_options(options)
    check_source(source)
    nvrtc = binding()
    arguments = (
        *STANDARD_OPTIONS, VERBOSE, *((_NO_CACHE,) if nvrtc.getVersion() >= _KEEPS_IMAGES else ()),
        f"--gpu-architecture={_WHOLE.get(architecture, architecture)}",
        *(f"-I{folder}" for folder in headers()), *options,
    )
    image, log, error = compiler_pool.compiled(source, arguments, architecture.startswith(PTX))
    if error:
        raise KernelError(f"a kernel does not compile for {architecture} ({error}):\n{log.strip()}")
    return image, log


def check_architecture(architecture: str) -> None:
    """Do nothing where kernels can be compiled for an architecture.

    Raises:
        KernelError: the compiler does not know it, or there is no compiler.
    """
    nvrtc = binding()
    known = nvrtc.getSupportedArchs()
    if _number(architecture) not in known:
        raise KernelError(
            "NVRTC {}.{}".format(*nvrtc.getVersion()) + f" cannot compile for '{architecture}'",
            remedy="architectures it knows: " + ", ".join(f"sm_{number}" for number in known),
        )


def compiles_for(architecture: str) -> bool:
    """Whether kernels can be compiled for an architecture here: a compiler may be older than a GPU."""
    try:
        check_architecture(architecture)
    except KernelError:
        return False
    return True


def _number(architecture: str) -> int | None:
    """90 of "sm_90", "sm_90a" and "compute_90"; None of what is no architecture."""
    match = re.fullmatch(rf"sm_(\d+)[af]?|{PTX}(\d+)", architecture)
    return None if match is None else int(match[1] or match[2])


@dataclass
class Compiler:
    """Images for one process: from memory, from the cache on disk, or compiled."""

    cache: Cache
    _images: dict[str, bytes] = field(default_factory=dict)
    _figures: dict[str, dict[str, KernelFigures] | None] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def image(self, kernel: KernelSource, architecture: str) -> bytes:
        """The image of one kernel; several threads that ask for the same one compile it once.

        Where ``ONNXFUSE_DUMP`` names a folder, it has line information, and text and image are written there.

        Raises:
            KernelError: as ``compile_cubin``.
            OutputError: the kernel cannot be dumped.
        """
        dump = Dump.wanted(kernel.source, kernel.options, kernel.kernels)
        if dump is None:
            return self._image(kernel, architecture)
        dump.write_source(kernel.source)
        options = (*kernel.options, LINE_INFORMATION)
        image = self._image(replace(kernel, source=dump.traced(kernel.source), options=options), architecture)
        dump.write_image(image, architecture)
        return image

    def figures(self, kernel: KernelSource, architecture: str) -> dict[str, KernelFigures] | None:
        """What the compiler made of a text's kernels, by name, None where it did not say or is not understood; the
        image is in the cache then.

        Raises:
            KernelError: as ``compile_cubin``.
        """
        name = key(kernel.source, kernel.options, _WHOLE.get(architecture, architecture))
        with self._lock(name):
            if name not in self._figures:
                kept = self.cache.read(name + _FIGURES)
                figures = None if kept is None else from_bytes(kept)
                if figures is None:
                    self._compile(name, kernel, architecture)
                else:
                    self._figures[name] = figures
            return self._figures[name]

    def _image(self, kernel: KernelSource, architecture: str) -> bytes:
        name = key(kernel.source, kernel.options, _WHOLE.get(architecture, architecture))
        with self._lock(name):
            image = self._images.get(name) or self.cache.read(name)
            if image is None:
                self._compile(name, kernel, architecture)
            else:
                self._images[name] = image
            return self._images[name]

    def _lock(self, name: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())

    def _compile(self, name: str, kernel: KernelSource, architecture: str) -> None:
        """Compile a kernel, and keep its image and what the compiler says of it."""
        self._images[name], log = compile_told(kernel.source, architecture, kernel.options)
        self.cache.write(name, self._images[name])
        try:
            figures = read_log(log)
        except KernelError:
            figures = None  # The image runs all the same.
        self._figures[name] = figures
        if figures is not None:
            self.cache.write(name + _FIGURES, to_bytes(figures))

    def images(self, kernels: Sequence[KernelSource], architecture: str) -> list[bytes]:
        """The images of several kernels, compiled in parallel, the longest texts first.

        Raises:
            KernelError, OutputError: as ``image``, for the first kernel that fails.
        """
        longest = sorted(range(len(kernels)), key=lambda place: -len(kernels[place].source))
        with compiler_pool(), ThreadPoolExecutor(workers(), "onnxfuse-compile") as pool:
            running = {place: pool.submit(self.image, kernels[place], architecture) for place in longest}
            return [running[place].result() for place in range(len(kernels))]


@functools.cache
def default_compiler() -> Compiler:
    """The compiler and cache that sessions of this process share."""
    return Compiler(Cache(default_folder(), compiler() or ""))


def load_kernels(image: bytes, kernels: Sequence[str], device: int = 0) -> dict[str, cupy.RawKernel]:
    """The kernels of an image, loaded on a GPU through ``cupy.RawModule``.

    Raises:
        KernelError: the GPU refuses the image, or a kernel is not in it.
        OSError: there is no folder for temporary files.
    """
    cupy = import_cupy()
    # CuPy keeps modules by path, so that each image needs a path of its own.
    with tempfile.TemporaryDirectory(prefix="onnxfuse-") as folder, cupy.cuda.Device(device):
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(image)
        try:
            module = cupy.RawModule(path=str(path))
            loaded = {name: module.get_function(name) for name in kernels}
            for kernel in loaded.values():
                kernel.compile()
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelError(f"the GPU does not take a compiled kernel ({', '.join(kernels)}): {error}") from error
    return loaded
