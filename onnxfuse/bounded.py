"""Files that may be anything, read within limits: ordinary files alone, no more bytes than were allowed for, JSON of
any depth."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = (
    (stat.S_ISDIR, "it is a folder"), (stat.S_ISFIFO, "it is a pipe"), (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"), (stat.S_ISBLK, "it is a device"),
)


_DEEPEST = 200
"""Levels of JSON that anything here has; what reads it may call itself for each.  How many more Python's parser takes
differs by its release."""

_HOLDERS = frozenset((dict, list))


def open_file(path: str | Path) -> BinaryIO:
    """Open an ordinary file; a pipe would block until somebody writes, and a device need not end.

    Raises:
        OSError: there is none at the path, or it cannot be opened; ``strerror`` says why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a NUL, of which no path is made
        raise OSError(errno.EINVAL, "its name holds a NUL", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, next((kind for test, kind in _KINDS if test(mode)), "it is no file"), str(path))


def read_bytes(path: str | Path, limit: int) -> bytes:
    """What an ordinary file holds.

    Raises:
        OSError: as ``open_file``; the file is larger than ``limit`` bytes.
    """
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data


def parse_json(data: bytes | str) -> Any:
    """JSON as Python data.

    Raises:
        ValueError: it is none, no UTF-8, holds a number of thousands of digits, or is nested too deep.
    """
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        level = [each for holder in level if holder.__class__ in _HOLDERS
                 for each in (holder if holder.__class__ is list else holder.values()) if each.__class__ in _HOLDERS]
        if not level:
            return found
    raise ValueError("it is nested too deep")
