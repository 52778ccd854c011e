"""The package's version, as installed; a checkout that is not installed has none."""

from __future__ import annotations

from importlib import metadata


def _version() -> str:
    try:
        return metadata.version("onnxfuse")
    except metadata.PackageNotFoundError:
        return "0+unknown"


__version__ = _version()
