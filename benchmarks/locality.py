"""Chains of convolutions whose intermediates the L2 cache does not hold: whole, image by image, and in strips of rows.

    python benchmarks/locality.py [--dry-run]

Each convolution is followed by SiLU, all in float16 and channels-last, run by PyTorch with cuDNN's best algorithms in
one CUDA graph.  A part of the last output needs its part of each intermediate and some rows around it (the halo), which
are computed once more for each strip; an intermediate of a part stays in the cache.  What a chain could gain at most is
the time in which its intermediates are written and read.  ``--dry-run`` names the chains and times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
from common import RESULTS, environment, measured_on, table
from processes import apart
from region_times import conclude

PARTS = (2, 4, 8)
"""Strips of an image."""

RUNS = 20


@dataclass(frozen=True)
class Chain:
    """Images of ``height`` by ``width`` through convolutions from one of ``channels`` to the next, ``kernel`` wide."""

    name: str
    batch: int
    height: int
    width: int
    channels: tuple[int, ...]
    kernel: int = 3

    @property
    def intermediate(self) -> int:
        """Bytes of the first intermediate."""
        return 2 * self.batch * self.height * self.width * self.channels[1]

    @property
    def halo(self) -> int:
        """Rows that a strip needs beyond each of its ends."""
        return (self.kernel // 2) * (len(self.channels) - 1)


CHAINS = (
    Chain("VAE decoder, 512", 4, 512, 512, (128, 128, 128)), Chain("VAE decoder, 256", 4, 256, 256, (256, 256, 256)),
    Chain("VAE decoder to RGB", 4, 512, 512, (128, 128, 3)), Chain("U-Net", 2, 64, 64, (320, 320, 320)),
    Chain("detector", 16, 160, 160, (64, 64, 64)), Chain("ResNet", 32, 56, 56, (64, 64, 64)),
    Chain("super-resolution, 720p", 1, 720, 1280, (64, 64, 64, 64)),
    Chain("inverted bottleneck, 1x1", 32, 112, 112, (32, 96, 24), kernel=1),
    Chain("16 channels, 1080p", 1, 1080, 1920, (16, 16, 16, 16)),
    Chain("8 channels, 1080p", 4, 1080, 1920, (8, 8, 8, 8)),
)


@dataclass(frozen=True)
class LocalityResult:
    """Microseconds of a chain: whole, image by image, and by how many strips each image has."""

    chain: Chain
    whole: float | None = None
    images: float | None = None
    strips: dict[int, float] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """Times as quick in the best parts as whole."""
        parts = [taken for taken in (self.images, *self.strips.values()) if taken]
        return self.whole / min(parts) if self.whole and parts else None


class _Network:
    """A chain's layers and tensors on the GPU."""

    def __init__(self, chain: Chain) -> None:
        import torch

        torch.backends.cudnn.benchmark = True
        self.chain = chain
        self.form: dict[str, Any] = {"memory_format": torch.channels_last}
        kind: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
        size = (chain.batch, chain.channels[0], chain.height, chain.width)
        self.given = torch.randn(*size, **kind).to(**self.form)
        self.padded = torch.nn.functional.pad(self.given, (0, 0, chain.halo, chain.halo)).to(**self.form)
        self.result = torch.empty(chain.batch, chain.channels[-1], *size[2:], **kind).to(**self.form)
        self.weights = [(0.05 * torch.randn(ahead, behind, chain.kernel, chain.kernel, **kind)).to(**self.form)
                        for behind, ahead in zip(chain.channels, chain.channels[1:], strict=False)]

    def layers(self, value: Any, rows: int) -> Any:
        """All of them, with so many rows of zeros beyond each end."""
        from torch.nn.functional import conv2d, silu

        for weight in self.weights:
            value = silu(conv2d(value, weight, padding=(rows, self.chain.kernel // 2)))
        return value

    def whole(self) -> None:
        """Layer after layer."""
        self.result.copy_(self.layers(self.given, self.chain.kernel // 2))

    def images(self) -> None:
        """Image after image."""
        for place in range(self.chain.batch):
            part = slice(place, place + 1)
            self.result[part].copy_(self.layers(self.given[part], self.chain.kernel // 2))

    def strips(self, parts: int) -> None:
        """Strip after strip of each image."""
        height, step = self.chain.height, -(-self.chain.height // parts)
        for place in range(self.chain.batch):
            for first in range(0, height, step):
                last, part = min(first + step, height), slice(place, place + 1)
                rows = self.padded[part, :, first:last + 2 * self.chain.halo]
                self.result[part, :, first:last].copy_(self.layers(rows, 0))


def _microseconds(run: Callable[[], None]) -> float:
    """Of one replay of a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(3 + RUNS):
        if turn == 3:
            begin.record()
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / RUNS


def measured(chains: tuple[Chain, ...]) -> list[LocalityResult]:
    """Every chain, timed; in a process of its own."""
    found = []
    for chain in chains:
        network = _Network(chain)
        found.append(LocalityResult(
            chain, _microseconds(network.whole), _microseconds(network.images) if chain.batch > 1 else None,
            {parts: _microseconds(partial(network.strips, parts)) for parts in PARTS}))
    return found


def show(found: list[LocalityResult]) -> str:
    """The table."""
    return table(
        ["chain", "intermediate, MB", "whole, us", "by images", *(f"{parts} strips" for parts in PARTS), "gain"],
        [[each.chain.name, f"{each.chain.intermediate / 1e6:.0f}",
          *(f"{taken:.0f}" if taken else "" for taken in (each.whole, each.images, *map(each.strips.get, PARTS))),
          f"{each.gain:.2f}" if each.gain else ""] for each in found])


@click.command(help=__doc__.split("\n")[0])
@click.option("--dry-run", is_flag=True, help="Name the chains; time nothing.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(dry_run: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    found = [LocalityResult(chain) for chain in CHAINS] if dry_run else apart(measured, CHAINS)
    conclude((show(found), True), "locality", where, {"chains": [asdict(each) for each in found]},
             None if dry_run else out)


if __name__ == "__main__":
    main()
