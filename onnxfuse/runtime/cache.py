"""Compiled kernels on disk: one file a kernel, in a folder per compiler.

An entry is a line that names the format, the SHA-256 of the image, and the image.  The native library reads the same
files (native/images.cc), so that a program without Python starts from a warm cache too.  Entries are written beside
their place and renamed into it: whoever reads meets a whole entry or none, and the last of several writers wins with
the same bytes.  A torn or changed entry counts as missing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"onnxfuse image 1\n"


def default_folder() -> Path | None:
    """``$ONNXFUSE_CACHE_DIR``, else ``$XDG_CACHE_HOME/onnxfuse``, else ``~/.cache/onnxfuse``; None with no home."""
    if folder := os.environ.get("ONNXFUSE_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "onnxfuse"
    if home := os.environ.get("HOME"):
        return Path(home) / ".cache" / "onnxfuse"
    return None


def digest(source: str, options: Sequence[str]) -> str:
    """Name of a kernel text with its options, 64 hexadecimal digits; native/images.cc computes the same."""
    return hashlib.sha256(("\n".join(options) + "\0" + source).encode()).hexdigest()


def key(source: str, options: Sequence[str], architecture: str) -> str:
    """File name of an entry; native/images.cc computes the same."""
    return f"{architecture}-{digest(source, options)}.cubin"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, all of it or nothing, and the folders above it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


_warned: set[Path] = set()


@dataclass(frozen=True)
class Cache:
    """The entries of one compiler ("nvrtc-13.0") below ``folder``; no folder, no cache."""

    folder: Path | None
    compiler: str

    def path(self, name: str) -> Path | None:
        """Where the entry of this name lies."""
        return None if self.folder is None else self.folder / self.compiler / name

    def read(self, name: str) -> bytes | None:
        """The image, or None where the entry is missing, unreadable or corrupt."""
        path = self.path(name)
        try:
            raw = b"" if path is None else path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + 65
        image = raw[start:]
        if not image or raw[:start] != _header(image):
            return None
        return image

    def write(self, name: str, image: bytes) -> bool:
        """Keep an image.  Where the folder cannot be written, warn once and go on without: False."""
        path = self.path(name)
        if path is None:
            return False
        try:
            write_whole(path, _header(image) + image)
        except OSError as error:
            if path.parent not in _warned:
                _warned.add(path.parent)
                warnings.warn(
                    f"the kernel cache {path.parent} cannot be written ({error.strerror}); kernels are compiled again "
                    "in every process; set ONNXFUSE_CACHE_DIR to a folder that can be written",
                    RuntimeWarning, stacklevel=2,
                )
            return False
        return True


def _header(image: bytes) -> bytes:
    return MAGIC + hashlib.sha256(image).hexdigest().encode() + b"\n"
