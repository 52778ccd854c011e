"""The C# program of examples/csharp: built by the .NET SDK, and run as the C++ program is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cli_models import ROOT

PROJECT = ROOT / "examples" / "csharp" / "deploy.csproj"
CPU_PACKAGE, GPU_PACKAGE = "Microsoft.ML.OnnxRuntime", "Microsoft.ML.OnnxRuntime.Gpu.Linux"


def lacking() -> str:
    """Why the program cannot be built here; "" where it can."""
    return "" if shutil.which("dotnet") else "dotnet is not here"


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
