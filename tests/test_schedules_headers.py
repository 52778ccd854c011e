"""The headers of generated kernels: definitions apart, and a text that begins with what it uses of them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from kernel_harness import make

from onnxfuse.emulator.kernel_text import for_host
from onnxfuse.emulator.toolchain import build, parts
from onnxfuse.ir.scalars import FUNCTIONS
from onnxfuse.runtime.compile import compile_cubin
from onnxfuse.schedules import headers
from onnxfuse.schedules.headers import HEADERS, definitions, header, linked, used_in, without_definitions
from onnxfuse.schedules.source import Source

FOLDER = Path(headers.__file__).parent
TYPES = frozenset(["__half", "__nv_bfloat16"])

ADD = "g (T[N] a, T[N] b) => (T[N] y) { s = Add(a, b) y = Relu(s) }"


def text_of(kind: str, text: str = ADD) -> str:
    code = make(text.replace("T[", f"{kind}[")).kernel.code
    assert isinstance(code, Source)
    return code.text


def test_all_headers_are_known() -> None:
    assert sorted(HEADERS) == sorted(path.stem for path in FOLDER.glob("cuda/*.cuh"))


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_its_definitions(name: str) -> None:
    """Nothing of it is lost, and each has a name."""
    found = definitions(name)
    assert header(name) == "".join(["namespace of {\n", *(each.text for each in found), "}\n"])
    assert all(each.names for each in found)


def test_what_texts_call_is_defined() -> None:
    called = {name for path in FOLDER.rglob("*.py") for name in re.findall(r"\bof::([A-Za-z]\w*)", path.read_text())}
    defined = {name for each in HEADERS for one in definitions(each) for name in one.names}
    assert called - {"name"} <= defined and len(called) > 60


@pytest.mark.parametrize("name", HEADERS)
def test_each_definition_brings_what_it_uses(name: str) -> None:
    """NVRTC reads it with nothing else before it."""
    texts = {linked(HEADERS, frozenset([one, *TYPES])) for each in definitions(name) for one in each.names}
    for text in texts:
        assert compile_cubin(text + 'extern "C" __global__ void kernel() {}', "sm_90")


@pytest.mark.parametrize(("kind", "included"), [
    ("float", []), ("float16", ["cuda_fp16.h"]), ("bfloat16", ["cuda_bf16.h"])])
def test_a_text_begins_with_what_it_uses(kind: str, included: list[str]) -> None:
    text = text_of(kind)
    assert re.findall(r"#include <(.*)>", text) == included
    assert " Vector {" in text
    assert not any(word in text for word in ("gelu", "reduce", "erff", "ipow", "OF_FUNCTION"))
    assert text.count("\n") < 110
    assert compile_cubin(text, "sm_75")


def test_two_types_of_16_bits() -> None:
    text = text_of("float16", "g (T[N] a) => (bfloat16[N] y) { y = Cast<to = 16>(a) }")
    assert re.findall(r"#include <(.*)>", text) == ["cuda_fp16.h", "cuda_bf16.h"]


def test_functions_made_by_a_macro_come_with_it() -> None:
    text = text_of("float", ADD.replace("Relu", "Erf"))
    assert text.index("#define OF_FUNCTION") < text.index("OF_FUNCTION(erf") < text.index("#undef OF_FUNCTION")
    assert "OF_FUNCTION(exp" not in text


@pytest.mark.parametrize("text", [
    "g (T[N,8] a, T[8] b, T[M] c) => (T[N,8] y, T[M] z) { y = Add(a, b) z = Relu(c) }",
    "g (T[2,8,9,9] x, T[8,1,3,3] w) => (T[2,8,9,9] y) { c = Conv<group = 8, pads = [1,1,1,1]>(x, w) y = Relu(c) }"])
def test_functions_name_those_that_they_call(text: str) -> None:
    """By which a text is known to need them: a part of its kernels still compiles."""
    kernel = make(text.replace("T[", "float16[")).kernel
    assert isinstance(kernel.code, Source) and len(kernel.code.functions) > 1
    for name in kernel.plan.kernels:
        assert compile_cubin(kernel.code.keeping({name}).text, "sm_80")


def test_what_is_left_without_definitions() -> None:
    """A text of a user's own, or one whose definitions are others, is left as it is."""
    text = text_of("float16")
    rest = without_definitions(text)
    assert rest is not None and text.endswith(rest) and "of::Vector" in rest and " Vector {" not in rest
    assert without_definitions(text.replace(" Vector {", "  Vector {")) is None
    assert without_definitions("namespace of {}\n") is None and without_definitions("") is None


def test_names_that_a_text_uses() -> None:
    text = "__half x = of::load<2>(p).at[0]; y = of::Store<T>::from(OF_NAN); load(q); half z;"
    assert used_in(text) == {"load", "Store", "OF_NAN", "__half"}


def test_the_emulator_compiles_nothing_that_a_text_does_not_call() -> None:
    """Of functions that are not inline either, which all texts are compiled after."""
    kernel = 'extern "C" __global__ void half_of(float* x) { x[0] = of::divide(x[0], 2.0f); }\n'
    text = linked(HEADERS, used_in(kernel)) + kernel
    header, body, _ = parts(for_host(text).text)
    assert "__noinline__ void plain_mma_tf32(" in header.read_text() and "divide(float" not in body
    library, _ = build(text)
    assert b"half_of" in library.read_bytes() and b"plain_mma" not in library.read_bytes()


@pytest.mark.parametrize("calls", [
    "of::plain_mma<__half>(sums, reinterpret_cast<unsigned (&)[4]>(*y), y[4], y[5]);",
    "sums[0] = of::reduce_lanes<of::Sum, 32>(x[0]);",
    "sums[0] = __half2float(__ushort_as_half(y[0]));",
])
def test_functions_of_their_own_are_compiled_once_for_all_texts(calls: str) -> None:
    """And so are instances of templates that most texts call."""
    kernel = f"""extern "C" __global__ void once(float* x, unsigned* y) {{
  float sums[4] = {{}};
  {calls}
  x[threadIdx.x] = of::divide(sums[0], 2.0f);
}}
"""
    library, _ = build(linked(HEADERS, used_in(kernel)) + kernel)
    assert any(each.name.encode() in library.read_bytes() for each in library.parent.glob("functions*.so"))


TWO = """
extern "C" __global__ void NAME(const float* x, float* y) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float a = x[i * 32 + threadIdx.x], b = x[i * 32 + threadIdx.x + 4096];
    y[i * 32 + threadIdx.x] = (float)(TEXT) + a + b;
  }
}
"""


def code_sizes(cubin: bytes) -> dict[str, int]:
    """Bytes of machine code by kernel, of an image in ELF64: its sections named .text.KERNEL."""
    table, = struct.unpack_from("<Q", cubin, 40)
    each, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + number * each) for number in range(count)]
    start = sections[names][4]
    called = [(cubin[start + name:cubin.index(b"\0", start + name)].decode(), size) for name, *_, size in sections]
    return {name.removeprefix(".text."): size for name, size in called if name.startswith(".text.")}


def test_instructions_are_what_the_compiler_makes_of_functions() -> None:
    """Within a third, or two; compilers differ.  Of those that are not told none takes more than 13."""
    told = {name: function.instructions for name, function in FUNCTIONS.items() if function.instructions > 1}
    texts = {name: function.floating for name, function in FUNCTIONS.items() if "of::" in (function.floating or "")}
    kernels = "".join(
        TWO.replace("NAME", f"k_{name}").replace("TEXT", text.format("a", "b", "a", "b"))
        for name, text in {**texts, "none": "a"}.items())
    sizes = code_sizes(compile_cubin(linked(("onnxfuse",), used_in(kernels)) + kernels, "sm_90"))
    found = {name: (sizes[f"k_{name}"] - sizes["k_none"]) / 16 / 16 for name in texts}
    assert {name: count for name, count in found.items() if name not in told and count > 13} == {}
    assert {name: count for name, count in found.items() if name in told and abs(
        count - told[name]) > max(2, told[name] / 3)} == {}
    assert set(told) <= set(texts)
