"""A product's or convolution's weights and bias, and what constants beside it make of them: y = W x + b, in float64.

Powers of two and permutations change no digit of a weight; all else rounds it anew, once, when it gets its type back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.graph.constants import numpy_type

Array = NDArray[Any]

UNITS: dict[int, float] = {TensorProto.FLOAT: 2.0**-24, TensorProto.FLOAT16: 2.0**-11, TensorProto.BFLOAT16: 2.0**-8}
"""By element type the most by which rounding changes a normal number, as a share of it."""

TF32_UNIT = 2.0**-11
"""The same of TF32, to which kernels round float32, and which has fewer digits of what is no normal number."""


@dataclass(frozen=True, eq=False)
class Linear:
    """What a product or a convolution computes of each window.

    Attributes:
        weights: by group, channel of the result in it, channel of the operand in it, and place in the window.
        bias: by channel of the result; None for none.
        exact: whether all that was done to them changed no digit.
    """

    weights: Array
    bias: Array | None = None
    exact: bool = True

    @property
    def is_finite(self) -> bool:
        """Whether it has no numbers but finite ones."""
        return all(np.isfinite(each).all() for each in (self.weights, self.bias) if each is not None)

    @property
    def channels(self) -> int:
        """Of the operand."""
        return int(self.weights.shape[0] * self.weights.shape[2])

    @property
    def features(self) -> int:
        """Channels of the result."""
        return int(self.weights.shape[0] * self.weights.shape[1])

    def of_scaled(self, factors: Array) -> Linear:
        """Of an operand whose channels are multiplied by factors first."""
        shaped = np.broadcast_to(factors, self.channels).reshape(self.weights.shape[0], 1, -1, 1)
        return replace(self, weights=self.weights * shaped, exact=self.exact and are_powers(factors))

    def of_shifted(self, addends: Array) -> Linear:
        """Of an operand to whose channels numbers are added first; nowhere may a window reach past the operand."""
        shaped = np.broadcast_to(addends, self.channels).reshape(self.weights.shape[0], 1, -1, 1)
        more = (self.weights * shaped).sum(axis=(2, 3)).reshape(-1)
        bias = more if self.bias is None else self.bias + more
        return replace(self, bias=bias, exact=self.exact and not addends.any())

    def of_taken(self, order: Array) -> Linear:
        """Of an operand whose channels are put in an order first; of one group."""
        weights = np.empty_like(self.weights)
        weights[:, :, order] = self.weights
        return replace(self, weights=weights)

    def scaled(self, factors: Array) -> Linear:
        """With the result's channels multiplied by factors."""
        each = np.broadcast_to(factors, self.features)
        weights = self.weights * each.reshape(*self.weights.shape[:2], 1, 1)
        bias = None if self.bias is None else self.bias * each
        return replace(self, weights=weights, bias=bias, exact=self.exact and are_powers(factors))

    def shifted(self, addends: Array) -> Linear:
        """With numbers added to the result's channels."""
        each = np.broadcast_to(addends, self.features)
        if self.bias is None:
            return replace(self, bias=np.array(each))
        total = self.bias + each
        # What Knuth's sum of two leaves: nothing where float64 holds the sum.
        part = total - self.bias
        left = (self.bias - (total - part)) + (each - part)
        return replace(self, bias=total, exact=self.exact and not left.any())

    def taken(self, order: Array) -> Linear:
        """With the result's channels put in an order; of one group."""
        bias = None if self.bias is None else self.bias[order]
        return replace(self, weights=self.weights[:, order], bias=bias)

    def after(self, first: Linear) -> Linear:
        """What it computes of another's result, as one; both of one group, itself of windows of one element."""
        own, inner = self.weights[0, :, :, 0], first.weights[0]
        features, channels, places = len(own), inner.shape[1], inner.shape[2]
        weights = (own @ inner.reshape(len(inner), -1)).reshape(1, features, channels, places)
        bias = self.bias
        if first.bias is not None:
            bias = own @ first.bias if bias is None else own @ first.bias + bias
        return Linear(weights, bias, exact=False)


def are_powers(factors: Array) -> bool:
    """Whether all factors are powers of two, or less than zero and that else."""
    return bool((np.abs(np.frexp(factors)[0]) == 0.5).all())


def typed(linear: Linear, dtype: int) -> tuple[Linear, str]:
    """The same as numbers of a type, each rounded once, and why they do not do; "" where they do.

    A channel of the result may lose to rounding what it loses among normal numbers: of weights that are about as small
    as the type holds, or smaller, more would be lost.  One that is not zero stays so, as infinity times it does.
    """
    wide = linear.weights.reshape(linear.features, -1)
    weights, _ = _rounded(wide, dtype)
    least = ml_dtypes.finfo(weights.dtype).smallest_subnormal  # type: ignore[no-untyped-call]
    weights = np.where((weights == 0) & (wide != 0), np.copysign(float(least), wide).astype(weights.dtype), weights)
    with np.errstate(invalid="ignore"):
        lost = weights.astype(np.float64) - wide
    sizes = _lengths(wide)
    exact = linear.exact and not lost.any()
    made = Linear(weights.reshape(linear.weights.shape), None, exact)
    if not np.isfinite(lost).all():
        return made, "a weight would be past the largest number of its type"
    if (_lengths(lost) > UNITS[dtype] * sizes).any() or (
            dtype == TensorProto.FLOAT and (_lengths(_subnormal(wide)) > TF32_UNIT * sizes).any()):
        return made, "a channel's weights would be too small for their type"
    if linear.bias is None:
        return made, ""
    bias, lost = _rounded(linear.bias, dtype)
    made = replace(made, bias=bias, exact=exact and not lost.any())
    if not np.isfinite(lost).all():
        return made, "a bias would be past the largest number of its type"
    if (np.abs(lost) > UNITS[dtype] * (np.abs(linear.bias) + sizes)).any():
        return made, "a bias would be too small for its type"
    return made, ""


def _lengths(rows: Array) -> Array:
    lengths: Array = np.sqrt(np.square(rows).sum(axis=1))
    return lengths


def _subnormal(wide: Array) -> Array:
    """What of numbers float32 holds as no normal number."""
    return np.where(np.abs(wide) < float(np.finfo(np.float32).smallest_normal), wide, 0)


def _rounded(wide: Array, dtype: int) -> tuple[Array, Array]:
    """Numbers in a type, and by how much they are off."""
    with np.errstate(over="ignore"):
        made = wide.astype(numpy_type(dtype))
    with np.errstate(invalid="ignore"):
        return made, made.astype(np.float64) - wide
