"""NVRTC with less optimisation, for tests that ask whether texts compile and not what becomes of them: the same
diagnoses and instructions, in a third of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from onnxfuse.runtime import compile
from onnxfuse.runtime.nvrtc import binding

OPTION = "--Ofast-compile=mid"
SINCE = (13, 0)
"""The oldest release that this was tried with."""


@contextmanager
def quickly() -> Iterator[None]:
    """Compile so meanwhile, where the release knows how."""
    options = (OPTION,) if binding().getVersion() >= SINCE else ()
    with patch.object(compile, "STANDARD_OPTIONS", (*compile.STANDARD_OPTIONS, *options)):
        yield
