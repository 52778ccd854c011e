"""Runs the text of CUDA kernels on the CPU, without a GPU: a thread is a fibre, and barriers and warp operations are
where fibres meet.

What it finds: wrong results; missing barriers (run with several orders); barriers and warp operations that not all
threads reach; reads and writes out of bounds; writes to inputs; misaligned vector accesses; shared memory and outputs
that are not initialised; tiles that nobody waited for, and arrivals that never come; casts of floats that an integer
cannot hold; arguments that do not fit their parameters; launches past a GPU's limits; endless loops.

How it differs from a GPU: fused multiply-adds are two roundings unless written as ``fmaf``; approximate intrinsics
are exact; subnormals are kept; blocks run one after the other. PTX does not compile, so headers keep a plain twin
behind ``ONNXFUSE_EMULATOR``. Kernels are found by ``extern "C" __global__`` in the text itself, not in what a macro
makes.
"""

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.machine import Argument, Emulator, Order
from onnxfuse.emulator.memory import Buffer
from onnxfuse.emulator.plan import element_type, run_plan

__all__ = ["Argument", "Buffer", "Emulator", "EmulatorError", "Order", "element_type", "run_plan"]
