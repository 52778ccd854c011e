"""Compiles the emulator's runtime and kernel text with host g++, once each, into a cache on disk."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.instances import instances
from onnxfuse.emulator.kernel_text import HostText, for_host
from onnxfuse.runtime.cache import default_folder, distrusted
from onnxfuse.schedules.headers import all_definitions, declarations, without_definitions

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")

# No errno, no strict aliasing and wrapping integers as on the device; what is left uninitialised gets a pattern.
_SEMANTICS = ["-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fwrapv",
              "-ftrivial-auto-var-init=pattern"]
# Most texts are compiled for a few launches: more optimisation would take longer than it saves.
_KERNEL_FLAGS = [
    "-std=c++17", "-Og", "-w", "-fPIC", *_SEMANTICS, "-fno-exceptions", "-fno-rtti", "-fno-ipa-reference",
    "-fno-stack-protector", "-fstack-clash-protection", "-fno-threadsafe-statics", "-fvisibility=hidden",
    "-fira-algorithm=priority", "-fira-region=one", "-fno-guess-branch-probability",
    "-fsanitize=alignment,bounds,float-cast-overflow", "-fno-sanitize-recover=all", "-U_FORTIFY_SOURCE",
]
_SILENT = "-fsanitize-undefined-trap-on-error"
"""A check that fails is an illegal instruction.  To say what it found is a tenth of a text's compilation, for what the
few launches that fail can be compiled again for."""
_INSTANCES = """
using Sums = float (&)[4];
using Counts = int (&)[4];
using Left = const unsigned (&)[4];
template void of::plain_mma<__half>(Sums, Left, unsigned, unsigned);
template void of::plain_mma<__nv_bfloat16>(Sums, Left, unsigned, unsigned);
template void of::plain_mma_bytes<signed char, signed char>(Counts, Left, unsigned, unsigned);
template void of::plain_mma_bytes<signed char, unsigned char>(Counts, Left, unsigned, unsigned);
template void of::plain_mma_bytes<unsigned char, signed char>(Counts, Left, unsigned, unsigned);
template void of::plain_mma_bytes<unsigned char, unsigned char>(Counts, Left, unsigned, unsigned);
"""
"""Of the headers' functions that are never part of another, those that are templates: what texts call of them."""
# Without the default libraries, so that the checks' handlers are the runtime's own; and without the linker's plugin for
# link-time optimisation, which takes longer than the rest of linking.
_LINK = ["-shared", "-nostdlib", "-fno-use-linker-plugin", "-Wl,-Bsymbolic"]
_RUNTIME_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-fno-stack-protector"]
if os.environ.get("ONNXFUSE_EMULATOR_UCONTEXT"):
    _RUNTIME_FLAGS.append("-DONNXFUSE_UCONTEXT")


def _plain() -> dict[str, str]:
    """The environment for a compiler, which says the same in every language and with every character set."""
    return {**os.environ, "LC_ALL": "C"}


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """What the host compiler says of itself.

    Raises:
        EmulatorError: there is none.
    """
    try:
        return subprocess.run([COMPILER, "--version"], env=_plain(), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmulatorError(f"a host C++ compiler is needed, and '{COMPILER}' does not run") from error


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """The folder for what this compiler makes of this version of the emulator, wherever that one lies.

    ``ONNXFUSE_EMULATOR_CACHE`` names its parent, by default ``emulator`` in the folder of compiled kernels.  What lies
    there is loaded as code: where others may write to it, or nothing can be written, this process has a folder of its
    own.

    Raises:
        EmulatorError: there is no host compiler.
    """
    version = compiler_version()
    digest = hashlib.sha256(f"{version} {_KERNEL_FLAGS} {_SILENT} {_INSTANCES} {instances()} {_RUNTIME_FLAGS}".encode())
    for file in sorted([*HERE.glob("shim/**/*"), *HERE.glob("*.cc"), *HERE.glob("*.h")]):
        if file.is_file():
            digest.update(f"{file.relative_to(HERE)} ".encode() + file.read_bytes())
    named, kernels = os.environ.get("ONNXFUSE_EMULATOR_CACHE"), default_folder()
    parent = Path(named) if named else None if kernels is None else kernels / "emulator"
    if parent is not None:
        folder = parent / digest.hexdigest()[:16]
        with suppress(OSError):
            for each in (parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not any(map(distrusted, (parent, folder))) and os.access(folder, os.W_OK):
                return folder
    own = tempfile.mkdtemp(prefix="onnxfuse-emulator-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _make(target: Path, command: Sequence[str], text: str | None = None, libraries: Sequence[str] = ()) -> None:
    """Run a compiler, on ``text`` where there is one, to write ``target``, which appears whole or not at all.

    Args:
        libraries: what to link with where the text calls it.

    Raises:
        EmulatorError: it failed; the text is its own.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch, "made")
        extra = ["-o", str(made)]
        if text is not None:
            Path(scratch, "kernel.cc").write_text(text)
            # The runtime, loaded before, brings the C libraries: linking them is a fifth of a small text's time.
            extra += ["kernel.cc", *libraries, "-lgcc"]
        result = subprocess.run([*command, *extra], env=_plain(), capture_output=True, text=True, cwd=scratch,
                                check=False)
        if result.returncode:
            raise EmulatorError(f"the text does not compile for the CPU:\n{result.stderr}")
        os.replace(made, target)


@lru_cache(maxsize=1)
def runtime() -> ctypes.CDLL:
    """The emulator's runtime, loaded so that kernels' libraries find its functions."""
    library = cache_folder() / "runtime.so"
    if not library.exists():
        _make(library, [COMPILER, *_RUNTIME_FLAGS, str(HERE / "runtime.cc"), "-Wl,--no-as-needed", "-lm", "-lrt"])
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=2)
def _header(common: str = "") -> Path:
    """A header that kernels are compiled after, with its precompiled form beside it: the emulator's own, and what texts
    begin with, where that is ``common``."""
    header = cache_folder() / f"emulator{hashlib.sha256(common.encode()).hexdigest()[:16] if common else ''}.h"
    compiled = header.with_name(f"{header.name}.gch")
    if not compiled.exists():
        header.write_text(f'#include "{_shim() / "emulator.h"}"\n{common}')
        _make(compiled, [COMPILER, *_KERNEL_FLAGS, _SILENT, f"-I{_shim()}", "-x", "c++-header", str(header)])
    return header


def parts(text: str) -> tuple[Path, str, list[str]]:
    """The header to compile a text after, what is left of the text, and what to link it with: where it begins with
    definitions of the headers of generated kernels, all of these are read once for all such texts."""
    begin = '#line 1 "kernel"\n'
    body = without_definitions(text.removeprefix(begin)) if text.startswith(begin) else None
    if body is None:
        return _header(), text, []
    line = text.count("\n", len(begin), len(text) - len(body)) + 1
    link = ["-Wl,--as-needed,-rpath,$ORIGIN", str(_functions())]
    return _header(_declared()), f'#line {line} "kernel"\n{body}', link


@lru_cache(maxsize=1)
def _declared() -> str:
    """The headers' definitions, but for what ``_functions`` has."""
    return declarations("__noinline__") + "".join(f"extern template {each};\n" for each in instances())


@lru_cache(maxsize=1)
def _functions() -> Path:
    """A library of the headers' functions that are never part of another: a product takes most of its time in one, and
    is worth more optimisation, once, than a text that is compiled for a few launches."""
    text = all_definitions() + _INSTANCES + "".join(f"template {each};\n" for each in instances())
    library = cache_folder() / f"functions{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _make(library, [COMPILER, *_RUNTIME_FLAGS, *_SEMANTICS, "-include", str(_header()), f"-I{_shim()}", *_LINK,
                        f"-Wl,-soname,{library.name}"], text)
    return library


@lru_cache(maxsize=1)
def _shim() -> Path:
    """A copy of the headers that kernels may include: another checkout with the same ones uses what was made of it."""
    folder = cache_folder() / "shim"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.copytree(HERE / "shim", part, dirs_exist_ok=True)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


def build(source: str, includes: Sequence[Path] = (), telling: bool = False) -> tuple[Path, HostText]:
    """The shared library that kernel text becomes, and the text as host g++ saw it.

    Args:
        includes: folders of the headers that the text includes, if it includes any.
        telling: whether a check of alignment, bounds or casts that fails says so; else it is an illegal instruction.

    Raises:
        EmulatorError: it does not compile; the text is the compiler's.
    """
    host = for_host(source)
    digest = hashlib.sha256(host.text.encode())
    for folder in includes:
        for file in sorted(folder.glob("*.[ch]*")):
            digest.update(file.name.encode() + file.read_bytes())
    library = cache_folder() / f"{digest.hexdigest()[:32]}{'-telling' if telling else ''}.so"
    if not library.exists():
        folders = [f"-I{folder}" for folder in (_shim(), *includes)]
        header, text, functions = parts(host.text)
        checks = [] if telling else [_SILENT]
        _make(library, [COMPILER, *_KERNEL_FLAGS, *checks, "-include", str(header), *folders, *_LINK], text, functions)
    return library, host
