"""What onnxfuse keeps on disk: compiled kernels and measurements."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from onnxfuse.doctor.findings import Finding
from onnxfuse.errors import KernelError
from onnxfuse.runtime.cache import Cache, default_folder, distrusted
from onnxfuse.runtime.nvrtc import compiler

_OWN = "Set ONNXFUSE_CACHE_DIR to a folder of your own that can be written."
_AGAIN = "kernels are compiled again in every process"
_PROBE = "doctor"
_MEGABYTE = 1 << 20


def cache() -> Finding:
    """The folder of compiled kernels, by an entry that is written, read and removed.  A folder that is not there yet is
    not made."""
    folder = default_folder()
    if folder is None:
        return Finding("compiler cache", "limited", message=f"There is no HOME: {_AGAIN}.", remedy=_OWN)
    try:
        there = folder.exists()
        if not there:
            return _to_be_made(folder)
        reason = distrusted(folder)
        if reason is not None:
            return Finding("compiler cache", "limited", path=str(folder),
                           message=f"It is not used ({reason}): {_AGAIN}.",
                           remedy=f"chmod go-w {folder}" if "chmod" in reason else _OWN)
        reason = _unusable(folder)
        if reason:
            return Finding("compiler cache", "limited", path=str(folder),
                           message=f"It cannot be written ({reason}): {_AGAIN}.", remedy=_OWN)
        entries = [entry.stat().st_size for entry in folder.glob("*/*.cubin")]  # by compiler
    except OSError as error:
        return Finding("compiler cache", "limited", path=str(folder),
                       message=f"It cannot be used ({error.strerror or error}): {_AGAIN}.", remedy=_OWN)
    return Finding("compiler cache", "ok", _compiler(), str(folder),
                   f"{len(entries):,} kernels, {sum(entries) / _MEGABYTE:.1f} MB")


def _compiler() -> str:
    """The compiler whose images are kept, "" where there is none."""
    try:
        return compiler() or ""
    except KernelError:  # told where the compiler is looked at
        return ""


def _to_be_made(folder: Path) -> Finding:
    """A folder that is not there yet: whether the one above it can be written."""
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return Finding("compiler cache", "limited", path=str(folder),
                       message=f"It cannot be made in {above}: {_AGAIN}.", remedy=_OWN)
    return Finding("compiler cache", "ok", path=str(folder), message="made when the first kernel is compiled")


def _unusable(folder: Path) -> str:
    """Why an entry cannot be kept, or ""."""
    kept = Cache(folder, _PROBE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            written = kept.write(_PROBE, b"probe")
            read = kept.read(_PROBE)
        finally:
            path = kept.path(_PROBE)
            if path is not None:
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    path.parent.rmdir()
    if written and read == b"probe":
        return ""
    words = str(told[0].message) if told else "what was written is not what is read"
    return words.partition(" cannot be written (")[2].partition(")")[0] or words


def database() -> Finding:
    """The database of measurements.

    Raises:
        MeasurementError: it is damaged, of a later release, or something else.
    """
    from onnxfuse.measuring.database import VARIABLE, default_path, find_database

    path = default_path()
    if path is None:
        return Finding("database", "limited", message="There is no HOME: what is measured is not kept.",
                       remedy=f"Set {VARIABLE} to a file.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = find_database()
    if told:
        return Finding("database", "limited", path=str(path), message=f"{told[0].message!s}.",
                       remedy=f"Set {VARIABLE} to a file that you may read and write, or remove this one.")
    if found is None:
        return Finding("database", "ok", path=str(path), message="none yet: `onnxfuse tune MODEL` makes it")
    with found:
        measured, seen = found.counts()
        gpus = ", ".join(dict.fromkeys(environment.gpu for environment in found.environments()))
    message = f"{measured:,} measurements, {seen:,} statistics" + (f", of {gpus}" if gpus else "")
    if not os.access(path, os.W_OK):
        return Finding("database", "limited", path=str(path), message=f"{message}; it cannot be written",
                       remedy=f"To keep what is measured here, set {VARIABLE} to a file of your own.")
    return Finding("database", "ok", path=str(path), message=message)
