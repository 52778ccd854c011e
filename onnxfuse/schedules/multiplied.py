"""What kernels with products have in common: operands of one type, that tensor cores multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Contract
from onnxfuse.schedules.kernel import VECTOR_BYTES


class Multiplied(ABC):
    """Operands of products, all of one type."""

    @property
    @abstractmethod
    def operand(self) -> int:
        """The type."""

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return TYPES[self.operand].size

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // self.size

    @property
    def rounds(self) -> bool:
        """Whether operands are rounded to what tensor cores multiply: float32's, to TF32."""
        return self.operand == FLOAT


def unmultiplied(products: Iterable[Contract]) -> str:
    """The types of products' operands, where kernels do not multiply them; "" where they do."""
    types = {operand.dtype for each in products for operand in each.operands}
    if len(types) == 1 and (types == {FLOAT} or TYPES[next(iter(types))].is_narrow):
        return ""
    return " and ".join(sorted(TYPES[dtype].name for dtype in types))
