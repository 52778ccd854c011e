"""What is known of an operator, in one record: ``define`` enters it, one file a family.

A record is whole or the package does not import: no part of it has a default, and parts that go together are there
together.  An operator without a record is opaque: nothing is fused with it, and its types are onnx's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, IntEnum

from onnxfuse.graph.context import TypeFunction
from onnxfuse.graph.model import Node
from onnxfuse.graph.order import MICROSOFT
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext
from onnxfuse.ir.tensors import Tensor
from onnxfuse.operators.arithmetic import Arithmetic, uncounted

CANONICAL = "onnxfuse.canonical"
"""Domain of operators that only the canonical view has."""

Lowering = Callable[[Node, LoweringContext], "Tensor | list[Tensor | None]"]
"""The outputs of a node as tensors; None for an output that it cannot give (nobody may ask for it)."""


class OperatorClass(IntEnum):
    """From what fuses with anything to what fuses with nothing."""

    POINTWISE = 0
    """Each result element comes from the element at the same place of every operand."""
    BROADCAST = 1
    """The same, with an operand spread along axes that it lacks."""
    VIEW = 2
    """Each result element is one element of one operand, at a place that sizes or indices tell, or a constant."""
    REDUCTION = 3
    """Each result element comes from a row, a channel or all of an operand: sums, norms, softmax."""
    SCAN = 4
    """Each result element comes from those before it along an axis: running totals."""
    POOLING = 5
    """Each result element comes from a window of an operand: its maximum or its mean."""
    HEAVY = 6
    """Matrix products, convolutions, attention and recurrent layers: arithmetic, not bytes, is what they cost."""
    SHAPE = 7
    """Reads its operand's sizes and none of its elements."""
    OPAQUE = 8
    """Everything else."""


POINTWISE, VIEW, REDUCTION, SCAN, POOLING, HEAVY, SHAPE, OPAQUE = (
    OperatorClass.POINTWISE, OperatorClass.VIEW, OperatorClass.REDUCTION, OperatorClass.SCAN, OperatorClass.POOLING,
    OperatorClass.HEAVY, OperatorClass.SHAPE, OperatorClass.OPAQUE)


class RuntimeKernel(Enum):
    """What kernel ONNX Runtime has for an operator: ``provider.kernels`` says how good each is, and what the runtime
    folds into a convolution's or a product's."""

    PLAIN = "plain"
    """One like any other."""
    ADDITION = "addition"
    """Of operands: a bias, where it is folded."""
    AFFINE = "affine"
    """A factor and a summand for each channel: a bias too, where it is folded."""
    FACTOR = "factor"
    """Products and quotients: weights take them in."""
    BORDER = "border"
    """Elements around a tensor: a convolution takes them in."""
    TRANSPOSE = "transpose"
    CURVE = "curve"
    """Sigmoid, tanh and their like."""
    GELU = "gelu"
    """A curve that the runtime's own GELU holds."""
    SOFTMAX = "softmax"
    NORM = "norm"
    REDUCTION = "reduction"
    """cuDNN's, of rows that lie anyhow."""
    SUM = "sum"
    """Of rows that lie together in a kernel of its own, else cuDNN's."""
    MEAN = "mean"
    """A sum, which another kernel divides."""
    TOTALS = "totals"
    """Running totals, each added up from the beginning."""
    SCATTER = "scatter"
    """Over its first operand, where nobody else needs that."""
    CONVOLUTION = "convolution"
    """cuDNN's; its bias is added by a kernel that reads the result again."""
    PRODUCT = "product"
    """cuBLAS's."""
    GEMM = "gemm"
    """The same, of two axes, with a bias of its own."""


PLAIN = RuntimeKernel.PLAIN


@dataclass(frozen=True)
class Operator:
    """An operator of a domain.

    Attributes:
        kind: how freely it fuses; an elementwise one is POINTWISE here, whatever its operands' sizes.
        types: element types, sizes and contents of its outputs from its inputs; onnx's own inference where None.
        lowering: what it means as tensors of the region IR; None where nobody has said so, and no kernel holds it.
        arithmetic: floating-point operations of a node.
        host: operands that ONNX Runtime's CUDA kernels read in host memory.
        runtime: the kernel that ONNX Runtime has for it.
        random: whether it draws random numbers; only what no kernel holds may.
        activation: whether it is what rules call an activation: a curve that networks put behind a layer.
    """

    name: str
    domain: str
    kind: OperatorClass
    types: TypeFunction | None
    lowering: Lowering | None
    arithmetic: Arithmetic
    host: frozenset[int]
    runtime: RuntimeKernel
    random: bool
    activation: bool


__all__ = [
    "CANONICAL", "HEAVY", "MICROSOFT", "OPAQUE", "OPERATORS", "PLAIN", "POINTWISE", "POOLING", "REDUCTION", "SCAN",
    "SHAPE", "VIEW", "Lowering", "Operator", "OperatorClass", "RuntimeKernel", "define", "flops_of", "is_contraction",
    "lowered", "lowering_of", "opaque", "operator_of",
]

OPERATORS: dict[tuple[str, str], Operator] = {}
"""Every record by domain and name."""


def define(
    *names: str, domain: str = "", kind: OperatorClass, types: TypeFunction | None, lowering: Lowering | None,
    arithmetic: Arithmetic, host: Collection[int], runtime: RuntimeKernel, activation: bool | None = None,
    random: bool | None = None,
) -> None:
    """Enter operators that are alike in everything but their names.

    Args:
        names: of the operators.
        domain: of all of them.
        kind, types, lowering, arithmetic, host, runtime: parts of the record; None where it has none of the first two.
        activation: said of pointwise operators, the only ones that may be one.
        random: said of opaque operators, in the same way.

    Raises:
        ValueError: an operator has a record already, or the record lacks a part that its kind needs.
    """
    for name in names:
        if (domain, name) in OPERATORS:
            raise ValueError(f"two records of {name} of domain '{domain}'")
        if (activation is None) is (kind is POINTWISE):
            raise ValueError(f"{name} must say whether it is an activation if it is pointwise, and only then")
        if (random is None) is (kind is OPAQUE):
            raise ValueError(f"{name} must say whether it is random if it is opaque, and only then")
        if lowering is not None and types is None and domain != CANONICAL:
            raise ValueError(f"{name} has a lowering and no types")
        if lowering is not None and kind is OPAQUE:
            raise ValueError(f"{name} has a lowering and is opaque")
        if lowering is not None and arithmetic is uncounted:
            raise ValueError(f"{name} has a lowering and no arithmetic")
        OPERATORS[domain, name] = Operator(
            name, domain, kind, types, lowering, arithmetic, frozenset(host), runtime, bool(random), bool(activation))


def opaque(
    *names: str, domain: str = "", types: TypeFunction | None, host: Collection[int], random: bool,
) -> None:
    """Enter operators of which nobody has said how they compute: nothing is fused with them, no kernel holds them,
    their operations are not counted, and ONNX Runtime's kernel is taken for one like any other.

    Raises:
        ValueError: an operator has a record already.
    """
    define(*names, domain=domain, kind=OPAQUE, types=types, lowering=None, arithmetic=uncounted, host=host,
           runtime=PLAIN, random=random)


def lowered() -> frozenset[tuple[str, str]]:
    """Domains and names of the operators that kernels hold: those with a meaning as tensors, but for contractions."""
    return frozenset(
        key for key, record in OPERATORS.items() if record.lowering is not None and record.kind is not HEAVY)


def operator_of(node: Node) -> Operator | None:
    """The record of a node's operator; None where there is none."""
    return OPERATORS.get((node.domain, node.op))


def lowering_of(node: Node) -> Lowering | None:
    """The lowering of a node's operator, or None: it has none, or the node breaks the operator's rules (by a graph that
    no such operator has, for one)."""
    if any(original.broken or original.has_subgraph for original in (node, *node.originals)):
        return None
    found = operator_of(node)
    return None if found is None else found.lowering


def is_contraction(node: Node) -> bool:
    """Whether a node has a meaning as tensors that is a contraction, which only some schedules hold."""
    found = operator_of(node)
    return found is not None and found.kind is HEAVY and lowering_of(node) is not None


def flops_of(node: Node, sizes: Sizes) -> int | None:
    """Floating-point operations of one run of the node; None where they are not counted, or a size is unknown.

    A node of the canonical view counts what its original nodes count.
    """
    if node.originals != (node,):
        counts = [flops_of(original, sizes) for original in node.originals]
        return None if None in counts else sum(count for count in counts if count is not None)
    found = operator_of(node)
    return None if found is None else found.arithmetic(node, sizes)
