"""The C# program of examples/csharp: built by the .NET SDK, or by Mono, and run as the C++ program is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cli_models import ROOT

PROJECT = ROOT / "examples" / "csharp" / "deploy.csproj"
STUB = ROOT / "tests" / "native" / "OnnxRuntime.cs"
"""ONNX Runtime's signatures that the program uses, over a model that gives its inputs back."""

CPU_PACKAGE, GPU_PACKAGE = "Microsoft.ML.OnnxRuntime", "Microsoft.ML.OnnxRuntime.Gpu.Linux"


def lacking() -> str:
    """Why the program cannot be built here; "" where it can."""
    return "" if shutil.which("dotnet") else "dotnet is not here"


def lacking_mono() -> str:
    """Why the program cannot be built and run without ONNX Runtime's package; "" where it can."""
    return "" if shutil.which("mcs") and shutil.which("mono") else "Mono is not here (apt-get install mono-mcs)"


def build_with_stub(folder: Path) -> Path:
    """The program over ``STUB``, with warnings as errors as its project has them."""
    out, program = folder / "deploy.exe", folder / "deploy"
    done = subprocess.run(["mcs", "-warn:4", "-warnaserror", f"-out:{out}", str(STUB),
                           *map(str, sorted(PROJECT.parent.glob("*.cs")))], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    program.write_text(f'#!/bin/sh\nexec mono {out} "$@"\n')
    program.chmod(0o755)
    return program


def build(folder: Path, package: str = CPU_PACKAGE) -> Path:
    """The program, built by the command that its project says, from a copy of it: the SDK writes beside what it builds.

    Args:
        package: the one with ONNX Runtime's native library, for the CPU alone or with the CUDA provider.
    """
    copy = shutil.copytree(PROJECT.parent, folder / "csharp")
    out = folder / "build" / "csharp"
    done = subprocess.run(["dotnet", "build", str(copy), "-o", str(out), f"-p:OnnxRuntime={package}"],
                          text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "deploy"
