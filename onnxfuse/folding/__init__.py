"""The second stage: arithmetic on sizes that constants can stand for, or that is done more than once.

    graph ─ fold ─▶ Folding: constants for operands, values shared by equal chains, nodes that nothing reads any more
"""

from onnxfuse.folding.decide import STAGE, Folding, decide
from onnxfuse.folding.operands import Constant, constant_operand

__all__ = ["STAGE", "Constant", "Folding", "constant_operand", "decide"]
