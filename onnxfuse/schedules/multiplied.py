"""What kernels with products have in common: operands of one type, that tensor cores multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.lower import Lowered
from onnxfuse.schedules.kernel import VECTOR_BYTES


class Multiplied(ABC):
    """Operands of products, all of one type; ``lowered``: the region."""

    lowered: Lowered

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
    def exact(self) -> bool:
        """Whether float32 operands must not be rounded to TF32."""
        return self.words and self.lowered.exact

    @property
    def words(self) -> bool:
        """Whether operands are float32, of which tensor cores multiply words as TF32."""
        return self.operand == FLOAT

    @property
    def rounds(self) -> bool:
        """Whether operands are rounded to what tensor cores multiply: float32's, to TF32."""
        return self.words and not self.exact


def unmultiplied(products: Iterable[Contract]) -> str:
    """The types of products' operands, where kernels do not multiply them; "" where they do."""
    types = {operand.dtype for each in products for operand in each.operands}
    if len(types) == 1 and (types == {FLOAT} or TYPES[next(iter(types))].is_narrow):
        return ""
    return " and ".join(sorted(TYPES[dtype].name for dtype in types))
