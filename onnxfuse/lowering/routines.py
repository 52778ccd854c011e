"""Library calls: steps of a launch plan that call a routine of a library in place of launching a kernel.

A plan may call the routines of ``ROUTINES`` alone.  The native library has the same table
(``onnxfuse/runtime/native/routines.cc``); it loads the library when a session is created, and says what is missing
where it cannot.  A call goes to the node's stream, so that it is timed, profiled and captured in CUDA graphs as kernels
are.

``gemm`` is a product of row-major matrices by cuBLASLt: ``c = a b`` for ``batch`` of them, with an accumulator of 32
bits (products of float32 are not rounded to TF32).  Elements lie densely: ``a`` has m rows of k, or, where
``transpose_a`` is 1, k rows of m; ``b`` has k rows of n, or n of k; ``c`` has m rows of n.  ``stride_a`` and so on are
elements from one matrix of a batch to the next, 0 where all take the same; those of ``c`` lie apart.  A product with no
element is not computed; k is 1 at least.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.lowering.fields import text, texts


@dataclass(frozen=True)
class Routine:
    """Names of what a routine takes: element types, operands of which the last is written, sizes."""

    library: str
    types: tuple[str, ...]
    operands: tuple[str, ...]
    sizes: tuple[str, ...]


ROUTINES = {
    "gemm": Routine(
        "cuBLASLt", ("float16", "bfloat16", "float32"), ("a", "b", "c"),
        ("m", "n", "k", "batch", "stride_a", "stride_b", "stride_c", "transpose_a", "transpose_b"),
    ),
}


@dataclass(frozen=True)
class LibraryCall:
    """A call of a routine.

    Args:
        routine: one of ``ROUTINES``.
        dtype: of all operands.
        arguments: the operands' addresses, ``i0``, ``o0`` or ``t0``; after them a scratch buffer, all of which the
            library may use as its workspace, or nothing.
        sizes: expressions, in the order of the routine's.

    Raises:
        ValueError: the routine takes no such call.
    """

    routine: str
    dtype: str
    arguments: tuple[str, ...]
    sizes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.routine not in ROUTINES:
            raise ValueError(
                f"the launch plan calls '{self.routine}', which is no routine that this library knows")
        routine = ROUTINES[self.routine]
        count = len(routine.operands)
        if self.dtype not in routine.types:
            self._wrong(f"is of '{self.dtype}', which it does not take")
        if not all(re.fullmatch(r"[iot]\d{1,6}", argument) for argument in self.arguments):
            self._wrong("has an argument that is no address")
        if not count <= len(self.arguments) <= count + 1:
            self._wrong(f"has {len(self.arguments)} arguments, not {count}")
        if self.arguments[count - 1].startswith("i"):
            self._wrong("writes an input")
        if not all(workspace.startswith("t") for workspace in self.arguments[count:]):
            self._wrong("has a workspace that is no scratch buffer")
        if len(self.sizes) != len(routine.sizes):
            self._wrong(f"has {len(self.sizes)} sizes, not {len(routine.sizes)}")

    def _wrong(self, what: str) -> None:
        raise ValueError(f"a call of '{self.routine}' in the launch plan {what}")

    def raw(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "call": self.routine, "type": self.dtype, "args": list(self.arguments),
            "sizes": dict(zip(ROUTINES[self.routine].sizes, self.sizes, strict=True)),
        }

    @staticmethod
    def read(raw: Mapping[str, object]) -> LibraryCall:
        """The call that ``raw`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        routine, sizes = text(raw["call"]), raw["sizes"]
        if not isinstance(sizes, dict):
            raise TypeError(f"{sizes!r} is no object")
        names = ROUTINES[routine].sizes if routine in ROUTINES else ()
        for name in names:
            if name not in sizes:
                raise ValueError(f"a call of '{routine}' in the launch plan has no size '{name}'")
        if routine in ROUTINES and len(sizes) != len(names):
            raise ValueError(f"a call of '{routine}' in the launch plan has sizes that it does not take")
        return LibraryCall(routine, text(raw["type"]), texts(raw["args"]), tuple(text(sizes[name]) for name in names))
