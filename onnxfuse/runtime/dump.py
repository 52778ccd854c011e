"""Kernels put aside to be looked at: ``ONNXFUSE_DUMP`` names a folder for their texts and images.

What is compiled then carries line information that refers to the dumped text, so that NVIDIA's profilers and
compute-sanitizer show its lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.errors import OutputError
from onnxfuse.runtime.cache import digest, write_whole

VARIABLE = "ONNXFUSE_DUMP"

_LONGEST = 100
"""Characters of a kernel's name in that of its file."""

LINE_INFORMATION = "-lineinfo"
"""NVRTC's option; it does not change the machine code."""


@dataclass(frozen=True)
class Dump:
    """Where one kernel text goes: ``add_one-0123456789abcdef.cu``, and its images beside it.

    The number is the start of the digest that the statistics file calls ``kernel``.
    """

    path: Path

    @staticmethod
    def wanted(source: str, options: Sequence[str], kernels: Sequence[str]) -> Dump | None:
        """The place for a text with these options and kernels; None where nothing is to be dumped."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        # The name is a model's: it must not lead elsewhere, nor be longer than a file's may be.
        stem = re.sub(r"[^A-Za-z0-9_]", "_", kernels[0])[:_LONGEST] if kernels else "kernel"
        name = f"{stem}-{digest(source, options)[:16]}.cu"
        return Dump(Path(folder).absolute() / name)

    def traced(self, source: str) -> str:
        """The text whose lines are called those of the dumped file.  It names an image of its own in the cache.

        NVRTC cannot write every path into an image: quotes break it, letters past ASCII become something else.  There
        the file's name stands alone.
        """
        path = str(self.path)
        plain = path.isascii() and path.isprintable() and not {'"', "\\"} & set(path)
        return f'#line 1 "{path if plain else self.path.name}"\n{source}'

    def write_source(self, source: str) -> None:
        """Write the text, whether it compiles or not.

        Raises:
            OutputError: the folder cannot be made or written.
        """
        self._write(self.path, source.encode())

    def write_image(self, image: bytes, architecture: str) -> None:
        """Write an image.

        Raises:
            OutputError: as ``write_source``.
        """
        self._write(self.path.with_suffix(f".{architecture}.cubin"), image)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as error:
            raise OutputError(
                f"A kernel cannot be dumped: {error.strerror or error}.", place=str(path),
                remedy=f"Set {VARIABLE} to a folder that can be written, or unset it.",
            ) from error
