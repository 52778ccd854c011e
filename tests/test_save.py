"""Writing a model: external data, large models, and failures that leave nothing behind."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from full_disk import full_after
from onnx import TensorProto, helper, numpy_helper
from rewriting_models import chain, fuse, fused_nodes, random_feeds, region, run, same_bits

from onnxfuse.errors import ExternalDataError, OutputError
from onnxfuse.graph import LoadedModel, load_model
from onnxfuse.operators import load_graph
from onnxfuse.rewriting import rewrite, save, unfuse, wire
from onnxfuse.varint import varint

SIZE = 64


def with_weights() -> onnx.ModelProto:
    """A chain whose product has a weight of 16 kB, and one that two names share."""
    weight = np.random.default_rng(1).normal(size=(SIZE, SIZE)).astype(np.float32)
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["a"], name="A"),
        helper.make_node("Relu", ["a"], ["b"], name="B"),
        helper.make_node("MatMul", ["b", "w"], ["c"], name="C"),
        helper.make_node("MatMul", ["c", "v"], ["d"], name="D"),
        helper.make_node("Tanh", ["d"], ["y"], name="E"),
    ]
    held = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight.T.copy(), "v")]
    held.append(numpy_helper.from_array(np.linspace(-1, 1, SIZE, dtype=np.float32), "bias"))
    declare = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", SIZE]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "weights", declare[:1], declare[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def stored(tmp_path: Path) -> LoadedModel:
    """The model on disk with every initialiser in ``in/weights.bin``."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.onnx"
    onnx.save(with_weights(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return load_model(path)


@pytest.fixture
def fused(stored: LoadedModel) -> onnx.ModelProto:
    """Its fused form: two regions."""
    graph = load_graph(stored)
    return rewrite(stored.proto, graph, [region(graph, "a", "b"), region(graph, "y")]).model


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def locations(path: Path) -> set[str]:
    """External files that a model refers to."""
    model = onnx.load(path, load_external_data=False)
    return {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }


def check_runs(path: Path) -> None:
    """The saved model passes onnx's checker and gives the original's bits."""
    onnx.checker.check_model(str(path), full_check=True)
    feeds = random_feeds(with_weights())
    assert same_bits(run(str(path), feeds), run(with_weights(), feeds))


def test_the_bytes_are_those_of_onnx(tmp_path: Path) -> None:
    model = fuse(chain(), ["a", "b", "c"]).model
    saved = save(model, tmp_path / "m.onnx")
    assert saved.path == tmp_path / "m.onnx" and saved.data is None
    assert saved.path.read_bytes() == model.SerializeToString()
    assert list(files(tmp_path)) == ["m.onnx"]


def test_fields_that_onnx_does_not_know_survive(tmp_path: Path) -> None:
    unknown = chain()
    unknown.MergeFromString(varint(1000 << 3 | 2) + b"\x03new")
    save(unknown, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == unknown.SerializeToString()
    assert b"new" in unfuse(fuse(unknown, ["a", "b"]).model).SerializeToString()


def test_weights_in_the_same_folder_stay_where_they_are(stored: LoadedModel, fused: onnx.ModelProto) -> None:
    assert stored.folder is not None
    before = files(stored.folder)
    saved = save(fused, stored.folder / "model.fused.onnx", source=stored)
    assert saved.data is None
    assert files(stored.folder) == {**before, "model.fused.onnx": fused.SerializeToString()}
    assert len(saved.path.read_bytes()) < 8192
    check_runs(saved.path)


def test_weights_below_the_new_folder_are_referred_to(
    stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path
) -> None:
    saved = save(fused, tmp_path / "model.fused.onnx", source=stored)
    assert saved.data is None and locations(saved.path) == {"in/weights.bin"}
    check_runs(saved.path)


def test_weights_that_the_runtime_would_not_find_are_copied(
    stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    seen: list[tuple[int, int]] = []
    saved = save(fused, tmp_path / "out" / "m.onnx", source=stored, progress=lambda *done: seen.append(done))
    assert saved.data is not None and locations(saved.path) == {saved.data.name}
    assert sorted(files(tmp_path / "out")) == ["m.onnx", saved.data.name]
    assert seen == sorted(seen) and seen[-1] == (saved.data.stat().st_size,) * 2
    check_runs(saved.path)


def test_copies_on_request(stored: LoadedModel, fused: onnx.ModelProto) -> None:
    assert stored.folder is not None
    before = files(stored.folder)
    saved = save(fused, stored.folder / "m.onnx", source=stored, external="copy")
    assert saved.data is not None and locations(saved.path) == {saved.data.name}
    assert {name: content for name, content in files(stored.folder).items() if name in before} == before
    check_runs(saved.path)


def test_a_tensor_referred_to_twice_is_copied_once(stored: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    model = onnx.ModelProto()
    model.CopyFrom(stored.proto)
    second = model.graph.initializer.add()
    second.CopyFrom(next(tensor for tensor in model.graph.initializer if tensor.name == "w"))
    second.name = "w_again"
    saved = save(model, tmp_path / "out" / "m.onnx", source=stored)
    spans = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in onnx.load(saved.path, load_external_data=False).graph.initializer
    }
    assert spans["w"] == spans["w_again"] != spans["v"]
    assert saved.data is not None and saved.data.stat().st_size < 2.5 * SIZE * SIZE * 4


def test_inline(stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    saved = save(fused, tmp_path / "out" / "m.onnx", source=stored, external="inline")
    assert saved.data is None and list(files(tmp_path / "out")) == ["m.onnx"]
    assert locations(saved.path) == set()
    plain = {tensor.name: tensor for tensor in with_weights().graph.initializer}
    for tensor in onnx.load(saved.path).graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(plain[tensor.name]))
    check_runs(saved.path)


def test_external_constants_inside_nodes_move_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    model = with_weights()
    weight = model.graph.initializer[0]
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weight, name="W"))
    del model.graph.initializer[0]
    path = tmp_path / "in" / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=1024, convert_attribute=True, location="w.bin")
    stored = load_model(path)
    saved = save(stored.proto, tmp_path / "out" / "m.onnx", source=stored, external="inline")
    assert saved.data is None
    check_runs(saved.path)
    copied = save(stored.proto, tmp_path / "out" / "n.onnx", source=stored, external="copy")
    held = onnx.load(copied.path).graph.node[0].attribute[0].t
    np.testing.assert_array_equal(numpy_helper.to_array(held), numpy_helper.to_array(weight))


def test_external_weights_for_training_move_too(stored: LoadedModel, tmp_path: Path) -> None:
    """A graph for training holds a tensor of each kind."""
    begin = stored.proto.training_info.add().initialization
    begin.initializer.append(stored.proto.graph.initializer[0])
    begin.initializer.append(numpy_helper.from_array(np.arange(3), "inline"))
    (tmp_path / "out").mkdir()
    for external in ("copy", "inline"):
        saved = save(stored.proto, tmp_path / "out" / "m.onnx", source=stored, external=external)  # type: ignore[arg-type]
        held, own = onnx.load(saved.path, load_external_data=False).training_info[0].initialization.initializer
        for found, wanted in ((held, with_weights().graph.initializer[0]), (own, begin.initializer[1])):
            np.testing.assert_array_equal(
                numpy_helper.to_array(found, str(tmp_path / "out")), numpy_helper.to_array(wanted))


@pytest.mark.parametrize("external", ["keep", "inline"])
def test_a_model_too_large_for_one_file(
    external: str, stored: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "LIMIT", 20_000)
    (tmp_path / "out").mkdir()
    model = with_weights() if external == "keep" else stored.proto
    typed = model.graph.initializer[0] if external == "keep" else None
    if typed is not None:  # as float_data instead of raw bytes
        numbers = numpy_helper.to_array(typed)
        typed.CopyFrom(helper.make_tensor(typed.name, TensorProto.FLOAT, numbers.shape, numbers.ravel()))
    before = model.SerializeToString(deterministic=True)
    saved = save(model, tmp_path / "out" / "m.onnx", source=stored, external=external)  # type: ignore[arg-type]
    assert model.SerializeToString(deterministic=True) == before
    assert saved.data is not None and saved.data.parent == saved.path.parent
    assert saved.path.stat().st_size < 20_000 < saved.data.stat().st_size
    offsets = [
        int(entry.value)
        for tensor in onnx.load(saved.path, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    ]
    assert len(offsets) == 2 and all(offset % 4096 == 0 for offset in offsets)
    check_runs(saved.path)


def test_nodes_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT", 100)
    with pytest.raises(OutputError) as caught:
        save(chain(), tmp_path / "m.onnx")
    assert caught.value.message.startswith("The model does not fit in one file of 2 GB: ")
    assert caught.value.remedy == "Keep large tensors as initialisers instead of Constant nodes."
    assert files(tmp_path) == {}


def test_the_input_is_never_overwritten(stored: LoadedModel, fused: onnx.ModelProto) -> None:
    assert stored.folder is not None and stored.path is not None
    before = files(stored.folder)
    (stored.folder / "link.onnx").symlink_to(stored.path)
    for name in ("model.onnx", "weights.bin", "link.onnx"):
        with pytest.raises(OutputError) as caught:
            save(fused, stored.folder / name, source=stored)
        assert str(caught.value) == (
            "The output would overwrite the model that is being read, or its data.\n"
            f"--> {stored.folder / name}\n"
            "help: Choose another name with -o."
        )
    (stored.folder / "link.onnx").unlink()
    assert files(stored.folder) == before


def test_data_of_the_input_is_never_overwritten(stored: LoadedModel, tmp_path: Path) -> None:
    """Nor what other models in the folder name, though it has the name that the new data would have."""
    first = save(stored.proto, tmp_path / "m.onnx", source=stored, external="copy")
    assert first.data is not None
    held, inode = first.data.read_bytes(), first.data.stat().st_ino
    first.path.rename(tmp_path / "source.onnx")
    source = load_model(tmp_path / "source.onnx")
    saved = save(source.proto, tmp_path / "m.onnx", source=source, external="copy")
    assert saved.data == first.data.with_name(first.data.name.replace(".data", ".1.data"))
    assert (first.data.read_bytes(), first.data.stat().st_ino) == (held, inode)
    check_runs(saved.path)
    save(chain(), tmp_path / "m.onnx")
    assert first.data.exists() and not saved.data.exists()


def test_an_older_output_is_replaced(stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path) -> None:
    """With its data, and what killed writers left, but nothing else."""
    out = tmp_path / "out"
    out.mkdir()
    others = ("m.onnx.data", "m.onnx.0123456789abcdeg.data", "other.onnx.0123456789abcdef.data", ".m.onnx.1.part")
    for name in ("m.onnx", "m.onnx.0123456789abcdef.data", ".m.onnx.01234567.part", *others):
        (out / name).write_text("older")
    saved = save(fused, out / "m.onnx", source=stored)
    assert saved.data is not None
    assert sorted(files(out)) == sorted(["m.onnx", saved.data.name, *others])
    check_runs(saved.path)


def test_the_same_model_gets_the_same_names_and_bytes(stored: LoadedModel, tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        save(stored.proto, folder / "m.onnx", source=stored, external="copy")
        found.append(files(folder))
    assert found[0] == found[1]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "m.onnx").symlink_to(tmp_path / "real" / "m.onnx")
    for model in (chain(), with_weights()):
        assert save(model, tmp_path / "m.onnx").path == tmp_path / "real" / "m.onnx"
        assert (tmp_path / "m.onnx").is_symlink()
        assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString()
    assert sorted(files(tmp_path / "real")) == ["m.onnx"]


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OutputError, match="Too many levels of symbolic links"):
        save(chain(), tmp_path / "a")


def test_a_pipe_is_no_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="The output is a device or a pipe"):
        save(chain(), tmp_path / "m.onnx")
    assert stat.S_ISFIFO((tmp_path / "m.onnx").stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_permissions_stay(mode: int, stored: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("older")
    (tmp_path / "m.onnx").chmod(mode)
    saved = save(stored.proto, tmp_path / "m.onnx", source=stored, external="copy")
    assert saved.data is not None
    assert [stat.S_IMODE(path.stat().st_mode) for path in (saved.path, saved.data)] == [mode, mode]


def test_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        saved = save(chain(), tmp_path / "m.onnx")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(saved.path.stat().st_mode) == 0o640


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        save(chain(), tmp_path / "no" / "m.onnx")
    assert str(caught.value) == (
        f"The folder '{tmp_path / 'no'}' does not exist.\n"
        f"--> {tmp_path / 'no' / 'm.onnx'}\n"
        "help: Create it, or choose another."
    )


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        save(chain(), tmp_path)
    assert str(caught.value) == (
        f"The output is a folder.\n--> {tmp_path}\nhelp: Give the name of a file: -o FOLDER/model.fused.onnx."
    )


def test_an_unknown_word(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="external is 'move'; it can be 'keep', 'copy', 'inline'"):
        save(chain(), tmp_path / "m.onnx", external="move")  # type: ignore[arg-type]


FULL = "Free space there, or choose another folder with -o."


@pytest.mark.parametrize("room", [0, 5_000, 20_000, 33_000, 34_000])
def test_a_full_disk(
    room: int, stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        (out / name).write_text("older")
    before = files(tmp_path)
    full_after(room, monkeypatch)
    with pytest.raises(OutputError) as caught:
        save(fused, out / "m.onnx", source=stored)
    assert str(caught.value) == (
        "The model cannot be written: No space left on device. Nothing was left behind.\n"
        f"--> {out / 'm.onnx'}\nhelp: {FULL}"
    )
    assert files(tmp_path) == before


def test_a_failure_at_the_last_moment(
    stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if target.name == "m.onnx":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    for older in ({}, {"m.onnx": b"older", "m.onnx.data": b"older"}):
        for name, content in older.items():
            (out / name).write_bytes(content)
        with pytest.raises(OutputError) as caught:
            save(fused, out / "m.onnx", source=stored)
        assert str(caught.value) == (
            "The model cannot be written: Permission denied. Nothing was left behind.\n"
            f"--> {out / 'm.onnx'}\nhelp: Choose a folder that you may write to with -o."
        )
        assert files(out) == older


def test_an_interrupt_leaves_nothing(
    stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(fused, tmp_path / "out" / "m.onnx", source=stored, progress=interrupt)
    assert files(tmp_path / "out") == {}


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError) as caught:
            save(with_weights(), tmp_path / "m.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        "The model cannot be written: File too large. Nothing was left behind.\n"
        f"--> {tmp_path / 'm.onnx'}\nhelp: Raise the limit (ulimit -f), or choose another folder with -o."
    )
    assert files(tmp_path) == {}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 kB, where the tests may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    with pytest.raises(OutputError) as caught:
        save(with_weights(), small_disk / "m.onnx")
    assert caught.value.message == "The model cannot be written: No space left on device. Nothing was left behind."
    assert caught.value.remedy == FULL
    assert files(small_disk) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError) as caught:
        save(chain(), tmp_path / "m.onnx")
    assert caught.value.message == "The model cannot be written: Permission denied. Nothing was left behind."


def test_data_cut_short_since_it_was_loaded(stored: LoadedModel, fused: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert stored.folder is not None
    os.truncate(stored.folder / "weights.bin", 100)
    with pytest.raises(ExternalDataError) as caught:
        save(fused, tmp_path / "out" / "m.onnx", source=stored)
    assert caught.value.message.startswith("The external data file 'weights.bin' is too short: ")
    assert caught.value.remedy == "Copy the file again, in full."
    assert files(tmp_path / "out") == {}


def test_external_data_that_is_inlined_into_a_body(stored: LoadedModel) -> None:
    """A small constant of an external file is read into the body; unfuse puts it into the model."""
    onnx.save(chain(), stored.path, save_as_external_data=True, location="c.bin", size_threshold=0)  # type: ignore[arg-type]
    assert stored.path is not None
    loaded = load_model(stored.path)
    graph = load_graph(loaded)
    fused = rewrite(loaded.proto, graph, [region(graph, "a", "b", "c")]).model
    assert len(fused_nodes(fused)) == 1
    saved = save(fused, stored.path.with_name("f.onnx"), source=loaded)
    feeds = random_feeds(chain())
    expected = run(chain(), feeds)
    assert same_bits(run(str(saved.path), feeds), expected)
    back = save(unfuse(fused), stored.path.with_name("u.onnx"), source=loaded)
    assert same_bits(run(str(back.path), feeds), expected)
