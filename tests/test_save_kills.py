"""Saving while processes die, and several at once: whoever looks finds one model with its own weights.

Every tensor of a model that is saved here holds one number, so that weights of two saves cannot be taken for those of
one.  ``--kills 2000`` kills at that many random moments, and ``--races 500`` saves as many pairs at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import files
from onnxfuse.graph import LoadedModel, load_model
from onnxfuse.rewriting import save

COUNT, LENGTH = 4, 4096


def model_of(number: int) -> onnx.ModelProto:
    """A sum of tensors that all hold a number."""
    weights = [numpy_helper.from_array(np.full(LENGTH, number, np.float32), f"w{place}") for place in range(COUNT)]
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [LENGTH])
    graph = helper.make_graph([helper.make_node("Sum", [tensor.name for tensor in weights], ["y"])], "numbers", [],
                              [value], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sources(folder: Path, numbers: tuple[int, ...]) -> dict[int, LoadedModel]:
    """Models on disk, each with its weights in a file."""
    found = {}
    for number in numbers:
        (folder / str(number)).mkdir(parents=True)
        path = folder / str(number) / "model.onnx"
        onnx.save(model_of(number), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        found[number] = load_model(path)
    return found


def number_in(path: Path) -> int:
    """The one number that all tensors of a saved model hold."""
    tensors = onnx.load(path).graph.initializer
    numbers = {float(each) for tensor in tensors for each in np.unique(numpy_helper.to_array(tensor))}
    assert len(tensors) == COUNT and len(numbers) == 1, f"weights of several saves: {numbers}"
    return int(numbers.pop())


def in_child(work: Callable[[], None], seconds: float | None = None) -> int:
    """The exit code of a process that does the work, or the signal that killed it after so many seconds, negative."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child.pid or 0, signal.SIGKILL)
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def check_after(out: Path, may: set[int], again: LoadedModel, number: int) -> None:
    """A model of one of these numbers stands there, and one more save leaves it and its data alone in the folder."""
    assert number_in(out / "m.onnx") in may
    saved = save(again.proto, out / "m.onnx", source=again, external="copy")
    assert number_in(out / "m.onnx") == number and saved.data is not None
    assert sorted(path.name for path in out.iterdir()) == ["m.onnx", saved.data.name]


STEPS = ("replace", "fsync", "fchmod", "open")
"""Calls of the system before each of which a writer dies."""


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_every_step(step: str, tmp_path: Path) -> None:
    models = sources(tmp_path / "in", (1, 2))
    out = tmp_path / "out"
    out.mkdir()
    save(models[1].proto, out / "m.onnx", source=models[1], external="copy")
    killed = 0
    while True:
        def work(place: int = killed) -> None:
            real, calls = getattr(os, step), 0

            def dies(*arguments: object, **named: object) -> object:
                nonlocal calls
                calls += 1
                if calls > place:
                    os._exit(9)
                return real(*arguments, **named)

            setattr(os, step, dies)
            save(models[2].proto, out / "m.onnx", source=models[2], external="copy")

        code = in_child(work)
        check_after(out, {2} if code == 0 else {1, 2}, models[1], 1)
        if code == 0:
            break
        assert code == 9
        killed += 1
    assert killed >= {"replace": 2, "fsync": 3, "fchmod": 2, "open": 1}[step]


def test_random_kills(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rng = Random(0)
    models = sources(tmp_path / "in", (1, 2))
    out = tmp_path / "out"
    out.mkdir()
    save(models[1].proto, out / "m.onnx", source=models[1], external="copy")

    def work() -> None:
        while True:
            for model in models.values():
                save(model.proto, out / "m.onnx", source=model, external="copy")

    for _ in range(pytestconfig.getoption("--kills")):
        assert in_child(work, rng.uniform(0.0, 0.05)) == -signal.SIGKILL
        assert number_in(out / "m.onnx") in models
    check_after(out, {1, 2}, models[2], 2)


def test_pairs_at_once(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Two processes save to one place, over and over; a third looks at it meanwhile."""
    models = sources(tmp_path / "in", (1, 2))
    out = tmp_path / "out"
    out.mkdir()
    races = int(pytestconfig.getoption("--races"))

    def work(number: int) -> None:
        for _ in range(races):
            saved = save(models[number].proto, out / "m.onnx", source=models[number], external="copy")
            assert saved.path.exists()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work, args=(number,)) for number in models]
    for child in children:
        child.start()
    looks = 0
    while any(child.is_alive() for child in children):
        # Not there yet, or replaced, with its data, since the model was read: the reader is told so.
        with contextlib.suppress(FileNotFoundError, onnx.checker.ValidationError, RuntimeError):
            assert number_in(out / "m.onnx") in models
            looks += 1
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0] and looks
    check_after(out, set(models), models[1], 1)


def test_what_is_being_written_is_not_swept(tmp_path: Path) -> None:
    """A save in the middle of another one, which comes to its end after it."""
    models = sources(tmp_path / "in", (1, 2))
    out = tmp_path / "out"
    out.mkdir()
    begun = False

    def second(done: int, of: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            save(models[2].proto, out / "m.onnx", source=models[2], external="copy")
            assert number_in(out / "m.onnx") == 2

    saved = save(models[1].proto, out / "m.onnx", source=models[1], external="copy", progress=second)
    assert begun and number_in(out / "m.onnx") == 1 and saved.data is not None
    assert sorted(path.name for path in out.iterdir()) == ["m.onnx", saved.data.name]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swept: who would know what is being written?"""
    def none(descriptor: int, how: int) -> None:
        raise OSError(files.NO_LOCKS[0], "no locks")

    monkeypatch.setattr(files.fcntl, "flock", none)
    models = sources(tmp_path / "in", (1, 2))
    for model in models.values():
        save(model.proto, tmp_path / "m.onnx", source=model, external="copy")
    assert number_in(tmp_path / "m.onnx") == 2
    assert len(list(tmp_path.glob("m.onnx.*.data"))) == 2


def test_who_holds_the_folder_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.05)
    model = sources(tmp_path / "in", (1,))[1]
    with files.alone_in(tmp_path) as alone:
        assert alone
        save(model.proto, tmp_path / "m.onnx", source=model, external="copy")
    assert number_in(tmp_path / "m.onnx") == 1
