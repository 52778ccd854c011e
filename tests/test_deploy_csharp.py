"""The C# program of examples/csharp: beside the C++ one, and run on the CPU where there is a .NET SDK."""

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
from cli_models import ROOT, encoder

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


@pytest.mark.skipif(csharp_program.lacking_mono() != "", reason=csharp_program.lacking_mono())
def test_it_compiles_and_carries_every_type_both_ways(tmp_path: Path) -> None:
    """Over the runtime's signatures and a model that gives its inputs back: the program's own part."""
    program = csharp_program.build_with_stub(tmp_path)
    model = tmp_path / "model.onnx"
    types = ["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "u4", "u8", "u2", "?"]
    given = {f"t{place}": np.arange(place * 7 % 13).astype(type) for place, type in enumerate(types)}
    given |= {"scalar": np.array(3.5, np.float32), "matrix": np.arange(1001 * 3).reshape(1001, 3)}
    model.write_text("\n".join(given))
    found = cpp_program.run(program, model, given, library_path())
    assert found.keys() == given.keys()
    for name, array in given.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
        assert found[name].shape == array.shape
    for wrong, told in (({}, r"t0\.npy: missing, or no \.npy file"),
                        ({**given, "t0": np.zeros(2, complex)}, r"t0\.npy: elements of type <c16"),
                        ({**given, "matrix": np.zeros((3, 2), order="F")}, r"matrix\.npy: not in C's order")):
        with pytest.raises(RuntimeError, match=told):
            cpp_program.run(program, model, wrong)
    with pytest.raises(RuntimeError, match="no such library: "):
        cpp_program.run(program, model, given, tmp_path / "none.so")


@pytest.mark.skipif(csharp_program.lacking() != "", reason=csharp_program.lacking())
def test_a_fused_model_gives_the_bits_that_python_gets(tmp_path: Path) -> None:
    program = csharp_program.build(tmp_path)
    path = tmp_path / "model.fused.onnx"
    onnxfuse.optimize(encoder(), dims={"batch": 4, "sequence": 32}, target="H200", embed=["sm_90"], verify=False,
                      database=False).save(path)
    random = np.random.default_rng(0)
    inputs = {"input_ids": random.integers(0, 1000, (4, 32)), "attention_mask": random.integers(0, 2, (4, 32))}
    (wanted,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    (found,) = cpp_program.run(program, path, inputs).values()
    # The package may hold another release of ONNX Runtime than Python's, with other kernels on the CPU.
    assert found.dtype == wanted.dtype and np.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"input_ids\.npy: missing, or no \.npy file"):
        cpp_program.run(program, path, {})
