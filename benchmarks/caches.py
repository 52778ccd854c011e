"""The runtime's GroupQueryAttention, over caches of keys and values, as one node: every way to run it, and the
runtime's own kernels.

    python benchmarks/caches.py [--cases token,prompt] [--type float32] [--target GPU] [--dry-run] [--no-torch]

Prompts, tokens and rows behind what a sequence has; caches lie in the memory of those of the past where they are as
large behind as before, as tuning has them, and are copied where they grow.  Passes where no best way takes longer than
the runtime's kernels.  ``--dry-run`` names the ways and times nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx
from common import table
from onnx import TensorProto, helper
from region_times import Prepared, RegionResult, figure, typed_command

from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.composed.cached import NAME
from onnxfuse.tuning.subjects import subjects_of

SLACK = 1.02
"""How many times as long as the runtime's a way may be timed that takes as long."""


@dataclass(frozen=True)
class CacheCase:
    """``batch`` sequences of so many new ``rows`` behind others, ``total`` with these, in caches that had ``past``
    rows; ``heads`` of queries over ``own`` of keys, of ``size`` columns; ``window``: keys that a query sees, 0 for
    all."""

    name: str
    batch: int
    rows: int
    past: int
    total: int
    heads: int = 32
    own: int = 8
    size: int = 64
    rotary: bool = True
    window: int = 0
    packed: bool = False
    kind: str = "float16"

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the model's symbols."""
        found = {"B": self.batch, "S": self.rows, "P": self.past, "L": self.total}
        return found | ({"M": self.total + 64} if self.rotary else {})

    @property
    def model(self) -> onnx.ModelProto:
        """The operator alone, whose longest length is a mask's, as exporters have it."""
        kind = TensorProto.DataType.Value(self.kind.upper())
        width, narrow = self.heads * self.size, self.own * self.size
        sides = {"q": ("B", "S", width + 2 * narrow if self.packed else width)}
        if not self.packed:
            sides |= {"k": ("B", "S", narrow), "v": ("B", "S", narrow)}
        tables = {"cos": ("M", self.size // 2), "sin": ("M", self.size // 2)} if self.rotary else {}
        caches = dict.fromkeys(("past_k", "past_v"), ("B", self.own, "P", self.size))
        infos = [helper.make_tensor_value_info(name, kind, shape)
                 for name, shape in {**sides, **caches, **tables}.items()]
        infos += [helper.make_tensor_value_info("n", TensorProto.INT32, ("B",)),
                  helper.make_tensor_value_info("mask", TensorProto.INT64, ("B", "L"))]
        window: dict[str, Any] = {"local_window_size": self.window} if self.window else {}
        nodes = [
            helper.make_node("Shape", ["mask"], ["s"], start=1, end=2), helper.make_node("Cast", ["s"], ["t"], to=6),
            helper.make_node(
                "GroupQueryAttention",
                ["q", *(("", "") if self.packed else ("k", "v")), "past_k", "past_v", "n", "t", *tables],
                ["y", "present_k", "present_v"], domain="com.microsoft", num_heads=self.heads, kv_num_heads=self.own,
                do_rotary=int(self.rotary), **window),
        ]
        results = [helper.make_tensor_value_info("y", kind, ("B", "S", width)), *(
            helper.make_tensor_value_info(name, kind, ("B", self.own, "T", self.size))
            for name in ("present_k", "present_v"))]
        return helper.make_model(helper.make_graph(nodes, "g", infos, results), ir_version=10, opset_imports=[
            helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)])


CASES = (
    CacheCase("prompt 1:1024", 1, 1024, 1024, 1024),
    CacheCase("prompt 1:1024 in room for 4096", 1, 1024, 4096, 1024),
    CacheCase("prompt 1:2048, 128", 1, 2048, 2048, 2048, size=128),
    CacheCase("prompt 4:512", 4, 512, 512, 512),
    CacheCase("prompt 1:4096, 128, window 1024", 1, 4096, 4096, 4096, size=128, window=1024),
    CacheCase("rows 512 behind 1536", 1, 512, 2048, 2048, size=128),
    CacheCase("rows 16 behind 1000", 1, 16, 2048, 1016, size=128),
    CacheCase("token 1:2048", 1, 1, 2048, 2048),
    CacheCase("token 1:2048, growing", 1, 1, 2047, 2048),
    CacheCase("token 1:2048 in room for 8192", 1, 1, 8192, 2048),
    CacheCase("token 16:2048", 16, 1, 2048, 2048),
    CacheCase("token 8:4096, 80", 8, 1, 4096, 4096, own=2, size=80),
    CacheCase("token 1:32768, 128", 1, 1, 32_768, 32_768, size=128),
    CacheCase("token 1:512, 128, not rotated", 1, 1, 512, 512, size=128, rotary=False),
    CacheCase("token 1:4096, packed, 128, window 1024", 1, 1, 4096, 4096, size=128, window=1024, packed=True),
)


def cases_of(kind: str) -> list[CacheCase]:
    """Those of a type."""
    return [replace(case, kind=kind) for case in CASES]


def prepare(case: CacheCase, profile: Profile, most: int | None = None) -> Prepared[CacheCase]:
    """All ways to run a case."""
    plan = optimise(case.model, Options(target=profile, dims=case.dims, verify=False, database=False, eager=True))
    subject = next(each for each in subjects_of(plan)[0] if each.fusion.kernel.schedule == NAME)
    return Prepared.of(case, subject, plan.costs.kernel_seconds(subject.fusion), most, _attention_of)


def _attention_of(kernel: Kernel) -> str:
    """The kernels of a way behind those that fill the caches."""
    return " ".join(step.kernel for step in kernel.plan.variants[0].launches if "attention" in step.kernel)


def show(found: list[RegionResult[CacheCase]]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    lines, passes = [], True
    for one in found:
        best = one.ways[one.best]
        share = best / one.runtime if best and one.runtime else None
        passes &= share is None or share <= SLACK
        lines.append([one.case.name, str(len(one.ways)), figure(one.runtime), figure(one.predicted),
                      figure(one.ways[one.own]), figure(best), one.best if best else one.own,
                      f"{1 / share:.2f}" if share else ""])
    return table(["case", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "gain"],
                 lines), passes


main = typed_command(__doc__, "caches", cases_of, prepare, lambda found, seconds: found, show)


if __name__ == "__main__":
    main()
