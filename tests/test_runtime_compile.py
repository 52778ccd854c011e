"""Compilation without a GPU, and the cache of compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from fused_models import ADD_ONE

from onnxfuse.errors import KernelError, OutputError
from onnxfuse.runtime import cache, compile, library, nvrtc, processes
from onnxfuse.runtime.compile import Compiler, KernelSource, compile_cubin

HALVES = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void halves(const __half* x, __nv_bfloat16* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2bfloat16(__half2float(x[i]));
}
"""

PLAIN = r'extern "C" __global__ void plain(float* y) { y[threadIdx.x] = NUMBER; }'


@pytest.mark.parametrize("architecture", [*compile.architectures(), "90a"])
def test_every_architecture_compiles_with_no_gpu(architecture: int | str) -> None:
    image = compile_cubin(HALVES, f"sm_{architecture}")
    assert image[:4] == b"\x7fELF"
    assert b"halves" in image


@pytest.mark.parametrize("architecture", ["sm_90", "sm_90a"])
def test_hoppers_instructions_are_there_under_both_its_names(architecture: str) -> None:
    assert compile_cubin(f"#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#error without\n#endif\n{ADD_ONE}", architecture)


def test_options_reach_the_compiler() -> None:
    assert compile_cubin(PLAIN, "sm_80", ["-DNUMBER=1"]) != compile_cubin(PLAIN, "sm_80", ["-DNUMBER=2"])


def test_a_kernel_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(KernelError) as error:
        compile_cubin("extern \"C\" __global__ void k(float* y) {\n  y[0] = nonsense;\n}", "sm_80")
    assert str(error.value) == (
        "a kernel does not compile for sm_80 (NVRTC_ERROR_COMPILATION (6)):\n"
        'kernel.cu(2): error: identifier "nonsense" is undefined\n'
        "    y[0] = nonsense;\n"
        "           ^\n\n"
        '1 error detected in the compilation of "kernel.cu".'
    )


@pytest.mark.parametrize("architecture", ["sm_70", "sm_", "90", "compute_70", "compute_90a"])
def test_an_unknown_architecture(architecture: str) -> None:
    with pytest.raises(KernelError) as error:
        compile_cubin(ADD_ONE, architecture)
    assert error.value.message.startswith("NVRTC ")
    assert error.value.message.endswith(f" cannot compile for '{architecture}'")
    assert "sm_75, sm_80" in (error.value.remedy or "")


def test_no_cupy_is_an_error_with_a_remedy() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from onnxfuse.runtime import compile, nvrtc\n"
        "assert nvrtc.compiler() is None\n"
        "from onnxfuse.runtime.callback import install\n"
        "assert install() is None\n"
        "try: compile.compile_cubin('', 'sm_80')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "no CUDA compiler: CuPy is not installed\n"
        "help: install CuPy and NVRTC: pip install onnxfuse\n"
    )


def test_threads_that_want_cupy_at_one_time() -> None:
    """One asks the GPU what it is while another compiles: in each order, as it hangs on how long either takes."""
    code = (
        "import sys, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from onnxfuse.runtime.importing import import_cupy\n"
        "from onnxfuse.runtime.nvrtc import binding\n"
        "works = [import_cupy, lambda: binding().getVersion()]\n"
        "with ThreadPoolExecutor(2) as pool:\n"
        "    first = pool.submit(works[int(sys.argv[1])])\n"
        "    time.sleep(float(sys.argv[2]))\n"
        "    for each in first, pool.submit(works[1 - int(sys.argv[1])]): print(type(each.result()).__name__)\n"
    )
    for first, later in (0, 0.0), (0, 0.02), (1, 0.0), (1, 0.02):
        done = subprocess.run([sys.executable, "-c", code, str(first), str(later)], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split()) == ["module", "tuple"]


@pytest.mark.parametrize("raised", ["ImportError('no')", "AttributeError('half of it')", "OSError('no library')"])
def test_cupy_that_does_not_load(tmp_path: Path, raised: str) -> None:
    """What asks the GPU for its figures then does without, as does what looks for a compiler."""
    (tmp_path / "cupy.py").write_text(f"raise {raised}")
    code = ("from onnxfuse.runtime.importing import import_cupy\n"
            "for _ in range(2):\n"
            "    try: import_cupy()\n"
            "    except ImportError as error: print(error)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, sys.path)))})
    said = raised.split("'")[1]
    assert done.stdout.splitlines() == [said if raised.startswith("I") else f"CuPy does not load: {said}"] * 2


def test_the_runtime_imports_without_cupy_and_graph_stages() -> None:
    code = ("import sys, onnxfuse.runtime, onnxfuse.runtime.callback\n"
            "print(sorted({m.split('.')[0] for m in sys.modules} & {'cupy', 'onnx_graphsurgeon', 'onnx', 'torch'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_several_kernels_compile_in_parallel_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(source: str, architecture: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
        calls.append(source)
        return f"{source} {architecture} {options}".encode(), ""

    monkeypatch.setattr(compile, "compile_told", counting)
    kernels = [KernelSource(f"source {number % 5}", ("-DX",), ("k",)) for number in range(20)]
    compiler = Compiler(cache.Cache(tmp_path, "test-1"))
    images = compiler.images(kernels, "sm_80")
    assert images == [f"source {number % 5} sm_80 ('-DX',)".encode() for number in range(20)]
    assert sorted(calls) == [f"source {number}" for number in range(5)]
    assert len(list((tmp_path / "test-1").iterdir())) == 5

    # Another process finds them on disk; another compiler does not.
    calls.clear()
    assert Compiler(cache.Cache(tmp_path, "test-1")).images(kernels, "sm_80") == images
    assert calls == []
    Compiler(cache.Cache(tmp_path, "test-2")).image(kernels[0], "sm_80")
    assert calls == ["source 0"]


def test_a_corrupt_entry_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "compile_told", lambda source, architecture, options: (b"\x7fELF image", ""))
    kernel, store = KernelSource("source"), cache.Cache(tmp_path, "test-1")
    Compiler(store).image(kernel, "sm_80")
    (path,) = (tmp_path / "test-1").iterdir()
    whole = path.read_bytes()
    for broken in (b"", whole[:50], whole[:-1], whole + b"!", whole[:-1] + b"?", b"x" * 400):
        path.write_bytes(broken)
        assert store.read(path.name) is None
        assert Compiler(store).image(kernel, "sm_80") == b"\x7fELF image"
        assert path.read_bytes() == whole


def test_kernels_are_dumped_with_line_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and image lie in the folder; the machine code has the text's lines, and an entry of its own in the cache."""
    store, kernel = cache.Cache(tmp_path / "cache", "test-1"), KernelSource(ADD_ONE, ("-DX",), ("add_one",))
    plain = Compiler(store).image(kernel, "sm_80")
    assert (b".debug_line" in plain, len(list((tmp_path / "cache" / "test-1").glob("*.cubin")))) == (False, 1)
    folder = tmp_path / "a folder"
    monkeypatch.setenv("ONNXFUSE_DUMP", str(folder))
    traced = Compiler(store).image(kernel, "sm_80")
    name = f"add_one-{cache.digest(ADD_ONE, ('-DX',))[:16]}"
    assert {path.name for path in folder.iterdir()} == {f"{name}.cu", f"{name}.sm_80.cubin"}
    assert (folder / f"{name}.cu").read_text() == ADD_ONE
    assert (folder / f"{name}.sm_80.cubin").read_bytes() == traced
    assert b".debug_line" in traced and str(folder).encode() in traced and f"{name}.cu".encode() in traced
    assert len(list((tmp_path / "cache" / "test-1").glob("*.cubin"))) == 2
    # From the cache it is dumped again, and into another folder compiled again, since the lines name the folder.
    monkeypatch.setattr(compile, "compile_told", lambda source, architecture, options: (source.encode(), ""))
    (folder / f"{name}.sm_80.cubin").unlink()
    assert Compiler(store).image(kernel, "sm_80") == traced
    assert (folder / f"{name}.sm_80.cubin").read_bytes() == traced
    monkeypatch.chdir(tmp_path)
    for hard in ('a "folder"', "a földer", "a\\folder", "a\nfolder"):
        monkeypatch.setenv("ONNXFUSE_DUMP", hard)
        assert Compiler(store).image(kernel, "sm_80").startswith(f'#line 1 "{name}.cu"\n'.encode())
    monkeypatch.setenv("ONNXFUSE_DUMP", "other")
    assert Compiler(store).image(kernel, "sm_80") == f'#line 1 "{tmp_path}/other/{name}.cu"\n{ADD_ONE}'.encode()


def test_a_dumped_kernel_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is there, and the log points at it."""
    monkeypatch.setenv("ONNXFUSE_DUMP", str(tmp_path))
    with pytest.raises(KernelError) as error:
        Compiler(cache.Cache(None, "")).image(KernelSource("nonsense"), "sm_80")
    (path,) = tmp_path.iterdir()
    assert f"\n{path}(1): error:" in str(error.value)
    assert path.read_text() == "nonsense"


def test_a_folder_for_dumps_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ONNXFUSE_DUMP", str(tmp_path / "file"))
    with pytest.raises(OutputError) as error:
        Compiler(cache.Cache(None, "")).image(KernelSource(ADD_ONE, (), ("add_one",)), "sm_80")
    path = tmp_path / "file" / f"add_one-{cache.digest(ADD_ONE, ())[:16]}.cu"
    assert str(error.value) == (
        f"A kernel cannot be dumped: File exists.\n--> {path}\n"
        "help: Set ONNXFUSE_DUMP to a folder that can be written, or unset it."
    )


def test_concurrent_writers_and_readers_meet_whole_entries(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from onnxfuse.runtime.cache import Cache\n"
        "store = Cache(Path(sys.argv[1]), 'test-1')\n"
        "for _ in range(150):\n"
        "    store.write('entry', bytes(range(256)) * 400)\n"
        "    assert store.read('entry') == bytes(range(256)) * 400\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    store, seen, stop = cache.Cache(tmp_path, "test-1"), set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            image = store.read("entry")
            seen.add(None if image is None else len(image))

    reader = threading.Thread(target=read)
    reader.start()
    codes = [writer.wait() for writer in writers]
    stop.set()
    reader.join()
    assert codes == [0, 0, 0]
    assert seen <= {None, 256 * 400}
    assert [path.name for path in (tmp_path / "test-1").iterdir()] == ["entry"]


def test_a_folder_that_cannot_be_written_warns_once_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")  # root writes everywhere, but not below a file
    store = cache.Cache(tmp_path / "file", "test-1")
    folder = tmp_path / "file" / "test-1"
    with pytest.warns(RuntimeWarning) as caught:
        assert store.write("entry", b"image") is False
    assert [str(warning.message) for warning in caught] == [
        f"the kernel cache {folder} cannot be written (File exists); kernels are compiled again in every process; "
        "set ONNXFUSE_CACHE_DIR to a folder that can be written"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.write("entry", b"image") is False
    assert store.read("entry") is None
    assert cache.Cache(None, "test-1").write("entry", b"image") is False


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONNXFUSE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def both() -> list[str]:
        # A fresh process: the library asks for the variables until it is told a folder.
        code = "from onnxfuse.runtime.library import *; print(read_text(load().onnxfuse_get_cache))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        folder = cache.default_folder()
        return ["" if folder is None else os.fspath(folder), done.stdout.strip()]

    assert both() == ["", ""]
    monkeypatch.setenv("HOME", "/home/x")
    assert both() == ["/home/x/.cache/onnxfuse"] * 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert both() == ["/xdg/onnxfuse"] * 2
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", "/own")
    assert both() == ["/own"] * 2


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The choice of a compiler, made anew; a machine whose driver runs CUDA 12 and has NVIDIA's CUDA 12 wheel."""
    for function in (nvrtc.compiler, nvrtc.binding, nvrtc.headers):
        function.cache_clear()
        monkeypatch.setattr(nvrtc, function.__name__, function.__wrapped__)
    monkeypatch.setattr(library, "gpus", lambda: (library.Gpu(0, "GPU", (8, 0), 108, (12, 4)),))
    versions = {"nvidia-cuda-nvrtc-cu12": "12.9.86", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(nvrtc, "_installed", versions.get)
    return monkeypatch


def test_a_driver_of_cuda_12_takes_the_compiler_of_cuda_12(fresh: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    fresh.setattr(nvrtc, "NvrtcLibrary", loaded.append)
    nvrtc.binding()
    assert [Path(path).parts[-3:] for path in loaded] == [("cuda_nvrtc", "lib", "libnvrtc.so.12")]
    assert nvrtc.compiler() == "nvrtc-12.9.86"
    fresh.setenv("ONNXFUSE_CUDA", "13")
    assert nvrtc.compiler() == "cupy-13"


def test_a_driver_of_cuda_12_without_its_compiler(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(nvrtc, "_installed", {"cupy-cuda13x": "14.2.0"}.get)
    with pytest.raises(KernelError) as error:
        nvrtc.binding()
    assert error.value.message.endswith(", and the driver runs CUDA 12 at most")
    assert error.value.remedy == (
        "update the driver (CUDA 13 needs 580 or newer) or pip install 'onnxfuse[cuda12]'"
    )


def test_a_wrong_cuda_version_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CUDA", "11")
    with pytest.raises(KernelError) as error:
        nvrtc.wanted_major()
    assert str(error.value) == "ONNXFUSE_CUDA is '11'\nhelp: set it to 12 or 13, or unset it"


def test_nvrtc_through_ctypes_does_what_cupys_binding_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cupys = nvrtc.binding()
    wanted = compile_cubin(HALVES, "sm_80")
    with open("/proc/self/maps") as maps:
        (path,) = {line.split()[-1] for line in maps if re.search(r"/libnvrtc\.so[.\d]*$", line)}
    direct = nvrtc.NvrtcLibrary(path)
    assert direct.getVersion() == cupys.getVersion()
    assert direct.getSupportedArchs() == cupys.getSupportedArchs()
    for module in (compile, processes):
        monkeypatch.setattr(module, "binding", lambda: direct)
    assert compile_cubin(HALVES, "sm_80") == wanted
    assert b".target sm_80\n" in compile_cubin(HALVES, "compute_80")
    assert not compile_cubin(HALVES, "compute_80").endswith(b"\0")
    with pytest.raises(KernelError) as error:
        compile_cubin("nonsense", "sm_80")
    assert str(error.value).startswith(
        "a kernel does not compile for sm_80 (NVRTC_ERROR_COMPILATION (6)):\nkernel.cu(1): error:"
    )


def test_a_missing_nvrtc_library(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(nvrtc, "_wheel", lambda _: Path("/nowhere"))
    with pytest.raises(KernelError) as error:
        nvrtc.binding()
    assert str(error.value) == (
        "no CUDA compiler: /nowhere/lib/libnvrtc.so.12: cannot open shared object file: No such file or directory\n"
        "help: pip install 'onnxfuse[cuda12]'"
    )
