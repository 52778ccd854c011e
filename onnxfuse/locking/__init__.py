"""A lock of what is fused in a model, and a later model beside it.

    lock_of(optimised, report)     what is fused, by onnxfuse and by ONNX Runtime itself
    lock_text, read_lock           the lock as a file
    check(lock, optimised, ...)    what of the lock a plan of now has no more, and why
"""

from onnxfuse.locking.check import check
from onnxfuse.locking.file import lock_text, read_lock
from onnxfuse.locking.gather import lock_of
from onnxfuse.locking.lock import Lock
from onnxfuse.locking.result import CheckResult
from onnxfuse.locking.settings import settings_of, sizes_of

__all__ = ["CheckResult", "Lock", "check", "lock_of", "lock_text", "read_lock", "settings_of", "sizes_of"]
