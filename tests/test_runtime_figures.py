"""What the compiler says of kernels, as it is read and kept; the images tell the same by their sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fused_models import KERNELS

from onnxfuse.errors import KernelError
from onnxfuse.runtime import compile, processes
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource
from onnxfuse.runtime.figures import KernelFigures, from_bytes, read_log, to_bytes

NAMES = ("plain", "spilling", "sharing", "calling", "picking")
SOURCE = KernelSource(KERNELS, (), NAMES)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that something was compiled for, in order."""
    done: list[str] = []
    real = compile.compile_told

    def told(source: str, architecture: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
        done.append(architecture)
        return real(source, architecture, options)

    monkeypatch.setattr(compile, "compile_told", told)
    return done


@pytest.mark.parametrize("number", compile.architectures())
def test_what_is_spilled_and_what_is_only_local(number: int, tmp_path: Path) -> None:
    found = Compiler(Cache(tmp_path, "test")).figures(SOURCE, f"sm_{number}")
    assert set(found) == set(NAMES)
    assert all(8 <= figures.registers <= 255 for figures in found.values())
    assert found["plain"] == KernelFigures(found["plain"].registers, 0, 0, 0)
    # 100 values of four bytes and 1,024 threads: 64 registers each, or 32 where two blocks are wanted.
    assert found["spilling"].registers in (32, 64)
    assert found["spilling"].spilled_bytes > 400
    assert 200 < found["spilling"].local_bytes < found["spilling"].spilled_bytes
    assert found["picking"].local_bytes >= 64 > 0 == found["picking"].spilled_bytes
    assert 777 * 4 <= found["sharing"].shared_bytes < 777 * 4 + 1024


def test_figures_are_kept_with_the_image(tmp_path: Path, compiled: list[str]) -> None:
    cache = Cache(tmp_path, "test")
    first = Compiler(cache)
    found = first.figures(SOURCE, "sm_90")
    image = first.image(SOURCE, "sm_90")
    assert compiled == ["sm_90"]
    second = Compiler(cache)
    assert second.figures(SOURCE, "sm_90") == found
    assert second.image(SOURCE, "sm_90") == image
    assert compiled == ["sm_90"]


def test_an_image_without_figures_is_compiled_again(tmp_path: Path, compiled: list[str]) -> None:
    cache = Cache(tmp_path, "test")
    found = Compiler(cache).figures(SOURCE, "sm_90")
    (kept,) = (tmp_path / "test").glob("*.figures")
    for damage in (lambda: kept.unlink(), lambda: kept.write_bytes(b"something else"),
                   lambda: cache.write(kept.name, b'{"plain": {"registers": 1}}')):
        damage()
        assert Compiler(cache).figures(SOURCE, "sm_90") == found
    assert compiled == ["sm_90"] * 4


@pytest.mark.parametrize("log", ["", "ptxas info : Compiling entry function 'plain': registers galore"])
def test_words_that_are_missing_or_not_understood_do_not_stop_a_session(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = compile.compile_told
    monkeypatch.setattr(compile, "compile_told", lambda *arguments: (real(*arguments)[0], log))
    compiler = Compiler(Cache(tmp_path, "test"))
    assert compiler.image(SOURCE, "sm_90")[:4] == b"\x7fELF"
    assert compiler.figures(SOURCE, "sm_90") is None
    assert not list(tmp_path.rglob("*.figures"))


@pytest.mark.parametrize(("version", "alone"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_the_compiler_keeps_no_images_of_its_own(
    version: tuple[int, int], alone: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What NVRTC has kept it hands out without a word, and only where there is a driver: no test here meets that."""
    given: list[tuple[str, ...]] = []

    class Older:
        """The compiler at hand, by another version."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def getVersion(self) -> tuple[int, int]:  # noqa: N802 - NVRTC's name
            return version

        def compileProgram(self, program: Any, arguments: tuple[str, ...]) -> None:  # noqa: N802 - NVRTC's name
            given.append(arguments)
            self.real.compileProgram(program, arguments)

    older = Older(compile.binding())
    for module in (compile, processes):
        monkeypatch.setattr(module, "binding", lambda: older)
    assert compile.compile_cubin(KERNELS, "sm_90")[:4] == b"\x7fELF"
    assert ["--no-cache" in arguments for arguments in given] == [alone]


def test_figures_come_back_from_bytes() -> None:
    figures = {"one": KernelFigures(64, 300, 264, 0), "other": KernelFigures(8, 0, 0, 16)}
    assert from_bytes(to_bytes(figures)) == figures
    for raw in (b"", b"[]", b'{"one": 1}', b'{"one": {"registers": 1}}'):
        assert from_bytes(raw) is None
    assert read_log("") is None
    assert read_log("ptxas info    : 4 bytes gmem") == {}
    with pytest.raises(KernelError, match="what the compiler says of the kernel one is not understood"):
        read_log("ptxas info : Compiling entry function 'one' for 'sm_90'\n")
