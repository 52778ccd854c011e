"""Instructions that a fused node costs the processor, by callgrind over the stand-in for the driver.

    python tests/native/instructions.py [--python OTHER_PYTHON] [--size 7] [--changing]

Prints, for a pointwise node and a row node of six inputs, the instructions of one ``KernelComputeV2`` in the library,
in ONNX Runtime under it, and in all; what the real driver would cost is not among them.  Needs valgrind and g++.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent

MODELS = {
    "pointwise": """g (float[b, s, 16] x) => (float[b, s, 16] y) {
        a = Sigmoid(x) m = Mul(x, a) n = Neg(m) y = Tanh(n) }""",
    "row": """g (float[b, s, 16] x, float[16] bias, float[b, s, 16] residual, float[16] scale, float[16] shift,
        float[b, s, 16] gate) => (float[b, s, 16] y) {
        a = Add(x, bias) r = Add(a, residual) n = LayerNormalization <axis = -1> (r, scale, shift)
        y = Mul(n, gate) }""",
}

CHILD = """
import sys, numpy, onnxruntime
model, library, runs, size, changing = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
for run in range(runs):
    sizes = {"b": 2, "s": size + (run % 2 if changing else 0)}
    shapes = [[sizes.get(axis, axis) for axis in value.shape] for value in session.get_inputs()]
    session.run(None, {value.name: numpy.ones(shape, numpy.float32)
                       for value, shape in zip(session.get_inputs(), shapes)})
"""


def write(folder: Path) -> None:
    """Write the models, whose launch plans are real and whose kernels do nothing."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    import fused_models
    import kernel_harness
    import onnx
    from native.stand_in import image
    from onnx import helper

    for name, text in MODELS.items():
        made = kernel_harness.make(text)
        plan = made.kernel.plan
        variants = tuple(replace(variant, steps=tuple(replace(step, kernel="nothing") for step in variant.steps))
                         for variant in plan.variants)
        fused = fused_models.Fused(replace(plan, variants=variants), made.kernel.source, [],
                                   images={"sm_90": image("nothing")})
        node = fused.node("node", "Region0", [], [value.name for value in made.lowered.tensors], "y")
        graph = helper.make_graph([node], name, made.model.graph.input, made.model.graph.output)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid(fused_models.DOMAIN, 1),
                                                          helper.make_opsetid("", 17)], ir_version=9),
                  folder / f"{name}.onnx")


def measured(python: str, folder: Path, name: str, library: Path, size: int, changing: bool) -> dict[str, float]:
    """Instructions of one compute, by the shared object that they belong to."""

    def total(runs: int) -> dict[str, int]:
        out = folder / f"{name}.{runs}.callgrind"
        subprocess.run(
            ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}",
             "--toggle-collect=onnxfuse::(anonymous namespace)::compute(void*, OrtKernelContext*)",
             python, "-c", CHILD, str(folder / f"{name}.onnx"), str(library), str(runs), str(size),
             str(int(changing))],
            check=True, env=os.environ | {"ONNXFUSE_LIBCUDA": str(folder / "fake_cuda.so"), "PYTHONMALLOC": "malloc"},
        )
        return by_object(out.read_text())

    few, many = total(20), total(120)
    return {key: (count - few.get(key, 0)) / 100 for key, count in many.items()}


def by_object(text: str) -> dict[str, int]:
    """Exclusive cost by shared object of a callgrind file."""
    names: dict[str, str] = {}
    costs: dict[str, int] = {}
    here = ""
    called = False
    for line in text.splitlines():
        if found := re.match(r"(c?)ob=(\(\d+\))(?: (.*))?$", line):
            if found[3]:
                names[found[2]] = Path(found[3]).name
            if not found[1]:
                here = names[found[2]]
        elif line.startswith("calls="):
            called = True
        elif re.match(r"[+\-*\d]", line):
            if not called:
                costs[here] = costs.get(here, 0) + int(line.split()[-1])
            called = False
    return costs


def main() -> None:
    """Build, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="a Python with NumPy and ONNX Runtime")
    parser.add_argument("--size", type=int, default=7, help="size of the second axis")
    parser.add_argument("--changing", action="store_true", help="let the size alternate between two")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["g++", "-x", "c", "-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC",
                        str(HERE / "fake_cuda.c"), "-o", str(folder / "fake_cuda.so")], check=True)
        library = folder / "libonnxfuse.so"
        sources = sorted(map(str, (HERE.parents[1] / "onnxfuse" / "runtime" / "native").glob("*.cc")))
        subprocess.run(["g++", "-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden",
                        '-DONNXFUSE_VERSION="0"', *sources, "-o", str(library), "-ldl", "-pthread"], check=True)
        write(folder)
        for model in MODELS:
            costs = measured(arguments.python, folder, model, library, arguments.size, arguments.changing)
            costs.pop("fake_cuda.so", None)
            ours = costs.get(library.name, 0)
            places = sorted(costs, key=lambda key: -costs[key])
            shown = ", ".join(f"{key} {costs[key]:.0f}" for key in places if costs[key] >= 1)
            print(f"{model}: {ours:.0f} in the library, {sum(costs.values()):.0f} in all ({shown})", flush=True)


if __name__ == "__main__":
    main()
