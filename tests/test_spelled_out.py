"""The runtime's own attentions as references spell them out: what ONNX Runtime's CPU provider gives for the operators
themselves, in float32, over random forms."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from kernel_harness import parse
from onnx import TensorProto, helper
from reference import Array

from onnxfuse.rewriting import value_types
from onnxfuse.verifying.evaluate import CPU, Evaluator, exact_options
from onnxfuse.verifying.given_biases import with_biases
from onnxfuse.verifying.reference import rounded_model
from onnxfuse.verifying.spelled_out import spelled_out

MASKS = ("", "lengths", "places", "keys", "queries")
"""None; where keys end in each batch; and where they begin; a number for each key, and for each query too."""


def _normal(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Array]:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _mask(form: str, batch: int, rows: int, keys: int, rng: np.random.Generator) -> Array:
    """Some keys hidden, and in the last batch all."""
    match form:
        case "lengths":
            found = rng.integers(0, keys + 1, batch)
        case "places":
            ends = rng.integers(0, keys + 1, batch)
            return np.concatenate([ends, rng.integers(0, keys + 1, batch)]).astype(np.int32)
        case "keys":
            found = rng.integers(0, 2, (batch, keys))
        case _:
            found = rng.integers(0, 2, (batch, rows, keys))
    found[-1] = 0
    return found.astype(np.int32)


def _model(op: str, inputs: dict[str, Array], operands: list[str], opset: int, **attributes: object) -> onnx.ModelProto:
    """A node, of inputs whose sizes nobody knows."""
    node = helper.make_node(op, operands, ["y"], domain="com.microsoft", **attributes)
    infos = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
             for name, array in inputs.items()]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def _run(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), exact_options(1), providers=CPU)
    found: Array = session.run(None, inputs)[0]
    return found


def _packed(seed: int, mask: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """An Attention at random."""
    rng = np.random.default_rng([seed, MASKS.index(mask)])
    batch, rows, heads, depth, wide = (int(rng.integers(1, most)) for most in (4, 8, 4, 7, 7))
    own = bool(rng.integers(2))
    sizes = [heads * depth, heads * depth, heads * (wide if own else depth)]
    inputs = _normal(rng, x=(batch, rows, 5), w=(5, sum(sizes)), b=(sum(sizes),))
    operands = [*inputs, "", "", ""]
    if not rng.integers(4):
        operands[2] = ""
    if mask:
        operands[3], inputs["m"] = "m", _mask(mask, batch, rows, rows, rng)
    if rng.integers(2):
        operands[5] = "r"
        inputs |= _normal(rng, r=(*(size if rng.integers(2) else 1 for size in (batch, heads)), rows, rows))
    attributes: dict[str, object] = {"num_heads": heads, "unidirectional": int(rng.integers(2))}
    if rng.integers(2):
        attributes["scale"] = float(rng.uniform(0.1, 0.9))
    if rng.integers(2):
        attributes["mask_filter_value"] = -3.5
    if own:
        attributes["qkv_hidden_sizes"] = sizes
    return _model("Attention", inputs, operands, int(rng.integers(11, 22)), **attributes), inputs


@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask: str) -> None:
    for seed in range(12):
        model, inputs = _packed(seed, mask)
        spelled = spelled_out(model)
        assert all(node.domain == "" for node in spelled.graph.node)
        np.testing.assert_allclose(_run(spelled, inputs), _run(with_biases(model), inputs), atol=2e-3 if mask else 2e-6, rtol=2e-5)


@pytest.mark.parametrize("form", ["rows", "biased", "heads"])
def test_multi_head_attention(form: str) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        batch, rows, keys, heads, depth, wide = (int(rng.integers(1, most)) for most in (4, 8, 8, 4, 7, 7))
        keys = rows if (causal := int(rng.integers(2))) else keys
        wide = depth if form == "heads" else wide
        inputs = _normal(rng, q=(batch, rows, heads * depth), k=(batch, keys, heads * depth),
                         v=(batch, keys, heads * wide))
        operands = [*inputs, "", "", ""]
        if form == "heads":
            inputs |= _normal(rng, k=(batch, heads, keys, depth), v=(batch, heads, keys, wide))
        if form == "biased":
            operands[3] = "b"
            inputs |= _normal(rng, b=(heads * (2 * depth + wide),))
        if form != "heads" and rng.integers(2):
            operands[4], inputs["m"] = "m", _mask("keys", batch, rows, keys, rng)
        if rng.integers(2):
            operands[5] = "r"
            inputs |= _normal(rng, r=(batch if rng.integers(2) else 1, heads, rows, keys))
        model = _model("MultiHeadAttention", inputs, operands, 17, num_heads=heads, unidirectional=causal)
        spelled = spelled_out(model)
        assert all(node.domain == "" for node in spelled.graph.node)
        np.testing.assert_allclose(_run(spelled, inputs), _run(model, inputs), atol=2e-3, rtol=2e-5)


GROUPED = [
    # batch, new rows, rows of the past, the longest sequence, the last places of each
    (2, 5, 0, 5, (4, 4)), (3, 5, 9, 5, (4, 2, 0)), (2, 1, 9, 10, (9, 4)), (3, 1, 12, 7, (6, 0, 3)), (1, 3, 9, 12, (11,)),
    (1, 4, 20, 9, (8,)),
]


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("case", GROUPED)
def test_group_query_attention(case: tuple[int, int, int, int, tuple[int, ...]], opset: int) -> None:
    """What sequences have, and what is attended of it; rows behind are the past's own, or zero."""
    batch, rows, past, total, ends = case
    for seed in range(6):
        rng = np.random.default_rng([seed, *case[:4]])
        own, shared, depth = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.choice([16, 32]))
        heads, half = own * shared, int(rng.choice([8, depth // 2]))
        packed = bool(rng.integers(2))
        inputs = _normal(rng, q=(batch, rows, (heads + packed * 2 * own) * depth))
        inputs |= {} if packed else _normal(rng, k=(batch, rows, own * depth), v=(batch, rows, own * depth))
        inputs |= _normal(rng, a=(batch, own, past, depth), c=(batch, own, past, depth))
        inputs |= {"n": np.array(ends, np.int32), "t": np.array(total, np.int32)}
        operands = ["q", *(["", ""] if packed else ["k", "v"]), "a", "c", "n", "t"]
        attributes: dict[str, object] = {"num_heads": heads, "kv_num_heads": own}
        if rng.integers(2):
            inputs |= _normal(rng, cos=(total + 2, half), sin=(total + 2, half))
            operands += ["cos", "sin"]
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(rng.integers(2))}
        for name, value in (("scale", 0.4), ("softcap", 2.5), ("local_window_size", 3)):
            if rng.integers(2):
                attributes[name] = value
        model = _model("GroupQueryAttention", inputs, operands, opset, **attributes)
        model.graph.node[0].output.extend(["d", "e"])
        model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "de")
        spelled = spelled_out(model)
        assert all(node.domain == "" for node in spelled.graph.node)
        got, wanted = (onnxruntime.InferenceSession(each.SerializeToString(), exact_options(1), providers=CPU).run(
            None, inputs) for each in (spelled, model))
        for sequence, end in enumerate(ends):
            count = min(end + 1, rows)
            np.testing.assert_allclose(got[0][sequence, :count], wanted[0][sequence, :count], atol=2e-6, rtol=2e-5)
            for place, cache in enumerate("ac", 1):
                whole, before = got[place][sequence], inputs[cache][sequence]
                np.testing.assert_allclose(whole[:, :end + 1], wanted[place][sequence, :, :end + 1], atol=1e-6)
                behind = max(end + 1 - rows, 0) + rows
                np.testing.assert_array_equal(whole[:, behind:past], before[:, behind:])
                assert not whole[:, max(behind, past):].any()


NARROW = ("g (float16[B,S,4] x, float16[4,12] w, float16[12] b) => (float16[B,S,4] y) "
          "{ y = com.microsoft.Attention<num_heads = 2>(x, w, b) }")


def test_what_is_infinite_inside() -> None:
    """Queries and keys have 16 bits where the original's own result is asked for, and no bounds where the exact one
    is."""
    body = parse(NARROW)
    weights = np.full((4, 12), 128, np.float16)
    weights[:, 8:] = 0.25  # those of the values
    inputs = {"x": np.full((1, 3, 4), 256, np.float16), "w": weights, "b": np.zeros(12, np.float16)}
    (own,) = Evaluator(rounded_model(body, value_types(body))).run(inputs)
    assert own.dtype == np.float16 and np.isnan(own).all()
    wide = onnx.ModelProto()
    wide.CopyFrom(body)
    for info in (*wide.graph.input, *wide.graph.output):
        info.type.tensor_type.elem_type = TensorProto.DOUBLE
    (exact,) = Evaluator(spelled_out(wide)).run(inputs)
    np.testing.assert_allclose(exact, 256)


def test_scores_that_overflow() -> None:
    """Are infinite where they have 16 bits too, as in the runtime's kernels for many, and not in those for one."""
    body = parse(NARROW)
    weights = np.full((4, 12), 1, np.float16)
    inputs = {"x": np.full((1, 3, 4), 128, np.float16), "w": weights, "b": np.zeros(12, np.float16)}
    owns = [Evaluator(rounded_model(body, value_types(body), scores)).run(inputs)[0] for scores in (True, False)]
    assert np.isnan(owns[0]).all() and (owns[1] == 512).all()


def test_values_inside_have_the_names_that_they_have_in_any_type() -> None:
    """By which it is known in what type they are declared."""
    body = parse(NARROW)
    types = value_types(spelled_out(body))
    inside = [name for node in spelled_out(body).graph.node for name in node.output if ".inside." in name]
    assert len(inside) > 10 and {types[name] for name in inside} == {TensorProto.FLOAT16, TensorProto.INT64}
    model = parse(NARROW.replace("float16", "float"))
    assert [name for node in spelled_out(model).graph.node for name in node.output][:-1] == inside


@pytest.mark.parametrize("text", [
    "g (float[B,S,4] x, float[4,12] w, float[12] b, float[2,B,2,P,2] p) => (float[B,S,4] y) { y = com.microsoft.Attention<num_heads = 2>(x, w, b, , p) }",
    "g (float[B,S,4] x, float[4,12] w, float[12] b) => (float[B,S,4] y, float[2,B,2,S,2] p) { y, p = com.microsoft.Attention<num_heads = 2>(x, w, b) }",
    "g (float[B,S,4] x, float[4,12] w, float[12] b, int32[B,1,M,M] m) => (float[B,S,4] y) { y = com.microsoft.Attention<num_heads = 2>(x, w, b, m) }",
    "g (float[B,S,4] x, float[4,12] w, float[12] b) => (float[B,S,4] y) { y = com.microsoft.Attention<num_heads = 2, do_rotary = 1>(x, w, b) }",
    "g (float[B,S,2,3,2] q) => (float[B,S,4] y) { y = com.microsoft.MultiHeadAttention<num_heads = 2>(q) }",
    "g (float[B,S,4] q, float[B,2,S,2] k, float[B,2,S,2] v, float[B,2,P,2] p) => (float[B,S,4] y) { y = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v, , , , p, p) }",
    *(f"g (float[B,S,64] q, float[B,2,P,16] a, int32[B] n, int32 t, float[B,4,S,L] r) => (float[B,S,32] y, float[B,2,T,16] d, float[B,2,T,16] e) {{ y, d, e = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1{more}>(q, , , a, a, n, t{operands}) }}"
      for more, operands in ((", smooth_softmax = 1", ""), (", causal = 0", ""), ("", ", , , , r"))),
])
def test_other_forms_stay_as_they_are(text: str) -> None:
    model = parse(text)
    assert list(spelled_out(model).graph.node) == list(model.graph.node)


def test_models_without_any_are_left_alone() -> None:
    model = parse("g (float[B,4] x) => (float[B,4] y) { y = Softmax(x) }")
    assert spelled_out(model) is model
