"""The C++ program of examples/cpp: built against ONNX Runtime's C++ headers, and run; the C# one is run alike."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cli_models import ROOT

SOURCES = ROOT / "examples" / "cpp"
HEADER = "onnxruntime_cxx_api.h"
SUFFIXES = ("", "include", "include/onnxruntime", "include/onnxruntime/core/session")

FOREIGN = re.compile(r"[^\s]*(?:libpython|cupy|nvrtc)[^\s]*")
"""Libraries that no deployment in C++ needs."""


def headers() -> Path | None:
    """Folder of the headers, under ``ONNXRUNTIME_ROOT`` or where distributions put them; no wheel has them."""
    roots = [os.environ.get("ONNXRUNTIME_ROOT"), "/usr", "/usr/local"]
    places = [Path(root, suffix) for root in roots if root for suffix in SUFFIXES]
    return next((place for place in places if (place / HEADER).is_file()), None)


def lacking() -> str:
    """Why the program cannot be built here; "" where it can."""
    missing = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not here"
    return "" if headers() else "ONNX Runtime's C++ headers are not here; ONNXRUNTIME_ROOT says where"


def _release(folder: Path) -> Path:
    """A folder with the headers and the library of the onnxruntime package as a release has them."""
    found, spec = headers(), importlib.util.find_spec("onnxruntime")
    assert found is not None and spec is not None and spec.origin is not None
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(found)
    for library in Path(spec.origin).with_name("capi").glob("libonnxruntime*"):
        (folder / "lib" / library.name).symlink_to(library)
        if library.name.startswith("libonnxruntime.so."):
            for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
                (folder / "lib" / name).symlink_to(library)
    return folder


def build(folder: Path) -> Path:
    """The program, built with warnings as errors by the commands that CMakeLists.txt says."""
    release = _release(folder / "release")
    for words in (
        ["cmake", "-S", SOURCES, "-B", folder / "build", f"-DONNXRUNTIME_ROOT={release}",
         "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"],
        ["cmake", "--build", folder / "build"],
    ):
        done = subprocess.run(list(map(str, words)), text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "deploy"


def run(program: Path, model: Path, inputs: Mapping[str, np.ndarray], library: Path | None = None
        ) -> dict[str, np.ndarray]:
    """Outputs of a model by name.

    Raises:
        RuntimeError: the program failed, with what it said, or it loaded what it should not need.
    """
    given, wanted = model.with_name("given"), model.with_name("wanted")
    for folder in (given, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for name, array in inputs.items():
        np.save(given / f"{name}.npy", array)
    log = model.with_name("loaded")
    done = subprocess.run(
        [str(program), str(model), str(given), str(wanted), *([] if library is None else [str(library)])], text=True,
        capture_output=True, check=False, env={
            **os.environ, "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(log),
            "ONNXFUSE_CACHE_DIR": str(model.with_name("no-kernels"))})
    loaded = "".join(each.read_text(errors="replace") for each in log.parent.glob("loaded.*"))
    foreign = FOREIGN.findall(loaded)
    if done.returncode != 0 or foreign or not loaded:
        raise RuntimeError(done.stderr or f"loaded: {foreign}")
    return {path.stem: np.load(path) for path in wanted.iterdir()}
