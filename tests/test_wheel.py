"""Wheels and source archives: what is in them, what they need, and that they install without a compiler."""

from __future__ import annotations

import configparser
import contextlib
import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_models import CHAIN, ROOT, write
from packaging.specifiers import SpecifierSet

# One process: setuptools puts what goes into a source archive together in the checkout.
pytestmark = pytest.mark.xdist_group("wheel")

BUILT = ROOT / "onnxfuse" / "runtime" / "libonnxfuse.so"

NEWEST_GLIBC = (2, 35)
"""Of the oldest systems that a wheel built where the tests run is to work on: Ubuntu 22.04, Debian 12."""

SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
PYTHONS = re.findall(r"Python :: (3\.\d+)", SETTINGS["metadata"]["classifiers"])
"""Releases of Python that the metadata names."""


def run(*words: object, folder: Path, **environment: str) -> str:
    """A command's output; its errors are the test's."""
    done = subprocess.run(list(map(str, words)), cwd=folder, env={**os.environ, **environment}, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Made:
    """A source archive, the folder it was unpacked to, and the wheel built there."""

    archive: Path
    sources: Path
    wheel: Path

    def metadata(self) -> email.message.Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            (place,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(wheel.read(place))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Both, with the library of this checkout in the compiler's place; `make dist` compiles it."""
    folder = tmp_path_factory.mktemp("dist")
    compiler = folder / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpfullversion ] && exec g++ "$1"\n'
        f'while [ "$1" != -o ]; do shift; done\ncp "{BUILT}" "$2"\n')
    compiler.chmod(0o755)
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # The argument of this name came with Python 3.11.4, and is ignored before by this one.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
    sources = folder / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", folder, folder=sources, CXX=str(compiler))
    return Made(archive, sources, next(folder.glob("*.whl")))


def test_a_source_archive_has_all_that_is_in_the_repository(made: Made) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a checkout")
    missing = {name for name in tracked if not (made.sources / name).exists()}
    assert missing <= {".gitignore"}


def test_a_wheel_has_all_that_the_package_reads(made: Made) -> None:
    package = ROOT / "onnxfuse"
    with zipfile.ZipFile(made.wheel) as wheel:
        held = set(wheel.namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in package.rglob("*")
              if path.is_file() and path.suffix != ".pyc" and path.parent.name != "native"}
    assert wanted - held == set() and any("emulator/shim/cuda/" in name for name in wanted)


def test_a_wheel_is_for_every_python_and_an_old_glibc(made: Made) -> None:
    match = re.fullmatch(r"onnxfuse-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_x86_64\.whl", made.wheel.name)
    assert match is not None, made.wheel.name
    assert (int(match[1]), int(match[2])) <= NEWEST_GLIBC


def test_auditwheel_agrees_with_the_tag(made: Made) -> None:
    pytest.importorskip("auditwheel")
    told = " ".join(run(sys.executable, "-m", "auditwheel", "show", made.wheel, folder=made.wheel.parent).split())
    tag = made.wheel.stem.rsplit("-", 1)[1]
    assert f'is consistent with the following platform tag: "{tag}"' in told, told
    assert "libstdc++" not in told


def test_the_metadata_says_who_may_use_it_where(made: Made) -> None:
    metadata = made.metadata()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] and metadata["Keywords"]
    with zipfile.ZipFile(made.wheel) as wheel:
        (place,) = (name for name in wheel.namelist() if name.endswith(f"/licenses/{metadata['License-File']}"))
        assert wheel.read(place) == (ROOT / "LICENSE").read_bytes()
    assert PYTHONS and all(name in SpecifierSet(metadata["Requires-Python"]) for name in PYTHONS)


def test_the_description_links_to_nothing_that_an_index_lacks(made: Made) -> None:
    metadata = made.metadata()
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str) and "make demo" in text and "Under the Apache License 2.0" in text
    assert not re.findall(r"\]\((?!https://)", text)


@pytest.mark.parametrize("url", ["", "https://git.example/onnxfuse/"])
def test_links_lead_to_the_sources_where_these_have_a_home(tmp_path: Path, url: str) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "README.md").write_text("[a](docs/a.md#b) [c](https://c.example) [d](mailto:d@e.example)")
    (tmp_path / "setup.cfg").write_text(f"[metadata]\nname = onnxfuse\nversion = 1.2\nurl = {url}\n")
    for name in ("onnxfuse", "rules"):
        (tmp_path / name).mkdir()
    run(sys.executable, "setup.py", "-q", "egg_info", folder=tmp_path)
    first = "[a](https://git.example/onnxfuse/blob/v1.2/docs/a.md#b)" if url else "a"
    told = email.message_from_string((tmp_path / "onnxfuse.egg-info" / "PKG-INFO").read_text()).get_payload()
    assert str(told).strip() == f"{first} [c](https://c.example) [d](mailto:d@e.example)"


@dataclass(frozen=True)
class Interpreter:
    """A Python that makes environments; ``root`` is the folder of its system where that is not this one."""

    path: str
    root: Path | None = None

    @property
    def before(self) -> list[str]:
        """What stands before commands of its system."""
        return [] if self.root is None else [shutil.which("chroot") or "/usr/sbin/chroot", str(self.root)]

    def pip(self, python: Path) -> list[object]:
        """What installs for an environment's Python: ours, or where this one cannot run that, its own."""
        return [sys.executable, "-m", "pip", "--python", python] if self.root is None else [
            *self.before, python, "-m", "pip"]


def interpreter(version: str) -> Interpreter | None:
    """A Python of a release such as "3.12": on the path, one of pyenv's, or of a system in a folder, as debootstrap
    makes it; ``ONNXFUSE_SYSTEMS`` names such folders."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python3")
    systems = [Path(folder).resolve() for folder in os.environ.get("ONNXFUSE_SYSTEMS", "").split()]
    for found in (*(Interpreter(str(path)) for path in (shutil.which(f"python{version}"), *sorted(pyenv)) if path),
                  *(Interpreter(f"/usr/bin/python{version}", folder) for folder in systems)):
        # What is on the path may be pyenv's word that it has this Python, and that another one is meant.
        if subprocess.run([*found.before, found.path, "-c",
                           f"import sys, venv; assert sys.version.startswith('{version}.')"], capture_output=True,
                          check=False).returncode == 0:
            return found
    return None


@contextlib.contextmanager
def scratch(python: Interpreter, here: Path) -> Iterator[Path]:
    """A folder that has one path for us and for the system of a Python."""
    if python.root is None:
        yield here
        return
    # The system finds its own root under the path that it has here.
    itself = python.root / python.root.relative_to("/")
    if not itself.is_symlink():
        itself.parent.mkdir(parents=True, exist_ok=True)
        itself.symlink_to("/")
    with tempfile.TemporaryDirectory(dir=python.root / "tmp") as folder:
        yield Path(folder)


def environment(folder: Path) -> dict[str, str]:
    """For commands that find nothing but what they are given, a compiler least of all."""
    nothing = folder / "nothing"
    nothing.mkdir()
    return {"PATH": str(nothing), "PYTHONPATH": "", "ONNXFUSE_CACHE_DIR": str(folder / "cache"), "NO_COLOR": "1"}


def check_installed(made: Made, folder: Path, bare: dict[str, str], before: Sequence[str] = ()) -> None:
    """The package of the environment ``folder / "venv"`` is the wheel's, finds all that it uses, and fuses."""
    python, command = ([*before, folder / "venv" / "bin" / name] for name in ("python", "onnxfuse"))
    place = run(*python, "-c", "import onnxfuse; print(onnxfuse.library_path())", folder=folder, **bare).strip()
    assert f"/{folder.name}/venv/" in place  # its system may know a shorter way there
    assert made.metadata()["Version"] in run(*command, "--version", folder=folder, **bare)
    found = json.loads(run(*command, "doctor", "--json", folder=folder, **bare))
    assert found["ok"] and all(part["state"] != "broken" for part in found["parts"])
    run(*command, "optimize", write(folder, CHAIN), "--dim", "batch=64", "--target", "H200", "--embed", "sm_90",
        folder=folder, **bare)
    assert b"\x7fELF" in (folder / "model.fused.onnx").read_bytes()


def test_the_wheel_installs_and_fuses_without_a_compiler(made: Made, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    bare = environment(tmp_path)
    run(sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python", "install", "-q", "--no-index",
        "--no-deps", made.wheel, folder=tmp_path, **bare)
    # What it requires is in the tests' own environment, where onnxfuse is this checkout, by a .pth file.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "onnxfuse" not in package.name and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    check_installed(made, tmp_path, bare)


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs_with_all_that_it_requires(made: Made, tmp_path: Path, version: str) -> None:
    """From the index, as a user's machine has it; ``make test-pythons``."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    with scratch(python, tmp_path) as folder:
        bare = environment(folder)
        run(*python.before, python.path, "-m", "venv", folder / "venv", *(["--without-pip"] if not python.root else []),
            folder=folder)
        wheel = shutil.copy(made.wheel, folder)
        run(*python.pip(folder / "venv" / "bin" / "python"), "install", "-q", "--only-binary", ":all:", wheel,
            folder=folder, **bare)
        check_installed(made, folder, bare, python.before)
