"""Whether everything that onnxfuse uses on this machine works, part by part, and how to mend what does not."""

from onnxfuse.doctor.examine import examine
from onnxfuse.doctor.findings import Diagnosis, Finding, State

__all__ = ["Diagnosis", "Finding", "State", "examine"]
