"""Library calls: steps of a launch plan that call a routine of a library in place of launching a kernel.

A plan may call the routines of ``ROUTINES`` alone.  The native library has the same table
(``onnxfuse/runtime/native/routines.cc``); it loads the library when a session is created, and says what is missing
where it cannot.  A call goes to the node's stream, so that it is timed, profiled and captured in CUDA graphs as kernels
are.

``gemm`` is a product of row-major matrices by cuBLASLt: ``c = f(a b)`` for ``batch`` of them, with an accumulator of 32
bits, parts of a sum included.  Operands of ``float32`` are multiplied as they are, those of ``tf32``, which are float32
too, are rounded to TF32 before.  Elements lie densely: ``a`` has m rows of k, or, where ``transpose_a`` is 1, k rows of
m; ``b`` has k rows of n, or n of k; ``c`` has m rows of n.  ``stride_a`` and so on are elements from one matrix of a
batch to the next, 0 where all take the same; those of ``c`` lie apart.  A product with no element is not computed; k is
1 at least.  ``activation`` is f, by its place in ``ACTIVATIONS``: GELU is what cuBLASLt calls so, the approximation by
tanh.  ``algorithm`` is a rank, up to ``MOST_RANK``, among the algorithms that the library proposes for these sizes,
operands so aligned and a workspace so large: 0 is what it takes for the quickest, and where it proposes fewer, the last
one runs.  A release of the library proposes the same in the same order in every process.

``gemm_bias`` is ``f(a b + bias)`` with a vector of n elements, ``gemm_add`` ``f(a b + d)`` with matrices that lie as
those of ``c`` do, and ``gemm_bias_add`` adds both.

``conv`` is a convolution by cuDNN, of 16-bit floats and of TF32: ``y = f(x * w)`` for images whose channels are last,
along one to three axes called z, y and x, the innermost last, with an accumulator of 32 bits.  Elements lie densely:
``x`` has ``images`` of ``size_z`` by ``size_y`` by ``size_x`` places of ``channels``, ``w`` has ``results`` of
``taps_z`` by ``taps_y`` by ``taps_x`` places of ``channels``, and ``y`` has ``images`` of ``count_z`` by ``count_y`` by
``count_x`` places of ``results``.  Windows begin ``before_x`` places before the image and then every ``step_x``; their
places are ``apart_x`` from one another, and zeros are read outside of the image.  An axis that is none has one place
and windows of one.  ``activation`` is f, by its place in ``CONVOLUTION_ACTIVATIONS``.  ``algorithm`` is a rank among
the plans that the library proposes and can make for these sizes, operands so aligned and a workspace so large, of those
whose sums are of 32 bits and always the same, and by no transform such as Winograd's.  ``conv_bias`` adds a vector of
``results`` to each place before f, ``conv_add`` an image that lies as y does, ``conv_bias_add`` both.

A variant that calls a library is left out where the library is not there, or has no algorithm for the sizes of a run:
the variants behind it run instead, if there are any.
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


ACTIVATIONS = ("", "relu", "gelu_tanh")
"""What a product may be followed by, nothing first."""

CONVOLUTION_ACTIVATIONS = (*ACTIVATIONS, "silu")
"""What a convolution may be followed by."""

AXES = "zyx"
"""Of a convolution's images, the outermost first."""

MOST_RANK = 15
"""Of an algorithm."""

TF32 = "tf32"
"""The type of float32 operands that are rounded."""

_TYPES = ("float16", "bfloat16", "float32", TF32)
_ROUNDED = ("float16", "bfloat16", TF32)
_SIZES = ("m", "n", "k", "batch", "stride_a", "stride_b", "stride_c", "transpose_a", "transpose_b", "activation",
          "algorithm")

_OF_AXIS = ("size", "count", "taps", "step", "apart", "before")
_OF_CONVOLUTION = ("images", "channels", "results", *(f"{name}_{axis}" for axis in AXES for name in _OF_AXIS),
                   "activation", "algorithm")

ROUTINES = {
    "gemm": Routine("cuBLASLt", _TYPES, ("a", "b", "c"), _SIZES),
    "gemm_bias": Routine("cuBLASLt", _TYPES, ("a", "b", "bias", "c"), _SIZES),
    "gemm_add": Routine("cuBLASLt", _TYPES, ("a", "b", "d", "c"), _SIZES),
    "gemm_bias_add": Routine("cuBLASLt", _TYPES, ("a", "b", "bias", "d", "c"), _SIZES),
    "conv": Routine("cuDNN", _ROUNDED, ("x", "w", "y"), _OF_CONVOLUTION),
    "conv_bias": Routine("cuDNN", _ROUNDED, ("x", "w", "bias", "y"), _OF_CONVOLUTION),
    "conv_add": Routine("cuDNN", _ROUNDED, ("x", "w", "d", "y"), _OF_CONVOLUTION),
    "conv_bias_add": Routine("cuDNN", _ROUNDED, ("x", "w", "bias", "d", "y"), _OF_CONVOLUTION),
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

    @property
    def workspace(self) -> tuple[str, ...]:
        """The scratch buffer that is its workspace, if any."""
        return self.arguments[len(ROUTINES[self.routine].operands):]

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
