"""The native library seen from Python: where it lies and what it exports besides ONNX Runtime's entry."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfuse.errors import KernelError, OutputError, RuntimeLibraryError

CompileCallback = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
)
"""Source, options and kernel names (one a line), architecture, device, reply: see native/images.h."""


_FIRST_WITH_OWN = 90
"""From here on a generation has instructions that no later one need have."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows, by ordinal; ``driver`` is the newest CUDA that the driver runs, as (13, 0)."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    driver: tuple[int, int]

    @property
    def architecture(self) -> str:
        """What the native library compiles for."""
        major, minor = self.capability
        return native_architecture(major * 10 + minor)


def native_architecture(sm: int) -> str:
    """What sessions compile for on a GPU: "sm_86" for 86, and "sm_90a" from Hopper on."""
    return f"sm_{sm}" + ("a" if sm >= _FIRST_WITH_OWN else "")


def library_path() -> Path:
    """The native library, for ``register_custom_ops_library`` of any ONNX Runtime binding.

    Returns:
        Its path, which is absolute.

    Raises:
        RuntimeLibraryError: it was not built.
    """
    path = Path(__file__).resolve().parent / "libonnxfuse.so"
    if not path.is_file():
        raise RuntimeLibraryError(
            "the native library of onnxfuse is not built", place=str(path),
            remedy="install the package with g++ at hand: pip install . (or pip install -e .)",
        )
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded native library with its functions typed.

    Raises:
        RuntimeLibraryError: it was not built or does not load.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        text, size = ctypes.c_char_p, ctypes.c_size_t
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "onnxfuse_version": (text, []),
            "onnxfuse_expect_names": (None, [ctypes.c_int]),
            "onnxfuse_set_compile_callback": (None, [ctypes.c_void_p]),
            "onnxfuse_reply_image": (None, [ctypes.c_void_p, text, size]),
            "onnxfuse_reply_error": (None, [ctypes.c_void_p, text]),
            "onnxfuse_set_cache": (None, [text, text]),
            "onnxfuse_get_cache": (size, [text, size]),
            "onnxfuse_cache_key": (size, [text, text, text, text, size]),
            "onnxfuse_devices": (size, [text, size]),
            "onnxfuse_set_recording": (None, [ctypes.c_int]),
            "onnxfuse_statistics": (size, [text, size]),
            "onnxfuse_write_statistics": (size, [text, size]),
            "onnxfuse_evaluate_plan": (size, [text, text, text, size]),
            "onnxfuse_read_json": (size, [text, size, text, size]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise RuntimeLibraryError(
            f"the native library of onnxfuse does not load: {error}", place=str(path),
            remedy="build it again on this machine: pip install --force-reinstall --no-deps onnxfuse",
        ) from error
    return library


def read_text(function: Callable[..., int], *arguments: Any) -> str:
    """The text that a function of the library writes into a buffer, however long."""
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = function(*arguments, buffer, size)
        if needed <= size:
            return buffer.value.decode("utf-8", "replace")
        size = needed


def read_checked(function: Callable[..., int], *arguments: Any) -> str:
    """The same for a function that may fail.

    Raises:
        ValueError: with the library's message.
    """
    kind, _, text = read_text(function, *arguments).partition(":")
    if kind != "ok":
        raise ValueError(text)
    return text


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, by ordinal, without opening a context on any.

    Raises:
        KernelError: there is no driver, or it does not start.
    """
    try:
        raw = json.loads(read_checked(load().onnxfuse_devices))
    except ValueError as error:
        raise KernelError(str(error)) from error
    return tuple(
        Gpu(ordinal, gpu["name"], (gpu["major"], gpu["minor"]), gpu["multiprocessors"],
            (gpu["driver"] // 1000, gpu["driver"] % 1000 // 10))
        for ordinal, gpu in enumerate(raw)
    )


def present_gpus() -> tuple[Gpu, ...]:
    """``gpus``; none where there is no driver, or no library to ask it."""
    try:
        return gpus()
    except (KernelError, RuntimeLibraryError):
        return ()


def record_runs(on: bool = True) -> None:
    """Count the runs of every fused node, per variant of its launch plan; ``statistics`` shows them."""
    load().onnxfuse_set_recording(int(on))


def statistics() -> dict[str, Any]:
    """What the library did in this process.

    ``images``: how many kernel images were ``embedded``, ``cached`` and ``compiled``, and how many the driver compiled
    of embedded ``ptx``.  ``kernels``: the fused nodes of
    the live sessions, each with ``node``, ``op``, ``region``, ``variants`` (their names) and ``runs`` (per variant,
    while ``record_runs`` is on).
    """
    statistics: dict[str, Any] = json.loads(read_checked(load().onnxfuse_statistics))
    return statistics


def write_statistics() -> tuple[Path, ...]:
    """Write the statistics files of this process now, with what is known by then; their paths.

    Each is written anyway when the last session that adds to it ends, and when the process does.  There is none where
    ``ONNXFUSE_STATISTICS`` was not set when a session was created.

    Raises:
        OutputError: a file cannot be written.
    """
    try:
        return tuple(map(Path, json.loads(read_checked(load().onnxfuse_write_statistics))))
    except ValueError as error:
        raise OutputError(
            str(error), remedy="Choose a file whose folder is there and has room: ONNXFUSE_STATISTICS=FILE.",
        ) from error
