"""Compiled kernels on disk: one file a kernel, in a folder per compiler.

An entry is a line that names the format, the SHA-256 of the entry's name and the image, and the image: under another
name it counts as missing, as one does that is torn or changed, no plain file, or longer than any image.  The native
library reads the same files (native/images.cc), so that a program without Python starts from a warm cache too.  Entries
are written beside their place and renamed into it: whoever reads meets a whole entry or none, and the last of several
writers wins with the same bytes.

An image is code, and a digest that anyone can compute does not say whose.  So a folder that belongs to another user, or
that others may write, is not used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.files import Part, sweep_parts

MAGIC = b"onnxfuse image 2\n"

MOST_BYTES = 64 << 20
"""Of an entry; what is longer is none."""


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
    with Part(path) as part:
        part.file.write(content)
        part.file.flush()
        part.put(path)


def distrusted(folder: Path) -> str | None:
    """Why entries of a folder may be somebody else's, or None: another user's, or one that others may write.

    Raises:
        OSError: it cannot be looked at.
    """
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it: chmod go-w"
    return None


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
        """The image, or None where the entry is missing, unreadable, corrupt or another one's."""
        path = self.path(name)
        try:
            raw = b"" if path is None or not self._trusted() else _plain_bytes(path)
        except OSError:
            return None
        start = len(MAGIC) + 65
        image = raw[start:]
        if not image or raw[:start] != _header(name, image):
            return None
        return image

    def _trusted(self) -> bool:
        """Whether entries are one's own; where not, warn once.

        Raises:
            OSError: a folder cannot be looked at.
        """
        assert self.folder is not None
        for folder in (self.folder, self.folder / self.compiler):
            reason = distrusted(folder)
            if reason is not None:
                _warn(folder, f"the kernel cache {folder} is not used ({reason}); kernels are compiled again in every "
                              "process; set ONNXFUSE_CACHE_DIR to a folder of your own")
                return False
        return True

    def write(self, name: str, image: bytes) -> bool:
        """Keep an image.  Where the folder cannot be written, warn once and go on without: False."""
        path = self.path(name)
        if path is None:
            return False
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusted():
                return False
            if path.parent not in _swept:
                _swept.add(path.parent)
                sweep_parts(path.parent)
            write_whole(path, _header(name, image) + image)
        except OSError as error:
            _warn(path.parent, f"the kernel cache {path.parent} cannot be written ({error.strerror}); kernels are "
                               "compiled again in every process; "
                               "set ONNXFUSE_CACHE_DIR to a folder that can be written")
            return False
        return True


_swept: set[Path] = set()


def _warn(folder: Path, message: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _plain_bytes(path: Path) -> bytes:
    """The contents of a plain file that is not too long; nothing for a folder, a pipe, a device or a link.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        return file.read(MOST_BYTES + 1) if stat.S_ISREG(found.st_mode) and found.st_size <= MOST_BYTES else b""


def _header(name: str, image: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + b"\0" + image).hexdigest().encode() + b"\n"
