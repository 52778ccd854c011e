"""Commands and code of the README and of the pages run as they stand; see doc_commands.py for what runs where."""

from __future__ import annotations

import re
from pathlib import Path

import doc_blocks
import pytest
from cli_models import ROOT
from doc_commands import CHOSEN, PAGES, follow, prepare

import onnxfuse


@pytest.mark.parametrize("page", CHOSEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_code_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNXFUSE_DATABASE", str(tmp_path / "measurements.sqlite"))
    prepare(tmp_path)
    follow(page, gpu=False)


def test_the_first_rule_does_what_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(ROOT / "docs" / "writing-rules.md", gpu=False)
    named, apart = (Path("my-rules", f"{name}.yaml") for name in ("squared-relu", "square-apart"))
    for rules, fused in (([], ["grow-pointwise"]), ([named], ["squared-relu"]), ([named, apart], ["squared-relu"] * 2)):
        report = onnxfuse.optimize("squares.onnx", rules=rules, dims={"batch": 512}, verify=False, compile=False,
                                   target="H100", database=False).report
        assert [each.rule for each in report.fusions] == fused


def test_what_needs_a_gpu_is_marked_and_known() -> None:
    """A page that has nothing else to run still counts for tests/gpu/check_docs.py."""
    marked = [block for page in CHOSEN for block in doc_blocks.blocks(page) if block.mark == "gpu"]
    assert len(marked) > 2 and {block.language for block in marked} == {"sh", "python"}


def test_code_in_other_languages_is_taken_from_the_examples() -> None:
    """What a page quotes of C++ stands in the program that is built."""
    whole = (ROOT / "examples" / "cpp" / "deploy.cc").read_text()
    quoted = [block for page in PAGES for block in doc_blocks.blocks(page) if block.language == "cpp"]
    calls = {call for block in quoted for call in re.findall(r"\b(Ort::\w+|\w+(?=\())", block.text)}
    assert {"Ort::SessionOptions", "RegisterCustomOpsLibrary", "AppendExecutionProvider_CUDA_V2"} <= calls
    assert all(call in whole for call in calls - {"session"}), calls
