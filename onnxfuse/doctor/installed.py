"""What is installed, and what a process has loaded."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path


def releases(packages: Iterable[str]) -> dict[str, str]:
    """Of these packages those that are installed, with their versions."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def clashing(packages: Iterable[str]) -> bool:
    """Whether two of these packages, which have files of the same names, are installed in one folder."""
    folders = [importlib.metadata.distribution(package).locate_file("") for package in releases(packages)]
    return len(set(folders)) < len(folders)


def loaded_from(name: str) -> str:
    """Path of a library that this process has loaded, by the beginning of its name; "" where it has not."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if path.rsplit("/", 1)[-1].startswith(name)), "")
