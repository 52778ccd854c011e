"""Small models and a runner for the tests of the commands."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx.parser
from click.testing import CliRunner, Result

from onnxfuse.cli import main

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: object, **environment: str) -> Result:
    """The command line in this process."""
    return _invoke(CliRunner(), arguments, environment)


def run_apart(*arguments: object, **environment: str) -> Result:
    """The same with the error stream apart."""
    return _invoke(apart(), arguments, environment)


def apart() -> CliRunner:
    """A runner that keeps what is written to the error stream apart; click before 8.2 must be asked to."""
    mixing = "mix_stderr" in inspect.signature(CliRunner).parameters
    return CliRunner(mix_stderr=False) if mixing else CliRunner()


def _invoke(runner: CliRunner, arguments: Sequence[object], environment: Mapping[str, str]) -> Result:
    return runner.invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "100", **environment})


def parse(text: str, opset: int = 17) -> onnx.ModelProto:
    """A model from the text of its graph."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def write(folder: Path, text: str, name: str = "model.onnx", opset: int = 17) -> Path:
    """The same as a file."""
    path = folder / name
    onnx.save(parse(text, opset), path)
    return path


CHAIN = """
g (float[batch, 4096] x, float[4096] w) => (float[batch, 4096] y) {
  half = Constant <value = float {0.5}> ()
  a = Mul(x, w)
  b = Tanh(a)
  c = Add(b, x)
  d = Sigmoid(c)
  y = Mul(d, half)
}
"""
"""One region of five pointwise nodes."""

PRODUCT = """
g (float[m, 64] x, float[64, 64] w) => (float[m, 64] y) {
  y = MatMul(x, w)
}
"""
"""Nothing to fuse."""


def encoder(layers: int = 1, hidden: int = 64, heads: int = 4, dtype: str = "float32") -> onnx.ModelProto:
    """The encoder of examples/encoder.py."""
    spec = importlib.util.spec_from_file_location("encoder", ROOT / "examples" / "encoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["encoder"] = module
    spec.loader.exec_module(module)
    model: onnx.ModelProto = module.encoder(module.Config(layers=layers, hidden=hidden, heads=heads, dtype=dtype))
    return model


def environment(**more: str) -> dict[str, str]:
    """For a process of its own: this checkout's package, plain output."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **more}
