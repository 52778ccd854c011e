"""The tutorial's commands, pasted in order, work as they stand.

``ONNXFUSE_TORCH_PYTHON`` is a Python with PyTorch, onnxscript and what onnxfuse requires; without it another encoder of
the same inputs stands for the exported model.  ``ONNXFUSE_DIST`` is a folder with a wheel and a source archive, both of
which are then installed as the tutorial says; ``make test-docs`` sets both.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import doc_blocks
import onnx
import pytest
from cli_models import ROOT, encoder

from onnxfuse.rewriting import read_fused

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = doc_blocks.blocks(PAGE)
ANYWHERE, TORCH, DIST = "", os.environ.get("ONNXFUSE_TORCH_PYTHON"), os.environ.get("ONNXFUSE_DIST")


def environment(folder: Path, python: str | None) -> dict[str, str]:
    """For the blocks; without a Python they make their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if python is None:
        return {"PORT": port, "NO_COLOR": "1", "PYTHONPATH": ""}
    return {**doc_blocks.commands(folder / "bin", python, ROOT), "PORT": port}


def check(folder: Path, told: str) -> None:
    """What the tutorial says came of it."""
    assert "(3, 40, " in told and "{'last_hidden_state': (2, 8, " in told
    nodes = read_fused(onnx.load(folder / "model.fused.onnx", load_external_data=False))
    assert len(nodes) > 2 and all(node.architectures == ("compute_90", "sm_80", "sm_90") for node in nodes)
    assert (folder / "report.html").exists() and (folder / "repository" / "encoder" / "config.pbtxt").exists()


def test_every_block_is_run_or_says_where() -> None:
    assert {block.mark for block in BLOCKS} == {ANYWHERE, "install", "torch", "gpu", "docker"}
    assert {block.language for block in BLOCKS} == {"sh", "python"}


@pytest.mark.slow
@pytest.mark.skipif(TORCH is not None, reason="the whole tutorial is run")
def test_the_tutorial_from_an_exported_model_on(tmp_path: Path) -> None:
    onnx.save(encoder(layers=1, hidden=64), tmp_path / "model.onnx")
    chosen = [block for block in BLOCKS if block.mark == ANYWHERE]
    check(tmp_path, doc_blocks.run(PAGE, chosen, tmp_path, environment(tmp_path, sys.executable)))


@pytest.mark.slow
@pytest.mark.skipif(TORCH is None, reason="ONNXFUSE_TORCH_PYTHON is not set")
def test_the_tutorial_from_the_export_on(tmp_path: Path) -> None:
    chosen = [block for block in BLOCKS if block.mark in (ANYWHERE, "torch")]
    check(tmp_path, doc_blocks.run(PAGE, chosen, tmp_path, environment(tmp_path, TORCH)))


@pytest.mark.slow
@pytest.mark.skipif(DIST is None, reason="ONNXFUSE_DIST is not set")
@pytest.mark.parametrize("kind", ["wheel", "source archive"])
def test_the_tutorial_in_a_fresh_environment(tmp_path: Path, kind: str) -> None:
    assert DIST is not None
    only = {"PIP_NO_BINARY": "onnxfuse"} if kind == "source archive" else {"PIP_ONLY_BINARY": "onnxfuse"}
    chosen = [block for block in BLOCKS if block.mark in (ANYWHERE, "torch", "install")]
    check(tmp_path, doc_blocks.run(PAGE, chosen, tmp_path, {**environment(tmp_path, None), "DIST": DIST, **only}))
