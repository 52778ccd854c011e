"""Sizes at run time: which input's axis gives each symbol its value, and what must agree.

Kernels and launch plans speak of symbols.  A symbol is bound by the first axis of a tensor input that is that symbol
alone, or that is linear in it (``s + 1``, ``64*s``); failing that by an operand in host memory that holds it, such as
the target shape of a Reshape.  A size whose symbols cannot be had (``s33*s50`` where no input
has an axis ``s33``) gets a stand-in symbol, bound by the axis or the operand itself.  Every other axis becomes a check.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.dims import Dim, symbol
from onnxfuse.ir.tensors import Tensor
from onnxfuse.lowering.launch import Atom, Check, expression
from onnxfuse.refusal import Refusal


@dataclass(frozen=True)
class Binding:
    """``symbols``: plan atom by symbol; ``sources``: the plan's symbol expressions; ``checks``: what must agree;
    ``stand_ins``: new symbol names by size that had to be replaced; ``names``: what symbols that were renamed stand
    for in the graph."""

    symbols: dict[str, str]
    sources: tuple[str, ...]
    checks: tuple[Check, ...]
    stand_ins: dict[Dim, str]
    names: dict[str, Dim] = field(default_factory=dict)

    def planned(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """What the symbols that were renamed are at sizes of the graph's, as far as these are known."""
        found = {name: size.known(sizes) for name, size in self.names.items()}
        return {name: number for name, number in found.items() if number is not None}

    def at(self, size: Dim, sizes: Mapping[str, int]) -> int | None:
        """What a size is at sizes of the graph's, None where these do not tell."""
        return size.substitute(self.names).known(sizes)


def bind(inputs: Sequence[Tensor], hosts: Sequence[Sequence[Dim]] = ()) -> Binding:
    """Bind the symbols of the inputs' shapes, and of the contents of operands in host memory."""
    symbols: dict[str, str] = {}
    sources: list[str] = []

    def define(name: str, source: str) -> None:
        symbols[name] = f"s{len(sources)}"
        sources.append(source)

    axes, told = _atoms("i", [tensor.shape for tensor in inputs]), _atoms("h", hosts)
    binding_atoms: set[Atom] = set()
    for atoms in (axes, told):
        for atom, size in atoms:
            name = _plain(size)
            if name is not None and name not in symbols:
                define(name, atom.token)
                binding_atoms.add(atom)
        for atom, size in atoms:
            missing = size.symbols - symbols.keys()
            if len(missing) == 1:
                (name,) = missing
                scale, rest = _linear(size, name)
                if scale:
                    source = f"{atom.token} {rest} -" if rest else atom.token
                    define(name, source if scale == 1 else f"{source} {scale} //")
    stand_ins: dict[Dim, str] = {}
    checks: list[Check] = []
    for atom, size in axes:
        if atom in binding_atoms:
            continue
        if not size.symbols <= symbols.keys():
            stand_ins.setdefault(size, f"@{len(stand_ins)}")
        else:
            condition = f"{atom.token} {expression(size, symbols)} =="
            checks.append(Check(condition, f"is not {size} as the model states", (atom.place, int(atom.part))))
    for _, size in told:
        if not size.symbols <= symbols.keys():
            stand_ins.setdefault(size, f"@{len(stand_ins)}")
    return Binding(symbols, tuple(sources), tuple(checks), stand_ins)


def _atoms(kind: str, contents: Sequence[Sequence[Dim]]) -> list[tuple[Atom, Dim]]:
    """What each size, an axis or an element, of operands of a kind is called."""
    return [(Atom(kind, place, str(part)), size)
            for place, sizes in enumerate(contents) for part, size in enumerate(sizes)]


def renamed(binding: Binding, stand_ins: dict[Dim, str]) -> Binding:
    """The binding with a further symbol for each of the plan's, called after it: kernels that are written over these
    do not depend on what a model calls its sizes."""
    whole = {name: size for size, name in stand_ins.items()}
    names = {f"@{atom}": whole.get(name, symbol(name)) for name, atom in binding.symbols.items()}
    stands = names | whole
    checks = tuple(replace(check, fault=_spelled(check.fault, stands)) for check in binding.checks)
    symbols = binding.symbols | {name: name[1:] for name in names}
    return replace(binding, symbols=symbols, checks=checks, names=stands)


def in_graph_terms(refusal: Refusal, names: Mapping[str, Dim]) -> Refusal:
    """A refusal that speaks of sizes as the graph does, not by the names that a region gives them."""
    return replace(refusal, message=_spelled(refusal.message, names), remedy=_spelled(refusal.remedy, names))


def _spelled(text: str, names: Mapping[str, Dim]) -> str:
    def size(match: re.Match[str]) -> str:
        found = names.get(match[0])
        if found is None:
            return match[0]
        return str(found) if found.value is not None or _plain(found) else f"({found})"

    return re.sub(r"@s?\d+", size, text)


def _plain(size: Dim) -> str | None:
    """The symbol that a size is, or None where it is more than that."""
    names = size.symbols
    if len(names) != 1:
        return None
    (name,) = names
    return name if size == symbol(name) else None


def _linear(size: Dim, name: str) -> tuple[int, int]:
    """(a, b) where the size is ``a * name + b``; a is 0 where it is not of that form."""
    constant = size.terms.get((), 0)
    scale = (size - constant).divide(symbol(name))
    if scale is None or scale.value is None or scale.value <= 0:
        return 0, 0
    return scale.value, constant
