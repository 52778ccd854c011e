"""From a region of the graph to a program of the region IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnx import TensorProto

from onnxfuse.graph.dims import Dim, symbol
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.ir.context import LoweringContext, Unlowerable, declare
from onnxfuse.ir.tensors import Contract, Input, Pool, Program, Size, Slice, Tensor, Window, operands, postorder
from onnxfuse.lowering.binding import Binding, bind, in_graph_terms, renamed
from onnxfuse.lowering.structure import Structure
from onnxfuse.operators import lowering_of
from onnxfuse.refusal import Refusal

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""Types that scalars are float32 for."""

DEEPEST = 200
"""Operations that may follow one on another in a region: schedules follow such chains by recursion."""


@dataclass(frozen=True)
class Lowered:
    """A region as tensors, and where its operands come from.

    Attributes:
        program: the tensors.
        tensors: values that the kernel reads, in the order of ``program.inputs``.
        sized: values whose contents only decide sizes.
        inlined: constants that became numbers of the kernel's text.
        binding: how the sizes' symbols are had from the inputs at run time.
    """

    program: Program
    tensors: tuple[Value, ...]
    sized: tuple[Value, ...]
    inlined: tuple[Value, ...]
    binding: Binding

    @cached_property
    def structure(self) -> Structure:
        """What it is apart from where it stands."""
        return Structure(self.program, self.binding)

    @cached_property
    def exact(self) -> bool:
        """Whether products of it are of float32 that is not to be rounded to TF32."""
        return any(isinstance(each, Contract) and each.exact for each in self.program.tensors)

    def elsewhere(self, places: Mapping[Value, Value]) -> Lowered:
        """What a region that is alike is, by the values that stand there for those here."""
        tensors, sized, inlined = (tuple(places.get(value, value) for value in values)
                                   for values in (self.tensors, self.sized, self.inlined))
        found = replace(self, tensors=tensors, sized=sized, inlined=inlined)
        object.__setattr__(found, "structure", self.structure)  # the same, and told once
        return found


def lower(
    nodes: Sequence[Node], outputs: Sequence[Value], graph: Graph, first: Sequence[Value] = (),
) -> Lowered | Refusal:
    """Lower a region.

    Args:
        nodes: nodes of the region (canonical ones count as one), in graph order.
        outputs: the values that are used outside.
        graph: the graph they belong to.
        first: those that come first among what the kernel reads, which it must read; others follow as nodes read them.
    """
    names: dict[str, Dim] = {}
    try:
        assumed = _assumed(graph)
        context = _lower(nodes, first, graph, lambda size: assumed.get(size, size))
        binding = _bind(context)
        rename, stand_ins = _renaming(binding.stand_ins, assumed), binding.stand_ins
        if stand_ins:
            names = {name: size for size, name in stand_ins.items()}
            context = _lower(nodes, first, graph, rename)
            binding = _bind(context)
        _check_sizes(context, outputs, binding)
        binding = renamed(binding, stand_ins)
        names = binding.names
        canonical = {name: symbol(f"@{atom}") for name, atom in binding.symbols.items()}
        context = _lower(nodes, first, graph, lambda size: rename(size).substitute(canonical))
        context.node = None
        made = tuple(context.tensors[value] for value in outputs)
        inputs = tuple(tensor for value in context.inputs if isinstance(tensor := context.tensors[value], Input))
        if not inputs:
            raise context.refuse("no-inputs", "the region reads no tensor")
    except Unlowerable as stopped:
        return in_graph_terms(stopped.refusal, names)
    operators = tuple(dict.fromkeys(node.qualified_op for node in nodes))
    program = Program(inputs, made, operators)
    return Lowered(program, tuple(context.inputs), tuple(context.sized), tuple(context.inlined), binding)


def _check_sizes(context: LoweringContext, outputs: Sequence[Value], binding: Binding) -> None:
    """Raise a refusal where a size is not known when the kernel runs, or the region is too deep to be written."""
    context.node = None
    names = {id(tensor): value.name for value, tensor in context.tensors.items()}
    depths: dict[int, int] = {}
    for tensor in postorder(tuple(context.tensors[value] for value in outputs)):
        depths[id(tensor)] = 1 + max((depths[id(operand)] for operand in operands(tensor)), default=0)
        if depths[id(tensor)] > DEEPEST:
            raise context.refuse(
                "region-depth", f"the region has a chain of more than {DEEPEST} operations; kernels hold no longer ones"
            )
        sizes = tensor.shape
        if isinstance(tensor, Size):
            sizes += (tensor.size,)
        elif isinstance(tensor, Slice | Window | Pool):
            sizes += tensor.starts
        elif isinstance(tensor, Contract):
            sizes += tensor.summed
        for size in sizes:
            if not size.symbols <= binding.symbols.keys():
                owner = f" of '{names[id(tensor)]}'" if id(tensor) in names else ""
                raise context.refuse(
                    "unbound-size", f"the size {size}{owner} cannot be computed from the region's inputs"
                )


def _bind(context: LoweringContext) -> Binding:
    contents = [[context.rename(size) for size in value.elements or ()] for value in hosts(context.sized)]
    return bind([context.tensors[value] for value in context.inputs], contents)


def hosts(sized: Sequence[Value]) -> list[Value]:
    """Those of the values which decide sizes that are known only when the model runs: the node's host operands."""
    return [value for value in sized if value.constant is None]


def _assumed(graph: Graph) -> dict[Dim, Dim]:
    """What stands for a size that was assumed to agree with another; the binding's checks make sure of it."""
    assumed: dict[Dim, Dim] = {}
    for assumption in graph.assumptions:
        for monomial in assumption.instead.terms:
            for atom, _ in monomial:
                if atom.kind == "bcast":
                    assumed |= {size: assumption.taken for size in atom.operands if size != assumption.taken}
    return assumed


def _renaming(stand_ins: dict[Dim, str], assumed: dict[Dim, Dim]) -> Callable[[Dim], Dim]:
    def rename(size: Dim) -> Dim:
        size = assumed.get(size, size)
        for whole, name in stand_ins.items():
            size = size.replace(whole, symbol(name))
        return size

    return rename


def _lower(
    nodes: Sequence[Node], first: Sequence[Value], graph: Graph, rename: Callable[[Dim], Dim]
) -> LoweringContext:
    context = LoweringContext(graph.opset, rename)
    for read in first:
        context.tensor(read)
    for node in nodes:
        context.node = node
        lowering = lowering_of(node)
        if lowering is None:
            raise context.refuse("no-lowering", f"{node.qualified_op} has no lowering")
        try:
            results = lowering(node, context)
        except (IndexError, ValueError, TypeError, KeyError, ZeroDivisionError, ArithmeticError) as error:
            # An axis that is not there, or sizes that do not fit: ONNX Runtime will say so when the model runs.
            raise context.refuse("broken-node", f"{node.qualified_op} breaks its operator's rules: {error}") from error
        tensors: list[Tensor | None] = results if isinstance(results, list) else [results]
        for place, value in enumerate(node.outputs):
            if value is None:
                continue
            tensor = tensors[place] if place < len(tensors) else None
            if tensor is None:
                raise context.refuse("no-lowering", f"output {place} of {node.qualified_op} has no lowering")
            if value.dtype is not None and value.dtype != tensor.dtype:
                # A canonical node stands for nodes with casts between them, which its operator does not know of.
                if node.rule is None or not FLOATS.issuperset((value.dtype, tensor.dtype)):
                    raise context.refuse("unsupported-type", f"'{value.name}' would change its type")
                tensor = declare(tensor, value.dtype)
            context.tensors[value] = tensor
    return context
