#!/usr/bin/env python3
"""The programs of examples/cpp and examples/csharp and Python on a GPU: the same bits from one model with embedded
kernels.

    ONNXRUNTIME_ROOT=/path/to/onnxruntime-linux-x64-gpu python tests/gpu/check_deploy.py [--rehearse]

The model is an encoder, in float32 and in float16, at two sizes.  A program's process may load no Python, no CuPy and
no compiler, and its cache of kernels is empty.  Where the .NET SDK builds the program in C#, with a package that may
hold another release of ONNX Runtime, and where PTX alone is embedded, which the driver compiles, answers are compared
within the tolerances of their types.
``--rehearse`` runs all on the CPU.  A program that cannot be built here is left out, saying why.  Exits with 1 where
something is wrong.
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
import csharp_program  # noqa: E402
import numpy as np  # noqa: E402
from cli_models import encoder  # noqa: E402

import onnxfuse  # noqa: E402
from onnxfuse.runtime import gpus, library_path  # noqa: E402

SIZES = ((4, 32), (3, 77))


ALLOWED = {"float32": 1e-3, "float16": 1e-2}
"""How far an element may be off, as a share of the largest, where two compilers made the kernels."""


def check(program: Path, dtype: str, kernels: bool, ptx: bool, exact: bool) -> list[str]:
    """What is wrong with a type."""
    folder = program.parent
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
        elif exact and found.tobytes() != wanted.tobytes():
            wrong.append(f"{shape}: the bits differ")
        elif not (error := np.abs(found - wanted).max() / np.abs(wanted).max()) <= ALLOWED[dtype]:
            wrong.append(f"{shape}: off by {error:.1e} of the largest")
    return wrong


def main() -> int:
    """Check both types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    kernels = not parser.parse_args().rehearse
    failed = 0
    for language, made in (("C++", cpp_program), ("C#", csharp_program)):
        if lacking := made.lacking():
            print(f"{language}: not run: {lacking}")
            continue
        with TemporaryDirectory() as place:
            os.environ["ONNXFUSE_CACHE_DIR"] = str(Path(place) / "cache")
            program = (csharp_program.build(Path(place), csharp_program.GPU_PACKAGE if kernels else
                                            csharp_program.CPU_PACKAGE)
                       if made is csharp_program else cpp_program.build(Path(place)))
            for dtype, ptx in product(ALLOWED, (False, True)):
                own_runtime = made is csharp_program and csharp_program.sdk()
                wrong = check(program, dtype, kernels, ptx, not own_runtime and not (kernels and ptx))
                print(f"{language}, {dtype}, {'PTX' if ptx else 'machine code'}: {'; '.join(wrong) or 'the same'}")
                failed += bool(wrong)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
