"""The native library reads and evaluates launch plans exactly as ``onnxfuse.lowering.launch`` does."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.lowering.launch import (
    DOMAIN,
    HOST_INPUTS,
    REGION_NAMES,
    Check,
    LaunchPlan,
    Output,
    Situation,
    Step,
    Variant,
)
from onnxfuse.runtime import cache, library, nodes
from onnxfuse.visible import visible

UNARY, BINARY = ["not"], ["+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", "and", "or", "ceil", "bcast"]


def native_runs(plan: LaunchPlan | str, situations: Sequence[Situation]) -> list[dict[str, Any]]:
    """What the library says of runs one after the other on one GPU; raises ValueError where the plan is wrong."""
    text = plan if isinstance(plan, str) else plan.to_json()
    runs = [{
        "inputs": [list(shape) for shape in situation.inputs], "hosts": [list(host) for host in situation.hosts],
        "input_addresses": list(situation.input_addresses), "output_addresses": list(situation.output_addresses),
    } for situation in situations]
    raw = {"sm": situations[0].sm, "sms": situations[0].multiprocessors, "runs": runs}
    result: list[dict[str, Any]] = json.loads(
        library.read_checked(library.load().onnxfuse_evaluate_plan, text.encode(), json.dumps(raw).encode())
    )
    for run in result:
        if "error" not in run:
            places, memory = run.pop("places"), run.pop("memory")
            if isinstance(plan, LaunchPlan):
                check_scratch(plan, run, places, memory)
    return result


def check_scratch(plan: LaunchPlan, run: dict[str, Any], places: list[int], memory: int) -> None:
    """Buffers lie within the memory at multiples of 256, and those that a step needs at once lie apart."""
    variant = plan.variants[run["variant"]]
    uses = {place: [number for number, step in enumerate(variant.steps) if f"t{place}" in step.arguments]
            for place in plan.scratch_of(variant)}
    lives = [(steps[0], steps[-1]) for steps in uses.values()]
    sizes = run["scratch"]
    assert len(places) == len(sizes) == len(lives)
    assert all(place % 256 == 0 for place in places)
    assert memory == max((place + size for place, size in zip(places, sizes, strict=True)), default=0)
    for b, (first, last) in enumerate(lives):
        for a in range(b):
            if lives[a][0] <= last and first <= lives[a][1] and sizes[a] and sizes[b]:
                assert places[a] + sizes[a] <= places[b] or places[b] + sizes[b] <= places[a], (run, places, lives)
    # No memory that nothing needs: as much as the fullest step, with buffers rounded up, unless gaps are left over.
    rounded = [-(-size // 256) * 256 for size in sizes]
    assert memory <= sum(rounded)
    if len(sizes) < 3:
        fullest = max((sum(size for size, (first, last) in zip(rounded, lives, strict=True) if first <= step <= last)
                       for step in range(len(variant.steps))), default=0)
        assert memory <= fullest


def native(plan: LaunchPlan | str, situation: Situation) -> dict[str, Any]:
    """The same of one run; raises ValueError with its message."""
    (result,) = native_runs(plan, [situation])
    if "error" in result:
        raise ValueError(result["error"])
    return result


def python(plan: LaunchPlan, situation: Situation) -> dict[str, Any]:
    """The same by the reference: symbols and checks, shapes, the first variant that holds, its launches."""
    situation.bind(plan)
    variant = next(v for v in plan.variants if all(situation.evaluate(guard) for guard in v.guards))

    def argument(text: str) -> int | str:
        return situation.evaluate(text[4:]) if ":" in text else text

    def launch(step: Step) -> dict[str, Any] | None:
        grid = [situation.evaluate(size) for size in step.grid]
        if 0 in grid:
            return None
        more: dict[str, Any] = {"dependent": True} if step.dependent else {}
        if step.cluster is not None:
            more["cluster"] = [situation.evaluate(size) for size in step.cluster]
            if not 1 <= prod(more["cluster"]) <= 8:
                raise ValueError(f"a cluster of {'x'.join(map(str, more['cluster']))} blocks; it has 1 to 8")
            if any(size % along for size, along in zip(grid, more["cluster"], strict=True)):
                sizes, cluster = ("x".join(map(str, each)) for each in (grid, more["cluster"]))
                raise ValueError(f"the grid {sizes} of a launch is no multiple of its cluster {cluster}")
        return {
            "kernel": step.kernel, "grid": grid, "block": [situation.evaluate(size) for size in step.block],
            "shared": situation.evaluate(step.shared), "args": [argument(text) for text in step.arguments],
            **more,
        }

    used = {text for step in variant.steps for text in step.arguments}
    outputs = [[situation.evaluate(size) for size in output.shape] for output in plan.outputs]
    for index, shape in enumerate(outputs):
        for axis, size in enumerate(shape):
            if size < 0:
                raise ValueError(f"axis {axis} of output {index} would have size {size}")
    return {
        "symbols": situation.symbols,
        "outputs": outputs,
        "variant": plan.variants.index(variant),
        "scratch": [situation.evaluate(size) for i, size in enumerate(plan.scratch) if f"t{i}" in used],
        "steps": [launch(step) for step in variant.steps],
    }


def expressions(atoms: list[str]) -> st.SearchStrategy[str]:
    """Expressions of a few operators; sizes stay far below 64 bits."""
    return st.recursive(
        st.sampled_from(atoms) | st.integers(-9, 300).map(str),
        lambda inner: (
            st.builds("{} {} {}".format, inner, inner, st.sampled_from(BINARY))
            | st.builds("{} {}".format, inner, st.sampled_from(UNARY))
            | st.builds("{} {} {} sel".format, inner, inner, inner)
        ),
        max_leaves=6,
    )


SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 64, 129, 300])
BEFORE = ["i0.0", "i0.1", "i1.0", "i0.n", "i1.n", "i0.addr", "h0.0", "h0.1", "h0.n", "h1.n", "sm", "sms"]
AFTER = [*BEFORE, "s0", "s1", "o0.addr"]


def positive(expression: str) -> str:
    """A size that a launch takes: at least 0, below 1000."""
    return f"{expression} 1000 %"


# Built once: hypothesis takes longer to look at new strategies than to draw from them.
BORDERS, SIZED, LATE = expressions(BEFORE), expressions([*BEFORE, "s0"]), expressions(AFTER)
EARLY, WITHIN = expressions([*BEFORE, "s0", "s1"]), LATE.map(positive)
ARGUMENTS = st.lists(st.sampled_from(["i0", "i1", "o0", "t0", "t1", "t2", "t3"]) | WITHIN.map("i32:{}".format)
                     | LATE.map("i64:{}".format), max_size=4).map(tuple)
THREE = st.tuples(WITHIN, WITHIN, WITHIN)
CLUSTERS = st.none() | st.tuples(*[st.sampled_from(["1", "1", "2", "4", "i0.0", "s0 1000 %"])] * 3)
STEPS = st.lists(st.builds(Step, st.sampled_from(["first", "sec\u00f6nd"]), THREE, THREE, ARGUMENTS, WITHIN, CLUSTERS,
                           st.booleans()), max_size=4).map(tuple)
ALIGNMENTS = st.sampled_from(["i0.addr 16 % 0 ==", "i1.addr 2 % 0 ==", "o0.addr 4 % 0 ==", "o0.addr 3 % 0 ==",
                              "o0.addr 8 % 1 ==", "i0.addr 512 % 0 ==", "i0.at i1.at ==", "i1.at o0.at ==",
                              "o0.at i0.at - 1099511627776 // not"])
GUARDED = st.lists(st.builds(Variant, st.just("guarded"), STEPS,
                             st.lists(LATE | ALIGNMENTS, min_size=1, max_size=3).map(tuple)), max_size=2)
CONDITIONS, AXES = st.lists(EARLY, max_size=2), st.lists(EARLY, max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> LaunchPlan:
    """Plans of two tensors, two host inputs, two symbols and up to three variants."""
    return LaunchPlan(
        "region \"x\"\n", 2, (draw(BORDERS), draw(SIZED)),
        tuple(Check(condition, f"check {i}") for i, condition in enumerate(draw(CONDITIONS))),
        (Output(1, tuple(draw(AXES))),), (*draw(GUARDED), Variant("rest", draw(STEPS))),
        tuple(draw(WITHIN) for _ in range(4)), ("-DX=1",),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Sizes, host values and addresses that fit ``plans``."""
    address = st.integers(0, 2**40) | st.sampled_from([256, 2**39])
    return Situation(
        ((draw(SIZES), draw(SIZES)), (draw(SIZES),)), ((draw(SIZES), draw(st.integers(-5, 5))), ()),
        (draw(address), draw(address)), (draw(address),), draw(st.sampled_from([75, 80, 90])), 132,
    )


@given(plans(), situations())
@settings(max_examples=120, deadline=None)
def test_plans_mean_the_same_in_both_languages(plan: LaunchPlan, situation: Situation) -> None:
    assert LaunchPlan.from_json(plan.to_json()) == plan
    try:
        expected = python(plan, situation)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            native(plan, situation)
    else:
        assert native(plan, situation) == expected


@given(plans(), st.lists(situations(), min_size=2, max_size=5), st.sampled_from([75, 80, 90]))
@settings(max_examples=120, deadline=None)
def test_what_is_kept_from_run_to_run_changes_nothing(plan: LaunchPlan, runs: list[Situation], sm: int) -> None:
    """Each run twice, the second time at other addresses, in any order: as if it were the only one."""
    sequence = []
    for run in runs:
        run.sm = sm
        moved = replace(run, input_addresses=run.input_addresses[::-1], output_addresses=(run.output_addresses[0] + 8,))
        sequence += [run, moved, replace(run)]
    seen = native_runs(plan, sequence)
    assert seen == [native_runs(plan, [run])[0] for run in sequence]
    for run, result in zip(sequence, seen, strict=True):
        if "error" not in result:
            assert result == python(plan, run)


def test_a_guard_sees_what_is_bound_to_the_memory_of_an_input() -> None:
    """By the whole address: another one may be the same modulo 256.  Where no address is known tensors lie apart."""
    plan = LaunchPlan("r", 2, (), (), (Output(1, ("i0.0",)),), (
        Variant("bound", (), ("i1.at o0.at ==",)), Variant("rest", ())))
    assert plan.version == 2
    runs = [Situation(((4,), (4,)), (), (0, given), (written,))
            for given, written in ((4096, 4096), (4096, 4352), (2**47 + 256, 256), (2**47, 2**47))]
    for run, chosen in zip(runs, (0, 1, 1, 0), strict=True):
        assert native(plan, run)["variant"] == python(plan, run)["variant"] == chosen
    assert Situation(((4,), (4,))).place(plan) == 1
    with pytest.raises(ValueError, match="a launch plan of version 1 that asks for what version 2 has"):
        native(plan.to_json().replace('"version":2', '"version":1'), runs[0])
    step = Step("first", ("i0.at", "1", "1"), ("32", "1", "1"), ())
    with pytest.raises(ValueError, match="names a whole address outside of a guard"):
        native(replace(plan, variants=(Variant("rest", (step,)),)), runs[0])


def test_more_sizes_in_turn_than_are_kept() -> None:
    """Launches are those of the run's own sizes; one that fails in between leaves nothing behind."""
    step = Step("first", ("i0.0", "1", "1"), ("32", "1", "1"), ("i0", "i64:i0.0 2 *"), "0")
    plan = LaunchPlan("r", 1, ("i0.0",), (Check("i0.0 9 <", "too many"),), (Output(1, ("i0.0",)),),
                      (Variant("rest", (step,)),))
    runs = [Situation(((size,),), (), (0,), (0,)) for size in (1, 2, 3, 4, 5, 6, 9, 5, 6, 7, 9, 1, 9, 7, 8, 2, 1)]
    for run, result in zip(runs, native_runs(plan, runs), strict=True):
        size = run.inputs[0][0]
        expected = {"error": "too many"} if size == 9 else python(plan, run)
        assert result == expected


def test_a_run_reads_nothing_of_the_one_before() -> None:
    """Inputs that a run does not give are absent, whatever an earlier one gave."""
    plan = LaunchPlan("r", 2, ("i0.0", "i1.0", "h1.0"), (), (), (Variant("rest", ()),))
    whole = Situation(((4,), (5,)), ((7,), (8,)))
    runs = [whole, Situation(((4,),), whole.hosts), Situation(whole.inputs, ((7,),)), whole]
    results = native_runs(plan, runs)
    assert results[0] == results[3] == python(plan, whole)
    assert results[1:3] == [
        {"error": "tensor input 1 is absent"},
        {"error": "host input 1 has 0 elements; the launch plan reads element 0"},
    ]


def one(expression: str, **attributes: Any) -> LaunchPlan:
    """A plan whose only symbol is the expression."""
    return LaunchPlan("r", 1, (expression,), (), (), (Variant("v", ()),), **attributes)


def evaluate(expression: str, situation: Situation | None = None) -> int:
    """One expression by the library."""
    result: int = native(one(expression), situation or Situation(((4, 6),)))["symbols"][0]
    return result


@pytest.mark.parametrize(("expression", "value"), [
    ("7 2 //", 3), ("-7 2 //", -4), ("7 -2 //", -4), ("7 0 //", 0), ("-7 2 %", 1), ("7 -2 %", -1), ("7 0 %", 0),
    ("7 2 ceil", 4), ("-7 2 ceil", -3), ("8 2 ceil", 4), ("7 0 ceil", 0), ("1 5 bcast", 5), ("5 1 bcast", 5),
    ("0 3 4 sel", 4), ("2 3 4 sel", 3), ("0 not", 1), ("i0.n", 24), ("i0.1 i0.0 -", 2),
    ("-9223372036854775808", -2**63), ("9223372036854775807", 2**63 - 1), ("-9223372036854775808 -1 %", 0),
])
def test_arithmetic(expression: str, value: int) -> None:
    assert evaluate(expression) == value
    assert Situation(((4, 6),)).evaluate(expression) == value


@pytest.mark.parametrize("expression", [
    "9223372036854775807 1 +", "-9223372036854775808 1 -", "4294967296 4294967296 *", "-9223372036854775808 -1 //",
    "-9223372036854775808 -1 ceil", "9223372036854775808", "i0.n i0.n *",
])
def test_sizes_past_64_bits_are_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^a size of the launch plan leaves 64 bits$"):
        evaluate(expression, Situation(((2**31, 2**31),)))


def test_an_empty_tensor_has_no_elements_however_large_its_other_axes() -> None:
    assert evaluate("i0.n", Situation(((2**40, 2**40, 0),))) == 0


@pytest.mark.parametrize(("expression", "message"), [
    ("", "the expression '' of the launch plan leaves no single value"),
    ("1 2", "the expression '1 2' of the launch plan leaves no single value"),
    ("1 +", "the expression '1 +' of the launch plan lacks an operand"),
    ("1 2 sel", "the expression '1 2 sel' of the launch plan lacks an operand"),
    ("i1.0", "unknown atom 'i1.0' in an expression of the launch plan"),
    ("i0.-1", "unknown atom 'i0.-1' in an expression of the launch plan"),
    ("i0.", "unknown atom 'i0.' in an expression of the launch plan"),
    ("s0", "unknown atom 's0' in an expression of the launch plan"),
    ("h8.0", "unknown atom 'h8.0' in an expression of the launch plan"),
    ("o0.addr", "unknown atom 'o0.addr' in an expression of the launch plan"),
    ("x", "unknown atom 'x' in an expression of the launch plan"),
    ("x" * 201, f"unknown atom '{'x' * 200}...' in an expression of the launch plan"),
    ("\u00e9" * 150, f"unknown atom '{chr(0xE9) * 100}...' in an expression of the launch plan"),
    ("1 " * 40_000, f"the expression '{'1 ' * 100}...' of the launch plan is too long"),
    ("h0.65536", "unknown atom 'h0.65536' in an expression of the launch plan"),
    ("i0.1024", "unknown atom 'i0.1024' in an expression of the launch plan"),
    ("1 " * 65 + "+ " * 64, "is nested too deep"),
    ("i0.2", "tensor input 0 has 2 axes; the launch plan reads axis 2"),
    ("h1.3", "host input 1 has 0 elements; the launch plan reads element 3"),
])
def test_wrong_expressions(expression: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        evaluate(expression)
    assert str(error.value) == message or (message == "is nested too deep" and str(error.value).endswith(message))


def changed(**members: Any) -> str:
    """A good plan as JSON with some members replaced, or dropped where None."""
    raw = json.loads(one("1").to_json()) | members
    return json.dumps({key: value for key, value in raw.items() if value is not None})


STEP = {"kernel": "k", "grid": ["1"] * 3, "block": ["1"] * 3, "shared": "0", "args": []}


@pytest.mark.parametrize(("plan", "message"), [
    (changed(version=3), "the launch plan has version 3; this library reads 1 and 2: install the release of onnxfuse "
                         "that wrote the model, or a newer one"),
    *((changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"cluster": ["1"] * 3} | more]}], **version),
       text) for version, more, text in (
          ({}, {}, "a launch plan of version 1 that asks for what version 2 has"),
          ({"version": 2}, {"dependent": 1}, "'dependent' is neither true nor false"),
          ({"version": 2}, {"cluster": ["2"]}, "'cluster' of a step has 1 sizes, not 3"),
          ({"version": 2}, {"cluster": ["3", "3", "1"]}, "a cluster of 3x3x1 blocks; it has 1 to 8"),
          ({"version": 2}, {"cluster": ["1", "0", "1"]}, "a cluster of 1x0x1 blocks; it has 1 to 8"),
          ({"version": 2}, {"cluster": ["2147483647"] * 3},
           "a cluster of 2147483647x2147483647x2147483647 blocks; it has 1 to 8"),
          ({"version": 2}, {"cluster": ["1", "-1", "1"]}, "the cluster of a launch is -1"),
          ({"version": 2}, {"cluster": ["1", "2", "1"]},
           "the grid 1x1x1 of a launch is no multiple of its cluster 1x2x1"))),
    (changed(checks=None), "'checks' is missing"),
    (changed(inputs="1"), "'inputs' is no integer"),
    (changed(inputs=-1), "'inputs' is -1"),
    (changed(variants=[]), "the last variant of the launch plan must have no guard"),
    (changed(variants=[{"name": "v", "guards": ["1"], "steps": []}]),
     "the last variant of the launch plan must have no guard"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"grid": ["1"]}]}]),
     "'grid' of a step has 1 sizes, not 3"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"args": ["i1"]}]}]),
     "unknown argument 'i1' of a kernel in the launch plan"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"args": ["i32:3000000000"]}]}]),
     "a 32-bit argument of a kernel is 3000000000"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"grid": ["1", "-1", "1"]}]}]),
     "the grid of a launch is -1"),
    ("[]", "'version' is missing"),
    (changed(options=["-DX=1"] * 257), "the launch plan has 257 options; 256 at most"),
    (changed(symbols=["1"] * 4097), "the launch plan has 4097 symbols; 4096 at most"),
    (changed(checks=[["1", "x"]] * 4097), "the launch plan has 4097 checks; 4096 at most"),
    (changed(checks=[["1", "x" * 4097]]), "a check's message has 4097 bytes; 4096 at most"),
    (changed(outputs=[{"dtype": 1, "shape": []}] * 4097), "the launch plan has 4097 outputs; 4096 at most"),
    (changed(outputs=[{"dtype": 1, "shape": ["1"] * 1025}]),
     "the launch plan has 1025 axes of an output; 1024 at most"),
    *((changed(outputs=[{"dtype": dtype, "shape": []}]), f"'dtype' of an output is {dtype}")
      for dtype in (-1, 0, 8, 64, 2**32 + 1)),
    (changed(scratch=["1"] * 1025), "the launch plan has 1025 scratch buffers; 1024 at most"),
    (changed(variants=[{"name": "v", "guards": [], "steps": []}] * 257),
     "the launch plan has 257 variants; 256 at most"),
    (changed(variants=[{"name": "v", "guards": ["1"] * 4097, "steps": []}]),
     "the launch plan has 4097 guards of a variant; 4096 at most"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [{}] * 65537}]),
     "the launch plan has 65537 steps; 65536 at most"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"args": ["i0"] * 4097}]}]),
     "the launch plan has 4097 arguments of a kernel; 4096 at most"),
    (changed(variants=[{"name": "v", "guards": [], "steps": [STEP | {"kernel": "a\0b"}]}]),
     "'kernel' has a zero byte"),
    (changed(region="a\0b"), "'region' has a zero byte"),
    (changed(region="r" * 4097), "'region' has 4097 bytes; 4096 at most"),
    (" " * 2**24 + "1", "the launch plan has 16777217 bytes; 16777216 at most"),
], ids=lambda value: value[:40])
def test_wrong_plans(plan: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        native(plan, Situation(((4, 6),)))
    assert str(error.value) == message


def read_json(text: str | bytes) -> Any:
    """A JSON text after the library read and wrote it."""
    raw = text.encode() if isinstance(text, str) else text
    return json.loads(library.read_checked(library.load().onnxfuse_read_json, raw, len(raw)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2**63, 2**63 - 1) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.booleans())
@settings(max_examples=80, deadline=None)
def test_json_is_read_as_python_reads_it(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1)
    if "\0" not in json.dumps(value, ensure_ascii=False):
        assert read_json(text) == value


@given(st.binary(max_size=40) | st.text('[]{}",:0123456789-truefalsn\\u \n', max_size=40).map(str.encode))
@settings(max_examples=100, deadline=None)
def test_hostile_json_is_an_error_or_what_python_reads(raw: bytes) -> None:
    try:
        result = read_json(raw)
    except (ValueError, UnicodeDecodeError) as error:
        assert str(error)
    else:
        assert result == json.loads(raw.decode("utf-8", "replace"))


@pytest.mark.parametrize(("text", "message"), [
    ("", "not JSON: a value expected at byte 0"),
    ("[1,]", "not JSON: a value expected at byte 3"),
    ("[1 2]", "not JSON: ',' or ']' expected at byte 3"),
    ('{"a":1,"a":2}', "not JSON: a key is repeated at byte 10"),
    ('{"a" 1}', "not JSON: ':' expected at byte 5"),
    ("{1:2}", "not JSON: a key expected at byte 1"),
    ("1.5", "not JSON: a number that is no integer at byte 1"),
    ("1e3", "not JSON: a number that is no integer at byte 1"),
    ("01", "not JSON: a number starts with zero at byte 1"),
    ("9223372036854775808", "not JSON: an integer past 64 bits at byte 19"),
    ("-9223372036854775809", "not JSON: an integer past 64 bits at byte 19"),
    ('"a', "not JSON: a string without end at byte 2"),
    ('"\n"', "not JSON: a control character in a string at byte 1"),
    ('"\\x"', "not JSON: an unknown escape at byte 3"),
    ('"\\u12g4"', "not JSON: four hexadecimal digits expected at byte 5"),
    ('"\\ud800"', "not JSON: a lone surrogate at byte 7"),
    ('"\\udc00"', "not JSON: a lone surrogate at byte 7"),
    ("1 1", "not JSON: unexpected text after the value at byte 2"),
    ("[" * 100000, "not JSON: nested too deep at byte 65"),
    ("[" + "0," * 2**20, "not JSON: too many values at byte 2097151"),
    (json.dumps(dict.fromkeys(map(str, range(65)))), "not JSON: too many keys in an object at byte 763"),
    (b'"\xc3"', "not JSON: a byte that is no UTF-8 at byte 1"),
    (b'"a\xed\xa0\x80"', "not JSON: a byte that is no UTF-8 at byte 2"),
    (b'"\xc0\x80"', "not JSON: a byte that is no UTF-8 at byte 1"),
    ("nul", "not JSON: a value expected at byte 0"),
])
def test_json_errors(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_json(text)
    assert str(error.value) == message


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300),
       st.lists(st.sampled_from(["-DX=1", "--use_fast_math", "-I/a b"]), max_size=3))
@settings(max_examples=100, deadline=None)
def test_cache_entries_have_one_name_in_both_languages(source: str, options: list[str]) -> None:
    name = library.read_text(library.load().onnxfuse_cache_key, source.encode(), "\n".join(options).encode(), b"sm_90a")
    assert name == cache.key(source, options, "sm_90a")
    assert name == "sm_90a-" + hashlib.sha256(("\n".join(options) + "\0" + source).encode()).hexdigest() + ".cubin"


def test_texts_of_others_are_shown_as_python_shows_them() -> None:
    """Characters that hide and their neighbours, as far as this Python's Unicode has assigned them."""
    hidden = [code for code in range(1, sys.maxunicode) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp")]
    edges = sorted({max(code + step, 1) for code in hidden for step in (-1, 0, 1)})
    shown = "".join(letter for letter in map(chr, edges) if unicodedata.category(letter) not in ("Cn", "Cs", "Co"))
    assert len(hidden) > 150
    for text in (shown, "\ue000\uf8ff\U000f0000\U0010fffd", "é 模 µ \\n"):
        with pytest.raises(ValueError) as error:
            native(changed(checks=[["0", text]]), Situation(((4,),)))
        assert str(error.value) == visible(text)


def test_long_plans_are_read_in_time_linear_in_their_length() -> None:
    """8 MB of steps, ten thousand times a rule's plan: seconds on a slow machine, where a square would be hours."""
    steps = [STEP | {"kernel": f"kernel_{number}", "args": ["i0", "i64:i0.n 4 * 128 ceil", "i32:7"]}
             for number in range(60_000)]
    text = changed(variants=[{"name": "v", "guards": [], "steps": steps}])
    assert 7 << 20 < len(text) < 9 << 20
    start = time.monotonic()
    assert len(native(text, Situation(((4, 6),)))["steps"]) == len(steps)
    assert time.monotonic() - start < 20


def test_constants_of_other_stages_agree() -> None:
    assert nodes.DOMAIN == DOMAIN
    headers = {name: (library.library_path().parent / "native" / name).read_text() for name in ("op.h", "expression.h")}
    assert f"kRegionNames = {REGION_NAMES};" in headers["op.h"]
    assert f"kHostInputs = {HOST_INPUTS};" in headers["expression.h"]
