"""Operators that onnx's evaluator lacks, or computes in float32: in float64 here, integers as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from reference_grouped import group_query_attention
from reference_images import channels as _channels
from reference_images import conv_transpose, grid_sample, resize
from reference_quantised import dequantize, dynamic_quantize, integers_to_floats, qgemm, quantize
from reference_recurrent import layer

Array = NDArray[np.generic]


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _phi(x: Array) -> Array:
    return x * 0.5 * (1 + _erf(x / np.sqrt(2)))


def _multi_head_attention(
    attributes: Mapping, opset: int, q: Array, k: Array, v: Array, *more: Array | None
) -> Array:
    """Without keys of the past, of queries, keys and values that are not packed."""
    bias, mask, scores = (*more, None, None, None)[:3]
    count = attributes["num_heads"]
    if bias is not None:
        q, k, v = (side + part for side, part in zip((q, k, v), np.split(
            bias, np.cumsum([q.shape[-1], k.shape[-1]])), strict=True))
    q, k, v = (side if side.ndim == 4 else side.reshape(*side.shape[:2], count, -1).transpose(0, 2, 1, 3)
               for side in (q, k, v))
    score = q @ k.transpose(0, 1, 3, 2) * (attributes.get("scale", 0.0) or q.shape[-1] ** -0.5)
    score = score + (0.0 if scores is None else scores)
    if mask is not None:
        score = score + np.where(_seen(mask, *score.shape), 0.0, attributes.get("mask_filter_value", -10000.0))
    if attributes.get("unidirectional", 0):
        score = np.where(np.tri(*score.shape[-2:], dtype=bool), score, -np.inf)
    made = (_softmax(score, (3,)) @ v).transpose(0, 2, 1, 3)
    return made.reshape(*made.shape[:2], -1)


def _seen(mask: Array, batch: int, heads: int, rows: int, keys: int) -> Array:
    """Of a mask of numbers for keys, for queries' keys, or of where keys end and begin."""
    if mask.ndim == 1:
        ends, begins = (*mask.reshape(-1, batch), np.zeros(batch, int))[:2]
        places = np.arange(keys)
        return ((places < ends[:, None]) & (places >= begins[:, None]))[:, None, None]
    return (mask[:, None, None] if mask.ndim == 2 else mask[:, None]) > 0


def _packed_attention(attributes: Mapping, opset: int, x: Array, w: Array, *more: Array | None) -> Array:
    """Without keys of the past."""
    bias, mask, _, scores = (*more, None, None, None, None)[:4]
    whole = x @ w + (0.0 if bias is None else bias)
    widths = attributes.get("qkv_hidden_sizes", [w.shape[1] // 3] * 3)
    sides = np.split(whole, np.cumsum(widths[:2]), axis=2)
    return _multi_head_attention(attributes, opset, *sides, None, mask, scores)


def _gelu_tanh(x: Array) -> Array:
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _silu(x: Array, alpha: float = 1.0) -> Array:
    return x / (1 + np.exp(-alpha * x))


def _gelu(attributes: Mapping, opset: int, x: Array) -> Array:
    return _gelu_tanh(x) if attributes.get("approximate") == b"tanh" else _phi(x)


def _biased(function: Callable[[Array], Array]) -> Callable:
    return lambda attributes, opset, x, bias=None: function(x if bias is None else x + bias)


def _normal(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    mean = x.mean(axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(x.var(axis=axes, keepdims=True) + epsilon)
    return (x - mean) * inverse, mean, inverse


def _root_mean_square(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + epsilon)


def _from(axis: int, x: Array) -> tuple[int, ...]:
    return tuple(range(axis % x.ndim, x.ndim))


def _layer_norm(
    attributes: Mapping, opset: int, x: Array, scale: Array, bias: Array | None = None
) -> tuple[Array, ...]:
    normal, mean, inverse = _normal(x, _from(attributes.get("axis", -1), x), attributes.get("epsilon", 1e-5))
    return normal * scale + (0 if bias is None else bias), mean, inverse


def _rms_norm(attributes: Mapping, opset: int, x: Array, scale: Array) -> Array:
    return _root_mean_square(x, _from(attributes.get("axis", -1), x), attributes.get("epsilon", 1e-5)) * scale


def _instance_norm(attributes: Mapping, opset: int, x: Array, scale: Array, bias: Array) -> Array:
    normal, _, _ = _normal(x, tuple(range(2, x.ndim)), attributes.get("epsilon", 1e-5))
    return normal * _channels(scale, x) + _channels(bias, x)


def _group_norm(attributes: Mapping, opset: int, x: Array, scale: Array, bias: Array) -> Array:
    groups = attributes["num_groups"]
    grouped = x.reshape(x.shape[0], groups, -1)
    normal, _, _ = _normal(grouped, (2,), attributes.get("epsilon", 1e-5))
    if opset >= 21:
        return normal.reshape(x.shape) * _channels(scale, x) + _channels(bias, x)
    return (normal * scale[:, None] + bias[:, None]).reshape(x.shape)


def _batch_norm(attributes: Mapping, opset: int, x: Array, *parameters: Array) -> Array:
    scale, bias, mean, variance = (p.reshape(-1, *(1,) * (x.ndim - 2)) for p in parameters)
    return (x - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-5)) * scale + bias


def _softmax(x: Array, axes: tuple[int, ...]) -> Array:
    powers = np.exp(x - x.max(axis=axes, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=axes, keepdims=True)


def _log_softmax(x: Array, axes: tuple[int, ...]) -> Array:
    shifted = x - x.max(axis=axes, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis=axes, keepdims=True))


def _softmax_like(function: Callable[[Array, tuple[int, ...]], Array]) -> Callable:
    def run(attributes: Mapping, opset: int, x: Array) -> Array:
        if opset >= 13:
            return function(x, (attributes.get("axis", -1) % x.ndim,))
        return function(x, _from(attributes.get("axis", 1), x))

    return run


def _safe_softmax(attributes: Mapping, opset: int, x: Array) -> Array:
    result = _softmax(x, (attributes.get("axis", -1) % x.ndim,))
    return np.where(np.isnan(result), 0.0, result)


def _skip_layer_norm(
    attributes: Mapping,
    opset: int,
    x: Array,
    skip: Array,
    scale: Array,
    bias: Array | None = None,
    added: Array | None = None,
) -> tuple[Array, ...]:
    total = x + skip + (0 if added is None else added)
    normal, mean, inverse = _normal(total, (-1,), attributes.get("epsilon", 1e-12))
    return normal * scale + (0 if bias is None else bias), mean, inverse, total


def _skip_rms_norm(
    attributes: Mapping, opset: int, x: Array, skip: Array, scale: Array, added: Array | None = None
) -> tuple[Array | None, ...]:
    total = x + skip + (0 if added is None else added)
    return _root_mean_square(total, (-1,), attributes.get("epsilon", 1e-12)) * scale, np.zeros(()), np.zeros(()), total


def truncated(x: Array, kind: np.dtype, bits: int) -> Array:
    """Floats as integers, as a GPU converts them: to 32 or 64 bits the nearest limit, shorter ones the lowest bits of
    that; NaN gives the highest bit alone, and 0 of a type of ``bits`` 32 and fewer to one of 32 and fewer."""
    width = max(32, 8 * kind.itemsize)
    lowest, highest = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if kind.kind == "i" else (0, 2**width - 1)
    unknown = 0 if bits <= 32 and width == 32 else 2 ** (width - 1)
    found = [unknown if number != number else highest if number >= highest else lowest if number <= lowest
             else int(number) for number in x.reshape(-1).tolist()]
    masked = np.array([number % 2 ** (8 * kind.itemsize) for number in found], np.dtype(f"u{kind.itemsize}"))
    return masked.view(kind).reshape(x.shape)


def clipped(x: Array, least: Array | None, most: Array | None, limits: tuple[float, float]) -> Array:
    """A limit that is absent is the type's own, one that is NaN limits nothing."""
    least, most = (own if limit is None else limit for limit, own in zip((least, most), limits, strict=True))
    x = np.where(x < least, least, x).astype(x.dtype)
    return np.where(x > most, most, x).astype(x.dtype)


def _power(attributes: Mapping, opset: int, x: Array, y: Array) -> Array:
    if x.dtype == np.float64:
        # NumPy takes the root of what is to the power of a half: NaN of -infinity, where C's pow is infinite.
        return np.where(np.isneginf(x) & (y > 0) & (y % 2 != 1), np.inf, np.power(x, y))
    info = np.iinfo(x.dtype)

    def power(base: int, exponent: int) -> int:
        if exponent < 0:
            return info.max if base == 0 else base ** (exponent % 2) if abs(base) == 1 else 0
        # Whatever is larger than one has passed every limit by then.
        return min(max(base ** (exponent if abs(base) < 2 else min(exponent, 64 + exponent % 2)), info.min), info.max)

    return np.vectorize(power, otypes=[x.dtype])(x.astype(object), y.astype(object))


def _quotient(attributes: Mapping, opset: int, x: Array, y: Array) -> Array:
    """Integers towards zero; a division by zero gives 0, which the standard leaves open, the lowest by -1 itself."""
    if x.dtype == np.float64:
        return x / y
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    whole = x // safe
    toward_zero = whole + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    return np.where(y == 0, 0, toward_zero).astype(x.dtype)


def _modulo(attributes: Mapping, opset: int, x: Array, y: Array) -> Array:
    if x.dtype == np.float64:
        return np.fmod(x, y)
    safe = np.where(y == 0, 1, y)
    rest = np.fmod(x, safe) if attributes.get("fmod") else np.mod(x, safe)
    return np.where(y == 0, 0, rest).astype(x.dtype)


def _mean_of(attributes: Mapping, opset: int, *operands: Array) -> Array:
    return sum(operands[1:], operands[0]) / len(operands)


def _axes(attributes: Mapping, x: Array, axes: Array | None) -> tuple[int, ...]:
    given = attributes.get("axes") if axes is None else axes
    if given is None or len(given) == 0:
        return () if attributes.get("noop_with_empty_axes") else tuple(range(x.ndim))
    return tuple(int(axis) % x.ndim for axis in given)


def _log_sum_exp(x: Array, axes: tuple[int, ...]) -> Array:
    largest = x.max(axis=axes, keepdims=True, initial=-np.inf)
    largest = np.where(np.isinf(largest), 0, largest)
    return np.log(np.exp(x - largest).sum(axis=axes, keepdims=True)) + largest


def _bounded(total: Callable, x: Array, axes: tuple[int, ...]) -> Array:
    """Past the limits of 32 bits the nearest of them, of 64 bits the lowest bits."""
    if x.dtype.itemsize > 4 or x.dtype.kind == "f":
        return total(x, axis=axes, keepdims=True, dtype=x.dtype)
    info = np.iinfo(x.dtype)
    exact = total(x, axis=axes, keepdims=True, dtype=np.float64)
    return np.clip(exact, info.min, info.max).astype(x.dtype)


REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "ReduceSum": lambda x, axes: _bounded(np.sum, x, axes),
    "ReduceProd": lambda x, axes: _bounded(np.prod, x, axes),
    "ReduceMean": lambda x, axes: x.mean(axis=axes, keepdims=True),
    "ReduceMax": lambda x, axes: x.max(axis=axes, keepdims=True),
    "ReduceMin": lambda x, axes: x.min(axis=axes, keepdims=True),
    "ReduceL1": lambda x, axes: np.abs(x).sum(axis=axes, keepdims=True),
    "ReduceL2": lambda x, axes: np.sqrt((x * x).sum(axis=axes, keepdims=True)),
    "ReduceSumSquare": lambda x, axes: (x * x).sum(axis=axes, keepdims=True),
    "ReduceLogSum": lambda x, axes: np.log(x.sum(axis=axes, keepdims=True)),
    "ReduceLogSumExp": _log_sum_exp,
}


def _reduction(name: str) -> Callable:
    def run(attributes: Mapping, opset: int, x: Array, axes: Array | None = None) -> Array:
        over = _axes(attributes, x, axes)
        kept = REDUCTIONS[name](x, over) if over or x.ndim == 0 else x
        return kept if attributes.get("keepdims", 1) else np.squeeze(kept, axis=over)

    return run


def _lp_norm(attributes: Mapping, opset: int, x: Array) -> Array:
    axis = attributes.get("axis", -1)
    norm = np.linalg.norm(x, ord=attributes.get("p", 2), axis=axis, keepdims=True) if x.size else x
    return x / np.where(norm == 0, 1, norm)


def _gather_elements(attributes: Mapping, opset: int, x: Array, indices: Array) -> Array:
    """Sizes of the other axes may be smaller than those of ``x``."""
    axis = attributes.get("axis", 0) % x.ndim
    part = x[tuple(slice(None) if place == axis else slice(size) for place, size in enumerate(indices.shape))]
    return np.take_along_axis(part, indices.astype(np.int64) % max(x.shape[axis], 1), axis)


def _gather_nd(attributes: Mapping, opset: int, x: Array, indices: Array) -> Array:
    """Without a batch."""
    places = (indices[..., place].astype(np.int64) % max(x.shape[place], 1) for place in range(indices.shape[-1]))
    return x[tuple(places)]


def _gather(attributes: Mapping, opset: int, x: Array, indices: Array) -> Array:
    axis = attributes.get("axis", 0)
    return np.take(x, indices.astype(np.int64) % max(x.shape[axis], 1), axis)


REDUCING = {
    b"none": lambda there, update: update, b"add": np.add, b"mul": np.multiply,
    # Of two that cannot be compared the runtime's kernels keep the update.
    b"max": lambda there, update: np.where(there > update, there, update),
    b"min": lambda there, update: np.where(there < update, there, update),
}
"""What a Scatter makes of what is there and an update."""


def _scatter_nd(attributes: Mapping, opset: int, x: Array, indices: Array, updates: Array) -> Array:
    result, reduction = x.copy(), REDUCING[attributes.get("reduction", b"none")]
    for at in np.ndindex(indices.shape[:-1]):
        place = tuple(int(index) for index in indices[at])
        result[place] = reduction(result[place], updates[at])
    return result


def _scatter_elements(attributes: Mapping, opset: int, x: Array, indices: Array, updates: Array) -> Array:
    result, reduction = x.copy(), REDUCING[attributes.get("reduction", b"none")]
    axis = attributes.get("axis", 0) % x.ndim
    for at in np.ndindex(indices.shape):
        place = (*at[:axis], int(indices[at]), *at[axis + 1:])
        result[place] = reduction(result[place], updates[at])
    return result


def _running_total(attributes: Mapping, opset: int, x: Array, axis: Array) -> Array:
    """One element after the other, so that what is infinite or no number reaches none before it."""
    along = int(np.ravel(axis)[0]) % x.ndim
    places = range(x.shape[along])
    result, total = np.empty_like(x), np.zeros(x.shape[:along] + x.shape[along + 1:], x.dtype)
    for place in reversed(places) if attributes.get("reverse", 0) else places:
        at = (slice(None),) * along + (place,)
        before, total = total, total + x[at]
        result[at] = before if attributes.get("exclusive", 0) else total
    return result


def _pad(attributes: Mapping, opset: int, x: Array, amounts: Array, value: Array | None = None,
         axes: Array | None = None) -> Array:
    chosen = [int(axis) % x.ndim for axis in (range(x.ndim) if axes is None else axes)]
    for axis, first, last in zip(chosen, amounts[:len(chosen)], amounts[len(chosen):], strict=True):
        x = np.take(x, range(max(-first, 0), x.shape[axis] - max(-last, 0)), axis)
        widths = [(max(first, 0), max(last, 0)) if place == axis else (0, 0) for place in range(x.ndim)]
        mode = attributes.get("mode", b"constant").decode()
        more = {} if mode != "constant" else {"constant_values": 0 if value is None else value.item()}
        x = np.pad(x, widths, mode=mode, **more)
    return x


def _global_pool(kind: str) -> Callable:
    """A reduction over the axes behind the channels."""

    def pool(attributes: Mapping, opset: int, x: Array) -> Array:
        axes, p = tuple(range(2, x.ndim)), attributes.get("p", 2)
        if kind == "average":
            return x.mean(axis=axes, keepdims=True)
        return x.max(axis=axes, keepdims=True) if kind == "max" else (
            (np.abs(x) ** p).sum(axis=axes, keepdims=True) ** (1 / p))

    return pool


def _pool(kind: str) -> Callable:
    """Window by window, as the standard numbers them: those that begin behind the data and its padding are none."""

    def sides(attributes: Mapping, axis: int, size: int, count: int) -> tuple[int, int, int]:
        kernel, stride = attributes["kernel_shape"][axis], (attributes.get("strides") or [1] * count)[axis]
        reach = (kernel - 1) * (attributes.get("dilations") or [1] * count)[axis] + 1
        automatic = attributes.get("auto_pad", b"NOTSET").decode()
        if automatic.startswith("SAME"):
            windows = -(-size // stride)
            padding = max((windows - 1) * stride + reach - size, 0)
            before = padding // 2 if automatic == "SAME_UPPER" else -(-padding // 2)
            return windows, before, padding - before
        before, behind = (0, 0) if automatic == "VALID" else (
            (attributes.get("pads") or [0] * 2 * count)[place] for place in (axis, axis + count))
        starts = range(-before, size + behind, stride)
        ends = size + behind + (stride - 1 if attributes.get("ceil_mode", 0) else 0)
        windows = sum(start + reach <= ends and start < size for start in starts)
        # Of a window that is too large by less than a stride the runtime takes what there is.
        return windows or int(reach - stride < before + size + behind < reach), before, behind

    def pool(attributes: Mapping, opset: int, x: Array) -> Array:
        count = x.ndim - 2
        strides, dilations = (attributes.get(name) or [1] * count for name in ("strides", "dilations"))
        placed = [sides(attributes, axis, x.shape[2 + axis], count) for axis in range(count)]
        result = np.empty((*x.shape[:2], *(windows for windows, _, _ in placed)), x.dtype)
        for window in np.ndindex(result.shape[2:]):
            picked = [strides[axis] * window[axis] - placed[axis][1] + dilations[axis] * np.arange(size)
                      for axis, size in enumerate(attributes["kernel_shape"])]
            padded = np.prod([((index >= -before) & (index < size + behind)).sum() for index, size, (_, before, behind)
                              in zip(picked, x.shape[2:], placed, strict=True)])
            inside = [index[(index >= 0) & (index < size)] for index, size in zip(picked, x.shape[2:], strict=True)]
            taken, axes = x[np.ix_(range(x.shape[0]), range(x.shape[1]), *inside)], tuple(range(2, x.ndim))
            counted = padded if attributes.get("count_include_pad", 0) else np.prod(taken.shape[2:])
            result[(..., *window)] = taken.max(axes) if kind == "max" else taken.sum(axes) / counted
        return result

    return pool


def _one_hot(attributes: Mapping, opset: int, indices: Array, depth: Array, values: Array) -> Array:
    count, axis = int(np.ravel(depth)[0]), attributes.get("axis", -1)
    found = np.expand_dims(indices.astype(np.int64), axis)
    places = np.arange(count).reshape([-1 if place == axis % found.ndim else 1 for place in range(found.ndim)])
    return np.where(places == np.where(found < 0, found + count, found), values[1], values[0])


def _loss(attributes: Mapping, opset: int, x: Array, labels: Array) -> Array:
    return -np.take_along_axis(x, labels[:, None], axis=1)[:, 0]


def _squeeze(attributes: Mapping, opset: int, x: Array, axes: Array | None = None) -> Array:
    given = attributes.get("axes") if axes is None else axes
    return np.squeeze(x, None if given is None else tuple(int(axis) for axis in given))


def _unsqueeze(attributes: Mapping, opset: int, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, tuple(int(axis) for axis in (attributes.get("axes") if axes is None else axes)))


def _hard_sigmoid(attributes: Mapping, opset: int, x: Array) -> Array:
    return np.clip(x * attributes.get("alpha", float(np.float32(0.2))) + attributes.get("beta", 0.5), 0, 1)


MICROSOFT, CANONICAL = "com.microsoft", "onnxfuse.canonical"

OWN: dict[tuple[str, str], Callable] = {
    **{("", op): layer(op) for op in ("LSTM", "GRU")},
    ("", "Erf"): lambda a, o, x: _erf(x),
    ("", "Gelu"): _gelu,
    ("", "Swish"): lambda a, o, x: _silu(x, a.get("alpha", 1.0)),
    ("", "Mish"): lambda a, o, x: x * np.tanh(np.logaddexp(0, x)),
    ("", "Softsign"): lambda a, o, x: x / (1 + np.abs(x)),
    ("", "Softplus"): lambda a, o, x: np.logaddexp(0, x),
    ("", "Sigmoid"): lambda a, o, x: 1 / (1 + np.exp(-x)),
    ("", "Reciprocal"): lambda a, o, x: 1 / x,
    ("", "HardSwish"): lambda a, o, x: x * np.clip(x / 6 + 0.5, 0, 1),
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_nd,
    ("", "Gather"): _gather,
    ("", "Pad"): _pad,
    ("", "CumSum"): _running_total,
    ("", "ScatterND"): _scatter_nd,
    ("", "ScatterElements"): _scatter_elements,
    ("", "Resize"): resize,
    ("", "GridSample"): grid_sample,
    ("", "OneHot"): _one_hot,
    ("", "GlobalAveragePool"): _global_pool("average"),
    ("", "GlobalMaxPool"): _global_pool("max"),
    ("", "GlobalLpPool"): _global_pool("power"),
    ("", "MaxPool"): _pool("max"),
    ("", "AveragePool"): _pool("average"),
    ("", "QuantizeLinear"): quantize,
    ("", "DynamicQuantizeLinear"): dynamic_quantize,
    (MICROSOFT, "MatMulIntegerToFloat"): integers_to_floats,
    (MICROSOFT, "QGemm"): qgemm,
    ("", "DequantizeLinear"): dequantize,
    (MICROSOFT, "QuantizeLinear"): quantize,
    (MICROSOFT, "DequantizeLinear"): dequantize,
    ("", "PRelu"): lambda a, o, x, slope: np.where(x < 0, x * slope, x),
    ("", "HardSigmoid"): _hard_sigmoid,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Elu"): lambda a, o, x: np.where(x < 0, a.get("alpha", 1.0) * np.expm1(x), x),
    ("", "Celu"): lambda a, o, x: np.where(x < 0, a.get("alpha", 1.0) * np.expm1(x / a.get("alpha", 1.0)), x),
    ("", "Selu"): lambda a, o, x: (
        a.get("gamma", 1.05070102214813232421875)
        * np.where(x <= 0, a.get("alpha", 1.67326319217681884765625) * np.expm1(x), x)
    ),
    ("", "Sign"): lambda a, o, x: np.where(x > 0, 1, np.where(x < 0, -1, 0)).astype(x.dtype),
    ("", "Pow"): _power,
    ("", "Div"): _quotient,
    ("", "Mod"): _modulo,
    ("", "Mean"): _mean_of,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    (MICROSOFT, "SimplifiedLayerNormalization"): _rms_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "ConvTranspose"): conv_transpose,
    ("", "GroupNormalization"): _group_norm,
    ("", "BatchNormalization"): _batch_norm,
    ("", "Softmax"): _softmax_like(_softmax),
    ("", "LogSoftmax"): _softmax_like(_log_softmax),
    ("", "LpNormalization"): _lp_norm,
    ("", "NegativeLogLikelihoodLoss"): _loss,
    ("", "Dropout"): lambda a, o, x, *rest: x,
    (MICROSOFT, "BiasGelu"): _biased(_phi),
    (MICROSOFT, "Gelu"): _biased(_phi),
    (MICROSOFT, "FastGelu"): _biased(_gelu_tanh),
    (MICROSOFT, "Attention"): _packed_attention, (MICROSOFT, "MultiHeadAttention"): _multi_head_attention,
    (MICROSOFT, "GroupQueryAttention"): group_query_attention,
    (MICROSOFT, "QuickGelu"): lambda a, o, x: _silu(x, a.get("alpha", float(np.float32(1.702)))),
    (MICROSOFT, "BiasAdd"): lambda a, o, x, bias, skip: x + bias + skip,
    (MICROSOFT, "SkipLayerNormalization"): _skip_layer_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
    (CANONICAL, "Silu"): lambda a, o, x: _silu(x),
    (CANONICAL, "QuickGelu"): lambda a, o, x: _silu(x, a["alpha"]),
    (CANONICAL, "SafeSoftmax"): _safe_softmax,
    **{("", name): _reduction(name) for name in REDUCTIONS},
}
