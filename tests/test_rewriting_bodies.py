"""Bodies as models of their own, as they are and in higher precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from rewriting_models import chain, fuse, fused_nodes, parse, region, run

from onnxfuse.errors import ModelError
from onnxfuse.operators import load_graph
from onnxfuse.region import Region
from onnxfuse.rewriting import body_model, read_fused, rewrite


def halves(text: str, inputs: str = "float16[n, 4] x", **arrays: np.ndarray) -> tuple[onnx.ModelProto, Region]:
    """A model of one region, the nodes of ``text``, whose result is ``y``."""
    model = parse(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float16[n, 4] y) {{ {text} }}', **arrays)
    graph = load_graph(model)
    return model, region(graph, *(node.outputs[0].name for node in graph.nodes if node.outputs[0]))


def element_types(model: onnx.ModelProto) -> tuple[list[int], list[int]]:
    """Element types of inputs and outputs."""
    return (
        [info.type.tensor_type.elem_type for info in model.graph.input],
        [info.type.tensor_type.elem_type for info in model.graph.output],
    )


def test_a_region_and_its_fused_node_have_one_body() -> None:
    model = chain()
    graph = load_graph(model)
    chosen = region(graph, "a", "b", "c")
    fused = rewrite(model, graph, [chosen]).model
    body = body_model(chosen, model)
    assert body == body_model(read_fused(fused)[0], fused)
    onnx.checker.check_model(body, full_check=True)
    assert [info.name for info in body.graph.input] == ["x0", "x1"]
    assert [info.name for info in body.graph.output] == ["y0"]
    x, z = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    (found,) = run(body, {"x0": x, "x1": z})
    np.testing.assert_array_equal(found, np.maximum((x + z) * np.float32(2), 0))  # float32: the same operations


def test_host_inputs_that_are_there_are_inputs() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[a, b] y) { s = Shape (x) t = Exp (x) y = Reshape (t, s) }
        """
    )
    graph = load_graph(model)
    body = body_model(region(graph, "t", "y", hosts=["s"]), model)
    assert [info.name for info in body.graph.input] == ["h0", "x0"]
    (found,) = run(body, {"h0": np.array([4, 2], np.int64), "x0": np.zeros((2, 4), np.float32)})
    assert found.shape == (4, 2)


@pytest.mark.parametrize(
    ("precision", "number"), [("float32", TensorProto.FLOAT), ("float64", TensorProto.DOUBLE)]
)
def test_types_are_raised(precision: str, number: int) -> None:
    model, chosen = halves("a = Mul (x, k) b = Cast <to = 1> (a) c = Exp (b) y = Cast <to = 10> (c)",
                           k=np.array([0.1], np.float16))
    body = body_model(chosen, model, precision=precision)  # type: ignore[arg-type]
    onnx.checker.check_model(body, full_check=True)
    assert element_types(body) == ([number], [number])
    assert body_model(chosen, model).graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_what_is_not_rounded_in_higher_precision() -> None:
    """float16: 40000 + 40000 overflows; in float32 it does not, and 40000 comes back exactly."""
    model, chosen = halves("a = Add (x, x) y = Sub (a, x)")
    x = np.full((1, 4), 40000, np.float16)
    for precision in ("float32", "float64"):
        body = body_model(chosen, model, precision=precision)  # type: ignore[arg-type]
        (found,) = ReferenceEvaluator(body).run(None, {"x0": x.astype(precision)})
        assert found.dtype == precision
        np.testing.assert_array_equal(found, x.astype(precision))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_an_explicit_cast_rounds(precision: str) -> None:
    """1 + 2^-12 is no float16: after the Cast it is 1."""
    model, chosen = halves("a = Cast <to = 1> (x) b = Add (a, k) c = Cast <to = 10> (b) y = Add (c, c)",
                           k=np.array([2.0**-12], np.float32))
    body = body_model(chosen, model, precision=precision)  # type: ignore[arg-type]
    (found,) = ReferenceEvaluator(body).run(None, {"x0": np.ones((1, 4), precision)})
    np.testing.assert_array_equal(found, np.full((1, 4), 2, precision))


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_comparisons_and_casts_to_integers_see_rounded_values(precision: str) -> None:
    """float16: 2048 + 0.75 is 2048, 1000 + 0.75 is 1001, and 70000 is infinite."""
    text = """
        a = Add (x, k) p = Greater (a, x) q = Cast <to = 10> (p)
        b = Mul (x, m) i = IsInf (b) j = Cast <to = 10> (i)
        e = Cast <to = 7> (a) f = Cast <to = 10> (e) g = Add (q, j) y = Add (g, f)
    """
    model, chosen = halves(text, k=np.array([0.75], np.float16), m=np.array([70], np.float16))
    body = body_model(chosen, model, precision=precision)  # type: ignore[arg-type]
    x = np.array([[2048, 1, 1000, 4]], np.float16)
    (found,) = ReferenceEvaluator(body).run(None, {"x0": x.astype(precision)})
    shifted = x + np.float16(0.75)
    with np.errstate(over="ignore"):
        expected = (shifted > x) + 1.0 * np.isinf(x * np.float16(70)) + shifted.astype(np.int64)
    assert expected.tolist() == [[2049, 2, 1003, 5]]
    np.testing.assert_array_equal(found, expected)


def test_bfloat16() -> None:
    """bfloat16 has 8 bits: 1 + 2^-9 is 1 after the Cast, and the constant keeps its bfloat16 value."""
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (bfloat16[n] x) => (bfloat16[n] y) {
          a = Cast <to = 1> (x) b = Add (a, k) c = Cast <to = 16> (b) y = Mul (c, w)
        }
        """,
        k=np.array([2.0**-9], np.float32),
        w=np.array([0.1], ml_dtypes.bfloat16),
    )
    graph = load_graph(model)
    body = body_model(region(graph, "a", "b", "c", "y"), model, precision="float32")
    onnx.checker.check_model(body, full_check=True)
    (found,) = run(body, {"x0": np.ones(3, np.float32)})
    np.testing.assert_array_equal(found, np.full(3, np.float32(ml_dtypes.bfloat16(0.1))))


def test_float32_constants_that_operators_imply() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x, int64[1] s) => (float[m] y) {
          a = Constant <value_float = 0.1> () b = Mul (x, a) c = ConstantOfShape (s) y = Add (b, c)
        }
        """
    )
    graph = load_graph(model)
    body = body_model(region(graph, "a", "b", "c", "y", inline=False), model, precision="float64")
    onnx.checker.check_model(body, full_check=True)
    (found,) = ReferenceEvaluator(body).run(None, {"x0": np.full(2, 0.3), "x1": np.array([2], np.int64)})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.full(2, 0.3) * np.float64(np.float32(0.1)), rtol=1e-15)  # float64, NumPy


def test_functions_of_the_model_come_along() -> None:
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
        g (float[n] x) => (float[n] y) { a = Exp (x) y = mine.twice (a) }
        <domain: "mine", opset_import: ["" : 17]>
        twice (u) => (v) { v = Add (u, u) }
        """
    )
    graph = load_graph(model)
    chosen = region(graph, "a", "y")
    fused = rewrite(model, graph, [chosen]).model
    onnx.checker.check_model(fused, full_check=True)
    for body in (body_model(chosen, model), body_model(read_fused(fused)[0], fused)):
        (found,) = run(body, {"x0": np.zeros(3, np.float32)})
        np.testing.assert_array_equal(found, np.full(3, 2, np.float32))


def test_types_that_the_file_does_not_hold_any_more() -> None:
    fused = fuse(chain(), ["a", "b", "c"]).model
    (node,) = fused_nodes(fused)
    record = next(entry for entry in node.attribute if entry.name == "onnxfuse")
    node.attribute.remove(record)
    with pytest.raises(ModelError) as caught:
        body_model(read_fused(fused)[0], fused)
    assert str(caught.value) == (
        "The file does not hold the types of a fused node's inputs and outputs any more.\n"
        "--> node 'node_a.test'\n"
        "help: Fuse the original model again."
    )
