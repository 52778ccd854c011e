"""What holds other nodes or more than one tensor: If, Loop, Scan, functions of the model, sequences and optionals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper
from schema_builder import Builder, opsets
from schema_values import BOOL, FLOAT, FLOATS, INT64, Known


def inner(b: Builder, prefix: str, outer: Collection[Known]) -> Builder:
    """A body of a graph; it reads what is around by name."""
    return replace(b, prefix=prefix, outer=tuple(outer), depth=b.depth + 1, known=[], inputs=[], constants=[], nodes=[],
                   pending={}, count=0)


def grown(body: Builder, least: int, most: int) -> None:
    wanted = body.rng.randint(least, most)
    for _ in range(4 * most):
        if len(body.nodes) >= wanted:
            break
        body.grow(body)


def graph_of(body: Builder, name: str, inputs: Collection[onnx.ValueInfoProto],
             outputs: Collection[str]) -> onnx.GraphProto:
    """Of nodes, constants and untyped outputs."""
    return helper.make_graph(body.nodes, name, list(inputs), [onnx.ValueInfoProto(name=each) for each in outputs],
                             body.constants)


def passed_on(body: Builder, name: str) -> str:
    """A value as an output that a node of the body computes, which it may not have been."""
    return name if any(name in node.output for node in body.nodes) else body.emit("Identity", [name])[0]


def truth(b: Builder) -> Known | str | None:
    """A condition: given, constant, computed, or of a size."""
    which = b.rng.randint(0, 4)
    if which == 0:
        return b.constant(np.array(b.flip()))
    if which == 1:
        return b.fill(BOOL, [] if b.flip() else [(1, 1)])
    x = b.find(lambda value: value.rank > 0 and (which == 2 or value.dtype in (FLOAT, INT64)) and value.size > 0)
    if x is None:
        return None
    if which == 2:
        axis = b.rng.randrange(x.rank)
        size = b.emit("Gather", [b.emit("Shape", [x])[0], b.constant(np.array(axis, np.int64))])[0]
        return b.emit("Equal", [size, b.constant(np.array(b.rng.choice((1, x.pairs[axis][0])), np.int64))])[0]
    most = b.emit("ReduceMax", [x], keepdims=0)[0]
    return b.emit("Greater", [most, b.scalar(1, x.dtype)])[0]


def branch(b: Builder, name: str, prefix: str) -> Builder | None:
    body = inner(b, prefix, b.around)
    grown(body, 1, 4)
    return body if any(value.name not in {v.name for v in b.around} for value in body.known) else None


def choice(b: Builder) -> object:
    """An If whose branches give tensors of the same types, of whatever sizes; names may be the same in both."""
    condition = truth(b)
    one = b.fresh("b") + "_"
    branches = [branch(b, "then", one), branch(b, "else", one if b.flip() else b.fresh("b") + "_")]
    if condition is None or branches[0] is None or branches[1] is None:
        return None
    outputs: list[list[str]] = [[], []]
    for _ in range(b.rng.choice((1, 1, 2))):
        first = branches[0].rng.choice(branches[0].known)
        same = [value for value in branches[1].around if value.dtype == first.dtype]
        outputs[0].append(passed_on(branches[0], first.name))
        second = b.rng.choice(same or branches[1].known)
        name = second.name
        if second.dtype != first.dtype:
            name = branches[1].emit("Cast", [name], to=first.dtype)[0]
        outputs[1].append(passed_on(branches[1], name))
    if any(len(set(names)) != len(names) for names in outputs):
        return None
    then, other = (graph_of(body, f"{b.prefix}g{place}", [], names)
                   for place, (body, names) in enumerate(zip(branches, outputs, strict=True)))
    return b.emit("If", [condition], len(outputs[0]), then_branch=then, else_branch=other)


def squeezed(b: Builder) -> object:
    """As an exporter writes the squeeze of an axis that may be longer."""
    x = b.find(lambda value: value.rank > 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    size = b.emit("Gather", [b.emit("Shape", [x])[0], b.constant(np.array(axis, np.int64))])[0]
    condition = b.emit("Equal", [size, b.constant(np.array(1, np.int64))])[0]
    then, other = (inner(b, b.fresh("b") + "_", b.around) for _ in range(2))
    old = b.opset < 13
    done = then.emit("Squeeze", [x] if old else [x, then.ints(axis)], **({"axes": [axis]} if old else {}))
    return b.emit("If", [condition], 1, then_branch=graph_of(then, "yes", [], done),
                  else_branch=graph_of(other, "no", [], other.emit("Identity", [x])))


def repeated(b: Builder) -> object:
    """A Loop with carried values and, at times, stacked ones."""
    body = inner(b, b.fresh("b") + "_", b.around)
    carried = [value for _ in range(b.rng.randint(1, 2)) if (value := b.value([*FLOATS, INT64])) is not None]
    if not carried:
        return None
    turn, going = Known(body.fresh("i"), INT64, (np.array(0, np.int64),) * 2), Known(body.fresh("i"), BOOL,
                                                                                   (np.array(True),) * 2)
    states = [Known(body.fresh("s"), value.dtype, value.arrays) for value in carried]
    body.known = [turn, *states]
    grown(body, 1, 5)
    onward = going.name if b.flip() else body.constant(np.array(True)).name
    outputs = [passed_on(body, onward)]
    for state in states:
        same = [value for value in body.known if value.dtype == state.dtype and value.pairs == state.pairs
                and value not in states]
        outputs.append(passed_on(body, (b.rng.choice(same) if same else state).name))
    stacked = [value for value in body.known if value not in (turn, *states)]
    if stacked and b.flip():
        outputs.append(passed_on(body, b.rng.choice(stacked).name))
    if len(set(outputs)) != len(outputs):
        return None
    count = b.constant(np.array(b.rng.randint(0, 3), np.int64)) if b.flip(0.7) else b.fill(INT64, [], 0, 4)
    infos = [helper.make_tensor_value_info(each.name, each.dtype, []) for each in (turn, going)]
    infos += [helper.make_tensor_value_info(state.name, state.dtype, None if b.flip() else [None] * state.rank)
              for state in states]
    return b.emit("Loop", [count, None if b.flip() else b.constant(np.array(True)), *carried], len(outputs) - 1,
                  body=graph_of(body, "body", infos, outputs))


def scanned(b: Builder) -> object:
    """A Scan over the first or another axis, forward or back."""
    x = b.value(FLOATS, 1, accept=lambda value: value.size > 0)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    if x.least[axis] == 0:
        return None
    part = tuple(np.take(array, 0, axis) for array in x.arrays)
    start = b.broadcast(Known("", x.dtype, (part[0], part[1])), x.dtype, whole=True)
    if start is None:
        return None
    body = inner(b, b.fresh("b") + "_", b.around)
    state, element = (Known(body.fresh("s"), x.dtype, arrays) for arrays in (start.arrays, (part[0], part[1])))
    body.known = [state, element]
    grown(body, 1, 5)
    same = [value for value in body.known if value.dtype == state.dtype and value.pairs == state.pairs
            and value is not state]
    each = [value for value in body.known if value not in (state, element)]
    if not each:
        return None
    outputs = [passed_on(body, (b.rng.choice(same) if same else state).name), passed_on(body, b.rng.choice(each).name)]
    if outputs[0] == outputs[1]:
        outputs[1] = body.emit("Identity", [outputs[1]])[0]
    infos = [helper.make_tensor_value_info(value.name, value.dtype, [None] * value.rank) for value in (state, element)]
    more = {} if axis == 0 and b.flip() else {"scan_input_axes": [axis], "scan_input_directions": [b.rng.randint(0, 1)]}
    return b.emit("Scan", [start, x], 2, body=graph_of(body, "body", infos, outputs), num_scan_inputs=1, **more)


def called(b: Builder) -> object:
    """A function of the model: new, or one that is there already."""
    there = [function for function in b.functions if len(function.input) == 1]
    x = b.value([b.kind])
    if x is None:
        return None
    if there and b.flip(0.3):
        function = b.rng.choice(there)
        return b.emit(function.name, [x], len(function.output), domain="local")
    body = replace(inner(b, "f_", ()), closed=True, depth=2, functions=[])
    body.known = [Known("f_in", x.dtype, x.arrays)]
    grown(body, 1, 5)
    made = [value for value in body.known[1:] if not value.constant]
    if not made:
        return None
    attributes = []
    if x.dtype == FLOAT and b.flip(0.3):
        attributes.append("slope")
        node = helper.make_node("LeakyRelu", ["f_in"], ["f_leaky"])
        node.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
        body.nodes.append(node)
    outputs = [b.rng.choice(made).name, *(["f_leaky"] if attributes else [])]
    name = f"Function{len(b.functions)}"
    b.functions.append(helper.make_function("local", name, ["f_in"], outputs, body.nodes, opsets(b.opset)[:1],
                                            attributes))
    return b.emit(name, [x], len(outputs), domain="local", **({"slope": 0.25} if attributes else {}))


def sequence(b: Builder) -> object:
    """Tensors as a sequence, and back."""
    x = b.value([*FLOATS, INT64], 1)
    if x is None:
        return None
    if b.flip(0.4) and x.pairs[0][0] == x.pairs[0][1] > 0:
        made = b.emit("SplitToSequence", [x, *([b.constant(np.array(1, np.int64))] if b.flip() else [])], axis=0,
                      keepdims=b.rng.randint(0, 1))[0]
    elif b.flip(0.2):
        made = b.emit("SequenceInsert", [b.emit("SequenceEmpty", [], dtype=x.dtype)[0], x])[0]
    else:
        made = b.emit("SequenceConstruct", [x] * b.rng.randint(1, 3))[0]
    if b.flip(0.3):
        made = b.emit("SequenceInsert", [made, x])[0]
        made = b.emit("SequenceErase", [made, b.constant(np.array(0, np.int64))])[0] if b.flip() else made
    if b.flip(0.4):
        return b.emit("SequenceAt", [made, b.constant(np.array(-1, np.int64))])
    if b.flip(0.2):
        return b.emit("SequenceLength", [made])
    return b.emit("ConcatFromSequence", [made], axis=0, new_axis=b.rng.randint(0, 1))


def optional(b: Builder) -> object:
    x = b.value([b.kind]) if b.opset >= 15 else None
    if x is None:
        return None
    made = b.emit("Optional", [x])[0]
    return b.emit(b.rng.choice(("OptionalHasElement", "OptionalGetElement")), [made])


MOTIFS: Mapping[str, Callable[[Builder], object]] = {
    "If": choice, "squeeze": squeezed, "Loop": repeated, "Scan": scanned, "function": called, "sequence": sequence,
    "optional": optional,
}

