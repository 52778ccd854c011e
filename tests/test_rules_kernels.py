"""Kernels that rules bring, in ``rules check``: compiled, run in the emulator, or what is said where that cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_models import ROOT, run
from emulator import EmulatorError

from onnxfuse.checking import Checked, check_rules
from onnxfuse.checking.kernels import NO_GPU
from onnxfuse.errors import KernelError

EXAMPLES = ROOT / "examples" / "rules"
WRONG = "Its kernel is wrong, on the CPU emulator: "

PTX = """__device__ float tanh_(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
"""


@pytest.fixture(autouse=True)
def two_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.checking.kernels.architectures", lambda: (75, 90))
    monkeypatch.setattr("onnxfuse.checking.kernels.find_runner", lambda: None)


def checked(folder: Path, old: str, new: str, before: str = "") -> Checked:
    """The shipped example with its kernel's text changed, or its rule's, behind what is put before it."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    texts = {name: (folder / name).read_text() for name in ("softcap.cu", "softcap.yaml")}
    (name,) = (name for name, text in texts.items() if old in text)
    (folder / name).write_text(before + texts[name].replace(old, new))
    return check_rules([folder])


@pytest.mark.parametrize(("old", "new", "message"), [
    ("tanhf", "sinf", f"{WRONG}output 0 of 1 on the example's inputs, variant user: "),
    ("i < count", "i <= count", f"{WRONG}on the example's inputs, variant user: kernel softcap, block (11, 0, 0), "
     "thread (184, 0, 0): read 0 bytes past the end of input i0 of 12000 bytes"),
    ("i64:", "i32:", f"{WRONG}on the example's inputs, variant user: kernel softcap, argument 3: np.int32(3000) given "
     "for an integer of 8 bytes"),
    ("= *cap;", "= cap;", "Its kernel does not compile for sm_90: kernel.cu(3): error: a value of type "),
    ("// y", '#include "/etc/hostname"\n// y', "Its kernel is refused: a kernel's text includes '\"/etc/hostname\"', "
     "and it may include headers of the CUDA toolkit alone."),
])
def test_what_is_wrong_with_a_kernel_is_told(old: str, new: str, message: str, tmp_path: Path) -> None:
    found = checked(tmp_path, old, new)
    assert found.kernels == {"softcap": "wrong"}
    first, *_ = found.failed
    assert first.fault is not None and first.fault.startswith(message), first.fault


def test_a_kernel_that_is_right_and_what_was_not_run(tmp_path: Path) -> None:
    found = checked(tmp_path, "// y", "#if __CUDA_ARCH__ < 900\n#error made for Hopper\n#endif\n// y")
    assert not found.failed and found.kernels == {"softcap": "right"}
    assert found.unrun == (("its kernel does not compile for sm_75", ("softcap",)), (NO_GPU, ("softcap",)))


def test_text_that_the_emulator_does_not_take_is_left_to_a_gpu(tmp_path: Path) -> None:
    found = checked(tmp_path, "tanhf", "tanh_", PTX)
    assert not found.failed and found.kernels == {"softcap": "not run"}
    told, other = (reason for reason, _ in found.unrun)
    assert told.replace("'", '"') == (  # which quotes hangs on the compiler
        'its kernel was not run in the emulator: kernel:1:44: error: attempt to use poisoned "asm"')
    assert other == NO_GPU


def test_machines_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_host() -> str:
        raise EmulatorError("a host C++ compiler is needed, and 'g++' does not run")

    def no_cuda() -> None:
        raise KernelError("no CUDA compiler: CuPy is not installed")

    monkeypatch.setattr("onnxfuse.checking.kernels.compiler_version", no_host)
    monkeypatch.setattr("onnxfuse.checking.kernels.binding", no_cuda)
    shutil.copy(EXAMPLES / "softcap.cu", tmp_path)
    shutil.copy(EXAMPLES / "softcap.yaml", tmp_path)
    (tmp_path / "bare.yaml").write_text("id: bare\nkind: fuse\nsummary: s.\nwhy: w.\npattern: y = Tanh(Relu(x))\n")
    done = run("rules", "check", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.split("\n\n")[1:] == [
        "not run:\n"
        "  bare: nothing was tried: the rule has no example\n"
        "  softcap: its kernel was not compiled: no CUDA compiler: CuPy is not installed\n"
        "  softcap: its kernel was not run in the emulator: a host C++ compiler is needed, and 'g++' does not run",
        "2 rules, 4 examples, 0 failed\n"]
