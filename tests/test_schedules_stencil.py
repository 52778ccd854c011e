"""The stencil schedule: depthwise convolutions of many windows and sizes, with what is around them, every variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from ir_reference import evaluate_lowered
from kernel_harness import Made, arguments, attempt, check, compile_all, make, parse, random_inputs

from onnxfuse.compiling import source_of
from onnxfuse.graph.dims import dim
from onnxfuse.refusal import Refusal
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Request, make_kernel, parse_choice
from onnxfuse.schedules.stencils.parts import ONE
from onnxfuse.schedules.stencils.shape import (
    MOST_TALL,
    MOST_THREADS,
    SHARED,
    Planned,
    cost,
    shapes,
    smallest,
    tile_of,
    without_vectors,
)


@dataclass(frozen=True)
class Case:
    """A convolution: sizes of its images, which may be symbols, its window and attributes, what follows, and what is
    read beside it; ``sizes`` are those of a run."""

    image: Sequence[int | str]
    kernel: Sequence[int]
    attributes: str = ""
    follows: str = "y = Identity(c)"
    reads: str = ""
    outputs: str = "T[A, B, C, D] y"
    kind: str = "float16"
    times: int = 1
    before: str = ""
    planned: Mapping[str, int] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The graph."""
        groups = self.image[1]
        shape, window = ", ".join(map(str, self.image)), ", ".join(map(str, self.kernel))
        features = int(groups) * self.times
        outputs = self.outputs if len(self.image) == 4 else self.outputs.replace(
            "A, B, C, D", ", ".join("ABCDE"[:len(self.image)]))
        image = "i" if self.before else "x"
        text = (f"g (T[{shape}] x, T[{features}, 1, {window}] w, T[{features}] b{self.reads}) => ({outputs}) "
                f"{{ {self.before} c = Conv<group = {groups}, {self.attributes}>({image}, w, b) {self.follows} }}")
        return text.replace("T[", f"{self.kind}[").replace(", >", ">")

    @property
    def length(self) -> int:
        """Products of a sum."""
        return int(np.prod(self.kernel))


CASES = {
    "one by one": Case([2, 3, 5, 6], [1, 1], "strides = [2, 1]"),
    "three by three": Case(["N", 6, 14, 14], [3, 3], "pads = [1, 1, 1, 1]", sizes={"N": 3}),
    "of bfloat16": Case(["N", 6, 8, 16], [3, 3], "pads = [1, 1, 1, 1]", kind="bfloat16", sizes={"N": 2}),
    "of float32": Case([2, 5, 9, 12], [3, 5], "pads = [0, 2, 1, 1]", kind="float"),
    "an even window": Case([1, 4, 13, 8], [2, 4], "pads = [1, 0, 0, 3]"),
    "seven by seven": Case([3, 4, 7, 7], [7, 7], "pads = [3, 3, 3, 3]"),
    "every other": Case([1, 3, 33, 7], [3, 3], "strides = [2, 2], pads = [1, 1, 1, 1]"),
    "every third, spread": Case([2, 3, 19, 40], [2, 5], "strides = [3, 1], dilations = [1, 3], pads = [0, 5, 2, 1]"),
    "spread rows": Case([2, 3, 12, 12], [3, 2], "dilations = [3, 2], pads = [3, 0, 3, 1]", kind="float"),
    "one pixel": Case([4, 3, 1, 1], [3, 3], "pads = [1, 1, 1, 1]"),
    "one row": Case([1, 3, 1, 31], [1, 5], "pads = [0, 2, 0, 2]"),
    "larger planes": Case([1, 2, 56, 56], [5, 5], "pads = [2, 2, 2, 2]"),
    "tiles": Case([1, 2, 72, 88], [3, 3], "pads = [1, 1, 1, 1]", kind="float"),
    "sizes known when it runs": Case(["N", 3, "H", "W"], [3, 3], "pads = [1, 1, 1, 1]",
                                     sizes={"N": 2, "H": 11, "W": 40}),
    "sizes that decide the padding": Case([2, 3, "H", "W"], [3, 4], 'auto_pad = "SAME_UPPER", strides = [2, 2]',
                                          sizes={"H": 9, "W": 24}),
    "two of each": Case([2, 3, 9, 8], [3, 3], "pads = [1, 1, 1, 1]", times=2),
    "several of one": Case([2, 1, 9, 8], [3, 3], "pads = [1, 1, 1, 1]", times=4),
    "a sequence": Case(["N", 4, "L"], [31], "pads = [15, 15]", sizes={"N": 2, "L": 100}),
    "a sequence of four": Case([2, 8, 64], [4], "pads = [3, 0]"),
    "a sequence in pieces": Case(["N", 2, "L"], [5], "strides = [2], pads = [2, 1]", sizes={"N": 1, "L": 3000},
                                 planned={"N": 4096, "L": 4096}),
    "a sequence in pieces, spread": Case([2, 2, 1200], [9], "dilations = [3], pads = [24, 0]", kind="float"),
    "a long line": Case([1, 2, 40, 50], [1, 40], "pads = [0, 20, 0, 19]", kind="float"),
    "a wide window": Case([1, 2, 9, 33], [4, 20], "pads = [2, 10, 1, 9]", kind="float"),
    "elements that no window has": Case([2, 3, 13, 13], [2, 2], "strides = [3, 3]"),
    "a large window": Case([1, 2, 20, 20], [11, 9], "pads = [5, 4, 5, 4]"),
    "three axes": Case([2, 3, 5, 6, 8], [3, 3, 3], "pads = [1, 1, 1, 1, 1, 1]"),
    "three axes, spread": Case([1, 2, "D", 6, 9], [2, 3, 1], "strides = [2, 1, 2], dilations = [2, 2, 1]",
                               kind="float", sizes={"D": 7}),
}

DRAWN = 8

AROUND = {
    "an activation": Case(["N", 6, 14, 14], [3, 3], "pads = [1, 1, 1, 1]", "s = Sigmoid(c) y = Mul(c, s)",
                          sizes={"N": 3}),
    "scale, shift and a limit": Case(
        [2, 6, 8, 8], [3, 3], "pads = [1, 1, 1, 1]",
        "d = Mul(c, s) e = Add(d, t) f = Clip(e, low, high) y = Add(f, x)",
        ", T[6, 1, 1] s, T[6, 1, 1] t, T low, T high"),
    "several results": Case([2, 6, 7, 7], [5, 5], "pads = [2, 2, 2, 2]", "y = Relu(c) z = Neg(c)",
                            outputs="T[A, B, C, D] y, T[A, B, C, D] z"),
    "a residual of each image": Case([3, 2, "H", 8], [3, 3], "pads = [1, 1, 1, 1]", "y = Add(c, r)",
                                     ", T[1, 2, H, 8] r", sizes={"H": 10}),
    "a shape of its own": Case([2, 4, 6, 6], [3, 3], "pads = [1, 1, 1, 1]",
                               "f = Constant<value_ints = [0, 4, -1]>() r = Reshape(c, f) y = Relu(r)",
                               outputs="T[A, B, E] y"),
}


SILU = "s = Sigmoid(x) i = Mul(x, s)"

BEFORE = {
    "SiLU": Case(["N", 6, 14, 14], [3, 3], "pads = [1, 1, 1, 1]", before=SILU, sizes={"N": 3}),
    "SiLU of odd planes": Case(["N", 3, 7, 5], [3, 3], "pads = [1, 1, 1, 1]", before=SILU, sizes={"N": 5}),
    "what is no zero at zero": Case([1, 2, 72, 88], [3, 3], "pads = [1, 1, 1, 1]", before="i = Sigmoid(x)"),
    "scale and shift": Case(["N", 4, "H", "W"], [5, 5], "pads = [2, 2, 2, 2]", reads=", T[4, 1, 1] g, T[4, 1, 1] h",
                            before="p = Mul(x, g) q = Add(p, h) i = Relu(q)", sizes={"N": 2, "H": 9, "W": 24}),
    "a sum": Case([2, 4, 12, 12], [3, 3], "pads = [1, 1, 1, 1]", reads=", T[2, 4, 12, 12] r", before="i = Add(x, r)",
                  kind="bfloat16"),
    "an image that is transposed": Case([2, 4, 6, 12], [3, 3], "pads = [1, 1, 1, 1]", reads=", T[2, 4, 12, 6] r",
                                        before="t = Transpose<perm = [0, 1, 3, 2]>(r) i = Add(x, t)"),
}
"""What is computed of the image before, with zeros around what comes of it."""


def made(case: Case, planned: Mapping[str, int] | None = None) -> Made:
    """The case's kernel."""
    found = make(case.text.replace("T low", f"{case.kind} low").replace("T high", f"{case.kind} high"),
                 planned=planned or case.planned or case.sizes)
    assert found.kernel.schedule == "stencil"
    return found


def drawn(seed: int) -> Case:
    """A convolution by chance."""
    chance = Random(seed)
    rank, symbols = chance.choice((1, 2, 2, 2, 3)), ("D", "H", "W")
    kernel = [chance.choice((1, 2, 3, 3, 4, 5, 7)) for _ in range(rank)]
    dilations = [chance.choice((1, 1, 2, 3)) for _ in range(rank)]
    strides = [chance.choice((1, 1, 2, 3)) for _ in range(rank)]
    pads = [chance.randint(0, size) for _ in range(2) for size in kernel]
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True)]
    sizes = [max(chance.choice((1, 7, 8, 14, 15, 24, 40)) // (rank - 1 or 1), size - before - after)
             for size, before, after in zip(reach, pads[:rank], pads[rank:], strict=True)]
    known = [chance.random() < 0.7 for _ in sizes]
    return Case(
        ["N", chance.randint(1, 5),
         *(size if told else symbol for size, told, symbol in zip(sizes, known, symbols[:rank], strict=True))],
        kernel, f"strides = {strides}, dilations = {dilations}, pads = {pads}",
        chance.choice(("y = Identity(c)", "y = Relu(c)", "s = Sigmoid(c) y = Mul(c, s)")),
        kind=chance.choice(("float16", "float16", "bfloat16", "float")), times=chance.choice((1, 1, 1, 2)),
        sizes={"N": chance.randint(1, 3), **{symbol: size for size, symbol in zip(sizes, symbols[:rank], strict=True)}})


@pytest.mark.parametrize("name", [*CASES, *AROUND, *BEFORE])
def test_windows(name: str) -> None:
    case = (CASES | AROUND | BEFORE)[name]
    one = made(case)
    inputs = random_inputs(one, case.sizes, seed=len(name))
    if "low" in inputs:
        inputs |= {"low": np.array(0, np.float16), "high": np.array(6, np.float16)}
    check(one, inputs, length=case.length, orders=["forward", "backward"])


@pytest.mark.parametrize("seed", [
    *range(DRAWN), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(DRAWN, 100))])
def test_windows_by_chance(seed: int) -> None:
    case = drawn(seed)
    one = made(case)
    check(one, random_inputs(one, case.sizes, seed), length=case.length, limit=3)


@pytest.mark.parametrize(("name", "planned"), [
    ("three by three", {"N": 64}), ("every other", {}), ("a sequence", {"N": 64, "L": 96}),
    ("sizes known when it runs", {"N": 8, "H": 56, "W": 64})])
def test_every_choice(name: str, planned: Mapping[str, int]) -> None:
    """Whole planes and tiles, few and many results a thread: what is offered is what runs, and right."""
    case = CASES[name]
    own = made(case, planned)
    assert own.kernel.choices
    kernels = [own.kernel]
    for choice in own.kernel.choices[:6]:
        kernel = make_kernel(Request(own.lowered, "test", planned, choice))
        assert not isinstance(kernel, Refusal) and kernel.choice == choice == parse_choice(str(choice))
        kernels.append(kernel)
    assert len({kernel.plan.variants[0].name for kernel in kernels}) == len(kernels)
    ways = [Made(own.model, own.graph, own.lowered, kernel) for kernel in kernels]
    compile_all(ways)
    inputs = random_inputs(own, {**case.sizes, **({"L": 96} if "L" in planned else {})})
    for way in ways:
        check(way, inputs, length=case.length, limit=1, misalign=False)


STRIPS = {
    "whole planes": Case([3, 4, 28, 28], [7, 7], "pads = [3, 3, 3, 3]"),
    "rows that no strip ends with": Case([2, 3, 33, 24], [5, 5], "pads = [2, 2, 0, 2]", kind="float"),
    "every other column, spread": Case([2, 2, 17, 50], [9, 3],
                                       "pads = [4, 2, 4, 2], dilations = [1, 2], strides = [1, 2]"),
    "sizes known when it runs": Case(["N", 2, "H", "W"], [7, 7], "pads = [3, 3, 3, 3]",
                                     sizes={"N": 1, "H": 31, "W": 40}, planned={"N": 64, "H": 56, "W": 64}),
}


@pytest.mark.parametrize("name", STRIPS)
def test_strips(name: str) -> None:
    """Rows that come one after the other, each into the sums of all windows that it is in."""
    case = STRIPS[name]
    own = made(case)
    strips = [choice for choice in own.kernel.choices if choice["tall"] > MOST_TALL]
    assert strips
    ways = []
    for choice in {choice["planes"] > 0: choice for choice in strips}.values():
        kernel = make_kernel(Request(own.lowered, "test", case.planned or case.sizes, choice))
        assert not isinstance(kernel, Refusal) and "sum_strip" in kernel.source
        ways.append(Made(own.model, own.graph, own.lowered, kernel))
    compile_all(ways)
    inputs = random_inputs(own, case.sizes)
    for way in ways:
        check(way, inputs, length=case.length, limit=1, misalign=False, orders=["forward", "backward"])


@pytest.mark.parametrize("name", ["three by three", "tiles"])
def test_padding_is_zeros_that_weights_multiply(name: str) -> None:
    """So that an infinite weight gives no number at a border, as it does in ONNX Runtime; and what is no number in an
    image shows wherever a window has it."""
    case = CASES[name]
    one = made(case)
    inputs = random_inputs(one, case.sizes)
    inputs["w"][0, 0, 0, 0] = np.inf
    inputs["x"][0, 1, 3, 4], inputs["x"][1 if name == "three by three" else 0, 1, 6, 6] = np.nan, -np.inf
    given = arguments(one, inputs)
    (expected,) = evaluate_lowered(one.lowered, given, case.sizes)
    assert np.isnan(expected[0, 0, 0]).all() and np.isnan(expected[0, 1, 2:5, 3:6]).all()
    assert np.isinf(expected[:, 1]).any() and np.isfinite(expected[:, 1]).any()
    for variant in variants_that_hold(one.kernel.plan, given, []):
        (actual,) = run_plan(one.kernel.plan, one.kernel.source, given, [], variant=variant)
        found = actual.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@pytest.mark.parametrize("name", ["three by three", "a sequence"])
def test_no_images(name: str) -> None:
    one = made(CASES[name])
    (result,) = run_plan(one.kernel.plan, one.kernel.source,
                         arguments(one, random_inputs(one, {**CASES[name].sizes, "N": 0})), [])
    assert result.shape[0] == 0 and result.size == 0


@pytest.mark.parametrize(("text", "code"), [
    ("g (double[1,3,8,8] x, double[3,1,3,3] w) => (double[1,3,6,6] y) { y = Conv<group = 3>(x, w) }",
     "stencil-structure"),
    ("g (float[1,3,8,8] x, float[3,1,K,3] w) => (float[1,3,A,6] y) { y = Conv<group = 3>(x, w) }",
     "stencil-structure"),
    ("g (float[1,3,80,80] x, float[3,1,80,80] w) => (float[1,3,1,1] y) { y = Conv<group = 3>(x, w) }",
     "stencil-structure"),
    ("g (float[1,3,8,8] x, float[3,1,3,3] w) => (float[1,6,6,3] y) "
     "{ c = Conv<group = 3>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }", "stencil-structure"),
    ("g (float[1,4,8,8] x, float[4,2,3,3] w) => (float[1,4,6,6] y) { y = Conv<group = 2>(x, w) }", "no-schedule"),
    ("g (float[1,4,8,8] x, float[4,1,3,3] w) => (float[1,4,1,1] y) "
     "{ c = Conv<group = 4>(x, w) y = GlobalAveragePool(c) }", "no-schedule"),
])
def test_refused(text: str, code: str) -> None:
    """Sums in double, a window of unknown size or of too many elements, results that lie otherwise, channels that are
    summed over, a reduction behind it."""
    found = attempt(parse(text), schedule="stencil")
    assert isinstance(found, Refusal) and found.code == code, found


@pytest.mark.parametrize("kernel", [(1, 1, 4), (1, 3, 3), (1, 7, 7), (3, 3, 3)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 7, 7), (1, 14, 14), (1, 56, 56), (1, 1, 4096), (8, 30, 200)])
def test_tiles_fit(kernel: Sequence[int], sizes: Sequence[int]) -> None:
    """Whatever is offered fits a block, has work for its threads, and the first of it costs least."""
    axes = tuple(replace(ONE, extent=dim(size), count=dim(size), taps=taps, start=dim(-(taps // 2)))
                 for size, taps in zip(sizes, kernel, strict=True))
    planned = Planned(axes, tuple(sizes), 32 * 96, 96, 1, 8, 8, 8 if sizes[-1] % 8 == 0 else 1,
                      8 if sizes[-1] % 8 == 0 else 1)
    found = shapes(planned)
    assert all(cost(found[0], planned) <= cost(shape, planned) for shape in found)
    others = [smallest(axes), without_vectors(planned)]
    assert others[0] is not None
    for shape in [*found, *filter(None, others)]:
        assert 0 < shape.items <= shape.threads <= MOST_THREADS and tile_of(shape, axes).shared <= SHARED
        assert shape.high % shape.tall == 0 and shape.wide % shape.broad == 0


def test_a_window_past_shared_memory_is_refused() -> None:
    axes = (ONE, *(replace(ONE, extent=dim(500), count=dim(20), taps=3, dilation=200) for _ in range(2)))
    assert smallest(axes) is None


@pytest.mark.parametrize(("name", "architecture"), [
    ("three by three", "sm_75"), ("seven by seven", "sm_80"), ("three axes, spread", "sm_86"),
    ("sizes that decide the padding", "sm_90"), ("a large window", "sm_120")])
def test_the_compiler_takes_it(name: str, architecture: str) -> None:
    """And keeps everything in registers."""
    kernel = made(CASES[name]).kernel
    figures = default_compiler().figures(source_of(kernel.source, kernel.plan), architecture)
    assert figures is not None and set(figures) >= set(kernel.plan.kernels)
    assert all(each.spilled_bytes == each.local_bytes == 0 for each in figures.values())
