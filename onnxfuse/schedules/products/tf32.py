"""The text of products of float32 whose warps have roles.

Copies by tensor maps round elements to TF32 on their way to shared memory, so that the instruction of four warps, which
cuts off what TF32 does not hold, multiplies what is rounded to the nearest.  It takes operands whose neighbours are
those that are summed over alone.
"""

from __future__ import annotations

from onnxfuse.schedules.attentions.together import tile_instruction
from onnxfuse.schedules.products.boxes import BoxText
from onnxfuse.schedules.products.specialised import SpecialisedText


class RoundedSpecialisedText(SpecialisedText):
    """Writes the body of a kernel of float32 operands of which one warp copies."""

    def _instruction(self, element: str) -> list[str]:
        return tile_instruction(self.shape.columns, "tf32.tf32", ", 1, 1", size=4)

    def _multiplies(self) -> str:
        return "multiply_tiles_tf32<Tensor, columns, depth>"


class RoundedBoxText(BoxText, RoundedSpecialisedText):
    """The same over windows that are copied in boxes."""
