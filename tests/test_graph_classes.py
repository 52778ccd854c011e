"""Operator classes, what runs on the host, and numbers for symbols."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph
from onnxfuse.graph.binding import Bound, bind, bound
from onnxfuse.graph.derived import MOST, Derived, derived, least
from onnxfuse.graph.sizes import shape_of
from onnxfuse.operators import OperatorClass, classify, is_deterministic, load_graph
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.provider.host import host, on_host
from onnxfuse.provider.removed import is_same_memory


def loaded(text: str, opset: int = 17) -> Graph:
    return load_graph(onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n{text}'))


def test_classes() -> None:
    graph = loaded("""
        g (float[b, s, 8] x, float[8] w, float[8, 8] m) => (float y) {
            same = Add(x, x)
            spread = Add(x, w)
            turned = Transpose(x)
            wide = Concat<axis = 2>(x, x)
            soft = Softmax(x)
            sum = ReduceSum(x)
            product = MatMul(x, m)
            shape = Shape(x)
            k = Constant<value = int64[1] {1}>()
            sorted, places = TopK(x, k)
            dropped = Dropout(x)
            noise = RandomNormalLike(x)
            gelu = com.microsoft.Gelu(x)
            bias = com.microsoft.BiasGelu(x, w)
            skip = com.microsoft.SkipLayerNormalization(x, x, w)
            fused = com.microsoft.FusedMatMul(x, m)
            odd = com.microsoft.Mystery(x)
            y = ReduceMax(x)
        }""")
    found = {node.outputs[0].name: classify(node, graph).name for node in graph.nodes if node.outputs[0]}
    assert found == {
        "same": "POINTWISE", "spread": "BROADCAST", "turned": "VIEW", "wide": "VIEW", "soft": "REDUCTION",
        "sum": "REDUCTION", "product": "HEAVY", "shape": "SHAPE", "k": "OPAQUE", "sorted": "OPAQUE",
        "dropped": "POINTWISE", "noise": "OPAQUE", "gelu": "POINTWISE", "bias": "BROADCAST", "skip": "REDUCTION",
        "fused": "HEAVY", "odd": "OPAQUE", "y": "REDUCTION",
    }
    assert OperatorClass.POINTWISE < OperatorClass.BROADCAST < OperatorClass.VIEW < OperatorClass.REDUCTION


def test_a_function_of_the_model_is_opaque_whatever_its_name() -> None:
    graph = load_graph(onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[n] x) => (float[n] y) { y = com.microsoft.Gelu(x) }
        <domain: "com.microsoft", opset_import: ["" : 17]> Gelu (a) => (b) { b = Neg(a) }"""))
    assert classify(graph.nodes[0], graph) is OperatorClass.OPAQUE


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("y = Relu(x)", True), ("y = RandomUniformLike(x)", False), ("y = Bernoulli(x)", False),
        ("y = Multinomial(x)", False), ("y = Dropout(x)", True),
        ("t = Constant<value = bool {1}>() y = Dropout(x, , t)", False),
        ("t = Constant<value = bool {0}>() y = Dropout(x, , t)", True),
        ("y = Dropout(x, , c)", False), ("y = com.microsoft.BiasDropout(x, x)", False),
    ],
)
def test_determinism(node: str, expected: bool) -> None:
    graph = loaded(f"g (float[b, 8] x, bool c) => (float[b, 8] y) {{ {node} }}")
    assert is_deterministic(graph.nodes[-1]) is expected


def test_arithmetic_on_sizes_runs_on_the_host() -> None:
    graph = loaded("""
        g (float[b, s, 8] x, int64[1] given) => (float[b, s, 8] y, float16[s] half) {
            shape = Shape(x)
            one = Constant<value = int64 {1}>()
            size = Gather(shape, one)
            axes = Constant<value = int64[1] {0}>()
            long = Unsqueeze(size, axes)
            all = Concat<axis = 0>(long, given)
            real = Cast<to = 1>(size)
            root = Sqrt(real)
            small = Cast<to = 10>(root)
            double = Add(small, small)
            zero = Constant<value = int64 {0}>()
            places = Range(zero, size, one)
            target = Shape(x)
            same = Reshape(x, target)
            scaled = Mul(same, root)
            half = Cast<to = 10>(places)
            folded = Add(one, zero)
            y = Identity(scaled)
        }""")
    found = host(graph)
    assert {value.name for value in found.values} == {"shape", "size", "long", "all", "real", "root", "small", "target"}
    # Unsqueeze moves no elements, so that its result stays where its operand is; the node itself is no kernel.
    assert {node.op for node in found.folded} == {"Constant", "Add"}
    free = {node.outputs[0].name for node in graph.nodes if node.outputs[0] and (
        node.op == "Constant" or node in found.nodes or node in found.folded or is_same_memory(node))}
    assert free == {
        "shape", "one", "size", "axes", "long", "all", "real", "root", "small", "zero", "target", "same", "folded", "y",
    }
    assert on_host(graph.values["root"], graph) and not on_host(graph.values["scaled"], graph)
    assert on_host(graph.nodes[0], graph) and not on_host(graph.values["double"].producer or graph.nodes[0], graph)
    assert host(graph) is found


@pytest.mark.parametrize("node", [
    "sides = Shape(x) real = Cast<to = 1>(sides) y = Resize(x, , real)",  # the kernel itself reads its scales there
    "sides = Shape(x) sizes = Mul(sides, sides) y = Resize(x, , , sizes)",
    "sides = Shape(x) y = Gather(table, sides)",  # a constant that is not small
    "sides = Shape(x) y = com.microsoft.Gelu(sides)",
])
def test_what_looks_like_arithmetic_on_sizes_and_is_none(node: str) -> None:
    graph = loaded(f"g (float[b, s] x) => (float y) {{ wide = Constant<value = int64[2] {{16, 16}}>() "
                   f"table = ConstantOfShape(wide) {node} }}")
    assert on_host(graph.values["sides"], graph)
    assert not on_host(graph.nodes[-1], graph) and not on_host(graph.values["y"], graph)


@pytest.mark.parametrize(("kind", "there"), [(1, True), (6, True), (10, False), (11, True), (16, False), (17, False)])
def test_short_floats_have_no_arithmetic_on_the_host(kind: int, there: bool) -> None:
    """What computes a value may run there, what reads it not: 10 is float16, 16 bfloat16, 17 a float8."""
    graph = loaded(f"""
        g (float[b, s, 8] x) => (float y) {{
            count = Size(x)  short = Cast<to = {kind}>(count)  y = Cast<to = 1>(short)
        }}""")
    assert on_host(graph.values["short"], graph) and on_host(graph.values["y"], graph) is there


@pytest.mark.parametrize(("count", "there"), [(100, True), (101, False)])
def test_only_small_constants_are_read_on_the_host(count: int, there: bool) -> None:
    graph = loaded(f"""
        g (float[b, s, 8] x) => (int64[{count}] y)
        <int64[{count}] c = {{{", ".join(["1"] * count)}}}> {{ n = Size(x)  y = Mul(n, c) }}""")
    assert on_host(graph.values["y"], graph) is there


def test_default_sizes_of_dimensions() -> None:
    graph = loaded("""
        g (float[s0, s1] ids, float[n, 3, hh, ww] image, float[?, seq_len, 8] state, float[k] other, float[r, 3, 3] m)
            => (float y) { y = ReduceMax(ids) found = NonZero(other) }""")
    assert bind(graph, {}) == {
        "s0": 1, "s1": 128, "n": 1, "hh": 224, "ww": 224, "state.0": 1, "seq_len": 128, "k": 1, "r": 1, "found.1": 16,
    }


def test_dimensions_that_are_given() -> None:
    graph = loaded("g (float[b, s] x, float[c, s] mask) => (float y) { y = ReduceMax(x) }")
    assert bind(graph, {"s": 40}) == {"b": 1, "s": 40, "c": 1}
    assert bind(graph, {"b": 8}) == {"b": 8, "s": 128, "c": 8}
    assert bind(graph, {"b": 8, "c": 1}) == {"b": 8, "s": 128, "c": 1}
    assert bind(graph, {"s": 0})["s"] == 0


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"batchs": 2}, "The model has no dimension 'batchs'.\n--> dims={\"batchs\": 2}\n"
                        "help: Did you mean 'batch'? Its dimensions are: batch, s."),
        ({"zzz": 2}, "The model has no dimension 'zzz'.\n--> dims={\"zzz\": 2}\nhelp: Its dimensions are: batch, s."),
        ({"batch": -1},
         "Dimension 'batch' cannot be -1.\n--> dims={\"batch\": -1}\nhelp: Give a size of zero or more."),
    ],
)
def test_dimensions_that_are_wrong(dims: dict[str, int], message: str) -> None:
    graph = loaded("g (float[batch, s] x) => (float y) { y = ReduceMax(x) }")
    with pytest.raises(ModelError) as caught:
        bind(graph, dims)
    assert str(caught.value) == message


def test_a_dimension_of_a_model_of_fixed_sizes() -> None:
    graph = loaded("g (float[2, 3] x) => (float y) { y = ReduceMax(x) }")
    with pytest.raises(ModelError) as caught:
        bind(graph, {"batch": 2})
    assert str(caught.value) == (
        "The model has no dimension 'batch'.\n--> dims={\"batch\": 2}\n"
        "help: The model's inputs have fixed sizes; leave dims out."
    )


MEL = """
    g (float[batch, samples] x, float[40, 1, 400] window, float[16, 40, 3] kernel) => (float y) {
        one = Constant <value_ints = [1]> ()
        wave = Unsqueeze(x, one)
        frames = Conv <strides = [160]> (wave, window)
        pooled = MaxPool <kernel_shape = [2], strides = [2]> (frames)
        y = Conv <kernel_shape = [3]> (pooled, kernel)
    }"""
"""(samples - 400) // 160 + 1 frames, half as many pooled, two fewer in the end."""


def test_a_default_is_raised_until_every_size_is_one_at_least() -> None:
    graph = loaded(MEL)
    found = bound(graph, {})
    assert found.sizes == {"batch": 1, "samples": 2048}
    assert found.notes == (
        "Dimension 'samples' is taken to be 2048: at 128, axis 2 of 'frames', a result of 'Conv -> frames' (Conv), "
        "would have -1.  Give the size that you use: dims={\"samples\": SIZE}.",
    )
    for value in graph.values.values():
        assert all(size > 0 for size in shape_of(value, found.sizes) or ())
    assert bound(graph, {"samples": 16000}).notes == ()
    assert all(each.kernels >= 0 and each.bytes >= 0 for each in
               (Ledger(graph, found.sizes).node(node) for node in graph.nodes))


def test_a_default_is_raised_past_what_leaves_nothing() -> None:
    """256 samples are no frame, 512 the first of the doublings with one."""
    graph = loaded("""
        g (float[batch, 1, samples] x, float[1, 1, 257] w) => (float[batch, 1, f] y) { y = Conv(x, w) }""")
    assert bound(graph, {}).sizes["samples"] == 512


def test_sizes_that_leave_a_tensor_less_than_nothing_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        bind(loaded(MEL), {"samples": 128})
    assert str(caught.value) == (
        "Axis 2 of 'frames', a result of 'Conv -> frames' (Conv), would have -1 elements: "
        "((samples + 80) // 160) - 2.\n"
        "--> dims={\"samples\": 128}\nhelp: Give a size that is large enough, from dims={\"samples\": 400} on."
    )


def test_where_no_size_is_large_enough_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(Derived, "at", lambda _, sizes: tried.append(sizes["samples"]))
    wanted = next(iter(derived(loaded(MEL))))
    assert least(wanted, {"samples": 128}, "samples") is None
    assert tried[-1] == MOST and len(tried) < 20


def test_a_size_that_may_be_zero_is_left_so() -> None:
    """Nothing past a limit, and an empty batch, are sizes like others."""
    graph = loaded("""
        g (float[n, k] x) => (float y) {
            from = Constant <value_ints = [512]> ()  to = Constant <value_ints = [9223372036854775807]> ()
            axis = Constant <value_ints = [1]> ()
            y = Slice(x, from, to, axis)
        }""")
    assert bound(graph, {}) == Bound({"n": 1, "k": 128}, assumed=("n", "k"))
    assert bind(loaded(MEL), {"batch": 0, "samples": 4000})["batch"] == 0


def test_sizes_that_only_differ_together() -> None:
    """Of two sizes the first of which must be the larger, that one is raised; where no size will do, none is."""
    graph = loaded("""
        g (float[a] x, float[b] z) => (float y) {
            n = Shape(x)  m = Shape(z)  d = Sub(n, m)  y = ConstantOfShape(d)
        }""")
    assert bound(graph, {}).sizes == {"a": 2, "b": 1}
    never = loaded("""
        g (float[a] x) => (float y) {
            n = Shape(x)  zero = Constant <value_ints = [0]> ()  d = Sub(zero, n)  y = ConstantOfShape(d)
        }""")
    found = bound(never, {})
    assert found == Bound({"a": 1}, assumed=("a",))
    assert shape_of(never.values["y"], found.sizes) is None


@pytest.mark.parametrize("name", ["seq_x", "h", "batch"])
def test_the_name_of_a_tensor_says_nothing_of_its_sizes(name: str) -> None:
    graph = loaded(f"g (float[?, 4, ?, 8] {name}) => (float y) {{ y = Relu({name}) }}")
    assert bind(graph, {}) == {f"{name}.0": 1, f"{name}.2": 224}
