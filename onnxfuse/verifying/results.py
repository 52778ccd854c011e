"""What a verification found, as frozen dataclasses, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not run"]

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class NodeResult:
    """One fused node.

    Attributes:
        node, op, rule: its name, operator type and rule.
        verdict: "not run" where there was no kernel runner, or no reference could be computed.
        error: the largest error met, as a share of the output's largest magnitude (of wrong elements, for integers).
        tolerance: what was allowed where error over tolerance was worst; ratio: that quotient.
        inputs: labels of the inputs used; variants: names of the launch plan's variants that ran.
        shared: another node with the same kernel, whose inputs stand for this one's: all of them, or edges alone where
            the user gave inputs; or "".
        rounded: whether elements passed because they hang on a number on the edge of a comparison or of rounding.
        message: what failed, and where; or why it was not run.
        where: of the largest error: which output, on which inputs, at which element.
    """

    node: str
    op: str
    rule: str
    verdict: Verdict
    error: float = 0.0
    tolerance: float = 0.0
    ratio: float = 0.0
    inputs: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    shared: str = ""
    rounded: bool = False
    message: str = ""
    where: str = ""


@dataclass(frozen=True)
class OutputDifference:
    """A model output beside the original's.

    Attributes:
        elements: that differ; error: the largest difference over the largest magnitude (of integers and booleans, the
            share of elements that differ).
        beyond: elements that are further off than was asked for.
        where, got, wanted: the element that is farthest off; got and wanted alone where types or shapes differ.
        inputs: what the run is called in which this was the most.
    """

    output: str
    elements: int
    error: float
    beyond: int = 0
    where: tuple[int, ...] = ()
    got: str = ""
    wanted: str = ""
    inputs: str = ""


@dataclass(frozen=True)
class WholeResult:
    """The fused model beside the original.

    Attributes:
        checked: whether ``onnx.checker`` passes the fused model, or does not pass the original either.
        identical: whether all outputs were bit for bit the original's, or as near as was asked for, without kernels, on
            the CPU; None where that was not run.
        differences: those that were not.
        device: largest difference of each output with the kernels running on the GPU; empty where they did not.
        message: what the checker or ONNX Runtime said against the fused model, or why the original was not run.
        outputs: largest difference of each output without kernels, those that are allowed and those of nothing too.
        first: the first fused node whose function computes something else, and how far off, in words; "" where
            nothing differs, or none does before something else.
    """

    checked: bool
    identical: bool | None
    differences: tuple[OutputDifference, ...] = ()
    device: tuple[OutputDifference, ...] = ()
    message: str = ""
    outputs: tuple[OutputDifference, ...] = ()
    first: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the model."""
        return self.checked and self.identical is not False


@dataclass(frozen=True)
class RunInputs:
    """One set of model inputs: what it is called, and the sizes of symbolic dimensions it was made with."""

    label: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.label} ({sizes})" if sizes else self.label


@dataclass(frozen=True)
class Verification:
    """All of it.

    Attributes:
        runner: what the kernels ran on, or None; runs: the model inputs used.
        notes: what was left out, in sentences.
    """

    runner: str | None
    runs: tuple[RunInputs, ...]
    whole: WholeResult
    nodes: tuple[NodeResult, ...]
    notes: tuple[str, ...] = ()

    @property
    def kernels_run(self) -> bool:
        """Whether every fused node's kernel was run and compared."""
        return self.runner is not None and all(node.verdict != "not run" for node in self.nodes)

    @property
    def failed(self) -> tuple[NodeResult, ...]:
        """Nodes to take back."""
        return tuple(node for node in self.nodes if node.verdict == "failed")

    @property
    def passed(self) -> bool:
        """Whether the model can be delivered as it is."""
        return self.whole.passed and not self.failed

    @property
    def summary(self) -> str:
        """One sentence."""
        if not self.whole.checked:
            return f"verification failed: onnx.checker refuses the fused model: {self.whole.message}"
        if self.whole.identical is False and self.whole.message:
            return f"verification failed: the fused model does not run where the original does: {self.whole.message}"
        if self.whole.identical is False:
            names = ", ".join(repr(entry.output) for entry in self.whole.differences[:_NAMES_SHOWN])
            return f"verification failed: without kernels the fused model differs from the original in {names}"
        graph = "graph verified" if self.whole.identical else f"graph checked, not run ({self.whole.message})"
        if not self.nodes:
            return f"{graph}, nothing was fused"
        if self.runner is None:
            return f"{graph}, kernels not run"
        ran = [node for node in self.nodes if node.verdict != "not run"]
        if self.failed:
            return f"{graph}, {len(self.failed)} of {len(ran)} kernels failed on {self.runner}"
        text = f"{graph}, {len(ran)} kernels verified on {self.runner}"
        if len(ran) < len(self.nodes):
            text += f", {len(self.nodes) - len(ran)} not run"
        return text

    def text(self) -> str:
        """The summary, the inputs, the worst nodes of each kernel and everything that failed, a line each."""
        lines = [self.summary]
        if self.runs:
            lines.append("  inputs: " + "; ".join(map(str, self.runs)))
        for node in self.failed:
            lines.append(f"  failed {node.node} ({node.rule}): {node.message}")
        for op, node in sorted(self._worst().items(), key=lambda item: -item[1].ratio):
            count = sum(other.op == op for other in self.nodes)
            edge = ", some elements on the edge of a comparison" if node.rounded else ""
            lines.append(f"  {op} ({node.rule}, {count} node{'s' if count > 1 else ''}): error {node.error:.1e} of the "
                         f"output's scale, {node.ratio:.0%} of what is allowed{edge}")
        for node in self.nodes:
            if node.verdict == "not run" and self.runner is not None:
                lines.append(f"  not run {node.node} ({node.rule}): {node.message}")
        for entry in self.whole.device:
            lines.append(f"  output {entry.output}: kernels differ from the original by {entry.error:.1e} of its scale")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _worst(self) -> dict[str, NodeResult]:
        """By operator type, the node of those that passed that is nearest to its limit."""
        worst: dict[str, NodeResult] = {}
        for node in self.nodes:
            if node.verdict == "passed" and (node.op not in worst or node.ratio > worst[node.op].ratio):
                worst[node.op] = node
        return worst

    def to_json(self) -> dict[str, Any]:
        """For the report file; infinite and undefined figures are None."""
        result = {"summary": self.summary, "passed": self.passed, "kernels_run": self.kernels_run, **asdict(self)}
        finite: dict[str, Any] = _finite(result)
        return finite


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
