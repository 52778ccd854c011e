"""What a report holds: what was fused, what was not and why, and what it costs before and after, as one value.

``docs/bytes.md`` defines the figures.  ``report.Report`` is the same with the ways to show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import NamedRecord, OperatorRecord, RemainingRecord


@dataclass(frozen=True)
class FusionEntry:
    """One fused node.

    Attributes:
        rule, schedule: ids.
        node: name of the fused node; kernel: its operator type, which nodes of one kernel share.
        replaces: the original nodes: names, or type and first output of a node without one.
        operators: their operator types, without constants.
        inputs, outputs: names of what it reads and writes, host operands among the inputs.
        bytes_before, bytes_after: through device memory, of the original nodes and of the fused one.
        kernels_before: kernels that ONNX Runtime launches for the original nodes; kernels_after: for the fused one.
        estimated_speedup: predicted GPU time of the original nodes over that of the fused one.
        memory_saved: bytes of tensors that are no longer made.
        architectures: those with an embedded image, machine code as "sm_90" and PTX as "compute_90".
        measured: GPU time that was measured of it (``region.Times``), or None.
        compiled: what the compiler made of its kernel (``planning.spills``), or None where it was not compiled.
        body: the body of an If, a Loop or a Scan that it is in, as "Loop_3/body", or "".
        runs: how often it runs in one run of the model; bytes, kernels and flops are those of one time.
        flops: arithmetic of the fused node; seconds_before, seconds_after: predicted GPU time of one run of the model,
            of the original nodes and of the fused one.
        recomputes: those of ``replaces`` that another fused node replaces too; they count there before fusion.
    """

    rule: str
    schedule: str
    node: str
    kernel: str
    replaces: tuple[str, ...]
    operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    kernels_before: int
    kernels_after: int
    estimated_speedup: float
    memory_saved: int
    architectures: tuple[str, ...] = ()
    measured: Mapping[str, Any] | None = None
    compiled: Mapping[str, Any] | None = None
    body: str = ""
    runs: float = 1.0
    recomputes: tuple[str, ...] = ()
    flops: int = 0
    seconds_before: float = 0.0
    seconds_after: float = 0.0


@dataclass(frozen=True)
class FoldedEntry:
    """Constants that are folded into weights that a fused node's kernel reads in the place of its nodes' own.

    Attributes:
        node: the first node that the fused one holds; what: what is folded into what.
        bytes: of the new weights, by which the file is larger.
    """

    node: str
    what: str
    bytes: int


@dataclass(frozen=True)
class BrokenEntry:
    """A fusion of ONNX Runtime's own that fused nodes break: they take some of its nodes, and not all.

    Attributes:
        rule: ids of the runtime rules that say so, joined by "+".
        left: nodes of it that stay the runtime's; fused_nodes: those that hold the others.
        seconds: predicted that ``left`` takes in one run beyond what runs all the same; 0 where the runtime's kernel
            does without the others.
    """

    rule: str
    left: tuple[str, ...]
    fused_nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Totals:
    """One run of a model; ``seconds`` is its predicted GPU time."""

    nodes: int
    kernels: int
    flops: int
    bytes_products: int
    bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Assumed:
    """What a plan rests on that nobody said: ``target``, whether the GPU was neither named nor present; ``dims``,
    symbols of the inputs' shapes whose size was not given."""

    target: bool = False
    dims: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftRegions:
    """Regions that are alike, could be fused, and are left to ONNX Runtime.

    Attributes:
        code: "runtime-fusion" (it runs each of them in one kernel itself), "no-gain", or that of another refusal.
        reason: a sentence, of the one of them that would gain most; speedup: what is predicted of that.
        rule: id of the rule that they are due to.
        operators: of one of them, many spellings of one operator taken as that; nodes: the first of each.
    """

    code: str
    reason: str
    rule: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    speedup: float


@dataclass(frozen=True)
class MatchEntry:
    """A place where a rule of the user's own matched.

    Attributes:
        rule: its id; node: the first node there.
        became: "fused", "lost" (to other regions) or "left" (to ONNX Runtime).
        to: what it lost to, or the larger region that it is part of, or ""; reason: a sentence, or "".
    """

    rule: str
    node: str
    became: str
    to: str
    reason: str


@dataclass(frozen=True)
class Sizes:
    """Arithmetic on sizes that was folded: operands that read a constant or an earlier value now, nodes that went."""

    operands: int = 0
    nodes: int = 0


@dataclass(frozen=True)
class Findings:
    """What became of a model.

    Attributes:
        model: the file, or the graph's name; output: the file written, or None; weights: files beside that one that
            hold weights of its.
        target: the GPU that was planned for; dims: sizes of the inputs' symbols that the figures hold for.
        before, after: one run of the model and of the fused one.
        unknown: tensors that count 0 bytes because their size cannot be told.
        candidates: regions for which there was a kernel.
        fusions: what was fused; refusals: what came near and was not; advice: those of them that a user can mend, by
            another export, an option or a rule.
        verification: see ``verifying``; ``{"status": "skipped"}`` where it was not asked for.
        measured: what ``bench`` measured, or None.
        sizes: arithmetic on sizes that was folded; constants: nodes of constants that are computed once and not
            in every run; biases: convolutions and products whose bias a fused node adds; layouts: values that lie
            channels-last between fused nodes; folded: constants that are folded into weights that kernels read.
        left: regions left to ONNX Runtime, the largest predicted gain first.
        canonical: how often each canonical rule took several nodes as one operator.
        named: where name rules match, and in how many fused nodes the products there are.
        matches: what became of the places where fuse rules of the user's own matched.
        broken: fusions of the runtime's own of which fused nodes take a part.
        assumed: what of ``target`` and ``dims`` nobody said.
        made: of a fused file, by what it was made and with which settings.
        warnings: of the rule files and the target; notes: what the plan rests on beside them.
        operators: what each operator costs before and after, the dearest first; remaining: nodes that are alike and
            take most of the time that is left, and why; roofline: what the target can do at most (``costs``).
        embedded: bytes in the file of all kernels that it embeds, by architecture.
        kernels: the text of each kernel, by the operator type of its nodes; the JSON leaves it out.
    """

    version: str
    model: str
    output: str | None
    target: str
    dims: Mapping[str, int]
    before: Totals
    after: Totals
    unknown: tuple[str, ...]
    candidates: int
    fusions: tuple[FusionEntry, ...]
    refusals: tuple[Refusal, ...]
    verification: Mapping[str, Any] = field(default_factory=lambda: {"status": "skipped"})
    measured: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    constants: int = 0
    biases: int = 0
    layouts: int = 0
    folded: tuple[FoldedEntry, ...] = ()
    left: tuple[LeftRegions, ...] = ()
    canonical: Mapping[str, int] = field(default_factory=dict)
    named: tuple[NamedRecord, ...] = ()
    matches: tuple[MatchEntry, ...] = ()
    advice: tuple[Refusal, ...] = ()
    assumed: Assumed = field(default_factory=Assumed)
    made: Mapping[str, Any] | None = None
    weights: tuple[str, ...] = ()
    operators: tuple[OperatorRecord, ...] = ()
    remaining: tuple[RemainingRecord, ...] = ()
    roofline: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    broken: tuple[BrokenEntry, ...] = ()
    embedded: Mapping[str, int] = field(default_factory=dict)

    @property
    def estimated_speedup(self) -> float:
        """Predicted GPU time of the whole model over that of the fused one."""
        return self.before.seconds / self.after.seconds if self.after.seconds else 1.0


def as_json(report: Findings) -> dict[str, Any]:
    """The report as plain data, flat, under the names that the documentation gives."""
    return {
        "onnxfuse": report.version,
        "model": report.model,
        "output": report.output,
        "weights": list(report.weights),
        "target": report.target,
        "dims": dict(report.dims),
        "assumed": asdict(report.assumed),
        "made": None if report.made is None else dict(report.made),
        **_figures(report),
        "measured": None if report.measured is None else dict(report.measured),
        "operators": [asdict(operator) for operator in report.operators],
        "remaining": [asdict(group) for group in report.remaining],
        "roofline": dict(report.roofline),
        "unknown": list(report.unknown),
        "candidates": report.candidates,
        "fusions": [asdict(fusion) for fusion in report.fusions],
        "embedded": dict(report.embedded),
        "left": [{**asdict(left), "times": len(left.nodes)} for left in report.left],
        "broken": [{**asdict(entry), "seconds": round(entry.seconds, 9)} for entry in report.broken],
        "canonical": dict(report.canonical),
        "named": [asdict(found) for found in report.named],
        "matches": [asdict(match) for match in report.matches],
        "advice": [asdict(refusal) for refusal in report.advice],
        "refusals": [asdict(refusal) for refusal in report.refusals],
        "verification": dict(report.verification),
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }


def _figures(report: Findings) -> dict[str, Any]:
    """One run before and after."""
    before, after = report.before, report.after
    return {
        "nodes_before": before.nodes,
        "nodes_after": after.nodes,
        "size_operands_folded": report.sizes.operands,
        "size_nodes_removed": report.sizes.nodes,
        "constant_nodes_once": report.constants,
        "biases_taken": report.biases,
        "values_channels_last": report.layouts,
        "folded_weights": [asdict(entry) for entry in report.folded],
        "kernels_before": before.kernels,
        "kernels_after": after.kernels,
        "flops_before": before.flops,
        "flops_after": after.flops,
        "bytes_products": before.bytes_products,
        "bytes_products_after": after.bytes_products,
        "bytes_before": before.bytes,
        "bytes_after": after.bytes,
        "peak_bytes_before": before.peak_bytes,
        "peak_bytes_after": after.peak_bytes,
        "estimated_seconds_before": round(before.seconds, 9),
        "estimated_seconds_after": round(after.seconds, 9),
        "estimated_speedup": round(report.estimated_speedup, 4),
    }
