"""Scenarios of what is recorded of runs: statistics, and ranges for profilers."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from native.stand_in import LIBRARY, counter, expect, fails, message, session


def counted(folder: Path | None = None) -> dict[str, Any]:
    """The only statistics file, whole, with nothing beside it."""
    (path,) = (folder or Path(os.environ["ONNXFUSE_STATISTICS"]).parent).iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record_to(name: str) -> Path:
    """Ask for statistics in a file of a new folder."""
    folder = Path(os.environ["ONNXFUSE_CACHE_DIR"]) / "statistics"
    folder.mkdir()
    os.environ["ONNXFUSE_STATISTICS"] = str(folder / name)
    return folder / name


def statistics() -> None:
    """Calls and time by node, variant and shapes: of two sessions, in one file, when the last of them ends."""
    path = record_to("%p.%%.json")
    x = np.zeros(300, np.float32)
    made, other = session("scratch"), session("aligned")
    for size in (300, 7, 300, 0):
        made.run(None, {"x": x[:size]})
    del made
    expect(list(path.parent.iterdir()) == [], "written before the last session ended")
    other.run(None, {"x": x})
    del other
    expect([entry.name for entry in path.parent.iterdir()] == [f"{os.getpid()}.%.json"])
    expect(counter("fake_events").value == 0, "events are left")
    found = counted()
    expect([found[key] for key in ("format", "onnxruntime", "driver", "process", "notes")]
           == ["onnxfuse statistics 1", onnxruntime.__version__, 13000, os.getpid(), []], found)
    expect(0 <= found["written"] - found["started"] < 60)
    expect(found["gpus"] == [{"ordinal": 0, "name": 'Fake GPU "40"', "capability": 90, "multiprocessors": 132}], found)
    nodes = {(node["node"], node["region"]): node for node in found["nodes"]}
    expect(sorted(nodes) == [("node0", "add-aligned"), *((f"node{i}", "add-two") for i in range(3))], nodes)
    timed = {"total_ns": 10_000, "least_ns": 10_000, "median_ns": 10_000}  # two launches of 5 us each
    for number in range(3):
        node = nodes[f"node{number}", "add-two"]
        expect((node["op"], node["gpu"], node["unrecorded"]) == ("Region0", 0, 0), node)
        expect(node["runs"] == [
            {"variant": "scratch", "inputs": [[size]], "outputs": [[size]], "calls": calls, "timed": calls * launches,
             "captured": 0, **({key: value * (calls if key == "total_ns" else 1) * launches
                                for key, value in timed.items()})}
            for size, calls, launches in ((0, 1, 0), (7, 1, 1), (300, 2, 1))], node["runs"])
    # A later session adds to the same file; a name without %p is replaced, whatever was there.
    again = session("scratch")
    again.run(None, {"x": x[:7]})
    del again
    runs = [node["runs"] for node in counted()["nodes"] if node["region"] == "add-two"]
    expect([run["calls"] for run in runs[0]] == [1, 2, 2], runs)


def statistics_captured() -> None:
    """Calls that go into a CUDA graph are counted and touch no event."""
    record_to("statistics.json")
    made = session("one")
    x = np.zeros(3, np.float32)
    made.run(None, {"x": x})
    counter("fake_capturing").value = 1
    for _ in range(3):
        made.run(None, {"x": x})
    counter("fake_capturing").value = 0
    del made
    found = counted()
    (run,) = found["nodes"][0]["runs"]
    expect((run["calls"], run["timed"], run["captured"], run["total_ns"]) == (4, 1, 3, 5000), run)
    expect(found["notes"] == ["calls that went into a CUDA graph are counted as captured and not timed; the graph's "
                              "replays are not seen"], found)


def statistics_behind() -> None:
    """Where the GPU is far behind, calls are counted and not timed; the rest is read at the end.  Nobody waits."""
    record_to("statistics.json")
    made = session("one")
    counter("fake_reached").value = 0
    for _ in range(100):
        made.run(None, {"x": np.zeros(3, np.float32)})
    expect(counter("fake_events").value == 128, counter("fake_events").value)
    library = ctypes.CDLL(str(LIBRARY))
    buffer = ctypes.create_string_buffer(4096)
    library.onnxfuse_write_statistics(buffer, 4096)
    expect(buffer.value.decode() == f'ok:["{os.environ["ONNXFUSE_STATISTICS"]}"]', buffer.value)
    (run,) = counted()["nodes"][0]["runs"]
    expect((run["calls"], run["timed"]) == (100, 0), run)
    del made
    (run,) = counted()["nodes"][0]["runs"]
    expect((run["calls"], run["timed"], run["total_ns"]) == (100, 64, 320_000), run)


def statistics_fault() -> None:
    """An event that the driver refuses ends the timing of the node, not the run."""
    record_to("statistics.json")
    made = session("one")
    counter("fake_event_error").value = 2
    for size in (3, 3, 5):
        expect(np.array_equal(made.run(None, {"x": np.zeros(size, np.float32)})[0], np.ones(size)))
    del made
    found = counted()
    expect([(run["calls"], run["timed"]) for run in found["nodes"][0]["runs"]] == [(2, 0), (1, 0)], found)
    expect(found["notes"] == ["calls of node0 were not timed: could not create an event: CUDA_ERROR_OUT_OF_MEMORY "
                              "(out of memory)"], found)


def statistics_failed_run() -> None:
    """A run whose launch fails keeps its events for the next one."""
    record_to("statistics.json")
    made = session("one")
    x = np.zeros(3, np.float32)
    counter("fake_launch_error").value = 2
    fails(partial(made.run, None, {"x": x}), "CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    counter("fake_launch_error").value = 0
    made.run(None, {"x": x})
    expect(counter("fake_events").value == 2, counter("fake_events").value)
    del made
    (run,) = counted()["nodes"][0]["runs"]
    expect((run["calls"], run["timed"], run["total_ns"]) == (2, 1, 5000), run)


def statistics_shapes() -> None:
    """Past 256 shapes of a node, calls are counted together."""
    record_to("statistics.json")
    made = session("one")
    for size in range(300):
        made.run(None, {"x": np.zeros(size, np.float32)})
    del made
    (node,) = counted()["nodes"]
    expect((len(node["runs"]), node["unrecorded"]) == (256, 44), len(node["runs"]), node["unrecorded"])


def statistics_at_exit() -> None:
    """A session that is alive when the process ends leaves its file too: statistics_left looks for it."""
    os.environ["ONNXFUSE_STATISTICS"] = os.environ["ONNXFUSE_CACHE_DIR"] + "/left.json"
    made = session("one")
    made.run(None, {"x": np.zeros(3, np.float32)})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    sys.modules["kept"] = made  # type: ignore[assignment]


def statistics_unwritable() -> None:
    """A file that could not be written is an error before anything runs; one that cannot any more, a line on stderr."""
    os.environ["ONNXFUSE_STATISTICS"] = "/nowhere/%p.json"
    text = message("one")
    expect(text.endswith(
        "onnxfuse: node 'node0' (Region0, add-one): the statistics that ONNXFUSE_STATISTICS asks for cannot be written "
        f"to '/nowhere/{os.getpid()}.json': No such file or directory"), text)
    path = record_to("gone.json")
    made = session("one")
    path.parent.rmdir()
    del made


def statistics_threads() -> None:
    """No call of sixteen threads is lost, and no time."""
    record_to("statistics.json")
    made = session("chain")
    x = [np.zeros(size, np.float32) for size in (3, 200)]

    def work(made: onnxruntime.InferenceSession) -> None:
        for number in range(50):
            made.run(None, {"x": x[number % 2]})

    pool = [threading.Thread(target=work, args=(made,)) for _ in range(16)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    del made
    nodes = counted()["nodes"]
    expect(len(nodes) == 20)
    for node in nodes:
        runs = [(run["inputs"], run["calls"], run["timed"], run["total_ns"], run["least_ns"]) for run in node["runs"]]
        expect(runs == [([[size]], 400, 400, 400 * 5000, 5000) for size in (3, 200)], runs)
    expect(counter("fake_events").value == 0)


def ranges() -> None:
    """A profiler sees a range around each fused node, closed again where the node fails."""
    os.environ["ONNXFUSE_RANGES"] = "1"
    made = session("scratch")
    x = np.zeros(3, np.float32)
    made.run(None, {"x": x})
    counter("fake_launch_error").value = 2
    fails(lambda: made.run(None, {"x": x}), "(out of memory)")
    profiler = ctypes.CDLL(os.environ["NVTX_INJECTION64_PATH"])
    seen = ctypes.c_char_p.in_dll(profiler, "seen")
    wanted = [f"<node{number} (add-two)>" for number in (0, 1, 2, 0)]
    expect((seen.value or b"").decode() == "".join(wanted), seen.value)


def no_ranges() -> None:
    """Without the switch the profiler is not even loaded."""
    session("one").run(None, {"x": np.zeros(3, np.float32)})
    with open("/proc/self/maps") as maps:
        expect(os.environ["NVTX_INJECTION64_PATH"] not in maps.read())


SCENARIOS = (
    statistics, statistics_captured, statistics_behind, statistics_fault, statistics_failed_run, statistics_shapes,
    statistics_at_exit, statistics_unwritable, statistics_threads, ranges, no_ranges,
)
