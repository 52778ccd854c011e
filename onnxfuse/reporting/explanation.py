"""Why a model is fused as it is, with the ways to show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxfuse.reporting.explain import Explained, explanation_json


@dataclass(frozen=True, repr=False)
class Explanation(Explained):
    """Why a model, or one node of it, is fused as it is, with the ways to show it."""

    def __repr__(self) -> str:
        what = repr(self.model) if self.node is None else f"{self.node.subject!r} in {self.model!r}"
        return f"<Explanation of {what} for {self.target}>"

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain data; ``json.dumps`` makes it a text."""
        return explanation_json(self)

    def to_text(self, width: int = 100, *, verbose: bool = False) -> str:
        """What the command prints, in lines of so many characters at most; ``verbose`` adds near misses that nothing
        you can change would mend."""
        from onnxfuse.reporting import explain_text
        from onnxfuse.reporting.text import in_lines

        return in_lines(lambda console: explain_text.show(self, console, verbose=verbose), width)
