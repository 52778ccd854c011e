"""Sessions whose CUDA driver is the stand-in fake_cuda.c, so that fused nodes run in ONNX Runtime's CPU provider.

    ONNXFUSE_LIBCUDA=.../fake_cuda.so python scenarios.py NAME

Each scenario is a function that raises where something is wrong.  A process loads one driver, hence one process for
each.  With ``SCENARIO_MODELS`` set to a folder, models are read from it and the package is not imported, so that any
Python with an ONNX Runtime can run them; ``write`` fills the folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

LIBRARY = Path(__file__).resolve().parents[2] / "onnxfuse" / "runtime" / "libonnxfuse.so"
IMAGE = b"FAKE\nadd_one\nadd_more\n\0"


def write(folder: Path) -> None:
    """Write the models that the scenarios read."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    import fused_models as make

    embedded = {"sm_90": IMAGE}
    with_image = {"images": embedded}
    models = {
        "one": make.chain(make.add_one(embedded), 1),
        "chain": make.chain(make.add_one(embedded), 20),
        "aligned": make.chain(make.add_aligned(embedded), 1),
        "compiled": make.chain(make.add_one(), 3),
        "lower": make.chain(make.add_one({"sm_86": IMAGE, "sm_80": b"FAKE\n\0", "sm_89": b"FAKE\n\0"}), 1),
        "torn": make.chain(make.add_one({"sm_90": b"\x7fELF"}), 1),
        "scratch": make.chain(make.Fused(**{**vars(make.add_two()), **with_image}), 3),
        "bodies": make.bodies(make.add_one(embedded)),
        "bodies_torn": make.bodies(make.add_one({"sm_90": b"\x7fELF"})),
        "host": make.chain(make.Fused(**{**vars(make.add_host()), **with_image}), 2, ["shape"]),
    }
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def driver() -> ctypes.CDLL:
    """The stand-in, to set and read its counters."""
    return ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"])


def counter(name: str, kind: Any = ctypes.c_int) -> Any:
    """A variable of the stand-in."""
    return kind.in_dll(driver(), name)


def model(name: str) -> bytes:
    """A model that ``write`` wrote."""
    return (Path(os.environ["SCENARIO_MODELS"]) / f"{name}.onnx").read_bytes()


def options() -> onnxruntime.SessionOptions:
    """Options with the library registered, by nothing but ONNX Runtime's own call."""
    out = onnxruntime.SessionOptions()
    out.log_severity_level = 4
    out.register_custom_ops_library(str(LIBRARY))
    return out


def session(name: str, settings: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    """A session of a model on the CPU provider, where the stand-in's kernels run."""
    return onnxruntime.InferenceSession(
        model(name), settings or options(), providers=["CPUExecutionProvider"], enable_fallback=0
    )


def message(name: str) -> str:
    """Why a session cannot be created."""
    try:
        session(name)
    except Exception as error:
        return str(error)
    raise AssertionError(f"a session of '{name}' was created")


def expect(condition: bool, *seen: object) -> None:
    """An assertion that stays in optimised Python and shows what was seen."""
    if not condition:
        raise AssertionError(seen)


def fails(run: Any, text: str) -> None:
    """``run`` must raise an error whose message ends with ``text``."""
    try:
        run()
    except Exception as error:
        expect(str(error).endswith(text), str(error))
    else:
        raise AssertionError("no error")


def embedded() -> None:
    """An embedded image runs with nothing but the library; empty tensors launch nothing."""
    made = session("chain")
    for size in (1, 5, 129, 200_000):
        x = np.random.default_rng(0).standard_normal(size, np.float32)
        expect(np.array_equal(made.run(None, {"x": x})[0], _plus(x, 20)), size)
    expect(list((ctypes.c_uint * 7).in_dll(driver(), "fake_last")) == [1024, 1, 1, 128, 1, 1, 0])
    before = counter("fake_launches", ctypes.c_long).value
    expect(made.run(None, {"x": np.zeros(0, np.float32)})[0].shape == (0,))
    expect(counter("fake_launches", ctypes.c_long).value == before, "launched on an empty tensor")
    expect(counter("fake_modules").value == 1, "twenty nodes share one module", counter("fake_modules").value)
    other = session("one")
    expect(counter("fake_modules").value == 1, "two sessions share one module")
    del made, other
    expect(counter("fake_modules").value == 0, "the last session unloads the module")


def bodies() -> None:
    """Nodes in a Loop's body and in the branches of an If in it get their kernels when the session is created."""
    made = session("bodies")
    expect(counter("fake_modules").value == 1, "one module", counter("fake_modules").value)
    x = np.random.default_rng(0).standard_normal(129, np.float32)
    for trips in (0, 1, 3):
        for flag in (False, True):
            before = counter("fake_launches", ctypes.c_long).value
            (y,) = made.run(None, {"x": x, "m": np.array(trips), "flag": np.array(flag)})
            times = trips * (1 + flag)
            expect(np.array_equal(y, _plus(x, times)), trips, flag)
            expect(counter("fake_launches", ctypes.c_long).value - before == times, trips, flag)
    del made
    expect(counter("fake_modules").value == 0, "the session unloads the module")
    text = message("bodies_torn")
    expect("node 'first' (Region0, add-one)" in text or "node 'only' (Region0, add-one)" in text, text)


def _plus(x: np.ndarray, times: int) -> np.ndarray:
    for _ in range(times):
        x = x + np.float32(1)
    return x


def lower() -> None:
    """The image of the nearest lower architecture of the same generation is taken, none of another."""
    counter("fake_major").value, counter("fake_minor").value = 8, 7
    x = np.ones(3, np.float32)
    expect("no kernel for Fake GPU" in message("one"), "an image of sm_90 on sm_87")
    expect(np.array_equal(session("lower").run(None, {"x": x})[0], x + 1))


def torn() -> None:
    """An image that the driver refuses is an error at creation."""
    text = message("torn")
    expect("node 'node0' (Region0, add-one): could not load a compiled kernel: CUDA_ERROR_INVALID_IMAGE "
           "(device kernel image is invalid)" in text, text)


def missing_image() -> None:
    """No image, no cache, no compiler: the message says what to do."""
    text = message("compiled")
    expect(text.endswith(
        "onnxfuse: node 'node0' (Region0, add-one): no kernel for Fake GPU \"40\" (sm_90): the node embeds none, the "
        f"cache '{os.environ['ONNXFUSE_CACHE_DIR']}' has none and no compiler is registered; write the model with "
        "'onnxfuse optimize --embed sm_90', or call onnxfuse.register(session_options) from Python"), text)


def callback() -> None:
    """The callback is asked once for a kernel, and its answer or its error reaches the session."""
    library = ctypes.CDLL(str(LIBRARY))
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 4, ctypes.c_int, ctypes.c_void_p)
    library.onnxfuse_reply_image.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.onnxfuse_reply_error.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    asked = []

    @kind
    def answer(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        asked.append((b"add_one(const float* x" in source, flags, kernels, architecture, device))
        library.onnxfuse_reply_image(reply, IMAGE, len(IMAGE))

    @kind
    def refuse(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        library.onnxfuse_reply_error(reply, b"the compiler's log")

    @kind
    def silent(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        return

    library.onnxfuse_set_compile_callback(refuse)
    expect(message("compiled").endswith("node 'node0' (Region0, add-one): the compiler's log"))
    library.onnxfuse_set_compile_callback(silent)
    expect(message("compiled").endswith("the compile callback gave no image"))
    library.onnxfuse_set_compile_callback(answer)
    made = session("compiled")
    expect(asked == [(True, b"", b"add_one", b"sm_90a", 0)], asked)
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(made.run(None, {"x": x})[0], x + 3))


def dump() -> None:
    """While kernels are dumped, the compiler is asked first; without one, embedded images run as ever."""
    os.environ["ONNXFUSE_DUMP"] = "/somewhere"
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(session("one").run(None, {"x": x})[0], x + 1))
    library = ctypes.CDLL(str(LIBRARY))
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 4, ctypes.c_int, ctypes.c_void_p)
    library.onnxfuse_reply_image.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    asked = []

    @kind
    def answer(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        asked.append(kernels)
        library.onnxfuse_reply_image(reply, IMAGE, len(IMAGE))

    library.onnxfuse_set_compile_callback(answer)
    expect(np.array_equal(session("one").run(None, {"x": x})[0], x + 1))
    expect(asked == [b"add_one"], asked)
    del os.environ["ONNXFUSE_DUMP"]
    session("one")
    expect(asked == [b"add_one"], asked)


def cache() -> None:
    """A program without Python's part reads the cache; a corrupt entry counts as missing."""
    folder = Path(os.environ["ONNXFUSE_CACHE_DIR"])
    (entry,) = folder.glob("*/*.cubin")
    whole = entry.read_bytes()
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(session("compiled").run(None, {"x": x})[0], x + 3))
    for broken in (b"", whole[:40], whole[:-1], whole[:-1] + b"!", b"X" + whole[1:], whole[17:]):
        entry.write_bytes(broken)
        expect("has none and no compiler" in message("compiled"), len(broken))


def scratch() -> None:
    """Scratch is allocated for each run and always freed, also where a launch fails."""
    made = session("scratch")
    x = np.arange(300, dtype=np.float32)
    allocated = counter("fake_allocated", ctypes.c_long)
    for _ in range(3):
        expect(np.array_equal(made.run(None, {"x": x})[0], x + 6))
    expect(allocated.value == 0, allocated.value)
    expect(made.run(None, {"x": x[:0]})[0].shape == (0,))
    counter("fake_launch_error").value = 2
    fails(lambda: made.run(None, {"x": x}),
          "onnxfuse: node 'node0' (Region0, add-two): could not launch the kernel 'add_one' with grid 3x1x1, block "
          "128x1x1 and 0 bytes of shared memory: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    expect(allocated.value == 0, allocated.value)
    counter("fake_launch_error").value = 0
    counter("fake_allocate_error").value = 2
    fails(lambda: made.run(None, {"x": x}),
          "could not allocate scratch memory: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    counter("fake_allocate_error").value = 0
    expect(np.array_equal(made.run(None, {"x": x})[0], x + 6), "a session works on after a failed run")


def no_pools() -> None:
    """A GPU without memory pools: an error at creation, for nodes with scratch only."""
    counter("fake_pools").value = 0
    expect(message("scratch").endswith(
        "the GPU Fake GPU \"40\" has no memory pools, which this kernel's scratch memory needs"))
    session("one")


def hosts() -> None:
    """Host inputs are read at each run; checks fail with their message."""
    made = session("host")
    x = np.arange(5, dtype=np.float32)
    for by in (0, 3, -7):
        expect(np.array_equal(made.run(None, {"x": x, "shape": np.array([5, by])})[0], x + 2 * by))
    fails(lambda: made.run(None, {"x": x, "shape": np.array([6, 1])}),
          "onnxfuse: node 'node0' (Region0, add-host): x has not the size that was promised")
    fails(lambda: made.run(None, {"x": x, "shape": np.array([5, 2**31])}),
          "onnxfuse: node 'node0' (Region0, add-host): a 32-bit argument of a kernel is 2147483648")
    expect(np.array_equal(made.run(None, {"x": x, "shape": np.array([5, 1])})[0], x + 2))


def variants() -> None:
    """A variant of another GPU generation is never run; runs are counted per variant."""
    library = ctypes.CDLL(str(LIBRARY))
    library.onnxfuse_set_recording(1)
    made = session("host")
    made.run(None, {"x": np.zeros(5, np.float32), "shape": np.array([5, 1])})
    buffer = ctypes.create_string_buffer(4096)
    library.onnxfuse_statistics(buffer, 4096)
    text = buffer.value.decode()
    expect(text.count('"variants":["hopper","rest"],"runs":[1,0]') == 2, text)
    expect('"images":{"embedded":1,"cached":0,"compiled":0}' in text, text)


def alignment() -> None:
    """Guards on addresses are held against every run, also where its sizes are those of the run before."""
    library = ctypes.CDLL(str(LIBRARY))
    library.onnxfuse_set_recording(1)
    made = session("aligned")
    buffer = ctypes.create_string_buffer(4096)
    runs = [0, 0, 0]
    steps = [(40, 0, 0), (40, 4, 1), (40, 0, 0), (40, 8, 2), (2000, 0, 2), (40, 0, 0), (2000, 12, 1)]
    for size, skew, variant in steps:
        memory = np.zeros(size * 4 + 32, np.uint8)
        first = -memory.ctypes.data % 16 + skew
        x = memory[first:first + size * 4].view(np.float32)
        x[:] = np.arange(size)
        expect(np.array_equal(made.run(None, {"x": x})[0], x + 1), size, skew)
        runs[variant] += 1
        library.onnxfuse_statistics(buffer, 4096)
        expect(f'"runs":{runs}'.replace(" ", "") in buffer.value.decode(), size, skew, buffer.value)


def places() -> None:
    """What a thread keeps for a node is never taken for that of a later session's node."""
    x = np.arange(300, dtype=np.float32)
    kinds = {"one": 1, "scratch": 6, "chain": 20, "aligned": 1}
    for turn in range(12):
        for name in list(kinds)[turn % 4:] + list(kinds)[: turn % 4]:
            made = session(name)
            sizes = (300, 7) if turn % 2 else (7, 300)
            for size in sizes:
                expect(np.array_equal(made.run(None, {"x": x[:size]})[0], _plus(x[:size], kinds[name])), name, size)


def threads() -> None:
    """Sixteen threads run one session, the parallel executor's workers among them."""
    settings = options()
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    settings.inter_op_num_threads = 2
    made = [session("scratch"), session("host"), session("chain", settings)]
    wrong: list[object] = []
    end = time.monotonic() + 1.5

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        while time.monotonic() < end and not wrong:
            x = random.standard_normal(int(random.integers(0, 600)), np.float32)
            by = int(random.integers(-9, 9))
            results = (made[0].run(None, {"x": x})[0], made[1].run(None, {"x": x, "shape": np.array([len(x), by])})[0],
                       made[2].run(None, {"x": x})[0])
            wanted = (_plus(x, 6), (x + np.float32(by)) + np.float32(by), _plus(x, 20))
            if not all(np.array_equal(a, b) for a, b in zip(results, wanted, strict=True)):
                wrong.append(seed)

    pool = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    expect(not wrong, wrong)
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


def churn() -> None:
    """Threads begin and end, and sessions are made and dropped, while others run."""
    shared = session("chain")
    wrong: list[object] = []
    end = time.monotonic() + 1.5

    def once(name: str, size: int) -> None:
        try:
            made, count = (shared, 20) if name == "chain" else (session(name), 6)
            x = np.arange(size, dtype=np.float32)
            for part in (x, x[: size // 2], x):
                if not np.array_equal(made.run(None, {"x": part})[0], _plus(part, count)):
                    wrong.append((name, size))
        except Exception as error:
            wrong.append(error)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        while time.monotonic() < end and not wrong:
            thread = threading.Thread(target=once, args=(["chain", "scratch"][seed % 2], int(random.integers(0, 600))))
            thread.start()
            thread.join()

    pool = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    expect(not wrong, wrong)
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


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


SCENARIOS = {
    function.__name__: function
    for function in (
        embedded, bodies, lower, torn, missing_image, callback, dump, cache, scratch, no_pools, hosts, variants,
        alignment, places, threads, churn, statistics, statistics_captured, statistics_behind, statistics_fault,
        statistics_failed_run, statistics_shapes, statistics_at_exit, statistics_unwritable, statistics_threads,
        ranges, no_ranges,
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
