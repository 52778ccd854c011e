"""Kernels compiled in processes of their own: the same images, faults that stay where they are, and nothing left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from cli_models import encoder

from onnxfuse import compiling, pipeline
from onnxfuse.compiling import compile_all
from onnxfuse.errors import KernelError
from onnxfuse.pipeline import Options, optimise
from onnxfuse.runtime import compile, nvrtc, nvrtc_library, processes
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource, compile_told
from onnxfuse.runtime.processes import CompilerPool, CompilerProcess
from onnxfuse.tuning import ahead

if TYPE_CHECKING:
    from onnxfuse.tuning.timer import Timer

pytestmark = pytest.mark.xdist_group("compiler_pool")


def text(number: int) -> str:
    return f'extern "C" __global__ void k(float* y) {{ y[threadIdx.x] += {number}.0f; }}'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompilerProcess]]:
    """The processes that a fresh pool of a machine with four processors started."""
    found: list[CompilerProcess] = []

    class Process(CompilerProcess):
        def __init__(self, library: str, version: tuple[int, int]) -> None:
            super().__init__(library, version)
            found.append(self)

    monkeypatch.setattr(processes, "CompilerProcess", Process)
    monkeypatch.setattr(processes, "processors", lambda: processes.LEAST_PROCESSORS)
    pool = CompilerPool()
    for module in (compile, processes):
        monkeypatch.setattr(module, "compiler_pool", pool)
    yield found
    assert all(process._process.returncode is not None for process in found), "a process is left"


def image(number: int) -> bytes:
    return compile_told(text(number), "sm_80")[0]


def test_processes_make_what_this_one_makes(started: list[CompilerProcess]) -> None:
    wanted = [image(number) for number in range(12)]
    ptx = compile_told(text(0), "compute_80")[0]
    assert not started
    with processes.compiler_pool(), ThreadPoolExecutor(12) as threads:
        assert list(threads.map(image, range(12))) == wanted
        assert 1 <= len(started) <= processes.workers()
        assert compile_told(text(0), "compute_80")[0] == ptx
        with pytest.raises(KernelError, match=r"does not compile for sm_80 \(NVRTC_ERROR_COMPILATION \(6\)\):\nkernel"):
            compile_told("nonsense", "sm_80")
        assert image(3) == wanted[3]
    assert [process._process.returncode for process in started] == [0] * len(started)


def test_they_are_kept_until_the_last_context_ends(started: list[CompilerProcess]) -> None:
    with processes.compiler_pool():
        with processes.compiler_pool():
            image(0)
        image(1)
        assert len(started) == 1 and started[0]._process.poll() is None
    assert started[0]._process.returncode == 0
    image(2)
    assert len(started) == 1


def test_what_compiles_beyond_the_last_context_is_finished(started: list[CompilerProcess]) -> None:
    """As the kernels of drafts are whose compilation was begun and that nobody waits for."""
    with processes.compiler_pool():
        process = processes.compiler_pool._process()
    assert process is not None and process._process.poll() is None
    arguments = ("--gpu-architecture=sm_80",)
    assert process.compiled(text(0), arguments, False)[0]
    processes.compiler_pool._give_back(process)
    assert started[0]._process.returncode == 0


def test_a_text_that_brings_the_compiler_down_fails_alone(started: list[CompilerProcess]) -> None:
    wanted = image(1)
    with processes.compiler_pool():
        image(0)
        started[0]._process.kill()
        started[0]._process.wait()
        with pytest.raises(KernelError) as error:
            image(1)
        assert error.value.message == "the compiler ended with SIGKILL"
        assert image(1) == wanted
    assert len(started) == 2


def test_an_interrupt_from_the_terminal_is_for_who_asks(started: list[CompilerProcess]) -> None:
    with processes.compiler_pool():
        image(0)
        started[0]._process.send_signal(signal.SIGINT)
        assert image(1)
    assert len(started) == 1 and started[0]._process.returncode == 0


def test_what_a_forked_process_compiles_is_its_own(started: list[CompilerProcess]) -> None:
    with processes.compiler_pool():
        image(0)
        child = os.fork()
        if not child:
            processes.compiler_pool.__init__()  # type: ignore[misc]  # what is registered for the module's own
            with processes.compiler_pool():
                image(1)
            os._exit(len(started))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert image(2) and len(started) == 1


def test_a_forked_process_has_an_empty_pool() -> None:
    with processes.compiler_pool():
        child = os.fork()
        if not child:
            os._exit(processes.compiler_pool._open)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name, value", [
    ("processors", lambda: processes.LEAST_PROCESSORS - 1),
    ("library_path", lambda: None),
    ("library_path", lambda: "/nowhere/libnvrtc.so.13"),
])
def test_without_processes_this_one_compiles(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    wanted = image(0)
    monkeypatch.setattr(processes, name, value)
    with processes.compiler_pool():
        assert image(0) == wanted
    assert not started


@pytest.mark.parametrize("script", ["sleep 60", "echo nothing", "exit 3", "printf '\\200\\005K\\001.'"])
def test_what_is_no_interpreter_is_not_taken_for_one(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(processes, "STARTS_WITHIN", 0.5)
    wanted = image(0)
    with processes.compiler_pool():
        assert image(0) == wanted
    assert not started


def test_a_program_that_holds_python_is_not_started(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, mark = tmp_path / "server", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with processes.compiler_pool():
        assert image(0)
    assert not started and not mark.exists()


def test_what_is_no_fault_of_the_text_is_tried_here(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the library's other half is found from here alone."""
    lost = b"", "", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE (7)"
    monkeypatch.setattr(CompilerProcess, "compiled", lambda *_: lost)
    with processes.compiler_pool():
        assert image(0)


def test_libraries_that_may_be_the_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One is known; of two of one version, as PyTorch brings another, it is not known which."""
    nvrtc.binding().getVersion()
    path = nvrtc.library_path.__wrapped__()
    assert path is not None
    direct = nvrtc_library.NvrtcLibrary(path)
    monkeypatch.setattr(nvrtc, "binding", lambda: direct)
    assert nvrtc.library_path.__wrapped__() == path
    monkeypatch.undo()
    maps = tmp_path / "maps"
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *given: real(maps if str(self) == "/proc/self/maps" else self))
    row = "7f00-7f10 r-xp 00000000 08:01 1      "
    maps.write_text(f"{row}{path}\n{row}{path.replace('libnvrtc', 'libnvrtc-builtins')}\n{row}[heap]\n")
    assert nvrtc.library_path.__wrapped__() == path
    again = tmp_path / "libnvrtc.so.13"
    again.symlink_to(path)
    maps.write_text(f"{row}{path}\n{row}{again}\n")
    assert nvrtc.library_path.__wrapped__() is None
    maps.write_text(f"{row}[heap]\n")
    assert nvrtc.library_path.__wrapped__() is None


def test_all_that_compile_several_texts_have_them(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that is optimised, sessions, embedding, and tuning."""
    pool, seen = processes.compiler_pool, list[int]()
    for module in (pipeline, compiling, ahead):
        monkeypatch.setattr(module, "compiler_pool", pool)
    monkeypatch.setattr(compiling, "default_compiler", lambda: Compiler(Cache(tmp_path / "cache", "test")))
    real = pool.compiled
    monkeypatch.setattr(pool, "compiled", lambda *given: (seen.append(pool._open), real(*given))[1])
    optimise(encoder(), Options(target="H100", verify=False, compile=True, database=False))
    assert len(seen) > 2 and all(seen)
    source = KernelSource(text(0), (), ("k",))
    for make in (Compiler(Cache(tmp_path / "1", "test")).images,
                 lambda sources, name: list(compile_all([(each, name) for each in sources],
                                                        Compiler(Cache(tmp_path / "2", "test")).image))):
        seen.clear()
        make([source], "sm_80")
        assert seen == [1]
    with ahead.Ahead(cast("Timer", None)):
        assert pool._open == 1
    assert not pool._open
