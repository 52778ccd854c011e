"""CUPTI's records are read right, and what can go wrong with it is said; no GPU is needed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from onnxfuse.errors import RuntimeLibraryError
from onnxfuse.measuring import cupti as module
from onnxfuse.measuring.cupti import (
    CONCURRENT_KERNEL,
    MEMCPY,
    MEMSET,
    Activity,
    Cupti,
    KernelTimer,
    busy_nanoseconds,
    demangled,
    read_record,
)

RECORD = 160
GRID = (4096, 2, 1)
END_OF_BUFFER = 12
NAMES: dict[str, Any] = {}


def packed(kind: int, start: int, end: int, name: str = "") -> bytes:
    """A record of CUPTI as CUpti_ActivityKernel9 lies in memory; fields that are not read hold rubbish."""
    raw = bytearray(b"\xa5" * RECORD)
    struct.pack_into("<I", raw, 0, kind)
    struct.pack_into("<QQ", raw, 16, start, end)
    if kind == CONCURRENT_KERNEL:
        text = NAMES.setdefault(name, ctypes.create_string_buffer(name.encode()))
        struct.pack_into("<iii", raw, 52, *GRID)
        struct.pack_into("<Q", raw, 104, ctypes.addressof(text) if name else 0)
    return bytes(raw)


class FakeLibrary:
    """libcupti as ``Cupti`` calls it: each flush hands back one buffer with the next list of records."""

    def __init__(self, flushes: Sequence[Sequence[bytes]], dropped: int = 0, failing: str = "") -> None:
        self.flushes = list(flushes)
        self.dropped = dropped
        self.failing = failing
        self.enabled: set[int] = set()
        self._next: dict[int, int] = {}

    def cuptiActivityRegisterCallbacks(self, requested: Any, completed: Any) -> int:  # noqa: N802
        self.requested, self.completed = requested, completed
        return 0

    def cuptiActivityEnable(self, kind: int) -> int:  # noqa: N802
        self.enabled.add(kind)
        return 35 if self.failing == "enable" else 0

    def cuptiActivityDisable(self, kind: int) -> int:  # noqa: N802
        self.enabled.discard(kind)
        return 0

    def cuptiActivityFlushAll(self, flag: int) -> int:  # noqa: N802
        assert flag == 1
        if not self.enabled or not self.flushes:
            return 0
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        self.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert buffer.value and buffer.value % 8 == 0 and most.value == 0
        raw = b"".join(self.flushes.pop(0))
        assert len(raw) <= size.value
        ctypes.memmove(buffer.value, raw, len(raw))
        self._next[buffer.value] = 0
        self.completed(None, 0, buffer.value, size.value, len(raw))
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, valid: Any, record: Any) -> int:  # noqa: N802
        if self.failing == "next":
            return 999
        offset = self._next[buffer.value]
        if offset >= valid.value:
            return END_OF_BUFFER
        self._next[buffer.value] = offset + RECORD
        record._obj.value = buffer.value + offset
        return 0

    def cuptiActivityGetNumDroppedRecords(self, context: Any, stream: int, dropped: Any) -> int:  # noqa: N802
        dropped._obj.value = self.dropped
        return 0

    def cuptiGetResultString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        return 0


def timer(*flushes: Sequence[bytes], **options: Any) -> tuple[KernelTimer, FakeLibrary]:
    library = FakeLibrary(flushes, **options)
    return KernelTimer(lambda: None, Cupti(library)), library


def test_a_kernel_record():
    raw = ctypes.create_string_buffer(packed(CONCURRENT_KERNEL, 1000, 3500, "softmax"))
    record = read_record(ctypes.addressof(raw))
    assert record == Activity(CONCURRENT_KERNEL, "softmax", 1000, 3500, GRID)
    assert record.nanoseconds == 2500
    assert record.is_kernel


def test_copies_and_fills_are_no_kernels():
    for kind, name in ((MEMCPY, "copy"), (MEMSET, "fill")):
        raw = ctypes.create_string_buffer(packed(kind, 5, 9))
        record = read_record(ctypes.addressof(raw))
        assert record == Activity(kind, name, 5, 9)
        assert not record.is_kernel


def test_other_records_are_passed_over():
    raw = ctypes.create_string_buffer(packed(46, 5, 9))
    assert read_record(ctypes.addressof(raw)) is None


def test_a_kernel_without_a_name():
    raw = ctypes.create_string_buffer(packed(CONCURRENT_KERNEL, 1, 2))
    record = read_record(ctypes.addressof(raw))
    assert record is not None and record.name == "unnamed"


def test_kernels_come_in_the_order_they_started():
    watch, library = timer([
        packed(CONCURRENT_KERNEL, 300, 350, "second"), packed(46, 0, 0), packed(MEMCPY, 200, 210),
        packed(CONCURRENT_KERNEL, 100, 180, "first"),
    ])
    with watch:
        assert library.enabled == {CONCURRENT_KERNEL, MEMCPY, MEMSET}
    assert watch.kernels == [("first", 80), ("second", 50)]
    assert [activity.name for activity in watch.activities] == ["first", "copy", "second"]
    assert library.enabled == set()


def test_laps():
    watch, _ = timer([packed(CONCURRENT_KERNEL, 1, 2, "a")], [], [packed(CONCURRENT_KERNEL, 5, 9, "b")])
    with watch:
        assert [activity.name for activity in watch.lap()] == ["a"]
        assert watch.lap() == []
        assert [activity.name for activity in watch.lap()] == ["b"]
    assert watch.kernels == [("a", 1), ("b", 4)]


def test_buffers_are_used_again():
    flush = [packed(CONCURRENT_KERNEL, 1, 2, "a")]
    watch, _ = timer(*[flush] * 5)
    with watch:
        for _ in range(4):
            watch.lap()
    assert watch._library is not None and len(watch._library._free) == 1


def test_timers_cannot_be_nested():
    watch, library = timer()
    with watch, pytest.raises(RuntimeError, match="cannot be nested"), KernelTimer(lambda: None, watch._library):
        pass
    with watch:  # and the outer one has let go
        assert library.enabled


def test_a_timer_that_does_not_run():
    watch, _ = timer()
    with pytest.raises(RuntimeError, match="not running"):
        watch.lap()


def test_an_error_inside_wins():
    watch, library = timer(failing="next")
    with pytest.raises(ZeroDivisionError), watch:
        _ = 1 / 0
    assert library.enabled == set()


def test_dropped_records_are_an_error():
    watch, _ = timer([packed(CONCURRENT_KERNEL, 1, 2, "a")], dropped=3)
    with pytest.raises(RuntimeLibraryError) as error, watch:
        pass
    assert str(error.value) == "CUPTI's records could not be read: 3 were dropped"


def test_records_that_cannot_be_read_are_an_error():
    watch, _ = timer([packed(CONCURRENT_KERNEL, 1, 2, "a")], failing="next")
    with pytest.raises(RuntimeLibraryError, match=r"not be read: cuptiActivityGetNextRecord failed \(999\)"), watch:
        pass


def test_cupti_refuses():
    watch, _ = timer(failing="enable")
    with pytest.raises(RuntimeLibraryError) as error, watch:
        pass
    assert str(error.value) == (
        "cuptiActivityEnable failed: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)\n"
        "help: GPU times need a CUPTI that is no newer than the driver, and the right to profile."
    )


def test_no_cupti(monkeypatch):
    monkeypatch.setattr(module, "candidates", list)
    with pytest.raises(RuntimeLibraryError) as error:
        module.cupti.__wrapped__()
    assert str(error.value) == (
        "GPU times need CUPTI, and no libcupti.so.13 or libcupti.so.12 was found.\n"
        "help: Install it: pip install nvidia-cuda-cupti (CUDA 13) or nvidia-cuda-cupti-cu12 (CUDA 12)."
    )


def test_where_cupti_is_looked_for(monkeypatch, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, name in ((old, "libcupti.so.12"), (new, "libcupti.so.13")):
        folder.mkdir()
        (folder / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{old}::{new}:{tmp_path / 'missing'}")
    found = module.candidates()
    assert found.index(str(new / "libcupti.so.13")) < found.index(str(old / "libcupti.so.12"))


def test_names_are_shown_as_in_source():
    assert demangled("onnxfuse_softmax") == "onnxfuse_softmax"
    assert demangled("_Znonsense") == "_Znonsense"
    assert demangled("_Z3addIfEvPT_S1_i") == "add<float>"
    assert demangled("_ZN2ns4gemmEv") == "ns::gemm"


@pytest.mark.parametrize(("times", "expected"), [
    ([], 0), ([(5, 9)], 4), ([(5, 9), (9, 12)], 7), ([(5, 9), (20, 30)], 14), ([(5, 9), (6, 12)], 7),
    ([(5, 30), (6, 12), (20, 40)], 35), ([(20, 30), (5, 22)], 25)])
def test_what_runs_side_by_side_counts_once(times: list[tuple[int, int]], expected: int) -> None:
    assert busy_nanoseconds(Activity(CONCURRENT_KERNEL, "k", start, end) for start, end in times) == expected
