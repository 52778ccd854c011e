"""The fused operator in ONNX Runtime's CPU provider, over a stand-in for the CUDA driver: tests/native/scenarios.py.

References are NumPy's float32 sums of the same order, compared bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fused_models import ADD_ONE
from native import scenarios
from native.stand_in import IMAGE, SHOWN, write

from onnxfuse.runtime import cache

NATIVE = Path(scenarios.__file__).parent

OLD_DRIVER = "fake_cuda_old"
"""A stand-in without the entries that came with CUDA 11.8 and 12."""

OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")
"""A Python that has NumPy and ONNX Runtime 1.20: the scenarios run there too."""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built stand-in beside the models."""
    folder = tmp_path_factory.mktemp("native")
    for source, *flags, name in (("fake_cuda", "fake_cuda"), ("fake_cuda", "-DOLD_DRIVER", OLD_DRIVER),
                                 ("fake_cublaslt", "fake_cublaslt"), ("fake_cudnn", "fake_cudnn"),
                                 ("fake_profiler", "fake_profiler")):
        subprocess.run(
            ["g++", "-x", "c", "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *flags,
             str(NATIVE / f"{source}.c"), "-o", str(folder / f"{name}.so")],
            check=True,
        )
    write(folder)
    return folder / "fake_cuda.so"


def environment(stand_in: Path, folder: Path, **more: str) -> dict[str, str]:
    """What a scenario needs, and nothing that leads to onnxfuse; ``folder`` is its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "ONNXFUSE_LIBCUDA": str(stand_in), "ONNXFUSE_LIBCUBLASLT": str(stand_in.with_name("fake_cublaslt.so")),
        "ONNXFUSE_LIBCUDNN": str(stand_in.with_name("fake_cudnn.so")),
        "SCENARIO_MODELS": str(stand_in.parent), "ONNXFUSE_CACHE_DIR": str(folder),
        "NVTX_INJECTION64_PATH": str(stand_in.with_name("fake_profiler.so")), **more,
    }


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["this", "oldest"])
def test_scenario(name: str, python: str, stand_in: Path, tmp_path: Path) -> None:
    if name == "cache":
        kept = cache.Cache(tmp_path, "nvrtc-1.0")
        for entry in (cache.key(ADD_ONE, (), "sm_90a"), f"sm_90a-{0:064}.cubin"):
            kept.write(entry, IMAGE)
    library = stand_in.with_name(f"{OLD_DRIVER}.so") if name == "old_driver" else stand_in
    done = subprocess.run(
        [python, str(NATIVE / "scenarios.py"), name], capture_output=True, text=True, timeout=120,
        env=environment(library, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    if name == "statistics_at_exit":
        (node,) = json.loads((tmp_path / "left.json").read_text())["nodes"]
        assert [(run["calls"], run["timed"], run["total_ns"]) for run in node["runs"]] == [(1, 1, 5000)]
    if name == "statistics_unwritable":
        path = tmp_path / "statistics" / "gone.json"
        assert done.stderr == f"onnxfuse: the statistics cannot be written to '{path}': No such file or directory\n"


def test_verbose_nodes_say_where_their_kernels_come_from(stand_in: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(NATIVE / "scenarios.py"), "hosts"], capture_output=True, text=True, check=True,
        env=environment(stand_in, tmp_path, ONNXFUSE_VERBOSE="1"),
    )
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("onnxfuse: ")) == [
        "onnxfuse: node 'node0' (Region0, add-host): 1 kernels for sm_90a, embedded",
        "onnxfuse: node 'node1' (Region0, add-host): 1 kernels for sm_90a, loaded before",
    ]


def test_a_node_s_name_steers_no_terminal(stand_in: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(NATIVE / "scenarios.py"), "steering"], capture_output=True, check=True,
        env=environment(stand_in, tmp_path, ONNXFUSE_VERBOSE="1"),
    )
    lines = [line for line in done.stderr.decode().split("\n") if line.startswith("onnxfuse: ")]
    shown = f"onnxfuse: {SHOWN}1 kernels for sm_90a, embedded"
    assert lines == [shown, shown.replace(r"\xff", "")]


def test_the_script_for_the_gpu_rehearses(stand_in: Path) -> None:
    script = NATIVE.parent / "gpu" / "check_runtime.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", str(stand_in), "--seconds", "0.3",
         "--only", "sizes", "host_inputs", "scratch", "embedded", "embedded_ptx",
         "threads", "recorded_runs"],
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 7


@pytest.mark.parametrize(("name", "count"), [
    ("check_launches", 10), ("check_library_steps", 5), ("check_library_convolutions", 4)])
def test_the_scripts_for_launches_and_libraries_rehearse(name: str, count: int, stand_in: Path) -> None:
    script = NATIVE.parent / "gpu" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", str(stand_in.parent)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == count
