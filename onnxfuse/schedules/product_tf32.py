"""The text of products of float32 whose warps have roles.

Copies by tensor maps round elements to TF32 on their way to shared memory, so that the instruction of four warps, which
cuts off what TF32 does not hold, multiplies what is rounded to the nearest.  It takes operands whose neighbours are
those that are summed over alone.
"""

from __future__ import annotations

from onnxfuse.schedules.attention_together import instruction
from onnxfuse.schedules.product_boxes import BoxText
from onnxfuse.schedules.product_specialised import SpecialisedText
from onnxfuse.schedules.text import indented


class RoundedSpecialisedText(SpecialisedText):
    """Writes the body of a kernel of float32 operands of which one warp copies."""

    def _instruction(self, element: str) -> list[str]:
        word = "unsigned long long"
        lines = instruction(
            "by_tile", self.shape.columns, "tf32.tf32", parameters=f"{word} left, {word} right, int more",
            given='"l"(left), "l"(right), "r"(more)', operands="%{0}, %{1}, more, 1, 1", more="%{2}", size=4)
        return ["struct Tensor {", *indented(lines), "};"]

    def _multiplies(self) -> str:
        return "multiply_tiles_tf32<Tensor, rows, columns>"


class RoundedBoxText(BoxText, RoundedSpecialisedText):
    """The same over windows that are copied in boxes."""
