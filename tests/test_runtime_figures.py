"""What is read from compiled images, against what the assembler says in its log (``--ptxas-options=-v``)."""

from __future__ import annotations

import re
from random import Random

import pytest
from fused_models import KERNELS

from onnxfuse.errors import KernelError
from onnxfuse.runtime import compile, nvrtc
from onnxfuse.runtime.figures import KernelFigures, read_figures


def told(architecture: str) -> dict[str, KernelFigures]:
    """The same from the log."""
    binding = nvrtc.binding()
    program = binding.createProgram(KERNELS, "kernel.cu", (), ())
    options = (*compile.STANDARD_OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
    binding.compileProgram(program, options)
    log = binding.getProgramLog(program)
    binding.destroyProgram(program)
    figures = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert name is not None
        assert registers is not None
        stack, shared = (re.search(rf"(\d+) bytes {what}", part) for what in ("cumulative stack size", "smem"))
        figures[name[1]] = KernelFigures(
            int(registers[1]), 0 if stack is None else int(stack[1]), 0 if shared is None else int(shared[1]))
    return figures


@pytest.mark.parametrize("number", compile.architectures())
def test_figures_are_the_assemblers(number: int) -> None:
    architecture = f"sm_{number}"
    found = read_figures(compile.compile_cubin(KERNELS, architecture))
    assert found == told(architecture)
    assert set(found) == {"plain", "spilling", "sharing", "calling"}
    assert found["spilling"].local_bytes > 0 == found["plain"].local_bytes
    assert found["sharing"].shared_bytes >= 777 * 4


def test_line_information_changes_no_figure() -> None:
    options = ("-lineinfo",)
    with_lines = compile.compile_cubin(KERNELS, "sm_90", options)
    assert read_figures(with_lines) == read_figures(compile.compile_cubin(KERNELS, "sm_90"))


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"no image at all" * 100])
def test_what_is_no_image(image: bytes) -> None:
    with pytest.raises(KernelError, match="registers cannot be read from a compiled image"):
        read_figures(image)


def test_damaged_images_are_errors_or_read() -> None:
    image, random = compile.compile_cubin(KERNELS, "sm_90"), Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(image[: random.randrange(len(image)) if random.random() < 0.3 else None])
        for _ in range(random.randint(1, 6)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            read_figures(bytes(damaged))
        except KernelError:
            refused += 1
    assert 50 < refused < 300
