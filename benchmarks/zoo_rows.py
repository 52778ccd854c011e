"""The rows of zoo.json: a model of a folder, at sizes; which of them are meant by names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx
from common import ZOO, hydrate
from quantising import quantised


@dataclass(frozen=True)
class Row:
    """A model of a folder, of so many bytes, at sizes; ``sizes`` by the place of the axis; products and convolutions
    are of 8-bit integers where it is ``quantised``.

    Models that came later are not ``in_mean``, so that the mean can be followed over the years."""

    model: str
    sizes: tuple[int, ...]
    inputs: Mapping[str, Any]
    in_mean: bool = True
    size: int = 0
    folder: Path = ZOO
    quantised: bool = False

    @property
    def name(self) -> str:
        return ":".join([self.model, *map(str, self.sizes)])

    @property
    def skeleton(self) -> Path:
        """Its model without weights."""
        return self.folder / f"{self.model}.onnx.xz"

    def hydrated(self) -> onnx.ModelProto:
        """It, with weights."""
        made: onnx.ModelProto = hydrate().hydrate(self.skeleton)
        if self.quantised:
            return quantised(made, hydrate().feeds({"inputs": self.inputs}, (1, *self.sizes[1:])))
        return made

    @property
    def family(self) -> str:
        """Rows of one family count as one in the mean: the three BERT rows are one architecture."""
        return "bert_base" if self.model.startswith("bert_base") else self.name

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the symbols."""
        return {size: self.sizes[axis] for spec in self.inputs.values()
                for axis, size in enumerate(spec["shape"]) if isinstance(size, str)}


def all_rows(folder: Path = ZOO) -> list[Row]:
    """The rows of a folder's zoo.json."""
    zoo = json.loads((folder / "zoo.json").read_text())
    return [Row(model, tuple(sizes), entry["inputs"], entry.get("in_mean", True), entry["bytes"], folder)
            for model, entry in zoo.items() for sizes in entry["sizes"]]


def choose(names: str | None, folder: Path = ZOO) -> list[Row]:
    """The rows whose names begin with one of the comma-separated names."""
    rows = all_rows(folder)
    if names is None:
        return rows
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if not any(row.name.startswith(name) for row in rows):
            raise click.BadParameter(f"no row begins with '{name}'; there are: {', '.join(row.name for row in rows)}")
    return [row for row in rows if row.name.startswith(tuple(wanted))]
