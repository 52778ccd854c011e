"""Builds the native library, names the wheel after what it needs, writes its bill of materials, and makes the README
fit for a package index; everything else stands in setup.cfg."""

import configparser
import hashlib
import json
import os
import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("onnxfuse/runtime/native")
LIBRARY = "onnxfuse/runtime/libonnxfuse.so"

# Whatever a fault in the library lets a model write: a return address that was changed ends the process, tables of
# functions are read-only once the library is loaded, and no stack holds code.  Distributions define _FORTIFY_SOURCE
# themselves, some of them otherwise.
HARDENING = (
    "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack",
)

# libstdc++ goes into the library, and none of its symbols out: the system's may be older, and a program that loads the
# library may have one of its own.  What nothing calls is left out, since it may need a newer glibc.
STATIC = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")

COMPILER = os.environ.get("CXX", "g++")


class BuildLibrary(build_ext):
    """Compiles libonnxfuse.so with g++: a plain shared library that Python is not needed to load."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        target, parts = Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp, ext.name)
        for folder in (target.parent, parts):
            folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *HARDENING]

        def compiled(source):
            made = str(parts / f"{Path(source).stem}.o")
            self.run_compiler(*flags, "-Wall", "-Wextra", f'-DONNXFUSE_VERSION="{self.distribution.get_version()}"',
                              "-c", source, "-o", made)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, ext.sources))
        self.run_compiler(*flags, "-shared", *STATIC, *objects, "-o", str(target), "-ldl", "-pthread")

    def run_compiler(self, *words):
        command = [COMPILER, *words]
        self.announce(" ".join(command), level=2)
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError as error:
            raise CompileError(f"{command[0]} was not found; onnxfuse needs g++ to build its native library") from error
        except subprocess.CalledProcessError as error:
            raise CompileError(f"{command[0]} failed on the native library") from error


def least_glibc(library):
    """The oldest glibc that has every symbol of a shared library, as (2, 34)."""
    listed = subprocess.run(["readelf", "-W", "--version-info", str(library)], check=True, text=True,
                            capture_output=True).stdout
    return max((int(major), int(minor)) for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", listed))


class BuildWheel(bdist_wheel):
    """Tags the wheel by what its library needs, which is a glibc and no Python.

    Adds a CycloneDX bill of materials, where PEP 770 looks for it: what the wheel brings, and what it asks for."""

    def get_tag(self):
        library = Path(self.bdist_dir or "", LIBRARY)
        if not library.exists():  # only the metadata is asked for; nothing is built
            return "py3", "none", super().get_tag()[2]
        major, minor = least_glibc(library)
        return "py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}"

    def egg2dist(self, egginfo_path, distinfo_path):
        super().egg2dist(egginfo_path, distinfo_path)
        library = Path(self.bdist_dir or "", LIBRARY)
        if not library.exists():  # only the metadata is asked for; nothing is built
            return
        place = Path(distinfo_path, "sboms", "onnxfuse.cdx.json")
        place.parent.mkdir()
        place.write_text(json.dumps(self.materials(library), indent=2) + "\n")

    def materials(self, library):
        """The bill; a requirement has its range and no version, since the choice is the installer's."""
        name, version = self.distribution.get_name(), self.distribution.get_version()
        package = f"pkg:pypi/{name}@{version}"
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        required = []
        for requirement in self.distribution.install_requires:
            other, bounds = re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", requirement).groups()
            other = re.sub(r"[-_.]+", "-", other).lower()
            required.append({
                "type": "library", "bom-ref": f"pkg:pypi/{other}", "purl": f"pkg:pypi/{other}", "name": other,
                "scope": "required", "properties": [{"name": "onnxfuse:range", "value": bounds}],
            })
        return {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX",
            "specVersion": "1.6", "version": 1,
            "metadata": {"component": {
                "type": "application", "bom-ref": package, "purl": package, "name": name, "version": version,
                "description": self.distribution.get_description(),
                "components": [{
                    "type": "file", "bom-ref": LIBRARY, "name": LIBRARY, "version": version,
                    "hashes": [{"alg": "SHA-256", "content": digest}],
                    "components": [{
                        "type": "library", "bom-ref": "libstdc++", "name": "libstdc++", "version": compiler_version(),
                        "licenses": [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}],
                    }],
                }],
            }},
            "components": required,
            "dependencies": [{"ref": package, "dependsOn": [LIBRARY, *(other["bom-ref"] for other in required)]}],
        }


def compiler_version():
    """The compiler's release, which is that of the libstdc++ in the library."""
    return subprocess.run([COMPILER, "-dumpfullversion"], check=True, text=True, capture_output=True).stdout.strip()


def description():
    """The README for a package index, which has none of the files that it links to: links lead to the sources' home
    where setup.cfg says one, and are plain text else."""
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    home = settings["metadata"].get("url", "").rstrip("/")
    version = settings["metadata"]["version"]
    return re.sub(
        r"\[([^]]*)\]\((?!\w+:)([^)]*)\)",
        lambda link: f"[{link[1]}]({home}/blob/v{version}/{link[2]})" if home else link[1],
        Path("README.md").read_text(encoding="utf-8"))


setup(
    long_description=description(),
    # setup.cfg can find packages or name them, not both; rules/ lies beside the package and is installed inside.
    packages=[*find_packages(include=["onnxfuse", "onnxfuse.*"]), "onnxfuse._rules"],
    package_dir={"onnxfuse._rules": "rules"},
    ext_modules=[
        Extension(
            "onnxfuse.runtime.libonnxfuse",
            sources=sorted(map(str, NATIVE.glob("*.cc"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
)
