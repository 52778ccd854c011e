"""A fused model and its report, as ``onnxfuse.optimize`` gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import onnx

from onnxfuse import locking, rewriting
from onnxfuse.files import write_text
from onnxfuse.locking import Lock
from onnxfuse.optimised import Optimised
from onnxfuse.reporting import Report
from onnxfuse.reporting.drawing import picture
from onnxfuse.rewriting.saving import External, Saved
from onnxfuse.unforeseen import told


@dataclass(frozen=True, repr=False)
class Result:
    """A fused model and its report.

    Attributes:
        optimised: everything that led to it, stage by stage.
        report: what was fused, what was not and why, and what it costs.
    """

    optimised: Optimised
    report: Report

    def __repr__(self) -> str:
        return repr(self.report).replace("<Report", "<Result", 1)

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model."""
        return self.optimised.model

    def save(self, path: str | Path | None = None, *, external: External = "keep",
             progress: Callable[[int, int], None] | None = None) -> Path:
        """``write``, of which the path is all that matters."""
        return self.write(path, external=external, progress=progress).path

    def to_svg(self) -> str:
        """The fused graph as a picture, each fused node with the nodes that its function holds.

        Raises:
            ModelError: there is more to draw than can be looked at.
        """
        with told(self.optimised.loaded.path):
            return picture(self.optimised.lean, Path(self.report.model).name)

    def write(self, path: str | Path | None = None, *, external: External = "keep",
              progress: Callable[[int, int], None] | None = None) -> Saved:
        """Write the fused model; returns its path, and the files outside it that hold weights of its.

        Args:
            path: by default beside the file that was read, ``model.fused.onnx`` for ``model.onnx``.
            external: what becomes of weights outside the model's file: "keep" refers to the same files where that is
                possible, "copy" copies them to ``<path>.DIGEST.data``, "inline" puts them into the model.
            progress: told the bytes copied to the data file, and those to copy.

        Raises:
            OutputError: the file cannot be written; nothing was left behind.
            ValueError: the model was not read from a file, and there is no path.
        """
        if path is None:
            if self.optimised.loaded.path is None:
                raise ValueError("a model that was not read from a file needs a path to be saved to")
            path = default_output(self.optimised.loaded.path)
        source = self.optimised.loaded
        if external not in get_args(External):
            raise ValueError(f"external is {external!r}; it can be {', '.join(map(repr, get_args(External)))}")
        with told(source.path, path):
            return rewriting.save(self.optimised.lean, path, source=source, external=external, progress=progress)

    def lock(self) -> Lock:
        """What is fused, by onnxfuse and by ONNX Runtime itself, to hold later models against (``check``)."""
        with told(self.optimised.loaded.path):
            return locking.lock_of(self.optimised, self.report)

    def save_lock(self, path: str | Path) -> Path:
        """Write the lock as a file of YAML, all of it or nothing; returns its path.

        Raises:
            OutputError: the file cannot be written; nothing was left behind.
        """
        write_text(Path(path), locking.lock_text(self.lock()))
        return Path(path)


def default_output(path: Path) -> Path:
    """Where the fused model goes by default: ``model.fused.onnx`` beside ``model.onnx``."""
    stem = path.name.removesuffix(".onnx")
    return path.with_name(f"{stem}.fused.onnx")
