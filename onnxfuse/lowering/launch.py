"""The launch plan: what the native library does when a fused node runs.

A plan travels in the node's ``plan`` attribute as JSON.  It names the symbols that the sizes of the inputs bind, the
checks that the sizes must pass, the shapes of the outputs, scratch memory, and a list of *variants*: guards, then
steps.  The first variant whose guards all hold runs; the last one has none.  A step launches one kernel, or calls a
routine of a library (``onnxfuse.lowering.routines``), without which its variant is passed over.

Sizes are written as expressions in reverse Polish notation, so that the library needs no parser worth the name.
Atoms:

    12            an integer
    i0.1          size of axis 1 of tensor input 0
    i0.n          number of elements of tensor input 0
    i0.addr       address of tensor input 0 modulo 256         o0.addr       the same of output 0
    i0.at         the whole address of tensor input 0          o0.at         the same of output 0
    h0.2          element 2 of host input 0 (int64 or int32)   h0.n          its number of elements
    s3            symbol 3 of the plan
    sm            compute capability, as 90                    sms           multiprocessors of the GPU

Operators: ``+ - * // % min max == != < <= and or not ceil bcast sel``.  ``//`` and ``%`` floor; ``a b ceil`` is the
quotient rounded up; ``a b bcast`` is b where a is 1, else a; ``c a b sel`` is a where c is not 0, else b.  A division
by zero gives 0.

Arguments of a kernel: ``i0`` a tensor input's address, ``o0`` an output's, ``t0`` a scratch buffer's,
``i32:EXPR`` and ``i64:EXPR`` integers, ``m0`` a tensor map (see below).  A step whose grid has a zero size is skipped.

Every step of every variant may use every scratch buffer: what one step writes another reads.  A run allocates those of
its variant in one block of memory, each at a multiple of 256 bytes; a buffer lives from the first to the last step that
uses it, and buffers that no step needs at once may share memory.  What is in a buffer before that first step is not
known.

A plan may ask for more than grids, which GPUs have from sm_90 on:

- ``cluster`` of a step: sizes of its thread block clusters.  A cluster has 8 blocks at most; the grid is a multiple
  of it.
- ``dependent`` of a step: programmatic dependent launch, so that the kernel may begin before the one before it on the
  stream ends, which may be another node's.  It must wait (``griddepcontrol.wait``) before it touches memory that an
  earlier kernel reads or writes, scratch included; only what no run writes, such as weights, may it read before.
- ``maps`` of the plan: tensor maps, which several steps may take (``onnxfuse.lowering.tensor_map``).

The library refuses to create a session on a GPU without them where a variant that could run there asks for them: such a
variant has the guard ``90 sm <=``, or the plan is for those GPUs alone.  A plan that asks for any of this, calls a
library, or names a whole address, is written as version 2, which earlier libraries refuse; every other plan is of
version 1, byte for byte as before.

Whole addresses stand in guards alone, which ask whether the caller bound an output to the memory of an input, as with
caches of keys (``i3.at o1.at ==``): a variant may then leave what lies there as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from onnxfuse.bounded import parse_json
from onnxfuse.graph.dims import OPERATIONS, Dim
from onnxfuse.lowering import fields
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.lowering.tensor_map import TensorMap

VERSION, EXTENDED = 1, 2
"""Versions of a plan as JSON: what every release reads, and what the module's text tells of it."""

HOST_INPUTS = 8
"""Optional leading inputs in host memory that every fused node has before its tensor inputs."""

REGION_NAMES = 512
"""Size of the pool of operator names, ``Region0`` and so on, that the native library registers."""

WHOLE = ".at"
"""Ends an atom that is a whole address."""

DOMAIN = "onnxfuse"
"""Domain of fused nodes."""


@dataclass(frozen=True)
class Step:
    """One kernel launch; all sizes are expressions."""

    kernel: str
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    arguments: tuple[str, ...]
    shared: str = "0"
    cluster: tuple[str, str, str] | None = None
    dependent: bool = False

    @property
    def extended(self) -> bool:
        """Whether it asks for more than a plan of version 1 can."""
        return self.cluster is not None or self.dependent

    def raw(self) -> dict[str, object]:
        """As JSON data."""
        out: dict[str, object] = {
            "kernel": self.kernel, "grid": list(self.grid), "block": list(self.block), "shared": self.shared,
            "args": list(self.arguments),
        }
        if self.cluster is not None:
            out["cluster"] = list(self.cluster)
        if self.dependent:
            out["dependent"] = True
        return out

    @staticmethod
    def read(raw: Mapping[str, object]) -> Step:
        """The step that ``raw`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        cluster = fields.three(raw["cluster"]) if "cluster" in raw else None
        return Step(
            fields.text(raw["kernel"]), fields.three(raw["grid"]), fields.three(raw["block"]),
            fields.texts(raw["args"]), fields.text(raw["shared"]), cluster, fields.truth(raw.get("dependent", False)),
        )


@dataclass(frozen=True)
class Variant:
    """A way to run the region, where all ``guards`` are non-zero."""

    name: str
    steps: tuple[Step | LibraryCall, ...]
    guards: tuple[str, ...] = ()

    @property
    def launches(self) -> tuple[Step, ...]:
        """The steps that launch kernels."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    @property
    def calls(self) -> tuple[LibraryCall, ...]:
        """The steps that call a library."""
        return tuple(step for step in self.steps if isinstance(step, LibraryCall))


@dataclass(frozen=True)
class Output:
    """Element type (``onnx.TensorProto.DataType``) and sizes of an output."""

    dtype: int
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """A condition on the inputs' sizes; where it does not hold the node fails with ``message``: ``fault``, after the
    axis that has it (an input and an axis of it, by place), if it is one's."""

    condition: str
    fault: str
    axis: tuple[int, int] | None = None

    @property
    def message(self) -> str:
        """What the node says."""
        return self.fault if self.axis is None else f"axis {self.axis[1]} of input {self.axis[0]} {self.fault}"


@dataclass(frozen=True)
class LaunchPlan:
    """See the module's text.  ``inputs`` counts the tensor inputs, ``region`` names the rule for messages,
    ``options`` are extra options for the compiler, ``scratch`` holds sizes in bytes, ``maps`` what steps take as
    ``m0``."""

    region: str
    inputs: int
    symbols: tuple[str, ...]
    checks: tuple[Check, ...]
    outputs: tuple[Output, ...]
    variants: tuple[Variant, ...]
    scratch: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    maps: tuple[TensorMap, ...] = ()

    @property
    def version(self) -> int:
        """The version that it is written as."""
        steps = [step for variant in self.variants for step in variant.steps]
        extended = self.maps or any(isinstance(step, LibraryCall) or step.extended for step in steps)
        whole = any(token.endswith(WHOLE) for variant in self.variants for guard in variant.guards
                    for token in guard.split())
        return EXTENDED if extended or whole else VERSION

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that its steps launch, sorted."""
        return tuple(sorted({step.kernel for variant in self.variants for step in variant.launches}))

    def scratch_of(self, variant: Variant) -> tuple[int, ...]:
        """The scratch buffers that a variant's steps use, as arguments or by tensor maps."""
        used = {argument for step in variant.steps for argument in step.arguments}
        used |= {one.base for place, one in enumerate(self.maps) if f"m{place}" in used}
        return tuple(place for place in range(len(self.scratch)) if f"t{place}" in used)

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps(
            {
                "version": self.version,
                "region": self.region,
                "inputs": self.inputs,
                "symbols": list(self.symbols),
                "checks": [[check.condition, check.message] for check in self.checks],
                "outputs": [{"dtype": output.dtype, "shape": list(output.shape)} for output in self.outputs],
                "scratch": list(self.scratch),
                "options": list(self.options),
                **({"maps": [one.raw() for one in self.maps]} if self.maps else {}),
                "variants": [
                    {
                        "name": variant.name,
                        "guards": list(variant.guards),
                        "steps": [step.raw() for step in variant.steps],
                    }
                    for variant in self.variants
                ],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> LaunchPlan:
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: the text is no plan of this version.
        """
        try:
            raw = parse_json(text)
            if raw["version"] not in (VERSION, EXTENDED):
                raise ValueError(
                    f"launch plan of version {raw['version']}; this release reads {VERSION} and {EXTENDED}")
            plan = LaunchPlan(
                fields.text(raw["region"]),
                fields.number(raw["inputs"]),
                fields.texts(raw["symbols"]),
                tuple(Check(*fields.two(check)) for check in raw["checks"]),
                tuple(
                    Output(fields.number(output["dtype"]), fields.texts(output["shape"])) for output in raw["outputs"]
                ),
                tuple(
                    Variant(
                        fields.text(variant["name"]),
                        tuple((LibraryCall if "call" in step else Step).read(step) for step in variant["steps"]),
                        fields.texts(variant["guards"]),
                    )
                    for variant in raw["variants"]
                ),
                fields.texts(raw["scratch"]),
                fields.texts(raw["options"]),
                tuple(map(TensorMap.read, raw.get("maps", []))),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a launch plan: {error}") from error
        if plan.version > raw["version"]:
            raise ValueError(f"a launch plan of version {raw['version']} that asks for what version {EXTENDED} has")
        return plan


def expression(size: Dim, symbols: Mapping[str, str]) -> str:
    """A size as an expression; ``symbols`` gives the atom that each of its symbols is.

    Raises:
        KeyError: a symbol has no atom.
    """
    terms = []
    for monomial, factor in size.terms.items():
        parts = []
        for atom, power in monomial:
            if atom.kind == "symbol":
                text = symbols[atom.name]
            else:
                a, b = (expression(operand, symbols) for operand in atom.operands)
                text = f"{a} {b} {atom.kind}"
            parts += [text] * power
        if factor != 1 or not parts:
            parts.append(str(factor))
        terms.append(" ".join(parts[:1] + [f"{part} *" for part in parts[1:]]))
    return " ".join(terms[:1] + [f"{term} +" for term in terms[1:]]) or "0"


@dataclass(frozen=True)
class Atom:
    """What an expression has of a run, or a kernel as a pointer: the kind's letter, which of that kind, and the part of
    it, "" for the whole."""

    kind: str
    place: int
    part: str = ""

    @staticmethod
    def read(token: str) -> Atom | None:
        """The atom that a token is; None for integers, operators and what the GPU tells."""
        whole, _, part = token.partition(".")
        return Atom(whole[0], int(whole[1:]), part) if whole[0].isalpha() and whole[1:].isdigit() else None

    @property
    def token(self) -> str:
        """As expressions write it."""
        return f"{self.kind}{self.place}.{self.part}" if self.part else f"{self.kind}{self.place}"


def moved(text: str, places: Mapping[str, Sequence[int]]) -> str:
    """An expression, or a pointer among arguments, with other places for its atoms: ``places`` has them by kind."""
    atoms = ((token, Atom.read(token)) for token in text.split())
    return " ".join(
        token if atom is None else replace(atom, place=places[atom.kind][atom.place]).token for token, atom in atoms)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """An expression, or a pointer among arguments, with the tokens that ``names`` has in place of some of its own."""
    return " ".join(names.get(token, token) for token in text.split())


def elsewhere(step: Step, names: Mapping[str, str]) -> Step:
    """A launch that reads and writes elsewhere: ``names`` has other tokens for those of its arguments."""
    return replace(step, arguments=tuple(renamed(argument, names) for argument in step.arguments))


@dataclass
class Situation:
    """What atoms mean in one run: sizes of the inputs, contents of host inputs, addresses, the GPU."""

    inputs: Sequence[tuple[int, ...]]
    hosts: Sequence[Sequence[int]] = ()
    input_addresses: Sequence[int] = ()
    output_addresses: Sequence[int] = ()
    sm: int = 90
    multiprocessors: int = 132
    symbols: list[int] = field(default_factory=list)

    def bind(self, plan: LaunchPlan) -> None:
        """Give the plan's symbols their values.

        Raises:
            ValueError: a check does not hold.
        """
        self.symbols = []
        for text in plan.symbols:
            self.symbols.append(self.evaluate(text))
        for check in plan.checks:
            if not self.evaluate(check.condition):
                raise ValueError(check.message)

    def place(self, plan: LaunchPlan) -> int:
        """Which variant of a plan runs, its symbols bound."""
        return next(place for place, variant in enumerate(plan.variants) if all(map(self.evaluate, variant.guards)))

    def evaluate(self, text: str) -> int:
        """The integer that an expression is."""
        stack: list[int] = []
        for token in text.split():
            if token == "sel":
                b, a, c = stack.pop(), stack.pop(), stack.pop()
                stack.append(a if c else b)
            elif token == "not":
                stack.append(int(not stack.pop()))
            elif token in _BINARY:
                b, a = stack.pop(), stack.pop()
                stack.append(_BINARY[token](a, b))
            else:
                stack.append(self._atom(token))
        (result,) = stack
        return result

    def _atom(self, token: str) -> int:
        atom = Atom.read(token)
        if atom is None:
            return self.sm if token == "sm" else self.multiprocessors if token == "sms" else int(token)
        if atom.kind == "s":
            return self.symbols[atom.place]
        if atom.kind == "h":
            return len(self.hosts[atom.place]) if atom.part == "n" else self.hosts[atom.place][int(atom.part)]
        if atom.part in ("addr", "at"):
            addresses, whole = self.input_addresses if atom.kind == "i" else self.output_addresses, atom.part == "at"
            if not addresses:  # where nothing is said of them, tensors lie apart
                return (atom.place if atom.kind == "i" else -1 - atom.place) if whole else 0
            return addresses[atom.place] % (1 << 64 if whole else 256)
        sizes = self.inputs[atom.place]
        return prod(sizes) if atom.part == "n" else sizes[int(atom.part)]


_BINARY: dict[str, Callable[[int, int], int]] = {
    **{name: operation for name, operation in OPERATIONS.items() if name not in ("//", "%")},
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0,
    "ceil": lambda a, b: -(-a // b) if b else 0,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}
