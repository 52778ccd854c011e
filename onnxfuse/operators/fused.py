"""Outputs of fused nodes: their launch plan says how large they are.

The plan (``lowering.launch``) writes sizes in reverse Polish notation over the sizes of the node's inputs.  What it
says of the numbers of one run holds for symbols as well.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from onnxfuse.bounded import parse_json
from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import Dim, broadcast, dim, maximum, minimum, product

DOMAIN = "onnxfuse"

HOST_INPUTS = 8
"""Leading inputs of a fused node that live in host memory, as in ``lowering.launch``."""

_OPERATORS: dict[str, Callable[[Dim, Dim], Dim]] = {
    "+": Dim.__add__, "-": Dim.__sub__, "*": Dim.__mul__, "//": Dim.__floordiv__, "%": Dim.__mod__,
    "min": minimum, "max": maximum, "bcast": broadcast,
}


def fused_node(context: TypeContext) -> list[Type]:
    """Types of the outputs of a fused node.

    Raises:
        ValueError, KeyError, IndexError, TypeError: the plan is missing or damaged, or a size is not known.
    """
    plan = parse_json(context.attribute("plan"))
    symbols: list[Dim] = []
    for text in plan["symbols"]:
        symbols.append(_evaluate(text, context, symbols))
    return [
        Type(_element_type(output["dtype"]), tuple(_evaluate(text, context, symbols) for text in output["shape"]))
        for output in plan["outputs"]
    ]


def _element_type(number: object) -> int:
    if isinstance(number, bool) or number not in onnx.TensorProto.DataType.values():
        raise ValueError(number)
    return int(str(number))


def _evaluate(text: object, context: TypeContext, symbols: list[Dim]) -> Dim:
    if not isinstance(text, str):
        raise TypeError(text)
    stack: list[Dim] = []
    for token in text.split():
        if token in _OPERATORS:
            second, first = stack.pop(), stack.pop()
            stack.append(_OPERATORS[token](first, second))
        else:
            stack.append(_atom(token, context, symbols))
    (result,) = stack
    return result


def _atom(token: str, context: TypeContext, symbols: list[Dim]) -> Dim:
    if token.lstrip("-").isdigit():
        return dim(int(token))
    if token[0] == "s":
        return symbols[int(token[1:])]
    place, part = token[1:].split(".")
    if token[0] == "h":
        contents = context.elements(int(place))
        if contents is None:
            raise ValueError(token)
        return contents[int(part)]
    shape = context.shape(HOST_INPUTS + int(place))
    if shape is None:
        raise ValueError(token)
    return product(shape) if part == "n" else shape[int(part)]
