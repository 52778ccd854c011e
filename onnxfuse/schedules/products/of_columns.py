"""What results of products are made of that is the same for all rows, such as scales and biases."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Constant, Scalar, children
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.packing import step_of
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.text import Sizes, Writer, unrolled


@dataclass(frozen=True)
class OfColumns:
    """Parts of results that are the same for all rows: the text of each, a vector's element where it differs along
    that, and the lines that make them, of a kernel and of a vector of columns; ``single``: those of a kernel."""

    texts: dict[Scalar, str]
    once: list[str]
    lines: list[str]
    single: frozenset[Scalar]

    @classmethod
    def of(cls, parts: ProductParts, lanes: Lanes, sizes: Sizes) -> OfColumns:
        """Those of a region's results, for lanes along the columns."""
        writer, down = Writer(lanes, sizes, prefix="of_column_"), parts.lanes("@m", 1)
        texts, arrays = dict[Scalar, str](), list[tuple[str, str, str]]()

        def find(scalar: Scalar) -> None:
            if down.moves(scalar):
                for child in children(scalar):
                    find(child)
            elif scalar not in texts and not isinstance(scalar, Constant):
                texts[scalar] = text = writer.scalar(scalar)
                if writer.scope(scalar) is Scope.LANE:
                    arrays.append((TYPES[scalar.dtype].compute, f"known{len(arrays)}", text))
                    texts[scalar] = f"{arrays[-1][1]}[v]"

        for scalar in (*parts.results, *(zero for pair in parts.zeros for zero in pair if zero is not None)):
            find(scalar)
        filled = unrolled("int v = 0; v < width; ++v", [
            *writer.lines[Scope.LANE], *(f"{name}[v] = {text};" for _, name, text in arrays)])
        return cls(
            texts, [*writer.lines[Scope.KERNEL], *writer.lines[Scope.ROW]],
            [*writer.lines[Scope.VECTOR], *(f"{kind} {name}[width];" for kind, name, _ in arrays),
             *(filled if arrays else [])],
            frozenset(scalar for scalar in texts if writer.scope(scalar) <= Scope.ROW))

    def quantises_all(self, result: Scalar) -> bool:
        """Whether a result is numbers that are all quantised by one step."""
        step = step_of(result)
        return step is not None and all(isinstance(each, Constant) or each in self.single for each in step)
