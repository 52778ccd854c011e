"""Each part broken in turn: what `onnxfuse doctor` says of it, how it is mended, and the exit code.

Drivers are small libraries built here, packages are folders on the path of a process of its own; everything else is as
it is installed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cli_models import ROOT, run

from onnxfuse.doctor import cuda
from onnxfuse.doctor.installed import loaded_from
from onnxfuse.measuring.database import Environment, Measurement, open_database
from onnxfuse.runtime import library, nvrtc
from onnxfuse.runtime.cache import Cache
from onnxfuse.version import __version__, _version

PARTS = ["NVIDIA driver", "GPU", "ONNX Runtime", "CUDA provider", "native library", "CuPy", "NVRTC", "CUDA headers",
         "compiler cache", "database"]

DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { return CODE; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { snprintf(name, size, "GPU %d", device); return 0; }
int cuDeviceGetAttribute(int* value, int what, int device) {
  const int capabilities[] = {CAPABILITIES};
  *value = what == 75 ? capabilities[device] / 10 : capabilities[device] % 10;
  return 0;
}
int cuGetErrorString(int code, const char** text) { *text = "the driver's words"; return 0; }
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What the process remembers of compilers and libraries is forgotten before and after."""
    remembered: list[Any] = [nvrtc.compiler, nvrtc.binding, nvrtc.headers, library.load]
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def built(path: Path, text: str, *flags: str) -> Path:
    """A shared library of C."""
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", *flags, "-", "-o", str(path)], input=text, text=True,
                   check=True)
    return path


def driver(folder: Path, code: int = 0, version: int = 13000, count: int = 1, capabilities: str = "90") -> str:
    """A driver, for ``ONNXFUSE_LIBCUDA``."""
    return str(built(folder / "libcuda.so", DRIVER, f"-DCODE={code}", f"-DVERSION={version}", f"-DCOUNT={count}",
                     f"-DCAPABILITIES={capabilities}"))


def examined(code: int, *arguments: str, **environment: str) -> dict[str, dict[str, str]]:
    """The parts by name, of an examination in this process that exits so."""
    result = run("doctor", "--json", *arguments, **environment)
    assert result.exit_code == code, result.output
    data = json.loads(result.output)
    assert [part["part"] for part in data["parts"]] == PARTS
    assert data["ok"] is (code == 0)
    return {part["part"]: part for part in data["parts"]}


def apart(code: int, folder: Path, **more: str) -> dict[str, dict[str, str]]:
    """The same in a process that finds the packages of a folder first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONNXFUSE_")}
    done = subprocess.run([sys.executable, "-m", "onnxfuse", "doctor", "--json"], text=True, capture_output=True,
                          env={**environment, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), **more})
    assert done.returncode == code, done.stderr + done.stdout
    return {part["part"]: part for part in json.loads(done.stdout)["parts"]}


def package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def release(folder: Path, name: str, version: str) -> None:
    """A package that is installed, going by what pip wrote of it."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def no_gpu() -> bool:
    return cuda.driver().gpu.state == "absent"


needs_no_gpu = pytest.mark.skipif(not no_gpu(), reason="there is a GPU")


# A machine on which nothing is broken


@needs_no_gpu
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    places = {"ONNXFUSE_CACHE_DIR": str(tmp_path), "ONNXFUSE_DATABASE": str(tmp_path / "m.sqlite")}
    parts = examined(0, **places)
    assert {name: part["state"] for name, part in parts.items() if part["state"] != "ok"} == {
        "NVIDIA driver": "absent", "GPU": "absent", "CUDA provider": "absent"}
    assert parts["ONNX Runtime"]["version"].endswith(f", API {parts['ONNX Runtime']['version'].split('.')[1]}")
    assert Path(parts["NVRTC"]["path"]).name.startswith("libnvrtc.so")
    assert parts["NVRTC"]["message"] == "compiled a kernel for sm_90"
    assert (parts["native library"]["version"], parts["native library"]["message"]) == (
        __version__, "registered with ONNX Runtime")
    assert parts["database"]["message"] == "none yet: `onnxfuse tune MODEL` makes it"
    assert parts["compiler cache"]["message"] == "0 kernels, 0.0 MB" and not list(tmp_path.iterdir())
    assert Cache(tmp_path, "nvrtc-1").write("sm_90-1.cubin", bytes(300_000))
    (tmp_path / "emulator" / "1").mkdir(parents=True)
    (tmp_path / "emulator" / "1" / "no.cubin").touch()
    assert examined(0, **places)["compiler cache"]["message"] == "1 kernels, 0.3 MB"
    examined(1, "--require-gpu", **places)


@needs_no_gpu
def test_what_is_printed(tmp_path: Path) -> None:
    result = run("doctor", ONNXFUSE_CACHE_DIR=str(tmp_path / "none"), ONNXFUSE_DATABASE=str(tmp_path / "m.sqlite"))
    lines = result.output.splitlines()
    assert result.exit_code == 0 and lines[0].startswith(f"onnxfuse {__version__}, Python 3.")
    assert f"  ONNXFUSE_CACHE_DIR={tmp_path / 'none'}" in lines
    assert [line[8:].split("  ")[0] for line in lines if line[:8].strip() in ("ok", "absent")] == PARTS
    place = lines.index(f"ok      compiler cache  {tmp_path / 'none'}")
    assert lines[place + 1].strip() == "made when the first kernel is compiled" and not (tmp_path / "none").exists()
    assert lines[-1] == ("everything works; there is no GPU here: models are fused and compiled for others, and "
                         "kernels are not run")
    told = run("doctor", "--require-gpu").output.splitlines()
    assert told[-1] == "to be mended: NVIDIA driver, GPU, CUDA provider"


# The driver and the GPUs


@pytest.mark.parametrize("settings, state, message, remedy", [
    ({"code": 803, "count": 0}, "broken", "It does not start: the driver's words (803).", "reboot after an update"),
    ({"code": 999, "count": 0}, "broken", "It does not start: the driver's words (999).", "reload the driver"),
    ({"code": 802, "count": 0}, "broken", "It does not start: the driver's words (802).", "nvidia-fabricmanager"),
    ({"code": 100, "count": 0}, "absent", "It does not start: the driver's words (100).", "docker run --gpus all"),
    ({"version": 11080}, "broken", "It is too old: onnxfuse needs CUDA 12 or newer.", "525 or newer"),
])
def test_a_driver_that_does_not_work(
    tmp_path: Path, settings: Mapping[str, int], state: str, message: str, remedy: str
) -> None:
    path = driver(tmp_path, **settings)
    parts = examined(int(state == "broken"), ONNXFUSE_LIBCUDA=path)
    found = parts["NVIDIA driver"]
    assert (found["state"], found["message"], found["path"]) == (state, message, path)
    assert remedy in found["remedy"]
    assert parts["GPU"]["state"] == "absent"


def test_libraries_that_are_no_driver(tmp_path: Path) -> None:
    text = tmp_path / "libcuda.so.1"
    text.write_text("no library")
    found = examined(1, ONNXFUSE_LIBCUDA=str(text))["NVIDIA driver"]
    assert found["state"] == "broken" and found["message"].startswith("ONNXFUSE_LIBCUDA names what does not load: ")
    assert found["remedy"].startswith("Unset ONNXFUSE_LIBCUDA")
    empty = built(tmp_path / "empty.so", "int nothing;")
    found = examined(1, ONNXFUSE_LIBCUDA=str(empty))["NVIDIA driver"]
    assert "cuInit" in found["message"] and found["state"] == "broken"


@needs_no_gpu
def test_gpus_that_a_driver_shows(tmp_path: Path) -> None:
    """The GPUs are made up: what would run on them says that it does not."""
    path = driver(tmp_path, count=2, capabilities="70, 86")
    parts = examined(1, ONNXFUSE_LIBCUDA=path)
    assert (parts["NVIDIA driver"]["state"], parts["NVIDIA driver"]["version"]) == ("ok", "CUDA 13.0")
    gpu = parts["GPU"]
    assert (gpu["state"], gpu["version"]) == ("limited", "GPU 0 (sm_70), GPU 1 (sm_86)")
    assert gpu["message"] == "Too old for onnxfuse, which needs sm_75 or newer: GPU 0 (sm_70)."
    assert parts["NVRTC"]["message"] == "compiled a kernel for sm_86"
    provider = parts["CUDA provider"]
    assert provider["state"] == "broken" and provider["message"].startswith("It does not start: ")
    assert "pip install 'onnxfuse[cuda]'" in provider["remedy"]
    assert parts["CuPy"]["state"] == "broken" and "onnxfuse[cuda12]" in parts["CuPy"]["remedy"]


def test_a_gpu_that_is_too_old(tmp_path: Path) -> None:
    parts = examined(1, ONNXFUSE_LIBCUDA=driver(tmp_path, capabilities="70"))
    assert parts["GPU"]["state"] == "broken" and parts["GPU"]["message"] == "onnxfuse needs sm_75 (T4) or newer."


def test_gpus_that_are_hidden(tmp_path: Path) -> None:
    parts = examined(0, ONNXFUSE_LIBCUDA=driver(tmp_path, count=0), CUDA_VISIBLE_DEVICES="7")
    assert parts["GPU"]["state"] == "absent" and "CUDA_VISIBLE_DEVICES is '7'." in parts["GPU"]["message"]


def test_a_card_without_a_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (("0000:00:01.0", "0x10de", "0x030200"), ("0000:00:02.0", "0x8086", "0x030000"),
                               ("0000:00:03.0", "0x10de", "0x068000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "empty").mkdir()
    assert cuda.nvidia_cards(tmp_path) == ["0000:00:01.0"]


# ONNX Runtime and the native library


def test_an_onnx_runtime_that_does_not_load(tmp_path: Path) -> None:
    package(tmp_path, "onnxruntime", "raise ImportError('libpython: undefined symbol: gone')")
    parts = apart(1, tmp_path)
    found = parts["ONNX Runtime"]
    assert (found["state"], found["message"]) == ("broken", "It does not load: libpython: undefined symbol: gone.")
    assert found["remedy"].startswith("pip uninstall -y onnxruntime-gpu && pip install onnxruntime-gpu")
    assert parts["native library"]["message"] == "Not looked at: ONNX Runtime does not load."
    assert (parts["CuPy"]["state"], parts["NVRTC"]["state"]) == ("ok", "ok")


OLD = """
__version__ = "1.18.1"
def get_available_providers(): return ["CPUExecutionProvider"]
def set_default_logger_severity(severity): pass
class SessionOptions:
    def register_custom_ops_library(self, path): raise RuntimeError("onnxfuse needs ONNX Runtime 1.20 or newer")
"""


def test_an_onnx_runtime_that_is_too_old_and_for_the_cpu(tmp_path: Path) -> None:
    package(tmp_path, "onnxruntime", OLD)
    parts = apart(1, tmp_path)
    found = parts["ONNX Runtime"]
    assert (found["state"], found["version"]) == ("broken", "1.18.1, API 18")
    assert found["path"] == str(tmp_path / "onnxruntime")
    assert found["message"] == "It is too old: onnxfuse needs 1.20 or newer."
    assert parts["native library"]["message"] == (
        "ONNX Runtime refuses it: onnxfuse needs ONNX Runtime 1.20 or newer")
    provider = parts["CUDA provider"]
    assert provider["message"].startswith("This ONNX Runtime is for the CPU alone")
    assert provider["remedy"] == "pip uninstall -y onnxruntime-gpu && pip install onnxruntime-gpu"


def test_two_packages_of_onnx_runtime_and_of_cupy(tmp_path: Path) -> None:
    for name, version in (("onnxruntime", "1.30.0"), ("onnxruntime-gpu", "1.31.0"), ("cupy-cuda12x", "14.0.0"),
                          ("cupy-cuda13x", "14.1.0")):
        release(tmp_path, name, version)
    parts = apart(1, tmp_path)
    assert parts["ONNX Runtime"]["message"].startswith("Packages overwrite one another's files: onnxruntime 1.30.0, ")
    assert parts["ONNX Runtime"]["remedy"].startswith("pip uninstall -y onnxruntime onnxruntime-gpu && ")
    assert parts["CuPy"]["message"] == "Packages of CuPy overwrite one another's files."
    assert parts["CuPy"]["remedy"].startswith("Keep one: pip uninstall -y cupy-cuda13x cupy-cuda12x && ")


def test_packages_in_folders_of_their_own_leave_each_other_alone(tmp_path: Path) -> None:
    release(tmp_path, "onnxruntime", "1.30.0")
    release(tmp_path, "cupy-cuda12x", "14.0.0")
    parts = apart(0, tmp_path)
    assert (parts["ONNX Runtime"]["state"], parts["CuPy"]["state"]) == ("ok", "ok")


def test_a_cupy_that_does_not_load(tmp_path: Path) -> None:
    package(tmp_path, "cupy", "raise ImportError('libcublas.so.13: cannot open shared object file')")
    parts = apart(1, tmp_path)
    assert parts["CuPy"]["message"] == "It does not load: libcublas.so.13: cannot open shared object file."
    assert parts["CuPy"]["remedy"] == "pip install --force-reinstall cupy-cuda13x"
    assert parts["NVRTC"]["state"] == "broken" and parts["NVRTC"]["message"].startswith("no CUDA compiler: ")


NATIVE = """
const char* onnxfuse_version(void) { return VERSION; }
void onnxfuse_expect_names(int n) {} void onnxfuse_set_compile_callback(void* f) {}
void onnxfuse_reply_image(void* r, const char* t, unsigned long n) {}
void onnxfuse_reply_error(void* r, const char* t) {} void onnxfuse_set_cache(const char* a, const char* b) {}
unsigned long onnxfuse_get_cache(char* t, unsigned long n) { return 0; }
unsigned long onnxfuse_cache_key(void) { return 0; } unsigned long onnxfuse_devices(char* t, unsigned long n) {
  const char* answer = "error:no driver"; for (int i = 0; i < 16; i++) t[i] = answer[i]; return 16; }
void onnxfuse_set_recording(int on) {} unsigned long onnxfuse_statistics(void) { return 0; }
unsigned long onnxfuse_write_statistics(void) { return 0; } unsigned long onnxfuse_evaluate_plan(void) { return 0; }
unsigned long onnxfuse_read_json(void) { return 0; }
"""


def nowhere(path: Path) -> None:
    path.unlink(missing_ok=True)


def no_library(path: Path) -> None:
    path.write_text("no library")


def without_entries(path: Path) -> None:
    built(path, "int nothing;")


def of_another_release(path: Path) -> None:
    built(path, NATIVE, '-DVERSION="9.9.9"')


def without_registration(path: Path) -> None:
    built(path, NATIVE, f'-DVERSION="{__version__}"')


@pytest.mark.parametrize("make, message, remedy", [
    (nowhere, "the native library of onnxfuse is not built", "g++"),
    (no_library, "the native library of onnxfuse does not load: ", "pip install --force-reinstall"),
    (without_entries, "the native library of onnxfuse does not load: ", "pip install --force-reinstall"),
    (of_another_release, f"It is of another release than onnxfuse {__version__}.", "pip install --force-reinstall"),
    (without_registration, "ONNX Runtime refuses it: ", "pip install --upgrade onnxruntime-gpu"),
])
def test_a_native_library_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], message: str, remedy: str
) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    make(tmp_path / "libonnxfuse.so")
    found = examined(1)["native library"]
    assert found["state"] == "broken" and found["path"] == str(tmp_path / "libonnxfuse.so")
    assert found["message"].startswith(message) and remedy in found["remedy"]


# The compiler and its headers


def test_a_compiler_that_is_asked_for_wrongly() -> None:
    parts = examined(1, ONNXFUSE_CUDA="11")
    assert (parts["NVRTC"]["state"], parts["NVRTC"]["message"], parts["NVRTC"]["remedy"]) == (
        "broken", "ONNXFUSE_CUDA is '11'", "set it to 12 or 13, or unset it")
    assert parts["compiler cache"]["state"] != "broken"


@pytest.mark.skipif(nvrtc._cupy_major() != 13 or nvrtc._installed("nvidia-cuda-nvrtc-cu12") is not None,
                    reason="CUDA 12 is installed")
def test_a_compiler_that_is_too_new() -> None:
    found = examined(1, ONNXFUSE_CUDA="12")["NVRTC"]
    assert found["state"] == "broken" and found["message"].endswith(", and the driver runs CUDA 12 at most")
    assert "pip install 'onnxfuse[cuda12]'" in found["remedy"]


def test_headers_that_are_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(Path(folder).exists() for folder in ("/usr/local/cuda/include/cuda_fp16.h",)):
        pytest.skip("the toolkit is installed")
    monkeypatch.setattr(nvrtc, "_wheel", lambda component: tmp_path / "nowhere")
    parts = examined(1, CUDA_PATH="", CUDA_HOME="")
    for part in ("NVRTC", "CUDA headers"):
        assert parts[part]["message"] == f"the headers of CUDA {nvrtc.binding().getVersion()[0]} are missing"
        assert parts[part]["remedy"].startswith("install them: pip install nvidia-cuda-runtime")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").write_text("#error broken\n")
    nvrtc.headers.cache_clear()
    parts = examined(1, CUDA_PATH=str(tmp_path))
    assert parts["NVRTC"]["state"] == "broken" and "does not compile" in parts["NVRTC"]["message"]
    assert (parts["CUDA headers"]["state"], parts["CUDA headers"]["path"]) == ("ok", str(tmp_path / "include"))


# What is kept on disk


def a_file(place: Path) -> None:
    place.write_text("")


def for_others(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def below_a_file(place: Path) -> None:
    place.parent.rmdir()
    place.parent.write_text("")


@pytest.mark.parametrize("make, message, remedy", [
    (a_file, "It cannot be used (Not a directory): ", "ONNXFUSE_CACHE_DIR"),
    (for_others, "It is not used (others may write to it: chmod go-w): ", "chmod go-w"),
    (below_a_file, "It cannot be ", "ONNXFUSE_CACHE_DIR"),
])
def test_a_cache_that_cannot_be_used(
    tmp_path: Path, make: Callable[[Path], None], message: str, remedy: str
) -> None:
    place = tmp_path / "above" / "cache"
    place.parent.mkdir()
    make(place)
    found = examined(0, ONNXFUSE_CACHE_DIR=str(place))["compiler cache"]
    assert found["state"] == "limited" and found["message"].startswith(message), found
    assert found["message"].endswith(": kernels are compiled again in every process.")
    assert remedy in found["remedy"]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONNXFUSE_CACHE_DIR", "ONNXFUSE_DATABASE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    parts = examined(0)
    assert parts["compiler cache"]["message"] == "There is no HOME: kernels are compiled again in every process."
    assert parts["database"]["message"] == "There is no HOME: what is measured is not kept."


def test_a_database_with_measurements(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    with open_database(path) as kept:
        kept.record(Environment("NVIDIA H100", "580", "0", "1", "n"), Measurement("s", "1>1", "default", 1.0))
    found = examined(0, ONNXFUSE_DATABASE=str(path))["database"]
    assert (found["state"], found["message"]) == ("ok", "1 measurements, 0 statistics, of NVIDIA H100")


def damaged(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"damage" * 1000)


def later(path: Path) -> None:
    open_database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")


def another(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")


@pytest.mark.parametrize("make", [damaged, later, another])
def test_a_database_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "m.sqlite"
    make(path)
    found = examined(1, ONNXFUSE_DATABASE=str(path))["database"]
    assert (found["state"], found["path"]) == ("broken", str(path))
    assert found["message"] and found["remedy"]


def test_a_folder_in_place_of_the_database(tmp_path: Path) -> None:
    found = examined(0, ONNXFUSE_DATABASE=str(tmp_path))["database"]
    assert found["state"] == "limited" and "cannot be read" in found["message"] and found["remedy"]


def test_names_that_steer_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[2J\n--> forged"
    folder.write_text("")
    result = run("doctor", ONNXFUSE_CACHE_DIR=str(folder), ONNXFUSE_DATABASE=str(folder), ONNXFUSE_CUDA="\x1b[2J")
    assert "\x1b" not in result.output and "\n--> forged" not in result.output
    assert result.output.count("\\x1b[2J") >= 3


def test_where_a_library_was_loaded_from() -> None:
    library.load()
    found = Path(loaded_from("libonnxfuse.so"))  # other tests load others of that name
    assert found.name == "libonnxfuse.so" and found.is_absolute()
    assert loaded_from("libnothing") == ""


def test_a_checkout_that_is_not_installed_has_the_version_of_its_setup_cfg(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert f"version = {_version()}\n" in (ROOT / "setup.cfg").read_text()
