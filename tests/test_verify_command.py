"""A fused file beside its original: what is said, the exit code, and the data.

Without a GPU outputs are compared on the CPU, and kernels run in the emulator where a test asks for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, ROOT, encoder, environment, parse, run, write
from emulated import EmulatedRunner
from onnx import helper, numpy_helper
from planted import changeable, damaged, kernels, plant

import onnxfuse
from onnxfuse import verifying
from onnxfuse.comparing import EXIT_CODES, NO_KERNELS
from onnxfuse.errors import ModelError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.verifying.closeness import Closeness, difference, measured
from onnxfuse.verifying.results import OutputDifference

SIZES = ("--dim", "batch=2", "--dim", "sequence=8")
DIMS = {"batch": 2, "sequence": 8}


@pytest.fixture(scope="module")
def fused() -> Optimised:
    """A transformer encoder of one layer in float32, everything fused that can be."""
    return optimise(encoder(1), Options(verify=False, least_gain=0.0, dims=DIMS))


@pytest.fixture
def files(fused: Optimised, tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "m.onnx", tmp_path / "m.fused.onnx"
    for path, model in zip(paths, (fused.loaded.proto, fused.model), strict=True):
        onnx.save(model, path)
    return paths


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "find_runner", lambda **_: None)


def lines(folder: Path, *arguments: object) -> tuple[int, list[str]]:
    """The exit code, and what is printed without the folder's name."""
    result = run("verify", *arguments)
    return result.exit_code, result.output.replace(str(folder), "FOLDER").splitlines()


# What is said, and the exit code


def test_a_sound_file_without_a_gpu(files: tuple[Path, Path], tmp_path: Path) -> None:
    count = len(read_fused(onnx.load(files[1])))
    code, told = lines(tmp_path, *files, *SIZES)
    assert (code, told[:2]) == (0, [
        f"FOLDER/m.onnx and FOLDER/m.fused.onnx ({count} fused nodes)",
        f"same: every output bit for bit without kernels; {NO_KERNELS}",
    ])
    assert told[2].strip().startswith("inputs: generated, seed 0 (batch=2, sequence=8); generated, seed 1 (")
    assert told[3].strip() == "without kernels: output 'last_hidden_state' is the same"
    assert lines(tmp_path, files[0], *SIZES) == (code, told)  # the file beside it


def test_a_file_alone_is_compared_with_the_original_in_it(files: tuple[Path, Path], tmp_path: Path) -> None:
    files[0].unlink()
    code, told = lines(tmp_path, files[1], *SIZES)
    assert code == 0 and told[0].startswith("the original in FOLDER/m.fused.onnx and FOLDER/m.fused.onnx (")
    assert told[1].startswith("same: ")


def test_kernels_that_must_run_and_do_not(files: tuple[Path, Path], tmp_path: Path) -> None:
    code, told = lines(tmp_path, *files, *SIZES, "--require-kernels")
    assert (code, told[1]) == (3, f"inconclusive: {NO_KERNELS}")


def test_kernels_in_the_emulator(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "find_runner", lambda **_: EmulatedRunner())
    count = len(read_fused(onnx.load(files[1])))
    code, told = lines(tmp_path, *files, *SIZES, "--require-kernels")
    assert (code, told[1]) == (0, "same: every output bit for bit without kernels; "
                                  f"{count} of {count} kernels right on the CPU emulator")
    (worst,) = [line.strip() for line in told if line.strip().startswith("worst kernel: ")]
    assert " of its output's largest magnitude, " in worst
    assert "% of what is allowed, output 0 of 1 on tiny, at [" in worst
    assert ", at [" in worst


def test_a_kernel_that_is_wrong_by_a_hundredth(
    fused: Optimised, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "find_runner", lambda **_: EmulatedRunner())
    op = kernels(fused.rewritten)[0]
    onnx.save(plant(fused.rewritten, op).model, files[1])
    nodes = [node.name for node in read_fused(fused.model) if node.op == op]
    code, told = lines(tmp_path, *files, *SIZES)
    total = len(read_fused(fused.model))
    assert (code, told[1]) == (1, f"different: {len(nodes)} of {total} kernels wrong on the CPU emulator; "
                                  "without kernels every output is the same")
    wrong = [line.strip() for line in told if line.strip().startswith("wrong kernel: ")]
    assert [line.split()[2] for line in wrong] == nodes
    assert "elements are wrong; the worst, at [" in wrong[0] and " instead of " in wrong[0]
    assert told[-1].strip() == ("help: onnxfuse bisect FOLDER/m.onnx FOLDER/m.fused.onnx  finds the fused nodes at "
                                "fault")


def test_a_function_that_was_changed_is_named(fused: Optimised, files: tuple[Path, Path], tmp_path: Path) -> None:
    op = changeable(fused.rewritten)[0]
    onnx.save(damaged(fused.rewritten, op).model, files[1])
    first = next(node for node in read_fused(fused.model) if node.op == op)
    code, told = lines(tmp_path, *files, *SIZES)
    assert code == 1
    assert told[1].startswith("different: output 'last_hidden_state' is off by ")
    assert told[1].endswith(f" without kernels; {NO_KERNELS}")
    (line,) = [line.strip() for line in told if line.strip().startswith("first to differ: ")]
    assert line.startswith(f"first to differ: {first.name} ({first.rule}): {first.outputs[0]!r} is off by ")
    # The functions hold the original: the file alone agrees with itself.
    assert lines(tmp_path, files[1], *SIZES)[0] == 0


def test_what_is_not_a_fused_nodes_is_not_laid_at_its_door(
    fused: Optimised, files: tuple[Path, Path], tmp_path: Path
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(fused.model)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    place = list(model.graph.node).index(product)
    model.graph.node.insert(place + 1, helper.make_node("Neg", [f"{product.output[0]}.old"], [product.output[0]]))
    product.output[0] += ".old"
    onnx.save(model, files[1])
    code, told = lines(tmp_path, *files, *SIZES)
    assert code == 1 and not any("first to differ" in line for line in told)


def test_a_small_change_of_a_function(fused: Optimised, files: tuple[Path, Path], tmp_path: Path) -> None:
    """The functions are the original's nodes: what differs by little differs, unless that is allowed."""
    model = onnx.ModelProto()
    model.CopyFrom(fused.model)
    changed = [attribute for function in model.functions for node in function.node for attribute in node.attribute
               if attribute.name == "epsilon"]
    for attribute in changed:
        attribute.f += 1e-6
    onnx.save(model, files[1])
    code, told = lines(tmp_path, *files, *SIZES)
    assert changed and code == 1 and told[1].startswith("different: output 'last_hidden_state' is off by ")
    code, told = lines(tmp_path, *files, *SIZES, "--atol", "1e-2")
    assert (code, told[1]) == (0, f"same: every output within 0.01 without kernels; {NO_KERNELS}")


WEIGHED = """
g (float[n, 64] x) => (float[n, 64] y) {
  scale = Constant <value = float {0.5}> ()
  a = Mul(x, scale)
  y = Tanh(a)
}
"""


@pytest.mark.parametrize("options, code, said", [
    ((), 0, "same: every output within 0.001 of the output's largest magnitude without kernels; no fused nodes"),
    (("--rtol", "1e-3"), 0, "same: every output within 0.001 * |original| without kernels; no fused nodes"),
    (("--atol", "1e-3", "--rtol", "1e-6"), 0,
     "same: every output within 0.001 + 1e-06 * |original| without kernels; no fused nodes"),
    (("--atol", "1e-7"), 1, "different: output 'y' is off by "),
    (("--atol", "0"), 1, "different: output 'y' is off by "),
])
def test_a_model_that_another_tool_made(tmp_path: Path, options: Sequence[str], code: int, said: str) -> None:
    first, second = (write(tmp_path, WEIGHED.replace("0.5", number), name)
                     for number, name in (("0.5", "m.onnx"), ("0.50005", "o.onnx")))
    found, told = lines(tmp_path, first, second, *options)
    assert (found, told[1][:len(said)]) == (code, said)
    words = "" if code else ", within what is allowed"
    assert any(line.endswith(f" elements differ{words}, on generated, seed 0 (n=1)") or
               f" elements differ{words}, on generated, seed " in line for line in told)


def test_several_sets_of_inputs(files: tuple[Path, Path], tmp_path: Path, fused: Optimised) -> None:
    """Files of arrays and ONNX test data, in their numbers' order; a set on which the original fails leaves it open."""
    folder = tmp_path / "real"
    folder.mkdir()
    ids, mask = np.zeros((2, 8), np.int64), np.ones((2, 8), np.int64)
    names = [value.name for value in fused.graph.inputs]
    np.savez(folder / "case_10.npz", **{names[0]: ids})
    np.savez(folder / "case_2.npz", **{names[0]: ids + 1})
    data = folder / "test_data_set_0"
    data.mkdir()
    for place, array in enumerate((ids, mask)[:len(names)]):
        onnx.save_tensor(numpy_helper.from_array(array), data / f"input_{place}.pb")
    code, told = lines(tmp_path, *files, "--inputs", folder)
    assert code == 0, told
    assert told[2].strip() == "inputs: case_2.npz; case_10.npz; test_data_set_0"
    np.savez(folder / "case_3.npz", **{names[0]: ids + 10**6})
    code, told = lines(tmp_path, *files, "--inputs", folder)
    assert (code, told[1]) == (3, "inconclusive: case_3.npz: left out")
    assert any(line.strip().startswith("note: case_3.npz: left out: A run of the model fails on case_3.npz: ")
               for line in told)


def test_weights_beside_each_file(tmp_path: Path) -> None:
    """Both files refer to weights of their own, in folders of their own, under one name."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        onnx.save(encoder(1), folder / "m.onnx", save_as_external_data=True, location="weights", size_threshold=256)
    path = onnxfuse.optimize(folders[1] / "m.onnx", dims=DIMS, verify=False).save(folders[1] / "m.fused.onnx")
    found, told = lines(tmp_path, folders[0] / "m.onnx", path, *SIZES)
    assert found == 0, told
    data = bytearray((folders[1] / "weights").read_bytes())
    data[:4096] = np.ones(1024, np.float32).tobytes()
    (folders[1] / "weights").write_bytes(data)
    found, told = lines(tmp_path, folders[0] / "m.onnx", path, *SIZES)
    assert found == 1 and told[1].startswith("different: output 'last_hidden_state' is off by "), told


# Models that do not run


def test_a_model_whose_own_run_fails_is_no_fault_of_the_fusion(tmp_path: Path) -> None:
    path = write(tmp_path, """
        g (float[50, 4096] table, int64[n] ids) => (float[n, 4096] y) {
          none = Constant <value = int64 {0}> ()
          far = Constant <value = int64 {1000}> ()
          nothing = Mul(ids, none) beyond = Add(nothing, far)
          a = Gather(table, beyond) b = Exp(a) c = Tanh(b) y = Neg(c) }""")
    fused = optimise(path, Options(verify=False, least_gain=0.0))
    onnx.save(fused.model, tmp_path / "model.fused.onnx")
    code, told = lines(tmp_path, path)
    assert (code, told[1][:45]) == (3, "inconclusive: the models were not run: A run ")


def test_operators_that_the_provider_lacks_are_no_difference(tmp_path: Path) -> None:
    """A file of another tool's for the GPU alone: nothing is known of it here."""
    first = write(tmp_path, "g (float[2, 4, 4, 8] x) => (float[2, 4, 4, 8] y) { y = Relu(x) }")
    other = parse("""g (float[2, 4, 4, 8] x) => (float[2, 4, 4, 8] y) {
        y = com.microsoft.GroupNorm <groups = 2, activation = 0> (x, w, w) }""")
    other.opset_import.add(domain="com.microsoft", version=1)
    other.graph.initializer.append(numpy_helper.from_array(np.ones(8, np.float32), "w"))
    onnx.save(other, tmp_path / "o.onnx")
    code, told = lines(tmp_path, first, tmp_path / "o.onnx")
    assert code == 3 and told[1].startswith("inconclusive: the models were not run: "), told


def test_a_fused_model_that_the_runtime_refuses(fused: Optimised, files: tuple[Path, Path], tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(fused.model)
    op = changeable(fused.rewritten)[0]
    function = next(function for function in model.functions if function.name == op)
    place, node = next((place, node) for place, node in enumerate(function.node) if node.op_type == "Add")
    function.node.insert(place, helper.make_node("Cast", [node.input[0]], ["whole"], to=onnx.TensorProto.INT64))
    function.node[place + 1].input[0] = "whole"
    onnx.save(model, files[1])
    code, told = lines(tmp_path, *files, *SIZES)
    assert code == 1 and told[1].startswith(
        "different: ONNX Runtime refuses the fused model where it takes the original: "), told


def renamed_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "z"
    model.graph.node[-1].output[0] = "z"


def wider_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1


@pytest.mark.parametrize("change, message", [
    (renamed_output, "error: The models have other outputs: the original 'y' (float of 2 axes), the fused model 'z' "
                     "(float of 2 axes)."),
    (wider_input, "error: The models have other inputs: the original 'x' (float of 2 axes), the fused model 'x' "
                  "(float of 3 axes)."),
])
def test_models_that_do_not_belong_together(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    first = write(tmp_path, WEIGHED)
    other = parse(WEIGHED)
    change(other)
    onnx.save(other, tmp_path / "o.onnx")
    assert lines(tmp_path, first, tmp_path / "o.onnx") == (1, [
        message, "--> FOLDER/o.onnx", "help: Give the model that the file was fused from."])


def test_a_file_that_was_fused_from_another_model(fused: Optimised, tmp_path: Path) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(fused.loaded.proto)
    name = read_fused(fused.model)[0].outputs[0]
    for node in other.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{each}.renamed" if each == name else each for each in names]
    onnx.save(other, tmp_path / "o.onnx")
    onnx.save(fused.model, tmp_path / "f.onnx")
    code, told = lines(tmp_path, tmp_path / "o.onnx", tmp_path / "f.onnx")
    assert code == 1 and told[0].endswith(f" speaks of {name!r}, and the original model has no such value.")


# Wrong usage


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    assert lines(tmp_path, write(tmp_path, CHAIN)) == (1, [
        "error: There is no fused model beside this one.", "--> FOLDER/model.fused.onnx",
        "help: Make it, onnxfuse optimize model.onnx, or name the file."])


def test_the_two_the_other_way_round(files: tuple[Path, Path], tmp_path: Path) -> None:
    assert lines(tmp_path, *files[::-1]) == (1, [
        "error: The original is a fused model itself.", "--> FOLDER/m.fused.onnx",
        "help: Give the original first; or the fused model alone, to compare it with the original that it holds."])


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x"])
@pytest.mark.parametrize("option", ["--rtol", "--atol"])
def test_limits_that_are_none(files: tuple[Path, Path], option: str, value: str) -> None:
    result = run("verify", *files, option, value)
    assert result.exit_code == 2 and f"Invalid value for '{option}': " in result.output


def empty(folder: Path) -> None:
    (folder / "note.txt").write_text("nothing")


def no_tensor(folder: Path) -> None:
    (folder / "input_0.pb").write_bytes(b"hello, this is no tensor")


def one_too_many(folder: Path) -> None:
    onnx.save_tensor(numpy_helper.from_array(np.zeros(1)), folder / "input_7.pb")


def elsewhere(folder: Path) -> None:
    tensor = onnx.TensorProto(dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    (folder / "input_0.pb").write_bytes(tensor.SerializeToString())


@pytest.mark.parametrize("make, message", [
    (empty, "error: The folder holds no inputs."),
    (no_tensor, "error: The inputs cannot be read: it is no tensor."),
    (one_too_many, "error: There is no input 7: the model has 2."),
    (elsewhere, "error: The inputs cannot be read: its numbers are in another file."),
])
def test_folders_that_hold_no_inputs(
    files: tuple[Path, Path], tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    code, told = lines(tmp_path, *files, "--inputs", folder)
    assert (code, told[0]) == (1, message)
    assert told[1].startswith("--> FOLDER/data") and told[2].startswith("help: ")


# As data, and from Python


def test_the_data(files: tuple[Path, Path]) -> None:
    result = run("verify", *files, *SIZES, "--json")
    data = json.loads(result.output)
    assert result.exit_code == 0
    assert set(data) == {"original", "fused", "status", "summary", "allowed", "inputs", "runner", "kernels_run",
                         "outputs", "outputs_with_kernels", "first_difference", "nodes", "notes"}
    assert (data["status"], data["kernels_run"], data["runner"]) == ("same", False, None)
    assert data["outputs"] == [{
        "output": "last_hidden_state", "elements": 0, "error": 0.0, "beyond": 0, "where": [], "got": "", "wanted": "",
        "inputs": "generated, seed 0 (batch=2, sequence=8)"}]
    assert {node["verdict"] for node in data["nodes"]} == {"not run"}


def test_from_python(fused: Optimised, files: tuple[Path, Path]) -> None:
    result = onnxfuse.verify(fused.loaded.proto, fused.model, dims=DIMS)
    assert isinstance(result, onnxfuse.VerifyResult)
    assert (result.same, result.status, result.exit_code) == (True, "same", 0)
    assert (result.original, result.fused) == ("the original model", "the fused model")
    assert repr(result) == f"<VerifyResult same: every output bit for bit without kernels; {NO_KERNELS}>"
    assert onnxfuse.verify(fused.model, dims=DIMS).same
    name = fused.graph.inputs[0].name
    sets = [{name: np.zeros((1, size), np.int64)} for size in (4, 8)]
    assert [str(each) for each in onnxfuse.verify(*files, inputs=sets).verification.runs] == [
        "your inputs 1", "your inputs 2"]
    assert not onnxfuse.verify(*files, inputs=sets[0], require_kernels=True).same
    with pytest.raises(ValueError, match="rtol is nan; it must be a number of zero or more"):
        onnxfuse.verify(*files, rtol=float("nan"))
    with pytest.raises(ValueError, match="needs its fused form"):
        onnxfuse.verify(fused.loaded.proto)
    with pytest.raises(ModelError, match="The model has no input 'q'"):
        onnxfuse.verify(*files, inputs={"q": np.zeros(1)})


def test_outputs_with_kernels_decide(fused: Optimised, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for the device: the whole model runs there too, and one output is made to differ."""
    monkeypatch.setattr(verifying, "find_runner", lambda **_: EmulatedRunner())
    monkeypatch.setattr(sys.modules["onnxfuse.verifying.kernels"], "CUDA", "CPUExecutionProvider")
    result = onnxfuse.verify(fused.loaded.proto, fused.model, dims=DIMS)
    device = result.verification.whole.device
    assert result.same and [(entry.output, entry.elements) for entry in device] == [("last_hidden_state", 0)]
    off = OutputDifference("last_hidden_state", 5, 0.02, 3, (0, 1), "1.02", "1.0", "generated")
    whole = replace(result.verification.whole, device=(off,))
    spoiled = replace(result, verification=replace(result.verification, whole=whole))
    assert (spoiled.status, spoiled.exit_code) == ("different", EXIT_CODES["different"])
    assert spoiled.summary.startswith("different: output 'last_hidden_state' is off by 2.0e-02 of its largest "
                                      "magnitude at [0, 1]: 1.02 instead of 1.0 with kernels; ")


def test_the_script_for_the_gpu_rehearses() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "gpu" / "check_verify.py"), "--rehearse"],
                          capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" spoiled: different: ") == 1
    assert " spoiled in optimize: 1 nodes taken back, 5 left; graph verified, 5 kernels verified" in done.stdout


# How far outputs are off


def test_where_an_output_is_farthest_off() -> None:
    wanted = np.array([[1.0, -4.0], [2.0, np.nan]], np.float32)
    got = wanted.copy()
    got[0, 1] = -4.5
    found = measured("y", got, wanted, Closeness(atol=0.1))
    assert (found.elements, found.error, found.beyond, found.where) == (1, 0.125, 1, (0, 1))
    assert (found.got, found.wanted) == ("-4.5", "-4.0")
    assert measured("y", got, wanted, Closeness(rtol=0.2)).beyond == 0
    assert measured("y", got, wanted, Closeness(share=0.2)).beyond == 0


@pytest.mark.parametrize("got, wanted, elements, beyond", [
    (np.array([2**62 + 1]), np.array([2**62]), 1, 1),
    (np.array(3.0), np.array(3.5), 1, 1),
    (np.array([np.inf, 1.0]), np.array([np.inf, 1.0]), 0, 0),
    (np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]), 1, 1),
    (np.array([np.nan, 1.0]), np.array([0.0, 1.0]), 1, 1),
    (np.array([-0.0]), np.array([0.0]), 0, 0),
    (np.array([1 + 2j]), np.array([1 + 3j]), 1, 1),
    (np.zeros((0, 3)), np.zeros((0, 3)), 0, 0),
    (np.zeros(3, np.float32), np.zeros(3, np.float64), 3, 3),
    (np.array([True, False]), np.array([True, True]), 1, 1),
])
def test_what_differs(got: np.ndarray, wanted: np.ndarray, elements: int, beyond: int) -> None:
    found = measured("y", got, wanted)
    assert (found.elements, found.beyond) == (elements, beyond)


def test_what_is_no_array() -> None:
    assert difference("y", ["a", "b"], ["a", "b"]) is None
    found = difference("y", {1: 2}, {1: 3})
    assert found is not None and (found.elements, found.beyond) == (1, 1)
    text = np.array(["a"], object)
    assert difference("y", text, text.copy()) is None
