"""Bad input through the command line: the exact message, exit code 1, and nothing written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from cli_models import CHAIN, ROOT, encoder, environment, parse, run, write

from onnxfuse import api, files
from onnxfuse.embedding import known_architectures
from onnxfuse.errors import InternalError, ModelError


def failed(folder: Path, *arguments: object, keep: set[str], code: int = 1) -> str:
    """What the command prints; ``keep`` are the files that may be there afterwards."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert {entry.name for entry in folder.iterdir()} == keep
    return result.output.replace(str(folder), "FOLDER")


def model_fails(folder: Path, content: bytes) -> str:
    (folder / "m.onnx").write_bytes(content)
    return failed(folder, "optimize", folder / "m.onnx", keep={"m.onnx"})


def with_external(location: str) -> bytes:
    model = parse("g (float[n, 4096] x) => (float[n, 4096] y) { a = Mul(x, w)\n y = Tanh(a) }")
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4096], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    model.graph.initializer.append(tensor)
    return model.SerializeToString()


def test_no_such_file(tmp_path: Path) -> None:
    assert failed(tmp_path, "optimize", tmp_path / "m.onnx", keep=set()) == (
        "error: There is no such file.\n"
        "--> FOLDER/m.onnx\n"
        "help: Check the path and the working directory.\n"
    )


def test_not_an_onnx_file(tmp_path: Path) -> None:
    assert model_fails(tmp_path, b"hello, this is no model\n") == (
        "error: The file is no ONNX model.\n"
        "--> FOLDER/m.onnx\n"
        "help: Give a file that onnx.save or an exporter wrote.\n"
    )


def test_truncated_file(tmp_path: Path) -> None:
    content = encoder().SerializeToString()
    output = model_fails(tmp_path, content[: len(content) // 2])
    first, *rest = output.splitlines()
    assert first.startswith("error: The file is cut short: its graph ends at byte ")
    assert first.endswith(f", and the file at {len(content) // 2}.")
    assert rest == ["--> FOLDER/m.onnx", "help: Copy or download the file again, in full."]


def test_missing_external_data(tmp_path: Path) -> None:
    assert model_fails(tmp_path, with_external("weights.bin")) == (
        "error: The external data file 'weights.bin' is missing.\n"
        "--> tensor 'w'\n"
        "help: Put the file back beside the model, at FOLDER/weights.bin.\n"
    )


def test_external_data_outside_the_folder(tmp_path: Path) -> None:
    assert model_fails(tmp_path, with_external("../weights.bin")) == (
        "error: The external data path '../weights.bin' leaves the model's folder.\n"
        "--> tensor 'w'\n"
        "help: Save the model again with its data beside it: "
        "onnx.save(model, path, save_as_external_data=True).\n"
    )


def test_cycle(tmp_path: Path) -> None:
    model = parse("g (float[n] x) => (float[n] y) { a = Add(x, b)\n b = Tanh(a)\n y = Neg(b) }")
    assert model_fails(tmp_path, model.SerializeToString()) == (
        "error: The graph has a cycle: 'Add -> a' -> 'Tanh -> b' -> 'Add -> a'.\n"
        "--> FOLDER/m.onnx, node 'Add -> a'\n"
        "help: Export the model again.\n"
    )


def test_unknown_opset(tmp_path: Path) -> None:
    model = parse("g (float[n] x) => (float[n] y) { y = Neg(x) }", opset=99)
    assert model_fails(tmp_path, model.SerializeToString()) == (
        f"error: The model's opset is 99, and onnx {onnx.__version__} knows up to "
        f"{onnx.defs.onnx_opset_version()}.\n"
        "--> FOLDER/m.onnx\n"
        "help: Install a newer onnx, or export the model with an older opset.\n"
    )


def test_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    model = parse("g (float[4] x, int64[4] i) => (float[4] y) { a = Neg(x)\n b = Exp(a)\n y = Add(b, i) }")
    assert model_fails(tmp_path, model.SerializeToString()) == (
        "error: ONNX Runtime refuses the model itself, before anything is fused: Type Error: Type parameter (T) of "
        "Optype (Add) bound to different types (tensor(float) and tensor(int64) in node ().\n"
        "--> FOLDER/m.onnx\n"
        "help: Mend the model first; onnxruntime.InferenceSession(path) shows the same.\n"
    )


def test_operators_of_the_users_own_are_not_the_models_fault(tmp_path: Path) -> None:
    model = parse("g (float[n, 64] x) => (float[n, 64] y) { a = Neg(x)\n b = Exp(a)\n y = Foo(b) }")
    model.graph.node[-1].domain = "com.acme"
    model.opset_import.add(domain="com.acme", version=1)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    result = run("optimize", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.output
    assert "verification: graph checked, not run" in result.output


RULE = (ROOT / "examples" / "rules" / "softcap.yaml").read_text()


@pytest.mark.parametrize(("old", "new", "message"), [
    ("summary:", "sumary:", (
        "error: Unknown key sumary.\n"
        "--> FOLDER/r.yaml:5:1\n"
        "  |\n"
        "5 | sumary: Soft-capped logits, cap * tanh(x / cap).\n"
        "  | ^^^^^^\n"
        "help: Did you mean summary?\n"
    )),
    ("y = Tanh(x / cap) * cap\n", "y = Tanh(x / cap * cap\n", (
        "error: '(' is never closed in the pattern.\n"
        "--> FOLDER/r.yaml:9:11\n"
        "  |\n"
        "9 |   y = Tanh(x / cap * cap\n"
        "  |           ^\n"
        "help: Add ')'.\n"
    )),
    ("y = Tanh(x", "y = Tahn(x", (
        "error: Unknown operator Tahn.\n"
        "--> FOLDER/r.yaml:9:7\n"
        "  |\n"
        "9 |   y = Tahn(x / cap) * cap\n"
        "  |       ^^^^\n"
        "help: Did you mean Tan?\n"
    )),
])
@pytest.mark.parametrize("command", ["optimize", "check"])
def test_wrong_rule(tmp_path: Path, old: str, new: str, message: str, command: str) -> None:
    write(tmp_path, CHAIN)
    (tmp_path / "softcap.cu").write_bytes((ROOT / "examples" / "rules" / "softcap.cu").read_bytes())
    rule = tmp_path / "r.yaml"
    rule.write_text(RULE.replace(old, new, 1))
    arguments = ["optimize", tmp_path / "model.onnx", "--rules", rule] if command == "optimize" else [
        "rules", "check", rule]
    assert failed(tmp_path, *arguments, keep={"model.onnx", "softcap.cu", "r.yaml"}) == message


@pytest.mark.parametrize(("arguments", "message"), [
    (["--dim", "bach=3"], (
        "error: The model has no dimension 'bach'.\n"
        "--> --dim bach=3\n"
        "help: Did you mean 'batch'? Its dimensions are: batch.\n"
    )),
    (["--disable", "gated-silo"], (
        "error: No rule is called gated-silo.\n"
        "--> --disable gated-silo\n"
        "help: Did you mean gated-silu?\n"
    )),
    (["--target", "H1000"], (
        'error: no hardware profile is called "H1000"\n'
        'help: did you mean "H100"?\n'
    )),
    (["-o", "FOLDER/none/out.onnx"], (
        "error: The folder 'FOLDER/none' does not exist.\n"
        "--> FOLDER/none/out.onnx\n"
        "help: Create it, or choose another.\n"
    )),
    (["--report", "FOLDER/none/report.json"], (
        "error: The folder 'FOLDER/none' does not exist.\n"
        "--> FOLDER/none/report.json\n"
        "help: Create it, or choose another.\n"
    )),
    (["-o", "FOLDER"], (
        "error: The output is a folder.\n"
        "--> FOLDER\n"
        "help: Give the name of a file.\n"
    )),
    (["-o", "FOLDER/model.onnx"], (
        "error: The output would overwrite the model that is being read, or its data.\n"
        "--> FOLDER/model.onnx\n"
        "help: Choose another name with -o.\n"
    )),
])
def test_options_that_do_not_fit(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write(tmp_path, CHAIN)
    real = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    code = 2 if arguments[0] != "-o" and arguments[0] != "--report" else 1
    assert failed(tmp_path, "optimize", path, *real, keep={"model.onnx"}, code=code) == message


def test_unknown_architecture(tmp_path: Path) -> None:
    output = failed(tmp_path, "optimize", write(tmp_path, CHAIN), "--embed", "sm_12", keep={"model.onnx"},
                    code=2)
    assert output == (
        "error: 'sm_12' is no GPU architecture that kernels can be embedded for.\n"
        "--> --embed sm_12\n"
        f"help: There are: {', '.join(known_architectures())}.\n"
    )


def test_unknown_rule_to_show() -> None:
    result = run("rules", "show", "silo")
    assert (result.exit_code, result.output) == (2, "error: No rule is called silo.\nhelp: Did you mean silu?\n")


def test_inputs_that_are_no_archive(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    output = failed(tmp_path, "optimize", path, "--inputs", path, keep={"model.onnx"})
    first, *rest = output.splitlines()
    assert first.startswith("error: The inputs cannot be read: ")
    assert rest == ["--> FOLDER/model.onnx", "help: Write them with numpy.savez(path, input_name=array, ...)."]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    (tmp_path / "closed").mkdir(mode=0o500)
    output = failed(tmp_path, "optimize", path, "-o", tmp_path / "closed" / "m.onnx", keep={"model.onnx", "closed"})
    assert output == (
        "error: The folder 'FOLDER/closed' is not writable.\n"
        "--> FOLDER/closed/m.onnx\n"
        "help: Choose a folder that you may write to.\n"
    )


def test_output_that_cannot_be_created(tmp_path: Path) -> None:
    name = "m" * 300 + ".onnx"
    output = failed(tmp_path, "optimize", write(tmp_path, CHAIN), "-o", tmp_path / name, keep={"model.onnx"})
    assert output == (
        "error: The file cannot be written: File name too long.\n"
        f"--> FOLDER/{name}\n"
        "help: Choose another name or folder.\n"
    )


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(data))


@pytest.mark.parametrize("choice", ["keep", "copy"])
def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    onnx.save(encoder(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=64)
    opened: Callable[..., Any] = open
    monkeypatch.setattr(files, "open", lambda *a, **k: Full(opened(*a, **k), 1000), raising=False)
    out = tmp_path / "out"
    out.mkdir()
    result = run("optimize", tmp_path / "m.onnx", "-o", out / "o.onnx", "--external-data", choice, "--no-verify")
    assert result.exit_code == 1
    assert result.output.replace(str(tmp_path), "FOLDER") == (
        "error: The model cannot be written: No space left on device. Nothing was left behind.\n"
        "--> FOLDER/out/o.onnx\n"
        "help: Free space there, or choose another folder with -o.\n"
    )
    assert list(out.iterdir()) == []


def test_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    """The same from the system itself: no file may grow past 4 kB in this process."""
    path = tmp_path / "m.onnx"
    onnx.save(encoder(), path)
    script = (
        "import resource, signal, sys\n"
        "from onnxfuse.cli import main\n"
        "import onnxfuse.api\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "optimize", str(path), "--no-verify"], env=environment(), text=True,
        capture_output=True, check=False,
    )
    assert done.returncode == 1
    assert done.stderr.replace(str(tmp_path), "FOLDER") == (
        "error: The model cannot be written: File too large. Nothing was left behind.\n"
        "--> FOLDER/m.fused.onnx\n"
        "help: Raise the limit (ulimit -f), or choose another folder with -o.\n"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


def test_an_unforeseen_error_names_the_file_and_what_a_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("onnxfuse.pipeline.load_rules", broken)
    path = write(tmp_path, CHAIN)
    result = run("optimize", path, "--least-gain", 1)
    assert result.exit_code == 1
    first, place, remedy, versions, command, rest = result.output.splitlines()
    assert first == "internal error: KeyError: 'oops'"
    assert re.fullmatch(rf"--> {path}, in pipeline.py:\d+", place)
    assert remedy == ("help: This is a fault of onnxfuse. Please report it with the file, or the smallest one that "
                      "shows it, and this:")
    assert re.fullmatch(r" +onnxfuse \S+, onnx \d\S+, onnxruntime\S* \d.*, numpy \d.*, Python 3\.\d+.*", versions)
    assert command.strip() == f"onnxfuse optimize {path} --least-gain 1"
    assert rest.strip() == "and what ONNXFUSE_DEBUG=1 in the environment shows: the traceback."
    assert "Traceback (most recent call last)" in run("optimize", path, ONNXFUSE_DEBUG="1").output
    with pytest.raises(InternalError, match="KeyError: 'oops'") as caught:
        api.optimize(path)
    assert isinstance(caught.value.__cause__, KeyError) and str(path) in str(caught.value.place)


def test_too_little_memory_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr("onnxfuse.pipeline.load_rules", broken)
    path = write(tmp_path, CHAIN)
    assert re.sub(r":\d+", "", run("optimize", path).output) == (
        f"internal error: There is not enough memory: Unable to allocate 9 TiB\n--> {path}, in pipeline.py\n"
        "help: Close what else runs, or work on a machine with more.\n"
    )


def test_names_that_a_terminal_would_obey_are_escaped() -> None:
    error = ModelError("Node 'a\x1b[31m' is wrong.", place="b\udcff", remedy="Rename\nit: é.")
    assert str(error) == "Node 'a\\x1b[31m' is wrong.\n--> b\\udcff\nhelp: Rename\\nit: é."


@pytest.mark.parametrize(("name", "message"), [
    ("x" * 300, "The file cannot be read: File name too long."),
    ("loop", "The file cannot be read: Too many levels of symbolic links."),
    ("file/m.onnx", "The file cannot be read: Not a directory."),
    ("odd\udcff", "There is no such file."),
    (".", "A folder is no ONNX model."),
])
@pytest.mark.parametrize("command", ["optimize", "report", "explain", "unfuse"])
def test_paths_that_lead_nowhere(command: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    more = ["-o", tmp_path / "out.onnx"] if command in ("optimize", "unfuse") else []
    output = failed(tmp_path, command, tmp_path / name, *more, keep={"loop", "file"})
    assert output.startswith(f"error: {message}\n--> FOLDER")
    assert "\nhelp: " in output


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    result = run("optimize", tmp_path / "a\0b")
    assert result.exit_code == 2 and "can be no file's name" in result.output
    with pytest.raises(ModelError, match="There can be no such file: embedded null byte"):
        api.optimize(tmp_path / "a\0b")


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.graph.load.LARGEST", 1000)
    assert run("optimize", "/dev/zero", "-o", "/tmp/never.onnx").output == (
        "error: The file has more than 2 GB, which no ONNX file can have.\n"
        "--> /dev/zero\n"
        "help: Save the model with its weights beside it: onnx.save(model, path, save_as_external_data=True).\n"
    )
