"""What the compiler made of a kernel, from what it says when it compiles (``--ptxas-options=-v``).

An image tells registers too, and a thread's local memory, but not what of that is spilled: an array that is indexed at
run time, as sines of large numbers need one, lies there as well and costs nothing where it is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onnxfuse.errors import KernelError

VERBOSE = "--ptxas-options=-v"
"""The compiler's option that makes it say so."""

_SPEAKER = "ptxas info"
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelFigures:
    """What the compiler made of a kernel.

    Attributes:
        registers: 32-bit registers of a thread.
        spilled_bytes: bytes that a thread writes and reads because registers do not hold its values, as they stand in
            the code: once each, however often a loop runs.
        local_bytes: bytes of a thread's local memory: what is spilled, and arrays that are indexed at run time.
        shared_bytes: static shared memory of a block.
    """

    registers: int
    spilled_bytes: int
    local_bytes: int
    shared_bytes: int


def read_log(log: str) -> dict[str, KernelFigures] | None:
    """The figures of all kernels that were compiled, by name; None where the log does not speak of them.

    Raises:
        KernelError: the log is none of a form that is known.
    """
    if _SPEAKER not in log:
        return None
    parts = _ENTRY.split(log)
    figures = {}
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        frame, used, shared = _FRAME.search(part), _USED.search(part), _SHARED.search(part)
        if frame is None or used is None:
            raise KernelError(
                f"what the compiler says of the kernel {name} is not understood",
                remedy="this release of onnxfuse reads what NVRTC 12.8 to 13 says",
            )
        local, stores, loads = map(int, frame.groups())
        figures[name] = KernelFigures(int(used[1]), stores + loads, local, 0 if shared is None else int(shared[1]))
    return figures


def to_bytes(figures: Mapping[str, KernelFigures]) -> bytes:
    """Figures as the cache keeps them."""
    return json.dumps({name: asdict(each) for name, each in figures.items()}, sort_keys=True).encode()


def from_bytes(raw: bytes) -> dict[str, KernelFigures] | None:
    """The same again; None where another release wrote something else."""
    try:
        return {name: KernelFigures(**each) for name, each in json.loads(raw).items()}
    except (ValueError, TypeError, AttributeError):
        return None
