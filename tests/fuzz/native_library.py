"""The native library: damaged launch plans, images and inputs, under the address and undefined-behaviour sanitizers.

A case of this subject is ``EACH`` cases of tests/native/fuzz.cc, one after the other in one process, since what one
leaves behind must not hurt the next.  Images are a third of them, launch plans the others, half of those in nodes of a
session.  ``fuzz show`` writes the files of one.

    python tests/fuzz/native_library.py FIRST COUNT

runs so many in one process, and looks for leaks at its end.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from ends import FaultError  # noqa: E402
from native import sanitized  # noqa: E402

from onnxfuse.errors import KernelError  # noqa: E402
from onnxfuse.runtime import library  # noqa: E402

EACH = 250
SANITIZERS = "address,undefined"


def prepare() -> None:
    """Build the program, which takes a minute."""
    sanitized.build(SANITIZERS)


def make(seed: int, folder: Path) -> list[Path]:
    """The numbers of the cases."""
    path = folder / "cases.json"
    path.write_text(json.dumps({"first": seed * EACH, "count": EACH}))
    return [path]


def attempt(files: list[Path]) -> str:
    """Run the cases; or, of files by themselves, give the library an image, or a launch plan and what it is evaluated
    for."""
    if files[0].name != "cases.json":
        return alone([path.read_bytes() for path in files])
    program = sanitized.build(SANITIZERS)
    numbers = json.loads(files[0].read_text())
    done = sanitized.run(program, "cases", program / "seeds", numbers["first"], numbers["count"], 1,
                         cwd=files[0].parent)
    if done.returncode != 0:
        number = re.findall(r"^case (\d+)$", done.stderr, re.MULTILINE)
        raise FaultError("hang" if done.returncode == 3 else "crash", f"case {number}\n{done.stderr[-4000:]}")
    raise KernelError(done.stdout.strip())  # of so many some are always refused


def main() -> int:
    """A long run."""
    first, count = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        program = sanitized.build(SANITIZERS)
        done = sanitized.run(program, "cases", program / "seeds", first, count, 1, cwd=Path(folder), leaks=True)
    print(done.stdout + done.stderr[-20_000:])
    return done.returncode


def alone(contents: list[bytes]) -> str:
    """The same of one case, by the library as it is installed."""
    native = library.load()
    try:
        if len(contents) == 2:
            return library.read_checked(native.onnxfuse_evaluate_plan, *contents)
        native.onnxfuse_image_fault.restype = ctypes.c_size_t
        fault = library.read_checked(native.onnxfuse_image_fault, contents[0], ctypes.c_size_t(len(contents[0])))
    except ValueError as error:
        raise KernelError(str(error)) from error
    if fault:
        raise KernelError(fault)
    return ""


if __name__ == "__main__":
    sys.exit(main())
