"""Entries of the kernel cache that are somebody else's, or none; what killed writers leave."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxfuse.runtime import cache
from onnxfuse.runtime.cache import Cache

NAME, OTHER, CONTENT = "sm_90-a.cubin", "sm_90-b.cubin", b"\x7fELF image"


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache", "nvrtc-1.0")
    assert made.write(NAME, CONTENT) and made.read(NAME) == CONTENT
    return made


def test_an_entry_is_bound_to_its_name(store: Cache) -> None:
    path, other = store.path(NAME), store.path(OTHER)
    assert path is not None and other is not None
    path.rename(other)
    assert store.read(OTHER) is None


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [linked, folder, pipe])
def test_what_is_no_plain_file_is_a_miss(spoil: Callable[[Path], None], store: Cache) -> None:
    path = store.path(NAME)
    assert path is not None
    spoil(path)
    assert store.read(NAME) is None


def test_what_is_longer_than_any_image_is_a_miss(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.path(NAME)
    assert path is not None
    monkeypatch.setattr(cache, "MOST_BYTES", path.stat().st_size)
    assert store.read(NAME) == CONTENT
    monkeypatch.setattr(cache, "MOST_BYTES", path.stat().st_size - 1)
    assert store.read(NAME) is None


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_not_used(place: int, mode: int, store: Cache) -> None:
    path = store.path(NAME)
    assert path is not None
    chosen = path.parents[place]
    chosen.chmod(mode)
    with pytest.warns(RuntimeWarning) as caught:
        assert store.read(NAME) is None
    assert [str(warning.message) for warning in caught] == [
        f"the kernel cache {chosen} is not used (others may write to it: chmod go-w); kernels are compiled again in "
        "every process; set ONNXFUSE_CACHE_DIR to a folder of your own"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read(NAME) is None and store.write(NAME, CONTENT) is False
    chosen.chmod(0o700)
    assert store.read(NAME) == CONTENT


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives folders away")
def test_another_users_folder_is_not_used(store: Cache) -> None:
    path = store.path(NAME)
    assert path is not None
    os.chown(path.parent, 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to another user"):
        assert store.read(NAME) is None
    assert store.write(NAME, CONTENT) is False


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o000])
def test_folders_are_made_so_that_they_are_trusted(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        made = Cache(tmp_path / "above" / "cache", "nvrtc-1.0")
        assert made.write(NAME, CONTENT) and made.read(NAME) == CONTENT
    finally:
        os.umask(before)


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    inner = tmp_path / "nvrtc-2.0"
    inner.mkdir(mode=0o700)
    (inner / f".{OTHER}.01234567.part").write_bytes(b"torn")
    (inner / "notes.part").write_bytes(b"somebody's")
    Cache(tmp_path, "nvrtc-2.0").write(NAME, CONTENT)
    assert sorted(path.name for path in inner.iterdir()) == ["notes.part", NAME]
