"""What fuzz.cc mutates: launch plans that rules and tests make, images of their kernels, and sizes that they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fused_models
import kernel_harness
import launch_convolutions
import launch_models
from native.stand_in import IMAGE, image

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.runtime.compile import compile_cubin

MODELS = (
    "g (float[b, s, 16] x) => (float[b, s, 16] y) { a = Sigmoid(x) m = Mul(x, a) n = Neg(m) y = Tanh(n) }",
    "g (float[b, s, 16] x, float[16] bias, float[16] scale, float[16] shift) => (float[b, s, 16] y) {"
    " a = Add(x, bias) y = LayerNormalization <axis = -1> (a, scale, shift) }",
    "g (float16[b, s] x) => (float16[b, s] y, float16[b, s] z) {"
    " a = Add(x, x) y = Softmax <axis = -1> (a) z = Exp(a) }",
    "g (float[b, 8, s] x) => (float[b, s, 8] y) { a = Relu(x) y = Transpose <perm = [0, 2, 1]> (a) }",
)
"""Graphs that become one kernel each: pointwise, rows, two outputs, a transpose."""

SIZES = {"b": 2, "s": 7}


@dataclass(frozen=True)
class Seed:
    """A launch plan, the name of its image's file, and sizes of its inputs."""

    plan: LaunchPlan
    image: str
    inputs: Sequence[Sequence[int]]
    hosts: Sequence[Sequence[int]] = ()


def seeds(images: dict[str, bytes]) -> list[Seed]:
    """All of them; ``images`` takes their images by name."""
    out = []
    for number, text in enumerate(MODELS):
        made = kernel_harness.make(text)
        shapes = [[SIZES.get(str(size)) or int(str(size)) for size in value.shape] for value in made.lowered.tensors]
        plan = made.kernel.plan
        kernels = {step.kernel for variant in plan.variants for step in variant.steps}
        images[f"made{number}"] = image(*sorted(kernels))
        images[f"compiled{number}"] = compile_cubin(made.kernel.source, "sm_90", plan.options)
        out += [Seed(plan, name, shapes) for name in (f"made{number}", f"made{number}", f"compiled{number}")]
    images["stand_in"] = IMAGE
    images["undeclared"] = image()
    out += [Seed(make().plan, "stand_in", [[5]]) for make in
            (fused_models.add_one, fused_models.add_aligned, fused_models.add_two, launch_models.clustered,
             launch_models.through_scratch, launch_models.add_four)]
    out += [Seed(launch_models.tiled().plan, "stand_in", [[size]]) for size in (64, 5)]
    for name, shapes in (("product", [[2, 5, 3], [2, 3, 7]]), ("product_turned", [[2, 3, 5], [7, 3]])):
        product = launch_models.PRODUCTS[name]
        out += [Seed(fused.plan, "stand_in", shapes) for fused in (product.fused(), product.of_sum())]
    out += [Seed(launch_models.PRODUCTS[name].fused().plan, "stand_in", shapes) for name, shapes in (
        ("product_bias", [[2, 5, 3], [3, 7], [7]]),
        ("product_bias_add", [[2, 3, 5], [2, 3, 7], [7], [2, 5, 7]]), ("product_or_sum", [[2, 3, 3], [3, 3]]))]
    out += [Seed(launch_convolutions.CONVOLUTIONS[name].fused().plan, "stand_in", shapes) for name, shapes in (
        ("convolution", [[2, 5, 4, 3], [7, 3, 3, 3]]), ("convolution_float16", [[1, 5, 6, 3], [2, 3, 2, 3], [2]]),
        ("convolution_line", [[2, 9, 4], [3, 5, 4], [3], [2, 4, 3]]),
        ("convolution_or_sum", [[2, 5, 4, 3], [3, 3, 3, 3]]))]
    out.append(Seed(fused_models.add_host().plan, "stand_in", [[5]], [[5, 3]]))
    (plan,) = (each.s for each in fused_models.undeclared().graph.node[0].attribute if each.name == "plan")
    out.append(Seed(LaunchPlan.from_json(plan.decode()), "undeclared", [[3, 5]]))
    return out


def write(folder: Path) -> None:
    """Write the seeds as fuzz.cc reads them."""
    images: dict[str, bytes] = {}
    found = [
        {"plan": json.loads(seed.plan.to_json()), "image": f"{seed.image}.image", "inputs": seed.inputs,
         "hosts": seed.hosts} for seed in seeds(images)
    ]
    for name, content in images.items():
        (folder / f"{name}.image").write_bytes(content)
    (folder / "seeds.json").write_text(json.dumps(found, separators=(",", ":")))
