"""Made inputs stay inside what every operator demands that they reach.

Each model is a piece of what an exporter writes.  ONNX Runtime's CPU provider, which checks indices, is the judge, and
what is drawn has to use most of the range: all zeros would pass as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser

from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.operators import load_graph
from onnxfuse.verifying.evaluate import exact_options

Array = NDArray[Any]

RNG = np.random.default_rng(0)


def model(text: str, tables: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    opset = 18 if "Bitwise" in text else 17
    found = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1, "ai.onnx.ml" : 3]>{text}')
    found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (tables or {}).items())
    return found


def rows(count: int, width: int = 4) -> Array:
    return RNG.standard_normal((count, width)).astype(np.float32)


def whole(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


def made(found: onnx.ModelProto, **dims: int) -> dict[str, Array]:
    """Inputs that were made for a model and that it ran on."""
    feeds = make_inputs(load_graph(found), dims)
    session = onnxruntime.InferenceSession(found.SerializeToString(), exact_options(), ["CPUExecutionProvider"])
    for result in session.run(None, feeds):
        assert result.dtype.kind != "f" or np.isfinite(result).all()
    return feeds


TABLE = {"table": rows(37)}
WRAPPED = {**TABLE, "zero": whole(0), "size": whole(37)}

INDEXED = {
    "negative indices wrapped by a choice, as tf2onnx does": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) {
          negative = Less(ids, zero) moved = Add(ids, size) wrapped = Where(negative, moved, ids)
          y = Gather(table, wrapped) }""", WRAPPED, 37),
    "negative indices wrapped by a remainder": ("""
        g (int32[n, 64] ids) => (float[n, 64, 4] y) {
          wide = Cast <to = 7> (ids) wrapped = Mod(wide, size) y = Gather(table, wrapped) }""", WRAPPED, 900),
    "a table behind a table": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) {
          kinds = Gather(types, ids) y = Gather(table, kinds) }""",
        {**TABLE, "types": RNG.integers(0, 37, 50)}, 50),
    "a table of more numbers than are read with the graph": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) {
          kinds = Gather(types, ids) some = Add(kinds, ids) y = Gather(table, some) }""",
        {"table": rows(120), "types": np.full(5000, 20, np.int64)}, 100),
    "two tables, the second shorter": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) <float[50, 4] first> {
          a = Gather(first, ids) b = Gather(table, ids) y = Add(a, b) }""", {**TABLE, "first": rows(50)}, 37),
    "an offset into a shared table": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) <int64 base = {30}> {
          moved = Add(ids, base) y = Gather(table, moved) }""", TABLE, 7),
    "ids that come as floats": ("""
        g (float[n, 64] ids) => (float[n, 64, 4] y) { kinds = Cast <to = 7> (ids) y = Gather(table, kinds) }""",
        TABLE, 37),
    "a scaled index": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) <int64 two = {2}> {
          twice = Mul(ids, two) y = Gather(table, twice) }""", TABLE, 19),
    "along a later axis": ("""
        g (int64[64] ids) => (float[4, 64] y) { y = Gather <axis = 1> (wide, ids) }""", {"wide": rows(4, 21)}, 21),
    "GatherElements": ("""
        g (int64[37, 64] ids) => (float[37, 64] y) { y = GatherElements <axis = 1> (table, ids) }""",
        {"table": rows(37, 9)}, 9),
    "GatherND": ("""
        g (int64[64, 2] ids) => (float[64] y) { y = GatherND(table, ids) }""", {"table": rows(37, 9)}, 9),
    "ScatterND": ("""
        g (int64[64, 1] ids, float[64, 4] u) => (float[37, 4] y) { y = ScatterND(table, ids, u) }""", TABLE, 37),
    "ArrayFeatureExtractor": ("""
        g (int64[64] ids) => (float[37, 64] y) { y = ai.onnx.ml.ArrayFeatureExtractor(wide, ids) }""",
        {"wide": rows(37, 11)}, 11),
    "OneHot": ("""
        g (int64[64] ids) => (float[64, 4] y) <int64 depth = {13}, float[2] values = {0, 1}> {
          hot = OneHot(ids, depth, values) y = MatMul(hot, table) }""", {"table": rows(13)}, 13),
    "the reach of two ids together": ("""
        g (int64[n, 64] ids, int64[n, 64] kinds) => (float[n, 64, 4] y) {
          both = Add(ids, kinds) y = Gather(table, both) }""", TABLE, 19),
    "a square that is looked up": ("""
        g (int64[64] ids) => (float[64, 4] y) { square = Mul(ids, ids) y = Gather(table, square) }""", TABLE, 7),
    "low bits of an id": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) <int64 bits = {63}> {
          low = BitwiseAnd(ids, bits) y = Gather(table, low) }""", TABLE, 37),
    "high bits of an id": ("""
        g (uint32[n, 64] ids) => (float[n, 64, 4] y) <uint32 two = {2}> {
          high = BitShift <direction = "RIGHT"> (ids, two) wide = Cast <to = 7> (high) y = Gather(table, wide) }""",
        TABLE, 148),
    "a sum of several": ("""
        g (float[n, 64] ids) => (float[n, 64, 4] y) {
          s = Sum(ids, ids) whole = Cast <to = 7> (s) y = Gather(table, whole) }""", TABLE, 19),
    "negative steps from the end": ("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y) { back = Neg(ids) y = Gather(table, back) }""", TABLE, 38),
    "regions of a batch": ("""
        g (float[9, 3, 16, 16] x, int64[64] ids) => (float[64, 3, 2, 2] y) {
          y = RoiAlign <output_height = 2, output_width = 2> (x, r, ids) }""",
        {"r": np.tile(np.float32([0, 0, 8, 8]), (64, 1))}, 9),
    "places that pooling left": ("""
        g (float[1, 1, 8, 8] x, int64[1, 1, 8, 8] ids) => (float[1, 1, 16, 16] y) {
          y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, ids) }""", {}, 256),
    "a sum of two ids": ("""
        g (int64[2, 64] ids) => (float[1, 64, 4] y) <int64[1] first = {0}> {
          both = ReduceSum(ids, first) y = Gather(table, both) }""", TABLE, 19),
    "ids where something unknown is small": ("""
        g (int64[64] ids, float[64, 64] x) => (float[64, 64, 4] y) <float little = {0.5}, int64 none = {0}> {
          p = MatMul(x, x) small = Less(p, little) chosen = Where(small, ids, none) y = Gather(table, chosen) }""",
        TABLE, 37),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices(name: str) -> None:
    text, tables, below = INDEXED[name]
    found = made(model(text, tables))["ids"]
    assert found.min() >= 0 and below * 0.75 <= found.max() + 1 <= below


def test_embed_layer_normalization() -> None:
    tables = {"words": rows(50, 8), "places": rows(64, 8), "kinds": rows(2, 8), "w": rows(1, 8)[0], "b": rows(1, 8)[0]}
    found = made(model("""
        g (int32[b, 32] ids, int32[b, 32] segments, int32[b, 32] attention_mask, int32[b, 32] at)
            => (float[b, 32, 8] y, int32[b] m) {
          y, m = com.microsoft.EmbedLayerNormalization <epsilon = 1e-5> (
            ids, segments, words, places, kinds, w, b, attention_mask, at)
        }""", tables))
    assert found["ids"].max() > 30 and set(np.unique(found["segments"])) == {0, 1}
    assert 30 < found["at"].max() < 64


def test_gather_block_quantized() -> None:
    """A table of four bits; this operator is not on every release's CPU provider: what is drawn is looked at."""
    infos = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 64]),
             helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64, 32])]
    node = helper.make_node("GatherBlockQuantized", ["table", "ids", "scales"], ["y"], domain="com.microsoft",
                            gather_axis=0, quantize_axis=1, block_size=16)
    tables = [helper.make_tensor("table", TensorProto.UINT4, [29, 32], np.zeros(29 * 32, np.uint8)),
              numpy_helper.from_array(rows(29, 2), "scales")]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], tables)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    found = make_inputs(load_graph(helper.make_model(graph, opset_imports=opsets, ir_version=10)), {})
    assert found["ids"].max() == 28


def test_positions_that_a_mask_counts() -> None:
    """RoBERTa's: the running sum of the mask, times the mask, plus the place of the padding."""
    found = made(model("""
        g (int64[n, seq] attention_mask) => (float[n, seq, 4] y) <int64 axis = {1}, int64[1] one = {1}> {
          sums = CumSum(attention_mask, axis) kept = Mul(sums, attention_mask) places = Add(kept, one)
          y = Gather(table, places) }""", TABLE), seq=35)
    assert (found["attention_mask"] == 1).all()


def test_position_ids() -> None:
    found = made(model("""
        g (int64[n, seq] position_ids) => (float[n, seq, 4] y) {
          two = Constant <value_int = 2> () moved = Add(position_ids, two) y = Gather(table, moved) }""", TABLE))
    assert found["position_ids"].max() == 34


COUNTS = {
    "limits of a range": ("g (int64 n) => (int64[k] y) <int64 zero = {0}, int64 one = {1}> { y = Range(zero, n, one) }",
                          "n", 1, 16),
    "what is divided by": ("g (int64[8192] x, int64[8192] n) => (int64[8192] y) { y = Div(x, n) }", "n", 1, 899),
    "a remainder's divisor": ("g (int64[8192] x, int64[8192] n) => (int64[8192] y) { y = Mod(x, n) }", "n", 1, 899),
    "how many are the largest": ("""
        g (float[4, 9] x, int64[1] n) => (float[4, k] y, int64[4, k] i) { y, i = TopK(x, n) }""", "n", 1, 9),
    "lengths of a recurrence": ("""
        g (float[7, 3, 2] x, int32[3] n) => (float[7, 1, 3, 2] y) {
          y = RNN <hidden_size = 2> (x, w, r, , n) }""", "n", 1, 7),
    "lengths to reverse": ("""
        g (float[7, 3, 2] x, int64[3] n) => (float[7, 3, 2] y) { y = ReverseSequence(x, n) }""", "n", 1, 7),
    "copies": ("g (float[4, 9] x, int64[2] n) => (float[k, l] y) { y = Tile(x, n) }", "n", 1, 2),
    "a shape to extend to": ("g (float[4, 9] x, int64[2] n) => (float[k, l] y) { y = Expand(x, n) }", "n", 1, 1),
    "a shape to take": ("g (float[4, 9] x, int64[2] n) => (float[k, l] y) { y = Reshape(x, n) }", "n", 0, 0),
    "a flat shape": ("g (float[4, 9] x, int64[1] n) => (float[k] y) { y = Reshape(x, n) }", "n", -1, -1),
    "a shape to fill": ("g (int64[2] n) => (float[k, l] y) { y = ConstantOfShape(n) }", "n", 1, 16),
    "a depth": ("""
        g (int64[5] x, int64 n) => (float[5, k] y) <float[2] values = {0, 1}> { y = OneHot(x, n, values) }""",
        "n", 1, 16),
    "an axis to sum along": ("""
        g (float[4, 9] x, int64[1] n) => (float[k, l] y) { y = ReduceSum(x, n) }""", "n", -2, 1),
    "an axis to total along": ("g (float[4, 9] x, int64 n) => (float[4, 9] y) { y = CumSum(x, n) }", "n", -2, 1),
    "an axis to add": ("g (float[4, 9] x, int64[1] n) => (float[k, l, m] y) { y = Unsqueeze(x, n) }", "n", -3, 2),
    "an axis to drop": ("g (float[4, 1, 9] x, int64[1] n) => (float[k, l] y) { y = Squeeze(x, n) }", "n", 1, 1),
    "equal parts": ("""
        g (float[12, 9] x, int64[3] n) => (float[k, 9] y, float[l, 9] z, float[m, 9] u) {
          y, z, u = Split <axis = 0> (x, n) }""", "n", 4, 4),
    "frames of a signal": ("""
        g (float[1, 256, 1] x, int64 step, float[64] w, int64 n) => (float[1, k, 33, 2] y) {
          y = STFT(x, step, w, n) }""", "n", 64, 64),
    "a window to make": ("g (int64 n) => (float[k] y) { y = HannWindow(n) }", "n", 1, 16),
    "how much is not padding": ("""
        g (int64[5] n) => (bool[5, 12] y) <int64 zero = {0}, int64 all = {12}, int64 one = {1}, int64[1] last = {1}> {
          places = Range(zero, all, one) column = Unsqueeze(n, last) y = Less(places, column) }""", "n", 1, 12),
    "the last place of cached keys": ("""
        g (float[2, 1, 16] q, float[2, 1, 16] k, float[2, 1, 16] v, float[2, 2, 32, 8] a, float[2, 2, 32, 8] b,
           int32[2] n, int32 all) => (float[2, 1, 16] y, float[2, 2, m, 8] c, float[2, 2, m, 8] d) {
          y, c, d = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (q, k, v, a, b, n, all) }""",
        "n", 32, 32),
    "where a rotation begins": ("""
        g (float[2, 8, 16] x, int64[1] n) => (float[2, 8, 16] y) {
          y = com.microsoft.RotaryEmbedding <num_heads = 2> (x, n, angles, angles) }""", "n", 0, 3),
    "places to shift by": ("""
        g (uint8[64] x, uint8[64] n) => (uint8[64] y) { y = BitShift <direction = "LEFT"> (x, n) }""", "n", 0, 7),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    text, value, least, most = COUNTS[name]
    tables = {"w": rows(2, 2)[None], "r": rows(2, 2)[None]} if "RNN" in text else {"angles": rows(11)} if (
        "Rotary" in text) else None
    found = made(model(text, tables))[value]
    assert least <= found.min() and found.max() <= most
    assert found.size < 64 or found.max() >= most // 2


FLOATS = {
    "logarithms": "g (float[9, 9] x) => (float[9, 9] y) { y = Log(x) }",
    "roots": "g (float[9, 9] x) => (float[9, 9] y) { y = Sqrt(x) }",
    "powers that are no whole numbers": """
        g (float[9, 9] x) => (float[9, 9] y) <float half = {0.5}> { y = Pow(x, half) }""",
    "logarithms of what a shift makes small": """
        g (float[9, 9] x) => (float[9, 9] y) <float one = {1}> { a = Add(x, one) b = Sqrt(a) y = Log(b) }""",
    "logarithms of a product with what nothing is known of": """
        g (float[9, 9] x) => (float[9, 9] y) { p = MatMul(x, x) s = Mul(p, x) a = Abs(s) y = Log(a) }""",
    "hyperbolic arcs": "g (float[9, 9] x) => (float[9, 9] y) { y = Acosh(x) }",
    "logarithms of sums": "g (float[9, 9] x) => (float[9, 1] y) { y = ReduceLogSum <axes = [1]> (x) }",
    "variances": """
        g (float[2, 3, 4, 4] i, float[3] s, float[3] b, float[3] m, float[3] v, float[9, 9] x)
          => (float[2, 3, 4, 4] y, float[9, 9] z) { y = BatchNormalization(i, s, b, m, v) z = Neg(x) }""",
    "arcs": "g (float[9, 9] x) => (float[9, 9] y) { y = Acos(x) }",
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_have_a_result(name: str) -> None:
    found = made(model(FLOATS[name]))["x"]
    assert np.unique(found).size > 70


def test_floats_of_either_sign_where_nothing_speaks_against_them() -> None:
    found = made(model("""
        g (float[9, 9] x) => (float[9, 9] y, float[9, 9] z) <float little = {0.001}> {
          s = Mul(x, x) t = Add(s, little) y = Log(t) a = Abs(x) b = Add(a, little) z = Sqrt(b) }"""))["x"]
    assert found.min() < 0 < found.max()


def test_a_logarithm_of_a_sum_of_exponentials_flattens_nothing() -> None:
    found = made(model("""
        g (float[9, 9] x) => (float[9, 9] y) {
          m = ReduceMax <axes = [1]> (x) c = Sub(x, m) e = Exp(c) axis = Constant <value_ints = [1]> ()
          s = ReduceSum(e, axis) l = Log(s) y = Sub(c, l) }"""))["x"]
    assert found.min() < 0 and abs(found.std() - 1) < 0.3


MASKS = {
    "one less the mask, times a large number": ("""
        g (int64[n, 64] valid, float[n, 64] x) => (float[n, 64] y) <float one = {1}, float low = {-10000}> {
          f = Cast <to = 1> (valid) r = Sub(one, f) s = Mul(r, low) t = Add(x, s) y = Softmax(t) }"""),
    "turned into truths": ("""
        g (int32[n, 64] valid, float[n, 64] x) => (float[n, 64] y) <float low = {-10000}> {
          c = Cast <to = 9> (valid) y = Where(c, x, low) }"""),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_not_called_so(name: str) -> None:
    assert (made(model(MASKS[name]))["valid"] == 1).all()


def test_ids_that_are_compared_are_no_mask() -> None:
    found = made(model("""
        g (int64[n, 64] ids) => (float[n, 64, 4] y, bool[n, 64] present) {
          present = Cast <to = 9> (ids) y = Gather(table, ids) }""", TABLE))
    assert found["ids"].max() > 30


def test_in_bodies() -> None:
    """An index that is read by name in a branch, and looked up in a table behind a table there."""
    branches = [helper.make_graph(
        [helper.make_node("Gather", ["types", "ids"], [f"{name}k"]),
         helper.make_node("Gather", ["table", f"{name}k"], [f"{name}y"])], name, [],
        [helper.make_tensor_value_info(f"{name}y", TensorProto.FLOAT, None)]) for name in ("then", "other")]
    infos = [helper.make_tensor_value_info("c", TensorProto.BOOL, []),
             helper.make_tensor_value_info("ids", TensorProto.INT64, [64]),
             helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 4])]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    tables = {"table": rows(37), "types": RNG.integers(0, 37, 21)}
    graph = helper.make_graph([node], "g", infos[:2], infos[2:],
                              [numpy_helper.from_array(array, name) for name, array in tables.items()])
    found = made(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert found["ids"].max() == 20


def test_what_the_user_gives_counts() -> None:
    """Ids of the user's leave a part of the table to those that are added to them."""
    text = """
        g (int64[64] ids, int64[64] kinds) => (float[64, 4] y) { both = Add(ids, kinds) y = Gather(table, both) }"""
    found = make_inputs(load_graph(model(text, TABLE)), {}, {"ids": np.full(64, 30, np.int64)})
    assert found["kinds"].max() == 6


def test_what_is_read_twice_at_every_step_takes_little_time() -> None:
    """Twenty-two sums of a value with itself are four million ways back to the input."""
    steps = " ".join(f"v{step + 1} = Add(v{step}, v{step})" for step in range(22))
    start = time.perf_counter()
    made(model(f"g (float[9, 9] v0) => (float[9, 9] y) {{ {steps} a = Abs(v22) y = Sqrt(a) }}"))
    assert time.perf_counter() - start < 2


def test_numbers_far_from_zero() -> None:
    """Years, of which a table has forty; none of the small numbers is one."""
    found = made(model("""
        g (int64[64] year, int32[64] month) => (float[64, 4] y) <int64 first = {1990}, int32 one = {1}> {
          place = Sub(year, first) a = Gather(table, place) m = Sub(month, one) b = Gather(table, m)
          y = Add(a, b) }""", TABLE))
    assert found["year"].min() >= 1990 and 2015 < found["year"].max() < 1990 + 37
    assert 20 < found["month"].max() <= 37


def test_settings_are_above_zero() -> None:
    found = made(model("""
        g (float[n, 9] x, float temperature, float[3] scales) => (float[n, 9] y, float[3] z) {
          y = Div(x, temperature) z = Neg(scales) }"""), n=9)
    for name in ("temperature", "scales"):
        assert found[name].min() > 0 and found[name].max() <= 1
    assert found["x"].min() < 0


def test_integers_in_place_of_drawn_ones() -> None:
    text = """
        g (int64[64] ids, int64[64] attention_mask, uint8[64] b) => (int64[64] y) { y = Add(ids, attention_mask) }"""
    found = make_inputs(load_graph(model(text)), {}, integers=0)
    assert not found["ids"].any() and not found["b"].any() and found["attention_mask"].all()
