"""Products and convolutions with what follows them as one kernel: every way to run them, the runtime's own nodes, and
PyTorch's bare product where that is installed.

    python benchmarks/products.py [--cases bert,resnet] [--type float32] [--target GPU] [--dry-run] [--no-torch]
        [--ways 8]

Products of the zoo in float16, bfloat16, or in float32 through TF32 (ONNX Runtime and PyTorch too), bare and with a
bias and GELU or a residual, a gate and its value, by constant weights, and convolutions of channels-last tensors with
bias and ReLU.  PyTorch's time is of the bare product, or of the channels-last convolution without bias; beside it the
time of its own kernel, cuBLASLt's, for a bias and GELU (by tanh, the one that it has), or for a product that is added
to a matrix in its place.  Passes where bare products take no longer than ONNX Runtime's each (by a hundredth at most)
and, by kernels that are generated, at most 1 / 0.9 times cuBLASLt's best in the mean; and the others at most 1.10 times
PyTorch's bare product each.  ``--dry-run`` names the ways and times nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from common import table
from region_times import (
    HEAD,
    NAMED,
    Prepared,
    RegionResult,
    TorchResult,
    compared,
    each_within,
    figure,
    torch_beside,
    torch_microseconds,
    typed_command,
)

from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.schedules.products.product import Product
from onnxfuse.schedules.products.rows import ProductRows

OWN, AROUND, SLACK = 1 / 0.9, 1.10, 1.01
"""How many times cuBLASLt's best our own bare products may take in the mean, PyTorch's bare product one with more
around, and the runtime's product the best way of a bare one: what two clocks tell apart."""

GEMM = "gemm"
"""How the names of a library's products begin."""

SETS = 3
"""Sets of inputs of PyTorch's that take turns."""

FOLLOWS = {
    "": "y = Identity(p)", "residual": "s = Add(p, c) y = Add(s, r)",
    "norm": "s = Add(p, c) z = Add(s, r) y = LayerNormalization <axis = -1> (z, g, h)",
    "sum and norm": "s = Add(p, c) z = Add(s, r) y = LayerNormalization <axis = -1> (z, g, h)",
    "gelu": "s = Add(p, c) q = Constant <value = T {ROOT}> () h = Div(s, q) e = Erf(h) "
            "i = Constant <value = T {ONE}> () o = Add(e, i) g = Mul(s, o) "
            "l = Constant <value = T {HALF}> () y = Mul(g, l)",
}
"""By what follows, nodes; those of a bias and GELU have constants of the type."""

NUMBERS = {"float16": {"ROOT": "15784", "ONE": "15360", "HALF": "14336"},
           "bfloat16": {"ROOT": "16309", "ONE": "16256", "HALF": "16128"},
           "float": {"ROOT": "1.4142135", "ONE": "1.0", "HALF": "0.5"}}
"""By type, the square root of two, one and a half; as their bits in 16 bits, as onnx reads them."""



@dataclass(frozen=True)
class ProductCase:
    """A product of ``rows`` by ``columns`` elements over ``depth``; or, with a ``window``, a convolution of ``rows``
    images of ``side`` by ``side``; ``products`` of one operand, a gate's two; ``follows``: what does;
    ``transposed``: whether the right operand has a row for each column; ``kind``: the type."""

    name: str
    rows: int
    columns: int
    depth: int
    follows: str = ""
    products: int = 1
    side: int = 0
    window: int = 0
    transposed: bool = False
    kind: str = "float16"

    @property
    def weights(self) -> tuple[str, ...]:
        """How inputs begin that are constants, as in a network, where they may be laid out ahead.  A convolution's are
        an input, which lies as networks that lie channels-last have it."""
        return () if self.window else ("b", "c", "g", "h")

    @property
    def flops(self) -> int:
        """Of the products."""
        pixels, taps = max(self.side, 1) ** 2, max(self.window, 1) ** 2
        return 2 * self.products * self.rows * pixels * self.columns * self.depth * taps

    @property
    def text(self) -> str:
        """The graph."""
        text = self._text.replace("T[", f"{self.kind}[").replace("value = T ", f"value = {self.kind} ")
        for name, number in NUMBERS[self.kind].items():
            text = text.replace(name, number)
        return text

    @property
    def _text(self) -> str:
        """The graph, of elements of T."""
        m, n, k = self.rows, self.columns, self.depth
        if self.window:
            pad, size = self.window // 2, f"{m},{self.side},{self.side}"
            pads = f"pads = [{pad},{pad},{pad},{pad}]"
            return (f"(T[{size},{k}] x, T[{n},{self.window},{self.window},{k}] w, T[{n}] c)"
                    f" => (T[{size},{n}] y) {{ t = Transpose <perm = [0,3,1,2]> (x) "
                    f"v = Transpose <perm = [0,3,1,2]> (w) p = Conv <{pads}> (t, v, c) q = Relu(p) "
                    f"y = Transpose <perm = [0,2,3,1]> (q) }}")
        if self.products == 2:
            return (f"(T[{m},{k}] a, T[{k},{n}] b, T[{k},{n}] c) => (T[{m},{n}] y) "
                    "{ u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }")
        beside = f", T[{n}] c, T[{m},{n}] r"
        norm = f"{beside}, T[{n}] g, T[{n}] h"
        more = {"residual": beside, "norm": norm, "sum and norm": norm, "gelu": f", T[{n}] c"}.get(self.follows, "")
        results = f"T[{m},{n}] y" + (f", T[{m},{n}] z" if self.follows == "sum and norm" else "")
        right, product = (f"{n},{k}", "Gemm <transB = 1>") if self.transposed else (f"{k},{n}", "MatMul")
        return (f"(T[{m},{k}] a, T[{right}] b{more}) => ({results}) "
                f"{{ p = {product}(a, b) {FOLLOWS[self.follows]} }}")


def _transformer(name: str, rows: int, width: int, inner: int) -> list[ProductCase]:
    bare = [ProductCase(f"{name} projection", rows, width, width), ProductCase(f"{name} up", rows, inner, width),
            ProductCase(f"{name} down", rows, width, inner)]
    return [*bare, *(replace(each, name=f"{each.name}, {follows}", follows=follows.lower()) for each, follows in zip(
        bare, ("residual", "GELU", "residual"), strict=True))]


CASES = (
    *_transformer("bert 8:128", 1024, 768, 3072), *_transformer("bert 32:384", 12_288, 768, 3072),
    *_transformer("vit 32", 6304, 768, 3072), ProductCase("t5 projection", 2048, 512, 512),
    ProductCase("llama projection", 1024, 2048, 2048), ProductCase("llama down", 1024, 2048, 5632),
    *(ProductCase(f"{name}, {follows}", rows, width, depth, follows) for name, rows, width, depth, follows in (
        ("norm of bert 8:128 projection", 1024, 768, 768, "norm"), ("norm of bert 8:128 down", 1024, 768, 3072, "norm"),
        ("norm of bert 32:384 projection", 12_288, 768, 768, "norm"),
        ("norm of bert 32:384 down", 12_288, 768, 3072, "norm"),
        ("norm of vit 32 projection", 6304, 768, 768, "sum and norm"),
        ("norm of vit 32 down", 6304, 768, 3072, "sum and norm"),
        ("norm of t5 projection", 2048, 512, 512, "sum and norm"), ("norm of t5 down", 2048, 512, 2048, "sum and norm"),
        ("norm of gpt2 projection", 2048, 768, 768, "sum and norm"),
        ("norm of gpt2 down", 2048, 768, 3072, "sum and norm"),
        ("norm of llama projection", 1024, 2048, 2048, "sum and norm"))),
    ProductCase("llama gate", 1024, 5632, 2048, "gate", 2), ProductCase("large", 8192, 8192, 4096),
    *(ProductCase(f"uneven {rows}, {depth} to {columns}{', transposed' if transposed else ''}", rows, columns, depth,
                  "gelu", transposed=transposed)
      for rows, depth, columns, transposed in (
          (8192, 180, 540, False), (8192, 180, 360, False), (8192, 360, 180, False), (8192, 180, 540, True),
          (4096, 770, 770, False), (4096, 770, 770, True), (65_536, 63, 256, True), (65_536, 319, 256, True),
          (65_536, 283, 128, True), (2048, 429, 429, True), (2048, 429, 1024, True), (2048, 429, 429, False),
          (2048, 768, 50_257, False), (2048, 768, 50_257, True))),
    *(ProductCase(f"resnet {side}, 3 x 3", 32, channels, channels, "relu", side=side, window=3)
      for side, channels in ((56, 64), (28, 128), (14, 256), (7, 512))),
    *(ProductCase(f"resnet {side}, {depth} to {columns}", 32, columns, depth, "relu", side=side, window=1)
      for side, depth, columns in ((56, 64, 256), (56, 256, 64), (28, 128, 512), (28, 512, 128), (14, 256, 1024),
                                   (14, 1024, 256), (7, 512, 2048), (7, 2048, 512))),
    *(ProductCase(f"unet {side}, 3 x 3", 2, channels, channels, "relu", side=side, window=3)
      for side, channels in ((64, 320), (32, 640), (16, 1280))),
    *(ProductCase(f"vae {side}, 3 x 3", 4, channels, channels, "relu", side=side, window=3)
      for side, channels in ((256, 128), (64, 512))),
)


def cases_of(kind: str) -> list[ProductCase]:
    """Those of a type; the standard's convolutions of these operators have no bfloat16."""
    return [replace(case, kind=kind) for case in CASES if not (case.window and kind == "bfloat16")]


@dataclass(frozen=True)
class ProductResult(TorchResult[ProductCase]):
    """The same, and the microseconds of cuBLASLt's kernel with what follows, where it has one."""

    fused: float | None = None


def prepare(case: ProductCase, profile: Profile, most: int | None = None) -> Prepared[ProductCase]:
    """All ways to run a case."""
    return Prepared.fusion(case, lambda region: region.kernel.schedule in (Product.name, ProductRows.name), profile,
                           most)


def torch_times(cases: Sequence[ProductCase], seconds: float) -> list[tuple[float | None, float | None]]:
    """Microseconds of GPU time of PyTorch's bare products, and of those with what follows; run in a process of its
    own."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    return each_within(cases, _torch_both, seconds, (None, None))


def _torch_both(case: ProductCase) -> tuple[float | None, float | None]:
    return _torch_time(case, _bare), _torch_time(case, _fused) if case.follows in ("gelu", "residual") else None


def with_torch(results: Sequence[RegionResult[ProductCase]], seconds: float) -> list[ProductResult]:
    """The same with PyTorch's times of each case, if it is there and there are ``seconds`` for it."""
    found = torch_beside(results, torch_times, seconds) if seconds > 0 else None
    return [ProductResult(**vars(result), torch=bare, fused=fused)
            for result, (bare, fused) in zip(results, found or [(None, None) for _ in results], strict=True)]


def _torch_time(case: ProductCase, made: Callable[[ProductCase], Callable[[], Any]]) -> float:
    runs = [made(case) for _ in range(SETS)]
    return torch_microseconds(lambda turn: runs[turn](), SETS)


def _fused(case: ProductCase) -> Callable[[], Any]:
    """PyTorch's product with what follows as cuBLASLt's one kernel."""
    import torch

    left, right, kind = _operands(case)
    if case.follows == "gelu":
        bias = torch.randn(case.columns, **kind)
        return lambda: torch._addmm_activation(bias, left, right, use_gelu=True)
    added = torch.randn(case.rows, case.columns, **kind)
    return lambda: added.addmm_(left, right)


def _operands(case: ProductCase) -> tuple[Any, Any, dict[str, Any]]:
    """PyTorch's operands of a product, and what tensors of its type are made with."""
    import torch

    kind: dict[str, Any] = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
    left, columns = torch.randn(case.rows, case.depth, **kind), case.columns * case.products
    right = torch.randn(columns, case.depth, **kind).T if case.transposed else torch.randn(case.depth, columns, **kind)
    return left, right, kind


def _bare(case: ProductCase) -> Callable[[], Any]:
    """PyTorch's product on inputs of its own."""
    import torch

    if not case.window:
        left, right, _ = _operands(case)
        return lambda: torch.mm(left, right)
    kind: dict[str, Any] = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
    images = torch.randn(case.rows, case.side, case.side, case.depth, **kind).permute(0, 3, 1, 2)
    weights = torch.randn(case.columns, case.window, case.window, case.depth, **kind).permute(0, 3, 1, 2)
    return lambda: torch.nn.functional.conv2d(images, weights, padding=case.window // 2)


def show(found: list[ProductResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    text = table([*HEAD, "cuBLASLt fused µs"], [[*compared(one), figure(one.fused)] for one in found])
    bare = [one for one in found if not one.case.follows]
    runtime = [best / one.runtime for one in bare if one.runtime and (best := one.ways[one.best])]
    own = [generated / library for one in bare if (library := quickest(one.ways, called=True))
           and (generated := quickest(one.ways, called=False))]
    around = [one.share for one in found if one.share and one.case.follows]
    if runtime:
        text += f"\n\nBare products take {max(runtime):.3f} times as long as ONNX Runtime's at most."
    if own:
        text += f"\n\nOur own kernels take {geometric_mean(own):.3f} times as long as cuBLASLt's best in the mean."
    if around:
        text += (f"\n\nWith what follows them products take {geometric_mean(around):.3f} times as long as PyTorch's "
                 f"bare ones in the mean, {max(around):.2f} at most.")
    return text, (max(runtime, default=0.0) <= SLACK and not (own and geometric_mean(own) > OWN)
                  and max(around, default=0.0) <= AROUND)


def quickest(ways: Mapping[str, float | None], called: bool) -> float | None:
    """Microseconds of the quickest way that a library has, or that is generated; None where none was timed."""
    return min((time for name, time in ways.items() if time and name.startswith(GEMM) is called), default=None)


main = typed_command(__doc__, "products", cases_of, prepare, with_torch, show)


if __name__ == "__main__":
    main()
