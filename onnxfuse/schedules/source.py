"""A kernel's text as data: device functions, the entries that call them, and what each takes.

Schedules write the bodies of functions, in C++; everything else (which parameters a function has, who calls what, the
names that a profiler shows, several kernels in one text) is structure until ``Source.text`` renders it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.launch import Step
from onnxfuse.lowering.lower import Lowered
from onnxfuse.schedules.headers import linked, used_in


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function or kernel.

    Attributes:
        kind: its type, in which ``{index}`` is the type of an index; name: what the body calls it.
        argument: the launch plan's argument for it, in which ``{bits}`` are those of an index.
        within: what its type is in functions that the kernel calls, where that is another.
    """

    kind: str
    name: str
    argument: str = ""
    within: str = ""

    def at(self, bits: int) -> Parameter:
        """The parameter of a kernel with indices of so many bits."""
        return replace(self, kind=self.kind.format(index=index_type(bits)), argument=self.argument.format(bits=bits))

    @property
    def declaration(self) -> str:
        """As a parameter list has it."""
        return f"{self.kind} {self.name}"

    @property
    def declaration_within(self) -> str:
        """As that of a function has it."""
        return f"{self.within or self.kind} {self.name}"


def index_type(bits: int) -> str:
    """The C++ type of an index of 32 or 64 bits."""
    return "int" if bits == 32 else "long long"


@dataclass(frozen=True)
class Body:
    """Lines of C++, and the size parameters that they name."""

    text: str
    sizes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Function:
    """A device function, a template over ``template`` and over ``idx``, the type of an index; ``calls``: names of the
    functions of the same text, and of the same ``space``, that it calls; that is its namespace, "" for none."""

    name: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    body: str
    calls: tuple[str, ...] = ()
    space: str = ""

    @property
    def whole_name(self) -> str:
        """Its name for who is elsewhere."""
        return _within(self.space, self.name)

    @property
    def whole_calls(self) -> tuple[str, ...]:
        """Such names of what it calls."""
        return tuple(_within(self.space, name) for name in self.calls)

    def entry(self, name: str, settings: Sequence[int], bits: int, threads: int, blocks: int = 1) -> Entry:
        """A kernel that calls it, with these numbers for its template and indices of so many bits; ``threads`` and
        ``blocks`` as ``Entry`` has them."""
        call = Call(self.name, (*map(str, settings), index_type(bits)), tuple(each.name for each in self.parameters))
        return Entry(name, threads, tuple(each.at(bits) for each in self.parameters), (call,), blocks)

    @property
    def text(self) -> str:
        """Its definition."""
        template = ", ".join([*(f"int {name}" for name in self.template), "typename idx"])
        parameters = ", ".join(each.declaration_within.format(index="idx") for each in self.parameters)
        text = f"template <{template}> __device__ __forceinline__ void {self.name}({parameters}) {{\n{self.body}}}\n"
        return f"namespace {self.space} {{\n{text}}}\n" if self.space else text


def _within(space: str, name: str) -> str:
    """A name of a namespace."""
    return f"{space}::{name}" if space else name


@dataclass(frozen=True)
class Call:
    """A call of a function with its template's arguments.

    Attributes:
        blocks: the parameter that says how many blocks make it, "" for all; threads: how many of their threads do, 0
            for all.
    """

    function: str
    template: tuple[str, ...]
    arguments: tuple[str, ...]
    blocks: str = ""
    threads: int = 0

    @property
    def text(self) -> str:
        """The statement."""
        template = f"<{', '.join(self.template)}>" if self.template else ""
        conditions = [f"(int)blockIdx.x < {self.blocks}"] if self.blocks else []
        conditions += [f"threadIdx.x < {self.threads}"] if self.threads else []
        condition = f"if ({' && '.join(conditions)}) " if conditions else ""
        return f"{condition}{self.function}{template}({', '.join(self.arguments)});"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters that it reads."""
        return (*self.arguments, self.blocks) if self.blocks else self.arguments

    def reading(self, names: Sequence[str]) -> Call:
        """The same of other values."""
        count = len(self.arguments)
        return replace(self, arguments=tuple(names[:count]), blocks="".join(names[count:]))


@dataclass(frozen=True)
class Entry:
    """A kernel: what it takes, and what it calls.

    Attributes:
        threads: of a block; blocks: how many of these a multiprocessor is to hold at least.
        calls: one that every block makes; or several, of which a block makes the one of its second index.
    """

    name: str
    threads: int
    parameters: tuple[Parameter, ...]
    calls: tuple[Call, ...]
    blocks: int = 1

    def step(self, grid: str, count: str = "1", shared: str = "0") -> Step:
        """Its launch over so many blocks, ``count`` times."""
        arguments = tuple(each.argument for each in self.parameters)
        return Step(self.name, (grid, count, "1"), (str(self.threads), "1", "1"), arguments, shared)

    @property
    def text(self) -> str:
        """Its definition."""
        parameters = ", ".join(each.declaration for each in self.parameters)
        return (
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks})\n'
            f"{self.name}({parameters}) {{\n{self._statements}}}\n"
        )

    @property
    def function(self) -> str:
        """Its definition as a device function, which an entry of several kernels calls."""
        parameters = ", ".join(each.declaration_within for each in self.parameters)
        return f"__device__ __forceinline__ void {self.name}({parameters}) {{\n{self._statements}}}\n"

    @property
    def _statements(self) -> str:
        if len(self.calls) == 1:
            return f"  {self.calls[0].text}\n"
        # Each call is a copy of the function, so that there is one for all that differ in values alone.
        referenced = {each.name for each in self.parameters if each.within}
        alike: dict[tuple[Call, tuple[str, ...]], list[int]] = {}
        for place, call in enumerate(self.calls):
            fixed = tuple(name if name in referenced else "" for name in call.names)
            alike.setdefault((call.reading([""] * len(call.names)), fixed), []).append(place)
        cases = "".join(self._case(places) for places in alike.values())
        return f"  switch (blockIdx.y) {{\n{cases}  }}\n"

    def _case(self, places: Sequence[int]) -> str:
        """What the blocks of some calls, alike but for the values that they read, do."""
        labels, first = " ".join(f"case {place}:" for place in places), self.calls[places[0]]
        if len(places) == 1:
            return f"    {labels} {first.text} break;\n"
        columns = list(zip(*(self.calls[place].names for place in places), strict=True))
        names = [f"a{number}" if len(set(column)) > 1 else column[0] for number, column in enumerate(columns)]
        own = [(name, column) for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]

        def taken(turn: int, kind: str = "") -> str:
            return "".join(f"{kind}{name} = {column[turn]}; " for name, column in own)

        others = "".join(f"        case {place}: {taken(turn)}break;\n" for turn, place in enumerate(places) if turn)
        return (f"    {labels} {{\n      {taken(0, 'auto ')}\n      switch (blockIdx.y) {{\n{others}      }}\n"
                f"      {first.reading(names).text}\n      break;\n    }}\n")


@dataclass(frozen=True)
class Source:
    """The text of a kernel's variants.

    Attributes:
        headers: those of which it begins with what it uses.
        comment: a line for people, which two equal texts need not share.
        functions, entries: defined in their order; a kernel of several variants once.
        inner: texts of other kernels, with the namespace that holds their functions, their entries among them.
    """

    headers: tuple[str, ...]
    comment: str = field(compare=False)
    functions: tuple[Function, ...]
    entries: tuple[Entry, ...]
    inner: tuple[tuple[str, Source], ...] = ()

    def __post_init__(self) -> None:
        # Variants under other guards may run the same kernel.
        object.__setattr__(self, "entries", tuple(dict.fromkeys(self.entries)))

    @cached_property
    def text(self) -> str:
        """All of it."""
        spaces = (f"namespace {name} {{\n{each._as_functions}}}\n" for name, each in self.inner)
        functions, entries = (each.text for each in self.functions), (each.text for each in self.entries)
        text = "".join([*spaces, *functions, *entries])
        return "".join([linked(self.headers, used_in(text)), self._line, text])

    @property
    def _as_functions(self) -> str:
        return "".join([self._line, *(each.text for each in self.functions), *(each.function for each in self.entries)])

    @property
    def _line(self) -> str:
        return f"// {self.comment}\n"

    def entry(self, name: str) -> Entry | None:
        """The kernel of a name."""
        return next((each for each in self.entries if each.name == name), None)

    def keeping(self, names: Collection[str]) -> Source:
        """The same with the kernels of these names alone, and the functions that they need."""
        entries = tuple(each for each in self.entries if each.name in names)
        needed = {call.function for entry in entries for call in entry.calls}
        for function in reversed(self.functions):  # each is defined after what it calls
            if function.whole_name in needed:
                needed.update(function.whole_calls)
        functions = tuple(each for each in self.functions if each.whole_name in needed)
        return replace(self, functions=functions, entries=entries)

    def prefixed(self, prefix: str) -> Source:
        """The same with other names for its kernels."""
        return replace(self, entries=tuple(replace(each, name=f"{prefix}_{each.name}") for each in self.entries))

    def within(self, space: str) -> Source:
        """The same with its functions in a namespace, and that before its kernels' names: it may stand beside others in
        one text."""
        return replace(
            self, functions=tuple(replace(each, space=space) for each in self.functions),
            entries=tuple(replace(each, name=f"{space}_{each.name}", calls=tuple(
                replace(call, function=_within(space, call.function)) for call in each.calls))
                for each in self.entries))


@dataclass(frozen=True)
class Given:
    """A text that came with a rule; nothing is known of what is in it."""

    text: str


@dataclass
class Signature:
    """The parameters of a region's functions: pointers, then the sizes that the text uses, then ``more``."""

    lowered: Lowered
    more: tuple[Parameter, ...] = ()

    @property
    def sizes(self) -> dict[str, str]:
        """Text of each size symbol: the name of its parameter, which is its name in the plan too."""
        return dict(self.lowered.binding.symbols)

    def parameters(self, used: Iterable[str]) -> tuple[Parameter, ...]:
        """The parameters of what uses these sizes, the sizes in the plan's order."""
        program, wanted = self.lowered.program, frozenset(used)
        inputs = (Parameter(f"const {TYPES[tensor.dtype].storage}* __restrict__", f"i{place}", f"i{place}")
                  for place, tensor in enumerate(program.inputs))
        outputs = (Parameter(f"{TYPES[tensor.dtype].storage}* __restrict__", f"o{place}", f"o{place}")
                   for place, tensor in enumerate(program.outputs))
        sizes = (Parameter("const {index}", name, f"i{{bits}}:{name}")
                 for name in dict.fromkeys(self.sizes.values()) if name in wanted)
        return (*inputs, *outputs, *sizes, *self.more)
