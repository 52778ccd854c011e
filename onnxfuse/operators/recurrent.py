"""Recurrent layers: LSTM, GRU and plain ones.

What inputs add to the gates is a product over all steps; what states do is the region IR's ``Recurrence``.
"""

from __future__ import annotations

from math import prod

from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node, Shape
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext
from onnxfuse.ir.contractions import contract
from onnxfuse.ir.scalars import FLOAT, NARROW
from onnxfuse.ir.tensors import Recurrence, Tensor
from onnxfuse.operators.arithmetic import sizes_of
from onnxfuse.operators.operands import integer_attribute
from onnxfuse.operators.record import HEAVY, PLAIN, define

USUAL = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh")}
"""Activations of each direction, where none are named."""

def recurrent_types(context: TypeContext) -> list[Type]:
    shape, dtype, recurrent = context.shape(), context.dtype(), context.shape(2)
    hidden = context.attribute("hidden_size")
    size = dim(int(hidden)) if hidden is not None else None if recurrent is None else recurrent[2]
    if size is None:
        return [Type(dtype)] * 3
    directions = dim(2 if context.attribute("direction", "forward") == "bidirectional" else 1)
    first = bool(context.attribute("layout", 0))
    if shape is None:
        # Whatever is read, it has three axes, and the batch that the state before the first step has.
        state = context.shape(5)
        length = context.unknown(1 if first else 0, 4)
        batch = context.unknown(0 if first else 2, 4) if state is None else state[0 if first else 1]
        shape = (batch, length) if first else (length, batch)
    if first:
        batch, length = shape[0], shape[1]
        states: Shape = (batch, directions, size)
        return [Type(dtype, (batch, length, directions, size)), Type(dtype, states), Type(dtype, states)]
    length, batch = shape[0], shape[1]
    states = (directions, batch, size)
    return [Type(dtype, (length, directions, batch, size)), Type(dtype, states), Type(dtype, states)]


def recurrent(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """A product of all inputs, and what becomes of the states from step to step."""
    _check(node, context)
    steps, weights, states = (_read(node, context, place) for place in range(3))
    assert steps is not None and weights is not None and states is not None
    if steps.dtype not in (*NARROW, FLOAT):
        raise context.refuse("unsupported-type", f"{node.op} of this type has no kernel")
    if states.shape[2].value is None:
        raise context.refuse("unknown-sizes", "how many units the layer has is not known before the model runs")
    given = contract((steps, "tbk"), (weights, "dgk"), "tbdg")
    bias, state, cell = (_read(node, context, place) for place in (3, 5, 6))
    direction = node.attributes.get("direction", "forward")
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[str(direction)]
    length, batch = steps.shape[:2]
    count, units = dim(len(backwards)), states.shape[2]

    def result(name: str, shape: Shape) -> Tensor:
        return Recurrence(steps.dtype, shape, node.op.lower(), given, states, bias, state, cell, backwards, name)

    last = (count, batch, units)
    return [result("steps", (length, count, batch, units)), result("state", last),
            result("cell", last) if node.op == "LSTM" else None]


def _read(node: Node, context: LoweringContext, place: int) -> Tensor | None:
    """An operand from memory; None where the node has none there."""
    value = node.inputs[place] if len(node.inputs) > place else None
    return None if value is None else context.tensor(value, read=True)


def _check(node: Node, context: LoweringContext) -> None:
    """Raise a refusal where a layer is of a kind that has no kernel."""
    def has(place: int) -> bool:
        return len(node.inputs) > place and node.inputs[place] is not None

    names = node.attributes.get("activations")
    usual = USUAL[node.op]
    found = [(name.decode() if isinstance(name, bytes) else str(name)).capitalize() for name in names or usual]
    other = (
        "sequences of lengths of their own" if has(4) else
        "weights of its cells" if node.op == "LSTM" and has(7) else
        "activations of its own" if any(name != usual[place % len(usual)] for place, name in enumerate(found)) else
        "a clip" if node.attributes.get("clip") else
        "a coupled forget gate" if integer_attribute(node, "input_forget", 0) else
        "the batch before the steps" if integer_attribute(node, "layout", 0) else
        "a reset before the product of its state" if node.op == "GRU" and not integer_attribute(
            node, "linear_before_reset", 0) else "")
    if other:
        raise context.refuse("unsupported-mode", f"{node.op} with {other} has no kernel")


def _recurrent_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Each step of each sequence by all weights, those of the input and those of the state."""
    steps, weights, states = (sizes_of(node.inputs[place], sizes) for place in range(3))
    if steps is None or weights is None or states is None or len(steps) != 3:
        return None
    return 2 * steps[0] * steps[1] * (prod(weights) + prod(states))


define("LSTM", "GRU", kind=HEAVY, types=recurrent_types, lowering=recurrent, arithmetic=_recurrent_arithmetic, host=(),
       runtime=PLAIN)
define("RNN", kind=HEAVY, types=recurrent_types, lowering=None, arithmetic=_recurrent_arithmetic, host=(),
       runtime=PLAIN)
