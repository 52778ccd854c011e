"""Subject ``npz``: files of inputs, damaged as bytes, as archives and in their arrays' headers, read and used."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import cli_models
import numpy as np
from damage import TEXTS, damage_bytes

from onnxfuse.graph import Graph
from onnxfuse.measuring import make_inputs, read_inputs
from onnxfuse.operators import load_graph

DTYPES = ("<f4", ">f4", "<f8", "|O", "|V2", "<U3", "|S0", "<M8[ns]", "?", "<c16", "<i8",
          "[('a', '<f4')]", "('<f4', (1000000000,))", "|V0", "<f3", "<U999999999", "[('x', '|O')]",
          "{'names': ['a'], 'formats': ['<f4']}")
SHAPES = ("(2, 4096)", "(4096,)", "()", "(-1,)", "(0, 10**30)", "(1000000000000,)", "(2,) * 3", "(True,)", "(1,) ",
          "(2.0,)", "[2]", "(" * 500, "(9223372036854775807, 4)", "(0,)", "(4294967296, 4294967296)",
          "(0, 4611686018427387904)", "(" + "1, " * 40 + ")")
NAMES = ("x", "w", "x.npy", "x", "../x", "a/b", "x.npy.npy", "", "é", "\x1b[2J", "y")


@cache
def graph() -> Graph:
    return load_graph(cli_models.parse(cli_models.CHAIN))


def make(seed: int, folder: Path) -> list[Path]:
    """A file of one array to four."""
    rng = Random(seed)
    path = folder / "inputs.npz"
    method = rng.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,) * 4 + (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        with zipfile.ZipFile(path, "w", method) as archive:
            for _ in range(rng.choice((1, 1, 2, 4))):
                known = rng.random() < 0.8
                name = rng.choice("xw") if known else rng.choice((*NAMES, *TEXTS[1:12]))
                ending = ".npy" if known else rng.choice((".npy", ".txt"))
                archive.writestr(name + ending, entry(rng, (2, 4096) if name == "x" else (4096,)))
    data = path.read_bytes()
    if rng.random() < 0.3:
        data = forged(data, rng)
    if rng.random() < 0.3:
        data = damage_bytes(data, rng)
    path.write_bytes(data)
    return [path]


def entry(rng: Random, shape: tuple[int, ...]) -> bytes:
    """An array as numpy writes it, or nearly."""
    kind: Any = np.float32
    if rng.random() < 0.3:
        kind = rng.choice((np.float16, np.int64, np.bool_, "<U3", ">f4"))
        shape = rng.choice(((2, 4096), (4096,), (), (0, 4096), (3, 5, 7)))
    array = np.ones(shape, kind)
    if rng.random() < 0.2:
        array = np.asfortranarray(array)
    made = io.BytesIO()
    np.lib.format.write_array(made, array, version=rng.choice((None, (1, 0), (2, 0), (3, 0))))
    data = made.getvalue()
    match rng.randrange(10):
        case 0:
            return damage_bytes(data, rng)
        case 1 | 2:
            order = rng.choice(("True", "False", "1", "None"))
            text = (f"{{'descr': {rng.choice(DTYPES)!r}, 'fortran_order': {order}, 'shape': {rng.choice(SHAPES)}, }}\n"
                    ).encode()
            if rng.random() < 0.2:
                text = text.replace(b"'shape'", rng.choice((b"'shap'", b"'shape': 1, 'more'", b"(" * 5000)))
            length = struct.pack("<H", min(len(text), 65535))
            return b"\x93NUMPY\x01\x00" + length + text + bytes(rng.choice((0, 4, 32768)))
        case 3 if rng.random() < 0.1:
            return bytes(10_000_000)
    return data


def forged(data: bytes, rng: Random) -> bytes:
    """Other numbers in the archive's directory: lengths, counts, methods."""
    result = bytearray(data)
    marks = [at for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06") for at in range(len(data) - 4)
             if data[at:at + 4] == mark] if len(data) < 200_000 else [data.rfind(b"PK\x05\x06")]
    at = rng.choice(marks) + rng.randrange(6, 30)
    value = rng.choice((0, 1, 0x7F, 0xFF, 0xFFFF, 0xFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
    result[at:at + 4] = struct.pack("<I", value)[:rng.choice((1, 2, 4))].ljust(1, b"\0")
    return bytes(result)


def attempt(files: Sequence[Path]) -> str:
    """Read it, and make a model's inputs with its arrays."""
    arrays = read_inputs(files[0])
    made = make_inputs(graph(), {}, arrays)
    return " ".join(f"{name}{array.shape}" for name, array in made.items())
