"""Sets of inputs that a user keeps: an .npz file, a folder of them, or test data in ONNX's own layout.

    inputs.npz            one set
    real/*.npz            a set a file
    test_data_set_0/      input_0.pb, input_1.pb, ...: the inputs of the model in their order
    data/test_data_set_*  a set a folder
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxfuse.bounded import read_bytes
from onnxfuse.errors import ModelError
from onnxfuse.measuring.archive import LARGEST, reason
from onnxfuse.measuring.inputs import read_inputs

MOST_SETS = 1000
"""Sets of inputs of one folder."""

_TENSOR = re.compile(r"input_(\d+)\.pb")


@dataclass(frozen=True)
class InputSet:
    """A user's arrays by input name, and what reports call them."""

    arrays: Mapping[str, NDArray[Any]]
    label: str = "your inputs"


def read_input_sets(path: str | Path, inputs: Sequence[str]) -> tuple[InputSet, ...]:
    """The sets of a file or a folder, in the order of their names.

    Args:
        inputs: names of the model's inputs, in their order.

    Raises:
        ModelError: there is no such file or folder, it holds no inputs, or they cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return (InputSet(read_inputs(path)),)
    try:
        entries = sorted(path.iterdir(), key=_order)
        archives = [entry for entry in entries if entry.suffix == ".npz"]
        folders = [entry for entry in (path, *entries) if entry.is_dir() and _tensors(entry)]
    except OSError as error:
        raise ModelError(f"The folder of inputs cannot be read: {reason(error)}.", place=str(path),
                         remedy="Choose a folder that you may read.") from error
    if not archives and not folders:
        raise ModelError("The folder holds no inputs.", place=str(path),
                         remedy="Put .npz files into it, or ONNX test data: test_data_set_0/input_0.pb.")
    if len(archives) + len(folders) > MOST_SETS:
        raise ModelError(f"The folder holds more than {MOST_SETS:,} sets of inputs.", place=str(path),
                         remedy="Give some of them.")
    return (*(InputSet(read_inputs(file), file.name) for file in archives),
            *(InputSet(_read_tensors(_tensors(folder), inputs), folder.name) for folder in folders))


def _order(path: Path) -> tuple[tuple[int, str], ...]:
    """Names with numbers in them in the numbers' order."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path.name))


def _tensors(folder: Path) -> dict[int, Path]:
    """Files of tensors by the number in their names."""
    found = ((_TENSOR.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return dict(sorted((int(match[1]), entry) for match, entry in found if match is not None))


def _read_tensors(files: Mapping[int, Path], inputs: Sequence[str]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for number, file in files.items():
        try:
            tensor = onnx.TensorProto.FromString(read_bytes(file, LARGEST - sum(_sizes(arrays.values()))))
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ValueError("its numbers are in another file")
            array = numpy_helper.to_array(tensor)
        except Exception as error:  # protobuf and onnx have exceptions of their own
            said = reason(error) if isinstance(error, OSError | ValueError) else "it is no tensor"
            raise ModelError(f"The inputs cannot be read: {said}.", place=str(file),
                             remedy="Write them with onnx.save_tensor(onnx.numpy_helper.from_array(array), path).",
                             ) from error
        if tensor.name not in inputs and number >= len(inputs):
            raise ModelError(f"There is no input {number}: the model has {len(inputs)}.", place=str(file),
                             remedy="Count from 0, in the order of the model's inputs.")
        arrays[tensor.name if tensor.name in inputs else inputs[number]] = array
    return arrays


def _sizes(arrays: Iterable[NDArray[Any]]) -> list[int]:
    return [array.nbytes for array in arrays]
