"""The native library, its stand-ins and fuzz.cc in one program, built with a sanitizer."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from native import fuzz_seeds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = ROOT / "onnxfuse" / "runtime" / "native"
HEADERS = [*sorted(LIBRARY.glob("*.h")), *sorted(HERE.glob("fuzz*.h"))]
SOURCES = [*sorted(LIBRARY.glob("*.cc")), *sorted(HERE.glob("fuzz*.cc"))]

ENVIRONMENT = {
    "UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "handle_abort=1:hard_rss_limit_mb=4096:detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
}
"""Leaks are looked for once, at the end of a long run (``python tests/fuzz/native_library.py``): the sanitizer's own
search for them fails now and then on a busy machine, once in a thousand processes."""


def build(sanitizers: str) -> Path:
    """The folder of the program ``fuzz``, the driver's stand-in and the folder ``seeds``; built where it is not there.

    Args:
        sanitizers: as g++ takes them: "address,undefined" or "thread".
    """
    read = [*SOURCES, *LIBRARY.glob("*.h"), *HERE.glob("*.h"), HERE / "fake_cuda.c",
            HERE / "fake_cublaslt.c", HERE / "fake_cudnn.c", Path(fuzz_seeds.__file__)]
    content = b"".join(path.read_bytes() for path in sorted(read))
    folder = ROOT / "build" / "sanitized" / f"{sanitizers}-{hashlib.sha256(content).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    (part / "seeds").mkdir(parents=True)
    # Those that are left out take half of the time, and what they would see the address sanitizer does.  -O1 would take
    # half as long again, for cases that take four fifths.
    flags = ["-Og", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize=null,alignment,vptr,object-size",
             "-fno-sanitize-recover=all"]

    compiler = ["g++", "-std=c++17", *flags, "-Wall", "-Wextra", "-Werror", '-DONNXFUSE_VERSION="0"', f"-I{LIBRARY}",
                f"-I{HERE}"]
    # Read once, all headers and the C++ library's with them, and not for each source.
    headers = part / "headers.h"
    headers.write_text("".join(f'#include "{header}"\n' for header in HEADERS))
    _run(*compiler, "-x", "c++-header", headers, "-o", part / "headers.h.gch")

    def compiled(source: Path) -> Path:
        target = part / f"{source.stem}.o"
        _run(*compiler, "-include", headers, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    (part / "headers.h.gch").unlink()  # tens of megabytes
    _run("g++", *flags, *objects, "-o", part / "fuzz", "-ldl", "-pthread")
    # The thread sanitizer takes what the stand-in counts for races of the library.
    _run("gcc", "-std=c11", "-D_GNU_SOURCE", *(flags if sanitizers != "thread" else ["-O1"]), "-shared", "-fPIC",
         HERE / "fake_cuda.c", "-o", part / "fake_cuda.so")
    for name in ("fake_cublaslt", "fake_cudnn"):
        _run("gcc", "-std=c11", "-D_GNU_SOURCE", "-DDRY", "-O1", "-shared", "-fPIC", HERE / f"{name}.c", "-o",
             part / f"{name}.so")
    fuzz_seeds.write(part / "seeds")
    try:
        part.rename(folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise
    for old in folder.parent.glob(f"{sanitizers}-*"):
        if not old.name.startswith(folder.name):
            shutil.rmtree(old, ignore_errors=True)
    return folder


def run(folder: Path, *arguments: object, cwd: Path, leaks: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the program of ``build``; statistics files go into ``cwd``."""
    options = ENVIRONMENT | {"ASAN_OPTIONS": ENVIRONMENT["ASAN_OPTIONS"].replace("leaks=0", f"leaks={int(leaks)}")}
    return subprocess.run(
        [folder / "fuzz", *map(str, arguments)], capture_output=True, text=True, errors="replace", cwd=cwd,
        env=os.environ | options | {"ONNXFUSE_LIBCUDA": str(folder / "fake_cuda.so"),
                                    "ONNXFUSE_LIBCUBLASLT": str(folder / "fake_cublaslt.so"),
                                    "ONNXFUSE_LIBCUDNN": str(folder / "fake_cudnn.so")},
    )


def _run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
