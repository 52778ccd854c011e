"""Models as TorchScript exports a squeeze: If(Shape(x)[i] == 1, Squeeze(x), x), and other Ifs that sizes decide."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from body_models import BOOL, CONSTANTS, INT64, WIDTH, chain, constant, model, node, value
from onnx import helper

NUMBERS = (*CONSTANTS, constant("one", 1, int), constant("second", 1, int), constant("axis", [1], int),
           constant("three", 3, int))

ROW = node("Flatten", "y", "z", axis=0)
"""A model states the rank of its outputs; this one leaves that of what is before it open."""


def graph(name: str, nodes: Sequence[onnx.NodeProto], *outputs: str) -> onnx.GraphProto:
    """A branch."""
    return helper.make_graph(list(nodes), name, [], [value(output, None) for output in outputs])


def squeeze(x: str, y: str, condition: str) -> onnx.NodeProto:
    """The If of a squeeze; both branches give their results names of their own."""
    return node(
        "If", condition, y, then_branch=graph("then", [node("Squeeze", f"{x} axis", f"{y}_less")], f"{y}_less"),
        else_branch=graph("else", [node("Identity", x, f"{y}_same")], f"{y}_same"),
    )


def is_one(x: str, place: str, name: str) -> list[onnx.NodeProto]:
    """``name``: whether the size at a place is 1."""
    return [node("Shape", x, f"{name}_shape"), node("Gather", f"{name}_shape {place}", f"{name}_size"),
            node("Equal", f"{name}_size one", name)]


CONDITIONS: dict[str, tuple[list[onnx.NodeProto], bool]] = {
    "equal": (is_one("x", "second", "c"), True),
    "not equal": ([*is_one("x", "second", "e"), node("Not", "e", "c")], False),
    "another axis": ([node("Shape", "x", "s"), node("Slice", "s two last", "w"), node("Squeeze", "w", "v"),
                      node("Equal", "v one", "c")], False),
    "both": ([*is_one("x", "second", "e"), node("Shape", "x", "s"), node("Size", "s", "r"),
              node("Equal", "r three", "f"), node("And", "e f", "c")], True),
    "either": ([*is_one("x", "second", "e"), node("Shape", "x", "s"), node("Size", "s", "r"),
                node("Greater", "r three", "f"), node("Or", "e f", "c")], True),
    "cast": ([node("Shape", "x", "s"), node("Gather", "s second", "n"), node("Cast", "n", "c", to=BOOL)], True),
}
"""Conditions over x[n, 1, WIDTH] that are known whatever n is, and what they are."""


def squeezed(name: str = "equal", rows: int | str = "n", middle: int | str = 1) -> onnx.ModelProto:
    """A chain, a squeeze of its result, and a chain over that, whose result is one row."""
    nodes, _ = CONDITIONS[name]
    return model(
        [*chain("x", "a", "x"), *nodes, squeeze("a", "b", "c"), *chain("b", "y", "b"), ROW],
        [value("x", [rows, middle, WIDTH])], [value("z", [1, "total"])],
        [*NUMBERS, constant("two", [2], int), constant("last", [3], int)],
    )


def in_turn() -> onnx.ModelProto:
    """A squeeze whose If hangs on the result of another, and an If in a branch whose condition lies in it."""
    inner = [*is_one("b", "second", "d"), squeeze("b", "k", "d"), node("Neg", "k", "yes")]
    outer = node("If", "c", "g", then_branch=graph("then", inner, "yes"),
                 else_branch=graph("else", [node("Abs", "b", "no")], "no"))
    nodes = is_one("x", "second", "c")
    return model(
        [*chain("x", "a", "x"), *nodes, squeeze("a", "b", "c"), outer, *chain("g", "y", "g"), ROW],
        [value("x", ["n", 1, WIDTH])], [value("z", [1, "total"])], NUMBERS,
    )


def by_rate() -> onnx.ModelProto:
    """Two large branches by a number that is an input, each with a squeeze inside."""

    def way(name: str) -> onnx.GraphProto:
        return graph(name, [
            *chain("x", f"{name}_a", "x"), *is_one("x", "second", f"{name}_c"),
            squeeze(f"{name}_a", f"{name}_b", f"{name}_c"), *chain(f"{name}_b", f"{name}_y", f"{name}_b"),
        ], f"{name}_y")

    return model(
        [node("Equal", "rate usual", "c"), node("If", "c", "y", then_branch=way("fast"), else_branch=way("slow"))],
        [value("x", ["n", 1, WIDTH]), value("rate", [], INT64)], [value("y", ["n", WIDTH])],
        [*NUMBERS, constant("usual", 16000, int)],
    )
