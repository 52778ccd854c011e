"""The C# program of examples/csharp: beside the C++ one, and run on the CPU by ONNX Runtime's C# API."""

from __future__ import annotations

import configparser
import ctypes
import re
from pathlib import Path
from xml.etree import ElementTree

import cpp_program
import csharp_program
import doc_blocks
import numpy as np
import onnxruntime
import pytest
from cli_models import ROOT, encoder, write

import onnxfuse
from onnxfuse.runtime import library_path

TEXTS = {path.name: path.read_text() for path in csharp_program.PROJECT.parent.glob("*.cs")}
CPP = {path.name: path.read_text() for path in cpp_program.SOURCES.iterdir()}


def test_the_project_asks_for_the_releases_that_the_package_asks_for() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    bounds = re.search(r"^onnxruntime-gpu>=([\d.]+),<([\d.]+)$", settings["options"]["install_requires"], re.MULTILINE)
    assert bounds is not None
    project = ElementTree.parse(csharp_program.PROJECT).getroot()
    (reference,) = project.iter("PackageReference")
    assert reference.attrib == {"Include": "$(OnnxRuntime)", "Version": f"[{bounds[1]},{bounds[2]})"}
    assert project.findtext("PropertyGroup/AssemblyName") == "deploy"
    assert project.findtext("PropertyGroup/OnnxRuntime") == csharp_program.GPU_PACKAGE


def test_it_registers_the_library_as_the_program_in_cpp_does() -> None:
    """Both calls look for one entry of the library, before the session is created."""
    assert ctypes.CDLL(str(library_path())).RegisterCustomOps
    program = TEXTS["Deploy.cs"]
    assert program.index("RegisterCustomOpLibrary(library)") and "RegisterCustomOpsLibrary(library)" in CPP["deploy.cc"]
    assert "MakeSessionOptionWithCudaProvider(0)" in program
    quoted = [block.text for block in doc_blocks.blocks(ROOT / "docs" / "deploy.md") if block.language == "csharp"]
    calls = {call for text in quoted for call in re.findall(r"\.(\w+)\(", text)}
    assert calls == {"MakeSessionOptionWithCudaProvider", "RegisterCustomOpLibrary"}


def test_both_programs_take_the_same_words_types_and_mistakes() -> None:
    of_cpp = {(name, kind.replace("_", ""), size) for name, kind, size in re.findall(
        r'\{"(...)", ONNX_TENSOR_ELEMENT_DATA_TYPE_(\w+), (\d)\}', CPP["npy.h"])}
    of_csharp = {(name, kind.upper(), size) for name, kind, size in re.findall(
        r'\("(...)", TensorElementType\.(\w+), (\d)\)', TEXTS["Npy.cs"])}
    assert of_csharp == of_cpp and len(of_cpp) == 12
    told = {text for text in re.findall(r'path \+ "(: [^"]+)"', CPP["npy.h"]) if "written" not in text}
    assert told == set(re.findall(r'path \+ "(: [^"]+)"', TEXTS["Npy.cs"])) and len(told) == 5
    (usage,) = re.findall(r'"(usage: [^"\\]+)', CPP["deploy.cc"])
    assert f'"{usage}"' in TEXTS["Deploy.cs"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := csharp_program.lacking():
        pytest.skip(lacking)
    return csharp_program.build(tmp_path_factory.mktemp("csharp"))


def fused(path: Path) -> dict[str, np.ndarray]:
    """A fused model, to a file, and inputs for it."""
    onnxfuse.optimize(encoder(), dims={"batch": 4, "sequence": 32}, target="H200", embed=["sm_90"], verify=False,
                      database=False).save(path)
    random = np.random.default_rng(0)
    return {"input_ids": random.integers(0, 1000, (4, 32)), "attention_mask": random.integers(0, 2, (4, 32))}


def test_a_fused_model_gives_the_bits_that_python_gets(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.fused.onnx"
    inputs = fused(path)
    (wanted,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    (found,) = cpp_program.run(program, path, inputs).values()
    # The SDK's package may hold another release of ONNX Runtime than Python's, with other kernels on the CPU.
    allowed = 1e-4 if csharp_program.sdk() else 0
    assert found.dtype == wanted.dtype and np.allclose(found, wanted, rtol=allowed, atol=allowed)


def test_arrays_of_every_type_go_in_and_out(program: Path, tmp_path: Path) -> None:
    shapes = [(), (5,), (0, 3), (2, 3, 4)]
    for place, shape in enumerate(shapes):
        path = tmp_path / f"model{place}.onnx"
        inputs = cpp_program.write_copies(path, shape)
        cpp_program.check_copies(inputs, cpp_program.run(program, path, inputs))


def test_mistakes_are_told(program: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "g (float[n, m] x) => (float[n, m] y) { y = Relu(x) }")
    right = np.ones((2, 3), np.float32)
    for given, told in (({}, r"x\.npy: missing, or no \.npy file"),
                        ({"x": right + 1j}, r"x\.npy: elements of type <c8"),
                        ({"x": np.asfortranarray(right)}, r"x\.npy: not in C's order")):
        with pytest.raises(RuntimeError, match=told):
            cpp_program.run(program, path, given)
    with pytest.raises(RuntimeError, match="InvalidArgument"):
        cpp_program.run(program, path, {"x": right[0]})


def test_the_library_registers(program: Path, tmp_path: Path) -> None:
    """It takes a session, and says itself that one has no CUDA provider for a fused node."""
    register = csharp_program.build(tmp_path, program=csharp_program.REGISTER)
    plain, path = write(tmp_path, "g (float[n] x) => (float[n] y) { y = Relu(x) }"), tmp_path / "model.fused.onnx"
    fused(path)
    assert cpp_program.run(register, plain, {}, library_path()) == {}
    with pytest.raises(RuntimeError, match=r"onnxfuse: node '[^']+' .* was given to the CPU, and its kernel runs on a"):
        cpp_program.run(register, path, {}, library_path())
    with pytest.raises(RuntimeError, match="no-such-library"):
        cpp_program.run(register, plain, {}, Path("/no-such-library.so"))
