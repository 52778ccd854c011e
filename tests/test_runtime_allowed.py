"""What a kernel of a model may ask of the machine that compiles it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fused_models import ADD_ONE

from onnxfuse.errors import KernelError
from onnxfuse.runtime.allowed import check_options, check_source
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource, compile_cubin


@pytest.mark.parametrize("option", [
    "--create-pch=FILE", "--time=FILE", "-time=FILE", "--pch-dir=FOLDER", "--use-pch=FILE", "--include-path=/etc",
    "-I/etc", "--pre-include=/etc/passwd", "-include", "/etc/passwd", "@FILE", "--options-file=FILE", "--dopt=on",
    "-DX=1 --time=FILE", "-DX=1\n--time=FILE",
    "--maxrregcount=32 --time=FILE", "--maxrregcount=32\n--time=FILE", "--fdevice-time-trace=FILE", "--fmad", "",
])
def test_an_option_that_no_model_may_ask_for(option: str, tmp_path: Path) -> None:
    option = option.replace("FILE", str(tmp_path / "made")).replace("FOLDER", str(tmp_path))
    with pytest.raises(KernelError, match="which no model may"):
        compile_cubin(ADD_ONE, "sm_90", (option,))
    assert not list(tmp_path.iterdir())


def test_options_that_change_the_code_alone() -> None:
    check_options(["--maxrregcount=32", "--fmad=false", "--ftz=true", "--prec-div=false", "--prec-sqrt=true",
                   "-lineinfo", "-DN", "-DN=", "-DN=12", "-DX=0.5f"])


@pytest.mark.parametrize("text", [
    '#include "FILE"', "#include <FILE>", "  # include 'FILE'", '#\tinclude/* */"FILE"', '/**/#/* \n */include "FILE"',
    '#inc\\\nlude "FILE"', '#inc\\  \r\nlude "FILE"', '%:include "FILE"', '#include_next "FILE"', '#import "FILE"',
    "const char text[] = {\n#embed \"FILE\"\n};", '#define NAME "FILE"\n#include NAME', "#include <../secret.h>",
    "#include <cuda/../../secret.h>", '#if __has_include("FILE")\n#endif', '#include // \n"FILE"',
    'const char* s = R"(")";\n#include "FILE"\n//"', "#include <.hidden>",
])
def test_no_text_reads_a_file(text: str, tmp_path: Path) -> None:
    """Whatever the spelling; those that the compiler would take are what matters, and it is not asked."""
    (tmp_path / "secret.h").write_text("int secret;\n")
    with pytest.raises(KernelError, match="headers of the CUDA toolkit alone"):
        compile_cubin(f"{text.replace('FILE', str(tmp_path / 'secret.h'))}\n{ADD_ONE}", "sm_90")


@pytest.mark.parametrize("text", [
    "#include <cuda_fp16.h>", "# include <cuda/std/type_traits> // for is_same", "#  include <cooperative_groups.h>",
    "#if __has_include(<cuda_bf16.h>)\n#endif", "// what to include \"here\"", "int includes = 1; int important = 2;",
    "#define includes 3",
])
def test_headers_of_the_toolkit_may_be_included(text: str) -> None:
    check_source(f"{text}\n{ADD_ONE}")


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/b", "x" * 300, "käse", "a\0b"])
def test_a_kernels_name_makes_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "one" / "two" / "dumps"
    monkeypatch.setenv("ONNXFUSE_DUMP", str(folder))
    Compiler(Cache(None, "")).image(KernelSource(ADD_ONE, (), (name,)), "sm_90")
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in found) == [".cu", ".cubin"] and {path.parent for path in found} == {folder}
