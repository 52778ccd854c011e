"""The second stage: arithmetic on sizes that constants can stand for, or that is done more than once, and what hangs on
it: Ifs that sizes decide.

    graph ─ fold ─▶ Folding: constants for operands, values shared by equal chains, nodes that nothing reads any more
"""

from onnxfuse.folding.branches import Taken, decided
from onnxfuse.folding.decide import STAGE, Folding, decide
from onnxfuse.folding.operands import Constant, constant_operand

__all__ = ["STAGE", "Constant", "Folding", "Taken", "constant_operand", "decide", "decided"]
