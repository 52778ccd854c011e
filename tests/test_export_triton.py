"""Model repositories for Triton Inference Server, read by the schema that Triton's own client carries."""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, PRODUCT, parse, run, write
from fused_models import add_one, chain
from google.protobuf import descriptor_pool, message_factory, text_format
from onnx import TensorProto, helper
from schema_graphs import seeded

from onnxfuse.rewriting import read_fused
from onnxfuse.runtime import library_path

IMAGE = b"\x7fELF not run here"


def read_configuration(folder: Path) -> Any:
    """config.pbtxt as a message of Triton's schema; fields that it lacks are errors."""
    try:
        files = importlib.metadata.files("tritonclient") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tritonclient is not here")
    (module,) = (file for file in files if str(file).endswith("tritonclient/grpc/model_config_pb2.py"))
    # The module itself is for one release of protobuf and not the newest; the schema in it is for all.
    (call,) = (node for node in ast.walk(ast.parse(module.read_text()))
               if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
               and node.func.attr == "AddSerializedFile")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(ast.literal_eval(call.args[0]))
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
    return text_format.Parse((folder / "config.pbtxt").read_text(), kind())


def name_of(value: Any, field: str) -> str:
    """An enumeration's value by name."""
    return str(value.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[getattr(value, field)].name)


def tensors(config: Any) -> dict[str, tuple[str, list[int]]]:
    """Element types and sizes of inputs and outputs."""
    return {each.name: (name_of(each, "data_type"), list(each.dims)) for each in (*config.input, *config.output)}


def embedded(folder: Path, **images: bytes) -> Path:
    """A fused model of two nodes, x to y, with images as given."""
    path = folder / "model.fused.onnx"
    onnx.save(chain(add_one(images=images), 2), path)
    return path


def test_a_model_goes_through_both_commands(tmp_path: Path) -> None:
    model = write(tmp_path, CHAIN)
    done = run("optimize", model, "--dim", "batch=64", "--target", "H200", "--embed", "sm_80,sm_90", "--no-verify")
    assert done.exit_code == 0, done.output
    done = run("export-triton", tmp_path / "model.fused.onnx", "--name", "chain", "--output", tmp_path / "models")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "models" / "chain"
    assert done.output == f"1 fused node for compute_90, sm_80, sm_90; written: {folder}\n"
    config = read_configuration(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("chain", "onnxruntime", 0)
    assert tensors(config) == {
        "x": ("TYPE_FP32", [-1, 4096]), "w": ("TYPE_FP32", [4096]), "y": ("TYPE_FP32", [-1, 4096])}
    assert [name_of(group, "kind") for group in config.instance_group] == ["KIND_GPU"]
    (library,) = config.model_operations.op_library_filename
    assert Path(library) == folder / "libonnxfuse.so"
    assert Path(library).read_bytes() == library_path().read_bytes()
    assert ctypes.CDLL(library).RegisterCustomOps
    served = onnx.load(folder / "1" / "model.onnx")
    assert [node.architectures for node in read_fused(served)] == [("compute_90", "sm_80", "sm_90")]
    assert sorted(path.name for path in folder.rglob("*")) == ["1", "config.pbtxt", "libonnxfuse.so", "model.onnx"]


def test_the_server_may_see_the_repository_elsewhere_and_batch(tmp_path: Path) -> None:
    done = run("export-triton", embedded(tmp_path, sm_90=IMAGE), "--name", "a-b.c_1", "--output", tmp_path / "r",
               "--server-path", "/models", "--max-batch", 8, "--version", 3)
    assert done.exit_code == 0, done.output
    config = read_configuration(tmp_path / "r" / "a-b.c_1")
    assert list(config.model_operations.op_library_filename) == ["/models/a-b.c_1/libonnxfuse.so"]
    assert config.max_batch_size == 8 and config.HasField("dynamic_batching")
    assert (tmp_path / "r" / "a-b.c_1" / "3" / "model.onnx").exists()
    # Each request has one element of the batch and no axis besides: Triton wants one, which a reshape takes away.
    for each in (*config.input, *config.output):
        assert list(each.dims) == [1] and each.HasField("reshape") and not each.reshape.shape


def test_another_version_stays_and_the_same_is_replaced(tmp_path: Path) -> None:
    for number in (1, 2, 2):
        done = run("export-triton", embedded(tmp_path, sm_90=IMAGE), "--name", "m", "--output", tmp_path, "--version",
                   number)
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["1", "2", "config.pbtxt", "libonnxfuse.so"]


@pytest.mark.parametrize("name", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT8", "INT16", "UINT16",
                                  "INT32", "UINT32", "INT64", "UINT64", "BOOL", "STRING"])
def test_every_type_that_triton_has_is_its_own(tmp_path: Path, name: str) -> None:
    kind = getattr(TensorProto, name)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["s"], ["t"])], "g",
        [helper.make_tensor_value_info("x", kind, ["n", 3]), helper.make_tensor_value_info("s", kind, [])],
        [helper.make_tensor_value_info("y", kind, ["n", 3]), helper.make_tensor_value_info("t", kind, [])])
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]),
              tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    assert done.output == f"nothing is fused in this model; written: {tmp_path / 'm'}\n"
    config = read_configuration(tmp_path / "m")
    short = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64"}.get(name, name)
    assert tensors(config) == {"x": (f"TYPE_{short}", [-1, 3]), "y": (f"TYPE_{short}", [-1, 3]),
                               "s": (f"TYPE_{short}", [1]), "t": (f"TYPE_{short}", [1])}
    assert not config.HasField("model_operations"), "nothing needs the library"


def test_sizes_of_outputs_are_those_that_the_runtime_infers(tmp_path: Path) -> None:
    """Triton compares them one by one."""
    model = write(tmp_path, """
g (float[4, 6] x, float[n, 5] z) => (float[a, b] y, float w, float[c, d] v) {
  shape = Constant <value = int64[2] {8, 3}> ()
  y = Reshape(x, shape)
  w = ReduceSum<keepdims = 0>(x)
  v = Concat<axis = 0>(z, z)
}
""")
    done = run("export-triton", model, "--name", "m", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    told = tensors(read_configuration(tmp_path / "m"))
    session = onnxruntime.InferenceSession(tmp_path / "m" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    for each in session.get_outputs():
        assert told[each.name][1] == ([size if isinstance(size, int) else -1 for size in each.shape] or [1]), each.name
    assert told["y"][1] == [8, 3]
    served = onnx.load(tmp_path / "m" / "1" / "model.onnx")
    assert [size.dim_value for size in served.graph.output[0].type.tensor_type.shape.dim] == [8, 3]


def test_an_output_of_a_rank_that_the_file_does_not_say_is_no_scalar(tmp_path: Path) -> None:
    model = parse("g (float[n, 4] x, int64[2] shape) => (float[a, b] y, float z) { y = Reshape(x, shape) "
                  "z = ReduceMax<keepdims = 0>(y) }")
    for info in model.graph.output:
        info.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    told = tensors(read_configuration(tmp_path / "m"))
    assert (told["y"][1], told["z"][1]) == ([-1, -1], [1])
    session = onnxruntime.InferenceSession(tmp_path / "m" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [len(each.shape) for each in session.get_outputs()] == [2, 0]


@pytest.mark.parametrize("seed", [9049, 9074, 9076, 9082, 9135])
def test_the_runtime_may_infer_more_than_we_do(tmp_path: Path, seed: int) -> None:
    onnx.save(seeded(seed).model, tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    if "has no elements" in done.output:
        pytest.skip("what these releases of onnx draw is a model that Triton does not serve")
    assert done.exit_code == 0, done.output
    told = tensors(read_configuration(tmp_path / "m"))
    session = onnxruntime.InferenceSession(tmp_path / "m" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert {each.name: told[each.name][1] for each in session.get_outputs()} == {
        each.name: [size if isinstance(size, int) else -1 for size in each.shape] or [1]
        for each in session.get_outputs()}


def test_a_model_that_the_cpu_has_no_kernels_for_is_served_by_what_is_known(tmp_path: Path) -> None:
    model = parse("g (float[n, 4] x) => (float[a, b] y) { t = Relu(x) y = Transpose(t) }")
    model.graph.node[0].op_type, model.graph.node[0].domain = "OnADevice", "somewhere"
    model.opset_import.add(domain="somewhere", version=1)
    onnx.save(model, tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert tensors(read_configuration(tmp_path / "m"))["y"] == ("TYPE_FP32", [-1, -1])


def test_weights_outside_come_along(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model = parse("g (float[m, 64] x) => (float[m, 64] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    (tmp_path / "here").mkdir()
    onnx.save(model, tmp_path / "here" / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    done = run("export-triton", tmp_path / "here" / "model.onnx", "--name", "m", "--output", tmp_path / "there")
    assert done.exit_code == 0, done.output
    (tmp_path / "here" / "weights").unlink()
    session = onnxruntime.InferenceSession(tmp_path / "there" / "m" / "1" / "model.onnx",
                                           providers=["CPUExecutionProvider"])
    x = np.ones((2, 64), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight, rtol=1e-4)


def test_names_are_quoted(tmp_path: Path) -> None:
    model = parse(PRODUCT)
    hostile = 'a"b\\c\n}\u202e é \x1b'
    for value in (model.graph.input[0], *model.graph.node):
        if isinstance(value, onnx.NodeProto):
            value.input[0] = hostile
        else:
            value.name = hostile
    onnx.save(model, tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert hostile in tensors(read_configuration(tmp_path / "m"))


SEQUENCE = """
g (seq(float[n]) x) => (float[m] y) {
  y = ConcatFromSequence<axis = 0>(x)
}
"""


@pytest.mark.parametrize(("text", "options", "words"), [
    (SEQUENCE, (), "The input 'x' is no tensor but a sequence, which Triton Inference Server does not serve."),
    ("g (float[n] x) => (complex64[n] y) { y = Cast<to = 14>(x) }", (),
     "The output 'y' has the element type complex64"),
    ("g (float[0] x) => (float[0] y) { y = Relu(x) }", (), "The input 'x' has no elements"),
    ("g (float[2, 2] x) => (float[2, 2] y) { y = Relu(x) }", ("--max-batch", "2"),
     "The input 'x' has no symbolic first axis, so that the server cannot put requests together."),
    (PRODUCT, ("--name", "../m"), "Invalid value for '--name'"),
    (PRODUCT, ("--version", "0"), "Invalid value for '--version'"),
], ids=["sequence", "complex", "empty", "no batch", "name", "version"])
def test_what_triton_cannot_serve_is_refused(tmp_path: Path, text: str, options: tuple[str, ...], words: str) -> None:
    done = run("export-triton", write(tmp_path, text), "--name", "m", "--output", tmp_path / "models", *options)
    assert done.exit_code in (1, 2) and words in done.output, done.output
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("images", [{}, {"sm_80": IMAGE, "sm_90": b""}], ids=["none", "one lacks it"])
def test_kernels_must_be_embedded(tmp_path: Path, images: dict[str, bytes]) -> None:
    model = chain(add_one(images=images), 2)
    if images:
        for node, kept in zip(model.graph.node, images, strict=True):
            for attribute in [each for each in node.attribute if each.name.startswith("image_")]:
                if attribute.name != f"image_{kept}":
                    node.attribute.remove(attribute)
    onnx.save(model, tmp_path / "model.onnx")
    done = run("export-triton", tmp_path / "model.onnx", "--name", "m", "--output", tmp_path)
    assert done.exit_code == 1
    assert "no architecture that every fused node holds a compiled kernel for" in done.output
    assert "onnxfuse optimize --embed sm_80,sm_90" in done.output


def test_a_repository_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    done = run("export-triton", embedded(tmp_path, sm_90=IMAGE), "--name", "m", "--output", tmp_path / "models")
    assert done.exit_code == 1 and "The repository cannot be written" in done.output
