"""Embedding: names of architectures, images, progress, messages.  Compiles for real with NVRTC; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fused_models import ADD_ONE, TWICE, add_one, chain

from onnxfuse.embedding import compile_images, embed, known_architectures, parse_architectures, with_ptx
from onnxfuse.errors import KernelError, TargetError
from onnxfuse.region import Region
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource
from onnxfuse.runtime.nodes import kernel_sources
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.source import Given

KNOWN = ("sm_75, sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, sm_100a, sm_120, sm_120a, compute_75, compute_80, "
         "compute_86, compute_89, compute_90, compute_100, compute_120")


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(Cache(tmp_path, "test"))


def test_spellings() -> None:
    names = ["sm_80", "80", "SM90a", "compute_120", " sm_75 ", "sm_80"]
    assert parse_architectures(names) == ("sm_80", "sm_90a", "compute_120", "sm_75")
    assert parse_architectures(["Compute75", "75"]) == ("compute_75", "sm_75")
    assert parse_architectures([]) == ()
    assert ", ".join(known_architectures()) == KNOWN


@pytest.mark.parametrize(("name", "meant"), [
    ("sm_9O", "Did you mean 'sm_90'? "), ("85", "Images for 'sm_80' run on it. "), ("sm_70", ""),
    ("sm_89a", "Images for 'sm_89' run on it. "), ("compute_90a", "PTX for 'compute_90' is compiled for it too. "),
    ("compute_70", ""),
    ("hopper", ""), ("", ""),
])
def test_an_unknown_architecture_is_named_with_the_known_ones(name: str, meant: str) -> None:
    with pytest.raises(TargetError) as caught:
        compile_images([], ["sm_80", name])
    assert str(caught.value) == (
        f"'{name}' is no GPU architecture that kernels can be embedded for.\n--> embed=[\"{name}\"]\n"
        f"help: {meant}There are: {KNOWN}."
    )


def test_equal_kernels_are_compiled_once_and_kept(compiler: Compiler, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    kernels = [KernelSource(text, (), ("add_one",)) for text in (ADD_ONE, TWICE, ADD_ONE)]
    first = compile_images(kernels, ["75", "sm_86"], lambda done, count: seen.append((done, count)), compiler)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert first[0] == first[2] != first[1]
    assert list(first[0]) == ["sm_75", "sm_86"]
    assert all(image.startswith(b"\x7fELF") for image in first[0].values())
    assert first[0]["sm_75"] != first[0]["sm_86"]
    assert len(list((tmp_path / "test").glob("*.cubin"))) == 4
    assert compile_images(kernels, ["75", "sm_86"], compiler=Compiler(Cache(tmp_path, "test"))) == first


def test_options_reach_the_compiler(compiler: Compiler) -> None:
    text = 'extern "C" __global__ void k(float* y) { y[0] = AMOUNT; }'
    one, two = (KernelSource(text, (f"-DAMOUNT={amount}",), ("k",)) for amount in ("1.0f", "2.0f"))
    first, second = compile_images([one, two], ["80"], compiler=compiler)
    assert first != second
    with pytest.raises(KernelError, match=r'(?s)^a kernel does not compile for sm_80 .*identifier "AMOUNT" is undef'):
        compile_images([one, KernelSource(text, (), ("k",))], ["80"], compiler=compiler)


def test_regions_get_the_images_that_the_runtime_looks_for(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    monkeypatch.setattr("onnxfuse.compiling.default_compiler", lambda: compiler)
    fused = add_one()
    region = Region((), (), (), "add-one", made=Kernel("pointwise", Given(fused.source), fused.plan))
    told: list[tuple[str, int, int]] = []
    (got,) = embed([region], ["90"], lambda *entry: told.append(entry))
    assert told == [("compiling kernels", 1, 2), ("compiling kernels", 2, 2)]
    assert got == replace(region, images=got.images) and list(got.images) == ["sm_90", "compute_90"]
    model = chain(add_one(images=got.images), 2)
    assert kernel_sources(model, "sm_90a") == []
    for other in ("sm_80", "sm_120a"):  # PTX is no machine code, which the compiler here makes for a GPU that it knows
        assert [source.source for source in kernel_sources(model, other)] == [ADD_ONE]
    assert kernel_sources(model, "sm_990a") == []
    assert [source.source for source in kernel_sources(chain(add_one(), 2), "sm_990a")] == [ADD_ONE]
    assert embed([region], [], lambda *entry: told.append(entry)) == [region]


def test_ptx_of_the_newest_is_for_gpus_to_come_unless_ptx_is_named() -> None:
    assert with_ptx(("sm_120a", "sm_75")) == ("sm_120a", "sm_75", "compute_120")
    assert with_ptx(("sm_90", "compute_80")) == ("sm_90", "compute_80")
    assert with_ptx(()) == ()


def test_nothing_to_embed(compiler: Compiler) -> None:
    assert compile_images([KernelSource(ADD_ONE)], [], compiler=compiler) == [{}]
    assert compile_images([], ["80"], compiler=compiler) == []
