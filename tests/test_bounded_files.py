"""What is read beside models, where it is anything: bounded, and one message with the file's name."""

from __future__ import annotations

import io
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_models import ROOT, run
from run_statistics_files import document

from onnxfuse.bounded import parse_json, read_bytes
from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.measuring import archive
from onnxfuse.measuring.database import find_database, open_database
from onnxfuse.measuring.inputs import read_inputs
from onnxfuse.measuring.run_profile import read_run_profile
from onnxfuse.planning.costs.hardware import read_profiles, resolve_profile
from onnxfuse.rules import cuda, load_rules
from onnxfuse.runtime.run_statistics import read_statistics

READERS: dict[str, Callable[[Path], Any]] = {
    "rules": lambda path: load_rules([path]),
    "a kernel": lambda path: load_rules([with_kernel(path)]),
    "profiles": read_profiles,
    "a target": lambda path: resolve_profile(f"{path}.yaml"),
    "inputs": read_inputs,
    "a profile of a run": read_run_profile,
    "statistics": read_statistics,
    "a database": find_database,
    "a database to write": lambda path: open_database(path),
}


def with_kernel(path: Path) -> Path:
    """The example's rule with a kernel file of this name."""
    rule = path.parent / "rule.yaml"
    text = (ROOT / "examples" / "rules" / "softcap.yaml").read_text()
    rule.write_text(text.replace("softcap.cu", path.name))
    return rule


def odd_file(folder: Path, kind: str) -> Path:
    path = folder / "odd"
    match kind:
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
            os.mkfifo(f"{path}.yaml")
        case "a device":
            path.symlink_to("/dev/zero")
        case "a loop":
            path.symlink_to(path)
        case "a long name":
            path = folder / ("n" * 300)
        case "no folder":
            path = folder / "none" / "odd"
        case "zeros":
            path.write_bytes(bytes(100))
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device", "a loop", "a long name", "no folder", "zeros"])
def test_odd_files_are_one_message(tmp_path: Path, kind: str, reader: str) -> None:
    path = odd_file(tmp_path, kind)
    if (kind, reader) == ("no folder", "a kernel"):
        path.parent.mkdir()
    if reader == "a database to write" and kind == "no folder":
        return  # it is made
    with pytest.raises(OnnxfuseError) as error:
        READERS[reader](path)
    assert path.name in str(error.value)
    assert "help: " in str(error.value)


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    assert len(read_bytes(tmp_path / "file", 1000)) == 1000
    with pytest.raises(OSError, match="it is larger than 999 bytes"):
        read_bytes(tmp_path / "file", 999)
    with pytest.raises(OSError, match="its name holds a NUL"):
        read_bytes("a\0b", 1)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "nul", b"\xff\xfe\xff"])
def test_json_of_any_kind(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_of_as_many_levels_with_every_python() -> None:
    """The parser itself takes a thousand levels before Python 3.14, and 50,000 since."""
    for begin, end, many in (("[", "]", 200), ('{"a":[', "]}", 100)):
        assert len(parse_json(begin * many + end * many)) == 1
        for more in (many + 1, 10_000):
            with pytest.raises(ValueError, match="it is nested too deep"):
                parse_json(begin * more + end * more)


# -- inputs -------------------------------------------------------------------------------------------------------


def npz(path: Path, entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, data in entries:
            made.writestr(name, data)
    return path


def npy(array: Any) -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array(made, np.asarray(array), allow_pickle=True)
    return made.getvalue()


def claiming(shape: str, descr: str = "'<f4'", data: bytes = b"") -> bytes:
    """An array whose header says what it likes."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


ONES = npy(np.ones((2, 3), np.float32))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("entries", "message"), [
    ([("x.txt", b"hello")], "its entry 'x.txt' is no array"),
    ([("x.npy", ONES), ("x.npy", ONES)], "the array 'x' is in it twice"),
    ([("x.npy", npy([{"a": 1}]))], "the array 'x' holds Python objects"),
    ([("x.npy", npy(np.zeros(2, [("a", "<f4")])))], "the array 'x' holds [('a', '<f4')], and no numbers"),
    ([("x.npy", npy(np.zeros(2, "<M8[s]")))], "the array 'x' holds datetime64[s], and no numbers"),
    ([("x.npy", claiming("(1000000000000,)"))], "the array 'x' is not as long as its header says"),
    ([("x.npy", claiming("(-1,)"))], "the array 'x' has a shape that no array has"),
    ([("x.npy", claiming("(0, 10000000000000000000000)"))], "the array 'x' has a shape that no array has"),
    ([("x.npy", claiming("(2,)", "('<f4', (1000000000,))", bytes(8)))], "the header of the array 'x' is damaged: "),
    ([("x.npy", claiming("(" * 3000))], "the header of the array 'x' is damaged: "),
    ([("x.npy", b"hello")], "the header of the array 'x' is damaged: "),
    ([("x.npy", b"")], "the header of the array 'x' is damaged: "),
    ([(f"{number}.npy", b"") for number in range(1001)], "it holds more than 1,000 arrays"),
])
def test_odd_arrays(tmp_path: Path, entries: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_inputs(npz(tmp_path / "x.npz", entries))
    assert str(error.value).startswith(f"The inputs cannot be read: {message}")
    assert str(error.value).endswith(
        f"\n--> {tmp_path}/x.npz\nhelp: Write them with numpy.savez(path, input_name=array, ...).")


def test_an_archive_that_expands_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGEST", 1_000_000)
    path = npz(tmp_path / "x.npz", [("x.npy", npy(np.zeros(150_000))), ("y.npy", npy(np.zeros(150_000)))])
    assert path.stat().st_size < 10_000
    with pytest.raises(ModelError, match="its arrays take more than 1,000,000 bytes"):
        read_inputs(path)


def test_a_directory_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "DIRECTORY", 70_000)
    path = npz(tmp_path / "x.npz", [("n" * 60_000 + f"{number}.npy", b"") for number in range(3)])
    with pytest.raises(ModelError, match="its directory is too long"):
        read_inputs(path)


def test_ways_of_packing_that_numpy_has_not(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the array 'x' is compressed in a way, or encrypted, as numpy writes none"):
        read_inputs(npz(tmp_path / "x.npz", [("x.npy", ONES)], zipfile.ZIP_LZMA))


def test_good_arrays_of_every_order_are_read(tmp_path: Path) -> None:
    arrays = {
        "x": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), "y": np.array(3, np.int64),
        "z": np.zeros((0, 5), np.float16), "a/b": np.array([True, False]), "t": np.array(["a", "bc"]),
        "b": np.ones(3, ">f4"),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found = read_inputs(tmp_path / "x.npz")
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype
                   for name, array in arrays.items())


# -- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration", ["1" + "0" * 400, "1e308", "1e999", "NaN", "-1", '"7"'])
def test_durations_that_are_none(tmp_path: Path, duration: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(f'[{{"cat": "Node", "name": "a_kernel_time", "dur": {duration}, "args": {{}}}}]')
    with pytest.raises(OnnxfuseError, match="The profile is damaged: event 0 has no name, duration or arguments"):
        read_run_profile(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000])
def test_records_of_any_depth(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    for read in (read_run_profile, read_statistics):
        with pytest.raises(OnnxfuseError, match=r"is no JSON|is not JSON"):
            read(path)


@pytest.mark.parametrize("more", [{"written": 10**15}, {"driver": 10**400}, {"started": -1}])
def test_statistics_of_impossible_numbers(tmp_path: Path, more: dict[str, int]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document(**more)))
    with pytest.raises(OnnxfuseError, match=f"The statistics file is damaged: {next(iter(more))}: "):
        read_statistics(path)


# -- rules and profiles -------------------------------------------------------------------------------------------

RULE = """\
id: my-rule
kind: fuse
summary: s
why: w
pattern: |
  {pattern}
"""


def statements(count: int, text: str) -> str:
    return "\n  ".join(f"a{number + 1} = {text.replace('?', f'a{number}')}" for number in range(count))


@pytest.mark.parametrize("pattern", [
    "y = " + "square(" * 50 + "x" + ")" * 50,
    statements(50, "any_of(square(?), Relu(?))"),
    statements(12, "product(?, ?, ?, ?)"),
    statements(400, "Neg(?)"),
])
def test_patterns_that_grow_without_end(tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "rule.yaml"
    path.write_text(RULE.replace("{pattern}", pattern))
    start = time.monotonic()
    with pytest.raises(OnnxfuseError) as error:
        load_rules([path])
    assert time.monotonic() - start < 10
    message, place, *_, remedy = str(error.value).splitlines()
    assert message == "The pattern leaves too many alternatives open, or nests too deep."
    assert place.startswith(f"--> {path}:") and remedy.startswith("help: Give the rule fewer alternatives")


def test_the_rules_that_ship_are_far_from_the_limits() -> None:
    assert load_rules([ROOT / "rules"]).all


@pytest.mark.parametrize("text", [
    "g (float[4] x) => (float[4] y) {" + " y = If <then_branch = t () => (float[4] z) {" * 20_000,
    "g (" + "seq(" * 100_000 + "float[4] x) => (float[4] y) { y = Relu(x) }",
    "g (float[4] x) => (float[4] y) <" + "(" * 100_000 + "> { y = Relu(x) }",
])
def test_a_deep_model_in_an_example_is_a_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rule.yaml"
    path.write_text(RULE.replace("{pattern}", "y = Relu(x)") + (
        f"examples:\n  - name: deep\n    expect: matched\n    model: |\n      {text}\n"))
    result = run("rules", "check", path)
    assert result.exit_code == 1
    assert "The model of the example 'deep' is wrong: it nests deeper than 40 brackets, at its line 2" in result.output


@pytest.mark.parametrize("source", ['"\\' * 200_000, "/*" * 200_000, "'" * 400_000, "f(" * 200_000, "{" * 400_000,
                                    "__global__ f(" * 60_000])
def test_kernel_files_of_nothing_but_marks_are_read_in_time(source: str) -> None:
    start = time.monotonic()
    assert cuda.fault(source, "f", 1, 0) is not None
    assert time.monotonic() - start < 5


def test_digits_may_be_grouped() -> None:
    source = 'extern "C" __global__ void f(float* x) { int n = 1\'000\'000; char c = \'{\'; }'
    assert cuda.fault(source, "f", 1, 0) is None


PROFILE = (ROOT / "rules" / "hardware" / "ada.yaml").read_text().split("\n\n")[0]


@pytest.mark.parametrize(("text", "message"), [
    ("a: &a [x, x]\nb: *a\n", "Hardware profiles may not hold anchors and aliases."),
    ("<<: {a: b}\n", 'hardware profile: unknown key "<<"'),
    ("[" * 5000, "The hardware profile is nested deeper than 12 levels."),
    ("# " + "x" * 1_000_001, "The hardware profile is larger than 1000000 bytes."),
    ("", "a hardware profile is a mapping with a name"),
    ("a: 1\x00", "The hardware profile holds a character that YAML does not allow (U+0000)."),
    (PROFILE.replace("name: L4", "name: 2026-11-23T00:00:00Z"), None),
    (PROFILE.replace("name: L4", "name: 80"), 'hardware profile: "name": input should be a valid string, not 80'),
    (PROFILE.replace("300", "1e400"), 'hardware profile "L4": "bandwidth_gb_s": input should be a finite number'),
    (PROFILE.replace("300", "1e308"), 'hardware profile "L4": "bandwidth_gb_s": input should be less than or equal to'),
    (PROFILE.replace("300", "5e-324"), 'hardware profile "L4": "bandwidth_gb_s": input should be at least 1e-09'),
    (PROFILE.replace("58", "9" * 400), 'hardware profile "L4": "multiprocessors": input should be a '),
])
def test_profiles_of_every_kind(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    if message is None:
        assert read_profiles(path)[0].name == "2026-11-23T00:00:00Z"
        return
    with pytest.raises(OnnxfuseError) as error:
        read_profiles(path)
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 1500
