"""Tensor maps: what the tensor memory accelerator of GPUs from sm_90 on copies tiles of a tensor by.

The library builds a map on the host (``cuTensorMapEncodeTiled``) from the tensor's address and sizes, keeps it for runs
that have the same, and passes it to the kernel as a parameter ``const __grid_constant__`` of 128 bytes, aligned to 64.
It holds the address: a CUDA graph that captures the launch replays it with the addresses that it captured, as it does
for every other argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.lowering.fields import number, numbers, text, texts

TYPES: dict[str, tuple[int, bool]] = {
    "uint8": (1, False), "uint16": (2, False), "uint32": (4, False), "int32": (4, False), "uint64": (8, False),
    "int64": (8, False), "float16": (2, True), "float32": (4, True), "float64": (8, True), "bfloat16": (2, True),
    "float32_ftz": (4, True), "tfloat32": (4, True), "tfloat32_ftz": (4, True),
}
"""Element types in the driver's order: their bytes, and whether they are floating."""

MOST_RANK, MOST_BOX, MOST_ELEMENT_STRIDE = 5, 256, 8
INTERLEAVES, SWIZZLES, PROMOTIONS = (0, 16, 32), (0, 32, 64, 128), (0, 64, 128, 256)
FILLS = ("zero", "nan")


@dataclass(frozen=True)
class TensorMap:
    """A tensor in device memory, and the tile of it that one copy takes; axes go from the innermost one on.

    Args:
        base: the argument that is its address: ``i0`` a tensor input, ``o0`` an output, ``t0`` a scratch buffer.
        dtype: one of ``TYPES``.
        sizes: elements along each axis, as expressions: 1 to 2^31.
        strides: bytes from one element to the next along each axis but the first, as expressions: multiples of 16 (of
            32 where ``interleave`` is 32) below 2^40.
        box: elements of a tile along each axis.
        element_strides: steps along each axis; 1 where none are given.
        swizzle, interleave, promotion: bytes, 0 for none: how rows lie in shared memory, channels in device memory, and
            what the second-level cache fetches.
        fill: what lies outside of the tensor.

    Raises:
        ValueError: the driver would refuse it, whatever its sizes are.
    """

    base: str
    dtype: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    interleave: int = 0
    promotion: int = 0
    fill: str = "zero"

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        if not re.fullmatch(r"[iot]\d{1,6}", self.base):
            _wrong(f"has the base '{self.base}', which is no address")
        _one_of("type", self.dtype, list(TYPES))
        if not 1 <= rank <= MOST_RANK:
            _wrong(f"has {rank} sizes; 1 to {MOST_RANK}")
        if len(self.strides) != rank - 1:
            _wrong(f"has {len(self.strides)} strides for {rank} sizes")
        _within("box", self.box, rank, MOST_BOX)
        _within("element_strides", self.element_strides, rank, MOST_ELEMENT_STRIDE)
        _one_of("interleave", self.interleave, INTERLEAVES)
        _one_of("swizzle", self.swizzle, SWIZZLES)
        _one_of("promotion", self.promotion, PROMOTIONS)
        _one_of("fill", self.fill, FILLS)
        self._check_layout()

    def _check_layout(self) -> None:
        size, floating = TYPES[self.dtype]
        row = self.box[0] * size
        if self.interleave and len(self.sizes) < 3:
            _wrong("with 'interleave' has fewer than 3 sizes")
        if self.interleave == 32 and self.swizzle != 32:
            _wrong("with 'interleave' 32 has no 'swizzle' 32")
        if not self.interleave and row % 16:
            _wrong(f"has a box of {row} bytes along its first axis, no multiple of 16")
        if not self.interleave and self.swizzle and row > self.swizzle:
            _wrong(f"has a box of {row} bytes along its first axis, more than its 'swizzle' {self.swizzle}")
        if self.fill == "nan" and not floating:
            _wrong("of integers has 'fill' nan")

    def raw(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "base": self.base, "type": self.dtype, "sizes": list(self.sizes), "strides": list(self.strides),
            "box": list(self.box), "element_strides": list(self.element_strides), "swizzle": self.swizzle,
            "interleave": self.interleave, "promotion": self.promotion, "fill": self.fill,
        }

    @staticmethod
    def read(raw: Mapping[str, object]) -> TensorMap:
        """The map that ``raw`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return TensorMap(
            text(raw["base"]), text(raw["type"]), texts(raw["sizes"]), texts(raw["strides"]), numbers(raw["box"]),
            numbers(raw["element_strides"]), number(raw["swizzle"]), number(raw["interleave"]),
            number(raw["promotion"]), text(raw["fill"]),
        )


def _wrong(what: str) -> None:
    raise ValueError(f"a tensor map of the launch plan {what}")


def _one_of(key: str, value: object, values: Sequence[object]) -> None:
    if value not in values:
        _wrong(f"has '{key}' {value}")


def _within(key: str, values: Sequence[int], rank: int, most: int) -> None:
    if len(values) != rank:
        _wrong(f"has {len(values)} of '{key}' for {rank} sizes")
    for value in values:
        if not 1 <= value <= most:
            _wrong(f"has {value} in '{key}'; it is 1 to {most}")
