"""A model of billions of weights: seconds and megabytes on a small machine, and no weight read or copied."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import sparse_decoder
from cli_models import CHAIN, environment, run, write

from onnxfuse.rewriting import read_fused

SECONDS, MEMORY = 60, 4 << 30
SMALL = sparse_decoder.Config(layers=2, hidden=512, heads=4, inner=1376, vocabulary=1000)
BILLIONS = sparse_decoder.Config()


def weights(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Where each weight outside the model lies."""
    return {tensor.name: {entry.key: entry.value for entry in tensor.external_data}
            for tensor in model.graph.initializer if tensor.external_data}


def optimised(folder: Path, config: sparse_decoder.Config, *options: str) -> tuple[str, float, int]:
    """What the command printed in a process that may hold 4 GB, its seconds of processors and its greatest size."""
    path = sparse_decoder.write(folder, config)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c",
         f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, {MEMORY}))\n"
         "from onnxfuse.cli import main; main()",
         "optimize", str(path), "--dim", "batch=1", "--dim", "sequence=1024", "--target", "H200", "--no-database",
         *options],
        env=environment(), text=True, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, seconds, 1024 * after.ru_maxrss


@pytest.mark.parametrize(("config", "options"), [
    (SMALL, ("--no-verify",)), pytest.param(BILLIONS, (), marks=pytest.mark.slow)], ids=["small", "billions"])
def test_weights_stay_where_they_lie(tmp_path: Path, config: sparse_decoder.Config, options: tuple[str, ...]) -> None:
    told, seconds, memory = optimised(tmp_path, config, *options)
    assert seconds < SECONDS and memory < MEMORY
    data = tmp_path / sparse_decoder.DATA
    assert data.stat().st_blocks == 0, "no byte of it was written"
    assert {path.name for path in tmp_path.iterdir()} == {data.name, "decoder.onnx", "decoder.fused.onnx"}
    before, after = (onnx.load(tmp_path / name, load_external_data=False) for name in
                     ("decoder.onnx", "decoder.fused.onnx"))
    assert weights(after) == weights(before) != {}
    # Two norms, a softmax, a gate and a rotary embedding or two in every layer.
    assert len(read_fused(after)) >= 5 * config.layers
    if config is BILLIONS:
        assert sum(int(place["length"]) for place in weights(after).values()) // 2 > 6_700_000_000
        assert f"not run ({NO_ROOM})" in told


NO_ROOM = "The model's weights take more memory than it may hold here."


@pytest.mark.parametrize("words", ["std::bad_alloc", "pthread_create failed, error msg: Cannot allocate memory"])
def test_too_little_memory_for_a_session_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def session(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    done = run("optimize", write(tmp_path, CHAIN), "--target", "H200", "--dim", "batch=64")
    assert done.exit_code == 0 and f"not run ({NO_ROOM})" in done.output, done.output
    assert (tmp_path / "model.fused.onnx").exists()
