"""Inferred types and sizes agree with ONNX Runtime's run of the model (CPU, its optimisations off); exact."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from graph_truth import differences, random_feeds
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph import Graph
from onnxfuse.graph.dims import broadcast, dim, minimum, symbol
from onnxfuse.operators import load_graph, lowering_of
from onnxfuse.operators.inference import output_types


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n{text}')


def checked(text: str, opset: int = 17, **sizes: int) -> Graph:
    """The graph, after a run with these sizes showed the same types, sizes and followed contents."""
    proto = parsed(text, opset)
    graph = load_graph(proto)
    unknown = [value for value in graph.values.values() if value.shape is None or value.dtype is None]
    assert not unknown
    assert differences(graph, proto, random_feeds(graph, sizes)) == []
    return graph


B, S = symbol("b"), symbol("s")


def test_heads_are_split_and_joined() -> None:
    graph = checked("""
        g (float[b, s, 64] x) => (float[b, s, 64] y) {
            shape = Shape(x)
            zero = Constant<value = int64 {0}>()
            one = Constant<value = int64[1] {1}>()
            two = Constant<value = int64[1] {2}>()
            first = Gather<axis = 0>(shape, zero)
            axes = Constant<value = int64[1] {0}>()
            batch = Unsqueeze(first, axes)
            length = Slice(shape, one, two)
            rest = Constant<value = int64[2] {4, -1}>()
            target = Concat<axis = 0>(batch, length, rest)
            split = Reshape(x, target)
            turned = Transpose<perm = [0, 2, 1, 3]>(split)
            keys = Transpose<perm = [0, 2, 3, 1]>(split)
            scores = MatMul(turned, keys)
            soft = Softmax<axis = -1>(scores)
            mixed = MatMul(soft, turned)
            back = Transpose<perm = [0, 2, 1, 3]>(mixed)
            whole = Constant<value = int64[3] {0, 0, -1}>()
            y = Reshape(back, whole)
        }""", b=2, s=5)
    assert graph.values["target"].elements == (B, S, dim(4), dim(-1))
    assert graph.values["scores"].shape == (B, dim(4), S, S)
    assert graph.values["y"].shape == (B, S, dim(64))


def test_arithmetic_on_sizes_is_followed() -> None:
    graph = checked("""
        g (float[b, s, 6] x) => (int64[1] y) {
            size = Size(x)
            tail = Shape<start = 1>(x)
            middle = Shape<start = -2, end = -1>(x)
            parts = Constant<value = int64[2] {1, 1}>()
            one, other = Split<axis = 0>(tail, parts)
            two = Constant<value = int64[1] {2}>()
            minus = Constant<value = int64[1] {-1}>()
            sum = Add(one, two)
            difference = Sub(other, two)
            double = Mul(sum, two)
            half = Div(double, two)
            floor = Div(one, two)
            rest = Mod(one, two)
            least = Min(one, other)
            most = Max(one, other)
            negative = Neg(one)
            narrow = Cast<to = 6>(sum)
            wide = Cast<to = 7>(narrow)
            asked = Concat<axis = 0>(minus, one)
            given = Equal(asked, minus)
            filled = ConstantOfShape<value = int64[1] {1}>(two)
            chosen = Where(given, filled, asked)
            all = ReduceProd<keepdims = 0>(tail)
            flat = Reshape(all, minus)
            many = Expand(one, two)
            times = Tile(one, two)
            start = Constant<value = int64 {0}>()
            step = Constant<value = int64 {2}>()
            end = Constant<value = int64 {7}>()
            range = Range(start, end, step)
            y = Identity(flat)
        }""", opset=15, b=3, s=5)
    found = {name: value.elements for name, value in graph.values.items()}
    assert found["size"] == (B * S * 6,)
    assert found["tail"] == (S, dim(6))
    assert found["middle"] == found["one"] == (S,)
    assert found["half"] == (S + 2,)
    assert found["floor"] == (S // 2,)
    assert found["rest"] == (S % 2,)
    assert found["least"] == (minimum(S, 6),)
    assert found["wide"] == (S + 2,)
    assert found["chosen"] == (dim(1), S)
    assert found["y"] == (S * 6,)
    assert found["many"] == (S, S) == found["times"]
    assert found["range"] == tuple(dim(number) for number in (0, 2, 4, 6))


def test_contents_are_followed() -> None:
    graph = checked("""
        g (float[b, 3] x, int64[1] open) => (int64 y) {
            sizes = Shape(x)
            some = Constant<value = int64[3] {2, 0, 3}>()
            narrow = Cast<to = 2>(some)
            same = Cast<to = 7>(narrow)
            truth = Cast<to = 9>(some)
            ones = Cast<to = 7>(truth)
            depth = Constant<value = int64 {4}>()
            values = Constant<value = int64[2] {5, 7}>()
            hot = OneHot(some, depth, values)
            turned = OneHot<axis = 0>(some, depth, values)
            before = Constant<value = int64[1] {-7}>()
            least = Constant<value = int64[1] {-9223372036854775807}>()
            zero = Constant<value = int64[1] {0}>()
            back = Constant<value = int64[1] {-1}>()
            first = Slice(some, before, least, zero, back)
            joined = Concat<axis = 0>(some, sizes)
            unknown = Concat<axis = 0>(some, open)
            y = ReduceSum<keepdims = 0>(hot)
        }""", b=4)
    found = {name: value.elements and [*map(str, value.elements)] for name, value in graph.values.items()}
    assert found["same"] == ["2", "0", "3"] and found["ones"] == ["1", "0", "1"]
    assert found["hot"] == ["5", "5", "7", "5", "7", "5", "5", "5", "5", "5", "5", "7"]
    assert found["turned"] == ["5", "7", "5", "5", "5", "5", "7", "5", "5", "5", "5", "7"]
    assert found["first"] == ["2"], "a start before the front is the front, backwards too"
    assert found["joined"] == ["2", "0", "3", "b", "3"] and found["unknown"] is None


@pytest.mark.parametrize(("node", "found"), [
    ("y = Conv<kernel_shape = [3, 3]>(unknown, weights)", "y.0, y.1, y.2, y.3"),
    ("y = Conv(unknown, kernel)", "y.0, 6, y.2, y.3"),
    ("y = ConvTranspose<group = 2>(unknown, kernel)", "y.0, 8, y.2, y.3"),
    ("y = Det(unknown)", None),
    ("y = Expand(x, open)", None),
    ("y = Expand(x, four)", "y.0, y.1, y.2, y.3"),
    ("y = Expand(unknown, four)", None),
])
def test_where_an_operand_is_unknown_the_type_and_perhaps_the_rank_are_not(node: str, found: str | None) -> None:
    graph = load_graph(parsed(f"""
        g (float[b, 3] x, int64[n] open, int64[4] four, float[6, 4, 3, 3] kernel) => (float z) {{
            seen = com.microsoft.Mystery(x)
            unknown = Cast<to = 1>(seen)
            weights = Cast<to = 1>(seen)
            {node}
            z = Neg(y)
        }}"""))
    value = graph.values["y"]
    assert value.dtype == TensorProto.FLOAT
    assert (None if value.shape is None else ", ".join(map(str, value.shape))) == found


@pytest.mark.parametrize(("operands", "found"), [
    ("q, k, v", "b, 2, s, 8"), ("q, k, v, , k, v", "b, 2, s, 8"), ("q, k, v, , seen, seen", None),
])
def test_attention(operands: str, found: str | None) -> None:
    graph = load_graph(parsed(f"""
        g (float[b, 2, s, 6] q, float[b, 2, t, 6] k, float[b, 2, t, 8] v) => (float z) {{
            seen = com.microsoft.Mystery(q)
            y = Attention({operands})
            z = Neg(y)
        }}""", opset=23))
    value = graph.values["y"]
    assert value.dtype == TensorProto.FLOAT
    assert (None if value.shape is None else ", ".join(map(str, value.shape))) == found


@pytest.mark.parametrize("size", [0, 1, 2, 5, 9])
def test_slices_of_symbolic_axes(size: int) -> None:
    graph = checked("""
        g (float[s, 8] x) => (float y) {
            zero = Constant<value = int64[1] {0}>()
            one = Constant<value = int64[1] {1}>()
            two = Constant<value = int64[1] {2}>()
            four = Constant<value = int64[1] {4}>()
            back = Constant<value = int64[1] {-1}>()
            far = Constant<value = int64[1] {9223372036854775807}>()
            before = Constant<value = int64[1] {-9223372036854775807}>()
            head = Slice(x, zero, four, zero)
            first = Slice(x, zero, four)
            tail = Slice(x, one, far, zero)
            last = Slice(x, back, far, zero)
            body = Slice(x, zero, back, zero)
            every = Slice(x, zero, far, zero, two)
            reversed = Slice(x, back, before, zero, back)
            columns = Slice(x, four, far, one)
            half = Slice(x, back, before, one, back)
            none = Slice(x, four, two, zero)
            y = ReduceSum<keepdims = 0>(half)
        }""", s=size)
    shapes = {name: value.shape for name, value in graph.values.items()}
    assert shapes["head"] == shapes["first"] == (minimum(4, S), dim(8))
    assert shapes["columns"] == (S, dim(4))
    assert shapes["none"] is not None and shapes["none"][0].evaluate({"s": size}) == 0
    assert shapes["reversed"] == (S, dim(8))
    assert shapes["every"] == ((S + 1) // 2, dim(8))


@pytest.mark.parametrize("sizes", [{"h": 9, "w": 12}, {"h": 32, "w": 17}])
def test_convolutions_and_pooling(sizes: dict[str, int]) -> None:
    checked("""
        g (float[2, 4, h, w] x, float[6, 2, 3, 3] k, float[4, 5, 2, 2] t, float[6, 4, 2, 3] u) => (float y) {
            a = Conv<group = 2, pads = [1, 1, 1, 1], strides = [2, 2]>(x, k)
            b = Conv<dilations = [2, 1], auto_pad = "VALID">(x, u)
            c = Conv<auto_pad = "SAME_UPPER", strides = [2, 3]>(x, u)
            d = ConvTranspose<strides = [2, 2], output_padding = [1, 0], pads = [1, 0, 0, 1]>(x, t)
            e = MaxPool<kernel_shape = [3, 2], strides = [2, 1]>(x)
            f = AveragePool<kernel_shape = [2, 2], pads = [1, 0, 1, 0]>(x)
            p = GlobalAveragePool(x)
            scales = Constant<value = float[4] {1.0, 1.0, 2.0, 0.5}>()
            r = Resize<mode = "nearest">(x, , scales)
            y = ReduceMax<keepdims = 0>(x)
        }""", **sizes)


def test_reductions_of_both_operator_sets() -> None:
    old = checked("""
        g (float[b, s, 8] x) => (float y) {
            mean = ReduceMean<axes = [-1]>(x)
            sum = ReduceSum<axes = [0, 2], keepdims = 0>(x)
            k = Constant<value = int64[1] {3}>()
            most, place = TopK<axis = 2>(x, k)
            best = ArgMax<axis = 1, keepdims = 0>(x)
            y = ReduceMax<keepdims = 0>(x)
        }""", opset=12, b=2, s=3)
    assert old.values["mean"].shape == (B, S, dim(1)) and old.values["sum"].shape == (S,)
    new = checked("""
        g (float[b, s, 8] x) => (float[b, 1, 8] y) {
            axes = Constant<value = int64[1] {-2}>()
            none = Constant<value = int64[0] {}>()
            same = ReduceSum<noop_with_empty_axes = 1>(x, none)
            y = ReduceMean(x, axes)
        }""", opset=18, b=2, s=3)
    assert new.values["same"].shape == (B, S, dim(8)) and new.values["y"].shape == (B, dim(1), dim(8))


def test_indexing_recurrence_and_norms() -> None:
    checked("""
        g (float[s, b, 6] x, int64[b, 2] i, float[1, 16, 6] w, float[1, 16, 4] r, float[6] scale) => (float y) {
            picked = Gather<axis = 1>(x, i)
            shaped = Shape(x)
            every, last, cell = LSTM<hidden_size = 4>(x, w, r)
            norm, mean, deviation = LayerNormalization(x, scale, scale)
            product = Einsum<equation = "sbi,tbi->bst">(x, x)
            depth = Constant<value = int64[1] {7}>()
            values = Constant<value = float[2] {0.0, 1.0}>()
            hot = OneHot(i, depth, values)
            found = NonZero(x)
            pads = Constant<value = int64[6] {0, 1, 0, 2, 0, 3}>()
            padded = Pad(x, pads)
            flat = Flatten<axis = 2>(x)
            drawn = Multinomial(flat)
            y = ReduceMax<keepdims = 0>(x)
        }""", s=3, b=2)


def test_operators_of_microsoft() -> None:
    checked("""
        g (float[b, s, 8] x, float[8] w, float[8, 24] q, float[24] p, float[5, 8] m) => (float y) {
            a, mean, deviation, sum = com.microsoft.SkipLayerNormalization(x, x, w, w)
            c = com.microsoft.BiasGelu(x, w)
            d = com.microsoft.FastGelu(x, w)
            e = com.microsoft.QuickGelu(x)
            f = com.microsoft.FusedMatMul<transB = 1>(x, m)
            h = com.microsoft.FusedMatMul<transA = 1, transBatchA = 1, transBatchB = 1>(x, x)
            i = com.microsoft.Attention<num_heads = 2>(x, q, p)
            j = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x)
            k = SimplifiedLayerNormalization(x, w)
            y = ReduceMax<keepdims = 0>(x)
        }""", b=3, s=3)


def test_unnamed_sizes_are_symbols_of_their_own() -> None:
    graph = checked("g (float[?, ?] x, float[?, 4] z) => (float y) { a = Shape(x) y = ReduceMax<keepdims = 0>(z) }",
                    **{"x.0": 2, "x.1": 3, "z.0": 5})
    assert graph.values["a"].elements == (symbol("x.0"), symbol("x.1"))
    assert graph.values["z"].shape == (symbol("z.0"), dim(4))


BROADCAST = """
    g (float[b, s, 4] x) => (float[b, s, 4] y) <float[{declared}] a> {{
        one = Constant<value = int64[3] {{1, -1, 4}}>()
        flat = Reshape(x, one)
        a = Add(flat, x)
        y = Relu(a)
    }}"""


@pytest.mark.parametrize(("declared", "taken"), [("b, s, 4", True), ("b, 7, 4", False)])
def test_where_two_symbols_broadcast_the_file_decides_between_them(declared: str, taken: bool) -> None:
    graph = load_graph(parsed(BROADCAST.format(declared=declared)))
    value = graph.values["a"]
    open_size = broadcast(B * S, S)
    assert value.shape == (B, S if taken else open_size, dim(4))
    assert graph.values["y"].shape == value.shape or not taken
    expected = [("a", 1, S, open_size)] if taken else []
    assert [tuple(assumption) for assumption in graph.assumptions if assumption.value == "a"] == expected


def test_a_statement_of_the_file_is_not_taken_where_operators_tell() -> None:
    graph = load_graph(parsed("""
        g (float[b, s] x) => (float[7, 9] y) <float[s, b] a> { a = Relu(x) y = Exp(a) }"""))
    assert graph.values["a"].shape == graph.values["y"].shape == (B, S)
    assert graph.assumptions == ()


def test_an_unknown_operator_has_the_sizes_that_the_file_states() -> None:
    proto = parsed("g (float[b, s] x) => (float[b, 5] y) { y = com.microsoft.Mystery(x) }")
    value = load_graph(proto).values["y"]
    assert value.shape == (B, dim(5)) and value.dtype == TensorProto.FLOAT
    proto.graph.output[0].ClearField("type")
    value = load_graph(proto).values["y"]
    assert value.shape is None and value.dtype is None


def test_a_node_that_breaks_its_operators_rules_is_left_alone() -> None:
    graph = load_graph(parsed("g (float[b, s] x) => (float y) { a = Transpose<perm = [0, 2, 1]>(x) y = Relu(a) }"))
    assert graph.values["a"].shape is None
    assert [node.broken for node in graph.nodes] == [True, False]
    assert lowering_of(graph.nodes[0]) is None and lowering_of(graph.nodes[1]) is not None


def test_branches_and_loops_have_what_onnx_tells() -> None:
    graph = load_graph(parsed("""
        g (float[b, 4] x, bool c) => (float y) {
            z = If (c) <
                then_branch = t () => (float[b, 4] p) { p = Relu(x) },
                else_branch = e () => (float[b, 4] q) { q = Neg(x) }
            >
            y = ReduceMax<keepdims = 0>(z)
        }"""))
    assert graph.values["z"].dtype == TensorProto.FLOAT and graph.values["z"].shape == (B, dim(4))


def test_types_of_a_node_outside_the_graph() -> None:
    graph = load_graph(parsed("g (float[b, s] x) => (float y) { a = Relu(x) y = ReduceMax<keepdims = 0>(a) }"))
    (found,) = output_types(graph.nodes[0], graph)
    assert found == (TensorProto.FLOAT, (B, S), None)


def test_large_graphs_take_little_time() -> None:
    """Each of 2,000 blocks reshapes by a computed shape: sizes stay in canonical form and do not grow."""
    lines = ["sh = Shape(x)", "four = Constant<value = int64[1] {4}>()", "w = Constant<value = int64[1] {-1}>()"]
    last = "x"
    for i in range(2000):
        lines += [f"t{i} = Concat<axis = 0>(w, four)", f"r{i} = Reshape({last}, t{i})", f"b{i} = Reshape(r{i}, sh)",
                  f"y{i} = Add(b{i}, x)"]
        last = f"y{i}"
    graph = load_graph(parsed(f"g (float[b, s, 4] x) => (float y) {{ {' '.join(lines)} y = Relu({last}) }}"))
    assert graph.values["y"].shape == (B, S, dim(4))
    assert graph.values["r1999"].shape == (B * S, dim(4))


def _standard_cases() -> Iterator[onnx.backend.test.case.test_case.TestCase]:  # type: ignore[name-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        yield from collect_testcases(None)


def _declared(model: onnx.ModelProto, inputs: list[object], symbolic: bool, constant: bool) -> onnx.ModelProto:
    """The case's model without the sizes of its outputs; its inputs' sizes as symbols; small operands as constants."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    kept = []
    for index, (given, content) in enumerate(zip(list(model.graph.input), inputs, strict=False)):
        if constant and index and isinstance(content, np.ndarray) and _is_small(content, given):
            model.graph.initializer.append(numpy_helper.from_array(content, given.name))
            continue
        kept.append(given)
        if symbolic and given.type.HasField("tensor_type"):
            for axis, entry in enumerate(given.type.tensor_type.shape.dim):
                entry.dim_param = f"{given.name}_{axis}"
    kept += list(model.graph.input)[len(inputs):]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for info in (*model.graph.output, *model.graph.value_info):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    return model


def _is_small(content: np.ndarray, given: onnx.ValueInfoProto) -> bool:
    if content.dtype.kind not in "iubf" or content.size > 64:
        return False
    return bool(helper.np_dtype_to_tensor_dtype(content.dtype) == given.type.tensor_type.elem_type)


@pytest.mark.xdist_group("standard-cases")  # of which test_standard_cases.py makes its cases too
def test_the_standards_own_examples() -> None:
    """onnx's examples of every operator: inferred sizes are the expected outputs', with sizes given and as symbols."""
    wrong, compared = [], 0
    for case in _standard_cases():
        opset = max((entry.version for entry in case.model.opset_import if entry.domain == ""), default=0)
        if opset < 11:
            continue
        inputs, outputs = case.data_sets[0]
        sizes = {
            f"{given.name}_{axis}": size
            for given, content in zip(case.model.graph.input, inputs, strict=False) if isinstance(content, np.ndarray)
            for axis, size in enumerate(content.shape)
        }
        for symbolic, constant in ((False, True), (True, True), (True, False)):
            graph = load_graph(_declared(case.model, inputs, symbolic, constant))
            for info, expected in zip(case.model.graph.output, outputs, strict=False):
                value = graph.values[info.name]
                if not isinstance(expected, np.ndarray) or value.shape is None:
                    continue
                if value.dtype != info.type.tensor_type.elem_type:
                    wrong.append((case.name, value, info.type.tensor_type.elem_type))
                known = [size for size in value.shape if size.symbols <= sizes.keys()]
                true = [n for size, n in zip(value.shape, expected.shape, strict=False) if size.symbols <= sizes.keys()]
                if len(value.shape) != expected.ndim or [size.evaluate(sizes) for size in known] != true:
                    wrong.append((case.name, value, expected.shape))
                compared += len(known)
    assert not wrong
    assert compared > 5_000
