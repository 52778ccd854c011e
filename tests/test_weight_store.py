"""Larger weights of a model, in one place while it is copied (``graph.store``), or in its file (``graph.lean``)."""

from __future__ import annotations

import copy
import gc
import os
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import rewriting
from onnxfuse.errors import ExternalDataError, ModelError
from onnxfuse.graph import load_model
from onnxfuse.graph.constants import is_external, read
from onnxfuse.graph.fields import has_unknown
from onnxfuse.graph.load import from_proto
from onnxfuse.graph.store import LEAST, WeightStore, apart, is_stored, resolved, stretch, whole
from onnxfuse.operators.inference import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting.metadata import packed, unpacked

OPTIONS = Options(target="H200", verify=False, database=False)


def model(rows: int = 256, dtype: type = np.float32) -> onnx.ModelProto:
    """A product with a large weight, what can be fused behind it, and an initialiser that nothing reads."""
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.standard_normal((rows, 256)).astype(dtype), "b": generator.standard_normal(256).astype(dtype),
        "idle": generator.standard_normal((256, 256)).astype(dtype)}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["a"]),
         helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Mul", ["r", "r"], ["y"])],
        "g", [helper.make_tensor_value_info("x", kind, [64, rows])],
        [helper.make_tensor_value_info("y", kind, [64, 256])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made.graph.initializer[0].doc_string = "of a layer"
    made.graph.initializer[0].metadata_props.add(key="from", value="training")
    return made


def test_a_copy_without_its_weights_is_small_and_becomes_the_same_model_again() -> None:
    made, store = model(), WeightStore()
    lean = apart(made, store)
    assert len(lean.SerializeToString()) < 4096 < LEAST < len(made.SerializeToString())
    assert [tensor.name for tensor in lean.graph.initializer if is_stored(tensor)] == ["w", "idle"]
    assert not any(map(is_external, lean.graph.initializer))
    assert whole(lean) == made
    assert whole(made) is made


def test_contents_are_read_through_a_reference() -> None:
    made, store = model(), WeightStore()
    reference, tensor = apart(made, store).graph.initializer[0], made.graph.initializer[0]
    assert resolved(reference) is tensor, "nothing is copied to look at it"
    np.testing.assert_array_equal(read(reference, None), numpy_helper.to_array(tensor))
    assert unpacked(packed(reference), onnx.TensorProto()) == tensor


def test_a_reference_that_was_renamed_and_reshaped_is_what_it_says() -> None:
    made, store = model(), WeightStore()
    reference = onnx.TensorProto()
    reference.CopyFrom(apart(made, store).graph.initializer[0])
    reference.name = "other"
    reference.dims[:] = [1, 256, 256]
    reference.ClearField("doc_string")
    changed = resolved(reference)
    assert (changed.name, list(changed.dims), changed.HasField("doc_string")) == ("other", [1, 256, 256], False)
    assert changed.metadata_props[0].value == "training"
    np.testing.assert_array_equal(numpy_helper.to_array(changed)[0], numpy_helper.to_array(made.graph.initializer[0]))
    assert made.graph.initializer[0].name == "w"


def test_contents_do_not_outlive_their_store_unnoticed() -> None:
    store = WeightStore()
    lean = apart(model(), store)
    del store
    gc.collect()
    with pytest.raises(ReferenceError, match="'w' outlived"):
        whole(lean)


def test_a_graph_keeps_what_its_constants_are_read_from() -> None:
    """It may be looked at when the model is there no more that it was built of."""
    graph = load_graph(from_proto(model()).lean())
    gc.collect()
    contents = graph.values["w"].contents
    assert contents is not None
    np.testing.assert_array_equal(contents(), numpy_helper.to_array(model().graph.initializer[0]))


@pytest.mark.usefixtures("lean_files")
def test_nothing_is_read_of_a_file_to_see_its_graph(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("onnxfuse.graph.lean.LEAST", LEAST)
    loaded = load_model(written(tmp_path / "m.onnx", model()), lean=True)
    monkeypatch.setattr("os.pread", None)
    graph = load_graph(loaded)
    assert graph.values["w"].is_constant
    assert not graph.values["w"].external


def test_a_model_with_what_this_release_does_not_know_stays_whole() -> None:
    later = onnx.ModelProto()
    later.ParseFromString(model().SerializeToString() + b"\xf8\x3f\x01")  # field 1023
    assert apart(later, WeightStore()) is later


def test_a_weight_in_a_file_of_its_own_stays_one() -> None:
    """Also where the tensor has an empty ``raw_data`` beside it, which the runtime takes no notice of."""
    made = model()
    first = made.graph.initializer[0]
    first.raw_data = b""
    first.data_location = TensorProto.EXTERNAL
    first.external_data.add(key="location", value="w.bin")
    lean = apart(made, WeightStore())
    assert is_external(lean.graph.initializer[0])
    assert is_stored(lean.graph.initializer[2])


def test_what_this_release_does_not_know_is_kept_beside_weights_that_are_folded() -> None:
    later = onnx.ModelProto()
    later.ParseFromString(model().SerializeToString() + b"\xf8\x3f\x01")
    loaded = from_proto(later).lean()
    assert loaded.store is None
    store = WeightStore()
    later.graph.initializer.append(store.keep(numpy_helper.from_array(np.ones((256, 256), np.float32), "folded")))
    assert has_unknown(whole(later))
    assert not any(map(is_stored, whole(later).graph.initializer))


def test_a_copy_of_a_model_has_its_weights() -> None:
    loaded = from_proto(model()).lean()
    other = copy.deepcopy(loaded)
    del loaded
    gc.collect()
    assert whole(other.proto) == model()


def test_each_optimisation_keeps_its_own_weights_and_not_those_of_others() -> None:
    loaded = from_proto(model()).lean()
    again = loaded.lean()
    assert again.store is not None and again.store is not loaded.store
    del loaded
    gc.collect()
    assert whole(again.proto) == model(), "the first one's are still there"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_fused_model_is_whole_where_it_is_asked_for_and_where_it_is_written(tmp_path, dtype) -> None:
    made = model(dtype=dtype)
    done = optimise(load_model(written(tmp_path / "m.onnx", made)), OPTIONS)
    assert done.rewritten.placed
    assert any(map(is_stored, done.lean.graph.initializer))
    saved = rewriting.save(done.lean, tmp_path / "lean.onnx", source=done.loaded).path
    assert done.lean is done.rewritten.model
    assert onnx.load(saved) == done.model
    assert done.lean is done.model, "what a user may change is what is saved"
    assert not any(tensor.data_location for tensor in done.model.graph.initializer)
    again = rewriting.original(load_model(saved)).proto
    assert again == made, "with the initialiser that nothing reads"


def test_too_large_for_one_file_weights_are_written_beside_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("onnxfuse.rewriting.wire.LIMIT", 1 << 17)
    done = optimise(load_model(written(tmp_path / "o.onnx", model())), OPTIONS)
    saved = rewriting.save(done.lean, tmp_path / "m.onnx", source=done.loaded)
    assert saved.data is not None
    assert saved.data.stat().st_size >= 2 * 4 * 256 * 256
    loaded = onnx.load(saved.path)
    for tensor in done.model.graph.initializer:
        (found,) = (each for each in loaded.graph.initializer if each.name == tensor.name)
        np.testing.assert_array_equal(numpy_helper.to_array(found), numpy_helper.to_array(tensor))


def test_no_file_names_a_store(tmp_path) -> None:
    """A location that looks like a reference is a path that leaves the model's folder."""
    made = model()
    lean = from_proto(made).lean()
    onnx.save(lean.proto, tmp_path / "stolen.onnx")
    text = next(tensor for tensor in lean.proto.graph.initializer if is_stored(tensor)).external_data[0].value
    forged = onnx.load(tmp_path / "stolen.onnx", load_external_data=False)
    for tensor in forged.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "/" + "0" * 32 + text[33:]
    onnx.save(forged, tmp_path / "forged.onnx")
    with pytest.raises(ExternalDataError, match="leaves the model's folder"):
        load_model(tmp_path / "forged.onnx")


def test_a_model_in_memory_is_its_owners_to_change() -> None:
    made = model()
    before = made.SerializeToString()
    done = optimise(made, OPTIONS)
    assert made.SerializeToString() == before
    kept = done.lean.SerializeToString(deterministic=True)
    made.graph.initializer[0].raw_data = bytes(4 * 256 * 256)
    assert done.model is done.lean
    assert done.model.SerializeToString(deterministic=True) == kept


def test_regions_lost_in_verification_are_taken_out_of_what_is_lean(tmp_path) -> None:
    done = optimise(load_model(written(tmp_path / "m.onnx", model())), OPTIONS)
    less = done.without(range(len(done.regions)))
    assert not less.rewritten.placed
    assert whole(less.lean) == model()


CASES = sorted(Path(__file__).with_name("fuzz").joinpath("cases", "models").glob("*.onnx"))


@pytest.fixture
def lean_files(monkeypatch) -> None:
    """Files of any size are read without their weights, and of these also small ones stay there."""
    monkeypatch.setattr("onnxfuse.graph.lean.LEAST_BYTES", 0)
    monkeypatch.setattr("onnxfuse.graph.lean.LEAST", 8)


def written(path: Path, made: onnx.ModelProto) -> Path:
    path.write_bytes(made.SerializeToString())
    return path


@pytest.mark.usefixtures("lean_files")
def test_weights_stay_in_the_file_until_they_are_wanted(tmp_path) -> None:
    path = written(tmp_path / "m.onnx", made := model())
    loaded = load_model(path, lean=True)
    tensors = loaded.proto.graph.initializer
    assert [tensor.name for tensor in tensors if stretch(tensor) is not None] == ["w", "b", "idle"]
    assert whole(loaded.proto) == made
    np.testing.assert_array_equal(read(tensors[0], None), numpy_helper.to_array(made.graph.initializer[0]))
    assert loaded.lean().proto == loaded.proto


@pytest.mark.usefixtures("lean_files")
def test_a_file_with_little_but_weights_is_read_without_them_alone(tmp_path, monkeypatch) -> None:
    path = written(tmp_path / "m.onnx", made := model())
    monkeypatch.setattr("onnxfuse.graph.lean.MOST_LEFT", 64)
    loaded = load_model(path, lean=True)
    assert loaded.store is None
    assert loaded.proto == made


@pytest.mark.usefixtures("lean_files")
def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(tmp_path) -> None:
    path = written(tmp_path / "m.onnx", made := model())
    loaded = load_model(path, lean=True)
    os.replace(written(tmp_path / "other.onnx", model(8)), path)
    assert whole(loaded.proto) == made


@pytest.mark.usefixtures("lean_files")
@pytest.mark.parametrize("change", ["cut short", "overwritten"])
def test_a_file_that_is_changed_meanwhile_is_one_error_and_nothing_is_written(tmp_path, change) -> None:
    """As exporters do who write the next model to the same place, of the same size."""
    path = written(tmp_path / "m.onnx", model())
    os.utime(path, (1, 1))  # a file system may tell no writes apart that follow one another at once
    loaded = load_model(path, lean=True)
    if change == "cut short":
        os.truncate(path, 4096)
    else:
        other = bytearray(path.read_bytes())
        other[-4096:] = bytes(4096)
        path.write_bytes(other)
    with pytest.raises(ModelError, match="changed meanwhile"):
        rewriting.save(loaded.proto, tmp_path / "out.onnx", source=loaded)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.usefixtures("lean_files")
def test_a_model_comes_out_of_a_pipe_once(tmp_path) -> None:
    pipe, made = tmp_path / "pipe", model(8)
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(made.SerializeToString(),))
    writer.start()
    loaded = load_model(pipe, lean=True)
    writer.join()
    assert whole(loaded.proto) == made


def odd(name: str) -> onnx.ModelProto:
    """A model whose first weight is not as exporters write it."""
    made = model()
    first = made.graph.initializer[0]
    match name:
        case "said to be in the model":
            first.data_location = TensorProto.DEFAULT
        case "too few bytes":
            first.raw_data = first.raw_data[:-4]
        case "a number for each element":
            made.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [256, 256], [0.5] * 65536))
        case "a segment":
            first.segment.begin = 1
        case "a field of a later release":
            first.ParseFromString(first.SerializeToString() + b"\xf8\x3f\x01")
        case "no type":
            first.data_type = 0
        case "sizes below zero":
            first.dims[:] = [-256, -256]
        case "a later type":
            first.data_type = 999
    return made


@pytest.mark.usefixtures("lean_files")
@pytest.mark.parametrize("name", [
    "said to be in the model", "too few bytes", "a number for each element", "a segment", "a field of a later release",
    "no type", "sizes below zero", "a later type"])
def test_what_no_exporter_writes_is_read_as_it_is(name, tmp_path) -> None:
    path = written(tmp_path / "m.onnx", odd(name))
    assert outcome(path, lean=True) == outcome(path, lean=False)


@pytest.mark.usefixtures("lean_files")
def test_damaged_files_are_what_they_are_without_it(tmp_path) -> None:
    raw, path = model(8).SerializeToString(), tmp_path / "m.onnx"
    generator = np.random.default_rng(0)
    for turn in range(300):
        damaged = bytearray(raw)
        for _ in range(1 + turn % 3):
            damaged[generator.integers(len(raw) if turn % 2 else 400)] = generator.integers(256)
        path.write_bytes(damaged[:generator.integers(len(raw))] if turn % 5 == 0 else damaged)
        assert outcome(path, lean=True) == outcome(path, lean=False), turn


@pytest.mark.usefixtures("lean_files")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_models_that_were_trouble_are_what_they_are_without_it(path) -> None:
    assert outcome(path, lean=True) == outcome(path, lean=False)


def outcome(path: Path, lean: bool) -> object:
    """The model, or what is said against it."""
    try:
        loaded = load_model(path, lean)
    except ModelError as error:
        return str(error)
    return whole(loaded.proto).SerializeToString(deterministic=True)


@pytest.mark.usefixtures("lean_files")
@pytest.mark.parametrize("external", ["keep", "copy", "inline"])
def test_a_fused_model_of_a_lean_one_is_the_same(tmp_path, external) -> None:
    path = written(tmp_path / "m.onnx", made := model())
    done = optimise(path, OPTIONS)
    assert any(stretch(tensor) for tensor in done.lean.graph.initializer)
    saved = rewriting.save(done.lean, tmp_path / "lean.onnx", source=done.loaded, external=external).path
    assert onnx.load(saved) == done.model == optimise(made, OPTIONS).model
    assert rewriting.original(load_model(saved)).proto == made
