"""The examples of rules, computed: each is fused by its rule and compared with what it was."""

from onnxfuse.checking.check import Checked, check_rules
from onnxfuse.checking.compute import example_inputs

__all__ = ["Checked", "check_rules", "example_inputs"]
