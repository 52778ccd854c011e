"""The runtime's GroupQueryAttention in NumPy, sequence by sequence and row by row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def rotated(side: Array, first: int, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rows (row, head, column) of a sequence whose first row has the place ``first``."""
    result, half = side.copy(), cos.shape[1]
    for row in range(len(side)):
        c, s = cos[first + row], sin[first + row]
        one, other = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
            slice(0, half), slice(half, 2 * half))
        x, y = side[row][:, one], side[row][:, other]
        result[row][:, one], result[row][:, other] = x * c - y * s, y * c + x * s
    return result


def group_query_attention(attributes: Mapping, opset: int, q: Array, k: Array | None, v: Array | None,
                          *more: Array | None) -> tuple[Array, Array, Array]:
    """What is attended, and keys and values as they are then; rows behind a sequence's end stay what they were, or are
    zero."""
    past_k, past_v, ends, total, cos, sin = (*more, None, None, None, None)[:6]
    heads, own = attributes["num_heads"], attributes["kv_num_heads"]
    batch, length = q.shape[:2]
    if k is None:
        columns = q.shape[2] // (heads + 2 * own)
        q, k, v = np.split(q, [heads * columns, (heads + own) * columns], axis=2)
    depth = q.shape[2] // heads
    rows = max(past_k.shape[2], int(np.reshape(total, ())))
    keys, values = (np.zeros((batch, own, rows, depth), past.dtype) for past in (past_k, past_v))
    keys[:, :, :past_k.shape[2]], values[:, :, :past_v.shape[2]] = past_k, past_v
    result = np.zeros((batch, length, heads, depth), q.dtype)
    cap, window = attributes.get("softcap", 0.0), attributes.get("local_window_size", -1)
    scale = attributes.get("scale", 0.0) or depth ** -0.5
    for b in range(batch):
        first = max(int(ends[b]) + 1 - length, 0)
        queries, new = q[b].reshape(length, heads, depth), k[b].reshape(length, own, depth)
        if attributes.get("do_rotary", 0):
            queries, new = (rotated(each, first, cos, sin, bool(attributes.get("rotary_interleaved", 0)))
                            for each in (queries, new))
        keys[b, :, first:first + length] = new.transpose(1, 0, 2)
        values[b, :, first:first + length] = v[b].reshape(length, own, depth).transpose(1, 0, 2)
        for row in range(length):
            end = first + row + 1
            begin = max(end - window, 0) if window > 0 else 0
            for head in range(heads):
                of = head // (heads // own)
                score = keys[b, of, begin:end] @ queries[row, head] * scale
                score = cap * np.tanh(score / cap) if cap else score
                power = np.exp(score - score.max())
                result[b, row, head] = power / power.sum() @ values[b, of, begin:end]
    return result.reshape(batch, length, -1), keys, values
