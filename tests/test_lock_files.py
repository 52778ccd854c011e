"""Files that are no lock, wrong usage of the commands that read and write locks, and locks as data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import pytest
from cli_models import ROOT, encoder, run
from lock_models import NORM, layers, lines, optimised, written

import onnxfuse
from onnxfuse.locking import Lock, lock_text, read_lock


@pytest.fixture(scope="module")
def lock() -> Lock:
    """Of three layers with norms as operators, each one fused node."""
    return optimised(layers()).lock()


@pytest.fixture
def file(lock: Lock, tmp_path: Path) -> Path:
    return written(lock, tmp_path)


def broken_files() -> Iterator[tuple[str, Callable[[str], str], str, str]]:
    """A name, what becomes of a lock's text, and what is said of it and of where."""
    yield "no YAML", lambda text: text.replace("fusions:", "fusions: ["), "This is not YAML: ", "m.lock.yaml:"
    yield ("conflict", lambda text: text.replace("made:", "<<<<<<< ours\nmade:"), "This is not YAML: ",
           "m.lock.yaml:")
    yield "empty", lambda text: "", "The file is no lock of onnxfuse.", "m.lock.yaml"
    yield "a list", lambda text: "- 1\n", "The file is no lock of onnxfuse.", "m.lock.yaml"
    yield "two", lambda text: f"{text}---\n{text}", "The file is no lock of onnxfuse.", "m.lock.yaml"
    yield ("newer", lambda text: text.replace("lock: 1", "lock: 2").replace('onnxfuse: "', 'onnxfuse: "9.'),
           "The lock was written by onnxfuse 9.", "m.lock.yaml:3:7")
    yield ("version", lambda text: text.replace("lock: 1", "lock: one"),
           "The lock's version is a number from 1 on, not 'one'.", "m.lock.yaml:3:7")
    yield ("unknown", lambda text: text.replace("    times: 3", "    time: 3"),
           "The lock has an unknown key fusions.0.time.", "m.lock.yaml:25:5")
    yield ("missing", lambda text: text.replace("  target: H100\n", ""), "The lock has lost its key plan.target.",
           "m.lock.yaml:8:1")
    yield ("type", lambda text: text.replace("times: 3", "times: many"),
           "fusions.0.times of the lock: input should be a valid integer.", "m.lock.yaml:25:12")
    yield ("places", lambda text: text.replace("times: 3", "times: 2"),
           "fusions.0 of the lock: 2 are counted, and there are 3 places.", "m.lock.yaml:23:5")
    yield ("nodes", lambda text: text.replace("Add -> c1, ", ""),
           "fusions.0 of the lock: place 2 has 3 nodes, and the structure 4 parts.", "m.lock.yaml:23:5")
    yield ("structure", lambda text: text.replace("[Add, Add(1), LayerNormalization(2)]", "[Add, Add(7), Exp]"),
           "runtime.0 of the lock: a part of the structure reads one that does not stand before it.",
           "m.lock.yaml:31:5")
    yield ("strategy", lambda text: text.replace("  target: H100", "  target: H100\n  strategy: best"),
           "The lock asks for what this release cannot plan: there is no strategy \"best\"", "m.lock.yaml")
    yield ("hint", lambda text: text.replace("  target: H100", "  target: H100\n  hints: {mood: 1}"),
           "The lock asks for what this release cannot plan: there is no hint \"mood\"", "m.lock.yaml")
    yield "tags", lambda text: text.replace("H100", "!!python/name:os.system H100"), "Lock files may not hold tags", ""
    yield "references", lambda text: text.replace("made:", "made: &a"), "Lock files may not hold anchors", ""


@pytest.mark.parametrize(("change", "message", "place"), [case[1:] for case in broken_files()],
                         ids=[case[0] for case in broken_files()])
def test_files_that_are_no_lock(
    file: Path, tmp_path: Path, change: Callable[[str], str], message: str, place: str
) -> None:
    file.write_text(change(file.read_text()))
    code, told = lines(tmp_path, layers(), file)
    assert code == 1 and told[0].startswith(f"error: {message}"), told
    assert told[1].startswith(f"--> FOLDER/{place}") and told[-1].startswith("help: "), told
    assert "--lock FILE` writes" in told[-1] or "that `onnxfuse optimize" in told[-1] or "Did you" in told[-1], told


def test_whatever_line_is_lost_is_an_error_or_a_lock(lock: Lock, tmp_path: Path) -> None:
    whole = lock_text(lock).splitlines()
    path = tmp_path / "m.lock.yaml"
    for place in range(len(whole)):
        for changed in ([*whole[:place], *whole[place + 1:]], [*whole[:place], whole[place][3:], *whole[place + 1:]]):
            path.write_text("\n".join(changed))
            with contextlib.suppress(onnxfuse.LockError):
                assert isinstance(read_lock(path), Lock)


def test_a_file_that_is_not_there(file: Path, tmp_path: Path) -> None:
    file.unlink()
    assert lines(tmp_path, layers(), file) == (1, [
        "error: The lock file cannot be read: No such file or directory.", "--> FOLDER/m.lock.yaml",
        "help: `onnxfuse optimize MODEL --lock FILE` writes it anew."])


def test_another_model(file: Path, tmp_path: Path) -> None:
    assert lines(tmp_path, encoder(1), file) == (1, [
        "error: The lock is of another model: of 'g', and nothing that it names is in this one.",
        "--> FOLDER/m.lock.yaml",
        "help: Give the lock of this model; `onnxfuse optimize MODEL --lock FILE` writes one."])


@pytest.mark.parametrize("options", [
    ["--lock", "M"], ["--report", "M"], ["-o", "O", "--lock", "O"], ["--report", "R", "--lock", "R"]])
def test_a_file_for_two_things(tmp_path: Path, options: Sequence[str]) -> None:
    onnx.save(layers(number=1), tmp_path / "M")
    before = (tmp_path / "M").read_bytes()
    result = run("optimize", tmp_path / "M", *(word if word.startswith("-") else tmp_path / word for word in options))
    assert result.exit_code == 2 and "is another file of this command." in " ".join(result.output.split())
    assert [each.name for each in tmp_path.iterdir()] == ["M"] and (tmp_path / "M").read_bytes() == before


@pytest.mark.parametrize("options", [
    [], ["--lock", "F", "--database", "d", "--no-database"], ["--lock", "F", "--target", "H1000"],
    ["--lock", "F", "--disable", "nosuch"], ["--lock", "F", "--dim", "bach=3"], ["--lock", "-"],
])
def test_wrong_usage(file: Path, tmp_path: Path, options: Sequence[str]) -> None:
    onnx.save(layers(), tmp_path / "m.onnx")
    result = run("check", tmp_path / "m.onnx", *(file if word == "F" else word for word in options))
    assert result.exit_code == 2


# As data, and from Python


def test_the_data(lock: Lock, file: Path, tmp_path: Path) -> None:
    onnx.save(layers("mean-variance"), tmp_path / "m.onnx")
    result = run("check", tmp_path / "m.onnx", "--lock", file, "--no-database", "--json")
    data = json.loads(result.output)
    assert (result.exit_code, data["status"], data["fusions"], data["runtime"]) == (1, "lost", 3, 0)
    assert data["changes"] == ["opset of ai.onnx 17 -> 13"] and len(data["lost"]) == 3
    first = data["lost"][0]
    assert (first["kind"], first["rule"], first["structure"]) == ("fusion", "residual-layer-norm", NORM)
    assert first["edge"] == ["Add -> s0", "LayerNormalization -> y0"]
    assert {each["rule"] for each in data["new"]} == {"grow-pointwise", "bias-activation"}
    words = (ROOT / "docs" / "lock.md").read_text(encoding="utf-8")
    for name in (*data, *first, *data["new"][0]):
        assert f"`{name}`" in words, name


def test_every_key_of_the_file_is_documented(lock: Lock) -> None:
    words = (ROOT / "docs" / "lock.md").read_text(encoding="utf-8")
    content = lock.model_dump()
    entries = (content["made"], content["plan"], content["model"], content["fusions"][0],
               content["fusions"][0]["at"][0], content["runtime"][0], content["runtime"][0]["at"][0])
    for name in (*content, *(key for entry in entries for key in entry)):
        assert f"`{name}`" in words, name


def test_from_python(tmp_path: Path) -> None:
    result = optimised(layers(number=1))
    path = result.save_lock(tmp_path / "m.lock.yaml")
    assert read_lock(path) == result.lock()
    found = onnxfuse.check(layers(number=1), path, database=False)
    assert isinstance(found, onnxfuse.CheckResult)
    assert (found.holds, found.status, found.exit_code) == (True, "holds", 0)
    assert repr(found) == "<CheckResult holds: 1 fusion, and 0 of ONNX Runtime's own>"
    other = onnxfuse.check(layers(number=1), path, target="T4", database=False)
    assert "target H100 -> T4" in other.changes
    with pytest.raises(onnxfuse.LockError, match="is of another model"):
        onnxfuse.check(encoder(1), path, database=False)
