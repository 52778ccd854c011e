"""Products of float32 whose operands are not to be rounded: a session's own keep them where ``use_tf32`` is 0."""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.ir.scalars import FLOAT
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Contract, Program


def exactly(program: Program) -> Program:
    """The same with its products of float32 as exact ones."""
    outputs = program.outputs
    while (found := next((each for each in Program(program.inputs, outputs, program.operators).tensors
                          if isinstance(each, Contract) and not each.exact and _is_float32(each)), None)) is not None:
        outputs = substituted(outputs, {found: replace(found, exact=True)})
    return program if outputs is program.outputs else replace(program, outputs=outputs)


def _is_float32(contract: Contract) -> bool:
    """Whether operands are float32."""
    return all(operand.dtype == FLOAT for operand in contract.operands)
