"""The native library's way back to the compiler, taken when a session is created."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import Any

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import library
from onnxfuse.runtime.compile import Compiler, KernelSource, default_compiler, load_kernels
from onnxfuse.runtime.nvrtc import compiler as find_compiler

_lock = threading.Lock()
_installed: Any = None  # ctypes keeps no reference of its own


def install() -> Compiler | None:
    """Give the native library a compiler and the cache's place, once in a process.

    Returns the compiler, or None where there is none: embedded and cached images run without.
    """
    global _installed
    native = library.load()
    compiler = default_compiler()
    with _lock:
        if _installed is None:
            folder = compiler.cache.folder
            native.onnxfuse_set_cache(os.fsencode(folder) if folder else b"", compiler.cache.compiler.encode())
            _installed = library.CompileCallback(_compile)
            if find_compiler() is not None:
                native.onnxfuse_set_compile_callback(ctypes.cast(_installed, ctypes.c_void_p))
                # A session that is created while Python goes down must not call into it.
                atexit.register(native.onnxfuse_set_compile_callback, None)
    return None if find_compiler() is None else compiler


def _compile(source: bytes, options: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
    native = library.load()
    try:
        kernel = KernelSource(source.decode(), _lines(options), _lines(kernels))
        image = default_compiler().image(kernel, architecture.decode())
        _prove(image, kernel.kernels, device)
        native.onnxfuse_reply_image(reply, image, len(image))
    except OnnxfuseError as error:
        native.onnxfuse_reply_error(reply, str(error).encode())
    except BaseException as error:  # ctypes would print it and go on; the session's creator must see it
        native.onnxfuse_reply_error(reply, f"{type(error).__name__}: {error}".encode())


def _prove(image: bytes, kernels: tuple[str, ...], device: int) -> None:
    """Load the kernels through CuPy, so that what the GPU refuses is said in CuPy's words."""
    try:
        load_kernels(image, kernels, device)
    except OSError:
        return  # nowhere to put the image for CuPy; the library loads it from memory and checks it then


def _lines(text: bytes) -> tuple[str, ...]:
    return tuple(text.decode().split("\n")) if text else ()
