"""Several independent regions in one launch: the second index of a block says whose it is.

    grid = (the most blocks of a part, number of parts)        block = the most threads of a part

Every part keeps the kernel that its own schedule made: its text becomes device functions in a namespace, equal texts
one, and an entry calls the part's.  Blocks and threads past a part's own end at once.  A variant of the whole is a
variant of each part, under the guards of all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files

from onnxfuse.lowering.launch import Check, LaunchPlan, Output, Step, Variant
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel, header

SCHEDULE = "together"

MOST_VARIANTS = 6
"""Variants of the whole: each is a kernel to compile, with the text of every part in it."""

LIGHT = frozenset({"pointwise", "rows"})
"""Schedules whose static shared memory is some hundred bytes; of others a kernel holds one part's at a time."""

_ENTRY = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+), (\d+)\)\n(\w+)\(([^)]*)\) \{')
_PLACED = re.compile(r"([ioh])(\d+)(\..+)?")
_OF_THE_GRID = re.compile(r"\bgridDim\b|\bblockDim\b|\bblockIdx\.[yz]\b")
_SYMBOL = re.compile(r"s\d+")


@dataclass(frozen=True)
class Part:
    """One of the regions.

    Attributes:
        kernel: its own; planned: the variant that runs at the planned sizes, by place.
        inputs, hosts, outputs: where its tensor inputs, host inputs and outputs are among those of the whole.
    """

    kernel: Kernel
    planned: int
    inputs: tuple[int, ...]
    hosts: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """A kernel as a part's text has it: its bounds, and the declarations of its parameters."""

    threads: int
    blocks: int
    parameters: tuple[str, ...]


def usable(kernel: Kernel) -> tuple[int, ...]:
    """Variants, by place, that can be a part's; empty where the last one, which runs anything, cannot, or the text
    looks at what the whole has of its own: the grid's size and its other axes, the block's size."""
    if _OF_THE_GRID.search(_split(kernel.source)[1]):
        return ()
    entries = _entries(kernel.source)
    found = tuple(place for place, variant in enumerate(kernel.plan.variants) if _fits(variant, entries))
    return found if found and found[-1] == len(kernel.plan.variants) - 1 else ()


def _fits(variant: Variant, entries: dict[str, _Entry]) -> bool:
    """Whether a variant is one launch along one axis, without scratch memory."""
    if len(variant.steps) != 1:
        return False
    (step,) = variant.steps
    entry = entries.get(step.kernel)
    return (
        entry is not None and not step.extended and len(entry.parameters) == len(step.arguments)
        and step.grid[1:] == ("1", "1") and step.block == (str(entry.threads), "1", "1") and entry.threads % 32 == 0
        and not any(argument.startswith("t") for argument in step.arguments)
    )


def share_launch(kernels: Sequence[tuple[Kernel, int]]) -> bool:
    """Whether usable variants, by place, of these kernels fit into one launch, and those that run anything too.

    Only one function with much shared memory fits.
    """
    return _agree(kernels) and _agree([(kernel, len(kernel.plan.variants) - 1) for kernel, _ in kernels])


def _agree(kernels: Sequence[tuple[Kernel, int]]) -> bool:
    heavy = set()
    for kernel, place in kernels:
        if kernel.schedule not in LIGHT and "__shared__" in (text := _split(kernel.source)[1]):
            heavy.add((text, kernel.plan.variants[place].steps[0].kernel))
    return len(heavy) <= 1


def together(parts: Sequence[Part], rule: str, outputs: int) -> Kernel | Refusal:
    """One kernel for independent regions, or why there is none.

    Args:
        parts: two or more.
        rule: id for the plan and the text's comment.
        outputs: how many the whole has; each is one part's.
    """
    return _Whole(parts, rule, outputs).kernel()


class _Whole:
    def __init__(self, parts: Sequence[Part], rule: str, outputs: int) -> None:
        self.parts, self.rule, self.count = parts, rule, outputs
        self.symbols: dict[str, str] = {}
        self.own = [self._symbols_of(part) for part in parts]
        self.bodies = [_split(part.kernel.source) for part in parts]
        self.entries = [_entries(part.kernel.source) for part in parts]
        self.spaces: dict[str, str] = {}

    def kernel(self) -> Kernel | Refusal:
        """The kernel of all parts."""
        ways = self._ways()
        if not ways:
            return Refusal("no-common-launch", "the regions' kernels cannot share a launch")
        variants, kernels = [], []
        for number, way in enumerate(ways):
            variant, text = self._variant(f"together_{number}", way)
            variants.append(variant)
            kernels.append(text)
        headers = dict.fromkeys(name for names, _ in self.bodies for name in names)
        comment = f"// {self.rule}: {len(self.parts)} regions in one launch\n"
        functions = (
            f"namespace {space} {{\n{_ENTRY.sub(_as_function, text)}}}\n" for text, space in self.spaces.items()
        )
        source = "".join([*map(header, headers), comment, *functions, *kernels])
        scattered = {part.inputs[place] for part in self.parts for place in part.kernel.scattered}
        phases = max(part.kernel.phases for part in self.parts)
        return Kernel(SCHEDULE, source, self._plan(variants), tuple(sorted(scattered)), phases=phases)

    def _plan(self, variants: list[Variant]) -> LaunchPlan:
        plans = [part.kernel.plan for part in self.parts]
        checks: dict[Check, None] = {}
        outputs: dict[int, Output] = {}
        for number, (part, plan) in enumerate(zip(self.parts, plans, strict=True)):
            for check in plan.checks:
                message = _renumbered(check.message, part.inputs)
                checks[replace(check, condition=self._moved(check.condition, number), message=message)] = None
            for place, output in zip(part.outputs, plan.outputs, strict=True):
                outputs[place] = Output(output.dtype, tuple(self._moved(size, number) for size in output.shape))
        return LaunchPlan(
            self.rule, 1 + max(place for part in self.parts for place in part.inputs), tuple(self.symbols),
            tuple(checks), tuple(outputs[place] for place in range(self.count)), tuple(variants),
            options=tuple(dict.fromkeys(option for plan in plans for option in plan.options)),
        )

    def _symbols_of(self, part: Part) -> dict[str, str]:
        """The whole's symbol for each of a part's."""
        found: dict[str, str] = {}
        for place, text in enumerate(part.kernel.plan.symbols):
            moved = " ".join(_token(token, part, found) for token in text.split())
            found[f"s{place}"] = self.symbols.setdefault(moved, f"s{len(self.symbols)}")
        return found

    def _moved(self, text: str, number: int) -> str:
        """A part's expression as the whole's."""
        return " ".join(_token(token, self.parts[number], self.own[number]) for token in text.split())

    def _ways(self) -> list[tuple[int, ...]]:
        """Variants of the parts that run together, by place: those that are planned, those of the same rank, and last
        those that run anything."""
        kernels = [part.kernel for part in self.parts]
        planned = tuple(part.planned for part in self.parts)
        each = [usable(kernel) for kernel in kernels]
        if any(place not in places for place, places in zip(planned, each, strict=True)):
            return []
        if not share_launch(list(zip(kernels, planned, strict=True))):
            return []
        last = tuple(places[-1] for places in each)
        ranks = (tuple(places[min(rank, len(places) - 1)] for places in each) for rank in range(max(map(len, each))))
        others = [
            way for way in dict.fromkeys(ranks)
            if way not in (planned, last) and _agree(list(zip(kernels, way, strict=True)))
        ]
        chosen = dict.fromkeys([planned, *others[: MOST_VARIANTS - 2]])
        return [*sorted((way for way in chosen if way != last), key=sum), last]

    def _variant(self, name: str, way: tuple[int, ...]) -> tuple[Variant, str]:
        """A variant and its kernel."""
        chosen = [part.kernel.plan.variants[place] for part, place in zip(self.parts, way, strict=True)]
        steps = [variant.steps[0] for variant in chosen]
        entries = [known[step.kernel] for known, step in zip(self.entries, steps, strict=True)]
        most = max(entry.threads for entry in entries)
        names: dict[str, str] = {}
        declared: list[str] = []

        def parameter(argument: str, kind: str) -> str:
            if argument not in names:
                names[argument] = argument if ":" not in argument else f"n{len(names)}"
                declared.append(f"{kind} {names[argument]}")
            return names[argument]

        grids = [self._moved(step.grid[0], number) for number, step in enumerate(steps)]
        cases = []
        for number, (step, entry, grid) in enumerate(zip(steps, entries, grids, strict=True)):
            arguments = [
                parameter(self._argument(argument, number), declaration.rpartition(" ")[0])
                for argument, declaration in zip(step.arguments, entry.parameters, strict=True)
            ]
            inside = [f"(int)blockIdx.x < {parameter(f'i32:{grid}', 'const int')}"] if len(set(grids)) > 1 else []
            inside += [f"threadIdx.x < {entry.threads}"] if entry.threads < most else []
            where = f"if ({' && '.join(inside)}) " if inside else ""
            call = f"{self._space(number)}::{step.kernel}({', '.join(arguments)});"
            cases.append(f"    case {number}: {where}{call} break;\n")
        text = (
            f'extern "C" __global__ void __launch_bounds__({most}, {min(entry.blocks for entry in entries)})\n'
            f"{name}({', '.join(declared)}) {{\n  switch (blockIdx.y) {{\n{''.join(cases)}  }}\n}}\n"
        )
        launch = Step(
            name, (_largest(grids), str(len(self.parts)), "1"), (str(most), "1", "1"), tuple(names),
            _largest([self._moved(step.shared, number) for number, step in enumerate(steps)]),
        )
        guards = dict.fromkeys(
            self._moved(guard, number) for number, variant in enumerate(chosen) for guard in variant.guards
        )
        label = ", ".join(dict.fromkeys(variant.name for variant in chosen))
        return Variant(f"{name}: {label}", (launch,), tuple(guards)), text

    def _space(self, number: int) -> str:
        """The namespace of a part's functions."""
        return self.spaces.setdefault(self.bodies[number][1], f"part{len(self.spaces)}")

    def _argument(self, argument: str, number: int) -> str:
        kind, colon, text = argument.partition(":")
        return f"{kind}:{self._moved(text, number)}" if colon else self._moved(argument, number)


def _renumbered(message: str, inputs: Sequence[int]) -> str:
    """A message that speaks of a part's inputs, speaking of the whole's."""
    return re.sub(r"(?<=of input )\d+", lambda found: str(inputs[int(found[0])]), message)


def _largest(sizes: Sequence[str]) -> str:
    """An expression for the largest of some."""
    first, *others = dict.fromkeys(sizes)
    return " ".join([first, *(f"{other} max" for other in others)])


def _token(token: str, part: Part, symbols: dict[str, str]) -> str:
    """An atom of a part's plan as the whole's; operators and numbers stay."""
    if _SYMBOL.fullmatch(token):
        return symbols[token]
    placed = _PLACED.fullmatch(token)
    if placed is None:
        return token
    kind, number, rest = placed.groups()
    places = {"i": part.inputs, "h": part.hosts, "o": part.outputs}[kind]
    return f"{kind}{places[int(number)]}{rest or ''}"


def _as_function(entry: re.Match[str]) -> str:
    """A kernel as a device function, which an entry of the whole calls."""
    _, _, name, parameters = entry.groups()
    return f"__device__ __forceinline__ void {name}({parameters}) {{"


@lru_cache(maxsize=256)
def _split(source: str) -> tuple[tuple[str, ...], str]:
    """The headers that a text begins with, and the rest of it."""
    found = []
    for name in _headers():
        if header(name) in source:
            source = source.replace(header(name), "", 1)
            found.append(name)
    return tuple(found), source


@cache
def _headers() -> tuple[str, ...]:
    """Names of all headers, the one that others build on first."""
    names = {file.name for file in files("onnxfuse.schedules").joinpath("cuda").iterdir()}
    stems = (name.removesuffix(".cuh") for name in names if name.endswith(".cuh"))
    return tuple(sorted(stems, key=lambda stem: (stem != "onnxfuse", stem)))


@lru_cache(maxsize=256)
def _entries(source: str) -> dict[str, _Entry]:
    """The kernels of a text, by name."""
    return {
        name: _Entry(int(threads), int(blocks), tuple(parameters.split(", ")))
        for threads, blocks, name, parameters in _ENTRY.findall(source)
    }
