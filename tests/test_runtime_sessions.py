"""Sessions without a GPU: what is registered where, and the messages.

References are NumPy's float32 sums, compared bit for bit.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fused_models import ADD_ONE, TWICE, add_host, add_one, chain
from native.stand_in import IMAGE
from onnx import TensorProto, helper

import onnxfuse.runtime as runtime
from onnxfuse.errors import KernelError, RuntimeLibraryError
from onnxfuse.runtime import callback, library
from onnxfuse.runtime.compile import KernelSource
from onnxfuse.runtime.nodes import fused_nodes, kernel_sources, names_needed

CPU = ["CPUExecutionProvider"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here sees a machine without a GPU, whatever this one has."""

    def none() -> tuple[library.Gpu, ...]:
        raise KernelError("no NVIDIA driver")

    monkeypatch.setattr(library, "gpus", none)


@pytest.mark.parametrize("providers", [
    None, CPU, ["CUDAExecutionProvider", "CPUExecutionProvider"], [("CUDAExecutionProvider", {"device_id": 1}), *CPU],
])
def test_without_a_gpu_the_functions_run(providers: Any, tmp_path: Path) -> None:
    path = tmp_path / "chain.onnx"
    onnx.save(chain(add_one(), 5), path)
    x = np.arange(7, dtype=np.float32)
    for model in (path, str(path), path.read_bytes()):
        session = runtime.session(model, providers)
        assert session.get_providers() == CPU
        assert np.array_equal(session.run(None, {"x": x})[0], x + 5)


def test_host_inputs_reach_the_function() -> None:
    x = np.arange(3, dtype=np.float32)
    session = runtime.session(chain(add_host(), 2, ["shape"]).SerializeToString())
    assert np.array_equal(session.run(None, {"x": x, "shape": np.array([3, 4])})[0], x + 8)


def test_the_models_pass_the_checker() -> None:
    onnx.checker.check_model(chain(add_one(), 3), full_check=True)
    onnx.checker.check_model(chain(add_host(), 3, ["shape"]), full_check=True)


MESSAGE = (
    "node 'node0' (Region0) was given to the CPU, and its kernel runs on a GPU: this session has no working "
    "CUDAExecutionProvider (no NVIDIA driver: /nowhere/libcuda.so: cannot open shared object file: No such file or "
    "directory; install the driver, or run the model without the onnxfuse library), or all inputs of the node lie in "
    "host memory; put CUDAExecutionProvider into the session's providers and install what it needs (pip install "
    "onnxfuse[cuda]), or open the model without the onnxfuse library, as onnxfuse.session does where there is no GPU"
)


def test_a_fused_node_on_the_cpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_LIBCUDA", "/nowhere/libcuda.so")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    runtime.register(options)
    with pytest.raises(Exception, match="RUNTIME_EXCEPTION") as error:
        onnxruntime.InferenceSession(chain(add_one(), 1).SerializeToString(), options, providers=CPU)
    assert str(error.value).endswith("onnxfuse: " + MESSAGE)


def test_session_gives_the_librarys_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_LIBCUDA", "/nowhere/libcuda.so")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    runtime.register(options)
    with pytest.raises(KernelError) as error:
        runtime.session(chain(add_one(), 1).SerializeToString(), CPU, options)
    assert str(error.value) == MESSAGE


def test_an_error_of_onnx_runtime_stays_its_own() -> None:
    with pytest.raises(Exception, match="INVALID_PROTOBUF"):
        runtime.session(b"no model", CPU)


def test_other_models_run_with_the_library_registered() -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "plain", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    runtime.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=CPU)
    assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]


def providers_and_gpu(monkeypatch: pytest.MonkeyPatch, providers: Any, **arguments: Any) -> list[int]:
    """The devices for which ``session`` registers the library, on a machine with two GPUs."""
    gpus = tuple(library.Gpu(ordinal, "GPU", (8, 6), 84, (13, 0)) for ordinal in range(2))
    registered: list[int] = []
    monkeypatch.setattr(library, "gpus", lambda: gpus)
    sessions = sys.modules["onnxfuse.runtime.sessions"]
    monkeypatch.setattr(sessions, "register", lambda options, path, device: registered.append(device))
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, options, **settings: settings)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *CPU])
    settings: Any = runtime.session("model.onnx", providers, **arguments)
    assert settings["providers"] == (providers or ["CUDAExecutionProvider", *CPU])
    assert settings["enable_fallback"] == 0
    return registered


@pytest.mark.parametrize(("providers", "arguments", "devices"), [
    (None, {}, [0]),
    (CPU, {}, []),
    (["CUDAExecutionProvider"], {}, [0]),
    ([("CUDAExecutionProvider", {"device_id": "1"}), "CPUExecutionProvider"], {}, [1]),
    (["CUDAExecutionProvider", "CPUExecutionProvider"], {"provider_options": [{"device_id": 1}, {}]}, [1]),
    ([("CUDAExecutionProvider", {"device_id": 2})], {}, []),
    (["TensorrtExecutionProvider", "CUDAExecutionProvider"], {}, []),
    (["NvTensorRTRTXExecutionProvider", "CUDAExecutionProvider"], {}, []),
])
def test_the_library_is_registered_where_cuda_runs(
    monkeypatch: pytest.MonkeyPatch, providers: Any, arguments: dict[str, Any], devices: list[int]
) -> None:
    assert providers_and_gpu(monkeypatch, providers, **arguments) == devices


def test_register_compiles_the_models_kernels_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[list[KernelSource], str]] = []

    class Recorder:
        def images(self, kernels: list[KernelSource], architecture: str) -> None:
            asked.append((kernels, architecture))

    monkeypatch.setattr(callback, "install", Recorder)
    monkeypatch.setattr(library, "gpus", lambda: (library.Gpu(0, "GPU", (9, 0), 132, (13, 0)),))
    path = tmp_path / "chain.onnx"
    onnx.save(chain(add_one(), 5), path)
    runtime.register(onnxruntime.SessionOptions(), path)
    assert asked == [([KernelSource(ADD_ONE, (), ("add_one",))], "sm_90a")]


def test_a_missing_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(RuntimeLibraryError) as error:
        runtime.register(onnxruntime.SessionOptions())
    assert str(error.value) == (
        f"the native library of onnxfuse is not built\n--> {tmp_path}/libonnxfuse.so\n"
        "help: install the package with g++ at hand: pip install . (or pip install -e .)"
    )


def test_a_library_that_onnx_runtime_refuses_is_an_error() -> None:
    class Refusing:
        def register_custom_ops_library(self, path: str) -> None:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : onnxfuse: too old")

    with pytest.raises(RuntimeLibraryError) as error:
        runtime.register(Refusing())  # type: ignore[arg-type]
    assert str(error.value) == (
        f"ONNX Runtime refuses the native library: too old\n--> {runtime.library_path()}"
    )


@pytest.mark.parametrize(("release", "known"), [(b"1.19.2", "1.19.2"), (b"nonsense", "nonsense"), (b"0.5", "0.5")])
def test_an_old_onnx_runtime_is_one_clear_error(release: bytes, known: str) -> None:
    messages: list[tuple[int, bytes]] = []
    create_status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)

    @create_status_type
    def create_status(code: int, message: bytes) -> int:
        messages.append((code, message))
        return 1

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: ctypes.addressof(table) if version == 1 else None)
    text = ctypes.create_string_buffer(release)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    entry = library.load().RegisterCustomOps
    entry.restype, entry.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    assert entry(None, ctypes.addressof(base)) == 1
    wanted = f"onnxfuse needs ONNX Runtime 1.20 or newer; this is {known}: pip install --upgrade onnxruntime-gpu"
    assert messages == [(1, wanted.encode())]


def test_the_version_of_the_library_is_the_packages() -> None:
    text = (Path(__file__).parents[1] / "setup.cfg").read_text()
    assert f"version = {library.load().onnxfuse_version().decode()}\n" in text


OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")

PLAIN_SCRIPT = """
import json, sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
if sys.argv[2]:
    options.register_custom_ops_library(sys.argv[2])
try:
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"], enable_fallback=0)
    print(json.dumps(session.run(None, {"x": numpy.zeros(3, numpy.float32)})[0].tolist()))
except Exception as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["this", "oldest"])
def test_plain_onnx_runtime_with_and_without_the_library(python: str, tmp_path: Path) -> None:
    path = tmp_path / "chain.onnx"
    onnx.save(chain(add_one(), 2), path)

    def run(registered: str) -> Any:
        done = subprocess.run([python, "-c", PLAIN_SCRIPT, str(path), registered], capture_output=True, text=True,
                              check=True, env=os.environ | {"ONNXFUSE_LIBCUDA": "/nowhere/libcuda.so"})
        return json.loads(done.stdout)

    assert run("") == [2, 2, 2]
    assert run(str(runtime.library_path())).endswith("onnxfuse: " + MESSAGE)


def nested() -> onnx.ModelProto:
    """Fused nodes in the graph, in a branch of an If, and in a function, beside a large weight."""
    model = chain(add_one({"sm_80": IMAGE}), 2)
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.FLOAT, [1000], bytes(4000), raw=True))
    inner = add_one(source=TWICE).node("inner", "Region1", [], ["x"], "z")
    branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n"])])
    model.graph.node.append(helper.make_node("If", ["c"], ["w"], "if", then_branch=branch, else_branch=branch))
    body = [add_host().node("deep", "Region2", ["h"], ["x"], "y")]
    model.functions.append(helper.make_function("local", "F", ["h", "x"], ["y"], body, [helper.make_opsetid("", 17)]))
    return model


def test_fused_nodes_are_found_everywhere(tmp_path: Path) -> None:
    model = nested()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    wanted = ["deep", "inner", "inner", "node0", "node1"]
    for form in (model, path, path.read_bytes()):
        assert sorted(node.name for node in fused_nodes(form)) == wanted


def test_kernels_with_an_image_for_the_gpu_are_not_compiled() -> None:
    twice = {KernelSource(TWICE, (), ("add_one",)), KernelSource(TWICE, (), ("add_more",))}
    assert set(kernel_sources(nested(), "sm_86")) == twice
    assert set(kernel_sources(nested(), "sm_90a")) == twice | {KernelSource(ADD_ONE, (), ("add_one",))}


@pytest.mark.parametrize("change", [
    b"[" * 100_000, b"1", {"variants": 3}, {"options": [1]}, {"options": ["\ud800"]},
    {"variants": [{"steps": [{"kernel": 1}]}]}, {"variants": [{"steps": [{"kernel": ["a"]}]}]},
])
def test_plans_that_are_none_are_left_to_the_library(change: Any) -> None:
    model = chain(add_one(), 1)
    (plan,) = (attribute for attribute in model.graph.node[0].attribute if attribute.name == "plan")
    plan.s = change if isinstance(change, bytes) else json.dumps(json.loads(plan.s) | change).encode()
    assert kernel_sources(model, "sm_90") == []


def test_a_number_of_the_pool_that_is_none_asks_for_no_names() -> None:
    nodes = [helper.make_node(op, [], [], domain="onnxfuse") for op in ("Region" + "9" * 5000, "Region", "Region7")]
    assert names_needed(nodes) == 8


def test_dumped_kernels_are_compiled_whatever_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_DUMP", "/somewhere")
    assert KernelSource(ADD_ONE, (), ("add_one",)) in kernel_sources(nested(), "sm_86")


@pytest.mark.parametrize("raw", [b"", b"\x3a", b"\x3a\xff\xff\x7f", b"\x0b", b"\xff" * 20])
def test_bytes_that_are_no_model(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"not an ONNX model|the file is empty"):
        fused_nodes(path)
