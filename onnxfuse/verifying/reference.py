"""What a fused node should compute, from its own body.

    body ─ float64 ─▶ reference            what every kernel is compared with; of large ones the GPU's passes too
         ─ nudged ──▶ two more references  where the body decides by computed numbers
         ─ wavering ▶ some more            how far what cancels may be off
         ─ hidden ──▶ one more             where a mask hides what no kernel need read
         ─ rounded ─▶ the original's own   every node's result rounded to its declared type
         ─ inside ──▶ one more of these    where an attention is one node, with its scores in float32 (``spelled_out``)
         ─ TF32 ────▶ two more of these    where products of float32 round their operands (``rounded_products``)
         ─ float32 ─▶ what a kernel may err where the original overflowed

On a GPU the original's own result comes from the CUDA provider instead (``runner``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.lowering.launch import HOST_INPUTS
from onnxfuse.rewriting import FusedNode, body_model, value_types
from onnxfuse.verifying.device_arrays import Values
from onnxfuse.verifying.device_bodies import device_body, unsuited
from onnxfuse.verifying.evaluate import Evaluator
from onnxfuse.verifying.feeds import is_float
from onnxfuse.verifying.hidden import guarded_model, may_hide, outweighed_model, shown
from onnxfuse.verifying.rounded_products import is_product, rounds, with_rounded_products
from onnxfuse.verifying.spelled_out import spelled_out
from onnxfuse.verifying.tolerances import WIDTHS
from onnxfuse.verifying.wavering import SAMPLE, SAMPLES, WAY, wavering_model

Array = NDArray[Any]

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_STEPS = frozenset({"Floor", "Ceil", "Round", "Sign", "Mod", "ArgMax", "ArgMin", "TopK", "Hardmax",
                    "ThresholdedRelu", "Shrink", "QuantizeLinear", "DynamicQuantizeLinear"})
"""Operators whose result jumps where an operand changes a little."""
_MOVES = frozenset({
    "Identity", "Cast", "CastLike", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split",
    "Concat", "Expand", "Tile", "Gather", "GatherElements", "GatherND", "Where", "Neg", "Abs", "Relu", "Max", "Min",
    "Clip", "ReduceMax", "ReduceMin", "Constant", "ConstantOfShape", "Shape", "Size", "DepthToSpace", "SpaceToDepth",
    "Not", "And", "Or", "Xor", "IsNaN", "IsInf", "Range", "Pad", "Dropout",
})
"""Operators that give elements of their operands, or exact functions of them: no rounding, but for a Cast's own."""

_NUDGES: dict[int, float] = {TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7, TensorProto.FLOAT: 2.0**-19,
           TensorProto.DOUBLE: 2.0**-48}
"""How much a computed number of each type is nudged: a unit in the last place of the narrow types, to which it is
rounded, and the error of a chain of operators in the others."""


@dataclass(frozen=True)
class Precision:
    """What each output of a body hangs on.

    Attributes:
        arithmetic: the narrowest float type in which a number on the way to it is computed or rounded; None where
            none is.
        decides: whether a computed number is compared or rounded to an integer on the way to it.
        reduces: whether there is a sum or a norm on the way to it.
    """

    arithmetic: int | None
    decides: bool
    reduces: bool


class Reference:
    """The body of a fused node, ready to be evaluated in nine ways."""

    def __init__(self, node: FusedNode, model: onnx.ModelProto) -> None:
        """Read the body.

        Args:
            node: of ``model``, which is a fused one.

        Raises:
            ModelError: the node's types were dropped from the file.
            VerificationError: ONNX Runtime cannot run the body.
        """
        self._node, self._model = node, model
        self.body = body_model(node, model)
        self.spelled = spelled_out(self.body)
        self.lifted = spelled_out(body_model(node, model, precision="float64"))
        self.types = value_types(self.spelled)
        self.precision = tuple(_precision(self.body, self.types))
        self._declared = {
            name: self.types[node.input[0]] for node in self.spelled.graph.node if node.input and node.output
            for name in (node.output[0], _result(node.output[0])) if node.input[0] in self.types
        }
        self._exact = Evaluator(self.lifted, self._declared)
        self._before: dict[str, tuple[Array, Array]] = {}
        self._wavering: dict[int, Evaluator] = {}

    @property
    def downgraded(self) -> tuple[str, ...]:
        """Operators that are evaluated in float32."""
        return self._exact.downgraded

    @cached_property
    def maskable(self) -> frozenset[str]:
        """Inputs among which minus infinity and the like are to be expected, as there is a softmax in some form; not
        those that are multiplied before it, whose sums would be no numbers."""
        multiplied: set[str] = set()
        softmax = False
        for node in reversed(self.spelled.graph.node):
            if "Softmax" in node.op_type or node.op_type == "Exp":
                softmax = True
            elif _attends(node):
                softmax = True
                multiplied.update(node.input[:3])
            elif is_product(node) or not multiplied.isdisjoint(node.output):
                multiplied.update(node.input)
        return frozenset(info.name for info in self.body.graph.input if softmax) - multiplied

    def outputs(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Every output in float64, integers and booleans as they are.

        Raises:
            VerificationError: the body cannot be run on these inputs.
        """
        # What edges of a run leave as it is, weights above all, is converted once for all of them.
        same = {name: wide for name, (given, wide) in self._before.items() if given is feeds.get(name)}
        converted = same | self._exact.converted({name: array for name, array in feeds.items() if name not in same})
        self._before = {name: (feeds[name], wide) for name, wide in converted.items()}
        return self._exact.run(converted)

    @cached_property
    def device_body(self) -> onnx.ModelProto | None:
        """What a GPU may compute of the same for a first look (``device_bodies``), where something is computed, and
        nothing in float64, of which its kernels may be short of digits."""
        widths = {output.arithmetic for output in self.precision}
        if TensorProto.DOUBLE in widths or widths == {None} or unsuited(self._exact.runnable):
            return None
        return device_body(self._exact.runnable, {
            info.name: info.type.tensor_type.elem_type for info in self.body.graph.input})

    def forget(self) -> None:
        """Keep no inputs of ``outputs``."""
        self._before = {}

    def nudged(self, feeds: Mapping[str, Array]) -> list[list[Array]]:
        """The outputs with the computed numbers that decide something a little larger, and a little smaller."""
        if not any(output.decides for output in self.precision) or any(not array.size for array in feeds.values()):
            return []
        converted = self._nudgers[0].converted(feeds)
        return [evaluator.run(converted) for evaluator in self._nudgers]

    def wavering(self, feeds: Mapping[str, Array], length: int) -> Iterator[list[Array]]:
        """The outputs in float64 some times over, the operands of what rounds a little off at random (``wavering``).

        Args:
            length: of the longest sum.
        """
        if length not in self._wavering:
            sources = {node.output[0]: node.input[0] for node in self.lifted.graph.node if node.op_type == "Cast"}
            self._wavering[length] = Evaluator(wavering_model(
                self.lifted, value_types(self.lifted), lambda name: _declared(name, sources, self.types), length,
                exact=lambda node: not node.domain and node.op_type in _MOVES, sums=_adds_many,
            ), self._declared)
        evaluator = self._wavering[length]
        converted = evaluator.converted(feeds)
        for sample in range(SAMPLES):
            for way in (1.0, -1.0):
                yield evaluator.run({**converted, SAMPLE: np.array(float(sample)), WAY: np.array(way)})

    def hidden(self, feeds: Mapping[str, Array]) -> list[list[Array]]:
        """The outputs where nothing that a mask of places or a guard hides shows (``hidden``); nothing where there is
        none.

        Of a query of the operator Attention that sees scores of minus infinity alone, by numbers that are not finite,
        providers differ, and a kernel gives zeros: then also the outputs with these in place of what such numbers
        change.
        """
        guarded = [] if self._guarded is None else [self._guarded.run(feeds)]
        if self._outweighed is None:
            return guarded
        seen = shown(feeds, self.maskable)
        clean = self._outweighed.run(seen)
        if not any(map(_attends, self.body.graph.node)):
            # A query from which a mask that is read hides all keys sees what a finite one leaves of them.
            return [*guarded, clean, self.outputs(seen)]
        zeros = [np.where(np.equal(one, other), one, 0) for one, other in zip(self.outputs(feeds), clean, strict=True)]
        return [clean, zeros]

    def seen(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Inputs without what is no number, where a mask may hide that; None where there is no such mask."""
        return None if self._outweighed is None else shown(feeds, self.maskable)

    def bounded(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs of inputs with zeros in the place of infinities."""
        return self.outputs({name: np.where(np.isinf(array), np.zeros((), array.dtype), array) if is_float(array)
                             else array for name, array in feeds.items()})

    def single(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Every output of the body in float32, as a kernel computes it."""
        return self._single.run(feeds)

    def own(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The body in its own types, node by node, in the outputs' types."""
        return self._own.run(feeds)

    def inside(self, feeds: Mapping[str, Array]) -> list[Array] | None:
        """The same with scores of attentions that are spelled out in float32, where others overflow; None where there
        are none."""
        return None if self.spelled is self.body else self._inside.run(feeds)

    def rounded(self, feeds: Mapping[str, Array]) -> list[Array] | None:
        """The same with operands of float32 products rounded to TF32; None where the kernel does not do so."""
        return None if self._rounded is None else self._rounded.run(feeds)

    def cut(self, feeds: Mapping[str, Array]) -> list[Array] | None:
        """The same with operands cut off."""
        return None if self._cut is None else self._cut.run(feeds)

    @cached_property
    def products(self) -> list[onnx.NodeProto]:
        """The body's products and convolutions."""
        return [node for node in self.spelled.graph.node if is_product(node)]

    @cached_property
    def _nudgers(self) -> tuple[Evaluator, Evaluator]:
        up, down = (Evaluator(_nudge(self.lifted, self.types, sign), self._declared) for sign in (1.0, -1.0))
        return up, down

    @cached_property
    def _outweighed(self) -> Evaluator | None:
        nodes = self.spelled.graph.node
        if sum(map(is_product, nodes)) + sum(map(_attends, nodes)) < 2 or not may_hide(self.spelled):
            return None
        return Evaluator(outweighed_model(self.lifted), self._declared)

    @cached_property
    def _guarded(self) -> Evaluator | None:
        model = guarded_model(self.lifted)
        return None if model is None else Evaluator(model, self._declared)

    @cached_property
    def _single(self) -> Evaluator:
        return Evaluator(spelled_out(body_model(self._node, self._model, precision="float32")), self._declared)

    @cached_property
    def _own(self) -> Evaluator:
        return Evaluator(rounded_model(self.body, self.types), self._declared)

    @cached_property
    def _inside(self) -> Evaluator:
        return Evaluator(rounded_model(self.body, self.types, scores=False), self._declared)

    @cached_property
    def _rounded(self) -> Evaluator | None:
        return self._with_rounded(cut=False)

    @cached_property
    def _cut(self) -> Evaluator | None:
        return self._with_rounded(cut=True)

    def _with_rounded(self, cut: bool) -> Evaluator | None:
        if not rounds(self._node, self.products, self.types):
            return None
        body = with_rounded_products(rounded_model(self.body, self.types), self.products, self.types, cut)
        return Evaluator(body, self._declared)


def formal_names(node: FusedNode) -> dict[str, str]:
    """By formal name of an input that is there (``h0``, ``x0``), the value of the model."""
    names = {f"h{place}": name for place, name in enumerate(node.inputs[:HOST_INPUTS]) if name}
    return names | {f"x{place}": name for place, name in enumerate(node.tensors)}


def rounded_model(body: onnx.ModelProto, types: Mapping[str, int], scores: bool = True) -> onnx.ModelProto:
    """The body with every float16 and bfloat16 node computed in float32 and its result rounded: what a GPU does.

    ONNX Runtime's CPU provider runs many such nodes in float32 and does not round between them; here casts that it
    must keep stand between all nodes, and where values lie inside of one that is spelled out (``spelled_out``, also of
    ``scores``).
    """
    narrow = {name for name, kind in types.items() if kind in _NARROW}
    result = onnx.ModelProto()
    result.CopyFrom(body)
    graph = result.graph
    graph.ClearField("node")
    for info in graph.input:
        if info.name in narrow:
            graph.node.append(helper.make_node("Cast", [info.name], [_wide(info.name)], to=TensorProto.FLOAT))
    for original in body.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if original.op_type not in ("Cast", "CastLike", "Constant", "ConstantOfShape"):
            node.input[:] = [_wide(name) if name in narrow else name for name in node.input]
            node.output[:] = [_result(name) if name in narrow else name for name in node.output]
        graph.node.append(node)
        for name in original.output:
            if name in narrow:
                if name not in node.output:
                    graph.node.append(helper.make_node("Cast", [_result(name)], [name], to=types[name]))
                graph.node.append(helper.make_node("Cast", [name], [_wide(name)], to=TensorProto.FLOAT))
    return spelled_out(result, {_result(name): types[name] for name in narrow}, scores)


def _wide(name: str) -> str:
    return f"{name}.w"


def _result(name: str) -> str:
    """What is computed in float32, before it is rounded."""
    return f"{name}.f"


def _precision(body: onnx.ModelProto, types: Mapping[str, int]) -> list[Precision]:
    """What each output of a body hangs on."""
    computed: dict[str, set[int | None]] = {}
    decided: set[str] = set()
    reduced: set[str] = set()
    for node in body.graph.node:
        reads = [name for name in node.input if name]
        kinds = {kind for name in reads for kind in computed.get(name, ())}
        for name in node.output:
            if not name:
                continue
            kind = types.get(name)
            fresh = kind in WIDTHS and _rounds(node, kind, types)
            computed[name] = kinds | {kind} if fresh else kinds
            if decided.intersection(reads) or _decides(node, computed, types):
                decided.add(name)
            if reduced.intersection(reads) or _reduces(node):
                reduced.add(name)
    found = []
    for info in body.graph.output:
        among = computed.get(info.name, ())
        arithmetic = next((width for width in WIDTHS if width in among), None)
        found.append(Precision(arithmetic, info.name in decided, info.name in reduced))
    return found


def _rounds(node: onnx.NodeProto, kind: int | None, types: Mapping[str, int]) -> bool:
    """Whether a result of this float type is rounded: computed, or cast from what it does not hold exactly."""
    if node.op_type in ("Cast", "CastLike") and not node.domain:
        # A float is wider than every type before it; what is no float may need any digits.
        return types.get(node.input[0]) not in WIDTHS[:WIDTHS.index(kind) + 1]
    return bool(node.domain) or node.op_type not in _MOVES


def _decides(node: onnx.NodeProto, computed: Mapping[str, set[int | None]], types: Mapping[str, int]) -> bool:
    return any(computed.get(name) for name in _deciding_inputs(node, types))


def _deciding_inputs(node: onnx.NodeProto, types: Mapping[str, int]) -> list[str]:
    """Float operands of a node whose result jumps where they change a little."""
    if node.domain and node.op_type != "QuantizeLinear":
        return []
    floats = [name for name in node.input if types.get(name) in WIDTHS]
    if node.op_type in _COMPARISONS or node.op_type in _STEPS:
        return floats
    if node.op_type in ("Cast", "CastLike") and types.get(node.output[0]) not in WIDTHS:
        return floats[:1]
    return []


def _reduces(node: onnx.NodeProto) -> bool:
    return node.op_type.startswith("Reduce") or any(
        part in node.op_type for part in ("Softmax", "Attention", "Norm", "CumSum", "Pool", "Loss"))


def _adds_many(node: onnx.NodeProto) -> bool:
    """Whether terms are added in the node itself."""
    return bool(node.domain) or _reduces(node) or node.op_type in ("MatMul", "Gemm", "Einsum", "Conv", "Sum", "Mean")


def _nudge(lifted: onnx.ModelProto, types: Mapping[str, int], sign: float) -> onnx.ModelProto:
    """The float64 body with the float operands of deciding nodes moved by ``sign`` times what they may err."""
    wide = value_types(lifted)
    result = onnx.ModelProto()
    result.CopyFrom(lifted)
    result.graph.ClearField("node")
    sources = {node.output[0]: node.input[0] for node in lifted.graph.node if node.op_type == "Cast"}
    for place, original in enumerate(lifted.graph.node):
        node = onnx.NodeProto()
        node.CopyFrom(original)
        names = _deciding_inputs(node, wide)
        # Only the first operand of a comparison moves: that reaches both of its sides.
        for name in names[:1]:
            if wide.get(name) != TensorProto.DOUBLE:
                continue
            share = _NUDGES[_declared(name, sources, types)]
            moved = f"nudge{place}"
            result.graph.node.extend(_moved(name, moved, sign * share))
            node.input[list(node.input).index(name)] = moved
        result.graph.node.append(node)
    return result


def _declared(name: str, sources: Mapping[str, str], types: Mapping[str, int]) -> int:
    """The type in the body of a value of the lifted body, back through the casts that round it."""
    while name not in types and name in sources:
        name = sources[name]
    kind = types.get(name, TensorProto.DOUBLE)
    return kind if kind in _NUDGES else TensorProto.DOUBLE


def _moved(name: str, target: str, share: float) -> list[onnx.NodeProto]:
    """target = name + share * (|name| + a sixteenth of the largest finite |name|)."""

    def constant(suffix: str, value: float) -> onnx.NodeProto:
        tensor = helper.make_tensor("value", TensorProto.DOUBLE, [], [value])
        return helper.make_node("Constant", [], [f"{target}.{suffix}"], value=tensor)

    def step(op: str, inputs: list[str], suffix: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [f"{target}.{suffix}"], **attributes)

    return [
        constant("share", share), constant("part", 1 / 16), constant("zero", 0.0), constant("large", 1e300),
        step("Abs", [name], "size"),
        step("Less", [f"{target}.size", f"{target}.large"], "finite"),
        step("Where", [f"{target}.finite", f"{target}.size", f"{target}.zero"], "known"),
        step("ReduceMax", [f"{target}.known"], "most", keepdims=0),
        step("Mul", [f"{target}.most", f"{target}.part"], "floor"),
        step("Add", [f"{target}.known", f"{target}.floor"], "range"),
        step("Mul", [f"{target}.range", f"{target}.share"], "by"),
        helper.make_node("Add", [name, f"{target}.by"], [target]),
    ]


def lengths(arrays: Mapping[str, Array], outputs: Sequence[Values]) -> int:
    """An upper estimate of the terms in the body's longest sum, from the sizes of what it reads and writes."""
    largest = max((array.size for array in arrays.values()), default=1)
    axis = max((size for array in arrays.values() for size in array.shape), default=1)
    least = max(min((output.size for output in outputs), default=1), 1)
    return max(1, axis, -(-largest // least))


def _attends(node: onnx.NodeProto) -> bool:
    """Whether a node is two products with a softmax between."""
    return node.op_type == "Attention" and not node.domain
