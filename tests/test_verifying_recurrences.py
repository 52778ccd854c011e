"""References of recurrent layers: in float64 what the standard says, step by step, also of what is no number."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from kernel_harness import parse
from reference_recurrent import layer

from onnxfuse.verifying.evaluate import Evaluator

GATES = {"LSTM": 4, "GRU": 3}


def model(op: str, direction: str, attributes: str, given: str, wanted: str) -> onnx.ModelProto:
    count, rows = 1 + (direction == "bidirectional"), GATES[op] * 5
    inputs = f"double[S,B,3] x, double[{count},{rows},3] w, double[{count},{rows},5] r"
    more = {"b": f"double[{count},{2 * rows}] b", "h": f"double[{count},B,5] h", "c": f"double[{count},B,5] c"}
    names = [name if name in given else "" for name in ("b", "", "h", *("c" * (op == "LSTM")))]
    results = {"y": f"double[S,{count},B,5] y", "u": f"double[{count},B,5] u", "v": f"double[{count},B,5] v"}
    written = [name for name in results if name in wanted and (name != "v" or op == "LSTM")]
    put = ", ".join(name if name in written else "_" for name in results if name != "v" or op == "LSTM")
    return parse(
        f"g ({', '.join([inputs, *(more[name] for name in names if name)])}) => "
        f"({', '.join(results[name] for name in written)}) {{ {put} = "
        f'{op}<hidden_size = 5, direction = "{direction}"{attributes}>(x, w, r, {", ".join(names)}) }}')


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "attributes"), [("LSTM", ""), ("GRU", ", linear_before_reset = 1"), ("GRU", "")])
@pytest.mark.parametrize(("given", "wanted"), [("bhc", "yuv"), ("", "y"), ("b", "u"), ("hc", "v")])
def test_spelled_layers(op: str, attributes: str, direction: str, given: str, wanted: str) -> None:
    wanted = "u" if op == "GRU" and wanted == "v" else wanted
    made = model(op, direction, attributes, given, wanted)
    rng = np.random.default_rng(2)
    sizes = {"S": 4, "B": 3}
    shapes = {info.name: [size.dim_value or sizes[size.dim_param] for size in info.type.tensor_type.shape.dim]
              for info in made.graph.input}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    feeds["x"][1, 1, 0] = np.nan
    with np.errstate(all="ignore"):
        expected = layer(op)({"direction": direction.encode(), "linear_before_reset": int(bool(attributes))}, 20,
                             feeds["x"], feeds["w"], feeds["r"], feeds.get("b"), None, feeds.get("h"), feeds.get("c"))
    evaluator = Evaluator(made)
    assert evaluator.downgraded == ()
    for name, found in zip([info.name for info in made.graph.output], evaluator.run(feeds), strict=True):
        np.testing.assert_allclose(found, expected["yuv".index(name)], rtol=1e-12, atol=1e-14)
