"""Files that appear whole or not at all, whoever else writes there and whatever dies meanwhile.

A file is written under another name beside its place, ``.NAME.TOKEN.part``, brought to the disk, and renamed.  Its
writer holds a lock on it for as long as it lives, so that what a killed writer left can be told from what is being
written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from onnxfuse.errors import OutputError

PATIENCE = 30.0
"""Seconds to wait for who is renaming in the same folder."""

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system says that has no locks."""


class Part:
    """A file in the making; gone at the end of the context unless it was put in place.

    Attributes:
        file: what is written to.
    """

    def __init__(self, target: Path) -> None:
        """Begin a file that is to be ``target``.

        Raises:
            OSError: nothing can be written there.
        """
        while True:
            self.path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            self.file: BinaryIO = open(self.path, "xb")  # noqa: SIM115  (closed at the end of the context)
            lock(self.file.fileno(), PATIENCE)
            # Between the two, who sweeps may have taken it for a left-over.
            if is_at(self.file.fileno(), self.path):
                return
            self.file.close()

    def __enter__(self) -> Part:
        return self

    def finish(self) -> None:
        """Bring what was written to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def put(self, target: Path, like: Path | None = None) -> None:
        """Put the file in its place, with the permissions of what was there, or of the file ``like``."""
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self.file.fileno(), stat.S_IMODE(os.stat(like or target).st_mode))
        os.replace(self.path, target)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        # Removed while the lock is held; after ``put`` nothing has this name.
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk has been told of by then
            self.file.close()


def write_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing.

    Raises:
        OutputError: it cannot be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        target = followed(path)
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe
            target.write_bytes(data)
            return
        with Part(target) as part:
            part.file.write(data)
            part.finish()
            with alone_in(target.parent) as alone:
                part.put(target)
                if alone:
                    sweep_parts(target.parent, target.name)
    except OSError as error:
        raise OutputError(
            f"The file cannot be written: {error.strerror or error}. Nothing was left behind.", place=str(path),
            remedy="Choose a folder that you may write to and that has room.",
        ) from error


def followed(path: Path) -> Path:
    """Where a file is really written: a symbolic link stays, and what it leads to is replaced.

    Raises:
        OSError: links lead in a circle.
    """
    if not path.is_symlink():
        return path
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return real


def lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Take the lock of an open file or folder, which ends with the descriptor; whether it is taken.

    False where another process still has it after so many seconds, or where the file system has no locks.

    Raises:
        OSError: it fails for another reason.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise
        else:
            return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """One process at a time in a folder; gives whether that is so: the file system may have no locks, and another
    process may hold it for too long.  What was renamed meanwhile is on the disk at the end."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lock(descriptor, PATIENCE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_parts(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left in a folder: of the file of this name, or of all.

    Raises:
        OSError: the folder cannot be read.
    """
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.[0-9a-f]{{8}}\.part", re.DOTALL)
    for path in [entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if lock(file.fileno()) and is_at(file.fileno(), path):
                path.unlink()
