#!/usr/bin/env python3
"""The C++ program of examples/cpp and Python on a GPU: the same bits from one model with embedded kernels.

    ONNXRUNTIME_ROOT=/path/to/onnxruntime-linux-x64-gpu python tests/gpu/check_deploy.py [--rehearse]

The model is an encoder, in float32 and in float16, at two sizes.  The program's process may load no Python, no CuPy and
no compiler, and its cache of kernels is empty.  Where PTX alone is embedded, which the driver compiles, its answers are
compared within the tolerances of its types: Python compiles for the very GPU.  ``--rehearse`` runs both on the CPU.
Exits with 1 where something is wrong, and with 0 where the program cannot be built, saying why.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import cpp_program  # noqa: E402
import numpy as np  # noqa: E402
from cli_models import encoder  # noqa: E402

import onnxfuse  # noqa: E402
from onnxfuse.runtime import gpus, library_path  # noqa: E402

SIZES = ((4, 32), (3, 77))


ALLOWED = {"float32": 1e-3, "float16": 1e-2}
"""How far an element may be off, as a share of the largest, where two compilers made the kernels."""


def check(program: Path, dtype: str, kernels: bool, ptx: bool, folder: Path) -> list[str]:
    """What is wrong with a type."""
    architecture = "compute_75" if ptx else gpus()[0].architecture if kernels else "sm_90"
    model = folder / f"{dtype}.onnx"
    result = onnxfuse.optimize(encoder(dtype=dtype), dims={"batch": 4, "sequence": 32}, embed=[architecture],
                               database=False)
    result.save(model)
    session = onnxfuse.session(model, None if kernels else ["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    wrong = []
    for shape in SIZES:
        inputs = {"input_ids": random.integers(0, 1000, shape), "attention_mask": random.integers(0, 2, shape)}
        (wanted,) = session.run(None, inputs)
        (found,) = cpp_program.run(program, model, inputs, library_path() if kernels else None).values()
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            wrong.append(f"{shape}: another type or shape")
        elif not (kernels and ptx) and found.tobytes() != wanted.tobytes():
            wrong.append(f"{shape}: the bits differ")
        elif not (error := np.abs(found - wanted).max() / np.abs(wanted).max()) <= ALLOWED[dtype]:
            wrong.append(f"{shape}: off by {error:.1e} of the largest")
    return wrong


def main() -> int:
    """Check both types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    kernels = not parser.parse_args().rehearse
    if lacking := cpp_program.lacking():
        print(f"not run: {lacking}")
        return 0
    failed = 0
    with TemporaryDirectory() as place:
        os.environ["ONNXFUSE_CACHE_DIR"] = str(Path(place) / "cache")
        program = cpp_program.build(Path(place))
        for dtype, ptx in product(ALLOWED, (False, True)):
            wrong = check(program, dtype, kernels, ptx, Path(place))
            print(f"{dtype}, {'PTX' if ptx else 'machine code'}: {'; '.join(wrong) or 'the same'}")
            failed += bool(wrong)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
