"""A fused file keeps the options of the CUDA provider that it was planned for, and who runs it with others is told."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from cli_models import CHAIN, parse, run, write

import onnxfuse
from onnxfuse import verifying
from onnxfuse.cuda_options import PlannedOtherwiseWarning, is_on, planned_otherwise, switches
from onnxfuse.measuring import runner
from onnxfuse.rewriting import plan_record
from onnxfuse.rewriting.provenance import KEY, note_plan
from onnxfuse.runtime import nodes, sessions
from onnxfuse.wording import command_line

CONVOLUTION = """
g (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y)
<float[4, 4, 3, 3] w = {WEIGHTS}>
{
    c = Conv<pads = [1, 1, 1, 1]>(x, w)
    a = Sigmoid(c)
    b = Mul(a, c)
    d = Exp(b)
    y = Mul(d, b)
}
""".replace("WEIGHTS", ", ".join(["1.0"] * 144))

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def fused(folder: Path, text: str = CONVOLUTION, *options: str) -> Path:
    result = run("optimize", write(folder, text), "--target", "H100", "--no-verify", *options)
    assert result.exit_code == 0, result.output
    return folder / "model.fused.onnx"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which sessions are created and nothing is registered."""
    monkeypatch.setattr(sessions, "_gpu", lambda ordinal: SimpleNamespace(architecture="sm_90"))
    monkeypatch.setattr(sessions, "_preload", lambda module: None)
    monkeypatch.setattr(sessions, "register", lambda *_, **__: None)


def test_the_file_keeps_them_and_its_report_shows_them(tmp_path: Path) -> None:
    path = fused(tmp_path, CONVOLUTION, "--provider-option", "use_tf32=0", "--provider-option", "device_id=1")
    given = {"device_id": "1", "use_tf32": "0"}
    record = plan_record(onnx.load(path))
    assert record is not None and record.provider_options == given
    assert record.hangs_on == ("prefer_nhwc", "fuse_conv_bias")  # and no product of float32 is in it
    assert nodes.planned_for(path) == nodes.planned_for(path.read_bytes()) == (given, list(record.hangs_on))
    assert json.loads(run("report", path, "--json").output)["made"]["provider_options"] == given
    assert "planned for options of the CUDA provider: device_id=1, use_tf32=0\n" in run("report", path).output
    page = tmp_path / "page.html"
    assert run("report", path, "--html", page).exit_code == 0
    assert "strategy auto, for device_id=1, use_tf32=0." in page.read_text()


def test_a_model_without_convolutions_hangs_on_nothing(tmp_path: Path) -> None:
    path = fused(tmp_path, CHAIN)
    assert nodes.planned_for(path) == ({}, [])
    assert "options of the CUDA provider" not in run("report", path).output


def test_a_kernel_that_rounds_hangs_on_tf32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onnxfuse.reporting import held

    made = onnxfuse.optimize(parse(CHAIN), verify=False)
    (fusion,) = made.optimised.plan.fusions
    object.__setattr__(fusion.kernel, "rounds", True)
    assert list(held._hangs_on(made.optimised)) == ["use_tf32"]


def test_files_of_others_say_nothing(tmp_path: Path) -> None:
    model = parse(CHAIN)
    assert nodes.planned_for(model.SerializeToString()) == ({}, [])
    for text in ("[]", '{"provider_options": 3, "hangs_on": {}}'):
        del model.metadata_props[:]
        model.metadata_props.add(key=KEY, value=text)
        assert nodes.planned_for(model.SerializeToString()) == ({}, [])
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\xff\xff")
    assert list(sessions.planned_otherwise(broken, {"use_tf32": "0"})) == []
    assert list(sessions.planned_otherwise(tmp_path / "none.onnx", {})) == []


@pytest.mark.parametrize(("planned", "given", "told"), [
    ({}, {}, []),
    ({"use_tf32": "1"}, {"use_tf32": True}, []),
    ({"prefer_nhwc": "0"}, {"fuse_conv_bias": 0}, []),
    ({}, {"use_tf32": "0"}, ["m.onnx was planned for use_tf32=1 of the CUDA provider and runs with use_tf32=0: kernels "
                             "of fused nodes round operands of float32 products to TF32 all the same.  Plan its "
                             "original with --provider-option use_tf32=0, or run it as it was planned."]),
    ({"prefer_nhwc": "true", "fuse_conv_bias": "1", "use_tf32": "0"}, {}, [
        "what lies beside convolutions was left unfused for nothing", "biases of convolutions are kernels of their own",
        ]),
])
def test_what_is_said(planned: dict[str, Any], given: dict[str, Any], told: list[str]) -> None:
    hangs_on = ["use_tf32"] if "use_tf32" in given else ["prefer_nhwc", "fuse_conv_bias"]
    with command_line():
        found = list(planned_otherwise(planned, hangs_on, given, "m.onnx"))
    assert len(found) == len(told) and all(part in whole for part, whole in zip(told, found, strict=True)), found


def test_switches_are_those_that_plans_hang_on() -> None:
    assert switches({"device_id": "1", "use_tf32": "False", "prefer_nhwc": True}) == {
        "prefer_nhwc": "1", "use_tf32": "0"}
    assert is_on({}, "use_tf32") and not is_on({}, "prefer_nhwc")


@pytest.mark.usefixtures("gpu")
def test_a_session_warns(tmp_path: Path) -> None:
    path = fused(tmp_path, CONVOLUTION, "--disable", "products")
    with pytest.warns(PlannedOtherwiseWarning, match=r"^model\.fused\.onnx was planned for prefer_nhwc=0 .* with pro"):
        onnxfuse.session(path, [(CUDA, {"prefer_nhwc": "1"}), CPU])
    with pytest.warns(PlannedOtherwiseWarning, match="^the model was planned for fuse_conv_bias=0"):
        onnxfuse.session(path.read_bytes(), [CUDA, CPU], provider_options=[{"fuse_conv_bias": 1}, {}])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannedOtherwiseWarning)
        onnxfuse.session(path, [(CUDA, {"prefer_nhwc": "0", "use_tf32": "0"}), CPU])
        onnxfuse.session(path, [CPU])
        machine = SimpleNamespace(provider=CPU, providers=lambda options: [(CUDA, options), CPU])
        runner.create_session(str(path), machine, {"prefer_nhwc": "1"}, fused=True)  # type: ignore[arg-type]


def test_verify_runs_as_the_file_was_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = fused(tmp_path, CHAIN)
    model = onnx.load(path)
    record = plan_record(model)
    assert record is not None
    note_plan(model, record.__class__(**{**vars(record), "provider_options": {"use_tf32": "0", "device_id": "7"}}))
    onnx.save(model, path)
    asked: list[object] = []
    monkeypatch.setattr(verifying, "find_runner", lambda **given: asked.append(given))
    assert onnxfuse.verify(path).status == "same"
    monkeypatch.setattr("onnxfuse.delivery.find_runner", lambda **given: asked.append(given))
    onnxfuse.optimize(parse(CHAIN), provider_options={"prefer_nhwc": "1", "device_id": "7"})
    assert asked == [{"settings": {"use_tf32": "0"}}, {"settings": {"prefer_nhwc": "1"}}]
