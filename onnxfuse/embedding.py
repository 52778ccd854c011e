"""Compiled kernels to put into a fused model, so that a deployment needs neither CuPy nor a compiler.

NVRTC needs no GPU and no driver.  Images come from the cache on disk where they are, and go there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches

from onnxfuse.errors import TargetError
from onnxfuse.runtime.compile import Compiler, KernelSource, architectures, default_compiler

Progress = Callable[[int, int], None]
"""Called with the images that are done and those that there will be."""

_SPELLING = re.compile(r"(?:sm_?|compute_?)?(\d{2,3})([af]?)", re.IGNORECASE)
_MOST_WORKERS = 16


def known_architectures() -> tuple[str, ...]:
    """What can be embedded, as "sm_90"; from Hopper on also with an "a" for what a GPU of that generation alone has."""
    return tuple(name for number in architectures() for name in
                 ((f"sm_{number}", f"sm_{number}a") if number >= 90 else (f"sm_{number}",)))


def parse_architectures(names: Iterable[str]) -> tuple[str, ...]:
    """Names such as "sm_80", "80" and "sm90a" in one spelling, each once, in the order given.

    Raises:
        TargetError: a name is no architecture that onnxfuse supports.
    """
    known = known_architectures()
    found: dict[str, None] = {}
    for name in names:
        match = _SPELLING.fullmatch(name.strip())
        spelled = f"sm_{match[1]}{match[2].lower()}" if match else name.strip()
        if spelled not in known:
            close = get_close_matches(spelled, known, n=1, cutoff=0.7)
            meant = f"Did you mean '{close[0]}'? " if close else ""
            raise TargetError(
                f"'{name}' is no GPU architecture that kernels can be embedded for.", place=f"--embed {name}",
                remedy=f"{meant}There are: {', '.join(known)}.",
            )
        found[spelled] = None
    return tuple(found)


def embed(source: str, architectures: Sequence[str], options: Sequence[str] = (), progress: Progress | None = None,
          compiler: Compiler | None = None) -> dict[str, bytes]:
    """The images of one kernel text by architecture, as ``FusedRegion.images`` holds them.

    Args:
        source: CUDA C++, complete in itself; options: the launch plan's.
        architectures: see ``parse_architectures``.
        compiler: with its cache; by default the one that sessions of this process use.

    Raises:
        TargetError: an architecture is not known.
        KernelError: the text does not compile, or there is no compiler.
    """
    return embed_all([KernelSource(source, tuple(options))], architectures, progress, compiler)[0]


def embed_all(kernels: Sequence[KernelSource], architectures: Sequence[str], progress: Progress | None = None,
              compiler: Compiler | None = None) -> list[dict[str, bytes]]:
    """The images of several kernels, compiled in parallel, equal ones once.

    Args:
        kernels: their texts and options; an image is kept under both, whatever kernels it must hold.

    Raises:
        TargetError: an architecture is not known.
        KernelError: a text does not compile, or there is no compiler.
    """
    names = parse_architectures(architectures)
    tasks = list(dict.fromkeys((kernel, name) for kernel in kernels for name in names))
    maker = compiler or default_compiler()
    images: dict[tuple[KernelSource, str], bytes] = {}
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1), "onnxfuse-embed") as pool:
        try:
            for task, image in zip(tasks, pool.map(lambda task: maker.image(*task), tasks), strict=True):
                images[task] = image
                if progress is not None:
                    progress(len(images), len(tasks))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [{name: images[kernel, name] for name in names} for kernel in kernels]
