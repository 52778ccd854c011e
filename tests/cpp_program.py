"""The C++ program of examples/cpp: built against ONNX Runtime's C++ headers, and run; the C# one is run alike."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import deploy_packages
import numpy as np
import onnx
from cli_models import ROOT
from onnx import TensorProto, helper

SOURCES = ROOT / "examples" / "cpp"
HEADER = "onnxruntime_cxx_api.h"
SUFFIXES = ("", "include", "include/onnxruntime", "include/onnxruntime/core/session")

FOREIGN = re.compile(r"[^\s]*(?:libpython|cupy|nvrtc)[^\s]*")
"""Libraries that no deployment in C++ needs."""


DTYPES = {"FLOAT": "f4", "FLOAT16": "f2", "DOUBLE": "f8", "INT64": "i8", "INT32": "i4", "INT16": "i2", "INT8": "i1",
          "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "BOOL": "?"}
"""Types that the programs read and write, as ONNX and as NumPy call them."""


def headers() -> Path | None:
    """Folder of the headers, under ``ONNXRUNTIME_ROOT``, where distributions put them, or out of packages; no wheel of
    ONNX Runtime has them."""
    roots = [os.environ.get("ONNXRUNTIME_ROOT"), "/usr", "/usr/local"]
    places = [Path(root, suffix) for root in roots if root for suffix in SUFFIXES]
    if not deploy_packages.lacking():
        places.append(deploy_packages.cache() / "include")
    return next((place for place in places if (place / HEADER).is_file()), None)


def lacking() -> str:
    """Why the program cannot be built here; "" where it can."""
    missing = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not here"
    if headers():
        return ""
    return f"no ONNX Runtime's C++ headers are here (ONNXRUNTIME_ROOT says where), and {deploy_packages.lacking()}"


def _release(folder: Path) -> Path:
    """A folder with the headers and the library of the onnxruntime package as a release has them."""
    found = headers()
    assert found is not None
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(found)
    for library in deploy_packages.native_libraries().glob("libonnxruntime*"):
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


def write_copies(path: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A model that copies an input of every type, to a file, and inputs for it."""
    def infos(prefix: str) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(f"{prefix}{name}", getattr(TensorProto, name), shape) for name in DTYPES]

    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in DTYPES]
    graph = helper.make_graph(nodes, "g", infos("in_"), infos("out_"))
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    random = np.random.default_rng(0)
    return {f"in_{name}": np.asarray(random.integers(0, 2, shape) if name == "BOOL" else random.normal(0, 50, shape)
                                     ).astype(kind) for name, kind in DTYPES.items()}


def check_copies(inputs: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    """Whether a program gives back what that model copies."""
    for name in DTYPES:
        one, other = inputs[f"in_{name}"], found[f"out_{name}"]
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes(), name
