"""Models that are small and would keep a careless optimiser busy for ever: each is done with in seconds."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import ROOT, run
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import api
from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.graph.dims import LONGEST, MOST_POWER, MOST_TERMS, SizeTooLargeError, dim, product, symbol
from onnxfuse.graph.stated import parse
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise

sys.path.insert(0, str(ROOT / "benchmarks"))
limits = importlib.import_module("limits")

LONG = 60.0
"""Seconds that none may take, on a busy machine; most take one."""

ONE = numpy_helper.from_array(np.array([1], np.int64), "one")


def model(nodes: list[onnx.NodeProto], shape: list[int | str] | None = None) -> onnx.ModelProto:
    """From x to y, with a constant one."""
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape or ["s"]),
             helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "bounded", infos[:1], infos[1:], [ONE])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sized(steps: Callable[[int], list[onnx.NodeProto]], count: int) -> onnx.ModelProto:
    """A tensor of a size that so many steps compute, and a chain behind."""
    nodes = [helper.make_node("Shape", ["x"], ["s0"]), *(node for place in range(count) for node in steps(place))]
    nodes += [helper.make_node("ConstantOfShape", [f"s{count}"], ["e"]), helper.make_node("Exp", ["e"], ["f"]),
              helper.make_node("Neg", ["f"], ["y"])]
    return model(nodes)


def squared(place: int) -> list[onnx.NodeProto]:
    return [helper.make_node("Mul", [f"s{place}"] * 2, [f"s{place + 1}"])]


def grown(place: int) -> list[onnx.NodeProto]:
    """(s + 1) * s: twice the terms, and coefficients of any length."""
    return [helper.make_node("Add", [f"s{place}", "one"], [f"a{place}"]),
            helper.make_node("Mul", [f"a{place}", f"s{place}"], [f"s{place + 1}"])]


def divided(place: int) -> list[onnx.NodeProto]:
    """(s + 1) // s + s, whose text doubles."""
    return [helper.make_node("Add", [f"s{place}", "one"], [f"a{place}"]),
            helper.make_node("Div", [f"a{place}", f"s{place}"], [f"d{place}"]),
            helper.make_node("Add", [f"d{place}", f"s{place}"], [f"s{place + 1}"])]


def quick(made: onnx.ModelProto, **dims: int) -> Optimised:
    start = time.perf_counter()
    result = optimise(made, Options(dims=dims, verify=False, database=False))
    assert time.perf_counter() - start < LONG
    return result


@pytest.mark.parametrize("count", [24, 60])
@pytest.mark.parametrize("steps", [squared, grown, divided])
def test_sizes_that_grow_without_end_are_unknown(steps: Callable[[int], list[onnx.NodeProto]], count: int) -> None:
    """The chain behind is fused all the same, for pointwise kernels ask for no size."""
    result = quick(sized(steps, count))
    shape = result.graph.values["e"].shape
    assert shape is not None and str(shape[0]) == "e.0"
    assert [[node.op for node in fusion.nodes] for fusion in result.plan.fusions] == [["Exp", "Neg"]]


@pytest.mark.parametrize("steps", [squared, grown])
def test_sizes_of_a_few_steps_are_known(steps: Callable[[int], list[onnx.NodeProto]]) -> None:
    (size,) = quick(sized(steps, 3)).graph.values["e"].shape or ()
    s = 5
    for _ in range(3):
        s = s * s if steps is squared else (s + 1) * s
    assert size.evaluate({"s": 5}) == s


def test_what_is_followed() -> None:
    s = symbol("s")
    assert product([s] * MOST_POWER).is_followed() and not product([s] * (MOST_POWER + 1)).is_followed()
    many = [symbol(f"a{place}") for place in range(MOST_TERMS + 1)]
    assert sum(many[1:], dim(0)).is_followed() and not sum(many, dim(0)).is_followed()
    assert dim((1 << 63) - 1).is_followed() and not dim(1 << 63).is_followed()
    assert (symbol("n" * (LONGEST - 2)) + 1).is_followed() is False
    with pytest.raises(SizeTooLargeError):
        product([sum(many, dim(0))] * 4)


@pytest.mark.parametrize("text", [
    "*".join(["(a + b + c + d + e + f)"] * 20), "(" * 500 + "a" + ")" * 500, "a" + " + a" * 2000, "((a**8)**8)**8",
    "-" * 900 + "a", "9" * 900, "(a+1)**8*(b+1)**8*(c+1)**8",
])
def test_texts_of_sizes_that_explode_name_a_symbol(text: str) -> None:
    start = time.perf_counter()
    size = parse(text)
    assert time.perf_counter() - start < 2.0
    assert size.is_followed() or size.value is not None or size == symbol(text)
    assert quick(model([helper.make_node("Exp", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])], [text]))


def chain(count: int) -> list[onnx.NodeProto]:
    names = ["x", *(f"v{place}" for place in range(count - 1)), "y"]
    return [helper.make_node("Exp" if place % 2 else "Neg", [names[place]], [names[place + 1]])
            for place in range(count)]


def concat(count: int) -> list[onnx.NodeProto]:
    nodes = [helper.make_node("Exp", ["x"], [f"v{place}"]) for place in range(count)]
    return [*nodes, helper.make_node("Concat", [f"v{place}" for place in range(count)], ["y"], axis=0)]


def ranks(count: int) -> list[onnx.NodeProto]:
    """Axes added one after the other, past what any kernel or NumPy takes."""
    names = ["x", *(f"v{place}" for place in range(count - 1)), "y"]
    return [helper.make_node("Unsqueeze", [names[place], "one"], [names[place + 1]]) for place in range(count)]


@pytest.mark.parametrize(("nodes", "count"), [(chain, 1000), (concat, 500), (ranks, 100)])
def test_many_of_one_kind(nodes: Callable[[int], list[onnx.NodeProto]], count: int) -> None:
    try:
        quick(model(nodes(count)))
    except OnnxfuseError as error:  # one clear message will do
        assert error.message


@pytest.mark.parametrize(("kind", "count"), [
    ("ifs", 31), ("growing", 24), ("carried", 50), ("calls", 300), ("beside", 20), ("huge", 2), ("identities", 1500),
    ("readers", 100), ("split", 150), ("splits", 50), ("wide", 8000), ("attributes", 4000), ("ranks", 100),
])
def test_all_that_is_done_without_a_run(kind: str, count: int) -> None:
    """Optimised, reported, explained and put back as it was; sizes like these took forever, or all of the memory."""
    found = limits.handle(kind, count)
    assert set(found.stages) == {"optimize", "report", "explain", "unfuse"}, found.outcome
    assert "NOT" not in found.outcome
    assert found.seconds < LONG


def message(length: int, inner: bytes, number: int) -> bytes:
    """A field of a protobuf message that holds another message."""
    size = length
    digits = []
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *digits, size]) + inner


def test_bodies_nested_past_what_a_file_can_hold(tmp_path: Path) -> None:
    """200 deep: no ONNX library writes it, but any program can."""
    graph = b""
    for _ in range(200):
        attribute = bytes([0x0A, 1]) + b"b" + bytes([0xA0, 1, 5]) + message(len(graph), graph, 6)
        node = message(2, b"If", 4) + message(len(attribute), attribute, 5)
        graph = message(len(node), node, 1)
    path = tmp_path / "deep.onnx"
    path.write_bytes(bytes([8, 8]) + message(len(graph), graph, 7))
    for command in ("optimize", "report", "explain", "unfuse"):
        result = run(command, path, *(("-o", tmp_path / "out.onnx") if command == "unfuse" else ()))
        assert result.exit_code == 1 and "The model has bodies in bodies, more than 31 deep." in result.output


def test_bodies_nested_as_deep_as_a_file_can_hold() -> None:
    with pytest.raises(ModelError, match="bodies in bodies, 32 deep, and ONNX files hold 31"):
        api.report(limits.ifs(32))


def test_functions_that_stand_for_more_nodes_than_there_can_be() -> None:
    """60 functions of two calls: two to the power of 59 nodes."""
    with pytest.raises(ModelError, match="The model's functions stand for 576,460,752,303,423,488 nodes"):
        api.report(limits.laughs(60))
    assert limits.handle("laughs", 10).stages.keys() >= {"optimize"}
