"""Olive and Optimum run what docs/integrations.md says, each in an environment of its own; the Dockerfile is read.

``ONNXFUSE_OLIVE_PYTHON`` and ``ONNXFUSE_OPTIMUM_PYTHON`` are Pythons with these packages and with what onnxfuse
requires; ``make test-integrations`` makes both.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from pathlib import Path

import doc_blocks
import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, ROOT, write

from onnxfuse.rewriting import read_fused

PAGE = ROOT / "docs" / "integrations.md"
OLIVE, OPTIMUM = (os.environ.get(f"ONNXFUSE_{name}_PYTHON") for name in ("OLIVE", "OPTIMUM"))
QUIET = {"OLIVE_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_the_workflow_of_the_page_is_the_example() -> None:
    (block,) = (block for block in doc_blocks.blocks(PAGE, "Olive") if block.language == "json")
    assert block.text == (ROOT / "examples" / "olive.json").read_text()


def olive(tmp_path: Path, workflow: dict[str, object] | None = None) -> None:
    """Run the page's commands on a workflow, the example by default."""
    assert OLIVE is not None
    text = (ROOT / "examples" / "olive.json").read_text() if workflow is None else json.dumps(workflow)
    (tmp_path / "olive.json").write_text(text)
    environment = {**doc_blocks.commands(tmp_path / "bin", OLIVE, ROOT), **QUIET}
    doc_blocks.run(PAGE, doc_blocks.blocks(PAGE, "Olive"), tmp_path, environment)


def same_bits(one: Path, other: Path) -> bool:
    """Whether two models of ``CHAIN``'s inputs give the same on the CPU."""
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=(3, 4096)).astype(np.float32), "w": random.normal(size=4096).astype(np.float32)}
    first, second = (onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
                     for path in (one, other))
    return np.array_equal(first, second)


@pytest.mark.skipif(OLIVE is None, reason="ONNXFUSE_OLIVE_PYTHON is not set")
def test_olive_runs_the_example(tmp_path: Path) -> None:
    model = write(tmp_path, CHAIN)
    olive(tmp_path)
    (node,) = read_fused(onnx.load(tmp_path / "fused" / "model.onnx"))
    assert node.architectures == ("compute_90", "sm_90")
    assert same_bits(model, tmp_path / "fused" / "model.onnx")


@pytest.mark.skipif(OLIVE is None, reason="ONNXFUSE_OLIVE_PYTHON is not set")
def test_olive_runs_the_pass_after_one_of_its_own_on_weights_outside(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    model = onnx.load(write(tmp_path / "from", CHAIN))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.linspace(-1, 1, 4096, dtype=np.float32), "w"))
    model.graph.input.pop(1)
    onnx.save(model, tmp_path / "from" / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    olive(tmp_path, {
        "input_model": {"type": "OnnxModel", "model_path": "from/model.onnx"},
        "passes": {"names": {"type": "AddOliveMetadata", "graph_name": "chain"},
                   "fuse": {"type": "Onnxfuse", "dims": {"batch": 64}, "target": "H200", "verify": False}},
        "output_dir": "fused",
    })
    (path,) = (tmp_path / "fused").rglob("*.onnx")
    fused = onnx.load(path)  # its weights lie beside it
    assert len(read_fused(fused)) == 1 and fused.graph.name == "chain"
    assert [info.name for info in fused.graph.input] == ["x"]


EXPORT = """
import torch, transformers
from optimum.onnxruntime import ORTModelForFeatureExtraction
torch.manual_seed(0)
config = transformers.BertConfig(vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                                 intermediate_size=256)
transformers.BertModel(config).eval().save_pretrained("torch")
ORTModelForFeatureExtraction.from_pretrained("torch", export=True).save_pretrained("bert")
"""

COMPARE = """
import torch
from optimum.onnxruntime import ORTModelForFeatureExtraction
given = {"input_ids": torch.arange(32).reshape(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
one, other = (ORTModelForFeatureExtraction.from_pretrained("bert", file_name=name)(**given).last_hidden_state
              for name in ("model.onnx", "model.fused.onnx"))
assert (one - other).abs().max() < 1e-5 * one.abs().max()
"""


@pytest.mark.skipif(OPTIMUM is None, reason="ONNXFUSE_OPTIMUM_PYTHON is not set")
def test_optimum_runs_a_fused_model(tmp_path: Path) -> None:
    assert OPTIMUM is not None
    environment = {**doc_blocks.commands(tmp_path / "bin", OPTIMUM, ROOT), **QUIET}
    for text in (EXPORT, None, COMPARE):
        if text is None:
            told = doc_blocks.run(PAGE, doc_blocks.blocks(PAGE, "Optimum"), tmp_path, environment)
            assert told.endswith("torch.Size([2, 16, 128])\n")
            continue
        done = subprocess.run(["python", "-c", text], cwd=tmp_path, env={**os.environ, **environment}, text=True,
                              capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(read_fused(onnx.load(tmp_path / "bert" / "model.fused.onnx"))) > 2


def test_the_dockerfile_names_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in lines} <= {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT"}
    stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
    for _, rest in (line for line in lines if line[0] == "COPY"):
        stage = re.match(r"--from=(\w+)", rest)
        assert stage[1] in stages if stage else (ROOT / rest.split()[0]).exists(), rest
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extra = dict(line[1].split("=", 1) for line in lines if line[0] == "ARG")["EXTRA"]
    assert extra in settings["options.extras_require"]
    (entry,) = (json.loads(rest) for word, rest in lines if word == "ENTRYPOINT")
    assert settings["options.entry_points"]["console_scripts"].split()[0] == entry[0]
    ignored = (ROOT / ".dockerignore").read_text().split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout.split()
    assert not {name.split("/")[0] for name in tracked} & set(ignored), "what the wheel is built from"
