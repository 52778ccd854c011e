"""What a pointwise kernel asks the second-level cache for: of an operand that is broadcast, once for every result.

Such a tensor is counted once (``traffic``), for it comes from memory once.  But where the first-level caches do not
hold it, it comes through the second-level one again for each place that it is broadcast to, and so does each operand of
what is computed of it before: a table of places that a kernel computes for every image and head of an attention is
better written once.
"""

from __future__ import annotations

from itertools import dropwhile

from onnxfuse.graph.model import Value
from onnxfuse.ir.scalars import TYPES
from onnxfuse.planning.costs.hardware import KIB, Profile
from onnxfuse.planning.costs.traffic import KernelTraffic

NEAR = 128 * KIB
"""Bytes of a tensor that a multiprocessor's first-level cache holds, beside what else passes through it."""

MOSTLY = 2
"""How many times the bytes of its own tensors a kernel reads again where that takes the time: it hides behind what
comes from memory else.  (H200: the biases of a T5's places took 48.8 microseconds, 6.7 by its tensors alone, and are
read again 11 times as much; kernels that read less again are predicted as well as others.)"""


def read_again_cached(traffic: KernelTraffic) -> int:
    """Bytes that a pointwise kernel of this traffic reads of broadcast operands beyond their own, from the second-level
    cache.  Where neighbours read one element it is asked for once."""
    again = 0
    for value, size in traffic.reads.items():
        own = size // _size(value)
        results = max((written // _size(result) for result, written in traffic.writes.items()
                       if _is_broadcast(value, result)), default=0)
        if size > NEAR and results > own:
            again += (results - own) * _size(value)
    return again


def _is_broadcast(value: Value, result: Value) -> bool:
    """Whether a result has an operand's sizes behind others of its own."""
    if not value.shape or result.shape is None:
        return False
    sizes = tuple(dropwhile(lambda size: size == 1, value.shape))
    return len(sizes) < len(result.shape) and result.shape[-len(sizes):] == sizes


def cached_seconds(traffic: KernelTraffic, profile: Profile, efficiency: float) -> float:
    """Seconds that such a kernel takes at least, by what passes through the second-level cache; 0 where that is not
    mostly what is read again.  ``efficiency``: share of a bandwidth that it reaches."""
    again = read_again_cached(traffic)
    if again <= MOSTLY * traffic.bytes:
        return 0.0
    return profile.floor_us * 1e-6 + (traffic.bytes + again) / (efficiency * profile.bandwidth * profile.l2_gain)


def _size(value: Value) -> int:
    """Bytes of an element."""
    return TYPES[value.dtype].size if value.dtype in TYPES else 1
