"""A fused model beside the original, and every kernel beside the nodes that it replaced.

    original ┐                 ┌─ whole: bit for bit, without kernels
             ├─ runs ─ capture ┤
    fused ───┘                 └─ nodes: kernel against body, on captured and edge inputs ─▶ what to take back
"""

from onnxfuse.verifying.results import NodeResult, OutputDifference, RunInputs, Verification, WholeResult
from onnxfuse.verifying.runner import CudaRunner, KernelRunner
from onnxfuse.verifying.verify import failed_regions, find_runner, verify

__all__ = [
    "CudaRunner", "KernelRunner", "NodeResult", "OutputDifference", "RunInputs", "Verification", "WholeResult",
    "failed_regions", "find_runner", "verify",
]
