"""Arrays out of an .npz file, which may be anybody's: what they take is known from their headers before any is read.

An archive of a few kilobytes can declare, and expand to, any number of bytes.  Its directory, the number of its arrays
and their sizes together are bounded; only arrays of numbers and text are read, and Python objects never.
"""

from __future__ import annotations

import errno
import io
import math
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onnxfuse.bounded import open_file

LARGEST = 1 << 31
"""Bytes of all arrays of a file together."""

MOST = 1000
"""Arrays of one file."""

DIRECTORY = 1 << 20
"""Bytes of the list of a file's entries."""

_HEADER = 1 << 16
"""Bytes at the start of an entry that hold its header; numpy reads headers up to 10,000 characters."""

_MAGIC = b"\x93NUMPY"
_RANKS = 32
_WRITTEN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class _Bounded(io.RawIOBase):
    """A file of which no more than so many bytes are read at once: ``zipfile`` reads a directory whole, as long as it
    says that it is."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.limit = file, DIRECTORY

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(self.limit + 1 if size is None or size < 0 else min(size, self.limit + 1))
        if len(data) > self.limit:
            raise ValueError("its directory is too long")
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file, by name.

    Raises:
        OSError: the file cannot be opened; ``strerror`` says why.
        ValueError: it is no .npz file, holds what is no array of numbers or text, or too much.
    """
    with open_file(path) as file:
        start = file.read(len(_MAGIC))
        if start == _MAGIC:
            raise ValueError("it holds one array without a name")
        if not start.startswith(b"PK"):
            raise ValueError("it is no archive of arrays")
        bounded = _Bounded(file)
        try:
            with zipfile.ZipFile(bounded) as archive:
                bounded.limit = LARGEST
                return _arrays(archive)
        except (OSError, ValueError):
            raise
        except MemoryError:
            raise ValueError("there is not enough memory for its arrays") from None
        except Exception as error:  # zipfile, zlib and struct have exceptions of their own for each fault
            raise ValueError(f"the archive is damaged: {error}") from error


def _arrays(archive: zipfile.ZipFile) -> dict[str, NDArray[Any]]:
    entries = archive.infolist()
    if len(entries) > MOST:
        raise ValueError(f"it holds more than {MOST:,} arrays")
    total = 0
    names: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename:
            raise ValueError(f"its entry {name!r} is no array")
        if name in names:
            raise ValueError(f"the array {name!r} is in it twice")
        if entry.compress_type not in _WRITTEN or entry.flag_bits & 1:
            raise ValueError(f"the array {name!r} is compressed in a way, or encrypted, as numpy writes none")
        names[name] = entry
        total += entry.file_size
        if total > LARGEST:
            raise ValueError(f"its arrays take more than {LARGEST:,} bytes")
    for name, entry in names.items():
        _check_header(archive, entry, name)
    return {name: _array(archive, entry, name) for name, entry in names.items()}


def _check_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> None:
    """Make sure that an entry is an array of numbers or text whose elements are as many bytes as it has.

    Raises:
        ValueError: it is not.
    """
    with archive.open(entry) as stream:
        head = io.BytesIO(stream.read(_HEADER))
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
    except Exception as error:  # a header is Python text, and numpy lets pass what Python says of it
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the header of the array {name!r} is damaged: {first[:200]}") from error
    if dtype.hasobject:
        raise ValueError(f"the array {name!r} holds Python objects")
    if dtype.names is not None or dtype.subdtype is not None or dtype.kind not in "biufcSUV":
        raise ValueError(f"the array {name!r} holds {str(dtype)[:100]}, and no numbers")
    if len(shape) > _RANKS or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"the array {name!r} has a shape that no array has")
    if math.prod(shape) * dtype.itemsize != entry.file_size - head.tell():
        raise ValueError(f"the array {name!r} is not as long as its header says")


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> NDArray[Any]:
    with archive.open(entry) as stream:
        try:
            found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"the array {name!r} is damaged: {error}") from error
    return found


def reason(error: OSError | ValueError) -> str:
    """What to say of an exception of ``read_arrays``."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or errno.errorcode.get(error.errno or 0, "it cannot be read")
    return str(error)
