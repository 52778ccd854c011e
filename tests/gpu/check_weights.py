"""Folded weights on a GPU: kernels that read them against the nodes, what they gain, and where the nodes' own lie.

    python tests/gpu/check_weights.py [--dry-run]

Every case of tests/weight_models.py is planned as if its kernel with folded weights were the faster one, and verified
on the GPU in all of its variants.  Then larger ones are measured (``tune``), with their weights as they are and
folded.  Last, of a model that is one product the memory that sessions take is counted: the weights that the fused
node's function alone reads must not lie on the GPU.  Exits with 1 where a node fails, a kernel was not run, or they do.
``--dry-run`` verifies in the emulator, makes times up and counts nothing: a trial without a GPU.  Needs what
check_runtime.py needs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

LARGE: dict[str, tuple[str, dict[str, tuple[int, ...]], int]] = {
    "a layer scale": ("g (T[M,3072] x, T[M,768] r) => (T[M,768] y) { p = MatMul(x, w) a = Add(p, b) q = Mul(a, g) "
                      "y = Add(q, r) }", {"w": (3072, 768), "b": (768,), "g": (768,)}, 1568),
    "queries": ("g (T[8,M,768] x) => (T[8,12,M,64] y) <int64[4] h = {0,0,12,64}> { p = MatMul(x, w) a = Add(p, b) "
                "r = Reshape(a, h) t = Transpose<perm = [0,2,1,3]>(r) y = Mul(t, g) }",
                {"w": (768, 768), "b": (768,), "g": ()}, 128),
    "scale and shift before": ("g (T[M,768] x) => (T[M,3072] y) { a = Mul(x, s) c = Add(a, d) p = MatMul(c, w) "
                               "q = Add(p, b) y = Relu(q) }",
                               {"s": (768,), "d": (768,), "w": (768, 3072), "b": (3072,)}, 1568),
    "a normalisation before": ("g (T[8,192,M,28] x) => (T[8,768,M,28] y) { a = BatchNormalization(x, s, h, m, v) "
                               "c = Conv(a, w, b) y = Relu(c) }",
                               {"s": (192,), "h": (192,), "m": (192,), "v": (192,), "w": (768, 192, 1, 1),
                                "b": (768,)}, 28),
    "two products": ("g (T[M,256] x) => (T[M,256] y) { p = MatMul(x, w) a = Add(p, b) q = MatMul(a, u) y = Add(q, d) }",
                     {"w": (256, 2048), "b": (2048,), "u": (2048, 256), "d": (256,)}, 1568),
}
"""Graph, shapes of its constants, and the size of M."""

PRODUCT = "g (T[M,8192] x) => (T[M,8192] y) { p = MatMul(x, w) y = Mul(p, g) }", {"w": (8192, 8192), "g": (8192,)}
MARGIN = 16 << 20
"""Bytes by which a session's memory may vary; the weights of ``PRODUCT`` take 128 MiB."""


def verified(folder: Path, runner: Any) -> Iterator[str]:
    """What is wrong of kernels that read folded weights."""
    from weight_models import CASES, case, folding, fused

    from onnxfuse.verifying import verify

    for place, name in enumerate(CASES):
        own = folder / str(place)
        own.mkdir()
        made = fused(case(name), own)
        found = verify(made, runner)
        ran = found.kernels_run and all(each.verdict == "passed" for each in found.nodes)
        print(f"{name}: {len(folding(made))} folded, {found.summary}")
        if not (folding(made) and ran and found.whole.passed):
            yield f"{name}: {found.summary}"


def measured(folder: Path, timer: Any) -> None:
    """Print what larger products take with their weights as they are, and folded."""
    from weight_models import model_of

    from onnxfuse.measuring.database import open_database
    from onnxfuse.tuning import TuneOptions, tune

    for name, (text, shapes, size) in LARGE.items():
        print(f"\n{name}")
        with open_database(folder / f"{name.replace(' ', '_')}.sqlite") as kept:
            found = tune(model_of(text, shapes), timer, kept, TuneOptions(dims={"M": size}, fold_weights=True))
        for each in found.regions:
            known = (each.runtime, each.default, each.best)
            times = ["       -" if one is None else f"{one:8.2f}" for one in known]
            print(f"  runtime, default, best {' '.join(times)} µs  {' '.join(each.operators)}  {each.shapes}")
            for fault in each.faults:
                print(f"    {fault}")


def placed(folder: Path) -> Iterator[str]:
    """What is wrong with the memory that a session takes."""
    import onnx
    from weight_models import folding, fused, model_of

    from onnxfuse.measuring import bench
    from onnxfuse.rewriting import save

    model = model_of(*PRODUCT)
    made = fused(model, folder, rows=16)
    onnx.save(model, folder / "model.onnx")
    save(made.model, folder / "fused.onnx", source=made.loaded)
    found = bench(folder / "model.onnx", folder / "fused.onnx", {"M": 16})
    before, after = found.original.peak_bytes, None if found.fused is None else found.fused.peak_bytes
    print(f"\nmemory of a session: {before} bytes, fused {after}; {len(folding(made))} folded")
    if before is None or after is None:
        yield f"memory was not counted: {'; '.join(found.notes)}"
    elif after > before + MARGIN:
        yield f"a session of the fused model takes {after - before} bytes more"


def main() -> int:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="emulator and times that are made up; no GPU is needed")
    dry = parser.parse_args().dry_run
    if not dry:
        from building import build

        build()
    with tempfile.TemporaryDirectory(prefix="onnxfuse-weights-") as name:
        folder = Path(name)
        if dry:
            from emulated import EmulatedRunner
            from weight_models import WeightTimer

            runner, timer = EmulatedRunner(), WeightTimer()
        else:
            from onnxfuse.tuning import find_timer
            from onnxfuse.verifying import find_runner

            runner, timer = find_runner(), find_timer()
        wrong = [*verified(folder, runner)]
        measured(folder, timer)
        wrong += [] if dry else placed(folder)
    for fault in wrong:
        print(f"wrong: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
