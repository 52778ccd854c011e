"""The plan as text, JSON and HTML: one ``Report``, shown three ways."""

from onnxfuse.reporting.gather import is_fused, report_of, report_of_fused
from onnxfuse.reporting.report import FusionEntry, Report, Totals, as_json

__all__ = ["FusionEntry", "Report", "Totals", "as_json", "is_fused", "report_of", "report_of_fused"]
