"""Running fused models: the native library, compilation when a session is created, and sessions."""

from onnxfuse.runtime.library import Gpu, gpus, library_path, record_runs, statistics, write_statistics
from onnxfuse.runtime.sessions import register, session

__all__ = [
    "Gpu", "gpus", "library_path", "record_runs", "register", "session", "statistics", "write_statistics",
]
