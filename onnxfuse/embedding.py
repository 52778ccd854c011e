"""Compiled kernels to put into a fused model, so that a deployment needs neither CuPy nor a compiler.

Machine code runs on the GPUs that it was compiled for; PTX, which the driver compiles, on these and on all later ones.
NVRTC needs no GPU and no driver.  Images come from the cache on disk where they are, and go there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from onnxfuse.compiling import COMPILING, Progress, Task, compile_all, source_of
from onnxfuse.errors import KernelError, TargetError
from onnxfuse.optimised import Tell
from onnxfuse.region import Region
from onnxfuse.runtime.compile import PTX, Compiler, KernelSource, architectures, default_compiler
from onnxfuse.wording import option

_SPELLING = re.compile(r"(sm_?|compute_?)?(\d{2,3})([af]?)", re.IGNORECASE)


def known_architectures() -> tuple[str, ...]:
    """What can be embedded: machine code, as "sm_90", from Hopper on also with an "a" for what a GPU of that generation
    alone has; and PTX, as "compute_90"."""
    code = [name for number in architectures() for name in
            ((f"sm_{number}", f"sm_{number}a") if number >= 90 else (f"sm_{number}",))]
    return (*code, *(f"{PTX}{number}" for number in architectures()))


def parse_architectures(names: Iterable[str]) -> tuple[str, ...]:
    """Names such as "sm_80", "80" and "sm90a" in one spelling, each once, in the order given.

    Raises:
        TargetError: a name is no architecture that onnxfuse supports.
    """
    known = known_architectures()
    found: dict[str, None] = {}
    for name in names:
        match = _SPELLING.fullmatch(name.strip())
        spelled = _spelled(match) if match else name.strip()
        if spelled not in known:
            raise TargetError(
                f"'{name}' is no GPU architecture that kernels can be embedded for.", place=option("embed", name),
                remedy=f"{_instead(spelled, match)}There are: {', '.join(known)}.", usage=True,
            )
        found[spelled] = None
    return tuple(found)


def _spelled(match: re.Match[str]) -> str:
    """One spelling for all that a name may be spelled like."""
    kind, number, suffix = match.groups()
    return f"{PTX if kind and kind.lower().startswith('c') else 'sm_'}{number}{suffix.lower()}"


def with_ptx(names: Sequence[str]) -> tuple[str, ...]:
    """Architectures with PTX of the newest among them for GPUs that are later than it, unless PTX is named.

    Args:
        names: see ``parse_architectures``.
    """
    if not names or any(name.startswith(PTX) for name in names):
        return tuple(names)
    return (*names, f"{PTX}{max(int(name.removeprefix('sm_').rstrip('af')) for name in names)}")


def _instead(spelled: str, match: re.Match[str] | None) -> str:
    """What to name instead: an image runs on every later GPU of its generation."""
    if match is None:
        close = get_close_matches(spelled, known_architectures(), n=1, cutoff=0.7)
        return f"Did you mean '{close[0]}'? " if close else ""
    number = int(match[2])
    if spelled.startswith(PTX):
        lower = [known for known in architectures() if known <= number]
        return f"PTX for '{PTX}{max(lower)}' is compiled for it too. " if lower else ""
    lower = [known for known in architectures() if known // 10 == number // 10 and known <= number]
    return f"Images for 'sm_{max(lower)}' run on it. " if lower else ""


def embed(regions: Sequence[Region], architectures: Sequence[str], tell: Tell) -> list[Region]:
    """The regions with an image for each architecture, where they have kernels; equal ones are compiled once.

    Args:
        architectures: see ``parse_architectures``; PTX of the newest is added (``with_ptx``).  With none the regions
            stay as they are.
        tell: told "compiling kernels", the images that are done and those that there will be.

    Raises:
        TargetError: an architecture is not known.
        KernelError: a kernel does not compile, or there is no compiler.
    """
    if not architectures:
        return list(regions)
    kernels = [source_of(region.kernel.source, region.kernel.plan) for region in regions]
    images = compile_images(kernels, with_ptx(parse_architectures(architectures)), partial(tell, COMPILING))
    return [replace(region, images=entry) for region, entry in zip(regions, images, strict=True)]


def compile_images(kernels: Sequence[KernelSource], architectures: Sequence[str], progress: Progress | None = None,
                   compiler: Compiler | None = None) -> list[dict[str, bytes]]:
    """The images of several kernels by architecture, compiled in parallel, equal ones once.

    Args:
        architectures: see ``parse_architectures``.
        progress: called in this thread, after each image.
        compiler: with its cache; by default the one that sessions of this process use.

    Raises:
        TargetError: an architecture is not known.
        KernelError: a text does not compile, or there is no compiler.
    """
    names = parse_architectures(architectures)
    tasks = list(dict.fromkeys((kernel, name) for kernel in kernels for name in names if kernel.kernels))
    images: dict[Task, bytes] = {}
    for task, image in compile_all(tasks, (compiler or default_compiler()).image, progress):
        if isinstance(image, KernelError):
            raise image
        images[task] = image
    return [{name: images[kernel, name] for name in names if kernel.kernels} for kernel in kernels]
