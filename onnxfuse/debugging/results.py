"""What a bisection found, as frozen dataclasses that can be written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Culprit:
    """Fused nodes that change an answer.

    Attributes:
        kind: "function": the nodes in the file are not those of the original; "kernel": it differs from its own nodes,
            run alone; "model": with it, and nothing smaller, an output of the model differs with kernels running.
        nodes: names of the fused nodes; several where only together they make a difference.
        kernels: their operator types.
        alike: other fused nodes with the same kernels; they were suspected with them.
        detail: what differs, and by how much.
        rules: ids of the rules they are due to; replaces: labels of the original nodes.
    """

    kind: str
    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    alike: tuple[str, ...]
    detail: str
    rules: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerResult:
    """Which fused nodes changed an answer.

    Attributes:
        device: what the kernels ran on, or None: then the functions alone were compared.
        inputs: what the models ran on; tolerance: of outputs; None where they had to be the same bit for bit.
        fused: number of fused nodes; tried: of variants that were run.
        outside: what differs with every fused node put back: the file is not the model, fused; "" where nothing does.
        culprits: in the order in which they were found.
        notes: what the reader has to know, a sentence each.
    """

    device: str | None
    inputs: tuple[str, ...]
    tolerance: float | None
    fused: int
    tried: int
    outside: str
    culprits: tuple[Culprit, ...]
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.outside:
            return f"the difference is no fusion's: with every fused node put back, {self.outside}"
        if self.culprits:
            sets = len(self.culprits)
            return f"{sets} {'fusion changes' if sets == 1 else 'fusions change'} the answer"
        return "no fusion changes the answer" if self.device else (
            "no fusion changes the answer without kernels; kernels were not run")

    def to_json(self) -> dict[str, Any]:
        """Everything, as dictionaries, lists, texts and numbers."""
        return {"by": "answer", "summary": self.summary, **asdict(self)}


@dataclass(frozen=True)
class NodeTime:
    """GPU time of a fused node and of the nodes that it replaced, run alone.

    Attributes:
        node, kernel, rule: its name, operator type and rule; replaces: labels of the original nodes.
        alike: other fused nodes with this kernel and inputs of these sizes; the figures are theirs too.
        before, after: milliseconds of the original nodes and of the fused one.
        speedup: before over after; low to high is its 95% interval.
        reason: why there are no figures, or "".
    """

    node: str
    kernel: str
    rule: str
    replaces: tuple[str, ...]
    alike: tuple[str, ...] = ()
    before: float = 0.0
    after: float = 0.0
    speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    reason: str = ""

    @property
    def lost(self) -> float:
        """Milliseconds that all nodes of this kernel lose in a run; below zero where they gain."""
        return (1 + len(self.alike)) * (self.after - self.before)

    @property
    def slower(self) -> bool:
        """Whether the fused node is slower beyond what the measurement leaves open."""
        return not self.reason and self.high < 1.0


@dataclass(frozen=True)
class TimeResult:
    """Which fused nodes cost time.

    Attributes:
        device: the GPU; inputs: what the nodes ran on.
        fused: number of fused nodes.
        times: of every distinct kernel, the largest loss first.
        whole, mended: GPU time of the original over that of the fused model, and over that of the fused model with the
            slower ones put back: the ratio and the ends of its 95% interval; None where none is slower.
    """

    device: str
    inputs: tuple[str, ...]
    fused: int
    times: tuple[NodeTime, ...]
    whole: tuple[float, float, float] | None = None
    mended: tuple[float, float, float] | None = None

    @property
    def culprits(self) -> tuple[NodeTime, ...]:
        """The slower ones."""
        return tuple(time for time in self.times if time.slower)

    @property
    def summary(self) -> str:
        """One sentence."""
        if not self.culprits:
            return "no fused node is slower than the nodes it replaced"
        number = sum(1 + len(time.alike) for time in self.culprits)
        lost = sum(time.lost for time in self.culprits)
        return f"{number} of {self.fused} fused nodes cost time: {1000 * lost:.1f} µs a run"

    def to_json(self) -> dict[str, Any]:
        """Everything, as dictionaries, lists, texts and numbers."""
        times = [{**asdict(time), "slower": time.slower, "lost": time.lost} for time in self.times]
        return {"by": "time", "summary": self.summary, **asdict(self), "times": times}
