"""What a fused file knows of how it was made: for which GPU and sizes, by what, how it was verified and measured.

The model's metadata property ``onnxfuse.plan`` holds a ``PlanRecord`` as JSON.  It is written once the plan is made,
gone when a fused node is put back, and nothing in it changes what the model computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import onnx

from onnxfuse.bounded import parse_json
from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.rewriting.properties import forget_property, note_property, property_of
from onnxfuse.typed import typed

KEY = "onnxfuse.plan"
"""Name of the model's metadata property."""

VERSION = 1

Figures = Mapping[str, float]


@dataclass(frozen=True)
class VerificationRecord:
    """How the model was verified.

    Attributes:
        status, summary: as in the report.
        date: as ISO 8601; "" where nothing was run.
        gpu: what kernels ran on, or ""; onnxruntime: its version.
        inputs: the sets of inputs that were used.
        worst_error: the largest error of a kernel that was met, as a share of its output's scale; worst_node: where.
        taken_back: fused nodes that failed, by rule.
    """

    status: str
    summary: str
    date: str = ""
    gpu: str = ""
    onnxruntime: str = ""
    inputs: tuple[str, ...] = ()
    worst_error: float | None = None
    worst_node: str = ""
    taken_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredRecord:
    """What both models took in one process: ``measured`` of the report, and the date."""

    speedup: float
    low: float
    high: float
    of: str
    device: str
    before: float
    after: float
    date: str = ""


@dataclass(frozen=True)
class BrokenRecord:
    """A fusion of ONNX Runtime's own that fused nodes break: ``broken`` of the report."""

    rule: str
    left: tuple[str, ...]
    fused_nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class NamedRecord:
    """Where a name rule matches, and what became of the products there: ``named`` of the report.

    Attributes:
        name: the rule's id; places: how many there are.
        one, several: of those whose products are all fused, how many have them in one fused node, and in several;
            left: how many whose products are all left to ONNX Runtime.
        rules: what fused products of theirs.
    """

    name: str
    places: int
    one: int
    several: int
    left: int
    rules: tuple[str, ...]


@dataclass(frozen=True)
class OperatorRecord:
    """What all nodes of an operator cost in one run, before and after fusion; ``operator`` is ``FUSED`` for the fused
    nodes.  Seconds are predicted; those of nodes that ONNX Runtime runs as one kernel are the main one's."""

    operator: str
    kernels_before: float = 0
    kernels_after: float = 0
    bytes_before: float = 0
    bytes_after: float = 0
    seconds_before: float = 0
    seconds_after: float = 0


FUSED = "(fused)"
"""In place of an operator: the fused nodes; no operator has brackets in its name."""


@dataclass(frozen=True)
class RemainingRecord:
    """Nodes that are alike and still take time after fusion.

    Attributes:
        state: "fused", "product" or "alone".
        node: the first of them; times: how many there are.
        operators: of one of them; rule: of a fused node, or the canonical rule that takes several nodes as one.
        shapes: what one of them reads and writes.
        bytes, kernels, seconds: of all of them together in one run; seconds are predicted.
        code, reason, remedy: why they are not fused, or the fused node is no larger; "" where nothing speaks against.
    """

    state: str
    node: str
    times: int
    operators: tuple[str, ...]
    rule: str
    shapes: str
    bytes: float
    kernels: float
    seconds: float
    code: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class PlanRecord:
    """How a fused model was made.

    Attributes:
        onnxfuse, onnx: versions.
        target: the GPU that was planned for; dims: sizes of the inputs' symbols.
        assumed_target, assumed_dims: whether nobody named the GPU; the sizes that nobody gave.
        strategy, hints, least_gain: what the plan was to be good at; channels_last: whether the CUDA provider prefers
            that; disabled: rules and stages that were left out.
        provider_options: of the CUDA provider, that were planned for; hangs_on: those with which the model would be
            planned otherwise were they others (``cuda_options``).
        before, after: totals of the report; nodes: figures of each fused node, by its name.
        unknown, candidates, canonical: as in the report.
        operators, remaining: as in the report; roofline: as there, empty where it is not known.
        verification, measured: None where that was not done.
        broken: fusions of the runtime's own that fused nodes break; named: what name rules call by a name.
        fold_weights: whether weights may be rounded anew for what is folded into them.
    """

    onnxfuse: str
    onnx: str
    target: str
    dims: Figures
    before: Figures
    after: Figures
    nodes: Mapping[str, Figures]
    assumed_target: bool = False
    assumed_dims: tuple[str, ...] = ()
    strategy: str = "auto"
    hints: Figures = field(default_factory=dict)
    least_gain: float | None = None
    channels_last: bool = False
    disabled: tuple[str, ...] = ()
    provider_options: Mapping[str, str] = field(default_factory=dict)
    hangs_on: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    candidates: int = 0
    canonical: Mapping[str, int] = field(default_factory=dict)
    operators: tuple[OperatorRecord, ...] = ()
    remaining: tuple[RemainingRecord, ...] = ()
    roofline: Figures = field(default_factory=dict)
    verification: VerificationRecord | None = None
    measured: MeasuredRecord | None = None
    broken: tuple[BrokenRecord, ...] = ()
    named: tuple[NamedRecord, ...] = ()
    fold_weights: bool = False


def note_plan(model: onnx.ModelProto, record: PlanRecord) -> None:
    """Keep, in place, how the model was made."""
    text = json.dumps({"version": VERSION, **asdict(record)}, separators=(",", ":"), ensure_ascii=False)
    note_property(model, KEY, text)


def forget_plan(model: onnx.ModelProto) -> None:
    """Forget that, in place."""
    forget_property(model, KEY)


def plan_record(model: onnx.ModelProto) -> PlanRecord | None:
    """How a model was made, where it knows that.

    Raises:
        ModelError: the record is damaged, or of another release.
    """
    text = property_of(model, KEY)
    if text is None:
        return None
    try:
        raw = dict(parse_json(text))
        version = raw.pop("version", None)
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, and this release reads {VERSION}")
        return typed(PlanRecord, raw)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"The record of how the model was made cannot be read: {error}.", place=f"metadata property '{KEY}'",
            remedy="Fuse the original model again, or take the property out.",
        ) from error


def today() -> str:
    """The date as ISO 8601, UTC; that of SOURCE_DATE_EPOCH where it is set, so that builds can be repeated.

    Raises:
        OnnxfuseError: SOURCE_DATE_EPOCH is no number of seconds.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        now = datetime.now(UTC) if given is None else datetime.fromtimestamp(int(given), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise OnnxfuseError(
            f"SOURCE_DATE_EPOCH is {given!r}, which is no date.",
            remedy="Set it to the seconds since 1970, or take it out of the environment.",
        ) from error
    return now.date().isoformat()
