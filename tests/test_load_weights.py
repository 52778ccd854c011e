"""Weights in files beside a model: referenced and not read, and each that is wrong is one clear error."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from test_load import message_of, model

from onnxfuse.errors import ExternalDataError
from onnxfuse.graph import from_proto, load_model


def external(folder: Path, location: str = "data.bin", elements: int = 8) -> Path:
    """A model with one weight of ``elements`` float32 in a file that the caller writes."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[elements], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "4", "length": str(4 * elements)}.items():
        weight.external_data.add(key=key, value=value)
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weight])
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_is_referenced_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(36))
    loaded = load_model(external(tmp_path))
    (weight,) = loaded.proto.graph.initializer
    assert weight.data_location == TensorProto.EXTERNAL and not weight.HasField("raw_data")


def test_weights_of_three_gigabytes_are_not_read(tmp_path: Path) -> None:
    """A sparse file stands for them; reading it would take the memory that this process may not have."""
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(4 + 3 * 2**30)
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_model(external(tmp_path, elements=3 * 2**28))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_missing_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    assert message_of(path, ExternalDataError) == (
        "The external data file 'data.bin' is missing.\n--> tensor 'w'\n"
        f"help: Put the file back beside the model, at {tmp_path / 'data.bin'}."
    )


def test_external_data_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(20))
    assert message_of(external(tmp_path), ExternalDataError) == (
        "The external data file 'data.bin' is too short: tensor 'w' ends at byte 36, and the file at 20.\n"
        "--> tensor 'w'\n"
        "help: Copy the file again, in full; it was cut short or belongs to another model."
    )


def test_external_data_of_fewer_bytes_than_the_tensor_needs(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(100))
    path = external(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].dims[0] = 9
    path.write_bytes(proto.SerializeToString())
    assert message_of(path, ExternalDataError) == (
        "Tensor 'w' needs 36 bytes and refers to 32 in 'data.bin'.\n--> tensor 'w'\nhelp: Export the model again."
    )


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../data.bin", "sub/../../data.bin", "C:\\data.bin", "..\\data.bin"],
)
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    assert message_of(external(tmp_path, location), ExternalDataError) == (
        f"The external data path '{location}' leaves the model's folder.\n--> tensor 'w'\n"
        "help: Save the model again with its data beside it: onnx.save(model, path, save_as_external_data=True)."
    )


def test_external_data_behind_a_link_out(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(100))
    os.symlink(tmp_path / "secret", folder / "data.bin")
    assert message_of(external(folder), ExternalDataError) == (
        "The external data path 'data.bin' is a link that leaves the model's folder.\n--> tensor 'w'\n"
        f"help: Put the data itself there: cp --remove-destination \"$(realpath '{folder / 'data.bin'}')\" "
        f"'{folder / 'data.bin'}'."
    )


def test_external_data_behind_a_link_inside(tmp_path: Path) -> None:
    (tmp_path / "real.bin").write_bytes(bytes(36))
    os.symlink("real.bin", tmp_path / "data.bin")
    assert load_model(external(tmp_path)).folder == tmp_path


def test_external_data_without_a_folder(tmp_path: Path) -> None:
    proto = onnx.load(external(tmp_path), load_external_data=False)
    assert message_of(proto, ExternalDataError) == (
        "Tensor 'w' keeps its data in 'data.bin', and the model has no folder.\n--> tensor 'w'\n"
        "help: Give the folder that holds the file, or load the model by path."
    )


def test_external_data_in_a_subgraph_is_checked(tmp_path: Path) -> None:
    weight = onnx.load(external(tmp_path), load_external_data=False).graph.initializer[0]
    branch = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["z"])], "b", [], [helper.make_tensor_value_info("z", 1, [8])], [weight],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([helper.make_node("Cast", ["x"], ["c"], to=9), node])
    with pytest.raises(ExternalDataError, match="is missing"):
        from_proto(proto, tmp_path)
