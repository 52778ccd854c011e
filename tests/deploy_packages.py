"""What the programs of examples/cpp and examples/csharp are built with, out of packages of PyPI and npm: .NET's
runtime, a C# compiler, ONNX Runtime's C# API and its C++ headers.

    python tests/deploy_packages.py

fetches them once, some 200 MB, against their digests, and keeps what is needed of them, 90 MB, in the cache:
``$ONNXFUSE_DEPLOY``, else ``~/.cache/onnxfuse/deploy``.  Needs pip, npm and Mono's compiler (``mono-mcs``), which
builds the program around the other compiler's libraries.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COMPILER = Path(__file__).with_name("native") / "Compile.cs"


@dataclass(frozen=True)
class Package:
    """A release's file; ``sha256`` of it."""

    name: str
    version: str
    sha256: str


RUNTIME = Package("dotnetcore2", "3.1.23", "5f076ddc39da0c685e7de20ecb91ee81185928918ec86fbeb3bffc55dd867ab5")
"""Microsoft's .NET Core 3.1 for Linux, whole."""
OPENSSL = Package("psycopg2-binary", "2.9.9", "977646e05232579d2e7b9c59e21dbe5261f403a88417f6a6512e70d3f8a046be")
"""Carries OpenSSL 1.1, with which .NET Core 3.1 hashes while it compiles; present systems have OpenSSL 3."""
ROSLYN = Package("@autorest/csharp", "3.0.0-beta.20220120.2",
                 "08679cdb90719157206c96c0bad83eda154c44910f9fa7330eabfe43d32aa0a6")
"""Carries Roslyn 4.0, Microsoft's C# compiler, in the last build for .NET Core 3.1."""
SOURCES = Package("com.github.asus4.onnxruntime", "0.4.9",
                  "e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d")
"""Carries the sources of ONNX Runtime's C# API, and its C++ headers; its native libraries stay out, Python's is
taken."""
RELEASE = (1, 29)
"""Of ONNX Runtime, of both; a native library as new or newer is needed."""

ROSLYN_LIBRARIES = {
    "Microsoft.CodeAnalysis.dll": "4.0.0.0", "Microsoft.CodeAnalysis.CSharp.dll": "4.0.0.0",
    "System.Collections.Immutable.dll": "5.0.0.0", "System.Reflection.Metadata.dll": "5.0.0.0",
    "System.Runtime.CompilerServices.Unsafe.dll": "5.0.0.0"}
HEADERS = "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64/onnxruntime.framework/Headers/"
"""The same for every system."""
API = "Microsoft.ML.OnnxRuntime.dll"
FRAMEWORK = "Microsoft.NETCore.App"


def cache() -> Path:
    """Where all this lies."""
    return Path(os.environ.get("ONNXFUSE_DEPLOY") or Path.home() / ".cache" / "onnxfuse" / "deploy")


def lacking() -> str:
    """Why nothing can be built with it; "" where it can."""
    if not _ready():
        return "what `make deploy-packages` fetches is not here"
    import onnxruntime  # what fetches the packages may have none

    found = onnxruntime.__version__
    if tuple(map(int, found.split(".")[:2])) < RELEASE:
        return f"what `make deploy-packages` fetches needs ONNX Runtime {'.'.join(map(str, RELEASE))}, here is {found}"
    return ""


def native_libraries() -> Path:
    """The folder of ONNX Runtime's native libraries, Python's."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("capi")


def _ready() -> bool:
    told = cache() / "ready"
    return told.is_file() and told.read_text() == _recipe()


def _recipe() -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + COMPILER.read_bytes()).hexdigest()


def compile_program(folder: Path, sources: Iterable[Path]) -> Path:
    """A program over ONNX Runtime's C# API, with warnings as errors, and what starts it."""
    home = cache()
    folder.mkdir()
    shutil.copy(home / API, folder)
    for library in native_libraries().glob("libonnxruntime*"):
        (folder / library.name).symlink_to(library)
        if library.name.startswith("libonnxruntime.so."):
            (folder / "libonnxruntime.so").symlink_to(library)
    _compile(home, f"-out:{folder / 'deploy.dll'}", f"-r:{home / API}", *map(str, sources))
    _settings(folder / "deploy.dll")
    program = folder / "deploy"
    program.write_text(f'#!/bin/sh\nexec "{home / "runtime" / "dotnet"}" "{folder / "deploy.dll"}" "$@"\n')
    program.chmod(0o755)
    return program


def _compile(home: Path, *words: str) -> None:
    _run(home / "runtime" / "dotnet", home / "roslyn" / "compile.dll", "-warnaserror", "-langversion:9", "-nostdlib",
         *(f"-r:{path}" for path in _references(home)), *words, LD_LIBRARY_PATH=str(home / "openssl"))


def _references(home: Path) -> list[Path]:
    return sorted((home / "runtime" / "shared" / FRAMEWORK / RUNTIME.version).glob("*.dll"))


def _settings(program: Path, libraries: dict[str, str] | None = None) -> None:
    """What the runtime reads beside a program: itself, no tables of languages, and libraries to take in place of
    older ones of its own."""
    program.with_suffix(".runtimeconfig.json").write_text(json.dumps({"runtimeOptions": {
        "framework": {"name": FRAMEWORK, "version": RUNTIME.version},
        "configProperties": {"System.Globalization.Invariant": True}}}))
    if libraries:
        taken = {name: {"assemblyVersion": version} for name, version in libraries.items()}
        program.with_suffix(".deps.json").write_text(json.dumps({
            "runtimeTarget": {"name": ".NETCoreApp,Version=v3.1"},
            "targets": {".NETCoreApp,Version=v3.1": {"libraries/1.0.0": {"runtime": taken}}},
            "libraries": {"libraries/1.0.0": {"type": "package", "serviceable": False, "sha512": ""}}}))


def _run(*words: object, **environment: str) -> str:
    done = subprocess.run(list(map(str, words)), env={**os.environ, **environment}, text=True, capture_output=True,
                          check=False)
    if done.returncode != 0:
        raise OSError(f"{Path(str(words[0])).name}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _checked(package: Package, folder: Path) -> Path:
    (found,) = folder.iterdir()
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise OSError(f"{found.name} has the digest {digest}, where {package.sha256} was released")
    return found


def _wheel(package: Package, scratch: Path) -> zipfile.ZipFile:
    """A package of PyPI."""
    _run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux2014_x86_64", "--dest", scratch,
         f"{package.name}=={package.version}")
    return zipfile.ZipFile(_checked(package, scratch))


def _packed(package: Package, scratch: Path) -> tarfile.TarFile:
    """A package of npm."""
    _run("npm", "pack", "--silent", "--pack-destination", scratch, f"{package.name}@{package.version}")
    return tarfile.open(_checked(package, scratch))


def _fetch(home: Path, scratch: Path) -> None:
    """What is needed of the packages, to ``home``; the sources, to ``scratch / "sources"``."""
    folders = [scratch / str(place) for place in range(4)]
    for folder in folders:
        folder.mkdir()
    with _wheel(RUNTIME, folders[0]) as runtime:
        prefix = "dotnetcore2/bin/"
        for name in runtime.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                _keep(home / "runtime" / name.removeprefix(prefix), runtime.read(name))
    (home / "runtime" / "dotnet").chmod(0o755)
    with _wheel(OPENSSL, folders[1]) as openssl:
        for name in openssl.namelist():
            file = name.rpartition("/")[2]
            if file.startswith(("libssl-", "libcrypto-")):
                # libssl asks for libcrypto by its name here; the runtime asks for libssl by its own.
                _keep(home / "openssl" / ("libssl.so.1.1" if file.startswith("libssl-") else file), openssl.read(name))
    with _packed(ROSLYN, folders[2]) as roslyn:
        for library in ROSLYN_LIBRARIES:
            _keep(home / "roslyn" / library, _member(roslyn, f"package/{library}"))
    with _packed(SOURCES, folders[3]) as sources:
        for name in sources.getnames():
            # No two files of the sources' folders have one name.
            if name.startswith("package/Runtime/") and name.endswith(".cs"):
                _keep(scratch / "sources" / name.rpartition("/")[2], _member(sources, name))
            elif name.startswith(HEADERS) and name.endswith(".h"):
                _keep(home / "include" / name.removeprefix(HEADERS), _member(sources, name))


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise OSError(f"{name} is no file")
    with file:
        return file.read()


def fetch() -> None:
    """Make the cache, unless it is there.

    Raises:
        OSError: a tool is not here, or a package cannot be had, is not the one that was released or does not compile.
    """
    if _ready():
        return
    cache().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache().parent) as place:
        scratch, home = Path(place), Path(place) / "made"
        _fetch(home, scratch)
        roslyn = home / "roslyn"
        own = [path for path in _references(home) if path.name not in ROSLYN_LIBRARIES]
        _run("mcs", "-warn:4", "-warnaserror", "-nostdlib", "-noconfig", f"-out:{roslyn / 'compile.dll'}",
             *(f"-r:{path}" for path in (*own, *(roslyn / name for name in ROSLYN_LIBRARIES))), COMPILER)
        _settings(roslyn / "compile.dll", ROSLYN_LIBRARIES)
        # As Microsoft's package has it for every runtime before .NET 8.
        _compile(home, f"-out:{home / API}", "-target:library", "-unsafe", "-define:NETSTANDARD2_0",
                 *map(str, sorted((scratch / "sources").iterdir())))
        (home / "ready").write_text(_recipe())
        shutil.rmtree(cache(), ignore_errors=True)
        home.rename(cache())


if __name__ == "__main__":
    try:
        fetch()
    except OSError as error:
        sys.exit(f"examples/csharp and examples/cpp cannot be built here: {error}")
