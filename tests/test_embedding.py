"""Embedding: names of architectures, images, progress, messages.  Compiles for real with NVRTC; no GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fused_models import ADD_ONE, TWICE

from onnxfuse.embedding import embed, embed_all, known_architectures, parse_architectures
from onnxfuse.errors import KernelError, TargetError
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource

KNOWN = "sm_75, sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, sm_100a, sm_120, sm_120a"


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(Cache(tmp_path, "test"))


def test_spellings() -> None:
    names = ["sm_80", "80", "SM90a", "compute_120", " sm_75 ", "sm_80"]
    assert parse_architectures(names) == ("sm_80", "sm_90a", "sm_120", "sm_75")
    assert parse_architectures([]) == ()
    assert ", ".join(known_architectures()) == KNOWN


@pytest.mark.parametrize(("name", "meant"), [
    ("sm_9O", "Did you mean 'sm_90'? "), ("sm_91", "Did you mean 'sm_90'? "), ("70", "Did you mean 'sm_75'? "),
    ("hopper", ""), ("", ""),
])
def test_an_unknown_architecture_is_named_with_the_known_ones(name: str, meant: str) -> None:
    with pytest.raises(TargetError) as caught:
        embed(ADD_ONE, [name])
    got = str(caught.value).replace("'sm_90a'", "'sm_90'")
    assert got == (f"'{name}' is no GPU architecture that kernels can be embedded for.\n--> --embed {name}\n"
                   f"help: {meant}There are: {KNOWN}.")


def test_images_by_architecture(compiler: Compiler) -> None:
    images = embed(ADD_ONE, ["80", "sm_90"], compiler=compiler)
    assert list(images) == ["sm_80", "sm_90"]
    assert all(image.startswith(b"\x7fELF") for image in images.values())
    assert images["sm_80"] != images["sm_90"]


def test_equal_kernels_are_compiled_once_and_kept(compiler: Compiler, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    kernels = [KernelSource(ADD_ONE), KernelSource(TWICE), KernelSource(ADD_ONE)]
    first = embed_all(kernels, ["75", "sm_86"], lambda done, count: seen.append((done, count)), compiler)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert first[0] == first[2] != first[1]
    assert len(list((tmp_path / "test").iterdir())) == 4
    assert embed_all(kernels, ["75", "sm_86"], compiler=Compiler(Cache(tmp_path, "test"))) == first


def test_options_reach_the_compiler(compiler: Compiler) -> None:
    text = 'extern "C" __global__ void k(float* y) { y[0] = AMOUNT; }'
    assert embed(text, ["80"], ["-DAMOUNT=1.0f"], compiler=compiler) != embed(text, ["80"], ["-DAMOUNT=2.0f"],
                                                                               compiler=compiler)
    with pytest.raises(KernelError, match=r"(?s)^a kernel does not compile for sm_80 .*identifier \"AMOUNT\" is undef"):
        embed(text, ["80"], compiler=compiler)


def test_nothing_to_embed(compiler: Compiler) -> None:
    assert embed(ADD_ONE, [], compiler=compiler) == {}
    assert embed_all([], ["80"], compiler=compiler) == []
