"""What an installation holds."""

from __future__ import annotations

import configparser
import ctypes
import hashlib
import json
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def requirements(*options: str) -> Iterator[Requirement]:
    """What setup.cfg asks for under these names; without a name everywhere, in extras too."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    texts = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    for text in [settings["options"][name] for name in options] or texts:
        for line in text.split():
            yield Requirement(line)


def locked(name: str) -> dict[str, list[Version]]:
    """The releases that a lock names; each must have hashes."""
    releases: dict[str, list[Version]] = {}
    for entry in re.split(r"\n(?=[\w-]+==)", (ROOT / ".ci" / f"{name}.txt").read_text())[1:]:
        package, version = re.match(r"([\w-]+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        assert "--hash=sha256:" in entry, package
        releases.setdefault(canonicalize_name(package), []).append(Version(version))
    return releases


def test_every_requirement_has_bounds_and_both_ends_are_locked() -> None:
    for requirement in requirements():
        assert {one.operator for one in requirement.specifier} == {">=", "<"}, requirement
    newest, lowest = locked("test"), locked("lowest")
    for requirement in requirements("install_requires"):
        name = canonicalize_name(requirement.name)
        assert all(release in requirement.specifier for release in (*lowest[name], *newest[name])), name
        assert min(lowest[name]) < min(newest[name]), name
    assert set(locked("oldest")) >= {"numpy", "onnxruntime"}




@pytest.mark.slow
def test_a_build_holds_library_rules_and_headers(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
         "build", "--build-base", str(tmp_path), "bdist_wheel", "--bdist-dir", str(tmp_path / "wheel"),
         "--dist-dir", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )
    (package,) = tmp_path.glob("lib*/onnxfuse")
    library = ctypes.CDLL(str(package / "runtime" / "libonnxfuse.so"))
    for name in ("RegisterCustomOps", "onnxfuse_version", "onnxfuse_set_compile_callback"):
        assert hasattr(library, name)

    def below(folder: Path, pattern: str) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob(pattern)}

    assert below(package / "_rules", "*.yaml") == below(ROOT / "rules", "*.yaml") != set()
    assert below(package / "_rules", "*.cu") == below(ROOT / "rules", "*.cu")
    assert below(package / "schedules", "*.cuh") == below(ROOT / "onnxfuse" / "schedules", "*.cuh") != set()
    data = {name for name in below(ROOT / "onnxfuse", "*.*") if not name.endswith((".py", ".pyc", ".cc", ".h"))}
    assert data <= below(package, "*.*")
    assert "py.typed" in data

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (place,) = (name for name in wheel.namelist() if name.endswith(".dist-info/sboms/onnxfuse.cdx.json"))
        materials = json.loads(wheel.read(place))
        (library_there,) = materials["metadata"]["component"]["components"]
        digest = hashlib.sha256(wheel.read(library_there["name"])).hexdigest()
        assert library_there["hashes"] == [{"alg": "SHA-256", "content": digest}]
        (linked,) = library_there["components"]
        assert linked["name"] == "libstdc++" and Version(linked["version"]).major >= 7
    asked = {part["name"]: SpecifierSet(part["properties"][0]["value"]) for part in materials["components"]}
    assert asked == {canonicalize_name(one.name): one.specifier for one in requirements("install_requires")}


def test_the_library_exports_its_entries_and_nothing_else() -> None:
    library = ROOT / "onnxfuse" / "runtime" / "libonnxfuse.so"
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if line.split()[-2] == "T"}
    assert names == {
        "RegisterCustomOps", "onnxfuse_cache_key", "onnxfuse_devices", "onnxfuse_evaluate_plan",
        "onnxfuse_expect_names", "onnxfuse_get_cache", "onnxfuse_image_fault", "onnxfuse_ptx_fault",
        "onnxfuse_read_json", "onnxfuse_reply_error", "onnxfuse_reply_image", "onnxfuse_set_cache",
        "onnxfuse_set_compile_callback", "onnxfuse_set_recording", "onnxfuse_statistics", "onnxfuse_version",
        "onnxfuse_write_statistics",
    }


def test_the_library_links_what_every_linux_of_glibc_has() -> None:
    """No CUDA and no ONNX Runtime, which it finds in the process, and no libstdc++, which it brings."""
    library = ROOT / "onnxfuse" / "runtime" / "libonnxfuse.so"
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(\w[^]]*?)\.so\.\d+\]", listed))
    assert {"libc"} <= needed <= {"libc", "libdl", "libgcc_s", "libm", "libpthread", "ld-linux-x86-64"}


def test_the_library_is_hardened() -> None:
    """No stack is executable, what the loader fills in is bound at once and read-only then, and stacks are guarded."""
    raw = (ROOT / "onnxfuse" / "runtime" / "libonnxfuse.so").read_bytes()
    (table,), (size, count) = struct.unpack_from("<Q", raw, 32), struct.unpack_from("<HH", raw, 54)
    segments = [struct.unpack_from("<IIQQQQ", raw, table + size * index) for index in range(count)]
    dynamic, stack, relro = 2, 0x6474E551, 0x6474E552
    flags = {kind: each for kind, each, *_ in segments}
    assert flags[stack] == 6, "read and write"
    assert relro in flags
    (start, length), = ((offset, used) for kind, _, offset, _, _, used in segments if kind == dynamic)
    entries = dict(struct.iter_unpack("<QQ", raw[start:start + length]))
    assert entries.get(24) is not None or entries.get(30, 0) & 8 or entries.get(0x6FFFFFFB, 0) & 1, "bound at once"
    assert b"\0__stack_chk_fail\0" in raw
