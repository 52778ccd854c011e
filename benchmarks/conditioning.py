"""How far a model's outputs move by rounding alone: what an error beside ONNX Runtime's outputs is to be held against.

    python benchmarks/conditioning.py [--rows NAME,...] [--networks benchmarks/convolutions] [--batch 2]

On the CPU, one row after the other: a float32 model whose products and convolutions round their operands to TF32, as
ONNX Runtime's CUDA provider does, beside the same with nothing rounded; a 16-bit one each of whose results is rounded,
as on a GPU, beside what the CPU provider computes, which keeps float32 between most nodes.  Told is the largest
difference of an output as a share of its largest number, as `zoo.py` tells errors: two ways to run a model that round
at other places may differ by as much and by some more, whichever of them is nearer.  Weights that are drawn, not
trained, may make much of a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import onnx
import onnxruntime
from common import RESULTS, environment, hydrate, networks_option, table, write_results
from numpy.typing import NDArray
from onnx import TensorProto, helper
from processes import apart
from zoo_rows import Row, choose

from onnxfuse.measuring.compare import compare
from onnxfuse.rewriting import value_types
from onnxfuse.verifying.evaluate import CPU, exact_options
from onnxfuse.verifying.reference import rounded_model
from onnxfuse.verifying.rounded_products import is_product, with_rounded_products


@dataclass(frozen=True)
class Conditioning:
    """A row: what is rounded in it, and the largest error of an output that comes of it."""

    row: str
    rounded: str
    error: float


def outputs(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]],
            options: onnxruntime.SessionOptions | None = None) -> dict[str, NDArray[Any]]:
    """What ONNX Runtime's CPU provider gives, by name."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=CPU)
    names = [info.name for info in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def with_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with nodes in the place of initializers, as bodies of fused nodes have them."""
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.graph.ClearField("initializer")
    result.graph.ClearField("node")
    result.graph.node.extend([*nodes, *model.graph.node])
    return result


def rounding(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> tuple[str, float]:
    """What is rounded in a model, and the largest error of an output that comes of it."""
    types = value_types(model)
    if any(kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for kind in types.values()):
        what, rounded = "results, to 16 bits", rounded_model(with_constants(model), types)
    else:
        products = [node for node in model.graph.node if is_product(node)]
        what, rounded = "operands of products, to TF32", with_rounded_products(model, products, types)
    errors = compare(outputs(model, feeds), outputs(rounded, feeds, exact_options()))
    return what, max((each.error for each in errors), default=0.0)


def measure(row: Row, batch: int) -> Conditioning:
    """One row, of so many of what it has along its first axis at most."""
    feeds = hydrate().feeds({"inputs": row.inputs}, (min(batch, row.sizes[0]), *row.sizes[1:]))
    return Conditioning(row.name, *rounding(row.hydrated(), feeds))


@click.command(help=__doc__.split("\n")[0])
@click.option("--rows", "names", metavar="NAME,...", help="Rows whose names begin so; all by default.")
@networks_option
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Of the first axis, at most.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=False,
              help="Folder for the results; benchmarks/results by default.")
def main(names: str | None, networks: Path, batch: int, out: Path) -> None:
    """Round in each row, and write what comes of it."""
    found = []
    for row in choose(names, networks):
        found.append(measure(row, batch))
        click.echo(f"  {row.name}: {found[-1].error:.1e}", err=True)
    text = table(["row", "rounded", "error"], [[each.row, each.rounded, f"{each.error:.1e}"] for each in found])
    click.echo(text)
    path = write_results(out, "conditioning", apart(environment), {"rows": [asdict(each) for each in found]}, text)
    click.echo(f"written: {path} and .json", err=True)


if __name__ == "__main__":
    main()
