"""What launch plans of version 2 ask for, on a real GPU: clusters, dependent launches, tensor maps, library calls.

    python tests/gpu/check_launches.py [--only NAME ...]

Needs what check_runtime.py needs, a GPU from sm_90 on, and cuBLASLt.  Prints a table and exits with 1 where a check
failed.  ``--rehearse FOLDER`` runs what can be run without a GPU over the stand-ins of tests/native that lie there,
``fake_cuda.so`` and ``fake_cublaslt.so``.  Sums are compared bit for bit; products with NumPy's of the same rounded
operands in float64, by the error of the output's scale.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from building import ROOT, build

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
build()

import fused_models as make  # noqa: E402
import launch_models as launches  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from runtime_sessions import REHEARSAL, Bound, begin, expect, failed, plus, session, with_images  # noqa: E402

TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}
"""Of the output's largest element: two units in the last place of it, and the order of sums."""

NODES = 50


def chained(fused: make.Fused, adds: int, count: int = 3) -> None:
    """A chain of nodes that add is right at all sizes, from one session."""
    made = session(make.chain(with_images(fused), count))
    random = np.random.default_rng(0)
    for size in (0, 1, 32, 127, 256, 300, 4096, 100_003, 1 << 22, 300):
        x = random.standard_normal(size, np.float32)
        expect(np.array_equal(made.run(None, {"x": x})[0], plus(x, adds * count)), "size", size)


def captured(fused: make.Fused, adds: int, count: int = 5) -> None:
    """A chain in a captured CUDA graph is right at every replay."""
    if REHEARSAL:
        return
    x = np.arange(1024, dtype=np.float32)
    bound = Bound(session(make.chain(fused, count, size=1024), enable_cuda_graph="1"), x)
    for factor in range(1, 20):
        expect(np.array_equal(bound.result(x * factor), plus(x * factor, adds * count)), "wrong at replay", factor)


def per_node(fused: make.Fused) -> float:
    """Microseconds that a node of a chain costs, wall time: a chain against one node of it, medians."""
    x = np.arange(1024, dtype=np.float32)
    long, short = (Bound(session(make.chain(with_images(fused), count)), x) for count in (NODES, 1))
    for _ in range(20):
        long.run()
        short.run()
    return (long.microseconds(50) - short.microseconds(50)) / (NODES - 1)


def clusters() -> str:
    """Kernels run in clusters of two blocks, as they see themselves; one waits for the one before it."""
    chained(launches.clustered(), 1)
    chained(launches.through_scratch(), 2)
    return "two blocks a cluster, right"


def clusters_captured() -> str:
    """The same in a captured CUDA graph."""
    captured(launches.clustered(), 1)
    captured(launches.through_scratch(), 2)
    return "not in a rehearsal" if REHEARSAL else "19 replays right"


def dependent_launches() -> str:
    """What a dependent launch saves between short kernels; a result, not a bar."""
    dependent = launches.clustered(guarded=False)
    (variant,) = dependent.plan.variants
    (step,) = variant.launches
    times = {}
    for name, changed in (("plain", replace(step, cluster=None, dependent=False)),
                          ("clusters", replace(step, dependent=False)), ("clusters, dependent", step)):
        plan = replace(dependent.plan, variants=(replace(variant, steps=(changed,)),))
        source = make.ADD_ONE if changed.cluster is None else dependent.source
        times[name] = per_node(replace(dependent, plan=plan, source=source))
    return ", ".join(f"{name} {took:.2f} us a node" for name, took in times.items())


def tensor_maps() -> str:
    """Tiles and vectors by the tensor memory accelerator, at sizes that leave tiles partly empty."""
    chained(launches.tiled(), 1)
    return "rank 1 and 2, right"


def tensor_maps_captured() -> str:
    """The same in a captured CUDA graph."""
    captured(launches.tiled(), 1)
    return "not in a rehearsal" if REHEARSAL else "19 replays right"


def tensor_maps_cost() -> str:
    """What two maps a node cost where they are built already, against two addresses; a result, not a bar."""
    return f"{per_node(launches.tiled()):.2f} us a node; plain {per_node(make.add_one()):.2f}"


def scratch() -> str:
    """Buffers that share memory are right."""
    chained(launches.add_four(), 4)
    captured(launches.add_four(), 4)
    return "four launches through three buffers in two, right"


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The values as the type holds them, in float64."""
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    return x.astype(kind).astype(np.float64)


def product_error(product: launches.Product, fused: make.Fused, more: float) -> float:
    """The largest error of a few sizes, by the output's scale; ``more`` is added to ``a`` before."""
    made = session(product.model(fused))
    random = np.random.default_rng(0)
    worst = 0.0
    sizes = [(1, 5, 7, 3), (3, 17, 33, 65), (2, 16, 24, 8), (1, 5, 7, 3)]
    sizes += [] if REHEARSAL else [(4, 512, 768, 1024), (1, 4096, 4096, 4096), (64, 128, 128, 64), (1, 1, 4096, 4096)]
    for batch, m, n, k in sizes:
        x = random.standard_normal((batch, k, m) if product.transpose_a else (batch, m, k), np.float32)
        inner = (n, k) if product.transpose_b else (k, n)
        w = random.standard_normal(inner if product.one_b else (batch, *inner), np.float32)
        (got,) = made.run(None, {"x": x, "w": w})
        a, b = rounded(x, product.dtype) + more, rounded(w, product.dtype)
        wanted = (a.swapaxes(1, 2) if product.transpose_a else a) @ (b.swapaxes(-1, -2) if product.transpose_b else b)
        error = float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))
        expect(error <= TOLERANCES[product.dtype], product, (batch, m, n, k), "error", error)
        worst = max(worst, error)
    return worst


def products() -> str:
    """Products of each type, stored either way, of one and of a batch, with a workspace and without."""
    plain = [each for each in launches.PRODUCTS.values()
             if each.dtype in TOLERANCES and not (each.bias or each.added or each.activation or each.fallback)]
    found = [product_error(product, product.fused(), 0.0) for product in plain]
    product = launches.Product(workspace=1 << 25)
    found.append(product_error(product, with_images(product.of_sum()), 1.0))
    return f"error at most {max(found):.1e} of the output's scale"


def products_captured() -> str:
    """A product in a captured CUDA graph."""
    if REHEARSAL:
        return "not in a rehearsal"
    product = launches.Product(workspace=1 << 25)
    made = session(product.model(product.fused()), enable_cuda_graph="1")
    random = np.random.default_rng(0)
    fed = {"x": random.standard_normal((2, 64, 96), np.float32), "w": random.standard_normal((2, 96, 32), np.float32)}
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in fed.items()}
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 64, 32), np.float32), "cuda", 0)
    binding = made.io_binding()
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("z", out)
    for factor in range(1, 10):
        held["x"].update_inplace(fed["x"] * factor)
        made.run_with_iobinding(binding)
        wanted = (fed["x"].astype(np.float64) * factor) @ fed["w"].astype(np.float64)
        error = float(np.max(np.abs(out.numpy() - wanted)) / np.max(np.abs(wanted)))
        expect(error <= TOLERANCES["float32"], "wrong at replay", factor, error)
    return "9 replays right"


def recorded_products() -> str:
    """Statistics count a product, and time it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.json"
        os.environ["ONNXFUSE_STATISTICS"] = str(path)
        try:
            product = launches.Product()
            made = session(product.model(product.fused()))
        finally:
            del os.environ["ONNXFUSE_STATISTICS"]
        size = 8 if REHEARSAL else 2048
        fed = {"x": np.ones((1, size, size), np.float32), "w": np.ones((1, size, size), np.float32)}
        for _ in range(10):
            made.run(None, fed)
        del made
        (node,) = json.loads(path.read_text())["nodes"]
        (run,) = node["runs"]
        expect(run["calls"] == 10 and run["timed"] == 10, run)
        # 2048^3 products in float32 take 0.3 ms at the rate of an H200's cores, and no less than 0.01 ms.
        expect(REHEARSAL or run["median_ns"] > 10_000, run)
        return f"10 calls counted and timed, {run['median_ns'] / 1e3:.0f} us each"


CHECKS: list[Callable[[], str]] = [
    clusters, clusters_captured, dependent_launches, tensor_maps, tensor_maps_captured, tensor_maps_cost, scratch,
    products, products_captured, recorded_products,
]


def main() -> int:
    """Run the checks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="names of the checks to run")
    parser.add_argument("--rehearse", metavar="FOLDER", type=Path, help="where the stand-ins are, built")
    arguments = parser.parse_args()
    begin(arguments.rehearse)
    wanted = [check for check in CHECKS if not arguments.only or check.__name__ in arguments.only]
    return 1 if sum(map(failed, wanted)) else 0


if __name__ == "__main__":
    sys.exit(main())
