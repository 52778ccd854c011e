"""Arithmetic on 16-bit constants: what sessions compute once, that float32 gives the same, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from plain_session import session

from onnxfuse.errors import ModelError
from onnxfuse.folding import constants, kept_for_their_type
from onnxfuse.graph import from_proto
from onnxfuse.operators import load_graph
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.provider.constants import MOVING, MOVING_FLOAT16
from onnxfuse.provider.host import host
from onnxfuse.reporting import report_of
from onnxfuse.rewriting import constants_record, exact_form, planned_form, unfuse, widen
from onnxfuse.rewriting.constants import KEY, narrow

WIDTH = {TensorProto.FLOAT16: np.dtype(np.float16), TensorProto.BFLOAT16: helper.tensor_dtype_to_np_dtype(16)}
OPSET = 22


def tensor(values: np.ndarray, name: str, dtype: int = TensorProto.FLOAT16) -> onnx.TensorProto:
    kept = values.astype(WIDTH[dtype]) if values.dtype.kind == "f" else values
    return numpy_helper.from_array(kept, name)


def model_of(nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], shape: tuple[int, ...] = (2, 4, 30),
             dtype: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", dtype, shape)
    y = helper.make_tensor_value_info("y", dtype, [f"size{axis}" for axis in shape])
    graph = helper.make_graph(nodes, "constants", [x], [y], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", OPSET)])


def weight_norm(dtype: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """A convolution whose weights are directions times lengths, as PyTorch's weight_norm writes it."""
    random = np.random.default_rng(3)
    nodes = [
        helper.make_node("ReduceL2", ["v", "axes"], ["norm"], name="norm", keepdims=1),
        helper.make_node("Div", ["v", "norm"], ["direction"], name="direction"),
        helper.make_node("Mul", ["direction", "g"], ["w"], name="scale"),
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1]),
        helper.make_node("Tanh", ["c"], ["t"], name="tanh"),
        helper.make_node("Mul", ["t", "c"], ["y"], name="gate"),
    ]
    return model_of(nodes, [
        tensor(random.standard_normal((6, 4, 3)), "v", dtype), tensor(random.uniform(0.5, 2, (6, 1, 1)), "g", dtype),
        tensor(random.standard_normal(6), "b", dtype), tensor(np.array([1, 2]), "axes")], dtype=dtype)


def chosen(model: onnx.ModelProto) -> list[str]:
    return [node.op for node in kept_for_their_type(load_graph(from_proto(model)))]


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    return widen(model, kept_for_their_type(load_graph(from_proto(model))))


def left_by_a_session(model: onnx.ModelProto, path: Path) -> list[str]:
    """The operators that a session computes in every run, with the optimisations that every provider has."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


OPERANDS = {
    "Add": [(2, 3), (2, 3)], "Mul": [(2, 3), (3,)], "Sub": [(2, 3), (2, 3)], "Div": [(2, 3), (2, 1)],
    "Pow": [(2, 3), (1,)], "Sqrt": [(2, 3)], "Exp": [(2, 3)], "Erf": [(2, 3)], "Relu": [(2, 3)], "Sigmoid": [(2, 3)],
    "Neg": [(2, 3)], "Softmax": [(2, 3)], "MatMul": [(2, 3), (3, 4)], "Gemm": [(2, 3), (3, 4)],
    "Conv": [(1, 2, 5), (3, 2, 3)], "ReduceSum": [(2, 3)], "ReduceL2": [(2, 3)], "ReduceMean": [(2, 3)],
    "Where": [(2, 3), (2, 3), (2, 3)], "Tile": [(2, 3), (2,)], "Pad": [(2, 3), (4,)], "Trilu": [(3, 3)],
    "CumSum": [(2, 3), ()], "Einsum": [(2, 3), (3, 4)], "MaxPool": [(1, 2, 6)], "Greater": [(2, 3), (2, 3)],
    "ArgMax": [(2, 3)], "Floor": [(2, 3)], "Cast": [(2, 3)], "Concat": [(2, 3), (2, 3)], "Flatten": [(2, 3)],
    "Gather": [(2, 3), (1,)], "GatherElements": [(2, 3), (2, 3)], "GatherND": [(2, 3), (1, 1)], "Identity": [(2, 3)],
    "IsInf": [(2, 3)], "IsNaN": [(2, 3)], "Reshape": [(2, 3), (1,)], "Sign": [(2, 3)], "Slice": [(2, 3), (1,), (1,)],
    "Split": [(2, 3)], "Squeeze": [(1, 3)], "Transpose": [(2, 3)], "Unsqueeze": [(2, 3), (1,)], "Clip": [(2, 3)],
    "Expand": [(2, 3), (3,)], "LayerNormalization": [(2, 3), (3,)], "Max": [(2, 3), (2, 3)], "Min": [(2, 3), (2, 3)],
    "Round": [(2, 3)], "ScatterElements": [(2, 3), (1, 3), (1, 3)], "ScatterND": [(2, 3), (1, 1), (1, 3)],
    "Shrink": [(2, 3)],
}
"""Shapes of constants that an operator takes."""

INTEGERS: dict[str, dict[int, list[int]]] = {
    "Tile": {1: [2, 1]}, "Pad": {1: [1, 0, 0, 1]}, "CumSum": {1: [1]}, "Gather": {1: [1]}, "GatherND": {1: [1]},
    "Reshape": {1: [6]}, "Slice": {1: [0], 2: [1]}, "Unsqueeze": {1: [0]}, "Expand": {1: [4, 2, 3]},
    "GatherElements": {1: [0, 1, 0, 1, 0, 1]}, "ScatterElements": {1: [0, 1, 0]}, "ScatterND": {1: [1]},
}
ATTRIBUTES: dict[str, dict[str, object]] = {
    "Cast": {"to": TensorProto.FLOAT}, "Concat": {"axis": 0}, "Split": {"num_outputs": 2},
    "Einsum": {"equation": "ij,jk->ik"}, "MaxPool": {"kernel_shape": [2]},
}


def of_constants(op: str, dtype: int) -> onnx.ModelProto:
    """One node of an operator that reads constants alone."""
    random = np.random.default_rng(7)
    held = []
    for place, shape in enumerate(OPERANDS[op]):
        values = random.uniform(0.5, 2, shape)
        if place in INTEGERS.get(op, {}):
            values = np.array(INTEGERS[op][place], np.int64).reshape(shape)
        elif op == "Where" and place == 0:
            values = values > 1
        held.append(tensor(values, f"c{place}", dtype))
    outputs = ["r", "s"] if op == "Split" else ["r"]
    node = helper.make_node(op, [each.name for each in held], outputs, name="node", **ATTRIBUTES.get(op, {}))
    model = model_of([node], held, dtype=dtype)
    del model.graph.input[:]
    model.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="r"))
    inferred = onnx.shape_inference.infer_shapes(model)
    model.graph.output[0].CopyFrom(inferred.graph.output[0])
    return model


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("op", OPERANDS)
def test_what_a_session_computes_once(op: str, dtype: int, tmp_path: Path) -> None:
    """As the record of the runtime has it; all else in float32, and nothing more is left of that."""
    model = of_constants(op, dtype)
    graph = load_graph(from_proto(model))
    once = bool(host(graph).folded)
    assert once == (op in MOVING or (dtype == TensorProto.FLOAT16 and op in MOVING_FLOAT16))
    made = widened(model)
    if dtype == TensorProto.FLOAT16:
        left = left_by_a_session(model, tmp_path / "model.onnx")
        assert bool(left) != once
    assert (made is model) == once
    assert left_by_a_session(made, tmp_path / "made.onnx") == []
    if not once:
        assert kept_for_their_type(load_graph(from_proto(made))) == ()


@pytest.mark.parametrize("op", [op for op in OPERANDS if op not in MOVING | MOVING_FLOAT16])
def test_it_gives_the_same(op: str) -> None:
    """What float16 is computed in on a CPU is float32, rounded once."""
    model = of_constants(op, TensorProto.FLOAT16)
    one, other = (session(each) for each in (model, widened(model)))
    assert one is not None and other is not None
    (before,), (after,) = one.run(None, {}), other.run(None, {})
    np.testing.assert_array_equal(before, after)


def optimised(model: onnx.ModelProto, **options: object) -> Optimised:
    return optimise(model, Options(target="H100", database=False, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", WIDTH, ids=["float16", "bfloat16"])
def test_a_weight_norm_is_computed_once(dtype: int, tmp_path: Path) -> None:
    """In the fused model nothing is left before the convolution, the report says so, and the original comes back."""
    model = weight_norm(dtype)
    assert chosen(model) == ["ReduceL2", "Div", "Mul"]
    made = optimised(model, verify=dtype == TensorProto.FLOAT16)
    assert report_of(made).constants == 3 and report_of(made).to_json()["constant_nodes_once"] == 3
    assert {node.op for node in host(made.graph).folded} >= {"ReduceL2", "Div", "Mul"}
    record = constants_record(made.model)
    assert record is not None and list(record.widened) == ["norm", "direction", "w"]
    # What is read by two is cast once, and each result is rounded before the next node reads it.
    casts = [tuple(node.input) for node in made.model.graph.node if node.op_type == "Cast"]
    assert casts == [("v",), ("norm_wide",), ("norm",), ("direction_wide",), ("direction",), ("g",), ("w_wide",)]
    assert unfuse(made.model) == model
    assert unfuse(made.model, folded=True) != model
    if dtype == TensorProto.FLOAT16:
        forms = unfuse(made.model, folded=True), model
        once, always = (left_by_a_session(form, tmp_path / "model.onnx") for form in forms)
        assert set(always) - set(once) == {"ReduceL2", "Div"} and once.count("Mul") == always.count("Mul") - 1


def test_the_form_again() -> None:
    """Who compares a fused file with its original has the form that was planned."""
    model = weight_norm()
    made = optimised(model, verify=False)
    again = planned_form(from_proto(model), made.model).proto
    assert "norm_wide" in {name for node in again.graph.node for name in node.output}
    assert exact_form(model, made.model) is not model


def test_left_out() -> None:
    made = optimised(weight_norm(), disable=("constants",), verify=False)
    assert constants_record(made.model) is None and report_of(made).constants == 0


def test_what_stays() -> None:
    """Numbers from inputs, random ones, of float32, that grow, that round by their type, those of the standard's
    functions, and inputs with a default."""
    ones = tensor(np.ones((2, 3)), "ones")
    for node, held in [
        (helper.make_node("Mul", ["x", "ones"], ["y"]), [ones]),
        (helper.make_node("RandomNormalLike", ["ones"], ["y"]), [ones]),
        (helper.make_node("HardSwish", ["ones"], ["y"]), [ones]),
        (helper.make_node("Gelu", ["ones"], ["y"], domain="com.microsoft"), [ones]),
        (helper.make_node("ConstantOfShape", ["size"], ["y"], value=tensor(np.array([2.0]), "")),
         [tensor(np.array([2, 3]), "size")]),
        (helper.make_node("Dropout", ["ones", "share", "training"], ["y"]),
         [ones, tensor(np.array(0.5), "share"), tensor(np.array(True), "training")]),
        (helper.make_node("QuantizeLinear", ["ones", "step"], ["y"]), [ones, tensor(np.array(0.5), "step")]),
        (helper.make_node("Tile", ["ones", "times"], ["y"]), [ones, tensor(np.array([1 << 11, 1 << 12]), "times")]),
    ]:
        assert chosen(model_of([node], held)) == []
    single = numpy_helper.from_array(np.ones((2, 3), np.float32), "ones")
    assert chosen(model_of([helper.make_node("Exp", ["ones"], ["y"])], [single])) == []
    default = model_of([helper.make_node("Exp", ["ones"], ["y"])], [ones])
    assert chosen(default) == ["Exp"]
    default.graph.input.append(helper.make_tensor_value_info("ones", TensorProto.FLOAT16, (2, 3)))
    assert chosen(default) == []


def test_functions_of_the_standard_run_every_time(tmp_path: Path) -> None:
    """Of float32 too, for the runtime takes them apart when constants are computed already; operators of com.microsoft
    do where they are of 16 bits."""
    single = numpy_helper.from_array(np.ones((2, 3), np.float32), "ones")
    model = model_of([helper.make_node("HardSwish", ["ones"], ["y"])], [single], dtype=TensorProto.FLOAT)
    assert left_by_a_session(model, tmp_path / "model.onnx") and not host(load_graph(from_proto(model))).folded
    for weights in (single, tensor(np.ones((2, 3)), "ones")):
        node = helper.make_node("QuickGelu", ["ones"], ["y"], domain="com.microsoft")
        graph = load_graph(from_proto(model_of([node], [weights], dtype=weights.data_type)))
        assert len(host(graph).folded) == (weights is single)


def test_what_moves_in_between() -> None:
    """Constants that the runtime computes from others count as such."""
    held = [tensor(np.ones((2, 3)), "w")]
    nodes = [helper.make_node("Exp", ["w"], ["a"]), helper.make_node("Transpose", ["a"], ["b"]),
             helper.make_node("Neg", ["b"], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    assert chosen(model_of(nodes, held, (3, 2))) == ["Exp", "Neg"]


def test_what_the_runtime_takes_out_stays() -> None:
    """Weights times one are these weights: nothing is computed, and what is behind counts as constant all the same."""
    held = [tensor(np.ones((2, 3)), "w"), tensor(np.array(1.0), "one")]
    nodes = [helper.make_node("Mul", ["w", "one"], ["a"]), helper.make_node("Exp", ["a"], ["b"]),
             helper.make_node("Add", ["x", "b"], ["y"])]
    made = optimised(model_of(nodes, held, (2, 3)), verify=False)
    record = constants_record(made.folded.proto)
    assert record is not None and list(record.widened) == ["b"]
    alone = optimised(model_of([nodes[0], helper.make_node("Add", ["x", "a"], ["y"])], held, (2, 3)), verify=False)
    assert constants_record(alone.folded.proto) is None


def test_what_annotations_speak_of_stays() -> None:
    model = weight_norm()
    annotation = model.graph.quantization_annotation.add(tensor_name="x")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="norm")
    record = constants_record(widened(model))
    assert record is not None and list(record.widened) == ["direction", "w"]


def test_what_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = model_of([helper.make_node("Tile", ["ones", "times"], ["y"])],
                        [tensor(np.ones(4), "ones"), tensor(np.array([3]), "times")])
    assert chosen(repeated) == ["Tile"]
    monkeypatch.setattr(constants, "MOST_GROWN", 8)
    assert chosen(repeated) == ["Tile"]  # 24 bytes of 8, and 8 of the number of times
    monkeypatch.setattr(constants, "MOST_GROWN", 7)
    assert chosen(repeated) == []


def test_an_edited_model() -> None:
    """Nodes whose casts are what they were compute in their own types again, others keep theirs."""
    model = weight_norm()
    made = widened(model)
    assert widen(made, kept_for_their_type(load_graph(from_proto(model)))) is made
    edited, others = onnx.ModelProto(), onnx.ModelProto()
    edited.CopyFrom(made)
    others.CopyFrom(made)
    edited.graph.node.append(helper.make_node("Neg", ["direction_wide"], ["z"]))
    narrow(made)
    assert made == model
    # A cast became another node, and a node reads something else.
    next(node for node in others.graph.node if node.output[0] == "norm_as_float").op_type = "Identity"
    next(node for node in others.graph.node if node.name == "scale").input[1] = "another"
    narrow(others)
    left = {node.name: list(node.input) for node in others.graph.node if node.name}
    assert left["norm"] == ["v", "axes"] and left["scale"] == ["direction_as_float", "another"]
    assert left["direction"] == ["v_as_float", "norm_as_float"]
    narrow(edited)
    assert constants_record(edited) is None
    kinds = {node.name: list(node.input) for node in edited.graph.node if node.name}
    assert kinds["norm"] == ["v", "axes"] and kinds["scale"] == ["direction", "g"]
    assert kinds["direction"] == ["v_as_float", "norm_as_float"]
    onnx.checker.check_model(edited, full_check=True)
    narrow(edited)


def test_a_damaged_record() -> None:
    model = weight_norm()
    helper.set_model_props(model, {KEY: json.dumps({"version": 99})})
    with pytest.raises(ModelError, match="Arithmetic on constants was widened by another release"):
        constants_record(model)
