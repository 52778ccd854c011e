"""The native library, built where it is missing or older than its sources."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "onnxfuse" / "runtime" / "libonnxfuse.so"


def build() -> None:
    """Build the native library where it is missing or old."""
    sources = [*(LIBRARY.parent / "native").glob("*.cc"), *(LIBRARY.parent / "native").glob("*.h")]
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(source.stat().st_mtime for source in sources):
        return
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
         f'-DONNXFUSE_VERSION="{config["metadata"]["version"]}"', *sorted(str(s) for s in sources if s.suffix == ".cc"),
         "-o", str(LIBRARY), "-ldl", "-pthread"],
        check=True,
    )
