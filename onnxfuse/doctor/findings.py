"""What an examination found, as frozen dataclasses and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "absent", "limited", "broken"]
"""It works; it is not on this machine, and nothing is wrong with that; it works, with less or slower; it does not."""


@dataclass(frozen=True)
class Finding:
    """One part.

    Attributes:
        part: what it is called; version, path: of what was found, "" where that is not known.
        message: what is to be said of it; remedy: how to mend it, or to get it.
    """

    part: str
    state: State
    version: str = ""
    path: str = ""
    message: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All parts.

    Attributes:
        system: versions of onnxfuse and Python, and the platform.
        environment: variables that change what onnxfuse does, as far as they are set.
        needs_gpu: whether a machine without a GPU counts as broken.
    """

    system: Mapping[str, str]
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]
    needs_gpu: bool = False

    def of(self, part: str) -> Finding:
        """One part by name."""
        return next(finding for finding in self.findings if finding.part == part)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What has to be mended."""
        wrong = ("broken", "absent") if self.needs_gpu else ("broken",)
        return tuple(finding for finding in self.findings if finding.state in wrong)

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.of("GPU").state not in ("absent", "broken")

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.faults:
            return f"to be mended: {', '.join(finding.part for finding in self.faults)}"
        less = [finding.part for finding in self.findings if finding.state == "limited"]
        text = f"nothing is broken; works with less: {', '.join(less)}" if less else "everything works"
        if not self.has_gpu:
            text += "; there is no GPU here: models are fused and compiled for others, and kernels are not run"
        return text

    @property
    def exit_code(self) -> int:
        """Of ``onnxfuse doctor``."""
        return 1 if self.faults else 0

    def to_json(self) -> dict[str, Any]:
        """Everything as data."""
        return {
            "summary": self.summary, "ok": not self.faults, "gpu": self.has_gpu, **self.system,
            "environment": dict(self.environment), "parts": [asdict(finding) for finding in self.findings],
        }
