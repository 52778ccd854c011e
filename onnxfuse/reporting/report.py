"""The report of a model: what was found, as data, as text and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxfuse.reporting.findings import Findings, as_json


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """What became of a model, with the ways to show it."""

    def __repr__(self) -> str:
        fused = f"{len(self.fusions)} fused node{'s' * (len(self.fusions) != 1)}"
        return (f"<Report of {self.model!r} for {self.target}: {fused}, "
                f"{self.estimated_speedup:.2f}x predicted, verification {self.verification['status']}>")

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, under the names of docs/report.md; ``json.dumps`` makes it a text."""
        return as_json(self)

    def to_text(self, width: int = 100, *, verbose: bool = False) -> str:
        """What the command prints, in lines of so many characters at most; ``verbose`` adds near misses that nothing
        you can change would mend."""
        from onnxfuse.reporting import report_text
        from onnxfuse.reporting.text import in_lines

        return in_lines(lambda console: report_text.show(self, console, verbose=verbose), width)

    def to_html(self) -> str:
        """The report as one page that needs nothing else; what the model names is text in it."""
        from onnxfuse.reporting.html import page

        return page(self)
