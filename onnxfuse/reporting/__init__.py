"""The plan as text, JSON and HTML: one ``Report``, shown three ways; and why it is what it is, an ``Explanation``."""

from onnxfuse.reporting.explain import explanation_json
from onnxfuse.reporting.explaining import explain
from onnxfuse.reporting.explanation import Explanation
from onnxfuse.reporting.findings import FusionEntry, Totals, as_json
from onnxfuse.reporting.gather import is_fused, report_of
from onnxfuse.reporting.held import keep_measured, note_report, report_of_fused
from onnxfuse.reporting.rates import with_rates
from onnxfuse.reporting.report import Report

__all__ = [
    "Explanation", "FusionEntry", "Report", "Totals", "as_json", "explain", "explanation_json", "is_fused",
    "keep_measured", "note_report", "report_of", "report_of_fused", "with_rates",
]
