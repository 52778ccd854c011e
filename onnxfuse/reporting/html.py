"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from onnxfuse.reporting import text
from onnxfuse.reporting.findings import Findings


def page(report: Findings) -> str:
    """The page; names from the model are escaped."""
    loader = PackageLoader("onnxfuse", "reporting")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )
    environment.filters |= {
        "size": text.size, "duration": text.duration, "operators": lambda entry: text.operators(entry, 200),
        "verification": text.verification_text,
    }
    kernels = text.grouped(report.fusions, lambda entry: entry.kernel)
    reasons = text.grouped(report.refusals, lambda refusal: (refusal.rule, refusal.code))
    return environment.get_template("report.html").render(
        report=report,
        kernels=list(kernels.values()),
        reasons=sorted(reasons.values(), key=lambda group: -len(group)),
    )
