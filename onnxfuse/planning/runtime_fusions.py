"""What ONNX Runtime's CUDA provider fuses itself, at its extended level: the baseline that a region has to beat.

Each function below stands for one of the runtime's graph transformers and states the conditions that it checks.  Seen
through sessions on the CPU (tests/test_runtime_fusions.py): LayerNorm, RMSNorm, GELU, BiasGelu, FastGelu, QuickGelu,
Gemm, FusedMatMul, SkipLayerNorm, Conv with BatchNormalization, Add and Mul.  Known only from the documented behaviour
of the CUDA provider, and taken as fused so that no gain is claimed that may not be there: Conv + Add + Relu in
float32, BiasSoftmax.  Attention and embedding fusions are not modelled: they fire on few exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def runtime_groups(graph: Graph) -> tuple[frozenset[Node], ...]:
    """Disjoint groups of two nodes and more that ONNX Runtime would run as one kernel each, in graph order."""
    groups = _Groups()
    for transformer in (
        _conv_constants, _layer_norm, _rms_norm, _simple_pairs, _gemm, _gelu_erf, _fused_matmul_transposes, _fast_gelu,
        _bias_gelu, _skip_layer_norm, _quick_gelu, _bias_softmax, _fused_matmul_scales, _conv_relu,
    ):
        for node in graph.nodes:
            transformer(node, groups)
    found = {frozenset(group) for group in groups.of.values() if len(group) > 1}
    return tuple(sorted(found, key=lambda group: min(node.index for node in group)))


@dataclass(frozen=True)
class _Unit:
    """A fused operator: its type, and what it reads first."""

    op: str
    source: Value


class _Groups:
    """Groups found so far, and the operator that each stands for, by its last node."""

    def __init__(self) -> None:
        self.of: dict[Node, set[Node]] = {}
        self.units: dict[Node, _Unit] = {}

    def free(self, nodes: Iterable[Node]) -> bool:
        """Whether no node is fused yet."""
        return not any(node in self.of for node in nodes)

    def join(self, *nodes: Node) -> None:
        """Make one group of these nodes and of the groups that they are in."""
        joined = {member for node in nodes for member in self.of.get(node, {node})}
        for member in joined:
            self.of[member] = joined


def _is(node: Node | None, *ops: str) -> bool:
    return node is not None and node.domain == "" and node.op in ops


def _out(node: Node) -> Value:
    value = node.outputs[0]
    assert value is not None, "these operators have one output"
    return value


def _next(node: Node) -> Node | None:
    """The one node that reads the node's output, through one operand, where it is no output of the graph."""
    value = _out(node)
    if value.is_output or len(value.consumers) != 1:
        return None
    consumer = value.consumers[0]
    return consumer if consumer.inputs.count(value) == 1 else None


def _producer(node: Node, position: int, *ops: str) -> Node | None:
    """The node that computes an operand, where it is one of ``ops``."""
    value = node.inputs[position] if position < len(node.inputs) else None
    return value.producer if value is not None and _is(value.producer, *ops) else None


def _is_constant(value: Value | None) -> bool:
    """Whether it is a constant, or folded from one by an operator that moves or converts it."""
    while value is not None and not value.is_constant:
        node = value.producer
        if node is None or not _is(node, "Identity", "Cast", "Reshape", "Transpose"):
            return False
        value = node.inputs[0]
    return value is not None and value.is_constant


def _scalar(value: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    while value is not None and value.constant is None and _is(value.producer, "Identity"):
        assert value.producer is not None
        value = value.producer.inputs[0]
    if value is None or value.constant is None or value.constant.size != 1:
        return None
    return float(np.asarray(value.constant).reshape(()).astype(np.float64))


def _near(value: Value | None, target: float) -> bool:
    number = _scalar(value)
    return number is not None and abs(number - target) <= 1e-2 * abs(target)


def _other(node: Node, value: Value) -> Value | None:
    """The other operand of a two-operand node."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _with_scalar(node: Node | None, op: str, target: float, source: Value) -> bool:
    """Whether ``node`` is ``op(source, target)``, either way round."""
    return _is(node, op) and node is not None and source in node.inputs and _near(_other(node, source), target)


def _simple_pairs(first: Node, groups: _Groups) -> None:
    """A node and the only one that reads it, which together are one operator of the standard."""
    if first.domain != "" or first.has_subgraph or not first.outputs or first.outputs[0] is None:
        return
    second = _next(first)
    if second is None or second.domain != "" or not groups.free([first, second]):
        return
    value = _out(first)
    match first.op, second.op:
        case "Relu", "Clip":
            fits = second.inputs[0] is value
        case "Not", "Where":
            fits = second.inputs[0] is value
        case "Div", "Mul":  # y (1 / x)
            fits = _near(first.inputs[0], 1.0)
        case "Transpose", "Gemm":
            fits = value in second.inputs[:2] and _swaps_last(first)
        case "Gemm", "Sum":
            fits = len(second.inputs) == 2 and (len(first.inputs) < 3 or first.inputs[2] is None)
            fits = fits and all(operand is not None and operand.shape == value.shape for operand in second.inputs)
        case "MatMul", "BatchNormalization":
            fits = all(_is_constant(operand) for operand in (first.inputs[1], *second.inputs[1:]))
        case "Pad", "Conv":
            amounts = first.inputs[1].constant if len(first.inputs) > 1 and first.inputs[1] is not None else None
            fits = second.inputs[0] is value and amounts is not None and bool(np.all(amounts >= 0))
            fits = fits and first.attributes.get("mode", "constant") in ("constant", b"constant")
            fits = fits and (len(first.inputs) < 3 or first.inputs[2] is None or _scalar(first.inputs[2]) == 0.0)
        case _:
            fits = False
    if fits:
        groups.join(first, second)


def _conv_constants(conv: Node, groups: _Groups) -> None:
    """Conv, then BatchNormalization, Mul or Add of constants of one number a channel: folded into weights and bias."""
    if not _is(conv, "Conv") or not all(value is None or _is_constant(value) for value in conv.inputs[1:]):
        return
    last = conv
    while (after := _next(last)) is not None and groups.free([after]):
        if _is(after, "BatchNormalization"):
            constant = all(_is_constant(value) for value in after.inputs[1:])
        elif _is(after, "Mul", "Add"):
            operand = _other(after, _out(last))
            constant = operand is not None and _is_constant(operand) and _per_channel(operand, _out(conv))
        else:
            return
        if not constant:
            return
        groups.join(conv, after)
        groups.units[after] = _Unit("Conv", _out(conv))
        last = after


def _per_channel(operand: Value, target: Value) -> bool:
    """Whether a constant varies along axis 1 of ``target`` alone."""
    if operand.shape is None or target.shape is None:
        return False
    sizes = [size.value for size in operand.shape]
    padded = [1] * (len(target.shape) - len(sizes)) + sizes
    return len(padded) == len(target.shape) and all(size == 1 for axis, size in enumerate(padded) if axis != 1)


def _gemm(product: Node, groups: _Groups) -> None:
    """MatMul by a matrix, then Add of a bias: Gemm.  Past two axes only where the left operand's sizes are known."""
    if not _is(product, "MatMul") or not groups.free([product]):
        return
    add = _next(product)
    left, right = product.inputs
    if not _is(add, "Add") or add is None or left is None or right is None or left.dtype not in _FLOATS:
        return
    bias = _other(add, _out(product))
    if bias is None or bias.shape is None or left.shape is None or right.shape is None or len(right.shape) != 2:
        return
    columns = right.shape[1]
    if len(left.shape) == 2:
        fits = bias.shape in ((columns,), (left.shape[0], columns), (left.shape[0], 1)) or (
            len(bias.shape) == 2 and bias.shape[0] == 1 and bias.shape[1] == columns
        )
    else:
        fits = bias.shape == (columns,) and all(size.value is not None for size in (*left.shape, *right.shape))
        fits = fits and not _is_attention_output(product)
    if fits:
        groups.join(product, add)
        groups.units[add] = _Unit("Gemm", left)
        for position in (0, 1) if len(left.shape) == 2 else ():
            transpose = _producer(product, position, "Transpose")
            if transpose is not None and _next(transpose) is product and _swaps_last(transpose):
                groups.join(product, transpose)


def _is_attention_output(product: Node) -> bool:
    """Reshape(Transpose(MatMul(Softmax, v))): left alone for the runtime's attention fusion."""
    node: Node | None = product
    for op in ("Reshape", "Transpose", "MatMul", "Softmax"):
        node = _producer(node, 0, op) if node is not None else None
    return node is not None


def _gelu_erf(erf: Node, groups: _Groups) -> None:
    """0.5 x (1 + erf(x / sqrt 2)), the half before or after."""
    if not _is(erf, "Erf"):
        return
    scale = _producer(erf, 0, "Div", "Mul")
    if scale is None:
        return
    divides = _is(scale, "Div")
    factors = scale.inputs[1 if divides else 0 :]
    target = 2**0.5 if divides else 0.5**0.5
    constants = [value for value in factors if value is not None and _near(value, target)]
    if not constants:
        return
    source = _other(scale, constants[0]) if not divides else scale.inputs[0]
    add = _next(erf)
    if source is None or add is None or not _with_scalar(add, "Add", 1.0, _out(erf)):
        return
    product = _next(add)
    if product is None or not _is(product, "Mul"):
        return
    factor = _other(product, _out(add))
    if factor is None:
        return
    half = _next(product)
    if factor is source and half is not None and _with_scalar(half, "Mul", 0.5, _out(product)):
        _activation(groups, "Gelu", source, half, scale, erf, add, product)
    elif factor.producer is not None and _next(factor.producer) is product \
            and _with_scalar(factor.producer, "Mul", 0.5, source):
        _activation(groups, "Gelu", source, product, scale, erf, add, factor.producer)


def _activation(groups: _Groups, op: str, source: Value, last: Node, *nodes: Node) -> None:
    if groups.free((last, *nodes)) and all(_next(node) is not None for node in nodes):
        groups.join(last, *nodes)
        groups.units[last] = _Unit(op, source)


def _layer_norm(mean: Node, groups: _Groups) -> None:
    """ReduceMean, Sub (once or twice), Pow 2, ReduceMean, Add, Sqrt, Div, Mul, Add, over the last axes.

    A Cast may follow the Sub, and another the Div.
    """
    if not _is(mean, "ReduceMean") or _out(mean).is_output:
        return
    source = mean.inputs[0]
    subs = [node for node in _out(mean).consumers if _is(node, "Sub") and node.inputs[0] is source]
    if source is None or not 1 <= len(subs) <= 2 or len(subs) != len(_out(mean).consumers):
        return
    casts = [cast for sub in subs for cast in _out(sub).consumers if _is(cast, "Cast")]
    for deviation in (*subs, *casts):
        for power in _out(deviation).consumers:
            if not _squares(power, _out(deviation)):
                continue
            chain = _chain(power, "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add") or _chain(
                power, "ReduceMean", "Add", "Sqrt", "Div", "Cast", "Mul", "Add"
            )
            numerator = chain[3].inputs[0] if chain else None
            if numerator is None or numerator.producer not in (*subs, *casts):
                continue
            weight, bias = chain[-2:]
            vectors = [_other(weight, _out(chain[-3])), _other(bias, _out(weight))]
            nodes = (mean, *subs, *casts, power, *chain)
            if all(value is not None and _is_constant(value) and value.rank == 1 for value in vectors) \
                    and groups.free(nodes):
                groups.join(*nodes)
                groups.units[bias] = _Unit("LayerNormalization", source)
            return


def _squares(node: Node, source: Value) -> bool:
    """Whether it is Pow(source, 2); a product with itself is not recognised."""
    return _is(node, "Pow") and node.inputs[0] is source and _near(node.inputs[1], 2.0)


def _chain(first: Node, *ops: str) -> tuple[Node, ...]:
    """The nodes that follow ``first`` one after the other, each read once, if they are of these types."""
    found: list[Node] = []
    node: Node | None = first
    for op in ops:
        node = _next(node) if node is not None else None
        if node is None or not _is(node, op):
            return ()
        found.append(node)
    return tuple(found)


def _rms_norm(power: Node, groups: _Groups) -> None:
    """Pow 2, ReduceMean, Add, Sqrt, Div of the same x (or Div of 1, Mul by x), Mul by a constant vector."""
    source = power.inputs[0] if power.inputs else None
    if source is None or not _squares(power, source):
        return
    chain = _chain(power, "ReduceMean", "Add", "Sqrt", "Div")
    if not chain:
        return
    if chain[3].inputs[0] is not source:
        scaled = _next(chain[3])
        if not _near(chain[3].inputs[0], 1.0) or scaled is None or not _is(scaled, "Mul") \
                or _other(scaled, _out(chain[3])) is not source:
            return
        chain = (*chain, scaled)
    weight = _next(chain[-1])
    if weight is None or not _is(weight, "Mul"):
        return
    vector = _other(weight, _out(chain[-1]))
    if vector is not None and _is_constant(vector) and vector.rank == 1 and groups.free((power, *chain, weight)):
        groups.join(power, *chain, weight)
        groups.units[weight] = _Unit("SimplifiedLayerNormalization", source)


def _fast_gelu(tanh: Node, groups: _Groups) -> None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), with Pow 3 or with products, the half taken of x.

    The runtime leaves it alone where its result is an output of the graph.
    """
    if not _is(tanh, "Tanh"):
        return
    scale = _producer(tanh, 0, "Mul")
    add = _next(tanh)
    if scale is None or add is None or not _with_scalar(add, "Add", 1.0, _out(tanh)):
        return
    product = _next(add)
    if product is None or not _is(product, "Mul") or _out(product).is_output:
        return
    factor = _other(product, _out(add))
    half = factor.producer if factor is not None else None
    if half is None or not _is(half, "Mul") or not any(_near(value, 0.5) for value in half.inputs):
        return
    source = next((value for value in half.inputs if value is not None and not _near(value, 0.5)), None)
    cubic = _between(source, scale) if source is not None else None
    if source is not None and cubic and any(_is(node, "Pow", "Mul") for node in cubic):
        _activation(groups, "FastGelu", source, product, scale, tanh, add, half, *cubic)


def _between(source: Value, last: Node, most: int = 6) -> list[Node] | None:
    """The pointwise nodes above ``last`` down from ``source`` and constants; None where they read anything else."""
    found: dict[Node, None] = {}
    front = [value for value in last.inputs if value is not None]
    while front:
        value = front.pop()
        if value is source or _is_constant(value):
            continue
        node = value.producer
        if node is None or not _is(node, "Mul", "Add", "Pow") or len(found) >= most:
            return None
        found[node] = None
        front += [value for value in node.inputs if value is not None]
    return list(found)


def _bias_gelu(add: Node, groups: _Groups) -> None:
    """Add of a vector, then GELU."""
    if not _is(add, "Add") or not groups.free([add]):
        return
    ranks = [value.rank if value is not None else None for value in add.inputs]
    if 1 not in ranks or None in ranks or not _same_last(add):
        return
    target = _out(add)
    readers = target.consumers
    if target.is_output or not readers:
        return
    if len(readers) == 1 and (_is(readers[0], "Gelu") or readers[0].qualified_op in _GELUS) and groups.free(readers):
        groups.join(add, readers[0])
        return
    for last, unit in groups.units.items():
        if unit.op in ("Gelu", "FastGelu") and unit.source is target and set(readers) <= groups.of[last]:
            groups.join(add, last)
            return


_GELUS = ("com.microsoft.Gelu", "com.microsoft.FastGelu")


def _same_last(add: Node) -> bool:
    sizes = [value.shape[-1].value if value is not None and value.shape else None for value in add.inputs]
    return sizes[0] is not None and sizes[0] == sizes[1]


def _skip_layer_norm(norm: Node, groups: _Groups) -> None:
    """Add of two like tensors of three axes, read once, then LayerNormalization; and before it the Add of a bias."""
    unit = groups.units.get(norm)
    if unit is not None and unit.op == "LayerNormalization":
        source, readers = unit.source, groups.of[norm]
    elif _is(norm, "LayerNormalization") and norm.inputs[0] is not None and norm not in groups.of:
        source, readers = norm.inputs[0], {norm}
    else:
        return
    add = source.producer
    if add is None or not _is(add, "Add") or not groups.free([add]) or source.is_output:
        return
    if not set(source.consumers) <= readers or (unit is None and len(source.consumers) != 1) or not _alike(add):
        return
    groups.join(norm, add)
    for value in add.inputs:
        before = value.producer if value is not None else None
        if before is None or not _is(before, "Add") or not groups.free([before]) or _next(before) is not add:
            continue
        bias = before.inputs[1]
        if bias is not None and _is_constant(bias) and bias.rank == 1 and _same_last(before):
            groups.join(norm, before)
            return


def _alike(add: Node) -> bool:
    shapes = [value.shape if value is not None else None for value in add.inputs]
    return shapes[0] is not None and shapes[0] == shapes[1] and len(shapes[0]) == 3


def _quick_gelu(sigmoid: Node, groups: _Groups) -> None:
    """x sigmoid(a x) and x sigmoid(x)."""
    if not _is(sigmoid, "Sigmoid") or sigmoid.inputs[0] is None:
        return
    product = _next(sigmoid)
    if product is None or not _is(product, "Mul"):
        return
    source, nodes = sigmoid.inputs[0], [sigmoid]
    scale = _producer(sigmoid, 0, "Mul")
    if scale is not None and _next(scale) is sigmoid and any(_scalar(value) is not None for value in scale.inputs):
        nodes.append(scale)
        inner = next((value for value in scale.inputs if _scalar(value) is None), None)
        source = inner if inner is not None else source
    if _other(product, _out(sigmoid)) is source:
        _activation(groups, "QuickGelu", source, product, *nodes)


def _bias_softmax(softmax: Node, groups: _Groups) -> None:
    """Add read only by a Softmax over the last axis, one operand of which repeats over whole leading axes."""
    if not _is(softmax, "Softmax"):
        return
    add = _producer(softmax, 0, "Add")
    if add is None or _next(add) is not softmax or not groups.free([add, softmax]):
        return
    shapes = [value.shape if value is not None else None for value in add.inputs]
    first, second = shapes
    if first is None or second is None or not first or not second or first[-1] != second[-1]:
        return
    target = _out(add).shape
    axis = int(softmax.attributes.get("axis", -1))
    if target is None or axis not in (-1, len(target) - 1):
        return
    for mask, full in ((first, second), (second, first)):
        if full != target:
            continue
        padded = [1] * (len(target) - len(mask)) + [size.value or 0 if size.value == 1 else size for size in mask]
        leading = padded[:-1]
        # Axes that agree, then axes of size one; or the other way round where the mask has fewer axes.
        split = 0
        if len(mask) == len(target):
            while split < len(leading) and leading[split] == target[split]:
                split += 1
        if all(size == 1 for size in leading[split:]):
            groups.join(add, softmax)
            return


def _fused_matmul_transposes(product: Node, groups: _Groups) -> None:
    """A Transpose that FusedMatMul's attributes can say and that only products read.

    Where several products read it, the first one's group holds it: none launches it.
    """
    if not _is(product, "MatMul") or _gemm_of(product, groups):
        return
    for position in (0, 1):
        transpose = _producer(product, position, "Transpose")
        if transpose is None or not groups.free([transpose]) or _out(transpose).is_output:
            continue
        if all(_is(reader, "MatMul") for reader in _out(transpose).consumers) and _says(transpose):
            groups.join(product, transpose)


def _says(transpose: Node) -> bool:
    """Whether it swaps the last two axes, or moves the first one behind the other leading axes, or to the end."""
    perm = transpose.attributes.get("perm")
    if perm is None or len(perm) < 3:
        return _swaps_last(transpose)
    rank = len(perm)
    moved = [*range(1, rank - 1), 0, rank - 1], [*range(1, rank), 0]
    return _swaps_last(transpose) or list(perm) in moved


def _gemm_of(product: Node, groups: _Groups) -> bool:
    after = _next(product)
    unit = groups.units.get(after) if after is not None else None
    return unit is not None and unit.op == "Gemm"


def _swaps_last(transpose: Node) -> bool:
    perm = transpose.attributes.get("perm")
    if perm is None:
        return _out(transpose).rank == 2
    rank = len(perm)
    return rank >= 2 and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def _fused_matmul_scales(product: Node, groups: _Groups) -> None:
    """A Mul or Div by one constant number before or after a product: FusedMatMul's alpha."""
    if not (_is(product, "MatMul") or product.qualified_op == "com.microsoft.FusedMatMul") or _gemm_of(product, groups):
        return
    for value in product.inputs:
        if value is None:
            continue
        scale = value.producer
        if scale is None:
            continue
        if scale is not None and _is_scale(scale) and groups.free([scale]) and _next(scale) is product:
            groups.join(product, scale)
            operand = next((value for value in scale.inputs if _scalar(value) is None), None)
            moved = operand.producer if operand is not None else None
            if moved is not None and _is(moved, "Transpose") and groups.free([moved]) and _next(moved) is scale \
                    and _says(moved):
                groups.join(product, moved)
        elif _is(scale, "Transpose") and scale is not None and scale in groups.of.get(product, set()):
            before = _producer(scale, 0, "Mul", "Div")
            if before is not None and _is_scale(before) and groups.free([before]) and _next(before) is scale:
                groups.join(product, before)
    after = _next(product)
    if after is not None and _is_scale(after) and groups.free([after]):
        groups.join(product, after)


def _is_scale(node: Node) -> bool:
    if _is(node, "Div"):
        return _scalar(node.inputs[1]) is not None
    return _is(node, "Mul") and any(_scalar(value) is not None for value in node.inputs)


def _conv_relu(conv: Node, groups: _Groups) -> None:
    """Conv, perhaps Add, then Relu, in float32: one call of the convolution library."""
    if not _is(conv, "Conv") or conv.inputs[0] is None or conv.inputs[0].dtype != TensorProto.FLOAT:
        return
    last = conv
    while (after := _next(last)) is not None and after in groups.of.get(conv, ()):
        last = after
    after = _next(last)
    if after is not None and _is(after, "Relu") and groups.free([after]):
        groups.join(conv, after)
    elif after is not None and _is(after, "Add") and groups.free([after]):
        operands = [value.shape if value is not None else None for value in after.inputs]
        relu = _next(after)
        if operands[0] == operands[1] is not None and relu is not None and _is(relu, "Relu") and groups.free([relu]):
            groups.join(conv, after, relu)
