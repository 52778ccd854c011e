"""Recurrent layers in float64, step by step, as the standard has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def layer(op: str) -> Callable[..., tuple[Array, ...]]:
    """What an LSTM or a GRU gives, by its attributes and operands; activations are the usual ones."""
    gates = {"LSTM": 4, "GRU": 3}[op]

    def run(attributes: Mapping, opset: int, x: Array, w: Array, r: Array, b: Array | None = None,
            lengths: Array | None = None, first: Array | None = None, cells: Array | None = None) -> tuple[Array, ...]:
        assert lengths is None and not attributes.get("layout")
        (steps, batch, _), directions, hidden = x.shape, w.shape[0], r.shape[2]
        biases = np.zeros((directions, 2 * gates * hidden)) if b is None else b
        every = np.zeros((steps, directions, batch, hidden))
        last, last_cells = np.zeros((2, directions, batch, hidden))
        for direction in range(directions):
            own = [np.zeros((batch, hidden)) if given is None else given[direction] for given in (first, cells)]
            backwards = direction == 1 or attributes.get("direction") == b"reverse"
            for step in reversed(range(steps)) if backwards else range(steps):
                given = x[step] @ w[direction].T + biases[direction, :gates * hidden]
                own = _STEPS[op](attributes, given, own, r[direction], biases[direction, gates * hidden:])
                every[step, direction] = own[0]
            last[direction], last_cells[direction] = own
        return (every, last, last_cells)[:gates - 1]

    return run


def _lstm(attributes: Mapping, given: Array, own: list[Array], r: Array, b: Array) -> list[Array]:
    put, out, kept, made = np.split(given + own[0] @ r.T + b, 4, axis=1)
    cell = _sigmoid(kept) * own[1] + _sigmoid(put) * np.tanh(made)
    return [_sigmoid(out) * np.tanh(cell), cell]


def _gru(attributes: Mapping, given: Array, own: list[Array], r: Array, b: Array) -> list[Array]:
    update, reset, made = np.split(given, 3, axis=1)
    (of_update, of_reset, of_made), (bias_update, bias_reset, bias_made) = np.split(r, 3), np.split(b, 3)
    z = _sigmoid(update + own[0] @ of_update.T + bias_update)
    s = _sigmoid(reset + own[0] @ of_reset.T + bias_reset)
    behind = s * (own[0] @ of_made.T + bias_made) if attributes.get("linear_before_reset") else (
        (s * own[0]) @ of_made.T + bias_made)
    return [(1 - z) * np.tanh(made + behind) + z * own[0], own[1]]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_STEPS = {"LSTM": _lstm, "GRU": _gru}
