"""Broadcasting, ranks, and sizes that are known only when the kernel runs.

float32 throughout, against float64, with the tolerance of ``reference.TOLERANCES``.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator import EmulatorError, run_plan
from kernel_harness import (
    Made,
    arguments,
    attempt,
    check,
    failures,
    make,
    parse,
    random_inputs,
    refused,
    sweep,
)
from onnx import numpy_helper

from onnxfuse.graph.dims import dim, symbol
from onnxfuse.graph.stated import parse as parse_dim
from onnxfuse.ir.tensors import Input
from onnxfuse.lowering.binding import bind

BROADCASTS = [
    ("", "", ""), ("", "N", "N"), ("N", "", "N"), ("1", "N", "N"), ("N", "1", "N"), ("N,1", "8", "N,8"),
    ("8", "N,1", "N,8"), ("N,8", "8", "N,8"), ("8", "N,8", "N,8"), ("N,1,8", "N,4,1", "N,4,8"),
    ("1,4,1,8", "N,1,3,1", "N,4,3,8"), ("2,1,3,1,2", "N,1,1,1", "2,N,3,1,2"), ("1,1", "5", "1,5"),
    ("2,3,1,2,1,4", "N,1,1,4", "2,3,N,2,1,4"), ("N,M", "M", "N,M"), ("N,1", "1,M", "N,M"), ("N,1,M", "K,1", "N,K,M"),
]


def typed(shape: str) -> str:
    return f"float[{shape}]" if shape else "float"


@pytest.mark.parametrize(("left", "right", "result"), BROADCASTS)
def test_broadcasting(left: str, right: str, result: str) -> None:
    sizes = ({"N": 1, "M": 1, "K": 1}, {"N": 5, "M": 3, "K": 2}, {"N": 8, "M": 16, "K": 4}, {"N": 0, "M": 4, "K": 4})
    for a, b in ((left, right), (right, left)):
        sweep(f"g ({typed(a)} x, {typed(b)} z) => ({typed(result)} y) {{ y = Sub(x, z) }}", *sizes)


@pytest.mark.parametrize("rank", range(7))
def test_ranks(rank: int) -> None:
    """Pointwise work between a transpose, a softmax where there is a row, in tensors of rank 0 to 6."""
    axes = ["N", "2", "3", "2", "4", "5"][:rank]
    turned = ",".join(reversed(axes))
    sweep(f"g ({typed(','.join(axes))} x) => ({typed(turned)} y) {{ a = Exp(x) t = Transpose(a) y = Mul(t, t) }}",
          {"N": 1}, {"N": 3}, {"N": 8})
    if rank:
        sweep(f"g (float[{','.join(axes)}] x) => (float[{','.join(axes)}] y) {{ a = Mul(x, x) y = Softmax(a) }}",
              {"N": 1}, {"N": 3}, {"N": 8}, length=8)


@pytest.mark.parametrize("size", [1, 3, 4, 31, 32, 33, 128, 4097])
def test_one_kernel_serves_every_size(size: int) -> None:
    made = make("g (float[B,S,C] x, float[C] b, float[B,S,1] m) => (float[B,S,C] y) { a = Add(x, b) y = Mul(a, m) }")
    assert made.kernel.source == make(
        "g (float[P,Q,R] x, float[R] b, float[P,Q,1] m) => (float[P,Q,R] y) { a = Add(x, b) y = Mul(a, m) }").kernel.source
    for batch, channels in ((1, 1), (2, 3), (1, 8)):
        check(made, random_inputs(made, {"B": batch, "S": size, "C": channels}))


def test_sizes_of_which_one_may_be_one() -> None:
    """Whether an axis is broadcast shows only when the kernel runs."""
    made = make("g (float[A,C] x, float[B,C] z) => (float[D,C] y) { y = Sub(x, z) }")
    for a, b in ((1, 1), (1, 5), (5, 1), (5, 5), (8, 8)):
        for c in (1, 3, 8):
            check(made, random_inputs(made, {"A": a, "B": b, "C": c, "D": max(a, b)}))
    assert refusal_of(made, {"A": 2, "B": 3, "C": 4}) in (
        "region test: sizes A and bcast(A, B) do not broadcast", "region test: sizes B and bcast(A, B) do not broadcast")


def test_three_sizes_of_which_some_may_be_one() -> None:
    made = make("g (float[A,4] x, float[B,4] z, float[C,1] w) => (float[D,4] y) { a = Add(x, z) y = Mul(a, w) }")
    for sizes in ((1, 1, 1), (1, 1, 3), (3, 1, 1), (1, 3, 1), (3, 3, 1), (1, 3, 3), (3, 3, 3)):
        check(made, random_inputs(made, {**dict(zip("ABC", sizes, strict=True)), "D": max(sizes)}))


def refusal_of(made: Made, sizes: Mapping[str, int]) -> str:
    """What the plan says to inputs of sizes that do not fit it."""
    with pytest.raises(EmulatorError) as caught:
        run_plan(made.kernel.plan, made.kernel.source, arguments(made, random_inputs(made, sizes)))
    return str(caught.value)


CHECKS = [
    ("g (float[N,8] x, int64[M,3] i) => (float[M,3] y) { y = GatherElements<axis=1>(x, i) }", {"N": 2, "M": 3},
     "region test: M <= N does not hold between sizes"),
    ("g (float[N,M] x) => (float[K,8] y) <int64[2] s = {-1,8}> { y = Reshape(x, s) }", {"N": 3, "M": 3, "K": 1},
     "region test: M*N == 8*((M*N) // 8) does not hold between sizes"),
    ("g (float[5,N] x, float[N,5] z) => (float[N,5] y) { t = Transpose(x) y = Add(t, z) }", None, ""),
    ("g (float[N,3] x, float[M,5] z) => (float[N,8] y) { y = Concat<axis=1>(x, z) }", None, ""),
]


@pytest.mark.parametrize(("text", "sizes", "message"), CHECKS)
def test_sizes_that_do_not_fit(text: str, sizes: Mapping[str, int] | None, message: str) -> None:
    made = make(text)
    if sizes is not None:
        assert refusal_of(made, sizes) == message
        return
    inputs = {"x": np.zeros((5, 3), np.float32), "z": np.zeros((4, 5), np.float32)}
    with pytest.raises(EmulatorError, match=r"^region test: axis 0 of input 1 is not N as the model states$"):
        run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))


def test_sizes_that_agree_though_they_are_called_differently() -> None:
    made = make("g (float[N,8] x, float[M,4] z) => (float[N,12] y) { y = Concat<axis=1>(x, z) }")
    check(made, random_inputs(made, {"N": 5, "M": 5}))
    made = make("g (float[N,8] x, int64[M,3] i) => (float[M,3] y) { y = GatherElements<axis=1>(x, i) }")
    check(made, {"x": np.random.default_rng(1).random((5, 8), np.float32), "i": np.arange(12).reshape(4, 3) % 8})


@pytest.mark.parametrize("text", [
    "g (float[N,\"s + 1\"] x) => (float[N,\"s + 1\"] y) { a = Exp(x) y = Softmax(a) }",
    "g (float[N,\"64*s\"] x) => (float[N,K,64] y) <int64[3] t = {0,-1,64}> { a = Exp(x) y = Reshape(a, t) }",
    "g (float[\"s + 1\",N] x, float[s,N] z) => (float[K,N] y) { y = Concat<axis=0>(x, z) }",
    "g (float[\"s*t\",N] x, float[\"s*t\",1] z) => (float[\"s*t\",N] y) { y = Mul(x, z) }",
    "g (float[N,\"s*t\"] x) => (float[N,1] y) { y = ReduceMean<axes=[-1]>(x) }",
    "g (float[N,\"s*t\"] x) => (float[N,\"s*t\",3] y) <int64[3] e = {1,1,3}, int64[1] a = {2}> { u = Unsqueeze(x, a) y = Expand(u, e) }",
])
@pytest.mark.parametrize("sizes", [{"N": 1, "s": 1, "t": 1}, {"N": 3, "s": 2, "t": 3}, {"N": 4, "s": 7, "t": 4}])
def test_compound_sizes(text: str, sizes: Mapping[str, int]) -> None:
    made = make(text, 17 if "axes=" in text else 20)
    check(made, random_inputs(made, {**sizes, "K": 2 * sizes["s"] + 1}), length=64)


def test_a_stand_in_that_is_called_like_a_size() -> None:
    """The size s*t gets a name of its own, whatever the others are called."""
    for name in ("d0", "s0", "L", "e", "row", "t0", "g0", "v0", "idx", "width", "i0.0", "lane"):
        text = f"g (float[\"s*t\",\"{name}\"] x, float[\"{name}\"] z) => (float[\"s*t\",\"{name}\"] y) {{ a = Add(x, z) y = Softmax(a) }}"
        made = make(text)
        check(made, {"x": np.random.default_rng(0).random((6, 9), np.float32), "z": np.zeros(9, np.float32)}, length=9)
        made = make(text.replace("Softmax", "Exp"))
        check(made, {"x": np.random.default_rng(0).random((6, 9), np.float32), "z": np.zeros(9, np.float32)})


def test_binding() -> None:
    """Plain sizes first, then linear ones, then stand-ins; every other axis is checked."""
    n, s = symbol("n"), symbol("s")
    x = Input(1, (s + 1, n), 0)
    z = Input(1, (s * 2, parse_dim("p*q"), n), 1)
    bound = bind([x, z])
    assert bound.sources == ("i0.1", "i0.0 1 -")
    assert bound.symbols == {"n": "s0", "s": "s1"}
    assert [check.condition for check in bound.checks] == ["i0.0 s1 1 + ==", "i1.0 s1 2 * ==", "i1.2 s0 =="]
    assert list(bound.stand_ins) == [parse_dim("p*q")]
    only = bind([Input(1, (s * 64, dim(3)), 0)])
    assert only.sources == ("i0.0 64 //",) and only.checks[1].condition == "i0.1 3 =="


def test_a_size_that_no_input_has() -> None:
    refusal = refused("g (float[N] x, int64[1] k) => (float[M] y) { e = Expand(x, k) y = Neg(e) }")
    assert refusal.code in ("unknown-shape", "unbound-size")


def test_assumptions_are_checked() -> None:
    """A size that the file states and the operators leave open is relied on, and made sure of when the kernel runs."""
    made = make("g (float[A,8] x, float[B,8] z) => (float[A,8] y) { s = Add(x, z) y = Softmax(s) }")
    check(made, random_inputs(made, {"A": 4, "B": 4}), length=8)
    assert not failures(made, random_inputs(made, {"A": 1, "B": 1}), length=8)


@pytest.mark.parametrize("text", [
    "g (float[N,0] x) => (float[N,0] y) { y = Exp(x) }",
    "g (float[N,0] x) => (float[N,1] y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
    "g (float[N,M] x) => (float[N,1] y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
    "g (float[N,M] x) => (float[N,M] y) { y = Softmax(x) }",
    "g (float[M,N] x) => (float[N,M] y) { t = Transpose(x) y = Exp(t) }",
    "g (float[N,M] x, float[N,3] z) => (float[N,K] y) { y = Concat<axis=1>(x, z) }",
])
def test_empty_tensors(text: str) -> None:
    made = make(text)
    for sizes in ({"N": 3, "M": 0, "K": 3}, {"N": 0, "M": 5, "K": 8}, {"N": 0, "M": 0, "K": 3}):
        check(made, random_inputs(made, sizes))


def test_a_grid_of_many_indices_stays_an_operand_that_no_kernel_reads() -> None:
    """6,144 numbers, more than are read to see a graph; the node's body needs them."""
    grid = np.stack(np.meshgrid([0], range(64), range(3, 35), indexing="ij"), -1)
    model = parse("g (float[1,64,N,4] x, float[1,64,32,4] u) => (float[1,64,N,4] y) "
                  "{ s = ScatterND(x, i, u) y = Neg(s) }")
    model.graph.initializer.append(numpy_helper.from_array(grid, "i"))
    made = attempt(model)
    assert isinstance(made, Made), made
    assert [value.name for value in made.lowered.tensors] == ["x", "u", "i"]
    assert "i2[" not in made.kernel.source
    for number in (35, 41):
        check(made, random_inputs(made, {"N": number}))
