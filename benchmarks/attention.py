"""Attention as one kernel: every way to run it, the runtime's own nodes, and PyTorch's where that is installed.

    python benchmarks/attention.py [--cases bert,long] [--type float32] [--target GPU] [--dry-run] [--no-torch]
        [--ways 8]

The zoo's attentions at the zoo's sizes, one new token against a cache, and long sequences, in float16, bfloat16, or in
float32 through TF32 (ONNX Runtime and PyTorch too).  PyTorch's time is that of the fastest backend of
scaled_dot_product_attention that takes the case, with the same mask where there is one.  Passes where the best way
takes no longer than 1.05 times PyTorch's in the mean over the cases, in float32 two thirds of it.  ``--dry-run`` names
the ways and times nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

import numpy as np
from common import table
from region_times import (
    NAMED,
    Prepared,
    RegionResult,
    each_within,
    figure,
    torch_beside,
    torch_microseconds,
    typed_command,
)

from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.schedules.attentions.attention import Attention

MEAN = {"float16": 1.05, "bfloat16": 1.05, "float": 1 / 1.5}
"""How many times as long as PyTorch's fastest the best way may take, in the mean, by type."""

LONGEST = {"float16": 256, "bfloat16": 256, "float": 128}
"""Heads that there are kernels for."""

CAP = 50.0
"""Of scores that are capped, as Gemma 2 caps them."""

SETS = 3
"""Sets of inputs of PyTorch's that take turns."""


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of an attention; ``shared`` heads have keys and values in common; ``mask``: its axes, or one that is
    computed from places: "causal", or "lowest", the same by a finite number; ``kind``: the type; ``kept``: whether
    its softmax is a result too, and ``capped``: whether scores go through a soft cap, a tangent, which no backend of
    PyTorch's has."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    shared: int = 1
    mask: str = ""
    kind: str = "float16"
    kept: bool = False
    capped: bool = False

    @property
    def plain(self) -> AttentionCase | None:
        """The same without a mask that is read or made by a finite number, and without a soft cap; None where it has
        neither."""
        mask = {"": "", "causal": "causal", "lowest": "causal"}.get(self.mask, "")
        found = replace(self, mask=mask, capped=False, name="")
        return None if self.kept or found == replace(self, name="") else found

    @property
    def flops(self) -> int:
        """Of both products, as far as queries see keys: of a causal mask half."""
        return 4 * self.batch * self.heads * self.queries * self.keys * self.size // (2 if self.is_causal else 1)

    @property
    def is_causal(self) -> bool:
        """Whether queries see no later keys."""
        return self.mask in _COMPUTED

    @property
    def text(self) -> str:
        """The graph, heads and all."""
        return self._text.replace("float16", self.kind)

    @property
    def _scale(self) -> str:
        """What scores are multiplied by, as the text of a graph has numbers of the type: of 16 bits these."""
        return self._number(self.size ** -0.5)

    def _number(self, number: float) -> str:
        return str(number if self.kind == "float" else int(np.array(number, self.kind).view(np.uint16)))

    @property
    def _text(self) -> str:
        b, h, s, k, d, g = self.batch, self.heads, self.queries, self.keys, self.size, self.heads // self.shared
        shapes = {"": "", **dict.fromkeys(_COMPUTED, ""), "keys": f", float16[{b},1,1,{k}] mask",
                  "all": f", float16[{b},1,{s},{k}] mask", "heads": f", float16[1,{h},{s},{k}] mask"}
        spread = (
            "k1 = Unsqueeze(k, two) k2 = Expand(k1, e) kh = Reshape(k2, w) "
            "v1 = Unsqueeze(v, two) v2 = Expand(v1, e) vh = Reshape(v2, w)"
        ) if self.shared > 1 else "kh = Identity(k) vh = Identity(v)"
        kept = f", float16[{b},{h},{s},{k}] p" if self.kept else ""
        capped = "n = Div(a0, cap) l = Tanh(n) a = Mul(l, cap)" if self.capped else "a = Identity(a0)"
        masked = {"": "c = Identity(a)", **_COMPUTED}.get(self.mask, "c = Add(a, mask)")
        return (
            f"(float16[{b},{s},{h * d}] x, float16[{b},{g},{k},{d}] k, float16[{b},{g},{k},{d}] v{shapes[self.mask]})"
            f" => (float16[{b},{s},{h * d}] y{kept}) <int64[4] heads = {{0,0,{h},{d}}}, "
            f"int64[3] joined = {{0,0,{h * d}}}, int64 nought = {{0}}, int64 once = {{1}}, int64 count = {{{s}}}, "
            f"float16 scale = {{{self._scale}}}, float16 cap = {{{self._number(CAP)}}}, "
            f"int64[1] outer = {{1}}, int64[1] two = {{2}}, "
            f"int64[5] e = {{1,1,{self.shared},1,1}}, int64[4] w = {{0,{h},-1,{d}}}> "
            f"{{ r = Reshape(x, heads) q = Transpose <perm = [0,2,1,3]> (r) {spread} "
            f"t = Transpose <perm = [0,1,3,2]> (kh) m = MatMul(q, t) a0 = Mul(m, scale) {capped} {masked} "
            f"p = Softmax <axis = -1> (c) o = MatMul(p, vh) "
            f"z = Transpose <perm = [0,2,1,3]> (o) y = Reshape(z, joined) }}"
        )


_CAUSAL = (
    "places = Range(nought, count, once) rows = Unsqueeze(places, outer) see = LessOrEqual(places, rows) "
    "low = Constant <value_float = -inf> () deep = CastLike(low, x) c = Where(see, a, deep)")
"""Scores c of scores a."""

_COMPUTED = {"causal": _CAUSAL, "lowest": _CAUSAL.replace("-inf", "-65504.0")}
"""Masks by places."""

CASES = (
    AttentionCase("bert 8:128", 8, 12, 128, 128, 64, mask="keys"),
    AttentionCase("bert 32:384", 32, 12, 384, 384, 64, mask="keys"),
    AttentionCase("vit 32", 32, 12, 197, 197, 64), AttentionCase("llama 1:1024", 1, 32, 1024, 1024, 64, 8, "all"),
    AttentionCase("gpt2 8:256", 8, 12, 256, 256, 64, mask="all"),
    AttentionCase("t5 8:256", 8, 12, 256, 256, 64, mask="heads"),
    AttentionCase("unet 2, 1024", 2, 8, 1024, 1024, 40), AttentionCase("unet 2, 1024 to 77", 2, 8, 1024, 77, 40),
    AttentionCase("dit 8", 8, 16, 1024, 1024, 72), AttentionCase("decode 1:2048", 1, 32, 1, 2049, 64, 8, "keys"),
    AttentionCase("decode 16:2048", 16, 32, 1, 2049, 64, 8, "keys"),
    AttentionCase("decode 1:32768", 1, 32, 1, 32768, 128, 8), AttentionCase("decode 1:512", 1, 12, 1, 512, 64),
    AttentionCase("decode 4:1024", 4, 16, 1, 1024, 128), AttentionCase("decode 1:8192", 1, 64, 1, 8192, 128, 8),
    AttentionCase("decode 8:4096", 8, 32, 1, 4096, 80, 2), AttentionCase("beams 4:300", 4, 8, 5, 300, 64, mask="keys"),
    AttentionCase("16 queries, 2048", 2, 16, 16, 2048, 64, mask="all"),
    AttentionCase("long 2048", 8, 16, 2048, 2048, 64), AttentionCase("long 8192", 2, 16, 8192, 8192, 64),
    AttentionCase("long 16384", 1, 16, 16384, 16384, 128), AttentionCase("long 4096, 128", 4, 16, 4096, 4096, 128),
    AttentionCase("wide 2048", 2, 8, 2048, 2048, 256),
    AttentionCase("causal 2048", 8, 16, 2048, 2048, 64, mask="causal"),
    AttentionCase("causal 4096, 128", 4, 16, 4096, 4096, 128, mask="causal"),
    AttentionCase("causal 8192, 128", 2, 16, 8192, 8192, 128, mask="causal"),
    AttentionCase("causal 4096, 128, a finite mask", 4, 16, 4096, 4096, 128, mask="lowest"),
    AttentionCase("causal 16384", 1, 4, 16384, 16384, 64, mask="causal"),  # 2^32 scores break the runtime
    *(replace(case, name=f"{case.name}, no mask", mask="") for case in (
        AttentionCase("bert 8:128", 8, 12, 128, 128, 64), AttentionCase("bert 32:384", 32, 12, 384, 384, 64),
        AttentionCase("llama 1:1024", 1, 32, 1024, 1024, 64, 8), AttentionCase("gpt2 8:256", 8, 12, 256, 256, 64),
        AttentionCase("decode 16:2048", 16, 32, 1, 2049, 64, 8))),
    AttentionCase("vit 32, capped", 32, 12, 197, 197, 64, capped=True),
    AttentionCase("llama 1:1024, capped", 1, 32, 1024, 1024, 64, 8, "all", capped=True),
    AttentionCase("long 4096, 128, capped", 4, 16, 4096, 4096, 128, capped=True),
    AttentionCase("causal 4096, 128, capped", 4, 16, 4096, 4096, 128, mask="causal", capped=True),
    AttentionCase("wide 2048, capped", 2, 8, 2048, 2048, 256, capped=True),
    AttentionCase("decode 1:32768, capped", 1, 32, 1, 32768, 128, 8, capped=True),
    AttentionCase("kept, bert 8:128", 8, 12, 128, 128, 64, mask="keys", kept=True),
    AttentionCase("kept, vit 32", 32, 12, 197, 197, 64, kept=True),
    AttentionCase("kept, gpt2 8:256", 8, 12, 256, 256, 64, mask="all", kept=True),
    AttentionCase("kept, 1024 of 128", 2, 16, 1024, 1024, 128, kept=True),
    AttentionCase("kept, causal 2048", 1, 16, 2048, 2048, 64, mask="causal", kept=True),
)


@dataclass(frozen=True)
class AttentionResult(RegionResult[AttentionCase]):
    """A case, and the microseconds of PyTorch's fastest backend."""

    torch: float | None = None
    backend: str = ""


def cases_of(kind: str) -> list[AttentionCase]:
    """Those of a type."""
    return [replace(case, kind=kind) for case in CASES if case.size <= LONGEST[kind]]


def prepare(case: AttentionCase, profile: Profile, most: int | None = None) -> Prepared[AttentionCase]:
    """All ways to run a case."""
    return Prepared.fusion(case, lambda region: region.kernel.schedule == Attention.name, profile, most)


def torch_times(cases: Sequence[AttentionCase], seconds: float) -> list[dict[str, float]]:
    """Microseconds of GPU time of PyTorch's backends, of those that take each case; run in a process of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    return each_within(cases, lambda case: {} if case.kept or case.capped else _torch_times(case), seconds, {})


def _torch_times(case: AttentionCase) -> dict[str, float]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind: dict[str, Any] = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
    groups = case.heads // case.shared
    masks = {"keys": (case.batch, 1, 1, case.keys), "all": (case.batch, 1, case.queries, case.keys),
             "heads": (1, case.heads, case.queries, case.keys)}
    sets = [(
        torch.randn(case.batch, case.heads, case.queries, case.size, **kind),
        torch.randn(case.batch, groups, case.keys, case.size, **kind),
        torch.randn(case.batch, groups, case.keys, case.size, **kind),
        torch.randn(masks[case.mask], **kind).expand(case.batch, case.heads, case.queries, case.keys)
        if case.mask in masks else None,
    ) for _ in range(SETS)]
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                    *([SDPBackend.MATH] if case.kind == "float" else [])):
        def run(turn: int, backend: Any = backend) -> None:
            query, key, value, mask = sets[turn]
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, mask, is_causal=case.is_causal, enable_gqa=case.shared > 1)

        try:
            found[backend.name.removesuffix("_ATTENTION").lower()] = torch_microseconds(run, SETS)
        except RuntimeError as error:
            print(f"  {case.name}: no {backend.name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def with_torch(results: Sequence[RegionResult[AttentionCase]], seconds: float) -> list[AttentionResult]:
    """The same with PyTorch's fastest backend of each, if it is there and there are ``seconds`` for it."""
    times = (torch_beside(results, torch_times, seconds) if seconds > 0 else None) or [{} for _ in results]
    best = [min(found, key=lambda name: found[name], default="") for found in times]
    return [AttentionResult(**vars(result), torch=found.get(name), backend=name)
            for result, found, name in zip(results, times, best, strict=True)]


def show(found: list[AttentionResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    rows, shares, masked = [], [], []
    for one in found:
        best = one.ways[one.best]
        share = best / one.torch if best and one.torch else None
        plain = next((each.ways[each.best] for each in found if replace(each.case, name="") == one.case.plain), None)
        over = best / plain if best and plain else None
        shares += [share] if share else []
        masked += [over] if over else []
        rows.append([
            one.case.name, str(len(one.ways)), figure(one.runtime), figure(one.predicted),
            figure(one.ways[one.own]), figure(best), one.best if best else one.own,
            f"{one.case.flops / best / 1e6:.0f}" if best else "",
            figure(one.torch), one.backend, f"{share:.2f}" if share else "", f"{over:.2f}" if over else ""])
    head = ["case", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "TFLOP/s", "PyTorch µs",
            "backend", "best / PyTorch", "best / plain"]
    text = table(head, rows)
    if masked:
        text += f"\n\nWith a mask, a bias or a soft cap it takes {max(masked):.2f} times as long as without at most."
    if not shares:
        return text, True
    mean = geometric_mean(shares)
    text += f"\n\nThe best way takes {mean:.3f} times as long as PyTorch's fastest in the mean."
    return text, mean <= MEAN[found[0].case.kind]


main = typed_command(__doc__, "attention", cases_of, prepare, with_torch, show)


if __name__ == "__main__":
    main()
