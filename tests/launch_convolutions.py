"""Fused nodes made by hand whose launch plans have cuDNN convolve: y = f(x * w + v + u), channels last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from fused_models import ADD_ONE, DOMAIN, FLOAT, Fused, elementwise
from launch_models import TYPES
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxfuse.lowering.launch import LaunchPlan, Output, Variant
from onnxfuse.lowering.routines import AXES, CONVOLUTION_ACTIVATIONS, LibraryCall


@dataclass(frozen=True)
class Along:
    """What windows are along an axis of the image; ``after``: zeros behind it."""

    taps: int = 1
    step: int = 1
    apart: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Places from the first of a window to its last, both counted."""
        return (self.taps - 1) * self.apart + 1

    def count(self, size: str) -> str:
        """Windows along it, as an expression."""
        return f"{size} {self.before + self.after - self.span + 1} + {self.step} ceil"


@dataclass(frozen=True)
class Convolved:
    """A convolution along one axis to three; ``fallback``: behind the call stands a kernel that gives x + 1, for
    results of the image's sizes."""

    dtype: str
    axes: tuple[Along, ...]
    activation: str = ""
    bias: bool = False
    added: bool = False
    workspace: int = 0
    algorithm: int = 0
    fallback: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what the node reads."""
        return ("a", "b", *(["c"] if self.bias else []), *(["d"] if self.added else []))

    def sizes(self) -> tuple[str, ...]:
        """Those of the call: s0 images, then the axes, then channels, and of results as many as weights are."""
        count, last = len(self.axes), len(self.axes) + 1
        of_axes = []
        for place in range(len(AXES)):
            own = place - (len(AXES) - count)
            axis = self.axes[own] if own >= 0 else Along()
            size = f"s{own + 1}" if own >= 0 else "1"
            of_axes += [size, axis.count(size), *map(str, (axis.taps, axis.step, axis.apart, axis.before))]
        return ("s0", f"s{last}", f"s{last + 1}", *of_axes, str(CONVOLUTION_ACTIVATIONS.index(self.activation)),
                str(self.algorithm))

    def fused(self) -> Fused:
        """A node that has no kernel of its own but the one behind."""
        count = len(self.axes)
        more = tuple(f"i{2 + place}" for place in range(self.bias + self.added))
        room = ("t0",) if self.workspace else ()
        routine = f"conv{'_bias' * self.bias}{'_add' * self.added}"
        call = LibraryCall(routine, self.dtype, ("i0", "i1", *more, "o0", *room), self.sizes())
        variants = [Variant("library", (call,))]
        if self.fallback:
            variants.append(Variant("generated", (elementwise("add_one", ("i0", "o0", "i64:i0.n")),)))
        shape = ("s0", *(axis.count(f"s{place + 1}") for place, axis in enumerate(self.axes)), f"s{count + 2}")
        plan = LaunchPlan(
            "convolution", 2 + self.bias + self.added, (*(f"i0.{axis}" for axis in range(count + 2)), "i1.0"), (),
            (Output(TYPES[self.dtype], shape),), tuple(variants),
            scratch=(str(self.workspace),) if self.workspace else ())
        return Fused(plan, ADD_ONE, self._body(), self.inputs)

    def _body(self) -> list[NodeProto]:
        """The convolution as ONNX nodes."""
        count = len(self.axes)
        first, last = [0, count + 1, *range(1, count + 1)], [0, *range(2, count + 2), 1]
        pads = [*(axis.before for axis in self.axes), *(axis.after for axis in self.axes)]
        nodes = [
            helper.make_node("Transpose", ["a"], ["image"], perm=first),
            helper.make_node("Transpose", ["b"], ["weights"], perm=first),
            helper.make_node("Conv", ["image", "weights"], ["sums"], pads=pads,
                             strides=[axis.step for axis in self.axes], dilations=[axis.apart for axis in self.axes]),
            helper.make_node("Transpose", ["sums"], ["p"], perm=last),
            helper.make_node("Add" if self.bias else "Identity", ["p", "c"] if self.bias else ["p"], ["s"]),
            helper.make_node("Add" if self.added else "Identity", ["s", "d"] if self.added else ["s"], ["t"])]
        if self.activation == "silu":
            return [*nodes, helper.make_node("Sigmoid", ["t"], ["g"]), helper.make_node("Mul", ["t", "g"], ["y"])]
        function = {"": "Identity", "relu": "Relu", "gelu_tanh": "Gelu"}[self.activation]
        attributes = {"approximate": "tanh"} if function == "Gelu" else {}
        return [*nodes, helper.make_node(function, ["t"], ["y"], **attributes)]

    def model(self, images: Mapping[str, bytes] | None = None) -> ModelProto:
        """A model of one node with inputs and an output of float32, which are rounded to the node's type."""
        def value(name: str, kind: int, rank: int) -> ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(rank)])

        fused, kind, rank = replace(self.fused(), images=images or {}), TYPES[self.dtype], len(self.axes) + 2
        named = dict(zip("xwvu", "abcd", strict=True))
        read = {"x": rank, "w": rank, **({"v": 1} if self.bias else {}), **({"u": rank} if self.added else {})}
        nodes = [*(helper.make_node("Cast", [name], [named[name]], to=kind) for name in read),
                 fused.node("node0", "Region0", [], self.inputs, "y"),
                 helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)]
        graph = helper.make_graph(
            nodes, "convolution", [value(name, FLOAT, each) for name, each in read.items()], [value("z", FLOAT, rank)],
            value_info=[value("y", kind, rank)])
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)],
            functions=[fused.function("Region0")], ir_version=9)

    def shapes(self, images: int, sizes: tuple[int, ...], channels: int, results: int) -> dict[str, tuple[int, ...]]:
        """Of the inputs, and of the result as ``z``."""
        windows = tuple((size + axis.before + axis.after - axis.span) // axis.step + 1
                        for size, axis in zip(sizes, self.axes, strict=True))
        assert prod(windows) >= 0
        out = {"x": (images, *sizes, channels), "w": (results, *(axis.taps for axis in self.axes), channels)}
        out |= {"v": (results,)} if self.bias else {}
        out |= {"u": (images, *windows, results)} if self.added else {}
        return {**out, "z": (images, *windows, results)}


SAME = Along(3, 1, 1, 1, 1)
CONVOLUTIONS = {
    "convolution": Convolved("tf32", (SAME, SAME)),
    "convolution_float16": Convolved(
        "float16", (Along(3, 2, 1, 1, 1), Along(2, 1, 3, 2, 0)), "relu", bias=True, workspace=1 << 12),
    "convolution_bfloat16": Convolved("bfloat16", (Along(), Along()), added=True, algorithm=1),
    "convolution_line": Convolved("float16", (Along(5, 2, 1, 0, 3),), "silu", bias=True, added=True),
    "convolution_volume": Convolved("tf32", (SAME, Along(1, 2), Along(2)), "gelu_tanh", bias=True),
    "convolution_or_sum": Convolved("tf32", (SAME, SAME), workspace=1 << 12, fallback=True),
}
"""By the names of their models."""
