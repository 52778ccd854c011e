"""Sizes as exporters write them into a file: texts."""

from __future__ import annotations

import ast

from onnxfuse.graph.dims import (
    LONGEST,
    Dim,
    SizeTooLargeError,
    broadcast,
    dim,
    maximum,
    minimum,
    product,
    symbol,
)


def parse(text: str) -> Dim:
    """The size that an exporter wrote down: ``"batch"``, ``"s50 + 1"``, ``"Min(512, s50)"``.

    A text that is no arithmetic expression, or one of a size that is not followed, names one symbol.
    """
    if len(text) > LONGEST:
        return symbol(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        size = _from_ast(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SizeTooLargeError):
        return symbol(text)
    return size if size.value is not None or size.is_followed() else symbol(text)


def _from_ast(tree: ast.expr) -> Dim:
    match tree:
        case ast.Constant(value=int(number)):
            return dim(number)
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return dim(0) - _from_ast(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _from_ast(left), _from_ast(right)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv() if b != 0:
                    return a // b
                case ast.Mod() if b != 0:
                    return a % b
                case ast.Pow() if b.value is not None and 0 <= b.value <= 8:
                    return product([a] * b.value)
        case ast.Call(func=ast.Name(id="Min" | "min"), args=[left, right]):
            return minimum(_from_ast(left), _from_ast(right))
        case ast.Call(func=ast.Name(id="Max" | "max"), args=[left, right]):
            return maximum(_from_ast(left), _from_ast(right))
        case ast.Call(func=ast.Name(id="bcast"), args=[left, right]):
            return broadcast(_from_ast(left), _from_ast(right))
    raise ValueError(ast.dump(tree))
