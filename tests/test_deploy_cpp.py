"""The C++ program of examples/cpp on the CPU, where the functions of fused nodes run; tests/gpu/check_deploy.py has it
run their kernels."""

from __future__ import annotations

from pathlib import Path

import cpp_program
import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import encoder, parse

import onnxfuse
from onnxfuse.rewriting import read_fused

pytestmark = pytest.mark.skipif(cpp_program.lacking() != "", reason=cpp_program.lacking())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpp_program.build(tmp_path_factory.mktemp("cpp"))


def test_a_fused_model_gives_the_bits_that_python_gets(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.fused.onnx"
    result = onnxfuse.optimize(encoder(), dims={"batch": 4, "sequence": 32}, target="H200", embed=["sm_90"],
                               verify=False, database=False)
    result.save(path)
    assert read_fused(result.model)
    random = np.random.default_rng(0)
    inputs = {"input_ids": random.integers(0, 1000, (4, 32)), "attention_mask": random.integers(0, 2, (4, 32))}
    (wanted,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    (found,) = cpp_program.run(program, path, inputs).values()
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 3, 4)], ids=str)
def test_arrays_of_every_type_go_in_and_out(program: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "model.onnx"
    inputs = cpp_program.write_copies(path, shape)
    cpp_program.check_copies(inputs, cpp_program.run(program, path, inputs))


def test_mistakes_are_told(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parse("g (float[n] x) => (float[n] y) { y = Relu(x) }"), path)
    with pytest.raises(RuntimeError, match=r"x\.npy: missing, or no \.npy file"):
        cpp_program.run(program, path, {})
    with pytest.raises(RuntimeError, match=r"x\.npy: not in C's order"):
        cpp_program.run(program, path, {"x": np.asfortranarray(np.ones((2, 3), np.float32))})
    with pytest.raises(RuntimeError, match=r"x\.npy: elements of type <c8"):
        cpp_program.run(program, path, {"x": np.ones(2, np.complex64)})
    with pytest.raises(RuntimeError, match="no-such-library"):
        cpp_program.run(program, path, {"x": np.ones(2, np.float32)}, Path("/no-such-library.so"))
