"""Few long rows, each shared by the blocks of a cluster, which tuning may tell the row schedule."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, make, random_inputs, told
from quick_compiler import quickly

from onnxfuse.runtime.compile import architectures, compile_cubin
from onnxfuse.schedules import Choice

REGIONS = {
    "softmax": "g (T[R,C] x) => (T[R,C] y) { y = Softmax(x) }",
    "a norm": "g (T[R,C] x, T[C] g, T[C] b) => (T[R,C] y) { y = LayerNormalization(x, g, b) }",
    "a residual and a norm": "g (T[R,C] x, T[R,C] r, T[C] g) => (T[R,C] y, T[R,C] s) { s = Add(x, r) y = RMSNormalization(s, g) }",
    "a norm and its rows' largest": "g (T[R,C] x) => (T[R,C] y, T[R,1] m) <int64[1] a = {1}> { m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }",
}

LENGTH = 8192
"""Elements of a row: four blocks of 256 threads have it, a vector of eight each."""


def clustered(made: Made) -> list[Choice]:
    return [choice for choice in made.kernel.choices if "cluster" in dict(choice.settings)]


def ways(text: str, kind: str, length: int = LENGTH) -> list[Made]:
    """Those whose blocks share rows."""
    made = make(text.replace("T[", f"{kind}["), 23, planned={"R": 5, "C": length})
    assert made.kernel.schedule == "rows" and not any(
        step.cluster for variant in made.kernel.plan.variants for step in variant.launches)
    found = [told(made, choice, {"R": 5, "C": length}) for choice in clustered(made)]
    assert all(each.kernel.plan.variants[0].launches[0].cluster is not None for each in found)
    return found


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("case", REGIONS)
def test_regions(case: str, kind: str) -> None:
    found = ways(REGIONS[case], kind)
    assert {dict(each.kernel.choice.settings)["cluster"] for each in found if each.kernel.choice} >= {2, 4}
    for made in found:
        for rows in (1, 3):
            check(made, random_inputs(made, {"R": rows, "C": LENGTH}), length=LENGTH, limit=1, misalign=False)


@pytest.mark.parametrize("kind", ["int64", "double", "int32"])
def test_sums_of_other_sizes(kind: str) -> None:
    """Each reduction has places of its own in a block's shared memory, of eight bytes."""
    text = "g (T[R,C] x) => (T[R,C] y) <int64[1] a = {1}> { s = ReduceSum(x, a) m = ReduceMax(x, a) d = Sub(x, m) y = Add(d, s) }"
    for made in ways(text, kind):
        check(made, random_inputs(made, {"R": 2, "C": LENGTH}), length=LENGTH, limit=1, misalign=False)


@pytest.mark.parametrize("order", ["backward", 3, 4, 5])
def test_no_barrier_is_missing(order: str | int) -> None:
    for case in ("softmax", "a norm"):
        made = ways(REGIONS[case], "float16")[0]
        check(made, random_inputs(made, {"R": 3, "C": LENGTH}), length=LENGTH, orders=[order], limit=1, misalign=False)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_at_the_edge(number: float) -> None:
    """In the part of one block alone."""
    made = ways(REGIONS["softmax"], "float16")[0]
    for place in (7, LENGTH - 3):
        inputs = random_inputs(made, {"R": 3, "C": LENGTH})
        inputs["x"][1, place], inputs["x"][2] = number, -np.inf
        check(made, inputs, length=LENGTH, limit=1, misalign=False)


def test_shorter_rows_and_other_gpus_have_other_kernels() -> None:
    """Rows of fewer elements than were planned, where no block may be without any, and GPUs before and after Hopper."""
    made = ways(REGIONS["softmax"], "float16")[0]
    first = made.kernel.plan.variants[0].name
    for sm, length, runs in ((90, LENGTH, True), (90, LENGTH + 8, False), (80, LENGTH, False), (100, LENGTH, False)):
        inputs = random_inputs(made, {"R": 2, "C": length})
        assert (variants_that_hold(made.kernel.plan, arguments(made, inputs), [], sm)[0] == first) is runs
    for length in (8, LENGTH - 8, 100):
        check(made, random_inputs(made, {"R": 2, "C": length}), length=length, misalign=False)


def test_many_rows_need_none() -> None:
    """Two blocks a multiprocessor are enough."""
    for rows, some in ((132, True), (133, False)):
        made = make(REGIONS["softmax"].replace("T[", "float16["), planned={"R": rows, "C": LENGTH})
        assert bool(clustered(made)) is some
    assert not clustered(make(REGIONS["softmax"].replace("T[", "float16["), planned={"R": 3, "C": 8193}))


@pytest.mark.parametrize("architecture", architectures())
def test_it_compiles(architecture: int) -> None:
    kernel = ways(REGIONS["a norm"], "float16")[0].kernel
    with quickly():
        assert compile_cubin(kernel.source, f"sm_{architecture}")[:4] == b"\x7fELF"
