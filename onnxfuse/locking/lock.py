"""A lock: what was fused in a model, by onnxfuse and by ONNX Runtime itself, and what for; its shape in the file.

What a place is called, and of which fusion it is, says where to look; what tells whether a fusion is still there is its
structure, so that names may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from onnxfuse.locking.structure import edges

VERSION = 1
"""Of the file's shape."""

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]

After = Literal["fires", "partly", "fused", "broken"]
"""What becomes of a fusion of ONNX Runtime's own in the fused model: it fires as before; it fires without nodes that
fused nodes have; fused nodes have all of it; it fires no more."""


class Part(BaseModel):
    """Base: no unknown keys, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Made(Part):
    """Releases that the lock was made with."""

    onnxfuse: str
    onnxruntime: str
    onnx: str


class Plan(Part):
    """What was planned for, and with which settings: ``check`` plans for the same.

    Attributes:
        channels_last: whether the CUDA provider prefers that; keeps_biases: whether convolutions keep their biases, as
            it adds them itself; keeps_float32: whether it does not round operands of products to TF32.
        fold_weights: whether weights may be rounded anew for what is folded into them.
        compiled: whether kernels were compiled for the target, so that those that spill registers were left out.
    """

    target: str
    dims: dict[str, Size] = {}
    strategy: str = "auto"
    hints: dict[str, Number] = {}
    least_gain: Number = 1.2
    channels_last: bool = False
    keeps_biases: bool = False
    keeps_float32: bool = False
    fold_weights: bool = False
    disabled: list[str] = []
    compiled: bool = False


class Interface(Part):
    """What others call the model by.

    Attributes:
        opsets: version by domain, "ai.onnx" for the standard one.
        inputs, outputs: by name the element type, then the sizes: numbers, or symbols; "..." where even their number
            is unknown.
    """

    file: str
    opsets: dict[str, Count]
    inputs: dict[str, list[str | int]]
    outputs: dict[str, list[str | int]]


class Spot(Part):
    """A place where something is fused.

    Attributes:
        nodes: labels of its nodes, one for each part of the structure, many spellings of one operator as one node.
        reads: values that it reads, constants left out; writes: those that it gives to others.
        spelled: canonical rules that took several nodes as one of these.
    """

    nodes: list[str]
    reads: list[str] = []
    writes: list[str] = []
    spelled: list[str] = []


class Fusion(Part):
    """Fusions of one kind.

    Attributes:
        rule: id of the rule that they are due to; structure: see ``locking.structure``; times: how many there are.
        at: their places, in graph order.
    """

    rule: str
    structure: list[str]
    times: Count
    at: list[Spot]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _check(self.structure, self.at, self.times)
        return self


class RuntimeSpot(Spot):
    """A place where ONNX Runtime fuses by itself.

    Attributes:
        seen: whether a session of the installed release on the CPU runs it as one; None where none was made.
        costs_us: predicted microseconds that what fused nodes leave of it takes in one run.
    """

    after: After
    seen: bool | None = None
    costs_us: Number = 0.0


class RuntimeFusion(Part):
    """ONNX Runtime's own fusions of one kind: ``before`` is how often they fire in the model, ``after`` in the fused
    one; the rest is as in ``Fusion``, of the runtime rules."""

    rule: str
    structure: list[str]
    before: Count
    after: Count
    at: list[RuntimeSpot]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _check(self.structure, self.at, self.before)
        return self


def _check(words: Sequence[str], places: Sequence[Spot], times: int) -> None:
    """Whether places fit their structure, and are as many as they say.

    Raises:
        ValueError: they do not.
    """
    if any(above >= reader for above, reader in edges(words)):
        raise ValueError("a part of the structure reads one that does not stand before it")
    for number, place in enumerate(places, 1):
        if len(place.nodes) != len(words):
            raise ValueError(f"place {number} has {len(place.nodes)} nodes, and the structure {len(words)} parts")
    if len(places) != times:
        raise ValueError(f"{times} are counted, and there are {len(places)} places")


class Lock(Part):
    """What was fused in a model.

    Attributes:
        lock: version of the file's shape.
        kernels: of one run, before and after; rules: how many fused nodes are due to each rule; recognised: how often
            each canonical rule took several nodes as one operator.
    """

    lock: int = VERSION
    made: Made
    plan: Plan
    model: Interface
    kernels: dict[Literal["before", "after"], Count]
    rules: dict[str, Count]
    recognised: dict[str, Count] = {}
    fusions: list[Fusion]
    runtime: list[RuntimeFusion]
