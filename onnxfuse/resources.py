"""Where the files lie that are no code."""

from __future__ import annotations

from pathlib import Path

from onnxfuse.errors import OnnxfuseError


def rules_folder() -> Path:
    """The folder of the shipped rules: ``rules/`` of a source checkout, else the copy in the installed package.

    Raises:
        OnnxfuseError: neither is there.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "rules", package / "_rules"):
        if (folder / "fusion").is_dir():
            return folder
    raise OnnxfuseError(
        "the shipped rules are missing", place=str(package / "_rules"), remedy="install onnxfuse again"
    )
