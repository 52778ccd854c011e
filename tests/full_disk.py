"""A disk that is full after some bytes, for whatever onnxfuse writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from onnxfuse import files as files_module


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: object, room: list[int]) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room[0] -= len(data)
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)  # type: ignore[attr-defined, no-any-return]

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def full_after(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full after so many bytes."""
    left = [room]
    monkeypatch.setattr(files_module, "open", lambda path, mode: Full(Path(path).open(mode), left), raising=False)  # noqa: SIM115
