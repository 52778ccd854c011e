"""Small models in which values are computed again, planned for an H200, of whose products nothing is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
from unmeasured import UNMEASURED

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.memory import peak_memory

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'

LARGE = {"N": 32, "H": 112, "W": 112}


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def fuse(text: str, **options: object) -> Optimised:
    given = {"dims": LARGE, "verify": False, "target": UNMEASURED, "database": False, **options}
    return optimise(model(text), Options(**given))  # type: ignore[arg-type]


def regions(optimised: Optimised) -> list[list[str]]:
    return [[node.op for node in fusion.nodes] for fusion in optimised.plan.fusions]


def again(optimised: Optimised) -> list[list[str]]:
    return [[node.op for node in fusion.again] for fusion in optimised.plan.fusions]


def packed(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(packed(proto), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def feeds(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        info.name: rng.standard_normal(
            [size.dim_value or sizes[size.dim_param] for size in info.type.tensor_type.shape.dim]
        ).astype(onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
        for info in proto.graph.input
    }


def peak(optimised: Optimised) -> int:
    return peak_memory(optimised.ledger, optimised.plan.fusions).peak
