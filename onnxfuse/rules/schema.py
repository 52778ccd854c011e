"""The shape of a rule file's documents, checked by pydantic; what the texts in them mean is checked in ``load``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) or value is None else [value]


def _as_test(value: Any) -> Any:
    return {"test": value} if not isinstance(value, dict) else value


def _as_expectation(value: Any) -> Any:
    return {"matched": True} if value == "matched" else value


def _as_argument(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        ((kind, size),) = value.items()
        return {"kind": kind, "size": _as_text(size)}
    return value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Words = Annotated[list[str], BeforeValidator(_as_list)]
Size = Annotated[str, BeforeValidator(_as_text)]
Kebab = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")]
Positive = Annotated[int, Field(gt=0)]
Extent = Annotated[int, Field(gt=0, le=1 << 30)]
Bound = Annotated[float, Field(ge=-1e38, le=1e38, strict=False)]


class Part(BaseModel):
    """Base: no unknown keys, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ConditionPart(Part):
    test: str
    code: Kebab | None = None
    message: str | None = None
    remedy: str | None = None


class Expectation(Part):
    matched: Literal[True] | None = None
    refused: Kebab | None = None


class ExamplePart(Part):
    name: str
    expect: Annotated[Expectation, BeforeValidator(_as_expectation)]
    model: str | None = None
    file: str | None = None
    opset: Annotated[int, Field(gt=0, le=1000)] = 17
    dims: dict[str, Extent] = {}
    inputs: dict[str, Annotated[list[Bound], Field(min_length=2, max_length=2, strict=False)]] = {}


class RulePart(Part):
    id: Kebab
    kind: str
    summary: str
    why: str
    quiet: bool = False
    examples: list[ExamplePart] = []


Conditions = list[Annotated[ConditionPart, BeforeValidator(_as_test)]]


class CanonicalPart(RulePart):
    pattern: str
    becomes: str
    results: Words | None = None
    where: Conditions = []
    sets: dict[str, Words] = {}


class RuntimePart(CanonicalPart):
    level: Literal["basic", "extended"]
    core: str | None = None


class NamePart(RulePart):
    pattern: str
    results: Words | None = None
    where: Conditions = []
    sets: dict[str, Words] = {}


class ArgumentPart(Part):
    kind: Literal["i32", "i64"]
    size: Size


class KernelPart(Part):
    file: str
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    inputs: list[str]
    outputs: list[str]
    arguments: list[Annotated[ArgumentPart, BeforeValidator(_as_argument)]] = []
    grid: Annotated[list[Size], BeforeValidator(_as_list), Field(min_length=1, max_length=3)]
    block: Annotated[list[Size], BeforeValidator(_as_list), Field(min_length=1, max_length=3)]
    shared: Size = "0"


class FusePart(RulePart):
    pattern: str
    results: Words | None = None
    where: Conditions = []
    sets: dict[str, Words] = {}
    grow: dict[str, Words] = {}
    kernel: KernelPart | None = None
    schedule: str | None = None


class GrowPart(RulePart):
    operators: Words
    max_nodes: Positive | None = None
    max_inputs: Positive | None = None
    max_outputs: Positive | None = None


class EdgePart(Part):
    from_: Words = Field(alias="from")
    to: Words


class ForbidPart(RulePart):
    reason: str
    pattern: str | None = None
    where: Conditions = []
    sets: dict[str, Words] = {}
    leave: Words = []
    unless_made: Words = []
    edge: EdgePart | None = None
    condition: Kebab | None = None


KINDS: dict[str, type[RulePart]] = {
    "canonical": CanonicalPart, "fuse": FusePart, "grow": GrowPart, "forbid": ForbidPart, "runtime": RuntimePart,
    "name": NamePart,
}
