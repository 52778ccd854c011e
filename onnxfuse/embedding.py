"""Compiled kernels into the regions that a model will hold; needs no GPU and no driver."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from os import cpu_count
from typing import TYPE_CHECKING

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.rewriting import FusedRegion
from onnxfuse.runtime.compile import KernelSource, default_compiler

if TYPE_CHECKING:
    from onnxfuse.pipeline import Tell


def embed(regions: Sequence[FusedRegion], architectures: Sequence[str], tell: Tell) -> list[FusedRegion]:
    """The regions with an image for each architecture ("sm_90"); equal kernels are compiled once.

    Raises:
        KernelError: a kernel does not compile, or the compiler does not know an architecture.
    """
    if not architectures:
        return list(regions)
    sources = [_source(region) for region in regions]
    wanted = [(source, architecture) for source in dict.fromkeys(sources) for architecture in architectures]
    compiler = default_compiler()
    with ThreadPoolExecutor(cpu_count() or 1, "onnxfuse-embed") as pool:
        running = {pool.submit(compiler.image, *one): one for one in wanted}
        try:
            for done, future in enumerate(as_completed(running)):
                future.result()
                tell("compiling kernels", done + 1, len(wanted))
        finally:
            pool.shutdown(cancel_futures=True)
    images = {one: future.result() for future, one in running.items()}
    return [
        replace(region, images={architecture: images[source, architecture] for architecture in architectures})
        for region, source in zip(regions, sources, strict=True)
    ]


def _source(region: FusedRegion) -> KernelSource:
    plan = LaunchPlan.from_json(region.plan)
    kernels = sorted({step.kernel for variant in plan.variants for step in variant.steps})
    return KernelSource(region.source, tuple(plan.options), tuple(kernels))
