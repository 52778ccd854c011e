"""What ONNX Runtime's CUDA provider fuses itself, at its extended level: the baseline that a region has to beat.

Each function below stands for one of the runtime's graph transformers and states the conditions that it checks.  Seen
through sessions on the CPU (tests/test_runtime_fusions.py): LayerNorm, RMSNorm, GELU, BiasGelu, FastGelu, QuickGelu,
Gemm, FusedMatMul, SkipLayerNorm, Conv with BatchNormalization, Add and Mul.  Known only from the documented behaviour
of the CUDA provider, and taken as fused so that no gain is claimed that may not be there: Conv + Add + Relu in
float32, BiasSoftmax.  Attention and embedding fusions are not modelled: they fire on few exports.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.planning.runtime_matching import (
    Groups,
    RuntimeFusion,
    Unit,
    is_constant,
    is_op,
    near,
    only_reader,
    other,
    producer,
    result,
    scalar,
    seen,
    with_scalar,
)

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def runtime_groups(graph: Graph) -> tuple[RuntimeFusion, ...]:
    """Disjoint groups of two nodes and more that ONNX Runtime would run as one kernel each, in graph order."""
    nodes, groups = seen(graph), Groups()
    for transformer in (
        _conv_constants, _layer_norm, _rms_norm, _simple_pairs, _gemm, _gelu_erf, _fused_matmul_transposes, _fast_gelu,
        _bias_gelu, _skip_layer_norm, _quick_gelu, _bias_softmax, _fused_matmul_scales, _conv_relu,
    ):
        for node in nodes:
            transformer(node, groups)
    return tuple(groups.all())


def groups_of(graph: Graph) -> tuple[RuntimeFusion, ...]:
    """``runtime_groups`` of a graph and of the bodies in it."""
    return tuple(group for each in graph.walk() for group in runtime_groups(each))


def _simple_pairs(first: Node, groups: Groups) -> None:
    """A node and the only one that reads it, which together are one operator of the standard."""
    if first.domain != "" or first.has_subgraph or not first.outputs or first.outputs[0] is None:
        return
    second = only_reader(first)
    if second is None or second.domain != "" or not groups.free([first, second]):
        return
    value = result(first)
    match first.op, second.op:
        case "Relu", "Clip":
            fits = second.inputs[0] is value
        case "Not", "Where":
            fits = second.inputs[0] is value
        case "Div", "Mul":  # y (1 / x)
            fits = near(first.inputs[0], 1.0)
        case "Transpose", "Gemm":
            fits = value in second.inputs[:2] and _swaps_last(first)
        case "Gemm", "Sum":
            fits = len(second.inputs) == 2 and (len(first.inputs) < 3 or first.inputs[2] is None)
            fits = fits and all(operand is not None and operand.shape == value.shape for operand in second.inputs)
        case "MatMul", "BatchNormalization":
            fits = all(is_constant(operand) for operand in (first.inputs[1], *second.inputs[1:]))
        case "Pad", "Conv":
            amounts = first.inputs[1].constant if len(first.inputs) > 1 and first.inputs[1] is not None else None
            fits = second.inputs[0] is value and amounts is not None and bool(np.all(amounts >= 0))
            fits = fits and first.attributes.get("mode", "constant") in ("constant", b"constant")
            fits = fits and (len(first.inputs) < 3 or first.inputs[2] is None or scalar(first.inputs[2]) == 0.0)
        case _:
            fits = False
    if fits and first.op in ("MatMul", "Gemm"):
        groups.attach(first, second)
    elif fits and second.op in ("Conv", "Gemm"):
        groups.attach(second, first)
    elif fits:
        groups.join(first, second)


def _conv_constants(conv: Node, groups: Groups) -> None:
    """Conv, then BatchNormalization, Mul or Add of constants of one number a channel: folded into weights and bias."""
    if not is_op(conv, "Conv") or not all(value is None or is_constant(value) for value in conv.inputs[1:]):
        return
    last = conv
    while (after := only_reader(last)) is not None and groups.free([after]):
        if is_op(after, "BatchNormalization"):
            constant = all(is_constant(value) for value in after.inputs[1:])
        elif is_op(after, "Mul", "Add"):
            operand = other(after, result(last))
            constant = operand is not None and is_constant(operand) and _per_channel(operand, result(conv))
        else:
            return
        if not constant:
            return
        groups.attach(conv, after)
        groups.units[after] = Unit("Conv", result(conv))
        last = after


def _per_channel(operand: Value, target: Value) -> bool:
    """Whether a constant varies along axis 1 of ``target`` alone."""
    if operand.shape is None or target.shape is None:
        return False
    sizes = [size.value for size in operand.shape]
    padded = [1] * (len(target.shape) - len(sizes)) + sizes
    return len(padded) == len(target.shape) and all(size == 1 for axis, size in enumerate(padded) if axis != 1)


def _gemm(product: Node, groups: Groups) -> None:
    """MatMul by a matrix, then Add of a bias: Gemm.  Past two axes only where the left operand's sizes are known."""
    if not is_op(product, "MatMul") or not groups.free([product]):
        return
    add = only_reader(product)
    left, right = product.inputs
    if not is_op(add, "Add") or add is None or left is None or right is None or left.dtype not in _FLOATS:
        return
    bias = other(add, result(product))
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
        groups.attach(product, add)
        groups.units[add] = Unit("Gemm", left)
        for position in (0, 1) if len(left.shape) == 2 else ():
            transpose = producer(product, position, "Transpose")
            if transpose is not None and only_reader(transpose) is product and _swaps_last(transpose):
                groups.attach(product, transpose)


def _is_attention_output(product: Node) -> bool:
    """Reshape(Transpose(MatMul(Softmax, v))): left alone for the runtime's attention fusion."""
    node: Node | None = product
    for op in ("Reshape", "Transpose", "MatMul", "Softmax"):
        node = producer(node, 0, op) if node is not None else None
    return node is not None


def _gelu_erf(erf: Node, groups: Groups) -> None:
    """0.5 x (1 + erf(x / sqrt 2)), the half before or after."""
    if not is_op(erf, "Erf"):
        return
    scale = producer(erf, 0, "Div", "Mul")
    if scale is None:
        return
    divides = is_op(scale, "Div")
    factors = scale.inputs[1 if divides else 0 :]
    target = 2**0.5 if divides else 0.5**0.5
    constants = [value for value in factors if value is not None and near(value, target)]
    if not constants:
        return
    source = other(scale, constants[0]) if not divides else scale.inputs[0]
    add = only_reader(erf)
    if source is None or add is None or not with_scalar(add, "Add", 1.0, result(erf)):
        return
    product = only_reader(add)
    if product is None or not is_op(product, "Mul"):
        return
    factor = other(product, result(add))
    if factor is None:
        return
    half = only_reader(product)
    if factor is source and half is not None and with_scalar(half, "Mul", 0.5, result(product)):
        _activation(groups, "Gelu", source, half, scale, erf, add, product)
    elif factor.producer is not None and only_reader(factor.producer) is product \
            and with_scalar(factor.producer, "Mul", 0.5, source):
        _activation(groups, "Gelu", source, product, scale, erf, add, factor.producer)


def _activation(groups: Groups, op: str, source: Value, last: Node, *nodes: Node) -> None:
    if groups.free((last, *nodes)) and all(only_reader(node) is not None for node in nodes):
        groups.join(last, *nodes)
        groups.units[last] = Unit(op, source)


def _layer_norm(mean: Node, groups: Groups) -> None:
    """ReduceMean, Sub (once or twice), Pow 2, ReduceMean, Add, Sqrt, Div, Mul, Add, whatever the axes.

    A Cast may follow the Sub, and another the Div.  The last two are by vectors of one length, constant or not; a norm
    without them stays as it is, or is an RMSNorm of the differences.
    """
    if not is_op(mean, "ReduceMean") or result(mean).is_output:
        return
    source = mean.inputs[0]
    subs = [node for node in result(mean).consumers if is_op(node, "Sub") and node.inputs[0] is source]
    if source is None or not 1 <= len(subs) <= 2 or len(subs) != len(result(mean).consumers):
        return
    casts = [cast for sub in subs for cast in result(sub).consumers if is_op(cast, "Cast")]
    for deviation in (*subs, *casts):
        for power in result(deviation).consumers:
            if not _squares(power, result(deviation)):
                continue
            chain = _chain(power, "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add") or _chain(
                power, "ReduceMean", "Add", "Sqrt", "Div", "Cast", "Mul", "Add"
            )
            numerator = chain[3].inputs[0] if chain else None
            if numerator is None or numerator.producer not in (*subs, *casts):
                continue
            weight, bias = chain[-2:]
            scale, shift = other(weight, result(chain[-3])), other(bias, result(weight))
            nodes = (mean, *subs, *casts, power, *chain)
            if scale is not None and shift is not None and scale.rank == 1 and scale.shape == shift.shape \
                    and groups.free(nodes):
                groups.join(*nodes)
                groups.units[bias] = Unit("LayerNormalization", source)
            return


def _squares(node: Node, source: Value) -> bool:
    """Whether it is Pow(source, 2); a product with itself is not recognised."""
    return is_op(node, "Pow") and node.inputs[0] is source and near(node.inputs[1], 2.0)


def _chain(first: Node, *ops: str) -> tuple[Node, ...]:
    """The nodes that follow ``first`` one after the other, each read once, if they are of these types."""
    found: list[Node] = []
    node: Node | None = first
    for op in ops:
        node = only_reader(node) if node is not None else None
        if node is None or not is_op(node, op):
            return ()
        found.append(node)
    return tuple(found)


def _rms_norm(power: Node, groups: Groups) -> None:
    """Pow 2, ReduceMean, Add, Sqrt, Div of the same x (or Div of 1, Mul by x), Mul by a vector."""
    source = power.inputs[0] if power.inputs else None
    if source is None or not _squares(power, source):
        return
    chain = _chain(power, "ReduceMean", "Add", "Sqrt", "Div")
    if not chain:
        return
    if chain[3].inputs[0] is not source:
        scaled = only_reader(chain[3])
        if not near(chain[3].inputs[0], 1.0) or scaled is None or not is_op(scaled, "Mul") \
                or other(scaled, result(chain[3])) is not source:
            return
        chain = (*chain, scaled)
    weight = only_reader(chain[-1])
    if weight is None or not is_op(weight, "Mul"):
        return
    vector = other(weight, result(chain[-1]))
    if vector is not None and vector.rank == 1 and groups.free((power, *chain, weight)):
        groups.join(power, *chain, weight)
        groups.units[weight] = Unit("SimplifiedLayerNormalization", source)


def _fast_gelu(tanh: Node, groups: Groups) -> None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), with Pow 3 or with products, the half taken of x.

    The runtime leaves it alone where its result is an output of the graph.
    """
    if not is_op(tanh, "Tanh"):
        return
    scale = producer(tanh, 0, "Mul")
    add = only_reader(tanh)
    if scale is None or add is None or not with_scalar(add, "Add", 1.0, result(tanh)):
        return
    product = only_reader(add)
    if product is None or not is_op(product, "Mul") or result(product).is_output:
        return
    factor = other(product, result(add))
    half = factor.producer if factor is not None else None
    if half is None or not is_op(half, "Mul") or not any(near(value, 0.5) for value in half.inputs):
        return
    source = next((value for value in half.inputs if value is not None and not near(value, 0.5)), None)
    cubic = _between(source, scale) if source is not None else None
    if source is not None and cubic and any(is_op(node, "Pow", "Mul") for node in cubic):
        _activation(groups, "FastGelu", source, product, scale, tanh, add, half, *cubic)


def _between(source: Value, last: Node, most: int = 6) -> list[Node] | None:
    """The pointwise nodes above ``last`` down from ``source`` and constants; None where they read anything else."""
    found: dict[Node, None] = {}
    front = [value for value in last.inputs if value is not None]
    while front:
        value = front.pop()
        if value is source or is_constant(value):
            continue
        node = value.producer
        if node is None or not is_op(node, "Mul", "Add", "Pow") or len(found) >= most:
            return None
        found[node] = None
        front += [value for value in node.inputs if value is not None]
    return list(found)


def _bias_gelu(add: Node, groups: Groups) -> None:
    """Add of a vector, then GELU."""
    if not is_op(add, "Add") or not groups.free([add]):
        return
    ranks = [value.rank if value is not None else None for value in add.inputs]
    if 1 not in ranks or None in ranks or not _same_last(add):
        return
    target = result(add)
    readers = target.consumers
    if target.is_output or not readers:
        return
    if len(readers) == 1 and (is_op(readers[0], "Gelu") or readers[0].qualified_op in _GELUS) and groups.free(readers):
        groups.attach(readers[0], add)
        return
    for last, unit in groups.units.items():
        if unit.op in ("Gelu", "FastGelu") and unit.source is target and set(readers) <= groups.of[last]:
            groups.attach(last, add)
            return


_GELUS = ("com.microsoft.Gelu", "com.microsoft.FastGelu")


def _same_last(add: Node) -> bool:
    sizes = [value.shape[-1].value if value is not None and value.shape else None for value in add.inputs]
    return sizes[0] is not None and sizes[0] == sizes[1]


def _skip_layer_norm(norm: Node, groups: Groups) -> None:
    """Add of two like tensors of three axes, read once, then LayerNormalization; and before it the Add of a bias."""
    unit = groups.units.get(norm)
    if unit is not None and unit.op == "LayerNormalization":
        source, readers = unit.source, groups.of[norm]
    elif is_op(norm, "LayerNormalization") and norm.inputs[0] is not None and norm not in groups.of:
        source, readers = norm.inputs[0], {norm}
    else:
        return
    add = source.producer
    if add is None or not is_op(add, "Add") or not groups.free([add]) or source.is_output:
        return
    if not set(source.consumers) <= readers or (unit is None and len(source.consumers) != 1) or not _alike(add):
        return
    groups.attach(norm, add)
    for value in add.inputs:
        before = value.producer if value is not None else None
        if before is None or not is_op(before, "Add") or not groups.free([before]) or only_reader(before) is not add:
            continue
        bias = before.inputs[1]
        if bias is not None and is_constant(bias) and bias.rank == 1 and _same_last(before):
            groups.attach(norm, before)
            return


def _alike(add: Node) -> bool:
    shapes = [value.shape if value is not None else None for value in add.inputs]
    return shapes[0] is not None and shapes[0] == shapes[1] and len(shapes[0]) == 3


def _quick_gelu(sigmoid: Node, groups: Groups) -> None:
    """x sigmoid(a x) and x sigmoid(x)."""
    if not is_op(sigmoid, "Sigmoid") or sigmoid.inputs[0] is None:
        return
    product = only_reader(sigmoid)
    if product is None or not is_op(product, "Mul"):
        return
    source, nodes = sigmoid.inputs[0], [sigmoid]
    scale = producer(sigmoid, 0, "Mul")
    if scale is not None and only_reader(scale) is sigmoid and any(scalar(value) is not None for value in scale.inputs):
        nodes.append(scale)
        inner = next((value for value in scale.inputs if scalar(value) is None), None)
        source = inner if inner is not None else source
    if other(product, result(sigmoid)) is source:
        _activation(groups, "QuickGelu", source, product, *nodes)


def _bias_softmax(softmax: Node, groups: Groups) -> None:
    """Add read only by a Softmax over the last axis, one operand of which repeats over whole leading axes."""
    if not is_op(softmax, "Softmax"):
        return
    add = producer(softmax, 0, "Add")
    if add is None or only_reader(add) is not softmax or not groups.free([add, softmax]):
        return
    # Where the file leaves sizes of the scores open the runtime does not find them either: seen in a T5 encoder.
    known = all(value is not None and value.declared in (None, value.shape) for value in add.inputs)
    first, second = (value.shape if value is not None else None for value in add.inputs)
    if not known or first is None or second is None or not first or not second or first[-1] != second[-1]:
        return
    target = result(add).shape
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
            groups.attach(softmax, add)
            return


def _fused_matmul_transposes(product: Node, groups: Groups) -> None:
    """A Transpose that FusedMatMul's attributes can say and that only products read.

    Where several products read it, the first one's group holds it: none launches it.
    """
    if not is_op(product, "MatMul") or _gemm_of(product, groups):
        return
    for position in (0, 1):
        transpose = producer(product, position, "Transpose")
        if transpose is None or not groups.free([transpose]) or result(transpose).is_output:
            continue
        if all(is_op(reader, "MatMul") for reader in result(transpose).consumers) and _says(transpose):
            groups.attach(product, transpose)


def _says(transpose: Node) -> bool:
    """Whether it swaps the last two axes, or moves the first one behind the other leading axes, or to the end."""
    perm = transpose.attributes.get("perm")
    if perm is None or len(perm) < 3:
        return _swaps_last(transpose)
    rank = len(perm)
    moved = [*range(1, rank - 1), 0, rank - 1], [*range(1, rank), 0]
    return _swaps_last(transpose) or list(perm) in moved


def _gemm_of(product: Node, groups: Groups) -> bool:
    after = only_reader(product)
    unit = groups.units.get(after) if after is not None else None
    return unit is not None and unit.op == "Gemm"


def _swaps_last(transpose: Node) -> bool:
    perm = transpose.attributes.get("perm")
    if perm is None:
        return result(transpose).rank == 2
    rank = len(perm)
    return rank >= 2 and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def _fused_matmul_scales(product: Node, groups: Groups) -> None:
    """A Mul or Div by one constant number before or after a product: FusedMatMul's alpha."""
    if not (is_op(product, "MatMul") or product.qualified_op == "com.microsoft.FusedMatMul"):
        return
    if _gemm_of(product, groups):
        return
    for value in product.inputs:
        if value is None:
            continue
        scale = value.producer
        if scale is None:
            continue
        if scale is not None and _is_scale(scale) and groups.free([scale]) and only_reader(scale) is product:
            groups.attach(product, scale)
            operand = next((value for value in scale.inputs if scalar(value) is None), None)
            moved = operand.producer if operand is not None else None
            if moved is None or not is_op(moved, "Transpose") or only_reader(moved) is not scale:
                continue
            if groups.free([moved]) and _says(moved):
                groups.attach(product, moved)
        elif is_op(scale, "Transpose") and scale is not None and scale in groups.of.get(product, set()):
            before = producer(scale, 0, "Mul", "Div")
            if before is not None and _is_scale(before) and groups.free([before]) and only_reader(before) is scale:
                groups.attach(product, before)
    after = only_reader(product)
    if after is not None and _is_scale(after) and groups.free([after]):
        groups.attach(product, after)


def _is_scale(node: Node) -> bool:
    if is_op(node, "Div"):
        return scalar(node.inputs[1]) is not None
    return is_op(node, "Mul") and any(scalar(value) is not None for value in node.inputs)


def _conv_relu(conv: Node, groups: Groups) -> None:
    """Conv, perhaps Add, then Relu, in float32: one call of the convolution library."""
    if not is_op(conv, "Conv") or conv.inputs[0] is None or conv.inputs[0].dtype != TensorProto.FLOAT:
        return
    last = conv
    while (after := only_reader(last)) is not None and after in groups.of.get(conv, ()):
        last = after
    after = only_reader(last)
    if after is not None and is_op(after, "Relu") and groups.free([after]):
        groups.attach(conv, after)
    elif after is not None and is_op(after, "Add") and groups.free([after]):
        operands = [value.shape if value is not None else None for value in after.inputs]
        relu = only_reader(after)
        if operands[0] == operands[1] is not None and relu is not None and is_op(relu, "Relu") and groups.free([relu]):
            groups.join(conv, after, relu)
