"""Scenarios of kernels: where their images come from, what they are launched with, threads."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from native.stand_in import (
    HOSTILE,
    IMAGE,
    LIBRARY,
    SHOWN,
    counter,
    driver,
    expect,
    fails,
    message,
    options,
    plus,
    session,
)
from native.stand_in import ptx as ptx_text

ASKED = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 4, ctypes.c_int, ctypes.c_void_p)
"""A callback that the library asks for an image."""


def declare_replies(library: ctypes.CDLL) -> None:
    """Say what the library's entries take by which such a callback answers."""
    library.onnxfuse_reply_image.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.onnxfuse_reply_error.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def embedded() -> None:
    """An embedded image runs with nothing but the library; empty tensors launch nothing."""
    made = session("chain", options(every_name=True))
    for size in (1, 5, 129, 200_000):
        x = np.random.default_rng(0).standard_normal(size, np.float32)
        expect(np.array_equal(made.run(None, {"x": x})[0], plus(x, 20)), size)
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
            expect(np.array_equal(y, plus(x, times)), trips, flag)
            expect(counter("fake_launches", ctypes.c_long).value - before == times, trips, flag)
    del made
    expect(counter("fake_modules").value == 0, "the session unloads the module")
    text = message("bodies_torn")
    expect("node 'first' (Region0, add-one)" in text or "node 'only' (Region0, add-one)" in text, text)


def quantized() -> None:
    """ONNX Runtime's quantisation passes give a node's output a new name, in bodies too."""
    def rounded(x: np.ndarray) -> np.ndarray:
        steps = np.clip(np.rint((x + np.float32(1)) / np.float32(0.25)) + 3, 0, 255) - 3
        return (steps * 0.25).astype(np.float32)

    x = np.random.default_rng(0).uniform(-3, 3, 129).astype(np.float32)
    expect(np.array_equal(session("quantized").run(None, {"x": x})[0], rounded(rounded(x))))
    made = session("quantized_bodies")
    for flag in (False, True):
        (y,) = made.run(None, {"x": x, "m": np.array(2), "flag": np.array(flag)})
        expect(np.array_equal(y, rounded(rounded(x))), flag)
    rows = x.reshape(3, 43)
    expect(np.array_equal(session("quantized_scan").run(None, {"x": rows})[0], rounded(rows)))


def undeclared() -> None:
    """Nodes tell types and sizes of their outputs where the runtime can ask; no size is said that is not known."""
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24):
        expect("output arg (v0) type inference failed" in message("undeclared"))
        return
    told = [(output.name, output.type, output.shape) for output in session("undeclared").get_outputs()]
    expect([name for name, _, _ in told] == ["y0", *(f"y{place}" for place in range(2, 13))], told)
    shapes = {name: shape for name, _, shape in told}
    expect([shapes[f"y{place}"] for place in (0, 2, 4, 5, 7, 12)] == [[], [7, "n"], ["n", 5], [0], ["n"], []], told)
    own = [shapes["y3"][0], shapes["y9"][0]]
    expect(len({*own, "n"}) == 3 and all(isinstance(name, str) for name in own), own)


def lower() -> None:
    """The image of the nearest lower architecture of the same generation is taken, none of another."""
    counter("fake_major").value, counter("fake_minor").value = 8, 7
    x = np.ones(3, np.float32)
    expect("no kernel for Fake GPU" in message("one"), "an image of sm_90 on sm_87")
    expect(np.array_equal(session("lower").run(None, {"x": x})[0], x + 1))


def older() -> None:
    """Images of an earlier generation are no use."""
    expect("no kernel for Fake GPU" in message("lower"), "an image of sm_89 on sm_90")


def ptx() -> None:
    """Where no machine code fits, neither embedded nor from the compiler, the driver compiles the PTX for the newest
    architecture that is not after the GPU's."""
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(session("newer").run(None, {"x": x})[0], x + 3))
    expect(np.array_equal(session("exact").run(None, {"x": x})[0], x + 1), "machine code goes before PTX")
    library = ctypes.CDLL(str(LIBRARY))
    text = ctypes.create_string_buffer(1000)
    library.onnxfuse_statistics.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.onnxfuse_statistics(text, len(text))
    expect(b'"images":{"embedded":1,"cached":0,"compiled":0,"ptx":1}' in text.value, text.value)
    where = "onnxfuse: node 'node0' (Region0, add-one): "
    told = message("newer_torn")
    expect(told.endswith(f"{where}the embedded image 'image_compute_90' is no PTX that the GPU's driver can be given: "
                         f"it has a zero byte ({len(ptx_text(90, 'add_one')) + 1} bytes)"), told)
    told = message("newer_driver")
    expect(told.endswith(
        f"{where}the node embeds no machine code for Fake GPU \"40\" (sm_90), and the driver does not compile its PTX: "
        "could not load a compiled kernel: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (the provided PTX was compiled with an "
        "unsupported toolchain.); install a newer driver, or write the model with 'onnxfuse optimize --embed sm_90'"),
        told)
    declare_replies(library)
    known = []

    @ASKED
    def answer(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        if known:
            library.onnxfuse_reply_image(reply, IMAGE, len(IMAGE))
        else:
            library.onnxfuse_reply_error(reply, b"cannot compile for this GPU")

    library.onnxfuse_set_compile_callback(answer)
    expect(np.array_equal(session("newer").run(None, {"x": x})[0], x + 3), "a compiler that does not know the GPU")
    expect("does not compile its PTX" in message("newer_driver"))
    known.append(True)
    expect(np.array_equal(session("newer_driver").run(None, {"x": x})[0], x + 1), "the compiler goes before PTX")


def torn() -> None:
    """An image that is none never reaches the driver, wherever it comes from; nor do arguments that a kernel lacks."""
    where = "onnxfuse: node 'node0' (Region0, add-one): "
    wrong = " is no machine code that the GPU's driver can be given: "
    text = message("torn")
    expect(text.endswith(f"{where}the embedded image 'image_sm_90'{wrong}its section table does not lie within it "
                         f"({len(IMAGE) - 2} bytes)"), text)
    text = message("floats")
    expect(text.endswith(f"{where}the attribute 'image_sm_90' has element type 1; an image is a tensor of uint8"), text)
    text = message("empty")
    expect(text.endswith(f"{where}the embedded image 'image_sm_90'{wrong}it has 0 bytes, fewer than a header "
                         "(0 bytes)"), text)
    for name, more in (("few", "more"), ("many", "fewer")):
        text = message(name)
        count = {"few": 2, "many": 4}[name]
        expect(text.endswith(f"{where}the kernel 'add_one' has {more} parameters than the {count} arguments of the "
                             "launch plan"), text)
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(session("cut").run(None, {"x": x})[0], x + 1), "a last byte that is zero may be missing")


def hostile() -> None:
    """Plans that no rule makes end in a message, from the runtime's first question to the run."""
    x = np.arange(4, dtype=np.float32)
    for name, (wanted, _) in HOSTILE.items():
        for declared in (True, False):
            text = ""
            try:
                session(f"hostile_{name}_{declared}").run(None, {"x": x})
            except Exception as error:
                text = str(error)
            expect(wanted in text, name, declared, text)


def steering() -> None:
    """Names from the model, whatever they hold, are one visible line of a message."""
    x = np.arange(4, dtype=np.float32)
    expect(np.array_equal(session("steering").run(None, {"x": x})[0], x + 1))
    text = message("steering_torn")
    expect(f"onnxfuse: {SHOWN}the embedded image" in text, text)
    made = session("steering_check")
    fails(lambda: made.run(None, {"x": x}), SHOWN.replace(r"\xff", "") + r"add\x1b[2J\none\u202e")


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
    declare_replies(library)
    asked = []

    @ASKED
    def answer(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        asked.append((b"add_one(const float* x" in source, flags, kernels, architecture, device))
        library.onnxfuse_reply_image(reply, IMAGE, len(IMAGE))

    @ASKED
    def refuse(source: bytes, flags: bytes, kernels: bytes, architecture: bytes, device: int, reply: int) -> None:
        library.onnxfuse_reply_error(reply, b"the compiler's log")

    @ASKED
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
    declare_replies(library)
    asked = []

    @ASKED
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
    """A program without Python's part reads the cache, of the newest compiler and in a folder that nobody else may
    write; an entry that is corrupt, another one's or no plain file counts as missing."""
    folder = Path(os.environ["ONNXFUSE_CACHE_DIR"])
    other, entry = sorted(folder.glob("*/*.cubin"))
    whole = entry.read_bytes()
    x = np.arange(4, dtype=np.float32)

    def works() -> None:
        expect(np.array_equal(session("compiled").run(None, {"x": x})[0], x + 3))

    def missing(why: object) -> None:
        text = message("compiled")
        expect("has none and no compiler" in text, why, text)

    works()
    for broken in (b"", whole[:40], whole[:-1], whole[:-1] + b"!", b"X" + whole[1:], whole[17:],
                   whole[:81] + b" " + whole[82:], whole + bytes(64 << 20)):
        entry.write_bytes(broken)
        missing(len(broken))
    other.replace(entry)
    missing("another name's")
    entry.unlink()
    entry.mkdir()
    missing("a folder")
    entry.rmdir()
    os.mkfifo(entry)
    missing("a pipe")
    entry.unlink()
    other.write_bytes(whole)
    entry.symlink_to(other)
    missing("a link")
    entry.unlink()
    entry.write_bytes(whole)
    for place in (folder, entry.parent):
        place.chmod(0o777)
        text = message("compiled")
        expect(f"'{folder}' is not used (others may write to it)" in text, text)
        place.chmod(0o700)
    for name in ("nvrtc-0.9", "nvrtc-1", "nvrtc-9.9.9", "other-7.0"):
        (folder / name).mkdir()
    works()
    (folder / "nvrtc-1.10").mkdir()
    missing("of an older compiler")


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


def short_hosts() -> None:
    """Host inputs of 32 bits."""
    made = session("host32")
    x = np.arange(5, dtype=np.float32)
    for by in (3, -7):
        expect(np.array_equal(made.run(None, {"x": x, "shape": np.array([5, by], np.int32)})[0], x + 2 * by))


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
    expect('"images":{"embedded":1,"cached":0,"compiled":0,"ptx":0}' in text, text)


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
    for turn in range(8):
        for name in list(kinds)[turn % 4:] + list(kinds)[: turn % 4]:
            made = session(name)
            sizes = (300, 7) if turn % 2 else (7, 300)
            for size in sizes:
                expect(np.array_equal(made.run(None, {"x": x[:size]})[0], plus(x[:size], kinds[name])), name, size)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Do a piece of work in so many threads, each told its number, to the end of all."""
    pool = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


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
            wanted = (plus(x, 6), (x + np.float32(by)) + np.float32(by), plus(x, 20))
            if not all(np.array_equal(a, b) for a, b in zip(results, wanted, strict=True)):
                wrong.append(seed)

    in_threads(work, 16)
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
                if not np.array_equal(made.run(None, {"x": part})[0], plus(part, count)):
                    wrong.append((name, size))
        except Exception as error:
            wrong.append(error)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        while time.monotonic() < end and not wrong:
            thread = threading.Thread(target=once, args=(["chain", "scratch"][seed % 2], int(random.integers(0, 600))))
            thread.start()
            thread.join()

    in_threads(work, 8)
    expect(not wrong, wrong)
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


SCENARIOS = (
    embedded, bodies, quantized, undeclared, lower, older, ptx, torn, hostile, steering, missing_image, callback,
    dump, cache, scratch, no_pools, hosts, short_hosts, variants, alignment, places, threads, churn,
)
