"""The package's version: as installed, or as a checkout that is not installed says it in its setup.cfg."""

from __future__ import annotations

from configparser import ConfigParser
from importlib import metadata
from pathlib import Path


def _version() -> str:
    try:
        return metadata.version("onnxfuse")
    except metadata.PackageNotFoundError:
        setup = ConfigParser()
        setup.read(Path(__file__).resolve().parents[1] / "setup.cfg")
        return setup.get("metadata", "version", fallback="0+unknown")


__version__ = _version()
