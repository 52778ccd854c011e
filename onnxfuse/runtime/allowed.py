"""What a kernel of a model may ask of the machine that compiles it: no file but the CUDA toolkit's own headers, and no
option but those that change the machine code.

NVRTC reads whatever file an ``#include`` names, and some of its options write files, so that a model from elsewhere
could reach both by its kernel texts and launch plans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnxfuse.errors import KernelError

_OPTIONS = re.compile(
    r"-lineinfo|-D\w+(=[\w.]*)?|--maxrregcount=\d{1,3}|--(fmad|ftz|prec-div|prec-sqrt)=(true|false)", re.ASCII)

_COMMENT = r"(?:/\*.*?\*/|//[^\n]*\n)"
_READS = re.compile(
    rf"(?:(?:#|%:|\?\?=)(?:\s|{_COMMENT})*(?:include_next|include|import|embed)|__has_(?:include|embed))"
    rf"(?!\w)(?:\s|\(|{_COMMENT})*(?P<what>[^\n)]*)", re.DOTALL)
"""Wherever it stands, in a comment or a string too: what those are to the compiler need not be known here."""

_HEADER = re.compile(r"<(?:\w[\w-]*/)*\w[\w-]*(?:\.\w+)?>")


def check_options(options: Sequence[str]) -> None:
    """Do nothing where a launch plan's options are of those that may be asked for.

    Raises:
        KernelError: one is not.
    """
    for option in options:
        if not _OPTIONS.fullmatch(option):
            raise KernelError(
                f"a kernel asks for the compiler's option {option[:80]!r}, which no model may",
                remedy="it may ask for -DNAME=WORD, --maxrregcount=N, and --fmad=, --ftz=, --prec-div= or --prec-sqrt= "
                       "true or false",
            )


def check_source(source: str) -> None:
    """Do nothing where a kernel text reads no file but headers below the compiler's folders.

    Raises:
        KernelError: it asks for another, or for one that only the compiler could name.
    """
    for match in _READS.finditer(re.sub(r"\\[ \t]*\r?\n", "", source)):
        what = match["what"].strip()
        if not _HEADER.match(what):
            raise KernelError(
                f"a kernel's text includes {what[:80]!r}, and it may include headers of the CUDA toolkit alone",
                remedy="name the header in angle brackets, as <cuda_fp16.h>, or put what is needed into the text",
            )
