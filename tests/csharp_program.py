"""The C# program of examples/csharp: built by the .NET SDK, or by what deploy_packages.py has, and run as the C++
program is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import deploy_packages
from cli_models import ROOT

PROJECT = ROOT / "examples" / "csharp" / "deploy.csproj"
REGISTER = ROOT / "tests" / "native" / "Register.cs"
"""A program in the example's place that registers the library where there is no CUDA provider."""

CPU_PACKAGE, GPU_PACKAGE = "Microsoft.ML.OnnxRuntime", "Microsoft.ML.OnnxRuntime.Gpu.Linux"


def sdk() -> bool:
    """Whether the .NET SDK builds the program, with ONNX Runtime from its own package; else it runs with Python's."""
    return shutil.which("dotnet") is not None


def lacking() -> str:
    """Why the program cannot be built here; "" where it can."""
    missing = deploy_packages.lacking()
    return "" if sdk() or not missing else f"no .NET SDK is here, and {missing}"


def build(folder: Path, package: str = CPU_PACKAGE, program: Path | None = None) -> Path:
    """The program, by the command that its project says where the SDK is here, with warnings as errors.

    Args:
        package: the SDK's, with ONNX Runtime's native library, for the CPU alone or with the CUDA provider.
        program: a file in place of the example's.
    """
    sources = [program] if program else sorted(PROJECT.parent.glob("*.cs"))
    if not sdk():
        return deploy_packages.compile_program(folder / "build", sources)
    # A copy: the SDK writes beside what it builds.
    copy, out = folder / "csharp", folder / "build"
    copy.mkdir()
    for path in (PROJECT, *sources):
        shutil.copy(path, copy)
    done = subprocess.run(["dotnet", "build", str(copy), "-o", str(out), f"-p:OnnxRuntime={package}"],
                          text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "deploy"
