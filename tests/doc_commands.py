"""What the README and the pages of documentation say to type, run as it stands, in order, on an encoder.

A block with a comment above it needs what the comment says and is run elsewhere: ``gpu`` by tests/gpu/check_docs.py,
``headers`` by test_deploy_cpp.py, ``dotnet`` by test_deploy_csharp.py, ``install`` and ``torch`` by test_tutorial.py;
``docker`` and ``production`` (a program that serves under load) by nobody.  Of the rest a line is left out where its
command needs a GPU, or installs.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import doc_blocks
import numpy as np
import onnx
from cli_models import ROOT, encoder, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "rules" / "README.md"]

ELSEWHERE = {"headers", "dotnet", "install", "torch", "docker", "production"}
OWN_TESTS = {"tutorial.md", "integrations.md"}
NOT_OURS = {"make", "pip"}
GPU_COMMANDS = {"bench", "tune"}
SETTLED_BY_A_GPU = "--require-kernels"

CHOSEN = [page for page in PAGES if page.name not in OWN_TESTS
          and any(block.language in ("sh", "python", "yaml") for block in doc_blocks.blocks(page))]
"""Pages with something to run that have no test of their own."""


def prepare(folder: Path) -> None:
    """What the pages speak of: a model and its fused form, rules of the user's own, real inputs."""
    model = encoder(layers=1, hidden=64)
    last = next(node for node in reversed(model.graph.node) if node.op_type == "Add")
    last.name = "node_Add_12"
    onnx.save(model, folder / "model.onnx")
    shutil.copytree(ROOT / "examples" / "rules", folder / "my-rules")
    (folder / "real").mkdir()
    ids = np.arange(64).reshape(2, 32)
    np.savez(folder / "real" / "first.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    done = run("optimize", folder / "model.onnx", "--no-verify")
    assert done.exit_code == 0, done.output


def follow(page: Path, gpu: bool) -> None:
    """Run a page's blocks in the current folder, which must have been prepared.

    Raises:
        AssertionError: a command failed, or a block has a mark that nobody knows.
    """
    names: dict[str, object] = {}
    for block in doc_blocks.blocks(page):
        place = f"{page.name}:{block.line}"
        if block.mark.startswith("file "):
            file = Path(block.mark.removeprefix("file "))
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
            continue
        assert block.mark in {"", "part", "gpu", *ELSEWHERE}, place
        if block.mark and not (gpu and block.mark == "gpu"):
            continue
        if block.language == "sh":
            _shell(block.text, page.name, gpu)
        elif block.language == "python":
            exec(compile(block.text, place, "exec"), names)
        elif block.language == "yaml":
            Path("page.yaml").write_text(block.text)
            done = run("rules", "check", "page.yaml")
            assert done.exit_code == 0, f"{place}\n{done.output}"


def _shell(text: str, page: str, gpu: bool) -> None:
    """Lines of commands, in this process."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] in NOT_OURS:
            continue
        assert words[0] == "onnxfuse", f"{page}: {line}"
        if not gpu and (words[1] in GPU_COMMANDS or SETTLED_BY_A_GPU in words):
            continue
        done = run(*words[1:])
        # What doctor finds is the machine's affair.
        assert done.exit_code == 0 or words[1] == "doctor", f"{page}: {line}\n{done.output}"
