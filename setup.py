"""Builds the native library; everything else about the package stands in setup.cfg."""

import os
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("onnxfuse/runtime/native")

# Whatever a fault in the library lets a model write: a return address that was changed ends the process, tables of
# functions are read-only once the library is loaded, and no stack holds code.  Distributions define _FORTIFY_SOURCE
# themselves, some of them otherwise.
HARDENING = (
    "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack",
)


class BuildLibrary(build_ext):
    """Compiles libonnxfuse.so with g++: a plain shared library that Python is not needed to load."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [
            os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *HARDENING,
            "-Wall", "-Wextra", f'-DONNXFUSE_VERSION="{self.distribution.get_version()}"', *ext.sources,
            "-o", str(target), "-ldl", "-pthread",
        ]
        self.announce(" ".join(command), level=2)
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError as error:
            raise CompileError(f"{command[0]} was not found; onnxfuse needs g++ to build its native library") from error
        except subprocess.CalledProcessError as error:
            raise CompileError(f"{command[0]} failed on the native library") from error


setup(
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
    cmdclass={"build_ext": BuildLibrary},
)
