"""A GPU of which nothing was measured that tells how long products take."""

from __future__ import annotations

from onnxfuse.planning.hardware import find_profile

_KNOWN = find_profile("H200")

UNMEASURED = _KNOWN.model_copy(update={"measured": _KNOWN.measured.model_copy(update={"tile_tflops": None})})
"""An H200 but for that."""
